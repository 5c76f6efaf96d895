"""Whose memory a restore reads: nodes are killed and join, and the bucket is asked for no byte of the
state."""

import os
import re
import signal
from collections import Counter
from pathlib import Path

import pytest

from harness.core.facts import EpochStarted, SessionStarted
from harness.look.audit.audit import audit
from storage.stores.store_urls import open_store
from storage.tiers.tiers import chunks_of
from support import buckets
from support.worlds import newest, same_training, train

pytestmark = pytest.mark.mesh
MESHED = Path(__file__).parents[1] / "support" / "meshed.py"
# From the fourth on, a step takes 6 s until the test has seen everything (`dawdle`). A busy machine
# spends many of them before a newcomer is ready, and the world does not grow once the last is made:
# with so many, `until` gives up before the run ends.
LONG = ("--total", "50")
STATE = re.compile(r".*/snapshots/parts/[^/]+/r\d{5}-")  # not the lists of parts


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The same training on one rank that nothing disturbs."""
    run = tmp_path_factory.mktemp("whole") / "run"
    train(run, 1, "--whole", *LONG, script=MESHED)
    return run


class Counted:
    """Nodes on a bucket that tells who read what of it."""

    def __init__(self, nodes, url, seen, monkeypatch):
        self.nodes, self.seen = nodes, seen
        nodes.url = f"s3://my-bucket/{nodes.run.parent.name}"
        self.env = {"AWS_ENDPOINT_URL": url, "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
        for name, value in {**self.env, "AWS_ACCESS_KEY_ID": "test"}.items():
            monkeypatch.setenv(name, value)
        self.stages = []

    def start(self, *flags, agent):
        n = len(self.stages) + 1
        self.stages.append(self.nodes.run.parent / f"stage{n}")
        self.nodes.start(
            *("--go", self.nodes.go, *LONG, *flags),
            script=MESHED,
            agent=("--set", f"stage_dir={self.stages[-1]}", *agent),
            env={**self.env, "AWS_ACCESS_KEY_ID": f"node{n}"},
        )

    def read(self):
        """Of the state, by each node: requests."""
        asked = [(who, path) for who, method, path, _ in list(self.seen) if method == "GET"]
        return Counter(who for who, path in asked if STATE.match(path) and who != "test")

    def kept_for_others(self):
        """Every chunk of the newest snapshot lies with a neighbour of who wrote it."""
        there = {p.name for stage in self.stages for p in stage.glob("*/near/chunks/*")}
        return chunks_of([newest(self.nodes.url)]) <= there


@pytest.fixture
def counted(nodes, monkeypatch):
    seen = []
    with buckets.moto(seen=seen) as url:
        yield Counted(nodes, url, seen, monkeypatch)


@pytest.mark.timeout(900)  # three epochs, and a machine may be busy; `until` gives up first
@pytest.mark.parametrize(
    ("flags", "mesh", "count", "nproc", "how"),
    [
        (["--whole"], "", 2, 1, "killed"),
        ([], "", 2, 1, "killed"),
        ([], "dp_shard=2", 4, 1, "killed"),
        ([], "dp_shard=2", 4, 1, "told"),
        ([], "tp=2", 2, 2, "killed"),
    ],
    ids=["ddp", "fsdp2", "hsdp", "hsdp-told", "tp"],
)
def test_survivors_and_a_newcomer_take_the_state_from_memory(
    whole, counted, flags, mesh, count, nproc, how
):
    """A node vanishes, or is told to go and leaves its share with its neighbour; another comes."""
    it, agent = counted.nodes, ["--nproc", str(nproc), *(["--mesh", mesh] if mesh else [])]
    for _ in range(count):
        counted.start(*flags, agent=agent)
    full = count * nproc
    it.until(lambda: any(e.world == full for e in it.facts(EpochStarted)))
    it.until(lambda: it.step() >= 3 and counted.kept_for_others())
    victim = int(it.facts(EpochStarted)[-1].members[-1].split("-")[0].removeprefix("m"))
    if how == "killed":
        os.killpg(it.processes[victim - 1].pid, signal.SIGKILL)
    else:
        it.processes[victim - 1].send_signal(signal.SIGTERM)
    it.until(lambda: it.facts(EpochStarted)[-1].world < full)
    counted.start(*flags, agent=agent)
    it.until(lambda: any(s.world == full and s.resumed_step for s in it.facts(SessionStarted)))
    it.go.touch()
    assert sorted(it.codes()) == sorted([-9 if how == "killed" else 33, *[0] * count]), it.logs()
    resumed = [s for s in it.facts(SessionStarted) if s.resumed_step]
    assert len(resumed) >= 2 and all(s.read_nbytes.keys() <= {"memory", "peer"} for s in resumed)
    # the newcomer's, from its peers' stages or from what they kept
    assert resumed[-1].read_nbytes.get("peer") or resumed[-1].tier == "survivors"
    assert not counted.read()
    same_training(it.url, whole)
    assert audit(open_store(it.url)).ok
