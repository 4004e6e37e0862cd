"""Every error this project raises on purpose.

The message holds what failed, the values, and what to do next.

StrataError
├── InputError              the caller can mend it; a server answers 4xx and lives on
│   ├── FormatError         a file is short, damaged, hostile or self-contradictory
│   ├── UnsupportedError    understood, but not supported; named, with the reason
│   ├── SettingError        an unknown setting, a bad value, or two that exclude each other
│   ├── ContextLengthError  prompt and context do not fit each other
│   ├── TemplateError       the chat template refused the conversation
│   └── DoesNotFitError     the memory plan exceeds a limit
└── EngineError             the engine's own trouble; state is void, the process lives
    ├── NumericsError       NaN or infinity where a number was due
    ├── StallError          somebody did not answer in bounded time
    ├── ProgramError        a window program breaks one of its rules (check())
    └── RequestCancelled    the one who asked has left; no fault of anybody
"""

from __future__ import annotations


class StrataError(Exception):
    """Base of all errors raised on purpose."""


class InputError(StrataError):
    """Something the caller gave is wrong, and the caller can mend it."""


class FormatError(InputError):
    """A file is short, damaged, hostile or contradicts itself."""


class UnsupportedError(InputError):
    """Understood, but not supported; the message names it and gives the reason."""


class SettingError(InputError):
    """An unknown setting, a value out of range, or a combination that cannot be."""


class ContextLengthError(InputError):
    """Prompt (plus requested tokens) does not fit the context; carries both counts."""

    def __init__(self, n_tokens: int, context_tokens: int) -> None:
        self.n_tokens = n_tokens
        self.context_tokens = context_tokens
        super().__init__(
            f"the prompt has {n_tokens} tokens but the context holds {context_tokens}; "
            f"shorten the prompt or start with a larger --context"
        )


class TemplateError(InputError):
    """The chat template refused the conversation; the message is the template's own."""


class DoesNotFitError(InputError):
    """The memory plan exceeds a limit; the message gives needed, available, source, shortfall."""


class EngineError(StrataError):
    """The engine's own trouble; the running request's state is void, the process lives."""


class NumericsError(EngineError):
    """NaN or infinity where a number was due."""


class StallError(EngineError):
    """A worker or device did not answer in bounded time; the message names the layer."""


class ProgramError(EngineError):
    """A window program breaks one of its rules; the message names the step and the rule."""


class RequestCancelled(EngineError):
    """The one who asked does not want the answer any more; raised to get out of a long step."""
