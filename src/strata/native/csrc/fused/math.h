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

typedef float Lanes4 __attribute__((vector_size(16)));
typedef double Lanes4d __attribute__((vector_size(32)));

// Eight float64 partial sums in two registers.
struct Sums8d {
    Lanes4d low = {}, high = {};

    static Lanes4d wide(const float* p) {
        Lanes4 v;
        std::memcpy(&v, p, sizeof v);
        return __builtin_convertvector(v, Lanes4d);
    }
    void add(const float* x) {
        low += wide(x);
        high += wide(x + 4);
    }
    void add_product(const float* a, const float* b) {
        low += wide(a) * wide(b);
        high += wide(a + 4) * wide(b + 4);
    }
    double fold() const {
        double p[4];
        const Lanes4d sum = low + high;
        std::memcpy(p, &sum, sizeof sum);
        return (p[0] + p[2]) + (p[1] + p[3]);
    }
};

// Sum of products in float64: 8 partial sums by index mod 8, folded in halves.
inline double dot_wide(const float* a, const float* b, int64_t n) {
    Sums8d sums;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) sums.add_product(a + i, b + i);
    if (i < n) {
        float x[8] = {}, y[8] = {};
        for (int j = 0; i + j < n; j++) {
            x[j] = a[i + j];
            y[j] = b[i + j];
        }
        sums.add_product(x, y);
    }
    return sums.fold();
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
