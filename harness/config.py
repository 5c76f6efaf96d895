"""Flags from frozen dataclasses: one field, one flag. Knows argparse and nothing else.

    @dataclass(frozen=True)
    class Launch:
        task: str = positional("the SkyPilot task YAML")
        nodes: str = flag("1:1", "how many nodes, LOW:HIGH")

An unknown flag is answered with the nearest known one.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import sys
import types
import typing
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


def flag(default: Any, help: str, **more: Any) -> Any:
    """A field that is `--its-name`."""
    return dataclasses.field(default=default, metadata={"help": help, **more})


def positional(help: str, **more: Any) -> Any:
    """A field that is given by position."""
    return dataclasses.field(metadata={"help": help, "positional": True, **more})


class Parser(argparse.ArgumentParser):
    """argparse that suggests the flag that was meant."""

    def error(self, message: str) -> NoReturn:
        known = [option for action in self._actions for option in action.option_strings]
        for word in message.removeprefix("unrecognized arguments: ").split():
            near = difflib.get_close_matches(word.split("=")[0], known, 1) if word.startswith("-") else []
            if near:
                message += f"; did you mean {near[0]}?"
                break
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: {message} (see `{self.prog} --help`)\n")


def add_flags(parser: argparse.ArgumentParser, cls: type[Any]) -> None:
    """Add one argument per field of `cls`."""
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        kind, settings = hints[f.name], dict(f.metadata)
        is_positional = settings.pop("positional", False)
        options: dict[str, Any] = {"help": settings.pop("help", None), **settings}
        if typing.get_origin(kind) in (typing.Union, types.UnionType):
            kind = next(k for k in typing.get_args(kind) if k is not type(None))
        if is_positional:
            if options.get("nargs") is None and kind is not list:
                options.setdefault("type", kind)
            parser.add_argument(f.name, **options)
            continue
        name = "--" + f.name.replace("_", "-")
        default = f.default if f.default is not dataclasses.MISSING else f.default_factory()  # type: ignore[operator,misc]
        if kind is bool:
            parser.add_argument(name, action="store_true", default=default, **options)
        elif typing.get_origin(kind) is tuple or kind is tuple:
            parser.add_argument(name, action="append", default=None, **options)
        else:
            options.setdefault("type", kind)
            if default not in (None, ""):
                options["help"] = f"{options['help'] or ''} (default: {default})"
            parser.add_argument(name, default=default, **options)


def build(cls: type[T], namespace: argparse.Namespace) -> T:
    """The dataclass from what was parsed."""
    values: dict[str, Any] = {}
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        value = getattr(namespace, f.name)
        if value is None and isinstance(f.default, tuple):
            value = f.default
        values[f.name] = tuple(value) if isinstance(value, list) else value
    return cls(**values)
