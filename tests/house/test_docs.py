"""Tests of the documentation: what it names exists, each room has a README, the map is current."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.cli.command import parser
from support import map as map_page
from support.words import MOST, MOST_TOGETHER, user_pages

ROOT = map_page.ROOT
ROOMS = sorted(
    path.parent
    for pattern in ("harness/*", "storage", "storage/*", "harness/look/*")
    for path in ROOT.glob(f"{pattern}/__init__.py")
)
PAGES = sorted(
    path
    for pattern in ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "harness/**/*.md", "storage/**/*.md")
    for path in ROOT.glob(pattern)
)
CODE = sorted(
    path
    for room in ("harness", "storage")
    for path in (ROOT / room).glob("**/*.py")
    if "templates" not in path.parts
)
FILES = {p.name for folder in ("examples", "benchmarks", "tests") for p in (ROOT / folder).rglob("*.py")}
FILES |= {path.name for path in CODE}
# files of users, and of other projects
USERS = {"script.py", "eval.py", "train.py", "lead.py", "run_clm_no_trainer.py", "x.py"}
# permissions and roles of clouds: `storage.objects.get`, `storage.objectViewer`
PERMISSIONS = re.compile(r"storage\.(buckets|objects?[A-Z.]|multipartUploads)")
MOST_LINES = 15  # of a room's README


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def spans(text: str) -> Iterator[str]:
    """Yield what stands in code font within prose and tables, without blocks of code."""
    outside = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.M | re.S)
    yield from re.findall(r"(?<!`)`([^`\n]+)`(?!`)", outside)


def file_exists(name: str, beside: Path) -> bool:
    """Return whether a page or docstring in the folder `beside` may name a file so. Of tests only
    the name counts: they are found by it."""
    if "/" not in name or name.startswith("tests/"):
        return name.rpartition("/")[2] in FILES | USERS
    return any((base / name).is_file() for base in (beside, ROOT, ROOT / "harness", ROOT / "storage"))


def module_exists(name: str) -> bool:
    """Return whether a dotted name is a module, or something that stands in one."""
    parts, at = name.split("."), ROOT
    while parts and (at / parts[0]).is_dir():
        at /= parts.pop(0)
    if not parts:
        return True
    file = at / f"{parts[0]}.py"
    if file.is_file():
        parts.pop(0)
    else:
        file = at / "__init__.py"
    return not parts or re.search(rf"\b{parts[0]}\b", file.read_text()) is not None


def unknown(text: str, beside: Path) -> list[str]:
    """Return the files and modules in code font that do not exist."""
    found = []
    for span in spans(text):
        if re.fullmatch(r"[\w/.-]+\.py", span):
            if not file_exists(span, beside):
                found.append(span)
        elif (dotted := re.match(r"(?:harness|storage)(?:\.[A-Za-z_]\w*)+", span)) and not (
            PERMISSIONS.match(span) or module_exists(dotted[0])
        ):
            found.append(dotted[0])
    return found


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_what_a_page_names_exists(path):
    assert not (wrong := unknown(path.read_text(), path.parent)), wrong


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_tests_that_a_page_names_exist(path):
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", path.read_text()):
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.M), f"{file}::{name}"


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_commands_that_a_page_names_exist(path):
    """`harness WORD` in code font, or at the beginning of a line of a block of code."""
    text = path.read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
    lines = [*spans(text), *"\n".join(blocks).splitlines()]
    called = [re.match(r"harness ([a-z][a-z-]*(?: [a-z][a-z-]*)?)", line) for line in lines]
    named_ones = [found[1] for found in called if found]
    known = set(parser()[1])
    first = {words.split()[0] for words in known}
    wrong = [w for w in named_ones if w not in known and w.split()[0] not in known | (first & {w})]
    assert not wrong, wrong


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_links_lead_somewhere(path):
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text()):
        if not re.match(r"[a-z]+:", link):
            assert (path.parent / link).exists(), link


@pytest.mark.parametrize("path", CODE, ids=named)
def test_what_a_docstring_names_exists(path):
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [
        ast.get_docstring(node)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, kinds)
    ]
    wrong = [name for text in texts if text for name in unknown(text, path.parent)]
    assert not wrong, wrong


@pytest.mark.parametrize("room", ROOMS, ids=named)
def test_each_room_has_a_short_readme(room):
    text = (room / "README.md").read_text()
    assert len([line for line in text.splitlines() if line.strip()]) <= MOST_LINES
    first = re.findall(r"^\d\. `([\w/.]+)`: ", text, re.M)
    assert 2 <= len(first) <= 3
    missing = [name for name in first if not (room / name).is_file()]
    assert not missing, missing
    assert "Tests: `" in text


def test_the_map_is_current():
    assert map_page.PAGE.read_text() == map_page.page(), "run `make map`"


def test_the_table_of_rooms_is_true():
    """CONTRIBUTING.md has a row for each room of harness, from the ground up."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| `(\w+)/` \|", text, re.M)
    assert rows == [room.name for room in map_page.rooms() if room.name not in ("storage", "harness")]


def test_architecture_is_short():
    """A page that a newcomer reads at a sitting, and the twenty files that it sends them to."""
    text = (ROOT / "docs" / "design" / "ARCHITECTURE.md").read_text()
    assert len(text.split()) <= 4000
    first = text.partition("## Read these twenty files first")[2].partition("\n## ")[0]
    files = re.findall(r"^(\d+)\. `([\w/.]+\.py)`: ", first, re.M)
    assert [int(number) for number, _ in files] == list(range(1, 21))


def test_every_page_is_in_the_contents_of_the_site():
    folder = ROOT / "docs"
    listed = re.findall(r"^([\w/]+)$", (folder / "index.md").read_text(), re.M)
    pages = [p.relative_to(folder).with_suffix("").as_posix() for p in folder.rglob("*.md")]
    assert sorted(listed) == sorted({*pages, "site/cli", "site/api", "site/facts"} - {"index"})


def test_user_pages_are_short():
    pages = user_pages()
    assert not (long := {name: count for name, count in pages.items() if count > MOST}), long
    assert (together := sum(pages.values())) <= MOST_TOGETHER, f"{together} words: shorten a page"
