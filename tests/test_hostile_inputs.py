"""Bad input to every command ends with exit status 2, a reason, no traceback, and nothing begun.

Some hundred cases are one test each, since each takes a few milliseconds; `make audit` prints them.
"""

from __future__ import annotations

import subprocess
import sys

import hostile_inputs as inputs
import pytest
from hostile import Case

LISTED, GENERATED = 114, 200  # at least: as many as the audit of the first version, and more


def failures(cases: list[Case]) -> list[str]:
    return [f"{one.name}: {why}" for one in cases if (why := one.run())]


@pytest.mark.parametrize("kind", ["urls", "flags", "files", "environment"])
def test_listed(kind: str) -> None:
    assert failures(getattr(inputs, kind)()) == []


def test_generated() -> None:
    made = inputs.generated()
    assert len(made) >= GENERATED
    assert failures(made) == []


def test_there_are_enough() -> None:
    assert len(inputs.listed()) >= LISTED


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "harness.cli", "launch", "binary", "--run", "new-run"],
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
