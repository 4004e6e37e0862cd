// AVX2 row decoders of the IQ types. First a row's indices, signs and scales are brought to plain arrays,
// super-block by super-block; then each vector of a step is put together from eight table look-ups, one
// per segment, so that codes are never stored in the row's own order.
//
// The width is a multiple of 256, so a row has 8 L blocks and every segment has L: no ends.
#pragma once
#include "decode_grids.h"
#include "tile.h"

#if defined(__AVX2__)

namespace strata {
namespace {

// In memory that decode_row would use as PlainRow, which is larger.
struct LookupRow {
    uint16_t* index;  // [8 L][8 or 4]
    uint32_t* signs;  // [8 L]: bit i is set where weight i of the block is negative
    float* scale;     // [8 L * groups]

    LookupRow(uint8_t* memory, int L)
        : index(reinterpret_cast<uint16_t*>(memory)),
          signs(reinterpret_cast<uint32_t*>(memory + static_cast<size_t>(L) * 128)),
          scale(reinterpret_cast<float*>(memory + static_cast<size_t>(L) * 160)) {}
};
static_assert(160 + 2 * 4 * LANES <= STEP_BYTES + 2 * 2 * 4 * LANES);

inline __m256i load_256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store_256(void* p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
inline __m256i widen_16(const uint8_t* p) {
    return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
// Words of a repeated 8-byte group: word w gets byte first + w / each.
inline __m256i spread_words(uint64_t bytes, int first, int each) {
    const auto word = [=](int w) { return static_cast<char>(first + w / each); };
    const char no = -128;
    const __m256i from = _mm256_setr_epi8(
        word(0), no, word(1), no, word(2), no, word(3), no, word(4), no, word(5), no, word(6), no, word(7), no,
        word(8), no, word(9), no, word(10), no, word(11), no, word(12), no, word(13), no, word(14), no, word(15), no);
    return _mm256_shuffle_epi8(_mm256_set1_epi64x(static_cast<int64_t>(bytes)), from);
}

// Bytes of 7 sign bits -> 8: the eighth makes parity even.
inline __m256i even_parity(__m256i x) {
    const __m256i odd = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, -128, -128, 0, -128, 0, 0, -128,
                                                                  -128, 0, 0, -128, 0, -128, -128, 0));
    const __m256i nibble = _mm256_set1_epi8(15);
    const __m256i low = _mm256_shuffle_epi8(odd, _mm256_and_si256(x, nibble));
    const __m256i high = _mm256_shuffle_epi8(odd, _mm256_and_si256(_mm256_srli_epi16(x, 4), nibble));
    return _mm256_or_si256(x, _mm256_xor_si256(low, high));
}

// Words of four 7-bit sign patterns (the top 4 bits are something else).
inline __m256i signs_of_words(__m256i w) {
    const auto field = [](__m256i x, uint32_t mask) { return _mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(mask))); };
    const __m256i a = _mm256_or_si256(field(w, 0x7f), field(_mm256_slli_epi32(w, 1), 0x7f00));
    const __m256i b = _mm256_or_si256(field(_mm256_slli_epi32(w, 2), 0x7f0000), field(_mm256_slli_epi32(w, 3), 0x7f000000));
    return even_parity(_mm256_or_si256(a, b));
}

// d * (1/2 + s) * unit, exact
inline void store_half_scales(float* to, float d, __m256i s, float unit) {
    const __m256 x = _mm256_add_ps(_mm256_cvtepi32_ps(s), _mm256_set1_ps(0.5f));
    _mm256_storeu_ps(to, _mm256_mul_ps(_mm256_mul_ps(x, _mm256_set1_ps(d)), _mm256_set1_ps(unit)));
}

// The eight nibbles of a word.
inline __m256i nibbles_of(uint32_t word) {
    const __m256i shift = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    return _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int>(word)), shift), _mm256_set1_epi32(15));
}

// Where each segment's entries of the step are.
template <class T>
struct SegmentPointers {
    const T *p0, *p1, *p2, *p3, *p4, *p5, *p6, *p7;
    STRATA_INLINE SegmentPointers(const T* first, int L, int per_block, int j) {
        const size_t n = static_cast<size_t>(L) * per_block;
        p0 = first + static_cast<size_t>(per_block) * j, p1 = p0 + n, p2 = p1 + n, p3 = p2 + n;
        p4 = p3 + n, p5 = p4 + n, p6 = p5 + n, p7 = p6 + n;
    }
};

// Loads and unpacks: inserts from memory go one a cycle on some processors.
inline __m256i eight_words(int a, int b, int c, int d, int e, int f, int g, int h) {
    const auto two = [](int x, int y) { return _mm_unpacklo_epi32(_mm_cvtsi32_si128(x), _mm_cvtsi32_si128(y)); };
    const __m128i low = _mm_unpacklo_epi64(two(a, b), two(c, d)), high = _mm_unpacklo_epi64(two(e, f), two(g, h));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}

inline __m256i words_at(const SegmentPointers<uint32_t>& s) {
    const auto at = [](const uint32_t* p) { return static_cast<int>(*p); };
    return eight_words(at(s.p0), at(s.p1), at(s.p2), at(s.p3), at(s.p4), at(s.p5), at(s.p6), at(s.p7));
}

// Entries k of every segment: one vector of 4-byte entries.
inline void look_up_entries(const uint32_t* table, const SegmentPointers<uint16_t>& s, int k, __m256i* u) {
    const auto at = [=](const uint16_t* p) { return static_cast<int>(table[p[k]]); };
    u[0] = eight_words(at(s.p0), at(s.p1), at(s.p2), at(s.p3), at(s.p4), at(s.p5), at(s.p6), at(s.p7));
}

// Two vectors of 8-byte entries.
inline void look_up_entries(const uint64_t* table, const SegmentPointers<uint16_t>& s, int k, __m256i* u) {
    const auto pair = [=](const uint16_t* a, const uint16_t* b) {
        const __m128i low = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(table + a[k]));
        return _mm_castps_si128(_mm_loadh_pi(_mm_castsi128_ps(low), reinterpret_cast<const __m64*>(table + b[k])));
    };
    const auto both = [](__m128i a, __m128i b) {
        return _mm256_castsi256_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(a), b, 1));
    };
    const __m256 outer = both(pair(s.p0, s.p1), pair(s.p4, s.p5)), inner = both(pair(s.p2, s.p3), pair(s.p6, s.p7));
    u[0] = _mm256_castps_si256(_mm256_shuffle_ps(outer, inner, 0x88));
    u[1] = _mm256_castps_si256(_mm256_shuffle_ps(outer, inner, 0xdd));
}

// 0xff in the bytes of vector v whose sign bits are set.
template <int V>
inline __m256i sign_bytes(__m256i signs) {
    constexpr char B = V / 2, C = B + 4, D = B + 8, E = B + 12;
    const __m256i from = _mm256_broadcastsi128_si256(_mm_setr_epi8(B, B, B, B, C, C, C, C, D, D, D, D, E, E, E, E));
    const __m256i bit = _mm256_set1_epi32(V % 2 ? static_cast<int>(0x80402010u) : 0x08040201);
    return _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(signs, from), bit), bit);
}

template <int BIAS>
inline __m256i with_sign(__m256i g, __m256i sign) {
    return _mm256_add_epi8(_mm256_sub_epi8(_mm256_xor_si256(g, sign), sign), _mm256_set1_epi8(BIAS));
}

struct LookupIQ3_S {
    static constexpr Type type = Type::IQ3_S;
    static const uint32_t* table() { return tables.iq3_s; }
    static __m256i apply(__m256i g, __m256i sign) {
        // the code of -w is 15 - code of w
        return _mm256_xor_si256(g, _mm256_and_si256(sign, _mm256_set1_epi8(15)));
    }
    static void indices(const uint8_t* b, uint16_t* index) {
        const __m256i bit = _mm256_broadcastsi128_si256(_mm_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128));
        const uint64_t ninth = load_u64(b + 66);
        for (int i = 0; i < 4; i++) {
            const __m256i set = _mm256_cmpeq_epi16(_mm256_and_si256(spread_words(ninth, 2 * i, 8), bit), bit);
            store_256(index + 16 * i, _mm256_or_si256(widen_16(b + 2 + 16 * i), _mm256_and_si256(set, _mm256_set1_epi16(256))));
        }
    }
    static __m256i signs(const uint8_t* b) { return load_256(b + 74); }
    static void scales(const uint8_t* b, float* scale) {
        const __m256i s = nibbles_of(load_u32(b + 106));
        const __m256 odd = _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_add_epi32(s, s), _mm256_set1_epi32(1)));
        _mm256_storeu_ps(scale, _mm256_mul_ps(_mm256_set1_ps(half_at(b)), odd));
    }
};

struct LookupIQ3_XXS {
    static constexpr Type type = Type::IQ3_XXS;
    static const uint32_t* table() { return tables.iq3_xxs; }
    static __m256i apply(__m256i g, __m256i sign) { return with_sign<31>(g, sign); }
    static void indices(const uint8_t* b, uint16_t* index) {
        for (int i = 0; i < 4; i++) store_256(index + 16 * i, widen_16(b + 2 + 16 * i));
    }
    static __m256i signs(const uint8_t* b) { return signs_of_words(load_256(b + 66)); }
    static void scales(const uint8_t* b, float* scale) {
        store_half_scales(scale, half_at(b), _mm256_srli_epi32(load_256(b + 66), 28), 0.5f);
    }
};

struct LookupIQ2_XXS {
    static constexpr Type type = Type::IQ2_XXS;
    static const uint64_t* table() { return tables.iq2_xxs; }
    static __m256i apply(__m256i g, __m256i sign) { return with_sign<43>(g, sign); }
    // pairs of words: four indices (0), then signs and scale (1)
    static __m256i words(const uint8_t* b, bool second) {
        const __m256 x = _mm256_castsi256_ps(load_256(b + 2)), y = _mm256_castsi256_ps(load_256(b + 34));
        const __m256 of_four = second ? _mm256_shuffle_ps(x, y, 0xdd) : _mm256_shuffle_ps(x, y, 0x88);
        return _mm256_permute4x64_epi64(_mm256_castps_si256(of_four), 0xd8);
    }
    static void indices(const uint8_t* b, uint16_t* index) {
        const __m256i bytes = words(b, false);
        store_256(index, _mm256_cvtepu8_epi16(_mm256_castsi256_si128(bytes)));
        store_256(index + 16, _mm256_cvtepu8_epi16(_mm256_extracti128_si256(bytes, 1)));
    }
    static __m256i signs(const uint8_t* b) { return signs_of_words(words(b, true)); }
    static void scales(const uint8_t* b, float* scale) {
        store_half_scales(scale, half_at(b), _mm256_srli_epi32(words(b, true), 28), 0.25f);
    }
};

inline void store_nibble_scales(float* scale, float d, uint64_t packed) {
    store_half_scales(scale, d, nibbles_of(static_cast<uint32_t>(packed)), 0.25f);
    store_half_scales(scale + 8, d, nibbles_of(static_cast<uint32_t>(packed >> 32)), 0.25f);
}

struct LookupIQ2_XS {
    static constexpr Type type = Type::IQ2_XS;
    static const uint64_t* table() { return tables.iq2_xs; }
    static __m256i apply(__m256i g, __m256i sign) { return with_sign<43>(g, sign); }
    // words of 9 bits of index, 7 of signs
    static void indices(const uint8_t* b, uint16_t* index) {
        const __m256i mask = _mm256_set1_epi16(511);
        store_256(index, _mm256_and_si256(load_256(b + 2), mask));
        store_256(index + 16, _mm256_and_si256(load_256(b + 34), mask));
    }
    static __m256i signs(const uint8_t* b) {
        const __m256i x = _mm256_srli_epi16(load_256(b + 2), 9), y = _mm256_srli_epi16(load_256(b + 34), 9);
        return even_parity(_mm256_permute4x64_epi64(_mm256_packus_epi16(x, y), 0xd8));
    }
    static void scales(const uint8_t* b, float* scale) { store_nibble_scales(scale, half_at(b), load_u64(b + 66)); }
};

struct LookupIQ2_S {
    static constexpr Type type = Type::IQ2_S;
    static const uint64_t* table() { return tables.iq2_s; }
    static __m256i apply(__m256i g, __m256i sign) { return with_sign<43>(g, sign); }
    static void indices(const uint8_t* b, uint16_t* index) {
        const uint64_t top = load_u64(b + 66);
        const __m256i up = _mm256_set1_epi64x(0x0004001000400100);  // two bits each, to bits 8 and 9
        for (int i = 0; i < 2; i++) {
            const __m256i high = _mm256_and_si256(_mm256_mullo_epi16(spread_words(top, 4 * i, 4), up), _mm256_set1_epi16(0x300));
            store_256(index + 16 * i, _mm256_or_si256(widen_16(b + 2 + 16 * i), high));
        }
    }
    static __m256i signs(const uint8_t* b) { return load_256(b + 34); }
    static void scales(const uint8_t* b, float* scale) { store_nibble_scales(scale, half_at(b), load_u64(b + 74)); }
};

// Indices and signs to the plain arrays, scales to where they belong.
template <class Lookup>
inline void read_row(const uint8_t* row, const Tile& t, const LookupRow& r) {
    constexpr TypeInfo type = TYPE_INFO[static_cast<int>(Lookup::type)];
    constexpr int PER_BLOCK = 32 / sizeof(*Lookup::table());
    for (int i = 0; i < t.L; i++, row += type.block_bytes) {
        prefetch_ahead(row, type.block_bytes);
        Lookup::indices(row, r.index + 8 * PER_BLOCK * i);
        store_256(r.signs + 8 * i, Lookup::signs(row));
        Lookup::scales(row, r.scale + 8 * type.groups * i);
    }
    transpose_scales<type.groups>(r.scale, t.L, t.scale(0), t.step_bytes);
}

template <class Lookup>
void decode_row_lookup(const uint8_t* row, const Tile& t, uint8_t* memory) {
    const auto* table = Lookup::table();
    constexpr int PER_ENTRY = sizeof(*table) / 4, PER_BLOCK = 8 / PER_ENTRY;
    const LookupRow r(memory, t.L);
    read_row<Lookup>(row, t, r);
    for (int j = 0; j < t.L; j++) {
        __m256i* out = reinterpret_cast<__m256i*>(t.codes(j));
        const SegmentPointers<uint16_t> index(r.index, t.L, PER_BLOCK, j);
        const __m256i signs = words_at(SegmentPointers<uint32_t>(r.signs, t.L, 1, j));
        __m256i u[8];
#pragma GCC unroll 8
        for (int k = 0; k < PER_BLOCK; k++) look_up_entries(table, index, k, u + PER_ENTRY * k);
        _mm256_store_si256(out, Lookup::apply(u[0], sign_bytes<0>(signs)));
        _mm256_store_si256(out + 1, Lookup::apply(u[1], sign_bytes<1>(signs)));
        _mm256_store_si256(out + 2, Lookup::apply(u[2], sign_bytes<2>(signs)));
        _mm256_store_si256(out + 3, Lookup::apply(u[3], sign_bytes<3>(signs)));
        _mm256_store_si256(out + 4, Lookup::apply(u[4], sign_bytes<4>(signs)));
        _mm256_store_si256(out + 5, Lookup::apply(u[5], sign_bytes<5>(signs)));
        _mm256_store_si256(out + 6, Lookup::apply(u[6], sign_bytes<6>(signs)));
        _mm256_store_si256(out + 7, Lookup::apply(u[7], sign_bytes<7>(signs)));
    }
}

}  // namespace
}  // namespace strata

#endif
