"""Routing in plain torch; rules are in the package docstring."""

from __future__ import annotations

from typing import Literal, Protocol

import torch

from strata.kernels.pointwise import exp, sigmoid

Scoring = Literal["softmax", "sigmoid", "softmax_topk"]
_SUM_EPS = 1e-20


def route(
    logits_TE: torch.Tensor,
    *,
    n_active: int,
    scoring: Scoring,
    normalize: bool,
    scale: float = 1.0,
    correction_E: torch.Tensor | None = None,
    n_groups: int = 1,
    groups_kept: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose n_active experts a token -> (expert_TK int32, weight_TK)."""
    if scoring == "sigmoid":
        score_TE = sigmoid(logits_TE)
        choice_TE = score_TE if correction_E is None else score_TE + correction_E
        if n_groups > 1:
            choice_TE = _best_groups_only(choice_TE, n_groups, groups_kept)
        expert_TK = _top(choice_TE, n_active)
        weight_TK = score_TE.gather(-1, expert_TK)
        total_T1 = _row_sum(weight_TK) + _SUM_EPS if normalize else None
    else:
        # softmax keeps the order of the logits, and the logits have fewer ties
        expert_TK = _top(logits_TE, n_active)
        power_TE = exp(logits_TE - logits_TE.amax(-1, keepdim=True))
        weight_TK = power_TE.gather(-1, expert_TK)
        chosen_only = normalize or scoring == "softmax_topk"
        total_T1 = _row_sum(weight_TK) if chosen_only else power_TE.sum(-1, keepdim=True)
    if total_T1 is not None:
        weight_TK = weight_TK / total_T1
    return expert_TK.to(torch.int32), weight_TK * scale


class RouteRule(Protocol):
    """What a router does; ``models.spec.MoeSpec`` has it."""

    @property
    def n_active(self) -> int:
        """Experts of a token."""
        ...

    @property
    def scoring(self) -> Scoring:
        """See the package docstring."""
        ...

    @property
    def normalize(self) -> bool:
        """Divide the weights by their sum."""
        ...

    @property
    def scale(self) -> float:
        """Multiplies the weights."""
        ...

    @property
    def n_groups(self) -> int:
        """Groups of experts; 1: none."""
        ...

    @property
    def groups_kept(self) -> int:
        """Groups whose experts count."""
        ...


def route_rows(
    logits_TE: torch.Tensor,
    rule: RouteRule,
    bias_E: torch.Tensor | None,
    correction_E: torch.Tensor | None,
    expert_R: torch.Tensor,
    weight_R: torch.Tensor,
) -> None:
    """``route`` of logits + bias, by row: row r is token r // K, rank r % K."""
    expert_TK, weight_TK = route(
        logits_TE if bias_E is None else logits_TE + bias_E,
        n_active=rule.n_active,
        scoring=rule.scoring,
        normalize=rule.normalize,
        scale=rule.scale,
        correction_E=correction_E,
        n_groups=rule.n_groups,
        groups_kept=rule.groups_kept,
    )
    expert_R.copy_(expert_TK.flatten())
    weight_R.copy_(weight_TK.flatten())


def _top(score_TE: torch.Tensor, n: int) -> torch.Tensor:
    """Columns of the n highest scores, highest first, ties by lower column."""
    return torch.sort(score_TE, dim=-1, descending=True, stable=True).indices[..., :n]


def _row_sum(x_TK: torch.Tensor) -> torch.Tensor:
    """Sum of each row in rank order, which ``sum`` would not promise."""
    return x_TK.cumsum(-1)[:, -1:]


def _best_groups_only(choice_TE: torch.Tensor, n_groups: int, groups_kept: int) -> torch.Tensor:
    """The scores with -inf outside each token's best groups."""
    by_group = choice_TE.reshape(choice_TE.shape[0], n_groups, -1)
    best_two = torch.sort(by_group, dim=-1, descending=True, stable=True).values[..., :2]
    group_score = best_two.sum(-1)  # two terms: one order
    kept = _top(group_score, groups_kept)
    dropped = torch.ones_like(group_score, dtype=torch.bool).scatter_(-1, kept, False)
    return by_group.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(1)
