"""strata tune: find the fastest setting within a quality budget, here and for this model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from strata.cli_flags import ENGINE, CommandParser, asked_settings
from strata.cli_quality import progress_bar, whole_number
from strata.cli_screen import open_model, say, tokenizer_of
from strata.core.errors import SettingError
from strata.core.files import require_folder
from strata.core.settings_load import Effective
from strata.engine.build import Ready
from strata.engine.fingerprints import machine_facts, model_digest
from strata.engine.model import Model, load_effective
from strata.engine.tuned import Point, TunedProfile, conditions_of, profile_folder
from strata.quality.arms import Arm, require_plain
from strata.quality.plot import plot_pareto
from strata.quality.texts import Text, read_texts, require_fit
from strata.quality.tune import (
    WINDOWS,
    Tuner,
    choice,
    pareto,
    require_tunable,
    timestamp,
    tune_lines,
)

ABOUT = (
    "Measure speed and quality of lossy settings on this machine, choose the fastest within a "
    "budget of mean top-20 KL (no bucket of positions over twice it), and store what was measured "
    "for --quality-budget."
)


def main(arguments: Sequence[str]) -> int:
    """Tune."""
    parser = CommandParser("tune", ABOUT)
    add = parser.add_argument
    add("model", metavar="MODEL", help="GGUF or safetensors file, part, or folder")
    add("--text", metavar="FILE", action="append", required=True, help="UTF-8 text; repeatable")
    add("--kl-budget", metavar="X", default="0.02", help="most mean KL [nats, default 0.02]")
    add("--windows", metavar="LIST", help="window sizes to try [default 1,2,4]")
    add("--tokens", metavar="N", help="most tokens of each text [default: all]")
    add("--json", metavar="FILE", help="write the points as JSON; - is standard output")
    add("--plot", metavar="FILE", help="draw speed over KL (needs matplotlib)")
    add("--quiet", action="store_true", help="no start-up report and no progress bar")
    parser.add_settings(ENGINE)
    args = parser.read(arguments)
    if args.spec is not None:
        parser.error("--spec is about answers; the window sizes that are tried are --windows")
    asked = asked_settings(args)
    budget = _budget(args.kl_budget)
    if asked.settings.quality_budget >= 0:
        parser.error("tune finds what --quality-budget uses; leave it out")
    require_folder("--profile-dir", profile_folder(asked.settings), "profiles")
    points, lines = _tune(args, asked, budget)
    print("\n".join(lines))
    if args.json:
        text = json.dumps([asdict(point) for point in points], indent=1)
        if args.json == "-":
            print(text)
        else:
            Path(args.json).write_text(text + "\n", encoding="utf-8")
    if args.plot:
        drawn = [(p.name, p.kl, p.tokens_s, pareto(p, points)) for p in points]
        plot_pareto(drawn, budget, Path(args.plot))
    return 0


def _tune(
    args: argparse.Namespace, asked: Effective, budget: float
) -> tuple[list[Point], list[str]]:
    windows = _windows(args.windows)
    n_tokens = whole_number("--tokens", args.tokens)
    texts: list[Text] = []

    def check(ready: Ready) -> None:
        require_plain(ready.settings)
        texts.extend(read_texts(args.text, tokenizer_of(ready), n_tokens))
        require_fit(texts, ready.settings.context)
        require_tunable(ready.plan.n_pairs, texts, ready.settings.context)

    with (
        open_model(args.model, asked, quiet=args.quiet, check=check) as model,
        progress_bar(args.quiet) as progress,
    ):
        tuner = Tuner(texts, budget, windows, progress)
        points = tuner.run(model)
        if model.settings.device == "cuda" and not asked.asked("pcie_frac"):
            model.close()

            def opener(share: str) -> Model:
                return load_effective(args.model, Arm("", {"pcie_frac": share}).effective(asked))

            points += tuner.shares(choice(points, budget), opener)
            points.sort(key=lambda point: -point.tokens_s)
    here = machine_facts()
    profile = TunedProfile(
        model_digest(args.model),
        here.digest,
        here.line,
        conditions_of(asked.settings),
        tuple((text.name, len(text.tokens)) for text in texts),
        timestamp(),
        tuple(points),
    )
    path = profile.save(profile_folder(asked.settings))
    say([f"stored in {path}; --quality-budget {budget:g} uses it"])
    return points, tune_lines(points, budget, tuner.skipped)


def _budget(text: str) -> float:
    try:
        budget = float(text)
    except ValueError:
        budget = -1.0
    if not 0 <= budget < float("inf"):
        raise SettingError(f"--kl-budget {text}: must be a number of at least 0")
    return budget


def _windows(text: str | None) -> list[int]:
    if text is None:
        return list(WINDOWS)
    sizes = [part.strip() for part in text.split(",")]
    if not all(size.isdigit() and 1 <= int(size) <= 8 for size in sizes):
        raise SettingError(f"--windows {text}: must be window sizes of 1 to 8, with commas between")
    return sorted({int(size) for size in sizes})
