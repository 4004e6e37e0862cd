"""C16 to C18 end to end: CPU paths and worker counts, eviction without end, broken numbers.

Expectations: ``tiny.forward`` (float64, all experts at hand, no cache), and the engine itself in
another setting, bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from strata import cli
from strata.core.errors import EngineError, NumericsError, SettingError
from strata.engine.draft import ScriptedDrafter
from strata.engine.model import Model
from strata.native import available_isas
from tests.cases.kit import load, tokens_of
from tests.cases.tiny import (
    Sizes,
    Weights,
    config,
    draw,
    forward,
    gguf_keys,
    stacked,
    write_folder,
    write_gguf,
)

WIDE = Sizes(experts=64, active=4, vocab=300)
TINY = Sizes()
PROMPT = [5, 9, 77, 31, 200, 14, 3, 250, 61, 42]
BROKEN = 111
"""A token whose embedding is NaN."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Weights]:
    weights = draw(WIDE, seed=21)
    return write_folder(tmp_path_factory.mktemp("wide"), weights, config(WIDE)), weights


@pytest.fixture(scope="module")
def long_text(wide: tuple[Path, Weights]) -> tuple[list[int], np.ndarray, np.ndarray]:
    """2,000 tokens of prompt, then 500 that the engine wrote without a cache; the reference's
    logits and its closest router choices."""
    path, weights = wide
    prompt = [int(i) for i in np.random.default_rng(2).integers(0, 250, 2000)]
    with load(path, context=2600) as model:
        said = tokens_of(model, prompt, 500, temperature=0.7, seed=4, logit_bias={258: -1e6})
    text = [*prompt, *said]
    assert len(text) == 2500
    return text, *forward(weights, WIDE, text)


class Swapper:
    """Exchanges an expert of the cache for a random one whenever it is called."""

    def __init__(self, model: Model, seed: int) -> None:
        self.tier = model.engine.service.tier
        self.everyone = [(i, e) for i, a in enumerate(self.tier.address_LE) for e in range(len(a))]
        self.rng = np.random.default_rng(seed)
        self.n_swaps = 0

    def __call__(self) -> None:
        resident = self.tier.resident()
        into = self.everyone[int(self.rng.integers(len(self.everyone)))]
        if resident and into not in resident:
            self.tier.evict(resident[int(self.rng.integers(len(resident)))])
            self.tier.insert(into)
            self.n_swaps += 1


def swapping(model: Model, text: list[int], n_prompt: int, window: int) -> tuple[np.ndarray, int]:
    """Logits after every token: the prompt in chunks, the rest in windows, a swap after each; and
    the number of swaps."""
    engine, swap = model.engine, Swapper(model, 1)
    rows = [engine.logits(text[:n_prompt])]
    for start in range(n_prompt, len(text), window):
        swap()
        piece = text[start : start + window]
        rows.append(engine.run_window(piece).copy())
        engine.commit(len(piece))
    return np.concatenate(rows), swap.n_swaps


@pytest.mark.parametrize("cache, window", [(0, 2), (4, 4), (6, 1), (128, 2)])
def test_c17_eviction_at_every_position(
    cache: int,
    window: int,
    wide: tuple[Path, Weights],
    long_text: tuple[list[int], np.ndarray, np.ndarray],
) -> None:
    """64 experts a layer, room for 0, top-k, 6 and all: right at all 2,500 positions."""
    text, expected, margin = long_text
    assert margin.min() > 2e-6, "a choice that float32 could turn; take another seed"
    with load(wide[0], context=2600, expert_cache=cache) as model:
        logits, n_swaps = swapping(model, text, 2000, window)
    assert n_swaps == 0 if cache in (0, 128) else n_swaps > 100
    worst = np.abs(logits - expected).max(1) / np.abs(expected).max()
    assert worst.max() <= 1e-3, f"position {int(worst.argmax())}"


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
@pytest.mark.parametrize("isa", ["portable", "best"])
def test_c16_paths_and_worker_counts(workers: int, isa: str, tmp_path: Path) -> None:
    """An expert width (37) that 7 does not divide: right, the same bits, and the path is named."""
    sizes = Sizes(ff=37)
    weights = draw(sizes)
    path = write_folder(tmp_path, weights, config(sizes))
    name = available_isas()[-1] if isa == "best" else isa
    with load(path, cpu_isa="portable") as model:
        base = model.logits(PROMPT)
    with load(path, workers=workers, cpu_isa=name) as model:
        logits = model.logits(PROMPT)
        (line,) = [x for x in model.report if x.startswith("CPU pool")]
        assert f"{workers} workers" in line and name in line
    assert np.array_equal(logits, base)
    assert np.abs(logits - forward(weights, sizes, PROMPT)[0]).max() < 1e-5 * np.abs(logits).max()


def test_c16_forcing_a_path_that_is_not_here(
    wide: tuple[Path, Weights], capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused before any work, with what there is."""
    missing = [isa for isa in ("portable", "avx2", "avx512") if isa not in available_isas()]
    if not missing:
        pytest.skip("this CPU has every path")
    with pytest.raises(SettingError, match=f"--cpu-isa {missing[0]}"):
        load(wide[0], cpu_isa=missing[0])
    command = ["run", str(wide[0]), "hi", "--device", "cpu", "--cpu-isa", missing[0]]
    assert cli.main(command) == 2
    shown = capsys.readouterr().err
    assert available_isas()[-1] in shown and shown.count("\n") == 1


def broken_copy(folder: Path) -> Path:
    """A model in which one token's embedding is NaN."""
    weights = draw(TINY)
    weights["model.embed_tokens.weight"][BROKEN] = float("nan")
    return write_gguf(folder / "b.gguf", stacked(weights, TINY, fused=False), gguf_keys(TINY))


@pytest.fixture
def broken(tmp_path: Path) -> Iterator[Model]:
    with load(broken_copy(tmp_path), prompt_chunk=4, spec=4, context=64) as model:
        yield model


SAFE = {"logit_bias": {BROKEN: -1e6, 258: -1e6}}


def failures() -> dict[str, Callable[[Model, list[int]], object]]:
    """Ways to meet the broken token."""
    return {
        "generate": lambda model, text: list(model.generate(text, max_tokens=3)),
        "prompt logits": lambda model, text: model.logits(text),
        "window logits": lambda model, text: model.logits(text, through="windows", window=4),
    }


@pytest.mark.parametrize("way", list(failures()))
@pytest.mark.parametrize("place", [0, 4, 9])
def test_c18b_one_request_ends_the_next_is_right(way: str, place: int, broken: Model) -> None:
    """An error that names it, at every place of a chunk; the kept state is dropped and the same
    prompt without the token is answered as on a fresh engine."""
    expected = tokens_of(broken, PROMPT, 8, **SAFE)
    text = list(PROMPT)
    text[place] = BROKEN
    with pytest.raises(NumericsError, match="position"):
        failures()[way](broken, text)
    assert broken.engine.tokens == []
    assert tokens_of(broken, PROMPT, 8, **SAFE) == expected


def test_c18b_a_wrong_draft_does_not_end_a_text(broken: Model) -> None:
    """Drafts that hold the broken token are rejected like any wrong draft (C21: drafts change no
    text)."""
    expected = tokens_of(broken, PROMPT, 12, **SAFE)
    for wrong_at in (1, 2, 3):
        broken.logits([1])  # drops the kept state
        guess = [*PROMPT, *expected[:wrong_at], BROKEN, BROKEN, BROKEN, *expected[4:]]
        broken._session.drafter = ScriptedDrafter(guess)
        answer = broken.generate(PROMPT, max_tokens=12, **SAFE)
        assert [event.token for event in answer] == expected
        assert answer.report.drafts.offered > answer.report.drafts.accepted


def test_c18b_the_model_lives_on(broken: Model) -> None:
    """Fifty broken requests; threads and files stay as many as they were."""
    expected = tokens_of(broken, PROMPT, 8, **SAFE)
    n_files = len(os.listdir("/proc/self/fd"))
    n_threads = len(os.listdir("/proc/self/task"))
    for i in range(50):
        with pytest.raises(NumericsError):
            list(broken.generate([*PROMPT[: i % 9], BROKEN], max_tokens=3))
    assert tokens_of(broken, PROMPT, 8, **SAFE) == expected
    assert len(os.listdir("/proc/self/fd")) == n_files
    assert len(os.listdir("/proc/self/task")) == n_threads


def test_c18b_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Code 1, one line; a byte of the prompt is the broken token."""
    path = broken_copy(tmp_path)
    with load(path) as model:
        text = next(c for c in map(chr, range(33, 1024)) if BROKEN in model.prompt_tokens(c))
    capsys.readouterr()
    assert cli.main(["run", str(path), text, "--raw", "--device", "cpu", "--quiet"]) == 1
    shown = capsys.readouterr()
    assert shown.out.strip() == "" and shown.err.count("\n") == 1 and "not finite" in shown.err


def test_c18b_an_answer_that_was_ended_is_over(broken: Model) -> None:
    """After the error the iterator is at its end; it does not go on with made-up tokens."""
    answer = broken.generate([*PROMPT, BROKEN], max_tokens=3)
    with pytest.raises(NumericsError):
        next(answer)
    assert next(answer, None) is None
    other = broken.generate(PROMPT, max_tokens=2, **SAFE)
    with pytest.raises(EngineError, match="newer request"):
        next(answer)
    assert len(list(other)) == 2


@pytest.mark.parametrize("scale", [1e6, 1e12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_c18a_huge_activations(dtype: torch.dtype, scale: float, tmp_path: Path) -> None:
    """A residual of this size is far beyond float16 and still right."""
    weights = {n: t.to(dtype) for n, t in draw(TINY).items()}
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"] * scale
    expected = forward(weights, TINY, PROMPT)[0]
    with load(write_folder(tmp_path, weights, config(TINY))) as model:
        logits = model.logits(PROMPT)
    assert np.abs(logits - expected).max() <= 1e-3 * np.abs(expected).max()


@pytest.mark.parametrize("scale", [1e19, 1e30, 1e36])
@pytest.mark.parametrize("through", ["windows", "prompt"])
def test_c18_a_huge_residual_gives_the_right_logits(
    tmp_path: Path, scale: float, through: str
) -> None:
    """Squares of such numbers have no float32; the reference's float64 holds them."""
    weights = draw(TINY)
    name = "model.embed_tokens.weight"
    weights[name] = weights[name] * scale
    path = write_folder(tmp_path / "huge", weights, config(TINY))
    with load(path) as model:
        found = model.logits(PROMPT, through=through)
    expected, _ = forward(weights, TINY, PROMPT)
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
