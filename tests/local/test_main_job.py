"""The main job as a user runs it: `harness launch` on the local cloud, with everything that can
die dying."""

import random
import signal
import time

import pytest

from harness.core.facts import (
    AttemptEnded,
    EpochStarted,
    NoticeSeen,
    RunEnded,
    SessionEnded,
    SnapshotCommitted,
)
from harness.look.pages.lane_chart import picture
from harness.look.reports.summary import summarize
from storage.stores.store_urls import open_store
from support.campaign import Campaign
from support.interruptions import check as adds_up
from support.whole_runs import assert_whole, harness
from support.worlds import history, newest, train

FLAGS = "--total 120 --every 10 --sleep-s 0.04 --reduce exact"


@pytest.fixture
def campaign(tmp_path):
    made = []

    def make(**settings):
        made.append(Campaign(tmp_path, **settings))
        return made[-1]

    yield make
    for c in made:
        c.close()


@pytest.mark.proof
def test_the_demo_market(campaign, tmp_path):
    """Noticed preemption, unnoticed kill, outage, return: the same training as undisturbed."""
    c = campaign(
        market="demo", nodes="1:3", flags="--total 300 --every 10 --sleep-s 0.08 --reduce exact"
    )
    c.launch()
    assert c.wait() == 0, c.logs()
    records = assert_whole(c, 300)
    train(tmp_path / "calm", 1, "--total", 300, "--every", 50, "--reduce", "exact")
    assert [r.loss for r in records] == [r.loss for r in history(tmp_path / "calm")]
    assert newest(c.run).data["weights"] == newest(tmp_path / "calm").data["weights"]
    same = harness("runs", "compare", c.run, tmp_path / "calm")
    assert same.returncode == 0 and "identical from step 1 to 300" in same.stdout, same.stdout
    assert len({r.world for r in records}) >= 2
    reasons = {e.reason for e in c.facts(EpochStarted)}
    # A slow machine's newcomers get in when a loss forms the next world, so there may be no "grow";
    # test_agent.py has that for sure.
    assert "start" in reasons and reasons & {"shrink", "loss"}
    # Nothing is lost on a notice: what was trained until the ranks left is what was committed. Rank
    # 0 says why; on another node than the one that was told it knows of a resize only.
    noticed = [f for f in c.facts(SnapshotCommitted) if f.why in ("notice", "resize")]
    told = {
        max((e.epoch for e in c.facts(EpochStarted) if n.member in e.members), default=0)
        for n in c.facts(NoticeSeen)
    }
    assert any(f.epoch in told for f in noticed)
    left = {(f.epoch, f.step) for f in c.facts(SessionEnded)}
    assert all((f.epoch, f.step) in left for f in noticed)
    planned = {(f.epoch, f.step) for f in c.facts(SessionEnded) if f.why in ("resize", "drained")}
    assert planned and planned <= {(f.epoch, f.step) for f in c.facts(SnapshotCommitted)}
    assert (c.run / "report.html").stat().st_size > 10_000
    assert "goodput" in c.output().lower()
    summary = summarize(open_store(str(c.run)))
    adds_up(summary.postmortem, summary.ledger)
    assert {"notice", "loss"} <= {one.kind for one in summary.postmortem.interruptions}
    for one in summary.postmortem.interruptions:
        assert picture(one, summary.ledger.attempts).count("<text") > len(one.moments)


@pytest.fixture(scope="module")
def calm_weights(tmp_path_factory):
    """What the weights are when nothing happens."""
    run = tmp_path_factory.mktemp("calm") / "run"
    train(run, 1, *FLAGS.split(), "--sleep-s", 0)
    return newest(run).data["weights"]


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(3))
def test_sigkill_of_anything_at_any_moment(campaign, seed, calm_weights):
    """Controller, provider, agents, workers, all at once; the same command again finishes the
    run, with the same weights."""
    rng = random.Random(seed)
    c = campaign(market="calm", nodes="1:2", flags=FLAGS)
    c.launch()
    kinds = ["controller", "agent", "worker", "provider", "all"]
    rng.shuffle(kinds)
    schedule = [(rng.uniform(1.0, 6.0), kind) for kind in kinds]
    print("kill schedule:", schedule)
    for pause_s, kind in schedule:
        time.sleep(pause_s)
        if c.process.poll() == 0:
            break
        c.kill(kind, rng)
        if kind in ("controller", "all"):
            c.process.wait(60)
            c.launch()
    assert c.wait() == 0, c.logs()
    assert_whole(c)
    assert newest(c.run).data["weights"] == calm_weights


@pytest.mark.proof
def test_a_controller_killed_after_the_last_step_leaves_nothing_to_the_next(campaign):
    """The run is over, but who led it could not end its nodes: the same command does."""
    c = campaign(market="calm", flags="--total 20 --every 10 --sleep-s 0.04")
    c.launch()
    c.until(lambda: c.step() >= 10)
    c.process.send_signal(signal.SIGSTOP)
    c.until(lambda: c.step() == 20)  # nodes go on by themselves
    c.process.kill()
    c.process.wait(60)
    assert c.left_over()
    c.launch()
    assert c.wait(200) == 0, c.logs()
    assert c.facts(AttemptEnded) and c.nothing_left()


@pytest.mark.proof
def test_a_second_controller_is_refused(campaign):
    # so that it still runs when the second one has started
    c = campaign(flags="--total 100000 --every 5 --sleep-s 0.1")
    first = c.launch()
    c.until(lambda: c.step() >= 10)
    second = c.launch()
    assert second.wait(200) == 1
    assert "already leading this run" in c.output()
    c.process = first
    seen = c.step()
    c.until(lambda: c.step() > seen)  # the first one's run is none the worse
    first.send_signal(signal.SIGINT)
    assert c.wait(200) == 3, c.logs()
    assert c.nothing_left()


@pytest.mark.proof
def test_ctrl_c_drains_and_the_same_command_resumes(campaign, tmp_path):
    go = tmp_path / "go"
    c = campaign(flags=f"{FLAGS} --go {go}")
    c.launch()
    c.until(lambda: c.step() >= 20)
    c.process.send_signal(signal.SIGINT)
    assert c.wait(200) == 3, c.logs()
    stopped_at = c.step()
    assert "resumes" in c.output() and c.nothing_left()
    assert c.facts(RunEnded)[-1].outcome == "stopped"
    assert not [a for a in c.facts(AttemptEnded) if a.end == "preempted"]
    go.touch()
    c.launch()
    assert c.wait() == 0, c.logs()
    assert_whole(c)
    assert any(f.step == stopped_at and f.why != "interval" for f in c.facts(SnapshotCommitted))
    again = c.launch()
    assert again.wait(200) == 0 and "finished already" in c.output()


@pytest.mark.proof
def test_a_budget_is_kept(campaign):
    """One minute of one node costs more than this, so nothing is started (what running ones may
    spend: tests/lab/test_sim.py)."""
    c = campaign(flags="--total 5000 --every 10 --sleep-s 0.05", extra=("--budget-usd", "0.004"))
    c.launch()
    assert c.wait() == 3, c.logs()
    assert "budget" in c.output()
    assert sum(a.usd for a in c.facts(AttemptEnded)) == 0
    assert c.nothing_left()


@pytest.mark.proof
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--fail-at 12 --every 10 --patient", "planned failure at step 12"),
        ("--nan-at 12 --every 10 --patient", "the loss is nan"),
        ("--global-batch 46", "multiple"),
        ("--no-such-flag", "unrecognized arguments"),
    ],
)
def test_a_broken_script_stops_the_run_with_its_reason(campaign, flags, says):
    c = campaign(flags=flags, nodes="1:2")
    c.launch()
    assert c.wait(150) == 1, c.logs()
    assert says in c.output(), c.output()
    assert "Traceback (most recent call last):\n  File" not in c.output().split("Last words")[0]
    assert c.nothing_left()
    if "every" in flags:
        assert c.step() in (10, 11)  # nothing was lost (11: the second node came just then)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("--nodes", "3:1"), "LOW <= HIGH"),
        (("--market", "sunny"), "sunny"),
        (("--policy", "nosuch"), "nosuch"),
        (("--env", "1BAD=x"), "1BAD"),
        (("--run", "s3://bucket-that-does-not-exist-anywhere/x"), "s3://"),
        (("--nodez", "3"), "did you mean --nodes?"),
    ],
)
def test_bad_flags_are_refused_before_anything_starts(campaign, change, says, monkeypatch):
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "k"),
        ("AWS_SECRET_ACCESS_KEY", "s"),
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:9"),
    ):
        monkeypatch.setenv(name, value)
    c = campaign()
    # a bucket that does not answer is asked for ten seconds: here one is enough
    first = "from harness.cli import common; common.PREFLIGHT_S = 1.0"
    ended = harness(*c.command[3:], *change, first=first)
    assert ended.returncode in (1, 2)
    assert says in ended.stderr and "Traceback" not in ended.stderr, ended.stderr
    assert c.nothing_left()


def test_a_task_that_skypilot_would_refuse_is_refused(campaign):
    c = campaign()
    c.task.write_text(c.task.read_text().replace("resources:", "resorces:"))
    ended = harness(*c.command[3:])
    assert ended.returncode == 2
    assert "resorces" in ended.stderr and "Traceback" not in ended.stderr
