"""Expert batches: the contract's bits for any workers, beside other work, in any order."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.core.errors import EngineError, UnsupportedError
from strata.formats.weight_types import TYPES
from strata.kernels.expert_rows import ExpertShape, layout
from strata.kernels.linear import linear_contract
from strata.native import CpuPool
from tests.kernels.test_linear import make_weight, same_bits
from tests.native.kit import ISAS, Batch, make_batch, pool

Q = ("Q8_0", "Q8_0", "Q8_0")
SHAPES = {
    "plain": layout(96, 64, Q),
    "gpt_oss": layout(64, 32, ("MXFP4",) * 3, bias=True, activation="swiglu_oai"),
    "nvfp4": layout(128, 64, ("NVFP4",) * 3, scales=True),
    "published": layout(512, 640, ("IQ3_XXS", "IQ3_XXS", "IQ4_NL")),
    "q2_0_down": layout(256, 64, ("IQ2_S", "IQ3_S", "Q2_0")),
    "float": layout(70, 37, ("F32", "F16", "BF16"), bias=True),
    "float_gate": layout(64, 96, ("BF16", "Q4_0", "Q4_1")),
    "float_down": layout(64, 50, ("Q5_0", "Q5_1", "F32")),
    "fp8": layout(128, 128, ("F8_E4M3_B128",) * 3),
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", SHAPES)
def test_rows_equal_the_contract(name: str, isa: str) -> None:
    """Expectation: expert_rows_contract; down rows of 640 and 32, odd widths."""
    batch = make_batch(SHAPES[name], n_experts=6, n_tokens=5, per_token=3)
    same_bits(batch.run(pool(isa)), batch.expected())


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_any_worker_count_gives_the_same_bits(workers: int) -> None:
    """C16: expert widths (37, 160) that 7 does not divide. Expectation: expert_rows_contract."""
    for shape in (SHAPES["float"], layout(96, 160, ("Q4_0", "Q4_1", "Q8_0"))):
        batch = make_batch(shape, n_experts=9, n_tokens=4, per_token=4, seed=workers)
        expected = batch.expected()
        for _ in range(5):
            same_bits(batch.run(pool("auto", workers)), expected)


@settings(max_examples=30, deadline=None)
@given(
    types=st.tuples(*[st.sampled_from(sorted(t for t in TYPES if TYPES[t].kind != "integer"))] * 3),
    blocks=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 9), st.integers(1, 6)),
    bias=st.booleans(),
    scales=st.booleans(),
    activation=st.sampled_from(["silu", "swiglu_oai"]),
    isa=st.sampled_from(ISAS),
    workers=st.sampled_from([1, 2, 3]),
)
def test_odd_experts(types, blocks, sizes, bias, scales, activation, isa, workers) -> None:
    """Expectation: expert_rows_contract for every mixture of types, sizes and extras."""
    d_block = max(32, *(TYPES[t].block_weights for t in types[:2]))
    f_block = max(32, TYPES[types[2]].block_weights)
    d, f = -(-32 * blocks[0] // d_block) * d_block, -(-32 * blocks[1] // f_block) * f_block
    shape = layout(d, f, types, bias=bias, scales=scales, activation=activation)
    n_experts, n_tokens, per_token = sizes
    batch = make_batch(shape, n_experts, n_tokens, min(per_token, n_experts))
    same_bits(batch.run(pool(isa, workers)), batch.expected())


def test_one_expert_many_tokens() -> None:
    """Prompt chunks: 70 rows of one expert. Expectation: expert_rows_contract."""
    batch = make_batch(SHAPES["plain"], n_experts=1, n_tokens=70, per_token=1)
    same_bits(batch.run(pool()), batch.expected())


def test_rows_go_where_the_plan_says() -> None:
    """Rows of a larger buffer; others keep what they held. Expectation: expert_rows_contract."""
    batch = make_batch(SHAPES["plain"], n_experts=4, n_tokens=3, per_token=2)
    expected = batch.expected()
    place = np.array([7, 0, 4, 9, 2, 5], np.int32)
    out = torch.full((10, 96), float("nan"))
    out[1] = 3.0
    moved = make_batch(SHAPES["plain"], n_experts=4, n_tokens=3, per_token=2)
    moved.row = place[batch.row]
    pool().wait(moved.submit(pool(), out))
    same_bits(out[torch.from_numpy(place.astype(np.int64))], expected)
    assert (out[1] == 3.0).all()
    assert torch.isnan(out[[3, 6, 8]]).all()


def test_input_may_change_after_submit() -> None:
    """Expectation: rows of the values at submit, although x is poisoned at once."""
    for name in ("plain", "float"):
        batch = make_batch(SHAPES[name], n_experts=4, n_tokens=3, per_token=2)
        expected = batch.expected()
        out = batch.out()
        ticket = batch.submit(pool(), out)
        batch.x_TD.fill_(float("nan"))
        pool().wait(ticket)
        same_bits(out, expected)


def test_strided_rows() -> None:
    """x and out as columns of wider tensors. Expectation: the dense batch."""
    batch = make_batch(SHAPES["plain"], n_experts=4, n_tokens=3, per_token=2)
    expected = batch.expected()
    wide_x, wide_out = torch.zeros(3, 200), torch.full((6, 300), 5.0)
    wide_x[:, 4:100] = batch.x_TD
    batch.x_TD = wide_x[:, 4:100]
    pool().wait(batch.submit(pool(), wide_out[:, 8:104]))
    same_bits(wide_out[:, 8:104].contiguous(), expected)
    assert (wide_out[:, :8] == 5).all() and (wide_out[:, 104:] == 5).all()


def test_nan_stays_in_its_rows() -> None:
    """A NaN token fills its own rows; others keep their bits, and the pool lives on."""
    batch = make_batch(SHAPES["plain"], n_experts=4, n_tokens=3, per_token=2)
    clean = batch.expected()
    batch.x_TD[1, 17] = float("nan")
    rows = batch.run(pool())
    assert torch.isnan(rows[2:4]).all()
    same_bits(rows[[0, 1, 4, 5]], clean[[0, 1, 4, 5]])
    batch.x_TD[1, 17] = 1.0
    same_bits(batch.run(pool()), batch.expected())


def test_no_rows() -> None:
    """An empty plan is a ticket like any other; expectation: nothing happens."""
    out = torch.full((1, 96), 2.0)
    none = np.zeros(0, np.int32)
    ticket = pool().submit_experts(
        SHAPES["plain"],
        torch.zeros(1, 96),
        np.zeros(0, np.int64),
        np.zeros(1, np.int32),
        none,
        none,
        out,
    )
    pool().wait(ticket)
    assert (out == 2).all()


@pytest.mark.parametrize("bias", [False, True])
def test_experts_in_pieces(bias: bool) -> None:
    """Expectation: the rows of whole blobs; matrices, and biases with scales, lie apart and odd."""
    shape = layout(64, 96, ("Q8_0", "Q4_0", "Q5_1"), bias=bias, scales=True)
    batch = make_batch(shape, n_experts=6, n_tokens=4, per_token=3, seed=7)
    starts = [shape.gate_offset, shape.up_offset, shape.down_offset]
    rest = shape.gate_bias_offset if bias else shape.scale_offset
    starts.append(rest)
    ends = [start + size for start, size in zip(starts, shape.matrix_bytes, strict=False)]
    ends.append(shape.blob_bytes)
    pieces, bases = [], []
    for expert in batch.expert:
        blob = batch.blobs[int(expert)]
        for start, end in zip(starts, ends, strict=True):
            piece = torch.empty(end - start + 2, dtype=torch.uint8)[2:]
            pieces.append(piece.copy_(blob[start:end]))
            bases.append(piece.data_ptr() - start)
    expected = batch.expected()
    batch.address = np.array(bases, np.int64).reshape(-1, 4)
    same_bits(batch.run(pool()), expected)
    batch.address = batch.address[:, :3]
    with pytest.raises(EngineError, match=r"expert_addr.*expected contiguous int64 \[\d, 4\]"):
        batch.run(pool())


def slow_batch(groups: int = 200) -> Batch:
    """Many groups of one small expert: long work in little memory."""
    batch = make_batch(layout(256, 256, Q), n_experts=1, n_tokens=4, per_token=1)
    batch.address = np.repeat(batch.address, groups)
    batch.start = np.arange(0, 4 * groups + 1, 4, dtype=np.int32)
    batch.row = np.arange(4 * groups, dtype=np.int32)
    batch.token = np.tile(batch.token, groups)
    batch.expert = np.zeros(groups, np.int64)
    return batch


def test_submit_returns_at_once_and_workers_work_alone() -> None:
    """The batch ends although nobody waits. Expectation: rows equal a waited run."""
    batch = slow_batch()
    two = pool("portable", 2)
    out = batch.out()
    started = time.perf_counter()
    ticket = batch.submit(two, out)
    submitted_s = time.perf_counter() - started
    while not two.done(ticket):
        assert time.perf_counter() - started < 60
        time.sleep(0.005)
    assert submitted_s < (time.perf_counter() - started) / 2
    assert torch.equal(out, batch.run(pool("auto", 1)))


def test_one_worker_works_only_in_wait() -> None:
    """The waiting thread is the one worker: nothing is done before it waits."""
    batch = make_batch(SHAPES["plain"], n_experts=4, n_tokens=3, per_token=2)
    out = batch.out()
    one = pool("auto", 1)
    ticket = batch.submit(one, out)
    time.sleep(0.02)
    assert not one.done(ticket) and torch.isnan(out).all()
    one.wait(ticket)
    assert one.done(ticket)
    same_bits(out, batch.expected())


@pytest.mark.parametrize("workers", [1, 2])
def test_dense_product_overtakes_experts_in_flight(workers: int) -> None:
    """A linear called meanwhile is done first, with its own bits. Expectation: linear_contract."""
    batch, busy = slow_batch(), pool("portable", workers)
    out = batch.out()
    w = make_weight("Q4_0", 300, 256, np.random.default_rng(1))
    x = torch.from_numpy(np.random.default_rng(2).standard_normal((4, 256)).astype(np.float32))
    ticket = batch.submit(busy, out)
    y = busy.linear(w, x)
    finished_first = busy.done(ticket)
    busy.wait(ticket)
    assert not finished_first
    same_bits(y, linear_contract(x, w))
    assert torch.equal(out, batch.run(pool("auto", 1)))


def test_on_time_batch_overtakes_a_late_one() -> None:
    """Submitted second, done first. Expectation: the late one still runs when the other is done."""
    late, soon = slow_batch(400), make_batch(SHAPES["plain"], 4, 3, 2)
    two = pool("portable", 2)
    late_out, soon_out = late.out(), soon.out()
    late_ticket = late.submit(two, late_out, late=True)
    two.wait(soon.submit(two, soon_out))
    late_is_done = two.done(late_ticket)
    two.wait(late_ticket)
    assert not late_is_done
    same_bits(soon_out, soon.expected())
    assert torch.equal(late_out, late.run(pool("auto", 1)))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_many_tickets_waited_in_any_order(workers: int) -> None:
    """More batches in flight than the pool has places for. Expectation: expert_rows_contract."""
    busy = pool("auto", workers)
    batch = make_batch(SHAPES["plain"], n_experts=4, n_tokens=3, per_token=2)
    expected = batch.expected()
    outs = [batch.out() for _ in range(200)]
    tickets = [batch.submit(busy, out, late=i % 3 == 0) for i, out in enumerate(outs)]
    assert len(set(tickets)) == 200
    for i in np.random.default_rng(0).permutation(200):
        busy.wait(tickets[i])
        same_bits(outs[i], expected)
    busy.wait(tickets[0])  # again


def test_threads_share_a_pool() -> None:
    """Four Python threads, products and batches at once. Expectation: each its own bits."""
    batch = make_batch(SHAPES["plain"], n_experts=4, n_tokens=3, per_token=2)
    w = make_weight("Q8_0", 200, 96, np.random.default_rng(1))
    rows, y = batch.expected(), linear_contract(batch.x_TD, w)
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(50):
            if not torch.equal(batch.run(pool()), rows) or not torch.equal(
                pool().linear(w, batch.x_TD), y
            ):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_counters_move() -> None:
    """Expectation: each clock of the three phases and the wait has moved, work is counted."""
    mine = CpuPool(2)
    before = mine.counters()
    make_batch(SHAPES["published"], 4, 3, 2).run(mine)
    after = mine.counters()
    mine.close()
    # an idle worker may have gone to sleep before the first look
    assert not any(count for name, count in before.items() if name != "sleeps")
    assert after["works"] == 1 and after["tasks"] > 10
    assert after["quantize_ns"] > 0 and after["compute_ns"] > 0


def test_refusals() -> None:
    """Expectation: one clear line for what must not reach the extension."""
    batch = make_batch(SHAPES["plain"], n_experts=4, n_tokens=3, per_token=2)
    out = batch.out()

    def submit(**changes) -> None:
        fields = {
            n: changes.get(n, getattr(batch, n))
            for n in ("x_TD", "address", "start", "row", "token")
        }
        pool().submit_experts(
            changes.get("shape", batch.shape),
            fields["x_TD"],
            fields["address"],
            fields["start"],
            fields["row"],
            fields["token"],
            changes.get("out", out),
        )

    with pytest.raises(EngineError, match="token holds 2, allowed is 0 .. 1"):
        submit(x_TD=batch.x_TD[:2])
    with pytest.raises(EngineError, match="row holds 5, allowed is 0 .. 4"):
        submit(out=out[:5])
    with pytest.raises(EngineError, match="does not cut 6 entries"):
        submit(start=batch.start - 1)
    with pytest.raises(EngineError, match="row is int64"):
        submit(row=batch.row.astype(np.int64))
    with pytest.raises(EngineError, match="experts: x is"):
        submit(x_TD=torch.zeros(3, 95))
    with pytest.raises(EngineError, match="experts: out is"):
        submit(out=out.T.contiguous().T)
    odd = ExpertShape(**{**vars(batch.shape), "up_type": "I8"})
    with pytest.raises(UnsupportedError, match="I8"):
        submit(shape=odd)
    assert torch.isnan(out).all()
