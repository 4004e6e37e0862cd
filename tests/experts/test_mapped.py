"""Experts left in the file: the same rows as from RAM, read ahead once, refused where re-coded.

Expectations: ``load_experts`` of the same source, and the numerics contract's reference.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from strata.core.errors import UnsupportedError
from strata.experts import mapped
from strata.experts.fast_tier import FastTier
from strata.experts.loader import load_experts
from strata.experts.mapped import RECENT, MappedLayer, ReadAhead, map_experts, mapped_bytes
from strata.experts.store import store_bytes
from strata.formats.paging import (
    page_in_memory,
    pages_in_memory,
    read_only_what_is_asked,
    will_need,
)
from strata.formats.weight_types import TYPES
from strata.kernels.expert_rows import expert_rows_contract
from strata.kernels.linear import linear_contract
from strata.kernels.weight import Weight
from strata.native import CpuPool, available_isas
from tests.experts.made_up import FileExperts, MadeUpExperts
from tests.kernels.test_linear import make_weight, same_bits


@pytest.fixture
def source(tmp_path):
    """Two layers with matrices of unequal sizes; biases, and in one layer scales."""
    types = (("Q4_0", "Q8_0", "MXFP4"), None, ("NVFP4", "Q4_1", "F16"))
    experts = FileExperts(64, 96, 6, types, True)
    experts.write(tmp_path / "experts.bin")
    return experts


def test_rows_are_those_of_ram(source):
    """Through the pool, from the addresses of pieces; the reference reads the blobs of RAM."""
    shapes = source.shapes()
    ram, disk = load_experts(shapes, source), map_experts(shapes, source)
    pool = CpuPool(2)
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((6, 64)).astype(np.float32))
    for layer in (0, 2):
        group = disk.layer(layer)
        out = torch.full((6, 64), float("nan"))
        chosen = np.array([4, 0, 5], np.int32)
        group.will_need(chosen)
        start = np.array([0, 1, 4, 6], np.int32)
        row = np.arange(6, dtype=np.int32)
        addresses = group.addresses()[chosen]
        assert addresses.shape == (3, 4)
        pool.wait(pool.submit_experts(group.shape, x, addresses, start, row, row, out))
        for g, expert in enumerate(chosen.tolist()):
            blob = ram.blob(layer, expert)
            assert torch.equal(disk.blob(layer, expert), blob)
            rows = slice(start[g], start[g + 1])
            same_bits(out[rows], expert_rows_contract(group.shape, blob, x[rows]))
    pool.close()


def test_bytes(source):
    """RAM holds biases and scales only; the rest is the file's size."""
    shapes = source.shapes()
    disk = map_experts(shapes, source)
    on_disk, extras = mapped_bytes(shapes)
    assert on_disk == Path(source.file.path).stat().st_size
    assert disk.n_bytes == extras < store_bytes(shapes) - on_disk + 1
    assert on_disk == sum(g.n_mapped_bytes for g in disk.layers if g is not None)


def test_the_fast_tier_takes_copies(source):
    """Expectation: the blob from RAM."""
    shapes = source.shapes()
    tier = FastTier(map_experts(shapes, source), 2)
    tier.impose([(0, 3), (2, 5)])
    for pair in ((0, 3), (2, 5)):
        blob = load_experts(shapes, source).blob(*pair)
        assert torch.equal(tier.slot_tensor(pair)[: len(blob)], blob)


def places(source, experts):
    """(address, bytes) of the experts' matrices, all gates first."""
    rows = [source.rows(0, e, proj) for proj in ("gate", "up", "down") for e in experts]
    return [(r.ctypes.data, r.nbytes) for r in rows]


def test_experts_are_read_ahead_once_in_a_while(source, monkeypatch):
    """Three matrices each, in the order in which they are read; not again within RECENT calls of
    the layer."""
    asked = []
    monkeypatch.setattr(mapped, "will_need_at", lambda *place: asked.append(place))
    group = MappedLayer(*source.shapes()[0], source, 0)
    group.will_need(np.array([1, 4], np.int32))
    assert asked == places(source, (1, 4))
    asked.clear()
    for _ in range(RECENT):
        group.will_need(np.array([4], np.int32))
    assert not asked
    group.will_need(np.array([1, 4], np.int32))
    assert asked == places(source, (1,))  # expert 1 was asked for too long ago


def test_a_system_that_tells_is_asked_each_time(source, monkeypatch):
    """Once a page was called missing, recent use proves nothing: what is missing is asked for; and
    nothing around it is read any more, in the areas of all layers' matrices, said once."""
    asked, areas, missing = [], [], set()
    monkeypatch.setattr(mapped, "will_need_at", lambda *place: asked.append(place))
    monkeypatch.setattr(mapped, "page_in_memory", lambda at: at not in missing)
    monkeypatch.setattr(mapped, "read_only_what_is_asked", lambda *area: areas.append(area))
    shapes = source.shapes()
    group, other = map_experts(shapes, source).layers[::2]
    four = np.array([4], np.int32)
    group.will_need(four)
    group.will_need(four)
    assert asked == places(source, (4,)) and not areas
    missing.add(sum(places(source, (4,))[1]) - 1)
    group.will_need(four)  # not seen: asked for a call ago
    assert asked == places(source, (4,)) and not areas
    missing.update(sum(place) - 1 for place in places(source, (2,)))
    group.will_need(np.array([2], np.int32))
    assert asked[3:] == places(source, (2,))
    inside = [any(a <= at and at + n <= a + size for a, size in areas)
              for at, n in places(source, range(6))]  # fmt: skip
    assert all(inside) and len(areas) == 6
    group.will_need(four)
    assert asked[6:] == places(source, (4,))[1:2] and len(areas) == 6
    other.will_need(four)
    assert len(asked) == 7


def test_areas_are_advised_for_real(tmp_path):
    """Any place and size does no harm; the bytes stay."""
    (tmp_path / "x").write_bytes(bytes(range(256)) * 100)
    view = np.memmap(tmp_path / "x", np.uint8, "r")
    read_only_what_is_asked(view.ctypes.data + 5, 20000)
    read_only_what_is_asked(view.ctypes.data, 0)
    np.testing.assert_array_equal(view, np.tile(np.arange(256, dtype=np.uint8), 100))


@pytest.mark.parametrize("tells", [True, None])
def test_what_is_in_memory_is_not_asked_for(monkeypatch, tells):
    """Once the system has called a page missing it is believed; where it says that all is there,
    or nothing at all, everything is asked for."""
    asked, there = [], {}
    monkeypatch.setattr(mapped, "will_need_at", lambda *place: asked.append(place))
    monkeypatch.setattr(mapped, "page_in_memory", lambda at: there.get(at, tells))
    read_ahead = ReadAhead()
    read_ahead([(0, 10), (100, 10)])
    assert asked == [(0, 10), (100, 10)]
    there[109] = False  # the last byte of the second
    read_ahead([(0, 10), (100, 10), (200, 10)])
    assert asked[2:4] == [(0, 10), (100, 10)]
    asked.clear()
    read_ahead([(0, 10), (100, 10), (200, 10)])
    assert asked == ([(100, 10)] if tells else [(0, 10), (100, 10), (200, 10)])


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="pages are counted on Linux")
def test_pages_of_a_file_are_counted(tmp_path):
    """Just written: all there. Expectation after dropping: what the system said one by one."""
    page = mmap.PAGESIZE
    path = tmp_path / "x"
    path.write_bytes(bytes(64 * page))
    view = np.memmap(path, np.uint8, "r")
    assert pages_in_memory(view) == (64, 64)
    assert pages_in_memory(view[page - 1 : page + 1]) == (2, 2)
    assert pages_in_memory(view[:0]) == (0, 0)
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    one_by_one = [page_in_memory(view.ctypes.data + i * page + 5) for i in range(64)]
    assert pages_in_memory(view) == (sum(one_by_one), 64)
    assert int(view[40 * page]) == 0
    assert page_in_memory(view.ctypes.data + 40 * page) is True


def test_hints_about_any_memory_do_no_harm(tmp_path):
    """Odd places, ends of mappings, nothing at all."""
    (tmp_path / "x").write_bytes(bytes(range(256)) * 100)
    view = np.memmap(tmp_path / "x", np.uint8, "r")
    for part in (view, view[5:7], view[:0], view[-1:], np.arange(9, dtype=np.uint8)):
        before = part.copy()
        will_need(part)
        np.testing.assert_array_equal(part, before)


def test_recoded_matrices_are_refused():
    """They are copies; the message names the layer and the matrix."""
    made_up = MadeUpExperts(64, 32, 2, (None, ("Q8_0",) * 3))
    with pytest.raises(UnsupportedError, match="--experts-on-disk: layer 1's gate matrices"):
        map_experts(made_up.shapes(), made_up)


@pytest.mark.skipif(not hasattr(mmap, "MAP_PRIVATE"), reason="needs pages without access")
@pytest.mark.parametrize("name", [t.name for t in TYPES.values() if t.kind != "integer"])
def test_kernels_read_no_byte_behind_a_matrix(name):
    """A file may end with a matrix: the page behind it has no access here. A read would crash."""
    n = max(128, TYPES[name].block_weights)
    w = make_weight(name, 5, n, np.random.default_rng(0))
    x = torch.from_numpy(np.random.default_rng(1).standard_normal((3, n)).astype(np.float32))
    size, page = w.data.numel(), mmap.PAGESIZE
    end = -(-size // page) * page
    area = mmap.mmap(-1, end + page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(area, dtype=torch.uint8)
    protect = ctypes.CDLL(None).mprotect
    behind = ctypes.c_void_p(memory.data_ptr() + end)
    assert protect(behind, ctypes.c_size_t(page), 0) == 0
    last = memory[end - size : end].copy_(w.data.reshape(-1)).view(5, -1)
    for isa in available_isas():
        pool = CpuPool(1, isa=isa)
        same_bits(pool.linear(Weight(name, 5, n, last), x), linear_contract(x, w))
        pool.close()
    assert protect(behind, ctypes.c_size_t(page), 3) == 0
