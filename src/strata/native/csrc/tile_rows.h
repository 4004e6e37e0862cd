// Products of a matrix in tiles with activation rows: numerics contract, section 3, 16 rows in lanes.
#pragma once
#include "tile_lanes.h"

namespace strata {
namespace {

// Activation rows of one pass over a tile row: in registers; or, four after four, over two tile rows.
constexpr int TILE_TOKENS = 4, MANY_TOKENS = 16;

// One tile row's part of each plane.
struct TileRow {
    const uint8_t *codes, *scales, *minimums, *supers, *super_minimums;
};

// Scales (or minimums) of a tile row, block by block.
template <class K>
struct TileScales {
    static constexpr TileScale KIND = K::form.scale;
    static constexpr bool SUPER = KIND == TileScale::SUPER_U8 || KIND == TileScale::SUPER_I8;
    const uint8_t *plane, *supers;
    int block_shift;
    Floats d[PARTS];

    // before the first block of a segment, and before every block that begins a super-block
    void load_super(int b) {
        if constexpr (SUPER)
            for (int part = 0; part < PARTS; part++) {
                d[part] = load_halves(supers + 2 * (TILE_ROWS * (b / 8) + PART_ROWS * part));
                if constexpr (K::form.factor != 1.0f) d[part] = times(d[part], all(K::form.factor));
            }
    }

    Floats at(int b, int g, int part) const {
        if constexpr (KIND == TileScale::F16)
            return load_halves(plane + 2 * (TILE_ROWS * static_cast<size_t>(b >> block_shift) + PART_ROWS * part));
        const uint8_t* p = plane + TILE_ROWS * (static_cast<size_t>(b) * K::GROUPS + g) + PART_ROWS * part;
        if constexpr (KIND == TileScale::SUPER_U8) return times(d[part], to_floats(load_u8(p)));
        if constexpr (KIND == TileScale::SUPER_I8) return times(d[part], to_floats(load_i8(p)));
        if constexpr (KIND == TileScale::E8M0) return from_e8m0(p);
        // a byte of NVFP4 moved up is an f16 2^8 too small; half of its value is wanted
        if constexpr (KIND == TileScale::UE4M3) return times(from_ue4m3(p), all(128.0f));
    }
};

// Memory is read front to back, but a segment is short: the codes some blocks ahead are asked for.
#ifndef STRATA_TILE_AHEAD
#define STRATA_TILE_AHEAD 8192
#endif
constexpr int TILE_AHEAD_BYTES = STRATA_TILE_AHEAD;

// y [T][16]
template <Type TYPE, int T>
void tile_row(const TileRow& row, int n_blocks, int block_shift, const void* const* activations, float* y) {
    using K = TileKind<TYPE>;
    constexpr int BLOCK_BYTES = 4 * TILE_ROWS * K::BITS;
    const CodeTable<K> table;
    TileScales<K> scales{row.scales, row.supers, block_shift, {}};
    TileScales<K> minimums{row.minimums, row.super_minimums, block_shift, {}};
    const int L = (n_blocks + LANES - 1) / LANES;
    Floats sums[LANES][T][PARTS];
    for (int s = 0; s < LANES; s++) {
        Floats p[T][PARTS];
        for (int t = 0; t < T; t++)
            for (int part = 0; part < PARTS; part++) p[t][part] = zeros();
        const int first = s * L, end = first + L < n_blocks ? first + L : n_blocks;
        for (int b = first; b < end; b++) {
            const uint8_t* codes = row.codes + static_cast<size_t>(BLOCK_BYTES) * b;
            for (int i = 0; i < BLOCK_BYTES; i += 64) __builtin_prefetch(codes + TILE_AHEAD_BYTES + i);
            if (b == first || b % 8 == 0) {
                scales.load_super(b);
                if constexpr (K::MIN) minimums.load_super(b);
            }
            const QuantizedStep* x[T];
            const int8_t* q[T];
            for (int t = 0; t < T; t++) {
                x[t] = static_cast<const QuantizedStep*>(activations[t]) + (b - first);
                q[t] = x[t]->block[s];
            }
#pragma GCC unroll 2
            for (int g = 0; g < K::GROUPS; g++) {
                int32_t sum[T];
                for (int t = 0; t < T; t++) sum[t] = K::GROUPS == 1 ? x[t]->sum[0][s] : x[t]->half[g][s];
                Ints dot[PARTS][T];
                int_dots_16<K, T>(codes, g, table, q, sum, dot);
#pragma GCC unroll 2
                for (int part = 0; part < PARTS; part++) {
                    const Floats s_w = scales.at(b, g, part);
                    for (int t = 0; t < T; t++)
                        p[t][part] = fused(to_floats(dot[part][t]), times(all(x[t]->scale[s]), s_w), p[t][part]);
                    if constexpr (K::MIN) {
                        const Floats m_w = minimums.at(b, g, part);
                        for (int t = 0; t < T; t++)
                            p[t][part] = fused_minus(all_of(K::GROUPS == 1 ? &x[t]->sum[0][s] : &x[t]->half[g][s]),
                                                     times(all(x[t]->scale[s]), m_w), p[t][part]);
                    }
                }
            }
        }
        for (int t = 0; t < T; t++)
            for (int part = 0; part < PARTS; part++) sums[s][t][part] = p[t][part];
    }
    for (int t = 0; t < T; t++)
        for (int part = 0; part < PARTS; part++) {
            const auto p = [&](int s) { return sums[s][t][part]; };
            store(y + TILE_ROWS * t + PART_ROWS * part,
                  plus(plus(plus(p(0), p(1)), plus(p(2), p(3))), plus(plus(p(4), p(5)), plus(p(6), p(7)))));
        }
}

#if defined(STRATA_MANY_ROWS)

// A group of a block of 16 W weight rows against activation rows, partial sums p in memory.
template <class K, int W>
struct ManyBlock {
    GroupCodes<K> w[W];
    Floats s_w[W], m_w[W];
    int s, g, step;

    template <int R>
    STRATA_INLINE void rows(const void* const* activations, float (*p)[W][TILE_ROWS]) const {
        const int8_t* q[R];
        const float* scale[R];
        const int32_t* sum[R];
        int32_t sums[R];
        for (int r = 0; r < R; r++) {
            const QuantizedStep& x = static_cast<const QuantizedStep*>(activations[r])[step];
            q[r] = x.block[s] + 4 * K::N * g;
            scale[r] = x.scale + s;
            sum[r] = (K::GROUPS == 1 ? x.sum[0] : x.half[g]) + s;
            sums[r] = *sum[r];
        }
        Ints dot[W][R];
        group_dots<K, W, R>(w, q, sums, dot);
        for (int r = 0; r < R; r++)
            for (int i = 0; i < W; i++) {
                Floats part = fused(to_floats(dot[i][r]), times(all(*scale[r]), s_w[i]), load(p[r][i]));
                if constexpr (K::MIN) part = fused_minus(all_of(sum[r]), times(all(*scale[r]), m_w[i]), part);
                store(p[r][i], part);
            }
    }
};

// The same for W tile rows and up to MANY_TOKENS activation rows, asking `ahead` bytes ahead; y [W][T][16]
template <Type TYPE, int W>
void tile_row_many(const TileRow* rows, int n_blocks, int block_shift, const void* const* activations, int T,
                   int64_t ahead, float* y) {
    using K = TileKind<TYPE>;
    constexpr int BLOCK_BYTES = 4 * TILE_ROWS * K::BITS;
    const CodeTable<K> table;
    TileScales<K> scales[W], minimums[W];
    for (int i = 0; i < W; i++) {
        scales[i] = {rows[i].scales, rows[i].supers, block_shift, {}};
        minimums[i] = {rows[i].minimums, rows[i].super_minimums, block_shift, {}};
    }
    const int L = (n_blocks + LANES - 1) / LANES;
    alignas(64) float sums[LANES][MANY_TOKENS][W][TILE_ROWS];
    for (int s = 0; s < LANES; s++) {
        auto* p = sums[s];
        for (int t = 0; t < T; t++)
            for (int i = 0; i < W; i++) store(p[t][i], zeros());
        const int first = s * L, end = first + L < n_blocks ? first + L : n_blocks;
        for (int b = first; b < end; b++)
            for (int g = 0; g < K::GROUPS; g++) {
                ManyBlock<K, W> block;
                block.s = s, block.g = g, block.step = b - first;
                for (int i = 0; i < W; i++) {
                    const uint8_t* codes = rows[i].codes + static_cast<size_t>(BLOCK_BYTES) * b;
                    if (g == 0) {
                        for (int line = 0; line < BLOCK_BYTES; line += 64) __builtin_prefetch(codes + ahead + line);
                        if (b == first || b % 8 == 0) {
                            scales[i].load_super(b);
                            if constexpr (K::MIN) minimums[i].load_super(b);
                        }
                    }
                    block.w[i].load(codes, g, table);
                    block.s_w[i] = scales[i].at(b, g, 0);
                    if constexpr (K::MIN) block.m_w[i] = minimums[i].at(b, g, 0);
                }
                int t = 0;
                for (; t + 4 <= T; t += 4) block.template rows<4>(activations + t, p + t);
                if (T - t == 3) block.template rows<3>(activations + t, p + t);
                if (T - t == 2) block.template rows<2>(activations + t, p + t);
                if (T - t == 1) block.template rows<1>(activations + t, p + t);
            }
    }
    for (int i = 0; i < W; i++)
        for (int t = 0; t < T; t++) {
            const auto p = [&](int s) { return load(sums[s][t][i]); };
            store(y + TILE_ROWS * (T * i + t),
                  plus(plus(plus(p(0), p(1)), plus(p(2), p(3))), plus(plus(p(4), p(5)), plus(p(6), p(7)))));
        }
}

#endif

// One tile row, by number of activation rows; and one or two tile rows with many of them.
struct TileKernels {
    void (*few[TILE_TOKENS])(const TileRow&, int, int, const void* const*, float*);
#if defined(STRATA_MANY_ROWS)
    void (*many[2])(const TileRow*, int, int, const void* const*, int, int64_t, float*);
#endif
};

template <Type TYPE>
inline constexpr TileKernels TILE_KERNELS = {
    {tile_row<TYPE, 1>, tile_row<TYPE, 2>, tile_row<TYPE, 3>, tile_row<TYPE, 4>},
#if defined(STRATA_MANY_ROWS)
    {tile_row_many<TYPE, 1>, tile_row_many<TYPE, 2>},
#endif
};

// Types whose tiles differ only in what is read at run time share kernels.
inline const TileKernels* tile_kernels(Type type) {
    switch (type) {
        case Type::Q8_0: return &TILE_KERNELS<Type::Q8_0>;
        case Type::Q5_0: return &TILE_KERNELS<Type::Q5_0>;
        case Type::Q5_1: return &TILE_KERNELS<Type::Q5_1>;
        case Type::Q4_0: return &TILE_KERNELS<Type::Q4_0>;
        case Type::Q4_1: return &TILE_KERNELS<Type::Q4_1>;
        case Type::Q2_0: case Type::TQ1_0: case Type::TQ2_0: return &TILE_KERNELS<Type::Q2_0>;
        case Type::Q2_K: return &TILE_KERNELS<Type::Q2_K>;
        case Type::Q3_K: return &TILE_KERNELS<Type::Q3_K>;
        case Type::Q4_K: return &TILE_KERNELS<Type::Q4_K>;
        case Type::Q5_K: return &TILE_KERNELS<Type::Q5_K>;
        case Type::Q6_K: return &TILE_KERNELS<Type::Q6_K>;
        case Type::IQ1_S: return &TILE_KERNELS<Type::IQ1_S>;
        case Type::IQ1_M: return &TILE_KERNELS<Type::IQ1_M>;
        case Type::IQ2_XXS: return &TILE_KERNELS<Type::IQ2_XXS>;
        case Type::IQ2_XS: case Type::IQ2_S: return &TILE_KERNELS<Type::IQ2_XS>;
        case Type::IQ3_XXS: return &TILE_KERNELS<Type::IQ3_XXS>;
        case Type::IQ3_S: return &TILE_KERNELS<Type::IQ3_S>;
        case Type::IQ4_NL: return &TILE_KERNELS<Type::IQ4_NL>;
        case Type::IQ4_XS: return &TILE_KERNELS<Type::IQ4_XS>;
        case Type::MXFP4: return &TILE_KERNELS<Type::MXFP4>;
        case Type::NVFP4: return &TILE_KERNELS<Type::NVFP4>;
        default: return nullptr;
    }
}

// The tile row that holds row r (a multiple of 16) of the matrix at `matrix`.
inline TileRow tile_row_at(const TilePlanes& p, const uint8_t* matrix, int64_t r) {
    const int64_t t = r / TILE_ROWS;
    const auto part = [&](int64_t plane, int64_t stride) {
        return plane < 0 ? nullptr : matrix + plane + stride * t;
    };
    return {part(p.codes, p.codes_stride), part(p.scales, p.scales_stride), part(p.minimums, p.scales_stride),
            part(p.supers, p.supers_stride), part(p.super_minimums, p.supers_stride)};
}

// What all tile rows of a RowsArgs share.
struct TiledRows {
    const RowsArgs& a;
    const TilePlanes planes = tile_planes(a.type, a.tiled_rows, a.n_cols);
    const TileKernels& kernels = *tile_kernels(a.type);
    const int n_blocks = a.n_cols / 32, block_shift = tile_info(a.type).block_shift;
    TileRow at(int r) const { return tile_row_at(planes, a.rows, a.first_col + r); }
    // finish(a, r, n, t, y): results of n rows from r on for activation row t
    template <class Finish>
    void give(int r, int t, const float* y, Finish finish) const {
        finish(a, r, a.n_rows - r < TILE_ROWS ? a.n_rows - r : TILE_ROWS, t, y);
    }
};

#if defined(STRATA_MANY_ROWS)

// Passes of about as many activation rows each, four by four; while the later ones read tile rows from the
// cache, the next tile rows are on their way.
template <class Finish>
void many_rows(const TiledRows& m, Finish finish) {
    const RowsArgs& a = m.a;
    float y[2 * MANY_TOKENS * TILE_ROWS];
    for (int r = 0, n_rows; r < a.n_rows; r += n_rows) {
        const int W = a.n_rows - r > TILE_ROWS ? 2 : 1;
        n_rows = W * TILE_ROWS;
        const TileRow rows[2] = {m.at(r), W == 2 ? m.at(r + TILE_ROWS) : TileRow{}};
        int passes = (a.n_tokens + MANY_TOKENS - 1) / MANY_TOKENS;
        for (int t = 0, T; t < a.n_tokens; t += T, passes--) {
            T = ((a.n_tokens - t + passes - 1) / passes + 3) / 4 * 4;
            T = T < a.n_tokens - t ? T : a.n_tokens - t;
            const int64_t ahead = t == 0 ? TILE_AHEAD_BYTES : W * m.planes.codes_stride;
            m.kernels.many[W - 1](rows, m.n_blocks, m.block_shift, a.activations + t, T, ahead, y);
            for (int i = 0; i < W * T; i++) m.give(r + TILE_ROWS * (i / T), t + i % T, y + TILE_ROWS * i, finish);
        }
    }
}

#endif

// All rows of a.rows for a matrix in tiles.
template <class Finish>
void tiled_rows(const RowsArgs& a, Finish finish) {
    const TiledRows m{a};
#if defined(STRATA_MANY_ROWS)
    if (a.n_tokens > TILE_TOKENS) return many_rows(m, finish);
#endif
    float y[TILE_TOKENS * TILE_ROWS];
    for (int r = 0; r < a.n_rows; r += TILE_ROWS) {
        const TileRow row = m.at(r);
        for (int t = 0, T; t < a.n_tokens; t += T) {
            T = a.n_tokens - t < TILE_TOKENS ? a.n_tokens - t : TILE_TOKENS;
            m.kernels.few[T - 1](row, m.n_blocks, m.block_shift, a.activations + t, y);
            for (int i = 0; i < T; i++) m.give(r, t + i, y + TILE_ROWS * i, finish);
        }
    }
}

}  // namespace
}  // namespace strata
