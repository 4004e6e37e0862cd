"""POST /v1/completions: continue a text, with echo and log-probabilities of the prompt, as
evaluation harnesses want them."""

from __future__ import annotations

import json
import uuid
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from strata.serve.bodies import MAX_N, Sampled, Stops, StreamOptions, biases, leftovers
from strata.serve.completion_logprobs import CompletionLogprobs
from strata.serve.errors import ApiError
from strata.serve.forms import asked_form
from strata.serve.generation import Ask, Generation, Piece
from strata.serve.openai_common import Said, Told, extra, quoted, sse, usage_of
from strata.serve.server import Server
from strata.serve.streams import respond
from strata.serve.text.deltas import ContentText

HARMLESS: dict[str, Any] = {"user": (None,), "metadata": (None, {}), "prompt_cache_key": (None,)}
REFUSED: dict[str, Any] = {
    "suffix": (None, ""),
    "best_of": (None, 1),
    "use_beam_search": (None, False),
}
MAX_PROMPTS = 64
Ids = list[Annotated[int, Field(ge=0)]]


class CompletionBody(Sampled):
    """A completion request."""

    prompt: str | Ids | Annotated[list[str] | list[Ids], Field(max_length=MAX_PROMPTS)]
    max_tokens: Annotated[int, Field(ge=0, le=1 << 31)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = 1
    stop: Stops = None
    stream_options: StreamOptions | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = False
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None


def router(server: Server) -> APIRouter:
    """The route."""
    routes = APIRouter()

    @routes.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        server.require_ready()
        server.require_model(body.model)
        generation = server.begin(await _ask(server, body))
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        answer = CompletionAnswer(server, generation, bool(body.echo), with_usage)
        return await respond(request, generation, answer, stream=bool(body.stream))

    return routes


async def _ask(server: Server, body: CompletionBody) -> Ask:
    warnings = leftovers(body, HARMLESS, REFUSED)
    given: Any = body.prompt
    many = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
    texts: list[Any] = given if many else [given]

    def encode() -> list[list[int]]:
        bos = None if body.add_special_tokens in (None, True) else False
        for text in texts:
            if isinstance(text, str):
                server.require_length([text], "completion")
        return [
            server.text.tokens.encode(text, add_bos=bos) if isinstance(text, str) else list(text)
            for text in texts
        ]

    prompts = await server.apart(encode, sum(map(len, texts)))
    for prompt in prompts:
        server.require_room(prompt, "completion")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens 0 needs echo", "invalid_request", field="max_tokens")
    constraint, form_field = asked_form(body, body.response_format, body.structured_outputs)
    server.require_constraint(constraint, form_field)
    sampling = server.sampling(
        max(map(len, prompts)),
        {
            **body.sampling(),
            "stop": body.stop or None,
            "max_tokens": 16 if body.max_tokens is None else body.max_tokens,
            "logit_bias": biases(body.logit_bias),
        },
    )
    logprobs = -1 if body.logprobs is None else body.logprobs
    return Ask(
        kind="completion",
        prompts=prompts,
        sampling=sampling,
        n=body.n or 1,
        chat=False,
        continues=True,
        logprobs=logprobs,
        prompt_logprobs=logprobs if body.echo else -1,
        constraint=constraint,
        warnings=warnings,
    )


class CompletionAnswer(Told):
    """Turns pieces into chunks or into one response."""

    def __init__(
        self, server: Server, generation: Generation, echo: bool, with_usage: bool
    ) -> None:
        self.said = Said(server, generation, f"cmpl-{uuid.uuid4().hex}")
        self._server = server
        self._generation = generation
        self._echo = echo
        self._with_usage = with_usage
        self._fixed = self.said.fixed("text_completion")[:-1]
        self._begun: set[int] = set()
        self._rows: dict[int, CompletionLogprobs] = {}

    def add(self, piece: Piece) -> bytes:
        """The chunk of a piece."""
        if not (piece.deltas or piece.tokens or piece.prompt or piece.finish):
            return b"" if piece.error else f": {piece.where}\n\n".encode()
        text, index = _text(piece), piece.index
        if index not in self._begun:
            self._begun.add(index)
            text = self._prompt_text(index) + text if self._echo else text
        logprobs = json.dumps(self._logprobs(index, [piece]))
        reason = f'"{piece.finish}"' if piece.finish else "null"
        more = self.said.tail(last=bool(piece.finish) and not self._with_usage)
        return sse(
            f'{self._fixed},"choices":[{{"index":{index},"text":{quoted(text)},'
            f'"logprobs":{logprobs},"finish_reason":{reason}}}]{more}}}'
        )

    def closing(self) -> bytes:
        """Usage, when it is asked for, and the end mark."""
        return self.said.closing(self._fixed, self._with_usage)

    def failed(self, error: ApiError) -> bytes:
        """The error as an event."""
        self._with_usage = False
        return sse(json.dumps(error.openai()))

    async def whole(self) -> dict[str, Any]:
        """The response at once."""
        ask = self._generation.ask
        pieces: list[list[Piece]] = [[] for _ in range(len(ask.prompts) * ask.n)]
        await self._generation.each(lambda piece: pieces[piece.index].append(piece))
        choices = []
        for index, parts in enumerate(pieces):
            text = self._prompt_text(index) if self._echo else ""
            text += "".join(map(_text, parts))
            choices.append(
                {
                    "index": index,
                    "text": text,
                    "logprobs": self._logprobs(index, parts),
                    "finish_reason": parts[-1].finish,
                }
            )
        return {
            **self.said.head("text_completion"),
            "choices": choices,
            "usage": usage_of(self._generation.usage),
            **extra(self._generation),
        }

    def _prompt_text(self, index: int) -> str:
        prompt = self._prompt(index)
        tokenizer = self._server.text.tokenizer
        return tokenizer.decode(prompt) if tokenizer else ""

    def _prompt(self, index: int) -> list[int]:
        return self._generation.ask.prompts[index // self._generation.ask.n]

    def _logprobs(self, index: int, pieces: list[Piece]) -> dict[str, Any] | None:
        """Of an answer's next pieces."""
        if self._generation.ask.logprobs < 0:
            return None
        if index not in self._rows:
            prompt = self._prompt(index) if self._echo else []
            self._rows[index] = CompletionLogprobs(self._server.text.tokenizer, prompt)
        return self._rows[index].of(pieces)


def _text(piece: Piece) -> str:
    return "".join(delta.text for delta in piece.deltas if isinstance(delta, ContentText))
