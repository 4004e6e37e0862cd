// Rows of quantized weights re-coded as tiles (docs/decisions/003-tiles.md), byte for byte as
// strata.formats.tiles does it.
#pragma once
#include <cstddef>
#include <cstdint>

#include "weight_types.h"

namespace strata {

struct RecodeArgs {
    Type type;
    const uint8_t* rows;
    int n_rows;
    int n_cols;
    int bits;                // of a stored code: 2, 4 or 8
    const uint8_t* stored;   // [256] stored code of every code c, indexed by c as an unsigned byte
    uint8_t* out;            // zeroed; planes at these offsets, -1: none
    int64_t codes, scales, minimums, supers;
    uint8_t* scratch;        // [n_cols]
};

// False for types that have no tiles. The getters give null where the binary lacks the set.
using Recode = bool (*)(const RecodeArgs& args);
Recode portable_recode();
Recode avx2_recode();
Recode avx512_recode();

}  // namespace strata
