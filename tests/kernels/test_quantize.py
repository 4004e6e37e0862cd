"""Int8 activations in slots: the layout rule and its values, on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from strata.kernels.numerics import quantize_activations
from strata.kernels.quantize import (
    Quantized,
    new_quantized,
    quantize,
    segment_blocks,
    slots_of_blocks,
)

SPECIAL = [np.nan, np.inf, -np.inf, 0.0, -0.0, 2.0**-101, 2.0**-100, 3e38, 1e-40]


def hard_rows(n_tokens, n_cols, rng):
    """Rows of ordinary blocks, blocks of ties, and blocks with each special value."""
    x = rng.standard_normal((n_tokens, n_cols // 32, 32)).astype(np.float32)
    x *= np.ldexp(np.float32(1), rng.integers(-40, 40, (n_tokens, n_cols // 32, 1)))
    x[0, 0] = (np.arange(32) - 16) * 0.5 * 127 / 8  # amax 127 * 16 / 16: q lies on halves
    for i, value in enumerate(SPECIAL):
        x.reshape(-1, 32)[(3 * i + 1) % (x.size // 32), i] = value
    return x.reshape(n_tokens, n_cols)


def unpacked(out: Quantized):
    """(q [T, K], scale [T, NB], half sums [T, 2 NB]) out of the slots."""
    slots = slots_of_blocks(out.n_cols)
    q, meta = out.q.cpu().numpy()[:, slots], out.meta.cpu().numpy()[:, slots]
    halves = np.stack((meta[:, :, 1] << 16 >> 16, meta[:, :, 1] >> 16), axis=2)
    scale = np.ascontiguousarray(meta[:, :, 0]).view(np.float32)
    return q.reshape(len(q), -1), scale, halves.reshape(len(q), -1)


@pytest.mark.parametrize("n_blocks", [1, 5, 8, 10, 20, 80])
def test_slots(n_blocks):
    """Rule: 8 contiguous segments of L blocks; blocks of one step are neighbours; each its own."""
    slots = slots_of_blocks(32 * n_blocks)
    length = segment_blocks(32 * n_blocks)
    assert length == -(-n_blocks // 8)
    assert len(set(slots.tolist())) == n_blocks and slots.max(initial=0) < 8 * length
    for block, slot in enumerate(slots):
        assert (slot % 8, slot // 8) == divmod(block, length)


@pytest.mark.parametrize("n_cols", [32, 320, 640])
def test_values(n_cols):
    """Expectation: contract 1 (kernels.numerics), put into slots."""
    x = hard_rows(3, n_cols, np.random.default_rng(n_cols))
    out = new_quantized(4, n_cols, "cpu")
    quantize(torch.from_numpy(x), out)
    q, scale, halves = unpacked(out.first(3))
    q_expected, scale_expected = quantize_activations(x)
    np.testing.assert_array_equal(q, q_expected)
    np.testing.assert_array_equal(scale, scale_expected)
    np.testing.assert_array_equal(halves, q_expected.reshape(3, -1, 16).astype(int).sum(2))
    assert not out.q[3].any() and not out.meta[3].any()
