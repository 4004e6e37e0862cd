// Products of a matrix in tiles with activation rows: numerics contract, section 3, 16 rows in lanes.
#pragma once
#include "tile_lanes.h"

namespace strata {
namespace {

constexpr int TILE_TOKENS = 4;

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
                q[t] = x[t]->q + 4 * s;
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
                            p[t][part] = fused_minus(all(static_cast<float>(sum[t])),
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

using TileRowKernel = void (*)(const TileRow&, int, int, const void* const*, float*);

template <Type TYPE>
TileRowKernel tile_kernel_of(int n_tokens) {
    switch (n_tokens) {
        case 1: return tile_row<TYPE, 1>;
        case 2: return tile_row<TYPE, 2>;
        case 3: return tile_row<TYPE, 3>;
        default: return tile_row<TYPE, 4>;
    }
}

// Types whose tiles differ only in what is read at run time share a kernel.
inline TileRowKernel tile_kernel_of(Type type, int n_tokens) {
    switch (type) {
        case Type::Q8_0: return tile_kernel_of<Type::Q8_0>(n_tokens);
        case Type::Q5_0: return tile_kernel_of<Type::Q5_0>(n_tokens);
        case Type::Q5_1: return tile_kernel_of<Type::Q5_1>(n_tokens);
        case Type::Q4_0: return tile_kernel_of<Type::Q4_0>(n_tokens);
        case Type::Q4_1: return tile_kernel_of<Type::Q4_1>(n_tokens);
        case Type::Q2_0: case Type::TQ1_0: case Type::TQ2_0: return tile_kernel_of<Type::Q2_0>(n_tokens);
        case Type::Q2_K: return tile_kernel_of<Type::Q2_K>(n_tokens);
        case Type::Q3_K: return tile_kernel_of<Type::Q3_K>(n_tokens);
        case Type::Q4_K: return tile_kernel_of<Type::Q4_K>(n_tokens);
        case Type::Q5_K: return tile_kernel_of<Type::Q5_K>(n_tokens);
        case Type::Q6_K: return tile_kernel_of<Type::Q6_K>(n_tokens);
        case Type::IQ1_S: return tile_kernel_of<Type::IQ1_S>(n_tokens);
        case Type::IQ1_M: return tile_kernel_of<Type::IQ1_M>(n_tokens);
        case Type::IQ2_XXS: return tile_kernel_of<Type::IQ2_XXS>(n_tokens);
        case Type::IQ2_XS: case Type::IQ2_S: return tile_kernel_of<Type::IQ2_XS>(n_tokens);
        case Type::IQ3_XXS: return tile_kernel_of<Type::IQ3_XXS>(n_tokens);
        case Type::IQ3_S: return tile_kernel_of<Type::IQ3_S>(n_tokens);
        case Type::IQ4_NL: return tile_kernel_of<Type::IQ4_NL>(n_tokens);
        case Type::IQ4_XS: return tile_kernel_of<Type::IQ4_XS>(n_tokens);
        case Type::MXFP4: return tile_kernel_of<Type::MXFP4>(n_tokens);
        case Type::NVFP4: return tile_kernel_of<Type::NVFP4>(n_tokens);
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

// All rows of a.rows for a matrix in tiles; finish(a, r, t, y) takes each result.
template <class Finish>
void tiled_rows(const RowsArgs& a, Finish finish) {
    const TilePlanes planes = tile_planes(a.type, a.tiled_rows, a.n_cols);
    const int shift = tile_info(a.type).block_shift;
    for (int r0 = 0; r0 < a.n_rows; r0 += TILE_ROWS) {
        const TileRow row = tile_row_at(planes, a.rows, a.first_col + r0);
        const int n = a.n_rows - r0 < TILE_ROWS ? a.n_rows - r0 : TILE_ROWS;
        for (int t = 0; t < a.n_tokens; t += TILE_TOKENS) {
            const int n_tokens = a.n_tokens - t < TILE_TOKENS ? a.n_tokens - t : TILE_TOKENS;
            float y[TILE_TOKENS * TILE_ROWS];
            tile_kernel_of(a.type, n_tokens)(row, a.n_cols / 32, shift, a.activations + t, y);
            for (int i = 0; i < n_tokens; i++)
                for (int r = 0; r < n; r++) finish(a, r0 + r, t + i, y[TILE_ROWS * i + r]);
        }
    }
}

}  // namespace
}  // namespace strata
