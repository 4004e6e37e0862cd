"""The experts of a window on a device: the plan's buffers, the device's rows, the host's answers.

The device plans; the host learns of a layer at its ring. A recorded window holds only addresses and
device scalars of this object, so residency and rules may change between windows without recording
anew. Knows no steps and no features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from strata.core.types import Place
from strata.experts.device_counters import DeviceCounters
from strata.experts.fast_tier import FastTier
from strata.experts.late import LateBelow
from strata.experts.link_stage import LinkStage
from strata.experts.store import ExpertStore
from strata.experts.workers import Worker
from strata.kernels.expert_rows.launch import (
    GpuExpert,
    GpuGroups,
    Hidden,
    gpu_expert,
    new_groups,
    new_hidden,
)
from strata.kernels.expert_rows.triton import down, gate_up
from strata.kernels.plan import Groups, Plan
from strata.kernels.plan.triton import ForHost, PlanRules, new_scratch, route_and_plan
from strata.kernels.quantize.ref import Quantized
from strata.kernels.words import Payload
from strata.memory.handshake import Handshake
from strata.native import CpuPool
from strata.native.serve import Server

POLL_US = 2000
"""Time without a ring after which the stream is asked whether it still runs."""

HOST = {False: Place.CPU, True: Place.CPU_LATE}


@dataclass(frozen=True)
class PlanBuffers:
    """Results of the plan for windows of one size; ``*_LR`` keep one row a layer until its end."""

    expert_LR: torch.Tensor
    weight_LR: torch.Tensor
    place_LR: torch.Tensor
    gpu: GpuGroups
    counts: torch.Tensor
    """Of ``ForHost``."""
    on_time: torch.Tensor
    """View of the counts: int32 [1], groups on time."""
    late: torch.Tensor
    any_host: torch.Tensor
    """int32 [1], not 0 when the host has anything to do."""
    hidden: dict[GpuExpert, Hidden] = field(default_factory=dict)


class DeviceService:
    """Plans, rows and answers of one engine.

    tier: the cached experts, on the device. host_addr_LE: addresses at which the device reads
    experts in RAM, 0 = none. workers: who computes the host's rows, on time and late.
    """

    def __init__(
        self,
        tier: FastTier,
        store: ExpertStore,
        workers: Mapping[Place, Worker],
        handshake: Handshake,
        device: torch.device,
        n_active: Sequence[int],
        host_addr_LE: Sequence[npt.NDArray[np.int64]] | None = None,
    ) -> None:
        self.tier, self.workers, self.handshake = tier, dict(workers), handshake
        self.late_below = LateBelow()
        self.device, self._n_active = device, list(n_active)
        n_layers = len(n_active)
        self._experts = [gpu_expert(g.shape) if g is not None else None for g in store.layers]
        widest = max((len(a) for a in tier.address_LE), default=0)
        self._vram_LE = torch.zeros((n_layers, max(widest, 1)), dtype=torch.int64, device=device)
        self._host_LE = torch.zeros_like(self._vram_LE)
        if host_addr_LE is not None:
            self._host_LE.copy_(torch.from_numpy(_table(host_addr_LE, self._host_LE.shape)))
        self._version = -1
        self._stage: LinkStage | None = None
        if host_addr_LE is not None and any(len(a) for a in host_addr_LE):
            self._stage = LinkStage(store, tier, device)
        self._all_resident = -1, False
        """(version of the tier, answer of ``all_resident`` for it)"""
        self._server: Server | None = None
        self.rules = PlanRules(
            torch.zeros(handshake.n_rows, dtype=torch.int32, device=device),
            torch.full((n_layers,), -1.0, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
        )
        self._scratch = new_scratch(self._vram_LE.shape[1], device)
        self.counters = DeviceCounters(n_layers)
        self._buffers: dict[int, PlanBuffers] = {}
        self._last: tuple[npt.NDArray[np.int32], npt.NDArray[np.int8]] | None = None

    @property
    def n_active(self) -> Sequence[int]:
        """Rows a token of each layer; 0 without routed experts."""
        return self._n_active

    def buffers(self, n_tokens: int) -> PlanBuffers:
        """The plan's buffers for that window size."""
        if n_tokens not in self._buffers:
            self._buffers[n_tokens] = self._new_buffers(n_tokens)
        return self._buffers[n_tokens]

    def _new_buffers(self, n_tokens: int) -> PlanBuffers:
        n_rows, n_layers = n_tokens * max(self._n_active), len(self._n_active)

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=self.device)

        counts = ints(5)
        place = torch.full((n_layers, n_rows), -1, dtype=torch.int8, device=self.device)
        made = PlanBuffers(
            ints(n_layers, n_rows),
            torch.zeros((n_layers, n_rows), device=self.device),
            place,
            new_groups(n_rows, self.device),
            counts,
            counts[0:1],
            counts[2:3],
            counts[4:5],
        )
        for expert in self._experts:
            if expert is not None and expert not in made.hidden:
                made.hidden[expert] = new_hidden(expert, n_rows, self.device)
        return made

    def refresh(self) -> None:
        """Between windows: let the device see the tier as it is now."""
        if self._version != self.tier.version:
            table = _table(self.tier.address_LE, self._vram_LE.shape)
            self._vram_LE.copy_(torch.from_numpy(table))
            if self._stage is not None:
                self._stage.refresh()
            self._version = self.tier.version

    def show(self, address_LE: Sequence[npt.NDArray[np.int64]]) -> None:
        """Let the device see experts at these addresses until the next ``refresh``."""
        self._vram_LE.copy_(torch.from_numpy(_table(address_LE, self._vram_LE.shape)))
        self._version = -1

    @contextmanager
    def without_link(self) -> Iterator[None]:
        """Meanwhile no plan lets the device read experts in RAM."""
        reached_LE = self._host_LE.clone()
        self._host_LE.zero_()
        try:
            yield
        finally:
            self._host_LE.copy_(reached_LE)

    def shown(self, layer: int) -> tuple[GpuExpert, torch.Tensor]:
        """A layer's experts as kernels see them, and their addresses, int64 [E] on the device."""
        expert = self._experts[layer]
        assert expert is not None, f"layer {layer} has no routed experts"
        return expert, self._vram_LE[layer, : len(self.tier.address_LE[layer])]

    def all_resident(self) -> bool:
        """Whether no window can have rows for the host."""
        version, resident = self._all_resident
        if version != self.tier.version:
            resident = all((addresses != 0).all() for addresses in self.tier.address_LE)
            self._all_resident = self.tier.version, resident
        return resident

    def plan(
        self,
        layer: int,
        n_tokens: int,
        logits_TE: torch.Tensor,
        rule: dict[str, object],
        x_TD: torch.Tensor | None = None,
        word: int | None = None,
    ) -> None:
        """Route and give every row its place. One launch.

        x_TD: activations for the host, with which the launch writes the layer's payload; word: of
        the ring, which then follows; None: nothing for the host, and no ring.
        """
        made, k = self.buffers(n_tokens), self._n_active[layer]
        n_rows, n_experts = n_tokens * k, logits_TE.shape[1]
        route_and_plan(
            logits_TE,
            made.expert_LR[layer, :n_rows],
            made.weight_LR[layer, :n_rows],
            self._vram_LE[layer, :n_experts],
            self._host_LE[layer, :n_experts],
            replace(self.rules, below=self.rules.below[layer : layer + 1]),
            made.place_LR[layer, :n_rows],
            made.gpu,
            None if x_TD is None else self._for_host(layer, made, x_TD, word),
            self._scratch,
            **rule,  # type: ignore[arg-type]
        )

    def _for_host(
        self, layer: int, made: PlanBuffers, x_TD: torch.Tensor, word: int | None
    ) -> ForHost:
        n_rows, shake = len(x_TD) * max(self._n_active), self.handshake
        return ForHost(
            made.counts, shake.ints_address, n_rows, x_TD, shake.x_address, word, layer + 1
        )

    def rows(
        self,
        layer: int,
        x_TD: torch.Tensor,
        x_q: Quantized | None,
        rows_RD: torch.Tensor,
        missed: bool = True,
    ) -> None:
        """Rows of the cached experts and of the PCIe share. Two launches, four when experts may be
        missed and lie within the device's reach."""
        expert, made = self._experts[layer], self.buffers(len(x_TD))
        assert expert is not None, f"layer {layer} has no routed experts"
        hidden, groups = made.hidden[expert], made.gpu
        if missed and self._stage is not None:
            groups = self._stage.fetch(layer, groups)
        gate_up(expert, groups, x_TD, x_q, hidden)
        if missed and self._stage is not None:
            self._stage.settle()
        down(expert, groups, hidden, rows_RD, len(x_TD))

    def defer_below(self, below_L: Sequence[float]) -> None:
        """From the next window on, CPU rows of layer l with a smaller share of their token's weight
        are late: negative none, infinity all."""
        self.rules.below.copy_(torch.tensor(list(below_L)))

    def serve_natively(self, pool: CpuPool, store: ExpertStore) -> None:
        """Answer rings with the pool itself instead of the workers."""
        shake = self.handshake
        layers = [None if g is None else (g.shape, g.addresses()) for g in store.layers]
        self._server = Server(
            pool,
            shake.words.ctypes.data,
            shake.host_address(shake.ints_address),
            shake.x(1).data_ptr(),
            shake.out(False).data_ptr(),
            shake.out(True).data_ptr(),
            shake.x(1).shape[1],
            layers,
        )

    def answer_in_python(self) -> None:
        """Answer rings with the workers again, which tests replace."""
        self._server = None

    def serve_window(self, n_tokens: int, done: int, failed: Callable[[], str | None]) -> None:
        """Answer every ring of a window until the one of ``done``. StallError as for
        ``Handshake.next_ring``."""
        shake, last, quiet_us = self.handshake, 0, 0
        n_rows = n_tokens * max(self._n_active)
        while last < done:
            if self._server is None:
                last = shake.next_ring(last, failed)
                if last < done:
                    self.serve(last - 1, n_tokens)
                continue
            before = last
            last = self._server.serve(n_rows, last, done, POLL_US)
            quiet_us = quiet_us + POLL_US if last == before else 0
            if last < done:
                shake.require_life(last, failed, quiet_us / 1e6)

    def serve(self, layer: int, n_tokens: int) -> None:
        """Answer the ring of a layer: rows on time, then the late ones."""
        shake = self.handshake
        payload = shake.payload(n_tokens * max(self._n_active))
        x_TD = shake.x(n_tokens)
        for late in (False, True):
            part = payload.part(late)
            if part.counts[0]:
                worker = self.workers[HOST[late]]
                worker.begin(layer, _groups(part), x_TD, shake.out(late))
                worker.finish(layer)
            shake.answer(layer, late)

    def note(self, expert_LR: npt.NDArray[np.int32], place_LR: npt.NDArray[np.int8]) -> None:
        """What the window that just ended did, as its buffers say; they stay as they are until the
        next one runs."""
        self._last = (expert_LR, place_LR)
        self.counters.add(place_LR)

    def rows_used(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """(layer, expert) of every routed row of the last window, rows of a layer together."""
        assert self._last is not None, "no window has run"
        expert_LR, place_LR = self._last
        layers, rows = np.nonzero(place_LR >= 0)
        return layers.astype(np.int32), expert_LR[layers, rows]

    def experts_of(self, layer: int) -> npt.NDArray[np.int32]:
        """Experts of the layer's rows in the last window."""
        assert self._last is not None, "no window has run"
        expert_R, place_R = self._last[0][layer], self._last[1][layer]
        taken: npt.NDArray[np.int32] = expert_R[place_R >= 0]
        return taken

    def missed_shares(self, layer: int, n_tokens: int) -> npt.NDArray[np.float64]:
        """Of each expert that the CPU computed in the last window, of n_tokens: its heaviest row's
        share of its token's routing weight, f64 [groups]."""
        k = self._n_active[layer]
        plan, weight_R = self.of(layer), self.buffers(n_tokens).weight_LR[layer, : n_tokens * k]
        weight_TK = weight_R.view(n_tokens, k).to("cpu", torch.float64).numpy()
        share_R = (weight_TK / weight_TK.sum(axis=1, keepdims=True)).reshape(-1)
        found = [np.empty(0)]
        for place in (Place.CPU, Place.CPU_LATE):
            groups = plan.groups.get(place)
            if groups is not None:
                found.append(np.maximum.reduceat(share_R[groups.row], groups.start[:-1]))
        return np.concatenate(found)

    def of(self, layer: int) -> Plan:
        """The plan of a layer in the last window."""
        assert self._last is not None, "no window has run"
        expert_R, place_R = self._last[0][layer], self._last[1][layer].copy()
        k = self._n_active[layer]
        groups = {}
        for place in np.unique(place_R[place_R >= 0]):
            row = np.flatnonzero(place_R == place).astype(np.int32)
            distinct = np.unique(expert_R[row])
            order = np.concatenate([row[expert_R[row] == e] for e in distinct])
            sizes = [int((expert_R[row] == e).sum()) for e in distinct]
            start = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
            groups[Place(int(place))] = Groups(distinct, start, order, order // np.int32(k))
        return Plan(place_R, groups)

    def drain(self) -> None:
        """After an error: wait until no worker touches a buffer any more."""
        for worker in self.workers.values():
            for layer in range(len(self._n_active)):
                worker.finish(layer)


def _groups(part: Payload) -> Groups:
    return Groups(part.expert, part.start, part.row, part.token)


def _table(address_LE: Sequence[npt.NDArray[np.int64]], shape: torch.Size) -> npt.NDArray[np.int64]:
    table = np.zeros(tuple(shape), np.int64)
    for layer, addresses in enumerate(address_LE):
        table[layer, : len(addresses)] = addresses
    return table
