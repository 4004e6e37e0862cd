"""Fills the expert store from a checkpoint: pieces of it are read and re-coded on all cores, and
beyond the store each thread holds a matrix and some scratch at most."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from strata.core.errors import InputError
from strata.experts.nodes import place_on_nodes
from strata.experts.pieces import Piece, cut, run_pieces
from strata.experts.store import ExpertLayer, ExpertStore, Progress, anonymous, stride_of
from strata.formats.paging import will_need
from strata.kernels.expert_rows import ExpertShape, layout
from strata.models.expert_source import PROJS, ExpertSource
from strata.models.spec import ModelSpec, MoeSpec
from strata.native.recode import encode_into
from strata.native.topology import read_topology

SCRATCH_BYTES = 2 << 20
"""Temporaries of one thread that re-codes, generously."""


def expert_shapes(spec: ModelSpec, source: ExpertSource) -> list[tuple[ExpertShape, int] | None]:
    """(native blob layout, experts) of each layer; None for layers without routed experts. Reads no
    weights."""
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


def peak_bytes(shapes: Sequence[tuple[ExpertShape, int] | None], workers: int) -> int:
    """Most memory that loading takes beyond the store: per thread, a matrix and scratch."""
    blobs = [stride_of(entry[0]) for entry in shapes if entry is not None]
    return workers * (max(blobs) + SCRATCH_BYTES) if blobs else 0


def load_experts(
    shapes: Sequence[tuple[ExpertShape, int] | None],
    source: ExpertSource,
    progress: Progress | None = None,
    *,
    workers: int = 1,
) -> ExpertStore:
    """Every expert into RAM, in the layouts that the shapes say, on that many threads."""
    layers = empty_layers(shapes)

    def fill(piece: Piece) -> None:
        group = layers[piece.layer]
        for expert in range(piece.first, piece.stop):
            fill_blob(group.blobs[expert].numpy(), group.shape, source, piece.layer, expert)

    run_pieces(cut(shapes), fill, workers, "experts", progress)
    return ExpertStore([layers.get(index) for index in range(len(shapes))])


def empty_layers(shapes: Sequence[tuple[ExpertShape, int] | None]) -> dict[int, ExpertLayer]:
    """Zeroed memory for all experts; the system gives the pages when they are written, on all NUMA
    nodes."""
    layers: dict[int, ExpertLayer] = {}
    nodes = read_topology().nodes
    for index, entry in enumerate(shapes):
        if entry is not None:
            shape, n_experts = entry
            stride = stride_of(shape)
            blobs = anonymous(stride * n_experts).view(n_experts, stride)
            layers[index] = ExpertLayer(shape, stride, blobs)
            place_on_nodes(layers[index], nodes)
    return layers


def fill_blob(
    blob: NDArray[np.uint8], shape: ExpertShape, source: ExpertSource, layer: int, expert: int
) -> None:
    """Write one expert's pieces at the offsets of its layout."""
    offsets = (shape.gate_offset, shape.up_offset, shape.down_offset)
    matrices = [source.rows(layer, expert, proj) for proj in PROJS]
    for rows in matrices:
        will_need(rows)
    for i, rows in enumerate(matrices):
        place = blob[offsets[i] : offsets[i] + shape.matrix_bytes[i]]
        if shape.layouts[i] == "tiles":
            encode_into(shape.types[i], rows, place)
        else:
            place[:] = rows.reshape(-1)
    fill_extras(blob, 0, shape, source, layer, expert)


def fill_extras(
    memory: NDArray[np.uint8],
    start: int,
    shape: ExpertShape,
    source: ExpertSource,
    layer: int,
    expert: int,
) -> None:
    """Write one expert's biases and scales; ``memory`` holds the blob from byte ``start`` on."""
    biases = (shape.gate_bias_offset, shape.up_bias_offset, shape.down_bias_offset)
    for proj, offset in zip(PROJS, biases, strict=True):
        if offset >= 0:
            _put(memory, offset - start, source.bias(layer, expert, proj))
    if shape.scale_offset >= 0:
        scales = [source.scale(layer, expert, proj) for proj in PROJS]
        _put(memory, shape.scale_offset - start, scales)


def _put(
    blob: NDArray[np.uint8], offset: int, numbers: NDArray[np.float32] | list[float] | None
) -> None:
    """Numbers as f32 at that byte."""
    assert numbers is not None, "the model's settings promise a bias"
    raw = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint8)
    blob[offset : offset + raw.size] = raw
