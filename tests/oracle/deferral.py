"""A forward in which some experts of a layer are late: added one token mixer after it."""

from __future__ import annotations

from typing import Any

import torch

from tests.oracle.run import Hooks, mixer_of, moe_of


def deferrable(model: Any) -> list[int]:
    """Routed layers that may defer: not the last, and not one in front of an n-gram block."""
    layers = model.model.layers
    return [
        index
        for index in range(len(layers) - 1)
        if moe_of(layers[index]) is not None and getattr(layers[index + 1], "ple", None) is None
    ]


def run_deferred(
    model: Any,
    ids: torch.Tensor,
    late_E: torch.Tensor,
    layers: list[int],
    streams: bool,
    hold: bool,
) -> torch.Tensor:
    """Logits [T, V] with the experts of late_E (1 = late) split off in ``layers``.

    hold: add them after the next layer's mixer and before its FFN read; otherwise in their own
    layer (the same sums in another order).
    """
    stash: dict[Any, torch.Tensor] = {}
    changed: list[Any] = []
    with Hooks() as hooks:
        for index in layers:
            experts = moe_of(model.model.layers[index]).experts
            experts.forward = _split(experts.forward, late_E, stash, index, hold)
            changed.append(experts)
            if hold:
                _join_later(hooks, model.model.layers, index, stash, streams)
        try:
            logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0]
        finally:
            for experts in changed:
                del experts.forward
    assert not stash
    return logits


def _split(inner: Any, late_E: torch.Tensor, stash: dict[Any, Any], index: int, hold: bool) -> Any:
    def forward(x: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        is_late = late_E[expert].to(weight.dtype)
        on_time = inner(x, expert, weight * (1 - is_late))
        late = inner(x, expert, weight * is_late)
        if not hold:
            return on_time + late
        stash[index] = late.view(1, -1, late.shape[-1])
        return on_time

    return forward


def _join_later(
    hooks: Hooks, layers: Any, index: int, stash: dict[Any, Any], streams: bool
) -> None:
    following = layers[index + 1]
    if not streams:

        def after_mixer(m: Any, args: Any, kwargs: Any, out: Any) -> Any:
            late = stash.pop(index)
            return (out[0] + late, *out[1:]) if isinstance(out, tuple) else out + late

        hooks.after(mixer_of(following), after_mixer)
        return

    def keep_coefficients(m: Any, args: Any, kwargs: Any, out: Any) -> None:
        stash["w", index] = out[2]

    def before_read(m: Any, args: Any, kwargs: Any) -> Any:
        late = stash.pop(index).unsqueeze(-2) * stash.pop(("w", index)).unsqueeze(-1)
        return (args[0] + late.flatten(-2), *args[1:]), kwargs

    hooks.after(layers[index].mlp_hyper_connection, keep_coefficients)
    hooks.before(following.mlp_hyper_connection, before_read)
