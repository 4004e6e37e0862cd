"""strata doctor: what this machine is, what will be slow and why, and how fast a model will answer.
Exit code 1 when the model does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence

from strata.bench.doctor import Look, findings, machine_lines
from strata.bench.machine import measure_bandwidths
from strata.bench.placed import Asked, forecast
from strata.bench.predict import planned_slots
from strata.bench.routing import Locality
from strata.bench.slices import why_no_slice
from strata.bench.traffic import traffic_of
from strata.cli_bench_speed import add_model, model_of
from strata.cli_flags import ENGINE, CommandParser, asked_settings
from strata.core.settings_load import Effective
from strata.engine.build import Ready, prepare
from strata.engine.machine import probe
from strata.native.topology import read_topology


def main(arguments: Sequence[str]) -> int:
    """Look, plan, predict."""
    parser = CommandParser("doctor", "Say what this machine is and how fast a model will answer.")
    add_model(parser)
    parser.add_argument(
        "--locality", metavar="ZIPF,REPEAT", default="0.6,0.3",
        help="how a text uses experts, for the share in the fast tier [default 0.6,0.3]",
    )  # fmt: skip
    parser.add_argument(
        "--check", action="store_true", help="load the model too, and compare with its windows"
    )
    parser.add_settings(ENGINE)
    args = parser.read(arguments)
    if args.model is None and args.synthetic is None:
        parser.refuse_settings(args, "without MODEL", ("device", "workers"))
        if args.check:
            parser.error("--check has no effect without MODEL")
    locality = Locality.parse(args.locality)
    asked = asked_settings(args)
    look = Look(probe(), read_topology())
    print("\n".join(machine_lines(look)), flush=True)
    device = asked.settings.device
    if device == "auto":
        device = "cuda" if look.machine.gpu is not None else "cpu"
    for finding in findings(look, device):
        print(finding.line(), flush=True)
    if args.model is None and args.synthetic is None:
        workers = asked.settings.workers or look.machine.cpu_cores
        print(measure_bandwidths(workers, device).line())
        return 0
    ready = prepare(model_of(parser, args), asked)
    try:
        path = model_of(parser, args) if args.check else None
        return _of_model(ready, asked, locality, path)
    finally:
        ready.plan.checkpoint.close()


def _of_model(ready: Ready, asked: Effective, locality: Locality, check: str | None) -> int:
    print("\n" + "\n".join(ready.memory.lines()), flush=True)
    if not ready.memory.fits:
        return 1
    print()
    reason = why_no_slice(ready.plan.checkpoint)
    if reason is None:
        wanted = Asked([planned_slots(ready)], locality, check=check)
        print("\n".join(forecast(ready, asked, wanted, print)[0].lines()))
        return 0
    bandwidths = measure_bandwidths(ready.settings.workers, ready.settings.device)
    traffic = traffic_of(ready.plan)
    seconds = (traffic.dense_bytes + traffic.routed_bytes) / bandwidths.host
    print(bandwidths.line())
    print(f"not predicted: {reason}; no window can be faster than its bytes from main memory, "
          f"{1 / seconds:.1f} tok/s")  # fmt: skip
    return 0
