"""Which layers' CPU rows may join late: known from the model alone, whether or not any is late."""

from __future__ import annotations

from typing import Literal

from strata.models.spec import ModelSpec, MoeSpec

Mode = Literal["1", "check"]
"""Where late rows join: behind the next mixer, or in their own layer."""


def deferrable_layers(spec: ModelSpec) -> list[int]:
    """Layers whose rows may join late: not the last one (the head reads its residual), not one in
    front of an n-gram block (which reads the full residual), and only layers with routed
    experts."""
    return [
        layer
        for layer in range(spec.n_layers - 1)
        if isinstance(spec.layers[layer].ffn, MoeSpec) and spec.layers[layer + 1].ngram is None
    ]


def never_late(spec: ModelSpec) -> str:
    """Which of the layers with routed experts can never be late, and why."""
    able = set(deferrable_layers(spec))
    found = []
    for layer, parts in enumerate(spec.layers):
        if not isinstance(parts.ffn, MoeSpec) or layer in able:
            continue
        last = layer == spec.n_layers - 1
        why = "the head reads its result" if last else f"{layer + 1} begins with an n-gram block"
        found.append(f"{layer} ({why})")
    return ", ".join(found)
