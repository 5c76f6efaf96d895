"""Runs that begin with weights of others, on real ranks: each reads its shards; then they are
exported."""

import json
from pathlib import Path

import pytest
import torch
from test_pretrained import exported, files, tiny
from worlds import history, train

from harness.cli import command as cli

SCRIPT = Path(__file__).parent / "fine_tuned.py"


@pytest.mark.parametrize("mesh", ["dp_shard=2,tp=2", "dp_shard=2"])
def test_ranks_of_a_mesh_read_their_shards_and_train_on(tmp_path, mesh):
    """The same losses as of one rank that holds it all, in half precision as it was stored; then
    the run is exported, and has learned."""
    model = tiny("llama-tiny")
    exported(model, tmp_path / "from", dtype="bf16")
    flags = ("--from", tmp_path / "from")
    train(tmp_path / "one", 1, *flags, script=SCRIPT)
    run = tmp_path / "run"
    world = 4 if "tp" in mesh else 2
    train(run, world, *flags, script=SCRIPT, env={"HARNESS_MESH": mesh})
    for r, a in zip(history(run), history(tmp_path / "one"), strict=True):
        assert r.loss == pytest.approx(a.loss, rel=1e-4)
    found = {}
    for name in ("one", "run"):
        with pytest.raises(SystemExit) as done:
            cli.main(["snapshots", "export", str(tmp_path / name), str(tmp_path / f"of-{name}")])
        assert done.value.code == 0
        found[name] = files(tmp_path / f"of-{name}")
    before, after, alone = files(tmp_path / "from"), found["run"], found["one"]
    assert before.keys() == after.keys() == alone.keys()
    for name in after:
        torch.testing.assert_close(after[name], alone[name], atol=2e-4, rtol=1e-3)
    assert not torch.equal(after["model.norm.weight"], before["model.norm.weight"].float())
    reads = json.loads((tmp_path / "from/reads.json").read_text())
    assert 0 < max(reads.values()) < 1.1 * min(reads.values())
