"""Routing traces: which experts each token takes in each layer, replayed in place of the router.

A made-up model's router knows no locality, so its hit rates would mean nothing. A trace of stated
locality (Zipf popularity, and the share of a token's experts that it keeps from the token before)
takes the place of the router's choice; the router's weights stay. ``Replay`` is a window
transformation: the router step runs as it is and a gather from the trace follows it, all on the
window's device, so that it can be recorded into a graph. Between windows only a position is set.
Where the plan routes (a device), the trace is laid over the router's logits; there its weights fall
evenly by rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from strata.core.errors import InputError, ProgramError, SettingError
from strata.memory.frame import Frame
from strata.models.spec import ModelSpec, MoeSpec
from strata.window.program import Program, Step
from strata.window.run import MAX_WINDOW_TOKENS

Ids = npt.NDArray[np.int32]

LOGITS = "router_logits"
"""What a router step writes where choosing is the plan's work; the buffer's name ends with E."""
RANK_STEP, OTHERS = 0.2, -20.0
"""Logits of a token's experts fall by so much from rank to rank; those of all others."""


@dataclass(frozen=True)
class Locality:
    """zipf: exponent of the experts' popularity in a layer (0: all alike). repeat: chance that an
    expert of the token before is taken again."""

    zipf: float = 0.6
    repeat: float = 0.3

    @classmethod
    def parse(cls, text: str) -> Locality:
        """From "ZIPF,REPEAT", say "0.6,0.3"."""
        try:
            zipf, repeat = (float(part) for part in text.split(","))
        except ValueError:
            zipf = repeat = -1.0
        if not (0 <= zipf <= 10 and 0 <= repeat < 1):
            raise SettingError(
                f"--locality {text}: give the Zipf exponent (0 to 10) and the share of experts "
                f"kept from token to token (0 to below 1), for example 0.6,0.3"
            )
        return cls(zipf, repeat)


def made_up_trace(
    n_layers: int, n_experts: int, n_active: int, n_tokens: int, how: Locality, seed: int = 0
) -> Ids:
    """A trace int32 [L, P, K] of distinct experts per token and layer; layers differ."""
    rng = np.random.default_rng(seed)
    popular = -how.zipf * np.log(np.arange(1, n_experts + 1))
    order_LE = np.argsort(rng.random((n_layers, n_experts)), axis=1)
    score_LE = popular[order_LE].astype(np.float32)
    trace = np.empty((n_layers, n_tokens, n_active), np.int32)
    rows = np.arange(n_layers)[:, None]
    for t in range(n_tokens):
        # the largest of score + Gumbel noise are a draw without replacement
        noisy = score_LE + rng.gumbel(size=score_LE.shape).astype(np.float32)
        if t:
            kept = rng.random((n_layers, n_active)) < how.repeat
            before = trace[:, t - 1]
            noisy[rows, before] += np.where(kept, np.float32(1e6), np.float32(0))
        best = np.argpartition(-noisy, n_active - 1, axis=1)[:, :n_active]
        # ranks are drawn anew: what is kept need not be what weighs most
        mixed = np.argsort(rng.random(best.shape), axis=1)
        trace[:, t] = np.take_along_axis(best, mixed, axis=1)
    return trace


def measured(trace_LPK: Ids) -> dict[str, float]:
    """overlap: share of a token's experts that the token before had. top_quarter: share of all uses
    that the most used quarter of the experts takes."""
    n_experts = int(trace_LPK.max()) + 1
    same = [np.isin(a, b).mean() for layer in trace_LPK for a, b in _pairs(layer)]
    shares = []
    for layer in trace_LPK:
        uses = np.sort(np.bincount(layer.reshape(-1), minlength=n_experts))[::-1]
        shares.append(uses[: max(1, n_experts // 4)].sum() / uses.sum())
    return {"overlap": float(np.mean(same)), "top_quarter": float(np.mean(shares))}


def _pairs(layer_PK: Ids) -> list[tuple[Ids, Ids]]:
    return list(zip(layer_PK[1:], layer_PK[:-1], strict=True))


def save_trace(path: Path, trace_LPK: Ids) -> None:
    """Keep a trace as .npy."""
    with path.open("wb") as file:
        np.save(file, trace_LPK)


def load_trace(path: Path) -> Ids:
    """A kept trace; InputError when the file holds something else."""
    try:
        trace = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InputError(f"routing trace {path}: cannot be read ({error})") from None
    if trace.ndim != 3 or trace.dtype.kind != "i" or trace.size == 0 or trace.min() < 0:
        raise InputError(
            f"routing trace {path}: expected whole numbers [layers, tokens, experts a token], "
            f"found {trace.dtype} {list(trace.shape)}"
        )
    return np.asarray(trace, np.int32)


def moe_layers(spec: ModelSpec) -> list[int]:
    """Layers with routed experts, ascending: row i of a trace belongs to the i-th of them."""
    return [i for i, layer in enumerate(spec.layers) if isinstance(layer.ffn, MoeSpec)]


class Replay:
    """A window transformation that takes the experts from a trace. ``seek`` before each window."""

    def __init__(self, spec: ModelSpec, trace_LPK: Ids, device: torch.device) -> None:
        layers = moe_layers(spec)
        self._n_experts = require_fit(spec, layers, trace_LPK)
        # windows at the end of the trace run into a copy of its beginning
        looped = np.concatenate([trace_LPK, trace_LPK[:, :MAX_WINDOW_TOKENS]], axis=1)
        tensors = torch.from_numpy(looped).to(device)
        self._ids_PK = {layer: tensors[i] for i, layer in enumerate(layers)}
        self.n_tokens = trace_LPK.shape[1]
        self._at = torch.zeros(1, dtype=torch.int64, device=device)

    def seek(self, token: int) -> None:
        """The next window's first token is this one of the trace, which repeats for ever."""
        self._at.fill_(token % self.n_tokens)

    def __call__(self, program: Program, frame: Frame) -> Program:
        """The program with every router step followed by the trace's choice."""
        steps = list(program.steps)
        routers = [i for i, step in enumerate(steps) if step.name == "router"]
        if len(routers) != len(self._ids_PK):
            raise ProgramError(
                f"the program has {len(routers)} router steps and the trace {len(self._ids_PK)} "
                f"layers; a routing trace needs a router step for each"
            )
        index_T = torch.zeros(frame.T, dtype=torch.int64, device=self._at.device)
        step_T = torch.arange(frame.T, device=self._at.device)
        for number, i in enumerate(routers):
            place = (lambda: torch.add(self._at, step_T, out=index_T)) if number == 0 else None
            steps[i] = self._replayed(steps[i], frame, index_T, place)
        return program.edited(steps)

    def _replayed(
        self,
        step: Step,
        frame: Frame,
        index_T: torch.Tensor,
        place: Callable[[], torch.Tensor] | None,
    ) -> Step:
        launch = step.launch
        source, target = self._source(step, frame)

        def run() -> None:
            launch()
            if place is not None:
                place()
            torch.index_select(source, 0, index_T, out=target)

        return replace(step, launch=run)

    def _source(self, step: Step, frame: Frame) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows of the trace [P, n], where the rows of a window go [T, n])."""
        ids_PK = self._ids_PK[step.layer]
        if LOGITS not in step.writes:
            n_active = ids_PK.shape[1]
            return ids_PK, frame["expert"][: frame.T * n_active].view(frame.T, n_active)
        n_experts = self._n_experts
        target = frame[f"{LOGITS}{n_experts}"][: frame.T]
        falling = 3.0 - RANK_STEP * torch.arange(ids_PK.shape[1], device=ids_PK.device)
        logits_PE = torch.full((len(ids_PK), n_experts), OTHERS, device=ids_PK.device)
        logits_PE.scatter_(1, ids_PK.long(), falling.expand(len(ids_PK), -1).contiguous())
        return logits_PE.to(target.dtype), target


def require_fit(spec: ModelSpec, layers: Sequence[int], trace_LPK: Ids) -> int:
    """The number of experts of a layer; InputError for a trace of another model."""
    ffns = [spec.layers[i].ffn for i in layers]
    kinds = {(f.n_experts, f.n_active) for f in ffns if isinstance(f, MoeSpec)}
    if not kinds:
        raise SettingError(f"--locality: {spec.family} has no routed experts to trace")
    n_experts, n_active = min(kinds)
    n_layers, _, k = trace_LPK.shape
    if (n_layers, k) != (len(layers), n_active) or int(trace_LPK.max()) >= n_experts:
        raise InputError(
            f"the routing trace is of {n_layers} layers, {k} experts a token, numbers up to "
            f"{int(trace_LPK.max())}; the model has {len(layers)} layers of {n_experts} experts, "
            f"{n_active} a token"
        )
    return n_experts
