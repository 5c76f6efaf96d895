"""A node of a sharded copy is lost: survivors keep their parts of the last step's state, of each part
some, and the next world goes on from there."""

import os
import signal
from pathlib import Path

import pytest

from harness.core.facts import SessionStarted, StepDone
from support.worlds import history, same_training, train

pytestmark = pytest.mark.mesh
MESHED = Path(__file__).parents[1] / "support" / "meshed.py"
TOTAL = 60
FLAGS = ("--total", TOTAL, "--every", 1000, "--sleep-s", 0.1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The same training on one rank that nothing disturbs."""
    run = tmp_path_factory.mktemp("whole") / "run"
    train(run, 1, "--whole", "--total", TOTAL, script=MESHED)
    return run


def reached(nodes):
    return max((fact.step for fact in nodes.facts(StepDone)), default=0)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("mesh", "count", "nproc", "victim"),
    [("dp_shard=2", 4, 1, 3), ("dp_shard=2", 2, 2, 1), ("tp=2", 2, 2, 0)],
)
def test_a_lost_node_of_a_sharded_copy_costs_one_step(whole, nodes, mesh, count, nproc, victim):
    """Four nodes with a rank each: ranks 0 and 1 hold a copy, and 2 and 3. Two nodes with two each:
    a whole copy is lost."""
    agent = ("--nproc", str(nproc), "--mesh", mesh)
    found = [nodes.start(*FLAGS, script=MESHED, agent=agent) for _ in range(count)]
    nodes.until(lambda: any(e.world == 4 for e in nodes.facts(SessionStarted)))
    begun = reached(nodes)
    nodes.until(lambda: reached(nodes) >= begun + 10)
    os.killpg(found[victim].pid, signal.SIGKILL)
    codes = [one.wait(240) for one in found]
    assert sorted(codes) == sorted([-9, *[0] * (count - 1)]), nodes.logs()
    starts = sorted(nodes.facts(SessionStarted), key=lambda e: e.epoch)
    assert starts[-1].tier == "survivors" and starts[-1].world == 2, nodes.logs()
    before = max(f.step for f in nodes.facts(StepDone) if f.epoch < starts[-1].epoch)
    assert starts[-1].resumed_step >= max(10, before - 1)
    assert [r.step for r in history(nodes.run)] == list(range(1, TOTAL + 1))
    same_training(nodes.run, whole)
