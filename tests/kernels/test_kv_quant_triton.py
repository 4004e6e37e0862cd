"""Encoded caches on the device: what append leaves, and attention over it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from strata.kernels.attention.triton import attention, new_scratch
from strata.kernels.attention.triton_append import HeadInput, append
from strata.kernels.kv_quant import decode as decode_ref
from strata.kernels.kv_quant import encode, group_of
from strata.kernels.kv_quant.triton import KvScales
from strata.kernels.rotary.triton import rotary_table
from strata.models.spec import RotarySpec

ROOT = Path(__file__).resolve().parents[2]
T, H, G, START = 2, 4, 2, 11
SPEC = RotarySpec(tuple(0.5**i for i in range(8)), "half")


def rand(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("bits", "dim"), [(8, 32), (8, 48), (4, 64), (4, 40)])
def test_append_then_attention(bits: int, dim: int, triton_device: torch.device) -> None:
    """Codes equal those of the f32 keys that a plain cache gets; attention equals, bit for bit,
    attention over the decoded cache."""
    d, n = triton_device, START + T
    q, k, v = (rand(i, T, heads * dim).to(d) for i, heads in enumerate((H, G, G)))
    v[0, :dim] = 0
    norms = [(1 + 0.1 * rand(5 + i, dim)).to(d) for i in range(2)]
    pos = torch.arange(START, n, dtype=torch.int32, device=d)
    inputs = (
        HeadInput(q, dim, None, norms[0]),
        HeadInput(k, dim, None, norms[1]),
        HeadInput(v, dim),
    )
    rest = (pos, 1e-6, rotary_table(SPEC, d))
    queries = torch.empty(T, H, dim, device=d)
    plain = [torch.zeros(n, G, dim, device=d) for _ in range(2)]
    append(*inputs, queries, *plain, *rest)

    group = group_of(bits, dim)
    old = [encode(rand(7 + i, n + 3, G, dim), bits, group) for i in range(2)]
    (k_codes, k_scale), (v_codes, v_scale) = ([c.clone().to(d) for c in pair] for pair in old)
    scales = KvScales(k_scale, v_scale)
    append(*inputs, queries, k_codes, v_codes, *rest, scales=scales)
    for made, codes, scale, before in zip(
        plain, (k_codes, v_codes), (k_scale, v_scale), old, strict=True
    ):
        wanted = encode(made[START:n].cpu(), bits, group)
        assert torch.equal(codes[START:n].cpu(), wanted[0])
        assert torch.equal(scale[START:n].cpu(), wanted[1])
        assert torch.equal(codes[:START].cpu(), before[0][:START])
        assert torch.equal(codes[n:].cpu(), before[0][n:])

    decoded = [
        decode_ref(c.cpu(), s.cpu()).to(d) for c, s in ((k_codes, k_scale), (v_codes, v_scale))
    ]
    outs = []
    for caches, known in ((decoded, None), ((k_codes, v_codes), scales)):
        out = torch.full((T, H, dim), float("nan"), device=d)
        attention(
            queries, *caches, pos, 0.2, new_scratch(T, H, 2, dim, d), out, chunk=16, scales=known
        )
        outs.append(out.cpu())
    assert torch.equal(outs[0], outs[1])


def test_products_over_codes_are_laid_out_like_those_over_f16(tmp_path: Path) -> None:
    """Expectation: operand widths of the f16 cache. Triton 3.6 would take 8 for 4-bit codes, which
    needs 64 positions a product: with 16 it counted some twice, on a GPU only."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.kernels.compile_attention"]
    run = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads(run.stdout) == {"16": [2], "8": [2], "4": [2]}
