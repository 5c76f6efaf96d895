"""What the README promises is there."""

import difflib
import itertools
import re
from pathlib import Path

import pytest
import tomllib
from fsspec.registry import known_implementations

from harness.cli.command import GROUPS, parser
from harness.cli.node import BUCKET, FOLDER
from harness.node.heartbeat import Limits

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TEXT = " ".join(README.split())  # wherever its lines are broken
SUBS = parser()[1]
# flags of other programs: torchrun, docker, sky, torchtitan; and of our own scripts
OTHERS = {"--rdzv-backend", "--shm-size", "--max-restarts", "--nnodes", "--down", "--api-key"}
OTHERS |= {"--parallelism", "--checkpoint", "--override", "--rdzv-conf", "--rdzv-id", "--compile"}
OTHERS |= {
    flag
    for folder in ("examples", "benchmarks", "tests", "harness")
    for path in (ROOT / folder).rglob("*.py")
    for flag in re.findall(r'"(--[a-z][a-z0-9-]+)"', path.read_text())
}


def test_readme_names_the_commands_that_matter():
    named = set(re.findall(r"`harness ([a-z]+(?: [a-z]+)?)", TEXT))
    assert named >= {"launch", "runs report", "prove verify", "runs compare", "market simulate"}


def named_in(text):
    """(words, flags, settings) of each `harness ...` command that a text names, up to the end of the
    line or of the code, or to the script's own arguments."""
    text = re.sub(r"(?<=[ =:])(?:'[^'\n]*'|\"[^\"\n]*\")", "X", text.replace("\\\n", " "))
    for found in re.finditer(r"(?<!from )(?<![\w./-])(?:\$\(BIN\)/)?harness ([a-z][^\n`]*)", text):
        said = re.split(r" -- | #|\||;|\"\$|\)", found[1])[0].split()
        at = next((n for n in (2, 1) if " ".join(said[:n]) in SUBS), 0)
        settings = [b.split("=")[0] for a, b in itertools.pairwise(said) if a == "--set"]
        flags = [word.split("=")[0] for word in said if re.fullmatch(r"--[a-z][a-z0-9-]*(=.*)?", word)]
        yield " ".join(said[:at]) or said[0], flags, settings


PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "sky_tasks").glob("*.yaml")),
    *sorted((ROOT / "harness" / "cli" / "templates").iterdir()),
]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_flag_and_setting_exists(path):
    text = path.read_text()
    code = "\n".join(re.findall(r"```.*?```|`[^`]+`", text, re.S)) if path.suffix == ".md" else text
    for words, flags, settings in named_in(code):
        if path.suffix != ".md" and words not in SUBS:
            continue  # a comment's prose
        assert words in {*SUBS, *GROUPS}, f"harness {words}"
        for flag in flags if words in SUBS else ():
            assert flag in SUBS[words]._option_string_actions, f"harness {words} {flag}"
        for setting in settings:
            assert setting in SUBS[words].setting_names(), f"harness {words} --set {setting}"
    known = {option for sub in SUBS.values() for option in sub._option_string_actions} | OTHERS
    if path.suffix == ".md":
        for flag in set(re.findall(r"`(--[a-z][a-z0-9-]+)", text)):
            assert flag in known, flag
        names = {name for sub in SUBS.values() for name in getattr(sub, "setting_names", dict)()}
        assert set(re.findall(r"`--set ([a-z_]+)", text)) <= names


def test_messages_name_commands_that_exist():
    """In quotes or backticks, in the code of the package."""
    for path in [*(ROOT / "harness").rglob("*.py"), *(ROOT / "storage").rglob("*.py")]:
        for code in re.findall(r"`harness ([a-z][a-z -]+)", path.read_text()):
            words = code.split(" -")[0].split()
            names = {" ".join(words[:n]) for n in (1, 2)}
            assert names & {*SUBS, *GROUPS, "help"}, f"{path}: harness {code}"


def test_every_make_target_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"`?make ([a-z-]+)", README)) <= targets


def test_the_diff_on_the_first_screen_is_the_true_one():
    plain, elastic = (
        (ROOT / "examples" / f"{name}.py").read_text().splitlines() for name in ("plain", "elastic")
    )
    true = {
        line
        for line in difflib.unified_diff(plain, elastic, lineterm="")
        if line[0] in "+-" and line[1:3] not in ("--", "++")
    }
    shown = [
        line
        for line in re.search(r"```diff\n(.*?)```", README, re.S)[1].splitlines()
        if line[0] in "+-"
    ]
    squeeze = {re.sub(r"\s+", " ", line) for line in true}
    assert shown
    for line in shown:
        assert re.sub(r"\s+", " ", line) in squeeze, line
    assert sum(line[0] == "+" for line in true) < 10 and sum(line[0] == "-" for line in true) < 10


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


# ---- what the package's own files say ------------------------------------------------------------
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_a_gpu_node_can_read_data_from_s3():
    """`--data s3://...` of the examples goes through fsspec, which names the package that it
    wants."""
    assert known_implementations["s3"]["class"].startswith("s3fs.")
    names = {
        re.split(r"[<>=\[]", one)[0]
        for one in PYPROJECT["project"]["optional-dependencies"]["worker"]
    }
    assert {"s3fs", "torch", "obstore"} <= names
    pinned = {
        line.split("==")[0]
        for line in (ROOT / "requirements.txt").read_text().splitlines()
        if "==" in line
    }
    # together, or pip cannot keep the pins
    assert {"s3fs", "aiobotocore", "botocore", "fsspec"} <= pinned


def test_versions_of_python_are_said_once():
    assert PYPROJECT["project"]["requires-python"] == ">=3.10"
    assert (
        "Python 3.11 or newer for the pinned environment, the package itself runs on 3.10" in TEXT
    )
    # which finds what 3.10 cannot read
    assert PYPROJECT["tool"]["ruff"]["target-version"] == "py310"


def test_help_says_what_the_code_does():
    """Figures in help texts are those of the code."""
    said = {name: action.help for name, action in SUBS["run"].setting_names().items()}
    for name in ("beat_s", "dead_s"):
        folder, bucket = getattr(FOLDER, name), getattr(BUCKET, name)
        assert f"0: {folder:g} s (folder), {bucket:g} s (bucket)" in said[name]
    assert f"at least {Limits().floor_s:g} s" in said["hang_after_s"]
    assert f"0: {Limits().start_s:g} s and {Limits().save_s:g} s" in said["stuck_after_s"]
