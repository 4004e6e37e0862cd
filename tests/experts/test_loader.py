"""Loading experts: the same bytes for any number of threads, honest progress, bounded memory."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from strata.core.errors import FormatError
from strata.experts.layouts import choose_layouts, impose_layouts
from strata.experts.loader import load_experts, peak_bytes
from strata.experts.pieces import PIECE_BYTES, cut
from strata.experts.store import store_bytes, stride_of
from strata.kernels.expert_rows.ref import matrices
from tests.experts.made_up import FileExperts, MadeUpExperts

STATUS = Path("/proc/self/status")
SMALL = MadeUpExperts(
    256, 64, 5, (("Q4_K", "Q6_K", "Q4_0"), None, ("F16", "IQ3_S", "MXFP4"), ("NVFP4",) * 3), True
)


def tiled(source):
    """All tiles that there are."""
    native = source.shapes()
    return choose_layouts(native, "tiles", reads_tiles=True, fits=lambda s: True).shapes


@pytest.mark.parametrize("shapes_of", [MadeUpExperts.shapes, tiled])
@pytest.mark.parametrize("workers", [1, 3])
def test_every_expert_is_in_its_place(shapes_of, workers):
    """Expectation: the source's own rows, decoded; biases and scales as the source gives them."""
    shapes = shapes_of(SMALL)
    store = load_experts(shapes, SMALL, workers=workers)
    assert store.layers[1] is None
    assert store.n_bytes == store_bytes(shapes)
    for layer in SMALL.layers:
        shape = store.layer(layer).shape
        for expert in range(5):
            blob = store.blob(layer, expert)
            for matrix, proj in zip(matrices(shape, blob), ("gate", "up", "down"), strict=True):
                expected = SMALL.weight(layer, expert, proj)
                np.testing.assert_array_equal(
                    matrix.dequantize(slice(None)), expected.dequantize(slice(None))
                )
                if shape.scale_offset >= 0:
                    assert matrix.scale == np.float32(SMALL.scale(layer, expert, proj))
            at = shape.down_bias_offset
            bias = blob[at : at + 4 * 256].view(torch.float32).numpy()
            np.testing.assert_array_equal(bias, SMALL.bias(layer, expert, "down"))


def test_pieces_cover_all_experts_once():
    """Expectation: every expert of every layer in one piece, of about 8 MiB, in order."""
    source = MadeUpExperts(2048, 768, 40, (("Q4_K",) * 3, None, ("Q8_0",) * 3))
    shapes = source.shapes()
    pieces = cut(shapes)
    for layer in (0, 2):
        covered = [e for p in pieces if p.layer == layer for e in range(p.first, p.stop)]
        assert covered == list(range(40))
    assert sum(p.n_bytes for p in pieces) == store_bytes(shapes)
    assert all(p.n_bytes <= max(PIECE_BYTES, stride_of(shapes[p.layer][0])) for p in pieces)
    assert cut([None]) == [] and load_experts([None], source).n_bytes == 0


@pytest.mark.parametrize("workers", [1, 4])
def test_progress_ascends_to_the_whole(workers, monkeypatch):
    """Expectation: what ``run_pieces`` promises, and store_bytes as the whole."""
    monkeypatch.setattr("strata.experts.pieces.PIECE_BYTES", 1)
    shapes, seen = SMALL.shapes(), []
    me = threading.current_thread()

    def progress(phase, done, total):
        assert threading.current_thread() is me
        seen.append((phase, done, total))

    load_experts(shapes, SMALL, progress, workers=workers)
    assert {(phase, total) for phase, _, total in seen} == {("experts", store_bytes(shapes))}
    done = [done for _, done, _ in seen]
    assert done[0] == 0 and done[-1] == store_bytes(shapes)
    assert done == sorted(done) and len(done) == 1 + 15


def test_the_first_error_ends_the_loading(monkeypatch):
    """A piece that fails is reported as it is, and what was not begun is not begun."""
    monkeypatch.setattr("strata.experts.pieces.PIECE_BYTES", 1)
    calls = []

    class Damaged(MadeUpExperts):
        def rows(self, layer, expert, proj):
            calls.append((layer, expert))
            time.sleep(0.002)
            if (layer, expert) == (0, 1):
                raise FormatError("this expert is damaged")
            return super().rows(layer, expert, proj)

    many = Damaged(256, 64, 200, (("Q4_K", "Q4_K", "Q8_0"),))
    with pytest.raises(FormatError, match="this expert is damaged"):
        load_experts(many.shapes(), many, workers=2)
    assert len(set(calls)) < 100


def anonymous_bytes():
    """This process's resident memory that is no file's."""
    lines = STATUS.read_text().splitlines()
    return int(next(x for x in lines if x.startswith("RssAnon:")).split()[1]) << 10


def anonymous_peak(work):
    """Most anonymous memory more than now while ``work`` runs; sampled every millisecond."""
    gc.collect()
    before, done, peak = anonymous_bytes(), threading.Event(), [0]

    def sample():
        while not done.wait(0.001):
            peak[0] = max(peak[0], anonymous_bytes() - before)

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        result = work()
    finally:
        done.set()
        sampler.join()
    return max(peak[0], anonymous_bytes() - before), result


@pytest.mark.skipif(not STATUS.exists(), reason="memory is read from /proc/self/status")
@pytest.mark.parametrize(
    "n_experts", [24, pytest.param(160, marks=pytest.mark.soak)], ids=["48MiB", "320MiB"]
)
@pytest.mark.parametrize("how", ["native", "tiles"])
def test_peak_memory_is_the_plan(tmp_path, n_experts, how):
    """Expectation: at most 1.1 times the planned bytes (the store and the threads' share)."""
    types = (("IQ4_NL", "Q4_0", "Q5_0"), ("IQ3_S", "IQ3_S", "Q4_K"))
    source = FileExperts(1024, 512, n_experts, types)
    source.write(tmp_path / "experts.bin")
    native = source.shapes()
    wanted = [("tiles",) * 3] * 2 if how == "tiles" else [None, None]
    shapes = impose_layouts(native, wanted)
    planned = store_bytes(shapes) + peak_bytes(shapes, 2)
    load_experts([(native[0][0], 1), None], source)  # what is loaded once stays
    peak, store = anonymous_peak(lambda: load_experts(shapes, source, workers=2))
    assert store.n_bytes == store_bytes(shapes)
    assert store_bytes(shapes) * 0.9 < peak <= 1.1 * planned
