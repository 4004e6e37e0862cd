"""Attention and its append step on the device against the torch versions of their ops."""

from __future__ import annotations

import pytest
import torch

from strata.kernels.attention import attention as attention_ref
from strata.kernels.attention.triton import Selection, attention, new_scratch
from strata.kernels.attention.triton_append import HeadInput, IndexerInput, append
from strata.kernels.qsa import block_keys, token_mask
from strata.kernels.quantize import new_quantized
from strata.kernels.quantize import quantize as quantize_ref
from strata.kernels.rms_norm import rms_norm
from strata.kernels.rotary import rotary
from strata.kernels.rotary.triton import rotary_table
from strata.models.spec import RotarySpec

T, H, G, D = 2, 6, 2, 32
EPS = 1e-6
SPEC = RotarySpec(tuple(0.5**i for i in range(8)), "half")
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def rand(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def positions(start: int, n: int, device: torch.device) -> torch.Tensor:
    return torch.arange(start, start + n, dtype=torch.int32, device=device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("start", [0, 39])
@pytest.mark.parametrize("kind", ["plain", "window", "sinks_gate"])
def test_attention(triton_device: torch.device, dtype: torch.dtype, start: int, kind: str) -> None:
    """Caches run past the window with NaN there; some splits of the short one are empty."""
    d = triton_device
    n = start + T
    q, k, v = rand(0, T, H, D) * 3, rand(1, n, G, D).to(dtype), rand(2, n, G, D).to(dtype)
    window = 11 if kind == "window" else None
    sinks = rand(3, H) if kind == "sinks_gate" else None
    wide = rand(4, T, H * 2 * D) if kind == "sinks_gate" else None
    expected = attention_ref(q, k, v, start, 0.2, window, sinks)
    if wide is not None:
        expected = expected * wide.view(T, H, 2, D)[:, :, 1].sigmoid()
    caches = torch.full((2, n + 9, G, D), float("nan"), dtype=dtype)
    caches[0, :n], caches[1, :n] = k, v
    caches = caches.to(d)
    out = torch.full((T, H, D), float("nan"), device=d)
    quantized = new_quantized(T, H * D, d)
    scratch = new_scratch(T, H, 3, D, d)
    scratch.out_THSv.fill_(float("nan"))
    attention(
        q.to(d), caches[0], caches[1], positions(start, T, d), 0.2, scratch, out,
        window_tokens=window, sinks_H=None if sinks is None else sinks.to(d),
        gate=None if wide is None else (wide.to(d)[:, D:], 2 * D), quantized=quantized, chunk=16,
    )  # fmt: skip
    torch.testing.assert_close(out.cpu(), expected, **CLOSE)
    same = new_quantized(T, H * D, "cpu")
    quantize_ref(out.cpu().view(T, -1), same)
    assert torch.equal(quantized.q.cpu(), same.q)
    assert torch.equal(quantized.meta.cpu(), same.meta)


def test_attention_over_selected_blocks(triton_device: torch.device) -> None:
    """Blocks of 4, budget 3: a token with 3 complete blocks sees all, one with 4 picks."""
    d = triton_device
    n = 17
    q, k, v = rand(0, T, H, D), rand(1, n, G, D).half(), rand(2, n, G, D).half()
    blocks = torch.tensor([[0, 1, 2], [0, 2, 3]], dtype=torch.int32)
    for start in (14, 15):
        end = start + T
        kept = blocks.clone()
        if (start + 1) // 4 <= 3:
            kept[0] = -1_000_000  # not read
            mask_blocks = blocks
        else:
            kept[0] = mask_blocks = torch.tensor([1, 2, 3], dtype=torch.int32)
            mask_blocks = kept
        mask = token_mask(mask_blocks, start, end, 4)
        expected = attention_ref(q, k[:end], v[:end], start, 0.2, None, None, mask)
        out = torch.full((T, H, D), float("nan"), device=d)
        attention(
            q.to(d), k.to(d), v.to(d), positions(start, T, d), 0.2, new_scratch(T, H, 2, D, d),
            out, selection=Selection(kept.to(d), 4), chunk=16,
        )  # fmt: skip
        torch.testing.assert_close(out.cpu(), expected, **CLOSE)


def test_a_token_alone_has_the_same_bits(triton_device: torch.device) -> None:
    d = triton_device
    q, k = rand(0, 3, H, D).to(d), rand(1, 30, G, D).half().to(d)
    together = torch.empty(3, H, D, device=d)
    attention(q, k, k, positions(20, 3, d), 0.2, new_scratch(3, H, 3, D, d), together, chunk=16)
    for t in range(3):
        alone = torch.empty(1, H, D, device=d)
        one = q[t : t + 1]
        scratch = new_scratch(1, H, 3, D, d)
        attention(one, k, k, positions(20 + t, 1, d), 0.2, scratch, alone, chunk=16)
        assert torch.equal(alone[0], together[t])


@pytest.mark.parametrize("bias", [False, True], ids=["norm", "bias"])
def test_append(triton_device: torch.device, bias: bool) -> None:
    """Interleaved query gates; biases instead of norms in the second case."""
    d, start, n_tokens = triton_device, 5, 3
    raw = rand(0, n_tokens, (2 * H + 2 * G) * D)
    q, k, v = raw[:, : 2 * H * D], raw[:, 2 * H * D : -G * D], raw[:, -G * D :]
    norms = [None, None] if bias else [rand(1, D), rand(2, D)]
    biases = [rand(s, x.shape[1]) if bias else None for s, x in ((3, q), (4, k), (5, v))]
    heads = [
        (x if b is None else x + b).view(n_tokens, -1, D)
        for x, b in zip((q, k, v), biases, strict=True)
    ]
    heads[0] = heads[0][:, ::2]
    pos = torch.arange(start, start + n_tokens)
    expected = []
    for x, norm in zip(heads, norms, strict=False):
        x = x.contiguous() if norm is None else rms_norm(x.contiguous(), norm, EPS)
        expected.append(rotary(x, pos, SPEC))
    caches = torch.zeros(2, 12, G, D, dtype=torch.float16, device=d)
    q_out = torch.full((n_tokens, H, D), float("nan"), device=d)
    raw = raw.to(d)
    inputs = [
        HeadInput(x, stride, None if b is None else b.to(d), None if norm is None else norm.to(d))
        for x, stride, b, norm in (
            (raw[:, : 2 * H * D], 2 * D, biases[0], norms[0]),
            (raw[:, 2 * H * D : -G * D], D, biases[1], norms[1]),
            (raw[:, -G * D :], D, biases[2], None),
        )
    ]
    append(
        *inputs, q_out, caches[0], caches[1], positions(start, n_tokens, d), EPS,
        rotary_table(SPEC, d),
    )  # fmt: skip
    torch.testing.assert_close(q_out.cpu(), expected[0], **CLOSE)
    rows = slice(start, start + n_tokens)
    torch.testing.assert_close(caches[0, rows].cpu(), expected[1].half(), rtol=1e-3, atol=1e-5)
    assert torch.equal(caches[1, rows].cpu(), heads[2].half())
    assert not caches[:, :start].any() and not caches[:, start + n_tokens :].any()


def test_append_with_an_indexer(triton_device: torch.device) -> None:
    """Windows of 3, 1, 4, 2 tokens, the third cut back to 2: block keys equal kernels/qsa's of all
    raw keys. Blocks of 3 complete inside a window and across windows; the ring wraps."""
    d, r, n_index = triton_device, 3, 2
    raw_k, raw_q = rand(0, 10, D), rand(1, 10, n_index * D)
    norm_q, norm_k = rand(2, D), rand(3, D)
    ring = torch.full((2 + 4, D), float("nan"), device=d)
    keys = torch.full((4, D), float("nan"), device=d)
    none = torch.zeros(4, 1, 1, device=d)
    caches = torch.zeros(2, 12, 1, 1, device=d)
    start = 0
    for size, kept in ((3, 3), (1, 1), (4, 2), (2, 2)):
        rows = slice(start, start + size)
        q_out = torch.full((size, n_index, D), float("nan"), device=d)
        indexer = IndexerInput(
            HeadInput(raw_q[rows].to(d), D, None, norm_q.to(d)),
            HeadInput(raw_k[rows].to(d), D, None, norm_k.to(d)),
            q_out, ring, keys, r,
        )  # fmt: skip
        x = HeadInput(none[:size, 0], 1)
        append(
            x, x, x, none[:size].clone(), caches[0], caches[1], positions(start, size, d), EPS,
            rotary_table(SPEC, d), indexer,
        )  # fmt: skip
        pos = torch.arange(start, start + size)
        expected = rotary(rms_norm(raw_q[rows].view(size, -1, D), norm_q, EPS), pos, SPEC)
        torch.testing.assert_close(q_out.cpu(), expected, **CLOSE)
        start += kept
    n_blocks = start // r
    raw = raw_k[: n_blocks * r].view(n_blocks, r, D)
    expected = block_keys(raw, norm_k, EPS, torch.arange(n_blocks) * r, SPEC)
    torch.testing.assert_close(keys[:n_blocks].cpu(), expected, **CLOSE)
