"""The house stays readable: files, functions and classes of a size that one reads at a time, one
meaning for the name of a type, lines that fit a page."""

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_FILE, MAX_FUNCTION, MAX_ATTRIBUTES, MAX_COLUMNS = 800, 70, 15, 100  # lines, lines, -, columns

# why a class may have more attributes: each is a value of its own, and to group them would help
# nobody
MANY_ATTRIBUTES = {
    "LaunchFlags": "one field for each flag of `harness launch`",
    "SimulateFlags": "one field for each flag of `harness market simulate`",
    "WatchFlags": "one field for each flag of `harness snapshots watch`",
    "PlanFlags": "one field for each flag of `harness plan`",
    "RunFlags": "one field for each flag of `harness run`",
    "PrepareFlags": "one field for each flag of `harness data prepare`",
    "Card": "an object in the bucket, one field for each key",
    "RunSpec": "one field for each setting of a run",
    "AttemptRow": "a row of a table, one field for each column",
    "EpochRow": "a row of a table, one field for each column",
    "RunState": "what is known of a run, one field for each kind of fact that counts",
    "LoopbackRun": "what W&B keeps of a run, one field for each part",
    "WandbRun": "one run at W&B: what it is made of, and how far it is",
    "BatchHeader": "a record in the bucket, one field for each key",
    "Member": "a record in the bucket, one field for each key",
    "Summary": "what a report tells, one field for each section",
    "StepRecord": "a record in the bucket, one field for each key",
    "SnapshotRow": "a row of a table, one field for each column",
    "Row": "a row of a table, one field for each column",
    # tests/support/system: each plays the hands of one seat, which are many small things
    "SimNode": "a machine: its clocks, processes, disk and links",
    "Sending": "a share of a snapshot on its way, with all that can befall it",
    "Ensemble": "the workers of an epoch",
    "SystemBuild": "one field for each part that a test may break",
    "Estimates": "what a policy may forecast by, one field for each thing",
    "AttemptHistory": "what the facts say of a run, one field for each thing",
    "Peers": "the ranks of a world, with what `prepare` fixes so that a step asks nothing",
    "Rhythm": "what a snapshot's due time follows from, and that time",
    "Training": "what a script gave to `prepare`, one field for each",
    "View": "what a policy may know, one field for each thing",
    "Loop": "a controller's turn: what it was given, and what it has seen",
    "_QuickMarket": "a world: one field for each thing in it",
    "MarketReplay": "a world: one field for each thing in it",
    "WholeSystem": "a world: one field for each thing in it",
    "FaultRates": "one field for each thing that a simulated world may do",
    "Rendezvous": "settings are its constructor's arguments; what it knows is in `others`",
}
# names that are ours to give, and yet stand twice
TWO_MEANINGS: dict[str, str] = {}


def sources(*folders: str) -> list[Path]:
    """Python files, without the script that `harness init` gives to users."""
    found = [p for folder in folders for p in (ROOT / folder).glob("**/*.py")]
    return sorted(p for p in found if "templates" not in p.parts)


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


CODE = sources("harness", "storage")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@pytest.mark.parametrize("path", CODE, ids=named)
def test_no_file_is_too_long(path):
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_FILE, f"{named(path)} has {lines} lines: split it by what it is about"


def length(function: Function) -> int:
    """Its lines, without those of classes in it, whose methods are counted by themselves."""
    inner = {
        line
        for node in ast.walk(function)
        if isinstance(node, ast.ClassDef)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    return len(set(range(function.lineno, (function.end_lineno or 0) + 1)) - inner)


@pytest.mark.parametrize("path", CODE, ids=named)
def test_no_function_is_too_long(path):
    found = {
        node.name: length(node)
        for node in ast.walk(tree_of(path))
        if isinstance(node, Function) and length(node) > MAX_FUNCTION
    }
    assert not found, f"{named(path)}: {found} lines: split it into steps that have names"


def attributes(one: ast.ClassDef) -> set[str]:
    """Fields in its body, and what its methods give to `self`."""
    found = {
        node.target.id
        for node in one.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and not re.match("ClassVar|InitVar", ast.unparse(node.annotation))
    }
    for method in one.body:
        if not isinstance(method, Function):
            continue
        found |= {
            node.attr
            for node in ast.walk(method)
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        }
    return found


@pytest.mark.parametrize("path", CODE, ids=named)
def test_no_class_has_too_many_attributes(path):
    found = {
        node.name: len(attributes(node))
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
        and node.name not in MANY_ATTRIBUTES
        and len(attributes(node)) > MAX_ATTRIBUTES
    }
    assert not found, f"{named(path)}: {found}: group what belongs together in a small dataclass"


def types(tree: ast.Module) -> Iterator[str]:
    """Classes, at any depth, and aliases of types."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name
    for statement in tree.body:
        targets: list[ast.expr] = []
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets = [statement.target]
        for target in targets:
            if isinstance(target, ast.Name) and re.fullmatch(r"_?[A-Z]\w*[a-z]\w*", target.id):
                yield target.id


def test_the_name_of_a_type_has_one_meaning():
    where: defaultdict[str, set[str]] = defaultdict(set)
    for path in CODE:
        for name in types(tree_of(path)):
            where[name].add(named(path))
    twice = {n: sorted(w) for n, w in where.items() if len(w) > 1 and n not in TWO_MEANINGS}
    assert not twice, f"a name for each: {twice} (docs/design/ARCHITECTURE.md has a glossary)"


def test_the_glossary_is_short_and_names_what_exists():
    """A term in code font is a type, or an alias of one."""
    page = (ROOT / "docs" / "design" / "ARCHITECTURE.md").read_text().partition("\n## Glossary\n")[2]
    terms = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", page, re.M)[1:]
    assert 40 <= len(terms) <= 60
    plain = [term.strip("`").lower() for term in terms]
    assert plain == sorted(set(plain))
    known = {name for path in CODE for name in types(tree_of(path))}
    named_in_code = {term.strip("`") for term in terms if term.startswith("`")}
    assert named_in_code <= known, named_in_code - known


# first words of a docstring that has no subject, or is a clause
FRAGMENTS = re.compile(
    r"(?:Of|As|That|Who|Whom|Whose|What|It|Its|To|Is|Are|Was|Were|Where|When|Whether|Which|"
    "While|If|By|For|From|In|On|At|With|Without|So|Than|Then|How|Why|Do|Does|Did|Has|"
    "Have|Had|Not|And|Or|But|Until|Unless|Because|Since|There|Here|Said|Told|Like|Be|"
    r"Been|Must|May|Can)\b"
)


@pytest.mark.parametrize("path", CODE, ids=named)
def test_docstrings_are_sentences(path):
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        f"{named(path)}: {getattr(node, 'name', 'the module')}: {text.splitlines()[0]}"
        for node in ast.walk(tree_of(path))
        if isinstance(node, kinds) and (text := ast.get_docstring(node))
        if FRAGMENTS.match(text)
    ]
    assert not found, "\n".join(found)


def prose(text: str) -> Iterator[tuple[int, str]]:
    """(number, line) of a markdown file, without tables, code and HTML."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith(("```", "~~~")):
            fenced = not fenced
        elif not fenced and not stripped.startswith(("|", "<")):
            yield number, line


def is_one_word(line: str) -> bool:
    """Nothing can be broken: a link, or code that stands together."""
    return " " not in re.sub(r"`[^`]*`", "code", line.strip().lstrip("-*0123456789. "))


PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "harness/**/*.md", "storage/**/*.md")
    for path in ROOT.glob(pattern)
)


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_prose_fits_a_page(path):
    long = [
        f"{named(path)}:{number} ({len(line)} columns)"
        for number, line in prose(path.read_text())
        if len(line) > MAX_COLUMNS and not is_one_word(line)
    ]
    assert not long, "\n".join(long)
