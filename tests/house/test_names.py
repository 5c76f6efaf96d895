"""Names in docstrings and comments: `module.Name` leads to where the name is defined today."""

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = [
    path
    for room in ("harness", "storage")
    for path in sorted((ROOT / room).rglob("*.py"))
    if "templates" not in path.parts
]
DOTTED = re.compile(r"(?<![\w.])([a-z_]\w*)\.([A-Z]\w+)")


def module(path: Path) -> str:
    return path.parent.name if path.stem == "__init__" else path.stem


def defined(path: Path) -> Iterator[str]:
    """Yield the names of types and constants at the top of a module."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in ast.walk(node):
                if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store):
                    yield target.id


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield docstrings and comments of a module with the numbers of their first lines."""
    with open(path, encoding="utf-8") as f:
        for token in tokenize.generate_tokens(io.StringIO(f.read()).readline):
            if token.type == tokenize.COMMENT or token.string.startswith('"""'):
                yield token.start[0], token.string


PACKAGES = {path.parent.name for path in CODE if path.stem == "__init__"}  # they pass names on
HOMES: dict[str, set[str]] = defaultdict(set)
for _path in CODE:
    for _name in defined(_path):
        HOMES[_name].add(module(_path))


def test_names_in_docstrings_and_comments_lead_to_their_module():
    wrong = [
        f"{path.relative_to(ROOT)}:{line + text[: found.start()].count(chr(10))}: "
        f"{found[0]} is in {' or '.join(sorted(HOMES[found[2]]))}"
        for path in CODE
        for line, text in prose(path)
        for found in DOTTED.finditer(text)
        if found[2] in HOMES and found[1] not in HOMES[found[2]] | PACKAGES
    ]
    assert not wrong, "\n".join(wrong)
