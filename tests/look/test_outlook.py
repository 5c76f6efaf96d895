"""What people are told of a run's deadline, of waits that it chose, and of its snapshots."""

import dataclasses

import pytest

from harness.core import facts as f
from harness.ledger.run_state import RunState
from harness.look.reports.live_view import decision_line, number_rows, status
from harness.look.reports.outlook import ChosenWaits, RunOutlook, interval_words, wait_words
from harness.look.reports.report import headline, to_json
from harness.look.reports.report_rows import snapshot_rows
from harness.look.reports.summary import summarize
from support.story import Story

T = 1_000_000.0


def state(deadline_s=T + 7200.0, done=50, total=100, step_s=36.0):
    made = RunState()
    told = [
        f.LeaseTaken(1),
        f.RunAsked("t.yaml", 1, 1, "deadline", deadline_s=deadline_s),
        f.EpochStarted(1, ("m0001-a",), 1),
        f.SessionStarted(1, 1, 0, 0, total, 8, 1, (8,)),
    ]
    for fact in told:
        made.add(f.Stamped(T - done * step_s, "w", fact))
    for step in range(1, done + 1):
        t = T - (done + 1 - step) * step_s
        made.add(f.Stamped(t, "w", f.StepDone(step, 1, 1.0, t, step_s)))
    return made


@pytest.mark.parametrize(
    ("deadline_s", "words", "spare_s"),
    [
        (T + 7200.0, "in 2 h 00 min: 1 h 30 min to spare", 5400.0),
        (T + 600.0, "in 10 min 00 s: at this speed 20 min 00 s too late", -1200.0),
        (T - 60.0, "60 s ago: at this speed 31 min 00 s too late", -1860.0),
        (None, "", None),
    ],
)
def test_a_deadline_beside_what_the_speed_promises(deadline_s, words, spare_s):
    found = RunOutlook.of(state(deadline_s), T)
    assert found.words(T) == words and found.spare_s == spare_s
    assert dict(number_rows(state(deadline_s), T)).get("deadline", "") == words


def test_of_a_run_that_never_trained_only_the_deadline_is_known():
    found = RunOutlook.of(state(done=0), T)
    assert found.words(T) == "in 2 h 00 min" and found.spare_s is None


def test_a_wait_that_was_chosen_says_what_it_is_for():
    made = state()
    made.add(f.Stamped(T - 60, "c", f.Decided("wait", "spot will be back", T + 4800, 3.1)))
    line = decision_line(made, T)
    assert line == (
        "wait: spot will be back, for about 1 h 20 min more, to save about $3.100 (60 s ago)"
    )
    assert "longer than was expected" in decision_line(made, T + 9000)
    assert wait_words(f.Decided("wait", "all nodes are there"), T) == ""
    assert wait_words(f.Decided("terminate", "x", T + 5), T) == ""


def test_chosen_waits_are_added_up():
    chosen = f.Decided("wait", "later", 9000.0, 2.0)
    told = [
        (0.0, f.Decided("wait", "all nodes are there")),
        (100.0, chosen),
        (1000.0, dataclasses.replace(chosen, expected_s=12000.0, saving_usd=9.0)),  # the same wait
        (1500.0, f.AttemptIntended(1, {})),
        (1600.0, chosen),
        (1700.0, dataclasses.replace(chosen, reason="cheaper soon")),
        (1750.0, f.Decided("wait", "no capacity")),
        (1800.0, chosen),
    ]
    facts = [f.Stamped(t, "c", fact) for t, fact in told]
    assert ChosenWaits.of(facts, 2000.0) == ChosenWaits(4, 1400 + 100 + 50 + 200, 8.0)
    assert ChosenWaits.of(facts[:1], 2000.0) == ChosenWaits()


@pytest.mark.parametrize(
    ("interval_s", "between_s", "words"),
    [
        (0.0, 0.0, ""),
        (60.0, 0.0, "every 60.0 s, as the script says"),
        (
            147.0,
            7200.0,
            "every 2 min 27 s: one costs 1.0 s of training and is there after 8.2 s; "
            "work is lost every 2 h 00 min",
        ),
        (
            104.0,
            3601.0,
            "every 1 min 44 s: one costs 1.0 s of training and is there after 8.2 s; "
            "work is lost every 1 h 00 min (assumed)",
        ),
    ],
)
def test_an_interval_says_why(interval_s, between_s, words):
    one = f.SnapshotCommitted(
        5, 1, 800, 0.2, 8.2, "interval", T, slowdown=0.1, interval_s=interval_s,
        between_losses_s=between_s,
    )  # fmt: skip
    assert interval_words(one) == words


# ---- of a whole run ------------------------------------------------------------------------------
def story(spare_s, over=True):
    made = Story()
    made.node(0)
    made.train(10, world=1, final=over)
    made.t += 1.0
    committed = f.SnapshotCommitted(
        10, made.epoch, 800, 0.2, 2.0, "final", made.t, interval_s=147.0, between_losses_s=7200.0
    )
    asked = f.RunAsked("train.yaml", 1, 1, "deadline", deadline_s=made.t + 2.0 + spare_s)
    made.told(committed, asked, f.Decided("wait", "later", made.t + 600, 1.5))
    made.t += 300.0
    made.told(f.Decided("wait", "all nodes are there"))
    if over:
        made.gone(0, "finished")
        made.told(f.RunEnded("done", "", 10))
    return made


def test_a_report_says_whether_the_deadline_was_met():
    made = story(3600.0)
    s = summarize(made.store)
    rows = dict(headline(s))
    assert rows["deadline"].endswith("UTC: met, with 1 h 00 min to spare")
    assert rows["waited"] == "5 min 00 s in 1 wait by choice, to save about $1.500"
    assert "work is lost every 2 h 00 min" in dict(snapshot_rows(s))["due"]
    said = to_json(s)
    assert said["deadline_s"] == s.asked.deadline_s
    assert said["waited"] == {"count": 1, "seconds": 300.0, "saving_usd": 1.5}
    late = dict(headline(summarize(story(-90.0).store)))
    assert late["deadline"].endswith("MISSED by 90 s")


def test_a_run_without_a_deadline_says_nothing_of_one():
    made = Story()
    made.node(0)
    assert "deadline" not in dict(headline(summarize(made.store)))


def test_status_tells_programs_the_same():
    made = story(3600.0, over=False)
    said = status(made.store, watch_s=0.0, now=lambda: made.t)
    assert said["deadline"]["deadline_s"] == made.t - 300.0 + 3602.0
    assert said["snapshot"]["every_s"] == 147.0
    assert said["snapshot"]["between_losses_s"] == 7200.0
    assert said["snapshot"]["why"].startswith("every 2 min 27 s")
    assert said["waiting"] is None
    made.told(f.Decided("wait", "later", made.t + 600, 1.5))
    said = status(made.store, watch_s=0.0, now=lambda: made.t)
    assert said["waiting"] == {"reason": "later", "expected_s": made.t + 600, "saving_usd": 1.5}
