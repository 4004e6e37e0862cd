"""Latent attention on the device against its reference, with float and tiled per-head matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from strata.formats.quants import dequantize
from strata.formats.weight_types import TYPES
from strata.kernels.attention import attention
from strata.kernels.attention.triton import new_scratch
from strata.kernels.gpu_weight import to_gpu
from strata.kernels.mla import absorbed, append_rows, expanded
from strata.kernels.mla.triton import append, attend
from strata.kernels.quantize import new_quantized
from strata.kernels.quantize import quantize as quantize_ref
from strata.kernels.rotary.triton import rotary_table
from strata.models.spec import RotarySpec
from tests.kernels.test_linear import make_weight

H, EPS = 3, 1e-6
CLOSE = {"rtol": 3e-5, "atol": 3e-5}


def run(d, weights, x, start, dtype, splits=3):
    """Append and attend for all tokens of x = (rows, norm, queries): (absorbed, cache, out)."""
    (k_b, v_b), (rows, norm, q), spec = weights, x, SPECS[x[2].shape[2]]
    n_tokens, width = rows.shape
    cache = torch.full((start + n_tokens + 5, width), float("nan"), dtype=dtype)
    cache[:start] = torch.randn(start, width, generator=torch.Generator().manual_seed(9))
    cache = cache.to(d)
    pos = torch.arange(start, start + n_tokens, dtype=torch.int32, device=d)
    queries = torch.full((n_tokens, H, width), float("nan"), device=d)
    rank, v_dim = v_b.n_cols, v_b.n_rows // H
    out = torch.full((n_tokens, H, v_dim), float("nan"), device=d)
    append(
        rows.to(d), norm.to(d), q.to(d), to_gpu(k_b, d), pos, cache, queries, EPS,
        rotary_table(spec, d),
    )  # fmt: skip
    scratch = new_scratch(n_tokens, H, splits, rank, d)
    scratch.out_THSv.fill_(float("nan"))
    int8 = new_quantized(n_tokens, H * v_dim, d) if v_dim % 32 == 0 else None
    attend(queries, cache, to_gpu(v_b, d), pos, 0.11, scratch, out, quantized=int8, chunk=16)
    if int8 is not None:
        same = new_quantized(n_tokens, H * v_dim, "cpu")
        quantize_ref(out.cpu().view(n_tokens, -1), same)
        assert torch.equal(int8.q.cpu(), same.q) and torch.equal(int8.meta.cpu(), same.meta)
    return queries.cpu(), cache.cpu(), out.cpu()


SPECS = {
    48: RotarySpec(tuple(0.5**i for i in range(8)), "pairs"),
    24: RotarySpec(tuple(0.7**i for i in range(4)), "half"),
}


def values(w):
    """[H, n, c] f32."""
    flat = torch.from_numpy(dequantize(TYPES[w.type], w.data.numpy())) * w.scale
    return flat.view(H, -1, w.n_cols)


@pytest.mark.parametrize(
    ("types", "rank", "plain", "rope", "v_dim", "dtype", "start"),
    [
        (("F32", "BF16"), 96, 32, 16, 32, torch.float16, 0),
        (("Q8_0", "Q4_0"), 64, 32, 16, 32, torch.float16, 37),
        (("Q4_K", "IQ4_XS"), 256, 32, 16, 64, torch.float32, 18),
        (("F16", "F32"), 40, 16, 8, 24, torch.float32, 5),
    ],
)
def test_equals_reference(types, rank, plain, rope, v_dim, dtype, start, triton_device):
    """Expectation: append_rows, absorbed, attention, expanded on the cache that the device left."""
    rng = np.random.default_rng(rank)
    k_b = make_weight(types[0], H * plain, rank, rng, 0.5)
    v_b = make_weight(types[1], H * v_dim, rank, rng)
    generator = torch.Generator().manual_seed(start)
    rows, q = (
        torch.randn(shape, generator=generator)
        for shape in ((2, rank + rope), (2, H, plain + rope))
    )
    norm = torch.rand(rank, generator=generator) + 0.5
    spec = SPECS[plain + rope]
    queries, cache, out = run(triton_device, (k_b, v_b), (rows, norm, q), start, dtype)
    expected = torch.full_like(cache[: start + 2], float("nan"))
    append_rows(rows, norm, EPS, start, spec, expected)
    close = {"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float16 else CLOSE
    torch.testing.assert_close(cache[start : start + 2], expected[start:], **close)
    assert cache[start + 2 :].isnan().all()
    wanted = absorbed(q, values(k_b), start, spec)
    size = wanted.abs().max()
    torch.testing.assert_close(queries / size, wanted / size, **CLOSE)
    seen = cache[: start + 2].unsqueeze(1).float()
    mixed = attention(queries, seen, seen[..., :rank], start, 0.11)
    wanted = expanded(mixed, values(v_b))
    size = wanted.abs().max()
    torch.testing.assert_close(out / size, wanted / size, **CLOSE)


def test_tokens_do_not_meet(triton_device):
    """Each of 3 tokens has the bits that it has when it comes alone after the others."""
    rng = np.random.default_rng(1)
    weights = (make_weight("Q8_0", H * 32, 64, rng), make_weight("Q8_0", H * 32, 64, rng))
    generator = torch.Generator().manual_seed(4)
    rows, q = (torch.randn(s, generator=generator) for s in ((3, 80), (3, H, 48)))
    norm = torch.ones(64)
    _, cache, out = run(triton_device, weights, (rows, norm, q), 20, torch.float16)
    for t in (0, 2):
        x = (rows[t : t + 1], norm, q[t : t + 1])
        # the same cache before it: fresh rows 20 .. 20 + t - 1 come from the window's own result
        d = triton_device
        pos = torch.tensor([20 + t], dtype=torch.int32, device=d)
        alone = cache.clone().to(d)
        queries, one = torch.empty(1, H, 80, device=d), torch.empty(1, H, 32, device=d)
        k_b, v_b = (to_gpu(w, d) for w in weights)
        append(x[0].to(d), norm.to(d), x[2].to(d), k_b, pos, alone, queries, EPS,
               rotary_table(SPECS[48], d))  # fmt: skip
        attend(queries, alone, v_b, pos, 0.11, new_scratch(1, H, 3, 64, d), one, chunk=16)
        assert torch.equal(one.cpu()[0], out[t])
