"""The command line: finds the command, imports its module and nothing else, and turns errors into
one line.

Exit codes: 0 done, 1 the engine failed or a check said no, 2 something in the call is wrong, 130
interrupted.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches

from strata import __version__
from strata.core.errors import InputError, StrataError
from strata.core.log import LOG, log_to

COMMANDS = {
    "run": "answer one prompt",
    "chat": "talk, turn by turn",
    "serve": "serve a model over HTTP",
    "inspect": "show what is in a model file",
    "explain": "print the steps of one window and where its experts are computed",
    "plan": "say how much memory a model takes, and whether it fits",
    "quality": "measure what lossy settings change, by position",
    "tune": "find the fastest setting within a quality budget",
    "logpos": "write the model's log-probabilities of a text",
    "bench": "measure: decode speed, arms against each other, CPU kernels, cache policies",
    "doctor": "say what this machine is, what will be slow, and how fast a model will answer",
}
"""Command and what it does; ``cli_<command>.py`` has ``main(arguments) -> exit code``."""

USAGE = """usage: strata COMMAND ...

Runs Mixture-of-Experts language models that are larger than the graphics card.

commands:
{commands}

strata COMMAND -h     options of a command
strata --version      version
"""

PIPE_CLOSED = 141
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    handler = log_to(quiet=True)  # what is in effect is in the start-up report
    try:
        code = _dispatch(given)
        sys.stdout.flush()
        return code
    except StrataError as error:
        print(f"strata: {_one_line(error)}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # the reader left; keep the interpreter from complaining when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        print(f"strata: {name}{error.strerror or error}", file=sys.stderr)
        return 2
    except MemoryError:
        print("strata: out of memory; see strata plan for what the model takes", file=sys.stderr)
        return 1
    finally:
        LOG.removeHandler(handler)


def _dispatch(given: list[str]) -> int:
    command = given[0] if given else ""
    if command == "--version":
        print(f"strata {__version__}")
        return 0
    if command in ("", "-h", "--help", "help"):
        width = max(map(len, COMMANDS))
        commands = "\n".join(f"  {name:{width}}  {text}" for name, text in COMMANDS.items())
        print(USAGE.format(commands=commands), end="")
        return 0 if command else 2
    if command not in COMMANDS:
        close = get_close_matches(command, COMMANDS, n=1)
        raise InputError(
            f"unknown command {command!r}"
            + (f"; did you mean {close[0]!r}?" if close else "; strata -h lists them")
        )
    return int(importlib.import_module(f"strata.cli_{command}").main(given[1:]))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    sys.exit(main())
