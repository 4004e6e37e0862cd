"""python -m strata.serve.scripted SCRIPT FD: an engine process without a model, for tests.

It writes what a script says, through the real session: stop texts, windows, limits, seeds,
log-probabilities and reuse are the real ones; only the logits are made up. A script is a JSON file:

    {"answers": [{"when": "text in the prompt", "write": ["pie", "ces"], "delay_s": 0.0,
                  "fault": null, "at": 0}],
     "control": ["<|name|>"], "context": 4096, "window": 1, "load_s": 0, "template": "..."}

Pieces become tokens as they are, one each; a piece that is in "control" becomes the control token.
A prompt that no "when" fits is answered with words made of the prompt itself, so that mixed up
answers are seen. fault: "die", "silent" (the pulse stands still), "deaf" (goes on, ignores a
cancel), "error" or "nan", after "at" tokens; "prompt_s": seconds that reading takes, in 20 steps.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from strata.core.errors import EngineError
from strata.core.settings import Settings
from strata.engine.draft import NoDrafter, ScriptedDrafter
from strata.engine.session import Session
from strata.engine.window_output import WindowOutput, output_of
from strata.serve.answering import MarkedDecoder, answer
from strata.serve.engine_loop import Control, EngineLoop
from strata.serve.messages import Generate, Load
from strata.serve.pipe import Pipe
from strata.serve.scripted_text import ScriptedTokenizer

Logits = npt.NDArray[np.float32]
LIKELY = 20.0
WORDS = ("ash", "birch", "cedar", "elm", "fir", "hazel", "larch", "maple", "oak", "pine")


class ScriptedEngine:
    """Logits that all but force the script's answer to the prompt at hand."""

    def __init__(self, script: Mapping[str, Any], tokenizer: ScriptedTokenizer) -> None:
        self.script = script
        self.tokenizer = tokenizer
        self.n_vocab = tokenizer.n_vocab
        self.context_tokens = int(script.get("context", 4096))
        self.tokens: list[int] = []
        self.answer: list[int] = []
        self.rule: Mapping[str, Any] = {}
        self.control: Control | None = None
        self._prompt: list[int] = []
        self._window: list[int] = []

    @property
    def mode(self) -> str:
        """Always the plain one."""
        return "exact"

    def select(self, overlap: str) -> Callable[[], None]:
        """There is only one way."""
        return lambda: None

    def begin(self, prompt: Sequence[int]) -> None:
        """The next answer is to this prompt."""
        text = self.tokenizer.decode(prompt, skip_special=False)
        rules = [r for r in self.script.get("answers", ()) if r.get("when", "") in text]
        self.rule = rules[0] if rules else {}
        pieces = self.rule.get("write") if rules else words_for(text)
        self.answer = [*self.tokenizer.pieces(pieces or ()), self.tokenizer.eos_ids[0]]
        self._prompt = list(prompt)

    def reset(self) -> None:
        """Nothing committed."""
        self.tokens = []

    def read_prompt(
        self, tokens: Sequence[int], progress: Callable[[int, int], None] | None = None
    ) -> Logits:
        """Take the prompt in, as slowly as the script says."""
        for i in range(20 if self.rule.get("prompt_s") else 0):
            time.sleep(self.rule["prompt_s"] / 20)
            if progress is not None:
                progress(len(tokens) * (i + 1) // 20, len(tokens))
        self.tokens += tokens
        return self._row(0)

    def score(
        self,
        tokens: Sequence[int],
        each: Callable[[int, Logits], None],
        progress: Callable[[int, int], None] | None = None,
    ) -> Logits:
        """Every prompt token is as likely as any other."""
        each(0, np.zeros((len(tokens), self.n_vocab), np.float32))
        self.tokens = list(tokens)
        return self._row(0)

    def verify(self, tokens: Sequence[int]) -> WindowOutput:
        """Rows after each token."""
        written = len(self.tokens) - len(self._prompt) + 1
        self._fault(written)
        if self.rule.get("delay_s"):
            time.sleep(self.rule["delay_s"])
        if self.control is not None:
            self.control.pulse()
        self._window = list(tokens)
        return output_of([self._row(written + i) for i in range(len(tokens))])

    def commit(self, n: int) -> None:
        """Keep the first n."""
        self.tokens += self._window[:n]

    def _row(self, written: int) -> Logits:
        row = np.zeros(self.n_vocab, np.float32)
        row[self.answer[min(written, len(self.answer) - 1)]] = LIKELY
        if self.rule.get("fault") == "nan" and written >= self.rule.get("at", 0):
            row[0] = np.nan
        return row

    def _fault(self, written: int) -> None:
        fault = self.rule.get("fault")
        if not fault or written < self.rule.get("at", 0):
            return
        if fault == "die":
            os._exit(3)
        if fault == "error":
            raise EngineError("the script says so")
        while fault in ("silent", "deaf"):
            time.sleep(0.05)
            if fault == "deaf" and isinstance(self.control, EngineLoop):
                self.control.tick()


def words_for(text: str) -> list[str]:
    """Twelve words that only this text gets."""
    digest = hashlib.sha256(text.encode()).digest()
    return [f"{WORDS[byte % len(WORDS)]} " for byte in digest[:12]]


class ScriptedBackend:
    """A backend over the scripted engine."""

    def __init__(self, script: Mapping[str, Any]) -> None:
        self._script = script
        self._tokenizer = ScriptedTokenizer(script)
        self._engine = ScriptedEngine(script, self._tokenizer)
        self._settings = Settings()

    def load(self, load: Load, control: Control) -> dict[str, Any]:
        """As slowly as the script says."""
        steps = 20
        for i in range(steps if self._script.get("load_s") else 0):
            time.sleep(self._script["load_s"] / steps)
            control.phase("experts", i + 1, steps)
        if self._script.get("load_error"):
            raise EngineError(self._script["load_error"])
        self._settings = Settings(**load.given)
        self._engine.control = control
        return {
            "version": "scripted",
            "model": load.model,
            "family": "qwen3_moe",
            "layers": 0,
            "vocabulary": self._engine.n_vocab,
            "context_tokens": self._engine.context_tokens,
            "eos_tokens": list(self._tokenizer.eos_ids),
            "exact": True,
            "mode": "exact",
            "settings": {},
            "report": [],
            "plan": {},
        }

    def generate(self, request: Generate, control: Control) -> tuple[str, dict[str, Any]]:
        """Answer as the script says."""
        engine = self._engine
        engine.begin(request.tokens)
        window = int(self._script.get("window", 1))
        drafter = ScriptedDrafter(request.tokens + engine.answer) if window > 1 else NoDrafter()
        engine.reset()
        decoder = MarkedDecoder(self._tokenizer, continues=request.continues)
        session = Session(engine, drafter, lambda: decoder, self._tokenizer.eos_ids, window)
        return answer(session, self._tokenizer, decoder, self._settings, request, control)

    def counters(self) -> dict[str, Any]:
        """A few rows, so that metrics have something to count."""
        return {"rows": {"CPU": [len(self._engine.tokens)]}, "live_tokens": 0}

    def idle(self) -> bool:
        """Nothing."""
        return False

    def close(self) -> None:
        """Nothing to let go."""


def main(arguments: list[str]) -> int:
    """Serve one HTTP process."""
    script = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    return EngineLoop(Pipe(int(arguments[1])), ScriptedBackend(script)).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
