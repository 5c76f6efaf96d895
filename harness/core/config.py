"""Flags from frozen dataclasses: one field, one flag. Knows argparse and nothing else.

    @dataclass(frozen=True)
    class Launch:
        task: str = positional("the SkyPilot task YAML")
        nodes: str = flag("1:1", "how many nodes, LOW:HIGH", check=node_range)
        budget_usd: float | None = flag(None, "stop before more than this is spent", above=0)

An unknown flag is answered with the nearest known one. Every number is finite and not negative; a
flag that takes others carries its own bounds (`at_least`, `above`, `at_most`; `at_least=None`: any
number), and one that is not a number may carry a `check`, which raises ValueError with what is
wanted. What breaks them is told with the flag's name, before anything is done.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import functools
import math
import sys
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


def flag(default: Any, help: str, **more: Any) -> Any:
    """A field that is `--its-name`. `more`: what argparse takes, bounds (see above), and `short`,
    such as "-m"."""
    return dataclasses.field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True)
class Bounds:
    """Which numbers a flag takes. `None`: no bound on that side."""

    at_least: float | None = 0
    above: float | None = None
    at_most: float | None = None

    def of(self, text: str, kind: type[float] | type[int]) -> float:
        """The number that `text` is. Raises ValueError that says what is wanted and what was
        found."""
        found: float | None = None
        with contextlib.suppress(ValueError):
            found = kind(text)
        if found is None or (kind is float and not math.isfinite(found)) or not self._holds(found):
            raise ValueError(f"wanted {self.words(kind)}, found {text!r}")
        return found

    def _holds(self, number: float) -> bool:
        low = self.at_least is None or self.above is not None or number >= self.at_least
        return (
            low
            and (self.above is None or number > self.above)
            and (self.at_most is None or number <= self.at_most)
        )

    def words(self, kind: type[float] | type[int]) -> str:
        words = "a whole number" if kind is int else "a finite number"
        sides = [f"above {self.above:g}"] if self.above is not None else []
        if self.at_least is not None and self.above is None:
            sides.append(f"of at least {self.at_least:g}")
        if self.at_most is not None:
            sides.append(f"of at most {self.at_most:g}")
        return " ".join([words, " and ".join(sides)]).strip()


def _checked(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """For argparse, which tells ValueErrors without their words."""

    def parse(text: str) -> Any:
        try:
            return convert(text)
        except ValueError as e:
            raise argparse.ArgumentTypeError(str(e)) from None

    return parse


def _kept(check: Callable[[str], object]) -> Callable[[str], str]:
    """The text as it stands, if `check` has nothing against it."""

    def parse(text: str) -> str:
        check(text)
        return text

    return parse


def positional(help: str, **more: Any) -> Any:
    """A field that is given by position."""
    return dataclasses.field(metadata={"help": help, "positional": True, **more})


class FlagParser(argparse.ArgumentParser):
    """argparse that suggests the flag that was meant."""

    def error(self, message: str) -> NoReturn:
        known = [option for action in self._actions for option in action.option_strings]
        unknown = message.removeprefix("unrecognized arguments: ")
        for word in unknown.split() if unknown != message else []:
            near = (
                difflib.get_close_matches(word.split("=")[0], known, 1)
                if word.startswith("-")
                else []
            )
            if near:
                message += f"; did you mean {near[0]}?"
                break
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: {message} (see `{self.prog} --help`)\n")


def add_flags(parser: argparse.ArgumentParser, cls: type[Any]) -> None:
    """Add one argument per field of `cls`."""
    hints = typing.get_type_hints(cls)
    # what a class inherits as keywords comes after its own
    for f in sorted(dataclasses.fields(cls), key=lambda f: f.kw_only is True):
        kind, settings = hints[f.name], dict(f.metadata)
        is_positional = settings.pop("positional", False)
        check, short = settings.pop("check", None), settings.pop("short", None)
        bounds = Bounds(
            **{
                side: settings.pop(side)
                for side in ("at_least", "above", "at_most")
                if side in settings
            }
        )
        options: dict[str, Any] = {"help": settings.pop("help", None), **settings}
        if typing.get_origin(kind) in (typing.Union, types.UnionType):
            kind = next(k for k in typing.get_args(kind) if k is not type(None))
        if check is not None:
            options["type"] = _checked(_kept(check))
        elif kind in (int, float):
            options["type"] = _checked(functools.partial(bounds.of, kind=kind))
        if is_positional:
            if options.get("nargs") is None and kind is not list:
                options.setdefault("type", kind)
            parser.add_argument(f.name, **options)
            continue
        names = [*([short] if short else []), "--" + f.name.replace("_", "-")]
        default = f.default if f.default is not dataclasses.MISSING else f.default_factory()  # type: ignore[operator]
        if kind is bool:
            parser.add_argument(*names, action="store_true", default=default, **options)
        elif typing.get_origin(kind) is tuple or kind is tuple:
            options.setdefault("action", "append")  # or "extend", with nargs
            parser.add_argument(*names, default=None, **options)
        else:
            options.setdefault("type", kind)
            if default not in (None, ""):
                options["help"] = f"{options['help'] or ''} (default: {default})"
            parser.add_argument(*names, default=default, **options)


def build(cls: type[T], namespace: argparse.Namespace) -> T:
    """The dataclass from what was parsed."""
    values: dict[str, Any] = {}
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        value = getattr(namespace, f.name)
        if value is None and isinstance(f.default, tuple):
            value = f.default
        values[f.name] = tuple(value) if isinstance(value, list) else value
    return cls(**values)


def words_of(flags: Any) -> list[str]:
    """The command line that gives these flags; what is at its default is left out."""
    placed: list[str] = []
    named: list[str] = []
    for f in dataclasses.fields(flags):
        value, name = getattr(flags, f.name), "--" + f.name.replace("_", "-")
        if f.metadata.get("positional"):
            placed += map(str, value) if isinstance(value, tuple) else [str(value)]
        elif value == f.default:
            continue
        elif isinstance(value, bool):
            named.append(name)
        else:
            each = value if isinstance(value, tuple) else (value,)
            named += [word for one in each for word in (name, str(one))]
    return [*placed, *named]
