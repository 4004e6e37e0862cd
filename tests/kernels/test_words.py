"""Words: the host's half anywhere, the device's half on a GPU with a host that is slow, or dead.

Expectations: the rows a host thread wrote are what the next kernel reads, whatever the delay; a
host that never answers releases the device in bounded time and leaves the error word.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from strata.kernels.words import WORD_BYTES, raise_word, read_word


def test_words_stand_on_lines_of_their_own_and_only_grow() -> None:
    words = np.zeros(4 * WORD_BYTES // 4, dtype=np.uint32)
    raise_word(words, 2, 7)
    assert [read_word(words, i) for i in range(4)] == [0, 0, 7, 0]
    assert np.flatnonzero(words).tolist() == [32]
    with pytest.raises(AssertionError, match="would fall from 7 to 6"):
        raise_word(words, 2, 6)


@pytest.mark.gpu
@pytest.mark.parametrize("delay_s", [0.0, 0.005, 0.05])
def test_the_device_waits_for_a_slow_host(delay_s: float) -> None:
    torch = pytest.importorskip("torch")
    runtime = pytest.importorskip("cuda.bindings.runtime")
    from strata.kernels.words.triton import ring, wait
    from strata.memory.mapped import CudaDriver, MappedArea

    torch.cuda.init()
    area = MappedArea(CudaDriver(runtime), 1 << 16, RuntimeError)
    words = area.host.numpy()[:4096].view(np.uint32)
    rows = area.host[4096 : 4096 + 4 * 256].view(torch.float32)
    device_rows = as_device(torch, area.device_address(4096), 256)
    out = torch.full((8, 256), float("nan"), device="cuda")
    one = torch.ones(1, dtype=torch.int32, device="cuda")
    word = [area.device_address(i * WORD_BYTES) for i in range(3)]
    ring(word[0], 0, one)  # compile before the host starts its clock
    wait(word[1], 0, 10**9, word[2], one)
    torch.cuda.synchronize()

    def host() -> None:
        for layer in range(8):
            while read_word(words, 0) < layer + 1:
                time.sleep(0)
            time.sleep(delay_s)
            rows.fill_(float(layer))
            raise_word(words, 1, layer + 1)

    thread = threading.Thread(target=host)
    thread.start()
    for layer in range(8):
        ring(word[0], layer + 1, one)
        wait(word[1], layer + 1, 5 * 10**9, word[2], one)
        out[layer].copy_(device_rows)
    torch.cuda.synchronize()
    thread.join()
    assert read_word(words, 2) == 0
    assert out.cpu().tolist() == [[float(layer)] * 256 for layer in range(8)]
    area.close()


@pytest.mark.gpu
def test_a_dead_host_releases_the_device() -> None:
    torch = pytest.importorskip("torch")
    runtime = pytest.importorskip("cuda.bindings.runtime")
    from strata.kernels.words.triton import wait
    from strata.memory.mapped import CudaDriver, MappedArea

    torch.cuda.init()
    area = MappedArea(CudaDriver(runtime), 1 << 16, RuntimeError)
    words = area.host.numpy()[:4096].view(np.uint32)
    one = torch.ones(1, dtype=torch.int32, device="cuda")
    started = time.monotonic()
    wait(area.device_address(0), 3, 10**8, area.device_address(WORD_BYTES), one)
    wait(area.device_address(0), 3, 10**8, area.device_address(WORD_BYTES), 0 * one)
    torch.cuda.synchronize()
    assert 0.1 <= time.monotonic() - started < 20
    assert read_word(words, 1) == 3
    area.close()


def as_device(torch, address: int, n: int):
    """A float32 tensor over mapped memory as the device sees it."""

    class Pointer:
        __cuda_array_interface__ = {
            "shape": (n,),
            "typestr": "<f4",
            "data": (address, False),
            "version": 3,
        }

    return torch.as_tensor(Pointer(), device="cuda")
