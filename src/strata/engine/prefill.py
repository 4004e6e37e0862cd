"""Reads prompts: chunks cut at absolute multiples of the chunk size, through the same parts as
windows.

Absolute cuts make a chunk's content independent of where reading began, so stored states can be
reused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from strata.window.run import WindowRunner

ReadProgress = Callable[[int, int], None]
"""(tokens read, tokens in all)"""


def cuts(start: int, stop: int, chunk_tokens: int) -> Iterator[tuple[int, int]]:
    """[start, stop) cut at the absolute multiples of chunk_tokens."""
    while start < stop:
        end = min(stop, (start // chunk_tokens + 1) * chunk_tokens)
        yield start, end
        start = end


def read_prompt(
    runner: WindowRunner,
    tokens: Sequence[int],
    chunk_tokens: int,
    *,
    all_logits: bool = False,
    progress: ReadProgress | None = None,
    each: Callable[[int, torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """Commit all tokens; logits [T, V] of every position, or [1, V] of the last. ContextLengthError
    before any work.

    each: told every chunk's first position and logits [n, V] instead of keeping them."""
    runner.state.require_room(len(tokens))
    base = runner.state.length
    total = base + len(tokens)
    out: list[torch.Tensor] = []
    for start, stop in cuts(base, total, chunk_tokens):
        n = stop - start
        n_head = n if all_logits or each else int(stop == total)
        recorded = runner.chunk(n, n_head)
        logits = runner.run(recorded, tokens[start - base : stop - base])
        if each is not None:
            each(start, logits)
            logits = logits[-1:]
        if n_head and (each is None or stop == total):
            out.append(logits.clone())
        runner.commit(n)
        if progress is not None:
            progress(stop - base, len(tokens))
    return torch.cat(out)
