"""The real engine behind the pipe: loads a model, warms it up, answers, and counts.

The only file of the server that leads to torch; the HTTP process never imports it.
"""

from __future__ import annotations

import time
from typing import Any

from strata import __version__
from strata.core.errors import InputError
from strata.core.settings import SETTINGS, Settings
from strata.core.settings_load import AUTO, DEFAULT, Effective
from strata.core.types import Place
from strata.engine.constraint import prepare
from strata.engine.model import Model, load_effective
from strata.engine.session import TextDecoder
from strata.formats.detokenize import StreamDecoder
from strata.formats.tokenizer import Tokenizer
from strata.serve.answering import MarkedDecoder, answer
from strata.serve.engine_loop import Control
from strata.serve.messages import Generate, Load


class NoText:
    """Decoder of a checkpoint without a tokenizer: ids only."""

    def push(self, token: int) -> str:
        """Nothing."""
        return ""

    def finish(self) -> str:
        """Nothing."""
        return ""


class ModelBackend:
    """One loaded model."""

    def __init__(self) -> None:
        self._model: Model | None = None
        self._tokenizer: Tokenizer | None = None
        self._layer_times: list[tuple[int, float]] = []
        self._timeline: list[list[float]] = []

    def load(self, load: Load, control: Control) -> dict[str, Any]:
        """Load, then write one token, so that "ready" is not a promise."""
        asked = Effective(
            Settings(**load.given), {**dict.fromkeys(SETTINGS, "default"), **load.sources}
        )
        control.phase("opening", 0, 1)
        model = load_effective(load.model, asked, control.phase)
        self._model = model
        try:
            self._tokenizer = model.tokenizer
            prepare(self._tokenizer)
        except InputError:
            self._tokenizer = None
        control.phase("warming up", 0, 1)
        list(model.generate([self._first_token()], max_tokens=1, seed=0))
        model.session.forget()
        control.phase("warming up", 1, 1)
        self._watch(control)
        return self._info(load, model)

    def generate(self, request: Generate, control: Control) -> tuple[str, dict[str, Any]]:
        """Answer one request."""
        model = self.model
        decoder = self._decoder(request)
        finish, report = answer(
            model.session, self._tokenizer, decoder, model.settings, request, control
        )
        notes = model.notes()
        return finish, {**report, "notes": notes} if notes else report

    def counters(self) -> dict[str, Any]:
        """Rows by layer and place since the start, memory, and what is parked."""
        model = self.model
        counts = model.engine.service.counters
        rows: dict[str, list[int]] = {}
        n_layers = model.engine.spec.n_layers
        for place in Place:
            if any(p == place for _, p in counts.rows_LP):
                rows[place.name] = [counts.rows_LP.get((i, place), 0) for i in range(n_layers)]
        memory = model.memory
        return {
            "rows": rows,
            "timeline": self._timeline,
            "parked": len(memory.parked) if memory else 0,
            "parked_bytes": memory.parked_bytes if memory else 0,
            "checkpoints": len(memory.live.checkpoints) if memory else 0,
            "live_tokens": model.engine.length,
            "quality": model.meter.facts() if model.meter else {},
        }

    def idle(self) -> bool:
        """A step of what is done when nobody asks (--quality-reread); whether more is left."""
        return self.model.meter is not None and self.model.meter.idle()

    def close(self) -> None:
        """Keep the conversations that are to be kept, and let the model go."""
        if self._model is not None:
            self._model.close()

    @property
    def model(self) -> Model:
        """The loaded model."""
        assert self._model is not None, "load comes first"
        return self._model

    def _watch(self, control: Control) -> None:
        """Every planned layer is a sign of life, and a mark on the time line of its window."""

        def on_plan(layer: int) -> None:
            now = time.perf_counter()
            marks = self._layer_times
            if marks and layer <= marks[-1][0]:
                start = marks[0][1]
                self._timeline = [[i, (t - start) * 1e3] for i, t in marks]
                marks.clear()
            marks.append((layer, now))
            control.pulse()

        self.model.engine.service.on_plan = on_plan

    def _decoder(self, request: Generate) -> TextDecoder:
        if self._tokenizer is None:
            return NoText()
        if request.chat:
            return MarkedDecoder(self._tokenizer, continues=request.continues)
        return StreamDecoder(self._tokenizer, continues=request.continues)

    def _first_token(self) -> int:
        bos = self._tokenizer.bos_id if self._tokenizer else None
        return bos if bos is not None else 0

    def _info(self, load: Load, model: Model) -> dict[str, Any]:
        engine = model.engine
        return {
            "version": __version__,
            "model": load.model,
            "family": engine.spec.family,
            "layers": engine.spec.n_layers,
            "vocabulary": engine.n_vocab,
            "context_tokens": engine.context_tokens,
            "eos_tokens": list(model.eos_tokens),
            "exact": engine.runner.variant.name == "exact" and model.settings.numerics == "exact",
            "mode": engine.runner.variant.name,
            "settings": settings_table(model.settings, load.sources),
            "report": list(model.report),
            "plan": engine.plan.as_dict(),
        }


def settings_table(settings: Settings, sources: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Every setting in effect: value, where it came from, whether it changes the output."""
    table: dict[str, dict[str, Any]] = {}
    for name, info in SETTINGS.items():
        value = getattr(settings, name)
        source = sources.get(name, "default")
        if source == "default" and value != info.default:
            source = AUTO
        table[name] = {
            "value": info.show(value),
            "source": source,
            "unit": info.unit,
            "changes_output": info.changes_output
            and value != info.default
            and source not in (DEFAULT, AUTO),
        }
    return table
