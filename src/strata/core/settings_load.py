"""Gathers settings: defaults < file < environment < flags. The only place that reads the
environment.

Remembers where each value came from. An unknown name anywhere is an error, never skipped; so is a
STRATA_ variable that no setting answers to.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.core.errors import SettingError
from strata.core.setting_kinds import SettingInfo, shown
from strata.core.settings import SETTINGS, Settings, nearest, require_known

CONFIG_ENV = "STRATA_CONFIG"
"""Names a settings file, as --config does."""

DEFAULT = "default"
AUTO = "auto"


@dataclass(frozen=True)
class Effective:
    """Settings and, for each, where its value came from: "default", "auto", "file X", "environment
    Y", "--flag".
    """

    settings: Settings
    sources: Mapping[str, str]

    def asked(self, name: str) -> bool:
        """Whether somebody gave this setting a value."""
        return self.sources[name] not in (DEFAULT, AUTO)


def load_settings(
    given: Mapping[str, Any] | None = None,
    *,
    config: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    as_flags: bool = False,
) -> Effective:
    """Settings from all sources; SettingError for anything unknown, out of range or contradictory.

    given: values of highest rank by setting name; None counts as not given. as_flags: report them
    as --flags. environ: replaces the process's environment (tests).
    """
    environment = os.environ if environ is None else environ
    given = {name: value for name, value in (given or {}).items() if value is not None}
    require_known(given, SETTINGS)
    config = config or environment.get(CONFIG_ENV) or None
    values: dict[str, Any] = {}
    sources = dict.fromkeys(SETTINGS, DEFAULT)
    if config is not None:
        for name, value in _read_file(Path(config)).items():
            values[name] = _parse(SETTINGS[name], value, f"file {config}")
            sources[name] = f"file {config}"
    for name, (variable, text) in _read_environment(environment).items():
        values[name] = _parse(SETTINGS[name], text, f"environment {variable}")
        sources[name] = f"environment {variable}"
    for name, value in given.items():
        values[name] = SETTINGS[name].parse(value)
        sources[name] = SETTINGS[name].flag if as_flags else f"argument {name}"
    return Effective(Settings(**values), sources)


def user_data_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Where a user's programs keep what they worked out (XDG base directories)."""
    environment = os.environ if environ is None else environ
    given = environment.get("XDG_DATA_HOME")
    # the specification has relative paths ignored
    if given and Path(given).is_absolute():
        return Path(given)
    return Path.home() / ".local" / "share"


def _parse(info: SettingInfo, value: object, source: str) -> Any:
    try:
        return info.parse(value)
    except SettingError as error:
        raise SettingError(f"{source}: {error}") from None


def _read_file(config: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(config.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError(f"settings file {config}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"settings file {config} is not valid TOML: {error}") from None
    require_known(table, SETTINGS, f"setting in {config}:")
    return table


def _read_environment(environment: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Setting name -> (variable, text). An empty variable counts as unset."""
    names = {variable: info.name for info in SETTINGS.values() for variable in info.env}
    found: dict[str, tuple[str, str]] = {}
    for variable in sorted(environment):
        text = environment[variable]
        if not variable.startswith("STRATA_") or variable == CONFIG_ENV or not text:
            continue
        if variable not in names:
            raise SettingError(
                f"environment variable {variable} is no setting of this version (see "
                f"docs/SETTINGS.md); unset it{nearest(variable, names)}"
            )
        name = names[variable]
        if name in found and found[name][1] != text:
            other, value = found[name]
            raise SettingError(
                f"{other}={shown(value)} and {variable}={shown(text)} set the same thing; unset one"
            )
        found[name] = (variable, text)
    return found
