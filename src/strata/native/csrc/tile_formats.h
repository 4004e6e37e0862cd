// Matrices in tiles (docs/decisions/003-tiles.md): what each weight type's tiles hold and where the planes
// begin. The same numbers as strata/formats/tile_formats.py; a test compares them.
#pragma once
#include "tables.h"
#include "weight_types.h"

namespace strata {

inline constexpr int TILE_ROWS = 16, TILE_SUPER_COLS = 256;

enum class TileScale : int { F16, SUPER_U8, SUPER_I8, E8M0, UE4M3 };

inline constexpr int8_t IQ1_LEVELS[16] = {-9, -7, -1, 1, 7, 9};
inline constexpr int8_t IQ2_LEVELS[16] = {-43, -25, -8, 8, 25, 43};
inline constexpr int8_t IQ3_XXS_LEVELS[16] = {-62, -52, -44, -36, -28, -20, -12, -4,
                                              4, 12, 20, 28, 36, 44, 52, 62};
inline constexpr int8_t FP4_LEVELS[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Code, group and minimum are those of TypeInfo, except that 8-bit tiles store c + 128.
struct TileInfo {
    int bits;             // of a stored code; 0: the type has no tiles
    const int8_t* table;  // codes of the 16 stored values, or null
    TileScale scale;
    int block_shift;      // F16: one scale for 2^block_shift blocks
    float factor;         // SUPER
};

STRATA_INLINE constexpr TileInfo tile_info(Type type) {
    using S = TileScale;
    switch (type) {
        case Type::Q8_0: case Type::Q5_0: case Type::Q5_1: return {8, nullptr, S::F16, 0, 1.0f};
        case Type::Q4_0: case Type::Q4_1: return {4, nullptr, S::F16, 0, 1.0f};
        case Type::Q2_0: return {2, nullptr, S::F16, 1, 1.0f};
        case Type::TQ1_0: case Type::TQ2_0: return {2, nullptr, S::F16, 3, 1.0f};
        case Type::Q2_K: return {2, nullptr, S::SUPER_U8, 0, 1.0f};
        case Type::Q3_K: return {4, nullptr, S::SUPER_I8, 0, 1.0f};
        case Type::Q4_K: case Type::IQ3_S: return {4, nullptr, S::SUPER_U8, 0, 1.0f};
        case Type::Q5_K: return {8, nullptr, S::SUPER_U8, 0, 1.0f};
        case Type::Q6_K: return {8, nullptr, S::SUPER_I8, 0, 1.0f};
        case Type::IQ1_S: case Type::IQ1_M: return {4, IQ1_LEVELS, S::SUPER_U8, 0, 0.125f};
        case Type::IQ2_XXS: case Type::IQ2_XS: case Type::IQ2_S: return {4, IQ2_LEVELS, S::SUPER_U8, 0, 0.125f};
        case Type::IQ3_XXS: return {4, IQ3_XXS_LEVELS, S::SUPER_U8, 0, 0.25f};
        case Type::IQ4_NL: return {4, IQ4_CODES, S::F16, 0, 1.0f};
        case Type::IQ4_XS: return {4, IQ4_CODES, S::SUPER_I8, 0, 1.0f};
        case Type::MXFP4: return {4, FP4_LEVELS, S::E8M0, 0, 1.0f};
        case Type::NVFP4: return {4, FP4_LEVELS, S::UE4M3, 0, 1.0f};
        default: return {0, nullptr, S::F16, 0, 1.0f};
    }
}

// Offsets of the planes of a matrix [n_rows, n_cols], bytes from its start; -1: none. The strides lead
// from one tile row to the next; the supers of the minimums follow those of the scales.
struct TilePlanes {
    int64_t codes, scales, minimums, supers, super_minimums, n_bytes;
    int64_t codes_stride, scales_stride, supers_stride;
};

STRATA_INLINE TilePlanes tile_planes(Type type, int n_rows, int n_cols) {
    constexpr int64_t ALIGN = 128;
    const TypeInfo& t = info(type);
    const TileInfo form = tile_info(type);
    const int64_t tile_rows = (n_rows + TILE_ROWS - 1) / TILE_ROWS, n_blocks = n_cols / 32;
    const bool f16 = form.scale == TileScale::F16;
    const bool super = form.scale == TileScale::SUPER_U8 || form.scale == TileScale::SUPER_I8;
    const int64_t run = int64_t{1} << form.block_shift;
    TilePlanes p;
    p.codes_stride = 4 * TILE_ROWS * form.bits * n_blocks;
    p.scales_stride = TILE_ROWS * (f16 ? 2 * ((n_blocks + run - 1) / run) : t.groups * n_blocks);
    p.supers_stride = 2 * TILE_ROWS * (n_cols / TILE_SUPER_COLS);
    p.n_bytes = 0;
    const auto place = [&](int64_t n_bytes, bool wanted) -> int64_t {
        if (!wanted) return -1;
        const int64_t start = p.n_bytes;
        p.n_bytes = (start + n_bytes + ALIGN - 1) / ALIGN * ALIGN;
        return start;
    };
    p.codes = place(p.codes_stride * tile_rows, true);
    p.scales = place(p.scales_stride * tile_rows, true);
    p.minimums = place(p.scales_stride * tile_rows, t.has_min);
    p.supers = place(p.supers_stride * tile_rows * (t.has_min ? 2 : 1), super);
    p.super_minimums = super && t.has_min ? p.supers + p.supers_stride * tile_rows : -1;
    return p;
}

}  // namespace strata
