"""The small native operations: near their torch references, the same bits for every T and ISA.

Expectations: ``kernels/<op>/ref.py`` in float64 where it is not integer work, within 1e-5 relative
to the largest number. Outputs begin as NaN, so that a number left out shows. A case runs 300 tokens
at once; token by token it must give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from strata.core.errors import EngineError
from strata.core.types import Place
from strata.kernels import gdn, hyper, ngram, pointwise, qsa, rotary
from strata.kernels.combine import combine, copy_rows
from strata.kernels.native_ops import native_ops
from strata.kernels.ops import Ops
from strata.kernels.plan import make_plan
from strata.kernels.plan.native import Planner
from strata.kernels.rms_norm import rms_norm
from strata.kernels.router import route_rows
from strata.native.fused_checks import _fused
from tests.native.kit import pool

T = 300
ISAS = ["portable", *(["auto"] if _fused.has_avx2() else [])]
OPS = {isa: native_ops(pool(isa, 1)) for isa in ISAS}
SPEC = SimpleNamespace(
    inv_freq=tuple(10000.0 ** (-i / 6) for i in range(6)), pairing="half", attention_factor=1.1
)
PAIRS = SimpleNamespace(inv_freq=SPEC.inv_freq, pairing="pairs", attention_factor=1.0)

Tensors = Sequence[torch.Tensor]


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def nan(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


@dataclass(frozen=True)
class Case:
    """An op on tokens [first, end): (ops, inputs cut to the tokens, start) -> outputs by token.

    run and expected get the same arguments; ``expected`` sees float64.
    """

    inputs: Tensors
    run: Callable[..., Tensors]
    expected: Callable[..., Tensors]
    rings: Tensors = field(default=())
    """State before the first token; every run works on a copy that goes on from run to run."""
    atol: float = 1e-5


def ring(entries: int, width: int, start: int, n_past: int, seed: int = 9) -> torch.Tensor:
    """NaN but for the n_past columns before start."""
    made = nan(entries, width)
    for p in range(max(0, start - n_past), start):
        made[p % entries] = draw(width, seed=seed + p)
    return made


START = 250  # the tables of rotary change at 256, rings wrap

H, J, K, V = 2, 6, 24, 20
CONV = {
    "taps_PN": draw(4, 2 * H * K + J * V, seed=1),
    "decay_J": -draw(J, seed=2).abs(),
    "dt_bias_J": draw(J, seed=3),
}


def conv_weights(dtype: torch.dtype) -> gdn.ConvWeights:
    return gdn.ConvWeights(
        **{k: v.to(dtype) for k, v in CONV.items()}, n_k_heads=H, n_v_heads=J, k_dim=K, v_dim=V
    )


def gdn_outs(n: int, dtype: torch.dtype) -> list[torch.Tensor]:
    sizes = ((H, K), (H, K), (J, V), (J,), (J,))
    return [nan(n, *size, dtype=dtype) for size in sizes]


def case_gdn_inputs(n_channels: int = 2 * H * K + J * V) -> Case:
    def call(op, rings, start, columns, a, b):
        out = gdn_outs(len(columns), columns.dtype)
        op(rings[0], start, columns, a, b, conv_weights(columns.dtype), out)
        return [*out, rings[0].expand(len(columns), *rings[0].shape)[-1:]]

    return Case(
        (draw(T, n_channels, seed=4), draw(T, J, seed=5, scale=9.0), draw(T, J, seed=6)),
        lambda ops, *args: call(ops.gdn_inputs, *args),
        lambda _, *args: call(gdn.inputs, *args),
        (ring(19, n_channels, START, 3),),
    )


def case_ngram(streams: int = 3, width: int = 21) -> Case:
    taps = draw(4, streams * width, seed=1)

    def call(gated, conv, rings, start, key, query, value, column, residual):
        u = gated(key, query, value)
        residual = residual.clone().flatten(1)
        conv(rings[0], start, column, taps.to(key.dtype), 3, u.flatten(1), residual)
        return u, residual

    inputs = [draw(T, streams, width, seed=s) for s in (2, 3)]
    inputs += [draw(T, width, seed=4), draw(T, streams * width, seed=5)]
    return Case(
        (*inputs, draw(T, streams, width, seed=6)),
        lambda ops, *args: call(ops.ngram_gate, ops.ngram_conv, *args),
        lambda _, *args: call(ngram.gated_value, ngram.add_convolved, *args),
        (ring(25, streams * width, START, 9),),
    )


def case_keys(dim: int = 20, r: int = 4) -> Case:
    weight = draw(dim, seed=1)

    def call(op, rings, start, raw):
        key = nan((START + T) // r, dim, dtype=raw.dtype)
        op(rings[0], start, raw, r, weight.to(raw.dtype), 1e-6, SPEC, key)
        done = [p // r if p % r == r - 1 else 0 for p in range(start, start + len(raw))]
        return [key[done].nan_to_num(7.0) if len(raw) else key[:0]]

    return Case(
        (draw(T, dim, seed=2),),
        lambda ops, *args: call(ops.append_keys, *args),
        lambda _, *args: call(qsa.append_keys, *args),
        (ring(r - 1 + 16, dim, START, r - 1),),
    )


def in_place(op, target: torch.Tensor, *args) -> Tensors:
    """The op on a copy of its target."""
    target = target.clone()
    op(target, *args)
    return [target]


def rotary_case(spec, normed: bool, cols: slice = slice(None)) -> Case:
    weight = draw(24, seed=1)[cols]

    def call(op, rings, start, x):
        out = nan(*x.shape[:2], 24, dtype=x.dtype)[..., cols]
        op(x[..., cols], weight.to(x.dtype) if normed else None, 1e-6, start, spec, out)
        return [out]

    return Case(
        (draw(T, 3, 24, seed=2),),
        lambda ops, *args: call(ops.head_rotary, *args),
        lambda _, *args: call(rotary.head_rotary, *args),
    )


def case_gates() -> Case:
    def call(op, rings, start, low, coeff):
        low, coeff = low.clone(), coeff.clone()
        op(low, coeff, 4)
        return low, coeff

    return Case(
        (draw(T, 10, seed=1, scale=20.0), draw(T, 4, seed=2, scale=20.0)),
        lambda ops, *args: call(ops.read_gates, *args),
        lambda _, *args: call(hyper.read_gates, *args),
    )


def plain_case(
    inputs: Tensors, run: Callable[..., torch.Tensor], ref: Callable[..., object]
) -> Case:
    """An op without start and rings, one output."""
    return Case(
        inputs,
        lambda ops, rings, start, *args: [run(ops, *args)],
        lambda _, rings, start, *args: [ref(*args)],
    )


WIDE, NORM = draw(T, 4, 37, seed=1), draw(4 * 37, seed=2)
CASES: dict[str, Callable[[], Case]] = {
    "rms_norm": lambda: plain_case(
        (WIDE.flatten(1),),
        lambda ops, x: ops.rms_norm(x, NORM, 1e-6, 4, nan(*x.shape)),
        lambda x: rms_norm(x, NORM.double(), 1e-6, 4),
    ),
    "read_gates": case_gates,
    "stream_mix": lambda: plain_case(
        (WIDE, draw(T, 4, 37, seed=3, scale=5.0)),
        lambda ops, x, g: ops.stream_mix(x, g, nan(len(x), 37)),
        hyper.mix,
    ),
    "stream_write": lambda: plain_case(
        (WIDE, draw(T, 37, seed=3), draw(T, 4, seed=4)),
        lambda ops, s, y, w: in_place(ops.stream_write, s, y, w)[0],
        lambda s, y, w: in_place(hyper.write, s, y, w)[0],
    ),
    "silu_times": lambda: plain_case(
        (draw(T, 45, seed=1, scale=20.0), draw(T, 45, seed=2)),
        lambda ops, g, u: in_place(ops.silu_times, g, u)[0],
        lambda g, u: in_place(pointwise.silu_times, g, u)[0],
    ),
    "sigmoid_times": lambda: plain_case(
        (WIDE, draw(T, 4, 37, seed=2, scale=9.0)),
        lambda ops, y, g: in_place(ops.sigmoid_times, y, g)[0],
        lambda y, g: in_place(pointwise.sigmoid_times, y, g)[0],
    ),
    "sigmoid_times_1": lambda: plain_case(
        (draw(T, 37), draw(T, 1, seed=2, scale=9.0)),
        lambda ops, y, g: in_place(ops.sigmoid_times, y, g)[0],
        lambda y, g: in_place(pointwise.sigmoid_times, y, g)[0],
    ),
    "gated_norm_silu": lambda: plain_case(
        (WIDE, draw(T, 4, 37, seed=3, scale=9.0)),
        lambda ops, o, z: ops.gated_norm(o, z, NORM[:37], 1e-6, "silu", nan(*o.shape)),
        lambda o, z: gdn.gated_norm(o, z, NORM[:37].double(), 1e-6, "silu"),
    ),
    "gated_norm_sigmoid": lambda: plain_case(
        (WIDE, draw(T, 4, 37, seed=3, scale=9.0)),
        lambda ops, o, z: ops.gated_norm(o, z, NORM[:37], 1e-6, "sigmoid", nan(*o.shape)),
        lambda o, z: gdn.gated_norm(o, z, NORM[:37].double(), 1e-6, "sigmoid"),
    ),
    "gdn_inputs": case_gdn_inputs,
    "ngram": case_ngram,
    "append_keys": case_keys,
    "head_rotary": lambda: rotary_case(SPEC, True),
    "head_rotary_pairs": lambda: rotary_case(PAIRS, False),
    "head_rotary_strided": lambda: rotary_case(SPEC, False, slice(8, None)),
}


def run_tokens(case: Case, op: Callable[..., Tensors], ops: Ops | None, cuts: Sequence[int],
               dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:  # fmt: skip
    """Outputs of all tokens, run in the given cuts."""
    rings = [r.to(dtype, copy=True) for r in case.rings]
    parts = []
    for first, end in zip([0, *cuts], [*cuts, T], strict=True):
        cut = [x[first:end].to(dtype) for x in case.inputs]
        parts.append(op(ops, rings, START + first, *cut))
    return [torch.cat(outs) for outs in zip(*parts, strict=True)]


@pytest.mark.parametrize("name", CASES)
def test_near_the_reference(name: str) -> None:
    case = CASES[name]()
    expected = run_tokens(case, case.expected, None, [], torch.float64)
    for got, wanted in zip(run_tokens(case, case.run, OPS["portable"], []), expected, strict=True):
        known = wanted.isfinite()  # ring entries that nobody wrote stay NaN
        assert torch.equal(got.isfinite(), known)
        assert (got - wanted)[known].abs().max() <= case.atol * wanted[known].abs().max()


@pytest.mark.parametrize("name", CASES)
def test_bits_depend_neither_on_tokens_at_once_nor_on_the_isa(name: str) -> None:
    """Expectation: 300 tokens at once with the portable build."""
    case = CASES[name]()
    expected = run_tokens(case, case.run, OPS["portable"], [])
    for ops in OPS.values():
        for cuts in ([], range(1, T), [1, 8, 16, 40, 290]):
            got = run_tokens(case, case.run, ops, list(cuts))
            if name == "gdn_inputs":  # the ring after the last run only
                assert torch.equal(got[-1][-1:].nan_to_num(), expected[-1].nan_to_num())
                got, wanted = got[:-1], expected[:-1]
            else:
                wanted = expected
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_caches_are_rounded_to_nearest_even(dtype: torch.dtype) -> None:
    """Against torch's conversion of the f32 result; subnormal, huge and special numbers too."""
    sizes = torch.logspace(-9, 6, 2000)
    special = torch.tensor([0.0, -0.0, 65504, 65519.9, 65520, 1e39, -1e39, float("nan")])
    ties = torch.arange(1, 2000) * 2**-25.0
    x = torch.cat([sizes, -sizes, special, ties, 1 + ties]).view(1, 1, -1)
    x = torch.nn.functional.pad(x, (0, x.shape[-1] % 2))
    still = SimpleNamespace(inv_freq=(0.0,), pairing="half", attention_factor=1.0)
    for ops in OPS.values():
        out = nan(1, 1, x.shape[-1], dtype=dtype)
        ops.head_rotary(x, None, 1e-6, 0, still, out)
        wanted = x.to(dtype)
        assert torch.equal(out.isnan(), wanted.isnan())
        assert torch.equal(
            out.nan_to_num(5.0).view(torch.int16), wanted.nan_to_num(5.0).view(torch.int16)
        )


RULES = [
    ("softmax", True, False, False, 1, 1),
    ("softmax", False, True, False, 1, 1),
    ("softmax_topk", False, True, False, 1, 1),
    ("sigmoid", True, False, True, 1, 1),
    ("sigmoid", True, False, True, 4, 2),
    ("sigmoid", False, False, False, 8, 3),
]


@pytest.mark.parametrize("rule", RULES)
def test_route(rule: tuple[str, bool, bool, bool, int, int]) -> None:
    """The reference's experts, ties by lower number, and its weights within 1e-6."""
    scoring, normalize, biased, corrected, n_groups, kept = rule
    spec = SimpleNamespace(
        n_active=6, scoring=scoring, normalize=normalize, scale=1.7, n_groups=n_groups,
        groups_kept=kept,
    )  # fmt: skip
    n_experts = 40
    # quarters: many ties among logits, and among scores
    logits = (4 * draw(T, n_experts)).round() / 4
    bias = (4 * draw(n_experts, seed=1)).round() / 4 if biased else None
    correction = (4 * draw(n_experts, seed=2)).round() / 8 if corrected else None
    n = T * spec.n_active
    results = {}
    for key, op in [("ref", route_rows), *((isa, ops.route) for isa, ops in OPS.items())]:
        expert, weight = torch.full((n,), -1, dtype=torch.int32), nan(n)
        op(logits, spec, bias, correction, expert, weight)
        results[key] = expert, weight
        for t in range(0, T, 37):
            one, w = torch.full((6,), -1, dtype=torch.int32), nan(6)
            op(logits[t : t + 1], spec, bias, correction, one, w)
            assert torch.equal(one, expert[6 * t : 6 * t + 6])
            assert torch.equal(w, weight[6 * t : 6 * t + 6])
    expert, weight = results.pop("ref")
    for got_expert, got_weight in results.values():
        assert torch.equal(got_expert, expert)
        torch.testing.assert_close(got_weight, weight, rtol=1e-6, atol=0)
        assert torch.equal(got_weight, results["portable"][1])


def test_route_of_nan_gives_nan_weights_and_experts_that_exist() -> None:
    """The router's docstring."""
    logits = draw(2, 16)
    logits[0, 3] = float("nan")
    logits[1] = float("nan")
    spec = SimpleNamespace(
        n_active=4, scoring="softmax", normalize=True, scale=1.0, n_groups=1, groups_kept=1
    )
    expert, weight = torch.full((8,), -1, dtype=torch.int32), torch.zeros(8)
    OPS["portable"].route(logits, spec, None, None, expert, weight)
    assert weight.isnan().all()
    assert int(expert.min()) >= 0 and int(expert.max()) < 16
    assert all(len(set(four.tolist())) == 4 for four in expert.view(2, 4))


@pytest.mark.parametrize("shared", [False, True])
def test_combine_has_the_bits_of_the_reference(shared: bool) -> None:
    """Contract section 6 fixes every rounding."""
    rows, weight = draw(T * 5, 37), draw(T, 5, seed=1)
    base = draw(T, 37, seed=2) if shared else None
    for ops in OPS.values():
        out = nan(T, 37)
        ops.combine(rows, weight, base, out)
        assert torch.equal(out, combine(rows, weight, None, base))


def test_copy_rows() -> None:
    """Against torch indexing; other rows stay."""
    index, source = np.array([5, 0, 3], np.int32), draw(7, 9)
    out, wanted = torch.ones(7, 9), torch.ones(7, 9)
    OPS["portable"].copy_rows(index, source, out)
    copy_rows(index, source, wanted)
    assert torch.equal(out, wanted)
    with pytest.raises(EngineError, match="holds 7, allowed is 0 .. 6"):
        OPS["portable"].copy_rows(np.array([7], np.int32), source, out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block_tokens, budget", [(4, 12), (1, 40), (7, 3)])
def test_select_blocks(dtype: torch.dtype, block_tokens: int, budget: int) -> None:
    """The reference's blocks on small integers: exact scores with many ties, cut by lower index."""
    start, dim = 120, 16
    q = draw(T, 3, dim).round()
    key = draw((start + T) // block_tokens, dim, seed=1).round().to(dtype)
    wanted = qsa.select_blocks(q.double(), key, start, block_tokens, budget)
    for ops in OPS.values():
        out = torch.full((T, budget), -7, dtype=torch.int32)
        ops.select_blocks(q, key, start, block_tokens, budget, out)
        assert torch.equal(out, wanted)
        for t in (0, 100, T - 1):
            one = torch.full((1, budget), -7, dtype=torch.int32)
            ops.select_blocks(q[t : t + 1], key, start + t, block_tokens, budget, one)
            assert torch.equal(one[0], wanted[t])
        n = start + T
        mask = qsa.token_mask(wanted, start, n, block_tokens)
        assert torch.equal(ops.token_mask(wanted, start, n, block_tokens), mask)


def test_select_blocks_of_real_numbers_keeps_the_best() -> None:
    """Scores recomputed in float64: no dropped block beats a kept one by more than rounding."""
    q, key, n, budget = draw(3, 4, 64), draw(2000, 64, seed=1), 2000, 100
    score = (q.double() @ key.double().t()).clamp_min(0).sum(1)
    kept_by = [ops.select_blocks(q, key, n - 3, 1, budget) for ops in OPS.values()]
    assert all(torch.equal(k, kept_by[0]) for k in kept_by)
    for t in range(3):
        kept = torch.zeros(n, dtype=torch.bool)
        kept[kept_by[0][t].long()] = True
        seen = torch.arange(n) < n - 3 + t + 1
        assert int(kept.sum()) == budget and bool((kept <= seen).all())
        assert score[t][kept].min() >= score[t][~kept & seen].max() - 1e-4


def test_plan_has_the_arrays_of_the_reference() -> None:
    """Every array of ``kernels/plan/ref`` for random rows and fast tiers."""
    rng, planner = np.random.default_rng(0), Planner()
    for _ in range(200):
        n_tokens, n_active, n_experts = rng.integers(1, 40), rng.integers(1, 9), rng.integers(9, 70)
        rows = [rng.permutation(n_experts)[:n_active] for _ in range(n_tokens)]
        expert_R = np.concatenate(rows).astype(np.int32)
        weight_R = rng.random(len(expert_R), np.float32)
        fast = np.where(rng.random(n_experts) < rng.choice([0, 0.3, 1]), 4096, 0).astype(np.int64)
        tensors = torch.from_numpy(expert_R), torch.from_numpy(weight_R)
        got = planner.plan(0, *tensors, int(n_active), fast)
        wanted = make_plan(0, expert_R, weight_R, int(n_active), fast)
        assert got.place_R.dtype == wanted.place_R.dtype == np.int8
        assert np.array_equal(got.place_R, wanted.place_R)
        assert list(got.groups) == list(wanted.groups)
        for place in wanted.groups:
            for name in ("expert_G", "start", "row", "token"):
                ours, theirs = (getattr(p.groups[place], name) for p in (got, wanted))
                assert ours.dtype == theirs.dtype == np.int32 and np.array_equal(ours, theirs)


def test_plan_with_rules_is_the_reference() -> None:
    """A rule moves every expert; a wrong expert number is refused."""
    planner, fast = Planner(), np.zeros(5, np.int64)
    expert_R = torch.tensor([3, 1, 3, 0], dtype=torch.int32)

    def late(draft) -> None:
        draft.place_G[:] = Place.CPU_LATE

    plan = planner.plan(0, expert_R, torch.ones(4), 2, fast, [late])
    assert list(plan.groups) == [Place.CPU_LATE]
    with pytest.raises(EngineError, match="row 1 is routed to expert 5 of 5"):
        wrong = torch.tensor([3, 5], dtype=torch.int32)
        planner.plan(0, wrong, torch.ones(2), 2, fast)


def test_tensors_that_do_not_fit_are_refused() -> None:
    """One line with what came and what was expected."""
    ops = OPS["portable"]
    with pytest.raises(EngineError, match="silu_times: up is torch.float64"):
        ops.silu_times(nan(2, 8), nan(2, 8, dtype=torch.float64))
    with pytest.raises(EngineError, match="stream_write: streams"):
        ops.stream_write(nan(2, 4, 16)[..., ::2], nan(2, 8), nan(2, 4))
    with pytest.raises(EngineError, match="expected 16 contiguous"):
        ops.stream_mix(nan(2, 4, 8), nan(2, 4, 8), nan(2, 7))
