"""Block selection on the device against kernels/qsa."""

from __future__ import annotations

import pytest
import torch

from strata.kernels.qsa import select_blocks as select_ref
from strata.kernels.qsa.triton import select_blocks

IH, D, R, BUDGET, CAPACITY = 2, 32, 4, 5, 64


def rand(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def select(
    q: torch.Tensor, keys: torch.Tensor, start: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(blocks, scores) of the device; rows that it leaves alone hold -7."""
    n_tokens = len(q)
    scores = torch.full((n_tokens, CAPACITY), float("nan"), device=device)
    blocks = torch.full((n_tokens, BUDGET), -7, dtype=torch.int32, device=device)
    pos = torch.arange(start, start + n_tokens, dtype=torch.int32, device=device)
    select_blocks(q.to(device), keys.to(device), pos, R, scores, blocks, programs=2, run=16)
    return blocks.cpu(), scores.cpu()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_selection(triton_device: torch.device, dtype: torch.dtype) -> None:
    """Token 2 completes block 41; more blocks than a run of the selection holds (16)."""
    start, n_tokens = 165, 3
    q, keys = rand(0, n_tokens, IH, D), rand(1, CAPACITY, D).to(dtype)
    keys[42:] = float("nan")
    blocks, scores = select(q, keys, start, triton_device)
    expected = select_ref(q, keys[: (start + n_tokens) // R], start, R, BUDGET)
    assert torch.equal(blocks, expected)
    product = torch.einsum("tid,bd->tbi", q, keys[:42].float())
    wanted = product.clamp(min=0).sum(-1) / D**0.5
    torch.testing.assert_close(scores[:, :42], wanted, rtol=1e-5, atol=1e-5)


def test_ties_go_to_the_lower_index(triton_device: torch.device) -> None:
    """Few distinct scores, zero among them, over runs of the selection."""
    keys = torch.zeros(CAPACITY, D, dtype=torch.float16)
    for block, value in ((3, 1.0), (20, 2.0), (21, 2.0), (33, 1.0), (40, 1.0), (41, -1.0)):
        keys[block, 0] = value
    q = torch.zeros(1, IH, D)
    q[:, :, 0] = 1.0
    start = 45 * R - 1
    blocks, _ = select(q, keys, start, triton_device)
    assert blocks.tolist() == [[3, 20, 21, 33, 40]]
    keys[40, 0] = -1.0
    blocks, _ = select(q, keys, start, triton_device)
    assert blocks.tolist() == [[0, 3, 20, 21, 33]]
    assert torch.equal(blocks, select_ref(q, keys[:45], start, R, BUDGET))


def test_nothing_to_select(triton_device: torch.device) -> None:
    """A token whose blocks fit is left alone, also beside one whose blocks do not."""
    q, keys = rand(0, 2, IH, D), rand(1, CAPACITY, D).half()
    blocks, _ = select(q, keys, BUDGET * R - 1, triton_device)
    assert blocks.tolist() == [[-7] * BUDGET] * 2
    start = (BUDGET + 1) * R - 2
    blocks, _ = select(q, keys, start, triton_device)
    assert blocks[0].tolist() == [-7] * BUDGET
    assert torch.equal(blocks[1:], select_ref(q, keys[: BUDGET + 1], start, R, BUDGET)[1:])


def test_scores_do_not_depend_on_other_tokens(triton_device: torch.device) -> None:
    q, keys = rand(0, 3, IH, D), rand(1, CAPACITY, D).half()
    blocks, scores = select(q, keys, 100, triton_device)
    for t in range(3):
        alone, row = select(q[t : t + 1], keys, 100 + t, triton_device)
        n = (101 + t) // R
        assert torch.equal(alone[0], blocks[t])
        assert torch.equal(row[0, :n], scores[t, :n])


@pytest.mark.parametrize("levels", [2, 9, 1000])
def test_many_equal_scores(triton_device: torch.device, levels: int) -> None:
    """Scores are whole numbers below ``levels``, so that ties stand on both sides of the border."""
    keys = torch.zeros(CAPACITY, D, dtype=torch.float16)
    generator = torch.Generator().manual_seed(levels)
    keys[:, 0] = torch.randint(0, levels, (CAPACITY,), generator=generator)
    q = torch.zeros(2, IH, D)
    q[:, :, 0] = torch.tensor([[1.0], [0.25]])
    blocks, _ = select(q, keys, 60 * R, triton_device)
    assert torch.equal(blocks, select_ref(q, keys[:60], 60 * R, R, BUDGET))
