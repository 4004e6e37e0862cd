# mypy: allow-untyped-defs, allow-untyped-decorators
"""Routing on the GPU: top K of each token's logits, and weights; rules: the package docstring.

One program takes all tokens of a window as a tile [T2, E2]; a token's row never meets another one.
Scores are compared as int32 that order alike (a warp finds their maximum in one instruction); of
equal scores the lowest column comes first. NaN counts as the highest score.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from strata.kernels.pointwise.triton import sigmoid
from strata.kernels.router.ref import Scoring
from strata.kernels.triton_common import EXACT

_LAST = tl.constexpr(0x7FFFFFFF)
_NOTHING = tl.constexpr(-(2**31))
_SUM_EPS = tl.constexpr(1e-20)


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
    logits, bias, correction, STRIDE, T: tl.constexpr, T2: tl.constexpr, E: tl.constexpr,
    E2: tl.constexpr, K: tl.constexpr, K2: tl.constexpr, SCORING: tl.constexpr,
    NORMALIZE: tl.constexpr, SCALE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    BIAS: tl.constexpr, CORRECTION: tl.constexpr,
):  # fmt: skip
    """(expert int32, weight f32), both [T2, K2]; what lies past T and K means nothing."""
    t = tl.arange(0, T2)[:, None]
    e = tl.arange(0, E2)[None, :]
    ok = (t < T) & (e < E)
    x = tl.load(logits + t * STRIDE + e, mask=ok, other=0.0)
    if BIAS:
        x += tl.load(bias + e, mask=e < E, other=0.0)
    choice = x
    if SCORING == "sigmoid":
        x = sigmoid(x)
        choice = x
        if CORRECTION:
            choice = x + tl.load(correction + e, mask=e < E, other=0.0)
        if GROUPS > 1:
            choice = _best_groups_only(choice, T2, E, GROUPS, KEPT)
    key = tl.where(e < E, sort_bits(choice), _NOTHING)
    rank = tl.arange(0, K2)[None, :]
    expert = tl.zeros((T2, K2), tl.int32)
    weight = tl.zeros((T2, K2), tl.float32)
    total = tl.zeros((T2,), tl.float32)
    highest = tl.zeros((T2,), tl.float32)
    for k in tl.static_range(K):
        best = tl.max(key, axis=1)
        column = tl.min(tl.where(key == best[:, None], e, E2), axis=1)
        key = tl.where(e == column[:, None], _NOTHING, key)
        if SCORING == "sigmoid":
            w = tl.sum(tl.where(e == column[:, None], x, 0.0), axis=1)
        else:
            w = unsorted(best)
            if k == 0:
                highest = w
            w = tl.exp(w - highest)
        total += w
        expert = tl.where(rank == k, column[:, None], expert)
        weight = tl.where(rank == k, w[:, None], weight)
    if SCORING == "softmax" and not NORMALIZE:
        power = tl.exp(tl.where(e < E, x - highest[:, None], float("-inf")))
        total = folded(power, T2, E2)
    if SCORING == "sigmoid":
        total += _SUM_EPS
    if SCORING != "sigmoid" or NORMALIZE:
        weight = tl.div_rn(weight, tl.broadcast_to(total[:, None], (T2, K2)))
    return expert, weight * SCALE


@triton.jit
def route_kernel(
    logits, bias, correction, expert, weight, STRIDE, T: tl.constexpr, T2: tl.constexpr,
    E: tl.constexpr, E2: tl.constexpr, K: tl.constexpr, K2: tl.constexpr, SCORING: tl.constexpr,
    NORMALIZE: tl.constexpr, SCALE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    BIAS: tl.constexpr, CORRECTION: tl.constexpr,
):  # fmt: skip
    """One program."""
    e, w = routed(
        logits, bias, correction, STRIDE, T, T2, E, E2, K, K2, SCORING, NORMALIZE, SCALE, GROUPS,
        KEPT, BIAS, CORRECTION,
    )  # fmt: skip
    t = tl.arange(0, T2)[:, None]
    k = tl.arange(0, K2)[None, :]
    ok = (t < T) & (k < K)
    tl.store(expert + t * K + k, e, mask=ok)
    tl.store(weight + t * K + k, w, mask=ok)


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
    n_tokens, n_experts = logits_TE.shape
    grouped = scoring == "sigmoid" and n_groups > 1
    if grouped:
        whole = all(n & (n - 1) == 0 for n in (n_experts, n_groups))
        assert whole, f"{n_experts} experts in {n_groups} groups: powers of two are needed"
    return {
        "logits": logits_TE,
        "bias": logits_TE if bias_E is None else bias_E,
        "correction": logits_TE if correction_E is None else correction_E,
        "STRIDE": logits_TE.stride(0),
        "T": n_tokens,
        "T2": triton.next_power_of_2(n_tokens),
        "E": n_experts,
        "E2": triton.next_power_of_2(n_experts),
        "K": n_active,
        "K2": triton.next_power_of_2(n_active),
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
    # one warp needs no barriers; four tokens are too many numbers for it
    warps = 1 if len(logits_TE) <= 2 else 4
    route_kernel[(1,)](expert=expert_R, weight=weight_R, **args, num_warps=warps, **EXACT)
