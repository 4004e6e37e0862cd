"""Where the pages of memory lie on machines with several NUMA nodes.

A policy counts for pages that are written later; pages that have a place keep it. Preferences only:
where the system refuses (containers often do), the node of the thread that writes first decides.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
from collections.abc import Collection
from functools import cache
from typing import Any

import torch

_PREFERRED, _INTERLEAVE = 1, 3
_MBIND = {"x86_64": 237, "aarch64": 235}
_MOST_NODES = 1024


def prefer_node(memory: torch.Tensor, node: int) -> bool:
    """Ask for pages of one node; whether the system agreed."""
    return _set_policy(memory, _PREFERRED, (node,))


def interleave(memory: torch.Tensor, nodes: Collection[int]) -> bool:
    """Ask for pages of the nodes in turn; whether the system agreed."""
    return _set_policy(memory, _INTERLEAVE, nodes)


def _set_policy(memory: torch.Tensor, policy: int, nodes: Collection[int]) -> bool:
    """For the whole pages of a contiguous tensor; those it shares with others stay as they are."""
    call, number = _syscall(), _MBIND.get(platform.machine())
    if call is None or number is None or any(node >= _MOST_NODES for node in nodes):
        return False
    page = mmap.PAGESIZE
    start = -(-memory.data_ptr() // page) * page
    end = (memory.data_ptr() + memory.numel() * memory.element_size()) // page * page
    if end <= start:
        return True
    mask = sum(1 << node for node in set(nodes)).to_bytes(_MOST_NODES // 8, sys.byteorder)
    # the kernel reads one bit less than it is told
    return bool(call(number, start, end - start, policy, mask, _MOST_NODES + 1, 0) == 0)


@cache
def _syscall() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    call = ctypes.CDLL(None).syscall
    size = ctypes.c_size_t
    call.argtypes = [ctypes.c_long, size, size, ctypes.c_int, ctypes.c_char_p, size, ctypes.c_uint]
    call.restype = ctypes.c_long
    return call
