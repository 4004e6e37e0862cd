"""strata chat: a conversation on the terminal. Each turn reuses the state of the turns before
it.
"""

from __future__ import annotations

import contextlib
import importlib
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType

from strata.cli_flags import REQUEST, CommandParser, asked_settings
from strata.cli_screen import open_model, say, show, tokenizer_of
from strata.core.errors import InputError, StrataError, UnsupportedError
from strata.engine.build import Ready
from strata.engine.model import Message, Model
from strata.engine.session import Answer

HELP = "/new starts over, /stats tells about the last answer, /exit leaves; Ctrl-C stops an answer"


def main(arguments: Sequence[str]) -> int:
    """Talk."""
    parser = CommandParser("chat", f"Talk to a model, turn by turn. {HELP}.")
    parser.add_argument("model", metavar="MODEL", help="GGUF or safetensors file, part, or folder")
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    parser.add_argument("--quiet", action="store_true", help="no start-up report")
    parser.add_settings(REQUEST)
    args = parser.read(arguments)
    asked = asked_settings(args)

    def check(ready: Ready) -> None:
        if not tokenizer_of(ready).has_chat_template:
            raise UnsupportedError(
                f"{args.model} has no chat template; continue a text with strata run --raw"
            )

    with open_model(args.model, asked, quiet=args.quiet, check=check) as model:
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                importlib.import_module("readline")  # line editing, where the platform has it
            say([HELP])
        Conversation(model, args.system).run()
    return 0


class Conversation:
    """The messages so far, and the loop over lines typed."""

    def __init__(self, model: Model, system: str | None) -> None:
        self._model = model
        self._first: list[Message] = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._first)
        self._last: Answer | None = None

    def run(self) -> None:
        """Read lines until the end of input or /exit."""
        for line in _lines():
            if line == "/exit":
                return
            if line == "/new":
                self._messages = list(self._first)
            elif line == "/stats":
                lines = self._last.report.lines() if self._last else ["no answer yet"]
                self._model.read_again()
                say([*lines, *self._model.counter_lines()])
            elif line.startswith("/"):
                say([f"unknown command {line.split()[0]}; {HELP}"])
            elif line:
                self._turn(line)

    def _turn(self, text: str) -> None:
        """One question and its answer. A refused turn leaves the conversation as it was."""
        messages = [*self._messages, {"role": "user", "content": text}]
        try:
            self._last = self._model.generate(messages)
            answer = self._write(self._last)
        except InputError as error:
            say([f"strata: {error}"])
            return
        except StrataError as error:
            say([f"strata: {error}; the turn is dropped"])
            return
        except KeyboardInterrupt:
            say(["(interrupted before the answer; the turn is dropped)"])
            return
        self._messages = [*messages, {"role": "assistant", "content": answer}]

    def _write(self, answer: Answer) -> str:
        """Show the answer; its text. Ctrl-C ends it between two tokens, and what was shown is
        kept.
        """
        pieces: list[str] = []
        with _interruptions(pieces) as interrupted:
            try:
                for event in answer:
                    pieces.append(event.text)
                    show(event)
                    if interrupted:
                        answer.close()
                        break
            finally:
                print(flush=True)
        if answer.report.finish == "length":
            say(["(cut at the length limit)"])
        return "".join(pieces)


def _lines() -> Iterator[str]:
    """Lines from the terminal or a pipe, stripped. Ctrl-C or the end of input at the prompt ends
    them.
    """
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt)
        except (EOFError, KeyboardInterrupt):
            if prompt:
                print()
            return
        yield line.strip()


@contextlib.contextmanager
def _interruptions(pieces: Sequence[str]) -> Iterator[list[int]]:
    """Collects Ctrl-C, to be looked at between two tokens. It is raised while there is no piece of
    answer yet (a long prompt is being read), and the second time in any case."""
    heard: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if heard or not pieces:
            raise KeyboardInterrupt
        heard.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield heard
    finally:
        signal.signal(signal.SIGINT, before)
