// Heads before attention: norm, rotary position, and their place in a cache of any float kind.
#pragma once
#include "math.h"

namespace strata {
namespace {

// Both round to nearest even.
inline uint16_t bf16_of(float x) {
    const uint32_t bits = bits_of(x);
    if (x != x) return 0x7fc0;
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline uint16_t half_of(float x) {
#if defined(__F16C__)
    return _cvtss_sh(x, 0);
#else
    const uint32_t bits = bits_of(x), magnitude = bits & 0x7fffffff;
    const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
    if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
    if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
    if (magnitude < 0x38800000) {  // subnormal: the sum's last bits are the result
        const float shifted = float_from_bits(magnitude) + 0.5f;
        return static_cast<uint16_t>(sign | (bits_of(shifted) - bits_of(0.5f)));
    }
    const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13));
#endif
}

inline void store_row(const float* x, int64_t n, FloatKind kind, void* out) {
    if (kind == FloatKind::f32) {
        std::memcpy(out, x, sizeof(float) * n);
        return;
    }
    uint16_t* to = static_cast<uint16_t*>(out);
    if (kind == FloatKind::f16)
        for (int64_t i = 0; i < n; i++) to[i] = half_of(x[i]);
    else
        for (int64_t i = 0; i < n; i++) to[i] = bf16_of(x[i]);
}

inline int64_t element_bytes(FloatKind kind) { return kind == FloatKind::f32 ? 4 : 2; }

// Rows of cos and sin, one per position, `pairs` numbers each, rows `step` apart.
struct Rotary {
    const float *cos, *sin;
    int64_t pairs, step;
    bool halves;  // pairs (i, i + pairs), else (2i, 2i + 1)

    void turn(float* x, int64_t t) const {
        const float *c = cos + t * step * pairs, *s = sin + t * step * pairs;
        const int64_t a0 = halves ? 1 : 2, b0 = halves ? pairs : 1;
        for (int64_t i = 0; i < pairs; i++) {
            const float a = x[a0 * i], b = x[a0 * i + b0];
            x[a0 * i] = a * c[i] - b * s[i];
            x[a0 * i + b0] = b * c[i] + a * s[i];
        }
    }
};

// out[t, h] = rotary(norm(x[t, h]) * weight); weight null: no norm. Strides in elements; out [.., d]
// contiguous, of that kind. x and out are the same numbers or do not overlap.
void head_rotary(int64_t n_tokens, const float* x, int64_t token_stride, int64_t head_stride,
                 int64_t heads, int64_t d, const float* weight, double eps, const float* cos,
                 const float* sin, int64_t pairs, int64_t step, bool halves, int64_t kind, uint8_t* out,
                 int64_t out_token_stride, int64_t out_head_stride) {
    const Rotary rotary{cos, sin, pairs, step, halves};
    const FloatKind to = static_cast<FloatKind>(kind);
    float* row = fused_scratch(d);
    for (int64_t t = 0; t < n_tokens; t++)
        for (int64_t h = 0; h < heads; h++) {
            const float* from = x + t * token_stride + h * head_stride;
            if (weight) scale_row(from, inverse_rms(from, d, eps), weight, d, row);
            else std::memcpy(row, from, sizeof(float) * d);
            rotary.turn(row, t);
            store_row(row, d, to, out + (t * out_token_stride + h * out_head_stride) * element_bytes(to));
        }
}

}  // namespace
}  // namespace strata
