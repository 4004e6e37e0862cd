"""The corrected read in two parts, as repair has it, is the whole read: bits of the input and of
the coefficients, whatever is read between the parts. Float and quantized matrices; plain norms.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from tests.engine.test_device_engine import FIXTURES, on_device

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET", "0") != "1" and not torch.cuda.is_available(),
    reason="no CUDA device, and TRITON_INTERPRET is not 1",
)


@pytest.mark.parametrize(
    "family, stem", [("qwen4_exp", "bf16"), ("qwen4_exp", "q8_0"), ("qwen3_moe", "bf16")]
)
def test_a_corrected_read_in_two_parts(
    family: str, stem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if (
        device == "cpu"
    ):  # the interpreter sums in one order at any width: float matrices, one launch
        monkeypatch.setattr("strata.models.gpu.residual.is_wide", lambda width: True)
    engine = on_device(FIXTURES / family / f"{stem}.gguf", device, expert_cache=3)
    network, frame = engine.runner.network, engine.runner.window(1).frame
    residual = network.residual
    frame.add(residual.corrected_specs("kept", "target"))
    draw = torch.Generator().manual_seed(1)
    drawn, other = (torch.randn(frame["residual"].shape, generator=draw) for _ in range(2))
    frame["residual"].copy_(drawn)
    residual.read("attn", 1, frame)
    coeff = residual.coeff("attn", frame)
    whole, wanted = frame["x"].clone(), None if coeff is None else coeff.clone()
    if coeff is not None:
        coeff.zero_()
    residual.corrected(1, frame, "kept")
    frame["residual"].copy_(other)
    residual.read("ffn", 1, frame)
    assert coeff is None or torch.equal(coeff, wanted)
    made = residual.corrected_input(1, frame, "kept", "target")
    assert torch.equal(made.x, whole) and whole.abs().max() > 0
    if made.q is not None and stem == "q8_0":
        assert torch.equal(made.q.q, frame["x.q"]) and torch.equal(made.q.meta, frame["x.meta"])
    assert coeff is None or torch.equal(coeff, wanted)
    engine.close()
