"""The event ring: rings, waits and failures of windows in order; at most 4,096 of them."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest

import strata
from strata.core.errors import StallError
from strata.window.event_ring import KEPT, EventRing
from strata.window.run import PLAIN

FIXTURES = Path(__file__).parent.parent / "fixtures"


def test_what_happened_in_order() -> None:
    with strata.load(FIXTURES / "qwen3_moe" / "bf16.gguf", device="cpu", context=64) as model:
        ring = EventRing(clock=iter(range(1000)).__next__)
        model.engine.runner.variant = dataclasses.replace(PLAIN, name="t", transforms=(ring,))
        model.engine.run_window([3, 4])
        n_layers = model.engine.spec.n_layers
        names = [line.split("window 1  ")[1] for line in ring.lines()]
        assert names == [
            "WINDOW of 2",
            *(
                f"{name} layer {layer}"
                for layer in range(n_layers)
                for name in ("RANG", "WAIT", "SERVED")
            ),
            "DONE",
        ]


def test_a_stall_is_written_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names the step and layer where the pool never answered."""
    path = FIXTURES / "qwen3_moe" / "bf16.gguf"
    with strata.load(path, device="cpu", context=64, verify_trace=True) as model:

        def never(layer: int, place: object) -> None:
            raise StallError("no answer")

        monkeypatch.setattr(model.engine.service, "wait", never)
        with caplog.at_level(logging.ERROR, logger="strata"), pytest.raises(StallError):
            model.engine.run_window([3])
        text = caplog.text
        assert "verify trace: no answer" in text
        order = [text.index(x) for x in ("RANG layer 0", "WAIT layer 0", "IN wait_cpu layer 0")]
        assert order == sorted(order) and "FAILED (StallError)" in text


def test_the_ring_forgets_the_oldest() -> None:
    ring = EventRing()
    for i in range(KEPT + 5):
        ring.add("RANG", i)
    assert len(ring.lines(2 * KEPT)) == KEPT and ring.lines(KEPT)[0].endswith("layer 5")
