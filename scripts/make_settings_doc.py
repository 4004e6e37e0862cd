"""Writes docs/SETTINGS.md from the settings table, so that the two cannot differ.

python scripts/make_settings_doc.py
"""

from __future__ import annotations

from pathlib import Path

from strata.core.setting_kinds import SettingInfo
from strata.core.settings import SETTINGS
from strata.core.settings_load import CONFIG_ENV

TARGET = Path(__file__).resolve().parents[1] / "docs" / "SETTINGS.md"

HEAD = f"""# Settings

Made from `src/strata/core/settings.py` by `scripts/make_settings_doc.py`; change it there.

The same names everywhere: `--top-k 20` on the command line, `top_k=20` in Python, `STRATA_TOP_K=20`
in the environment, `top_k = 20` in a TOML file given with `--config FILE` or `{CONFIG_ENV}`.
Flags outrank the environment, the environment outranks the file, the file outranks the default.
An unknown name, a value out of range or two settings that exclude each other are an error, wherever
they come from; a value that was asked for is never replaced. What is in effect is printed at start.
"""

ENGINE = """
## Engine

Fixed when a model is loaded.
"""

REQUEST = """
## Request

May differ from one answer to the next; in Python given to `generate`.
"""

SERVE = """
## Server

Read by `strata serve` when it starts.
"""

FEATURES = """
*Output*: whether another value can change the text. With every setting at its default, a new
version never changes greedy text beyond rounding.
"""


def cell(text: str) -> str:
    """Text that is safe inside a table cell."""
    return text.replace("|", "\\|")


def kind(info: SettingInfo) -> str:
    """Form and unit of one setting."""
    return f"`{cell(info.kind)}`" + (f" {info.unit}" if info.unit else "")


def table(scope: str) -> str:
    """One scope's settings as a table."""
    lines = [
        "| flag | value | default | output | meaning | environment |",
        "|---|---|---|---|---|---|",
    ]
    for info in SETTINGS.values():
        if info.scope == scope:
            names = ", ".join(f"`{name}`" for name in info.env)
            changes = "changes" if info.changes_output else "same"
            lines.append(
                f"| `{info.flag}` | {kind(info)} | {info.show(info.default)} | {changes} "
                f"| {cell(info.help)} | {names} |"
            )
    return "\n".join(lines) + "\n"


def render() -> str:
    """The whole document."""
    return "\n".join(
        (
            HEAD + FEATURES + ENGINE,
            table("engine") + REQUEST,
            table("request") + SERVE,
            table("serve"),
        )
    )


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
