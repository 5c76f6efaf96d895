"""A lost node costs one step at most: survivors keep the state, and the next world goes on from it."""

import itertools
import json
import os
import signal
from dataclasses import replace

import psutil
import pytest
import torch

from harness.core.facts import SessionStarted, StepDone
from harness.core.step_records import StepRecord
from harness.worker.resuming.hand_over import (
    PIECE_NBYTES,
    ChosenPart,
    Holding,
    chained,
    choose,
    plan,
)
from harness.worker.resuming.kept_state import KeptState, ModelBuffers, marks_of
from storage.snapshots.manifest import Ref
from storage.snapshots.restore import RewindOrder
from support.worlds import history, train

TOTAL = 90
FLAGS = ("--total", TOTAL, "--every", 1000, "--sleep-s", 0.1, "--reduce", "exact")


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """The weights at the end of the run on one rank that nothing happens to."""
    folder = tmp_path_factory.mktemp("calm")
    ended = train(folder / "run", 1, *FLAGS[:2], "--reduce", "exact", "--out", folder / "out.json")
    assert ended.codes == [0]
    return json.loads((folder / "out.json").read_text())["weights"]


def reached(nodes):
    return max((fact.step for fact in nodes.facts(StepDone)), default=0)


def train_on(nodes, count, agent=()):
    """Start nodes and wait until they have trained together for ten steps, without a snapshot."""
    out = nodes.run.parent / "out.json"
    found = [nodes.start(*FLAGS, "--out", out, agent=agent) for _ in range(count)]
    world = count * int(agent[1] if agent else 1)
    nodes.until(lambda: any(e.world == world for e in nodes.facts(SessionStarted)))
    begun = reached(nodes)
    nodes.until(lambda: reached(nodes) >= begun + 10)
    return found


def check(nodes, calm, lost=1):
    """The run has ended with the calm run's weights, and no world did more than one step again."""
    assert json.loads((nodes.run.parent / "out.json").read_text())["weights"] == calm, nodes.logs()
    done = sorted((fact.epoch, fact.step) for fact in nodes.facts(StepDone))
    starts = sorted(nodes.facts(SessionStarted), key=lambda e: e.epoch)
    kept = [e for e in starts if e.tier == "survivors"]
    assert len(kept) == lost, nodes.logs()
    for start in kept:
        before = max(step for epoch, step in done if epoch < start.epoch)
        assert before - start.resumed_step <= 1
        assert start.resumed_step >= 10
    assert [r.step for r in history(nodes.run)] == list(range(1, TOTAL + 1))


def workers_of(process):
    return [p for p in psutil.Process(process.pid).children(recursive=True) if "rank" in p.name()]


@pytest.mark.proof
def test_a_node_that_lost_its_worker_gets_the_state_from_the_others(nodes, calm):
    found = train_on(nodes, 3)
    (worker,) = workers_of(found[1])
    worker.kill()
    assert [one.wait(200) for one in found] == [0, 0, 0], nodes.logs()
    check(nodes, calm)
    assert "kept the state of step" not in (nodes.run.parent / "node2.log").read_text()


@pytest.mark.proof
def test_a_node_that_falls_silent_costs_one_step(nodes, calm):
    """Nobody's connection breaks, so each agent asks its waiting worker."""
    first, second, third = train_on(nodes, 3)
    halted = [second.pid, *(p.pid for p in psutil.Process(second.pid).children(recursive=True))]
    for pid in halted:
        os.kill(pid, signal.SIGSTOP)
    assert (first.wait(200), third.wait(200)) == (0, 0), nodes.logs()
    check(nodes, calm)
    os.killpg(second.pid, signal.SIGKILL)
    os.kill(second.pid, signal.SIGCONT)


@pytest.mark.proof
def test_loss_after_loss_without_a_snapshot(nodes, calm):
    """Two of three nodes go, one after the other; the last one goes on alone."""
    first, second, third = train_on(nodes, 3)
    os.killpg(third.pid, signal.SIGKILL)
    nodes.until(lambda: any(e.world == 2 for e in nodes.facts(SessionStarted)))
    begun = reached(nodes)
    nodes.until(lambda: reached(nodes) >= begun + 5)
    os.killpg(first.pid, signal.SIGKILL)
    assert second.wait(200) == 0, nodes.logs()
    check(nodes, calm, lost=2)


@pytest.mark.proof
def test_whichever_worker_of_a_node_is_lost_another_one_keeps_the_state(nodes, calm):
    (node,) = train_on(nodes, 1, agent=("--nproc", "2"))
    for name in ("rank-0", "rank-1"):
        begun = reached(nodes)
        nodes.until(lambda begun=begun: reached(nodes) >= begun + 10)
        next(p for p in workers_of(node) if p.name() == name).kill()
        count = len(nodes.facts(SessionStarted))
        nodes.until(lambda count=count: len(nodes.facts(SessionStarted)) > count)
    assert node.wait(200) == 0, nodes.logs()
    check(nodes, calm, lost=2)


# ---- what is chosen ------------------------------------------------------------------------------
S80, S40 = Ref(3, 80).name, Ref(2, 40).name
KEPT = KeptState("run", 1, 3, 97, 0, 1, "aa", ("", S80), "", "", "file", {"a": (0, 10)})


def holdings(*kept):
    return [Holding(True, () if one is None else (one,)) for one in kept]


def test_the_newest_step_is_chosen():
    older = replace(KEPT, step=96, content="bb")
    found = choose(holdings(older, KEPT, None, KEPT), "run", 1, S80, [])
    assert (found.step, found.doubt) == (97, "")
    assert found.parts == (ChosenPart(holders=(1, 3), takers=(0, 2)),)


@pytest.mark.parametrize(
    ("change", "newest", "orders"),
    [
        ({"run": "another"}, S80, []),
        ({"phase": 2}, S80, []),
        ({}, S40, []),  # it does not come after that snapshot
        ({"step": 80}, S80, []),
        ({}, S80, [RewindOrder(4, step=60, was=80, why="a spike")]),
    ],
)
def test_what_does_not_come_after_the_newest_snapshot_is_not_used(change, newest, orders):
    assert not choose(holdings(replace(KEPT, **change)), "run", 1, newest, orders).parts


def test_a_state_of_before_any_snapshot_is_used():
    assert choose(holdings(KEPT), "run", 1, "", []).step == 97


def test_the_odd_one_out_is_named_and_takes_the_others_state():
    odd = replace(KEPT, content="bb")
    found = choose(holdings(KEPT, odd, KEPT), "run", 1, S80, [])
    assert found.parts == (ChosenPart(holders=(0, 2), takers=(1,)),)
    assert "rank 1" in found.doubt


def test_without_a_majority_none_is_used():
    found = choose(holdings(KEPT, replace(KEPT, content="bb")), "run", 1, S80, [])
    assert not found.parts and "different states of step 97" in found.doubt


def of_two(step, place, content=""):
    """What a rank at this place keeps, of a copy on two ranks."""
    return replace(KEPT, step=step, place=place, copy_ranks=2, content=content or f"place {place}")


def sharded(*kept, copy_ranks=2):
    """Holdings of nodes with a rank each."""
    found = enumerate(holdings(*kept))
    return [replace(one, place=n % copy_ranks, copy_ranks=copy_ranks) for n, one in found]


def test_of_a_state_in_parts_some_survivor_must_have_each():
    """Ranks 0 and 2 had finished step 97, but nobody with the other part had."""
    found = choose(
        sharded(of_two(97, 0), of_two(96, 1), of_two(96, 0), None), "run", 1, S80, []
    )
    assert found.step == 96
    assert found.parts == (ChosenPart((2,), (0,)), ChosenPart((1,), (3,)))
    assert not choose(sharded(of_two(97, 0), None), "run", 1, S80, []).parts


def test_copies_on_fewer_ranks_need_the_others_parts_too():
    found = choose(sharded(of_two(97, 0), of_two(97, 1), copy_ranks=1), "run", 1, S80, [])
    assert found.parts == (ChosenPart((0,), (1,)), ChosenPart((1,), (0,)))


def test_a_node_of_several_ranks_receives_a_part_once():
    """Two nodes with a copy each; the first one's ranks are new."""
    both = (of_two(97, 0), of_two(97, 1))
    ranks = [(True, 0, ()), (False, 1, ()), (True, 0, both), (False, 1, ())]
    found = choose([Holding(leads, kept, place, 2) for leads, place, kept in ranks], "run", 1, S80, [])
    assert found.parts == (ChosenPart((2,), (0,)), ChosenPart((2,), (0,)))


def worlds(copy_ranks):
    """Every world of four ranks, each on a node of its own, some of which have come to step 96, some
    to 97, some to a 97 that is wrong, and some are new."""
    for states in itertools.product((None, 96, 97, "wrong"), repeat=4):
        held = []
        for rank, state in enumerate(states):
            place = rank % copy_ranks
            step, content = (97, "wrong") if state == "wrong" else (state, f"{state} {place}")
            kept = replace(KEPT, step=step or 0, place=place, copy_ranks=copy_ranks, content=content)
            held.append(Holding(True, (kept,) if state else (), place, copy_ranks))
        yield states, held


@pytest.mark.parametrize("copy_ranks", [1, 2, 4])
def test_in_every_world_the_newest_step_is_chosen_that_survivors_hold_whole(copy_ranks):
    for states, held in worlds(copy_ranks):
        found = choose(held, "run", 1, S80, [])
        at = {step: {r % copy_ranks for r, s in enumerate(states) if s == step} for step in (96, 97)}
        whole = [step for step, places in at.items() if len(places) == copy_ranks]
        if "wrong" not in states:
            assert (found.step if found.parts else None) == max(whole, default=None), states
        for place, part in enumerate(found.parts):
            told = {held[rank].kept[0].content for rank in part.holders}
            assert len(told) == 1 and {held[r].kept[0].step for r in part.holders} == {found.step}
            ranks = [r for r in range(4) if r % copy_ranks == place]
            assert sorted(part.holders + part.takers) == ranks, states
            right = [r for r in ranks if states[r] == found.step]
            if len(right) > states.count("wrong"):  # a wrong one is outvoted, and named
                assert part.holders == tuple(right), states
                wrong = [r for r in ranks if states[r] == "wrong" and found.step == 97]
                assert not wrong or "held another state" in found.doubt


def test_every_taker_gets_every_byte_once_from_holders_in_turn():
    part = ChosenPart(holders=(1, 3), takers=(0, 2))
    pieces = plan(part, 5 * PIECE_NBYTES + 1)
    for taker in part.takers:
        mine = sorted((start, end) for _, to, start, end in pieces if to == taker)
        assert mine[0][0] == 0 and mine[-1][1] == 5 * PIECE_NBYTES + 1
        assert all(a[1] == b[0] for a, b in itertools.pairwise(mine))
    assert {holder for holder, *_ in pieces} == {1, 3}
    assert pieces[0][0] != next(holder for holder, taker, *_ in pieces if taker == 2)


def record(step):
    return StepRecord(step, 1, 3, (2, 2, 2), 48, "d", 48.0, 0.5, 0.1, 0.0, 0.1)


def test_records_are_chained_to_the_snapshot_that_they_come_after():
    kept = [record(step).chained("mine") for step in (80, 81, 82)]
    found = chained(kept, 80, "theirs")
    assert [(r.step, r.prev) for r in found] == [(81, "theirs"), (82, found[0].h)]
    with pytest.raises(ValueError, match="step 80"):
        chained(kept[1:], 79, "theirs")


# ---- what is noted -------------------------------------------------------------------------------
def test_buffers_that_forwards_change_are_noted_and_first_changes_found():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model.register_buffer("count", torch.zeros(1))
    buffers = ModelBuffers(model)
    noted = buffers.copies()
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    assert set(noted) == {f"model/1.{name}" for name in statistics}
    model(torch.randn(4, 2))
    assert torch.equal(noted["model/1.running_mean"], torch.zeros(2))
    assert buffers.lost() == []
    model.count += 1
    assert buffers.lost() == ["model/count"]
    assert "model/count" in buffers.copies() and buffers.lost() == []


def test_weights_that_a_script_has_swapped_are_told_from_the_models_own():
    model = torch.nn.Linear(2, 2)
    before = marks_of(list(model.parameters()))
    with torch.no_grad():
        model.weight.copy_(torch.zeros(2, 2))  # an average, to validate with
    assert marks_of(list(model.parameters())) != before
    before = marks_of(list(model.parameters()))
    model.weight.data = torch.ones(2, 2)
    assert marks_of(list(model.parameters())) != before
