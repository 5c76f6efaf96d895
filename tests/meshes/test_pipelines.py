"""Models as pipelines of stages, on real ranks, beside data parallelism, sharding and tensor
parallelism; copies come and go, and cuts change."""

import json
import os
import signal
from pathlib import Path

import pytest

from harness.core.batch import Batching, expected_digest
from harness.core.facts import EpochLeft, EpochStarted
from harness.core.mesh import parse
from harness.look.audit.audit import audit
from storage.stores.store_urls import open_store
from support.worlds import history, newest, same_training, train

pytestmark = pytest.mark.mesh
PIPED = Path(__file__).parents[1] / "support" / "piped.py"


def piped(run, world, *flags, mesh="", **how):
    env = {"HARNESS_MESH": mesh} if mesh else {}
    return train(run, world, *flags, env=env, script=PIPED, **how)


def said(out, world):
    """Of all ranks, by name of the tensor."""
    told = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(world)]
    hashes = [item for one in told for item in one["hashes"].items()]
    assert len(set(hashes)) == len(dict(hashes))  # who holds the same has the same
    return dict(hashes), {k: v for one in told for k, v in one["sums"].items()}, told


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One rank holds the whole model: its run by flags, and what it said."""
    made = {}

    def of(*flags):
        if flags not in made:
            folder = tmp_path_factory.mktemp("whole")
            piped(folder / "run", 1, *flags, "--out", folder / "out")
            made[flags] = folder / "run", said(folder / "out", 1)
        return made[flags]

    return of


LONG = ("--total", 50, "--every", 10)


@pytest.mark.parametrize(
    ("mesh", "world", "replicas"),
    [("pp=2", 4, 2), ("pp=2,dp_shard=2", 4, 2), ("pp=2,tp=2", 8, 2), ("pp=2,dp_shard=2,tp=2", 8, 2)],
)
def test_a_pipeline_trains_as_a_whole_model(whole, tmp_path, mesh, world, replicas):
    run, out = tmp_path / "run", tmp_path / "out"
    piped(run, world, *LONG, "--out", out, mesh=mesh)
    theirs, (_, sums, _) = whole(*LONG)
    same_training(run, theirs)
    _, mine, told = said(out, world)
    assert mine == pytest.approx(sums, rel=1e-3)
    held = [one["held"] for one in told]
    assert max(held) < 0.6 * sum(held) / (world // copy_ranks(mesh))
    records = history(run)
    assert {(r.world, len(r.shares)) for r in records} == {(world, replicas)}
    batching = Batching(500, 24, 4, seed=1)
    assert all(int(r.digest, 16) == expected_digest(batching, r.step) for r in records)
    assert audit(open_store(str(run))).ok


def copy_ranks(mesh):
    return parse(mesh).copy_ranks


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zero-bubble", "zero-bubble-v"])
def test_every_schedule_trains_alike(whole, tmp_path, schedule):
    """Shares of 5 and of 1 micro-batch as well: what a schedule does not take is done in turns."""
    piped(tmp_path / "run", 2, "--schedule", schedule, mesh="pp=2")
    same_training(tmp_path / "run", whole()[0])
    speeds = {"HARNESS_MESH": "pp=2", "HARNESS_SPEEDS": "[5.0, 5.0, 1.0, 1.0]"}
    train(tmp_path / "uneven", 4, "--schedule", schedule, env=speeds, script=PIPED)
    same_training(tmp_path / "uneven", whole()[0])
    assert {r.shares for r in history(tmp_path / "uneven")} == {(5, 1)}


@pytest.mark.parametrize(
    "flags",
    [
        ["--norm", "BatchNorm1d"],
        ["--tokens"],
        ["--scaler"],
        ["--groups", "--ema"],
        ["--meta"],
        ["--cuts", "blocks.1"],
    ],
)
def test_what_else_a_step_has(whole, tmp_path, flags):
    """Running averages, losses by tokens, a scaler that skips steps, groups and an average of the
    weights, a model without values, a cut of one's own."""
    theirs = whole(*(() if "--cuts" in flags else flags))[0]
    out = tmp_path / "out"
    piped(tmp_path / "run", 4, *flags, "--total", 7, mesh="pp=2")
    piped(tmp_path / "run", 2, *flags, "--out", out, mesh="pp=2")  # goes on with one copy
    same = [r.loss for r in history(tmp_path / "run")]
    assert same == pytest.approx([r.loss for r in history(theirs)], rel=1e-4)
    assert audit(open_store(str(tmp_path / "run"))).ok


def stored(run):
    return sum(part.nbytes for part in newest(run).stored.values())


def test_any_cut_goes_on_from_a_snapshot(whole, tmp_path):
    """Other stages, more of them, none; each byte is stored once."""
    run, sizes = tmp_path / "run", []
    for world, mesh, total, *flags in (
        (2, "pp=2", 2),
        (1, "", 4),
        (4, "pp=4", 6),
        (2, "pp=2", 8, "--schedule", "interleaved"),
        (4, "pp=2,dp_shard=2", 10),
        (4, "pp=2,tp=2", 11),
        (2, "dp_shard=2", 12),
    ):
        piped(run, world, "--total", total, *flags, mesh=mesh)
        sizes.append(stored(run))
    same_training(run, whole()[0])
    assert max(sizes) < 1.4 * min(sizes)  # small tensors are padded
    assert newest(run).data["final"] and audit(open_store(str(run))).ok


def test_loading_another_cut_changes_no_bit(whole, tmp_path):
    """There and back again without a step: the same weights, and the same optimizer's state."""
    run = tmp_path / "run"
    piped(run, 2, "--total", 5, "--out", tmp_path / "out", mesh="pp=2")
    first, _, _ = said(tmp_path / "out", 2)
    again = newest(run)
    for i, (world, mesh) in enumerate([(1, ""), (4, "pp=4"), (4, "pp=2,dp_shard=2"), (2, "pp=2")]):
        out = tmp_path / f"out{i}"
        piped(run, world, "--total", 5, "--out", out, mesh=mesh)
        assert said(out, world)[0] == first
    names = set(again.tensors)
    assert {n for n in names if n.startswith("optimizer/0/state/21/")}  # of the whole model's 22+
    assert set(newest(run).tensors) == names


def test_exact_sums_are_the_same_for_any_number_of_copies_and_any_cut(whole, tmp_path):
    flags = ["--reduce", "exact", "--norm", "BatchNorm1d"]
    theirs, (hashes, _, _) = whole(*flags)
    wanted = [(r.loss, r.metrics["grad_norm"]) for r in history(theirs)]
    for i, (world, mesh, *more) in enumerate(
        [
            (2, "pp=2"),
            (4, "pp=2"),
            (6, "pp=2"),
            (4, "pp=2,dp_shard=2"),
            (2, "pp=2", "--schedule", "zero-bubble"),
            (2, "pp=2", "--schedule", "interleaved"),
        ]
    ):
        run, out = tmp_path / f"run{i}", tmp_path / f"out{i}"
        # begun with one copy: the units of the sums are in the snapshot
        piped(run, 2 if world == 6 else world, *flags, *more, "--total", 5, mesh=mesh)
        piped(run, world, *flags, *more, "--out", out, mesh=mesh)
        assert said(out, world)[0] == hashes, (world, mesh, more)
        assert [(r.loss, r.metrics["grad_norm"]) for r in history(run)] == wanted


@pytest.mark.parametrize("mesh", ["pp=2", "pp=2,tp=2"])
def test_copies_come_and_go(whole, nodes, mesh):
    """Stages on nodes of their own: one is killed, and its copy goes; a newcomer makes it whole; one
    is drained, and its copy goes. A step takes 6 s from the fourth on, until all is seen."""
    ranks = copy_ranks(mesh) // 2  # of a node
    flags = ["--total", 50, "--go", nodes.go]
    agent = ["--mesh", mesh, "--nproc", ranks]
    both = 4 * ranks

    def join(count):
        for _ in range(count):
            nodes.start(*flags, script=PIPED, agent=map(str, agent))

    def world():
        return nodes.facts(EpochStarted)[-1].world if nodes.facts(EpochStarted) else 0

    join(4)
    nodes.until(lambda: world() == both and nodes.step() >= 3)
    members = nodes.facts(EpochStarted)[-1].members
    victim = int(members[3].split("-")[0].removeprefix("m"))
    os.killpg(nodes.processes[victim - 1].pid, signal.SIGKILL)
    nodes.until(lambda: world() == both // 2)
    join(1)
    nodes.until(lambda: world() == both)
    members = nodes.facts(EpochStarted)[-1].members
    leaver = int(members[1].split("-")[0].removeprefix("m"))
    nodes.processes[leaver - 1].send_signal(signal.SIGTERM)
    nodes.until(lambda: world() == both // 2)
    nodes.go.touch()
    codes = nodes.codes()
    assert sorted(codes) == [-9, 0, 0, 0, 33], nodes.logs()
    assert "drained" in [e.why for e in nodes.facts(EpochLeft)]
    assert {e.world for e in nodes.facts(EpochStarted)} <= {both // 2, both}
    same_training(nodes.run, whole("--total", "50")[0])
    assert audit(open_store(nodes.url)).ok


@pytest.mark.parametrize(
    ("mesh", "world", "flags", "says"),
    [
        ("pp=2", 3, [], "3 ranks make no whole number of copies of 2 ranks; use 2 or 4"),
        ("pp=2", 2, ["--fault", "whole"], "wanted stages made by harness.pipeline(model, run"),
        ("pp=2", 2, ["--fault", "tied"], "tied weights of stages 0 and 1"),
        ("pp=2", 2, ["--fault", "loose"], "wanted every parameter in one of the modules"),
        ("pp=2", 2, ["--fault", "shape"], "wanted micro-batches of one shape"),
        ("pp=2", 2, ["--fault", "order"], "in the order in which the model has them"),
        ("pp=2", 2, ["--schedule", "2f2b"], "wanted one of gpipe, 1f1b"),
        ("pp=2", 2, ["--norm", "SyncBatchNorm"], "other stages have none of it"),
        ("pp=2,dp_shard=2", 4, ["--schedule", "zero-bubble"], "its backward comes in two parts"),
        ("pp=2,tp=2", 4, ["--reduce", "exact"], "reduce='exact' sums within stages of a pipeline"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, mesh, world, flags, says):
    ended = piped(tmp_path / "run", world, *flags, mesh=mesh, codes=(1, -9))
    assert says in ended.output, ended.output
