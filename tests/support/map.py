"""The generator of docs/design/MAP.md (`make map`): a row for each file, with the first sentence of its
docstring, room by room in the order of tests/house/test_architecture.py.

    python -m support.map         write docs/design/MAP.md
"""

from __future__ import annotations

import ast
import re
import runpy
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "design" / "MAP.md"
INTRO = """\
# Map

Every file that ships, room by room, from the ground up: a room imports only from rooms above it.
Written by `make map` from the first sentence of each file's docstring; change it there.
[ARCHITECTURE.md](ARCHITECTURE.md) says what to read first.
"""


def first_sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring, in one line; "" without a docstring."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split())
    sentence = re.match(r".*?[.!?](?= [A-Z`]|$)", text)
    return (sentence[0] if sentence else text).rstrip(".:").replace("|", "\\|")


def has_code(path: Path) -> bool:
    """Return whether a file has more than a docstring."""
    return any(
        not isinstance(node, ast.Expr | ast.ImportFrom) or getattr(node, "level", 0)
        for node in ast.parse(path.read_text()).body
    )


def rooms() -> list[Path]:
    """Return the rooms from the ground up: `storage`, then those of `harness`."""
    page = next(ROOT.glob("tests/**/test_architecture.py"))
    order = runpy.run_path(str(page))["ORDER"]
    return [ROOT / "storage", ROOT / "harness", *(ROOT / "harness" / room for room in order)]


def folders(room: Path) -> list[Path]:
    """Return a room and the folders in it that hold code."""
    if room.name == "harness":
        return [room]
    inner = sorted(path.parent for path in room.rglob("__init__.py") if path.parent != room)
    return [room, *inner]


def section(folder: Path) -> str:
    """Return the part of the page about one folder."""
    name = folder.relative_to(ROOT).as_posix()
    files = sorted(p for p in folder.glob("*.py") if p.name != "__init__.py")
    if has_code(folder / "__init__.py"):
        files.insert(0, folder / "__init__.py")
    rows = [f"| `{p.name}` | {first_sentence(p)} |" for p in files]
    about = textwrap.fill(first_sentence(folder / "__init__.py") + ".", 100)
    return f"\n## `{name}/`\n{about}\n" + "\n| file | what it is |\n|---|---|\n" + "\n".join(rows) + "\n"


def page() -> str:
    """Return the whole page."""
    return INTRO + "".join(section(folder) for room in rooms() for folder in folders(room))


if __name__ == "__main__":
    PAGE.write_text(page())
