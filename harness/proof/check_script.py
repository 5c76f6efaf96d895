"""A script's own lines, for `harness check` to point at: where a name was made, and whether
something is decided by it."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class SourceText:
    """`path`: of the script's file; `tree`: None if it cannot be parsed (a module that is run by
    name, a syntax of another Python)."""

    path: str = ""
    tree: ast.Module | None = None

    @classmethod
    def read(cls, path: str) -> SourceText:
        with contextlib.suppress(OSError, SyntaxError, ValueError):
            return cls(path, ast.parse(Path(path).read_text()))
        return cls(path)

    def made(self, name: str) -> int:
        """The line where what a picture calls `name` ("main().ema.shadow[0]", "seen") was first
        given its value; 0: not found."""
        function, base = root_of(name)
        lines = [line for scope in self._scopes(function) for line in _bound(scope, base)]
        return min(lines, default=0)

    def decides(self, name: str) -> bool:
        """Is something decided by it: is it compared, or the condition of a branch?"""
        _, base = root_of(name)
        tests: list[ast.AST] = []
        for node in ast.walk(self.tree) if self.tree else ():
            if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
                tests.append(node.test)
            elif isinstance(node, ast.Compare):
                tests.append(node)
        return any(
            isinstance(node, ast.Name) and node.id == base
            for test in tests
            for node in ast.walk(test)
        )

    def used(self, name: str) -> int:
        """The first line that uses it after it was made; 0: none."""
        function, base = root_of(name)
        made = self.made(name)
        lines = [
            node.lineno
            for scope in self._scopes(function)
            for node in ast.walk(scope)
            if isinstance(node, ast.Name) and node.id == base and node.lineno > made
        ]
        return min(lines, default=0)

    def reads(self, dataset: str) -> int:
        """Where the class of that name reads a sample; 0: it is not the script's."""
        for node in ast.walk(self.tree) if self.tree else ():
            if isinstance(node, ast.ClassDef) and node.name == dataset:
                methods = [n for n in node.body if isinstance(n, ast.FunctionDef)]
                found = [n for n in methods if n.name == "__getitem__"]
                return (found or [node])[0].lineno  # type: ignore[list-item]
        return 0

    def makes(self, kind: str) -> int:
        """The first line that calls something of that name; 0: none."""
        lines = [
            node.lineno
            for node in (ast.walk(self.tree) if self.tree else ())
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == kind
        ]
        return min(lines, default=0)

    def called(self, attribute: str) -> int:
        """The first line that calls a method of that name; 0: none."""
        lines = [
            node.lineno
            for node in (ast.walk(self.tree) if self.tree else ())
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == attribute
        ]
        return min(lines, default=0)

    def _scopes(self, function: str) -> Iterator[Scope]:
        if self.tree is None:
            return
        if not function:
            yield self.tree
            return
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == function:
                yield node


def root_of(name: str) -> tuple[str, str]:
    """The function ("": none) and the variable of what a picture calls `name`."""
    found = re.match(r"(?:(\w+|<\w+>)\(\)\.)?(\w+)", name)
    return (found[1] or "", found[2]) if found else ("", name)


def _bound(scope: Scope, name: str) -> Iterator[int]:
    """Lines that give `name` a value in this scope."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store):
            yield node.lineno
