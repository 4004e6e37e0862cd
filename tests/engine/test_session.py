"""Sessions on a scripted engine whose logits depend on every committed token.

The expected text comes from `plain`, a loop of one token at a time over the same function: any
token committed too much or too little changes everything that follows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np
import pytest
from tests.engine.scripted import (
    ALPHABET,
    EOS,
    PROMPT,
    Letters,
    ScriptedEngine,
    V,
    letters_after,
    row_after,
)

from strata.core.errors import (
    ContextLengthError,
    EngineError,
    InputError,
    NumericsError,
    SettingError,
)
from strata.core.settings import Settings
from strata.core.types import TokenEvent
from strata.engine.draft import Drafter, LookupDrafter, NoDrafter, ScriptedDrafter
from strata.engine.sampler import History, Sampler
from strata.engine.session import Session


def session(
    engine: ScriptedEngine, drafter: Drafter | None = None, window: int = 1, **more: object
) -> Session:
    return Session(engine, drafter or NoDrafter(), Letters, (EOS,), window, **more)


def plain(prompt: list[int], n: int, settings: Settings, row: Callable = row_after) -> list[int]:
    """n tokens, one at a time, from the same function and sampler."""
    sampler, tokens = Sampler(settings, V), list(prompt)
    for _ in range(n):
        tokens.append(sampler.pick(row(tokens), History(tokens, len(prompt))))
    return tokens[len(prompt) :]


def ids(events: Sequence[TokenEvent]) -> list[int]:
    return [event.token for event in events]


def noisy(text: list[int], rng: random.Random, wrong: float) -> list[int]:
    """The true text with some tokens replaced: drafts that are accepted up to a random place."""
    return [rng.randrange(V - 1) if rng.random() < wrong else token for token in text]


SAMPLINGS = [
    {},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.8, "seed": 8, "top_k": 9, "top_p": 0.9},
    {"repeat_penalty": 1.5, "frequency_penalty": 0.7, "presence_penalty": 0.3},
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("window", [1, 2, 4, 6, 8])
@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_windows_and_drafts_do_not_change_the_text(
    window: int, wrong: float, sampling: dict[str, float]
) -> None:
    settings = Settings(max_tokens=40, **sampling)
    expected = plain(PROMPT, 40, settings)
    rng = random.Random(window)
    drafter = ScriptedDrafter(PROMPT + noisy(expected, rng, wrong), sizes=[7, 0, 3, 1, 2])
    engine = ScriptedEngine()
    answer = session(engine, drafter, window).answer(PROMPT, settings)
    assert ids(list(answer)) == expected
    assert answer.report.finish == "length"
    assert engine.tokens == PROMPT + expected
    assert max(engine.sizes) <= window


def test_lookup_drafts_are_taken_where_text_repeats() -> None:
    def cycle(tokens: Sequence[int]) -> np.ndarray:
        row = np.zeros(V, np.float32)
        row[(tokens[-1] + 1) % 5] = 9
        return row

    engine = ScriptedEngine(cycle)
    answer = session(engine, LookupDrafter(), 4).answer(PROMPT, Settings(max_tokens=40))
    assert ids(list(answer)) == [i % 5 for i in range(1, 41)]
    assert answer.report.drafts.accepted >= 24  # all but the first windows


@pytest.mark.parametrize("place", range(1, 9))
@pytest.mark.parametrize("end", ["length", "eos"])
def test_the_kept_state_is_what_was_delivered(place: int, end: str) -> None:
    """C22: length limit and end token at every place of a 4-token window with right drafts."""
    truth = plain(PROMPT, 12, Settings())

    def row(tokens: Sequence[int]) -> np.ndarray:
        out = row_after(tokens)
        if end == "eos" and len(tokens) == len(PROMPT) + place:
            out[EOS] = 99
        return out

    drafter = ScriptedDrafter(PROMPT + truth[:place] + [EOS] * (end == "eos") + truth[place:])
    engine = ScriptedEngine(row)
    talk = session(engine, drafter, 4)
    answer = talk.answer(PROMPT, Settings(max_tokens=place if end == "length" else 100))
    delivered = ids(list(answer))
    visible = truth[:place]
    assert delivered == (visible if end == "length" else [*visible, EOS])
    assert answer.report.finish == ("length" if end == "length" else "stop")
    assert engine.tokens == PROMPT + visible

    follow_up = [*PROMPT, *delivered, 2, 7]
    second = talk.answer(follow_up, Settings(max_tokens=5))
    text = ids(list(second))
    assert second.report.reuse.reused_tokens == len(PROMPT) + len(visible)
    assert second.report.reuse.first_difference is None
    assert engine.n_read[1:] == [len(delivered) - len(visible) + 2]
    assert text == plain(follow_up, 5, Settings())


@pytest.mark.parametrize("n_seen", range(1, 12))
def test_a_client_that_leaves_finds_only_what_it_saw(n_seen: int) -> None:
    truth = plain(PROMPT, 30, Settings())
    engine = ScriptedEngine()
    talk = session(engine, ScriptedDrafter(PROMPT + truth), 4)
    answer = talk.answer(PROMPT, Settings(max_tokens=30))
    seen = ids(list(islice(answer, n_seen)))
    answer.close()
    assert seen == truth[:n_seen]
    # the last token may not have been computed yet; nothing beyond it is there
    assert engine.tokens in (PROMPT + seen, PROMPT + seen[:-1])
    counts = answer.report.drafts
    assert counts.emitted == counts.from_prompt + counts.windows + counts.accepted - counts.cut
    again = talk.answer([*PROMPT, *seen], Settings(max_tokens=10))
    assert ids(list(again)) == truth[n_seen : n_seen + 10]
    assert again.report.reuse.reused_tokens >= len(PROMPT) + n_seen - 1


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("wrong", [0.0, 0.4])
def test_stop_text_over_tokens(window: int, wrong: float) -> None:
    """C28: the 'en ' inside 'seven ' is no match, nothing of the stop text is shown."""
    text = "seven green kettles boil"
    script = [ALPHABET.index(c) for c in text]
    drafter = ScriptedDrafter(PROMPT + noisy(script, random.Random(1), wrong))
    engine = ScriptedEngine(letters_after(text))
    answer = session(engine, drafter, window).answer(PROMPT, Settings(stop=["en kettles"]))
    events = list(answer)
    assert "".join(event.text for event in events) == "seven gre"
    assert events[-1].finish == "stop" and all(event.finish is None for event in events[:-1])
    n = text.index("kettles") + len("kettles")
    assert ids(events) == script[:n]
    assert engine.tokens == PROMPT + script[: n - 1]


def test_text_that_was_held_back_comes_at_the_end() -> None:
    settings = Settings(stop=["seven greek"], max_tokens=9)
    events = list(session(ScriptedEngine(letters_after("seven green"))).answer(PROMPT, settings))
    assert [event.text for event in events] == [""] * 8 + ["seven gre"]
    assert events[-1].finish == "length"
    ended = list(session(ScriptedEngine(letters_after("seven gre"))).answer(PROMPT, settings))
    assert "".join(event.text for event in ended) == "seven gre"


@pytest.mark.parametrize("seed", range(30))
def test_counts_add_up(seed: int) -> None:
    """C23, for random drafts, sizes and ends."""
    rng = random.Random(seed)
    n = rng.randrange(1, 40)
    truth = plain(PROMPT, n, Settings())
    window = rng.randrange(1, 9)
    sizes = [rng.randrange(8) for _ in range(5)]
    drafter = ScriptedDrafter(PROMPT + noisy(truth, rng, 0.3), sizes)
    answer = session(ScriptedEngine(), drafter, window).answer(PROMPT, Settings(max_tokens=n))
    counts = answer.report.drafts
    assert len(list(answer)) == counts.emitted == n
    assert counts.emitted == counts.from_prompt + counts.windows + counts.accepted - counts.cut
    assert counts.from_prompt == 1 and counts.cut in (0, 1)
    assert counts.accepted <= counts.offered
    assert sum(counts.accepted_at) == counts.accepted
    assert sum(counts.offered_at) == counts.offered
    assert all(a <= o for a, o in zip(counts.accepted_at, counts.offered_at, strict=True))


def test_no_drafts_offered_is_said_so() -> None:
    answer = session(ScriptedEngine(), None, 1).answer(PROMPT, Settings(max_tokens=4))
    list(answer)
    (line,) = answer.report.drafts.lines()
    assert "no drafts offered" in line and "%" not in line


def test_share_of_tokens_a_limited_drafter_could_propose() -> None:
    """C23: a drafter of half the vocabulary; the text is unaffected, the share is counted here."""
    truth = plain(PROMPT, 30, Settings())
    half = frozenset(range(V // 2))
    drafter = ScriptedDrafter(PROMPT + truth, vocabulary=half)
    answer = session(ScriptedEngine(), drafter, 4).answer(PROMPT, Settings(max_tokens=30))
    assert ids(list(answer)) == truth
    share = 100 * sum(token in half for token in truth) / 30
    assert 0 < share < 100
    assert f"could have proposed {share:.0f} %" in answer.report.drafts.lines()[-1]


def test_a_prompt_that_differs_is_read_again_and_says_where() -> None:
    engine = ScriptedEngine()
    talk = session(engine)
    list(talk.answer(PROMPT, Settings(max_tokens=6)))
    other = [*PROMPT[:3], 30, 31, 32]
    answer = talk.answer(other, Settings(max_tokens=6))
    assert ids(list(answer)) == plain(other, 6, Settings())
    assert (answer.report.reuse.reused_tokens, answer.report.reuse.first_difference) == (0, 3)
    assert "position 3" in answer.report.reuse.line()


def test_a_prompt_inside_the_kept_state_is_read_again() -> None:
    talk = session(ScriptedEngine())
    first = ids(list(talk.answer(PROMPT, Settings(max_tokens=6))))
    answer = talk.answer(PROMPT, Settings(max_tokens=6))
    assert ids(list(answer)) == first
    assert answer.report.reuse.first_difference == len(PROMPT)


def test_the_kept_state_itself_needs_no_reading() -> None:
    engine = ScriptedEngine()
    talk = session(engine)
    first = ids(list(talk.answer(PROMPT, Settings(max_tokens=6))))
    answer = talk.answer(PROMPT + first, Settings(max_tokens=6))
    assert first + ids(list(answer)) == plain(PROMPT, 12, Settings())
    assert answer.report.reuse.reused_tokens == len(PROMPT) + 6
    assert engine.n_read == [len(PROMPT)]


@pytest.mark.parametrize("bad_length", [5, 6, 8])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_broken_number_ends_the_request_and_drops_the_state(
    bad_length: int, value: float
) -> None:
    """C18 (b): an error instead of token 0; the same prompt again is answered right."""
    broken = True

    def row(tokens: Sequence[int]) -> np.ndarray:
        out = row_after(tokens)
        if broken and len(tokens) == bad_length:
            out[17] = value
        return out

    engine = ScriptedEngine(row)
    truth = plain(PROMPT, 10, Settings())
    talk = session(engine, ScriptedDrafter(PROMPT + truth), 2)
    seen = []
    with pytest.raises(NumericsError, match=f"position {bad_length} "):
        for event in talk.answer(PROMPT, Settings(max_tokens=10)):
            seen.append(event.token)
    assert seen == truth[: bad_length - len(PROMPT)]
    assert engine.tokens == []
    broken = False
    answer = talk.answer(PROMPT, Settings(max_tokens=10))
    assert ids(list(answer)) == truth
    assert answer.report.reuse.reused_tokens == 0


def test_context_limit_is_refused_before_any_work() -> None:
    """C24: both counts are in the message and nothing is read; a prompt that fits is served
    next.
    """
    engine = ScriptedEngine(context_tokens=8)
    talk = session(engine)
    with pytest.raises(ContextLengthError, match=r"9 tokens .* 8") as caught:
        talk.answer(list(range(9)), Settings())
    assert (caught.value.n_tokens, caught.value.context_tokens) == (9, 8)
    assert engine.n_read == []
    # a full context still has the logits for one more token
    for n_prompt in (8, 7, 5):
        prompt = list(range(n_prompt))
        answer = talk.answer(prompt, Settings())
        assert ids(list(answer)) == plain(prompt, 9 - n_prompt, Settings())
        assert answer.report.finish == "length"


@pytest.mark.parametrize("window", [2, 4, 8])
def test_windows_stop_at_the_context_limit(window: int) -> None:
    truth = plain(PROMPT, 20, Settings())
    engine = ScriptedEngine(context_tokens=len(PROMPT) + 9)
    talk = session(engine, ScriptedDrafter(PROMPT + truth), window)
    assert ids(list(talk.answer(PROMPT, Settings()))) == truth[:10]


def test_bad_requests_are_refused_before_any_work() -> None:
    engine = ScriptedEngine()
    talk = session(engine)
    for prompt, settings, error in (
        ([], {}, InputError),
        ([V], {}, InputError),
        ([-1], {}, InputError),
        (PROMPT, {"logit_bias": {V: 1}}, SettingError),
    ):
        with pytest.raises(error):
            talk.answer(prompt, Settings(**settings))
    assert engine.n_read == []


def test_a_newer_answer_takes_over() -> None:
    talk = session(ScriptedEngine())
    old = talk.answer(PROMPT, Settings())
    next(old)
    new = talk.answer([7, 8], Settings(max_tokens=5))
    assert next(new).token == plain([7, 8], 1, Settings())[0]
    with pytest.raises(EngineError, match="newer request"):
        next(old)
    assert ids(list(new)) == plain([7, 8], 5, Settings())[1:]


def test_observer_sees_each_token_that_was_read_through_a_window() -> None:
    truth = plain(PROMPT, 12, Settings())
    seen: list[tuple[int, int]] = []

    def observe(position: int, row: np.ndarray, target: int) -> None:
        tokens = PROMPT + truth
        np.testing.assert_array_equal(row, row_after(tokens[: position + 1]))
        seen.append((position, target))

    drafter = ScriptedDrafter(PROMPT + noisy(truth, random.Random(2), 0.3))
    talk = session(ScriptedEngine(), drafter, 4, observer=observe)
    list(talk.answer(PROMPT, Settings(max_tokens=12)))
    assert seen == [(len(PROMPT) + i, truth[i + 1]) for i in range(11)]


def test_times_leave_the_reader_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that only the reader moves, no decode time is counted."""
    now = 0.0
    monkeypatch.setattr("strata.engine.session.time.perf_counter", lambda: now)
    answer = session(ScriptedEngine()).answer(PROMPT, Settings(max_tokens=5))
    for _ in answer:
        now += 10
    assert answer.report.decode_s == 0


def test_report_lines() -> None:
    answer = session(ScriptedEngine()).answer(PROMPT, Settings(max_tokens=3, temperature=1, seed=5))
    list(answer)
    text = "\n".join(answer.report.lines())
    assert "5 tokens, 0 reused" in text and "3 tokens" in text
    assert "finish length" in text and "seed 5" in text
