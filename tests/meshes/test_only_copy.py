"""A node of the only sharded copy is lost: each rank's share of a state a few steps back lies in the
next node's memory as well, and the next world goes on from there."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from harness.core.facts import SessionStarted
from support.worlds import history, same_training, train

pytestmark = pytest.mark.mesh
MESHED = Path(__file__).parents[1] / "support" / "meshed.py"
TOTAL = 50
FLAGS = ("--total", TOTAL, "--every", 1000, "--sleep-s", 0.2)
KEPT = "harness: the nodes keep the state of step"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The same training on one rank that nothing disturbs."""
    run = tmp_path_factory.mktemp("whole") / "run"
    train(run, 1, "--whole", "--total", TOTAL, script=MESHED)
    return run


def train_until_kept(nodes, count, nproc=1, agent=()):
    """Start nodes, and wait until they keep a state; the bucket has no snapshot at all."""
    agent = ("--nproc", str(nproc), *agent)
    found = [nodes.start(*FLAGS, script=MESHED, agent=agent) for _ in range(count)]
    world = count * nproc
    nodes.until(lambda: any(e.world == world for e in nodes.facts(SessionStarted)))
    nodes.until(lambda: KEPT in nodes.logs())
    return found


def check(nodes, whole, world):
    """The run has ended as if nothing had happened. Return how the last world began."""
    assert [r.step for r in history(nodes.run)] == list(range(1, TOTAL + 1))
    same_training(nodes.run, whole)
    start = max(nodes.facts(SessionStarted), key=lambda e: e.epoch)
    assert start.world == world and start.resumed_epoch == 0, "not from a snapshot"
    return start


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("count", "nproc", "victim"), [(4, 1, 2), (2, 1, 0)])
def test_a_lost_node_of_the_only_copy_costs_a_few_steps(whole, nodes, count, nproc, victim):
    found = train_until_kept(nodes, count, nproc)
    os.killpg(found[victim].pid, signal.SIGKILL)
    codes = [one.wait(240) for one in found]
    assert sorted(codes) == sorted([-9, *[0] * (count - 1)]), nodes.logs()
    assert check(nodes, whole, (count - 1) * nproc).resumed_step > 0, nodes.logs()


@pytest.mark.timeout(600)
def test_a_worker_that_is_killed_on_a_single_node_costs_a_few_steps(whole, nodes):
    (node,) = train_until_kept(nodes, 1, nproc=2)
    worker = next(
        p for p in psutil.Process(node.pid).children(recursive=True) if "rank-1" in p.name()
    )
    worker.kill()
    assert node.wait(240) == 0, nodes.logs()
    assert check(nodes, whole, 2).resumed_step > 0, nodes.logs()


@pytest.mark.timeout(600)
def test_with_both_nodes_that_have_a_share_the_state_is_lost(whole, nodes):
    found = train_until_kept(nodes, 4)
    for one in found[1:]:
        os.killpg(one.pid, signal.SIGKILL)
    assert sorted(one.wait(240) for one in found) == [-9, -9, -9, 0], nodes.logs()
    assert check(nodes, whole, 1).resumed_step == 0
    assert "which had a share of it, are both gone" in nodes.logs()


@pytest.mark.timeout(600)
def test_nodes_that_keep_nothing_for_each_other_say_so_once(whole, nodes):
    found = [
        nodes.start(*FLAGS, script=MESHED, agent=("--set", "peer_tier=off")) for _ in range(2)
    ]
    assert [one.wait(240) for one in found] == [0, 0], nodes.logs()
    assert nodes.logs().count("the nodes keep no state in memory") == 1
    assert KEPT not in nodes.logs()
    check(nodes, whole, 2)
