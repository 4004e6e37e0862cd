// Norms, gates and residual streams: rows in, rows out.
#pragma once
#include "math.h"

namespace strata {
namespace {

// Each of the `groups` equal parts of a row has a mean of its own; weight [groups * part].
void rms_norm(int64_t n_rows, const float* x, const float* weight, int64_t groups, int64_t part, double eps,
              float* out) {
    for (int64_t r = 0; r < n_rows; r++)
        for (int64_t g = 0; g < groups; g++) {
            const int64_t at = (r * groups + g) * part;
            scale_row(x + at, inverse_rms(x + at, part, eps), weight + g * part, part, out + at);
        }
}

// In place: low = silu(low / C), coeff = 2 sigmoid(coeff / C); coeff may be null.
void read_gates(int64_t n_tokens, float* low, int64_t rank, float* coeff, int64_t streams) {
    const float count = static_cast<float>(streams);
    for (int64_t i = 0; i < n_tokens * rank; i++) low[i] = silu_c(low[i] / count);
    for (int64_t i = 0; coeff && i < n_tokens * streams; i++) coeff[i] = 2.0f * sigmoid_c(coeff[i] / count);
}

// Mean over the streams of sigmoid(gate) * normed, streams ascending.
void stream_mix(int64_t n_tokens, const float* normed, const float* gate, int64_t streams, int64_t width,
                float* out) {
    for (int64_t t = 0; t < n_tokens; t++, out += width) {
        for (int64_t c = 0; c < streams; c++, normed += width, gate += width) {
            if (c == 0)
                for (int64_t i = 0; i < width; i++) out[i] = sigmoid_c(gate[i]) * normed[i];
            else
                for (int64_t i = 0; i < width; i++) out[i] += sigmoid_c(gate[i]) * normed[i];
        }
        for (int64_t i = 0; i < width; i++) out[i] /= static_cast<float>(streams);
    }
}

// residual[t, c] += coeff[t, c] * y[t]
void stream_write(int64_t n_tokens, float* residual, const float* y, const float* coeff, int64_t streams,
                  int64_t width) {
    for (int64_t t = 0; t < n_tokens; t++, y += width)
        for (int64_t c = 0; c < streams; c++, residual += width) {
            const float factor = *coeff++;
            for (int64_t i = 0; i < width; i++) residual[i] += factor * y[i];
        }
}

// gate becomes silu(gate) * up
void silu_times(int64_t n_tokens, float* gate, const float* up, int64_t width) {
    for (int64_t t = 0; t < n_tokens; t++)
        activate_row({false, 0.0f, up + t * width, gate + t * width, static_cast<int>(width)});
}

// y[t] becomes y[t] * sigmoid(gate[t]); a token has one gate or one per number
void sigmoid_times(int64_t n_tokens, float* y, const float* gate, int64_t width, bool one_gate) {
    if (!one_gate) {
        for (int64_t i = 0; i < n_tokens * width; i++) y[i] *= sigmoid_c(gate[i]);
        return;
    }
    for (int64_t t = 0; t < n_tokens; t++, y += width) {
        const float factor = sigmoid_c(gate[t]);
        for (int64_t i = 0; i < width; i++) y[i] *= factor;
    }
}

// rms norm of every row of o, times weight [width], times silu or sigmoid of z
void gated_norm(int64_t n_tokens, const float* o, const float* z, const float* weight, int64_t heads,
                int64_t width, double eps, bool silu, float* out) {
    for (int64_t r = 0; r < n_tokens * heads; r++, o += width, z += width, out += width) {
        scale_row(o, inverse_rms(o, width, eps), weight, width, out);
        if (silu)
            for (int64_t i = 0; i < width; i++) out[i] *= silu_c(z[i]);
        else
            for (int64_t i = 0; i < width; i++) out[i] *= sigmoid_c(z[i]);
    }
}

// shared (or 0) + weight[t, 0] * row[t, 0] + ..., ranks ascending, two roundings each
void combine(int64_t n_tokens, const float* rows, const float* weight, int64_t n_active, int64_t width,
             const float* shared, float* out) {
    for (int64_t t = 0; t < n_tokens; t++, out += width) {
        if (shared) std::memcpy(out, shared + t * width, sizeof(float) * width);
        else std::memset(out, 0, sizeof(float) * width);
        for (int64_t j = 0; j < n_active; j++, rows += width) {
            const float factor = *weight++;
            for (int64_t i = 0; i < width; i++) out[i] += factor * rows[i];
        }
    }
}

}  // namespace
}  // namespace strata
