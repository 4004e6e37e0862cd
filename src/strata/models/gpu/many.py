"""Parts of a network for many tokens at once, on tensor cores (``--numerics fast``).

The weights, caches and state are those of windows; products are ``linear.triton_gemm``. Kernels
that keep a ring or walk a recurrence go over PIECE tokens a launch, as many as the ring lets a
window have. The order of sums is not that of windows (``window/device_fast.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from strata.kernels.attention.triton import Selection, attention, new_scratch
from strata.kernels.attention.triton_append import HeadInput, IndexerInput, append
from strata.kernels.gdn.triton import GdnState, window
from strata.kernels.gpu_weight import GpuWeight
from strata.kernels.hyper.triton import mix, rank_gate
from strata.kernels.linear.triton_gemm import half_rows, linear_many, new_half_rows
from strata.kernels.ngram.triton import ngram
from strata.kernels.qsa.triton import select_blocks
from strata.kernels.rms_norm.triton import Pending, add_norm
from strata.models.gpu.attention import GpuAttention
from strata.models.gpu.ffn import GatedFfn
from strata.models.gpu.frame import DeviceState
from strata.models.gpu.gdn import GpuGdn
from strata.models.gpu.ngram import GpuNgram
from strata.models.gpu.residual import GpuResidual, Site, StreamRead
from strata.models.ring import MAX_WINDOW_TOKENS as PIECE

SELECT_TOKENS, ATTEND_TOKENS, SPLITS = 8, 64, 4


@dataclass(frozen=True)
class Chunk:
    """Where a chunk stands: pos_N int32 [N] on the device, and the state it goes through."""

    pos_N: torch.Tensor
    state: DeviceState

    @cached_property
    def full(self) -> torch.Tensor:
        """int32 [1] on the device: tokens of a whole piece."""
        return torch.full((1,), PIECE, dtype=torch.int32, device=self.pos_N.device)

    @cached_property
    def rest(self) -> torch.Tensor:
        """The same of the last piece, if it is not whole."""
        return self.full.new_full((1,), len(self.pos_N) % PIECE)

    def pieces(self, size: int = PIECE) -> Iterator[slice]:
        """The chunk in runs of up to ``size`` tokens."""
        for first in range(0, len(self.pos_N), size):
            yield slice(first, min(first + size, len(self.pos_N)))


def product(x_NK: torch.Tensor, *weights: GpuWeight) -> list[torch.Tensor]:
    """Every weight times every row, f32 [N, rows] each."""
    half = new_half_rows(len(x_NK), x_NK.shape[1], x_NK.device)
    half_rows(x_NK, half)
    outs = [x_NK.new_empty(len(x_NK), w.n_rows) for w in weights]
    for weight, out in zip(weights, outs, strict=True):
        linear_many(weight, out, half)
    return outs


def read(
    residual: GpuResidual,
    site: Site,
    layer: int,
    streams: torch.Tensor,
    pending: Pending | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A block's input f32 [N, D] and its write's coefficients, after adding what is pending."""
    return _read(residual.reader(site, layer), residual.eps, streams, pending)


def head_read(residual: GpuResidual, streams: torch.Tensor) -> torch.Tensor:
    """The output head's input."""
    return _read(residual.head_reader, residual.eps, streams, None)[0]


def _read(
    reader: StreamRead | torch.Tensor,
    eps: float,
    streams: torch.Tensor,
    pending: Pending | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    n, width = len(streams), streams.shape[-1]
    if isinstance(reader, torch.Tensor):
        x = streams.new_empty(n, width)
        add_norm(streams, reader, eps, x, pending=pending)
        return x, None
    count = streams.shape[1]
    normed = streams.new_empty(n, count * width)
    add_norm(streams, reader.norm, eps, normed, pending=pending)
    weights = [w for w in (reader.down, reader.inject) if w is not None]
    made = torch.cat(product(normed, *weights), dim=1)
    low = streams.new_empty(n, reader.down.n_rows)
    coeff = None if reader.inject is None else streams.new_empty(n, count)
    rank_gate(made, low, coeff, count)
    (gate,) = product(low, reader.up)
    x = streams.new_empty(n, width)
    mix(gate, normed, count, x)
    return x, coeff


def gdn(mixer: GpuGdn, x_ND: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    """Gated DeltaNet; the recurrent state moves with every piece."""
    columns, z, a, b = product(x_ND, *mixer.inputs)
    y = torch.empty_like(z)
    state, layer = chunk.state, mixer.layer
    ring, both = state.tensor(layer, "conv"), state.both(layer, "recurrent")
    work = x_ND.new_empty(PIECE, mixer.spec.n_v_heads, mixer.workspace_numbers)
    # launches of the pieces take the host as long as the device: all views are made at once
    whole = (columns, z, a, b, chunk.pos_N, y)
    every = zip(*(torch.split(tensor, PIECE) for tensor in whole), strict=True)
    for columns_T, z_T, a_T, b_T, pos_T, y_T in every:
        where = GdnState(ring, both, state.front_number(layer, "recurrent"), work)
        n = chunk.full if len(y_T) == PIECE else chunk.rest
        window(columns_T, z_T, a_T, b_T, n, pos_T, where, mixer.weights, y_T)
        state.flip(layer, "recurrent")
    return product(y, mixer.output)[0]


def attend(mixer: GpuAttention, x_ND: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    """Attention: keys and values of the whole chunk first, then every token over the cache."""
    spec, state, layer = mixer.spec, chunk.state, mixer.layer
    made = product(x_ND, *mixer.inputs)
    n, dim = len(x_ND), spec.head_dim
    q = x_ND.new_empty(n, spec.n_heads, dim)
    index_q = None
    if spec.indexer is not None:
        index_q = x_ND.new_empty(n, spec.indexer.n_heads, spec.indexer.head_dim)
    for piece in chunk.pieces():
        _append(mixer, [m[piece] for m in made], q[piece], index_q, piece, chunk)
    blocks = _select(mixer, index_q, chunk)
    out = torch.empty_like(q)
    scratch = new_scratch(min(n, ATTEND_TOKENS), spec.n_heads, SPLITS, dim, x_ND.device)
    for piece in chunk.pieces(ATTEND_TOKENS):
        selection = gate = None
        if blocks is not None and spec.indexer is not None:
            selection = Selection(blocks[piece], spec.indexer.block_tokens)
        if spec.gate:
            gate = (made[0][piece][:, dim:], 2 * dim)
        attention(
            q[piece], state.tensor(layer, "k"), state.tensor(layer, "v"), chunk.pos_N[piece],
            spec.scale, scratch, out[piece], window_tokens=spec.window_tokens,
            sinks_H=mixer.sinks, selection=selection, gate=gate, scales=mixer.scales(state),
        )  # fmt: skip
    return product(out.view(n, -1), mixer.output)[0]


def _append(
    mixer: GpuAttention,
    made: Sequence[torch.Tensor],
    q: torch.Tensor,
    index_q: torch.Tensor | None,
    piece: slice,
    chunk: Chunk,
) -> None:
    spec, state, layer = mixer.spec, chunk.state, mixer.layer
    dim, indexer = spec.head_dim, None
    if spec.indexer is not None and index_q is not None:
        norms, width = mixer.index_norms, spec.indexer.head_dim
        indexer = IndexerInput(
            HeadInput(made[3], width, norm_d=norms["q"]),
            HeadInput(made[4], width, norm_d=norms["k"]),
            index_q[piece],
            state.tensor(layer, "index_ring"),
            state.tensor(layer, "block_keys"),
            spec.indexer.block_tokens,
        )
    (q_bias, k_bias, v_bias), (q_norm, k_norm) = mixer.biases, mixer.norms
    append(
        HeadInput(made[0], 2 * dim if spec.gate else dim, q_bias, q_norm),
        HeadInput(made[1], dim, k_bias, k_norm),
        HeadInput(made[2], dim, v_bias),
        q,
        state.tensor(layer, "k"),
        state.tensor(layer, "v"),
        chunk.pos_N[piece],
        mixer.eps,
        mixer.rotary,
        indexer,
        mixer.scales(state),
    )


def _select(mixer: GpuAttention, index_q: torch.Tensor | None, chunk: Chunk) -> torch.Tensor | None:
    spec = mixer.spec.indexer
    if spec is None or index_q is None:
        return None
    keys = chunk.state.tensor(mixer.layer, "block_keys")
    budget = spec.budget_tokens // spec.block_tokens
    blocks = torch.zeros((len(index_q), budget), dtype=torch.int32, device=index_q.device)
    scores = index_q.new_empty(SELECT_TOKENS, len(keys))
    for piece in chunk.pieces(SELECT_TOKENS):
        n = piece.stop - piece.start
        select_blocks(
            index_q[piece], keys, chunk.pos_N[piece], spec.block_tokens, scores[:n], blocks[piece]
        )
    return blocks


def ngram_block(
    block: GpuNgram, rows_NW: torch.Tensor, streams: torch.Tensor, chunk: Chunk
) -> None:
    """The block into the residual, in place."""
    key, value = product(rows_NW, *block.inputs)
    ring = chunk.state.tensor(block.layer, "ngram_conv")
    scratch = streams.new_empty(2, PIECE, key.shape[1])
    for piece in chunk.pieces():
        ngram(
            key[piece], value[piece], streams[piece], ring, chunk.pos_N[piece], block.weights,
            scratch,
        )  # fmt: skip


def gated(ffn: GatedFfn, x_ND: torch.Tensor) -> torch.Tensor:
    """A dense feed-forward, f32 [N, D]."""
    gate, up = product(x_ND, ffn.gate, ffn.up)
    return product(torch.nn.functional.silu(gate).mul_(up), ffn.down)[0]
