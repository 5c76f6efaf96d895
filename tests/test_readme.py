"""What the README promises is there."""

import difflib
import re
from pathlib import Path

from harness.cli import COMMANDS, parser

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_every_command_and_flag_exists():
    _, subs = parser()
    named = set(re.findall(r"`harness ([a-z]+)", README))
    assert named >= {"launch", "run", "status", "report", "verify", "compare", "simulate"}
    assert named <= set(COMMANDS)
    flags = {option for sub in subs.values() for action in sub._actions for option in action.option_strings}
    rows = [line for line in README.splitlines() if "harness " in line]
    for flag in set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", "\n".join(rows))):
        assert flag in flags | {"--cloud"}, flag


def test_every_make_target_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"`?make ([a-z-]+)", README)) <= targets


def test_the_diff_on_the_first_screen_is_the_true_one():
    plain, elastic = ((ROOT / "examples" / f"{name}.py").read_text().splitlines() for name in ("plain", "elastic"))
    true = {line for line in difflib.unified_diff(plain, elastic, lineterm="") if line[0] in "+-" and line[1:3] not in ("--", "++")}
    shown = [line for line in re.search(r"```diff\n(.*?)```", README, re.S)[1].splitlines() if line[0] in "+-"]
    squeeze = {re.sub(r"\s+", " ", line) for line in true}
    assert shown
    for line in shown:
        assert re.sub(r"\s+", " ", line) in squeeze, line
    assert sum(line[0] == "+" for line in true) < 10 and sum(line[0] == "-" for line in true) < 10


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
