"""strata bench: measurements. Without a name: how fast a model answers.

A measurement is one row of BENCHES and a module of ``strata.bench``; only the chosen one is loaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

BENCHES = {
    "speed": "strata.cli_bench_speed:main",
    "cache": "strata.cli_bench_cache:main",
    "cpu": "strata.cli_bench_cpu:main",
    "serve": "strata.cli_bench_serve:main",
}
"""Name -> "module:function"; the function takes the arguments and gives the exit code."""


def main(arguments: Sequence[str]) -> int:
    """Run one measurement."""
    named = bool(arguments) and arguments[0] in BENCHES
    name, rest = (arguments[0], arguments[1:]) if named else ("speed", arguments)
    module, function = BENCHES[name].split(":")
    return int(getattr(importlib.import_module(module), function)(rest))
