"""Compiles attention for compute capability 9.0 without a GPU and prints, as JSON, the operand
widths that the compiler chose for its products: {bits of the cache: [kWidth, ...]}.

Run as a program of its own: in a test process kernels are defined for the interpreter.
"""

from __future__ import annotations

import json
import re

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from strata.kernels.attention.triton import partial_kernel
from strata.kernels.triton_common import EXACT

CACHES = {16: ("*fp16", 1), 8: ("*i8", 64), 4: ("*u8", 32)}


def widths(bits: int) -> list[int]:
    """kWidth of every operand layout, over heads of 64 numbers and chunks of 16 positions."""
    cache, group = CACHES[bits]
    types = {
        "q": "*fp32", "k": cache, "v": cache, "k_scale": "*fp16", "v_scale": "*fp16",
        "kept": "*i32", "pos": "*i32", "top_out": "*fp32", "sum_out": "*fp32", "out": "*fp32",
        "scale": "fp32", "K_STRIDE": "i32", "V_STRIDE": "i32",
    }  # fmt: skip
    constants = {
        "H": 4, "G": 2, "D": 64, "DV": 64, "BLOCK_D": 64, "BLOCK_V": 64, "BLOCK_N": 16,
        "SPLITS": 2, "WINDOW": 0, "R": 1, "BUDGET": 0, "BITS": bits, "K_GROUP": group,
        "V_GROUP": group,
    }  # fmt: skip
    signature = {name: types.get(name, "constexpr") for name in partial_kernel.arg_names}
    source = ASTSource(partial_kernel, signature, constexprs=constants)
    options = {"num_warps": 4, "num_stages": 2, **EXACT}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return sorted({int(w) for w in re.findall(r"kWidth = (\d+)", made.asm["ttgir"])})


if __name__ == "__main__":
    print(json.dumps({bits: widths(bits) for bits in CACHES}))
