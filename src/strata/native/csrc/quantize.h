// Activations of quantized weights: numerics contract, section 1, in the layout of backend.h.
#pragma once
#include "backend.h"
#include "scalar.h"

namespace strata {
namespace {

// One block of 32: int8 codes and the scale.
inline float quantize_block(const float* x, int8_t* q) {
    uint32_t largest = 0;
    for (int i = 0; i < 32; i++) {
        const uint32_t bits = bits_of(x[i]) & 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    const float amax = float_from_bits(largest);
    const bool finite = largest < 0x7f800000;
    if (!finite || amax < 0x1p-100f) {
        std::memset(q, 0, 32);
        return finite ? 0.0f : __builtin_nanf("");
    }
    const float inverse = 127.0f / amax;
    for (int i = 0; i < 32; i++) q[i] = static_cast<int8_t>(static_cast<int>(__builtin_rintf(x[i] * inverse)));
    return amax / 127.0f;
}

void quantize_row(const float* x, int n_cols, QuantizedStep* out) {
    const int n_blocks = n_cols / 32, L = n_steps(n_cols);
    for (int b = 0; b < LANES * L; b++) {
        const int s = b / L, j = b % L;
        int8_t q[32] = {};
        float scale = 0.0f;
        if (b < n_blocks) scale = quantize_block(x + 32 * static_cast<size_t>(b), q);
        int low = 0, high = 0;
        for (int i = 0; i < 16; i++) {
            low += q[i];
            high += q[i + 16];
        }
        QuantizedStep& step = out[j];
        for (int v = 0; v < 8; v++) std::memcpy(step.q + 32 * v + 4 * s, q + 4 * v, 4);
        std::memcpy(step.block[s], q, sizeof q);
        step.scale[s] = scale;
        step.sum[0][s] = low + high;
        step.half[0][s] = low;
        step.half[1][s] = high;
    }
}

}  // namespace
}  // namespace strata
