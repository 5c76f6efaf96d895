"""Calls as people write them on a command line: `at_most(best_value, usd_per_h=2)`. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from harness.core.world import BadInput

MOST_DEEP = 20  # calls within calls
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
# options after a "?" may have a "="
_WORD = re.compile(r"[^\s(),='\"?]*(?:\?[^\s(),'\"]*)?")
_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class WrittenCall:
    """`name`, `name()` or `name(first, ..., option=value)`. `called`: with parentheses."""

    name: str
    arguments: tuple[WrittenCall, ...] = ()
    options: dict[str, str] = field(default_factory=dict)
    called: bool = False

    def names(self) -> set[str]:
        """Of it and of all that is in it."""
        return {self.name}.union(*(argument.names() for argument in self.arguments))


def parse(what: str, text: str) -> WrittenCall:
    """Raises BadInput that points to the place; `what` begins its message."""
    return _Parser(what, text).whole()


class _Parser:
    """Reads from left to right. `at`: the next character."""

    def __init__(self, what: str, text: str):
        self.what, self.text, self.at, self.depth = what, text, 0, 0

    def whole(self) -> WrittenCall:
        call = self._call()
        if self._peek():
            raise self._wrong("the end")
        return call

    def _call(self) -> WrittenCall:
        """One name, with what stands in its parentheses."""
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
        """The next character that is no space; "": the end."""
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
