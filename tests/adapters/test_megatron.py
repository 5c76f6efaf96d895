"""Megatron-Core's own dist_checkpointing, on CPUs (gloo), through our storage: onto the same ranks
and onto others; and the example, whose loop needs GPUs, with stand-ins for what it asks of CUDA."""

import re
from pathlib import Path

import pytest

pytest.importorskip("megatron.core.dist_checkpointing")

from storage.snapshots.snapshots import Snapshots
from storage.stores.store_urls import open_store

SCRIPTS = Path(__file__).parent / "scripts"
SCRIPT = SCRIPTS / "megatron_state.py"
PRELOAD = "megatron.core.dist_checkpointing"
LEFT = 33  # asked to leave; what it had is saved


def test_a_sharded_state_goes_to_any_number_of_ranks(warm, tmp_path):
    folder, url = tmp_path / "folder", tmp_path / "url"
    folder.mkdir()

    def run(world, what, *flags, codes=(0,)):
        words = (tmp_path / "run", world, what, folder, url, *flags)
        return warm.train(*words, script=SCRIPT, codes=codes).output

    assert run(2, "save").count("same") == 2
    index = Snapshots(open_store(str(url))).latest().tensors
    assert {name.rpartition("/")[2]: entry["shape"] for name, entry in index.items()} == {
        "embedding": [8, 3],
        "layers": [4, 6],
        "norm": [5],
        "gated": [16],
    }
    for world in (1, 2, 4):
        said = run(world, "load")
        assert said.count("same") == world, said
    assert "StateMismatch" in run(2, "load", "--wide", codes=(1, -9))


def test_the_example_goes_on_in_any_layout(warm, tmp_path):
    """Whole, split by tensor, by pipeline and by both, shares of replicas uneven: the same losses,
    since the same samples are in each step and the state is the same."""

    def losses(name, world, steps, *flags, codes=(0,), **env):
        model = ("--layers", 2, "--dim", 32, "--seq", 32, "--global-batch", 8, "--steps", steps)
        places = ("--out", tmp_path / name / "out", "--cache", tmp_path / "cache")
        words = (tmp_path / name / "run", world, *model, *places, "--data", SCRIPTS, *flags)
        env["HARNESS_ON_CHANGE"] = "accept"
        ended = warm.train(*words, script=SCRIPTS / "megatron_example.py", env=env, codes=codes)
        return {int(k): float(x) for k, x in re.findall(r"step (\d+): loss (\S+)", ended.output)}

    for name in ("whole", "moved", "bf16"):
        (tmp_path / name).mkdir()
    undisturbed = losses("whole", 1, 6)
    assert list(undisturbed) == [1, 2, 3, 4, 5, 6] and undisturbed[6] < undisturbed[1]
    moved = [
        losses("moved", 2, 9, "--tensor", 2, codes=(LEFT,), TOLD_AFTER=2),
        losses("moved", 4, 3, "--pipeline", 2),
        losses("moved", 3, 4),
        losses("moved", 4, 6, "--tensor", 2, "--pipeline", 2),
    ]
    assert [list(part) for part in moved] == [[1, 2], [3], [4], [5, 6]]
    found = {step: loss for part in moved for step, loss in part.items()}
    assert found == pytest.approx(undisturbed, abs=2e-4)
    half = losses("bf16", 1, 2, "--dtype", "bf16") | losses("bf16", 2, 4, "--dtype", "bf16")
    assert half == pytest.approx({step: undisturbed[step] for step in half}, abs=0.05)
    assert list(half) == [1, 2, 3, 4]
