"""attention against a masked softmax over all positions, and bit-equality over window sizes."""

from __future__ import annotations

import math

import pytest
import torch

from strata.kernels.attention import attention

CASES = {
    "plain": {},
    "window": {"window_tokens": 9},
    "sinks": {"sinks": True},
    "selected": {"selected": True},
    "all at once": {"window_tokens": 12, "sinks": True, "selected": True},
    "window of one": {"window_tokens": 1},
}


def _visible(start: int, T: int, window: int | None, selected: torch.Tensor | None) -> torch.Tensor:
    """bool [T, n] by the definition, entry by entry."""
    n = start + T
    seen = torch.zeros(T, n, dtype=torch.bool)
    for t in range(T):
        for j in range(n):
            p = start + t
            seen[t, j] = j <= p and (window is None or j > p - window)
    return seen if selected is None else seen & selected


def _dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    seen: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Softmax over every position with -inf where not seen and one more column for the sink."""
    q, k, v = q.double(), k.double(), v.double()
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    score = torch.einsum("thd,nhd->htn", q, k) * scale
    score = score.masked_fill(~seen, -math.inf)
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, q.shape[0], 1)
        score = torch.cat([score, column], -1)
    weight = score.softmax(-1)[..., : k.shape[0]]
    return torch.einsum("htn,nhd->thd", weight, v)


def _inputs(
    case: dict[str, object], T: int, start: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    torch.manual_seed(3)
    n = start + T
    q, k, v = torch.randn(T, 6, 8), torch.randn(n, 2, 8), torch.randn(n, 2, 5)
    sinks = torch.randn(6).to(dtype) if case.get("sinks") else None
    selected = None
    if case.get("selected"):
        selected = torch.rand(T, n) < 0.5
        selected[torch.arange(T), start + torch.arange(T)] = True
    return q.to(dtype), k.to(dtype), v.to(dtype), sinks, selected


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("start", [0, 17])
@pytest.mark.parametrize("dtype,tol", [(torch.float32, 2e-6), (torch.float64, 1e-14)])
def test_equals_a_masked_softmax(name: str, start: int, dtype: torch.dtype, tol: float) -> None:
    """Expectation: the dense softmax in float64 with a mask built entry by entry."""
    case = CASES[name]
    window = case.get("window_tokens")
    q, k, v, sinks, selected = _inputs(case, 7, start, dtype)
    out = attention(q, k, v, start, 0.4, window, sinks, selected)
    expected = _dense(q, k, v, 0.4, _visible(start, 7, window, selected), sinks)
    assert out.dtype == dtype and out.shape == (7, 6, 5)
    torch.testing.assert_close(out.double(), expected, rtol=tol, atol=tol)


@pytest.mark.parametrize("name", CASES)
def test_what_is_not_seen_is_not_touched(name: str) -> None:
    """Expectation: NaN keys and values at every position that no token sees change no bit."""
    case = CASES[name]
    window = case.get("window_tokens")
    q, k, v, sinks, selected = _inputs(case, 3, 20, torch.float32)
    seen = _visible(20, 3, window, selected).any(0)
    out = attention(q, k, v, 20, 0.4, window, sinks, selected)
    k[~seen], v[~seen] = math.nan, math.nan
    assert torch.equal(attention(q, k, v, 20, 0.4, window, sinks, selected), out)
    assert out.isfinite().all()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "cache,dtype",
    [
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float64),
    ],
)
def test_bits_do_not_depend_on_the_number_of_tokens(
    name: str, cache: torch.dtype, dtype: torch.dtype
) -> None:
    """Expectation: 120 tokens one at a time over the same cache."""
    case = CASES[name]
    window = case.get("window_tokens")
    q, k, v, sinks, selected = _inputs(case, 120, 5, dtype)
    k, v = k.to(cache), v.to(cache)
    together = attention(q, k, v, 5, 0.4, window, sinks, selected)
    for t in range(120):
        end = 5 + t + 1
        mask = None if selected is None else selected[t : t + 1, :end]
        alone = attention(q[t : t + 1], k[:end], v[:end], 5 + t, 0.4, window, sinks, mask)
        assert torch.equal(alone[0], together[t])


def test_a_full_mask_is_no_mask() -> None:
    """Expectation: bit-equal to no mask at all."""
    q, k, v, _, _ = _inputs({}, 9, 30, torch.float32)
    full = torch.ones(9, 39, dtype=torch.bool).tril(30)
    assert torch.equal(attention(q, k, v, 30, 0.4, None, None, full), attention(q, k, v, 30, 0.4))


def test_values_may_be_the_front_of_the_keys() -> None:
    """Expectation: a strided view gives the bits of its contiguous copy (latent attention)."""
    q, k, _, _, _ = _inputs({}, 4, 11, torch.float32)
    v = k[..., :5]
    assert torch.equal(attention(q, k, v, 11, 0.4), attention(q, k, v.contiguous(), 11, 0.4))


def test_large_scores_do_not_overflow() -> None:
    """Expectation: a key 1e4 times stronger than the rest takes all the weight."""
    k = torch.full((3, 1, 2), 1e4)
    k[1] = -1e4
    v = torch.tensor([[[1.0]], [[2.0]], [[3.0]]])
    out = attention(torch.tensor([[[1.0, 1.0]]]), k, v, 2, 1.0)
    assert out.item() == 2.0 and out.isfinite().all()
