"""Keys and values of one attention layer as state: floats, or codes with scales (kernels/kv_quant).

A token's codes and scales come from its own numbers alone, so they do not depend on the window it
came in, and an entry is overwritten whole. What models/attention says of rejected tokens holds.

Only keys and values are encoded. The indexer's block keys stay f16 then: there is one per block,
and they decide what is read, not how exactly. Latent rows (models/mla) serve every head as key and
value at once and are small already: refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from strata.core.errors import SettingError
from strata.kernels.kv_quant import bits_of, decode, encode, group_of
from strata.memory.state import SequenceState, StateSpec

KV_DTYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "f64": torch.float64,
    "int8": torch.int8,
    "q4": torch.uint8,
}
"""Element types of caches by the names of ``--kv``; integers are codes."""

LEAST_GROUP = 8
"""Numbers that a scale must at least be for: with fewer, f16 is hardly larger."""

_ROWS = 512
"""Positions decoded at once: temporary numbers stay in the processor's caches."""

Seen = tuple[torch.Tensor, torch.Tensor, int, torch.Tensor | None]


def is_encoded(dtype: torch.dtype) -> bool:
    """Whether a cache of that element type holds codes."""
    return not dtype.is_floating_point


def float_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the caches that stay floats beside keys and values of that type."""
    return torch.float16 if is_encoded(dtype) else dtype


def require_floats(dtype: torch.dtype, what: str) -> None:
    """SettingError where codes cannot be had."""
    if is_encoded(dtype):
        raise SettingError(
            f"--kv {_name(dtype)}: {what} keeps one latent row a token for all heads, which is "
            f"stored as floats only; pass --kv f16 or f32"
        )


def _name(dtype: torch.dtype) -> str:
    return next(name for name, known in KV_DTYPES.items() if known == dtype)


@dataclass(frozen=True)
class KvCache:
    """Where one layer's keys and values lie. n_groups: key/value heads of ``dim`` numbers."""

    layer: int
    n_groups: int
    dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if is_encoded(self.dtype) and self.group < LEAST_GROUP:
            raise SettingError(
                f"--kv {_name(self.dtype)}: heads of {self.dim} numbers would need a scale for "
                f"every {self.group} of them, at least {LEAST_GROUP} are meant; pass --kv f16"
            )

    @property
    def encoded(self) -> bool:
        """Whether codes are stored."""
        return is_encoded(self.dtype)

    @property
    def group(self) -> int:
        """Numbers of a scale."""
        return group_of(bits_of(self.dtype), self.dim)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the state tensors."""
        return ("k", "v", "k_scale", "v_scale") if self.encoded else ("k", "v")

    @property
    def decoded_bytes(self) -> int:
        """Of a position's key and value while a window on the CPU reads them; 0 for floats."""
        return 2 * self.n_groups * self.dim * 2 if self.encoded else 0

    def state(self) -> dict[str, StateSpec]:
        """Positional: an entry is one token's."""
        if not self.encoded:
            kv = StateSpec("positional", (self.n_groups, self.dim), self.dtype)
            return {"k": kv, "v": kv}
        width = self.dim * bits_of(self.dtype) // 8
        codes = StateSpec("positional", (self.n_groups, width), self.dtype)
        scales = (self.n_groups, self.dim // self.group)
        scale = StateSpec("positional", scales, torch.float16)
        return {"k": codes, "v": codes, "k_scale": scale, "v_scale": scale}

    def write(self, state: SequenceState, name: str, start: int, x_TGd: torch.Tensor) -> None:
        """Keys ("k") or values ("v") of the tokens from start on."""
        end = start + len(x_TGd)
        if not self.encoded:
            state.tensor(self.layer, name)[start:end].copy_(x_TGd)
            return
        codes, scale = encode(x_TGd, bits_of(self.dtype), self.group)
        state.tensor(self.layer, name)[start:end].copy_(codes)
        state.tensor(self.layer, f"{name}_scale")[start:end].copy_(scale)

    def seen(
        self,
        state: SequenceState,
        start: int,
        end: int,
        window_tokens: int | None,
        selected_Tn: torch.Tensor | None,
    ) -> Seen:
        """Keys, values, start and selection for attention of the tokens at start to end - 1.

        Of codes only what some token sees is decoded; start and selection then count those.
        """
        k, v = (state.tensor(self.layer, name) for name in "kv")
        if not self.encoded:
            return k[:end], v[:end], start, selected_Tn
        if selected_Tn is None or window_tokens is not None:
            first = 0 if window_tokens is None else max(0, start + 1 - window_tokens)
            some = slice(first, end)
            cut = None if selected_Tn is None else selected_Tn[:, first:].contiguous()
            return *self._decoded(state, some), start - first, cut
        wanted = selected_Tn.any(0)
        wanted[start:] = True  # the window's own positions stand last, as attention expects them
        index = wanted.nonzero().squeeze(-1)
        selected = selected_Tn[:, index].contiguous()
        return *self._decoded(state, index), len(index) - (end - start), selected

    def _decoded(
        self, state: SequenceState, at: slice | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._decode(state, "k", at), self._decode(state, "v", at)

    def _decode(self, state: SequenceState, name: str, at: slice | torch.Tensor) -> torch.Tensor:
        codes = state.tensor(self.layer, name)[at]
        scale = state.tensor(self.layer, f"{name}_scale")[at]
        out = torch.empty(len(codes), self.n_groups, self.dim, dtype=torch.float16)
        for first in range(0, len(codes), _ROWS):
            some = slice(first, first + _ROWS)
            out[some] = decode(codes[some], scale[some])
        return out
