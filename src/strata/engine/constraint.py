"""Answers held to a grammar: which tokens may come next, worked out while the window runs.

llguidance keeps the parser; here are the bridge from our tokenizer to it and the object that a
session asks. ``plan`` cuts drafts at the first that the grammar does not admit and has a thread
compute the mask of every place of the coming window, each as if the drafts before it were taken;
``mask`` then only writes -inf. A mask depends on the tokens before it and on nothing else, so the
text does not depend on the window size. Knows no schemas: it is given a grammar.
"""

from __future__ import annotations

import json
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from strata.core.errors import EngineError, InputError, UnsupportedError

try:
    import llguidance
except ImportError:  # an engine without structured output works; require_llguidance says so
    llguidance = None  # type: ignore[assignment]

Row = npt.NDArray[np.float64]


class Mask(NamedTuple):
    """The tokens that may come, or those that may not, whichever are fewer: most masks are one or
    the other almost whole, so writing -inf costs little."""

    only: npt.NDArray[np.intp] | None
    without: npt.NDArray[np.intp] | None

    def apply(self, row_V: Row) -> None:
        """In place."""
        if self.only is not None:
            kept = row_V[self.only]
            row_V.fill(-np.inf)
            row_V[self.only] = kept
        elif self.without is not None:
            row_V[self.without] = -np.inf


class TokenSource(Protocol):
    """What the bridge needs of a tokenizer (see formats.tokenizer.Tokenizer)."""

    @property
    def n_vocab(self) -> int:
        """Largest id + 1."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for."""

    def is_control(self, token: int) -> bool:
        """Whether the token is no text."""

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """The tokens of a text."""


def require_llguidance() -> Any:
    """The library; UnsupportedError when it is not installed."""
    if llguidance is None:
        raise UnsupportedError(
            "structured output needs the package llguidance, not installed here: pip install "
            "llguidance"
        )
    return llguidance


def grammar_error(grammar: str) -> str | None:
    """What is wrong with a grammar (Lark, or llguidance's JSON form), on one line; None if
    nothing. Special tokens are not looked up."""
    text = str(require_llguidance().LLMatcher.validate_grammar(grammar))
    return " ".join(text.split()) or None


def schema_error(schema: Any) -> str | None:
    """The same for a JSON schema alone."""
    return grammar_error(
        require_llguidance().LLMatcher.grammar_from_json_schema(json.dumps(schema))
    )


class _Bridge:
    """Our vocabulary as llguidance wants it: where only one text can follow, the library asks for
    the tokens that the model would use for it."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: TokenSource) -> None:
        ids = range(tokenizer.n_vocab)
        self.eos_token_id = tokenizer.eos_ids[0]
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(token) for token in ids]
        self.special_token_ids = [token for token in ids if tokenizer.is_control(token)]
        self._tokenizer = weakref.ref(tokenizer)  # the table must not keep its own key alive

    def __call__(self, text: bytes | str) -> list[int]:
        words = text if isinstance(text, str) else text.decode("utf-8", "replace")
        tokenizer = self._tokenizer()
        return tokenizer.encode(words, add_bos=False) if tokenizer is not None else []


class TokenTable:
    """A tokenizer's vocabulary inside llguidance, and the thread that computes masks. Making it
    takes up to seconds for a large vocabulary: once a model (see ``table_of``)."""

    def __init__(self, tokenizer: TokenSource) -> None:
        if not tokenizer.eos_ids:
            raise UnsupportedError(
                "structured output needs a token that ends an answer; the checkpoint names none"
            )
        library = require_llguidance()
        ends = list(tokenizer.eos_ids)
        self.table = library.LLTokenizer(
            _Bridge(tokenizer), n_vocab=tokenizer.n_vocab, eos_token=ends
        )
        self.ends = frozenset(ends)
        ids = range(tokenizer.n_vocab)
        self.controls = frozenset(
            tokenizer.token_bytes(token).decode("utf-8", "replace")
            for token in ids
            if tokenizer.is_control(token)
        )
        """Spellings of the control tokens."""
        self.n_vocab = tokenizer.n_vocab
        self.thread = ThreadPoolExecutor(1, "strata-masks")


_TABLES: weakref.WeakKeyDictionary[TokenSource, TokenTable] = weakref.WeakKeyDictionary()
_MAKING = threading.Lock()


def table_of(tokenizer: TokenSource) -> TokenTable:
    """The tokenizer's table, made at the first call."""
    with _MAKING:
        table = _TABLES.get(tokenizer)
        if table is None:
            table = _TABLES[tokenizer] = TokenTable(tokenizer)
        return table


def prepare(tokenizer: TokenSource) -> None:
    """Begin to make the table, so that the first request that needs it does not wait for it."""
    if llguidance is not None and tokenizer.eos_ids:
        threading.Thread(target=table_of, args=(tokenizer,), daemon=True).start()


class GrammarConstraint:
    """One answer's parser state. Calls: ``plan`` before a window (may be left out), then for each
    pick ``mask`` and ``accept``. InputError for a grammar that cannot be compiled."""

    def __init__(self, grammar: str, table: TokenTable) -> None:
        self._table = table
        library = require_llguidance()
        limits = library.LLParserLimits(verbose_errors=False)
        self._matcher = library.LLMatcher(table.table, grammar, log_level=0, limits=limits)
        self._check()
        self._drafts: list[int] = []
        self._ahead: list[Mask] = []
        self._running: Future[list[Mask]] | None = None
        self._ended = False

    @property
    def ended(self) -> bool:
        """Whether an end token was accepted."""
        return self._ended

    def plan(self, drafts: list[int]) -> list[int]:
        """The drafts up to the first that may not come; masks for them begin to be computed."""
        self._wait()
        if self._ended:
            return []
        n_kept = self._matcher.validate_tokens(drafts) if drafts else 0
        kept = drafts[:n_kept]
        self._drafts, self._ahead = list(kept), []
        self._running = self._table.thread.submit(self._masks, kept)
        return kept

    def mask(self, row_V: Row) -> None:
        """Set what may not follow to -inf, in place; rows beyond the tokenizer's ids too."""
        self._wait()
        if not self._ahead:
            self._drafts, self._ahead = [], self._masks([])
        self._check()
        n = self._table.n_vocab
        self._ahead[0].apply(row_V[:n])
        row_V[n:] = -np.inf

    def accept(self, token: int) -> None:
        """What was picked from the row just masked."""
        self._wait()
        if token in self._table.ends:
            self._ended = True
            return
        if not self._matcher.consume_token(token):
            raise EngineError(f"token {token} was picked although the grammar does not admit it")
        as_drafted = bool(self._drafts) and self._drafts[0] == token
        self._drafts = self._drafts[1:] if as_drafted else []
        self._ahead = self._ahead[1:] if as_drafted else []

    def _masks(self, drafts: list[int]) -> list[Mask]:
        """The mask here and after each draft; the parser is where it was afterwards."""
        masks = [self._mask()]
        n_taken = 0
        for token in drafts:
            if not self._matcher.consume_token(token):
                break
            n_taken += 1
            masks.append(self._mask())
        if n_taken:
            self._matcher.rollback(n_taken)
        return masks

    def _mask(self) -> Mask:
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        may_V = np.unpackbits(words, count=self._table.n_vocab, bitorder="little").view(np.bool_)
        if 2 * int(np.count_nonzero(may_V)) < len(may_V):
            return Mask(np.flatnonzero(may_V), None)
        return Mask(None, np.flatnonzero(~may_V))

    def _wait(self) -> None:
        """The parser belongs to one thread at a time."""
        if self._running is not None:
            running, self._running = self._running, None
            self._ahead = running.result()

    def _check(self) -> None:
        if self._matcher.is_error():
            why = " ".join(str(self._matcher.get_error()).split())
            raise InputError(f"the form asked for cannot be enforced: {why[:300]}")
