"""The engine: one loaded model and one sequence. Tokens in, logits out; text belongs to the
session.

Invariant: ``length`` tokens are committed, and whatever failed before, the next call starts from
exactly those or from a
reset. After a NumericsError or StallError the state is void until ``reset``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from strata.core.errors import EngineError, InputError, NumericsError, SettingError
from strata.core.settings import Settings
from strata.core.types import Place
from strata.engine.prefill import ReadProgress, read_prompt
from strata.engine.window_output import WindowOutput
from strata.experts.adapt import Adapter
from strata.experts.service import ExpertService
from strata.formats.tokenizer import Tokenizer
from strata.memory.budget import MemoryPlan
from strata.memory.state import Image, SequenceState, Snapshot
from strata.models.spec import ModelSpec
from strata.window.run import MAX_WINDOW_TOKENS, WindowRunner

Logits = npt.NDArray[np.float32]


class Engine:
    """Made by ``engine.build.build``; close it when done."""

    def __init__(
        self,
        *,
        spec: ModelSpec,
        settings: Settings,
        tokenizer: Tokenizer | InputError,
        runner: WindowRunner,
        plan: MemoryPlan,
        report: Sequence[str],
        on_close: Callable[[], None],
    ) -> None:
        self.spec = spec
        self.settings = settings
        self.runner = runner
        self.plan = plan
        self.report = list(report)
        self._tokenizer = tokenizer
        self._on_close = on_close
        self._void = False
        self._closed = False
        self._output: WindowOutput | None = None
        self.adapter: Adapter | None = None
        """Exchanges cached experts between windows; None keeps them (``engine/adaptive.py``)."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer; InputError with the reason when it has none that works."""
        if isinstance(self._tokenizer, InputError):
            raise self._tokenizer
        return self._tokenizer

    @property
    def n_vocab(self) -> int:
        """V: width of the logits."""
        return self.spec.n_vocab

    @property
    def state(self) -> SequenceState:
        """The sequence's state."""
        return self.runner.state

    @property
    def service(self) -> ExpertService:
        """Expert placement and counters."""
        return self.runner.service

    @property
    def context_tokens(self) -> int:
        """Tokens that fit."""
        return self.state.context_tokens

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self.state.length

    @property
    def tokens(self) -> list[int]:
        """The committed tokens (a copy)."""
        return list(self.state.tokens)

    def reset(self) -> None:
        """Start a new sequence."""
        self._require_open()
        self.state.reset()
        self._void = False

    @property
    def mode(self) -> str:
        """How windows run now: "exact", or the name of what changes the output."""
        return self.runner.variant.name

    def select(self, overlap: str) -> Callable[[], None]:
        """Run windows as a request's ``overlap`` says, until the returned function is called.
        SettingError for what this engine cannot do."""
        before, found = self.runner.variant, self.runner.overlaps.get(overlap)
        if found is None:
            raise SettingError(
                f"overlap {overlap}: this engine only does {', '.join(self.runner.overlaps)}"
            )
        self.runner.variant = found

        def back() -> None:
            self.runner.variant = before

        return back

    def read_prompt(self, tokens: Sequence[int], progress: ReadProgress | None = None) -> Logits:
        """Commit the tokens; logits float32 [V] after the last. ContextLengthError before any
        work."""
        self._require_tokens(tokens)
        with self._voiding():
            self._begin(len(tokens))
            logits = read_prompt(self.runner, tokens, self.settings.prompt_chunk, progress=progress)
            last = _finite_copy(logits, self.length - 1)[0]
            return np.asarray(last)

    def score(
        self,
        tokens: Sequence[int],
        each: Callable[[int, Logits], None],
        progress: ReadProgress | None = None,
    ) -> Logits:
        """Read a new sequence of these tokens and tell the logits after each: each(first position,
        logits float32 [n, V]), chunk by chunk. Logits [V] after the last."""
        self.reset()
        self._require_tokens(tokens)

        def checked(start: int, rows: torch.Tensor) -> None:
            each(start, _finite_copy(rows, start))

        with self._voiding():
            self._begin(len(tokens))
            chunk = self.settings.prompt_chunk
            last = read_prompt(self.runner, tokens, chunk, progress=progress, each=checked)
            return np.asarray(_finite_copy(last, self.length - 1)[0])

    def run_window(self, tokens: Sequence[int]) -> Logits:
        """Logits float32 [T, V] of a verify window of 1..8 tokens, a copy; nothing is committed
        yet.

        A row may hold NaN, because a wrong draft must not end a text that never takes it;
        ``commit`` refuses such rows."""
        return self.verify(tokens).logits()

    def verify(self, tokens: Sequence[int]) -> WindowOutput:
        """As ``run_window``, but logits are brought here only when they are asked for, and only
        until the engine runs again."""
        self._require_tokens(tokens)
        runner = self.runner
        with self._voiding():
            recorded = runner.window(len(tokens))
            self._begin(len(tokens))
            logits = runner.run(recorded, tokens)

        def bring() -> Logits:
            return np.asarray(runner.on_host(logits).to(torch.float32).numpy())

        self._output = WindowOutput(len(tokens), bring, runner.choice)
        return self._output

    def commit(self, n: int) -> None:
        """Keep the first n tokens (0..T) of the window just run. NumericsError when their logits
        are not finite."""
        self._require_open()
        with self._voiding():
            if self._output is not None:
                self._output.require_finite(n, self.length)
            self.runner.commit(n)
        if self.adapter is not None:
            self.adapter.after_window(self.service)

    def snapshot(self) -> Snapshot:
        """State to come back to (``restore``) while the sequence still begins with these tokens."""
        return self.state.snapshot()

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot."""
        self.state.restore(snapshot)
        self._void = False

    def adopt(self, image: Image) -> None:
        """Continue the sequence of an image instead of the one here."""
        self._require_open()
        self.state.adopt(image)
        self._void = False

    def logits(
        self,
        token_ids: Sequence[int],
        through: Literal["prompt", "windows"] = "prompt",
        window: int = 1,
    ) -> Logits:
        """float32 [T, V]: row t is the distribution after token t, for a new sequence of these
        tokens.

        through "prompt": read in chunks; "windows": through verify windows of ``window`` tokens,
        all kept.
        """
        self._require_tokens(token_ids)
        if through not in ("prompt", "windows"):
            raise InputError(f'through must be "prompt" or "windows", not {through!r}')
        _require_window(window)
        if through == "prompt" and window != 1:
            raise InputError(f'window {window} has no effect with through="prompt"')
        self.reset()
        self.state.require_room(len(token_ids))
        if through == "prompt":
            with self._voiding():
                self._begin(len(token_ids))
                chunk = self.settings.prompt_chunk
                logits = read_prompt(self.runner, token_ids, chunk, all_logits=True)
                return _finite_copy(logits, 0)
        rows: list[Logits] = []
        for start in range(0, len(token_ids), window):
            rows.append(self.run_window(token_ids[start : start + window]))
            self.commit(min(window, len(token_ids) - start))
        return np.concatenate(rows)

    def explain(self, window: int) -> list[str]:
        """The program of a window size, and the place of each row in the last plan of every
        layer."""
        _require_window(window)
        recorded = self.runner.window(window)
        lines = [f"window of {window} tokens, {len(recorded.program.steps)} steps"]
        lines += recorded.program.lines()
        lines.append("")
        tokens = (self.state.tokens[-1:] or [0]) * window
        self.run_window(tokens)
        self.commit(0)
        for layer, group in enumerate(self.service.tier.address_LE):
            if len(group):
                plan = self.service.of(layer)
                counts = ", ".join(f"{p.name} {plan.count(p)}" for p in Place if plan.count(p))
                experts = sum(len(g.expert_G) for g in plan.groups.values())
                lines.append(f"plan:{layer}: {experts} distinct experts; rows: {counts}")
        return lines

    def close(self) -> None:
        """Stop the workers and let the memory go. Closing twice is fine."""
        if not self._closed:
            self._closed = True
            try:
                if self.adapter is not None:
                    self.adapter.close()
            finally:
                self._on_close()

    def _begin(self, n_tokens: int) -> None:
        """So many tokens are about to run: logits of the window before end with it.
        ContextLengthError first."""
        self.state.require_room(n_tokens)
        if self._output is not None:
            self._output.end()
            self._output = None

    def _require_open(self) -> None:
        if self._closed:
            raise EngineError("this engine is closed; load the model again")

    def _require_tokens(self, tokens: Sequence[int]) -> None:
        self._require_open()
        if self._void:
            raise EngineError("the state is void after an earlier failure; call reset() first")
        if len(tokens) == 0:
            raise InputError("no tokens given; at least one is needed")
        for token in tokens:
            if not 0 <= token < self.n_vocab:
                raise InputError(f"token id {token} is outside the vocabulary of {self.n_vocab}")

    def _voiding(self) -> _Voiding:
        return _Voiding(self)


class _Voiding:
    """Marks the state void when the block fails half way; errors found before any work leave it
    alone."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None and not issubclass(kind, InputError):
            self._engine._void = True


def _require_window(n_tokens: int) -> None:
    whole = isinstance(n_tokens, int) and not isinstance(n_tokens, bool)
    if not whole or not 1 <= n_tokens <= MAX_WINDOW_TOKENS:
        raise InputError(
            f"window must be a whole number from 1 to {MAX_WINDOW_TOKENS}, not {n_tokens!r}"
        )


def _require_finite(logits_TV: Logits, first_position: int) -> None:
    """NumericsError naming the first position with NaN or infinity."""
    bad = ~np.isfinite(logits_TV).all(axis=-1)
    if bad.any():
        raise NumericsError(
            f"the logits after position {first_position + int(bad.argmax())} are not finite; the "
            f"request was stopped and its state dropped"
        )


def _finite_copy(logits_TV: torch.Tensor, first_position: int) -> Logits:
    """float32, checked."""
    rows = logits_TV.to(torch.float32).numpy().copy()
    _require_finite(rows, first_position)
    return rows
