// Decoders, one block (or super-block) at a time: codes u, scales and minima of the numerics contract,
// section 2. Byte work is written on vectors of 32 bytes, which every compiler lowers to what it has.
#pragma once
#include "bytes.h"
#include "scalar.h"
#include "weight_types.h"

namespace strata {
namespace {

// Each decoder: u[block_weights], scale and minimum one per group of the block.

struct DecodeQ4_0 {
    static constexpr Type type = Type::Q4_0;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float*) {
        scale[0] = half_at(b);
        store32(u, nibbles_32(b + 2));
    }
};

struct DecodeQ4_1 {
    static constexpr Type type = Type::Q4_1;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float* minimum) {
        scale[0] = half_at(b);
        minimum[0] = -half_at(b + 2);
        store32(u, nibbles_32(b + 4));
    }
};

struct DecodeQ5_0 {
    static constexpr Type type = Type::Q5_0;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float*) {
        scale[0] = half_at(b);
        store32(u, nibbles_32(b + 6) | (bits_32(load_u32(b + 2)) & 16));
    }
};

struct DecodeQ5_1 {
    static constexpr Type type = Type::Q5_1;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float* minimum) {
        scale[0] = half_at(b);
        minimum[0] = -half_at(b + 2);
        store32(u, nibbles_32(b + 8) | (bits_32(load_u32(b + 4)) & 16));
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
        store32(u, look_up(FP4_CODES_12, nibbles_32(b + 1)));
    }
};

struct DecodeNVFP4 {
    static constexpr Type type = Type::NVFP4;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float*) {
        for (int g = 0; g < 4; g++) scale[g] = tables.half_ue4m3[b[g]];
        for (int half = 0; half < 2; half++, u += 32) {
            // eight bytes a group: low halves are its weights 0..7, high halves 8..15
            uint64_t quarter[4];
            const Bytes32 codes = look_up(FP4_CODES_12, nibbles_32(b + 4 + 16 * half));
            std::memcpy(quarter, &codes, 32);
            store_u64(u, quarter[0]);
            store_u64(u + 8, quarter[2]);
            store_u64(u + 16, quarter[1]);
            store_u64(u + 24, quarter[3]);
        }
    }
};

struct DecodeQ2_0 {
    static constexpr Type type = Type::Q2_0;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float*) {
        scale[0] = scale[1] = half_at(b);
        // four codes a byte, low bits first
        for (int i = 0; i < 64; i++) u[i] = b[2 + i / 4] >> 2 * (i % 4) & 3;
    }
};

// Digit 0 of all bytes, then digit 1, ...; the first digit of byte q is 3 * q >> 8, the next that of 3 * q.
template <class Bytes>
inline void trits(const uint8_t* in, int n_digits, uint8_t* u) {
    Bytes q;
    std::memcpy(&q, in, sizeof q);
    for (int d = 0; d < n_digits; d++, u += sizeof q) {
        const Bytes digit = ((Bytes)(q > 85) & 1) + ((Bytes)(q > 170) & 1);
        std::memcpy(u, &digit, sizeof q);
        q = q + q + q;
    }
}

struct DecodeTQ1_0 {
    static constexpr Type type = Type::TQ1_0;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float*) {
        trits<Bytes32>(b, 5, u);
        trits<Bytes16>(b + 32, 5, u + 160);
        trits<Bytes4>(b + 48, 4, u + 240);
        const float d = half_at(b + 52);
        for (int i = 0; i < 8; i++) scale[i] = d;
    }
};

// In each half of 128 weights, bit pair l of byte m is weight 32 l + m.
inline void two_bits(const uint8_t* in, uint8_t* u) {
    for (int half = 0; half < 2; half++, in += 32, u += 128) {
        const Bytes32 packed = load32(in);
        for (int l = 0; l < 4; l++) store32(u + 32 * l, packed >> 2 * l & 3);
    }
}

struct DecodeTQ2_0 {
    static constexpr Type type = Type::TQ2_0;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float*) {
        two_bits(b, u);
        const float d = half_at(b + 64);
        for (int i = 0; i < 8; i++) scale[i] = d;
    }
};

struct DecodeQ2_K {
    static constexpr Type type = Type::Q2_K;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float* minimum) {
        const float d = half_at(b + 80), d_min = half_at(b + 82);
        for (int g = 0; g < 16; g++) scale[g] = d * static_cast<float>(b[g] & 15);
        for (int g = 0; g < 16; g++) minimum[g] = d_min * static_cast<float>(b[g] >> 4);
        two_bits(b + 16, u);
    }
};

struct DecodeQ3_K {
    static constexpr Type type = Type::Q3_K;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float*) {
        const float d = half_at(b + 108);
        // sixteen 6-bit scales: eight bytes of low halves, four bytes of bit pairs
        const uint64_t halves = 0x0f0f0f0f0f0f0f0full, pairs = 0x0303030303030303ull;
        const uint64_t low = load_u64(b + 96), high = load_u32(b + 104);
        const uint64_t top_0 = (high | high >> 2 << 32) & pairs;
        const uint64_t top_1 = (high >> 4 | high >> 6 << 32) & pairs;
        uint8_t bits[16];
        store_u64(bits, (low & halves) | top_0 << 4);
        store_u64(bits + 8, (low >> 4 & halves) | top_1 << 4);
        for (int g = 0; g < 16; g++) scale[g] = d * static_cast<float>(bits[g] - 32);
        const Bytes32 third = load32(b);
        for (int half = 0; half < 2; half++) {
            const Bytes32 packed = load32(b + 32 + 32 * half);
            for (int l = 0; l < 4; l++, u += 32)
                store32(u, (packed >> 2 * l & 3) | (third >> (4 * half + l) & 1) << 2);
        }
    }
};

// The 12 bytes of Q4_K and Q5_K: eight 6-bit scales, eight 6-bit minima.
inline void sub_scales(const uint8_t* b, float* scale, float* minimum) {
    const float d = half_at(b), d_min = half_at(b + 2);
    const uint32_t p0 = load_u32(b + 4), p1 = load_u32(b + 8), p2 = load_u32(b + 12);
    uint8_t s[8], m[8];
    store_u32(s, p0 & 0x3f3f3f3f);
    store_u32(s + 4, (p2 & 0x0f0f0f0f) | (p0 >> 2 & 0x30303030));
    store_u32(m, p1 & 0x3f3f3f3f);
    store_u32(m + 4, (p2 >> 4 & 0x0f0f0f0f) | (p1 >> 2 & 0x30303030));
    for (int i = 0; i < 8; i++) scale[i] = d * static_cast<float>(s[i]);
    for (int i = 0; i < 8; i++) minimum[i] = d_min * static_cast<float>(m[i]);
}

struct DecodeQ4_K {
    static constexpr Type type = Type::Q4_K;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float* minimum) {
        sub_scales(b, scale, minimum);
        for (int run = 0; run < 4; run++, u += 64) {
            const Bytes32 packed = load32(b + 16 + 32 * run);
            store32(u, packed & 15);
            store32(u + 32, packed >> 4);
        }
    }
};

struct DecodeQ5_K {
    static constexpr Type type = Type::Q5_K;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float* minimum) {
        sub_scales(b, scale, minimum);
        const Bytes32 fifth = load32(b + 16);
        for (int run = 0; run < 4; run++, u += 64) {
            const Bytes32 packed = load32(b + 48 + 32 * run);
            store32(u, (packed & 15) | (fifth >> 2 * run & 1) << 4);
            store32(u + 32, packed >> 4 | (fifth >> (2 * run + 1) & 1) << 4);
        }
    }
};

struct DecodeQ6_K {
    static constexpr Type type = Type::Q6_K;
    static void block(const uint8_t* b, uint8_t* u, float* scale, float*) {
        const float d = half_at(b + 208);
        for (int g = 0; g < 16; g++) scale[g] = d * static_cast<float>(static_cast<int8_t>(b[192 + g]));
        const uint8_t *low = b, *high = b + 128;
        for (int half = 0; half < 2; half++, low += 64, high += 32, u += 128) {
            const Bytes32 l0 = load32(low), l1 = load32(low + 32), h = load32(high);
            store32(u, (l0 & 15) | (h & 3) << 4);
            store32(u + 32, (l1 & 15) | (h >> 2 & 3) << 4);
            store32(u + 64, l0 >> 4 | (h >> 4 & 3) << 4);
            store32(u + 96, l1 >> 4 | h >> 6 << 4);
        }
    }
};

}  // namespace
}  // namespace strata
