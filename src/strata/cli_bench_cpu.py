"""strata bench cpu: memory bandwidth of this machine, and what the CPU kernels make of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from strata.bench.cpu import CpuOptions, Step, measure
from strata.bench.cpu_experts import EXPERTS
from strata.bench.cpu_plot import plot
from strata.bench.cpu_table import WIDTH, tables
from strata.cli_flags import CommandParser
from strata.cli_screen import say
from strata.core.errors import SettingError
from strata.core.settings import nearest
from strata.formats.weight_types import TYPES
from strata.native import available_isas
from strata.native.isa import pick_isa
from strata.native.rows import KERNEL_TYPES
from strata.native.topology import read_topology

TYPES_SHOWN = "Q8_0,Q4_0,Q4_K,Q6_K,IQ4_NL,IQ3_S,IQ3_XXS,IQ2_S,Q2_0,MXFP4"
MOST_ROWS = 16


def main(arguments: Sequence[str]) -> int:
    """Measure, print tables, write files."""
    args = _parser().read(arguments)
    if args.plot is not None and find_spec("matplotlib") is None:
        raise SettingError(
            "--plot needs matplotlib (pip install matplotlib), which is not installed here; "
            "--json keeps the numbers without it"
        )
    options = CpuOptions(
        types=parse_types(args.types),
        rows=_numbers("--rows", args.rows, MOST_ROWS),
        threads=parse_threads(args.threads),
        isas=parse_isas(args.isa),
        seconds=_seconds(args.seconds),
        against=_against(args.against),
        experts=_experts(args.experts),
    )
    for path in (args.json, args.plot):
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise SettingError(f"{path}: its folder does not exist; create it first")
    with _progress() as step:
        found = measure(options, step)
    _show(found)
    if args.json is not None:
        Path(args.json).write_text(json_text(found), encoding="utf-8")
        say([f"{args.json}: written"])
    if args.plot is not None:
        plot(found, Path(args.plot))
        say([f"{args.plot}: written"])
    return 0


def json_text(found: dict[str, Any]) -> str:
    """JSON with one line for each row of a table."""
    parts = []
    for key, value in found.items():
        text = json.dumps(value)
        if isinstance(value, list):
            rows = ",\n  ".join(json.dumps(row) for row in value)
            text = f"[\n  {rows}\n ]" if value else "[]"
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _parser() -> CommandParser:
    parser = CommandParser(
        "bench cpu",
        "Read bandwidth of this machine, and the speed of the CPU kernels by weight type, layout, "
        "instruction set and activation rows.",
    )
    add = parser.add_argument
    add("--types", metavar="LIST", default=TYPES_SHOWN, help=f"weight types [{TYPES_SHOWN}]")
    add("--rows", metavar="LIST", default="1,2,4,8", help="activation rows at once [1,2,4,8]")
    add("--threads", metavar="LIST", default="1,all", help="numbers of threads, or all [1,all]")
    add("--isa", metavar="LIST", help="instruction sets [all that run here but portable]")
    add("--against", metavar="NAME", help="also measure this library's dot products: ggml")
    add("--seconds", metavar="S", default="2", help="for each type and number of threads [s, 2]")
    add("--experts", metavar="N", default=str(EXPERTS),
        help=f"experts of the table of whole experts, 0 leaves it out [{EXPERTS}]")  # fmt: skip
    add("--json", metavar="FILE", help="write all numbers, spread included")
    add("--plot", metavar="FILE", help="draw them; needs matplotlib")
    return parser


def parse_types(text: str) -> tuple[str, ...]:
    """Weight types of a list; SettingError for those without kernels."""
    found = []
    for word in _words("--types", text):
        name = word.upper()
        if name not in TYPES or name not in KERNEL_TYPES or name in ("F64", "I8"):
            raise SettingError(
                f"--types {word}: no kernels for this type{nearest(name, sorted(KERNEL_TYPES))}"
            )
        found.append(name)
    return tuple(dict.fromkeys(found))


def parse_threads(text: str) -> tuple[int, ...]:
    """Numbers of threads; "all" is one for each core that this process may use."""
    topology = read_topology()
    words = [
        str(topology.default_workers) if word == "all" else word
        for word in _words("--threads", text)
    ]
    return _numbers("--threads", ",".join(words), topology.n_parallel)


def parse_isas(text: str | None) -> tuple[str, ...]:
    """Instruction sets, slowest first; SettingError for those that cannot run here."""
    if text is None:
        return ()
    available = available_isas()
    asked = {pick_isa(word.lower(), available) for word in _words("--isa", text)}
    return tuple(isa for isa in available if isa in asked)


def _words(flag: str, text: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise SettingError(f"{flag} {text!r}: give names or numbers with commas between them")
    return words


def _numbers(flag: str, text: str, most: int) -> tuple[int, ...]:
    words = _words(flag, text)
    for word in words:
        if not (word.isascii() and word.isdigit()) or not 1 <= int(word) <= most:
            raise SettingError(f"{flag} {word}: must be a number between 1 and {most}")
    return tuple(sorted({int(word) for word in words}))


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = float("nan")
    if not 0 <= seconds <= 3600:
        raise SettingError(f"--seconds {text}: must be a number between 0 and 3600")
    return seconds


def _experts(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or 0 < int(text) < 40 or int(text) > 4096:
        raise SettingError(f"--experts {text}: must be 0, or between 40 and 4096")
    return int(text)


def _against(text: str | None) -> tuple[str, ...]:
    if text is None:
        return ()
    if text != "ggml":
        raise SettingError(f"--against {text}: only ggml can be measured beside our kernels")
    return (text,)


def _progress() -> AbstractContextManager[Step | None]:
    console = Console(stderr=True)
    return _Bar(console) if console.is_terminal else nullcontext(None)


class _Bar:
    """A bar over the measurements; the callback that moves it while entered."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("measuring {task.description}"), BarColumn(), MofNCompleteColumn(),
            TimeElapsedColumn(), console=console, transient=True,
        )  # fmt: skip

    def __enter__(self) -> Step:
        self._progress.start()
        task = self._progress.add_task("", total=None)

        def step(what: str, done: int, total: int) -> None:
            self._progress.update(task, description=what, completed=done, total=total)

        return step

    def __exit__(self, *error: object) -> None:
        self._progress.stop()


def _show(found: dict[str, Any]) -> None:
    # a file gets whole tables, a narrow terminal folds them
    width = None if sys.stdout.isatty() else WIDTH
    console = Console(width=width, highlight=False)
    for table in tables(found):
        console.print(table)
