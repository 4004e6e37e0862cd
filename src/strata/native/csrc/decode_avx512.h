// Row decoders of the IQ3 types for processors with AVX-512 VBMI: grids are looked up in registers, 64
// indices at a time. A point of a grid is cut into two bytes of small numbers (of its levels), a byte of
// 128 points costs one instruction, and a table turns levels into codes. Codes come in the row's own
// order and are interleaved after that. (Measured for IQ2, whose grids are larger: slower than look-ups.)
#pragma once
#include "decode_lookup_x86.h"

#if defined(__AVX512VNNI__)

#define STRATA_VBMI __attribute__((target("avx512vbmi")))

namespace strata {
namespace {

inline bool has_vbmi() {
    static const bool has = __builtin_cpu_supports("avx512vbmi");
    return has;
}

STRATA_VBMI inline __m512i table_64(const uint8_t* p) { return _mm512_loadu_si512(p); }

// The byte of each index among N; bits 8 and 9 of the indices are masks.
template <int N>
STRATA_VBMI inline __m512i bytes_of(const uint8_t* plane, __m512i index, __mmask64 bit8, __mmask64 bit9) {
    if constexpr (N == 128) {
        return _mm512_permutex2var_epi8(table_64(plane), index, table_64(plane + 64));
    } else {
        const __m512i low = bytes_of<N / 2>(plane, index, bit8, bit9);
        const __m512i high = bytes_of<N / 2>(plane + N / 2, index, bit8, bit9);
        const __mmask64 top = N == 256 ? _mm512_movepi8_mask(index) : N == 512 ? bit8 : bit9;
        return _mm512_mask_blend_epi8(top, low, high);
    }
}

// Codes of levels: table entry, or where the sign is set entry 8 + level.
STRATA_VBMI inline __m512i codes_of_levels(const int8_t* table, __m512i level, uint64_t sign) {
    const __m512i t = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    return _mm512_shuffle_epi8(t, _mm512_or_si512(level, _mm512_maskz_set1_epi8(sign, 8)));
}

// A super-block of 64 indices of 4 weights.
template <int N>
STRATA_VBMI inline void iq3_codes(const uint8_t* planes, const int8_t* codes, const uint8_t* low, uint64_t ninth,
                                  const uint8_t* signs, uint8_t* u) {
    alignas(64) static const uint8_t ORDER[64] = {
        0, 1, 2, 3, 16, 17, 18, 19, 32, 33, 34, 35, 48, 49, 50, 51, 4, 5, 6, 7, 20, 21, 22, 23, 36, 37, 38, 39, 52, 53, 54, 55,
        8, 9, 10, 11, 24, 25, 26, 27, 40, 41, 42, 43, 56, 57, 58, 59, 12, 13, 14, 15, 28, 29, 30, 31, 44, 45, 46, 47, 60, 61, 62, 63};
    // an order that the unpacking below turns into the row's
    const __m512i order = table_64(ORDER), nibble = _mm512_set1_epi8(15);
    const __m512i index = _mm512_permutexvar_epi8(order, table_64(low));
    const __mmask64 bit8 = N == 512 ? _mm512_movepi8_mask(_mm512_permutexvar_epi8(order, _mm512_movm_epi8(ninth))) : 0;
    const __m512i a = bytes_of<N>(planes, index, bit8, 0), b = bytes_of<N>(planes + N, index, bit8, 0);
    const __m512i ab[2] = {_mm512_unpacklo_epi8(a, b), _mm512_unpackhi_epi8(a, b)};
    for (int i = 0; i < 2; i++) {
        const __m512i even = _mm512_and_si512(ab[i], nibble);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi16(ab[i], 4), nibble);
        _mm512_storeu_si512(u + 128 * i, codes_of_levels(codes, _mm512_unpacklo_epi8(even, odd), load_u64(signs + 16 * i)));
        _mm512_storeu_si512(u + 128 * i + 64,
                            codes_of_levels(codes, _mm512_unpackhi_epi8(even, odd), load_u64(signs + 16 * i + 8)));
    }
}

// The codes of eight levels, then of their negatives, as in TypeInfo.
inline constexpr int8_t IQ3_S_SIGNED[16] = {8, 9, 10, 11, 12, 13, 14, 15, 7, 6, 5, 4, 3, 2, 1, 0};
inline constexpr int8_t IQ3_XXS_SIGNED[16] = {33, 37, 41, 45, 49, 53, 57, 62, 29, 25, 21, 17, 13, 9, 5, 0};

template <class Lookup>
STRATA_VBMI void vbmi_codes(const uint8_t* row, int n, uint8_t* u, float* scale) {
    constexpr TypeInfo type = TYPE_INFO[static_cast<int>(Lookup::type)];
    alignas(64) uint8_t signs[32];
    for (int i = 0; i < n; i++, row += type.block_bytes) {
        prefetch_ahead(row, type.block_bytes);
        Lookup::scales(row, scale + 8 * type.groups * i);
        store_256(signs, Lookup::signs(row));
        uint8_t* out = u + 256 * static_cast<size_t>(i);
        if constexpr (Lookup::type == Type::IQ3_S)
            iq3_codes<512>(tables.iq3_s_levels[0], IQ3_S_SIGNED, row + 2, load_u64(row + 66), signs, out);
        else
            iq3_codes<256>(tables.iq3_xxs_levels[0], IQ3_XXS_SIGNED, row + 2, 0, signs, out);
    }
}

template <class Lookup>
void decode_row_vbmi(const uint8_t* row, const Tile& t, uint8_t* memory) {
    constexpr TypeInfo type = TYPE_INFO[static_cast<int>(Lookup::type)];
    const PlainRow plain(memory, t.L);
    vbmi_codes<Lookup>(row, t.L, plain.codes, plain.scale);
    transpose_scales<type.groups>(plain.scale, t.L, t.scale(0), t.step_bytes);
    interleave(t, plain.codes);
}

}  // namespace
}  // namespace strata

#endif
