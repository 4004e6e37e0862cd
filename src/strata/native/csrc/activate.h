// exp, silu and the expert's middle: numerics contract, section 5.
#pragma once
#include "backend.h"
#include "scalar.h"

namespace strata {
namespace {

inline float exp_c(float value) {
    // written so that a NaN falls through both comparisons
    float x = value < -87.0f ? -87.0f : value;
    x = x > 88.0f ? 88.0f : x;
    const float n = __builtin_rintf(x * 1.44269504f);
    float r = __builtin_fmaf(n, -0.693145752f, x);
    r = __builtin_fmaf(n, -1.42860677e-6f, r);
    float P = 1.9875691500e-4f;
    P = __builtin_fmaf(P, r, 1.3981999507e-3f);
    P = __builtin_fmaf(P, r, 8.3334519073e-3f);
    P = __builtin_fmaf(P, r, 4.1665795894e-2f);
    P = __builtin_fmaf(P, r, 1.6666665459e-1f);
    P = __builtin_fmaf(P, r, 5.0000001201e-1f);
    const float y = __builtin_fmaf(P, r * r, r) + 1.0f;
    const int shift = x == x ? static_cast<int>(n) : 0;
    return float_from_bits(bits_of(y) + (static_cast<uint32_t>(shift) << 23));
}

void activate_row(const ActivateArgs& a) {
    if (!a.swiglu_oai) {
        for (int i = 0; i < a.n; i++) {
            const float g = a.gate[i];
            a.gate[i] = g / (1.0f + exp_c(-g)) * a.up[i];
        }
        return;
    }
    for (int i = 0; i < a.n; i++) {
        const float g = a.gate[i] > a.limit ? a.limit : a.gate[i];
        float u = a.up[i] > a.limit ? a.limit : a.up[i];
        u = u < -a.limit ? -a.limit : u;
        a.gate[i] = g / (1.0f + exp_c(-(1.702f * g))) * (u + 1.0f);
    }
}

}  // namespace
}  // namespace strata
