"""strata quality: how far lossy settings are from the exact engine, measured on texts.

Teacher-forced: every token of every text is read through windows, by the exact engine first, and
the arms' distributions are compared with it position by position.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from strata.cli_explain import window_size
from strata.cli_flags import ENGINE, CommandParser, asked_settings
from strata.cli_screen import open_model, say, tokenizer_of
from strata.core.errors import InputError, SettingError
from strata.core.settings_load import Effective
from strata.engine.build import Ready
from strata.engine.fingerprints import machine_facts
from strata.engine.model import Model, load_effective
from strata.quality.arms import Arm, parse_arms, require_arms, require_plain
from strata.quality.measure import Progress
from strata.quality.plot import plot_by_position
from strata.quality.protocol import Protocol, QualityReport
from strata.quality.record import Recording, compare_recordings, load_recording
from strata.quality.report import report_lines, table_lines, to_json
from strata.quality.texts import Text, read_texts, require_fit

ABOUT = (
    "Measure what lossy settings change: KL, top-1 agreement and perplexity by position, each arm "
    "against the exact engine on the same texts. Or compare two stored runs (--compare A B)."
)


def main(arguments: Sequence[str]) -> int:
    """Measure or compare."""
    parser = _parser()
    args = parser.read(arguments)
    if args.compare:
        if args.model is not None or args.text:
            parser.error("--compare takes two stored files and neither a model nor texts")
        parser.only(args, "--compare", "quiet")
        return _compare(args)
    if args.model is None or not args.text:
        parser.error("a model and at least one --text are needed (or --compare A B)")
    if args.spec is not None:
        parser.error(
            "--spec is about answers; the windows that texts are read through are --window"
        )
    asked = asked_settings(args)
    report, recordings = _measure(args, asked)
    print("\n".join(report_lines(report)))
    _write(args, report, recordings)
    return 0


def _parser() -> CommandParser:
    parser = CommandParser("quality", ABOUT)
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", help="GGUF or safetensors file, part, or folder")
    add("--text", metavar="FILE", action="append", help="UTF-8 text; may be given more than once")
    add(
        "--arms",
        metavar="LIST",
        default="off",
        help="settings to compare, e.g. 'off;defer_cpu=1;defer_cpu=1,defer_cpu_below=0.1'; the "
        "rows floor, check and scale are always there",
    )
    add("--window", metavar="N", help="tokens read together, 1 to 8 [default 1]")
    add("--tokens", metavar="N", help="most tokens of each text [default: all]")
    add("--json", metavar="FILE", help="write the report as JSON; - is standard output")
    add("--plot", metavar="FILE", help="draw KL by position (needs matplotlib)")
    add("--save", metavar="DIR", help="store each arm's run as a quality file in a new folder")
    add("--compare", metavar=("A", "B"), nargs=2, help="compare two quality files, A the reference")
    add("--quiet", action="store_true", help="no start-up report and no progress bar")
    parser.add_settings(ENGINE)
    return parser


def _measure(
    args: argparse.Namespace, asked: Effective
) -> tuple[QualityReport, dict[str, Recording]]:
    arms, window = parse_arms(args.arms), window_size(args.window, 1)
    n_tokens = whole_number("--tokens", args.tokens)
    folder = _new_folder(args.save)
    recordings: dict[str, Recording] = {}
    texts: list[Text] = []

    def check(ready: Ready) -> None:
        require_plain(ready.settings)
        texts.extend(read_texts(args.text, tokenizer_of(ready), n_tokens))
        for settings in (ready.settings, *require_arms(arms, asked, ready)):
            require_fit(texts, settings.context)

    with (
        open_model(args.model, asked, quiet=args.quiet, check=check) as model,
        progress_bar(args.quiet) as progress,
    ):
        protocol = Protocol(
            Path(args.model).name,
            machine_facts(model.settings).line,
            texts,
            arms,
            window,
            progress,
            recordings if folder is not None else None,
        )

        def opener(arm: Arm) -> Model:
            return load_effective(args.model, arm.effective(asked))

        return protocol.run(model, opener), recordings


def _write(
    args: argparse.Namespace, report: QualityReport, recordings: dict[str, Recording]
) -> None:
    if args.json:
        text = json.dumps(to_json(report), indent=1)
        if args.json == "-":
            print(text)
        else:
            Path(args.json).write_text(text + "\n", encoding="utf-8")
    if args.plot:
        title = f"{report.model}, windows of {report.window}, {report.resident}"
        plot_by_position(report.arms, Path(args.plot), title)
    if args.save:
        folder = Path(args.save)
        folder.mkdir(parents=True, exist_ok=True)
        for name, recording in recordings.items():
            recording.save(folder / f"{re.sub('[^A-Za-z0-9.=-]+', '_', name)}.npz")
        report_file = folder / "report.json"
        report_file.write_text(json.dumps(to_json(report), indent=1) + "\n", encoding="utf-8")
        say([f"{folder}: {len(recordings)} quality files and report.json"])


def _compare(args: argparse.Namespace) -> int:
    one, two = args.compare
    a, b = load_recording(one), load_recording(two)
    result = compare_recordings(a, b, (str(one), str(two)))
    print(f"reference {one}: {a.head.model}, {a.head.arm}, windows of {a.head.window}")
    print(f"other     {two}: {b.head.model}, {b.head.arm}, windows of {b.head.window}")
    print("\n".join(table_lines([result])))
    if result.note:
        print(result.note)
    return 0


def whole_number(flag: str, text: str | None) -> int | None:
    """The value of a flag that counts something; None when it is not given."""
    if text is None:
        return None
    if not text.strip().isdigit() or int(text) < 1:
        raise SettingError(f"{flag} {text}: must be a whole number of at least 1")
    return int(text)


def _new_folder(name: str | None) -> Path | None:
    if name is None:
        return None
    folder = Path(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"--save {folder}: exists and is not an empty folder")
    return folder


@contextmanager
def progress_bar(quiet: bool) -> Iterator[Progress | None]:
    """A callback (what, done, in all) that draws a bar; None where nobody watches."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Bars(*columns, TimeRemainingColumn(), console=console, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def update(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield update
