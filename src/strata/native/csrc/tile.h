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

// A row decoded in its own order, on its way into a tile.
struct PlainRow {
    uint8_t* codes;    // [32 * n_blocks]
    float* scale;      // [8 * L * groups]
    float* minimum;    // [8 * L * groups]

    static size_t bytes(int L) { return static_cast<size_t>(L) * (STEP_BYTES + 2 * 2 * 4 * LANES); }
    PlainRow(uint8_t* memory, int L)
        : codes(memory),
          scale(reinterpret_cast<float*>(memory + static_cast<size_t>(L) * STEP_BYTES)),
          minimum(scale + static_cast<size_t>(L) * 2 * LANES) {}
};

#if defined(__AVX2__)

// Where the eight blocks of step j begin.
struct BlockPointers {
    const uint8_t* p[8];
    STRATA_INLINE BlockPointers(const Tile& t, const uint8_t* row, size_t block_bytes, int j) {
        if (7 * t.L + j < t.n_blocks) {
            const size_t L = t.L * block_bytes;
            const uint8_t *p0 = row + j * block_bytes, *p4 = p0 + 4 * L;
            p[0] = p0, p[1] = p0 + L, p[2] = p0 + 2 * L, p[3] = p0 + 3 * L;
            p[4] = p4, p[5] = p4 + L, p[6] = p4 + 2 * L, p[7] = p4 + 3 * L;
            return;
        }
        for (int s = 0; s < LANES; s++) p[s] = row + t.block(s, j) * block_bytes;
    }
};

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
        const BlockPointers block(t, plain, 32, j);
        for (int s = 0; s < LANES; s++) {
            const __m128i* p = reinterpret_cast<const __m128i*>(block.p[s]);
            low[s] = _mm_loadu_si128(p);
            high[s] = _mm_loadu_si128(p + 1);
        }
        __m256i v[8];
        transpose_8x4(low, v);
        transpose_8x4(high, v + 4);
        for (int i = 0; i < 8; i++) _mm256_store_si256(out + i, v[i]);
    }
}

// in [8][n] -> out [n][8]
inline void transpose_scales(const float* in, int n, float* out) {
    int c = 0;
    for (; c + 8 <= n; c += 8) {
        __m256 r[8], u[8];
        for (int s = 0; s < 8; s++) r[s] = _mm256_loadu_ps(in + n * s + c);
        for (int s = 0; s < 4; s++) {
            u[2 * s] = _mm256_unpacklo_ps(r[2 * s], r[2 * s + 1]);
            u[2 * s + 1] = _mm256_unpackhi_ps(r[2 * s], r[2 * s + 1]);
        }
        for (int half = 0; half < 2; half++) {
            const __m256 *a = u + 4 * half, *b = a + 2;
            r[4 * half] = _mm256_shuffle_ps(a[0], b[0], 0x44);
            r[4 * half + 1] = _mm256_shuffle_ps(a[0], b[0], 0xee);
            r[4 * half + 2] = _mm256_shuffle_ps(a[1], b[1], 0x44);
            r[4 * half + 3] = _mm256_shuffle_ps(a[1], b[1], 0xee);
        }
        for (int i = 0; i < 4; i++) {
            _mm256_store_ps(out + LANES * (c + i), _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
            _mm256_store_ps(out + LANES * (c + i + 4), _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
        }
    }
    for (; c < n; c++)
        for (int s = 0; s < LANES; s++) out[LANES * c + s] = in[n * s + c];
}

#else

inline void transpose_scales(const float* in, int n, float* out) {
    for (int c = 0; c < n; c++)
        for (int s = 0; s < LANES; s++) out[LANES * c + s] = in[n * s + c];
}

inline void interleave(const Tile& t, const uint8_t* plain) {
    for (int j = 0; j < t.L; j++)
        for (int s = 0; s < LANES; s++) {
            const uint8_t* from = plain + 32 * t.block(s, j);
            uint8_t* to = t.codes + static_cast<size_t>(j) * STEP_BYTES + 4 * s;
            for (int v = 0; v < 8; v++) std::memcpy(to + 32 * v, from + 4 * v, 4);
        }
}

#endif

// memory: PlainRow::bytes(L)
template <class Decoder>
void decode_row(const uint8_t* row, const Tile& t, uint8_t* memory) {
    constexpr TypeInfo type = TYPE_INFO[static_cast<int>(Decoder::type)];
    constexpr int GROUPS = type.groups, BLOCK_GROUPS = type.block_weights / 32 * GROUPS;
    const PlainRow plain(memory, t.L);
    uint8_t* u = plain.codes;
    float *scale = plain.scale, *minimum = plain.minimum;
    for (int n = t.n_blocks * 32 / type.block_weights; n > 0; n--) {
        Decoder::block(row, u, scale, minimum);
        row += type.block_bytes;
        u += type.block_weights;
        scale += BLOCK_GROUPS;
        if constexpr (type.has_min) minimum += BLOCK_GROUPS;
    }
    const int n = t.L * GROUPS;
    for (int i = t.n_blocks * GROUPS; i < LANES * n; i++) {
        plain.scale[i] = -0.0f;
        if constexpr (type.has_min) plain.minimum[i] = 0.0f;
    }
    transpose_scales(plain.scale, n, t.scale);
    if constexpr (type.has_min) transpose_scales(plain.minimum, n, t.minimum);
    interleave(t, plain.codes);
}

}  // namespace
}  // namespace strata
