"""Errors as clients expect them: one body for the OpenAI routes, one for the Anthropic ones."""

from __future__ import annotations

import re
from typing import Any

from strata.core.errors import (
    ContextLengthError,
    InputError,
    SettingError,
    TemplateError,
    UnsupportedError,
)
from strata.serve.messages import End

_FLAG = re.compile(r"--([a-z-]+)")


class ApiError(Exception):
    """An answer with a status of 4xx or 5xx. code: short and stable; field: where it is wrong;
    retry_s: when to ask again."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        *,
        field: str | None = None,
        retry_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = " ".join(message.split())
        self.code = code
        self.field = field
        self.retry_s = retry_s

    @property
    def headers(self) -> dict[str, str]:
        """Of the response."""
        headers = {} if self.retry_s is None else {"Retry-After": str(self.retry_s)}
        if self.status == 401:
            headers["WWW-Authenticate"] = 'Basic realm="strata", charset="UTF-8"'
        return headers

    def openai(self) -> dict[str, Any]:
        """The body of the OpenAI routes."""
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": kinds.get(self.status, kind),
                "param": self.field,
                "code": self.code,
            }
        }

    def anthropic(self) -> dict[str, Any]:
        """The body of the Anthropic routes."""
        kinds = {
            401: "authentication_error", 403: "permission_error", 404: "not_found_error",
            413: "request_too_large", 503: "overloaded_error", 529: "overloaded_error",
        }  # fmt: skip
        kind = "invalid_request_error" if self.status < 500 else "api_error"
        return {
            "type": "error",
            "error": {"type": kinds.get(self.status, kind), "message": self.message},
        }

    def body(self, path: str) -> dict[str, Any]:
        """In the manner of the route."""
        return self.anthropic() if path.startswith("/v1/messages") else self.openai()


def bad_request(error: InputError, field: str | None = None) -> ApiError:
    """What the caller can mend; field: where, if that is known."""
    if isinstance(error, ContextLengthError):
        return ApiError(400, str(error), "context_length_exceeded", field=field or "messages")
    if isinstance(error, TemplateError):
        return ApiError(400, str(error), "template_refused", field="messages")
    if isinstance(error, UnsupportedError):
        return ApiError(400, str(error), "unsupported", field=field)
    setting = _FLAG.match(str(error))
    if isinstance(error, SettingError) and setting:  # a request has fields, not flags
        name = setting.group(1).replace("-", "_")
        return ApiError(400, name + str(error)[setting.end() :], "invalid_request", field=name)
    return ApiError(400, str(error), "invalid_request", field=field)


def engine_error(end: End) -> ApiError:
    """What an ``End`` with an error means for the client."""
    if end.error_kind in ("EngineDied", "Stopping"):
        return ApiError(503, end.error, "engine_unavailable", retry_s=2)
    if end.error_kind in ("InputError", "SettingError", "ContextLengthError", "UnsupportedError"):
        return ApiError(400, end.error, "invalid_request")
    return ApiError(500, end.error or "the engine failed", "engine_error")
