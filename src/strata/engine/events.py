"""What a request leaves behind besides its tokens: counts of drafts, reuse of the kept state,
times.

The counts always satisfy ``emitted == from_prompt + windows + accepted - cut`` and ``accepted <=
offered``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class DraftCounts:
    """Windows of one answer and what became of their drafts."""

    windows: int = 0
    offered: int = 0
    accepted: int = 0
    offered_at: list[int] = field(default_factory=list)
    """By place in the window: [0] is the first draft."""
    accepted_at: list[int] = field(default_factory=list)
    emitted: int = 0
    """Tokens delivered."""
    from_prompt: int = 0
    """Of these, picked from the prompt's own logits, outside any window: the first token."""
    cut: int = 0
    """1 when the last window ended with an accepted draft, so that its own pick was not needed."""
    proposable: int = 0
    """Of the tokens emitted, those in the drafter's vocabulary."""
    limited: bool = False
    """Whether the drafter knows a part of the vocabulary only."""

    def offer(self, n_drafts: int) -> None:
        """A window with this many drafts begins."""
        self.windows += 1
        self.offered += n_drafts
        for counts in (self.offered_at, self.accepted_at):
            counts.extend([0] * (n_drafts - len(counts)))
        for place in range(n_drafts):
            self.offered_at[place] += 1

    def accept(self, place: int) -> None:
        """The draft at this place of the window was the model's own pick."""
        self.accepted += 1
        self.accepted_at[place] += 1

    def lines(self) -> list[str]:
        """Printable, without a percentage of nothing."""
        if not self.offered:
            lines = [f"drafts: no drafts offered in {self.windows} windows"]
        else:
            places = " ".join(
                f"{a}/{o}" for a, o in zip(self.accepted_at, self.offered_at, strict=True)
            )
            lines = [
                f"drafts: {self.accepted} of {self.offered} accepted "
                f"({100 * self.accepted / self.offered:.0f} %), by place {places}; "
                f"{(self.windows + self.accepted - self.cut) / self.windows:.2f} tokens a window"
            ]
        if self.limited and self.emitted:
            share = 100 * self.proposable / self.emitted
            lines.append(f"drafter's vocabulary: could have proposed {share:.0f} % of the tokens")
        return lines


@dataclass(frozen=True)
class Reuse:
    """How much of a prompt was already in the kept state."""

    prompt_tokens: int
    reused_tokens: int
    first_difference: int | None = None
    """Position where prompt and kept text part, when they do before either ends."""
    inexact_tokens: int = 0
    """Of the reused ones, those written by a mode that changes the output."""

    def line(self) -> str:
        """Printable."""
        text = f"prompt: {self.prompt_tokens} tokens, {self.reused_tokens} reused"
        if self.first_difference is not None:
            text += f" (differs from the kept state at position {self.first_difference})"
        if self.inexact_tokens:
            text += f" ({self.inexact_tokens} of them in a state that changes the output)"
        return text


@dataclass
class Report:
    """One answer, filled while it is written."""

    reuse: Reuse
    seed: int | None
    """Seed of the draws; None when the most likely token is taken."""
    prompt_s: float = 0.0
    decode_s: float = 0.0
    """Seconds of work after the prompt; the reader's own time is left out."""
    mode: str = "exact"
    """How its windows ran: "exact", or the name of what changes the output."""
    finish: str | None = None
    stop_text: str | None = None
    """The stop text that ended it, when one did."""
    drafts: DraftCounts = field(default_factory=DraftCounts)
    more: Callable[[], list[str]] = list
    """Further lines, about the windows since they were last asked for."""

    @property
    def decode_tokens_s(self) -> float:
        """Tokens a second after the first one; 0 when there was only one."""
        n = self.drafts.emitted - self.drafts.from_prompt
        return n / self.decode_s if n and self.decode_s > 0 else 0.0

    @property
    def prompt_tokens_s(self) -> float:
        """Freshly read prompt tokens a second."""
        fresh = self.reuse.prompt_tokens - self.reuse.reused_tokens
        return fresh / self.prompt_s if self.prompt_s > 0 else 0.0

    def lines(self) -> list[str]:
        """Printable summary."""
        seed = "" if self.seed is None else f", seed {self.seed}"
        return [
            f"{self.reuse.line()}, {self.prompt_tokens_s:.1f} tokens/s",
            f"answer: {self.drafts.emitted} tokens, {self.decode_tokens_s:.1f} tokens/s, "
            f"finish {self.finish or 'interrupted'}{seed}",
            *([] if self.mode == "exact" else [f"windows: {self.mode} (changes the output)"]),
            *self.drafts.lines(),
            *self.more(),
        ]
