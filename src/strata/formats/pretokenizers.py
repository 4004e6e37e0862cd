"""How text is cut into words before byte-level BPE, by the names GGUF files use for it.

A GGUF file stores tokens and merges but only the *name* of the cutting rule (tokenizer.ggml.pre).
Each rule here is that of the published tokenizer.json of its model family, Unicode normalization
included, so that a GGUF and a tokenizer.json of one model give equal ids. Knows no vocabularies.

Source of the names: llama.cpp's table of pre-tokenizers. A name missing here is refused: a wrong
rule gives a model that works badly without saying why.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from strata.core.errors import UnsupportedError
from strata.formats.text import quoted

# Pieces that the published rules share. Alternatives are tried in order at each position.
_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ONE_LEAD = r"[^\r\n\p{L}\p{N}]?"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: str) -> str:
    """The rule of Llama 3 and Qwen 2, which differ in how many digits stay together."""
    return f"{_SUFFIX}|{_ONE_LEAD}\\p{{L}}+|{digits}|{_SYMBOLS}|{_SPACES}"


def _cased_words(digits: str, suffix: str) -> str:
    """The rule of o200k (gpt-4o) and Tekken: a capital after small letters begins a word."""
    symbols = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
    return (
        f"{_ONE_LEAD}{_UPPER}*{_LOWER}+{suffix}|{_ONE_LEAD}{_UPPER}+{_LOWER}*{suffix}"
        f"|{digits}|{symbols}|{_SPACES}"
    )


_QWEN35 = (
    f"{_SUFFIX}|{_ONE_LEAD}[\\p{{L}}\\p{{M}}]+|\\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_DEEPSEEK_V3 = (
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _SPACES
)
# DeepSeek-LLM lists the cased letters it keeps together; these cased letters are not in its list:
# Georgian, some Latin and Cyrillic extensions, mathematical alphabets, later scripts.
_DEEPSEEK_OTHERS = (
    r"\x{560}-\x{588}\x{10c7}-\x{10ff}\x{1c80}-\x{1c8f}\x{2d00}-\x{2d2d}\x{a790}-\x{a7fa}"
    r"\x{ab30}-\x{ab68}\x{10570}-\x{105bc}\x{10d50}-\x{10d85}\x{16e40}-\x{16e7f}\x{1d400}-\x{1df2f}"
)
_DEEPSEEK_LETTERS = rf"[\p{{Lu}}\p{{Ll}}\p{{Lt}}&&[^{_DEEPSEEK_OTHERS}]]"
_DEEPSEEK_CJK = "[一-龥ࠀ-一가-퟿]+"


@dataclass(frozen=True)
class PreTokenizer:
    """A cutting rule.

    cuts: patterns applied one after another, each within the pieces the former left; matches and
    what lies between them both become pieces. nfc: text is composed (Unicode NFC) first.
    ignore_merges: a piece that is itself a token is taken as it is. add_bos: whether text begins
    with the begin token when the file has no flag for it.
    """

    cuts: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def normalizer(self) -> normalizers.Normalizer | None:
        """As an object of the tokenizers library; None when text is left as it is."""
        return normalizers.NFC() if self.nfc else None

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """As an object of the tokenizers library; bytes become the letters of the byte alphabet."""
        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(cut), "isolated") for cut in self.cuts
        ]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(steps)


_ONE_DIGIT_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_QWEN2 = PreTokenizer((_words(r"\p{N}"),), nfc=True)
_LLAMA3 = PreTokenizer((_words(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_GPT4O = PreTokenizer((_cased_words(r"\p{N}{1,3}", f"{_SUFFIX}?"),), ignore_merges=True)

_KINDS = {
    "default": PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((_GPT2,)),
    "smollm": _ONE_DIGIT_GPT2,
    "refact": _ONE_DIGIT_GPT2,
    "starcoder": _ONE_DIGIT_GPT2,
    "qwen2": _QWEN2,
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "glm4": PreTokenizer((_words(r"\p{N}{1,3}"),), ignore_merges=True),
    "chatglm-bpe": PreTokenizer((_words(r"\p{N}{1,3}"),), ignore_merges=True),
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
    "tekken": PreTokenizer((_cased_words(r"\p{N}", ""),), ignore_merges=True, add_bos=True),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?{_DEEPSEEK_LETTERS}+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            _DEEPSEEK_CJK,
            r"\p{N}",
        )
    ),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")
    ),
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_V3)),
}


def known_pre_tokenizers() -> tuple[str, ...]:
    """All names that ``pre_tokenizer_named`` accepts."""
    return tuple(_KINDS)


def pre_tokenizer_named(name: str) -> PreTokenizer:
    """The rule behind a GGUF file's tokenizer.ggml.pre; UnsupportedError when we have none."""
    found = _KINDS.get(name)
    if found is None:
        raise UnsupportedError(
            f"the pre-tokenizer {quoted(name)} (tokenizer.ggml.pre) is not supported; known are "
            f"{', '.join(_KINDS)}. Use the model's safetensors checkpoint with its tokenizer.json"
        )
    return found
