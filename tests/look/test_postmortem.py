"""Post-mortems: what ended each world and which ends belong together, their moments, what each is
to blame for to the nanosecond, and what else would have cost, on made runs with known answers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from harness.bucket.archive import read_committed, read_facts
from harness.bucket.layout import IDENTITY, Identity
from harness.core import facts as f
from harness.core import step_records as rec
from harness.core.facts import Stamped
from harness.core.loss_rates import daly
from harness.ledger.bill import NANO
from harness.ledger.ledger import Ledger
from harness.look.postmortems.postmortem import postmortem
from harness.look.reports.summary import summarize
from storage.snapshots.snapshots import Snapshots
from support.clock import speaking
from support.histories import T0, whole_run
from support.interruptions import Made, check, lost_node
from support.system import fault_plan


def at(one, what: str) -> list[float]:
    """When, in seconds from the begin of the run."""
    return [round(m.t - T0, 6) for m in one.moments if m.what == what]


def spent(losses) -> dict[str, float]:
    """In seconds; all until a node's first step is `start` here."""
    begin = ("provision", "setup", "start")
    found = {bucket: n / NANO for bucket, n in losses.ns.items() if n and bucket not in begin}
    start = sum(losses.ns[bucket] for bucket in begin) / NANO
    return {**found, "start": start} if start else found


# ---- a loss without notice -----------------------------------------------------------------------


def test_a_loss_tells_its_moments_and_who_replaced_the_node():
    found, _ = lost_node().told()
    loss, grow = found.interruptions
    assert (loss.kind, loss.epochs, loss.world) == ("loss", (1,), (2, 1))
    assert loss.cause == "node 2 gone without notice"
    assert [n.name for n in loss.nodes] == ["2"]
    assert loss.begun_s - T0 == 27.0  # nobody knows of anything after step 15
    assert (loss.gap_s, loss.lasted_s) == (7.0, 12.0)
    chain = ["gone", "left", "formed", "restored", "first step", "caught up", "asked", "up"]
    assert [m.what for m in loss.moments if m.what in chain][:5] == chain[:5]
    assert {what: at(loss, what) for what in chain} == {
        "gone": [30.0],
        "left": [32.0],
        "formed": [33.0],
        "restored": [34.0],
        "first step": [34.0],
        "caught up": [39.0],
        "asked": [37.0],
        "up": [37.0],
    }
    assert at(loss, "whole") == [46.5]
    assert (grow.kind, grow.cause) == ("resize", "node 3 joined")
    assert (at(grow, "staged"), at(grow, "committed")) == ([42.5], [44.0])


def test_a_loss_is_blamed_for_what_it_cost_and_nothing_else_is():
    found, ledger = lost_node().told()
    loss, grow = found.interruptions
    # Steps 11 to 15 on two nodes, and 3 s until node 2 was gone; then node 1 made no step for 4 s.
    # Node 3 started for 9.5 s
    assert spent(loss.losses) == {"redone": 2 * (5.0 + 3.0), "reform": 4.0, "start": 9.5}
    assert loss.losses.steps == 5
    assert loss.losses.usd == pytest.approx(29.5)
    assert spent(grow.losses) == {"snapshot": 0.5, "reform": 4.0}
    assert spent(found.rest)["start"] == 4.0  # of the first two
    assert found.rest.ns["useful"] == ledger.ns["useful"]


def test_gpu_time_counts_every_gpu_of_a_node():
    made = Made().ask(1, 2, gpus=8).form(1, 2).train(5)
    made.t += 1.0
    found, ledger = made.gone(2).broke(1).form(1, reason="loss").train(6).finish().told()
    (loss,) = found.interruptions
    assert loss.losses.gpu_s == pytest.approx(8 * loss.losses.billed_s)
    assert loss.losses.billed_ns < ledger.billed_ns


# ---- notices -------------------------------------------------------------------------------------
def test_a_notice_tells_what_it_saved():
    made = Made().ask(1, 2).form(1, 2).train(14, every=5)  # step 10 was committed at 24 s, at 26 s
    made.notice(2).train(2).drain(leaving=(2,))
    made.say(f.DrainVerdict(made.member(2), 16, 1, 1, True, 16, True, 118.0, 2.0))
    made.t += 1.0
    found, _ = made.gone(2, end="drained").form(1, reason="shrink").train(4).finish().told()
    (one,) = found.interruptions
    assert (one.kind, one.cause) == ("notice", "kill notice from aws to node 2")
    assert one.saved is not None
    assert (one.saved.first_step, one.saved.last_step, one.saved.steps) == (11, 16, 6)
    assert (one.saved.seconds, one.saved.node_s) == (6.0, 12.0)
    assert one.saved.usd == pytest.approx(12.0)
    assert one.losses.steps == 0
    assert (one.nodes[0].grace_s, one.nodes[0].commit_s) == (120.0, 4.0)
    assert one.nodes[0].in_time is True
    (verdict,) = [m for m in one.moments if m.what == "verdict"]
    assert verdict.node == "2"
    assert verdict.text.startswith("step 16: 1 of 1 shares committed (forecast: 2.0 s needed")
    whats = [m.what for m in one.moments]
    assert whats.index("notice") < whats.index("staged") < whats.index("committed")
    assert whats.index("committed") < whats.index("gone") < whats.index("first step")


def test_a_notice_that_was_too_short_saves_nothing():
    made = Made().ask(1, 2).form(1, 2).train(12, every=10)
    made.notice(2, grace_s=3.0).train(3)
    made.say(f.GraceSpent(made.member(2), 1, made.t, 15, 10, "10 is safe, 15 is not"))
    made.gone(2).broke(1).form(1, reason="loss", resumed=10).train(8).finish()
    found, _ = made.told()
    (one,) = found.interruptions
    assert one.kind == "notice"
    assert "gone before its workers left" in one.cause
    assert one.saved is None
    assert one.losses.steps == 5
    (late,) = [m for m in one.moments if m.what == "verdict"]
    assert late.text == "time is up: 10 is safe, 15 is not"


def test_a_notice_that_was_taken_back_costs_nothing():
    made = Made().ask(1).form(1).train(3).notice(1)
    made.say(f.NoticeCancelled(made.member(1), "n1"), made.t + 1.0)
    found, _ = made.train(3).finish().told()
    (one,) = found.interruptions
    assert (one.epochs, one.world, one.losses.billed_ns) == ((), (1, 1), 0)
    assert one.cause == "kill notice from aws to node 1 was taken back"
    assert [m.what for m in one.moments] == ["notice", "cancelled"]


def test_a_calm_run_has_no_interruption():
    found, ledger = Made().ask(1, 2).form(1, 2).train(9, every=3).finish().told()
    assert found.interruptions == ()
    assert found.what_if[0].name == "half the snapshot interval"
    assert found.rest.ns == ledger.ns


# ---- which belong together -----------------------------------------------------------------------
def test_nodes_taken_at_once_are_one_interruption():
    made = Made().ask(1, 2, 3).form(1, 2, 3).train(10)
    made.gone(3).broke(1, 2)
    made.form(1, 2, reason="loss").train(2)
    made.gone(2).broke(1)
    found, _ = made.form(1, reason="loss").train(12).finish().told()
    (one,) = found.interruptions
    assert [n.name for n in one.nodes] == ["3", "2"]
    assert (one.epochs, one.world) == ((1, 2), (3, 1))
    assert one.cause == "node 3 gone without notice; then node 2 gone without notice"
    assert one.losses.steps == 12


def test_nodes_taken_after_the_run_has_caught_up_are_two():
    made = Made().ask(1, 2, 3).form(1, 2, 3).train(3)
    made.gone(3).broke(1, 2)
    made.form(1, 2, reason="loss").train(5)
    made.gone(2).broke(1)
    found, _ = made.form(1, reason="loss").train(6).finish().told()
    assert [(one.kind, one.losses.steps) for one in found.interruptions] == [
        ("loss", 3),
        ("loss", 5),
    ]


def test_worlds_that_break_before_a_step_prolong_the_interruption():
    made = Made().ask(1, 2).form(1, 2).train(4)
    made.gone(2).broke(1)
    for _ in range(3):
        made.form(1, reason="loss")
        made.t += 100.0
        made.say(f.WorkerFailed(made.member(1), made.epoch, 0, 1, "OSError", "no"))
        made.broke(1, why="failed")
    found, _ = made.form(1, reason="loss").train(6).finish().told()
    (one,) = found.interruptions
    assert (one.kind, one.epochs) == ("loss", (1, 2, 3, 4))
    assert len(at(one, "trouble")) == 3
    assert one.gap_s == pytest.approx(4 * 2.0 + 300.0)


def test_a_launch_that_ends_before_it_trains_is_followed_by_another():
    made = Made().ask(1, 2).form(1, 2).train(4).gone(2).broke(1)
    made.form(1, reason="loss").train(5)
    made.refuse(3)
    made.ask(4, boot_s=2.0).train(2).gone(4).ask(5, boot_s=2.0).train(2)
    made.drain("resize").form(1, 5, reason="grow").train(3).finish()
    found, _ = made.told()
    loss = found.interruptions[0]
    asked = [(m.node, m.text) for m in loss.moments if m.what == "asked"]
    assert asked[0] == ("", "no capacity")
    assert [node for node, _ in asked[1:]] == ["4", "5"]
    assert spent(loss.losses)["start"] == 2.0 + 2.0 + 4.5  # of node 4, which was in vain, and of node 5
    assert len(found.interruptions) == 2


def test_a_node_that_is_lost_before_it_trains_is_an_interruption_of_its_own():
    made = Made().ask(1).form(1).train(2).ask(2, boot_s=1.0)
    made.t += 6.0
    found, _ = made.gone(2, end="lost").train(2).finish().told()
    (one,) = found.interruptions
    assert (one.kind, one.epochs, spent(one.losses)) == ("loss", (), {"start": 6.0})
    assert one.cause == "node 2 ended before it trained: lost"


# ---- other causes --------------------------------------------------------------------------------
def test_causes_are_told_apart():
    def ended(befall, resumed=0, attempts=(1, 2)):
        made = Made().ask(1, 2, 3).form(1, 2).train(6)
        befall(made)
        made.form(*attempts, reason="restart", resumed=resumed).train(8).finish()
        return made.told()[0].interruptions[0]

    def hang(made):
        hung = f.WorkerHung(made.member(2), 1, 1, 6, "reducing", 30.0, True, "no sign")
        made.say(hung)
        made.broke(1, 2, why="hung")

    def crash(made):
        made.say(f.GuardTripped(6, 1, "non-finite", math.nan))
        made.say(f.WorkerFailed(made.member(1), 1, 0, 1, "ValueError", "bad <loss>"))
        made.broke(1, 2, why="failed")

    def health(made):
        made.say(f.HealthSeen(made.member(2), "GPU-0", "xid 79", "off the bus", "kill"))
        made.broke(1, 2, why="unfit")
        made.gone(2, end="unfit")

    def move(made):
        made.say(f.Decided("release", "attempt 2: the whole run moves"))
        made.drain("drain", leaving=(2,))
        made.gone(2, end="terminated")

    def rewind(made):
        made.say(f.SessionEnded(1, 6, "rewind"))
        made.broke(1, 2, why="resize")

    back = ended(rewind)
    assert (back.kind, back.cause) == ("rewind", "guards sent the run back from step 7")
    assert back.losses.steps == 6 and not back.wanted
    found = [ended(hang), ended(crash), ended(health, attempts=(1,))]
    found.append(ended(move, resumed=6, attempts=(1, 3)))
    assert [(one.kind, one.cause) for one in found] == [
        ("hang", "rank 1 on node 2 hung in reducing"),
        ("crash", "rank 0 on node 1 failed: ValueError"),
        ("health", "node 2: GPU GPU-0: xid 79 (kill)"),
        ("move", "node 2 given back for node 3"),
    ]
    assert [one.losses.steps for one in found] == [6, 6, 6, 0]
    assert [m.text for m in found[3].moments if m.what == "decided"] == [
        "release attempt 2: the whole run moves"
    ]
    # the first three began together; node 3 waited for this move
    assert spent(found[3].losses)["start"] > 0


def test_steps_of_older_worlds_are_lost_to_the_interruption_that_went_back_that_far():
    """Epoch 2 resumes from step 5, epoch 3 from step 3, since the snapshot of step 5 is bad."""
    made = Made().ask(1).form(1).train(5, every=5).train(2)
    made.say(f.WorkerFailed(made.member(1), 1, 0, 1, "OSError", ""))
    made.broke(1, why="failed").form(1, reason="restart", resumed=5).train(4)
    made.t += 100.0
    made.say(f.WorkerFailed(made.member(1), 2, 0, 1, "OSError", ""))
    made.broke(1, why="failed").form(1, reason="restart", resumed=3)
    made.say(f.SnapshotQuarantined(5, 1, "state.bin does not match"))
    made.say(f.Warned(3, 3, "step 5 could not be read"))
    found, ledger = made.train(9).finish().told()
    first, second = found.interruptions
    assert first.losses.steps == 2  # 6 and 7
    assert second.losses.steps == 4 + 2  # 6 to 9 of epoch 2, 4 and 5 of epoch 1
    assert ledger.steps_lost == 8
    assert [m.text for m in second.moments if m.what == "quarantined"] == [
        "step 5: state.bin does not match"
    ]
    assert [m.text for m in second.moments if m.what == "warned"] == ["step 5 could not be read"]


# ---- what else would have cost -------------------------------------------------------------------
def test_the_best_interval_is_dalys():
    # C = 2 s, M = 1 h: ratio 1/3600; sqrt(14400) (1 + (1/60)/3 + (1/3600)/9) - 2
    assert daly(2.0, 3600.0) == pytest.approx(120 * (1 + 1 / 180 + 1 / 32400) - 2)
    assert daly(10.0, 4.0) == 4.0  # nothing helps


def test_another_interval_costs_what_is_known():
    """Snapshots every 5 s cost 0.2 s each: a tenth of 2 s. The one loss redid 16 node-seconds."""
    found, _ = lost_node().told()
    m = found.measured
    assert (m.interval_s, m.commit_s, m.cost_s) == (5.0, 2.0, pytest.approx(0.2))
    assert m.between_losses_s == 15.0 + 8.0 + 4.0  # one world of three broke
    loss, grow = found.interruptions
    half, twice, best, standby = loss.what_if
    # 15 s of training on two nodes: three more snapshots, three node-seconds of 0.4 s each
    assert half.node_s == pytest.approx(3 * 0.4 + 2 * (2.5 / 2 + 2.0) - 16.0)
    assert twice.node_s == pytest.approx(-1.5 * 0.4 + 2 * (10.0 / 2 + 2.0) - 16.0)
    assert half.usd == pytest.approx(half.node_s)  # at a dollar a second
    assert best.note == f"every {m.best_s:.1f} s"
    assert m.best_s == max(daly(m.cost_s, m.between_losses_s), 6.0)
    # nothing was lost by growing: 8 s of training on one node
    assert grow.what_if[0].node_s == pytest.approx(8 / 5 * 0.2)
    total = found.what_if[0]
    tail = 4 / 5 * 0.2 * 2  # after the last interruption: 4 s on two nodes
    assert total.node_s == pytest.approx(half.node_s + grow.what_if[0].node_s + tail)
    assert standby.name == "one more node standing by"


def test_a_node_standing_by_spares_the_wait_for_a_launch():
    made = Made()
    made.say(f.RunAsked("t", 2, 2, "cheapest"))
    made.ask(1, 2).form(1, 2).train(8)
    made.gone(2).broke(1)  # at 20 s
    made.ask(3, boot_s=49.0)  # its agent starts at 70 s
    found, _ = made.form(1, 3, reason="loss").train(9).finish().told()
    (one,) = found.interruptions
    standby = next(a for a in one.what_if if a.name == "one more node standing by")
    # It stands by from 12 s to 20 s; node 1 does not wait for 50 s.
    assert standby.node_s == pytest.approx(8.0 - 50.0)
    assert standby.usd == pytest.approx(8.0 - 50.0)
    assert standby.wall_s == pytest.approx(-50.0)
    whole = next(a for a in found.what_if if a.name == "one more node standing by")
    assert whole.node_s == pytest.approx(8.0 - 50.0 + 9.0)  # and it stands by until the end


def test_a_node_standing_by_fills_a_place_until_the_world_is_whole():
    found, _ = lost_node().told()
    standby = next(a for a in found.interruptions[0].what_if if "standing by" in a.name)
    # One of two places, from 34 s to 46.5 s: half of that is gained. It stood by from 12 to 27 s.
    assert standby.wall_s == pytest.approx(-12.5 / 2)
    assert standby.node_s == pytest.approx(15.0)


# ---- the known story -----------------------------------------------------------------------------
def test_the_story_of_a_whole_run():
    summary = summarize(whole_run().store)
    found = summary.postmortem
    check(found, summary.ledger)
    assert [(one.kind, one.epochs, one.losses.steps) for one in found.interruptions] == [
        ("resize", (1,), 0),
        ("notice", (2,), 0),
        ("loss", (3,), 7),
        ("notice", (4,), 0),
    ]
    _, notice, loss, outage = found.interruptions
    assert (notice.saved.first_step, notice.saved.last_step) == (41, 51)
    assert loss.losses.ns["redone"] == summary.ledger.ns["redone"]
    assert [m.node for m in outage.moments if m.what == "up"] == ["7"]
    assert outage.gap_s == pytest.approx(summary.ledger.epochs[4].gap_s)
    assert loss.begun_s == pytest.approx(summary.ledger.epochs[2].last_s)


@pytest.mark.parametrize("until", range(20, 320, 25))
def test_a_run_that_goes_on_adds_up_too(until):
    known = [s for s in whole_story_facts() if s.t <= T0 + until]
    ledger = Ledger.of(known, [], T0 + until)
    check(postmortem(known, ledger), ledger)


def whole_story_facts():
    if not FACTS:
        FACTS.extend(read_facts(whole_run().store))
    return FACTS


FACTS: list[Stamped] = []


def test_clocks_that_differ_break_nothing():
    """Machines' clocks may be minutes apart."""
    for skew in (-300.0, 300.0):
        made = lost_node()
        made.facts = [
            replace(s, t=s.t + skew) if isinstance(s.fact, (f.AttemptEnded, f.EpochLeft)) else s
            for s in made.facts
        ]
        found, ledger = made.told()
        assert sum(one.losses.steps for one in found.interruptions) == ledger.steps_lost


def test_a_node_standing_by_does_not_help_where_all_are_taken():
    made = Made().ask(1, 2).form(1, 2).train(8)
    made.gone(1, 2)
    found, _ = made.ask(3, boot_s=49.0).form(3, reason="start").train(9).finish().told()
    (one,) = found.interruptions
    standby = next(a for a in one.what_if if a.name == "one more node standing by")
    assert (standby.wall_s, standby.note) == (0.0, "it would have been taken too")
    assert standby.node_s == pytest.approx(8.0)


def test_nodes_that_are_taken_before_they_train_belong_to_what_took_the_others():
    made = Made().ask(1, 2).form(1, 2).train(4).ask(3, boot_s=1.0).train(1)
    made.gone(2, 3).broke(1)
    found, _ = made.form(1, reason="loss").train(8).finish().told()
    (one,) = found.interruptions
    assert one.cause == "node 2 gone without notice; with it node 3 before training"
    assert [n.name for n in one.nodes] == ["2", "3"]
    assert spent(one.losses)["start"] == 1.0


def test_a_place_is_filled_once():
    """What is launched after the world is whole again is growth, and nobody's fault."""
    made = Made().ask(1, 2).form(1, 2).train(4).gone(2).broke(1)
    made.form(1, reason="loss").train(5).ask(3, boot_s=0.0).train(1)
    made.drain("resize").form(1, 3, reason="grow").train(3).ask(4, boot_s=0.0).train(2)
    made.drain("resize").form(1, 3, 4, reason="grow").train(2).finish()
    found, _ = made.told()
    assert [m.node for m in found.interruptions[0].moments if m.what == "up"] == ["3"]
    assert spent(found.rest)["start"] == 2 * 2.0 + 2.0 + 4.5


def test_a_notice_to_a_node_that_had_not_trained_has_cost_its_start():
    made = Made().ask(1).form(1).train(2).ask(2, boot_s=1.0)
    made.t += 4.0
    made.notice(2)
    made.t += 2.0
    found, _ = made.gone(2, end="drained").train(2).finish().told()
    (one,) = found.interruptions
    assert (one.kind, one.epochs, spent(one.losses)) == ("notice", (), {"start": 6.0})
    assert [m.what for m in one.moments] == ["asked", "up", "joined", "notice", "gone"]


# ---- long runs, and worlds that nobody made up ---------------------------------------------------
def test_what_is_told_coarsely_is_blamed_the_same(monkeypatch):
    """Of long runs a node's time is told in pieces (`spans.py`), none across the end of a world."""
    from harness.ledger import ledger as ledger_parts
    from harness.ledger import time_spans

    def blamed() -> list[dict[str, float]]:
        found = summarize(whole_run().store).postmortem
        return [{b: round(s, 6) for b, s in spent(i.losses).items()} for i in found.interruptions]

    exact = blamed()
    monkeypatch.setattr(ledger_parts, "LARGE", 0)
    monkeypatch.setattr(time_spans, "PIECE", 4)
    monkeypatch.setattr(time_spans, "MOST_SEGMENTS", 4)
    monkeypatch.setattr(time_spans, "GROUPS", 2)
    assert blamed() == exact


@pytest.mark.parametrize("seed", [11, 14])
def test_worlds_of_the_simulation_add_up(seed):
    """Real agents, controllers and sessions' machines on a virtual clock; sessions tell no steps
    live there, so what is known are the committed ones."""
    from support.system import system_run
    from support.system.system_node import EPOCH_S

    setting = fault_plan.Setting.of(seed)
    system = system_run.WholeSystem(seed, setting, fault_plan.faults_of(seed, setting), system_run.SystemBuild())
    with speaking(setting.protocol):
        system.play()
    facts = [on_wall_clock(s, EPOCH_S) for s in read_facts(system.bucket.inner)]
    named = Snapshots(system.bucket.inner).latest().data["samples"]
    head = Identity.decode(system.bucket.inner.get(IDENTITY)).body
    records = read_committed(system.bucket.inner, rec.named({"samples": named}), rec.genesis(head))
    ledger = Ledger.of(facts, records, EPOCH_S + system.kernel.now_s)
    found = postmortem(facts, ledger, records=records)
    check(found, ledger)
    kinds = {one.kind for one in found.interruptions}
    assert kinds & {"notice", "loss", "health", "crash"} and "resize" in kinds
    lost = sum(one.losses.billed_ns for one in found.interruptions)
    assert 0 < lost < ledger.billed_ns


def on_wall_clock(stamped: Stamped, begin_s: float) -> Stamped:
    """Controllers of the simulation count from 0, agents from `begin_s`."""
    if stamped.t >= begin_s:
        return stamped
    fact = stamped.fact
    names = ("asked_s", "up_s", "gone_s")
    moved = {n: t + begin_s for n in names if (t := getattr(fact, n, None)) is not None}
    return Stamped(stamped.t + begin_s, stamped.writer, replace(fact, **moved))


def test_what_was_over_long_before_is_no_part_of_it():
    made = Made().ask(1, 2).form(1, 2).notice(2)
    made.say(f.NoticeCancelled(made.member(2), "n2"), made.t + 1.0)
    made.say(f.AttemptDoubted(2, True))
    made.say(f.AttemptDoubted(2, False), made.t + 1.0)
    made.say(f.HealthSeen(made.member(2), "GPU-0", "xid 13", "", "count"))
    made.t += 1000.0
    made.train(4).gone(2).broke(1)
    found, _ = made.form(1, reason="loss").train(6).finish().told()
    (loss,) = found.interruptions
    assert loss.kind == "loss"
    assert {m.what for m in loss.moments} == {
        "gone", "left", "formed", "restored", "first step", "caught up",
    }  # fmt: skip


def test_a_notice_that_is_taken_back_too_late_has_cost_a_world():
    made = Made().ask(1, 2).form(1, 2).train(4).notice(2).train(1)
    made.drain("resize")
    made.say(f.NoticeCancelled(made.member(2), "n2"), made.t - 0.5)
    found, _ = made.form(1, 2, reason="restart").train(3).finish().told()
    (one,) = found.interruptions
    assert one.kind == "notice"
    assert one.cause == "kill notice from aws to node 2, which stayed after all"
    assert one.losses.ns["reform"] == 2 * 4 * NANO
    assert one.saved is None  # nothing would have been lost
    assert {"notice", "cancelled", "committed"} <= {m.what for m in one.moments}
