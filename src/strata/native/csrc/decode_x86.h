// AVX2 row decoders of the common types: straight from the row's bytes into the tile.
#pragma once
#include "decode_grids.h"
#include "tile.h"

#if defined(__AVX2__)

namespace strata {
namespace {

// The f16 at the head of the eight blocks of a step.
inline __m256 half_scales(const uint8_t* const block[8]) {
    __m128i h = _mm_cvtsi32_si128(load_u16(block[0]));
    h = _mm_insert_epi16(h, load_u16(block[1]), 1);
    h = _mm_insert_epi16(h, load_u16(block[2]), 2);
    h = _mm_insert_epi16(h, load_u16(block[3]), 3);
    h = _mm_insert_epi16(h, load_u16(block[4]), 4);
    h = _mm_insert_epi16(h, load_u16(block[5]), 5);
    h = _mm_insert_epi16(h, load_u16(block[6]), 6);
    h = _mm_insert_epi16(h, load_u16(block[7]), 7);
    return _mm256_cvtph_ps(h);
}

inline void load_16(const uint8_t* const block[8], int offset, __m128i r[8]) {
    for (int s = 0; s < 8; s++)
        r[s] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(block[s] + offset));
}

inline void split_nibbles(const __m256i packed[4], __m256i u[8]) {
    const __m256i mask = _mm256_set1_epi8(15);
    for (int i = 0; i < 4; i++) {
        u[i] = _mm256_and_si256(packed[i], mask);
        u[i + 4] = _mm256_and_si256(_mm256_srli_epi16(packed[i], 4), mask);
    }
}

inline void look_up(__m256i table, __m256i u[8]) {
    for (int i = 0; i < 8; i++) u[i] = _mm256_shuffle_epi8(table, u[i]);
}

inline __m256i table_16(const void* bytes) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(bytes)));
}

struct StepQ8_0 {
    static constexpr Type type = Type::Q8_0;
    static void step(const uint8_t* const block[8], __m256i u[8], float* scale, float*) {
        __m128i r[8];
        load_16(block, 2, r);
        transpose_8x4(r, u);
        load_16(block, 18, r);
        transpose_8x4(r, u + 4);
        _mm256_store_ps(scale, half_scales(block));
    }
};

template <int OFFSET>
inline void nibble_step(const uint8_t* const block[8], __m256i u[8]) {
    __m128i r[8];
    __m256i packed[4];
    load_16(block, OFFSET, r);
    transpose_8x4(r, packed);
    split_nibbles(packed, u);
}

struct StepQ4_0 {
    static constexpr Type type = Type::Q4_0;
    static void step(const uint8_t* const block[8], __m256i u[8], float* scale, float*) {
        nibble_step<2>(block, u);
        _mm256_store_ps(scale, half_scales(block));
    }
};

struct StepQ4_1 {
    static constexpr Type type = Type::Q4_1;
    static void step(const uint8_t* const block[8], __m256i u[8], float* scale, float* minimum) {
        nibble_step<4>(block, u);
        _mm256_store_ps(scale, half_scales(block));
        const uint8_t* second[8];
        for (int s = 0; s < 8; s++) second[s] = block[s] + 2;
        _mm256_store_ps(minimum, _mm256_xor_ps(half_scales(second), _mm256_set1_ps(-0.0f)));
    }
};

struct StepIQ4_NL {
    static constexpr Type type = Type::IQ4_NL;
    static void step(const uint8_t* const block[8], __m256i u[8], float* scale, float*) {
        nibble_step<2>(block, u);
        look_up(table_16(IQ4_CODES), u);
        _mm256_store_ps(scale, half_scales(block));
    }
};

struct StepMXFP4 {
    static constexpr Type type = Type::MXFP4;
    static void step(const uint8_t* const block[8], __m256i u[8], float* scale, float*) {
        nibble_step<1>(block, u);
        look_up(table_16(FP4_CODES_12), u);
        for (int s = 0; s < 8; s++) scale[s] = tables.half_e8m0[block[s][0]];
    }
};

// The blocks past the end of the row; one group per block.
inline void end_scales(const Tile& t, bool has_min) {
    for (int b = t.n_blocks; b < LANES * t.L; b++) {
        t.scale(b % t.L)[b / t.L] = -0.0f;
        if (has_min) t.minimum(b % t.L, 1)[b / t.L] = 0.0f;
    }
}

template <class Step>
void decode_row_steps(const uint8_t* row, const Tile& t, uint8_t*) {
    constexpr TypeInfo type = TYPE_INFO[static_cast<int>(Step::type)];
    static_assert(type.block_weights == 32 && type.groups == 1);
    for (int j = 0; j < t.L; j++) {
        __m256i* out = reinterpret_cast<__m256i*>(t.codes(j));
        prefetch_ahead(row + j * 8 * type.block_bytes, 8 * type.block_bytes);
        const BlockPointers block(t, row, type.block_bytes, j);
        __m256i u[8];
        Step::step(block.p, u, t.scale(j), t.minimum(j, 1));
        for (int i = 0; i < 8; i++) _mm256_store_si256(out + i, u[i]);
    }
    end_scales(t, type.has_min);
}

// Two blocks of 32 share a scale; a byte holds four consecutive codes, so byte v of a block becomes
// the dword of vector v.
inline void decode_row_q2_0(const uint8_t* row, const Tile& t, uint8_t*) {
    const __m256i low = _mm256_set1_epi32(0x000f000f), pairs = _mm256_set1_epi32(0x03030303);
    const __m256i byte = _mm256_set1_epi32(255);
    for (int j = 0; j < t.L; j++) {
        __m256i* out = reinterpret_cast<__m256i*>(t.codes(j));
        prefetch_ahead(row + 4 * 18 * j, 4 * 18);
        const uint8_t* block[8];
        alignas(16) uint64_t packed[8];
        for (int s = 0; s < 8; s++) {
            const int b = t.block(s, j);
            block[s] = row + static_cast<size_t>(b / 2) * 18;
            packed[s] = load_u64(block[s] + 2 + 8 * (b % 2));
        }
        _mm256_store_ps(t.scale(j), half_scales(block));
        const __m256i p0 = _mm256_set_epi64x(packed[3], packed[2], packed[1], packed[0]);
        const __m256i p1 = _mm256_set_epi64x(packed[7], packed[6], packed[5], packed[4]);
        const __m256i even = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
        const __m256i q0 = _mm256_permutevar8x32_epi32(p0, even);
        const __m256i q1 = _mm256_permutevar8x32_epi32(p1, even);
        const __m256i words[2] = {_mm256_permute2x128_si256(q0, q1, 0x20),
                                  _mm256_permute2x128_si256(q0, q1, 0x31)};
        for (int v = 0; v < 8; v++) {
            const __m256i word = v < 4 ? words[0] : words[1];
            __m256i x = _mm256_and_si256(_mm256_srli_epi32(word, 8 * (v % 4)), byte);
            x = _mm256_and_si256(_mm256_or_si256(x, _mm256_slli_epi32(x, 12)), low);
            x = _mm256_and_si256(_mm256_or_si256(x, _mm256_slli_epi32(x, 6)), pairs);
            _mm256_store_si256(out + v, x);
        }
    }
    end_scales(t, false);
}

}  // namespace
}  // namespace strata

#endif
