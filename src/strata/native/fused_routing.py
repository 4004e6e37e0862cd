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


_ROWS = fused_ops("portable")


def group_rows(
    expert_R: I32,
    n_active: int,
    fast_addr_E: npt.NDArray[np.int64],
    fast_place: int,
    other_place: int,
) -> tuple[npt.NDArray[np.int8], RowGroups, RowGroups]:
    """Rows by distinct expert in order of first appearance, experts with an address apart.

    Returns int8 [R]: fast_place where the row's expert has an address, else other_place; the groups
    of experts with an address; the other groups.
    EngineError for an expert number that does not exist.
    """
    n = len(expert_R)
    if expert_R.dtype != np.int32 or fast_addr_E.dtype != np.int64:
        raise EngineError(f"group_rows: experts {expert_R.dtype}, addresses {fast_addr_E.dtype}")
    expert_R, fast_addr_E = np.ascontiguousarray(expert_R), np.ascontiguousarray(fast_addr_E)
    lists = np.empty(4 * n + 2, np.int32)
    place_R = np.empty(n, np.int8)
    counts = np.empty(4, np.int64)
    wrong = _ROWS.group_rows(
        n,
        expert_R.ctypes.data,
        n_active,
        fast_addr_E.ctypes.data,
        len(fast_addr_E),
        fast_place,
        other_place,
        lists.ctypes.data,
        place_R.ctypes.data,
        counts.ctypes.data,
    )
    if wrong >= 0:
        raise EngineError(
            f"row {wrong} is routed to expert {expert_R[wrong]} of {len(fast_addr_E)}"
        )
    fast_groups, fast_rows, groups, rows = counts.tolist()
    middle = 2 * fast_groups + 1 + 2 * fast_rows
    end = middle + 2 * groups + 1 + 2 * rows
    return place_R, _cut(lists[:middle], fast_groups), _cut(lists[middle:end], groups)


def _cut(lists: I32, groups: int) -> RowGroups:
    rows = (len(lists) - 2 * groups - 1) // 2
    first = 2 * groups + 1
    return RowGroups(
        lists[:groups], lists[groups:first], lists[first : first + rows], lists[first + rows :]
    )
