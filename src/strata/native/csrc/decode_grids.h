// Decoders of the IQ types; same shape as in decode_blocks.h. A grid entry is 8 (IQ1, IQ2) or 4 (IQ3)
// weights; four or eight entries make 32 codes.
#pragma once
#include "decode_blocks.h"

namespace strata {
namespace {

typedef uint64_t Words4 __attribute__((vector_size(32)));
typedef uint32_t Words8 __attribute__((vector_size(32)));

inline Bytes32 four(uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
    return reinterpret_cast<Bytes32>(Words4{a, b, c, d});
}

// bias + g where the sign byte is 0, bias - g where it is 0xff
inline Bytes32 signed_codes(Bytes32 g, Bytes32 sign, uint8_t bias) { return ((g ^ sign) - sign) + bias; }

// Four 7-bit sign patterns of a word.
inline Bytes32 signs_7(uint32_t word) {
    const uint64_t* t = tables.signs7;
    return four(t[word & 127], t[word >> 7 & 127], t[word >> 14 & 127], t[word >> 21 & 127]);
}

struct DecodeIQ2_XXS {
    static constexpr Type type = Type::IQ2_XXS;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float*) {
        const float d = half_at(b);
        const uint64_t* t = tables.iq2_xxs;
        for (int i = 0; i < 8; i++) {
            const uint8_t* index = b + 2 + 8 * i;
            const uint32_t word = load_u32(index + 4);
            scale[i] = d * (0.5f + static_cast<float>(word >> 28)) * 0.25f;
            const Bytes32 g = four(t[index[0]], t[index[1]], t[index[2]], t[index[3]]);
            store32(u + 32 * i, signed_codes(g, signs_7(word), 43));
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
        const uint64_t *t = tables.iq2_xs, *s = tables.signs7;
        for (int i = 0; i < 8; i++) {
            // four words of 9 bits of grid, 7 of signs
            const uint64_t w = load_u64(b + 2 + 8 * i);
            const Bytes32 g = four(t[w & 511], t[w >> 16 & 511], t[w >> 32 & 511], t[w >> 48 & 511]);
            const Bytes32 sign = four(s[w >> 9 & 127], s[w >> 25 & 127], s[w >> 41 & 127], s[w >> 57]);
            store32(u + 32 * i, signed_codes(g, sign, 43));
        }
    }
};

struct DecodeIQ2_S {
    static constexpr Type type = Type::IQ2_S;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float*) {
        nibble_scales(b + 74, half_at(b), scale);
        const uint64_t* t = tables.iq2_s;
        for (int i = 0; i < 8; i++) {
            const uint8_t* low = b + 2 + 4 * i;
            const uint32_t top = b[66 + i];
            const Bytes32 g = four(t[low[0] | (top << 8 & 0x300)], t[low[1] | (top << 6 & 0x300)],
                                   t[low[2] | (top << 4 & 0x300)], t[low[3] | (top << 2 & 0x300)]);
            store32(u + 32 * i, signed_codes(g, bits_32(load_u32(b + 34 + 4 * i)), 43));
        }
    }
};

struct DecodeIQ3_XXS {
    static constexpr Type type = Type::IQ3_XXS;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float*) {
        const float d = half_at(b);
        const uint32_t* t = tables.iq3_xxs;
        for (int i = 0; i < 8; i++) {
            const uint8_t* x = b + 2 + 8 * i;
            const uint32_t word = load_u32(b + 66 + 4 * i);
            scale[i] = d * (0.5f + static_cast<float>(word >> 28)) * 0.5f;
            const Words8 g = {t[x[0]], t[x[1]], t[x[2]], t[x[3]], t[x[4]], t[x[5]], t[x[6]], t[x[7]]};
            store32(u + 32 * i, signed_codes(reinterpret_cast<Bytes32>(g), signs_7(word), 31));
        }
    }
};

struct DecodeIQ3_S {
    static constexpr Type type = Type::IQ3_S;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float*) {
        const float d = half_at(b);
        const uint32_t* t = tables.iq3_s;
        for (int i = 0; i < 8; i++) {
            scale[i] = d * static_cast<float>(1 + 2 * (b[106 + i / 2] >> 4 * (i % 2) & 15));
            const uint8_t* x = b + 2 + 8 * i;
            const uint32_t top = b[66 + i];
            const auto entry = [&](int k) { return t[x[k] | (top << (8 - k) & 256)]; };
            const Words8 g = {entry(0), entry(1), entry(2), entry(3), entry(4), entry(5), entry(6), entry(7)};
            // the code of -w is 15 - code of w
            const Bytes32 flip = bits_32(load_u32(b + 74 + 4 * i)) & 15;
            store32(u + 32 * i, reinterpret_cast<Bytes32>(g) ^ flip);
        }
    }
};

// Grid codes are 8 * (1 + point); the shift of +- 1 and the bias of 9 add 2 or nothing.
inline uint64_t iq1_shift(uint32_t negative) { return (1 - static_cast<uint64_t>(negative)) * 0x0202020202020202ull; }

struct DecodeIQ1_S {
    static constexpr Type type = Type::IQ1_S;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float*) {
        const float d = half_at(b);
        const uint64_t* t = tables.iq1;
        for (int i = 0; i < 8; i++) {
            const uint32_t w = load_u16(b + 34 + 2 * i);
            scale[i] = d * static_cast<float>(2 * (w >> 12 & 7) + 1) * 0.125f;
            const uint8_t* low = b + 2 + 4 * i;
            const uint64_t shift = iq1_shift(w >> 15);
            const Bytes32 g = four(t[low[0] | (w << 8 & 0x700)], t[low[1] | (w << 5 & 0x700)],
                                   t[low[2] | (w << 2 & 0x700)], t[low[3] | (w >> 1 & 0x700)]);
            store32(u + 32 * i, g + four(shift, shift, shift, shift));
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
        const uint64_t* t = tables.iq1;
        for (int i = 0; i < 8; i++) {
            // a nibble per 8 weights: 3 high grid bits, the sign of the shift
            const uint32_t w = load_u16(b + 32 + 2 * i);
            const uint8_t* low = b + 4 * i;
            const Bytes32 g = four(t[low[0] | (w << 8 & 0x700)], t[low[1] | (w << 4 & 0x700)],
                                   t[low[2] | (w & 0x700)], t[low[3] | (w >> 4 & 0x700)]);
            store32(u + 32 * i, g + four(iq1_shift(w >> 3 & 1), iq1_shift(w >> 7 & 1), iq1_shift(w >> 11 & 1),
                                         iq1_shift(w >> 15)));
        }
    }
};

inline void iq4_codes(const uint8_t* in, uint8_t* u) { store32(u, look_up(IQ4_CODES, nibbles_32(in))); }

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
