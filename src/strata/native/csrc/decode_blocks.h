// Decoders, one block (or super-block) at a time: codes u, scales and minima of the numerics contract,
// section 2. The portable truth; vector versions of some are in decode_x86.h.
#pragma once
#include "scalar.h"
#include "weight_types.h"

namespace strata {
namespace {

// Each decoder: BLOCKS sub-blocks of 32 weights; u[32 * BLOCKS], scale and minimum [BLOCKS * groups].

inline void nibbles_16(const uint8_t* in, uint8_t* u) {
    for (int i = 0; i < 16; i++) {
        u[i] = in[i] & 15;
        u[i + 16] = in[i] >> 4;
    }
}

struct DecodeQ4_0 {
    static constexpr Type type = Type::Q4_0;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float*) {
        scale[0] = half_at(b);
        nibbles_16(b + 2, u);
    }
};

struct DecodeQ4_1 {
    static constexpr Type type = Type::Q4_1;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float* minimum) {
        scale[0] = half_at(b);
        minimum[0] = -half_at(b + 2);
        nibbles_16(b + 4, u);
    }
};

inline void fifth_bits(uint32_t top, uint8_t* u) {
    for (int i = 0; i < 32; i++) u[i] |= (top >> i & 1) << 4;
}

struct DecodeQ5_0 {
    static constexpr Type type = Type::Q5_0;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float*) {
        scale[0] = half_at(b);
        nibbles_16(b + 6, u);
        fifth_bits(load_u32(b + 2), u);
    }
};

struct DecodeQ5_1 {
    static constexpr Type type = Type::Q5_1;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float* minimum) {
        scale[0] = half_at(b);
        minimum[0] = -half_at(b + 2);
        nibbles_16(b + 8, u);
        fifth_bits(load_u32(b + 4), u);
    }
};

struct DecodeQ8_0 {
    static constexpr Type type = Type::Q8_0;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float*) {
        scale[0] = half_at(b);
        std::memcpy(u, b + 2, 32);
    }
};

struct DecodeMXFP4 {
    static constexpr Type type = Type::MXFP4;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float*) {
        scale[0] = tables.half_e8m0[b[0]];
        nibbles_16(b + 1, u);
        for (int i = 0; i < 32; i++) u[i] = FP4_CODES_12[u[i]];
    }
};

struct DecodeNVFP4 {
    static constexpr Type type = Type::NVFP4;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float*) {
        for (int g = 0; g < 4; g++) {
            scale[g] = tables.half_ue4m3[b[g]];
            for (int i = 0; i < 8; i++) {
                const uint8_t byte = b[4 + 8 * g + i];
                u[16 * g + i] = FP4_CODES_12[byte & 15];
                u[16 * g + i + 8] = FP4_CODES_12[byte >> 4];
            }
        }
    }
};

struct DecodeQ2_0 {
    static constexpr Type type = Type::Q2_0;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float*) {
        scale[0] = scale[1] = half_at(b);
        for (int i = 0; i < 64; i++) u[i] = b[2 + i / 4] >> 2 * (i % 4) & 3;
    }
};

inline void trits(const uint8_t* in, int n_bytes, int n_digits, uint8_t* u) {
    static constexpr uint8_t POW3[5] = {1, 3, 9, 27, 81};
    for (int d = 0; d < n_digits; d++)
        for (int i = 0; i < n_bytes; i++)
            u[d * n_bytes + i] = static_cast<uint8_t>(in[i] * POW3[d]) * 3 >> 8;
}

struct DecodeTQ1_0 {
    static constexpr Type type = Type::TQ1_0;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float*) {
        trits(b, 32, 5, u);
        trits(b + 32, 16, 5, u + 160);
        trits(b + 48, 4, 4, u + 240);
        for (int i = 0; i < 8; i++) scale[i] = half_at(b + 52);
    }
};

// In each half of 128 weights, bit pair l of byte m is weight 32 l + m.
inline void two_bits(const uint8_t* in, uint8_t* u) {
    for (int half = 0; half < 2; half++, in += 32, u += 128)
        for (int l = 0; l < 4; l++)
            for (int m = 0; m < 32; m++) u[32 * l + m] = in[m] >> 2 * l & 3;
}

struct DecodeTQ2_0 {
    static constexpr Type type = Type::TQ2_0;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float*) {
        two_bits(b, u);
        for (int i = 0; i < 8; i++) scale[i] = half_at(b + 64);
    }
};

struct DecodeQ2_K {
    static constexpr Type type = Type::Q2_K;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float* minimum) {
        const float d = half_at(b + 80), d_min = half_at(b + 82);
        for (int g = 0; g < 16; g++) {
            scale[g] = d * static_cast<float>(b[g] & 15);
            minimum[g] = d_min * static_cast<float>(b[g] >> 4);
        }
        two_bits(b + 16, u);
    }
};

struct DecodeQ3_K {
    static constexpr Type type = Type::Q3_K;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float*) {
        const float d = half_at(b + 108);
        const uint8_t *low = b + 96, *high = b + 104;
        for (int g = 0; g < 16; g++) {
            const int bits = (g < 8 ? low[g] & 15 : low[g - 8] >> 4) | (high[g % 4] >> 2 * (g / 4) & 3) << 4;
            scale[g] = d * static_cast<float>(bits - 32);
        }
        two_bits(b + 32, u);
        for (int l = 0; l < 8; l++)
            for (int m = 0; m < 32; m++) u[32 * l + m] |= (b[m] >> l & 1) << 2;
    }
};

// The 12 bytes of Q4_K and Q5_K: eight 6-bit scales, eight 6-bit minima.
inline void sub_scales(const uint8_t* b, float* scale, float* minimum) {
    const float d = half_at(b), d_min = half_at(b + 2);
    const uint8_t* p = b + 4;
    for (int i = 0; i < 4; i++) {
        scale[i] = d * static_cast<float>(p[i] & 63);
        minimum[i] = d_min * static_cast<float>(p[i + 4] & 63);
        scale[i + 4] = d * static_cast<float>((p[i + 8] & 15) | p[i] >> 6 << 4);
        minimum[i + 4] = d_min * static_cast<float>(p[i + 8] >> 4 | p[i + 4] >> 6 << 4);
    }
}

inline void nibble_runs(const uint8_t* in, uint8_t* u) {
    for (int run = 0; run < 4; run++, in += 32, u += 64)
        for (int m = 0; m < 32; m++) {
            u[m] = in[m] & 15;
            u[32 + m] = in[m] >> 4;
        }
}

struct DecodeQ4_K {
    static constexpr Type type = Type::Q4_K;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float* minimum) {
        sub_scales(b, scale, minimum);
        nibble_runs(b + 16, u);
    }
};

struct DecodeQ5_K {
    static constexpr Type type = Type::Q5_K;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float* minimum) {
        sub_scales(b, scale, minimum);
        nibble_runs(b + 48, u);
        for (int l = 0; l < 8; l++)
            for (int m = 0; m < 32; m++) u[32 * l + m] |= (b[16 + m] >> l & 1) << 4;
    }
};

struct DecodeQ6_K {
    static constexpr Type type = Type::Q6_K;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float*) {
        const float d = half_at(b + 208);
        for (int g = 0; g < 16; g++) scale[g] = d * static_cast<float>(static_cast<int8_t>(b[192 + g]));
        const uint8_t *low = b, *high = b + 128;
        for (int half = 0; half < 2; half++, low += 64, high += 32, u += 128)
            for (int m = 0; m < 32; m++) {
                u[m] = (low[m] & 15) | (high[m] & 3) << 4;
                u[32 + m] = (low[32 + m] & 15) | (high[m] >> 2 & 3) << 4;
                u[64 + m] = low[m] >> 4 | (high[m] >> 4 & 3) << 4;
                u[96 + m] = low[32 + m] >> 4 | (high[m] >> 6) << 4;
            }
    }
};

}  // namespace
}  // namespace strata
