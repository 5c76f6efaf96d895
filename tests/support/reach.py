"""What a suite of slow tests can be touched by: the files that it imports, directly or not.

`python -m support.reach SUITE` exits with 0 if none of them has changed since the suite last
passed, as tests/proven.json says, and with 1 if one has; `--record` writes there that it has passed
now. `.ci/run` asks it, and `make meshes` and `make adapters` record. Comments and docstrings do
not count. A module whose name stands in a string (of a command, a plug-in, a script) counts as
imported.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROVEN = ROOT / "tests" / "proven.json"
# a suite's own files, the modules of commands that its processes run, and what it is installed by
COMMANDS = ("harness/cli/command.py", "harness/cli/node.py")
SETUP = ("pyproject.toml", "requirements.txt", "requirements-apart.txt", "tests/conftest.py")
SUITES = {
    "meshes": ("tests/meshes/**/*", *COMMANDS, *SETUP),
    "adapters": (
        *("tests/adapters/**/*", "harness/adapters/**/*.py", "harness/cli/start.py"),
        *("harness/cli/launch.py", *COMMANDS, *SETUP, "requirements-adapters.txt"),
    ),
}


def modules() -> dict[str, Path]:
    """Return all modules of the tree by name: what ships, what tests share, examples."""
    found: dict[str, Path] = {}
    for base, folders in ((ROOT, ("harness", "storage", "examples")), (ROOT / "tests", ("support",))):
        for folder in folders:
            for path in (base / folder).rglob("*.py"):
                name = ".".join(path.relative_to(base).with_suffix("").parts)
                found[name.removesuffix(".__init__")] = path
    return found


def named(tree: ast.AST, known: dict[str, Path]) -> Iterator[str]:
    """Yield the names of modules, with packages above them, that a file imports or has in a
    string."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words = node.value.replace("/", ".").replace(":", " ").replace("'", " ").split()
            names = [word.removesuffix(".py") for word in words if len(node.value) < 100_000]
        for name in names:
            parts = name.split(".")
            for n in range(1, len(parts) + 1):
                if (one := ".".join(parts[:n])) in known:
                    yield one


def files(pattern: str) -> list[Path]:
    """Return the files that match a pattern, without what Python has compiled and our record."""
    found = (path for path in ROOT.glob(pattern) if "__pycache__" not in path.parts)
    return sorted(path for path in found if path.is_file() and path != PROVEN)


def is_data(path: Path) -> bool:
    """Return whether a file is what the code beside it may read: tables, pages, styles."""
    return path.suffix not in (".py", ".md")


def plain(path: Path) -> tuple[ast.AST | None, bytes]:
    """Return a file's syntax tree, if it is Python, and what of it counts."""
    whole = path.read_bytes()
    if path.suffix != ".py":
        return None, whole
    tree = ast.parse(whole)
    for node in ast.walk(tree):
        match getattr(node, "body", None):
            case [ast.Expr(value=ast.Constant(value=str()) as text), *_]:
                text.value = ""
    return tree, ast.dump(tree, annotate_fields=False).encode()


def reached(suite: str) -> dict[str, bytes]:
    """Return what counts of each file that a suite can be touched by, by its path."""
    known = modules()
    ahead = [path for pattern in SUITES[suite] for path in files(pattern)]
    found: dict[str, bytes] = {}
    while ahead:
        path = ahead.pop()
        if (name := path.relative_to(ROOT).as_posix()) in found:
            continue
        tree, found[name] = plain(path)
        if tree is not None:
            ahead += [known[one] for one in named(tree, known)]
            ahead += [one for one in files(f"{path.parent.relative_to(ROOT)}/*") if is_data(one)]
    return found


def digest(suite: str) -> str:
    """Return a digest of all that a suite can be touched by."""
    whole = hashlib.sha256()
    for name, counts in sorted(reached(suite).items()):
        whole.update(hashlib.sha256(name.encode() + b"\0" + counts).digest())
    return whole.hexdigest()


def main(suite: str, record: bool) -> int:
    """Record that a suite has passed, or return whether it has to run: 1, else 0."""
    proven = json.loads(PROVEN.read_text()) if PROVEN.exists() else {}
    now = digest(suite)
    if record:
        proven[suite] = now
        PROVEN.write_text(json.dumps(proven, indent=2, sort_keys=True) + "\n")
        return 0
    same = proven.get(suite) == now
    told = "nothing that it reaches has changed since it passed" if same else "has to run"
    print(f"{suite}: {told}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], "--record" in sys.argv[2:]))
