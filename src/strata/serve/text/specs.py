"""What a request says about the form of its answer; plain data that crosses the pipe as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

ConstraintKind = Literal["json_schema", "json_object", "regex", "grammar", "choice", "tool_calls"]


@dataclass(frozen=True)
class ToolSpec:
    """A tool the model may call. parameters: JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True)
class ConstraintSpec:
    """A form the answer must have.

    value: the schema (json_schema), None (json_object), the pattern (regex), the Lark text
    (grammar), the list of texts (choice), or for tool_calls {"tools": [...], "required": bool,
    "only": name or None, "family": ..., "template_hint": ...}.
    reasoning_end: free text comes first and ends with this text (thinking); None when the answer
    proper begins at once. reasoning_open: thinking comes only if the answer begins with this text;
    None when it is open already.
    """

    kind: ConstraintKind
    value: Any = None
    reasoning_end: str | None = None
    reasoning_open: str | None = None

    def as_json(self) -> dict[str, Any]:
        """For the pipe."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ConstraintSpec:
        """Back from the pipe."""
        return cls(**data)


class TokenizerLike(Protocol):
    """What constraints need of a tokenizer (see formats.tokenizer.Tokenizer)."""

    @property
    def n_vocab(self) -> int:
        """Largest id + 1."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for."""

    def is_control(self, token: int) -> bool:
        """Whether the token is no text."""

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """The tokens of a text."""
