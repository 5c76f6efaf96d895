"""Real runs that are proved from their buckets afterwards."""

import itertools

import pytest

from harness.bucket import volumes
from harness.bucket.archive import Compactor, read_facts
from harness.bucket.journal import Follower, Journal
from harness.core import facts as f
from harness.core.facts import (
    AgentStarted,
    EpochStarted,
)
from harness.look.audit.audit import audit
from harness.look.reports.compare import compare
from storage.snapshots.snapshots import Snapshots
from storage.stores.folder_store import MemoryStore
from storage.stores.store_urls import open_store
from support.nodes import EPOCHS_OF_ITS_OWN
from support.worlds import newest, train


@pytest.mark.proof
def test_an_unchanged_script_that_ends_well_finishes_the_run(nodes, tmp_path):
    script = tmp_path / "plain.py"
    script.write_text("print('hello from', __import__('os').environ['RANK'])\n")
    nodes.start(script=script, agent=("--nproc", "2"))
    assert nodes.codes() == [0]
    assert "[0] hello from 0" in nodes.logs() and newest(nodes.run).data["final"] is True
    report = audit(open_store(nodes.url))
    assert report.ok, report.first_violation


@pytest.mark.proof
def test_a_run_ends_with_its_script_and_nobody_starts_after_that(nodes, tmp_path):
    """`run.steps` once per epoch: the first loop's last step is safe, and is not the end. A
    node that waits then leaves with 0."""
    script = tmp_path / "epochs.py"
    script.write_text(EPOCHS_OF_ITS_OWN)
    snapshots = Snapshots(open_store(nodes.url))
    agent = nodes.start(tmp_path, script=script)
    nodes.until(lambda: nodes.step() == 2)
    assert not snapshots.ended(newest(nodes.run))
    (tmp_path / "go2").touch()
    nodes.until(lambda: nodes.step() == 4)
    assert not snapshots.ended(newest(nodes.run))
    # it is let in by nobody
    waiting = nodes.start(tmp_path, script=script, agent=("--min-nodes", "2"))
    nodes.until(lambda: len(nodes.facts(AgentStarted)) == 2)
    (tmp_path / "go4").touch()
    assert agent.wait(200) == 0, nodes.logs()
    assert snapshots.ended(newest(nodes.run)) == "step 4 of 4 is the last"
    assert waiting.wait(200) == 0, nodes.logs()
    assert nodes.start(tmp_path, script=script).wait(200) == 0, nodes.logs()
    assert [e.epoch for e in nodes.facts(EpochStarted)] == [1]
    report = audit(open_store(nodes.url))
    assert report.ok, report.first_violation


def test_a_stream_that_forgets_reads_other_rows_and_that_shows(tmp_path):
    """A sample is lost on load, as with a buffer that no state holds: positions are the same,
    contents are not."""
    train(tmp_path / "whole", 1, "--iterable", "--total", 6)
    train(tmp_path / "parts", 1, "--iterable", "--total", 3)
    train(tmp_path / "parts", 1, "--iterable", "--forgetful", "--total", 6)
    found = compare(open_store(str(tmp_path / "whole")), open_store(str(tmp_path / "parts")))
    assert found.first_other_samples == 4 and not found.same(rtol=1.0)


def test_measurements_of_a_long_run_are_thinned_evenly_and_it_is_still_proven(monkeypatch):
    monkeypatch.setattr(volumes, "MOST_MEASURED", 20)
    monkeypatch.setattr(volumes, "FANOUT", 4)
    from support.truerun import TrueRun

    run = TrueRun().train(4, world=1, final=True).end()
    clock, store = [run.t], run.store
    nodes = [Journal(store, f"agent-{n}", lambda: clock[0]) for n in range(2)]
    compactor = Compactor(store)
    for i in range(200):
        clock[0] += 60.0
        for node in nodes:
            node.record(f.NodeMeasured(node.writer, 60.0, {"cpu/percent": float(i)}))
            node.flush()
        if i % 10 == 9:
            compactor.compact(all_of_them=True)
    assert audit(store).ok
    kept = [s for s in read_facts(store, steps=False) if isinstance(s.fact, f.NodeMeasured)]
    assert 20 <= len(kept) <= 20 * len(store.list("archive/brief/"))
    values = [s.fact.metrics["cpu/percent"] for s in kept if s.writer == "agent-1"]
    assert values[0] == 0.0 and values[-1] > 180
    assert max(b - a for a, b in itertools.pairwise(values)) <= 40
    # all of them are in the volumes
    every = [s for s in read_facts(store) if isinstance(s.fact, f.NodeMeasured)]
    assert len(every) == 400
    follower = Follower(MemoryStore("memory://x", {k: store.get(k) for k in store.list("")}))
    assert len([s for s in follower.poll() if isinstance(s.fact, f.NodeMeasured)]) <= len(kept)
