// Decoders of the IQ types; same shape as in decode_blocks.h. Eight weights are one 64-bit word.
#pragma once
#include "decode_blocks.h"

namespace strata {
namespace {

inline constexpr uint64_t ONES = 0x0101010101010101ull;

// bias + g where the sign byte is 0, bias - g where it is 0xff; no byte borrows as long as g <= bias
inline uint64_t signed_codes(uint64_t g, uint64_t sign, uint64_t bias) {
    return g + bias * ONES - (sign & g << 1);
}

struct DecodeIQ2_XXS {
    static constexpr Type type = Type::IQ2_XXS;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float*) {
        const float d = half_at(b);
        for (int i = 0; i < 8; i++) {
            const uint8_t* index = b + 2 + 8 * i;
            const uint32_t word = load_u32(index + 4);
            scale[i] = d * (0.5f + static_cast<float>(word >> 28)) * 0.25f;
            for (int l = 0; l < 4; l++) {
                const uint64_t sign = tables.signs7[word >> 7 * l & 127];
                store_u64(u + 32 * i + 8 * l, signed_codes(tables.iq2_xxs[index[l]], sign, 43));
            }
        }
    }
};

inline void nibble_scales(const uint8_t* packed, float d, float* scale) {
    for (int i = 0; i < 8; i++) {
        scale[2 * i] = d * (0.5f + static_cast<float>(packed[i] & 15)) * 0.25f;
        scale[2 * i + 1] = d * (0.5f + static_cast<float>(packed[i] >> 4)) * 0.25f;
    }
}

struct DecodeIQ2_XS {
    static constexpr Type type = Type::IQ2_XS;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float*) {
        nibble_scales(b + 66, half_at(b), scale);
        for (int i = 0; i < 32; i++) {
            const uint16_t word = load_u16(b + 2 + 2 * i);
            store_u64(u + 8 * i, signed_codes(tables.iq2_xs[word & 511], tables.signs7[word >> 9], 43));
        }
    }
};

struct DecodeIQ2_S {
    static constexpr Type type = Type::IQ2_S;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float*) {
        nibble_scales(b + 74, half_at(b), scale);
        for (int i = 0; i < 32; i++) {
            const int index = b[2 + i] | (b[66 + i / 4] >> 2 * (i % 4) & 3) << 8;
            store_u64(u + 8 * i, signed_codes(tables.iq2_s[index], tables.signs8[b[34 + i]], 43));
        }
    }
};

struct DecodeIQ3_XXS {
    static constexpr Type type = Type::IQ3_XXS;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float*) {
        const float d = half_at(b);
        for (int i = 0; i < 8; i++) {
            const uint8_t* index = b + 2 + 8 * i;
            const uint32_t word = load_u32(b + 66 + 4 * i);
            scale[i] = d * (0.5f + static_cast<float>(word >> 28)) * 0.5f;
            for (int l = 0; l < 4; l++) {
                const uint64_t g = tables.iq3_xxs[index[2 * l]] |
                                   static_cast<uint64_t>(tables.iq3_xxs[index[2 * l + 1]]) << 32;
                const uint64_t sign = tables.signs7[word >> 7 * l & 127];
                store_u64(u + 32 * i + 8 * l, signed_codes(g, sign, 62));
            }
        }
    }
};

struct DecodeIQ3_S {
    static constexpr Type type = Type::IQ3_S;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float*) {
        const float d = half_at(b);
        for (int i = 0; i < 8; i++) {
            scale[i] = d * static_cast<float>(1 + 2 * (b[106 + i / 2] >> 4 * (i % 2) & 15));
            const uint8_t* index = b + 2 + 8 * i;
            const uint32_t top = b[66 + i];
            for (int l = 0; l < 4; l++) {
                const uint64_t g0 = tables.iq3_s[index[2 * l] | (top << (8 - 2 * l) & 256)];
                const uint64_t g1 = tables.iq3_s[index[2 * l + 1] | (top << (7 - 2 * l) & 256)];
                // the code of -w is 15 - code of w
                const uint64_t flip = tables.signs8[b[74 + 4 * i + l]] & 15 * ONES;
                store_u64(u + 32 * i + 8 * l, (g0 | g1 << 32) ^ flip);
            }
        }
    }
};

// 8 * point +- 1, plus 9
inline uint64_t iq1_codes(int index, bool negative) {
    return tables.iq1[index] + (negative ? 0 : 2 * ONES);
}

struct DecodeIQ1_S {
    static constexpr Type type = Type::IQ1_S;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float*) {
        const float d = half_at(b);
        for (int i = 0; i < 8; i++) {
            const uint32_t word = load_u16(b + 34 + 2 * i);
            scale[i] = d * static_cast<float>(2 * (word >> 12 & 7) + 1) * 0.125f;
            for (int l = 0; l < 4; l++) {
                const int index = b[2 + 4 * i + l] | static_cast<int>(word >> 3 * l & 7) << 8;
                store_u64(u + 32 * i + 8 * l, iq1_codes(index, word >= 0x8000));
            }
        }
    }
};

struct DecodeIQ1_M {
    static constexpr Type type = Type::IQ1_M;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float*) {
        const uint8_t* words = b + 48;
        uint16_t d_bits = 0;
        for (int i = 0; i < 4; i++) d_bits |= load_u16(words + 2 * i) >> 12 << 4 * i;
        const float d = half_to_float(d_bits);
        for (int g = 0; g < 16; g++) {
            const int s = load_u16(words + 2 * (g / 4)) >> 3 * (g % 4) & 7;
            scale[g] = d * static_cast<float>(2 * s + 1) * 0.125f;
        }
        for (int i = 0; i < 32; i++) {
            const int field = b[32 + i / 2] >> 4 * (i % 2) & 15;
            store_u64(u + 8 * i, iq1_codes(b[i] | (field & 7) << 8, field >= 8));
        }
    }
};

inline void iq4_codes(const uint8_t* in, uint8_t* u) {
    nibbles_16(in, u);
    for (int i = 0; i < 32; i++) u[i] = static_cast<uint8_t>(IQ4_CODES[u[i]]);
}

struct DecodeIQ4_NL {
    static constexpr Type type = Type::IQ4_NL;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float*) {
        scale[0] = half_at(b);
        iq4_codes(b + 2, u);
    }
};

struct DecodeIQ4_XS {
    static constexpr Type type = Type::IQ4_XS;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float*) {
        const float d = half_at(b);
        const int high = load_u16(b + 2);
        for (int i = 0; i < 8; i++) {
            const int s = (b[4 + i / 2] >> 4 * (i % 2) & 15) | (high >> 2 * i & 3) << 4;
            scale[i] = d * static_cast<float>(s - 32);
            iq4_codes(b + 8 + 16 * i, u + 32 * i);
        }
    }
};

}  // namespace
}  // namespace strata
