"""Tensor parallelism on real ranks: exact sums beside it."""

import json
from pathlib import Path

import pytest
from worlds import history, same_training, train

MESHED = Path(__file__).parent / "meshed.py"


def meshed(folder, world, *flags, mesh=""):
    """What rank 0 says at the end."""
    out, env = folder / "out.json", {"HARNESS_MESH": mesh} if mesh else {}
    train(folder / "run", world, "--out", out, *flags, env=env, script=MESHED)
    return json.loads(out.read_text())


def test_exact_sums_are_the_same_for_any_number_of_replicas(tmp_path):
    """Of tensor parallel ranks, whoever shards what else."""
    found = set()
    for mesh, world in (("tp=2", 2), ("tp=2", 4), ("tp=2", 6), ("dp_shard=2,tp=2", 4)):
        folder = tmp_path / f"{mesh}-{world}"
        said = meshed(folder, world, "--reduce", "exact", mesh=mesh)
        numbers = [(r.loss, r.metrics["grad_norm"]) for r in history(folder / "run")]
        found.add((said["weights"], *numbers))
    assert len(found) == 1
    whole = meshed(tmp_path / "whole", 1, "--whole", "--reduce", "exact")
    same_training(tmp_path / "tp=2-6" / "run", tmp_path / "whole" / "run")
    assert said["sum"] == pytest.approx(whole["sum"], rel=1e-4)
