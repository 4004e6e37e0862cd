"""The typed messages between the HTTP process and the engine process, and how they are framed.

A frame is its length (4 bytes, little-endian) and a JSON list: the message's name and its fields in
order. Everything that crosses the pipe is one of the classes below; a frame that is none of them
is a ProtocolError, never guessed at.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from strata.core.errors import EngineError

MAX_FRAME_BYTES = 256 << 20
"""A frame that claims more is not ours."""
_LENGTH = struct.Struct("<I")


class ProtocolError(EngineError):
    """What came through the pipe is not a message of ours."""


@dataclass(frozen=True)
class Load:
    """First message: load this model. given: settings by name, asked for by somebody; sources:
    where each came from."""

    model: str
    given: dict[str, Any]
    sources: dict[str, str]


@dataclass(frozen=True)
class Generate:
    """Answer a prompt. sampling: request settings by name. chat: control tokens are spelled between
    marks (see text.deltas) instead of left out. logprobs: how many likeliest tokens to tell with
    each token; -1 none. prompt_logprobs: the same for the prompt's own tokens. constraint: a
    ConstraintSpec as JSON. continues: the answer continues the prompt's text."""

    id: int
    tokens: list[int]
    sampling: dict[str, Any]
    chat: bool = True
    logprobs: int = -1
    prompt_logprobs: int = -1
    constraint: dict[str, Any] | None = None
    continues: bool = False


@dataclass(frozen=True)
class Cancel:
    """Stop working on this request; it is answered with ``End`` as soon as that is so."""

    id: int


@dataclass(frozen=True)
class Ping:
    """Are you there?"""

    n: int


@dataclass(frozen=True)
class Stop:
    """End: keep what is to be kept, and exit."""


@dataclass(frozen=True)
class Phase:
    """Progress of loading: done of total, in the unit of the phase."""

    phase: str
    done: int
    total: int


@dataclass(frozen=True)
class Ready:
    """The model is loaded and one token was generated. info: see status.ModelInfo."""

    info: dict[str, Any]


@dataclass(frozen=True)
class Failed:
    """Loading failed. mendable: by the caller (a setting, a file), not by trying again."""

    message: str
    mendable: bool


@dataclass(frozen=True)
class Pong:
    """Here. pulse: counts steps of work; it stands still when the engine does."""

    n: int
    pulse: int


@dataclass(frozen=True)
class Reading:
    """Prompt tokens read, of those to read; reused: found in kept state before."""

    id: int
    done: int
    total: int


@dataclass(slots=True)  # made for every token: frozen ones take three times as long
class Tokens:
    """Tokens of an answer, in order: [token, text] or [token, text, logprob, [[id, logprob]...]].

    Text is what became certain with the token; it may be empty."""

    id: int
    items: list[list[Any]]


@dataclass(frozen=True)
class PromptLogprobs:
    """For prompt tokens from position ``start``: [logprob or None, [[id, logprob]...]]."""

    id: int
    start: int
    items: list[list[Any]]


@dataclass(frozen=True)
class End:
    """The request is over. finish: "stop", "length", "cancelled" or "error". report: counts and
    times (see answer_report); error: its message, error_kind the class of errors.py."""

    id: int
    finish: str
    report: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    error_kind: str = ""


@dataclass(frozen=True)
class Counters:
    """Facts of the engine for metrics and status, sent after every request."""

    values: dict[str, Any]


Message = (
    Load | Generate | Cancel | Ping | Stop
    | Phase | Ready | Failed | Pong | Reading | Tokens | PromptLogprobs | End | Counters
)  # fmt: skip
_CLASSES: tuple[type[Any], ...] = (
    Load, Generate, Cancel, Ping, Stop,
    Phase, Ready, Failed, Pong, Reading, Tokens, PromptLogprobs, End, Counters,
)  # fmt: skip
_BY_NAME: Mapping[str, type[Any]] = {cls.__name__: cls for cls in _CLASSES}
_FIELDS: Mapping[type[Any], tuple[str, ...]] = {
    cls: tuple(f.name for f in fields(cls)) for cls in _CLASSES
}
_N_FIELDS: Mapping[str, int] = {cls.__name__: len(names) for cls, names in _FIELDS.items()}
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=True).encode
_parse = json.JSONDecoder().raw_decode


def encode(message: Message) -> bytes:
    """One frame."""
    kind = type(message)
    row = [kind.__name__, *(getattr(message, name) for name in _FIELDS[kind])]
    body = _encode(row).encode()
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Message:
    """The message of one frame's body; ProtocolError."""
    try:
        row, _ = _parse(body.decode())
        name = row[0]
        if len(row) - 1 != _N_FIELDS[name]:
            raise ValueError("wrong number of fields")
        message: Message = _BY_NAME[name](*row[1:])
        return message
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ProtocolError(f"not a message: {body[:80]!r} ({error})") from None


class Frames:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are complete with these bytes."""
        if self._rest:
            data = self._rest + data
        at, size = 0, len(data)
        while size - at >= 4:
            (length,) = _LENGTH.unpack_from(data, at)
            if length > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame claims {length} bytes")
            if size - at < 4 + length:
                break
            at += 4 + length
            yield decode(data[at - length : at])
        self._rest = data[at:]
