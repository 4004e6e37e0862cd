"""The fused GDN layer on the device against the mixer's own steps in torch (kernels/gdn), fed one
token at a time with explicit state."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch

from strata.kernels.gdn import causal_conv, gated_norm, gates, l2_norm, recurrence
from strata.kernels.gdn.triton import GdnState, GdnWeights, flip, replay, window, workspace_numbers
from strata.kernels.quantize import new_quantized
from strata.kernels.quantize import quantize as quantize_ref

H, J, K, V, P, ENTRIES = 2, 4, 16, 32, 4, 8
N = 2 * H * K + J * V
EPS = 1e-6


def rand(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Inputs:
    """Projections of some tokens."""

    columns: torch.Tensor
    z: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor

    def of(self, first: int, n: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Columns and z side by side in one buffer, as one product leaves them; a and b too."""
        rows = slice(first, first + n)
        wide = torch.cat([self.columns[rows], self.z[rows]], 1).to(device)
        pair = torch.cat([self.a[rows], self.b[rows]], 1).to(device)
        return wide[:, :N], wide[:, N:], pair[:, :J], pair[:, J:]


def inputs(n: int) -> Inputs:
    return Inputs(rand(0, n, N), rand(1, n, J * V), rand(2, n, J), rand(3, n, J))


def weights(order: str, gate: str, device: torch.device) -> GdnWeights:
    return GdnWeights(
        (rand(4, P, N) * 0.5).to(device),
        (-rand(5, J).exp()).to(device),
        rand(6, J).to(device),
        (1 + 0.1 * rand(7, V)).to(device),
        EPS,
        H,
        K,
        order,
        gate,
    )


def new_state(device: torch.device, n_tokens: int = 4) -> GdnState:
    return GdnState(
        torch.zeros(ENTRIES, N, device=device),
        torch.zeros(2, J, K, V, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
        torch.full((n_tokens, J, workspace_numbers(K, V)), float("nan"), device=device),
    )


def reference(x: Inputs, w: GdnWeights) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """y [n, J * V], and the state after each token."""
    head = torch.arange(J)
    key_head = head // (J // H) if w.head_order == "grouped" else head % H
    past = torch.zeros(P - 1, N)
    y = causal_conv(past, x.columns, w.taps_PN, 1)
    n = len(y)
    q = l2_norm(y[:, : H * K].reshape(n, H, K)) / math.sqrt(K)
    k = l2_norm(y[:, H * K : 2 * H * K].reshape(n, H, K))
    v = y[:, 2 * H * K :].reshape(n, J, V)
    keep, beta = gates(x.a, x.b, w.decay_J, w.dt_bias_J)
    m, outs, states = torch.zeros(J, K, V), [], []
    for t in range(n):
        one = slice(t, t + 1)
        outs.append(recurrence(q[one], k[one], v[one], keep[one], beta[one], key_head, m, m))
        states.append(m.clone())
    o = torch.cat(outs)
    return gated_norm(o, x.z.view(n, J, V), w.norm_V, EPS, w.output_gate).flatten(1), states


def int32(value: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32, device=device)


@pytest.mark.parametrize(("order", "gate"), [("grouped", "silu"), ("interleaved", "sigmoid")])
def test_windows_and_partial_commits(triton_device: torch.device, order: str, gate: str) -> None:
    """Windows of which some tokens stay; the ring of 8 columns wraps."""
    d = triton_device
    sizes, kept = [3, 4, 1, 4], [3, 2, 1, 3]
    x = inputs(sum(kept) + 1)
    w = weights(order, gate, torch.device("cpu"))
    expected, states = reference(x, w)
    w, state, at = weights(order, gate, d), new_state(d), 0
    for size, n in zip(sizes, kept, strict=True):
        out = torch.full((size, J * V), float("nan"), device=d)
        quantized = new_quantized(size, J * V, d)
        pos = torch.arange(at, at + size, dtype=torch.int32, device=d)
        args = x.of(at, size, d)
        window(*args, int32(size, d), pos, state, w, out, quantized)
        torch.testing.assert_close(out.cpu(), expected[at : at + size], rtol=1e-5, atol=1e-5)
        same = new_quantized(size, J * V, "cpu")
        quantize_ref(out.cpu(), same)
        assert torch.equal(quantized.q.cpu(), same.q)
        replay(*args, int32(n, d), pos, state, w, out, quantized)
        flip(int32(n, d), state.which)
        at += n
        committed = state.state[int(state.which)].cpu()
        torch.testing.assert_close(committed, states[at - 1], rtol=1e-5, atol=1e-5)


def test_more_tokens_than_warps(triton_device: torch.device) -> None:
    """Twelve tokens at once: a warp makes the inputs and norms of two."""
    d = triton_device
    x, w = inputs(12), weights("grouped", "silu", torch.device("cpu"))
    expected, states = reference(x, w)
    w, state = weights("grouped", "silu", d), new_state(d, 12)
    state = replace(state, ring=torch.zeros(15, N, device=d))
    out = torch.empty(12, J * V, device=d)
    pos = torch.arange(12, dtype=torch.int32, device=d)
    window(*x.of(0, 12, d), int32(12, d), pos, state, w, out)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state.state[1].cpu(), states[-1], rtol=1e-5, atol=1e-5)


def test_nothing_accepted_changes_nothing(triton_device: torch.device) -> None:
    d = triton_device
    x, w, state = inputs(3), weights("grouped", "silu", d), new_state(d)
    out = torch.empty(3, J * V, device=d)
    args, pos = x.of(0, 3, d), torch.arange(3, dtype=torch.int32, device=d)
    window(*args, int32(3, d), pos, state, w, out)
    before = state.state[0].clone()
    replay(*args, int32(0, d), pos, state, w, out)
    flip(int32(0, d), state.which)
    assert int(state.which) == 0
    assert torch.equal(state.state[0], before)


def test_window_sizes_and_replays_have_the_same_bits(triton_device: torch.device) -> None:
    """4 tokens at once, one by one, and 3 of 4 replayed then 1: equal outputs and states."""
    d = triton_device
    x, w = inputs(4), weights("grouped", "silu", d)
    outs, states = [], []
    for plan in ([(4, 4)], [(1, 1)] * 4, [(4, 3), (1, 1)]):
        state, at, rows = new_state(d), 0, []
        for size, n in plan:
            out = torch.empty(size, J * V, device=d)
            pos = torch.arange(at, at + size, dtype=torch.int32, device=d)
            args = x.of(at, size, d)
            window(*args, int32(size, d), pos, state, w, out)
            replay(*args, int32(n, d), pos, state, w, out)
            flip(int32(n, d), state.which)
            rows.append(out[:n])
            at += n
        outs.append(torch.cat(rows))
        states.append(state.state[int(state.which)])
    for out, committed in zip(outs[1:], states[1:], strict=True):
        assert torch.equal(out, outs[0])
        assert torch.equal(committed, states[0])
