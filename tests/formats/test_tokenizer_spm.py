"""SentencePiece vocabularies from GGUF metadata against the sentencepiece package itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.formats.tokenizer_samples import BYTE, CONTROL, NORMAL, TEXTS, UNKNOWN, USER_DEFINED

from strata.formats.detokenize import StreamDecoder
from strata.formats.tokenizer import Tokenizer
from strata.formats.tokenizer_gguf import vocabulary_from_gguf

sentencepiece = pytest.importorskip("sentencepiece")
TOOLS = ("<tool>", "||")
PROSE = (Path(__file__).parents[2] / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")


def trained(folder: Path, **options: Any) -> Any:
    """A SentencePiece BPE model of 700 tokens, trained on our own documentation and the samples."""
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join([PROSE, *TEXTS * 4]).replace("\0", ""), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(folder / "m"), vocab_size=700, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        character_coverage=0.98, num_threads=1, minloglevel=2, max_sentence_length=20000,
        allow_whitespace_only_pieces=True, **options,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "m.model"))


def from_pieces(model: Any, **more: Any) -> Tokenizer:
    """Ours, from the keys that converters write for such a model."""
    ids = range(model.get_piece_size())
    pieces = [model.id_to_piece(i) for i in ids]
    types = [
        UNKNOWN if model.is_unknown(i)
        else CONTROL if model.is_control(i)
        else BYTE if model.is_byte(i)
        else USER_DEFINED if pieces[i] in TOOLS
        else NORMAL
        for i in ids
    ]  # fmt: skip
    keys = {"model": "llama", "tokens": pieces, "token_type": types, "unknown_token_id": 0,
            "bos_token_id": 1, "eos_token_id": 2,
            "scores": [model.get_score(i) for i in ids]}  # fmt: skip
    return Tokenizer(
        vocabulary_from_gguf({f"tokenizer.ggml.{k}": v for k, v in (keys | more).items()})
    )


@pytest.mark.parametrize("prefix", [True, False])
def test_ids_and_text_equal_sentencepiece(tmp_path: Path, prefix: bool) -> None:
    # Expectation: the sentencepiece package with the same model, with and without its first space.
    model = trained(tmp_path, add_dummy_prefix=prefix, user_defined_symbols=list(TOOLS))
    ours = from_pieces(model, add_space_prefix=prefix)
    texts = [*TEXTS, *PROSE.split("\n"), "a<tool>b ||c", "x || <tool> y", "", "漢字 é🦄"]
    for text in texts:
        ids = model.encode(text)
        assert ours.encode(text, add_bos=False) == ids, text
        assert ours.decode(ids) == model.decode(ids) == text
        stream = StreamDecoder(ours)
        assert "".join(map(stream.push, ids)) + stream.finish() == text


def test_begin_token_and_control_text(tmp_path: Path) -> None:
    # Expectation: SentencePiece files begin with the begin token unless their flag says no, and
    # spelled control tokens are text (C10).
    model = trained(tmp_path)
    ours = from_pieces(model)
    assert ours.encode("the") == [1, *model.encode("the")]
    assert from_pieces(model, add_bos_token=False).encode("the") == model.encode("the")
    ids = ours.encode("a</s>b", add_bos=False)
    assert not any(map(ours.is_control, ids))
    assert ours.decode(ids) == "a</s>b"
    # behind a control token the text gets its space again, as in llama.cpp
    special = ours.encode("a</s>b", special=True, add_bos=False)
    assert special == [*model.encode("a"), 2, *model.encode("b")]


def test_a_text_that_continues_keeps_its_space(tmp_path: Path) -> None:
    # Expectation: the first space belongs to the tokenizer only at the begin of a text.
    model = trained(tmp_path)
    ours = from_pieces(model)
    ids = model.encode("the window")
    assert ours.decode(ids) == "the window"
    assert ours.decode(ids, continues=True) == " the window"
