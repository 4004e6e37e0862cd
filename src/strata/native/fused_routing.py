"""The typed face of routing: experts and weights from logits, and routed rows grouped by expert."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from strata.core.errors import EngineError
from strata.native.fused_checks import at, fused_ops

_SCORINGS = {"softmax": 0, "sigmoid": 1, "softmax_topk": 2}

I32 = npt.NDArray[np.int32]


class FusedRouting:
    """The operations for one instruction set, as a CpuPool calls it."""

    def __init__(self, isa: str) -> None:
        self._ops = fused_ops(isa)

    def route(
        self,
        logits_TE: torch.Tensor,
        bias_E: torch.Tensor | None,
        n_active: int,
        scoring: str,
        normalize: bool,
        scale: float,
        correction_E: torch.Tensor | None,
        n_groups: int,
        groups_kept: int,
        expert_TK: torch.Tensor,
        weight_TK: torch.Tensor,
    ) -> None:
        """``kernels/router``, into expert int32 and weight of T * n_active numbers each."""
        n_tokens, n_experts = logits_TE.shape
        n = n_tokens * n_active
        whole = n_groups >= 1 and n_experts % n_groups == 0 and groups_kept <= n_groups
        if n_active > n_experts or not whole:
            raise EngineError(
                f"route: {n_active} of {n_experts} experts in {groups_kept} of {n_groups} groups"
            )
        self._ops.route(
            n_tokens,
            at(logits_TE, n_tokens * n_experts, "route: logits"),
            0 if bias_E is None else at(bias_E, n_experts, "route: bias"),
            n_experts,
            n_active,
            _SCORINGS[scoring],
            normalize,
            scale,
            0 if correction_E is None else at(correction_E, n_experts, "route: correction"),
            n_groups,
            groups_kept,
            at(expert_TK, n, "route: expert", torch.int32),
            at(weight_TK, n, "route: weight"),
        )


class RowGroups(NamedTuple):
    """Rows of one place by expert: entries start[g] .. start[g + 1] - 1 belong to expert[g]."""

    expert: I32
    start: I32
    row: I32
    token: I32


class RowGrouper:
    """Groups the routed rows of a layer; remembers where the address tables lie."""

    def __init__(self) -> None:
        self._ops = fused_ops("portable")  # integers only
        # a table is kept so that its id is never given to another
        self._tables: dict[int, tuple[npt.NDArray[np.int64], int]] = {}

    def group(
        self,
        expert_R: torch.Tensor,
        n_active: int,
        fast_addr_E: npt.NDArray[np.int64],
        fast_place: int,
        other_place: int,
    ) -> tuple[npt.NDArray[np.int8], RowGroups, RowGroups]:
        """Rows by distinct expert in order of first appearance, experts with an address apart.

        fast_addr_E: an array that lives on and changes in place.
        Returns int8 [R]: fast_place where the row's expert has an address, else other_place; the
        groups of experts with an address; the other groups.
        EngineError for an expert number that does not exist.
        """
        n = expert_R.shape[0]
        memory = np.empty(4 * n + 2 + (n + 3) // 4, np.int32)
        lists = memory.ctypes.data
        try:
            fast_groups, fast_rows, groups, rows = self._ops.group_rows(
                n,
                at(expert_R, n, "group_rows: expert", torch.int32),
                n_active,
                self._table(fast_addr_E),
                len(fast_addr_E),
                fast_place,
                other_place,
                lists,
                lists + 4 * (4 * n + 2),
            )
        except ValueError as error:
            raise EngineError(str(error)) from None
        place_R = memory[4 * n + 2 :].view(np.int8)[:n]
        middle = 2 * fast_groups + 1 + 2 * fast_rows
        fast = _cut(memory, 0, fast_groups, fast_rows)
        return place_R, fast, _cut(memory, middle, groups, rows)

    def _table(self, fast_addr_E: npt.NDArray[np.int64]) -> int:
        known = self._tables.get(id(fast_addr_E))
        if known is None:
            if fast_addr_E.dtype != np.int64 or not fast_addr_E.flags.c_contiguous:
                raise EngineError(f"group_rows: addresses are {fast_addr_E.dtype}, not plain int64")
            known = self._tables[id(fast_addr_E)] = (fast_addr_E, fast_addr_E.ctypes.data)
        return known[1]


def _cut(memory: I32, first: int, groups: int, rows: int) -> RowGroups:
    start = first + groups
    row = start + groups + 1
    token = row + rows
    return RowGroups(
        memory[first:start], memory[start:row], memory[row:token], memory[token : token + rows]
    )
