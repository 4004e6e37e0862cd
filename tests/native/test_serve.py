"""The host's side of a window without Python: rings answered, rows on time before the late ones.

Expectation: expert_rows_contract for every row; the words by the definition in memory/handshake. A
thread stands for the device: it writes payloads, rings, and waits as a window would.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from strata.core.errors import EngineError
from strata.kernels.expert_rows import layout
from strata.memory.handshake import (
    RING,
    ROWS,
    ROWS_LATE,
    Handshake,
    PlainArea,
    area_bytes,
    raise_word,
    read_word,
)
from strata.native import CpuPool
from strata.native.serve import Server
from tests.kernels.test_linear import same_bits
from tests.native.kit import Batch, make_batch

D, N_TOKENS, PER_TOKEN, N_EXPERTS = 96, 3, 4, 9
N_ROWS = N_TOKENS * PER_TOKEN
LAYERS = (
    layout(D, 64, ("Q8_0", "Q8_0", "Q8_0")),
    None,
    layout(D, 160, ("Q4_0", "Q4_1", "Q8_0")),
)


def wait_for(shake: Handshake, word: int, value: int) -> None:
    limit = time.monotonic() + 10
    while read_word(shake.words, word) < value:
        assert time.monotonic() < limit, f"word {word} stays at {read_word(shake.words, word)}"


def ring(shake: Handshake, layer: int, batch: Batch, n_on_time: int) -> None:
    """Publish the batch, its first groups on time and the others late, and ring."""
    ints = shake._ints
    n_groups, entries = len(batch.expert), int(batch.start[n_on_time])
    ints[:4] = (n_on_time, entries, n_groups - n_on_time, len(batch.row) - entries)
    ints[4 : 4 + n_groups] = batch.expert
    starts = ints[4 + N_ROWS : 5 + 2 * N_ROWS]
    starts[:] = len(batch.row)
    starts[: n_groups + 1] = batch.start
    ints[5 + 2 * N_ROWS : 5 + 3 * N_ROWS] = batch.row
    ints[5 + 3 * N_ROWS : 5 + 4 * N_ROWS] = batch.token
    shake.x(N_TOKENS).copy_(batch.x_TD)
    for late in (False, True):
        shake.out(late).fill_(float("nan"))
    raise_word(shake.words, RING, layer + 1)


def server_of(pool: CpuPool, shake: Handshake, batches: list[Batch | None]) -> Server:
    layers = [
        None if b is None else (b.shape, np.array([x.data_ptr() for x in b.blobs], np.int64))
        for b in batches
    ]
    rows, late = shake.out(False).data_ptr(), shake.out(True).data_ptr()
    words = shake.words.ctypes.data
    return Server(pool, words, shake.ints_address, shake.x_address, rows, late, D, layers)


def batches_of(seed: int) -> list[Batch | None]:
    return [
        None if shape is None else make_batch(shape, N_EXPERTS, N_TOKENS, PER_TOKEN, seed + i)
        for i, shape in enumerate(LAYERS)
    ]


def serve(server: Server, done: int, ended: list[int]) -> None:
    ended.append(server.serve(N_ROWS, 0, done, 10_000_000))


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_ring_is_answered_with_the_contract_s_bits(workers: int, share: float) -> None:
    shake = Handshake(PlainArea(area_bytes(D, N_TOKENS, N_ROWS)), D, N_TOKENS, N_ROWS)
    pool = CpuPool(workers=workers)
    done = len(LAYERS) + 1
    for window in range(4):
        batches = batches_of(10 * window)
        server = server_of(pool, shake, batches)
        shake.start()
        ended: list[int] = []
        host = threading.Thread(target=serve, args=(server, done, ended))
        host.start()
        for layer, batch in enumerate(batches):
            if batch is None:
                continue
            n_on_time = round(share * len(batch.expert))
            ring(shake, layer, batch, n_on_time)
            expected, entries = batch.expected(), int(batch.start[n_on_time])
            for word, late, at in (
                (ROWS, False, slice(0, entries)),
                (ROWS_LATE, True, slice(entries, None)),
            ):
                wait_for(shake, word, layer + 1)
                rows = torch.from_numpy(batch.row[at].astype(np.int64))
                same_bits(shake.out(late)[rows], expected[rows])
                others = torch.ones(N_ROWS, dtype=torch.bool)
                others[rows] = False
                assert shake.out(late)[others].isnan().all()
        raise_word(shake.words, RING, done)
        host.join(10)
        assert ended == [done]
    pool.close()


def test_no_ring_within_the_limit_gives_the_last_one_back() -> None:
    shake = Handshake(PlainArea(area_bytes(D, N_TOKENS, N_ROWS)), D, N_TOKENS, N_ROWS)
    with_pool = CpuPool(workers=1)
    server = server_of(with_pool, shake, batches_of(0))
    assert server.serve(N_ROWS, 0, 4, 3000) == 0
    with_pool.close()


def test_a_ring_of_a_dense_layer_is_an_error() -> None:
    """Nothing can be computed for it; the engine would raise this instead of hanging."""
    shake = Handshake(PlainArea(area_bytes(D, N_TOKENS, N_ROWS)), D, N_TOKENS, N_ROWS)
    pool = CpuPool(workers=1)
    batches = batches_of(0)
    server = server_of(pool, shake, batches)
    assert batches[0] is not None
    ring(shake, 1, batches[0], 1)
    with pytest.raises((EngineError, RuntimeError, IndexError)):
        server.serve(N_ROWS, 0, 4, 1_000_000)
    pool.close()
