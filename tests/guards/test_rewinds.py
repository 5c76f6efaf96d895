"""Runs that go back to an older snapshot when their loss spikes, in real worlds of real processes."""

import json

import pytest

from harness.core.facts import EpochStarted, GuardTripped, StepSkipped
from harness.core.world import RESIZE
from harness.guards.rewind import WENT_BACK, snapshot_before
from harness.lab.replay import replay
from harness.look.audit.audit import audit
from storage.snapshots.manifest import Ref
from storage.snapshots.restore import (
    ALLOWED,
    Rewind,
    RewindOrder,
    left_behind,
    order_rewind,
    rewinds,
)
from storage.snapshots.retention import Keep
from storage.snapshots.snapshots import Snapshots
from storage.stores.store_urls import open_store
from support.guarded_runs import SCRIPT, SETTINGS, facts, guarded, under_an_agent
from support.guarded_trainer import TOTAL
from support.worlds import history, train

SPIKE, STEPS = 33, 8
LEFT_OUT = range(SPIKE - STEPS + 1, SPIKE + 1)
BAD = ["--spike", SPIKE, "--every", 5]


@pytest.fixture
def settings(tmp_path):
    """Write the settings of guards into a file; a spike is not skipped for its norm."""

    def write(**more):
        file = tmp_path / "guards.yaml"
        told = {"spike": "rewind", "skip_above": 0.0, "clip_sigmas": 0.0, "rewind_steps": STEPS}
        file.write_text(json.dumps({**SETTINGS, **told, **more}))
        return str(file)

    return write


def through_rewinds(run, world, *flags, script=SCRIPT):
    """Train, and start again as long as the run goes back; return what it ended with."""
    for _ in range(5):
        out = run.with_suffix(".json")
        ended = train(run, world, *flags, "--out", out, script=script, codes=(0, RESIZE))
        if set(ended.codes) == {0}:
            return json.loads(out.read_text())
    raise AssertionError(ended.output)


def calm(tmp_path, *flags):
    """A run without guards, whose script leaves out the same updates, and that has no spike."""
    left_out = ",".join(map(str, LEFT_OUT))
    return guarded(tmp_path / "calm", 1, "--leave-out", left_out, "--every", 5, *flags)[0]


@pytest.mark.parametrize(
    ("world", "parallel", "loop"),
    [
        pytest.param(1, "ddp", "steps", marks=pytest.mark.proof),
        (2, "ddp", "steps"),
        pytest.param(3, "ddp", "steps", marks=pytest.mark.proof),
        pytest.param(2, "fsdp2", "steps", marks=pytest.mark.proof),
        pytest.param(3, "fsdp2", "steps", marks=pytest.mark.proof),
    ],
)
def test_a_spike_sends_the_run_back_and_its_steps_are_left_out(
    tmp_path, settings, world, parallel, loop
):
    run = tmp_path / "run"
    flags = ["--guards", settings(), "--parallel", parallel, "--loop", loop, *BAD]
    found = through_rewinds(run, world, *flags)
    assert found == calm(tmp_path)
    (order,) = rewinds(open_store(str(run)))
    assert order.step in range(0, 26, 5)  # those of steps just before may be on their way
    assert (order.first, order.last) == (LEFT_OUT[0], SPIKE)
    (back,) = [one for one in facts(run, GuardTripped) if one.what.startswith(WENT_BACK)]
    assert (back.step, back.what) == (SPIKE, f"{WENT_BACK} {order.step}")
    skipped = {r.step: r.skipped for r in history(run) if r.skipped}
    assert [*skipped] == [*LEFT_OUT] and set(skipped) == {s.step for s in facts(run, StepSkipped)}
    report = audit(open_store(str(run)))
    assert report.ok, report.first_violation
    (note,) = [one for one in report.notes if "guards" in one]
    assert "step 33: left out, since the loss of step 33 was" in note
    assert f"the run went back to step {order.step}" in note


def test_another_world_ends_with_the_same_weights(tmp_path, settings):
    run = tmp_path / "run"
    flags = ["--guards", settings(), *BAD]
    ended = train(run, 2, *flags, script=SCRIPT, codes=(RESIZE,))
    assert "the updates of steps 26 to 33 will be left out" in ended.output
    train(run, 3, *flags, "--total", 29, script=SCRIPT)  # ends amid what is left out
    assert guarded(run, 1, *flags)[0] == calm(tmp_path)


@pytest.mark.proof
def test_under_an_agent_the_run_goes_on_by_itself(tmp_path, settings):
    run, out = tmp_path / "run", tmp_path / "out.json"
    words = ["--set", "gpu_health=off", "--guards", settings(), "--", SCRIPT]
    ended = under_an_agent(run, *words, *map(str, [*BAD, "--out", out]))
    assert ended.returncode == 0, ended.stdout
    assert json.loads(out.read_text()) == calm(tmp_path)
    assert len(facts(run, EpochStarted)) == 2


def test_a_spike_that_is_skipped_anyway_sends_nobody_back(tmp_path, settings):
    run = tmp_path / "run"
    guarded(run, 1, "--guards", settings(skip_above=20.0), *BAD)
    assert [one.step for one in facts(run, StepSkipped)] == [SPIKE]
    assert not rewinds(open_store(str(run)))


@pytest.mark.proof
def test_a_run_that_goes_back_too_often_stops(tmp_path, settings):
    run = tmp_path / "run"
    flags = ["--guards", settings(most_rewinds=1), "--every", 5, "--spike", f"{SPIKE},50"]
    train(run, 1, *flags, script=SCRIPT, codes=(RESIZE,))
    ended = train(run, 1, *flags, script=SCRIPT, codes=(1,))
    assert "BadInput: the loss of step 50 was" in ended.output
    assert "went back 1 times before, wanted at most 1" in ended.output


@pytest.mark.proof
def test_the_learning_rate_rises_after_a_rewind(tmp_path, settings):
    run = tmp_path / "run"
    found = through_rewinds(run, 2, "--guards", settings(rewarm_steps=4), *BAD)
    assert found["finite"] and found["schedule"] == TOTAL
    assert found == calm(tmp_path, "--rewarm", f"{SPIKE},4")
    assert found != calm(tmp_path / "full")


def test_without_a_bucket_a_run_cannot_go_back(settings):
    ended = train("", 1, "--guards", settings(), *BAD, script=SCRIPT, codes=(1,))
    assert "wanted a run with a bucket to go back in" in ended.output


@pytest.mark.proof
def test_a_replay_leaves_out_the_same_steps(tmp_path, settings):
    run, scratch = tmp_path / "run", tmp_path / "again"
    through_rewinds(run, 2, "--guards", settings(), *BAD, "--total", 42)
    scratch.mkdir()
    store = open_store(str(run))
    begin = min(ref.step for ref in Snapshots(store).refs() if ref.epoch > 1)
    found = replay(store, scratch, begin, 10, 1, [SCRIPT, *map(str, BAD)])
    assert found.identical, found


# ---- orders --------------------------------------------------------------------------------------
def test_an_order_leaves_snapshots_of_older_generations_behind(tmp_path):
    store = open_store(str(tmp_path))
    order = RewindOrder(3, 20, 32, "why", 25, 33)
    assert order_rewind(store, order) and not order_rewind(store, order)
    assert order_rewind(store, RewindOrder(5, 0, 7))  # a person's leaves none
    assert rewinds(store) == [order, RewindOrder(5, 0, 7)]
    refs = {Ref(2, 20), Ref(2, 25), Ref(1, 30), Ref(3, 25), Ref(4, 40)}
    assert left_behind(refs, rewinds(store)) == {Ref(2, 25), Ref(1, 30)}


def test_the_snapshot_to_go_back_to_outlasts_a_commit_that_is_under_way(tmp_path):
    """The run keeps one snapshot, and its next is committed after the order was written."""
    snapshots = Snapshots(open_store(str(tmp_path)))

    def commit(step):
        snapshots.write(Ref(1, step), 0, 1, {"a.bin": b"a"}, {}, {"samples": None}, "t")
        assert snapshots.commit(Ref(1, step), 1)

    commit(20)
    assert snapshot_before(snapshots, 25, []) == 20
    commit(30)
    assert snapshots.prune(Keep(last=1)) == [] and Ref(1, 20) in snapshots.refs()


@pytest.mark.parametrize("data", [b"{}", b"[]", b'{"step": "1", "was": 2}', b'{"step": 1, "x": 2}'])
def test_an_order_that_was_changed_by_hand_is_refused(tmp_path, data):
    store = open_store(str(tmp_path))
    store.create(f"{ALLOWED}000002.json", data)
    with pytest.raises(Rewind, match="was changed by hand"):
        rewinds(store)
