"""strata logpos: what the model expected at each token of a text, read through windows, one line a
token.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from strata.cli_explain import window_size
from strata.cli_flags import ENGINE, CommandParser, asked_settings
from strata.cli_screen import open_model, require_room, say, tokenizer_of
from strata.core.errors import InputError, SettingError
from strata.core.settings import SETTINGS
from strata.engine.build import Ready
from strata.engine.logpos import NO_TOKEN, LogposWriter, extra_token
from strata.engine.model import Model

MOST_TOP = 256


def main(arguments: Sequence[str]) -> int:
    """Write log-probabilities."""
    parser = CommandParser(
        "logpos", "Write the model's log-probabilities of a text, a line a token."
    )
    parser.add_argument("model", metavar="MODEL", help="GGUF or safetensors file, part, or folder")
    parser.add_argument(
        "--text", metavar="FILE", required=True, help="UTF-8 text to read; - is stdin"
    )
    parser.add_argument(
        "--out", metavar="FILE", required=True, help="lines are appended to this file"
    )
    parser.add_argument(
        "--top",
        metavar="N",
        default="20",
        help=f"tokens listed a line, 0 to {MOST_TOP} [default 20]",
    )
    parser.add_argument(
        "--window", metavar="N", help="tokens read together, 1 to 8 [tokens, default: --spec]"
    )
    parser.add_argument("--quiet", action="store_true", help="no start-up report")
    parser.add_settings(ENGINE)
    args = parser.read(arguments)
    asked = asked_settings(args)
    for name in ("logpos", "logpos_top"):
        if asked.asked(name):
            ours = "--out" if name == "logpos" else "--top"
            parser.error(
                f"{SETTINGS[name].flag} ({asked.sources[name]}) is about answers; this command "
                f"writes none, use {ours}"
            )
    window = window_size(args.window, asked.settings.spec)
    top = _top(args.top)
    text = _read(args.text)

    def check(ready: Ready) -> None:
        _require_some(n := len(tokenizer_of(ready).encode(text)))
        require_room(n, ready.settings.context)

    with open_model(args.model, asked, quiet=args.quiet, check=check) as model:
        extra = extra_token(model.settings, model.eos_tokens, model.engine.n_vocab)
        with LogposWriter(Path(args.out), top, extra) as write:
            n = write_text(model, model.prompt_tokens(text), window, write)
    say([f"{args.out}: {n} lines appended"])
    return 0


def write_text(model: Model, tokens: Sequence[int], window: int, write: LogposWriter) -> int:
    """Read tokens through windows, all kept, and write a line for each; the number of lines."""
    engine = model.engine
    _require_some(len(tokens))
    require_room(len(tokens), engine.context_tokens)
    engine.reset()
    for start in range(0, len(tokens), window):
        chunk = tokens[start : start + window]
        for i, row in enumerate(engine.run_window(chunk)):
            following = tokens[start + i + 1 : start + i + 2]
            write(start + i, row, following[0] if following else NO_TOKEN)
        engine.commit(len(chunk))
    return len(tokens)


def _require_some(n_tokens: int) -> None:
    if not n_tokens:
        raise InputError("the text is empty; at least one token is needed")


def _top(text: str) -> int:
    if not text.strip().isdigit() or int(text) > MOST_TOP:
        raise SettingError(f"--top {text}: must be between 0 and {MOST_TOP}")
    return int(text)


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name} is not UTF-8 text: {error.reason} at byte {error.start}"
        ) from None
