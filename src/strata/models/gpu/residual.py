"""The residual path on the GPU: models/residual with writes fused into the norm that follows.

Where a block's result is still pending, the read adds it to the residual in the same launch.
"""

from __future__ import annotations

from typing import Literal

import torch

from strata.kernels.embed.triton import lookup
from strata.kernels.hyper.triton import down, mix, rank_gate, up_mix, write_coefficients
from strata.kernels.hyper.triton_read import StreamWeights, is_plain, is_wide, new_turns, read
from strata.kernels.rms_norm.triton import Pending, add_norm
from strata.memory.frame import BufferSpec, Frame
from strata.models.gpu.roles import GpuRoles
from strata.models.gpu.rows import Rows, products, row_specs, rows_of
from strata.models.spec import ModelSpec

Site = Literal["attn", "ffn"]
INPUT: dict[Site, str] = {"attn": "x", "ffn": "ffn_x"}
OUTPUT: dict[Site, str] = {"attn": "mixer_out", "ffn": "ffn_out"}


class GpuResidual:
    """Streams [T, D], or [T, C, D] with hyper-connections. Roles as in models/residual."""

    def __init__(self, spec: ModelSpec, roles: GpuRoles) -> None:
        self._spec = spec
        self.table = roles.matrix("embed")
        self._hyper = spec.streams > 1
        sites: tuple[Site, ...] = ("attn", "ffn")
        keys = [f"layers.{layer}.{site}" for layer in range(spec.n_layers) for site in sites]
        if self._hyper:
            self._reads = {k: StreamRead(spec, roles, f"{k}_read", True) for k in keys}
            self._head = StreamRead(spec, roles, "head_read", False)
        else:
            self._norms = {k: roles.vector(f"{k}_norm") for k in keys}
            self._final_norm = roles.vector("final_norm")

    def buffers(self) -> dict[str, BufferSpec]:
        """The residual, and what every block reads and writes."""
        spec, f32 = self._spec, torch.float32
        d, c = spec.d_model, spec.streams
        found = {
            "ids": BufferSpec((), torch.int64),
            "residual": BufferSpec((c, d) if self._hyper else (d,), f32),
            "mixer_out": BufferSpec((d,), f32),
            "ffn_out": BufferSpec((d,), f32),
        }
        for name in ("x", "ffn_x", "head_x"):
            found |= row_specs(name, d)
        if self._hyper:
            found |= row_specs("hc_normed", c * d) | row_specs("hc_low", spec.hc_rank)
            found["hc_product"] = BufferSpec((spec.hc_rank + c,), f32)
            found["hc_gate"] = BufferSpec((c * d,), f32)
            found["coeff_attn"] = found["coeff_ffn"] = BufferSpec((c,), f32)
        return found

    @property
    def scratch(self) -> tuple[str, ...]:
        """Buffers that a read writes and nobody else reads."""
        return ("hc_normed", "hc_low", "hc_product", "hc_gate") if self._hyper else ()

    def embed(self, frame: Frame) -> None:
        """residual = table row of each id (every stream)."""
        lookup(self.table, frame["ids"], frame["residual"])

    def coeff(self, site: Site, frame: Frame) -> torch.Tensor | None:
        """Write coefficients of the last read of that site."""
        return frame[f"coeff_{site}"] if self._hyper else None

    def read(self, site: Site, layer: int, frame: Frame, pending: Pending | None = None) -> None:
        """Input of a block, as floats and int8, after adding what is pending."""
        key = f"layers.{layer}.{site}"
        if self._hyper:
            self._reads[key].run(frame, INPUT[site], self.coeff(site, frame), pending)
        else:
            self._norm(frame, self._norms[key], INPUT[site], pending)

    def corrected(self, layer: int, frame: Frame, kept: str) -> None:
        """What the layer's mixer would read of the residual as it is now, kept for
        ``corrected_input``; and its write coefficients. Only what the mixer's write waits for."""
        key = f"layers.{layer}.attn"
        if self._hyper:
            coeff = self.coeff("attn", frame)
            assert coeff is not None
            self._reads[key].coefficients(frame, coeff, kept)
        else:
            self._norm(frame, self._norms[key], kept, None)

    def corrected_specs(self, kept: str, target: str) -> dict[str, BufferSpec]:
        """Buffers of ``corrected`` and ``corrected_input``."""
        d = self._spec.d_model
        if not self._hyper:
            return row_specs(kept, d)
        return row_specs(kept, self._spec.streams * d) | row_specs(target, d)

    def corrected_input(self, layer: int, frame: Frame, kept: str, target: str) -> Rows:
        """The mixer's input from what ``corrected`` kept: the target rows, or (plain residuals)
        the kept ones."""
        if not self._hyper:
            return rows_of(frame, kept)
        self._reads[f"layers.{layer}.attn"].rest(frame, target, kept)
        return rows_of(frame, target)

    def head(self, frame: Frame) -> None:
        """Input of the output head."""
        if self._hyper:
            self._head.run(frame, "head_x", None, None)
        else:
            self._norm(frame, self._final_norm, "head_x", None)

    def pending(self, site: Site, frame: Frame, bias: torch.Tensor | None = None) -> Pending:
        """The block output of that site, not yet added."""
        return Pending(frame[OUTPUT[site]], self.coeff(site, frame), bias)

    def write(self, frame: Frame, pending: Pending) -> None:
        """Add a block output by itself."""
        self.add(frame["residual"], pending)

    def add(self, streams: torch.Tensor, pending: Pending) -> None:
        """The same for streams of any number of tokens."""
        add_norm(streams, None, self._spec.norm_eps, None, pending=pending)

    @property
    def eps(self) -> float:
        """Of every norm."""
        return self._spec.norm_eps

    def reader(self, site: Site, layer: int) -> StreamRead | torch.Tensor:
        """Who reads a block's input: a read of the streams, or the weight of a plain norm."""
        key = f"layers.{layer}.{site}"
        return self._reads[key] if self._hyper else self._norms[key]

    @property
    def head_reader(self) -> StreamRead | torch.Tensor:
        """The same for the output head."""
        return self._head if self._hyper else self._final_norm

    def _norm(
        self, frame: Frame, weight: torch.Tensor, target: str, pending: Pending | None
    ) -> None:
        rows = rows_of(frame, target)
        add_norm(
            frame["residual"], weight, self._spec.norm_eps, rows.x, pending=pending,
            quantized=rows.q,
        )  # fmt: skip


class StreamRead:
    """One READ of the streams. Without inject (the head) there are no coefficients."""

    def __init__(self, spec: ModelSpec, roles: GpuRoles, prefix: str, inject: bool) -> None:
        self._eps, self._streams = spec.norm_eps, spec.streams
        self.norm = roles.vector(prefix + ".norm").flatten()
        self.down, self.up = roles.matrix(prefix + ".down"), roles.matrix(prefix + ".up")
        self.inject = roles.matrix(prefix + ".inject") if inject else None
        self._weights = StreamWeights(self.norm, self.down, self.inject, self.up, self._eps)
        self._fused = is_plain(self._weights)
        self._at_once = self._fused and is_wide(spec.d_model)
        self._turns = new_turns(self.norm.device)

    def run(
        self, frame: Frame, target: str, coeff_TC: torch.Tensor | None, pending: Pending | None
    ) -> None:
        """Fill the target rows and the coefficients."""
        if self._at_once and len(frame["residual"]) == 1:
            normed, low, out = (rows_of(frame, name) for name in ("hc_normed", "hc_low", target))
            read(
                self._weights, frame["residual"], pending, normed.x, low.x, coeff_TC, out.x, out.q,
                self._turns,
            )  # fmt: skip
            return
        self._normed(frame, "hc_normed", pending)
        self._mixed(frame, target, "hc_normed", coeff_TC)

    def coefficients(self, frame: Frame, coeff_TC: torch.Tensor, kept: str) -> None:
        """The first part of a read: the normed streams into the kept rows, and the coefficients."""
        assert self.inject is not None, "the head has no coefficients"
        self._normed(frame, kept, None)
        normed, low = rows_of(frame, kept), rows_of(frame, "hc_low").x
        if self._fused:
            write_coefficients(normed.x, self.inject, self._streams, coeff_TC)
            return
        product_TC = frame["hc_product"].view(-1)[: coeff_TC.numel()].view(coeff_TC.shape)
        products((self.inject,), normed, (product_TC,))
        rank_gate(product_TC, low[:, :0], coeff_TC, self._streams)

    def rest(self, frame: Frame, target: str, kept: str) -> None:
        """The second part: the target rows from the kept ones."""
        self._mixed(frame, target, kept, None)

    def _normed(self, frame: Frame, into: str, pending: Pending | None) -> None:
        normed = rows_of(frame, into)
        tiles = self.down.is_tiles or (self.inject is not None and self.inject.is_tiles)
        add_norm(
            frame["residual"], self.norm, self._eps, normed.x, pending=pending,
            quantized=normed.q if tiles else None,
        )  # fmt: skip

    def _mixed(self, frame: Frame, target: str, source: str, coeff_TC: torch.Tensor | None) -> None:
        """Products of the normed streams; with coefficients too, or without."""
        normed, inject = rows_of(frame, source), None if coeff_TC is None else self.inject
        low, out = rows_of(frame, "hc_low"), rows_of(frame, target)
        if self._fused:
            down(normed.x, self.down, inject, self._streams, low.x, coeff_TC)
            up_mix(low.x, self.up, normed.x, self._streams, out.x, out.q)
            return
        product = frame["hc_product"]
        rank = self.down.n_rows
        if inject is None:
            product = product.view(-1)[: len(product) * rank].view(-1, rank)
            products((self.down,), normed, (product,))
        else:
            both = (product[:, :rank], product[:, rank:])
            products((self.down, inject), normed, both)
        rank_gate(product, low.x, coeff_TC, self._streams)
        products((self.up,), low, (frame["hc_gate"],), fresh=False)
        mix(frame["hc_gate"], normed.x, self._streams, out.x, out.q)
