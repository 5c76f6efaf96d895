"""docs/design/EXTENDING.md: its examples work as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.proof
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "design" / "EXTENDING.md").read_text()
FILES = dict(re.findall(r"```python\n# file: (\S+)\n(.*?)```", PAGE, re.S))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mine")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def environment(folder):
    path = os.pathsep.join([str(folder), str(ROOT)])
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HARNESS_", "PYTEST_"))}
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def test_every_block_is_a_file():
    assert len(re.findall("```python", PAGE)) == len(FILES) == 9


@pytest.mark.parametrize("name", sorted(name for name in FILES if name.startswith("test_")))
def test_the_examples_pass_their_contracts(folder, name):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name]
    ended = subprocess.run(
        command,
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"\d+ passed", ended.stdout), ended.stdout


def test_the_policy_is_named_on_the_command_line(folder):
    command = [sys.executable, "-m", "harness.cli", "market", "simulate", "--seeds", "2"]
    command += ["--policy", "my_policies:frugal?top_usd=2"]
    ended = subprocess.run(
        command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=280
    )
    assert "every rule held" in ended.stdout, ended.stdout + ended.stderr


def test_a_run_is_led_on_a_cloud_of_ones_own(folder, tmp_path):
    pytest.importorskip("torch")
    agent = [sys.executable, "-m", "harness.cli", "run", "--nproc", "1", "--"]
    script = ["-m", "harness.lab.exercise", "--total", "6"]
    ended = subprocess.run(
        [sys.executable, "lead.py", str(tmp_path / "run"), *agent, *script],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1].startswith("done 6 "), ended.stdout
