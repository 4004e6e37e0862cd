"""strata plan: bytes per tier before anything is loaded. Exit code 1 when they do not fit."""

from __future__ import annotations

import json
from collections.abc import Sequence

from strata.cli_flags import ENGINE, CommandParser, asked_settings
from strata.core.settings import SETTINGS
from strata.engine.build import plan_model


def main(arguments: Sequence[str]) -> int:
    """Plan the memory of a model."""
    parser = CommandParser("plan", "Say how much memory a model takes here; loads nothing.")
    parser.add_argument("model", metavar="MODEL", help="GGUF or safetensors file, part, or folder")
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")
    parser.add_settings(ENGINE)
    args = parser.read(arguments)
    ready = plan_model(args.model, asked_settings(args))
    plan, off = ready.memory, ready.nothing_to_do()
    if ready.settings.quality_budget > 0:
        off["quality_budget"] = "a plan takes no profile, which belongs to one machine"
    if args.json:
        print(json.dumps({**plan.as_dict(), "off_here": off}, indent=1))
    else:
        for name, why in off.items():
            value = SETTINGS[name].show(getattr(ready.settings, name))
            print(f"{SETTINGS[name].flag} {value}: off here: {why}")
        print("\n".join(plan.lines()))
    return 0 if plan.fits else 1
