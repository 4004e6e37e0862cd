"""The CPU pool: persistent C++ workers that compute products, experts, attention and recurrences.

Checks shapes and passes addresses; all work and all waiting happens without the interpreter lock.
Knows no models, no plans and no steps. Invariant: results have the same bits for any number of
workers, any instruction set and any number of rows at once.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from strata.core.errors import SettingError, UnsupportedError
from strata.formats.tiles import tile_plan
from strata.native.checks import check_array, check_tensor, row_bytes, run
from strata.native.extension import _native
from strata.native.fused_checks import at
from strata.native.isa import available_isas, pick_isa
from strata.native.measure import HandoverTimes, handover_times, read_seconds
from strata.native.mixer_args import attention_args, gdn_args
from strata.native.records import ShapeLike, WeightLike
from strata.native.topology import Topology, affinity_report, plan_affinity, read_topology

log = logging.getLogger("strata.native")


@dataclass(frozen=True)
class _Matrices:
    """Matrices multiplied with the same rows, as the extension knows them."""

    native: _native.Matrices
    kept: tuple[WeightLike, ...]
    n_cols: int
    n_rows: list[int]


class CpuPool:
    """``workers`` threads compute, the waiting thread among them; ``workers - 1`` are started.

    workers: default one per physical core that this process may use.
    cpus: the CPU of each worker; the first is for the calling thread, which is not pinned.
        Default: cores first, siblings last, NUMA nodes in turn.
    isa: "auto", "portable", "avx2", "avxvnni" or "avx512".
    spin_us: how long an idle worker looks for work before it sleeps.
    flags, topology: pretended processor features and CPUs (tests).
    SettingError, before any work, for what cannot be.
    """

    reads_tiles = True
    """Matrices may lie in tiles: ``Weight.layout``, the layouts of ``ExpertShape``."""

    def __init__(
        self,
        workers: int | None = None,
        cpus: Sequence[int] | None = None,
        isa: str = "auto",
        spin_us: int = 250,
        *,
        flags: Iterable[str] | None = None,
        topology: Topology | None = None,
    ) -> None:
        available = available_isas(flags)
        self.isa = pick_isa(isa, available)
        if spin_us < 0:
            raise SettingError(f"spin time of {spin_us} us; it must be 0 or more")
        topology = topology or read_topology()
        if workers is None:
            workers = topology.default_workers if cpus is None else len(cpus)
        self.workers = workers
        self.cpus = _checked_cpus(topology, workers, cpus)
        self._topology = topology
        self._node_bytes: Counter[int] = Counter()
        self.nodes = topology.nodes
        """NUMA nodes with workers' CPUs; a worker is at home on its CPU's."""
        node_of = {cpu.id: self.nodes.index(cpu.node) for cpu in topology.cpus}
        homes = [node_of[cpu] for cpu in self.cpus]
        spinners = min(workers, topology.n_parallel)
        self._pool = _native.Pool(self.isa, workers, self.cpus, homes, spin_us, spinners)
        self._close = weakref.finalize(self, self._pool.close)
        self._kept: dict[int, torch.Tensor] = {}
        self._layouts: dict[int, tuple[ShapeLike, _native.ExpertLayout]] = {}
        self._matrices: dict[tuple[int, ...], _Matrices] = {}
        log.info(
            "CPU kernels: %s (available: %s); %s",
            self.isa,
            ", ".join(available),
            "; ".join(affinity_report(topology, self.cpus)),
        )

    @property
    def affinity(self) -> list[str]:
        """One line per NUMA node: its workers, their CPUs, and the bytes told to lie there."""
        told = self._node_bytes if self._node_bytes else None
        return affinity_report(self._topology, self.cpus, told)

    def linear(
        self, w: WeightLike, x_TK: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """y[T, N] = x[T, K] W^T * w.scale in f32; done on return, ahead of experts in flight."""
        n_tokens = x_TK.shape[0]
        check_tensor(x_TK, "linear: x", torch.float32, (n_tokens, w.n_cols))
        if out is None:
            out = x_TK.new_empty(n_tokens, w.n_rows)
        check_tensor(out, "linear: out", torch.float32, (n_tokens, w.n_rows))
        self.linears((w,), x_TK, (out,))
        return out

    def linears(
        self, ws: Sequence[WeightLike], x_TK: torch.Tensor, outs: Sequence[torch.Tensor]
    ) -> None:
        """Products of the same rows with matrices of one width, at once; as ``linear`` one by one.

        outs[i]: contiguous, T * n_rows numbers in any shape. Matrices are kept as long as the pool.
        """
        known = self._matrices.get(tuple([id(w) for w in ws])) or self._known_matrices(ws)
        n_tokens = x_TK.shape[0]
        x = at(x_TK, n_tokens * known.n_cols, "linear: x")
        to = [at(o, n_tokens * n, "linear: out") for o, n in zip(outs, known.n_rows, strict=True)]
        run(self._pool.linears, known.native, x, n_tokens, to)

    def submit_experts(
        self,
        shape: ShapeLike,
        x_TD: torch.Tensor,
        expert_addr: npt.NDArray[np.int64],
        start: npt.NDArray[np.int32],
        row: npt.NDArray[np.int32],
        token: npt.NDArray[np.int32],
        out_RD: torch.Tensor,
        late: bool = False,
        layer: int = -1,
    ) -> int:
        """Start the experts' rows and return a ticket at once.

        expert_addr int64 [G]: address of each distinct expert's blob; or int64 [G, 4], for experts
        in pieces: what the shape's offsets of gate, of up, of down, and of biases and scales count
        from.
        start int32 [G + 1]: group g's entries are start[g] .. start[g + 1] - 1.
        row, token int32 [n]: entry i computes x_TD[token[i]] into out_RD[row[i]], each row once.
        x_TD is read before the call returns; the blobs must live, and out_RD be left alone, until
        wait(). late: after batches that are not. layer: whose counters grow (``count_layers``).
        """
        n, groups = len(row), len(expert_addr)
        apart = expert_addr.ndim == 2
        size = (groups, 4) if apart else (groups,)
        check_array(expert_addr, "experts: expert_addr", np.int64, *size)
        check_array(start, "experts: start", np.int32, groups + 1)
        check_array(row, "experts: row", np.int32, n)
        check_array(token, "experts: token", np.int32, n)
        width = shape.d_model
        check_tensor(x_TD, "experts: x", torch.float32, (x_TD.shape[0], width), rows_apart=True)
        check_tensor(
            out_RD, "experts: out", torch.float32, (out_RD.shape[0], width), rows_apart=True
        )
        ticket: int = run(
            self._pool.submit_experts_apart if apart else self._pool.submit_experts,
            self._layout(shape),
            x_TD.data_ptr(),
            x_TD.stride(0),
            x_TD.shape[0],
            groups,
            expert_addr.ctypes.data,
            start.ctypes.data,
            n,
            row.ctypes.data,
            token.ctypes.data,
            out_RD.data_ptr(),
            out_RD.stride(0),
            out_RD.shape[0],
            late,
            layer,
        )
        self._kept[ticket] = out_RD
        return ticket

    def wait(self, ticket: int) -> None:
        """Help until the batch is done and its rows are written. Waiting twice is fine."""
        run(self._pool.wait, ticket)
        self._kept.pop(ticket, None)

    def serve(
        self, server: _native.Server, n_rows: int, last: int, done: int, limit_us: int
    ) -> int:
        """``native.serve.Server.serve`` with this pool's workers and kernels."""
        return run(self._pool.serve, server, n_rows, last, done, limit_us)  # type: ignore[no-any-return]

    def done(self, ticket: int) -> bool:
        """Whether the batch is done already; never waits."""
        return self._pool.done(ticket)

    def attention(
        self,
        q_THd: torch.Tensor,
        k_nGd: torch.Tensor,
        v_nGv: torch.Tensor,
        start: int,
        scale: float,
        window_tokens: int | None = None,
        sinks_H: torch.Tensor | None = None,
        selected_Tn: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``kernels/attention`` in f32: [T, H, dv].

        Caches of one dtype, f32, f16 or bf16, their last axis contiguous; selected bool or uint8.
        """
        n_tokens, n_heads, _ = q_THd.shape
        size = (n_tokens, n_heads, v_nGv.shape[2])
        if out is None:
            out = q_THd.new_empty(size)
        check_tensor(out, "attention: out", torch.float32, size)
        sinks = None if sinks_H is None else sinks_H.to(torch.float32).contiguous()
        args = attention_args(
            q_THd, k_nGd, v_nGv, start, scale, window_tokens or 0, sinks, selected_Tn, out
        )
        run(self._pool.attention, args)
        return out

    def gdn_recurrence(
        self,
        q_THK: torch.Tensor,
        k_THK: torch.Tensor,
        v_TJV: torch.Tensor,
        keep_TJ: torch.Tensor,
        beta_TJ: torch.Tensor,
        key_head_J: torch.Tensor,
        state_in_JKV: torch.Tensor,
        state_out_JKV: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``kernels/gdn`` recurrence in f32: o_TJV; the last state goes to state_out."""
        if out is None:
            out = torch.empty_like(v_TJV)
        check_tensor(out, "gdn: out", torch.float32, tuple(v_TJV.shape))
        key_head = key_head_J.to(torch.int32).contiguous()
        args = gdn_args(
            q_THK, k_THK, v_TJV, keep_TJ, beta_TJ, key_head, state_in_JKV, state_out_JKV, out
        )
        if v_TJV.shape[0] == 0:
            state_out_JKV.copy_(state_in_JKV)
        else:
            run(self._pool.gdn, args)
        return out

    def counters(self) -> dict[str, int]:
        """Since the start, all layers and dense products together.

        plan_ns (making batches of experts), quantize_ns and compute_ns (sums over the workers),
        wait_ns (waiting threads without a task), works, tasks, strays (tasks run on another node
        than their expert's), sleeps.
        """
        return self._pool.counters()

    def count_layers(self, n: int) -> None:
        """From now on count batches of experts by layer too, 0 .. n - 1 (at most 511 layers)."""
        run(self._pool.count_layers, n)

    def layer_counters(self) -> list[dict[str, int]]:
        """As ``counters``, of each layer's experts alone (sleeps are not told apart)."""
        return self._pool.layer_counters()

    def set_node(self, memory: torch.Tensor, node: int) -> None:
        """Tell that experts in this memory lie on a NUMA node: its workers compute them first.

        Nothing may be in flight. SettingError for a node without workers' CPUs, EngineError for
        memory told twice.
        """
        if node not in self.nodes:
            raise SettingError(f"NUMA node {node} has no CPU of this pool; nodes: {self.nodes}")
        n_bytes = memory.numel() * memory.element_size()
        run(self._pool.add_home, memory.data_ptr(), n_bytes, self.nodes.index(node))
        self._node_bytes[node] += n_bytes

    def measure_handover(self, n: int, pause_us: int = 0) -> HandoverTimes:
        """Times of n empty jobs in which every worker takes part, from C++ and from Python.

        pause_us: slept before each job; longer than ``spin_us``, so that workers must be woken.
        """
        return handover_times(self._pool, n, pause_us)

    def measure_read(self, memory: torch.Tensor, times: int = 1) -> list[float]:
        """Seconds of reading all bytes of a contiguous tensor with all workers, once per pass."""
        return read_seconds(self._pool, memory, times)

    def close(self) -> None:
        """Finish what is in flight and end the workers. Closing twice is fine."""
        self._close()
        self._kept.clear()

    def _known_matrices(self, ws: Sequence[WeightLike]) -> _Matrices:
        """Checked once; matrices are kept so that their ids are never given to others."""
        native = _native.Matrices()
        for w in ws:
            check_tensor(w.data, "linear: weight", torch.uint8, _data_size(w))
            tiles = w.layout == "tiles"
            run(native.add, w.type, w.data.data_ptr(), w.n_rows, w.n_cols, w.scale, tiles)
        made = _Matrices(native, tuple(ws), ws[0].n_cols, [w.n_rows for w in ws])
        self._matrices[tuple([id(w) for w in ws])] = made
        return made

    def _layout(self, shape: ShapeLike) -> _native.ExpertLayout:
        """The extension's copy of an expert shape, made once per shape object."""
        known = self._layouts.get(id(shape))
        if known is None:
            # the shape is kept so that its id is never given to another
            known = self._layouts[id(shape)] = (shape, native_layout(shape))
        return known[1]


def _data_size(w: WeightLike) -> tuple[int, ...]:
    """Of a matrix's bytes; UnsupportedError for a type without kernels (tiles: without tiles)."""
    per_row = row_bytes(w.type, w.n_cols)
    if w.layout == "tiles":
        return (tile_plan(w.type, w.n_rows, w.n_cols).n_bytes,)
    return w.n_rows, per_row


def native_layout(shape: ShapeLike) -> _native.ExpertLayout:
    """UnsupportedError for a type or activation without kernels."""
    for name in (shape.gate_type, shape.up_type):
        row_bytes(name, shape.d_model)
    row_bytes(shape.down_type, shape.d_expert)
    if shape.activation not in ("silu", "swiglu_oai"):
        raise UnsupportedError(f"experts: activation {shape.activation!r} has no kernel")
    offsets = [
        shape.gate_offset,
        shape.up_offset,
        shape.down_offset,
        shape.gate_bias_offset,
        shape.up_bias_offset,
        shape.down_bias_offset,
        shape.scale_offset,
    ]
    return _native.expert_layout(
        shape.d_model,
        shape.d_expert,
        shape.gate_type,
        shape.up_type,
        shape.down_type,
        offsets,
        shape.activation == "swiglu_oai",
        shape.swiglu_limit,
        [layout == "tiles" for layout in (shape.gate_layout, shape.up_layout, shape.down_layout)],
    )


def _checked_cpus(topology: Topology, workers: int, cpus: Sequence[int] | None) -> list[int]:
    """The CPU of each worker, planned or as given."""
    if cpus is None:
        return plan_affinity(topology, workers)
    if workers < 1 or len(cpus) != workers:
        raise SettingError(f"{workers} CPU workers with {len(cpus)} CPUs; give one CPU per worker")
    usable = {cpu.id for cpu in topology.cpus}
    if not usable.issuperset(cpus):
        raise SettingError(
            f"CPUs {sorted(set(cpus) - usable)} are not among those this process may use: "
            f"{sorted(usable)}"
        )
    return list(cpus)
