"""Runs that begin with weights of others, on real ranks: each reads its shards; then they are
exported."""

import json
from pathlib import Path

import pytest
import torch

from harness.cli import command as cli
from support.exports import exported, files, tiny
from support.worlds import history, train

pytestmark = pytest.mark.mesh
SCRIPT = Path(__file__).parents[1] / "support" / "fine_tuned.py"


@pytest.mark.parametrize(
    ("mesh", "copies"), [("dp_shard=2,tp=2", 1), ("dp_shard=2", 1), ("dp_shard=2", 2)]
)
def test_the_first_copys_ranks_read_their_shards_and_all_train_on(tmp_path, mesh, copies):
    """The same losses as of one rank that holds it all, in half precision as it was stored; then
    the run is exported, and has learned."""
    model = tiny("llama-tiny")
    exported(model, tmp_path / "from", dtype="bf16")
    flags = ("--from", tmp_path / "from")
    train(tmp_path / "one", 1, *flags, script=SCRIPT)
    run = tmp_path / "run"
    world = 4 if "tp" in mesh else 2 * copies
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
    others = [reads.pop(str(rank)) for rank in range(world // copies, world)]
    assert not any(others)  # they get their weights from the first copy
    assert 0 < max(reads.values()) < 1.1 * min(reads.values())
    whole = sum(t.nbytes for t in before.values())
    assert max(reads.values()) < 0.55 * whole  # what a rank holds, and columns of others' rows


TRAINER = Path(__file__).parents[2] / "examples" / "pretrain.py"


MESHES = {
    "llama-tiny": [("dp_shard=2", 2), ("dp_shard=2,tp=2", 4)],
    "qwen3-tiny": [("tp=2", 2)],
    "gpt2-tiny": [("tp=2", 2)],
    "moe-tiny": [("dp_shard=2", 2), ("dp_shard=2,ep=2", 4)],
}


def trained(run, source, world, mesh, *more, env=None):
    """Losses, and what was validated: of each step."""
    source = source.parent
    words = ["--data", source / "text.txt", "--cache", source / "cache", "--model", source / "from"]
    sizes = "--seq 32 --steps 4 --global-batch 8 --micro-batch 2 --warmup 1 --lr 1e-3 --ema"
    words += [*sizes.split(), "--snapshot-every-steps", 2, "--checkpointing", *more]
    train(run, world, *words, *(["--mesh", mesh] if mesh else []), env=env, script=TRAINER)
    return [(r.loss, r.metrics.get("val_loss"), r.metrics.get("ema_val_loss")) for r in history(run)]


def same(found, wanted):
    for row, other in zip(found, wanted, strict=True):
        assert [x is None for x in row] == [x is None for x in other]
        for x, y in zip(row, other, strict=True):
            assert x is None or x == pytest.approx(y, rel=1e-4)


@pytest.fixture
def source(tmp_path):
    """Makes weights to begin with, beside a text."""

    def made(name, **other):
        (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 200)
        exported(tiny(name, **other), tmp_path / "from")
        return tmp_path / "from"

    return made


@pytest.mark.parametrize("name", MESHES)
def test_the_reference_trainer_on_meshes(tmp_path, source, name):
    """From the same weights the same losses on any mesh, validation, average and all."""
    begin, evals = source(name), ("--eval-every", 2, "--eval-windows", 6)
    alone = trained(tmp_path / "whole", begin, 1, "", *evals)
    for mesh, world in MESHES[name]:
        same(trained(tmp_path / mesh, begin, world, mesh, *evals), alone)
    assert alone[-1][0] < 0.99 * alone[0][0] and alone[-1][1] is not None


def test_the_reference_trainer_through_stages(tmp_path, source):
    """The same losses; one rank goes on from what two stages left, and its half precision is
    theirs."""
    begin, never = source("llama-tiny", tied=False), ("--eval-every", 0)
    alone = trained(tmp_path / "whole", begin, 1, "", *never)
    same(trained(tmp_path / "both", begin, 4, "pp=2,dp_shard=2", *never), alone)
    half = {"HARNESS_UNTIL_STEP": 2}
    trained(tmp_path / "stages", begin, 2, "pp=2", *never, env=half)
    same(trained(tmp_path / "stages", begin, 1, "", *never), alone)
    never += ("--dtype", "bf16")
    rounded = trained(tmp_path / "rounded", begin, 1, "", *never)
    assert rounded[0] != alone[0]
    same(trained(tmp_path / "rounded-stages", begin, 2, "pp=2", *never), rounded)


@pytest.mark.parametrize(
    ("words", "mesh", "says"),
    [
        ("--model moe-tiny", "dp_shard=1,tp=2", "tp=2: wanted a model without experts"),
        ("", "dp_shard=1,tp=2", "wanted a model of models.py"),
        ("--model llama-tiny --float8", "dp_shard=2", "harness.float8"),
        ("--model llama-tiny", "tp=2,dp_shard", "dp_shard"),
        ("--model llama-tiny", "pp=2", "pp=2: wanted --no-tied, --eval-every 0"),
        ("--no-tied --eval-every 0", "pp=2", "pp=2: wanted a model of models.py"),
        ("--model llama-tiny --compile", "tp=2", "tp=2: wanted no --compile"),
        ("--model llama-tiny", "cp=2", "docs/MESHES.md#long-sequences-cp"),
        ("--model llama-9b", "dp_shard=2", "wanted a model of llama-tiny"),
    ],
)
def test_the_reference_trainer_refuses_by_name(tmp_path, words, mesh, says):
    (tmp_path / "text.txt").write_text("the quick brown fox " * 400)
    data = ["--data", tmp_path / "text.txt", "--cache", tmp_path / "cache", "--mesh", mesh]
    ended = train(tmp_path / "run", 2, *words.split(), *data, script=TRAINER, codes=(1, -9))
    assert says in ended.output, ended.output
