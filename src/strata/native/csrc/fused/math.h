// Functions of one number and sums over rows. Every result has the same bits on every instruction set
// and in every surrounding: only IEEE operations in a written order, one exp (numerics contract 5).
#pragma once
#include "../activate.h"
#include "../lanes.h"

namespace strata {

// Memory of the calling thread, at least n floats, valid until the next call.
float* fused_scratch(int64_t n_floats);

namespace {

inline float sigmoid_c(float x) { return 1.0f / (1.0f + exp_c(-x)); }
inline float silu_c(float x) { return x / (1.0f + exp_c(-x)); }

// log(1 + e^x) = max(x, 0) + log1p(u), u = e^-|x|, and log1p(u) = 2 atanh(u / (2 + u))
inline float softplus_c(float x) {
    const double u = exp_c(x > 0.0f ? -x : x);
    const double s = u / (2.0 + u), z = s * s;
    double series = 1.0 / 17.0;
    for (int n = 15; n >= 1; n -= 2) series = series * z + 1.0 / n;
    return static_cast<float>((x > 0.0f ? x : 0.0f) + 2.0 * s * series);
}

typedef double Lanes8d __attribute__((vector_size(64)));

inline double fold_lanes(Lanes8d v) {
    double p[8];
    std::memcpy(p, &v, sizeof v);
    for (int half = 4; half > 0; half /= 2)
        for (int i = 0; i < half; i++) p[i] += p[i + half];
    return p[0];
}

inline Lanes8d load8d(const float* p) { return __builtin_convertvector(load8(p), Lanes8d); }

// Sum of products in float64: 8 partial sums by index mod 8, folded in halves.
inline double dot_wide(const float* a, const float* b, int64_t n) {
    Lanes8d p = {};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) p += load8d(a + i) * load8d(b + i);
    if (i < n) {
        const int rest = static_cast<int>(n - i);
        p += __builtin_convertvector(load_few<F32Element>(a + i, rest), Lanes8d) *
             __builtin_convertvector(load_few<F32Element>(b + i, rest), Lanes8d);
    }
    return fold_lanes(p);
}

inline float inverse_rms(const float* x, int64_t n, double eps) {
    return static_cast<float>(1.0 / __builtin_sqrt(dot_wide(x, x, n) / static_cast<double>(n) + eps));
}

// out = x * inverse * weight, two products; out may be x
inline void scale_row(const float* x, float inverse, const float* weight, int64_t n, float* out) {
    for (int64_t i = 0; i < n; i++) out[i] = x[i] * inverse * weight[i];
}

}  // namespace
}  // namespace strata
