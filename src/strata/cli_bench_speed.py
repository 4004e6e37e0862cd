"""strata bench: decode speed of one or several ways of running, with what it takes to judge it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from strata.bench.arms import parse_arms
from strata.bench.prompts import SHORT
from strata.bench.report import (
    Record,
    by_cell,
    load_records,
    plot,
    require_comparable,
    save_records,
    table,
)
from strata.bench.routing import Locality
from strata.bench.speed import Options, Outcome, run_speed
from strata.cli_flags import ENGINE, CommandParser, asked_settings
from strata.cli_screen import say
from strata.core.errors import SettingError
from strata.models.synthetic import PREFIX, is_synthetic

QUICK = {"prompts": 3, "tokens": 32, "rounds": 2}
LONG_TOKENS = 30_000
SAME = {"expert_cache": "cap_slots", "vram_gb": "cap_vram"}
"""Settings that have a second name here."""

RIVALS = (
    ("slots", "expert_cache", "cap_slots"), ("vram_gb", "cap_vram"),
    ("threads", "workers"), ("window", "spec"), ("long", "prompts"),
)  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Measure, print a table, keep records."""
    parser = _parser()
    args = parser.read(arguments)
    path = Path(args.json) if args.json else None
    if args.compare:
        parser.only(args, "--compare", "force", "plot")
        return _show(load_records(Path(args.compare)), args.force, args.plot)
    _require_one_each(parser, args)
    for name, other in SAME.items():
        if getattr(args, other) is not None:
            setattr(args, name, getattr(args, other))
    asked = asked_settings(args)
    model = model_of(parser, args)
    number = _Numbers(parser, args)
    options = Options(
        model=model,
        arms=parse_arms(args.arms),
        fresh=args.fresh,
        prompts=number("prompts", 12, len(SHORT)),
        tokens=number("tokens", 200),
        rounds=number("rounds", 3),
        long_tokens=LONG_TOKENS if args.long else 0,
        layers=not args.no_layers,
        predict=args.predict,
        slots=_numbers(parser, "slots", args.slots, 0, 1 << 20),
        threads=_numbers(parser, "threads", args.threads, 1, 1024),
        at=_numbers(parser, "at", args.at, 1, 1 << 20),
    )
    if options.at and options.long_tokens:
        parser.error("--at and --long exclude each other: a state is made up or read")
    options = _routing(parser, args, _window(parser, args, options))
    earlier = load_records(path) if path is not None and args.append else []
    for _, alike in by_cell(earlier) if not args.force else ():
        require_comparable(alike)

    def keep(outcome: Outcome) -> None:
        if path is not None:
            save_records(path, [*earlier, *outcome.records])
        if outcome.lines:
            print("\n".join(outcome.lines), flush=True)
            outcome.lines.clear()

    outcome = run_speed(options, asked, lambda text: say([text]), keep)
    return _show([*earlier, *outcome.records], args.force, args.plot)


def _require_one_each(parser: CommandParser, args: Namespace) -> None:
    """An option that another one would silently outrank is refused."""
    for names in RIVALS:
        given = ["--" + n.replace("_", "-") for n in names if getattr(args, n) not in (None, False)]
        if len(given) > 1:
            parser.error(f"{given[0]} and {given[1]} exclude each other: they say the same thing")
    if args.append and not args.json:
        parser.error("--append needs --json FILE: that is what is added to")


def _show(records: Sequence[Record], force: bool, plot_path: str | None) -> int:
    if not records:
        raise SettingError("there is nothing to show: the file holds no arm")
    for title, alike in by_cell(records):
        if not force:
            require_comparable(alike)
        print("\n".join([*([f"{title}:"] if title else []), *table(alike)]))
    if plot_path:
        plot(records, Path(plot_path))
    return 0


def model_of(parser: CommandParser, args: Namespace) -> str:
    """The model's path, or the synthetic name that --synthetic, --layers, ... give."""
    given: str | None = getattr(args, "model", None)
    name: str | None = getattr(args, "synthetic", None)
    if (given is None) == (name is None):
        parser.error("give either MODEL or --synthetic NAME:TYPE")
    sizes = [
        f":{key}={getattr(args, key)}"
        for key in ("layers", "experts", "vocab")
        if getattr(args, key) is not None
    ]
    path = given if name is None else PREFIX + name
    assert path is not None
    if sizes and not is_synthetic(path):
        parser.error("--layers, --experts and --vocab make a synthetic model smaller; a file is "
                     "what it is")  # fmt: skip
    return path + "".join(sizes)


def add_model(parser: CommandParser) -> None:
    """MODEL, or --synthetic and its sizes."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help="file, part, folder, or "
                        "synthetic:NAME:TYPE")  # fmt: skip
    parser.add_argument(
        "--synthetic",
        metavar="NAME:TYPE",
        help="a published shape with made-up weights, e.g. qwen4_exp-125b:IQ3_S",
    )
    for key in ("layers", "experts", "vocab"):
        parser.add_argument(f"--{key}", metavar="N", help=f"with --synthetic: only so many {key}")


def _parser() -> CommandParser:
    parser = CommandParser("bench", "Measure decode speed: prompts x tokens x rounds.")
    add_model(parser)
    add = parser.add_argument
    add("--arms", metavar="A,B", default="off", help="off, floor (off once more), check, defer, "
        "below (what a mixer can hide), repair, repair-below, or NAME=SETTING:VALUE joined by +; "
        "they take turns on one engine [default off]")  # fmt: skip
    add("--fresh", action="store_true", help="an engine per arm, one after another")
    add("--prompts", metavar="N", help="short prompts, 1 to 12 [default 12]")
    add("--tokens", metavar="N", help="tokens written after each [default 200]")
    add("--rounds", metavar="N", help="times over [default 3]")
    add("--quick", action="store_true", help="3 prompts x 32 tokens, 2 rounds")
    add("--long", action="store_true", help=f"3 prompts of {LONG_TOKENS} tokens instead")
    add("--at", metavar="N", help="from a made-up state of N tokens instead of prompts that are "
        "read: speed only; several with commas")  # fmt: skip
    add("--slots", metavar="N", help="with so many experts in the fast tier; several with commas, "
        "without loading anew")  # fmt: skip
    add("--threads", metavar="N", help="with so many CPU workers; several with commas, on a GPU "
        "without loading anew")  # fmt: skip
    add("--window", metavar="T", help="windows of exactly T tokens instead of drafts; "
        "several sizes with commas")  # fmt: skip
    add("--accept", metavar="N", help="with --window: tokens kept of each [default 1]")
    add("--locality", metavar="ZIPF,REPEAT", help="experts from a made-up routing trace; off is "
        "the router [default for synthetic models 0.6,0.3, else off]")  # fmt: skip
    add("--trace", metavar="FILE", help="experts from a routing trace (.npy [L, tokens, K])")
    add("--cap-vram", metavar="X", help="the same as --vram-gb: act as a smaller card")
    add("--cap-slots", metavar="N", help="the same as --expert-cache: a smaller cache")
    add("--predict", action="store_true", help="first predict windows of one token from slices of "
        "the model, as doctor does, and compare")  # fmt: skip
    add("--no-layers", action="store_true", help="leave the per-layer times out")
    add("--json", metavar="FILE", help="keep the records in this file")
    add("--append", action="store_true", help="with --json: add to it and compare with its arms")
    add("--compare", metavar="FILE", help="only show the table of such a file")
    add("--plot", metavar="FILE", help="draw the speeds (needs matplotlib)")
    add("--force", action="store_true", help="compare arms of different budgets")
    parser.add_settings(ENGINE)
    return parser


class _Numbers:
    """Whole numbers of the protocol, from flags or --quick."""

    def __init__(self, parser: CommandParser, args: Namespace) -> None:
        self._parser, self._args = parser, args

    def __call__(self, name: str, default: int, most: int = 1 << 20) -> int:
        text = getattr(self._args, name)
        if text is None:
            return QUICK[name] if self._args.quick else default
        if not text.isdigit() or not 1 <= int(text) <= most:
            self._parser.error(f"--{name} {text}: must be between 1 and {most}")
        return int(text)


def _numbers(
    parser: CommandParser, name: str, text: str | None, least: int, most: int
) -> tuple[int, ...]:
    """Different whole numbers with commas; () when not given."""
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    right = all(part.isdigit() and least <= int(part) <= most for part in parts)
    if not right or len(set(parts)) < len(parts):
        parser.error(f"--{name} {text}: different numbers between {least} and {most}, with commas")
    return tuple(int(part) for part in parts)


def _window(parser: CommandParser, args: Namespace, options: Options) -> Options:
    window, accept = args.window, args.accept
    if window is None:
        if accept is not None:
            parser.error("--accept needs --window: it says how many of its tokens are kept")
        return options
    windows = _numbers(parser, "window", window, 1, 8)
    kept = accept or "1"
    if not kept.isdigit() or not 1 <= int(kept) <= max(windows):
        parser.error(f"--accept {kept}: must be between 1 and --window {window}")
    return replace(options, windows=windows, accept=int(kept))


def _routing(parser: CommandParser, args: Namespace, options: Options) -> Options:
    text, trace = args.locality, args.trace
    if text is not None and trace is not None:
        parser.error("--locality and --trace exclude each other: one trace at a time")
    if trace is not None:
        return replace(options, trace=Path(trace))
    if text == "off" or (text is None and not is_synthetic(options.model)):
        return options
    return replace(options, locality=Locality.parse(text) if text else Locality())
