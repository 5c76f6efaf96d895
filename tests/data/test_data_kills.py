"""`harness data prepare`, killed at any moment and started again: the same corpus to the byte."""

import random
import signal
import subprocess
import sys

import psutil
import pytest

from support.corpora import WORDS, command, content
from support.worlds import environment, until

pytestmark = pytest.mark.proof


@pytest.mark.parametrize("more", [[], ["--near-duplicates", 0.7]])
def test_killed_at_any_moment_and_started_again_makes_the_same(tmp_path, more):
    """SIGKILL of the command while it has two processes; they die with it."""
    if more:
        pytest.importorskip("datasketch")
    flags = ["--unit-mib", 1, "--shard-mib", 1, "--chunk-kib", 16, "--jobs", 2, "--held-out", 0.1]
    flags += more
    big = tmp_path / "big"
    big.mkdir()
    rng = random.Random(1)
    for i in range(12):  # each a unit, of a tenth of a second or so
        (big / f"{i}.txt").write_text(" ".join(rng.choices(WORDS, k=200_000)))
    calm = command("prepare", big, tmp_path / "calm", *flags)
    assert calm.returncode == 0, calm.stderr
    wanted = content(tmp_path / "calm")
    assert len(wanted) > 12

    folder, kills = tmp_path / "killed", 0
    words = [sys.executable, "-m", "harness.cli", "data", "prepare", big, folder, *flags]
    while True:
        process = subprocess.Popen(list(map(str, words)), env=environment(), text=True)
        # some objects later, and then some
        more = sum(1 for path in folder.rglob("*") if path.is_file()) + rng.randrange(1, 6)
        until(
            lambda: process.poll() is not None  # noqa: B023
            or sum(1 for path in folder.rglob("*") if path.is_file()) > more,  # noqa: B023
            "objects",
            every_s=rng.choice([0.001, 0.01, 0.05]),
        )
        if process.poll() is not None:
            assert process.returncode == 0
            break
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
        until(lambda: not any(map(alive, children)), "its processes to die")  # noqa: B023
        assert kills < 40
    assert kills >= 2
    found = content(folder)
    # of a file that was being written only a temporary name can be left
    assert {name: data for name, data in found.items() if not name.endswith(".tmp")} == wanted
    assert command("verify", folder).returncode == 0


def alive(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
