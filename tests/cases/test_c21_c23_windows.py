"""C21 to C23 end to end: windows of drafts change no text, keep what was seen, and are counted.

Expectations: plain decoding (window 1) of the same model, and counting by hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from strata.core.errors import ContextLengthError
from strata.engine.draft import ScriptedDrafter
from strata.engine.model import Model
from tests.cases.kit import load, tokens_of
from tests.cases.tiny import Sizes, config, draw, write_folder, write_tokenizer

SIZES = Sizes(vocab=288)
FIXTURES = Path(__file__).parents[1] / "fixtures"
NO_END = {"logit_bias": {258: -1e6}}
PROMPTS = {
    "words": [104, 105, 32, 116, 104, 101, 114, 101],
    "periodic": [11, 12, 13, 14] * 8,
    "one token": [42],
    "long": [int(i) for i in np.random.default_rng(7).integers(0, 250, 300)],
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_folder(tmp_path_factory.mktemp("m"), draw(SIZES, seed=3), config(SIZES))
    write_tokenizer(folder, SIZES.vocab)
    return folder


@pytest.fixture(scope="module")
def plain(path: Path) -> Iterator[Model]:
    with load(path, context=700) as model:
        yield model


def fresh(model: Model) -> None:
    """Drop the kept state."""
    model.logits([1])


SAMPLINGS = ({}, {"temperature": 0.8, "top_p": 0.95, "seed": 11})


@pytest.fixture(scope="module")
def plain_texts(plain: Model) -> list[tuple[list[int], dict[str, float], list[int]]]:
    """(prompt, sampling, 256 tokens) of plain decoding."""
    texts = []
    for sampling in SAMPLINGS:
        for name, prompt in PROMPTS.items():
            if sampling and name != "words":
                continue
            fresh(plain)
            texts.append((prompt, sampling, tokens_of(plain, prompt, 256, **NO_END, **sampling)))
    return texts


@pytest.mark.parametrize("window, cache", [(1, 7), (2, 0), (2, 16), (4, 7), (6, 2)])
def test_c21_256_tokens(
    window: int,
    cache: int,
    path: Path,
    plain_texts: list[tuple[list[int], dict[str, float], list[int]]],
) -> None:
    """Every prompt, experts partly cached, greedy and sampled: the same ids."""
    accepted = 0
    with load(path, context=700, spec=window, expert_cache=cache) as model:
        for prompt, sampling, expected in plain_texts:
            fresh(model)
            answer = model.generate(prompt, max_tokens=256, **NO_END, **sampling)
            assert [event.token for event in answer] == expected
            assert len(expected) == 256
            accepted += answer.report.drafts.accepted
    assert (accepted > 0) == (window > 1), "prompt lookup finds nothing in these texts"


@pytest.mark.parametrize("family", ["qwen4_exp", "qwen3_next", "gpt_oss", "deepseek_v3"])
def test_c21_every_kind_of_state(family: str) -> None:
    """Recurrent, indexed, sliding and latent state: right and wrong drafts at random places."""
    file = FIXTURES / family / "bf16.gguf"
    prompt = [int(i) for i in np.random.default_rng(3).integers(8, 300, 30)]
    rng = np.random.default_rng(9)
    with load(file) as one:
        expected = tokens_of(one, prompt, 48, logit_bias={7: -1e6})
    text = [*prompt, *expected]
    for window in (2, 4, 6):
        with load(file, spec=window, expert_cache=5) as model:
            guess = [t if rng.random() < 0.7 else int(rng.integers(8, 300)) for t in text]
            model._session.drafter = ScriptedDrafter(guess, sizes=[3, 1, 5, 2, 0, 5])
            answer = model.generate(prompt, max_tokens=48, logit_bias={7: -1e6})
            assert [event.token for event in answer] == expected
            assert 0 < answer.report.drafts.accepted < answer.report.drafts.offered


@pytest.mark.parametrize("place", [0, 1, 2, 3])
@pytest.mark.parametrize("end", ["length", "end token", "client leaves"])
@pytest.mark.parametrize("family", ["tiny", "qwen4_exp"])
def test_c22_the_state_is_what_was_delivered(end: str, place: int, family: str, path: Path) -> None:
    """The end at each place of a 4-token window of right drafts; the follow-up reuses all of it and
    continues as from a fresh start."""
    file = path if family == "tiny" else FIXTURES / family / "bf16.gguf"
    prompt = [31, 90, 14, 15, 92, 65, 35, 89]
    no_end = {"logit_bias": {7: -1e6, 258: -1e6}}
    with load(file) as one:
        full = tokens_of(one, prompt, 40, **no_end)
    # the first token comes from the prompt; windows of 4 begin behind it
    n = next(n for n in range(5 + place, 36, 4) if full[n - 1] not in full[: n - 1])
    with load(file, spec=4) as model:
        session = model._session
        session.drafter = ScriptedDrafter([*prompt, *full])
        if end == "end token":
            session.eos_tokens = frozenset({full[n - 1]})
        answer = model.generate(prompt, max_tokens=n if end == "length" else 40, **no_end)
        said: list[int] = []
        for event in answer:
            said.append(event.token)
            if end == "client leaves" and len(said) == n:
                answer.close()
                break
        assert said == full[:n]
        seen = [*prompt, *said]
        kept = model.engine.tokens
        # an end token, or one that nobody computed yet, may be missing at the end; nothing is extra
        assert kept == seen[: len(kept)] and len(kept) >= len(seen) - (end != "length")
        session.eos_tokens = frozenset()
        follow_up = [*seen, 50, 51, 52]
        session.drafter = ScriptedDrafter([])
        second = model.generate(follow_up, max_tokens=8, **no_end)
        text = [event.token for event in second]
        assert second.report.reuse.reused_tokens == len(kept)
        assert second.report.reuse.first_difference is None
    with load(file) as one:
        assert tokens_of(one, follow_up, 8, **no_end) == text


def test_c22_stop_text_inside_a_window(path: Path, plain: Model) -> None:
    """A stop text ends the answer with the same text and the same number of tokens at any window;
    what follows is right."""
    fresh(plain)
    events = list(plain.generate(PROMPTS["words"], max_tokens=40, **NO_END))
    text = "".join(event.text for event in events)
    stop = next(text[i : i + 2] for i in range(9, 30) if text[i : i + 2].isprintable())
    fresh(plain)
    expected = list(plain.generate(PROMPTS["words"], max_tokens=40, stop=[stop], **NO_END))
    assert expected[-1].finish == "stop"
    assert "".join(e.text for e in expected) == text[: text.index(stop)]
    with load(path, context=700, spec=4) as model:
        model._session.drafter = ScriptedDrafter(
            [*PROMPTS["words"], *(event.token for event in events)]
        )
        found = list(model.generate(PROMPTS["words"], max_tokens=40, stop=[stop], **NO_END))
        assert [(e.token, e.text, e.finish) for e in found] == [
            (e.token, e.text, e.finish) for e in expected
        ]
        assert tokens_of(model, PROMPTS["one token"], 5, **NO_END) == tokens_of(
            plain, PROMPTS["one token"], 5, **NO_END
        )


@pytest.mark.parametrize("window", [1, 2, 4, 8])
@pytest.mark.parametrize("room", [1, 2, 3, 5, 9])
def test_c22_windows_at_the_end_of_the_context(
    window: int, room: int, path: Path, plain: Model
) -> None:
    """Prompts that leave room for 0 to 8 more tokens: as many tokens as fit, the last one not
    stored; then the next prompt works."""
    prompt = PROMPTS["long"][: 40 - room + 1]
    fresh(plain)
    expected = tokens_of(plain, prompt, room, **NO_END)
    with load(path, context=40, spec=window) as model:
        model._session.drafter = ScriptedDrafter([*prompt, *expected, *[9] * 20])
        events = list(model.generate(prompt, max_tokens=100, **NO_END))
        assert [event.token for event in events] == expected
        assert events[-1].finish == "length" and model.engine.length <= 40
        with pytest.raises(ContextLengthError):
            model.generate(PROMPTS["long"][:41])
        assert len(tokens_of(model, [5, 6], 3, **NO_END)) == 3


@pytest.mark.parametrize("window", [1, 2, 4, 6])
def test_c23_counts(window: int, path: Path, plain: Model) -> None:
    """accepted <= offered, in all and by place; emitted = first + windows + accepted - cut."""
    prompt = PROMPTS["words"]
    fresh(plain)
    full = tokens_of(plain, prompt, 60, **NO_END)
    rng = np.random.default_rng(1)
    with load(path, context=700, spec=window) as model:
        guess = [t if rng.random() < 0.6 else 9 for t in [*prompt, *full]]
        for n in (1, 2, 17, 60):
            fresh(model)
            if window > 1:
                model._session.drafter = ScriptedDrafter(guess)
            answer = model.generate(prompt, max_tokens=n, **NO_END)
            assert [event.token for event in answer] == full[:n]
            counts = answer.report.drafts
            assert counts.emitted == n == 1 + counts.windows + counts.accepted - counts.cut
            assert counts.accepted == sum(counts.accepted_at) <= counts.offered
            assert counts.offered == sum(counts.offered_at)
            places = zip(counts.accepted_at, counts.offered_at, strict=True)
            assert all(a <= o for a, o in places) and len(counts.offered_at) < max(window, 2)
            _assert_told(answer.report.lines(), counts.offered)


def _assert_told(lines: Sequence[str], offered: int) -> None:
    (line,) = [x for x in lines if x.startswith("drafts")]
    assert ("no drafts offered" in line) == (offered == 0)
    assert ("%" in line) == (offered > 0)


def test_c23_a_drafter_that_knows_half_of_the_vocabulary(path: Path, plain: Model) -> None:
    """The share of the output it could have proposed is counted; the text stays."""
    prompt = PROMPTS["words"]
    fresh(plain)
    full = tokens_of(plain, prompt, 60, **NO_END)
    half = frozenset(range(0, SIZES.vocab, 2))
    with load(path, context=700, spec=4) as model:
        model._session.drafter = ScriptedDrafter([*prompt, *full], vocabulary=half)
        answer = model.generate(prompt, max_tokens=60, **NO_END)
        assert [event.token for event in answer] == full
        share = round(100 * sum(token in half for token in full) / 60)
        assert f"could have proposed {share} % of the tokens" in answer.report.lines()[-1]
