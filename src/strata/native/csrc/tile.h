// One decoded weight row in the lane = segment layout of backend.h, and the generic row decoder.
#pragma once
#include "backend.h"
#include "decode_blocks.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace strata {
namespace {

struct Tile {
    uint8_t* codes;   // [L][8 vectors][8 lanes][4]
    float* scale;     // [L][groups][8]
    float* minimum;   // [L][groups][8]; only for types with a minimum
    int L;
    int n_blocks;

    static size_t bytes(const TypeInfo& t, int L) {
        const size_t step = STEP_BYTES + 4 * LANES * t.groups * (t.has_min ? 2 : 1);
        return (L * step + 63) / 64 * 64;
    }
    Tile(const TypeInfo& t, int n_cols, uint8_t* memory)
        : codes(memory), L(n_steps(n_cols)), n_blocks(n_cols / 32) {
        scale = reinterpret_cast<float*>(codes + static_cast<size_t>(L) * STEP_BYTES);
        minimum = scale + static_cast<size_t>(L) * LANES * t.groups;
    }
    // Block of segment s at step j; past the end, any valid block will do.
    int block(int s, int j) const {
        const int b = s * L + j;
        return b < n_blocks ? b : n_blocks - 1;
    }
};

// Walks the blocks of a row in order: segment s, step j.
struct Cursor {
    int L, s = 0, j = 0;
    explicit Cursor(int steps) : L(steps) {}
    void next() {
        if (++j == L) {
            j = 0;
            s++;
        }
    }
};

inline void end_scales(const Tile& t, const TypeInfo& type, Cursor at) {
    for (; at.s < LANES; at.next())
        for (int g = 0; g < type.groups; g++) {
            const size_t i = (static_cast<size_t>(at.j) * type.groups + g) * LANES + at.s;
            t.scale[i] = -0.0f;
            if (type.has_min) t.minimum[i] = 0.0f;
        }
}

#if defined(__AVX2__)

// Eight rows of four dwords (one row per segment) -> four vectors with one segment per lane.
inline void transpose_8x4(const __m128i r[8], __m256i out[4]) {
    const __m256i y0 = _mm256_inserti128_si256(_mm256_castsi128_si256(r[0]), r[4], 1);
    const __m256i y1 = _mm256_inserti128_si256(_mm256_castsi128_si256(r[1]), r[5], 1);
    const __m256i y2 = _mm256_inserti128_si256(_mm256_castsi128_si256(r[2]), r[6], 1);
    const __m256i y3 = _mm256_inserti128_si256(_mm256_castsi128_si256(r[3]), r[7], 1);
    const __m256i t0 = _mm256_unpacklo_epi32(y0, y1), t1 = _mm256_unpackhi_epi32(y0, y1);
    const __m256i t2 = _mm256_unpacklo_epi32(y2, y3), t3 = _mm256_unpackhi_epi32(y2, y3);
    out[0] = _mm256_unpacklo_epi64(t0, t2);
    out[1] = _mm256_unpackhi_epi64(t0, t2);
    out[2] = _mm256_unpacklo_epi64(t1, t3);
    out[3] = _mm256_unpackhi_epi64(t1, t3);
}

inline void interleave(const Tile& t, const uint8_t* plain) {
    __m256i* out = reinterpret_cast<__m256i*>(t.codes);
    for (int j = 0; j < t.L; j++, out += 8) {
        __m128i low[8], high[8];
        for (int s = 0; s < LANES; s++) {
            const __m128i* p = reinterpret_cast<const __m128i*>(plain + 32 * t.block(s, j));
            low[s] = _mm_loadu_si128(p);
            high[s] = _mm_loadu_si128(p + 1);
        }
        __m256i v[8];
        transpose_8x4(low, v);
        transpose_8x4(high, v + 4);
        for (int i = 0; i < 8; i++) _mm256_store_si256(out + i, v[i]);
    }
}

#else

inline void interleave(const Tile& t, const uint8_t* plain) {
    for (int j = 0; j < t.L; j++)
        for (int s = 0; s < LANES; s++) {
            const uint8_t* from = plain + 32 * t.block(s, j);
            uint8_t* to = t.codes + static_cast<size_t>(j) * STEP_BYTES + 4 * s;
            for (int v = 0; v < 8; v++) std::memcpy(to + 32 * v, from + 4 * v, 4);
        }
}

#endif

// plain: room for one row of codes.
template <class Decoder>
void decode_row(const uint8_t* row, const Tile& t, uint8_t* plain) {
    constexpr TypeInfo type = TYPE_INFO[static_cast<int>(Decoder::type)];
    constexpr int BLOCKS = type.block_weights / 32, GROUPS = type.groups;
    Cursor at(t.L);
    uint8_t* u = plain;
    for (int b = 0; b < t.n_blocks; b += BLOCKS, row += type.block_bytes, u += type.block_weights) {
        float scale[BLOCKS * GROUPS], minimum[BLOCKS * GROUPS];
        Decoder::block(row, u, scale, minimum);
        for (int i = 0; i < BLOCKS; i++, at.next())
            for (int g = 0; g < GROUPS; g++) {
                const size_t to = (static_cast<size_t>(at.j) * GROUPS + g) * LANES + at.s;
                t.scale[to] = scale[i * GROUPS + g];
                if constexpr (type.has_min) t.minimum[to] = minimum[i * GROUPS + g];
            }
    }
    end_scales(t, type, at);
    interleave(t, plain);
}

}  // namespace
}  // namespace strata
