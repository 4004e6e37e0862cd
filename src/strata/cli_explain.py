"""strata explain: the steps of one window in order, and where the last plan put each layer's
experts.
"""

from __future__ import annotations

from collections.abc import Sequence

from strata.cli_flags import ENGINE, CommandParser, asked_settings
from strata.cli_screen import open_model
from strata.core.errors import SettingError

WINDOWS = range(1, 9)


def main(arguments: Sequence[str]) -> int:
    """Explain a window."""
    parser = CommandParser(
        "explain", "Print the program of one window, and one plan of each layer."
    )
    parser.add_argument("model", metavar="MODEL", help="GGUF or safetensors file, part, or folder")
    parser.add_argument(
        "--window", metavar="N", help="tokens of the window, 1 to 8 [tokens, default: --spec]"
    )
    parser.add_argument("--quiet", action="store_true", help="no start-up report")
    parser.add_settings(ENGINE)
    args = parser.read(arguments)
    asked = asked_settings(args)
    window = window_size(args.window, asked.settings.spec)
    with open_model(args.model, asked, quiet=args.quiet) as model:
        print("\n".join(model.engine.explain(window)))
    return 0


def window_size(text: str | None, default: int) -> int:
    """A --window value; SettingError when it is no window size."""
    if text is None:
        return default
    if not text.strip().isdigit() or int(text) not in WINDOWS:
        raise SettingError(f"--window {text}: must be between {WINDOWS[0]} and {WINDOWS[-1]}")
    return int(text)
