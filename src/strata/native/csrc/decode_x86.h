// AVX2 row decoders of the common types: straight from the row's bytes into the tile.
#pragma once
#include "decode_lookup_x86.h"
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

// In 512-bit registers: agreed with the 256-bit form in an emulation. Not built (-DSTRATA_WIDE_STEPS
// does) until it has run on such a processor.
#if defined(__AVX512VNNI__) && defined(STRATA_WIDE_STEPS)

// Codes of a step: two vectors of backend.h each.
using StepCodes = __m512i;
constexpr int N_STEP_CODES = 4;

inline StepCodes table_16(const void* bytes) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(bytes)));
}
inline StepCodes look_up(StepCodes table, StepCodes u) { return _mm512_shuffle_epi8(table, u); }
inline void store_codes(uint8_t* out, int i, StepCodes u) { _mm512_store_si512(out + 64 * i, u); }

// Nibbles of 16 bytes of each block.
template <int OFFSET>
inline void nibble_step(const uint8_t* const block[8], StepCodes u[N_STEP_CODES]) {
    __m128i r[8];
    load_16(block, OFFSET, r);
    const auto four = [&](int i) {
        const __m512i two = _mm512_inserti32x4(_mm512_castsi128_si512(r[i]), r[i + 1], 1);
        return _mm512_inserti32x4(_mm512_inserti32x4(two, r[i + 2], 2), r[i + 3], 3);
    };
    const __m512i a = four(0), b = four(4), mask = _mm512_set1_epi8(15), two = _mm512_set1_epi32(2);
    const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
    const __m512i low = _mm512_permutex2var_epi32(a, first, b);
    const __m512i high = _mm512_permutex2var_epi32(a, _mm512_add_epi32(first, two), b);
    u[0] = _mm512_and_si512(low, mask);
    u[1] = _mm512_and_si512(high, mask);
    u[2] = _mm512_and_si512(_mm512_srli_epi16(low, 4), mask);
    u[3] = _mm512_and_si512(_mm512_srli_epi16(high, 4), mask);
}

#else

using StepCodes = __m256i;
constexpr int N_STEP_CODES = 8;

inline StepCodes table_16(const void* bytes) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(bytes)));
}
inline StepCodes look_up(StepCodes table, StepCodes u) { return _mm256_shuffle_epi8(table, u); }
inline void store_codes(uint8_t* out, int i, StepCodes u) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(out) + i, u);
}

// Nibbles of 16 bytes of each block.
template <int OFFSET>
inline void nibble_step(const uint8_t* const block[8], StepCodes u[N_STEP_CODES]) {
    __m128i r[8];
    __m256i packed[4];
    load_16(block, OFFSET, r);
    transpose_8x4(r, packed);
    const __m256i mask = _mm256_set1_epi8(15);
    for (int i = 0; i < 4; i++) {
        u[i] = _mm256_and_si256(packed[i], mask);
        u[i + 4] = _mm256_and_si256(_mm256_srli_epi16(packed[i], 4), mask);
    }
}

#endif

template <int OFFSET>
inline void store_nibbles(const uint8_t* const block[8], uint8_t* out) {
    StepCodes u[N_STEP_CODES];
    nibble_step<OFFSET>(block, u);
    for (int i = 0; i < N_STEP_CODES; i++) store_codes(out, i, u[i]);
}

template <int OFFSET>
inline void store_table_codes(const uint8_t* const block[8], const void* table, uint8_t* out) {
    StepCodes u[N_STEP_CODES];
    nibble_step<OFFSET>(block, u);
    const StepCodes t = table_16(table);
    for (int i = 0; i < N_STEP_CODES; i++) store_codes(out, i, look_up(t, u[i]));
}

// Each: the codes of a step, its scales and minima.

struct StepQ8_0 {
    static constexpr Type type = Type::Q8_0;
    static void step(const uint8_t* const block[8], uint8_t* out, float* scale, float*) {
        __m128i r[8];
        __m256i u[8];
        load_16(block, 2, r);
        transpose_8x4(r, u);
        load_16(block, 18, r);
        transpose_8x4(r, u + 4);
        for (int i = 0; i < 8; i++) _mm256_store_si256(reinterpret_cast<__m256i*>(out) + i, u[i]);
        _mm256_store_ps(scale, half_scales(block));
    }
};

struct StepQ4_0 {
    static constexpr Type type = Type::Q4_0;
    static void step(const uint8_t* const block[8], uint8_t* out, float* scale, float*) {
        store_nibbles<2>(block, out);
        _mm256_store_ps(scale, half_scales(block));
    }
};

struct StepQ4_1 {
    static constexpr Type type = Type::Q4_1;
    static void step(const uint8_t* const block[8], uint8_t* out, float* scale, float* minimum) {
        store_nibbles<4>(block, out);
        _mm256_store_ps(scale, half_scales(block));
        const uint8_t* second[8];
        for (int s = 0; s < 8; s++) second[s] = block[s] + 2;
        _mm256_store_ps(minimum, _mm256_xor_ps(half_scales(second), _mm256_set1_ps(-0.0f)));
    }
};

struct StepIQ4_NL {
    static constexpr Type type = Type::IQ4_NL;
    static void step(const uint8_t* const block[8], uint8_t* out, float* scale, float*) {
        store_table_codes<2>(block, IQ4_CODES, out);
        _mm256_store_ps(scale, half_scales(block));
    }
};

struct StepMXFP4 {
    static constexpr Type type = Type::MXFP4;
    static void step(const uint8_t* const block[8], uint8_t* out, float* scale, float*) {
        store_table_codes<1>(block, FP4_CODES_12, out);
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
        prefetch_ahead(row + j * 8 * type.block_bytes, 8 * type.block_bytes);
        const BlockPointers block(t, row, type.block_bytes, j);
        Step::step(block.p, t.codes(j), t.scale(j), t.minimum(j, 1));
    }
    end_scales(t, type.has_min);
}

// Super-blocks: the nibbles of a row are put side by side first, so that segments lie apart evenly.
inline void decode_row_iq4_xs(const uint8_t* row, const Tile& t, uint8_t* memory) {
    const PlainRow plain(memory, t.L);
    const __m256i two_bits = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
    for (int i = 0; i < t.L; i++, row += 136) {
        prefetch_ahead(row, 136);
        for (int k = 0; k < 4; k++) store_256(plain.codes + 128 * i + 32 * k, load_256(row + 8 + 32 * k));
        const __m256i high = _mm256_srlv_epi32(_mm256_set1_epi32(load_u16(row + 2)), two_bits);
        const __m256i top = _mm256_slli_epi32(_mm256_and_si256(high, _mm256_set1_epi32(3)), 4);
        const __m256i s = _mm256_sub_epi32(_mm256_or_si256(nibbles_of(load_u32(row + 4)), top), _mm256_set1_epi32(32));
        _mm256_storeu_ps(plain.scale + 8 * i, _mm256_mul_ps(_mm256_set1_ps(half_at(row)), _mm256_cvtepi32_ps(s)));
    }
    transpose_scales<1>(plain.scale, t.L, t.scale(0), t.step_bytes);
    for (int j = 0; j < t.L; j++)
        store_table_codes<0>(BlockPointers(t, plain.codes, 16, j).p, IQ4_CODES, t.codes(j));
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
