"""The residual path: what a block reads, where its result goes, and what the head reads.

One interface for the plain residual [T, D] and for hyper-connections [T, C, D]. Knows no mixers and
no experts. ``read`` fixes the write coefficients before the block runs, so a block's result, or a
part of it, may be added later (``add_late``) with the coefficients of its own read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal, Protocol

import torch

from strata.kernels.ops import Ops
from strata.memory.frame import BufferSpec, Frame
from strata.models.parts import Part
from strata.models.roles import Roles, matrix, vector
from strata.models.spec import ModelSpec

Site = Literal["attn", "ffn"]

_INPUT: dict[Site, str] = {"attn": "x", "ffn": "ffn_x"}
_OUTPUT: dict[Site, str] = {"attn": "mixer_out", "ffn": "ffn_out"}

# Tokens of a read at once: bounds its temporaries, which are several times the streams.
_BLOCK_TOKENS = 256


class Residual(Protocol):
    """Residual stream(s) of one model. Buffer "residual" is [T, D] or [T, C, D]."""

    def buffers(self) -> Mapping[str, BufferSpec]:
        """The residual and what every block reads and writes."""
        ...

    def embed(self) -> Part:
        """Start: "ids" -> "residual"."""
        ...

    def read(self, site: Site, layer: int) -> Part:
        """Input of a block: "residual" -> "x" or "ffn_x" (and "coeff_attn" or "coeff_ffn")."""
        ...

    def write(self, site: Site, layer: int) -> Part:
        """Add "mixer_out" or "ffn_out" to "residual"."""
        ...

    def head(self) -> Part:
        """Input of the output head: "residual" -> "head_x"."""
        ...

    def add_late(
        self, residual: torch.Tensor, coeff_TC: torch.Tensor | None, late_TD: torch.Tensor
    ) -> None:
        """Add a part of a block's output later, with that block's coefficients (plain: None)."""
        ...

    def mixer_input(
        self,
        layer: int,
        residual: torch.Tensor,
        x_TD: torch.Tensor,
        coeff_TC: torch.Tensor | None,
    ) -> None:
        """Fill x, and the coefficients if wanted, with what the layer's mixer reads of these
        streams (plain: it has none)."""
        ...


def _common_buffers(d_model: int, streams: int, dtype: torch.dtype) -> dict[str, BufferSpec]:
    wide = BufferSpec((d_model,), dtype)
    names = ("x", "mixer_out", "ffn_x", "ffn_out", "head_x")
    shape = (d_model,) if streams == 1 else (streams, d_model)
    return {
        "ids": BufferSpec((), torch.int64),
        "residual": BufferSpec(shape, dtype),
        **dict.fromkeys(names, wide),
    }


class PlainResidual:
    """One stream; every read is an RMS norm.

    ``roles``: embed, final_norm, layers.<l>.attn_norm, layers.<l>.ffn_norm.
    """

    def __init__(self, spec: ModelSpec, roles: Roles, ops: Ops) -> None:
        self._d_model = spec.d_model
        self._eps = spec.norm_eps
        self._ops = ops
        self._embed = matrix(roles, "embed", spec.n_vocab, spec.d_model)
        self._norms: dict[tuple[str, int], torch.Tensor] = {
            (site, layer): self._norm(roles, f"layers.{layer}.{site}_norm")
            for layer in range(spec.n_layers)
            for site in _INPUT
        }
        self._final_norm = self._norm(roles, "final_norm")

    def _norm(self, roles: Roles, role: str) -> torch.Tensor:
        return vector(roles, role, (self._d_model,), self._ops.dtype)

    def buffers(self) -> Mapping[str, BufferSpec]:
        """The residual and what every block reads and writes."""
        return _common_buffers(self._d_model, 1, self._ops.dtype)

    def embed(self) -> Part:
        """residual = table row of each id."""

        def run(frame: Frame) -> None:
            frame["residual"].copy_(self._ops.lookup(self._embed, frame["ids"], self._ops.dtype))

        return Part("embed", ("ids",), ("residual",), run)

    def read(self, site: Site, layer: int) -> Part:
        """x = norm(residual)."""
        return self._norm_part(f"{site}_read", self._norms[site, layer], _INPUT[site])

    def head(self) -> Part:
        """head_x = final norm(residual)."""
        return self._norm_part("head_read", self._final_norm, "head_x")

    def _norm_part(self, name: str, weight: torch.Tensor, target: str) -> Part:
        def run(frame: Frame) -> None:
            self._ops.rms_norm(frame["residual"], weight, self._eps, out=frame[target])

        return Part(name, ("residual",), (target,), run)

    def write(self, site: Site, layer: int) -> Part:
        """residual += block output."""
        source = _OUTPUT[site]

        def run(frame: Frame) -> None:
            self.add_late(frame["residual"], None, frame[source])

        return Part(f"{site}_write", ("residual", source), ("residual",), run)

    def add_late(
        self, residual: torch.Tensor, coeff_TC: torch.Tensor | None, late_TD: torch.Tensor
    ) -> None:
        """residual += late; a plain residual has no coefficients."""
        residual += late_TD

    def mixer_input(
        self,
        layer: int,
        residual: torch.Tensor,
        x_TD: torch.Tensor,
        coeff_TC: torch.Tensor | None,
    ) -> None:
        """x = norm(residual)."""
        self._ops.rms_norm(residual, self._norms["attn", layer], self._eps, out=x_TD)


class _Read:
    """One READ of the streams. Without inject (the head) there are no coefficients."""

    def __init__(self, spec: ModelSpec, roles: Roles, prefix: str, inject: bool, ops: Ops) -> None:
        width = spec.streams * spec.d_model
        self._streams = spec.streams
        self._eps = spec.norm_eps
        self._ops = ops
        self._norm = vector(roles, prefix + ".norm", (width,), ops.dtype)
        self._down = matrix(roles, prefix + ".down", spec.hc_rank, width)
        self._up = matrix(roles, prefix + ".up", width, spec.hc_rank)
        self._inject = matrix(roles, prefix + ".inject", spec.streams, width) if inject else None

    def run(
        self, streams_TCD: torch.Tensor, x_TD: torch.Tensor, coeff_TC: torch.Tensor | None
    ) -> None:
        """Fill x and coeff from the streams."""
        if streams_TCD.shape[0] <= _BLOCK_TOKENS:
            self._block(streams_TCD, x_TD, coeff_TC)
            return
        for rows in _blocks(streams_TCD.shape[0]):
            coeff = None if coeff_TC is None else coeff_TC[rows]
            self._block(streams_TCD[rows], x_TD[rows], coeff)

    def _block(
        self, streams_TCD: torch.Tensor, x_TD: torch.Tensor, coeff_TC: torch.Tensor | None
    ) -> None:
        ops = self._ops
        normed_TN = ops.rms_norm(streams_TCD.flatten(1), self._norm, self._eps, self._streams)
        low_TR = normed_TN.new_empty(normed_TN.shape[0], self._down.n_rows)
        if self._inject is None or coeff_TC is None:
            coeff_TC = None
            ops.linears(normed_TN, (self._down,), (low_TR,))
        else:
            ops.linears(normed_TN, (self._down, self._inject), (low_TR, coeff_TC))
        ops.read_gates(low_TR, coeff_TC, self._streams)
        gate_TN = ops.linear(low_TR, self._up)
        ops.stream_mix(normed_TN.view_as(streams_TCD), gate_TN.view_as(streams_TCD), x_TD)


class HyperResidual:
    """C streams.

    ``roles``: embed, layers.<l>.{attn,ffn}_read.{norm,down,up,inject}, head_read.{norm,down,up}.
    """

    def __init__(self, spec: ModelSpec, roles: Roles, ops: Ops) -> None:
        self._d_model = spec.d_model
        self._streams = spec.streams
        self._ops = ops
        self._embed = matrix(roles, "embed", spec.n_vocab, spec.d_model)
        self._reads: dict[tuple[str, int], _Read] = {
            (site, layer): _Read(spec, roles, f"layers.{layer}.{site}_read", True, ops)
            for layer in range(spec.n_layers)
            for site in _INPUT
        }
        self._head = _Read(spec, roles, "head_read", False, ops)

    def buffers(self) -> Mapping[str, BufferSpec]:
        """The streams, what every block reads and writes, and the coefficients of both sites."""
        coeff = BufferSpec((self._streams,), self._ops.dtype)
        common = _common_buffers(self._d_model, self._streams, self._ops.dtype)
        return common | {"coeff_attn": coeff, "coeff_ffn": coeff}

    def embed(self) -> Part:
        """Every stream starts as the table row of the id."""

        def run(frame: Frame) -> None:
            row_TD = self._ops.lookup(self._embed, frame["ids"], self._ops.dtype)
            frame["residual"].copy_(row_TD.unsqueeze(1).expand_as(frame["residual"]))

        return Part("embed", ("ids",), ("residual",), run)

    def read(self, site: Site, layer: int) -> Part:
        """x = gated mean of the normed streams, and the coefficients of the write that follows."""
        target, coeff, read = _INPUT[site], f"coeff_{site}", self._reads[site, layer]

        def run(frame: Frame) -> None:
            read.run(frame["residual"], frame[target], frame[coeff])

        return Part(f"{site}_read", ("residual",), (target, coeff), run)

    def write(self, site: Site, layer: int) -> Part:
        """Stream c receives coeff[c] times the block output."""
        source, coeff = _OUTPUT[site], f"coeff_{site}"

        def run(frame: Frame) -> None:
            self.add_late(frame["residual"], frame[coeff], frame[source])

        return Part(f"{site}_write", ("residual", coeff, source), ("residual",), run)

    def head(self) -> Part:
        """head_x = gated mean of the normed streams; there is no final norm besides."""

        def run(frame: Frame) -> None:
            self._head.run(frame["residual"], frame["head_x"], None)

        return Part("head_read", ("residual",), ("head_x",), run)

    def add_late(
        self, residual: torch.Tensor, coeff_TC: torch.Tensor | None, late_TD: torch.Tensor
    ) -> None:
        """Stream c += coeff[c] * late, on the raw streams."""
        assert coeff_TC is not None, "hyper-connections write with the coefficients of a read"
        if residual.shape[0] <= _BLOCK_TOKENS:
            self._ops.stream_write(residual, late_TD, coeff_TC)
            return
        for rows in _blocks(residual.shape[0]):
            self._ops.stream_write(residual[rows], late_TD[rows], coeff_TC[rows])

    def mixer_input(
        self,
        layer: int,
        residual: torch.Tensor,
        x_TD: torch.Tensor,
        coeff_TC: torch.Tensor | None,
    ) -> None:
        """x = gated mean of the normed streams; coeff = 2 sigmoid(inject normed / C)."""
        self._reads["attn", layer].run(residual, x_TD, coeff_TC)


def _blocks(n_tokens: int) -> Iterator[slice]:
    for start in range(0, n_tokens, _BLOCK_TOKENS):
        yield slice(start, start + _BLOCK_TOKENS)


def build_residual(spec: ModelSpec, roles: Roles, ops: Ops) -> Residual:
    """The residual a model's spec asks for."""
    build: Callable[[ModelSpec, Roles, Ops], Residual]
    build = HyperResidual if spec.streams > 1 else PlainResidual
    return build(spec, roles, ops)
