"""strata bench cache: what cache policies would have read, on a routing trace.

Every policy is told each token's experts in order, layer by layer, with the same number of slots in
every layer. Beside the hit rates stands the ratio of reads to those of the best cache there could
be (Belady with bypass, which knows the future): 1.0 cannot be beaten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from strata.bench.prompts import SHORT, random_prompt
from strata.bench.routing import Ids, moe_layers
from strata.core.errors import InputError, SettingError
from strata.engine.engine import Engine
from strata.engine.model import Model
from strata.experts.policy import POLICIES, belady_hits
from strata.models.spec import MoeSpec

STATIC = "static"
"""The experts that the first half of the trace used most, never exchanged."""


@dataclass(frozen=True)
class CacheResult:
    """One policy with so many slots in each layer. reads: experts that were not held."""

    policy: str
    slots: int
    hits: int
    accesses: int
    best_hits: int

    @property
    def hit_rate(self) -> float:
        """Share of accesses that were held."""
        return self.hits / self.accesses

    @property
    def ratio(self) -> float:
        """Reads over those of the best cache; infinite when that reads nothing."""
        best = self.accesses - self.best_hits
        return (self.accesses - self.hits) / best if best else float("inf")


def simulate(
    trace_LPK: Ids, slots: Sequence[int], policies: Sequence[str] = (*POLICIES, STATIC)
) -> list[CacheResult]:
    """Every policy with every number of slots. The second half of the trace counts; the first one
    fills the caches, the best cache's too."""
    found = []
    half = trace_LPK.shape[1] // 2
    layers = [layer.tolist() for layer in trace_LPK]
    accesses = sum(len(token) for layer in layers for token in layer[half:])
    for n in slots:
        best = sum(belady_hits(layer, n, count_from=half) for layer in layers)
        for policy in policies:
            hits = sum(_hits(policy, layer, n, half) for layer in layers)
            found.append(CacheResult(policy, n, hits, accesses, best))
    return found


def _hits(name: str, tokens: list[list[int]], slots: int, half: int) -> int:
    if name == STATIC:
        flat = [e for token in tokens[:half] for e in token]
        order = np.argsort(-np.bincount(flat), kind="stable")[:slots]
        held = set(order.tolist())
        return sum(expert in held for token in tokens[half:] for expert in token)
    policy, hits = POLICIES[name](slots, ()), 0
    for number, token in enumerate(tokens):
        for expert in token:
            hit = policy.access(expert)
            hits += hit and number >= half
        policy.end_token()
    return hits


def table(results: Sequence[CacheResult], n_experts: int) -> list[str]:
    """Hit rates and ratios, a line per number of slots."""
    names = list(dict.fromkeys(r.policy for r in results))
    head = f"{'slots a layer':<16} {'best':>7} " + " ".join(f"{name:>14}" for name in names)
    lines = [head]
    for slots in dict.fromkeys(r.slots for r in results):
        row = [r for r in results if r.slots == slots]
        best = row[0].best_hits / row[0].accesses
        cells = " ".join(f"{f'{r.hit_rate:.1%} {r.ratio:.2f}x':>14}" for r in row)
        lines.append(f"{f'{slots} of {n_experts}':<16} {best:>7.1%} {cells}")
    lines.append("hit rate, and reads as a multiple of the best cache's (Belady with bypass)")
    return lines


def parse_slots(text: str, n_experts: int) -> list[int]:
    """Slots of a layer: numbers, or parts of its experts such as 1/8."""
    found = []
    for part in text.split(","):
        top, slash, bottom = part.strip().partition("/")
        if not top.isdigit() or (slash and not bottom.isdigit()) or (slash and int(bottom) == 0):
            raise SettingError(f"--slots {text}: {part!r} is neither a number nor a part like 1/8")
        n = int(top) * n_experts // int(bottom) if slash else int(top)
        if not 1 <= n <= n_experts:
            raise SettingError(f"--slots {text}: {part} is {n} of {n_experts} experts of a layer")
        found.append(n)
    return found


def record_trace(model: Model, n_tokens: int, say: Callable[[str], None]) -> Ids:
    """The experts of n_tokens that a model writes after the protocol's prompts, [L, P, K], as its
    router chose them."""
    engine = model.engine
    layers = moe_layers(engine.spec)
    if not layers:
        raise SettingError(f"{engine.spec.family} has no routed experts to trace")
    ffn = engine.spec.layers[layers[0]].ffn
    assert isinstance(ffn, MoeSpec)
    rows: list[np.ndarray[tuple[int, ...], np.dtype[np.int32]]] = []
    number = 0
    while len(rows) < n_tokens:
        prompt = _prompt(model, number)
        engine.reset()
        row = engine.read_prompt(prompt)
        room = min(engine.context_tokens - len(prompt), n_tokens - len(rows), 200)
        if room < 1:
            raise InputError("the prompts fill the whole context; use a larger --context")
        for _ in range(room):
            row = engine.run_window([int(np.argmax(row))])[0]
            rows.append(_experts(engine, layers, ffn.n_active))
            engine.commit(1)
        number += 1
        say(f"recorded {len(rows)} of {n_tokens} tokens")
    return np.stack(rows, axis=1).astype(np.int32)


def _prompt(model: Model, number: int) -> list[int]:
    words = SHORT[number % len(SHORT)]
    try:
        return model.prompt_tokens([{"role": "user", "content": words}] if model.chats else words)
    except InputError:  # no text here
        return random_prompt(40, model.engine.n_vocab, number)


def _experts(
    engine: Engine, layers: Sequence[int], n_active: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """Experts of the window's one token, [L, K], by rank."""
    found = np.empty((len(layers), n_active), np.int32)
    for i, layer in enumerate(layers):
        for groups in engine.service.of(layer).groups.values():
            found[i, groups.row] = np.repeat(groups.expert_G, np.diff(groups.start))
    return found
