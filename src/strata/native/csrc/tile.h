// One decoded weight row in the lane = segment layout of backend.h, and the generic row decoder.
#pragma once
#include "backend.h"
#include "decode_blocks.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace strata {
namespace {

// L steps, each: codes [8 vectors][8 lanes][4], scale f32 [groups][8], and minimum f32 [groups][8] for
// types that have one; whole cache lines.
struct Tile {
    uint8_t* steps;
    int step_bytes;
    int L;
    int n_blocks;

    static constexpr int bytes_of_step(int groups, bool has_min) {
        return (STEP_BYTES + 4 * LANES * groups * (has_min ? 2 : 1) + 63) / 64 * 64;
    }
    static int bytes_of_step(const TypeInfo& t) { return bytes_of_step(t.groups, t.has_min); }
    static size_t bytes(const TypeInfo& t, int L) { return static_cast<size_t>(L) * bytes_of_step(t); }
    Tile(const TypeInfo& t, int n_cols, uint8_t* memory)
        : steps(memory), step_bytes(bytes_of_step(t)), L(n_steps(n_cols)), n_blocks(n_cols / 32) {}

    uint8_t* codes(int j) const { return steps + static_cast<size_t>(step_bytes) * j; }
    float* scale(int j) const { return reinterpret_cast<float*>(codes(j) + STEP_BYTES); }
    float* minimum(int j, int groups) const { return scale(j) + LANES * groups; }
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
    for (int j = 0; j < t.L; j++) {
        __m256i* out = reinterpret_cast<__m256i*>(t.codes(j));
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

// in [8][L * GROUPS] -> vectors of 8, GROUPS of them at `out` and every `stride` bytes from there
template <int GROUPS>
inline void transpose_scales(const float* in, int L, float* out, size_t stride) {
    const int n = L * GROUPS;
    const auto to = [=](int c) {
        return reinterpret_cast<float*>(reinterpret_cast<uint8_t*>(out) + stride * (c / GROUPS)) + c % GROUPS * LANES;
    };
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
            _mm256_store_ps(to(c + i), _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
            _mm256_store_ps(to(c + i + 4), _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
        }
    }
    for (; c < n; c++)
        for (int s = 0; s < LANES; s++) to(c)[s] = in[n * s + c];
}

#else

template <int GROUPS>
inline void transpose_scales(const float* in, int L, float* out, size_t stride) {
    for (int j = 0; j < L; j++)
        for (int i = 0; i < GROUPS * LANES; i++) {
            float* to = reinterpret_cast<float*>(reinterpret_cast<uint8_t*>(out) + stride * j);
            to[i] = in[L * GROUPS * (i % LANES) + j * GROUPS + i / LANES];
        }
}

inline void interleave(const Tile& t, const uint8_t* plain) {
    for (int j = 0; j < t.L; j++)
        for (int s = 0; s < LANES; s++) {
            const uint8_t* from = plain + 32 * t.block(s, j);
            uint8_t* to = t.codes(j) + 4 * s;
            for (int v = 0; v < 8; v++) std::memcpy(to + 32 * v, from + 4 * v, 4);
        }
}

#endif

// Rows follow each other, so what is read next lies a little ahead; a step reads in eight places, too
// many for the hardware to foresee (from memory, one thread: 1.4 to 1.7 times faster on Zen 3).
constexpr int PREFETCH_BYTES = 4096;

inline void prefetch_ahead(const uint8_t* p, int n_bytes) {
    for (int i = 0; i < n_bytes; i += 64) __builtin_prefetch(p + PREFETCH_BYTES + i);
}

// memory: PlainRow::bytes(L)
template <class Decoder>
void decode_row(const uint8_t* row, const Tile& t, uint8_t* memory) {
    constexpr TypeInfo type = TYPE_INFO[static_cast<int>(Decoder::type)];
    constexpr int GROUPS = type.groups, BLOCK_GROUPS = type.block_weights / 32 * GROUPS;
    const PlainRow plain(memory, t.L);
    uint8_t* u = plain.codes;
    float *scale = plain.scale, *minimum = plain.minimum;
    for (int n = t.n_blocks * 32 / type.block_weights; n > 0; n--) {
        prefetch_ahead(row, type.block_bytes);
        Decoder::block(row, u, scale, minimum);
        row += type.block_bytes;
        u += type.block_weights;
        scale += BLOCK_GROUPS;
        if constexpr (type.has_min) minimum += BLOCK_GROUPS;
    }
    for (int i = t.n_blocks * GROUPS; i < LANES * t.L * GROUPS; i++) {
        plain.scale[i] = -0.0f;
        if constexpr (type.has_min) plain.minimum[i] = 0.0f;
    }
    transpose_scales<GROUPS>(plain.scale, t.L, t.scale(0), t.step_bytes);
    if constexpr (type.has_min)
        transpose_scales<GROUPS>(plain.minimum, t.L, t.minimum(0, GROUPS), t.step_bytes);
    interleave(t, plain.codes);
}

}  // namespace
}  // namespace strata
