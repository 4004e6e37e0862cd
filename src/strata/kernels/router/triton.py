# mypy: allow-untyped-defs, allow-untyped-decorators
"""Routing on the GPU: top K of each token's logits, and weights; rules: the package docstring.

Program t takes token t with one warp, which needs no barriers. Scores are compared as int32 that
order alike (a warp finds their maximum in one instruction); of equal scores the lowest column comes
first. NaN counts as the highest score.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from strata.kernels.pointwise.triton import sigmoid
from strata.kernels.router.ref import Scoring
from strata.kernels.triton_common import EXACT, INTERPRET, opaque_zero

_LAST = tl.constexpr(0x7FFFFFFF)
_NOTHING = tl.constexpr(-(2**31))
_SUM_EPS = tl.constexpr(1e-20)
MOST_ACTIVE = 32
"""Experts of a token: one for each thread."""


@triton.jit
def sort_bits(x):
    """int32 that order like f32 x; -0 equals +0, NaN is the highest."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 becomes +0
    bits = tl.where(bits < 0, bits ^ _LAST, bits)
    return tl.where(x == x, bits, _LAST)


@triton.jit
def unsorted(bits):
    """The f32 that such bits came from; the highest is NaN."""
    return tl.where(bits < 0, bits ^ _LAST, bits).to(tl.float32, bitcast=True)


@triton.jit
def sort_keys(x, column):
    """int64 keys that order like f32 x, equal ones by falling column; NaN first."""
    return (sort_bits(x).to(tl.int64) << 32) | (column ^ _LAST).to(tl.int64)


@triton.jit
def column_of(key):
    """The column in a key."""
    return (key & _LAST).to(tl.int32) ^ _LAST


@triton.jit
def folded(x, ROWS: tl.constexpr, N: tl.constexpr):
    """Row sums of [ROWS, N] by sums of two neighbours: one order for every tile shape.

    tl.sum's order follows the tile's layout, which follows the number of tokens (seen on an H200).
    """
    if N == 1:
        y = tl.reshape(x, (ROWS,))
    else:
        HALF: tl.constexpr = N // 2
        y = folded(tl.sum(tl.reshape(x, (ROWS, HALF, 2)), axis=2), ROWS, HALF)
    return y


@triton.jit
def _best_groups_only(
    choice, T2: tl.constexpr, E: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr
):
    """-inf outside the KEPT groups of the largest sums of two best scores."""
    SIZE: tl.constexpr = E // GROUPS
    c = tl.reshape(choice, (T2, GROUPS, SIZE))
    i = tl.arange(0, SIZE)[None, None, :]
    best = tl.max(c, axis=2)
    at = tl.min(tl.where(c == best[:, :, None], i, SIZE), axis=2)
    second = tl.max(tl.where(i == at[:, :, None], float("-inf"), c), axis=2)
    score = best + second
    g = tl.arange(0, GROUPS)
    mine, other = score[:, :, None], score[:, None, :]
    ahead = (other > mine) | ((other == mine) & (g[None, None, :] < g[None, :, None]))
    kept = tl.sum(ahead.to(tl.int32), axis=2) < KEPT
    return tl.reshape(tl.where(kept[:, :, None], c, float("-inf")), (T2, E))


@triton.jit
def routed(
    logits, bias, correction, E: tl.constexpr, E2: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    SCORING: tl.constexpr, NORMALIZE: tl.constexpr, SCALE: tl.constexpr, GROUPS: tl.constexpr,
    KEPT: tl.constexpr, BIAS: tl.constexpr, CORRECTION: tl.constexpr,
):  # fmt: skip
    """(expert int32, weight f32), both [KP], of one token; what lies past K means nothing."""
    e = tl.arange(0, E2)
    x = tl.load(logits + e, mask=e < E, other=0.0)
    if BIAS:
        x += tl.load(bias + e, mask=e < E, other=0.0)
    choice = x
    if SCORING == "sigmoid":
        x = sigmoid(x)
        choice = x
        if CORRECTION:
            choice = x + tl.load(correction + e, mask=e < E, other=0.0)
        if GROUPS > 1:
            kept = _best_groups_only(tl.reshape(choice, (1, E)), 1, E, GROUPS, KEPT)
            choice = tl.reshape(kept, (E2,))
    key = tl.where(e < E, sort_bits(choice), _NOTHING)
    rank = tl.arange(0, KP)
    expert = tl.zeros((KP,), tl.int32)
    weight = tl.zeros((KP,), tl.float32)
    highest = unsorted(tl.max(key, axis=0))
    total = 0.0
    # a loop, not K copies of it: instructions that run once come slowly (H200: half of the time)
    for k in range(0, K if INTERPRET else K + opaque_zero()):
        best = tl.max(key, axis=0)
        column = tl.min(tl.where(key == best, e, E2), axis=0)
        key = tl.where(e == column, _NOTHING, key)
        if SCORING == "sigmoid":
            w = tl.sum(tl.where(e == column, x, 0.0), axis=0)
        else:
            w = tl.exp(unsorted(best) - highest)
        total += w
        expert = tl.where(rank == k, column, expert)
        weight = tl.where(rank == k, w, weight)
    if SCORING == "softmax" and not NORMALIZE:
        power = tl.exp(tl.where(e < E, x - highest, float("-inf")))
        total = tl.sum(folded(tl.reshape(power, (1, E2)), 1, E2), axis=0)
    if SCORING == "sigmoid":
        total += _SUM_EPS
    if SCORING != "sigmoid" or NORMALIZE:
        weight = tl.div_rn(weight, tl.full((KP,), 1.0, tl.float32) * total)
    return expert, weight * SCALE


@triton.jit
def route_kernel(
    logits, bias, correction, expert, weight, STRIDE, E: tl.constexpr, E2: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, SCORING: tl.constexpr, NORMALIZE: tl.constexpr,
    SCALE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, BIAS: tl.constexpr,
    CORRECTION: tl.constexpr,
):  # fmt: skip
    """Program t: token t."""
    t = tl.program_id(0)
    e, w = routed(
        logits + t * STRIDE, bias, correction, E, E2, K, KP, SCORING, NORMALIZE, SCALE, GROUPS,
        KEPT, BIAS, CORRECTION,
    )  # fmt: skip
    k = tl.arange(0, KP)
    tl.store(expert + t * K + k, e, mask=k < K)
    tl.store(weight + t * K + k, w, mask=k < K)


def router_args(
    logits_TE: torch.Tensor,
    *,
    n_active: int,
    scoring: Scoring,
    normalize: bool,
    scale: float = 1.0,
    bias_E: torch.Tensor | None = None,
    correction_E: torch.Tensor | None = None,
    n_groups: int = 1,
    groups_kept: int = 1,
) -> dict[str, object]:
    """Arguments of a kernel that calls ``routed``, by name."""
    n_experts = logits_TE.shape[1]
    assert n_active <= MOST_ACTIVE, f"{n_active} experts a token, at most {MOST_ACTIVE}"
    grouped = scoring == "sigmoid" and n_groups > 1
    if grouped:
        whole = all(n & (n - 1) == 0 for n in (n_experts, n_groups))
        assert whole, f"{n_experts} experts in {n_groups} groups: powers of two are needed"
    return {
        "logits": logits_TE,
        "bias": logits_TE if bias_E is None else bias_E,
        "correction": logits_TE if correction_E is None else correction_E,
        "STRIDE": logits_TE.stride(0),
        "E": n_experts,
        "E2": triton.next_power_of_2(n_experts),
        "K": n_active,
        "KP": MOST_ACTIVE,
        "SCORING": scoring,
        "NORMALIZE": normalize,
        "SCALE": scale,
        "GROUPS": n_groups if grouped else 1,
        "KEPT": groups_kept,
        "BIAS": bias_E is not None,
        "CORRECTION": scoring == "sigmoid" and correction_E is not None,
    }


def route(
    logits_TE: torch.Tensor, expert_R: torch.Tensor, weight_R: torch.Tensor, **rule: object
) -> None:
    """expert_R int32 and weight_R f32 [T * K], ranks in order, from logits f32 [T, E]. One launch.

    rule: the keywords of ``router_args``.
    """
    args = router_args(logits_TE, **rule)  # type: ignore[arg-type]
    route_kernel[(len(logits_TE),)](expert=expert_R, weight=weight_R, **args, num_warps=1, **EXACT)
