"""A conversation on one engine: reads prompts, writes answers through verify windows, keeps what
the client saw.

Invariants. The text does not depend on the window size or the drafter. Whenever a consumer stops
reading, the engine has committed exactly the prompt and the tokens delivered, less an end token or
a last token that nobody has computed yet. After any failure the engine is reset: a broken state is
never reused.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from strata.core.errors import ContextLengthError, EngineError, InputError, RequestCancelled
from strata.core.settings import Settings
from strata.core.types import TokenEvent
from strata.engine.draft import Drafter
from strata.engine.events import Report, Reuse
from strata.engine.last_only import LastOnly, Memory
from strata.engine.sampler import Constraint, History, Sampler
from strata.engine.stop import StopScanner
from strata.engine.window_output import WindowOutput, output_of

Logits = npt.NDArray[np.float32]


class EngineLike(Protocol):
    """What a session needs of an engine."""

    @property
    def n_vocab(self) -> int:
        """V."""
        ...

    @property
    def context_tokens(self) -> int:
        """Most committed tokens."""
        ...

    @property
    def tokens(self) -> list[int]:
        """The committed tokens."""
        ...

    @property
    def mode(self) -> str:
        """How windows run: "exact", or what changes the output."""
        ...

    def select(self, overlap: str) -> Callable[[], None]:
        """Run windows as a request's ``overlap`` says, until the result is called."""
        ...

    def reset(self) -> None:
        """Commit nothing; usable again after a failure."""
        ...

    def read_prompt(
        self, tokens: Sequence[int], progress: Callable[[int, int], None] | None = None
    ) -> Logits:
        """Commit the tokens; logits [V] after the last."""
        ...

    def score(
        self,
        tokens: Sequence[int],
        each: Callable[[int, Logits], None],
        progress: Callable[[int, int], None] | None = None,
    ) -> Logits:
        """A new sequence of these tokens, telling the logits after each; [V] after the last."""
        ...

    def verify(self, tokens: Sequence[int]) -> WindowOutput:
        """What comes after each token of a window; commits nothing."""
        ...

    def commit(self, n: int) -> None:
        """Keep the first n tokens of the window just run."""
        ...


class TextDecoder(Protocol):
    """Turns the ids of one answer into text, whole characters only."""

    def push(self, token: int) -> str:
        """Text that is certain with this token."""
        ...

    def finish(self) -> str:
        """What is left at the end, invalid bytes replaced."""
        ...


WindowObserver = Callable[[int, Logits, int], None]
"""(position of a token read through a window, logits [V] after it, the token that followed)."""
PickObserver = Callable[[Logits, int], None]
"""(the model's own logits [V], the token picked from them)."""


class Session:
    """One mutable sequence. One answer at a time: feeding a new prompt ends the one before."""

    def __init__(
        self,
        engine: EngineLike,
        drafter: Drafter,
        decoder: Callable[[], TextDecoder],
        eos_tokens: Sequence[int],
        window: int = 1,
        observer: WindowObserver | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.engine = engine
        self.memory = memory or LastOnly(engine)
        self.drafter = drafter
        self.decoder = decoder
        self.eos_tokens = frozenset(eos_tokens)
        self.window = window
        self.observer = observer
        self._answer: Answer | None = None
        self._last: tuple[WindowOutput, int] | None = None
        """(window, row) of the last committed token, while its logits need not have been read."""

    def end(self) -> None:
        """End the answer in progress, if any; what was delivered stays in the state."""
        if self._answer is not None:
            self._answer.close()
            self._answer = None

    def forget(self) -> None:
        """Drop the kept state; the next prompt is read from its beginning."""
        self.end()
        self.memory.reset()

    def void(self, error: BaseException | None = None) -> None:
        """After a failure: the state is not to be trusted, drop it; only after a cancelled one is
        what stood before the prompt still good."""
        self._last = None
        if isinstance(error, RequestCancelled) and self.memory.rewind():
            return
        with contextlib.suppress(EngineError):  # a closed engine has nothing to drop
            self.memory.reset()

    def scored(
        self,
        prompt: Sequence[int],
        each: Callable[[int, Logits], None],
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Read a prompt afresh and tell the logits after each of its tokens: each(first position,
        logits [n, V]). An answer to the same prompt then goes on from there."""
        self.forget()
        try:
            self.memory.set_row(self.engine.score(prompt, each, progress))
        except BaseException:
            self.void()
            raise

    def answer(
        self,
        prompt: Sequence[int],
        settings: Settings,
        decoder: TextDecoder | None = None,
        progress: Callable[[int, int], None] | None = None,
        *,
        constraint: Constraint | None = None,
        picked: PickObserver | None = None,
    ) -> Answer:
        """An iterator that reads the prompt at its first step and then writes. ContextLengthError,
        SettingError and InputError come from here, before any work. decoder: instead of a new one
        of the session's. constraint: the form of the answer. picked: told of every pick."""
        if not prompt:
            raise InputError("the prompt is empty; at least one token is needed")
        outside = [token for token in prompt if not 0 <= token < self.engine.n_vocab]
        if outside:
            raise InputError(
                f"token id {outside[0]} is outside the vocabulary of {self.engine.n_vocab}"
            )
        if len(prompt) > self.engine.context_tokens:
            raise ContextLengthError(len(prompt), self.engine.context_tokens)
        sampler = Sampler(settings, self.engine.n_vocab, constraint)
        self.end()
        if settings.overlap != "auto":
            self.engine.select(settings.overlap)()  # refused here, before any work
        decoder = decoder or self.decoder()
        self._answer = Answer(self, list(prompt), settings, sampler, decoder, progress, picked)
        return self._answer

    def is_current(self, answer: Answer) -> bool:
        """Whether this answer still owns the session."""
        return self._answer is answer

    def feed(
        self, prompt: Sequence[int], progress: Callable[[int, int], None] | None = None
    ) -> tuple[Logits, Reuse]:
        """Read a prompt, reusing what is kept of it; logits [V] after the last token."""
        reuse = self.memory.arrange(prompt, exact_only=self.engine.mode == "exact")
        fresh = prompt[reuse.reused_tokens :]
        if fresh:
            progress = self.memory.reading(prompt, reuse, progress)
            self.memory.set_row(self.engine.read_prompt(fresh, progress))
        row = self.memory.row()
        assert row is not None
        self.drafter.begin(prompt)
        return row, reuse

    def keep(self, output: WindowOutput, n: int) -> None:
        """Commit the first n tokens of the window just run."""
        self.memory.wrote_window(exact=self.engine.mode == "exact")
        self.engine.commit(n)
        if n:
            self.memory.set_row(None)
            self._last = output, n - 1

    def settle(self) -> None:
        """No window follows: the memory gets the logits after the last token."""
        last, self._last = self._last, None
        if last is not None:
            with contextlib.suppress(EngineError):  # others have run the engine meanwhile
                self.memory.set_row(last[0].row(last[1]).copy())


class Answer:
    """Iterates over the TokenEvents of one answer; ``report`` fills as it goes."""

    def __init__(
        self,
        session: Session,
        prompt: list[int],
        settings: Settings,
        sampler: Sampler,
        decoder: TextDecoder,
        progress: Callable[[int, int], None] | None,
        picked: PickObserver | None = None,
    ) -> None:
        self._session = session
        self._sampler = sampler
        self._progress = progress
        self._picked = picked
        self._overlap = settings.overlap
        self._tokens = prompt
        self._n_prompt = len(prompt)
        room = session.engine.context_tokens - len(prompt) + 1  # the last one need not be stored
        self._limit = min(settings.max_tokens, room)
        self._decoder = decoder
        self._scanner = StopScanner(settings.stop)
        self.report = Report(Reuse(len(prompt), 0), None if sampler.greedy else sampler.seed)
        self.report.drafts.limited = session.drafter.vocabulary is not None
        self._clock = 0.0
        self._events = self._write()

    def __iter__(self) -> Iterator[TokenEvent]:
        """Itself."""
        return self

    def __next__(self) -> TokenEvent:
        """The next token; EngineError when a newer request took the session over."""
        if self.report.finish is None and not self._session.is_current(self):
            raise EngineError("a newer request on this model ended this answer; ask again")
        return next(self._events)

    def close(self) -> None:
        """Stop here. What was delivered stays in the state."""
        self._events.close()

    def _write(self) -> Generator[TokenEvent, None, None]:
        session, report = self._session, self.report
        back = _nothing if self._overlap == "auto" else session.engine.select(self._overlap)
        report.mode = session.engine.mode
        try:
            self._clock = time.perf_counter()
            self._sampler.plan([])
            row, report.reuse = session.feed(self._tokens, self._progress)
            report.prompt_s = time.perf_counter() - self._clock
            self._clock = time.perf_counter()
            event = self._deliver(output_of([row]), 0)
            report.drafts.from_prompt = 1
            yield from self._hand_out(event)
            pending: int | None = event.token
            while not report.finish and pending is not None:
                pending = yield from self._window([pending, *self._drafts()])
            if report.finish == "length" and pending is not None and self._room() > 0:
                session.keep(session.engine.verify([pending]), 1)
        except GeneratorExit:
            raise
        except BaseException as error:
            session.void(error)
            raise
        finally:
            session.settle()
            back()

    def _window(self, window: list[int]) -> Generator[TokenEvent, None, int | None]:
        """Run the last token and its drafts, hand out the picks as far as they agree, and commit
        what was handed out. Returns the last pick, or None when it is committed already."""
        session, counts = self._session, self.report.drafts
        start, drafts = len(self._tokens) - 1, window[1:]
        output = session.engine.verify(window)
        counts.offer(len(drafts))
        n_kept, agrees = 1, True
        try:
            for place in range(len(window)):
                event = self._deliver(output, place)
                if session.observer is not None:
                    session.observer(start + place, output.row(place), event.token)
                agrees = place < len(drafts) and event.token == drafts[place]
                if agrees:
                    counts.accept(place)
                    n_kept += event.finish != "stop"  # nothing continues a text after its end
                counts.cut = int(agrees)
                yield from self._hand_out(event)
                if event.finish or not agrees:
                    break
        except GeneratorExit:
            session.keep(output, n_kept)
            raise
        session.keep(output, n_kept)
        return None if agrees else self._tokens[-1]

    def _room(self) -> int:
        """Tokens the context still holds, the last pick included if it is not committed yet."""
        return self._session.engine.context_tokens - len(self._tokens) + 1

    def _drafts(self) -> list[int]:
        n = min(
            self._session.window - 1, self._limit - self.report.drafts.emitted, self._room() - 1
        )
        drafts = list(self._session.drafter.propose(n)[:n]) if n > 0 else []
        return self._sampler.plan(drafts)

    def _deliver(self, output: WindowOutput, place: int) -> TokenEvent:
        """Pick the token after one of a window's and make its event. Logits are read only when the
        pick, or who is told of it, needs them."""
        best = output.greedy(place) if self._sampler.takes_highest else None
        if best is None:  # also where some logit is not finite: the sampler says which
            row = output.row(place)
            best = self._sampler.pick(row, History(self._tokens, self._n_prompt))
        token = best
        if self._picked is not None:
            self._picked(output.row(place), token)
        self._tokens.append(token)
        drafter, counts = self._session.drafter, self.report.drafts
        drafter.extend([token])
        counts.emitted += 1
        counts.proposable += drafter.vocabulary is None or token in drafter.vocabulary
        event = self._event(token)
        self.report.finish, self.report.stop_text = event.finish, self._scanner.found
        return event

    def _event(self, token: int) -> TokenEvent:
        if token in self._session.eos_tokens:
            return TokenEvent(token, self._rest()[0], "stop")
        text, stopped = self._scanner.push(self._decoder.push(token))
        if not stopped and self.report.drafts.emitted == self._limit:
            rest, stopped = self._rest()
            return TokenEvent(token, text + rest, "stop" if stopped else "length")
        return TokenEvent(token, text, "stop" if stopped else None)

    def _rest(self) -> tuple[str, bool]:
        """Text held back so far, at the end; and whether a stop text was found in it after all."""
        text, stopped = self._scanner.push(self._decoder.finish())
        return (text, True) if stopped else (text + self._scanner.finish(), False)

    def _hand_out(self, event: TokenEvent) -> Iterator[TokenEvent]:
        """Yield with the clock stopped: the reader's time is not ours."""
        self.report.decode_s += time.perf_counter() - self._clock
        try:
            yield event
        finally:
            self._clock = time.perf_counter()


def _nothing() -> None:
    pass
