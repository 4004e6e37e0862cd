"""A vocabulary from the metadata of a GGUF file. Knows the keys, no file and no template language.

Keys are those of the GGUF specification, under ``tokenizer.ggml.``: model, pre, tokens, token_type,
scores, merges, *_token_id, add_bos_token, add_space_prefix; templates under
``tokenizer.chat_template``.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import tokenizers
from tokenizers import models, normalizers

from strata.core.errors import FormatError, UnsupportedError
from strata.formats.added_tokens import AddedToken, AddedTokens
from strata.formats.pretokenizers import pre_tokenizer_named
from strata.formats.text import quoted
from strata.formats.vocabulary import SPACE_MARK, Vocabulary

_LOG = logging.getLogger(__name__)
_PREFIX = "tokenizer.ggml."
_SURROGATE = re.compile("[\ud800-\udfff]")


class TokenType(IntEnum):
    """tokenizer.ggml.token_type of one token."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Files name one end token; models end their answers with any of these (llama.cpp goes by spelling
# too). "<|end|>" ends a message but not the answer where "<|return|>" exists.
_END_TEXTS = frozenset({
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "<|return|>",
    "<|call|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>", "<EOT>", "[EOT]", "[e~[",
    "<｜end▁of▁sentence｜>",
})  # fmt: skip
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_NAMED_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",
    "mask_token": "mask_token_id",
}


def vocabulary_from_gguf(metadata: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary that ``metadata`` (GGUF keys and values) describes.

    FormatError when keys are missing or contradict each other, UnsupportedError for kinds of
    tokenizers or pre-tokenizers that we do not have.
    """
    kind = metadata.get(f"{_PREFIX}model")
    if not isinstance(kind, str) or kind not in ("gpt2", "llama"):
        none = kind is None or (isinstance(kind, str) and kind in ("none", "no_vocab"))
        what = "the file has no vocabulary" if none else "that kind is not known"
        raise UnsupportedError(
            f"tokenizer.ggml.model is {kind!r}: {what}; supported are 'gpt2' (byte-level BPE) and "
            f"'llama' (SentencePiece)"
        )
    table = _Table(metadata)
    return _byte_level(table) if kind == "gpt2" else _sentence_piece(table)


class _Table:
    """Tokens with their types, checked; and the flags and ids around them."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.tokens = _texts(self.required("tokens"), "tokens")
        self.n_tokens = len(self.tokens)
        self._check_unique()
        types = self.get("token_type")
        self.has_types = types is not None
        self.types: list[int] = (
            _numbers(types, "token_type", self.n_tokens)
            if self.has_types
            else [TokenType.NORMAL] * self.n_tokens
        )
        self.ids = {name: self._id(key) for name, key in _NAMED_KEYS.items()}
        self.end_ids = self._end_ids()
        self._mark_control()

    def get(self, key: str) -> Any:
        """The value under tokenizer.ggml.``key``, or None."""
        return self._metadata.get(_PREFIX + key)

    def required(self, key: str) -> Any:
        """The same; FormatError when it is missing."""
        value = self.get(key)
        if value is None:
            raise FormatError(f"the file has no {_PREFIX}{key}; convert the model again")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A yes-or-no key."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, int):
            raise FormatError(f"{_PREFIX}{key} is {quoted(str(value), 60)}, not true or false")
        return bool(value)

    def of_type(self, *types: TokenType) -> list[int]:
        """Ids of all tokens of these types, in order."""
        wanted = set(types)
        return [i for i, kind in enumerate(self.types) if kind in wanted and self.tokens[i]]

    def _id(self, key: str) -> int | None:
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise FormatError(f"{_PREFIX}{key} is {quoted(str(value), 60)}, which is no token id")
        if value < 0:
            return None
        if value >= self.n_tokens:
            if key in ("bos_token_id", *_END_KEYS):
                raise FormatError(
                    f"{_PREFIX}{key} is {value} but the vocabulary has {self.n_tokens} tokens"
                )
            # Files with a padding id one past the end are common and harmless.
            _LOG.warning("%s%s is %s, outside the vocabulary: ignored", _PREFIX, key, value)
            return None
        return value

    def _check_unique(self) -> None:
        if len(set(self.tokens)) == self.n_tokens:
            return
        seen: dict[str, int] = {}
        for i, token in enumerate(self.tokens):
            if token and seen.setdefault(token, i) != i:
                raise FormatError(
                    f"tokens {seen[token]} and {i} are both {quoted(token)}; a vocabulary must not "
                    f"name a token twice"
                )

    def _end_ids(self) -> tuple[int, ...]:
        named = [self._id(key) for key in _END_KEYS]
        spelled = {token: i for i, token in enumerate(self.tokens) if token in _END_TEXTS}
        if "<|return|>" in spelled:
            spelled.pop("<|end|>", None)
        return tuple(dict.fromkeys([*(i for i in named if i is not None), *spelled.values()]))

    def _mark_control(self) -> None:
        """Control tokens of files without types, and known end tokens typed as ordinary ones."""
        if self.has_types:
            known = [i for i in self.end_ids if self.tokens[i] in _END_TEXTS]
        else:
            known = [i for i in (*self.ids.values(), *self.end_ids) if i is not None]
        for i in known:
            self.types[i] = TokenType.CONTROL

    def added(self) -> AddedTokens:
        """Tokens found by spelling."""
        control = {TokenType.CONTROL, TokenType.UNKNOWN}
        ids = self.of_type(TokenType.USER_DEFINED, *control)
        return AddedTokens(
            AddedToken(i, self.tokens[i], control=self.types[i] in control) for i in ids
        )

    def templates(self) -> dict[str, str]:
        """Chat templates by name."""
        prefix = "tokenizer.chat_template"
        found = {}
        for key, value in self._metadata.items():
            if key == prefix or key.startswith(f"{prefix}."):
                found[key[len(prefix) + 1 :] or "default"] = str(value)
        return found

    def vocabulary(
        self,
        backend: tokenizers.Tokenizer,
        after_ordinary: tokenizers.Tokenizer | None = None,
        **rest: Any,
    ) -> Vocabulary:
        """All of it, with what depends on the kind of tokenizer."""
        tokens = self.tokens
        named = {name: tokens[i] for name, i in self.ids.items() if i is not None}
        return Vocabulary(
            first=backend,
            after_control=backend,
            after_ordinary=after_ordinary or backend,
            piece=lambda i: tokens[i] if 0 <= i < len(tokens) else None,
            n_vocab=self.n_tokens,
            added=self.added(),
            bos_id=self.ids["bos_token"],
            eos_id=self.ids["eos_token"],
            eos_ids=self.end_ids,
            unk_id=self.ids["unk_token"],
            pad_id=self.ids["pad_token"],
            templates=self.templates(),
            named=named,
            **rest,
        )


def _byte_level(table: _Table) -> Vocabulary:
    name = table.get("pre")
    if name is None:
        _LOG.warning("the file does not name its pre-tokenizer (%spre): taking 'default'", _PREFIX)
        name = "default"
    rule = pre_tokenizer_named(str(name))
    # Control tokens stay out, so that no text can be merged into one.
    ids = table.of_type(TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED, TokenType.BYTE)
    vocab = {table.tokens[i]: i for i in ids}
    merges = _pairs(_texts(table.required("merges"), "merges"))
    model = _bpe(vocab, merges, rule.ignore_merges)
    backend = tokenizers.Tokenizer(model)
    if (normalizer := rule.normalizer()) is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = rule.pre_tokenizer()
    add_bos = table.flag("add_bos_token", rule.add_bos and table.ids["bos_token"] is not None)
    return table.vocabulary(backend, spelling="bytes", add_bos=add_bos, strip_space=False)


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], ignore_merges: bool) -> models.BPE:
    try:
        return models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges)
    except Exception:  # the library raises its own kind for a merge of tokens that do not exist
        usable = [(a, b) for a, b in merges if a in vocab and b in vocab and a + b in vocab]
    _LOG.warning("%d merges name tokens that do not exist: ignored", len(merges) - len(usable))
    return models.BPE(vocab=vocab, merges=usable, ignore_merges=ignore_merges)


def _pairs(merges: list[str]) -> list[tuple[str, str]]:
    """Merges "a b" as pairs; the first letter of a may itself be a space."""
    pairs: list[Any] = [tuple(merge.split(" ", 1)) for merge in merges]
    for i in [i for i, pair in enumerate(pairs) if len(pair) != 2 or "" in pair]:
        left, _, right = merges[i][1:].partition(" ")
        if merges[i][:1] != " " or not right:
            raise FormatError(
                f"merge {i}, {quoted(merges[i])}, is not two tokens with a space between"
            )
        pairs[i] = (f" {left}", right)
    return pairs


def _sentence_piece(table: _Table) -> Vocabulary:
    """SentencePiece's BPE: the best-scored token that two neighbours form is made first.

    As ranked merges: every way to put a token together from two others, best score first. Equal to
    SentencePiece except where two ways to form one token compete for the same letters.
    """
    scores = _numbers(table.required("scores"), "scores", table.n_tokens)
    vocab = {table.tokens[i]: i for i in table.of_type(TokenType.NORMAL, TokenType.UNUSED)}
    merges = [
        (scores[i], -cut, token[:cut], token[cut:])
        for token, i in vocab.items()
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    merges.sort(key=lambda merge: merge[:2], reverse=True)
    vocab |= {table.tokens[i]: i for i in table.of_type(TokenType.BYTE)}
    unk_id = table.ids["unk_token"]
    unk = table.tokens[unk_id] if unk_id is not None else None
    if unk is not None and unk_id is not None:
        vocab[unk] = unk_id
    model = models.BPE(
        vocab=vocab,
        merges=[merge[2:] for merge in merges],
        unk_token=unk,
        fuse_unk=True,
        byte_fallback=True,
    )
    with_space, without = tokenizers.Tokenizer(model), tokenizers.Tokenizer(model)
    mark = normalizers.Replace(" ", SPACE_MARK)
    with_space.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), mark])
    without.normalizer = mark
    prefix = table.flag("add_space_prefix", True)
    return table.vocabulary(
        with_space if prefix else without,
        after_ordinary=without,
        spelling="sentencepiece",
        add_bos=table.flag("add_bos_token", table.ids["bos_token"] is not None),
        strip_space=prefix,
    )


def _items(values: Any, key: str) -> list[Any]:
    """The items of an array, as a list."""
    if isinstance(values, str) or not hasattr(values, "__len__"):
        raise FormatError(f"{_PREFIX}{key} is {quoted(str(values), 60)}, not an array")
    return list(values.tolist() if hasattr(values, "tolist") else values)


def _texts(values: Sequence[str | bytes], key: str) -> list[str]:
    """A string array as str, checked to be valid text."""
    texts = _items(values, key)
    if not all(isinstance(text, str | bytes) for text in texts):
        raise FormatError(
            f"{_PREFIX}{key} holds something else than texts; convert the model again"
        )
    if bytes in set(map(type, texts)):
        texts = [x.decode("utf-8", "surrogateescape") if isinstance(x, bytes) else x for x in texts]
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        bad = next(i for i, text in enumerate(texts) if _SURROGATE.search(text))
        raise FormatError(f"{_PREFIX}{key}: string {bad} is not valid UTF-8") from None
    return texts


def _numbers(values: Any, key: str, n_tokens: int) -> list[Any]:
    """A numeric array with one number for each token, as a list."""
    numbers = _items(values, key)
    if not all(isinstance(number, int | float) for number in numbers):
        raise FormatError(
            f"{_PREFIX}{key} holds something else than numbers; convert the model again"
        )
    if len(numbers) < n_tokens:
        raise FormatError(
            f"{_PREFIX}{key} has {len(numbers)} numbers for {n_tokens} tokens; "
            f"convert the model again"
        )
    return numbers[:n_tokens]
