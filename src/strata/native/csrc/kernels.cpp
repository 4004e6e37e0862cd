// One instruction set's backend. Compiled once per set with its flags and STRATA_BACKEND = its getter.
#include "activate.h"
#include "attention.h"
#include "backend.h"
#include "decode_avx512.h"
#include "decode_grids.h"
#include "decode_lookup_x86.h"
#include "decode_x86.h"
#include "dot.h"
#include "float_rows.h"
#include "gdn.h"
#include "quantize.h"
#include "tile.h"
#include "tile_rows.h"

namespace strata {
namespace {

using DecodeRow = void (*)(const uint8_t* row, const Tile& tile, uint8_t* memory);

#if defined(__AVX2__)
template <class Lookup>
DecodeRow decoder_by_lookup() {
#if defined(__AVX512VNNI__)
    if constexpr (Lookup::type == Type::IQ3_S || Lookup::type == Type::IQ3_XXS)
        if (has_vbmi()) return decode_row_vbmi<Lookup>;
#endif
    return decode_row_lookup<Lookup>;
}
#endif

DecodeRow decoder_of(Type type) {
    switch (type) {
#if defined(__AVX2__)
        case Type::Q4_0: return decode_row_steps<StepQ4_0>;
        case Type::Q4_1: return decode_row_steps<StepQ4_1>;
        case Type::Q8_0: return decode_row_steps<StepQ8_0>;
        case Type::IQ4_NL: return decode_row_steps<StepIQ4_NL>;
        case Type::MXFP4: return decode_row_steps<StepMXFP4>;
        case Type::Q2_0: return decode_row_q2_0;
        case Type::IQ4_XS: return decode_row_iq4_xs;
        case Type::IQ2_XXS: return decoder_by_lookup<LookupIQ2_XXS>();
        case Type::IQ2_XS: return decoder_by_lookup<LookupIQ2_XS>();
        case Type::IQ2_S: return decoder_by_lookup<LookupIQ2_S>();
        case Type::IQ3_XXS: return decoder_by_lookup<LookupIQ3_XXS>();
        case Type::IQ3_S: return decoder_by_lookup<LookupIQ3_S>();
#else
        case Type::Q4_0: return decode_row<DecodeQ4_0>;
        case Type::Q4_1: return decode_row<DecodeQ4_1>;
        case Type::Q8_0: return decode_row<DecodeQ8_0>;
        case Type::IQ4_NL: return decode_row<DecodeIQ4_NL>;
        case Type::MXFP4: return decode_row<DecodeMXFP4>;
        case Type::Q2_0: return decode_row<DecodeQ2_0>;
        case Type::IQ4_XS: return decode_row<DecodeIQ4_XS>;
        case Type::IQ2_XXS: return decode_row<DecodeIQ2_XXS>;
        case Type::IQ2_XS: return decode_row<DecodeIQ2_XS>;
        case Type::IQ2_S: return decode_row<DecodeIQ2_S>;
        case Type::IQ3_XXS: return decode_row<DecodeIQ3_XXS>;
        case Type::IQ3_S: return decode_row<DecodeIQ3_S>;
#endif
        case Type::Q5_0: return decode_row<DecodeQ5_0>;
        case Type::Q5_1: return decode_row<DecodeQ5_1>;
        case Type::Q2_K: return decode_row<DecodeQ2_K>;
        case Type::Q3_K: return decode_row<DecodeQ3_K>;
        case Type::Q4_K: return decode_row<DecodeQ4_K>;
        case Type::Q5_K: return decode_row<DecodeQ5_K>;
        case Type::Q6_K: return decode_row<DecodeQ6_K>;
        case Type::IQ1_S: return decode_row<DecodeIQ1_S>;
        case Type::IQ1_M: return decode_row<DecodeIQ1_M>;
        case Type::TQ1_0: return decode_row<DecodeTQ1_0>;
        case Type::TQ2_0: return decode_row<DecodeTQ2_0>;
        case Type::NVFP4: return decode_row<DecodeNVFP4>;
        default: return nullptr;
    }
}

// Tiles of one pass over the tokens: few rows for few tokens (the row is read once anyway), more for
// many, so that an activation row is read once per pass; all of them fit the L2 cache.
constexpr size_t PASS_BYTES = 64 << 10;

int rows_per_pass(size_t tile_bytes, int n_tokens, int most) {
    if (n_tokens <= MAX_TOKENS) return 1;
    const size_t fit = PASS_BYTES / tile_bytes;
    return fit < 1 ? 1 : fit > static_cast<size_t>(most) ? most : static_cast<int>(fit);
}

constexpr int MOST_ROWS = 16;

size_t tile_bytes_of(Type type, int n_cols) {
    const TypeInfo& t = info(type);
    return t.quantized() ? Tile::bytes(t, n_steps(n_cols))
                         : (sizeof(float) * padded_32(n_cols) + 63) / 64 * 64;
}

size_t scratch_bytes(Type type, int n_cols, int n_tokens) {
    const size_t tile = tile_bytes_of(type, n_cols);
    return tile * rows_per_pass(tile, n_tokens, MOST_ROWS) + PlainRow::bytes(n_steps(n_cols));
}

inline void finish(const RowsArgs& a, int r, int t, float y) {
    y = y * a.scale;
    if (a.bias) y = y + load_f32(a.bias + 4 * static_cast<size_t>(r));
    a.out[t][a.first_col + r] = y;
}

// Of rows r .. r + n - 1, n <= 16: whole vectors but for a matrix's last rows.
inline void finish_tile(const RowsArgs& a, int r, int n, int t, const float* __restrict y) {
    float* __restrict out = a.out[t] + a.first_col + r;
    const uint8_t* __restrict bias = a.bias ? a.bias + 4 * static_cast<size_t>(r) : nullptr;
    const float scale = a.scale;
    if (n == TILE_ROWS && !bias) {
        for (int i = 0; i < TILE_ROWS; i++) out[i] = y[i] * scale;
        return;
    }
    for (int i = 0; i < n; i++) {
        const float x = y[i] * scale;
        out[i] = bias ? x + load_f32(bias + 4 * i) : x;
    }
}

void quantized_rows(const RowsArgs& a, uint8_t* scratch) {
    const TypeInfo& type = info(a.type);
    const DecodeRow decode = decoder_of(a.type);
    const size_t tile_bytes = tile_bytes_of(a.type, a.n_cols);
    const int pass = rows_per_pass(tile_bytes, a.n_tokens, MOST_ROWS);
    uint8_t* plain = scratch + tile_bytes * pass;
    for (int r0 = 0; r0 < a.n_rows; r0 += pass) {
        const int n = a.n_rows - r0 < pass ? a.n_rows - r0 : pass;
        for (int r = 0; r < n; r++)
            decode(a.rows + a.row_bytes * (r0 + r), Tile(type, a.n_cols, scratch + tile_bytes * r), plain);
        for (int t = 0; t < a.n_tokens; t += MAX_TOKENS) {
            const int n_tokens = a.n_tokens - t < MAX_TOKENS ? a.n_tokens - t : MAX_TOKENS;
            const DotTile dot = dot_of(type, n_tokens);
            for (int r = 0; r < n; r++) {
                float y[MAX_TOKENS];
                dot(Tile(type, a.n_cols, scratch + tile_bytes * r), a.activations + t, type.mul, type.bias, y);
                for (int i = 0; i < n_tokens; i++) finish(a, r0 + r, t + i, y[i]);
            }
        }
    }
}

void float_rows(const RowsArgs& a, uint8_t* scratch) {
    const int n_padded = padded_32(a.n_cols);
    const size_t tile_bytes = tile_bytes_of(a.type, a.n_cols);
    const int pass = rows_per_pass(tile_bytes, a.n_tokens, MOST_ROWS);
    const bool in_place = a.type == Type::F32 && n_padded == a.n_cols &&
                          reinterpret_cast<uintptr_t>(a.rows) % alignof(float) == 0;
    for (int r0 = 0; r0 < a.n_rows; r0 += pass) {
        const int n = a.n_rows - r0 < pass ? a.n_rows - r0 : pass;
        const float* w[MOST_ROWS];
        for (int r = 0; r < n; r++) {
            const uint8_t* row = a.rows + a.row_bytes * (r0 + r);
            float* wide = reinterpret_cast<float*>(scratch + tile_bytes * r);
            if (!in_place) widen_row(a.type, row, a.n_cols, wide);
            w[r] = in_place ? reinterpret_cast<const float*>(row) : wide;
        }
        for (int t = 0, n_tokens; t < a.n_tokens; t += n_tokens) {
            n_tokens = float_tokens(a.n_tokens - t);
            for (int r = 0; r < n; r++) {
                float y[MAX_FLOAT_TOKENS];
                dot_floats(w[r], n_padded, a.activations + t, n_tokens, y);
                for (int i = 0; i < n_tokens; i++) finish(a, r0 + r, t + i, y[i]);
            }
        }
    }
}

void rows(const RowsArgs& args, uint8_t* scratch) {
    if (args.tiled_rows) tiled_rows(args, finish_tile);
    else if (info(args.type).quantized()) quantized_rows(args, scratch);
    else float_rows(args, scratch);
}

void dequantize(Type type, const uint8_t* row, int n_cols, float* out, uint8_t* scratch) {
    const TypeInfo& t = info(type);
    if (!t.quantized()) {
        float* wide = reinterpret_cast<float*>(scratch);
        widen_row(type, row, n_cols, wide);
        std::memcpy(out, wide, sizeof(float) * n_cols);
        return;
    }
    const Tile tile(t, n_cols, scratch);
    decoder_of(type)(row, tile, scratch + tile_bytes_of(type, n_cols));
    for (int b = 0; b < tile.n_blocks; b++)
        for (int i = 0; i < 32; i++) {
            const int s = b / tile.L, j = b % tile.L;
            const uint8_t u = tile.codes(j)[i / 4 * 32 + 4 * s + i % 4];
            const int code = t.fit == 0 ? static_cast<int8_t>(u) : t.mul * u - t.bias;
            const int g = i * t.groups / 32 * LANES + s;
            float w = static_cast<float>(code) * tile.scale(j)[g];
            if (t.has_min) w = w - tile.minimum(j, t.groups)[g];
            out[32 * b + i] = w;
        }
}

}  // namespace

const Backend* STRATA_BACKEND() {
    static constexpr Backend backend = {STRATA_NAME,  quantize_row, scratch_bytes,
                                        rows,         dequantize,   activate_row,
                                        attention_scratch_bytes, attention_rows, gdn_columns};
    return &backend;
}

}  // namespace strata
