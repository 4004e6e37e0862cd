// One instruction set's operations. Compiled once per set with its flags and STRATA_FUSED = its getter.
#include "conv.h"
#include "heads.h"
#include "norms.h"
#include "route.h"
#include "select.h"
#include "table.h"

namespace strata {

const FusedTable* STRATA_FUSED() {
    static constexpr FusedTable table = {
        rms_norm,   read_gates, stream_mix,  stream_write, silu_times, sigmoid_times, gated_norm,
        combine,    gdn_inputs, ngram_gate,  ngram_conv,   head_rotary, block_keys,   ring_store,
        select_blocks, token_mask, route,    copy_rows,    group_rows};
    return &table;
}

}  // namespace strata
