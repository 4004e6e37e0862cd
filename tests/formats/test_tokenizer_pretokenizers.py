"""Cutting rules against published tokenizers, other libraries' rules and recorded pieces."""

from __future__ import annotations

import pytest
import regex
from tests.formats.tokenizer_samples import PRETOKENS, TEXTS
from tokenizers import pre_tokenizers
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

from strata.core.errors import UnsupportedError
from strata.formats.pretokenizers import known_pre_tokenizers, pre_tokenizer_named

# The pattern published in Mistral's tekken.json, in one piece.
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def pieces(kind: str, text: str) -> list[str]:
    """The words that rule ``kind`` cuts ``text`` into."""
    rule = pre_tokenizer_named(kind)
    normalizer = rule.normalizer()
    text = normalizer.normalize_str(text) if normalizer else text
    return [text[a:b] for _, (a, b) in rule.pre_tokenizer().pre_tokenize_str(text)]


@pytest.mark.parametrize("kind", sorted(PRETOKENS["pieces"]))
def test_recorded_pieces(kind: str) -> None:
    # Expectation: pretokens.json, whose "sources" say for each kind where the pieces come from.
    assert [pieces(kind, text) for text in TEXTS] == PRETOKENS["pieces"][kind]


@pytest.mark.parametrize("kind", ["glm4", "chatglm-bpe", "llama3", "llama-v3"])
def test_names_of_one_rule(kind: str) -> None:
    # Expectation: the published tokenizers of GLM-4 and Llama 3 cut by the same pattern.
    assert [pieces(kind, text) for text in TEXTS] == PRETOKENS["pieces"]["llama-bpe"]


def test_llama4_is_gpt4o() -> None:
    # Expectation: Llama 4's published pattern is that of o200k.
    assert [pieces("llama4", text) for text in TEXTS] == PRETOKENS["pieces"]["gpt-4o"]


@pytest.mark.parametrize("text", TEXTS)
def test_gpt2_and_one_digit_rules(text: str) -> None:
    # Expectation: the tokenizers library's own GPT-2 rule, and behind its digit splitter for
    # SmolLM, StarCoder and Refact, whose tokenizer.json is built of these two.
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    for rule, kinds in ((gpt2, ["gpt-2"]), (digits, ["smollm", "refact", "starcoder"])):
        expected = [text[a:b] for _, (a, b) in rule.pre_tokenize_str(text)]
        for kind in kinds:
            assert pieces(kind, text) == expected


@pytest.mark.parametrize("text", TEXTS)
def test_qwen35_and_tekken(text: str) -> None:
    # Expectation: the published patterns run by another regular expression engine.
    composed = pre_tokenizer_named("qwen35").normalizer()
    assert composed is not None
    plain = composed.normalize_str(text)
    assert pieces("qwen35", text) == regex.findall(PRETOKENIZE_REGEX, plain)
    assert pieces("tekken", text) == regex.findall(TEKKEN, text)


def test_every_rule_keeps_all_text() -> None:
    # Expectation: cutting must not lose or change a character (besides composing them).
    for kind in known_pre_tokenizers():
        rule = pre_tokenizer_named(kind)
        normalizer = rule.normalizer()
        for text in TEXTS:
            plain = normalizer.normalize_str(text) if normalizer else text
            assert "".join(pieces(kind, text)) == plain


def test_unknown_kind_is_named() -> None:
    # Expectation: the project's rule that an unknown rule is refused, never replaced silently.
    with pytest.raises(UnsupportedError, match="'kimi-k9'.*qwen2"):
        pre_tokenizer_named("kimi-k9")
