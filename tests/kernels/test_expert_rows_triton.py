"""GPU expert rows: tiles against contract 5 bit for bit, float experts near the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from strata.kernels.expert_rows import expert_rows_contract, layout
from strata.kernels.expert_rows.launch import (
    batch_of,
    dense_expert,
    gpu_expert,
    new_groups,
    new_hidden,
    row_tuning,
)
from strata.kernels.expert_rows.triton import dense_gate_up, down, gate_up
from strata.kernels.gpu_weight import to_gpu
from strata.kernels.linear import linear_contract
from strata.kernels.numerics import quantize_activations, silu_c
from strata.kernels.quantize import new_quantized
from strata.kernels.quantize.triton import quantize
from tests.kernels.test_expert_rows import fill
from tests.kernels.test_linear import make_weight, same_bits
from tests.kernels.test_quantize import unpacked

TILES = ("tiles", "tiles", "tiles")


def groups_of(expert_R, n_active, addresses, device, spare=1):
    """Rows grouped by expert in order of first appearance, one entry of the table left over."""
    groups = new_groups(len(expert_R) + spare, device)
    distinct = list(dict.fromkeys(expert_R))
    rows = [[r for r, e in enumerate(expert_R) if e == d] for d in distinct]
    entry_row = torch.tensor([r for group in rows for r in group], dtype=torch.int32)
    start = np.cumsum([0] + [len(group) for group in rows])
    groups.addr[: len(distinct)] = torch.tensor([addresses[d] for d in distinct])
    groups.start[: len(start)] = torch.from_numpy(start)
    groups.entry_row[: len(entry_row)] = entry_row
    groups.entry_token[: len(entry_row)] = entry_row // n_active
    groups.n_groups[0] = len(distinct)
    return groups


def run(shape, blobs, expert_R, x, device, tunings=(None, None)):
    """Unweighted rows [R, D]; rows and hidden start as NaN or garbage."""
    n_tokens, n_rows = len(x), len(expert_R)
    expert = gpu_expert(shape)
    on_device = [blob.to(device) for blob in blobs]
    addresses = [blob.data_ptr() for blob in on_device]
    assert all(a % 16 == 0 for a in addresses)
    groups = groups_of(expert_R, n_rows // n_tokens, addresses, device)
    x = x.to(device)
    x_q = None
    if "tiles" in shape.layouts[:2]:
        x_q = new_quantized(n_tokens, shape.d_model, device)
        quantize(x, x_q)
    hidden = new_hidden(expert, n_rows, device)
    rows = torch.full((n_rows, shape.d_model), float("nan"), device=device)
    gate_up(expert, groups, x, x_q, hidden, tunings[0])
    down(expert, groups, hidden, rows, n_tokens, tunings[1])
    return rows.cpu()


def blobs_of(shape, n, rng):
    """Filled blobs, each copied to memory of its own."""
    return [fill(shape, rng)[0].clone() for _ in range(n)]


CASES = [
    # d, f, types, bias, scales, activation, experts of the rows, tokens, tunings
    (64, 96, ("Q8_0", "Q8_0", "Q4_1"), False, False, "silu", [0], 1, None),
    (96, 32, ("MXFP4", "MXFP4", "MXFP4"), True, False, "swiglu_oai", [1, 0], 1, None),
    (64, 64, ("NVFP4", "NVFP4", "NVFP4"), False, True, "silu", [0, 1], 2, None),
    # gate and up of two types; experts with one, two and three rows; batches of two
    (64, 64, ("Q2_0", "IQ4_NL", "Q5_1"), True, True, "silu", [0, 1, 1, 2, 1, 0], 3, 2),
    (256, 256, ("IQ3_S", "IQ3_S", "Q2_K"), False, False, "silu", [1], 1, None),
]


@pytest.mark.parametrize(
    ("d", "f", "types", "bias", "scales", "activation", "experts", "n_tokens", "batch"), CASES
)
def test_tiles_equal_contract(
    d, f, types, bias, scales, activation, experts, n_tokens, batch, triton_device
):
    """Expectation: expert_rows_contract of each row's own blob and token, bit for bit."""
    rng = np.random.default_rng(d + f)
    shape = layout(
        d, f, types, bias=bias, scales=scales, activation=activation, swiglu_limit=1.5,
        layouts=TILES,
    )  # fmt: skip
    blobs = blobs_of(shape, max(experts) + 1, rng)
    x = torch.from_numpy(rng.standard_normal((n_tokens, d)).astype(np.float32))
    # one program a group: the interpreter takes a second for each
    batch = batch or batch_of(n_tokens)
    expert = gpu_expert(shape)
    rows = 32 * -(-f // 32)
    rows = 1 << (rows - 1).bit_length()
    tunings = (
        row_tuning(4, rows, 2, batch, expert.twins),
        row_tuning(2, max(32, 1 << (d - 1).bit_length()), 3, batch),
    )
    got = run(shape, blobs, experts, x, triton_device, tunings)
    for r, e in enumerate(experts):
        t = r * n_tokens // len(experts)
        same_bits(got[r], expert_rows_contract(shape, blobs[e], x[t : t + 1])[0])


@pytest.mark.parametrize(
    ("types", "experts", "n_tokens"),
    [(("IQ4_NL", "IQ4_NL", "Q8_0"), [1, 0], 1), (("Q4_1", "Q4_1", "Q5_0"), [0, 0], 2)],
)
def test_weights_through_registers(types, experts, n_tokens, triton_device):
    """Three blocks a segment, the last not everywhere, two and four ahead: the same bits."""
    rng = np.random.default_rng(9)
    shape = layout(544, 96, types, layouts=TILES)
    blobs = blobs_of(shape, 2, rng)
    x = torch.from_numpy(rng.standard_normal((n_tokens, 544)).astype(np.float32))
    tunings = (
        row_tuning(4, 128, 0, n_tokens, True, ahead=2),
        row_tuning(2, 1024, 0, n_tokens, ahead=4),
    )
    got = run(shape, blobs, experts, x, triton_device, tunings)
    for r, e in enumerate(experts):
        t = r * n_tokens // len(experts)
        same_bits(got[r], expert_rows_contract(shape, blobs[e], x[t : t + 1])[0])


def test_default_programs(triton_device):
    """The default tunings: several programs a group, rows to spare in the last one."""
    rng = np.random.default_rng(4)
    shape = layout(32, 96, ("IQ4_NL", "IQ4_NL", "Q8_0"), layouts=TILES)
    blobs, x = blobs_of(shape, 1, rng), torch.from_numpy(rng.random((1, 32), np.float32))
    got = run(shape, blobs, [0], x, triton_device)
    same_bits(got[0], expert_rows_contract(shape, blobs[0], x)[0])


@pytest.mark.parametrize(
    ("types", "layouts"),
    [
        (("BF16", "BF16", "BF16"), ("native", "native", "native")),
        (("F32", "F16", "F32"), ("native", "native", "native")),
        (("F16", "Q8_0", "Q4_0"), ("native", "tiles", "tiles")),
        (("Q8_0", "Q8_0", "BF16"), ("tiles", "tiles", "native")),
    ],
)
def test_float_matrices(types, layouts, triton_device):
    """Expectation: contracts 4 and 5 bit for bit, so a row may be the CPU's as well; width 72 ends
    in the middle of 32 lanes where nothing is quantized."""
    rng = np.random.default_rng(7)
    floats = all(how == "native" for how in layouts)
    shape = layout(72 if floats else 64, 32, types, bias=True, layouts=layouts)
    blobs = blobs_of(shape, 2, rng)
    x = torch.from_numpy(rng.standard_normal((2, shape.d_model)).astype(np.float32))
    experts = [0, 1, 1, 0]
    tunings = (row_tuning(2, 32, 2, 2, gpu_expert(shape).twins), row_tuning(2, 64, 2, 2))
    got = run(shape, blobs, experts, x, triton_device, tunings)
    for r, e in enumerate(experts):
        same_bits(got[r : r + 1], expert_rows_contract(shape, blobs[e], x[r // 2 : r // 2 + 1]))
    alone = run(shape, blobs, experts[2:], x[1:], triton_device, tunings)
    same_bits(got[2:], alone)


@pytest.mark.parametrize(("name", "n_tokens"), [("Q6_K", 1), ("Q8_0", 2), ("BF16", 1)])
def test_dense_gate_up(name, n_tokens, triton_device):
    """Expectation: contract 5's silu of linear_contract products; quantized as contract 1 says."""
    rng = np.random.default_rng(n_tokens)
    d = 256 if name == "Q6_K" else 64
    gate, up = (make_weight(name, 64, d, rng) for _ in range(2))
    x = torch.from_numpy(rng.standard_normal((n_tokens, d)).astype(np.float32))
    on_gpu = [to_gpu(w, triton_device) for w in (gate, up)]
    hidden = new_hidden(dense_expert(*on_gpu, tiles_out=True), n_tokens, triton_device)
    x_q = new_quantized(n_tokens, d, triton_device)
    quantize(x.to(triton_device), x_q)
    dense_gate_up(*on_gpu, x.to(triton_device), x_q, hidden, row_tuning(2, 64, 2, n_tokens, True))
    g, u = (linear_contract(x, w).numpy() for w in (gate, up))
    q, scale = quantize_activations(silu_c(g) * u)
    got_q, got_scale, _ = unpacked(hidden.h_q)
    if name == "BF16":  # another order of f32 sums
        np.testing.assert_allclose(got_scale, scale, rtol=1e-5)
        assert np.abs(got_q.astype(int) - q).max() <= 1
    else:
        same_bits(got_scale, scale)
        np.testing.assert_array_equal(got_q, q)
