"""Policies of memory: what the system is asked, by hand; and asked for real, it stays usable."""

from __future__ import annotations

import mmap
import platform
import sys

import pytest
import torch

from strata.experts.store import anonymous
from strata.memory import numa
from strata.memory.numa import interleave, prefer_node

known = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "aarch64") or not sys.platform.startswith("linux"),
    reason="numbers of system calls are known for these",
)


@known
def test_what_the_system_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole pages only, policies 1 (preferred) and 3 (in turn), a bit for each node."""
    asked: list[tuple[int, ...]] = []

    def call(number, start, n_bytes, policy, mask, n_bits, flags):
        asked.append((start, n_bytes, policy, int.from_bytes(mask, sys.byteorder), flags))
        assert n_bits == 8 * len(mask) + 1
        return 0 if policy == 1 else -1

    monkeypatch.setattr(numa, "_syscall", lambda: call)
    page, memory = mmap.PAGESIZE, anonymous(10 * mmap.PAGESIZE)
    at = memory.data_ptr()
    assert prefer_node(memory[page - 1 : 4 * page + 7], 3) is True
    assert interleave(memory, (0, 2, 70)) is False
    assert asked == [
        (at + page, 3 * page, 1, 1 << 3, 0),
        (at, 10 * page, 3, 1 | 1 << 2 | 1 << 70, 0),
    ]
    assert prefer_node(memory[5:100], 0) is True and len(asked) == 2  # no whole page
    assert prefer_node(memory, 5000) is False and len(asked) == 2


def test_asked_for_real() -> None:
    """Node 0 is always there; whether a container may ask is its own matter."""
    memory = anonymous(1 << 20)
    assert prefer_node(memory, 0) in (True, False)
    assert interleave(memory, (0,)) in (True, False)
    memory.fill_(7)
    assert torch.equal(memory, torch.full((1 << 20,), 7, dtype=torch.uint8))
