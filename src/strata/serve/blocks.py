"""Deltas to blocks that begin, grow and end one after the other, as newer APIs have it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from strata.serve.text.deltas import ContentText, Delta, ReasoningText, ToolCallStart

Kind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    """One block of an answer. id, name: of a call."""

    index: int
    kind: Kind
    id: str = ""
    name: str = ""
    text: str = ""


@dataclass
class Blocks:
    """Gathers an answer; ``add`` says what happened as (event, block, new text)."""

    all: list[Block] = field(default_factory=list)
    _open: Block | None = None

    def add(self, deltas: list[Delta]) -> Iterator[tuple[str, Block, str]]:
        """Events "start", "delta" and "stop"."""
        for delta in deltas:
            if isinstance(delta, ToolCallStart):
                yield from self.close()
                yield from self._begin(Block(len(self.all), "call", delta.id, delta.name))
                continue
            kind: Kind = "call"
            if isinstance(delta, ContentText):
                kind = "text"
            elif isinstance(delta, ReasoningText):
                kind = "reasoning"
            if self._open is None or self._open.kind != kind:
                yield from self.close()
                yield from self._begin(Block(len(self.all), kind))
            block = self._open
            assert block is not None
            block.text += delta.text
            yield "delta", block, delta.text

    def close(self) -> Iterator[tuple[str, Block, str]]:
        """End the block that is open."""
        if self._open is not None:
            yield "stop", self._open, ""
            self._open = None

    def _begin(self, block: Block) -> Iterator[tuple[str, Block, str]]:
        self.all.append(block)
        self._open = block
        yield "start", block, ""
