"""What the storage of keys and values takes and changes, for the start-up report.

The classes are measurements on the demo model, not bounds: docs/QUALITY.md has the command, the
texts and the tables. Another model is measured by ``strata quality MODEL --arms kv=int8``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from strata.memory.state import StateSpec

MEASURED_KL = {"f16": 0.0007, "int8": 0.0008, "q4": 0.0034}
"""Mean KL (nats a token) to the same engine with f32 caches: 4 texts of 330 positions."""


def kv_line(kv: str, state_specs: Sequence[Mapping[str, StateSpec]]) -> str:
    """Bytes of a position over all layers, and the class of difference that was measured."""
    growing = [s for group in state_specs for s in group.values() if s.kind == "positional"]
    n_bytes = sum(s.entry_bytes / s.stride_tokens for s in growing)
    line = f"keys and values: {kv}, {n_bytes:,.0f} bytes a token of context"
    if kv in MEASURED_KL:
        line += (
            f"; class of difference: KL {MEASURED_KL[kv]:g} to f32, measured on the demo model "
            f"(docs/QUALITY.md)"
        )
    return line
