"""Log-probabilities of /v1/completions: lists side by side, of one answer, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strata.formats.detokenize import StreamDecoder
from strata.serve.generation import Piece
from strata.serve.model_text import ServedTokenizer


class CompletionLogprobs:
    """Goes along with one answer; ``of`` its pieces, in order. prompt: its ids when they are
    echoed, else none.

    Offsets are positions in the characters of the choice's text (a token inside a character stands
    at that character; one that gives no text, where its text would be), so they come from decoding
    and not from the tokens' names.
    """

    def __init__(self, tokenizer: ServedTokenizer | None, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._n_prompt = 0
        self._n_chars = 0
        self._stream = StreamDecoder(tokenizer, continues=not prompt) if tokenizer else None

    def of(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The lists for what these pieces tell."""
        out: dict[str, Any] = {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": [],
        }  # fmt: skip
        for piece in pieces:
            for logprob, top in piece.prompt:
                self._add(out, self._prompt[self._n_prompt], logprob, top)
                self._n_prompt += 1
                if self._n_prompt == len(self._prompt) and self._tokenizer and self._stream:
                    # the text is made of two, so half a character ends with the prompt
                    self._n_chars += len(self._stream.finish())
                    self._stream = StreamDecoder(self._tokenizer, continues=True)
            for item in piece.tokens:
                if len(item) > 2:
                    self._add(out, item[0], item[2], item[3])
        return out

    def _add(
        self, out: dict[str, Any], token: int, logprob: float | None, top: Sequence[Any]
    ) -> None:
        text = self._spelled(token)
        out["tokens"].append(text)
        out["token_logprobs"].append(logprob)
        best = {self._spelled(other): value for other, value in reversed(top)}
        if logprob is not None:
            best.setdefault(text, logprob)
        out["top_logprobs"].append(best if logprob is not None else None)
        out["text_offset"].append(self._n_chars)
        if self._stream is not None:
            self._n_chars += len(self._stream.push(token))

    def _spelled(self, token: int) -> str:
        raw = self._tokenizer.token_bytes(token) if self._tokenizer else b""
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:  # half a character: told apart from every text
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
