"""Executing a part of a run again, on another number of workers."""

import subprocess
import sys

import pytest

from harness.core.world import BadInput
from harness.lab.replay import replay
from storage.stores.store_urls import open_store
from support.worlds import TRAINER, newest, train

pytestmark = pytest.mark.proof


def flags(reduce):
    return ["--reduce", reduce, "--total", "24", "--every", "8", "--patient"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replay")
    for reduce in ("exact", "fast"):
        train(folder / reduce, 2, *flags(reduce))
    return folder


def test_an_exact_window_is_the_same_on_any_world(runs, tmp_path):
    found = replay(
        open_store(str(runs / "exact")),
        tmp_path,
        8,
        8,
        3,
        [TRAINER, *flags("exact")],
        timeout_s=240,
    )
    assert found.identical and (found.first, found.last) == (9, 16)
    assert found.weights == "identical"


def test_a_fast_window_differs_on_another_world_and_the_step_is_named(runs, tmp_path):
    found = replay(
        open_store(str(runs / "fast")), tmp_path, 8, 8, 3, [TRAINER, *flags("fast")], timeout_s=240
    )
    assert not found.identical
    assert found.first_difference.startswith("step ") and found.weights.startswith("different: ")


def test_the_command(runs):
    command = [
        sys.executable,
        "-m",
        "harness.cli",
        "runs", "replay",
        str(runs / "exact"),
        "--start",
        "16",
        "--steps",
        "50",
        "--nodes",
        "1",
    ]
    ended = subprocess.run(
        [*command, "--", TRAINER, *flags("exact")], capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 0, ended.stderr
    assert "steps 17-24 on 1 worker: identical" in ended.stdout
    assert newest(runs / "exact").data["weights"] in ended.stdout


def test_what_is_not_kept_cannot_be_replayed(runs, tmp_path):
    with pytest.raises(BadInput, match="no snapshot of step 5; found: 8, 16, 24"):
        replay(open_store(str(runs / "exact")), tmp_path, 5, 3, 1, [TRAINER])
