"""Compiles kernels for compute capability 9.0 without a GPU and prints what the PTX shows, as JSON.

Run as a program of its own: in a test process kernels are defined for the interpreter.
"""

from __future__ import annotations

import json
import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from strata.kernels.combine.triton import combine_kernel
from strata.kernels.expert_rows import layout
from strata.kernels.expert_rows import triton as experts
from strata.kernels.expert_rows.launch import GpuExpert, gpu_expert, tune_down, tune_gate_up
from strata.kernels.gpu_matrix import float_matrix, tile_matrix
from strata.kernels.linear.launch import Part, is_narrow, room_bytes, spread_of, tune
from strata.kernels.linear.triton import linear_kernel
from strata.kernels.plan.triton import plan_kernel
from strata.kernels.quantize.triton import quantize_kernel
from strata.kernels.triton_common import EXACT

TYPES = {
    "addr": "*i64", "start": "*i32", "entry_row": "*i32", "entry_token": "*i32",
    "n_groups": "*i32", "x": "*fp32", "q": "*i8", "meta": "*i32", "h": "*fp32", "h_q": "*i8",
    "h_meta": "*i32", "rows": "*fp32", "gate": "i64", "up": "i64", "gate_scale": "fp32",
    "up_scale": "fp32", "cpu_rows": "i64", "weight": "*fp32", "place": "*i8", "shared": "*fp32",
    "shared_gate": "*fp32", "out": "*fp32", "residual": "*fp32", "coeff": "*fp32",
}  # fmt: skip


def ptx(kernel: Any, constants: dict[str, Any], warps: int, **types: Any) -> str:
    """The PTX of a kernel; pointers and addresses are multiples of 16."""
    known = TYPES | types
    signature = {name: known.get(name, "constexpr") for name in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, kind in enumerate(signature.values())
        if isinstance(kind, str) and (kind[0] == "*" or kind == "i64")
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, **EXACT}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


def expert(types: tuple[str, str, str], kind: str, d: int = 2560, f: int = 640) -> GpuExpert:
    """An expert of the flagship's widths."""
    return gpu_expert(layout(d, f, types, layouts=(kind,) * 3))  # type: ignore[arg-type]


def linear_ptx(n_tokens: int) -> str:
    """Two equal quantized matrices, one of another type, and float rows in one launch."""
    parts, start = [], 0
    for i, (matrix, tiles, count, rows) in enumerate(
        (
            (tile_matrix("Q6_K", 512, 2560), True, 2, 16),
            (tile_matrix("IQ4_XS", 256, 2560), True, 1, 4),
            (float_matrix("BF16", 48, 2560), False, 1, 2),
        )
    ):
        first = 0 if i == 0 else i + 1
        programs = -(-matrix.n_rows // rows)
        narrow = is_narrow(rows, 1)
        parts.append(Part(matrix, tiles, first, count, start, programs, rows, 5, narrow, i == 1))
        start = parts[-1].end
    constants = {
        "T": n_tokens, "K": 2560, "SLOTS": 80, "PARTS": tuple(parts),
        "STRIDES": (512, 512, 256, 48), "ROOM": 0,
    }  # fmt: skip
    four = {"weights": ("i64",) * 4, "outs": ("i64",) * 4, "scales": ("fp32",) * 4}
    return ptx(linear_kernel, constants, 1, **four)


def spread_ptx() -> str:
    """Few long rows, as the rule lays them out: blocks spread over the threads."""
    matrix = tile_matrix("Q6_K", 2560, 6144)
    n = tune([matrix], 1)
    spread = spread_of(matrix, 1, n)
    assert spread is not None
    programs = 2560 // n.tile_rows
    part = Part(matrix, True, 0, 1, 0, programs, n.tile_rows, 0, False, False, spread)
    constants = {
        "T": 1, "K": 6144, "SLOTS": 192, "PARTS": (part,), "STRIDES": (2560,),
        "ROOM": room_bytes((part,), 1),
    }  # fmt: skip
    one = {"weights": ("i64",), "outs": ("i64",), "scales": ("fp32",)}
    return ptx(linear_kernel, constants, n.warps, **one)


def gate_up_ptx(e: GpuExpert, n_tokens: int, batch: int) -> str:
    """The first half of an expert."""
    n = tune_gate_up(e, batch)
    constants = {"E": e, "N": n, "T": n_tokens, "SLOTS_X": 80, "SLOTS_H": 24}
    return ptx(experts.gate_up_kernel, constants, n.warps)


def down_ptx(e: GpuExpert, n_tokens: int, batch: int) -> str:
    """The second half of an expert."""
    n = tune_down(e, batch)
    return ptx(experts.down_kernel, {"E": e, "N": n, "T": n_tokens, "SLOTS": 24}, n.warps)


def dense_ptx(e: GpuExpert, n_tokens: int) -> str:
    """The first half of a dense feed-forward."""
    n = tune_gate_up(e, n_tokens)
    constants = {"E": e, "N": n, "T": n_tokens, "SLOTS_X": 80, "SLOTS_H": 24}
    return ptx(experts.dense_gate_up_kernel, constants, n.warps)


def combine_ptx() -> str:
    """Every option of the combine kernel."""
    flags = ("HAS_PLACE", "HAS_CPU", "HAS_SHARED", "HAS_GATE", "HAS_OUT")
    constants = {"D": 2560, "K": 10, "STREAMS": 4, "TAKEN": 39, "BLOCK": 128}
    return ptx(combine_kernel, constants | dict.fromkeys(flags, True), 1)


def plan_ptx() -> str:
    """Routing and plan of one token of the flagship."""
    constants = {
        "T": 1, "T2": 1, "K2": 16, "D": 0, "D2": 1, "R": 10, "ROUTES": True, "HOST": False,
        "RINGS": False, "E": 512, "E2": 512, "K": 10, "KP": 32, "SCORING": "softmax",
        "NORMALIZE": True, "SCALE": 1.0, "GROUPS": 1, "KEPT": 1, "BIAS": False, "CORRECTION": False,
    }  # fmt: skip
    types = dict.fromkeys(("logits", "bias", "correction", "below"), "*fp32")
    types |= dict.fromkeys(("expert", "moved", "tail", "counts", "arrived"), "*i32")
    types |= dict.fromkeys(("g_start", "g_row", "g_token", "g_count"), "*i32")
    types |= dict.fromkeys(("vram", "host", "g_addr", "said"), "*i64")
    types |= {"x_out": "i64", "ints": "i64", "word": "i64", "value": "i32", "STRIDE": "i32"}
    return ptx(plan_kernel, constants, 1, **types)


def facts(text: str) -> dict[str, int]:
    """Counts of what matters in PTX."""
    count = {
        "flushed": len(re.findall(r"\.ftz", text)),
        "copies_16": len(re.findall(r"cp\.async\.cg\.shared\.global[^;]*, 0x10", text)),
        "loads_16": len(re.findall(r"ld\.global(\.\w+)*\.v4\.b32", text)),
        "byte_loads": len(re.findall(r"ld\.global(\.\w+)*\.[bu]8", text)),
        "approximate": len(re.findall(r"div\.full|div\.approx|ex2\.approx", text)),
        "dots": len(re.findall(r"dp4a\.[su]32\.s32", text)),
        "barriers": len(re.findall(r"bar(rier)?\.(\w+\.)*sync", text)),
        "over_a_warp": len(re.findall(r"redux\.sync", text)),
        "handed_on": len(re.findall(r"st\.shared\.v4\.b32 \[%r", text)),
    }
    return count


def main() -> None:
    """Compile all and print {name: facts}."""
    iq3 = expert(("IQ3_XXS", "IQ3_XXS", "IQ4_NL"), "tiles")
    texts = {
        "linear": linear_ptx(2),
        "spread": spread_ptx(),
        "gate_up": gate_up_ptx(iq3, 2, 2),
        "down": down_ptx(iq3, 2, 2),
        "down_registers": down_ptx(iq3, 1, 1),
        "down_float": down_ptx(expert(("BF16",) * 3, "native"), 2, 2),
        "dense": dense_ptx(expert(("Q4_K", "Q4_K", "Q6_K"), "tiles", f=768), 2),
        "combine": combine_ptx(),
        "plan": plan_ptx(),
        "quantize": ptx(quantize_kernel, {"NB": 80, "SLOTS": 80, "N": 8}, 2),
    }
    print(json.dumps({name: facts(text) for name, text in texts.items()}))


if __name__ == "__main__":
    main()
