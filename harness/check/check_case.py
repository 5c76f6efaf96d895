"""The evidence that `harness check` judges, its rulings, and the numbers that rules compare.
Pure."""

from __future__ import annotations

import ast
import contextlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from harness.check.evidence import Gradient, Outcome, RankLife

# The source lines of a script, to which `harness check` points: where a name was first given its
# value, and whether something depends on it.

Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class SourceText:
    """The source of a script. `path`: its file; `tree`: None if it cannot be parsed (a module that
    is run by name, or the syntax of another Python)."""

    path: str = ""
    tree: ast.Module | None = None

    @classmethod
    def read(cls, path: str) -> SourceText:
        with contextlib.suppress(OSError, SyntaxError, ValueError):
            return cls(path, ast.parse(Path(path).read_text()))
        return cls(path)

    def made(self, name: str) -> int:
        """Return the line where the variable in a picture's `name` ("main().ema.shadow[0]", "seen")
        was first given its value; 0 if not found."""
        function, base = root_of(name)
        lines = [line for scope in self._scopes(function) for line in _bound(scope, base)]
        return min(lines, default=0)

    def decides(self, name: str) -> bool:
        """Return whether something depends on the variable: it is compared, or is the condition of
        a branch."""
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

    def only_shown(self, name: str) -> bool:
        """Return whether the variable is only printed or logged, maybe every so many steps."""
        function, base = root_of(name)
        read: set[ast.AST] = set()
        shown: set[ast.AST] = set()
        for node in (n for scope in self._scopes(function) for n in _within(scope, base)):
            if isinstance(node, ast.Name) and node.id == base and isinstance(node.ctx, ast.Load):
                read.add(node)
            elif isinstance(node, ast.stmt) and _only_shows(node):
                shown |= set(ast.walk(node))
        return bool(read) and read <= shown

    def used(self, name: str) -> int:
        """Return the first line that uses the variable after it was made; 0 if none."""
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
        """Return the line where the class of that name reads a sample; 0 if it is not the
        script's."""
        for node in ast.walk(self.tree) if self.tree else ():
            if isinstance(node, ast.ClassDef) and node.name == dataset:
                methods = [n for n in node.body if isinstance(n, ast.FunctionDef)]
                found = [n for n in methods if n.name == "__getitem__"]
                return (found or [node])[0].lineno  # type: ignore[list-item]
        return 0

    def makes(self, kind: str) -> int:
        """Return the first line that calls something of that name; 0 if none."""
        lines = [
            node.lineno
            for node in (ast.walk(self.tree) if self.tree else ())
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == kind
        ]
        return min(lines, default=0)

    def called(self, attribute: str) -> int:
        """Return the first line that calls a method of that name; 0 if none."""
        lines = [
            node.lineno
            for node in (ast.walk(self.tree) if self.tree else ())
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == attribute
        ]
        return min(lines, default=0)

    def mentions(self, attribute: str) -> bool:
        """Return whether the script uses an attribute of that name."""
        nodes = ast.walk(self.tree) if self.tree else ()
        return any(isinstance(node, ast.Attribute) and node.attr == attribute for node in nodes)

    def imports(self, *packages: str) -> bool:
        """Return whether the script imports one of these packages, or a module of it."""
        found: list[str] = []
        for node in ast.walk(self.tree) if self.tree else ():
            if isinstance(node, ast.Import):
                found += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found.append(node.module or "")
        return any(name.partition(".")[0] in packages for name in found)

    def _scopes(self, function: str) -> Iterator[Scope]:
        if self.tree is None:
            return
        if not function:
            yield self.tree
            return
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == function:
                yield node


SHOWING = ("print", "debug", "info", "warning", "write", "set_description", "set_postfix")


def _only_shows(statement: ast.stmt) -> bool:
    """Return whether a statement only prints or logs."""
    if isinstance(statement, ast.If):
        return all(map(_only_shows, (*statement.body, *statement.orelse)))
    if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)):
        return False
    return ast.unparse(statement.value.func).rpartition(".")[2] in SHOWING


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def _within(scope: ast.AST, name: str) -> Iterator[ast.AST]:
    """Yield the nodes of a scope, without those inner ones where `name` is another variable."""
    yield scope
    for node in ast.iter_child_nodes(scope):
        if not _hides(node, name):
            yield from _within(node, name)


def _hides(node: ast.AST, name: str) -> bool:
    """Return whether a function or comprehension has a variable `name` of its own."""
    if isinstance(node, COMPREHENSIONS):
        return any(name in _bound_by(each.target) for each in node.generators)
    if not isinstance(node, FUNCTIONS):
        return False
    inner = [n for part in ast.iter_child_nodes(node) for n in ast.walk(part)]
    if any(isinstance(n, (ast.Global, ast.Nonlocal)) and name in n.names for n in inner):
        return False
    return any(isinstance(n, ast.arg) and n.arg == name for n in inner) or name in _bound_by(node)


def _bound_by(node: ast.AST) -> set[str]:
    """Return the names that are given a value below a node."""
    names = (n for n in ast.walk(node) if isinstance(n, ast.Name))
    return {n.id for n in names if isinstance(n.ctx, ast.Store)}


def root_of(name: str) -> tuple[str, str]:
    """Return the function ("" if none) and the variable in a picture's `name`."""
    found = re.match(r"(?:(\w+|<\w+>)\(\)\.)?(\w+)", name)
    return (found[1] or "", found[2]) if found else ("", name)


def _bound(scope: Scope, name: str) -> Iterator[int]:
    """Yield the lines that give `name` a value in this scope."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store):
            yield node.lineno


HOLDS, FAILS, UNTRIED, NOTE = "holds", "fails", "untried", "note"
SAME = 1e-5  # relative difference of what one worker computes twice
ALIKE = 2e-3  # relative difference of two workers' sums: room for half precision
CLEARLY = 0.95  # a loss that falls by so much in a few steps does not do so by chance
PARALLEL = 1 - 1e-6  # cosine of gradients that differ by a factor only


@dataclass(frozen=True)
class Ruling:
    """The ruling on one promise. `where`: FILE:LINE to change, "" if unknown."""

    promise: str
    state: str  # HOLDS, FAILS, UNTRIED or NOTE
    what: str
    where: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Case:
    """The evidence that is judged. `two`: None if it was not tried; `ignored`: names that may be
    lost; `must_fall`: the loss has to fall; `shared`: both of two workers used one GPU, which not
    every script supports."""

    one: Outcome
    two: Outcome | None
    source: SourceText
    ignored: frozenset[str] = frozenset()
    must_fall: bool = False
    shared: bool = False

    @property
    def before(self) -> RankLife:
        """The life of the one worker until it was killed."""
        return self.one.of_rank(0, 0) or RankLife()

    @property
    def after(self) -> RankLife | None:
        """The life of the same worker after its resume; None if it was not killed."""
        return self.one.of_rank(0, 1) if self.one.struck else None

    @property
    def second(self) -> Case | None:
        """The case of the second kill: the lives until then count as one. None: there was
        none."""
        first, then = self.before, self.after
        if not self.one.struck_again or then is None or then.resumed is None:
            return None
        steps = (*(s for s in first.steps if s.number <= (then.resumed or 0)), *then.steps)
        last = self.one.of_rank(0, 2)
        lives = (replace(first, epoch=then.epoch, steps=steps), *((last,) if last else ()))
        return replace(self, one=replace(self.one, lives=lives, struck_again=False))

    @property
    def prepare_line(self) -> str:
        said = self.before.prepared
        return said.where if said else ""

    @property
    def driver(self) -> str:
        """The framework that makes the steps; "" means the script itself."""
        said = self.before.prepared
        return said.driver if said else ""

    @property
    def same_samples(self) -> bool:
        """True if a step is known to use the same samples however often and wherever it is made,
        that is, if there are records of them."""
        return bool(self.one.records)

    def at(self, line: int) -> str:
        return f"{self.source.path}:{line}" if line else ""


# ---- words and numbers ---------------------------------------------------------------------------
def falling(losses: list[float]) -> bool:
    """Return whether losses fall by more than the noise: the slope of the line through them is
    below zero by twice its standard error, or the last third lies clearly below the first."""
    count = len(losses)
    if not all(map(math.isfinite, losses)) or count < 4:
        return False
    third = max(1, count // 3)
    if median(losses[-third:]) < CLEARLY * median(losses[:third]):
        return True
    steps, mean = [i - (count - 1) / 2 for i in range(count)], sum(losses) / count
    square = sum(x * x for x in steps)
    slope = sum(x * y for x, y in zip(steps, losses, strict=True)) / square
    rest = sum((y - mean - slope * x) ** 2 for x, y in zip(steps, losses, strict=True))
    return slope < -2 * math.sqrt(rest / (count - 2) / square)


def median(values: list[float]) -> float:
    if not all(map(math.isfinite, values)):
        return math.nan
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def usable(gradients: tuple[Gradient, ...]) -> bool:
    return bool(gradients) and all(math.isfinite(g.norm) and g.norm > 0 for g in gradients)


def distance(a: Gradient, b: Gradient) -> float:
    """Return how far two gradients are apart, relative to `a`."""
    apart = math.dist(a.sketch, b.sketch)
    size = math.hypot(*a.sketch) or 1e-30
    return 0.0 if apart == 0 else max(apart / size, abs(a.norm - b.norm) / (a.norm or 1e-30))


def cosine(a: Gradient, b: Gradient) -> float:
    both = sum(x * y for x, y in zip(a.sketch, b.sketch, strict=True))
    return both / ((math.hypot(*a.sketch) * math.hypot(*b.sketch)) or 1e-30)


def differ(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    """Return the greatest relative difference of two lists; infinite if their lengths differ."""
    if len(a) != len(b):
        return math.inf
    return max(
        (abs(x - y) / max(abs(x), 1e-12) for x, y in zip(a, b, strict=True) if x != y), default=0.0
    )
