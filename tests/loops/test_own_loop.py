"""Steps that another trainer makes, on any world: the seam beneath all adapters."""

from pathlib import Path

import pytest

from harness.bucket.archive import read_facts
from harness.core.batch import digest, sample_hash
from harness.core.facts import SessionStarted
from harness.core.step_records import StepRecord
from harness.lab.replay import replay
from harness.ledger.run_state import RunState
from harness.look.audit import audit_records
from harness.look.audit.audit import audit
from harness.look.audit.audit_rules import RuleBroken
from harness.look.reports.compare import compare
from harness.look.reports.live_view import describe
from storage.snapshots.snapshots import Snapshots
from storage.stores.store_urls import open_store
from support.worlds import history, newest, train

SCRIPT = str(Path(__file__).parents[1] / "support" / "alone_trainer.py")
ENV = {"HARNESS_ADAPT": "auto", "HARNESS_SCRIPT_WORLD": 1}


def go(run, world=1, *flags, reduce="fast", env=None, **kwargs):
    attach = f'{{"seed": 1, "snapshot_every_steps": 3, "reduce": "{reduce}"}}'
    return train(
        run,
        world,
        *flags,
        script=SCRIPT,
        env={**ENV, "HARNESS_ATTACH": attach, **(env or {})},
        **kwargs,
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """20 steps on one rank, never stopped."""
    run = tmp_path_factory.mktemp("alone") / "run"
    go(run, 1, reduce="exact")
    return run


IDENTITY = {
    **{"version": 1, "seed": 7, "samples": 0, "global_batch": 24, "micro_batch": 4},
    **{"shuffle": False, "contents": True, "adapter": "accelerate", "script_world": 1},
}


def made(step, begins, samples=24, shares=(6,)):
    where = range(begins, begins + samples)
    sum_of = f"{digest(sample_hash(where, where)):016x}"
    return StepRecord(
        *(step, 1, 1, shares, samples, sum_of, 24.0, 1.0, 0.1, 0.0, 1.0),
        contents="0" * 16,
        begins=begins,
    )


def violations(run):
    return [c for c in audit(open_store(str(run))).checks if not c.ok]


def test_records_add_up_and_prove(alone):
    records = history(alone)
    assert [r.samples for r in records[:6]] == [24, 24, 24, 24, 4, 24]
    assert [r.begins for r in records[:6]] == [0, 24, 48, 72, 96, 100]
    assert records[4].shares == (1,) and newest(alone).data["final"]
    assert not violations(alone)


@pytest.mark.parametrize(("world", "flags"), [(2, []), (4, ["--destroy"])])
def test_any_world_trains_the_same_to_the_bit(alone, tmp_path, world, flags):
    ended = go(tmp_path / "run", world, *flags, reduce="exact")
    said = compare(open_store(str(tmp_path / "run")), open_store(str(alone)))
    assert [r.loss for r in history(tmp_path / "run")] == [r.loss for r in history(alone)]
    assert newest(tmp_path / "run").data["weights"] == newest(alone).data["weights"]
    assert said.first_other_samples is None and said.same_weights, said
    assert not violations(tmp_path / "run")
    # what runs after the training draws the same on all ranks
    after = [line for line in ended.output.splitlines() if line.startswith("after the")]
    assert len(after) == world and len(set(after)) == 1


def test_it_goes_on_where_it_was_killed_in_another_world(alone, tmp_path):
    run = tmp_path / "run"
    go(run, 3, "--sleep-s", 0.5, reduce="exact", codes=(0, -9), kill_after_s=9)
    began = newest(run)
    ended = go(run, 2, reduce="exact")
    if began is not None:
        assert f"begins at {began.step}" in ended.output
    assert newest(run).data["weights"] == newest(alone).data["weights"]
    assert not violations(run)


def test_the_first_world_decides_the_batch(tmp_path):
    env = {"HARNESS_SCRIPT_WORLD": ""}
    began = go(tmp_path / "run", 2, "--accumulation", 3, "--epochs", 1, env=env)
    batch = "global batch 24 = 4 per device × 3 accumulation × 2 ranks (script world)"
    assert began.output.count(batch) == 1
    store = open_store(str(tmp_path / "run"))
    (session,) = (s.fact for s in read_facts(store) if isinstance(s.fact, SessionStarted))
    assert describe(session, RunState()) == (
        "bold green", f"{batch}; generation 1: training from step 0"
    )  # fmt: skip
    assert [r.samples for r in history(tmp_path / "run")] == [24, 24, 24, 24, 4]
    ended = go(tmp_path / "run", 1, "--accumulation", 3, "--epochs", 2, env=env)
    assert "begins at 5" in ended.output and batch not in ended.output
    assert [r.samples for r in history(tmp_path / "run")][5:] == [24, 24, 24, 24, 4]


@pytest.mark.proof
def test_a_part_of_it_is_replayed(alone, tmp_path):
    store = open_store(str(alone))
    start = sorted(ref.step for ref in Snapshots(store).refs())[-2]  # the last one is the end's
    found = replay(store, tmp_path, start, 4, 3, [SCRIPT], timeout_s=120)
    assert found.identical and found.first == start + 1 and found.last > start, found


@pytest.mark.parametrize(
    "change", [{"begins": 25}, {"samples": 23}, {"samples": 25}, {"shares": (7,)}]
)
def test_a_forged_step_is_found(change):
    good = [made(1, 0), made(2, 24), made(3, 48)]
    audit_records._obey("key", good, IDENTITY)
    bad = made(**{"step": 2, "begins": 24, **change})
    with pytest.raises(RuleBroken):
        audit_records._obey("key", [good[0], bad, good[2]], IDENTITY)
