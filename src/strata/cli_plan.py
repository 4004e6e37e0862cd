"""strata plan: bytes per tier before anything is loaded. Exit code 1 when they do not fit."""

from __future__ import annotations

import json
from collections.abc import Sequence

from strata.cli_flags import ENGINE, CommandParser, asked_settings
from strata.engine.build import plan_model
from strata.memory.budget import MemoryPlan


def main(arguments: Sequence[str]) -> int:
    """Plan the memory of a model."""
    parser = CommandParser("plan", "Say how much memory a model takes here; loads nothing.")
    parser.add_argument("model", metavar="MODEL", help="GGUF or safetensors file, part, or folder")
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")
    parser.add_settings(ENGINE)
    args = parser.read(arguments)
    plan = plan_model(args.model, asked_settings(args))
    if args.json:
        print(json.dumps(as_json(plan), indent=1))
    else:
        print("\n".join(plan.lines()))
    return 0 if plan.fits else 1


def as_json(plan: MemoryPlan) -> dict[str, object]:
    """Owners, limits and verdict, sizes in bytes."""
    return {
        "fits": plan.fits,
        "owners": [
            {"tier": line.tier, "owner": line.owner, "bytes": line.n_bytes} for line in plan.lines_
        ],
        "tiers": {
            tier: {
                "needed_bytes": plan.need(tier),
                "available_bytes": limit.n_bytes,
                "limit": limit.source,
                "shortfall_bytes": max(plan.need(tier) - limit.n_bytes, 0),
            }
            for tier, limit in plan.limits.items()
        },
    }
