"""The plain program: what one window does, layer by layer, before any feature moves a step.

    pre(l)   [ngram] -> attn_read -> mixer steps -> attn_write -> ffn_read -> router -> plan ->
    publish -> ring -> shared_expert
    post(l)  gpu_rows (cached) -> wait_cpu -> add_cpu_rows -> combine -> ffn_write

Deferral, repair, profiling and graphs are transformations of this list and live in files of their
own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from strata.core.types import Place
from strata.experts.service import ExpertService
from strata.kernels.ops import Ops
from strata.kernels.plan import Rule
from strata.memory.frame import BufferSpec, Frame
from strata.models.network import MoeFfn, Network
from strata.window.build import ProgramBuilder
from strata.window.program import Program, Wait

HOST_ROWS = {Place.CPU: "cpu_rows", Place.CPU_LATE: "cpu_rows_late"}
"""Where the host writes the rows of each of its places; a buffer exists only when a feature asks
for it."""


def window_buffers(network: Network) -> dict[str, BufferSpec]:
    """Every named buffer of the plain program."""
    spec, dtype = network.spec, network.dtype
    wide = BufferSpec((spec.d_model,), dtype)
    rows = BufferSpec((spec.d_model,), dtype, lead="R")
    buffers: dict[str, BufferSpec] = {
        "ids": BufferSpec((), torch.int64),
        "x": wide,
        "mixer_out": wide,
        "ffn_x": wide,
        "ffn_out": wide,
        "head_x": wide,
        "logits": BufferSpec((spec.n_vocab,), dtype, lead="H"),
    }
    if network.n_active:
        buffers |= {
            "expert": BufferSpec((), torch.int32, lead="R"),
            "weight": BufferSpec((), dtype, lead="R"),
            "shared_out": wide,
            "rows": rows,
            "cpu_rows": rows,
        }
    for ngram in network.ngrams.values():
        buffers["ngram_rows"] = BufferSpec((ngram.row_width,), dtype)
    buffers |= network.buffers()
    return buffers


def make_frame(
    network: Network,
    state: object,
    n_tokens: int,
    *,
    extra: Mapping[str, BufferSpec] | None = None,
    n_head: int | None = None,
    keep_inputs: bool = True,
) -> Frame:
    """Buffers for windows of n_tokens tokens over a SequenceState."""
    specs = window_buffers(network) | dict(extra or {})
    return Frame(
        n_tokens,
        max(network.n_active, 1),
        specs,
        network.buffer_layers(),
        state,  # type: ignore[arg-type]
        network.device,
        keep_inputs=keep_inputs,
        n_head=n_head,
    )


def plain_program(
    network: Network, frame: Frame, service: ExpertService, rules: Sequence[Rule] = ()
) -> Program:
    """The whole window in order, for the frame's number of tokens; rules go to every layer's
    plan."""
    spec = network.spec
    builder = ProgramBuilder(
        frame, spec.n_layers, owned=network.owned_names(), kept=("logits", "ids", "ngram_rows")
    )
    builder.part(0, network.residual.embed())
    for layer in range(spec.n_layers):
        _mixer_half(builder, network, layer)
        ffn = network.ffns[layer]
        if isinstance(ffn, MoeFfn):
            _moe_half(builder, network, layer, ffn, service, rules)
        else:
            builder.part(layer, network.residual.read("ffn", layer))
            builder.part(layer, ffn.part())
        builder.part(layer, network.residual.write("ffn", layer))
    builder.part(spec.n_layers, network.residual.head())
    builder.part(spec.n_layers, network.head_part())
    return builder.program()


def _mixer_half(builder: ProgramBuilder, network: Network, layer: int) -> None:
    if layer in network.ngrams:
        builder.part(layer, network.ngrams[layer].part())
    builder.part(layer, network.residual.read("attn", layer))
    for part in network.mixers[layer].parts():
        builder.part(layer, part)
    builder.part(layer, network.residual.write("attn", layer))


def _moe_half(
    builder: ProgramBuilder,
    network: Network,
    layer: int,
    ffn: MoeFfn,
    service: ExpertService,
    rules: Sequence[Rule],
) -> None:
    frame, n_active = builder.frame, ffn.spec.n_active
    n_rows = frame.T * n_active
    expert_R, weight_R = frame["expert"][:n_rows], frame["weight"][:n_rows]

    def plan() -> None:
        service.plan(layer, expert_R, weight_R, n_active, rules)

    builder.part(layer, network.residual.read("ffn", layer))
    builder.part(layer, ffn.router_part())
    builder.step("plan", layer, ("expert", "weight"), ("plan",), plan)
    host_rows = {p: frame[name] for p, name in HOST_ROWS.items() if name in frame.tensors()}
    builder.step("publish", layer, ("ffn_x", "plan"), ("payload",))
    builder.step(
        "ring",
        layer,
        ("payload",),
        (),
        lambda: service.ring(layer, frame["ffn_x"], host_rows),
        rings=True,
    )
    # without a GPU the payload is the activations themselves, so the host holds ffn_x too
    builder.step("host", layer, ("payload", "ffn_x"), ("cpu_rows",), stream="host")
    shared = ffn.shared_part()
    if shared is not None:
        builder.part(layer, shared)
    _moe_post(builder, network, layer, service, weight_R.view(frame.T, n_active))


def _moe_post(
    builder: ProgramBuilder,
    network: Network,
    layer: int,
    service: ExpertService,
    weight_TK: torch.Tensor,
) -> None:
    frame, ops = builder.frame, network.ops
    ffn = network.ffns[layer]
    assert isinstance(ffn, MoeFfn)
    with_shared = ffn.shared_part() is not None
    builder.step(
        "gpu_rows", layer, ("ffn_x", "plan"), ("rows",), lambda: _fast_rows(service, frame, layer)
    )
    builder.step(
        "wait_cpu",
        layer,
        (),
        (),
        lambda: service.wait(layer, Place.CPU),
        waits=(Wait("rows", layer),),
    )
    builder.step(
        "add_cpu_rows",
        layer,
        ("rows", "cpu_rows", "plan"),
        ("rows",),
        lambda: _add_rows(ops, service, frame, layer, Place.CPU, frame["cpu_rows"]),
    )
    builder.step(
        "combine",
        layer,
        ("rows", "weight", "plan", *(("shared_out",) if with_shared else ())),
        ("ffn_out",),
        partial(
            ops.combine,
            frame["rows"][: weight_TK.numel()],
            weight_TK,
            frame["shared_out"] if with_shared else None,
            frame["ffn_out"],
        ),
    )


def _fast_rows(service: ExpertService, frame: Frame, layer: int) -> None:
    frame["rows"].zero_()
    service.fast_rows(layer, frame["ffn_x"], frame["rows"])


def _add_rows(
    ops: Ops,
    service: ExpertService,
    frame: Frame,
    layer: int,
    place: Place,
    source_RD: torch.Tensor,
) -> None:
    groups = service.of(layer).groups.get(place)
    if groups is not None:
        ops.copy_rows(groups.row, source_RD, frame["rows"])
