"""Functions of users, named by dotted path, and calls on a command line, such as
`at_most(best_value, usd_per_h=2)`. Pure."""

from __future__ import annotations

import functools
import inspect
import math
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

from harness.core.world import BadInput

MOST_DEEP = 20  # most nested calls
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
# options after a "?" may have a "="
_WORD = re.compile(r"[^\s(),='\"?]*(?:\?[^\s(),'\"]*)?")
_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class WrittenCall:
    """A call `name`, `name()` or `name(first, ..., option=value)`. `called`: written with
    parentheses."""

    name: str
    arguments: tuple[WrittenCall, ...] = ()
    options: dict[str, str] = field(default_factory=dict)
    called: bool = False

    def names(self) -> set[str]:
        """Return the names of this call and of all calls in its arguments."""
        return {self.name}.union(*(argument.names() for argument in self.arguments))


def parse(what: str, text: str) -> WrittenCall:
    """Parse a call. Raises BadInput, whose message begins with `what` and points to the place."""
    return _Parser(what, text).whole()


class _Parser:
    """A parser that reads from left to right. `at`: index of the next character."""

    def __init__(self, what: str, text: str):
        self.what, self.text, self.at, self.depth = what, text, 0, 0

    def whole(self) -> WrittenCall:
        call = self._call()
        if self._peek():
            raise self._wrong("the end")
        return call

    def _call(self) -> WrittenCall:
        """Parse one name and its parenthesised arguments, if any."""
        name = self._word("a name")
        if self._peek() != "(":
            return WrittenCall(name)
        self.depth += 1
        if self.depth > MOST_DEEP:
            raise self._wrong(f"at most {MOST_DEEP} calls within each other")
        self.at += 1
        arguments: list[WrittenCall] = []
        options: dict[str, str] = {}
        while self._peek() != ")":
            argument = self._call()
            if self._peek() == "=":
                self._option(argument, options)
            elif options:
                raise self._wrong("option=value after an option")
            else:
                arguments.append(argument)
            if self._peek() == ",":
                self.at += 1
            elif self._peek() != ")":
                raise self._wrong("',' or ')'")
        self.at += 1
        self.depth -= 1
        return WrittenCall(name, tuple(arguments), options, True)

    def _option(self, name: WrittenCall, options: dict[str, str]) -> None:
        if name.called or not _NAME.fullmatch(name.name):
            raise self._wrong("the name of an option before '='")
        if name.name in options:
            raise self._wrong(f"{name.name} once")
        self.at += 1
        options[name.name] = self._word("a value")

    def _word(self, wanted: str) -> str:
        self._peek()
        if found := _QUOTED.match(self.text, self.at):
            self.at = found.end()
            return found[0][1:-1]
        if (found := _WORD.match(self.text, self.at)) and found[0]:
            self.at = found.end()
            return found[0]
        raise self._wrong(wanted)

    def _peek(self) -> str:
        """Skip white space and return the next character; "" at the end."""
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1
        return self.text[self.at : self.at + 1]

    def _wrong(self, wanted: str) -> BadInput:
        found = repr(self.text[self.at]) if self._peek() else "the end"
        before = self.text[max(0, self.at - 200) : self.at]
        return BadInput(
            f"{self.what} {self.text!r:.400}: wanted {wanted}, found {found} after "
            f"{before!r}; it is written like at_most(best_value, usd_per_h=2)"
        )


# Functions of users, named by dotted path: `pkg.module:function?name=value&name=value`. Pure.

NUMBERS = (float, int, "float", "int", "float | None", "int | None")  # annotations of numbers


def imported(what: str, path: str) -> Any:
    """Import the object that a path such as `pkg.module:name` names. Raises BadInput, whose message
    begins with `what`."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as e:
        raise BadInput(
            f"{what} {path!r} cannot be imported ({e}); is its package installed or on PYTHONPATH?"
        ) from e


def with_options(
    what: str, path: str, function: Callable[..., Any], query: str, arguments: int
) -> Callable[..., Any]:
    """Bind the options of `name=value&name=value` to the function; see `value_of`. `arguments`: the
    number of positional arguments of later calls. Raises BadInput."""
    options = options_of(what, query)
    check_call(
        f"{what} {f'{path}?{query}' if query else path!r}",
        path,
        function,
        [None] * arguments,
        options,
        f"options are written {path}?name=value&name=value",
    )
    return functools.partial(function, **options) if options else function


def options_of(what: str, query: str) -> dict[str, float | str]:
    """Parse the options of `name=value&name=value`. Raises BadInput."""
    return {key: value_of(what, value) for key, value in parse_qsl(query, keep_blank_values=True)}


def check_call(
    where: str,
    path: str,
    function: Callable[..., Any],
    arguments: Sequence[object],
    options: Mapping[str, object],
    written: str,
) -> None:
    """Raise BadInput if the function cannot be called with these arguments. Built-in functions
    without a signature are not checked."""
    try:
        takes = inspect.signature(function)
    except ValueError:
        return
    try:
        takes.bind(*arguments, **options)
    except TypeError as e:
        raise BadInput(f"{where}: {e}; it is {path}{takes}; {written}") from e
    for name, value in options.items():
        wanted = takes.parameters[name].annotation if name in takes.parameters else ""
        if wanted in NUMBERS and isinstance(value, str):
            raise BadInput(f"{where}: wanted {name} as a number, found {value!r}")


def value_of(what: str, text: str) -> float | str:
    """Convert `text` to a number if it looks like one, else return it unchanged. Raises BadInput
    for a number that is not finite."""
    try:
        found = float(text)
    except ValueError:
        return text
    if not math.isfinite(found):
        raise BadInput(f"the option {text!r} of a {what}: wanted a finite number")
    return found
