"""Records that the GPU's expert kernels are launched with. Knows no kernels.

``GpuExpert`` is one expert's blob as kernels see it: known at compile time. ``GpuGroups`` says
which rows belong to which blob: device tensors that the plan fills. ``Hidden`` holds the
activations between the two halves of the feed-forward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from strata.core.errors import UnsupportedError
from strata.formats.tiles import tile_format
from strata.formats.weight_types import TYPES
from strata.kernels.expert_rows.shape import ExpertShape
from strata.kernels.gpu_matrix import Matrix, TileMatrix, float_matrix, matrix_of, tile_matrix
from strata.kernels.gpu_weight import GpuWeight
from strata.kernels.linear.launch import is_narrow
from strata.kernels.quantize.ref import Quantized, new_quantized

BLOCK_ROWS = 32
"""Rows of gate and up a program owns when down is quantized: one block of h."""


@dataclass(frozen=True)
class GpuExpert:
    """Gate, up [F, D] and down [D, F] with their byte offsets in a blob (docs of ExpertShape).

    has_scale: the results of gate, up and down are multiplied once by numbers of their own, which
    lie in the blob from scale_offset on, or (scale_offset < 0) are given at the launch.
    """

    d_model: int
    d_expert: int
    gate: Matrix
    up: Matrix
    down: Matrix
    gate_offset: int
    up_offset: int
    down_offset: int
    gate_bias_offset: int
    up_bias_offset: int
    down_bias_offset: int
    has_scale: bool
    scale_offset: int
    activation: str
    swiglu_limit: float

    @property
    def tiles_in(self) -> bool:
        """Gate and up are tiles."""
        return self.gate_is_tiles and self.up_is_tiles

    @property
    def gate_is_tiles(self) -> bool:
        """Gate is tiles, not float rows."""
        return isinstance(self.gate, TileMatrix)

    @property
    def up_is_tiles(self) -> bool:
        """Up is tiles, not float rows."""
        return isinstance(self.up, TileMatrix)

    @property
    def twins(self) -> bool:
        """Gate and up are tiles of one type."""
        return self.gate_is_tiles and self.gate == self.up

    @property
    def tiles_out(self) -> bool:
        """Down is tiles, so h is quantized."""
        return isinstance(self.down, TileMatrix)


def gpu_expert(shape: ExpertShape) -> GpuExpert:
    """The record of a blob; UnsupportedError when a matrix lies so that no kernel reads it."""
    d, f = shape.d_model, shape.d_expert
    sizes = ((f, d), (f, d), (d, f))
    gate, up, down = (
        _matrix(kind, layout, *size)
        for kind, layout, size in zip(shape.types, shape.layouts, sizes, strict=True)
    )
    return GpuExpert(
        d,
        f,
        gate,
        up,
        down,
        shape.gate_offset,
        shape.up_offset,
        shape.down_offset,
        shape.gate_bias_offset,
        shape.up_bias_offset,
        shape.down_bias_offset,
        shape.scale_offset >= 0,
        shape.scale_offset,
        shape.activation,
        shape.swiglu_limit,
    )


@cache
def first_half(expert: GpuExpert) -> GpuExpert:
    """What gate and up need, so that experts that differ in down share a compiled kernel."""
    down = expert.gate if expert.gate_is_tiles == expert.tiles_out else expert.down
    return replace(expert, down=down, down_offset=0, down_bias_offset=-1)


def _matrix(kind: str, layout: str, n_rows: int, n_cols: int) -> Matrix:
    if layout == "tiles":
        return tile_matrix(kind, n_rows, n_cols)
    if kind in ("BF16", "F16", "F32"):
        return replace(float_matrix(kind, n_rows, n_cols), contract=True)
    hint = "use --expert-layout tiles" if tile_format(kind) else "convert the experts to BF16"
    raise UnsupportedError(
        f"expert matrices of type {kind} ({TYPES[kind].kind}) in the file's own layout are not "
        f"read by the GPU; {hint}"
    )


def dense_expert(gate: GpuWeight, up: GpuWeight, tiles_out: bool) -> GpuExpert:
    """A dense gated feed-forward's first half as one expert without a blob (silu).

    Its down matrix is a stand-in: only whether h is quantized counts.
    """
    d, f = gate.n_cols, gate.n_rows
    down = tile_matrix("Q8_0", 16, f) if tiles_out else float_matrix("F32", 16, f)
    scaled = gate.scale != 1.0 or up.scale != 1.0
    return GpuExpert(
        d, f, matrix_of(gate), matrix_of(up), down,
        0, 0, 0, -1, -1, -1, scaled, -1, "silu", 0.0,
    )  # fmt: skip


@dataclass(frozen=True)
class GpuGroups:
    """Rows by expert, as ``kernels.plan.Groups``, in device memory; all int32 but addr.

    addr: int64 [G_max], the blob of each group: VRAM, or RAM that is mapped for the device;
    multiples of 16. start: [G_max + 1]: group g has entries start[g] .. start[g + 1] - 1.
    entry_row, entry_token: [R]. n_groups: [1]; groups from there on are not looked at. No token is
    twice in a group, so a group of a window of T tokens has at most T entries; of one token, entry
    g is that of group g.
    """

    addr: torch.Tensor
    start: torch.Tensor
    entry_row: torch.Tensor
    entry_token: torch.Tensor
    n_groups: torch.Tensor

    @property
    def most(self) -> int:
        """G_max."""
        return len(self.addr)


def new_groups(n_rows: int, device: torch.device | str) -> GpuGroups:
    """Room for n_rows rows, no groups."""

    def ints(n: int) -> torch.Tensor:
        return torch.zeros(n, dtype=torch.int32, device=device)

    addr = torch.zeros(n_rows, dtype=torch.int64, device=device)
    return GpuGroups(addr, ints(n_rows + 1), ints(n_rows), ints(n_rows), ints(1))


@dataclass(frozen=True)
class Hidden:
    """h of R rows: f32 [R, F] (down is float, or gate or up is) and, when down is tiles, int8."""

    h: torch.Tensor | None
    h_q: Quantized | None


def new_hidden(expert: GpuExpert, n_rows: int, device: torch.device | str) -> Hidden:
    """Buffers for n_rows rows."""
    h = h_q = None
    if not (expert.tiles_in and expert.tiles_out):
        h = torch.zeros((n_rows, expert.d_expert), device=device)
    if expert.tiles_out:
        h_q = new_quantized(n_rows, expert.d_expert, device)
    return Hidden(h, h_q)


@dataclass(frozen=True)
class RowTuning:
    """Programs of a launch: warps, matrix rows of each (a power of two), blocks in flight, the most
    rows of activations that one pass over the weights serves, whether a thread has fewer than four
    rows of its segment, and how many blocks ahead weights come into registers (0: by asynchronous
    copies instead, ``stages`` blocks)."""

    warps: int
    rows: int
    stages: int
    batch: int
    narrow: bool
    ahead: int = 0


def batch_of(n_tokens: int) -> int:
    """Rows of activations that one pass serves in a window of that many tokens."""
    return 1 if n_tokens == 1 else 2 if n_tokens == 2 else 4


def row_tuning(
    warps: int, rows: int, stages: int, batch: int, twins: bool = False, ahead: int = 0
) -> RowTuning:
    """A tuning; twins: gate and up lie side by side in the threads."""
    narrow = is_narrow(rows * (2 if twins else 1), warps)
    return RowTuning(warps, rows, stages, batch, narrow, ahead)


def tune_gate_up(expert: GpuExpert, batch: int) -> RowTuning:
    """Tiles: one block of h a program, four rows a thread. One token: weights through registers
    (H200, 10 experts 2560 -> 2 x 640 of IQ3_S: 8.6 us against 9.9; 8 of 2048 -> 2 x 768 of Q4_K:
    8.6 against 9.7; wider codes and those with a table were not measured)."""
    if expert.tiles_in:
        gate = expert.gate
        light = isinstance(gate, TileMatrix) and gate.bits == 4 and not gate.table
        ahead = 2 if batch == 1 and expert.twins and light else 0
        return row_tuning(4 if expert.twins else 2, BLOCK_ROWS, 4, batch, expert.twins, ahead)
    return row_tuning(2, 4 if batch <= 2 else 2, 4, batch)


def tune_down(expert: GpuExpert, batch: int) -> RowTuning:
    """Widths of F have few blocks a segment: all are in flight, of one token in registers (640 ->
    2560 of IQ4_NL: 6.9 us against 8.2; 768 -> 2048 of Q6_K: 6.3 against 7.0)."""
    if expert.tiles_out:
        in_segment = -(-expert.d_expert // 256)
        ahead = in_segment if batch == 1 and in_segment <= 3 else 0
        return row_tuning(1, 16, 4, batch, ahead=ahead)
    return row_tuning(1, 4 if batch <= 2 else 2, 4, batch)
