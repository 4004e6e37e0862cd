"""The whole comparison: reference, floor, check, scale and the arms asked for, on any texts.

Arms that only differ in how windows run are variants of one engine; the others are loaded one
after another, each once, when the first engine is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from strata.core.errors import InputError, SettingError
from strata.core.settings import SETTINGS, Settings
from strata.engine.engine import Engine
from strata.engine.model import Model
from strata.quality.arms import Arm, require_plain, standard_arms, use_variant
from strata.quality.measure import (
    Progress,
    Reference,
    log_probabilities,
    measure_arm,
    read_reference,
)
from strata.quality.record import Head, Recording
from strata.quality.scores import ArmResult
from strata.quality.texts import Text, require_fit, tokenizer_digest

Opener = Callable[[Arm], Model]
"""Loads a model with an arm's settings; the protocol closes it."""


@dataclass(frozen=True)
class QualityReport:
    """The table and what it is about. reference_s: seconds of the exact run; rows: reference's
    routed rows by place."""

    model: str
    machine: str
    family: str
    window: int
    texts: tuple[tuple[str, int], ...]
    settings: Mapping[str, str]
    resident: str
    arms: tuple[ArmResult, ...]
    reference_s: float
    missing: Mapping[str, str] = field(default_factory=dict)
    """Standard rows that this model cannot have, and why."""

    @property
    def n_positions(self) -> int:
        """Positions compared."""
        return sum(n for _, n in self.texts)


@dataclass
class Protocol:
    """What to compare. recordings: gets a Recording for each row's name, where asked for."""

    name: str
    machine: str
    texts: Sequence[Text]
    arms: Sequence[Arm]
    window: int = 1
    progress: Progress | None = None
    recordings: dict[str, Recording] | None = None

    def run(self, model: Model, opener: Opener | None = None) -> QualityReport:
        """Measure everything; the model is closed when an arm needs an engine of its own.

        SettingError when the model's own settings are lossy, or an arm cannot be."""
        engine = model.engine
        require_plain(model.settings)
        require_fit(self.texts, engine.context_tokens)
        others = [arm for arm in self.arms if not arm.is_variant]
        if others and opener is None:
            raise SettingError(f"arm {others[0].name} needs an engine of its own")
        standard, missing = _standard(engine)
        n = sum(len(text.tokens) for text in self.texts)
        with Reference(n, engine.n_vocab) as reference:
            seconds = self._reference(model, reference)
            floor = self._arm(engine, Arm("floor"), model, reference)
            variants = [*standard, *(arm for arm in self.arms if arm.is_variant)]
            results = {a.name: self._arm(engine, a, model, reference) for a in variants}
            facts = self._facts(model)
            if others:
                model.close()
            for arm in others:
                assert opener is not None
                with opener(arm) as own:
                    self._require_same(model, own, arm)
                    results[arm.name] = self._arm(own.engine, arm, own, reference)
        order = [*(arm.name for arm in standard), *(arm.name for arm in self.arms)]
        rows = (floor, *(results[name] for name in order))
        return QualityReport(
            **facts, arms=rows, reference_s=seconds, missing=missing, window=self.window
        )

    def _reference(self, model: Model, reference: Reference) -> float:
        use_variant(model.engine, model.settings)
        seconds = read_reference(model.engine, self.texts, self.window, reference, self.progress)
        if self.recordings is not None:
            recording, n = self._recording(model, "off", model.settings), 0
            for index, text in enumerate(self.texts):
                for position in range(len(text.tokens)):
                    p = log_probabilities(reference.rows[n], position, text)
                    following = text.tokens[position + 1 : position + 2]
                    recording.add(index, position, p, following[0] if following else None)
                    n += 1
        return seconds

    def _arm(self, engine: Engine, arm: Arm, model: Model, reference: Reference) -> ArmResult:
        settings = arm.settings(model.settings)
        recording = None
        if self.recordings is not None and arm.name != "floor":
            recording = self._recording(model, arm.name, settings)
        return measure_arm(
            engine,
            arm,
            settings,
            self.texts,
            self.window,
            reference,
            progress=self.progress,
            recording=recording,
        )

    def _recording(self, model: Model, name: str, settings: Settings) -> Recording:
        assert self.recordings is not None
        n_vocab = model.engine.n_vocab
        texts = tuple((text.name, text.digest, len(text.tokens)) for text in self.texts)
        digest = tokenizer_digest(model.tokenizer, n_vocab)
        head = Head(
            name, self.name, n_vocab, digest, texts, self.window, shown(settings), self.machine
        )
        return self.recordings.setdefault(name, Recording(head))

    def _require_same(self, model: Model, own: Model, arm: Arm) -> None:
        if own.engine.n_vocab != model.engine.n_vocab:
            raise InputError(
                f"arm {arm.name} has {own.engine.n_vocab} tokens, the reference has "
                f"{model.engine.n_vocab}; both must have the same vocabulary"
            )
        require_fit(self.texts, own.engine.context_tokens)

    def _facts(self, model: Model) -> dict[str, Any]:
        engine = model.engine
        n_experts = sum(len(addresses) for addresses in engine.service.tier.address_LE)
        return {
            "model": self.name,
            "machine": self.machine,
            "family": engine.spec.family,
            "texts": tuple((text.name, len(text.tokens)) for text in self.texts),
            "settings": shown(model.settings),
            "resident": f"{len(engine.service.tier.resident())} of {n_experts} experts",
        }


def shown(settings: Settings) -> dict[str, str]:
    """Engine settings that are not at their default, as text."""
    return {
        name: info.show(getattr(settings, name))
        for name, info in SETTINGS.items()
        if info.scope == "engine" and getattr(settings, name) != info.default
    }


def _standard(engine: Engine) -> tuple[list[Arm], dict[str, str]]:
    """check and scale, as far as this model can have them."""
    network = engine.runner.network
    possible, missing = [], {}
    for arm in standard_arms(max(network.n_active, 1)):
        try:
            settings = arm.settings(engine.settings)
            off = use_variant(engine, settings).off
        except SettingError as error:
            missing[arm.name] = str(error)
            continue
        if off or not network.n_active:
            missing[arm.name] = "; ".join(off.values()) or "the model has no routed experts"
        else:
            possible.append(arm)
    return possible, missing
