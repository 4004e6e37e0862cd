"""Reference forwards, and how near each choice of experts and blocks was."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Arrays = dict[str, Any]


class Hooks:
    """Forward hooks that are taken off on exit."""

    def __init__(self) -> None:
        self._handles: list[Any] = []

    def after(self, module: torch.nn.Module, fn: Callable[..., Any]) -> None:
        """fn(module, args, kwargs, output)."""
        self._handles.append(module.register_forward_hook(fn, with_kwargs=True))

    def before(self, module: torch.nn.Module, fn: Callable[..., Any]) -> None:
        """fn(module, args, kwargs)."""
        self._handles.append(module.register_forward_pre_hook(fn, with_kwargs=True))

    def __enter__(self) -> Hooks:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()


def moe_of(layer: Any) -> Any:
    """The layer's routed feed-forward, or None."""
    return layer.mlp if hasattr(layer.mlp, "experts") else None


def mixer_of(layer: Any) -> Any:
    """The layer's token mixer."""
    return layer.self_attn if hasattr(layer, "self_attn") else layer.linear_attn


def router_of(moe: Any) -> Any:
    """The router of a routed feed-forward."""
    return moe.gate if hasattr(moe, "gate") else moe.router


def first(value: Any) -> torch.Tensor:
    """The tensor, or the first of a tuple."""
    return value[0] if isinstance(value, tuple | list) else value


def np32(tensor: torch.Tensor) -> np.ndarray:
    """As a float32 array."""
    return tensor.detach().to(torch.float32).cpu().numpy()


def capture(model: Any, ids: torch.Tensor, tiny: Any) -> tuple[Arrays, Any]:
    """One prefill: logits, each layer's choices and hidden states; and the cache it left."""
    found: Arrays = {}
    with Hooks() as hooks:
        for index, layer in enumerate(model.model.layers):
            _watch_layer(hooks, found, index, layer)
        hooks.after(
            model.model.layers[-1],
            lambda m, a, k, o: found.__setitem__("hidden_out", np32(first(o)[0])),
        )
        out = model(input_ids=ids, use_cache=True)
    found["logits"] = np32(out.logits[0])
    return found, out.cache


def _watch_layer(hooks: Hooks, found: Arrays, index: int, layer: Any) -> None:
    key = f"layers.{index}."

    def put(name: str, tensor: torch.Tensor) -> None:
        found[key + name] = np32(tensor[0])

    def hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        value: torch.Tensor = args[0] if args else kwargs["hidden_states"]
        return value

    def on_router(m: Any, args: Any, kwargs: Any, out: Any) -> None:
        # positions lie flat: router inputs have no batch axis
        found[key + "router_logits"] = np32(out[0])
        found[key + "expert"] = out[2].cpu().numpy().astype(np.int32)
        found[key + "weight"] = np32(out[1])

    hooks.before(layer, lambda m, a, k: put("hidden_in", hidden(a, k)))
    hooks.after(mixer_of(layer), lambda m, a, k, o: put("mixer_out", first(o)))
    hooks.after(layer.mlp, lambda m, a, k, o: put("ffn_out", first(o)))
    moe = moe_of(layer)
    if moe is not None:
        hooks.after(router_of(moe), on_router)
    indexer = getattr(mixer_of(layer), "indexer", None)
    if indexer is not None:

        def on_index(m: Any, args: Any, kwargs: Any, out: Any) -> None:
            found[key + "selected"] = out[0, 0].cpu().numpy()
            found[key + "block_margin"] = _block_margin(m, args[0], args[1])

        hooks.after(indexer, on_index)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    n = cos.shape[-1]
    a, b = x[..., : n // 2], x[..., n // 2 : n]
    return torch.cat([x[..., :n] * cos + torch.cat([-b, a], -1) * sin, x[..., n:]], -1)


def _block_margin(indexer: Any, hidden: torch.Tensor, rotary: Any) -> np.ndarray:
    """Per query the gap between the last chosen and the first dropped block, or infinity."""
    n_tokens, width, ratio = hidden.shape[1], indexer.index_head_dim, indexer.compress_ratio
    cos, sin = rotary[0][0, :n_tokens], rotary[1][0, :n_tokens]
    projected = indexer.index_qk_proj(hidden)[0]
    query = indexer.q_layernorm(projected[:, :-width].view(n_tokens, -1, width))
    query = _rotate(query, cos[:, None], sin[:, None])
    n = n_tokens // ratio
    mean = projected[: n * ratio, -width:].view(n, ratio, width).mean(1)
    key = _rotate(indexer.k_layernorm(mean), cos[: n * ratio : ratio], sin[: n * ratio : ratio])
    score = torch.relu(torch.einsum("thd,nd->tnh", query, key)).sum(-1) / math.sqrt(width)
    margin = torch.full((n_tokens,), float("inf"))
    for token in range(n_tokens):
        done = score[token, : (token + 1) // ratio].sort(descending=True).values
        if len(done) > indexer.block_topk:
            margin[token] = done[indexer.block_topk - 1] - done[indexer.block_topk]
    return np32(margin)


def router_margin(logits_TE: np.ndarray, expert_TK: np.ndarray) -> np.ndarray:
    """Per token the gap in router logits between the last chosen and the best other expert."""
    chosen = np.take_along_axis(logits_TE, expert_TK, -1).min(-1)
    rest = logits_TE.copy()
    np.put_along_axis(rest, expert_TK, -np.inf, -1)
    margin: np.ndarray = np.abs(chosen - rest.max(-1))
    return margin


def pieces(model: Any, ids: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Logits [T, V] of the prompt read in pieces through the cache."""
    cache, outputs, start = None, [], 0
    for size in sizes:
        out = model(input_ids=ids[:, start : start + size], cache=cache, use_cache=True)
        cache, start = out.cache, start + size
        outputs.append(out.logits[0])
    assert start == ids.shape[1]
    return torch.cat(outputs)


def greedy(model: Any, ids: torch.Tensor, n: int) -> np.ndarray:
    """The n most likely tokens after the prompt, one after another."""
    out = model(input_ids=ids, use_cache=True)
    tokens = []
    for _ in range(n):
        token = out.logits[0, -1].argmax().view(1, 1)
        tokens.append(int(token))
        out = model(input_ids=token, cache=out.cache, use_cache=True)
    return np.array(tokens, np.int64)
