// The short causal convolution over a ring of past columns, and what its layers do around it.
#pragma once
#include "math.h"

namespace strata {
namespace {

// Columns of width n: position p >= start is row p - start of x, an earlier one lies in the ring at
// p % entries, and before 0 there are zeros.
struct Columns {
    const float* x;
    float* ring;
    int64_t entries, start, n_tokens, n;
    const float* zeros;

    const float* at(int64_t position) const {
        if (position >= start) return x + (position - start) * n;
        return position < 0 ? zeros : ring + position % entries * n;
    }
    // Of more columns than the ring holds, the last ones.
    void store() const {
        const int64_t end = start + n_tokens;
        const int64_t first = n_tokens > entries ? end - entries : start;
        for (int64_t p = first; p < end; p++)
            std::memcpy(ring + p % entries * n, at(p), sizeof(float) * n);
    }
};

struct Taps {
    const float* weight;  // [taps, n], the last one for the token itself
    int64_t taps, dilation;
};

// y = silu(sum over taps ascending of tap * column); y [n] overlaps nothing
inline void convolve(const Columns& columns, const Taps& taps, int64_t position, float* __restrict y) {
    const int64_t n = columns.n;
    for (int64_t j = 0; j < taps.taps; j++) {
        const float* column = columns.at(position - taps.dilation * (taps.taps - 1 - j));
        const float* weight = taps.weight + j * n;
        if (j == 0)
            for (int64_t i = 0; i < n; i++) y[i] = column[i] * weight[i];
        else
            for (int64_t i = 0; i < n; i++) y[i] += column[i] * weight[i];
    }
    for (int64_t i = 0; i < n; i++) y[i] = silu_c(y[i]);
}

struct GdnInputs {
    Columns columns;
    Taps taps;
    const float *a, *b, *decay, *dt_bias;  // [T, J], [T, J], [J], [J]
    int64_t n_k_heads, n_v_heads, k_dim, v_dim;
    float *q, *k, *v, *keep, *beta;
};

// Each head at length one, then divided.
inline void unit_heads(const float* x, int64_t heads, int64_t width, float divisor, float* out) {
    for (int64_t h = 0; h < heads; h++, x += width, out += width) {
        const float inverse = static_cast<float>(1.0 / __builtin_sqrt(dot_wide(x, x, width) + 1e-6));
        for (int64_t i = 0; i < width; i++) out[i] = x[i] * inverse / divisor;
    }
}

inline void gdn_token(const GdnInputs& g, int64_t t, float* y) {
    const int64_t k_width = g.n_k_heads * g.k_dim, v_width = g.n_v_heads * g.v_dim, j0 = t * g.n_v_heads;
    convolve(g.columns, g.taps, g.columns.start + t, y);
    const float root = static_cast<float>(__builtin_sqrt(static_cast<double>(g.k_dim)));
    unit_heads(y, g.n_k_heads, g.k_dim, root, g.q + t * k_width);
    unit_heads(y + k_width, g.n_k_heads, g.k_dim, 1.0f, g.k + t * k_width);
    std::memcpy(g.v + t * v_width, y + 2 * k_width, sizeof(float) * v_width);
    for (int64_t j = 0; j < g.n_v_heads; j++) {
        g.keep[j0 + j] = exp_c(g.decay[j] * softplus_c(g.a[j0 + j] + g.dt_bias[j]));
        g.beta[j0 + j] = sigmoid_c(g.b[j0 + j]);
    }
}

// Convolution of [q | k | v] columns, heads of q and k at length one (q also divided by sqrt(K)), and
//   keep = exp(decay * softplus(a + dt_bias)), beta = sigmoid(b)
void gdn_inputs(int64_t n_tokens, float* ring, int64_t entries, int64_t start, const float* x,
                const float* weight, int64_t taps, const float* a, const float* b, const float* decay,
                const float* dt_bias, int64_t n_k_heads, int64_t n_v_heads, int64_t k_dim, int64_t v_dim,
                float* q, float* k, float* v, float* keep, float* beta) {
    const int64_t n = 2 * n_k_heads * k_dim + n_v_heads * v_dim;
    float* zeros = fused_scratch(2 * n);
    std::memset(zeros, 0, sizeof(float) * n);
    const Columns columns{x, ring, entries, start, n_tokens, n, zeros};
    const GdnInputs g{columns, {weight, taps, 1}, a, b, decay, dt_bias, n_k_heads, n_v_heads, k_dim, v_dim,
                      q, k, v, keep, beta};
    for (int64_t t = 0; t < n_tokens; t++) gdn_token(g, t, zeros + n);
    columns.store();
}

// residual += u + convolution(x)
void ngram_conv(int64_t n_tokens, float* ring, int64_t entries, int64_t start, const float* x, int64_t n,
                const float* weight, int64_t taps, int64_t dilation, const float* u, float* residual) {
    float *zeros = fused_scratch(2 * n), *y = zeros + n;
    std::memset(zeros, 0, sizeof(float) * n);
    const Columns columns{x, ring, entries, start, n_tokens, n, zeros};
    for (int64_t t = 0; t < n_tokens; t++, u += n, residual += n) {
        convolve(columns, {weight, taps, dilation}, start + t, y);
        for (int64_t i = 0; i < n; i++) residual[i] += u[i] + y[i];
    }
    columns.store();
}

// u[t, c] = sigmoid of the signed root of <key, query> / sqrt(D), times value[t]
void ngram_gate(int64_t n_tokens, const float* key, const float* query, const float* value, int64_t streams,
                int64_t width, float* u) {
    const double root = __builtin_sqrt(static_cast<double>(width));
    for (int64_t t = 0; t < n_tokens; t++, value += width)
        for (int64_t c = 0; c < streams; c++, key += width, query += width, u += width) {
            const float score = static_cast<float>(dot_wide(key, query, width) / root);
            const float size = __builtin_fabsf(score) < 1e-6f ? 1e-6f : __builtin_fabsf(score);
            const float sign = score > 0.0f ? 1.0f : score < 0.0f ? -1.0f : 0.0f;
            const float gate = sigmoid_c(__builtin_sqrtf(size) * sign);
            for (int64_t i = 0; i < width; i++) u[i] = gate * value[i];
        }
}

}  // namespace
}  // namespace strata
