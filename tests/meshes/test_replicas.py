"""Worlds of replica groups: batch, digests, losses and votes run over replicas of two ranks, with a
real model that is split between them."""

import dataclasses
import json
import os
import signal
from pathlib import Path

import pytest

from harness.bucket.archive import read_facts
from harness.bucket.layout import epoch_key, read_epoch
from harness.core.batch import Batching, expected_digest
from harness.core.facts import EpochStarted, SessionStarted, Validated
from harness.core.world import BadInput
from harness.lab.replay import replay
from harness.look.audit.audit import audit
from harness.worker.gradients.parallel import Replicated, check_fits
from storage.stores.store_urls import open_store
from support.worlds import history, newest, same_training, train

pytestmark = pytest.mark.proof
SPLIT = Path(__file__).parents[1] / "support" / "split.py"
TWO = {"HARNESS_REPLICA_RANKS": "2"}


def split(run, world, *flags, env=TWO, **how):
    return train(run, world, *flags, env=env, script=SPLIT, **how)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One rank holds the whole model, and nothing happens to it."""
    folder = tmp_path_factory.mktemp("whole")
    split(folder / "run", 1, "--whole", "--out", folder / "out.json", env={})
    return folder / "run", json.loads((folder / "out.json").read_text())


@pytest.mark.parametrize("world", [2, 4])
def test_a_split_model_trains_as_a_whole_one(whole, tmp_path, world):
    run, out = tmp_path / "run", tmp_path / "out.json"
    split(run, world, "--out", out)
    same_training(run, whole[0])
    records = history(run)
    assert {(r.world, r.replica_ranks, r.shares) for r in records} == {
        (world, 2, {2: (6,), 4: (3, 3)}[world])
    }
    batching = Batching(500, 24, 4, seed=1)
    assert all(
        r.samples == 24 and int(r.digest, 16) == expected_digest(batching, r.step) for r in records
    )
    said = json.loads(out.read_text())
    assert said["place"] == [world // 2, 2, 0]
    assert said["sum"] == pytest.approx(whole[1]["sum"], rel=1e-4)
    store = open_store(str(run))
    facts = [s.fact for s in read_facts(store)]
    [started] = [f for f in facts if isinstance(f, SessionStarted)]
    assert (started.world, started.shares, started.parallel) == (world, records[0].shares, "split")
    # what is summed counts each replica once
    assert [f.metrics for f in facts if isinstance(f, Validated)] == [{"replicas": world / 2}]
    assert audit(store).ok
    if world == 4:  # a record of four replicas would be a lie
        epoch = dataclasses.replace(read_epoch(store, 1), replica_ranks=1)
        store.put(epoch_key(1), epoch.encode())
        assert "wanted replicas of 1 ranks" in str(audit(store).checks)


def test_a_split_run_goes_on_in_other_worlds(whole, tmp_path):
    """Four ranks, two, four again, and at last one rank with the whole model."""
    run = tmp_path / "run"
    for world, total in ((4, 4), (2, 7), (4, 10)):
        split(run, world, "--total", total)
    split(run, 1, "--whole", env={})
    same_training(run, whole[0])
    assert [(r.world, len(r.shares)) for r in history(run)] == (
        [(4, 2)] * 4 + [(2, 1)] * 3 + [(4, 2)] * 3 + [(1, 1)] * 2
    )
    assert newest(run).data["final"] and audit(open_store(str(run))).ok


def test_a_part_of_a_split_run_is_replayed_in_replicas_of_the_same_size(tmp_path):
    split(tmp_path / "run", 4)
    store = open_store(str(tmp_path / "run"))
    (tmp_path / "again").mkdir()
    found = replay(store, tmp_path / "again", 6, 3, 4, [str(SPLIT)], timeout_s=240)
    assert found.identical and (found.first, found.last) == (7, 9)
    with pytest.raises(BadInput, match="3 ranks make no whole number of replicas of 2 ranks"):
        replay(store, tmp_path / "odd", 6, 3, 3, [str(SPLIT)])


def test_a_replica_is_as_fast_as_its_slowest_rank(whole, tmp_path):
    speeds = {"HARNESS_SPEEDS": "[9.0, 1.0, 2.0, 2.0]"}
    split(tmp_path / "run", 4, env=TWO | speeds)
    same_training(tmp_path / "run", whole[0])
    assert {r.shares for r in history(tmp_path / "run")} == {(2, 4)}


def test_exact_sums_over_replicas_are_the_same_to_the_bit(tmp_path):
    """Each rank of a replica does all of its work: summed over all ranks, that would count
    twice."""
    found = {}
    for world, flags, env in ((1, ["--whole"], {}), (2, [], TWO), (4, [], TWO)):
        out = tmp_path / f"{world}.json"
        run = tmp_path / f"run-{world}"
        split(run, world, "--twice", "--reduce", "exact", "--out", out, *flags, env=env)
        found[world] = (
            json.loads(out.read_text())["weights"],
            [(r.loss, r.metrics["grad_norm"]) for r in history(run)],
            newest(run).data["state"]["reduce"],
        )
    assert found[1] == found[2] == found[4]


@pytest.mark.parametrize(
    ("world", "env", "flags", "says"),
    [
        (3, TWO, [], "3 ranks make no whole number of replicas of 2 ranks; use 2 or 4 ranks"),
        (
            2,
            TWO,
            ["--strategy", "none"],
            "the strategy 'ddp' holds a copy of the model on 1 rank, this world's replicas have 2 "
            "ranks",
        ),
        (
            2,
            TWO,
            ["--reduce", "exact"],
            "the strategy 'split' makes sums of the kind 'fast', found attach(reduce='exact')",
        ),
        (
            2,
            {"HARNESS_REPLICA_RANKS": "1"},
            ["--replica-ranks", "2"],
            "attach(replica_ranks=2): this world was formed of replicas of 1 ranks",
        ),
        (2, {"HARNESS_REPLICA_RANKS": "no"}, [], "HARNESS_REPLICA_RANKS='no': wanted a number"),
        (
            2,
            {},
            ["--replica-ranks", "2", "--stray"],
            "step 1: wanted all 2 ranks of a replica to read the same samples",
        ),
        (4, TWO, ["--apart"], "is not the same on all ranks, and a snapshot would mix them: model/1.w"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tmp_path, world, env, flags, says):
    ended = split(tmp_path / "run", world, *flags, env=env, codes=(1,))
    assert says in ended.output and newest(tmp_path / "run") is None


def test_agents_form_worlds_of_whole_replicas(whole, nodes):
    """Three nodes of one rank each: two train, one waits; it takes the place of one that
    vanishes."""
    # a step takes 0.2 s, and 3 s from the seventh on, until the loss was seen
    flags, agent = ["--total", 12, "--go", nodes.go], ["--replica-ranks", "2", "--nproc", "1"]
    for _ in range(3):
        nodes.start(*flags, script=SPLIT, agent=agent)
    nodes.until(lambda: nodes.step() >= 3)
    [started] = nodes.facts(EpochStarted)
    assert started.world == 2
    victim = int(started.members[1].split("-")[0].removeprefix("m"))
    os.killpg(nodes.processes[victim - 1].pid, signal.SIGKILL)
    nodes.until(lambda: len(nodes.facts(EpochStarted)) == 2)
    nodes.go.touch()
    codes = nodes.codes()
    assert sorted(codes) == [-9, 0, 0], nodes.logs()
    assert [e.world for e in nodes.facts(EpochStarted)] == [2, 2]
    same_training(nodes.run, whole[0])
    assert {r.shares for r in history(nodes.run)} == {(6,)}
    assert audit(open_store(nodes.url)).ok


def test_a_strategy_that_lacks_something_is_told_what():
    class Half:
        name = "half"

    with pytest.raises(BadInput, match=r"the strategy 'half': .* found no equal_rounds, .*norm"):
        check_fits(Half(), "fast", 1)
    check_fits(Replicated([]), "fast", 1)
