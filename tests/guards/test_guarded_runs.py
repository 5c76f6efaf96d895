"""Trainings that go wrong under guards, in real worlds of real processes: what is skipped and who
is named, the same weights on any world, resumes, and the limit."""

import io
import json

import pytest

from harness.bucket.archive import read_facts
from harness.core.facts import EpochStarted, GuardTripped, StepDone, StepSkipped
from harness.core.world import STOPPED
from harness.guards.guard_rules import StepRules, guards_of
from harness.lab.replay import replay
from harness.ledger.run_state import RunState
from harness.look.alerts.alert_evaluator import fired
from harness.look.audit.audit import audit
from harness.look.trackers.metric_rows import events_of
from storage.snapshots.snapshots import Snapshots
from storage.stores.store_urls import open_store
from storage.terminal_text import Console
from support import guard_campaign
from support.guarded_runs import SCRIPT, SETTINGS, comes, facts, guarded, owner, under_an_agent
from support.guarded_trainer import TOTAL
from support.worlds import TRAINER, history, newest, train

POISONED, NAN, INF, SPIKE = 100, 7, 20, 33


@pytest.fixture
def guards(tmp_path):
    file = tmp_path / "guards.yaml"
    file.write_text(json.dumps(SETTINGS))  # JSON is YAML
    return str(file)


# ---- what is seen, and who is named --------------------------------------------------------------
BAD = ["--poisoned", POISONED, "--nan", NAN, "--inf", INF, "--spike", SPIKE]


@pytest.mark.parametrize(
    ("loop", "parallel", "reduce"),
    [
        ("steps", "ddp", "exact"),
        ("loader", "ddp", "exact"),
        pytest.param("steps", "ddp", "fast", marks=pytest.mark.proof),
        pytest.param("steps", "fsdp2", "exact", marks=pytest.mark.proof),
        pytest.param("steps", "fsdp2", "fast", marks=pytest.mark.proof),
    ],
)
def test_bad_steps_are_skipped_and_named_on_two_ranks(tmp_path, guards, loop, parallel, reduce):
    run = tmp_path / "run"
    flags = ["--guards", guards, "--loop", loop, "--parallel", parallel, "--reduce", reduce, *BAD]
    found, output = guarded(run, 2, *flags)
    assert found["finite"]
    skipped = {one.step: one for one in facts(run, StepSkipped)}
    for step, one in skipped.items():
        assert f"step {step} is skipped: {one.why}" in output
    spikes = {one.step for one in facts(run, GuardTripped) if one.what == "loss spike"}
    assert SPIKE in spikes and SPIKE in skipped
    if loop == "loader":  # the order of its epochs is another
        assert {"the loss is nan"} < {one.why for one in skipped.values()}
        return
    assert skipped.keys() == {*comes(POISONED), *comes(NAN), *comes(INF), SPIKE} - {
        step for step in comes(POISONED) if step <= SETTINGS["warm_up"]
    }
    for step, micro in comes(NAN).items():
        one = skipped[step]
        assert (one.why, one.micro_batches) == ("the loss is nan", (micro,))
        assert one.ranks == (owner(micro, 2),) and f" {NAN}" in one.samples
    first, *later = comes(INF)
    assert skipped[first].why.startswith("the gradient norm is ")
    # looked at from the second on
    assert later and [skipped[s].micro_batches for s in later] == [(comes(INF)[s],) for s in later]
    assert [skipped[s].ranks for s in later] == [(owner(comes(INF)[s], 2),) for s in later]
    assert "above 20 times its mean" in skipped[SPIKE].why


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
@pytest.mark.proof
def test_any_world_ends_with_the_same_weights(tmp_path, guards, parallel):
    flags = ["--guards", guards, "--parallel", parallel, "--clip", 0.5, *BAD]
    alone, _ = guarded(tmp_path / "one", 1, "--guards", guards, "--clip", 0.5, *BAD)
    for world in (2, 3):
        run = tmp_path / f"w{world}"
        assert guarded(run, world, *flags)[0] == alone
        assert [r.skipped for r in history(run)] == [r.skipped for r in history(tmp_path / "one")]


def test_batch_norm_and_buffers_keep_nothing_of_a_skipped_step(tmp_path, guards):
    flags = ["--norm", "--guards", guards, "--nan", NAN, "--poisoned", f"{POISONED},{NAN}"]
    alone, _ = guarded(tmp_path / "one", 1, *flags)
    assert alone["finite"] and guarded(tmp_path / "two", 2, *flags)[0] == alone


# ---- nothing else changes ------------------------------------------------------------------------
def test_a_healthy_run_is_the_same_to_the_bit_with_default_guards(tmp_path):
    flags = ["--total", 130, "--every", 50, "--clip", 0.5]
    plain, _ = guarded(tmp_path / "plain", 1, *flags)
    watched, _ = guarded(tmp_path / "guarded", 1, "--guards", "default", *flags)
    assert watched == plain and not facts(tmp_path / "guarded", StepSkipped)
    loss = [(r.loss, r.metrics["grad_norm"]) for r in history(tmp_path / "guarded")]
    assert loss == [(r.loss, r.metrics["grad_norm"]) for r in history(tmp_path / "plain")]
    assert "guards" not in newest(tmp_path / "plain").data["state"]


def test_without_guards_a_nan_stops_the_run_as_before(tmp_path):
    _, output = guarded(tmp_path / "run", 1, "--nan", NAN, codes=(1,))
    assert "NonFiniteLoss" in output


def test_clips_as_the_rules_say(tmp_path, guards):
    """The state in the snapshot is that of the rules, given the recorded losses and norms."""
    run = tmp_path / "run"
    settings = {**SETTINGS, "clip_sigmas": 0.5, "clip_least": 0.0}
    (tmp_path / "guards.yaml").write_text(json.dumps(settings))
    clipped, _ = guarded(run, 2, "--guards", guards, *BAD)
    rules = StepRules(guards_of(guards))
    for record in history(run):
        found = rules.judge(record.step, record.loss, record.metrics["grad_norm"])
        assert found.skip == record.skipped
    assert rules.clipped >= 2
    assert newest(run).data["state"]["guards"] == json.loads(json.dumps(rules.state_dict()))
    unclipped = {**settings, "clip_sigmas": 0.0}
    (tmp_path / "guards.yaml").write_text(json.dumps(unclipped))
    assert guarded(tmp_path / "other", 2, "--guards", guards, *BAD)[0] != clipped


@pytest.mark.parametrize("own", [[], ["--own-step"]])
def test_the_scheduler_goes_on_or_waits(tmp_path, guards, own):
    bad = len({*comes(NAN)})
    flags = ["--guards", guards, "--nan", NAN, *own]
    assert guarded(tmp_path / "a", 1, *flags)[0]["schedule"] == TOTAL
    (tmp_path / "guards.yaml").write_text(json.dumps({**SETTINGS, "skip": "hold"}))
    held = guarded(tmp_path / "h", 1, *flags)[0]["schedule"]
    assert held == (TOTAL if own else TOTAL - bad)  # the script steps its own as it likes


# ---- resumes, the limit, the proof ---------------------------------------------------------------
def test_a_resumed_run_ends_with_the_weights_of_a_calm_one(tmp_path, guards):
    flags = ["--guards", guards, "--every", 5, *BAD]
    calm, _ = guarded(tmp_path / "calm", 1, *flags)
    run = tmp_path / "run"
    train(run, 2, *flags, "--total", 23, script=SCRIPT)  # another world, and it ends early
    train(run, 3, *flags, script=SCRIPT, kill_after_s=4.0, codes=(0, -9))
    assert guarded(run, 1, *flags)[0] == calm
    assert newest(run).data["state"]["guards"] == newest(tmp_path / "calm").data["state"]["guards"]


def test_guards_may_begin_in_the_middle_of_a_run(tmp_path, guards):
    run = tmp_path / "run"
    guarded(run, 1, "--total", 20)
    found, output = guarded(run, 1, "--guards", guards, "--spike", 45)
    assert found["finite"] and "resumed from step 20" in output
    assert [one.step for one in facts(run, StepSkipped)] == [45]


def test_too_many_bad_steps_stop_the_run_and_name_the_samples(tmp_path, guards):
    run = tmp_path / "run"
    (tmp_path / "guards.yaml").write_text(json.dumps({**SETTINGS, "most_bad": 10}))
    _, output = guarded(run, 2, "--guards", guards, "--nan-from", 31, codes=(1,))
    assert "BadInput: step 41: the loss is nan: micro-batch 0 of rank 0 (samples " in output
    assert "micro-batch 5 of rank 1 (samples " in output
    assert "11 updates of the last 100 steps were skipped, wanted at most 10" in output
    assert newest(run).step in (30, 40)  # of good weights; that of 40 may have been on its way
    (stop,) = facts(run, GuardTripped)
    assert (stop.what, stop.step, stop.value) == ("too many bad steps", 41, 11.0)
    assert [one.step for one in facts(run, StepSkipped)] == list(range(31, 42))


@pytest.mark.proof
def test_an_agent_does_not_retry_what_would_be_skipped_again(tmp_path, guards):
    run = tmp_path / "run"
    (tmp_path / "guards.yaml").write_text(json.dumps({**SETTINGS, "most_bad": 3}))
    flags = ["--set", "gpu_health=off", "--guards", guards, "--", SCRIPT, "--nan-from", "21"]
    ended = under_an_agent(run, *flags)
    assert ended.returncode == STOPPED, ended.stdout
    assert "4 updates of the last 100 steps were skipped, wanted at most 3" in ended.stdout
    assert len(facts(run, EpochStarted)) == 1
    assert newest(run).step in (10, 20)  # that of step 20 may still have been on its way


def test_a_command_with_wrong_guards_starts_nothing(tmp_path, guards):
    run = tmp_path / "run"
    (tmp_path / "guards.yaml").write_text("skip: sometimes")
    ended = under_an_agent(run, "--guards", guards, "--", SCRIPT)
    assert ended.returncode == 2 and not run.exists()
    said = " ".join(ended.stdout.split())
    assert "guards: skip='sometimes': wanted advance or hold" in said


def test_proof_trackers_and_alerts_name_what_was_skipped(tmp_path, guards):
    run = tmp_path / "run"
    guarded(run, 1, "--guards", guards, "--nan", NAN)
    report = audit(open_store(str(run)))
    assert report.ok, report.first_violation
    (note,) = [one for one in report.notes if "guards" in one]
    assert note.startswith(f"updates that guards have skipped: {len(comes(NAN))} (step ")
    assert all(f"step {step}: the loss is nan" in note for step in comes(NAN))
    assert len(facts(run, StepDone)) == TOTAL
    told = read_facts(open_store(str(run)))
    points = [e.values.get("event/guard_step") for e in events_of(told, (), (), RunState())]
    assert [step for step in points if step] == sorted(comes(NAN))
    assert fired(told, told[-1].t)[0].title == "an update is skipped"


@pytest.mark.proof
def test_a_replay_judges_by_the_settings_of_the_run(tmp_path, guards):
    """Its script does not ask for guards; the snapshot does."""
    run, scratch = tmp_path / "run", tmp_path / "again"
    flags = ["--nan", NAN, "--spike", SPIKE]
    guarded(run, 2, "--guards", guards, "--total", 45, "--every", 15, *flags)
    scratch.mkdir()
    begin = min(ref.step for ref in Snapshots(open_store(str(run))).refs())
    found = replay(open_store(str(run)), scratch, begin, 60, 1, [SCRIPT, *map(str, flags)])
    assert found.identical and found.last == 45, found
    assert found.first <= SPIKE  # a skipped one, and comes(NAN) with a loss that is NaN


# ---- what is refused -----------------------------------------------------------------------------
def test_what_cannot_be_guarded_is_refused_by_name(tmp_path):
    env = {"HARNESS_GUARDS": "default"}
    for script, flags, says in [
        ("safe_point", (), "guards do not see the gradients of a loop with run.safe_point"),
        ("phases", (), "guards judge steps of one phase only"),
        ("adapter", (), "guards are not built for accelerate"),
        ("files", (), "guards do not see the gradients of a loop with run.files"),
    ]:
        file = tmp_path / f"{script}.py"
        file.write_text(ATTACHED + (PREPARED if script != "files" else "") + LOOPS[script])
        ended = train(tmp_path / script, 1, *flags, env=env, script=file, codes=(1,))
        assert "BadInput" in ended.output and says in ended.output
    env = {"HARNESS_GUARDS": "none.yaml"}
    ended = train(tmp_path / "file", 1, env=env, script=TRAINER, codes=(1,))
    assert "none.yaml: wanted guards (--guards)" in ended.output


ATTACHED = """
import harness, torch
run = harness.attach()
"""
PREPARED = """
model = torch.nn.Linear(2, 1)
run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
"""
LOOPS = {
    "safe_point": "run.resume()",
    "files": "run.files.restore('out')",
    "phases": """
for step in run.steps([torch.ones(2)] * 8, total=2, global_batch=4, micro_batch=4):
    for x in step.again():
        step.backward(model(x).mean())
    step.sync()
    for x in step.again():
        pass
""",
    "adapter": """
from harness.loops.own_loop import own_loop
own_loop(run, micro_batches=2, micro_batch=2, data="x", adapter="accelerate")
""",
}


# ---- many of them --------------------------------------------------------------------------------
@pytest.mark.proof
def test_a_few_of_make_guards():
    console = Console(file=io.StringIO(), width=200)
    assert guard_campaign.command(10, 4, 1000, console) == 0, console.file.getvalue()
