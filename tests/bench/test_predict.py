"""Slices and the serial law.

Expectations: slices have the layers, types and kinds of the model they come from; the law's numbers
by hand. That predictions agree with what is measured is checked by scripts on quiet machines
(docs/DETAILS.md), not here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.bench.machine import Bandwidths
from strata.bench.predict import Prediction, SliceTime, predict
from strata.bench.routing import Locality
from strata.bench.slices import depths, slice_of, why_no_slice
from strata.core.settings_load import load_settings
from strata.engine.build import prepare
from strata.engine.checkpoint_plan import understand
from strata.models.synthetic import open_model
from strata.window.stamps import layer_kind

FIXTURES = Path(__file__).parent.parent / "fixtures"
FULL = {
    "qwen4_exp-125b:IQ3_S": (6, 10),
    "qwen3-30b-a3b:Q4_K_M": (6, 12),
    "gpt-oss-120b:MXFP4": (6, 12),
    "glm-4.5-air:Q4_K": (7, 13),
}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements that are made but not looked at take little time."""
    monkeypatch.setattr("strata.bench.predict.TURNS", 2)
    monkeypatch.setattr("strata.engine.layout_cost._READ_BYTES", 8 << 20)


@pytest.mark.parametrize("name", FULL)
def test_slices_repeat_the_models_layers(name: str) -> None:
    """Depths by hand: what is irregular (n-grams at layer 1, one dense layer), then periods of 4
    or 1; every slice has the kinds of layers and the weight types of the model."""
    full = open_model("synthetic:" + name)
    of = understand(full)
    small, large = depths(of.spec)
    assert (small, large) == FULL[name]
    kinds = [layer_kind(of.spec, i) for i in range(of.spec.n_layers)]
    period = large - small
    for i in range(large, of.spec.n_layers):
        assert kinds[i] == kinds[small + (i - small) % period]
    part = understand(slice_of(full, of.spec, small))
    assert [layer_kind(part.spec, i) for i in range(small)] == kinds[:small]
    for i in range(small):
        ours, theirs = part.shapes[i], of.shapes[i]
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours[0] == theirs[0] and 64 <= ours[1] <= theirs[1]
    assert part.spec.n_vocab == of.spec.n_vocab
    assert part.weights.on_disk_bytes < 64 << 20, "no n-gram table larger than memory"


def test_what_cannot_be_sliced_is_told() -> None:
    ckpt = open_model(FIXTURES / "qwen3_moe" / "bf16.gguf")
    assert why_no_slice(ckpt) is None
    ckpt.close()


def prediction(**changes: object) -> Prediction:
    """1 ms fixed, 10 bytes elsewhere at 1 kB/s by the pool, 2 kB/s by the link, 2.5 together."""
    none = SliceTime(1, 0.0, 0.0, 0.0)
    facts: dict[str, object] = {
        "fixed_s": 0.001, "host_bytes": 10.0, "link_share": 0.0, "pool_bytes_s": 1e3,
        "bandwidths": Bandwidths(3e3, 9e3, 2e3, 2.5e3), "hit_rate": 0.0, "slices": (none, none),
    }  # fmt: skip
    return Prediction(**(facts | changes))  # type: ignore[arg-type]


def test_the_law_by_hand() -> None:
    assert prediction().window_s == pytest.approx(0.001 + 10 / 1e3)
    # 6 bytes by the CPU 6 ms, 4 over the link 2 ms, 10 together 4 ms
    assert prediction(link_share=0.4).host_s == pytest.approx(0.006)
    # 2 by the CPU 2 ms, 8 over the link 4 ms, 10 together 4 ms
    assert prediction(link_share=0.8).host_s == pytest.approx(0.004)
    assert prediction(host_bytes=0.0).tokens_s == pytest.approx(1000)


def test_a_dense_model_has_no_second_term() -> None:
    asked = load_settings({"device": "cpu", "context": 64})
    ready = prepare(FIXTURES / "llama" / "bf16.gguf", asked)
    try:
        found = predict(ready, asked, Locality(), lambda text: None)
    finally:
        ready.plan.checkpoint.close()
    assert found.tokens_s > 0 and found.host_bytes == 0 and len(found.lines()) == 2


def test_a_prediction_is_made() -> None:
    """On a tiny file: positive, of sensible parts, in one line each."""
    asked = load_settings({"device": "cpu", "context": 128})
    ready = prepare(FIXTURES / "qwen3_moe" / "bf16.gguf", asked)
    try:
        said: list[str] = []
        found = predict(ready, asked, Locality(), said.append)
    finally:
        ready.plan.checkpoint.close()
    assert found.tokens_s > 0 and found.host_bytes > 0 and found.pool_bytes_s > 0
    assert found.slices[1].expert_bytes >= found.slices[0].expert_bytes > 0
    assert said and "predicted" in found.lines()[0]
