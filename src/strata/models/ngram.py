"""The n-gram (PLE) block: hashed rows of a large table, gated into every residual stream.

It runs before a layer's read. Which rows a token needs depends on token ids only, so the host
gathers them before the window runs (``Ngram.rows``) and the block starts from "ngram_rows".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from strata.core.errors import FormatError
from strata.kernels.embed import lookup
from strata.kernels.ops import Ops
from strata.kernels.weight import Weight
from strata.memory.frame import Frame
from strata.memory.state import StateSpec
from strata.models.parts import Part
from strata.models.ring import assert_can_cut_back, ring_spec
from strata.models.roles import Roles, matrix, vector
from strata.models.spec import ModelSpec, NgramSpec

# Tokens at once: bounds the temporaries, which are several times the streams.
_BLOCK_TOKENS = 256
_FEW_TOKENS = 4


class Ngram:
    """The block in front of one layer. ``roles``: ngram.* as listed in NgramSpec."""

    def __init__(
        self, layer: int, spec: NgramSpec, model: ModelSpec, roles: Roles, ops: Ops
    ) -> None:
        self.layer = layer
        self.spec = spec
        self.ops = ops
        self.row_width = len(spec.head_vocab) * spec.head_dim
        self._d_model = model.d_model
        self._streams = model.streams
        self._eps = model.norm_eps
        wide = model.streams * model.d_model
        self._key = matrix(roles, "ngram.key", wide, self.row_width)
        self._value = matrix(roles, "ngram.value", model.d_model, self.row_width)
        self._norm_key = vector(roles, "ngram.norm_key", (wide,), ops.dtype)
        self._norm_query = vector(roles, "ngram.norm_query", (wide,), ops.dtype)
        self._norm_conv = vector(roles, "ngram.norm_conv", (wide,), ops.dtype)
        self._taps_PN = (
            vector(roles, "ngram.conv", (wide, spec.conv_taps), ops.dtype).t().contiguous()
        )
        self.table = _table(spec, roles)

    @property
    def _n_past(self) -> int:
        return (self.spec.conv_taps - 1) * self.spec.dilation

    def state(self) -> Mapping[str, StateSpec]:
        """Past inputs of the convolution: the normed u of every stream."""
        wide = self._streams * self._d_model
        return {"ngram_conv": ring_spec(self._n_past, wide, self.ops.dtype)}

    def rows(self, previous: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """What belongs into "ngram_rows" for tokens that follow previous, [T, row_width] f32."""
        ids_TH = row_ids(self.spec, previous, tokens)
        return gather(self.spec, self.table, ids_TH, self.ops.lookup)

    def part(self) -> Part:
        """The one step."""
        return Part(
            "ngram", ("residual", "ngram_rows", "ngram_conv"), ("residual", "ngram_conv"), self._run
        )

    def _run(self, frame: Frame) -> None:
        assert_can_cut_back(frame)
        ring = frame.state.tensor(self.layer, "ngram_conv")
        for start in range(0, frame.T, _BLOCK_TOKENS):
            rows = slice(start, start + _BLOCK_TOKENS)
            position = frame.start + start
            residual = frame["residual"][rows]
            u_TN = self._gated_value(residual, frame["ngram_rows"][rows])
            column_TN = self.ops.rms_norm(u_TN, self._norm_conv, self._eps, self._streams)
            self.ops.ngram_conv(
                ring, position, column_TN, self._taps_PN, self.spec.dilation, u_TN,
                residual.flatten(1),
            )  # fmt: skip

    def _gated_value(self, streams_TCD: torch.Tensor, rows_TE: torch.Tensor) -> torch.Tensor:
        """u = gate of each stream times the value, [T, C * D] (E: width of the gathered rows)."""
        ops, eps, streams = self.ops, self._eps, self._streams
        key_TN = streams_TCD.new_empty(streams_TCD.shape[0], streams * self._d_model)
        value_TD = key_TN.new_empty(key_TN.shape[0], self._d_model)
        ops.linears(rows_TE.to(ops.dtype), (self._key, self._value), (key_TN, value_TD))
        key_TN = ops.rms_norm(key_TN, self._norm_key, eps, streams)
        query_TN = ops.rms_norm(streams_TCD.flatten(1), self._norm_query, eps, streams)
        u_TCD = ops.ngram_gate(key_TN.view_as(streams_TCD), query_TN.view_as(streams_TCD), value_TD)
        return u_TCD.flatten(1)


def _table(spec: NgramSpec, roles: Roles) -> Weight:
    """The table; it may have padding rows after those that can be hashed to."""
    n_rows = max(o + v for o, v in zip(spec.head_offset, spec.head_vocab, strict=True))
    table = roles.get("ngram.table")
    if not isinstance(table, Weight) or table.n_cols != spec.head_dim or table.n_rows < n_rows:
        shape = (table.n_rows, table.n_cols) if isinstance(table, Weight) else "missing"
        raise FormatError(
            f"ngram.table is {shape}, the config implies at least [{n_rows}, {spec.head_dim}]; "
            f"check that all parts of the file are there"
        )
    return table


def row_ids(
    spec: NgramSpec, previous: Sequence[int], tokens: Sequence[int]
) -> npt.NDArray[np.int64]:
    """Table rows of each token, [T, heads]: bigram heads first, then trigrams and so on.

    previous: the tokens before these, at least ngram_size - 1 of them if there are that many. The
    token s places back counts as EOS when the sequence starts, or an EOS lies, among the s places
    before; an EOS does not cut its own past.
    """
    if 0 < len(tokens) <= _FEW_TOKENS:
        return np.array(_few_row_ids(spec, previous, tokens), dtype=np.int64)
    n_back = spec.ngram_size - 1
    eos = np.uint64(spec.eos_token)
    past = np.asarray(previous[max(0, len(previous) - n_back) :], dtype=np.uint64)
    ids = np.concatenate(
        [np.full(n_back - len(past), eos), past, np.asarray(tokens, dtype=np.uint64)]
    )
    n_tokens = len(tokens)
    multipliers = np.asarray(spec.multipliers, dtype=np.uint64)
    vocab = np.asarray(spec.head_vocab, dtype=np.uint64)
    offset = np.asarray(spec.head_offset, dtype=np.uint64)
    mixed = ids[n_back:] * multipliers[0]
    cut = np.zeros(n_tokens, dtype=bool)
    rows: list[npt.NDArray[np.uint64]] = []
    for back in range(1, spec.ngram_size):
        token = ids[n_back - back : n_back - back + n_tokens]
        cut |= token == eos
        mixed = mixed ^ (np.where(cut, eos, token) * multipliers[back])
        heads = slice((back - 1) * spec.heads_per_ngram, back * spec.heads_per_ngram)
        rows.append(mixed[:, None] % vocab[heads] + offset[heads])
    return np.concatenate(rows, axis=1).astype(np.int64)


def _few_row_ids(
    spec: NgramSpec, previous: Sequence[int], tokens: Sequence[int]
) -> list[list[int]]:
    """``row_ids`` in Python's integers: a window stands waiting, and NumPy takes several times as
    long for so few numbers."""
    n_back, eos, per = spec.ngram_size - 1, spec.eos_token, spec.heads_per_ngram
    heads = list(zip(spec.head_vocab, spec.head_offset, strict=True))
    past = list(previous[max(0, len(previous) - n_back) :])
    ids = [eos] * (n_back - len(past)) + past + list(tokens)
    found = []
    for at in range(n_back, n_back + len(tokens)):
        mixed, cut = ids[at] * spec.multipliers[0] & _MASK, False
        row: list[int] = []
        for back in range(1, spec.ngram_size):
            token = ids[at - back]
            cut = cut or token == eos
            mixed ^= (eos if cut else token) * spec.multipliers[back] & _MASK
            row += [mixed % n + first for n, first in heads[(back - 1) * per : back * per]]
        found.append(row)
    return found


def gather(
    spec: NgramSpec,
    table: Weight,
    ids_TH: npt.NDArray[np.int64],
    look_up: Callable[[Weight, torch.Tensor, torch.dtype], torch.Tensor] = lookup,
) -> torch.Tensor:
    """Each token's rows side by side, [T, heads * head_dim] f32; touches only these rows."""
    rows = look_up(table, torch.from_numpy(ids_TH), torch.float32)
    return rows.view(-1, len(spec.head_vocab) * spec.head_dim)


@dataclass(frozen=True)
class NgramConstants:
    """What hashing needs besides the tokens; ``n_table_rows`` includes the padding of the table."""

    multipliers: tuple[int, ...]
    head_vocab: tuple[int, ...]
    head_offset: tuple[int, ...]
    n_table_rows: int


def ngram_constants(
    *,
    n_vocab: int,
    ngram_size: int,
    heads_per_ngram: int,
    vocab_base: int,
    divisible_by: int,
    seed: int,
    block_index: int = 0,
) -> NgramConstants:
    """The constants that an HF config implies (a GGUF file stores them).

    Multipliers: odd numbers from splitmix64 of seed + 10007 * block_index, small enough that token
    times multiplier stays below 2^63. Head vocabularies: consecutive primes from vocab_base up,
    block after block. block_index: which of the model's n-gram blocks, from 0.
    Source: Qwen4-Exp in transformers.
    """
    bound = max(1, (2**63 - 1) // max(n_vocab, 1) // 2)
    first = seed + 10007 * block_index
    draws = [_splitmix64(first + _GOLDEN * (i + 1)) for i in range(ngram_size)]
    n_heads = (ngram_size - 1) * heads_per_ngram
    primes = _primes_from(vocab_base, n_heads * (block_index + 1))[n_heads * block_index :]
    offsets = tuple(accumulate(primes, initial=0))
    return NgramConstants(
        multipliers=tuple(2 * (draw % bound) + 1 for draw in draws),
        head_vocab=tuple(primes),
        head_offset=offsets[:-1],
        n_table_rows=-(-offsets[-1] // divisible_by) * divisible_by,
    )


_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def _splitmix64(seed: int) -> int:
    """One output of the splitmix64 generator (Steele, Lea, Flood 2014) from this state."""
    z = (seed + _GOLDEN) & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


def _primes_from(start: int, n: int) -> list[int]:
    """The first n primes >= start."""
    found: list[int] = []
    candidate = max(start, 2)
    while len(found) < n:
        if all(candidate % divisor for divisor in range(2, math.isqrt(candidate) + 1)):
            found.append(candidate)
        candidate += 1
    return found
