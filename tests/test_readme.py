"""What the README promises is there."""

import difflib
import re
from pathlib import Path

import tomllib
from fsspec.registry import known_implementations

from harness.cli.command import COMMANDS, parser
from harness.cli.run import BUCKET, FOLDER
from harness.node.progress import Limits

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
TEXT = " ".join(README.split())  # wherever its lines are broken
# flags of other programs: torchrun, docker, harness.views.trackers, benchmarks
OTHERS = {"--rdzv-backend", "--shm-size", "--collect", "--store"}


def test_every_command_and_flag_exists():
    _, subs = parser()
    named = set(re.findall(r"`harness ([a-z]+)", TEXT))
    assert named >= {"launch", "run", "status", "report", "verify", "compare", "simulate"}
    assert named <= set(COMMANDS)
    flags = {
        option
        for sub in subs.values()
        for action in sub._actions
        for option in action.option_strings
    }
    for flag in set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", TEXT)):
        assert flag in flags | OTHERS, flag


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
    _, subs = parser()
    said = {
        option: action.help for action in subs["run"]._actions for option in action.option_strings
    }
    for name in ("beat_s", "dead_s"):
        folder, bucket = getattr(FOLDER, name), getattr(BUCKET, name)
        assert (
            f"0: {folder:g} s (folder), {bucket:g} s (bucket)"
            in said["--" + name.replace("_", "-")]
        )
    assert f"at least {Limits().floor_s:g} s" in said["--hang-after-s"]
    assert f"0: {Limits().start_s:g} s and {Limits().save_s:g} s" in said["--stuck-after-s"]
