"""The ring of past columns: against a list of all columns."""

from __future__ import annotations

import pytest
import torch

from strata.memory.frame import Frame
from strata.models.ring import (
    MAX_WINDOW_TOKENS,
    assert_can_cut_back,
    past_columns,
    ring_spec,
    store_columns,
)
from tests.models.kit import CPU, sequence

N_READ, WIDTH = 9, 3


def test_past_columns_are_those_stored_last_whatever_was_rejected() -> None:
    """Against the accepted columns in a list, zeros before the start; the ring begins as NaN."""
    specs = [{"columns": ring_spec(N_READ, WIDTH, torch.float32)}]
    ring = sequence(specs).tensor(0, "columns")
    draw = torch.Generator().manual_seed(1)
    accepted = torch.zeros(N_READ, WIDTH)
    for step in range(200):
        start = len(accepted) - N_READ
        assert torch.equal(past_columns(ring, start, N_READ), accepted[-N_READ:])
        n_tokens = int(torch.randint(1, MAX_WINDOW_TOKENS + 1, (), generator=draw))
        n = int(torch.randint(0, n_tokens + 1, (), generator=draw))
        if step == 100:  # a prompt chunk: longer than the ring, accepted whole
            n = n_tokens = 4000
        x = torch.randn(n_tokens, WIDTH, generator=draw)
        store_columns(ring, start, x)
        accepted = torch.cat([accepted, x[:n]])


def test_the_longest_window_that_can_be_cut_back_has_a_limit() -> None:
    """Beyond it a rejected token could overwrite a column that is read again."""
    specs = [{"columns": ring_spec(N_READ, WIDTH, torch.float32)}]

    def of(n_tokens: int, keep: bool) -> Frame:
        return Frame(n_tokens, 1, {}, {}, sequence(specs), CPU, keep_inputs=keep)

    assert_can_cut_back(of(MAX_WINDOW_TOKENS, True))
    assert_can_cut_back(of(4096, False))
    with pytest.raises(AssertionError, match="17 tokens"):
        assert_can_cut_back(of(MAX_WINDOW_TOKENS + 1, True))
