"""Megatron-Core's own dist_checkpointing, on CPUs (gloo), through our storage: onto the same ranks
and onto others."""

from pathlib import Path

import pytest

pytest.importorskip("megatron.core.dist_checkpointing")

from storage.opening import open_store
from storage.snapshots import Snapshots

SCRIPT = Path(__file__).parent / "scripts" / "megatron_state.py"
PRELOAD = "megatron.core.dist_checkpointing"


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
