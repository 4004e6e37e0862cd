"""Arms: words and their meaning; which can take turns on one engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import strata
from strata.bench.arms import parse_arms, variant_of
from strata.core.errors import SettingError

PATH = Path(__file__).parent.parent / "fixtures" / "qwen3_moe" / "bf16.gguf"


def test_words() -> None:
    off, defer, light = parse_arms("off, defer,light=defer-cpu:1+defer-cpu-below:0.05")
    assert (off.name, off.changes) == ("off", {})
    assert defer.changes == {"defer_cpu": "1"} and not defer.needs_engine
    assert light.changes == {"defer_cpu": "1", "defer_cpu_below": "0.05"} and not light.needs_engine
    assert parse_arms("big=expert-cache:5")[0].needs_engine == ["expert_cache"]
    assert not parse_arms("third=pcie-frac:0.3")[0].needs_engine


@pytest.mark.parametrize(
    "text, why",
    [
        ("", "different names"),
        ("off,off", "different names"),
        ("deffer", "known are off, floor, check, defer"),
        ("a=defer-cpuu:1", r"did you mean 'defer_cpu'\?"),
        ("a=defer-cpu:1+workers", "has no value"),
    ],
)
def test_bad_words(text: str, why: str) -> None:
    with pytest.raises(SettingError, match=why):
        parse_arms(text)


def test_arms_of_one_engine_run_as_engines_of_their_own() -> None:
    """Logits of each arm on one engine equal those of an engine loaded with its settings."""
    tokens = [3, 9, 4, 11, 5, 7]
    with strata.load(PATH, device="cpu", context=64) as model:
        arms = {arm.name: variant_of(model.engine, arm) for arm in parse_arms("off,defer")}
        ours = {}
        for name in ("off", "defer", "off"):
            model.engine.runner.variant = arms[name]
            ours[name] = model.engine.logits(tokens, through="windows", window=2)
        with pytest.raises(SettingError, match="expert_cache, which is fixed.*--fresh"):
            variant_of(model.engine, parse_arms("c=expert-cache:5")[0])
        with pytest.raises(SettingError, match="arm x: --defer-cpu"):
            variant_of(model.engine, parse_arms("x=defer-cpu:7")[0])
        with pytest.raises(SettingError, match="arm x: pcie-frac is off here: there is no GPU"):
            variant_of(model.engine, parse_arms("x=pcie-frac:0.3")[0])
    for name, setting in (("off", "0"), ("defer", "1")):
        with strata.load(PATH, device="cpu", context=64, defer_cpu=setting) as model:
            alone = model.logits(tokens, through="windows", window=2)
        assert np.array_equal(ours[name], alone)
    assert not np.array_equal(ours["off"], ours["defer"])
