"""Every Python that pyproject.toml names can run the package: grammar and standard library.

`make pythons` (tests/support/pythons.py) also installs it and runs tests under each one that is here.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.pythons import LIGHT, NAMED, PROJECT, ROOT, interpreter, light_files

pytestmark = pytest.mark.proof
OLDEST = re.search(r'requires-python = ">=(3\.\d+)"', PROJECT)[1]
SHIPPED = sorted(p for folder in ("harness", "storage") for p in (ROOT / folder).rglob("*.py"))
COMPILE = """
import sys
for path in sys.argv[1:]:
    compile(open(path, encoding="utf-8").read(), path, "exec")
"""


def newer_than_oldest(folder: Path) -> str:
    """What vermin finds in a folder that the oldest Python does not have; empty: nothing."""
    pytest.importorskip("vermin")
    program = [sys.executable, "-c", "from vermin.main import main; main()"]
    options = ["--no-tips", "--violations", f"-t={OLDEST}-"]
    done = subprocess.run([*program, *options, folder], capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr if done.returncode else ""


def test_the_files_that_name_versions_agree():
    minors = [int(version.removeprefix("3.")) for version in NAMED]
    assert minors == list(range(int(OLDEST.removeprefix("3.")), minors[-1] + 1))
    assert f'target-version = "py{OLDEST.replace(".", "")}"' in PROJECT
    readme = " ".join((ROOT / "README.md").read_text().split())  # wherever its lines are broken
    assert f"Python {NAMED[0]} to {NAMED[-1]}" in readme
    assert len(light_files(LIGHT)) == len(LIGHT)


def test_grammar_is_the_oldest_ones():
    for path in SHIPPED:
        ast.parse(path.read_text(), str(path), feature_version=tuple(map(int, OLDEST.split("."))))


@pytest.mark.parametrize("version", NAMED)
def test_each_python_compiles_every_file(version):
    found = interpreter(version)
    if found is None:
        pytest.skip(f"no python{version} on the PATH or among pyenv's")
    subprocess.run([found, "-I", "-c", COMPILE, *map(str, SHIPPED)], check=True, timeout=60)


@pytest.mark.parametrize("folder", ["harness", "storage"])
def test_the_standard_library_is_the_oldest_ones(folder):
    assert newer_than_oldest(ROOT / folder) == ""


def test_a_newer_name_is_found(tmp_path):
    (tmp_path / "new.py").write_text("import tomllib\nfrom datetime import UTC\n")
    found = newer_than_oldest(tmp_path)
    assert "tomllib" in found and "datetime.UTC" in found
