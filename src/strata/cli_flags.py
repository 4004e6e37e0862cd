"""Parsers of the commands, made from the settings table: no flag is written down twice."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from strata.core.errors import SettingError
from strata.core.files import require_file, require_text
from strata.core.setting_kinds import Scope, SettingInfo
from strata.core.settings import SETTINGS, nearest
from strata.core.settings_load import CONFIG_ENV, Effective, load_settings

ENGINE: tuple[Scope, ...] = ("engine",)
REQUEST: tuple[Scope, ...] = ("engine", "request")
SERVE: tuple[Scope, ...] = ("serve", "engine", "request")


_BELONGS: dict[Scope, str] = {
    "serve": "is a setting of strata serve",
    "request": "is about sampling, and this command writes no text",
    "engine": "is fixed when a model is loaded, and this command loads none",
}
OUTPUTS, TEXTS, DRAWN = ("json", "plot", "out"), ("text", "texts"), (".png", ".svg", ".pdf")


class CommandParser(argparse.ArgumentParser):
    """A parser that raises SettingError with one clear line instead of printing its usage."""

    def __init__(self, command: str, about: str) -> None:
        super().__init__(
            prog=f"strata {command}",
            description=about,
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32),
        )

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting."""
        raise SettingError(f"{message} ({self.prog} -h shows the options)")

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse; an unknown flag is an error that names the nearest one."""
        args, extra = self.parse_known_args(list(arguments))
        if extra:
            flag = extra[0].partition("=")[0]
            if flag.startswith("-"):
                other = next((i for i in SETTINGS.values() if i.flag == flag), None)
                if other is not None:
                    self.error(f"{flag} has no effect here: it {_BELONGS[other.scope]}")
                known = [name for action in self._actions for name in action.option_strings]
                self.error(f"unknown option {flag}{nearest(flag, known)}")
            self.error(f"unexpected argument {extra[0]!r}; text with spaces needs quotes")
        _require_files(args)
        return args

    def only(self, args: argparse.Namespace, way: str, *beside: str) -> None:
        """SettingError for an option that was given and has no effect on this way of calling the
        command. way: its flag; beside: names of options that go with it."""
        kept = {way[2:].replace("-", "_"), *beside}
        for action in self._actions:
            if action.dest not in kept and getattr(args, action.dest, action.default) not in (
                action.default, [], None,
            ):  # fmt: skip
                option = action.option_strings[0] if action.option_strings else action.metavar
                self.error(f"{option} has no effect with {way}, which reads what is stored")

    def refuse_settings(
        self, args: argparse.Namespace, where: str, but: Sequence[str] = ()
    ) -> None:
        """SettingError for an engine setting that was given as a flag and has no effect here."""
        given = [i for i in SETTINGS.values() if getattr(args, i.name, None) is not None]
        for info in given:
            if info.scope == "engine" and info.name not in but:
                self.error(f"{info.flag} has no effect {where}")

    def add_settings(self, scopes: Iterable[Scope]) -> None:
        """One flag for each setting of these scopes, and --config."""
        titles = {
            "engine": "engine settings",
            "request": "sampling and length",
            "serve": "server settings",
        }
        for scope in scopes:
            group = self.add_argument_group(titles[scope])
            for info in SETTINGS.values():
                if info.scope == scope:
                    _add_flag(group, info)
        self.add_argument(
            "--config", metavar="FILE", help=f"TOML file of settings (environment: {CONFIG_ENV})"
        )


def _require_files(args: argparse.Namespace) -> None:
    """What a command would find out after its work: a file it cannot write, a text it cannot
    read."""
    given = vars(args)
    for name in OUTPUTS:
        path = given.get(name)
        if not isinstance(path, str) or path == "-":
            continue
        if name == "plot" and Path(path).suffix not in DRAWN:
            raise SettingError(f"--plot {path}: a plot's name ends in {', '.join(DRAWN)}")
        require_file(f"--{name}", Path(path))
    for name in TEXTS:
        for path in [given[name]] if isinstance(given.get(name), str) else given.get(name) or ():
            if path != "-":
                require_text(f"--{name}", Path(path))


def asked_settings(args: argparse.Namespace) -> Effective:
    """Settings of a command's flags over environment and file."""
    given = {name: getattr(args, name, None) for name in SETTINGS}
    return load_settings(given, config=args.config, as_flags=True)


def read_text(argument: str | None) -> str:
    """A text argument; standard input when it is missing or "-"."""
    if argument is not None and argument != "-":
        return argument
    if argument is None and sys.stdin.isatty():
        raise SettingError("no prompt given; write it as an argument or pipe it in")
    return sys.stdin.read()


def _add_flag(group: argparse._ArgumentGroup, info: SettingInfo) -> None:
    unit = f" {info.unit}" if info.unit else ""
    default = info.show(info.default)
    shown = default if default in (info.auto_word, "none") else f"{default}{unit}"
    output = "; changes the output" if info.changes_output else ""
    text = f"{info.help} [{unit.strip() + ', ' if unit else ''}default {shown}{output}]"
    help_text = text.replace("%", "%%")
    if info.kind == "on|off":
        group.add_argument(
            info.flag, dest=info.name, action=argparse.BooleanOptionalAction, help=help_text
        )
    else:
        group.add_argument(
            info.flag,
            dest=info.name,
            metavar=info.kind,
            action="append" if info.repeatable else "store",
            help=help_text,
        )
