"""Texts that are read teacher-forced: their tokens, and fingerprints that tell whether two runs
read the same ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from strata.core.errors import InputError
from strata.formats.tokenizer import Tokenizer


@dataclass(frozen=True)
class Text:
    """One text: a name for people and its token ids."""

    name: str
    tokens: tuple[int, ...]

    @property
    def digest(self) -> str:
        """Of the tokens."""
        return hashlib.blake2b(repr(self.tokens).encode(), digest_size=12).hexdigest()


def read_texts(
    files: Sequence[str | Path], tokenizer: Tokenizer, most_tokens: int | None = None
) -> list[Text]:
    """The files' texts, each cut to its first most_tokens tokens. InputError for a file that is
    missing, empty, not UTF-8, or given twice."""
    texts: list[Text] = []
    for file in files:
        path = Path(file)
        try:
            content = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{path} is not UTF-8 text: {error.reason} at byte {error.start}"
            ) from None
        except OSError as error:
            raise InputError(f"{path}: {error.strerror or error}") from None
        tokens = tuple(tokenizer.encode(content))[:most_tokens]
        if not tokens:
            raise InputError(f"{path} has no tokens; at least one is needed")
        text = Text(path.name, tokens)
        if text.digest in [other.digest for other in texts]:
            raise InputError(f"{path}: this text is given twice and would count twice")
        texts.append(text)
    return texts


def require_fit(texts: Sequence[Text], context_tokens: int) -> None:
    """InputError naming the text that is longer than the context."""
    for text in texts:
        if len(text.tokens) > context_tokens:
            raise InputError(
                f"{text.name} has {len(text.tokens)} tokens but the context holds "
                f"{context_tokens}; load with a larger --context or read less with --tokens"
            )


def tokenizer_digest(tokenizer: Tokenizer, n_vocab: int) -> str:
    """Of every token's bytes in order: what an id means."""
    digest = hashlib.blake2b(digest_size=12)
    for token in range(n_vocab):
        piece = tokenizer.token_bytes(token)
        digest.update(len(piece).to_bytes(4, "little"))
        digest.update(piece)
    return digest.hexdigest()
