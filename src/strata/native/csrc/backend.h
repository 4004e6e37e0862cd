// What one instruction set offers: plain functions over plain memory, no threads, no Python.
//
// Quantized rows, the layout that all of them share ("lane = segment", numerics contract 3): a row of
// NB = K / 32 blocks is cut into 8 segments of L = ceil(NB / 8) blocks. Step j works on block j of every
// segment; vector v (0..7) of a step holds the four codes 4v..4v+3 of each of the 8 blocks, one block
// per 32-bit lane. So one step is 8 vectors of 32 bytes and no lane ever meets another.
// Blocks past the end of the row have codes of any value, q = 0 and a product of scales of -0, which
// leaves a partial sum as it is, bit for bit.
#pragma once
#include <cstddef>
#include <cstdint>

#include "weight_types.h"

namespace strata {

inline constexpr int LANES = 8;
inline constexpr int STEP_BYTES = 256;

STRATA_INLINE int n_steps(int n_cols) { return (n_cols / 32 + LANES - 1) / LANES; }
STRATA_INLINE int padded_32(int n_cols) { return (n_cols + 31) / 32 * 32; }

// One step of an activation row for quantized weights; a row is L of them.
struct alignas(64) QuantizedStep {
    int8_t q[STEP_BYTES];      // [8 vectors][8 lanes][4]
    float scale[LANES];
    int32_t sum[1][LANES];     // of the block's q
    int32_t half[2][LANES];    // of its halves
    int8_t block[LANES][32];   // the codes again, block by block: one cache line a block for tiles
};
static_assert(sizeof(QuantizedStep) == 640);

// Rows of a matrix times activation rows: out[t][first_col + r] = row r . activation t * scale (+ bias[r]).
struct RowsArgs {
    Type type;
    const uint8_t* rows;
    size_t row_bytes;
    int n_rows;
    int n_cols;
    const void* const* activations;  // per token: QuantizedStep [L], or f32 [padded_32(n_cols)]
    int n_tokens;
    float scale;
    const uint8_t* bias;             // f32 [n_rows], any alignment, or null
    float* const* out;               // per token
    int64_t first_col;
    // Not 0: `rows` is the start of a matrix of so many rows in tiles, first_col the first row to
    // compute, a multiple of 16.
    int tiled_rows = 0;
};

struct ActivateArgs {
    bool swiglu_oai;
    float limit;
    const float* up;
    float* gate;  // in: gate, out: h
    int n;
};

enum class FloatKind : int { f32, f16, bf16 };

struct AttentionArgs {
    const float* q;            // [T, H, dk]
    const void* k;
    const void* v;
    FloatKind kind;
    int64_t k_stride, k_head_stride;  // elements from one position, one head to the next
    int64_t v_stride, v_head_stride;
    int n_tokens, n_heads, n_groups, dk, dv;
    int64_t start;
    float scale;
    int64_t window_tokens;     // 0: no window
    const float* sinks;        // [H] or null
    const uint8_t* selected;   // [T, start + T] or null
    float* out;                // [T, H, dv]
};

struct GdnArgs {
    const float* q;        // [T, Hk, dk]
    const float* k;
    const float* v;        // [T, Hv, dv]
    const float* keep;     // [T, Hv]
    const float* beta;     // [T, Hv]
    const int32_t* key_head;  // [Hv]
    const float* state_in;  // [Hv, dk, dv]
    float* state_out;
    float* out;            // [T, Hv, dv]
    int n_tokens, n_key_heads, n_value_heads, dk, dv;
};

inline constexpr int GDN_COLUMNS = 32;

struct Backend {
    const char* name;
    // x[n_cols] into QuantizedStep [L]; n_cols is a multiple of 32
    void (*quantize)(const float* x, int n_cols, QuantizedStep* out);
    size_t (*scratch_bytes)(Type type, int n_cols, int n_tokens);
    void (*rows)(const RowsArgs& args, uint8_t* scratch);
    void (*dequantize)(Type type, const uint8_t* row, int n_cols, float* out, uint8_t* scratch);
    void (*activate)(const ActivateArgs& args);
    size_t (*attention_scratch_bytes)(const AttentionArgs& args, int n_heads);
    // heads first_head .. first_head + n_heads - 1, all of one key/value head, of token t
    void (*attention)(const AttentionArgs& args, int t, int first_head, int n_heads, uint8_t* scratch);
    // columns first_col .. + GDN_COLUMNS (cut at dv) of one value head, all tokens;
    // scratch: dk * GDN_COLUMNS floats
    void (*gdn)(const GdnArgs& args, int value_head, int first_col, uint8_t* scratch);
};

// Null where the binary was built without that instruction set.
const Backend* portable_backend();
const Backend* avx2_backend();
const Backend* avxvnni_backend();
const Backend* avx512_backend();

}  // namespace strata
