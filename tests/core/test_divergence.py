"""Divergences against sums written out here, hand values, and the edge cases of C48."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest

from strata.core.divergence import (
    Vocabulary,
    compare,
    kl,
    kl_top,
    kl_top_lists,
    log_softmax,
    require_same_vocabulary,
)
from strata.core.errors import InputError, NumericsError


def random_rows(n: int, width: int, seed: int = 0, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(n, width)) * spread).astype(np.float32)


def test_hand_values() -> None:
    # KL of (1/2, 1/2) to (1/4, 3/4) is ln 2 - ln 3 / 2
    p, q = np.log([0.5, 0.5]), np.log([0.25, 0.75])
    assert kl(p, q) == pytest.approx(math.log(2) - math.log(3) / 2, rel=1e-12)
    # top 1 and the rest of (1/2, 1/4, 1/4) to (1/4, 1/2, 1/4): (1/2, 1/2) to (1/4, 3/4)
    p, q = np.log([0.5, 0.25, 0.25]), np.log([0.25, 0.5, 0.25])
    assert kl_top(p, q, 1) == pytest.approx(math.log(2) - math.log(3) / 2, rel=1e-12)


def test_full_and_top_kl_equal_plain_sums() -> None:
    a, b = random_rows(6, 300, 1), random_rows(6, 300, 2)
    result = compare(a, b)
    for t in range(6):
        p, q = (np.exp(x[t].astype(float)) / np.exp(x[t].astype(float)).sum() for x in (a, b))
        assert result.kl[t] == pytest.approx((p * np.log(p / q)).sum(), rel=1e-9)
        order = np.argsort(-p)[:20]
        rest_p, rest_q = 1 - p[order].sum(), 1 - q[order].sum()
        plain = (p[order] * np.log(p[order] / q[order])).sum() + rest_p * np.log(rest_p / rest_q)
        assert result.kl_top[t] == pytest.approx(plain, rel=1e-9)
        assert result.top1[t] == (p.argmax() == q.argmax())


def test_top_kl_never_exceeds_full_kl() -> None:
    # merging tokens into a bucket can only lose distinction (the log-sum inequality)
    result = compare(random_rows(50, 200, 3), random_rows(50, 200, 4))
    assert (result.kl_top <= result.kl + 1e-12).all()


def test_kl_with_itself_through_a_file_is_nothing() -> None:
    """C48: 150,000 tokens, one very peaked row, stored as float32 log-probabilities."""
    rows = random_rows(3, 150_000)
    rows[1, 77] = 90.0
    stored = np.stack([log_softmax(row) for row in rows]).astype(np.float32)
    file = io.BytesIO()
    np.save(file, stored)
    file.seek(0)
    again = np.load(file)
    result = compare(rows, again)
    assert result.kl.max() <= 1e-6 and result.kl_top.max() <= 1e-6
    assert result.top1.all()
    # the text form keeps six decimals of the twenty likeliest
    for t in range(3):
        p = log_softmax(rows[t])
        top = np.argsort(-p)[:20]
        assert kl_top_lists(p[top], np.round(p[top], 6)) <= 1e-6


def test_suppressed_tokens_in_both_are_finite() -> None:
    a, b = random_rows(4, 50, 5), random_rows(4, 50, 6)
    a[:, 10:20] = b[:, 10:20] = -np.inf
    result = compare(a, b)
    assert np.isfinite(result.kl).all() and np.isfinite(result.kl_top).all()
    keep = np.r_[0:10, 20:50]
    np.testing.assert_allclose(result.kl, compare(a[:, keep], b[:, keep]).kl, rtol=1e-12)


def test_a_token_that_only_the_other_rules_out_costs_everything() -> None:
    a, b = random_rows(1, 50, 7), random_rows(1, 50, 8)
    b[0, int(a[0].argmax())] = -np.inf
    assert np.isinf(compare(a, b).kl[0])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_nan_in_either_names_the_position(bad: float, side: int) -> None:
    rows = [random_rows(5, 40, 1), random_rows(5, 40, 2)]
    rows[side][3, 8] = bad
    with pytest.raises(NumericsError, match=("first", "second")[side] + ": position 103 "):
        compare(*rows, positions=range(100, 105), names=("first", "second"))


def test_a_row_without_any_token_is_an_error() -> None:
    with pytest.raises(NumericsError, match="position 9 "):
        log_softmax(np.full(4, -np.inf), 9)


def test_other_vocabularies_and_lengths_are_errors_that_name_both() -> None:
    with pytest.raises(InputError, match=r"old has 40 .* new has 41 "):
        compare(random_rows(2, 40), random_rows(2, 41), names=("old", "new"))
    with pytest.raises(InputError, match=r"old has 2 positions, new has 3"):
        compare(random_rows(2, 40), random_rows(3, 40), names=("old", "new"))
    with pytest.raises(InputError, match=r"a has 5 .*\(tokenizer x\), b has 5 \(tokenizer y\)"):
        require_same_vocabulary(Vocabulary("a", 5, "x"), Vocabulary("b", 5, "y"))
    require_same_vocabulary(Vocabulary("a", 5, "x"), Vocabulary("b", 5))
    with pytest.raises(InputError, match="shape"):
        compare(random_rows(0, 4), random_rows(0, 4))


def test_buckets_hold_means_by_position() -> None:
    positions = [0, 7, 8, 63, 64, 639, 640, 5000]
    a, b = random_rows(8, 30, 9), random_rows(8, 30, 10)
    result = compare(a, b, positions=positions)
    buckets = result.buckets()
    assert [(x.positions, x.n) for x in buckets] == [
        ("0-7", 2), ("8-63", 2), ("64-639", 2), ("640+", 2), ("all", 8),
    ]  # fmt: skip
    for i, bucket in enumerate(buckets[:4]):
        assert bucket.kl == pytest.approx(result.kl[2 * i : 2 * i + 2].mean())
        assert bucket.kl_top == pytest.approx(result.kl_top[2 * i : 2 * i + 2].mean())
    assert buckets[-1].top1 == pytest.approx(result.top1.mean())
    short = compare(a[:1], b[:1]).buckets()
    assert [x.positions for x in short] == ["0-7", "all"]
    assert len(result.lines()) == 6
