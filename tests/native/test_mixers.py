"""Attention and the gated delta rule of the pool: near float64, and the same bits for every T."""

from __future__ import annotations

import pytest
import torch

from strata.core.errors import EngineError
from strata.kernels.attention import attention
from strata.kernels.gdn import l2_norm, recurrence
from tests.native.kit import ISAS, pool

POOLS = [(isa, workers) for isa in ISAS for workers in (1, 3)]
# heads, key/value heads, dk, dv, start, T
ATTENTION = [
    (4, 2, 64, 64, 30, 5),
    (8, 1, 96, 64, 0, 9),
    (6, 3, 80, 40, 100, 1),
    (16, 2, 128, 128, 300, 3),
    (2, 2, 24, 7, 5, 4),
    (40, 1, 20, 16, 9, 2),
]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def case(heads, groups, dk, dv, start, n_tokens, dtype):
    """q, k, v, sinks and a selection that always holds the token itself."""
    n = start + n_tokens
    q, k = draw(n_tokens, heads, dk), draw(n, groups, dk, seed=1).to(dtype)
    v = draw(n, groups, dv, seed=2).to(dtype)
    selected = (draw(n_tokens, n, seed=3) > 0) | torch.eye(n)[start:].bool()
    return q, k, v, draw(heads, seed=4), selected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", ATTENTION)
@pytest.mark.parametrize("window", [None, 7])
def test_attention(sizes, dtype, window) -> None:
    """Expectation: float64 within 1e-5; all pools, and token by token, the same bits."""
    *_, start, n_tokens = sizes
    q, k, v, sinks_H, selected_Tn = case(*sizes, dtype)
    scale = q.shape[-1] ** -0.5
    for sinks in (None, sinks_H):
        for selected in (None, selected_Tn):
            expected = attention(q.double(), k, v, start, scale, window, sinks, selected)
            got = [
                pool(*which).attention(q, k, v, start, scale, window, sinks, selected)
                for which in POOLS
            ]
            assert (got[0] - expected).abs().max() < 1e-5
            for t in range(n_tokens):
                end = start + t + 1
                mask = None if selected is None else selected[t : t + 1, :end].contiguous()
                one = pool().attention(
                    q[t : t + 1], k[:end], v[:end], end - 1, scale, window, sinks, mask
                )
                assert torch.equal(one[0], got[0][t])
            for other in got[1:]:
                assert torch.equal(other, got[0])


def test_full_selection_equals_none() -> None:
    """Expectation: the op's contract."""
    q, k, v, sinks, selected = case(4, 2, 64, 64, 30, 5, torch.float32)
    plain = pool().attention(q, k, v, 30, 0.1, None, sinks)
    for full in (torch.ones_like(selected), torch.ones_like(selected).to(torch.uint8)):
        assert torch.equal(pool().attention(q, k, v, 30, 0.1, None, sinks, full), plain)


def test_values_at_the_front_of_keys() -> None:
    """Latent attention's cache: v is a view of k's rows, rows lie apart. Expectation: float64."""
    rows = draw(12, 1, 72)
    k, v = rows[:, :, :64], rows[:, :, :40]
    q = draw(3, 4, 64, seed=1)
    expected = attention(q.double(), k, v, 9, 0.2)
    assert (pool().attention(q, k, v, 9, 0.2) - expected).abs().max() < 1e-5


def test_far_scores_and_nan() -> None:
    """Scores of +-400 do not overflow; a NaN in q fills its own row only. Expectation: float64."""
    q, k, v, *_ = case(2, 1, 32, 32, 6, 3, torch.float32)
    big = q * 400
    expected = attention(big.double(), k, v, 6, 1.0)
    assert (pool().attention(big, k, v, 6, 1.0) - expected).abs().max() < 1e-4
    q[1, 0, 3] = float("nan")
    got = pool().attention(q, k, v, 6, 1.0)
    assert torch.isnan(got[1, 0]).all()
    assert torch.isfinite(got[0]).all() and torch.isfinite(got[2]).all()
    assert torch.isfinite(got[1, 1]).all()


def gdn_case(key_heads, value_heads, dk, dv, n_tokens):
    """q, k, v, keep, beta, key_head, state as the layer makes them."""
    q = l2_norm(draw(n_tokens, key_heads, dk)) / dk**0.5
    k = l2_norm(draw(n_tokens, key_heads, dk, seed=1))
    v = draw(n_tokens, value_heads, dv, seed=2)
    keep = torch.exp(-draw(n_tokens, value_heads, seed=3).abs())
    beta = torch.sigmoid(draw(n_tokens, value_heads, seed=4))
    key_head = torch.arange(value_heads) % key_heads
    return [q, k, v, keep, beta], key_head, draw(value_heads, dk, dv, seed=5)


@pytest.mark.parametrize("sizes", [(2, 6, 12, 20, 7), (4, 8, 128, 128, 9), (1, 3, 64, 40, 1)])
def test_gdn(sizes) -> None:
    """Expectation: float64 within 1e-5; all pools, and any split, the same bits."""
    args, key_head, state = gdn_case(*sizes)
    n_tokens = sizes[-1]
    state_64 = torch.empty_like(state).double()
    o_64 = recurrence(*(a.double() for a in args), key_head, state.double(), state_64)
    results = []
    for which in POOLS:
        new = torch.full_like(state, float("nan"))
        results.append((pool(*which).gdn_recurrence(*args, key_head, state, new), new))
    o, new = results[0]
    assert (o - o_64).abs().max() < 1e-5 and (new - state_64).abs().max() < 1e-5
    for other_o, other_new in results[1:]:
        assert torch.equal(other_o, o) and torch.equal(other_new, new)
    in_place, parts = state.clone(), []
    for cut in (
        slice(0, n_tokens // 3),
        *(slice(t, t + 1) for t in range(n_tokens // 3, n_tokens)),
    ):
        piece = [a[cut] for a in args]
        parts.append(pool().gdn_recurrence(*piece, key_head, in_place, in_place))
    assert torch.equal(torch.cat(parts), o) and torch.equal(in_place, new)


def test_refusals() -> None:
    """Expectation: one clear line."""
    q, k, v, sinks, selected = case(4, 2, 64, 64, 3, 2, torch.float32)
    with pytest.raises(EngineError, match="do not belong together"):
        pool().attention(q, k[:4], v, 3, 1.0)
    with pytest.raises(EngineError, match="do not belong together"):
        pool().attention(q, k.double(), v.double(), 3, 1.0)
    with pytest.raises(EngineError, match="selected is"):
        pool().attention(q, k, v, 3, 1.0, None, None, selected[:, :4])
    with pytest.raises(EngineError, match="sinks is"):
        pool().attention(q, k, v, 3, 1.0, None, sinks[:3])
    args, key_head, state = gdn_case(2, 4, 8, 8, 3)
    with pytest.raises(EngineError, match="key_head holds 2, allowed is 0 .. 1"):
        pool().gdn_recurrence(*args, key_head + torch.tensor([0, 0, 0, 1]), state, state.clone())
    with pytest.raises(EngineError, match="gdn: state_out is"):
        pool().gdn_recurrence(*args, key_head, state, state.clone()[:, :, :7])
