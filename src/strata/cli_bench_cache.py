"""strata bench cache: hit rates of cache policies on a routing trace, beside the best there could
be.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from strata.bench.cache import parse_slots, record_trace, simulate, table
from strata.bench.routing import Ids, Locality, load_trace, made_up_trace, measured, save_trace
from strata.cli_flags import ENGINE, CommandParser, asked_settings
from strata.cli_screen import open_model, say
from strata.core.errors import SettingError
from strata.engine.build import Ready

SIZES = {"layers": 4, "experts": 128, "active": 8, "tokens": 1000}
"""Of a made-up trace; a model's own has so many tokens."""


def main(arguments: Sequence[str]) -> int:
    """Simulate; print a table."""
    parser = CommandParser("bench cache", "Compare cache policies on a routing trace.")
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", help="record the trace from this model's own text")
    add("--trace", metavar="FILE", help="a routing trace (.npy [L, tokens, experts a token])")
    add("--locality", metavar="ZIPF,REPEAT", help="a made-up trace [default 0.6,0.3]")
    add("--layers", metavar="N", help="of a made-up trace [default 4]")
    add("--experts", metavar="N", help="of a layer of a made-up trace [default 128]")
    add("--active", metavar="N", help="experts a token takes of a made-up trace [default 8]")
    add("--tokens", metavar="N", help="length of the trace [default 1000]")
    add("--slots", metavar="A,B", default="1/8,1/4,3/8", help="slots of a layer: numbers or parts "
        "of its experts [default 1/8,1/4,3/8]")  # fmt: skip
    add("--save-trace", metavar="FILE", help="keep the trace")
    add("--json", metavar="FILE", help="write the results")
    parser.add_settings(ENGINE)
    args = parser.read(arguments)
    _require_effect(parser, args)
    trace, n_experts = _trace(parser, args)
    if args.save_trace:
        save_trace(Path(args.save_trace), trace)
    facts = measured(trace)
    layers, tokens, active = trace.shape
    print(
        f"trace: {layers} layers, {tokens} tokens, {active} of {n_experts} experts; next token "
        f"shares {facts['overlap']:.0%}, the most used quarter takes {facts['top_quarter']:.0%}"
    )
    results = simulate(trace, parse_slots(args.slots, n_experts))
    print("\n".join(table(results, n_experts)))
    if args.json:
        rows = [vars(r) | {"hit_rate": r.hit_rate, "ratio": r.ratio} for r in results]
        text = json.dumps({"trace": facts, "results": rows}, indent=1)
        Path(args.json).write_text(text + "\n", encoding="utf-8")
    return 0


def _require_effect(parser: CommandParser, args: Namespace) -> None:
    """An option that the chosen kind of trace would ignore is refused."""
    recorded = args.model is not None or args.trace is not None
    for name in SIZES:
        kind = "a trace that was kept" if args.trace is not None else "a model's own trace"
        fixed = recorded if name != "tokens" else args.trace is not None
        if fixed and getattr(args, name) is not None:
            parser.error(f"--{name} has no effect on {kind}")
    if args.model is None:
        parser.refuse_settings(args, "without MODEL", ("device",))


def _number(parser: CommandParser, args: Namespace, name: str) -> int:
    text = getattr(args, name)
    if text is None:
        return SIZES[name]
    if not text.isdigit() or int(text) < 1:
        parser.error(f"--{name} {text}: must be 1 or more")
    return int(text)


def _trace(parser: CommandParser, args: Namespace) -> tuple[Ids, int]:
    """The trace, and how many experts a layer has."""
    given = [x for x in (args.model, args.trace, args.locality) if x is not None]
    if len(given) > 1:
        parser.error("MODEL, --trace and --locality exclude each other: one trace at a time")
    n = {name: _number(parser, args, name) for name in SIZES}
    if n["tokens"] < 4:
        raise SettingError("--tokens: a trace needs at least 4 tokens, of which half count")
    if args.trace is not None:
        kept = load_trace(Path(args.trace))
        return kept, int(kept.max()) + 1
    if args.model is not None:
        counts: list[int] = []

        def check(ready: Ready) -> None:
            if not any(ready.plan.n_experts_L):
                raise SettingError(f"{ready.plan.spec.family} has no routed experts to trace")
            counts.append(max(ready.plan.n_experts_L))
            parse_slots(args.slots, counts[0])

        with open_model(args.model, asked_settings(args), quiet=True, check=check) as model:
            return record_trace(model, n["tokens"], lambda text: say([text])), counts[0]
    if n["active"] > n["experts"]:
        raise SettingError(f"--active {n['active']} of --experts {n['experts']}: too many")
    how = Locality.parse(args.locality) if args.locality else Locality()
    parse_slots(args.slots, n["experts"])
    made = made_up_trace(n["layers"], n["experts"], n["active"], n["tokens"], how)
    return made, n["experts"]
