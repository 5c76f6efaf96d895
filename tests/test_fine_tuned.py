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
    whole = sum(t.nbytes for t in before.values())
    assert max(reads.values()) < 0.55 * whole  # what a rank holds, and columns of others' rows


TRAINER = Path(__file__).parent.parent / "examples" / "pretrain.py"


@pytest.mark.parametrize("name", ["llama-tiny", "moe-tiny"])
def test_the_reference_trainer_on_meshes(tmp_path, name):
    """From the same weights the same losses on any mesh, validation, average and all."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 200)
    exported(tiny(name), tmp_path / "from")
    sizes = "--seq 32 --steps 4 --global-batch 8 --micro-batch 2 --warmup 1 --eval-every 2"
    more = "--eval-windows 6 --snapshot-every-steps 2 --ema --checkpointing --lr 1e-3"
    words = ["--data", tmp_path / "text.txt", "--cache", tmp_path / "cache"]
    words += ["--model", tmp_path / "from", *sizes.split(), *more.split()]
    alone = None
    meshes = ["", "dp_shard=2"] + ["dp_shard=2,tp=2"] * (name == "llama-tiny")
    for mesh in meshes:
        run = tmp_path / f"run-{mesh or 'whole'}"
        world = {"": 1, "dp_shard=2": 2}.get(mesh, 4)
        flags = ["--mesh", mesh] if mesh else []
        train(run, world, *words, *flags, script=TRAINER)
        found = [
            (r.loss, r.metrics.get("val_loss"), r.metrics.get("ema_val_loss")) for r in history(run)
        ]
        alone = alone or found
        for row, wanted in zip(found, alone, strict=True):
            assert [x is None for x in row] == [x is None for x in wanted]
            for x, y in zip(row, wanted, strict=True):
                assert x is None or x == pytest.approx(y, rel=1e-4)
    assert alone[-1][0] < 0.99 * alone[0][0] and alone[-1][1] is not None


@pytest.mark.parametrize(
    ("words", "mesh", "says"),
    [
        ("--model moe-tiny", "dp_shard=1,tp=2", "tp=2: wanted a model without experts"),
        ("", "dp_shard=1,tp=2", "wanted a model of models.py"),
        ("--model llama-tiny --float8", "dp_shard=2", "--float8"),
        ("--model llama-9b", "dp_shard=2", "wanted a model of llama-tiny"),
    ],
)
def test_the_reference_trainer_refuses_by_name(tmp_path, words, mesh, says):
    (tmp_path / "text.txt").write_text("the quick brown fox " * 400)
    data = ["--data", tmp_path / "text.txt", "--cache", tmp_path / "cache", "--mesh", mesh]
    ended = train(tmp_path / "run", 2, *words.split(), *data, script=TRAINER, codes=(1, -9))
    assert says in ended.output, ended.output
