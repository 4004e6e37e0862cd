"""The CPU pool: persistent C++ workers that compute products, experts, attention and recurrences.

Checks shapes and passes addresses; all work and all waiting happens without the interpreter lock. Knows no models, no
plans and no steps. Invariant: results have the same bits for any number of workers, any instruction set, any number of
rows at once.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from strata.core.errors import EngineError, SettingError, UnsupportedError
from strata.formats.weight_types import TYPES
from strata.native.extension import _native
from strata.native.isa import available_isas, pick_isa
from strata.native.rows import KERNEL_TYPES
from strata.native.topology import Topology, affinity_report, plan_affinity, read_topology


log = logging.getLogger("strata.native")

_FLOAT_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class WeightLike(Protocol):
    """A matrix as ``kernels.weight.Weight`` describes it."""

    @property
    def type(self) -> str: ...
    @property
    def n_rows(self) -> int: ...
    @property
    def n_cols(self) -> int: ...
    @property
    def data(self) -> torch.Tensor: ...
    @property
    def scale(self) -> float: ...


class ShapeLike(Protocol):
    """An expert's blob as ``kernels.expert_rows.ExpertShape`` describes it."""

    @property
    def d_model(self) -> int: ...
    @property
    def d_expert(self) -> int: ...
    @property
    def gate_type(self) -> str: ...
    @property
    def up_type(self) -> str: ...
    @property
    def down_type(self) -> str: ...
    @property
    def gate_offset(self) -> int: ...
    @property
    def up_offset(self) -> int: ...
    @property
    def down_offset(self) -> int: ...
    @property
    def gate_bias_offset(self) -> int: ...
    @property
    def up_bias_offset(self) -> int: ...
    @property
    def down_bias_offset(self) -> int: ...
    @property
    def scale_offset(self) -> int: ...
    @property
    def activation(self) -> str: ...
    @property
    def swiglu_limit(self) -> float: ...


class CpuPool:
    """``workers`` threads, the waiting thread among them: ``workers - 1`` are started and pinned.

    workers: default one per physical core that this process may use. cpus: the CPU of each worker (the first belongs
    to the calling thread and is not pinned); default: cores first, siblings last, NUMA nodes in turn. isa: "auto",
    "portable", "avx2" or "avx512". spin_us: how long an idle worker looks for work before it sleeps. flags, topology:
    pretended processor features and CPUs (tests). SettingError, before any work, for what cannot be.
    """

    def __init__(
        self,
        workers: int | None = None,
        cpus: Sequence[int] | None = None,
        isa: str = "auto",
        spin_us: int = 100,
        *,
        flags: Iterable[str] | None = None,
        topology: Topology | None = None,
    ) -> None:
        flags = None if flags is None else frozenset(flags)
        self.isa = pick_isa(isa, flags)
        topology = topology or read_topology()
        if workers is None:
            workers = topology.default_workers if cpus is None else len(cpus)
        if spin_us < 0:
            raise SettingError(f"spin time of {spin_us} us; it must be 0 or more")
        self.cpus = _checked_cpus(topology, workers, cpus)
        self.workers = workers
        self.affinity = affinity_report(topology, self.cpus)
        """One line per NUMA node: its workers and their CPUs."""
        self._pool = _native.Pool(
            self.isa, workers, self.cpus, spin_us, min(workers, topology.n_parallel)
        )
        self._close = weakref.finalize(self, self._pool.close)
        self._kept: dict[int, torch.Tensor] = {}
        self._layouts: dict[int, tuple[ShapeLike, _native.ExpertLayout]] = {}
        log.info(
            "CPU kernels: %s (available: %s); %s",
            self.isa,
            ", ".join(available_isas(flags)),
            "; ".join(self.affinity),
        )

    def linear(
        self, w: WeightLike, x_TK: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """y[T, N] = x[T, K] W^T * w.scale, f32; done on return, ahead of experts in flight."""
        n_tokens = x_TK.shape[0]
        _check(x_TK, "linear: x", torch.float32, (n_tokens, w.n_cols))
        row_bytes = _row_bytes(w.type, w.n_cols)
        _check(w.data, "linear: weight", torch.uint8, (w.n_rows, row_bytes))
        if out is None:
            out = x_TK.new_empty(n_tokens, w.n_rows)
        _check(out, "linear: out", torch.float32, (n_tokens, w.n_rows))
        _run(
            self._pool.linear,
            w.type,
            w.data.data_ptr(),
            w.n_rows,
            w.n_cols,
            w.scale,
            x_TK.data_ptr(),
            n_tokens,
            out.data_ptr(),
        )
        return out

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
    ) -> int:
        """Start the experts' rows and return a ticket at once.

        expert_addr int64 [G]: address of each distinct expert's blob; start int32 [G + 1]: group g's entries are
        start[g] .. start[g + 1] - 1; entry i computes activation row token[i] into out_RD[row[i]] (each row once).
        x_TD is read before the call returns; out_RD and the blobs must live, and out_RD be left alone, until wait().
        late: after batches that are not.
        """
        n, groups = len(row), len(expert_addr)
        for name, array, dtype, length in (
            ("expert_addr", expert_addr, np.int64, groups),
            ("start", start, np.int32, groups + 1),
            ("row", row, np.int32, n),
            ("token", token, np.int32, n),
        ):
            if array.dtype != dtype or array.shape != (length,) or not array.flags.c_contiguous:
                raise EngineError(
                    f"experts: {name} is {array.dtype} {list(array.shape)}, expected contiguous "
                    f"{np.dtype(dtype)} [{length}]"
                )
        _check(x_TD, "experts: x", torch.float32, (x_TD.shape[0], shape.d_model), rows_apart=True)
        _check(
            out_RD, "experts: out", torch.float32, (out_RD.shape[0], shape.d_model), rows_apart=True
        )
        _check_index("start", start, n + 1)
        if start[0] != 0 or start[-1] != n or (groups and int(np.diff(start).min()) < 0):
            raise EngineError(f"experts: start {start.tolist()} does not cut {n} entries into groups")
        if n:
            _check_index("token", token, x_TD.shape[0])
            _check_index("row", row, out_RD.shape[0])
        ticket: int = _run(
            self._pool.submit_experts,
            self._layout(shape),
            x_TD.data_ptr(),
            x_TD.stride(0),
            groups,
            expert_addr.ctypes.data,
            start.ctypes.data,
            n,
            row.ctypes.data,
            token.ctypes.data,
            out_RD.data_ptr(),
            out_RD.stride(0),
            late,
        )
        self._kept[ticket] = out_RD
        return ticket

    def wait(self, ticket: int) -> None:
        """Help until the batch is done; its rows are then written. A ticket may be waited for again."""
        _run(self._pool.wait, ticket)
        self._kept.pop(ticket, None)

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
    ) -> torch.Tensor:
        """``kernels/attention`` in f32: [T, H, dv]. Caches f32, f16 or bf16, both of one dtype; dims contiguous."""
        n_tokens, n_heads, dk = q_THd.shape
        n, groups, dv = v_nGv.shape
        _check(q_THd, "attention: q", torch.float32, (n_tokens, n_heads, dk))
        kind = _FLOAT_KINDS.get(k_nGd.dtype)
        fits = (
            k_nGd.shape == (n, groups, dk) and n == start + n_tokens and n_heads % groups == 0
        )
        plain = k_nGd.stride(2) == 1 and v_nGv.stride(2) == 1
        if kind is None or v_nGv.dtype != k_nGd.dtype or not fits or not plain:
            raise EngineError(
                f"attention: q {list(q_THd.shape)}, k {k_nGd.dtype} {list(k_nGd.shape)} and v {v_nGv.dtype} "
                f"{list(v_nGv.shape)} at start {start} do not belong together"
            )
        out = q_THd.new_empty(n_tokens, n_heads, dv)
        sinks = None if sinks_H is None else sinks_H.to(torch.float32).contiguous()
        if sinks is not None:
            _check(sinks, "attention: sinks", torch.float32, (n_heads,))
        if selected_Tn is not None:
            _check(selected_Tn, "attention: selected", selected_Tn.dtype, (n_tokens, n))
            if selected_Tn.dtype not in (torch.bool, torch.uint8):
                raise EngineError(f"attention: selected is {selected_Tn.dtype}, expected bool or uint8")
        args = _native.attention_args(
            q_THd.data_ptr(),
            k_nGd.data_ptr(),
            v_nGv.data_ptr(),
            kind,
            [k_nGd.stride(0), k_nGd.stride(1), v_nGv.stride(0), v_nGv.stride(1)],
            [n_tokens, n_heads, groups, dk, dv],
            start,
            scale,
            window_tokens or 0,
            0 if sinks is None else sinks.data_ptr(),
            0 if selected_Tn is None else selected_Tn.data_ptr(),
            out.data_ptr(),
        )
        _run(self._pool.attention, args)
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
    ) -> torch.Tensor:
        """``kernels/gdn`` recurrence in f32: o_TJV; the last state goes to state_out (which may be state_in)."""
        n_tokens, n_value_heads, dv = v_TJV.shape
        n_key_heads, dk = q_THK.shape[1:]
        for name, tensor, size in (
            ("q", q_THK, (n_tokens, n_key_heads, dk)),
            ("k", k_THK, (n_tokens, n_key_heads, dk)),
            ("v", v_TJV, (n_tokens, n_value_heads, dv)),
            ("keep", keep_TJ, (n_tokens, n_value_heads)),
            ("beta", beta_TJ, (n_tokens, n_value_heads)),
            ("state_in", state_in_JKV, (n_value_heads, dk, dv)),
            ("state_out", state_out_JKV, (n_value_heads, dk, dv)),
        ):
            _check(tensor, f"gdn: {name}", torch.float32, size)
        key_head = key_head_J.to(torch.int32).contiguous()
        _check(key_head, "gdn: key_head", torch.int32, (n_value_heads,))
        _check_index("key_head", key_head.numpy(), n_key_heads)
        out = torch.empty_like(v_TJV)
        if n_tokens == 0:
            state_out_JKV.copy_(state_in_JKV)
            return out
        args = _native.gdn_args(
            q_THK.data_ptr(),
            k_THK.data_ptr(),
            v_TJV.data_ptr(),
            keep_TJ.data_ptr(),
            beta_TJ.data_ptr(),
            key_head.data_ptr(),
            state_in_JKV.data_ptr(),
            state_out_JKV.data_ptr(),
            out.data_ptr(),
            [n_tokens, n_key_heads, n_value_heads, dk, dv],
        )
        _run(self._pool.gdn, args)
        return out

    def counters(self) -> dict[str, int]:
        """Since the start: quantize_ns, compute_ns (summed over workers), wait_ns, works, tasks, sleeps."""
        return self._pool.counters()

    def close(self) -> None:
        """Finish what is in flight and end the workers. Closing twice is fine."""
        self._close()
        self._kept.clear()

    def _layout(self, shape: ShapeLike) -> _native.ExpertLayout:
        """The extension's copy of an expert shape, made once per shape object."""
        known = self._layouts.get(id(shape))
        if known is not None:
            return known[1]
        for name in (shape.gate_type, shape.up_type):
            _row_bytes(name, shape.d_model)
        _row_bytes(shape.down_type, shape.d_expert)
        if shape.activation not in ("silu", "swiglu_oai"):
            raise UnsupportedError(f"experts: activation {shape.activation!r} has no kernel")
        layout = _native.expert_layout(
            shape.d_model,
            shape.d_expert,
            shape.gate_type,
            shape.up_type,
            shape.down_type,
            [
                shape.gate_offset,
                shape.up_offset,
                shape.down_offset,
                shape.gate_bias_offset,
                shape.up_bias_offset,
                shape.down_bias_offset,
                shape.scale_offset,
            ],
            shape.activation == "swiglu_oai",
            shape.swiglu_limit,
        )
        # the shape is kept so that its id is never given to another
        self._layouts[id(shape)] = (shape, layout)
        return layout


def _checked_cpus(topology: Topology, workers: int, cpus: Sequence[int] | None) -> list[int]:
    """The CPU of each worker, planned or as given."""
    if cpus is None:
        return plan_affinity(topology, workers)
    if workers < 1 or len(cpus) != workers:
        raise SettingError(f"{workers} CPU workers with {len(cpus)} CPUs; give one CPU per worker")
    unusable = sorted(set(cpus) - {cpu.id for cpu in topology.cpus})
    if unusable:
        raise SettingError(
            f"CPUs {unusable} are not among those this process may use: "
            f"{sorted(cpu.id for cpu in topology.cpus)}"
        )
    return list(cpus)


def _row_bytes(type_name: str, n_cols: int) -> int:
    """Bytes of a row that the kernels can read."""
    if type_name not in KERNEL_TYPES:
        raise UnsupportedError(f"no row kernels for weight type {type_name}")
    try:
        return TYPES[type_name].row_bytes(n_cols)
    except ValueError as error:
        raise EngineError(str(error)) from None


def _check(
    tensor: torch.Tensor,
    name: str,
    dtype: torch.dtype,
    size: tuple[int, ...],
    rows_apart: bool = False,
) -> None:
    """The extension reads raw memory, so everything about the tensor must be as said."""
    layout = (
        tensor.stride(1) == 1 if rows_apart and tensor.dim() == 2 else tensor.is_contiguous()
    )
    if (
        tensor.dtype != dtype
        or tuple(tensor.shape) != size
        or tensor.device.type != "cpu"
        or not layout
    ):
        raise EngineError(
            f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            f"{'' if layout else ' (not contiguous)'}, expected contiguous {dtype} {list(size)} on cpu"
        )


def _check_index(name: str, index: npt.NDArray[np.int32], end: int) -> None:
    """All of a non-empty index array in 0 .. end - 1."""
    if int(index.min()) < 0 or int(index.max()) >= end:
        raise EngineError(
            f"{name} holds {int(index.min())} .. {int(index.max())}, allowed is 0 .. {end - 1}"
        )


def _run(call: Callable[..., Any], *args: Any) -> Any:
    """Call the extension; its errors become ours."""
    try:
        return call(*args)
    except (RuntimeError, ValueError) as error:
        raise EngineError(str(error)) from None
