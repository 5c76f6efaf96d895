"""What must hold of every run that has ended well."""

import subprocess
import sys
import time

from harness.core.batch import Batching, expected_digest
from support.campaign import Campaign
from support.worlds import history


def harness(*words, first=""):
    """`first`: Python that runs before the command."""
    program = ["-c", f"{first}; import harness.cli.__main__"] if first else ["-m", "harness.cli"]
    return subprocess.run(
        [sys.executable, *program, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
    )


def assert_whole(c: Campaign, total=120):
    """The run is finished, proven from the bucket, and nothing is left of it."""
    records = history(c.run)
    assert [r.step for r in records] == list(range(1, total + 1))
    batching = Batching(1000, 48, 4, seed=1)
    assert all(
        int(r.digest, 16) == expected_digest(batching, r.step) and r.samples == 48 for r in records
    )
    verified = harness("prove", "verify", c.run)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    deadline = time.monotonic() + 60
    while (left := c.left_over()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left
    return records
