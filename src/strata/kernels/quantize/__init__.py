"""Op: activations as int8 blocks of 32, laid out for kernels that hold segments in lanes.

    x f32 [T, K]  ->  Quantized: q int8 [T, slots, 32], meta int32 [T, slots, 2]

Values are those of the numerics contract (docs/decisions/001-numerics-contract.md section 1). A row
has NB = K / 32 blocks in 8 contiguous segments of L = ceil(NB / 8); block b lies in slot
``(b % L) * 8 + b // L``, so that the blocks that eight lanes read together are neighbours. There
are 8 L slots; those of blocks that do not exist hold anything and count for nothing.
meta: bits of the f32 scale; sums of the codes of both halves, low 16 bits (first half) and high.
"""

from strata.kernels.quantize.ref import (
    Quantized,
    new_quantized,
    quantize,
    segment_blocks,
    slots_of_blocks,
)

__all__ = ["Quantized", "new_quantized", "quantize", "segment_blocks", "slots_of_blocks"]
