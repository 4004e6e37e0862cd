"""What the commands show on the terminal: answers on standard output, everything else on standard
error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from strata.core.errors import ContextLengthError, InputError
from strata.core.settings_load import Effective
from strata.core.types import TokenEvent
from strata.engine.build import Check, Ready
from strata.engine.model import Model, load_effective
from strata.formats.tokenizer import Tokenizer


@contextmanager
def open_model(
    path: str, asked: Effective, *, quiet: bool, check: Check | None = None
) -> Iterator[Model]:
    """Load a model with a progress bar (on a terminal) and its start-up report; closed at the
    end. check: a look at what is asked of it, before a weight is read.
    """
    with _progress_bar() as progress:
        model = load_effective(path, asked, progress, check)
    with model:
        if not quiet:
            say(model.report)
        yield model


def tokenizer_of(ready: Ready) -> Tokenizer:
    """The tokenizer of a model that is not loaded yet; InputError when it has none."""
    if isinstance(ready.tokenizer, InputError):
        raise ready.tokenizer
    return ready.tokenizer


def require_room(n_tokens: int, context_tokens: int) -> None:
    """ContextLengthError for more tokens than the context holds."""
    if n_tokens > context_tokens:
        raise ContextLengthError(n_tokens, context_tokens)


def say(lines: Iterable[str]) -> None:
    """Write lines for people to standard error."""
    for line in lines:
        print(line, file=sys.stderr)


def show(event: TokenEvent) -> None:
    """Write the text of one token at once."""
    if event.text:
        sys.stdout.write(_writable(event.text))
        sys.stdout.flush()


def _writable(text: str) -> str:
    """The text without characters that the terminal's encoding lacks."""
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, errors="replace").decode(encoding)


@contextmanager
def _progress_bar() -> Iterator[Any]:
    """A callback (phase, bytes done, bytes in all) that draws a bar; None where nobody watches."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("loading {task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        tasks: dict[str, Any] = {}

        def update(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = progress.add_task(phase, total=total)
            progress.update(tasks[phase], completed=done, total=total)

        yield update
