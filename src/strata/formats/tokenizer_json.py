"""A vocabulary from tokenizer.json and what lies beside it. Knows the files, no template language.

tokenizer.json is read by the tokenizers library; here its parts are looked at to find added tokens,
how names stand for bytes, and spaces at the begin. Special tokens and flags come from
tokenizer_config.json, end tokens also from generation_config.json and config.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from strata.core.errors import FormatError, InputError, UnsupportedError
from strata.formats.added_tokens import AddedToken, AddedTokens
from strata.formats.json_file import read_json_object
from strata.formats.text import quoted
from strata.formats.vocabulary import SPACE_MARK, Spelling, Vocabulary

_NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask"))
_PLAIN_NORMALIZERS = {"NFC", "NFKC", "NFD", "NFKD"}


def vocabulary_from_json(
    files: Mapping[str, Path],
    config: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
) -> Vocabulary:
    """The vocabulary described by ``files`` (by name: tokenizer.json and, if there, others).

    UnsupportedError without tokenizer.json or for kinds of it that we do not have; FormatError when
    it is damaged.
    """
    if "tokenizer.json" not in files:
        raise UnsupportedError(
            "the checkpoint has no tokenizer.json, and other kinds of vocabularies are not "
            "supported; save the tokenizer with a current transformers"
        )
    path = files["tokenizer.json"]
    backend = _open(path)
    settings = _object(files, "tokenizer_config.json")
    added = _take_added_tokens(backend)
    spelling, strip_space = _spelling(backend, path)
    texts = {**_token_texts(_object(files, "special_tokens_map.json")), **_token_texts(settings)}
    ids = {name: i for name, text in texts.items() if (i := backend.token_to_id(text)) is not None}
    bos_id = ids.get("bos_token", _first_id(generation_config, config, "bos_token_id"))
    eos_ids = _end_ids(ids.get("eos_token"), generation_config, config)
    add_bos = settings.get("add_bos_token")
    if add_bos is None:
        add_bos = bos_id is not None and _writes_bos(backend, bos_id)
    later = _without_first_space(backend)
    texts = {name: text for name, text in texts.items() if name in ids}
    for name, i in (("bos_token", bos_id), ("eos_token", eos_ids[0] if eos_ids else None)):
        if name not in texts and i is not None and (text := backend.id_to_token(i)) is not None:
            texts[name] = text
    return Vocabulary(
        first=backend,
        after_control=later,
        after_ordinary=later,
        piece=backend.id_to_token,
        n_vocab=max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        added=added,
        spelling=spelling,
        bos_id=bos_id,
        eos_id=ids.get("eos_token", eos_ids[0] if eos_ids else None),
        eos_ids=eos_ids,
        add_bos=bool(add_bos),
        strip_space=strip_space,
        unk_id=ids.get("unk_token"),
        pad_id=ids.get("pad_token"),
        templates=_templates(files, settings),
        named=texts,
    )


def _open(path: Path) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for anything it cannot read
        if not path.is_file():
            raise InputError(f"cannot read {path}: no such file") from None
        raise FormatError(f"{path} is not a valid tokenizer.json ({error})") from None
    kind = type(backend.model).__name__
    if kind not in ("BPE", "Unigram"):
        raise UnsupportedError(f"{path}: a {kind} tokenizer is not supported, only BPE and Unigram")
    backend.no_truncation()
    backend.no_padding()
    return backend


def _object(files: Mapping[str, Path], name: str) -> dict[str, Any]:
    return read_json_object(files[name]) if name in files else {}


def _state(part: Any) -> dict[str, Any]:
    """A part of a tokenizer (normalizer, decoder, ...) as the JSON it was read from."""
    return dict(json.loads(part.__getstate__())) if part is not None else {}


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """The steps of a part, those of sequences in order."""
    todo = [_state(part)] if part is not None else []
    while todo:
        step = todo.pop(0)
        if step.get("type") == "Sequence":
            inner = next((value for value in step.values() if isinstance(value, list)), [])
            todo = [*inner, *todo]
        else:
            yield step


def _take_added_tokens(backend: tokenizers.Tokenizer) -> AddedTokens:
    """The added tokens, which from now on the library itself takes for ordinary text.

    Ordinary tokens that are matched in normalized text (SentencePiece's) stay with the library.
    """
    plain = all(step.get("type") in _PLAIN_NORMALIZERS for step in _steps(backend.normalizer))
    ours = {
        i: token
        for i, token in backend.get_added_tokens_decoder().items()
        if token.special or plain or not token.normalized
    }
    # The library hides only special tokens from the search.
    backend.add_special_tokens(
        [tokenizers.AddedToken(t.content, special=True, normalized=False) for t in ours.values()]
    )
    backend.encode_special_tokens = True
    return AddedTokens(
        AddedToken(i, t.content, t.special, t.lstrip, t.rstrip, t.single_word)
        for i, t in ours.items()
    )


def _spelling(backend: tokenizers.Tokenizer, path: Path) -> tuple[Spelling, bool]:
    """How names stand for bytes, and whether decoding drops a space at the begin."""
    spelling: Spelling | None = None
    strip = False
    for step in _steps(backend.decoder):
        kind = step.get("type")
        if kind == "ByteLevel":
            spelling = "bytes"
        elif kind == "Replace" and step.get("content") == " ":
            spelling = _space_spelling(step.get("pattern"), path)
        elif kind == "Metaspace":
            spelling = _space_spelling(step.get("replacement"), path)
            strip = step.get("prepend_scheme", "always") != "never"
        elif kind == "Strip" and step.get("content") == " ":
            strip = step.get("start", 0) > 0
        elif kind not in ("ByteFallback", "Fuse"):
            raise UnsupportedError(f"{path}: the decoder {kind} is not supported")
    if spelling is None:
        raise UnsupportedError(f"{path} has no decoder that says how tokens spell spaces")
    return spelling, strip


def _space_spelling(mark: Any, path: Path) -> Spelling:
    if mark not in (SPACE_MARK, {"String": SPACE_MARK}):
        raise UnsupportedError(f"{path}: spaces are spelled {mark!r}; only U+2581 is supported")
    return "sentencepiece"


def _without_first_space(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer for text behind a token, where only the begin of a text gets a space."""
    steps = list(_steps(backend.pre_tokenizer))
    if not any(step.get("prepend_scheme") == "first" for step in steps):
        return backend
    text = re.sub(r'("prepend_scheme":\s*)"first"', r'\1"never"', backend.to_str())
    later = tokenizers.Tokenizer.from_str(text)
    later.encode_special_tokens = True
    return later


def _token_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens of tokenizer_config.json: strings, or objects with their content."""
    found = {}
    for name in _NAMES:
        value = settings.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _ids_of(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [i for i in values if isinstance(i, int) and not isinstance(i, bool) and i >= 0]


def _first_id(
    generation: Mapping[str, Any] | None, config: Mapping[str, Any] | None, key: str
) -> int | None:
    ids = [i for source in (generation, config) for i in _ids_of((source or {}).get(key))]
    return ids[0] if ids else None


def _end_ids(
    named: int | None, generation: Mapping[str, Any] | None, config: Mapping[str, Any] | None
) -> tuple[int, ...]:
    """The tokenizer's end token and those of generation_config.json, else of config.json."""
    ids = [] if named is None else [named]
    config = config or {}
    sources = [generation or {}, config, config.get("text_config") or {}]
    found = (_ids_of(source.get("eos_token_id")) for source in sources)
    return tuple(dict.fromkeys([*ids, *next((some for some in found if some), [])]))


def _writes_bos(backend: tokenizers.Tokenizer, bos_id: int) -> bool:
    """Whether the library's own post-processing begins a text with the begin token."""
    return backend.encode("a", add_special_tokens=True).ids[:1] == [bos_id]


def _templates(files: Mapping[str, Path], settings: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name; a chat_template.jinja wins over the one in tokenizer_config.json."""
    if "chat_template.jinja" in files:
        path = files["chat_template.jinja"]
        try:
            return {"default": path.read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read {path}: {error}") from None
    found = settings.get("chat_template")
    if isinstance(found, str):
        return {"default": found}
    if found is None:
        return {}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in found}
    except (TypeError, KeyError):
        raise FormatError(f"the chat_template {quoted(str(found))} is no template") from None
