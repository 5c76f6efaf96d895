"""Bad input to every command ends with exit status 2, a reason, no traceback, and nothing begun.

Some of the cases of each table, since all of them take half a minute: `make audit` and
test_hostile_day.py have them all.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from support import hostile_inputs as inputs
from support.hostile import Case

LISTED, GENERATED = 114, 200  # at least: as many as the audit of the first version, and more
EACH, SOME = 5, 60  # of the listed ones every so many; of the generated ones so many


def failures(cases: list[Case]) -> list[str]:
    return [f"{one.name}: {why}" for one in cases if (why := one.run())]


@pytest.mark.parametrize("kind", ["urls", "flags", "files", "environment"])
def test_listed(kind: str) -> None:
    assert failures(getattr(inputs, kind)()[::EACH]) == []


def test_generated() -> None:
    assert failures(inputs.generated(SOME)) == []


def test_there_are_enough() -> None:
    assert len(inputs.listed()) >= LISTED
    assert len({one.name for one in inputs.generated()}) >= GENERATED


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "harness.cli", "status", "s3://", "--once"],
        ["-m", "storage", "list", "s3:/b"],
    ],
    ids=" ".join,
)
def test_real_processes_end_so_too(words: list[str]) -> None:
    """Also what happens while modules are imported, and at exit."""
    done = subprocess.run(
        [sys.executable, *words], cwd=inputs.folder(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 12
