"""How one setting is declared and how its value is read from text or Python. Knows no setting by
name.

A field made here carries its SettingInfo: unit, help, range, and the word that stands for its
automatic value. A value is accepted in Python form (``256``) and in text form (``"256"``), and
never bent to fit.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from strata.core.errors import SettingError

MAX_BIAS = 1e6
"""Largest logit bias either way: decides every choice, and sums stay finite."""

Scope = Literal["engine", "request", "serve"]
"""Fixed when a model is loaded, free from one request to the next, or of the server alone."""


@dataclasses.dataclass(frozen=True)
class SettingInfo:
    """What is known about one setting besides its value."""

    name: str
    default: Any
    help: str
    kind: str
    """Shown in help texts: "N", "X", "FILE", "TEXT" or the choices."""
    unit: str
    changes_output: bool
    scope: Scope
    convert: Callable[[object], Any]
    """Raises ValueError with the reason, without the setting's name."""
    auto: object = None
    """Value that means "work it out"; written as auto_word."""
    auto_word: str = "auto"
    repeatable: bool = False
    aliases: tuple[str, ...] = ()
    """Further environment names, those of the upstream engine."""
    secret: bool = False
    """Never shown."""

    @property
    def flag(self) -> str:
        """Name on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> tuple[str, ...]:
        """Environment names, our own first."""
        return ("STRATA_" + self.name.upper(), *self.aliases)

    def show(self, value: object) -> str:
        """The value as a reader would type it."""
        if self.auto is not None and value == self.auto:
            return self.auto_word
        if value is None:
            return "none"
        if self.secret:
            return "(not shown)"
        if isinstance(value, bool):
            return "on" if value else "off"
        if isinstance(value, tuple):
            return ", ".join(_show_item(item) for item in value) or "none"
        return repr(value) if isinstance(value, float) else str(value)

    def parse(self, value: object) -> Any:
        """Python or text form to the stored form; SettingError naming the setting and the value."""
        if self.auto is not None and isinstance(value, str) and value.strip() == self.auto_word:
            return self.auto
        try:
            return self.convert(value)
        except ValueError as error:
            what = "" if self.secret else f" {shown(value)}"
            raise SettingError(f"{self.flag}{what}: {error}") from None


def shown(value: object) -> str:
    """A value of any kind in an error message, cut to a readable length."""
    text = value if isinstance(value, str) else repr(value)
    return repr(text) if text == "" else text[:60] + ("..." if len(text) > 60 else "")


def _show_item(item: object) -> str:
    return f"{item[0]}={item[1]}" if isinstance(item, tuple) else repr(item)


def _field(
    default: Any, help: str, kind: str, convert: Callable[[object], Any], **more: Any
) -> Any:
    facts = {"unit": "", "changes_output": False, "scope": "engine", **more}
    metadata = {"default": default, "help": help, "kind": kind, "convert": convert, **facts}
    return dataclasses.field(default=default, metadata=metadata)


def info_of(field: dataclasses.Field[Any]) -> SettingInfo:
    """SettingInfo of a dataclass field made by one of the functions below."""
    return SettingInfo(name=field.name, **field.metadata)


def choice(default: str, choices: tuple[str, ...], help: str, **more: Any) -> Any:
    """One of a few words."""

    def convert(value: object) -> str:
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)  # defer_cpu = 1 in a settings file
        if value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return str(value)

    return _field(default, help, "|".join(choices), convert, **more)


def integer(default: int, low: int, high: int | None, help: str, **more: Any) -> Any:
    """A whole number in [low, high]."""
    auto = more.get("auto")

    def convert(value: object) -> int:
        if isinstance(value, str):
            try:
                value = int(value.strip())
            except ValueError:
                raise ValueError("must be a whole number") from None
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError("must be a whole number")
        if value != auto or auto is None:
            _require_range(value, low, high)
        return value

    return _field(default, help, "N", convert, **more)


def number(default: float, low: float, high: float | None, help: str, **more: Any) -> Any:
    """A finite number in [low, high]."""
    above = more.pop("above", False)

    def convert(value: object) -> float:
        result = _finite(value)
        if result == more.get("auto"):
            return result
        _require_range(result, low, high)
        if above and result <= low:
            raise ValueError(f"must be above {low:g}")
        return result

    return _field(default, help, "X", convert, **more)


def one_in(help: str, **more: Any) -> Any:
    """A share of the form 1/N, or 0 for none (the default)."""

    def convert(value: object) -> Fraction:
        try:
            share = Fraction(str(value).strip())
        except (ValueError, ZeroDivisionError):
            share = Fraction(-1)
        if share != 0 and share.numerator != 1:
            raise ValueError("must be 0 or 1/N")
        return share

    return _field(Fraction(0), help, "1/N", convert, **more)


def switch(default: bool, help: str, **more: Any) -> Any:
    """On or off."""
    words = {"1": True, "on": True, "true": True, "0": False, "off": False, "false": False}

    def convert(value: object) -> bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.strip().lower() in words:
            return words[value.strip().lower()]
        raise ValueError("must be on or off")

    return _field(default, help, "on|off", convert, **more)


def path(help: str, **more: Any) -> Any:
    """The path of a file (or, with another ``kind``, of a folder), or none."""
    kind = more.pop("kind", "FILE")

    def convert(value: object) -> Path | None:
        if value is None:
            return None
        if not isinstance(value, str | Path) or not str(value):
            raise ValueError("must be a path")
        return Path(value).expanduser()

    return _field(None, help, kind, convert, **more)


def text(default: str, help: str, **more: Any) -> Any:
    """One text without control characters; empty is none."""
    kind = more.pop("kind", "TEXT")
    if not default:
        more |= {"auto": "", "auto_word": "none"}

    def convert(value: object) -> str:
        if not isinstance(value, str | Path) or not str(value).isprintable():
            raise ValueError("must be a text without control characters")
        return str(value)

    return _field(default, help, kind, convert, **more)


def texts(help: str, **more: Any) -> Any:
    """A list of texts; from text, one text or a JSON list of them."""

    def convert(value: object) -> tuple[str, ...]:
        if isinstance(value, str):
            value = _json_list(value)
        if not isinstance(value, list | tuple) or not all(isinstance(x, str) for x in value):
            raise ValueError("must be a text or a list of texts")
        if not all(value):
            raise ValueError("an empty text would match everywhere")
        return tuple(dict.fromkeys(value))

    return _field((), help, "TEXT", convert, repeatable=True, **more)


def layers(help: str, **more: Any) -> Any:
    """Layer numbers; from text, separated by commas. Empty is automatic."""

    def convert(value: object) -> tuple[int, ...]:
        if isinstance(value, str):
            value = [] if value.strip() == more.get("auto_word", "auto") else value.split(",")
        if not isinstance(value, list | tuple):
            raise ValueError("must be layer numbers, separated by commas")
        try:
            found = sorted({_whole(item) for item in value})
        except (TypeError, ValueError):
            raise ValueError("must be layer numbers, separated by commas") from None
        if found and found[0] < 0:
            raise ValueError("layers count from 0")
        return tuple(found)

    return _field((), help, "LIST", convert, auto=(), **more)


def biases(help: str, **more: Any) -> Any:
    """Token id to added logit; from text "id=value", several separated by commas."""

    def convert(value: object) -> tuple[tuple[int, float], ...]:
        if isinstance(value, str):
            value = [value]
        if isinstance(value, Mapping):
            pairs = list(value.items())
        elif isinstance(value, list | tuple):
            pairs = [pair for item in value for pair in _bias_pairs(item)]
        else:
            raise ValueError("must map token ids to numbers")
        result: dict[int, float] = {}
        for token, bias in pairs:
            key = _token(token)
            if key in result:
                raise ValueError(f"token {key} is given twice")
            result[key] = _finite(bias)
            _require_range(result[key], -MAX_BIAS, MAX_BIAS)
        return tuple(sorted(result.items()))

    return _field((), help, "ID=X", convert, repeatable=True, **more)


def _whole(item: object) -> int:
    """A whole number, or a text of one; nothing is rounded."""
    if isinstance(item, bool) or not isinstance(item, int | str):
        raise ValueError
    return int(item)


def _require_range(value: float, low: float, high: float | None) -> None:
    if value < low or (high is not None and value > high):
        limits = f"between {low} and {high}" if high is not None else f"{low} or more"
        raise ValueError(f"must be {low}" if low == high else f"must be {limits}")


def _finite(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("must be a number")
    try:
        result = float(value)
    except (ValueError, OverflowError):
        raise ValueError("must be a number") from None
    if not math.isfinite(result):
        raise ValueError("must be a finite number")
    return result


def _token(value: object) -> int:
    try:
        token = int(value) if isinstance(value, str) else value
    except ValueError:
        token = None
    if isinstance(token, bool) or not isinstance(token, int) or token < 0:
        raise ValueError(f"{shown(value)} is no token id")
    return token


def _bias_pairs(item: object) -> list[tuple[object, object]]:
    if isinstance(item, str):
        parts = [part.partition("=") for part in item.split(",")]
        if not all(sign for _, sign, _ in parts):
            raise ValueError("must look like 123=-1.5")
        return [(token.strip(), bias.strip()) for token, _, bias in parts]
    if isinstance(item, list | tuple) and len(item) == 2:
        return [(item[0], item[1])]
    raise ValueError("must map token ids to numbers")


def _json_list(value: str) -> object:
    if value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except ValueError:
            pass
    return [value]
