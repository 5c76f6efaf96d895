"""Context parallelism on real ranks: they share the positions of their sequences."""

import json
from pathlib import Path

import pytest

from harness.core.batch import Batching, expected_digest
from harness.look.audit.audit import audit
from storage.stores.store_urls import open_store
from support.come_and_go import come_and_go
from support.worlds import history, same_training, train

pytestmark = pytest.mark.mesh
CONTEXTS = Path(__file__).parents[1] / "support" / "contexts.py"


def shared(folder, world, *flags, mesh="", **how):
    """What rank 0 says at the end."""
    out, env = folder / "out.json", {"HARNESS_MESH": mesh} if mesh else {}
    train(folder / "run", world, "--out", out, *flags, env=env, script=CONTEXTS, **how)
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One rank holds the whole model, and sees whole sequences."""
    folder = tmp_path_factory.mktemp("whole")
    shared(folder, 1, "--whole")
    return folder / "run"


@pytest.mark.parametrize(
    ("mesh", "world", "replicas", "held"),
    [("cp=2", 2, 1, 1 / 2), ("dp_shard=2,cp=2", 4, 2, 1 / 4), ("cp=3", 6, 2, 1 / 3)],
)
def test_ranks_that_share_sequences_train_as_a_whole_one(
    whole, tmp_path, mesh, world, replicas, held
):
    said = shared(tmp_path, world, mesh=mesh)
    same_training(tmp_path / "run", whole)
    assert said["replicas"] == replicas and said["held"] == pytest.approx(held, rel=0.2)
    records = history(tmp_path / "run")
    assert {(r.world, len(r.shares)) for r in records} == {(world, replicas)}
    batching = Batching(500, 24, 4, seed=1)
    assert all(int(r.digest, 16) == expected_digest(batching, r.step) for r in records)
    assert audit(open_store(str(tmp_path / "run"))).ok


def test_tokens_that_do_not_count_weigh_nothing(tmp_path):
    """Of each rank's positions others do not count."""
    shared(tmp_path / "whole", 1, "--whole", "--tokens")
    shared(tmp_path / "cp", 4, "--tokens", mesh="dp_shard=2,cp=2")
    same_training(tmp_path / "cp" / "run", tmp_path / "whole" / "run")


def test_exact_sums_are_the_same_for_any_number_of_replicas(tmp_path):
    found = {}
    for mesh, world in (("cp=2", 2), ("cp=2", 4), ("cp=2", 6), ("dp_shard=2,cp=2", 4)):
        folder = tmp_path / f"{mesh}-{world}"
        said = shared(folder, world, "--reduce", "exact", "--dropout", 0.1, mesh=mesh)
        numbers = [(r.loss, r.metrics["grad_norm"]) for r in history(folder / "run")]
        found[mesh, world] = said["weights"], numbers
    assert len({str(one) for one in found.values()}) == 1


@pytest.mark.timeout(900)  # four epochs, and a machine may be busy
def test_replicas_come_and_go(tmp_path, nodes):
    """With exact sums to the bit as undisturbed ones."""
    flags = ["--total", 50, "--reduce", "exact"]
    calm, out = shared(tmp_path / "calm", 2, *flags, mesh="cp=2"), tmp_path / "live.json"
    agent = ["--mesh", "cp=2", "--nproc", "1"]
    come_and_go(nodes, CONTEXTS, [*flags, "--out", out], agent, (4, 2, 4, 2))
    assert json.loads(out.read_text())["weights"] == calm["weights"]
    same_training(nodes.run, tmp_path / "calm" / "run")
    assert audit(open_store(nodes.url)).ok


def test_fifty_steps_go_as_in_one_process(tmp_path):
    shared(tmp_path / "whole", 1, "--whole", "--total", 50)
    shared(tmp_path / "cp", 4, "--total", 50, mesh="dp_shard=2,cp=2")
    same_training(tmp_path / "cp" / "run", tmp_path / "whole" / "run")


def test_meshes_change(whole, tmp_path):
    for mesh, world, total in (("dp_shard=2,cp=2", 4, 3), ("dp_shard=2", 2, 6), ("cp=2", 4, 9)):
        shared(tmp_path, world, "--total", total, mesh=mesh)
    shared(tmp_path, 1, "--whole")
    same_training(tmp_path / "run", whole)
    assert audit(open_store(str(tmp_path / "run"))).ok


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--length", 22], "a length that is a multiple of 4 (twice cp), found 22 along dimension 1"),
        (["--batch-norm"], "the model has BatchNorm, whose averages are over all positions"),
    ],
)
def test_what_cannot_be_shared_is_refused(tmp_path, flags, says):
    env = {"HARNESS_MESH": "cp=2"}
    ended = train(tmp_path, 2, *flags, env=env, script=CONTEXTS, codes=(1, -9))
    assert says in ended.output, ended.output
