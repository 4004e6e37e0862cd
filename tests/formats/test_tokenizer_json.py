"""Tokenizers from tokenizer.json against the tokenizers library and transformers."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.formats.tokenizer_samples import (
    TEXTS,
    TINY,
    control_ids,
    tiny_files,
    tiny_json,
    tiny_reference,
)
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as HfTokenizer

from strata.core.errors import FormatError, InputError, UnsupportedError
from strata.formats.tokenizer import Tokenizer, load_tokenizer
from strata.formats.tokenizer_json import vocabulary_from_json

OURS, REFERENCE = tiny_json(), tiny_reference()


@dataclass
class Beside:
    """A checkpoint as far as tokenizers look at it."""

    tokenizer_files: dict[str, Path]
    config: dict[str, Any] = field(default_factory=dict)
    generation_config: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    format: str = "safetensors"


def save(folder: Path, hf: HfTokenizer, **config: Any) -> Tokenizer:
    """Ours, from ``hf`` and a tokenizer_config.json saved in ``folder``."""
    hf.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(Beside({path.name: path for path in folder.iterdir()}))


@pytest.mark.parametrize("text", [*TEXTS, "", "a<|im_end|>b", "<|im_start|>user\nhi<|im_end|>\n"])
def test_ids_and_text_equal_the_library(text: str) -> None:
    # Expectation: the tokenizers library reading the same file.
    ids = REFERENCE.encode(text, add_special_tokens=False).ids
    assert OURS.encode(text, special=True) == ids
    assert OURS.decode(ids) == REFERENCE.decode(ids)
    assert OURS.decode(ids, False) == REFERENCE.decode(ids, skip_special_tokens=False)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=40))
def test_any_text_equals_the_library(text: str) -> None:
    # Expectation: the tokenizers library; for lone surrogates, which it cannot take, U+FFFD.
    plain = "".join("\ufffd" if "\ud800" <= char <= "\udfff" else char for char in text)
    assert OURS.encode(text) == REFERENCE.encode(plain, add_special_tokens=False).ids


def test_control_text_is_ordinary_unless_asked_for() -> None:
    # C10. Expectation: the id of the control token, and the bytes of the text.
    text = "x<|im_end|>y"
    assert OURS.encode(text, special=True).count(2) == 1
    ids = OURS.encode(text)
    assert control_ids(OURS, ids) == []
    assert OURS.decode(ids) == text


def test_ends_come_from_all_files() -> None:
    # Expectation: eos_token of tokenizer_config.json first, then generation_config.json's list.
    generation = {"eos_token_id": [2, 0]}
    tokenizer = load_tokenizer(Beside(tiny_files(), generation_config=generation))
    assert (tokenizer.eos_id, tokenizer.eos_ids) == (2, (2, 0))
    assert tokenizer.bos_id is None and tokenizer.pad_id == 0
    text_config = {"text_config": {"eos_token_id": 5}}
    assert load_tokenizer(Beside(tiny_files(), config=text_config)).eos_ids == (2, 5)


def test_size_and_bytes() -> None:
    # Expectation: the file's own table: 6,144 tokens, every byte among them.
    assert OURS.n_vocab == 6144
    letters = {OURS.token_bytes(i) for i in range(OURS.n_vocab)}
    assert {bytes([b]) for b in range(256) if b not in range(0xF5, 0x100)} <= letters
    assert OURS.token_bytes(2) == b"<|im_end|>"
    assert OURS.is_control(2) and not OURS.is_control(100)
    assert OURS.token_bytes(10**6) == b""


@pytest.mark.parametrize(("asked", "written"), [(None, True), (False, False), (True, True)])
def test_begin_token_by_flag_or_post_processor(
    tmp_path: Path, asked: bool | None, written: bool
) -> None:
    # Expectation: tokenizer_config.json's flag if there is one, else what the library would add.
    hf = tiny_reference()
    hf.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    flags = {} if asked is None else {"add_bos_token": asked}
    tokenizer = save(tmp_path, hf, bos_token="<|endoftext|>", **flags)
    plain = REFERENCE.encode("hello", add_special_tokens=False).ids
    assert tokenizer.encode("hello") == ([0] if written else []) + plain
    assert tokenizer.encode("hello", add_bos=False) == plain
    # written by the text and asked for: once
    assert tokenizer.encode("<|endoftext|>hello", special=True, add_bos=True) == [0, *plain]


def test_begin_token_that_does_not_exist() -> None:
    # Expectation: our error, since there is no id to add.
    with pytest.raises(InputError, match="names no begin token"):
        OURS.encode("x", add_bos=True)


def sentence_piece_like(scheme: str) -> HfTokenizer:
    """A small SentencePiece-like tokenizer with byte fallback and both kinds of added tokens."""
    letters = ["\u2581", *"abcdefghijklmnopqrstuvwxyz.,"]
    pieces = [f"<0x{b:02X}>" for b in range(256)] + letters
    merges = [("\u2581", "t"), ("h", "e"), ("\u2581t", "he"), ("a", "b"), ("\u2581", "ab")]
    vocab = {"<unk>": 0, **{piece: i + 1 for i, piece in enumerate(pieces)}}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    hf = HfTokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if scheme == "prepend":
        hf.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    else:
        hf.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    strip = [] if scheme == "never" else [decoders.Strip(" ", 1, 0)]
    replace = decoders.Replace("\u2581", " ")
    hf.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), *strip])
    hf.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", rstrip=True)])
    hf.add_tokens([AddedToken("[tool]", normalized=False), AddedToken("abc", single_word=True)])
    return hf


@pytest.mark.parametrize("scheme", ["prepend", "first", "always", "never"])
def test_spaces_around_added_tokens(tmp_path: Path, scheme: str) -> None:
    # Expectation: the tokenizers library, for each of its rules about a space at the begin.
    hf = sentence_piece_like(scheme)
    ours = save(tmp_path, hf)
    for text in [
        "the ab", " the", "<s>the<s> ab</s>  the", "the[tool]the [tool] ab", "[tool]", "é漢 <s>é",
        "x abc abcd abc", "abc</s>\n\n abc", "", " ", "<s>",
    ]:  # fmt: skip
        ids = hf.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, special=True) == ids, text
        assert ours.decode(ids) == hf.decode(ids), text


def test_files_that_do_not_do(tmp_path: Path) -> None:
    # Expectation: one clear error of the project's own kinds each.
    with pytest.raises(UnsupportedError, match="no tokenizer.json"):
        load_tokenizer(Beside({}))
    with pytest.raises(InputError, match="no such file"):
        load_tokenizer(Beside({"tokenizer.json": tmp_path / "tokenizer.json"}))
    broken = tmp_path / "tokenizer.json"
    broken.write_bytes((TINY / "tokenizer.json").read_bytes()[:1000])
    with pytest.raises(FormatError, match=r"not a valid tokenizer\.json"):
        load_tokenizer(Beside({"tokenizer.json": broken}))
    hf = HfTokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    with pytest.raises(UnsupportedError, match="WordLevel"):
        save(tmp_path, hf)
    hf = HfTokenizer(models.BPE({"a": 0}, []))
    hf.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedError, match="decoder WordPiece"):
        save(tmp_path, hf)


def test_truncation_in_the_file_is_not_obeyed(tmp_path: Path) -> None:
    # Expectation: a prompt is never cut silently; the limit belongs to the engine's context.
    hf = tiny_reference()
    hf.enable_truncation(4)
    hf.enable_padding(length=8)
    text = "one two three four five six seven"
    assert save(tmp_path, hf).encode(text) == OURS.encode(text)


def test_template_files(tmp_path: Path) -> None:
    # Expectation: Hugging Face's order: chat_template.jinja wins; a list holds named templates.
    shutil.copytree(TINY, tmp_path, dirs_exist_ok=True)
    config = json.loads((TINY / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    files = {path.name: path for path in tmp_path.iterdir()}
    named = Tokenizer(vocabulary_from_json(files))
    user = [{"role": "user", "content": "x"}]
    assert named.decode(named.chat_prompt(user)) == "plain"
    assert named.decode(named.chat_prompt(user, tools=[{"type": "function"}])) == "tools"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    files = {path.name: path for path in tmp_path.iterdir()}
    own = Tokenizer(vocabulary_from_json(files))
    assert own.decode(own.chat_prompt(user)) == "from the file"
