"""Routing traces: locality is what was stated, and a window computes the trace's experts.

Expectations: overlap of independent draws is K/E; the counters of the service see the trace's ids.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import strata
from strata.bench.routing import Locality, Replay, load_trace, made_up_trace, measured, save_trace
from strata.core.errors import InputError, SettingError
from strata.window.run import Variant

FIXTURES = Path(__file__).parent.parent / "fixtures"


def test_locality_is_what_was_stated() -> None:
    flat = measured(made_up_trace(2, 64, 4, 300, Locality(0, 0)))
    assert abs(flat["overlap"] - 4 / 64) < 0.03 and abs(flat["top_quarter"] - 0.25) < 0.1
    sticky = measured(made_up_trace(2, 64, 4, 300, Locality(0, 0.5)))
    assert abs(sticky["overlap"] - (0.5 + 0.5 * 4 / 64)) < 0.05
    # harmonic sums: the first 16 of 64 take 3.38 / 4.74 of a Zipf law of exponent 1 (one draw)
    assert measured(made_up_trace(2, 64, 1, 2000, Locality(1, 0)))["top_quarter"] == pytest.approx(
        0.713, abs=0.04
    )


def test_experts_of_a_token_differ_and_layers_do_too() -> None:
    trace = made_up_trace(3, 16, 6, 50, Locality(1.0, 0.4))
    assert all(len(set(token)) == 6 for layer in trace for token in layer.tolist())
    assert not np.array_equal(trace[0], trace[1])
    assert np.array_equal(trace, made_up_trace(3, 16, 6, 50, Locality(1.0, 0.4)))


def test_bad_words_are_refused() -> None:
    for text in ("x", "1", "-1,0", "1,1", "1,2,3"):
        with pytest.raises(SettingError, match="--locality"):
            Locality.parse(text)
    assert Locality.parse("0.8,0.25") == Locality(0.8, 0.25)


def test_a_trace_file_comes_back(tmp_path: Path) -> None:
    trace = made_up_trace(2, 8, 2, 20, Locality())
    save_trace(tmp_path / "t.npy", trace)
    assert np.array_equal(load_trace(tmp_path / "t.npy"), trace)
    (tmp_path / "bad.npy").write_bytes(b"nothing")
    with pytest.raises(InputError, match="cannot be read"):
        load_trace(tmp_path / "bad.npy")
    np.save(tmp_path / "flat.npy", np.arange(4))
    with pytest.raises(InputError, match="expected whole numbers"):
        load_trace(tmp_path / "flat.npy")


@pytest.mark.parametrize("window", [1, 3])
def test_windows_take_the_trace(window: int) -> None:
    """The plans of windows hold exactly the trace's experts, around its end too."""
    with strata.load(FIXTURES / "qwen3_moe" / "bf16.gguf", device="cpu", context=64) as model:
        engine, spec = model.engine, model.engine.spec
        ffn = spec.layers[0].ffn
        trace = made_up_trace(spec.n_layers, ffn.n_experts, ffn.n_active, 10, Locality())
        replay = Replay(spec, trace, torch.device("cpu"))
        engine.runner.variant = Variant("trace", (replay,))
        engine.read_prompt([3, 4])
        for start in range(0, 12, window):
            replay.seek(start)
            engine.run_window([5] * window)
            engine.commit(window)
            rows = [(start + t) % 10 for t in range(window)]
            for layer in range(spec.n_layers):
                plan = engine.service.of(layer)
                used = {e for g in plan.groups.values() for e in g.expert_G.tolist()}
                assert used == set(trace[layer, rows].reshape(-1).tolist())


@pytest.mark.parametrize(
    "family, error, text",
    [("qwen3_moe", InputError, "the model has"), ("llama", SettingError, "no routed experts")],
)
def test_a_trace_of_another_model_is_refused(
    family: str, error: type[Exception], text: str
) -> None:
    trace = made_up_trace(1, 8, 2, 10, Locality())
    with (
        strata.load(FIXTURES / family / "bf16.gguf", device="cpu", context=64) as model,
        pytest.raises(error, match=text),
    ):
        Replay(model.engine.spec, trace, torch.device("cpu"))
