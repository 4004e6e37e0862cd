"""Both ends of a window: what the host wrote is in the device's tensors, what the device made is on
the host. Expectation: the same numbers, and nothing beside them."""

from __future__ import annotations

import pytest
import torch

from strata.kernels.words.triton_ends import START_WORDS, hand_out, take_in


def host(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.pin_memory() if device.type == "cuda" else tensor


@pytest.mark.parametrize("n_tokens", [1, 3, 8])
@pytest.mark.parametrize("width", [0, 100, 1500])
def test_take_in(n_tokens: int, width: int, triton_device: torch.device) -> None:
    ids = torch.arange(n_tokens, dtype=torch.int32) * 70_000 + 151_000
    words = torch.cat([torch.tensor([1, 30_000], dtype=torch.int32), ids])
    assert len(words) == START_WORDS + n_tokens
    rows = torch.randn(n_tokens, width) if width else None
    which = torch.zeros(1, dtype=torch.int32, device=triton_device)
    pos = torch.zeros(n_tokens + 1, dtype=torch.int32, device=triton_device)
    taken = torch.zeros(n_tokens + 1, dtype=torch.int64, device=triton_device)
    out = torch.full((n_tokens + 1, max(width, 1)), 7.0, device=triton_device)
    take_in(
        host(words, triton_device),
        None if rows is None else host(rows, triton_device),
        which,
        pos[:n_tokens],
        taken[:n_tokens],
        out[:n_tokens] if width else None,
    )
    assert which.tolist() == [1]
    assert pos.tolist() == [*range(30_000, 30_000 + n_tokens), 0]
    assert taken.tolist() == [*ids.tolist(), 0]
    assert rows is None or torch.equal(out[:n_tokens].cpu(), rows)
    assert (out[n_tokens if width else 0 :] == 7).all()


@pytest.mark.parametrize("shape", [(1, 1), (48, 10), (61, 64)])
def test_hand_out(shape: tuple[int, int], triton_device: torch.device) -> None:
    choice = torch.tensor([[5, 0], [151_935, 2], [0, 1]], dtype=torch.int32)
    expert = torch.randint(0, 512, shape, dtype=torch.int32)
    place = torch.randint(-1, 4, shape, dtype=torch.int8)
    outs = tuple(host(torch.full_like(t, 99), triton_device) for t in (choice, expert, place))
    on = [t.to(triton_device) for t in (choice, expert, place)]
    hand_out(on[0], on[1], on[2], outs, None)  # type: ignore[arg-type]
    if triton_device.type == "cuda":
        torch.cuda.synchronize()
    for out, made in zip(outs, (choice, expert, place), strict=True):
        assert torch.equal(out, made)


def test_nothing_was_routed(triton_device: torch.device) -> None:
    """A dense model has no experts to tell of."""
    none = torch.zeros((0, 0), dtype=torch.int32), torch.zeros((0, 0), dtype=torch.int8)
    choice = torch.tensor([[3, 0]], dtype=torch.int32)
    out = host(torch.zeros_like(choice), triton_device)
    hand_out(choice.to(triton_device), *(t.to(triton_device) for t in none), (out, *none), None)
    if triton_device.type == "cuda":
        torch.cuda.synchronize()
    assert out.tolist() == [[3, 0]]
