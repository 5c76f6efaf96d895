"""Models on meshes: sharded within copies (HSDP), split by tensor parallelism beside it, on real
ranks; copies come and go."""

import json
import os
import signal
from pathlib import Path

import pytest

from harness.bucket.layout import read_epoch
from harness.core.batch import Batching, expected_digest
from harness.core.facts import EpochStarted, SessionStarted
from harness.look.audit.audit import audit
from storage.stores.store_urls import open_store
from support.worlds import history, newest, same_training, train

pytestmark = [pytest.mark.proof, pytest.mark.mesh]
MESHED = Path(__file__).parents[1] / "support" / "meshed.py"


def meshed(run, world, *flags, mesh="", **how):
    env = {"HARNESS_MESH": mesh} if mesh else {}
    return train(run, world, *flags, env=env, script=MESHED, **how)


def trained_whole(folder, *flags):
    """One rank holds the whole model."""
    meshed(folder / "run", 1, "--whole", "--out", folder / "out.json", *flags)
    return folder / "run", json.loads((folder / "out.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return trained_whole(tmp_path_factory.mktemp("whole"))


FIFTY = ("--total", 50, "--every", 25)  # 2.4 epochs


@pytest.fixture(scope="module")
def fifty_whole(tmp_path_factory):
    return trained_whole(tmp_path_factory.mktemp("fifty"), *FIFTY)


@pytest.mark.parametrize(
    ("mesh", "world", "replicas", "held"),
    [("dp_shard=2", 4, 4, 0.5), ("dp_shard=2,tp=2", 4, 2, 0.25), ("tp=2", 2, 1, 0.5)],
)
def test_a_model_on_a_mesh_trains_as_a_whole_one(whole, tmp_path, mesh, world, replicas, held):
    run, out = tmp_path / "run", tmp_path / "out.json"
    meshed(run, world, "--out", out, mesh=mesh)
    same_training(run, whole[0])
    said = json.loads(out.read_text())
    assert said["sum"] == pytest.approx(whole[1]["sum"], rel=1e-4)
    assert said["replicas"] == replicas and said["held"] == pytest.approx(held, rel=0.2)
    records = history(run)
    assert {(r.world, len(r.shares)) for r in records} == {(world, replicas)}
    batching = Batching(500, 24, 4, seed=1)
    assert all(int(r.digest, 16) == expected_digest(batching, r.step) for r in records)
    store = open_store(str(run))
    assert read_epoch(store, 1).mesh == mesh and audit(store).ok


@pytest.mark.parametrize("mesh", ["dp_shard=2", "dp_shard=2,tp=2"])  # HSDP 2 x 2, FSDP x TP 2 x 2
def test_fifty_steps_are_those_of_a_single_process(fifty_whole, tmp_path, mesh):
    run, out = tmp_path / "run", tmp_path / "out.json"
    meshed(run, 4, *FIFTY, "--out", out, mesh=mesh)
    same_training(run, fifty_whole[0])
    assert [r.step for r in history(run)] == list(range(1, 51))
    assert json.loads(out.read_text())["sum"] == pytest.approx(fifty_whole[1]["sum"], rel=1e-4)
    assert audit(open_store(str(run))).ok


def stored(run):
    return sum(part.nbytes for part in newest(run).stored.values())


def test_copies_come_and_go_and_meshes_change(whole, tmp_path):
    """What is stored is one copy, whoever holds how many; and any mesh goes on from it."""
    run, sizes = tmp_path / "run", []
    for mesh, world, total in (
        ("dp_shard=2", 4, 3),
        ("dp_shard=2", 2, 5),
        ("dp_shard=2,tp=2", 4, 7),
        ("tp=2", 2, 9),
        ("dp_shard=4", 4, 11),
    ):
        meshed(run, world, "--total", total, mesh=mesh)
        sizes.append(stored(run))
    meshed(run, 1, "--whole")
    sizes.append(stored(run))
    same_training(run, whole[0])
    assert max(sizes) < 1.3 * min(sizes)  # small tensors are padded
    assert newest(run).data["final"] and audit(open_store(str(run))).ok


def test_exact_sums_are_the_same_for_any_number_of_copies(tmp_path):
    found = {}
    for mesh, world in (("", 1), ("dp_shard=2", 2), ("dp_shard=2", 4), ("dp_shard=3", 3)):
        run, out = tmp_path / f"run{world}", tmp_path / f"{world}.json"
        flags = () if mesh else ("--whole",)
        meshed(run, world, "--reduce", "exact", "--out", out, *flags, mesh=mesh)
        found[world] = (
            json.loads(out.read_text())["weights"],
            [(r.loss, r.metrics["grad_norm"]) for r in history(run)],
        )
    assert found[1] == found[2] == found[3] == found[4]


@pytest.mark.timeout(900)  # three epochs, and a machine may be busy
def test_a_lost_node_takes_its_copy_with_it_and_no_other(fifty_whole, nodes):
    """Four nodes of one rank each, two copies of two ranks; then two and one that waits; and a
    newcomer makes it two copies again. A step takes 6 s from the fourth on, until all is seen."""
    flags, agent = ["--total", 50, "--go", nodes.go], ["--mesh", "dp_shard=2", "--nproc", "1"]
    for _ in range(4):
        nodes.start(*flags, script=MESHED, agent=agent)
    nodes.until(lambda: any(e.world == 4 for e in nodes.facts(EpochStarted)) and nodes.step() >= 3)
    epochs = nodes.facts(EpochStarted)
    victim = int(epochs[-1].members[3].split("-")[0].removeprefix("m"))
    os.killpg(nodes.processes[victim - 1].pid, signal.SIGKILL)
    nodes.until(lambda: nodes.facts(EpochStarted)[-1].world == 2)
    nodes.start(*flags, script=MESHED, agent=agent)
    nodes.until(lambda: nodes.facts(EpochStarted)[-1].world == 4)
    nodes.go.touch()
    codes = nodes.codes()
    assert sorted(codes) == [-9, 0, 0, 0, 0], nodes.logs()
    assert {e.world for e in nodes.facts(EpochStarted)} <= {2, 4}
    same_training(nodes.run, fifty_whole[0])
    assert audit(open_store(nodes.url)).ok


@pytest.mark.timeout(900)  # three epochs, and a machine may be busy
def test_another_mesh_is_taken_while_the_wanted_one_cannot_be_had(fifty_whole, nodes):
    """Four nodes train on one mesh, the three that are left on another, and with a newcomer on the
    first again: the state is resharded each time. A step takes 6 s from the fourth on, until all
    is seen."""
    meshes = ("--mesh", "dp_shard=4|auto:2..3", "--set", "mesh_wait_s=1")
    flags, agent = ["--total", 50, "--go", nodes.go], [*meshes, "--nproc", "1"]
    for _ in range(4):
        nodes.start(*flags, script=MESHED, agent=agent)
    store = open_store(nodes.url)

    def last():
        epochs = nodes.facts(EpochStarted)
        return read_epoch(store, epochs[-1].epoch) if epochs else None

    nodes.until(lambda: last() and last().world == 4 and nodes.step() >= 3)
    victim = int(last().members[3].split("-")[0].removeprefix("m"))
    os.killpg(nodes.processes[victim - 1].pid, signal.SIGKILL)
    nodes.until(lambda: last().mesh != "dp_shard=4")
    assert (last().mesh, last().world) == ("dp_shard=3", 3)  # nobody is left over
    nodes.start(*flags, script=MESHED, agent=agent)
    nodes.until(lambda: last().mesh == "dp_shard=4")
    nodes.go.touch()
    assert sorted(nodes.codes()) == [-9, 0, 0, 0, 0], nodes.logs()
    assert nodes.facts(SessionStarted)[-1].read_nbytes["peer"]
    same_training(nodes.run, fifty_whole[0])
    assert audit(store).ok


@pytest.mark.parametrize(
    ("mesh", "world", "flags", "says"),
    [
        ("dp_shard=2", 3, [], "3 ranks make no whole number of copies of 2 ranks; use 2 or 4"),
        ("dp_shard=2", 2, ["--plain"], "wanted a model sharded by harness.fsdp2(model, run)"),
        ("dp_shard=2", 4, ["--apart"], "the state of 'model' is not the same on all ranks"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, mesh, world, flags, says):
    ended = meshed(tmp_path / "run", world, *flags, mesh=mesh, codes=(1, -9))
    assert says in ended.output, ended.output
