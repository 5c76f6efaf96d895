"""Mixtures of experts that lie over `ep`, on real ranks: the training is that of one rank that has
them all; copies come and go; any mesh goes on from any snapshot."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.core.batch import Batching, expected_digest
from harness.core.facts import EpochStarted
from harness.look.audit.audit import audit
from storage.stores.store_urls import open_store
from support.worlds import history, same_training, train

pytestmark = pytest.mark.mesh
SUPPORT = Path(__file__).parents[1] / "support"
MIXTURE = SUPPORT / "mixture.py"


def mixture(run, world, *flags, mesh="", **how):
    env = {"HARNESS_MESH": mesh} if mesh else {}
    return train(run, world, *flags, env=env, script=MIXTURE, **how)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One rank has all experts: what of a run with these flags?"""
    known = {}

    def run(*flags):
        if flags not in known:
            folder = tmp_path_factory.mktemp("alone")
            mixture(folder / "run", 1, *flags, "--out", folder / "out.json")
            known[flags] = folder / "run", json.loads((folder / "out.json").read_text())
        return known[flags]

    return run


def same_as(alone, run, out):
    same_training(run, alone[0])
    said = json.loads(out.read_text())
    assert said["bias"] == alone[1]["bias"] and all(map(any, said["bias"]))
    assert said["sum"] == pytest.approx(alone[1]["sum"], rel=1e-5)
    assert audit(open_store(str(run))).ok
    return said


@pytest.mark.parametrize(("mesh", "held"), [("dp_shard=2,ep=2", 0.5), ("dp_shard=4,ep=2", 0.25)])
def test_fifty_steps_are_those_of_one_rank(alone, tmp_path, mesh, held):
    flags, run, out = ("--total", 50, "--every", 25), tmp_path / "run", tmp_path / "out.json"
    mixture(run, 4, *flags, "--out", out, mesh=mesh)
    assert same_as(alone(*flags), run, out)["held"] == held
    records = history(run)
    assert [(r.world, r.shares) for r in records] == [(4, (2, 2, 1, 1))] * 50
    batching = Batching(500, 24, 4, seed=1)
    assert all(int(r.digest, 16) == expected_digest(batching, r.step) for r in records)


@pytest.mark.parametrize("mesh", ["dp_shard=2,ep=2", "dp_shard=4,ep=4"])
def test_fillers_and_what_is_computed_again_count_nothing(alone, tmp_path, mesh):
    """Ten micro-batches for four ranks, so two of them are given fillers."""
    run, out = tmp_path / "run", tmp_path / "out.json"
    mixture(run, 4, "--uneven", "--again", "--out", out, mesh=mesh)
    same_as(alone("--uneven"), run, out)
    assert {r.shares for r in history(run)} == {(3, 3, 2, 2)}


def test_a_model_from_the_meta_device_begins_alike_on_any_mesh(alone, tmp_path):
    run, out = tmp_path / "run", tmp_path / "out.json"
    mixture(run, 4, "--meta", "--out", out, mesh="dp_shard=4,ep=2")
    same_as(alone("--meta"), run, out)


def test_exact_sums_are_there_without_ep(tmp_path):
    found = []
    for world in (1, 2, 3):
        run, out = tmp_path / f"{world}", tmp_path / f"{world}.json"
        mixture(run, world, "--reduce", "exact", "--total", 6, "--out", out)
        said = json.loads(out.read_text())
        found.append((said["weights"], said["bias"], [r.loss for r in history(run)]))
    assert found[0] == found[1] == found[2]


def test_one_run_goes_on_from_mesh_to_mesh(alone, tmp_path):
    run, out = tmp_path / "run", tmp_path / "out.json"
    for mesh, world, total in (
        ("dp_shard=2,ep=2", 4, 2),
        ("dp_shard=4,ep=4", 4, 4),
        ("", 1, 6),
        ("dp_shard=2,ep=2", 2, 8),
        ("dp_shard=2", 2, 10),
        ("dp_shard=4,ep=2", 4, 12),
    ):
        mixture(run, world, "--total", total, "--out", out, mesh=mesh)
    same_as(alone(), run, out)


def test_what_is_saved_on_any_mesh_is_loaded_bit_equal_on_any_other(tmp_path):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    env = {k: v for k, v in env.items() if not k.startswith("HARNESS_")}
    ended = subprocess.run(
        [sys.executable, SUPPORT / "expert_shards.py", tmp_path],
        env=env,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ended.returncode == 0, ended.stderr
    rows = [line.split("\t") for line in ended.stdout.splitlines() if "\t" in line]
    assert len(rows) == 8 and len({weights for weights, _, _ in rows}) == 1
    sizes = [int(nbytes) for _, nbytes, _ in rows]
    assert max(sizes) < 1.1 * min(sizes)  # one copy, whoever holds how many; with padding


@pytest.mark.parametrize(("end", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 33)])
def test_a_node_is_lost_or_drained_and_a_newcomer_comes(alone, nodes, end, code):
    """Four nodes of one rank each: two copies of two ranks, which share the experts."""
    flags = ["--total", 60, "--go", nodes.go]
    agent = ["--mesh", "dp_shard=2,ep=2", "--nproc", "1"]
    for _ in range(4):
        nodes.start(*flags, script=MIXTURE, agent=agent)
    nodes.until(lambda: any(e.world == 4 for e in nodes.facts(EpochStarted)) and nodes.step() >= 3)
    member = nodes.facts(EpochStarted)[-1].members[3]
    one = nodes.processes[int(member.split("-")[0].removeprefix("m")) - 1]
    if end == signal.SIGKILL:
        os.killpg(one.pid, end)
    else:
        one.send_signal(end)
    nodes.until(lambda: nodes.facts(EpochStarted)[-1].world == 2)
    nodes.start(*flags, script=MIXTURE, agent=agent)
    nodes.until(lambda: nodes.facts(EpochStarted)[-1].world == 4)
    nodes.go.touch()
    assert sorted(nodes.codes()) == sorted([code, 0, 0, 0, 0]), nodes.logs()
    assert {e.world for e in nodes.facts(EpochStarted)} <= {2, 4}
    assert {r.world for r in history(nodes.run)} == {2, 4}
    same_training(nodes.run, alone("--total", 60)[0])
    assert audit(open_store(nodes.url)).ok


@pytest.mark.parametrize(
    ("mesh", "flags", "says"),
    [
        ("dp_shard=2,ep=2", ["--whole"], "wanted a model whose experts lie over ep, found none"),
        ("dp_shard=2,ep=2", ["--reduce", "exact"], "an expert's gradient is one sum over the rows"),
        ("cp=2", [], "Router counts the tokens of its rank: wanted ranks with samples of their"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, mesh, flags, says):
    ended = mixture(tmp_path / "run", 2, *flags, mesh=mesh, codes=(1, -9))
    assert says in ended.output, ended.output
