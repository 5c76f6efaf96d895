"""Real SkyPilot on real Slurm clusters, in short: two nodes on the cheaper cloud, power cuts, the
move to the dearer one, a bill; and plain `sky launch` and a managed job, whose bills are SkyPilot's.

Off unless HARNESS_LAB names a folder for the lab's state (it stays, so that the next time nothing
is installed): it takes both cores of a small computer for minutes, and needs root and Debian's
Slurm. `.ci/run` sets it where `tests/slurm/lab.py fit` says yes. The long form is `make lab`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from lab import provide, unfit

FOLDER = os.environ.get("HARNESS_LAB", "")
WITHIN_S = 2400.0  # a bound for a computer that is slow, not what it takes

why = unfit() or (
    "" if FOLDER else "HARNESS_LAB names no folder for it (it takes minutes and two cores)"
)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root installs packages")
@pytest.mark.parametrize(
    ("status", "wanted"), [(0, ""), (100, "apt-get update failed: E: no network")]
)
def test_what_is_missing_is_installed_and_nothing_is_started(tmp_path, monkeypatch, status, wanted):
    """With an apt-get that writes down what it was asked, and whether services may start."""
    for folder in ("bin", "etc", "usr/sbin"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "etc/debian_version").touch()
    apt, asked = tmp_path / "bin/apt-get", tmp_path / "asked"
    policy = tmp_path / "usr/sbin/policy-rc.d"
    apt.write_text(
        f"#!/bin/sh\n{policy}; echo $? $* >> {asked}\necho 'E: no network' >&2; exit {status}\n"
    )
    apt.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    assert provide({"sh": "dash"}, tmp_path) == "" and not asked.exists()
    assert provide({"sh": "dash", "no-such-program": "that-package"}, tmp_path) == wanted
    [update, *install] = asked.read_text().splitlines()
    assert update.startswith("101 ") and update.endswith(" update")  # 101: no service may start
    assert len(install) == (0 if status else 1)
    assert all(line.endswith("--no-install-recommends that-package") for line in install)
    assert not policy.exists()


@pytest.mark.skipif(bool(why), reason=why)
@pytest.mark.timeout(WITHIN_S + 60)
def test_a_run_goes_on_in_the_dearer_cloud_and_nothing_is_left():
    command = [sys.executable, str(Path(__file__).parent / "lab.py"), "short", FOLDER]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=WITHIN_S
    )
    assert done.returncode == 0 and "Everything holds." in done.stdout, done.stdout[-6000:]
    assert "The bills agree." in done.stdout, done.stdout[-6000:]
    left = [
        p.name
        for p in Path("/proc").iterdir()
        if p.name.isdigit() and runs_in(p, f"{Path(FOLDER).resolve()}/")
    ]
    assert left == []


def runs_in(process, folder):
    """Is it a program or a daemon of the lab?"""
    try:
        words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    return any(word.startswith(folder) for word in words)
