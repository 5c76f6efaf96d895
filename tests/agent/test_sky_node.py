"""The end of a Slurm allocation: a fake `scancel` and `scontrol` write down how they were called.
`tests/slurm/scenario.py` shows the same with real Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.agent.sky_node import SPARE_MINUTES, give_back
from harness.clouds.sky_broker import IDLE_MINUTES

OURS = {"SLURM_JOB_ID": "7", "HARNESS_ATTEMPT": "3", "SKYPILOT_CLUSTER_INFO": '{"cloud": "Slurm"}'}


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("scancel", "scontrol"):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/asked\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path / "asked"


def test_a_node_without_a_leader_ends_its_allocation_and_others_bound_theirs(asked: Path) -> None:
    assert give_back(OURS, at_once=True) == give_back(OURS, at_once=False) == ""
    later = f"scontrol update jobid=7 endtime=now+{SPARE_MINUTES}minutes"
    assert asked.read_text().splitlines() == ["scancel 7", later]
    assert SPARE_MINUTES == IDLE_MINUTES


@pytest.mark.parametrize("lacking", OURS)
def test_what_no_controller_of_ours_launched_is_left_alone(asked: Path, lacking: str) -> None:
    env = {name: value for name, value in OURS.items() if name != lacking}
    assert give_back(env, at_once=True) == "" and not asked.exists()


def test_what_slurm_answers_is_told(asked: Path) -> None:
    for script, said in (
        ("echo 'Access denied' >&2; exit 1", "`scancel 7` failed: Access denied"),
        ("exit 2", "`scancel 7` failed: Command '['scancel', '7']' returned non-zero exit"),
    ):
        (asked.parent / "scancel").write_text(f"#!/bin/sh\n{script}\n")
        assert give_back(OURS, at_once=True).startswith(said)
    (asked.parent / "scancel").unlink()
    assert "No such file" in give_back(OURS, at_once=True)
