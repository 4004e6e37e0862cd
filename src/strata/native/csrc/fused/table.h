// The small operations of a layer between its products, as one instruction set computes them. All sets
// give the same bits. Each function does one thing for every token; what it does stands with it.
#pragma once
#include <cstdint>

namespace strata {

struct FusedTable {
    // norms.h
    void (*rms_norm)(int64_t n_rows, const float* x, const float* weight, int64_t groups, int64_t part,
                     double eps, float* out);
    void (*read_gates)(int64_t n_tokens, float* low, int64_t rank, float* coeff, int64_t streams);
    void (*stream_mix)(int64_t n_tokens, const float* normed, const float* gate, int64_t streams,
                       int64_t width, float* out);
    void (*stream_write)(int64_t n_tokens, float* residual, const float* y, const float* coeff,
                         int64_t streams, int64_t width);
    void (*silu_times)(int64_t n_tokens, float* gate, const float* up, int64_t width);
    void (*sigmoid_times)(int64_t n_tokens, float* y, const float* gate, int64_t width, bool one_gate);
    void (*gated_norm)(int64_t n_tokens, const float* o, const float* z, const float* weight, int64_t heads,
                       int64_t width, double eps, bool silu, float* out);
    void (*combine)(int64_t n_tokens, const float* rows, const float* weight, int64_t n_active,
                    int64_t width, const float* shared, float* out);
    // conv.h
    void (*gdn_inputs)(int64_t n_tokens, float* ring, int64_t entries, int64_t start, const float* x,
                       const float* weight, int64_t taps, const float* a, const float* b, const float* decay,
                       const float* dt_bias, int64_t n_k_heads, int64_t n_v_heads, int64_t k_dim,
                       int64_t v_dim, float* q, float* k, float* v, float* keep, float* beta);
    void (*ngram_gate)(int64_t n_tokens, const float* key, const float* query, const float* value,
                       int64_t streams, int64_t width, float* u);
    void (*ngram_conv)(int64_t n_tokens, float* ring, int64_t entries, int64_t start, const float* x,
                       int64_t n, const float* weight, int64_t taps, int64_t dilation, const float* u,
                       float* residual);
    // heads.h
    void (*head_rotary)(int64_t n_tokens, const float* x, int64_t token_stride, int64_t head_stride,
                        int64_t heads, int64_t d, const float* weight, double eps, const float* cos,
                        const float* sin, int64_t pairs, int64_t step, bool halves, int64_t kind,
                        uint8_t* out, int64_t out_token_stride, int64_t out_head_stride);
    // select.h
    void (*block_keys)(int64_t n_blocks, const float* ring, int64_t entries, int64_t start,
                       const float* raw, int64_t d, int64_t first_block, int64_t r, const float* weight,
                       double eps, const float* cos, const float* sin, int64_t pairs, bool halves,
                       int64_t kind, uint8_t* out);
    void (*ring_store)(int64_t n_tokens, float* ring, int64_t entries, int64_t start, const float* x,
                       int64_t n);
    void (*select_blocks)(int64_t n_tokens, const float* q, int64_t heads, int64_t d, const void* keys,
                          int64_t kind, int64_t start, int64_t r, int64_t budget, int32_t* kept);
    void (*token_mask)(int64_t n_tokens, const int32_t* kept, int64_t budget, int64_t start, int64_t n,
                       int64_t r, uint8_t* seen);
    // route.h
    void (*route)(int64_t n_tokens, const float* logits, const float* bias, int64_t n_experts,
                  int64_t n_active, int64_t scoring, bool normalize, double scale, const float* correction,
                  int64_t n_groups, int64_t groups_kept, int32_t* expert, float* weight);
    int64_t (*copy_rows)(int64_t n, const int32_t* index, const float* from, float* out, int64_t n_rows,
                         int64_t width);
    int64_t (*group_rows)(int64_t n_rows, const int32_t* expert, int64_t n_active, const int64_t* fast,
                          int64_t n_experts, int64_t fast_place, int64_t other_place, int32_t* lists,
                          int8_t* place, int64_t* groups, int64_t* rows);
};

// Null where the binary was built without that instruction set.
const FusedTable* portable_fused();
const FusedTable* avx2_fused();

}  // namespace strata
