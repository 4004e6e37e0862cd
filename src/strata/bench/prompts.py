"""What the speed protocol reads: twelve short prompts of different kinds, and long texts.

All of our own wording. A text of one repeated token would route to the same experts for ever and is
flagged (``monotony``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

SHORT = (
    "Explain in plain words why the sky turns red in the evening and blue at noon, and what would "
    "change if the air were twice as thick.",
    "Write a Python function that reads a CSV file of bank transfers and returns the three largest "
    "per month, with a short test for an empty month.",
    "A train leaves at 8:40 and needs 95 minutes; another leaves the other end at 9:05 and needs "
    "110 minutes for the same 140 km. Where do they meet? Show each step.",
    "Schreibe einen höflichen Brief an einen Vermieter, in dem du um die Reparatur der Heizung "
    "bittest und einen Termin in der kommenden Woche vorschlägst.",
    "Compare keeping a sorted array with keeping a balanced tree when one element is added for "
    "every thousand that are looked up. When does the answer change?",
    "Tell the story of a lighthouse keeper who finds a letter addressed to the next keeper. Keep "
    "it quiet and end it before the letter is opened.",
    "List what a small bakery should check before it takes its first online orders, from payment "
    "to packaging, and say which of it can wait for the second month.",
    "Rewrite this SQL so that it needs one pass: SELECT id FROM t WHERE v = (SELECT MAX(v) FROM t) "
    "UNION SELECT id FROM t WHERE v = (SELECT MIN(v) FROM t); and explain why it is faster.",
    "Explique à un enfant de dix ans comment un barrage produit de l'électricité, puis donne une "
    "expérience simple à faire avec une bouteille d'eau.",
    "Prove that the sum of two odd numbers is even, then that the product of two odd numbers is "
    "odd, and say where each proof would fail for numbers written in base three.",
    "Summarise the arguments for and against a four-day week for a workshop of twelve people whose "
    "machines must run five days.",
    "Give a recipe for lentil soup for six with what a corner shop has in winter, and variants for "
    "somebody who eats no onions and somebody who likes it hot.",
)
"""Chat, code, mathematics and three languages."""

_SUBJECTS = (
    "the harbour", "a clerk", "the old printer", "our neighbour", "the second pump", "a courier",
    "the archive", "the night shift", "a gardener", "the council", "the new index", "a violinist",
)  # fmt: skip
_VERBS = (
    "counted", "sold", "repaired", "described", "moved", "measured", "lent", "painted", "checked",
    "forgot", "copied", "weighed",
)  # fmt: skip
_OBJECTS = (
    "seven crates", "the ledger of spring", "a broken valve", "two maps", "the longest bridge",
    "a list of names", "the green boat", "an unpaid bill", "four samples of clay", "the last tram",
    "a box of letters", "the width of the door",
)  # fmt: skip
_ENDS = (
    "before the rain came", "while nobody looked", "for the third time", "and went home",
    "because the light was good", "without saying why", "at the price of last year", "by hand",
)  # fmt: skip


def long_text(n_words: int, seed: int) -> str:
    """Varied sentences with numbers and dates, about n_words words."""
    rng = np.random.default_rng([30_000, seed])
    sentences: list[str] = []
    words = 0
    while words < n_words:
        subject, verb, thing, end = (
            str(rng.choice(part)) for part in (_SUBJECTS, _VERBS, _OBJECTS, _ENDS)
        )
        day, number = int(rng.integers(1, 29)), int(rng.integers(100, 10_000))
        sentence = f"On day {day} {subject} {verb} {thing}, entry {number}, {end}."
        sentences.append(sentence)
        words += len(sentence.split())
    return " ".join(sentences)


def random_prompt(n_tokens: int, n_vocab: int, seed: int) -> list[int]:
    """Ids for a model without text."""
    rng = np.random.default_rng([7, seed])
    return [int(t) for t in rng.integers(0, n_vocab, n_tokens)]


def monotony(tokens: Sequence[int]) -> str | None:
    """A warning when a prompt says the same over and over; None for ordinary text."""
    distinct = len(set(tokens))
    if len(tokens) >= 32 and distinct <= max(2, len(tokens) // 50):
        return (
            f"a prompt of {len(tokens)} tokens has only {distinct} different ones: it uses the "
            f"same experts again and again, and its speed says nothing about real text"
        )
    return None
