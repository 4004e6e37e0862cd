"""Typed reading of a model's settings: a config.json's keys, or a GGUF's metadata.

Knows no family. Whatever is missing, of the wrong kind or unsupported is refused by naming the
file, the key, the value and what was expected.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from strata.core.errors import FormatError, UnsupportedError

MOST = 1 << 20
"""Largest credible width or number of parts; work is done for each before a tensor is compared."""
MOST_TOKENS = 1 << 40
"""Largest credible number of tokens or table rows."""


class Config:
    """A read-only view of settings.

    ``where`` names the file in errors, ``prefix`` is put before every key.

    A key whose value is null counts as absent. Keys with several spellings are tried in the order
    given.
    """

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.values = values
        self.where = where
        self.prefix = prefix

    def get(self, key: str) -> Any:
        """The value as it stands in the file, or None."""
        return self.values.get(self.prefix + key)

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.get(key) is not None

    def section(self, key: str) -> Config:
        """The object under a key; empty when absent."""
        value = self.get(key)
        if value is None:
            return Config({}, f"{self.where}: {key}")
        if not isinstance(value, Mapping):
            raise self.wrong(key, value, "an object")
        return Config(value, f"{self.where}: {key}")

    def size(self, *keys: str, default: int | None = None, most: int = MOST) -> int:
        """A whole number from 1 to ``most``."""
        return self._whole(keys, default, 1, most)

    def count(self, *keys: str, default: int | None = None, most: int = MOST) -> int:
        """A whole number from 0 to ``most``."""
        return self._whole(keys, default, 0, most)

    def number(self, *keys: str, default: float | None = None) -> float:
        """A finite number."""
        key, value = self._first(keys, default)
        number = float("nan")
        if isinstance(value, int | float) and not isinstance(value, bool):
            with contextlib.suppress(OverflowError):  # JSON knows whole numbers of any length
                number = float(value)
        if not math.isfinite(number):
            raise self.wrong(key, value, "a number")
        return number

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or false."""
        key, value = self._first((key,), default)
        if not isinstance(value, bool | np.bool_):
            raise self.wrong(key, value, "true or false")
        return bool(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        key, value = self._first((key,), default)
        if not isinstance(value, str):
            raise self.wrong(key, value, "a text")
        return value

    def items(self, key: str) -> list[Any] | None:
        """A list, whatever its items; None when absent."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, np.ndarray):
            return list(value.tolist())
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise self.wrong(key, value, "a list")
        return list(value)

    def whole_numbers(self, key: str) -> tuple[int, ...] | None:
        """A list of whole numbers (a single one counts as a list of one); None when absent."""
        value = self.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            return (value,)
        items = self.items(key)
        if items is None:
            return None
        if any(isinstance(i, bool) or not isinstance(i, int) for i in items):
            raise self.wrong(key, value, "a list of whole numbers")
        return tuple(items)

    def per_layer(self, key: str, n_layers: int) -> list[Any] | None:
        """The trunk layers' items of a list (draft layers may follow); None when absent."""
        items = self.items(key)
        if items is not None and len(items) < n_layers:
            raise FormatError(
                f"{self.where}: {self.prefix}{key} has {len(items)} items for {n_layers} layers; "
                f"the file contradicts itself, fetch it again"
            )
        return None if items is None else items[:n_layers]

    def require(self, key: str, *expected: Any) -> None:
        """Refuse a value other than those expected (none: any value). An absent key passes."""
        value = self.get(key)
        if value is None:
            return
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if value not in expected:
            names = " or ".join(repr(e) for e in expected)
            raise self.unsupported(key, value, names or "leaving it out")

    def unsupported(self, key: str, value: Any, expected: str) -> UnsupportedError:
        """The refusal of a setting that this program does not compute."""
        return UnsupportedError(
            f"{self.where}: {self.prefix}{key} is {_short(value)}; only {expected} is supported, "
            f"so this model cannot be run"
        )

    def wrong(self, key: str, value: Any, expected: str) -> FormatError:
        """The refusal of a value of the wrong kind."""
        return FormatError(
            f"{self.where}: {self.prefix}{key} is {_short(value)} where {expected} was expected; "
            f"compare it with the file the model was published with"
        )

    def _first(self, keys: tuple[str, ...], default: Any) -> tuple[str, Any]:
        for key in keys:
            if self.has(key):
                return key, self.get(key)
        if default is None:
            names = " or ".join(self.prefix + key for key in keys)
            raise FormatError(
                f"{self.where} has no {names}; the model cannot be built without it, "
                f"compare it with the file the model was published with"
            )
        return keys[0], default

    def positive(self, *keys: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.number(*keys, default=default)
        if value <= 0:
            raise self.wrong(self._first(keys, default)[0], value, "a number above 0")
        return value

    def _whole(self, keys: tuple[str, ...], default: int | None, least: int, most: int) -> int:
        key, value = self._first(keys, default)
        if isinstance(value, np.ndarray) and value.size and (value == value.flat[0]).all():
            value = value.flat[0].item()
        if isinstance(value, np.ndarray | list):
            raise self.unsupported(key, value, "one value for all layers")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(key, value, f"a whole number of at least {least}")
        if value > most:
            raise self.wrong(key, value, f"a whole number of at most {most}")
        return value


def _short(value: Any) -> str:
    text = repr(value.tolist() if isinstance(value, np.ndarray) else value)
    return text if len(text) <= 60 else text[:57] + "..."
