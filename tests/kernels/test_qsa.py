"""Block keys, block selection and token masks against their definitions in plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from strata.kernels.qsa import block_keys, select_blocks, token_mask
from strata.kernels.rms_norm import rms_norm
from strata.kernels.rotary import rotary
from strata.models.spec import RotarySpec

SPEC = RotarySpec((1.0, 0.1, 0.01), "half")


def _kept(q_Id: torch.Tensor, keys: torch.Tensor, n_blocks: int, budget: int) -> list[int]:
    """Kept block indices of one query by the definition: best score first, then lowest index."""
    scores = []
    for j in range(n_blocks):
        dots = [sum(a * b for a, b in zip(q.tolist(), keys[j].tolist(), strict=True)) for q in q_Id]
        scores.append(sum(max(d, 0.0) for d in dots) / math.sqrt(q_Id.shape[1]))
    best = sorted(range(n_blocks), key=lambda j: (-scores[j], j))
    return sorted(best[:budget])


@pytest.mark.parametrize("block_tokens", [1, 3, 4])
def test_block_keys_are_pooled_normed_rotated(block_tokens: int) -> None:
    """Expectation: torch's mean over the block, then rms_norm and rotary at its first token."""
    torch.manual_seed(1)
    raw = torch.randn(6, block_tokens, 8, dtype=torch.float64)
    weight, first = torch.rand(8, dtype=torch.float64), torch.arange(6) * block_tokens
    keys = block_keys(raw, weight, 1e-6, first, SPEC)
    expected = rotary(rms_norm(raw.mean(1), weight, 1e-6)[:, None], first, SPEC)[:, 0]
    torch.testing.assert_close(keys, expected, rtol=1e-13, atol=1e-13)
    for j in range(6):
        alone = block_keys(raw[j : j + 1], weight, 1e-6, first[j : j + 1], SPEC)
        assert torch.equal(alone[0], keys[j])


@pytest.mark.parametrize("start,n_tokens", [(0, 40), (37, 8), (3, 1)])
@pytest.mark.parametrize("block_tokens", [1, 4])
def test_selection_is_the_definition(start: int, n_tokens: int, block_tokens: int) -> None:
    """Expectation: scores and order by plain Python floats."""
    torch.manual_seed(2)
    n_blocks, budget = (start + n_tokens) // block_tokens, 5
    q = torch.randn(n_tokens, 3, 8, dtype=torch.float64)
    keys = torch.randn(n_blocks, 8, dtype=torch.float64)
    kept = select_blocks(q, keys, start, block_tokens, budget)
    assert kept.dtype == torch.int32 and kept.shape == (n_tokens, budget)
    for t in range(n_tokens):
        expected = _kept(q[t], keys, (start + t + 1) // block_tokens, budget)
        assert kept[t].tolist() == expected + [-1] * (budget - len(expected))


def test_equal_scores_keep_the_lower_index() -> None:
    """Expectation: all scores are 0 but block 6's, so 6 and then the lowest indices stay."""
    keys = -torch.ones(9, 4)
    keys[6] = 1.0
    kept = select_blocks(torch.ones(1, 2, 4), keys, 35, 4, 4)
    assert kept.tolist() == [[0, 1, 2, 6]]


def test_own_block_can_be_dropped() -> None:
    """Expectation (qwen4_exp rule): when the query ends its block, the block competes like any."""
    keys = torch.ones(4, 4)
    keys[3] = -1.0
    kept = select_blocks(torch.ones(1, 1, 4), keys, 15, 4, 3)
    assert kept.tolist() == [[0, 1, 2]]
    assert token_mask(kept, 15, 16, 4)[0].tolist() == [True] * 12 + [False] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_selection_does_not_depend_on_the_number_of_tokens(dtype: torch.dtype) -> None:
    """Expectation: 300 tokens one at a time, with half-precision keys as they are cached."""
    torch.manual_seed(3)
    q, keys = torch.randn(300, 4, 16, dtype=dtype), torch.randn(80, 16).half()
    together = select_blocks(q, keys, 20, 4, 7)
    for t in range(300):
        alone = select_blocks(q[t : t + 1], keys[: (21 + t) // 4], 20 + t, 4, 7)
        assert torch.equal(alone[0], together[t])


@pytest.mark.parametrize("start,n_tokens", [(0, 21), (18, 5), (19, 1)])
@pytest.mark.parametrize("block_tokens", [1, 4])
def test_token_mask_is_the_definition(start: int, n_tokens: int, block_tokens: int) -> None:
    """Expectation: for every query and position, block kept or position in the open block."""
    torch.manual_seed(4)
    n = start + n_tokens
    blocks = torch.full((n_tokens, 3), -1, dtype=torch.int32)
    for t in range(n_tokens):
        complete = (start + t + 1) // block_tokens
        some = torch.randperm(complete)[:3].sort().values
        blocks[t, : len(some)] = some.int()
    mask = token_mask(blocks, start, n, block_tokens)
    for t in range(n_tokens):
        end = start + t + 1
        tail = end // block_tokens * block_tokens
        expected = [
            j < end and (j // block_tokens in blocks[t].tolist() or j >= tail) for j in range(n)
        ]
        assert mask[t].tolist() == expected
