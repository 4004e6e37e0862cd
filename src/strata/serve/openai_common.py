"""Shapes that several OpenAI routes share: heads, usage, log-probabilities, our own additions."""

from __future__ import annotations

import json
from json.encoder import encode_basestring
from typing import Any
from urllib.parse import quote

from strata.serve.generation import Generation, Usage
from strata.serve.server import Server


def quoted(text: str) -> str:
    """A JSON string."""
    return str(encode_basestring(text))


def sse(data: str) -> bytes:
    """One event."""
    return f"data: {data}\n\n".encode()


def usage_of(usage: Usage) -> dict[str, Any]:
    """The usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.reused_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def extra(generation: Generation) -> dict[str, Any]:
    """What we add to a response: how each answer came about, and fields that had no effect."""
    out: dict[str, Any] = {"strata": {"answers": generation.usage.reports}}
    if generation.ask.warnings:
        out["warnings"] = generation.ask.warnings
    return out


def warned(warnings: list[str]) -> dict[str, str]:
    """The header that names fields without effect, if there are any."""
    return {"X-Strata-Warnings": quote("; ".join(warnings), " ;:'")} if warnings else {}


class Said:
    """What every chunk or response of one request repeats."""

    def __init__(self, server: Server, generation: Generation, id: str) -> None:
        self.id = id
        self._server = server
        self._generation = generation

    @property
    def headers(self) -> dict[str, str]:
        """Of the response."""
        headers = {"X-Request-Id": self.id, "X-Strata-Mode": self._server.fingerprint}
        return headers | warned(self._generation.ask.warnings)

    def head(self, kind: str) -> dict[str, Any]:
        """Id, kind, time, model."""
        return {
            "id": self.id,
            "object": kind,
            "created": self._generation.created,
            "model": self._server.text.name,
            "system_fingerprint": self._server.fingerprint,
        }

    def fixed(self, kind: str) -> str:
        """The head as JSON; its closing brace is cut off by who goes on."""
        return json.dumps(self.head(kind), ensure_ascii=False, separators=(",", ":"))

    def tail(self, *, last: bool) -> str:
        """Our additions as further members of the last chunk."""
        if not last:
            return ""
        return "," + json.dumps(extra(self._generation), ensure_ascii=False)[1:-1]

    def closing(self, fixed: str, with_usage: bool) -> bytes:
        """The end of a stream: the usage, if it is asked for, and the end mark. fixed: of its
        chunks, without the closing brace."""
        if not with_usage:
            return b"data: [DONE]\n\n"
        usage = json.dumps(usage_of(self._generation.usage))
        last = f'{fixed},"choices":[],"usage":{usage}{self.tail(last=True)}}}'
        return f"data: {last}\n\ndata: [DONE]\n\n".encode()

    def logprobs(self, items: list[list[Any]]) -> list[dict[str, Any]]:
        """Of tokens of an answer."""
        return [
            {
                **self.token(item[0], item[2]),
                "top_logprobs": [self.token(token, logprob) for token, logprob in item[3]],
            }
            for item in items
            if len(item) > 2
        ]

    def token(self, token: int, logprob: float) -> dict[str, Any]:
        """A token with its text and bytes."""
        raw = self.token_bytes(token)
        text = raw.decode("utf-8", "replace")
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(raw)}

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for."""
        tokenizer = self._server.text.tokenizer
        return tokenizer.token_bytes(token) if tokenizer else b""


class Told:
    """What the answers of all APIs have in common: they repeat ``said``, and most say nothing
    before the first piece."""

    said: Said

    @property
    def headers(self) -> dict[str, str]:
        """Of the response."""
        return self.said.headers

    def opening(self) -> bytes:
        """Nothing yet."""
        return b""
