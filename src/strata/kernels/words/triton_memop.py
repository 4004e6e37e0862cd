"""``--wait memop``: the stream itself waits for the host's word, and no program polls.

A memory operation has no condition: where a layer leaves the host nothing to do, the device raises
the word itself first. Nor has it a limit of its own: the host's ends it, by releasing every word.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import triton
import triton.language as tl

from strata.core.errors import UnsupportedError
from strata.kernels.triton_common import EXACT
from strata.kernels.words.triton import announce

_AT_LEAST = 0
"""The flag of the comparison word >= value, of signed differences."""


@triton.jit
def _nothing_kernel(word: tl.int64, value: tl.int32, count) -> None:
    # a word that was released stays as it is
    raised = tl.load(word.to(tl.pointer_type(tl.int32)), volatile=True) >= value
    if (tl.load(count) == 0) & (not raised):
        announce(word, value)


def wait(word: int, value: int, count: torch.Tensor) -> None:
    """Hold the current stream until the word at this device address is at least ``value``.

    count: int32 [1] on the device, what the host has to do; 0 waits for nothing. One launch and one
    memory operation. UnsupportedError when the driver refuses.
    """
    _nothing_kernel[(1,)](word, value, count, num_warps=1, **EXACT)
    driver: Any = importlib.import_module("cuda.bindings.driver")
    stream = torch.cuda.current_stream().cuda_stream
    (code,) = driver.cuStreamWaitValue32(stream, word, value, _AT_LEAST)
    if int(code):
        raise UnsupportedError(
            f"--wait memop: the driver refuses to wait for a word in memory ({code.name}); "
            "take --wait spin"
        )
