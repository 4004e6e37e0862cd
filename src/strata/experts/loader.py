"""Fills the expert store from a checkpoint, streaming: at no time is more than one expert held twice."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from strata.core.errors import InputError
from strata.experts.store import ExpertLayer, ExpertStore, Progress, anonymous, stride_of
from strata.kernels.expert_rows import ExpertShape, layout
from strata.models.expert_source import ExpertSource
from strata.models.spec import ModelSpec, MoeSpec

PROJECTIONS = ("gate", "up", "down")


def expert_shapes(spec: ModelSpec, source: ExpertSource) -> list[tuple[ExpertShape, int] | None]:
    """(blob layout, experts) of each layer; None for layers without routed experts. Reads no weights."""
    shapes: list[tuple[ExpertShape, int] | None] = []
    for index, layer in enumerate(spec.layers):
        ffn = layer.ffn
        if not isinstance(ffn, MoeSpec):
            shapes.append(None)
            continue
        types = source.types(index)
        try:
            shape = layout(
                spec.d_model,
                ffn.width,
                types,
                bias=ffn.expert_bias,
                scales="NVFP4" in types,
                activation=ffn.activation,
                swiglu_limit=ffn.swiglu_limit,
            )
        except InputError as error:
            raise type(error)(f"layer {index}: {error}") from None
        shapes.append((shape, ffn.n_experts))
    return shapes


def load_experts(
    shapes: Sequence[tuple[ExpertShape, int] | None],
    source: ExpertSource,
    progress: Progress | None = None,
) -> ExpertStore:
    """Copy every expert into RAM."""
    total = sum(stride_of(s[0]) * s[1] for s in shapes if s is not None)
    done = 0
    layers: list[ExpertLayer | None] = []
    for index, entry in enumerate(shapes):
        if entry is None:
            layers.append(None)
            continue
        shape, n_experts = entry
        stride = stride_of(shape)
        blobs = anonymous(stride * n_experts).view(n_experts, stride)
        for expert in range(n_experts):
            fill_blob(blobs[expert].numpy(), shape, source, index, expert)
            done += stride
            if progress is not None and expert % 32 == 31:
                progress("experts", done, total)
        layers.append(ExpertLayer(shape, stride, blobs))
        if progress is not None:
            progress("experts", done, total)
    return ExpertStore(layers)


def fill_blob(
    blob: np.ndarray, shape: ExpertShape, source: ExpertSource, layer: int, expert: int
) -> None:
    """Write one expert's pieces at the offsets of its layout."""
    offsets = (shape.gate_offset, shape.up_offset, shape.down_offset)
    biases = (shape.gate_bias_offset, shape.up_bias_offset, shape.down_bias_offset)
    for projection, offset, bias_offset in zip(PROJECTIONS, offsets, biases, strict=True):
        rows = source.rows(layer, expert, projection)
        blob[offset : offset + rows.size] = rows.reshape(-1)
        if bias_offset >= 0:
            bias = source.bias(layer, expert, projection)
            raw = np.ascontiguousarray(bias, dtype=np.float32).view(np.uint8)
            blob[bias_offset : bias_offset + raw.size] = raw
    if shape.scale_offset >= 0:
        scales = [source.scale(layer, expert, p) for p in PROJECTIONS]
        raw = np.asarray(scales, dtype=np.float32).view(np.uint8)
        blob[shape.scale_offset : shape.scale_offset + raw.size] = raw
