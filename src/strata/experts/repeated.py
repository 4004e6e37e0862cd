"""Fills the expert store of a made-up model, whose experts repeat: each is re-coded once per layer
and then copied, so that filling goes at the speed of memory. Every expert has memory of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from strata.experts.loader import empty_layers, fill_blob
from strata.experts.pieces import Piece, cut, run_pieces
from strata.experts.store import ExpertStore, Progress
from strata.kernels.expert_rows import ExpertShape
from strata.models.expert_source import ExpertSource


def load_repeated(
    shapes: Sequence[tuple[ExpertShape, int] | None],
    source: ExpertSource,
    twin: Callable[[int], int],
    progress: Progress | None = None,
    *,
    workers: int = 1,
) -> ExpertStore:
    """Every expert into RAM, in the layouts that the shapes say, on that many threads.

    twin(e) <= e is the expert whose bytes e has.
    """
    layers = empty_layers(shapes)

    def first(piece: Piece) -> None:
        group = layers[piece.layer]
        for expert in range(piece.first, piece.stop):
            if twin(expert) == expert:
                blob = group.blobs[expert].numpy()
                fill_blob(blob, group.shape, source, piece.layer, expert)

    def others(piece: Piece) -> None:
        blobs = layers[piece.layer].blobs
        for expert in range(piece.first, piece.stop):
            if twin(expert) != expert:
                blobs[expert].copy_(blobs[twin(expert)])

    pieces = cut(shapes)
    run_pieces(pieces, first, workers, "experts made up", progress)
    run_pieces(pieces, others, workers, "experts", progress)
    return ExpertStore([layers.get(index) for index in range(len(shapes))])
