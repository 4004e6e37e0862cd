"""Windows on a GPU, end to end; in CI one small window through Triton's interpreter.

Expectations: the CPU engine's logits on the same file (itself checked against transformers) within
1e-3 of the largest; bits of logits compared with the same engine under another window size, cache,
PCIe share or run (the promise of docs/decisions/001).
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import strata
from strata.bench.arms import parse_arms, variant_of
from strata.core.settings import Settings
from strata.core.settings_load import Effective
from strata.core.settings_resolve import Machine
from strata.core.types import Place
from strata.engine import build as builder
from strata.engine.engine import Engine
from strata.experts.link_part import Moved, Speeds, fixed_share
from strata.experts.share_control import SOUGHT, ShareControl
from strata.experts.workers import DelayedWorker
from strata.native import available_isas
from strata.window.device_run import DeviceRunner, DeviceVariant

FIXTURES = Path(__file__).parent.parent / "fixtures"
KEYS = [
    ("qwen4_exp", "bf16"),
    ("qwen4_exp", "q8_0"),
    ("qwen3_moe", "bf16"),
    ("qwen3_next", "bf16"),
    ("qwen3_5_moe", "bf16"),
    ("gpt_oss", "bf16"),
    ("gpt_oss", "mxfp4"),
    ("glm4_moe", "bf16"),
    ("qwen2_moe", "bf16"),
    ("llama", "bf16"),
    ("qwen2", "bf16"),
]
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="no CUDA GPU")


def on_device(path: Path, device: str, **given: object) -> Engine:
    """The engine over a device's window; "cpu" runs its kernels in the interpreter."""
    asked = {"device": "cuda", "context": 128, "kv": "f32", "workers": 2} | given
    sources = {f.name: "default" for f in dataclasses.fields(Settings)} | dict.fromkeys(asked, "")
    effective = Effective(dataclasses.replace(Settings(), **asked), sources)  # type: ignore[arg-type]
    machine = Machine("a GPU", "a GPU", 2, available_isas())
    ready = builder.prepare(path, effective, machine=machine)
    return builder.assemble_device(ready, None, torch.device(device))


def tokens_of(family: str, n: int) -> list[int]:
    ids = np.load(FIXTURES / family / "bf16.npz")["input_ids"].reshape(-1)
    return [int(i) for i in ids[:n]]


def on_cpu(family: str, stem: str, tokens: list[int]) -> np.ndarray:
    with strata.load(FIXTURES / family / f"{stem}.gguf", device="cpu", context=128) as model:
        return model.logits(tokens, through="windows", window=2)


def near(ours: np.ndarray, theirs: np.ndarray) -> bool:
    return bool(np.abs(ours - theirs).max() <= 1e-3 * np.abs(theirs).max())


@pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")
def test_a_window_through_the_interpreter_equals_the_cpu_engine() -> None:
    tokens = tokens_of("qwen3_moe", 2)
    engine = on_device(FIXTURES / "qwen3_moe" / "bf16.gguf", "cpu", expert_cache=5)
    output = engine.verify(tokens)
    best = [output.greedy(t) for t in range(2)]
    ours = output.logits()
    engine.close()
    assert near(ours, on_cpu("qwen3_moe", "bf16", tokens))
    assert best == ours.argmax(axis=1).tolist()


@gpu
@needs_gpu
def test_arms_of_one_engine_have_pcie_shares_of_their_own() -> None:
    """3 experts a token, none cached: places are 3 * share of them, the logits' bits are equal;
    auto begins with the numbers of an equally quick link."""
    path = FIXTURES / "qwen3_moe" / "bf16.gguf"
    engine = on_device(path, "cuda", expert_cache=0, pcie_frac=0.5)
    arms = "off,none=pcie-frac:0,most=pcie-frac:0.8,all=pcie-frac:1,auto=pcie-frac:auto"
    n_layers = engine.runner.network.spec.n_layers
    found, rows = [], {}
    for arm in parse_arms(arms):
        engine.runner.variant = variant_of(engine, arm)
        before = engine.service.counters.total(Place.PCIE)
        found.append(engine.verify(tokens_of("qwen3_moe", 1)).logits())
        engine.commit(0)
        rows[arm.name] = (engine.service.counters.total(Place.PCIE) - before) / n_layers
    engine.close()
    assert all(np.array_equal(found[0], other) for other in found)
    assert rows == {"off": 1, "none": 0, "most": 2, "all": 3, "auto": 1}


@pytest.mark.parametrize(
    "own, seeks, late, numbers, learns",
    [
        (None, True, False, Speeds(64).moved(8), True),
        (None, False, False, fixed_share(64, 8), False),
        (128, True, False, fixed_share(128, 8), False),
        (SOUGHT, False, False, Speeds(64).moved(8), True),
        (SOUGHT, False, True, fixed_share(64, 8), False),
        (None, True, True, fixed_share(64, 8), False),
        (128, True, True, fixed_share(128, 8), False),
    ],
)
def test_the_share_of_a_window(
    own: int | None, seeks: bool, late: bool, numbers: Moved, learns: bool
) -> None:
    """A window's own share outranks the engine's; beside late rows nothing is sought, and the
    engine's first share holds."""
    applied: list[Moved] = []
    runner = DeviceRunner.__new__(DeviceRunner)
    runner.share = ShareControl(64, 8, applied.append, seeks)
    window = SimpleNamespace(
        variant=DeviceVariant(share=own, share_rests=late), host=True, frame=SimpleNamespace(T=1)
    )
    assert (runner._share_out(window) is runner.share) == learns  # type: ignore[arg-type]
    assert applied == [numbers]


@gpu
@needs_gpu
@pytest.mark.parametrize("family, stem", KEYS)
def test_logits_equal_the_cpu_engine(family: str, stem: str) -> None:
    """Where activations become int8, a last bit can change a code, and so which expert is taken;
    then positions up to the first such one are compared."""
    tokens = tokens_of(family, 40)
    engine = on_device(FIXTURES / family / f"{stem}.gguf", "cuda", expert_cache=0)
    ours = engine.logits(tokens, through="windows", window=4)
    engine.close()
    theirs = on_cpu(family, stem, tokens)
    if stem == "bf16":
        assert near(ours, theirs)
        return
    off = np.abs(ours - theirs).max(axis=1) > 0.05 * np.abs(theirs).max()
    first = int(off.argmax()) if off.any() else len(tokens)
    assert first >= 4 and np.abs(ours - theirs)[:first].max() < 0.05 * np.abs(theirs).max()


@gpu
@needs_gpu
@pytest.mark.parametrize(
    "family, stem",
    [("qwen4_exp", "bf16"), ("qwen4_exp", "q8_0"), ("qwen3_next", "bf16"), ("gpt_oss", "mxfp4")],
)
def test_placement_and_window_change_no_bit(family: str, stem: str) -> None:
    path, tokens = FIXTURES / family / f"{stem}.gguf", tokens_of(family, 24)
    found = []
    n_pairs = -1
    for cache, share in ((0, 0.0), (7, 0.3), (-2, 0.0), (0, 1.0), (-1, 0.0)):
        if cache == -2:
            cache = n_pairs // 4
        engine = on_device(path, "cuda", expert_cache=cache, pcie_frac=share)
        n_pairs = sum(len(a) for a in engine.service.tier.address_LE)
        assert len(engine.service.tier.resident()) == (n_pairs if cache == -1 else cache)
        for window in (1, 2, 4, 6):
            found.append(engine.logits(tokens, through="windows", window=window))
        found.append(engine.logits(tokens, through="prompt"))
        found.append(engine.logits(tokens, through="windows", window=2))
        engine.close()
    assert all(np.array_equal(found[0], other) for other in found)


@gpu
@needs_gpu
@pytest.mark.parametrize("family", ["qwen4_exp", "qwen3_next", "qwen3_moe"])
def test_rejected_tokens_leave_nothing(family: str) -> None:
    tokens = tokens_of(family, 40)
    # windows of new sizes are recorded in mid-sequence here, which must not touch what is committed
    engine = on_device(FIXTURES / family / "bf16.gguf", "cuda", expert_cache=3)
    straight = engine.logits(tokens, through="windows", window=1)
    rng = np.random.default_rng(3)
    engine.reset()
    out = []
    while engine.length < len(tokens):
        size = int(rng.integers(1, 9))
        keep = min(int(rng.integers(0, size + 1)), len(tokens) - engine.length)
        window = tokens[engine.length : engine.length + keep]
        window += [int(t) for t in rng.integers(8, 64, size - keep)]
        out.append(engine.run_window(window)[:keep])
        engine.commit(keep)
    engine.close()
    assert np.array_equal(np.concatenate(out), straight)


@gpu
@needs_gpu
@pytest.mark.parametrize("family, cache", [("qwen4_exp", 3), ("qwen3_next", -1), ("llama", None)])
def test_the_device_chooses_and_logits_wait_for_whoever_asks(
    family: str, cache: int | None
) -> None:
    """Windows of 1 to 8 tokens, whole and in part kept, with and without a host in them; half of
    their logits are never read. Expectation: the logits of a straight run."""
    tokens = tokens_of(family, 40)
    given = {} if cache is None else {"expert_cache": cache}
    engine = on_device(FIXTURES / family / "bf16.gguf", "cuda", **given)
    straight = engine.logits(tokens, through="windows", window=1)
    engine.reset()
    for i in range(24):
        start, size = engine.length, 1 + i % 8
        window = tokens[start : start + size]
        if not window:
            break
        output = engine.verify(window)
        best = [output.greedy(t) for t in range(len(window))]
        assert best == straight[start : start + len(window)].argmax(axis=1).tolist()
        if i % 2:
            assert np.array_equal(output.row(0), straight[start])
            assert np.array_equal(output.logits(), straight[start : start + len(window)])
        engine.commit(len(window) if i % 3 else (len(window) + 1) // 2)
    assert i > 8
    engine.close()


@gpu
@needs_gpu
@pytest.mark.parametrize("below", [0.0, 0.3])
def test_deferral_is_the_cpu_engines(below: float) -> None:
    """Expectation: the CPU engine with the same settings (equal to transformers with hooked
    experts, tests/window/test_defer.py)."""
    path, tokens = FIXTURES / "qwen4_exp" / "bf16.gguf", tokens_of("qwen4_exp", 30)
    same = {"defer_cpu": "1", "defer_cpu_below": below, "expert_cache": 3}
    engine = on_device(path, "cuda", pcie_frac=0.0, **same)
    ours = engine.logits(tokens, through="windows", window=2)
    late = engine.service.counters.total(Place.CPU_LATE)
    engine.close()
    with strata.load(path, device="cpu", context=128, **same) as model:
        theirs = model.logits(tokens, through="windows", window=2)
        assert late == model.engine.service.counters.total(Place.CPU_LATE) > 0
    assert near(ours, theirs)


@gpu
@needs_gpu
@pytest.mark.parametrize(
    "settings",
    [{}, {"wait": "memop"}, {"defer_cpu": "1"}, {"defer_cpu": "1", "wait": "memop"},
     {"defer_cpu": "check"}],
)  # fmt: skip
def test_a_slow_host_changes_no_bit(settings: dict[str, object]) -> None:
    """Delays of 0 to 50 ms in random layers, through the Python workers; expectation: no delay."""
    path, tokens = FIXTURES / "qwen4_exp" / "bf16.gguf", tokens_of("qwen4_exp", 12)
    found = []
    for seed in range(3):
        engine = on_device(path, "cuda", expert_cache=3, pcie_frac=0.0, **settings)
        if seed:
            rng = np.random.default_rng(seed)
            delays = {i: float(rng.choice([0.0, 0.005, 0.05])) for i in range(8)}
            service = engine.service
            service.answer_in_python()
            for place, worker in list(service.workers.items()):
                service.workers[place] = DelayedWorker(worker, delays)
        found.append(engine.logits(tokens, through="windows", window=3))
        engine.close()
    assert all(np.array_equal(found[0], other) for other in found)


@gpu
@needs_gpu
@pytest.mark.parametrize("family, stem", [("qwen4_exp", "q8_0"), ("gpt_oss", "mxfp4")])
@pytest.mark.parametrize("cache", [0, 9])
def test_prompts_read_by_layers_have_the_bits_of_windows(
    family: str, stem: str, cache: int
) -> None:
    path, tokens = FIXTURES / family / f"{stem}.gguf", tokens_of(family, 45)
    found, after = [], []
    for short_read in (10**6, 0):
        engine = on_device(path, "cuda", expert_cache=cache, short_read=short_read, context=128)
        found.append(engine.logits(tokens, through="prompt"))
        after.append(engine.run_window(tokens[:2]))
        engine.commit(1)
        after[-1] = np.concatenate([after[-1], engine.run_window(tokens[3:6])])
        engine.close()
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(after[0], after[1])


@gpu
@needs_gpu
@pytest.mark.parametrize("family", ["qwen4_exp", "qwen3_next", "qwen3_moe", "gpt_oss", "llama"])
def test_prompts_on_tensor_cores(family: str) -> None:
    """Expectation: the CPU engine within the 11 bits of f16 operands; windows go on from there."""
    path, tokens = FIXTURES / family / "bf16.gguf", tokens_of(family, 45)
    cache = {} if family == "llama" else {"expert_cache": 3}
    engine = on_device(path, "cuda", **cache, short_read=0, numerics="fast")
    ours = engine.logits(tokens[:40], through="prompt")
    after = engine.run_window(tokens[40:42])
    engine.commit(1)
    after = np.concatenate([after[:1], engine.run_window(tokens[41:44])])
    engine.close()
    theirs = on_cpu(family, "bf16", tokens)
    apart = np.abs(np.concatenate([ours, after]) - theirs[:44]).max(axis=1)
    # a choice of expert or block may turn where two are nearly equal
    assert np.median(apart) < 0.01 * np.abs(theirs).max()
