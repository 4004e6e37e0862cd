"""Quality files: what one run expected at each position, to be compared later or elsewhere.

A ``.npz`` of the 256 likeliest tokens of every position with their log-probabilities, the log of
what the others sum to, and log p(next token); and a JSON head that says of which model, tokenizer,
texts, settings and window it is.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from strata.core.divergence import Array, Vocabulary, kl_top_lists, require_same_vocabulary
from strata.core.errors import FormatError, InputError, NumericsError
from strata.quality.scores import ArmResult, Scores

LISTED = 256
TOP = 20
FORMAT = "strata quality"
VERSION = 1
_ARRAYS = ("text", "position", "token", "logp", "rest", "target")


@dataclass(frozen=True)
class Head:
    """What a file is about. texts: (name, digest of the tokens, count) of each; settings: those
    that differ from the defaults, as text."""

    arm: str
    model: str
    n_vocab: int
    tokenizer: str
    texts: tuple[tuple[str, str, int], ...]
    window: int
    settings: Mapping[str, str]
    machine: str


@dataclass
class Recording:
    """Positions of one run, filled as they come; log-probabilities in nats."""

    head: Head
    text: list[int] = field(default_factory=list)
    position: list[int] = field(default_factory=list)
    token: list[npt.NDArray[np.int32]] = field(default_factory=list)
    """[min(256, V)] each, likeliest first."""
    logp: list[npt.NDArray[np.float32]] = field(default_factory=list)
    rest: list[float] = field(default_factory=list)
    target: list[float] = field(default_factory=list)

    def add(self, text: int, position: int, logp_V: Array, target: int | None) -> None:
        """Append one position of text number ``text``."""
        k = min(LISTED, len(logp_V))
        listed = np.argpartition(-logp_V, k - 1)[:k]
        listed = listed[np.lexsort((listed, -logp_V[listed]))]
        others = np.delete(logp_V, listed)
        likely = others[others > -np.inf]
        peak = likely.max() if len(likely) else 0.0
        rest = peak + np.log(np.exp(likely - peak).sum()) if len(likely) else -np.inf
        self.text.append(text)
        self.position.append(position)
        self.token.append(listed.astype(np.int32))
        self.logp.append(logp_V[listed].astype(np.float32))
        self.rest.append(float(rest))
        self.target.append(float("nan") if target is None else float(logp_V[target]))

    def save(self, path: Path) -> None:
        """Write the file; an existing one is replaced when the new one is complete."""
        arrays: dict[str, Any] = {
            "text": np.asarray(self.text, np.int32),
            "position": np.asarray(self.position, np.int32),
            "token": np.stack(self.token),
            "logp": np.stack(self.logp),
            "rest": np.asarray(self.rest, np.float32),
            "target": np.asarray(self.target, np.float32),
        }
        head = {"format": FORMAT, "version": VERSION, **asdict(self.head)}
        partial = path.with_suffix(".partial.npz")
        np.savez_compressed(partial, head=np.array(json.dumps(head)), **arrays)
        partial.replace(path)


def load_recording(path: str | Path) -> Recording:
    """A stored run. FormatError for what is no whole quality file, NumericsError naming the
    position for NaN in it."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as stored:
            head = json.loads(str(stored["head"]))
            arrays = {name: stored[name] for name in _ARRAYS}
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    except (ValueError, KeyError, zipfile.BadZipFile, EOFError) as error:
        # NumPy takes what is no archive for a pickle, and says how to open that
        why = "it is no NumPy archive" if "pickle" in str(error) else error
        raise FormatError(f"{path} is no whole quality file: {why}") from None
    if head.pop("format", None) != FORMAT or head.pop("version", None) != VERSION:
        raise FormatError(f"{path} is no quality file of version {VERSION}")
    head["texts"] = tuple(tuple(text) for text in head["texts"])
    made = Recording(Head(**head), **{n: list(a) for n, a in arrays.items()})
    for position, logp in zip(made.position, made.logp, strict=True):
        if np.isnan(logp).any() or np.isposinf(logp).any():
            raise NumericsError(f"{path}: position {position} holds NaN or infinity")
    return made


def compare_recordings(reference: Recording, other: Recording, names: tuple[str, str]) -> ArmResult:
    """Divergence of two stored runs over the reference's top 20 and the rest. InputError naming
    both when tokenizers, vocabularies or texts differ.

    A token of the reference's top 20 that the other does not list gets the most it can have; the
    result's note counts them.
    """
    a, b = reference.head, other.head
    require_same_vocabulary(
        Vocabulary(names[0], a.n_vocab, a.tokenizer), Vocabulary(names[1], b.n_vocab, b.tokenizer)
    )
    _require_same_texts(reference, other, names)
    scores, unlisted = Scores(), 0
    for i, position in enumerate(reference.position):
        ids, p = reference.token[i][:TOP], reference.logp[i][:TOP].astype(np.float64)
        known = dict(zip(other.token[i].tolist(), other.logp[i].tolist(), strict=True))
        most = min(float(other.logp[i][-1]), float(other.rest[i]))
        unlisted += sum(token not in known for token in ids.tolist())
        q = np.array([known.get(token, most) for token in ids.tolist()])
        scores.position.append(position)
        scores.kl_top.append(kl_top_lists(p, q))
        scores.top1.append(bool(ids[0] == other.token[i][0]))
        scores.target.append(float(other.target[i]))
    note = f"{unlisted} tokens beyond the other's {LISTED} listed" if unlisted else ""
    return ArmResult(b.arm, dict(b.settings), tuple(scores.buckets()), note=note)


def _require_same_texts(reference: Recording, other: Recording, names: tuple[str, str]) -> None:
    ours, theirs = (r.head.texts for r in (reference, other))
    for i in range(max(len(ours), len(theirs))):
        one, two = (texts[i] if i < len(texts) else None for texts in (ours, theirs))
        if one is None or two is None or one[1] != two[1]:
            shown = ("no text" if t is None else f"{t[0]} ({t[2]} tokens)" for t in (one, two))
            raise InputError(
                f"cannot compare: text {i + 1} of {names[0]} is {next(shown)}, of {names[1]} "
                f"{next(shown)}; both must have read the same texts"
            )
    for name, recording in zip(names, (reference, other), strict=True):
        expected = sum(n for _, _, n in recording.head.texts)
        if len(recording.position) != expected:
            raise FormatError(
                f"{name} holds {len(recording.position)} positions, its texts have {expected}"
            )
