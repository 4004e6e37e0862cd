"""The forecast of --experts-on-disk: worked out by hand; what it measures is in the file."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from tests.engine.test_expert_memory import bigger_copy

import strata
from strata.engine import build, disk_forecast
from strata.engine.checkpoint_plan import understand
from strata.engine.disk_forecast import (
    Forecast,
    cached_share,
    memory_seconds,
    spans,
    token_bytes,
    token_weights,
)
from strata.formats.checkpoint import open_checkpoint
from strata.formats.disk_speed import disk_speed

FIXTURE = Path(__file__).parents[1] / "fixtures" / "qwen3_moe" / "q8_0.gguf"
GIB = 1 << 30


def forecast(**changes) -> Forecast:
    """100 GiB of experts, 1 GB a token, 2 GB/s of disk, 50 ms from memory."""
    given = {
        "file_bytes": 100 * GIB,
        "token_bytes": 10**9,
        "cached": 0.25,
        "room": 0.5,
        "disk_bytes_per_s": 2e9,
        "memory_s": 0.05,
    }
    return Forecast(**(given | changes))


def test_tokens_per_second() -> None:
    """75 % of 1 GB at 2 GB/s and 50 ms: 0.425 s; half of it: 0.3 s; all in memory: 0.05 s."""
    found = forecast()
    assert found.tokens_per_s(0.25) == pytest.approx(1 / 0.425)
    assert found.tokens_per_s(0.5) == pytest.approx(1 / 0.3)
    assert found.tokens_per_s(1.0) == pytest.approx(20)
    have, expect = found.lines()
    assert "100.00 GiB, 25% of it in memory now, room for 50% beside" in have
    assert "the disk reads 2.00 GB/s (measured on this file)" in have
    assert "expect at most 2.4 tokens/s now and 3.3 once memory is filled" in expect
    assert "a token reads 1.00 GB of experts, 50 ms of it where all are in memory" in expect


def test_what_is_not_known_is_not_said() -> None:
    """Without a measured disk only the speed of memory is known; unknown cache counts as empty."""
    have, expect = forecast(disk_bytes_per_s="direct reads are refused here (x)").lines()
    assert "the disk's speed is not known (direct reads are refused here (x))" in have
    assert "expect a speed nobody can say (" in expect
    have, expect = forecast(cached=None).lines()
    assert "an unknown share of it in memory now" in have
    assert "expect at most 1.8 tokens/s now" in expect  # 0.05 + 0.5 s
    slow = forecast(disk_bytes_per_s=1e8).lines()[1]
    assert "expect at most 0.13 tokens/s now and 0.20 once" in slow
    assert "without the setting they are faster" in forecast(room=1.0).lines()[2]


def test_work_of_a_token() -> None:
    """Three layers, 3 of 8 experts of 32 x 32 in Q8_0: 34 bytes a row of 32."""
    with open_checkpoint(FIXTURE) as checkpoint:
        assert checkpoint.metadata["qwen3moe.expert_used_count"] == 3
        plan = understand(checkpoint)
        assert token_weights(plan) == {"Q8_0": 3 * 3 * 3 * 32 * 32}
        assert token_bytes(plan) == 3 * 3 * 3 * 32 * 34
    costs = {("Q8_0", "native"): 2.0, ("Q4_K", "native"): 3.0}
    assert memory_seconds({"Q8_0": 10, "Q4_K": 5}, lambda kind, how: costs[kind, how]) == 35.0


@pytest.fixture
def big(tmp_path: Path) -> Path:
    """The fixture with experts' tensors of 4.7 MB each."""
    path = tmp_path / "big.gguf"
    bigger_copy(path, 64, 4096)
    return path


def test_places_are_those_of_the_experts(big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expectation: the file's bytes there are the tensors' own; just written, all is in memory."""
    with open_checkpoint(big) as checkpoint:
        experts = understand(checkpoint).experts
        found = spans(checkpoint, experts)
        assert len(found) == 9
        for span, name in zip(found, experts.tensor_names(), strict=True):
            assert span.n_bytes == 64 * 4096 * 18
            with open(span.path, "rb") as stream:
                stream.seek(span.offset)
                assert stream.read(100) == np.asarray(checkpoint.raw(name))[:100].tobytes()
        assert isinstance(disk_speed(found, 0.01), float | str)
        assert cached_share(checkpoint, experts) == 1.0
        monkeypatch.setattr(disk_forecast, "_told", lambda owner, writable: False)
        assert cached_share(checkpoint, experts) is None


def test_said_before_loading(
    big: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning at once, and in the report; nothing for few experts or without the setting."""
    asked = {"device": "cpu", "context": 16, "experts_on_disk": True}
    said_at_loading: list[int] = []

    def said() -> list[str]:
        messages = [record.getMessage() for record in caplog.records]
        return [m for m in messages if m.startswith("experts on disk:")]

    def load_planned(*arguments):
        said_at_loading.append(len(said()))
        return real(*arguments)

    real = build.load_planned
    monkeypatch.setattr(build, "load_planned", load_planned)
    with strata.load(big, **asked) as model:
        assert not [line for line in model.report if "expect at most" in line] and not said()
    monkeypatch.setattr(disk_forecast, "FROM_BYTES", 1)
    with strata.load(big, **(asked | {"experts_on_disk": False})) as model:
        assert not [line for line in model.report if "expect at most" in line] and not said()
    with caplog.at_level(logging.WARNING, "strata"), strata.load(big, **asked) as model:
        assert [line for line in model.report if line.startswith("experts on disk:")] == said()
    assert said_at_loading == [0, 0, len(said())] and len(said()) >= 2
