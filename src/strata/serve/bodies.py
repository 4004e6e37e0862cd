"""Bodies of requests, and what becomes of fields that have no effect here.

Nothing is ignored without a word: a field we obey is declared; one that changes nothing is named
in the response's ``warnings``; one that would change the answer and cannot be obeyed is an error;
so is an unknown one that looks like a misspelt known one.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from strata.serve.dialects import FORMS, NEUTRAL, own_names, refuse, refuse_range
from strata.serve.errors import ApiError

Count = Annotated[int, Field(ge=1, le=1 << 31)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
Stops = str | Annotated[list[str], Field(max_length=16)] | None
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
MAX_N = 16


class Body(BaseModel):
    """A JSON object whose unknown members are kept, to be named."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _own_names(cls, data: Any) -> Any:
        return own_names(data, cls.model_fields)


class StreamOptions(BaseModel):
    """What a stream holds besides the answer."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False
    include_obfuscation: bool | None = None
    continuous_usage_stats: Literal[False] | None = None


Overlap = Literal["auto", "exact", "balanced", "fast"]
"""How a request's windows use late CPU rows; docs/SERVER.md."""


class Sampled(Body):
    """What the OpenAI routes share."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-100, le=100)] | None = None
    seed: Seed | None = None
    overlap: Overlap | None = None
    stream: bool | None = False

    def sampling(self) -> dict[str, Any]:
        """By setting name; None is "not said"."""
        top_k = 0 if self.top_k == -1 else self.top_k
        values = {
            "temperature": self.temperature,
            "top_k": top_k,
            "min_p": self.min_p,
            "repeat_penalty": self.repetition_penalty,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "overlap": self.overlap,
            "seed": None if self.seed is None or self.seed == -1 else self.seed % 2**64,
        }
        if self.top_p == 0:  # the most likely token alone
            return {**values, "top_k": 1}
        return {**values, "top_p": self.top_p}


def leftovers(body: Body, harmless: Mapping[str, Any], refused: Mapping[str, Any]) -> list[str]:
    """Warnings for fields without effect. ApiError for fields that would have one.

    harmless: names and the values that need no warning, as a tuple; refused: names and the values
    that mean "do not", as a tuple.
    """
    warnings: list[str] = []
    if getattr(body, "stream_options", None) is not None and not getattr(body, "stream", False):
        warnings.append("stream_options has no effect without stream")
    if getattr(body, "stop", None) == "":
        warnings.append("stop is an empty text and has no effect")
    off = {"repetition_penalty": 1, "frequency_penalty": 0, "presence_penalty": 0}
    penalized = any(getattr(body, name, None) not in (None, none) for name, none in off.items())
    declared = list(type(body).model_fields)
    for name, value in (body.model_extra or {}).items():
        if name in refused:
            if value not in refused[name] and value not in NEUTRAL.get(name, ()):
                raise ApiError(
                    400, f"{name} is not supported here", "unsupported_field", field=name
                )
        elif name in harmless:
            if value not in harmless[name]:
                warnings.append(f"{name} has no effect here")
        elif name in FORMS and "structured_outputs" in declared:
            continue  # see serve.forms
        elif not (refuse(name, value) or refuse_range(name, value, penalized)):
            close = difflib.get_close_matches(name, declared, n=1, cutoff=0.85)
            if close:
                raise ApiError(
                    400,
                    f"unknown field {name!r}; did you mean {close[0]!r}?",
                    "unknown_field",
                    field=name,
                )
            warnings.append(f"{name} is not known here and has no effect")
    return warnings


def biases(given: Mapping[str, float] | None) -> dict[int, float] | None:
    """logit_bias of the OpenAI APIs."""
    if not given:
        return None
    try:
        return {int(token): bias for token, bias in given.items()}
    except ValueError:
        raise ApiError(
            400, "logit_bias must map token ids to numbers", "invalid_request", field="logit_bias"
        ) from None
