"""What a run learns from its own facts: speed, changeovers, losses, prices, deadline."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import asdict

import pytest

from harness.bucket.archive import read_facts
from harness.bucket.journal import Journal
from harness.controller import learning
from harness.controller.learning import LOOK_S, PriceBook, RunEstimator, RunGoals
from harness.core import facts as f
from harness.core.estimates import CapacitySeen, Estimates, Spell, StepPace
from harness.core.world import Offer, Wait
from harness.ledger.attempts import AttemptHistory, CapacityBook
from harness.ledger.bill import leave_usd
from harness.ledger.world_speed import RunTimings, StepTiming, typical
from storage.errors import StoreUnavailable
from storage.stores.folder_store import MemoryStore

WEST = Offer(1.0, "aws/west/a", accelerator="A100", gpus=4, speed=2.0, place="aws/west")
EAST = Offer(1.5, "aws/east/a", accelerator="A100", gpus=4, speed=2.0, place="aws/east")
SLOW = Offer(0.5, "aws/west/t4", accelerator="T4", gpus=1, place="aws/west")


class Telling:
    """A run's seats, which write to its bucket."""

    def __init__(self, url="memory://run"):
        self.store, self.t = MemoryStore(url, {}), 0.0
        self.seats = {}

    def say(self, *found, seat="controller-1"):
        journal = self.seats.setdefault(seat, Journal(self.store, seat, lambda: self.t))
        for fact in found:
            journal.record(fact)
        journal.flush()

    def node(self, attempt, offer, launch_s=100.0):
        self.say(f.AttemptIntended(attempt, asdict(offer)))
        self.t += launch_s
        self.say(f.AttemptUp(attempt, self.t))

    def gone(self, attempt, end):
        node = self.book().open[attempt]
        self.say(
            f.AttemptEnded(attempt, end, node.asked_s, node.up_s, self.t, None, end, 1.0, 0.01)
        )

    def world(self, epoch, *attempts, step=0, total=1000, batch=(64, 2)):
        members = tuple(f"m{a:04d}-x" for a in attempts)
        self.say(f.EpochStarted(epoch, members, 4 * len(attempts)), seat="agent-1")
        self.t += 20.0
        begun = f.SessionStarted(epoch, 4 * len(attempts), step, epoch - 1, total, *batch)
        self.say(begun, seat=f"worker-e{epoch}")

    def steps(self, epoch, first, last, step_s):
        self.t += (last - first + 1) * step_s
        timed = f.StepsTimed(epoch, first, last, {"forward": 0.75 * step_s, "data": 0.25 * step_s})
        done = f.StepDone(last, epoch, 1.0, self.t - step_s, step_s)
        self.say(timed, done, seat=f"worker-e{epoch}")

    def snapshot(self, epoch, step, why="interval", **more):
        told = f.SnapshotCommitted(step, epoch, 10**9, 0.2, 8.0, why, self.t - 8.0, **more)
        self.say(told, seat="agent-1")

    def book(self):
        found = read_facts(self.store, "controller-")
        return AttemptHistory.of(found, random.Random(0))


def known(run, wanted=RunGoals(), offers=(WEST, EAST, SLOW), **more):
    return RunEstimator(run.store, wanted, **more).known(run.t, run.book(), offers)


def trained(url="memory://run"):
    """One node for 100 steps, then two for 50."""
    run = Telling(url)
    run.node(1, WEST)
    run.world(1, 1)
    run.steps(1, 1, 50, 8.0)
    run.snapshot(1, 50)
    run.steps(1, 51, 100, 8.0)
    run.snapshot(1, 100)
    run.node(2, WEST, launch_s=60.0)
    run.world(2, 1, 2, step=100)
    run.steps(2, 101, 150, 4.0)
    return run


def test_speed_work_and_starts_are_measured():
    run = trained("s3://bucket/run")
    found = known(run)
    assert found.total_steps == 1000 and found.micro_batches == 32
    assert found.paces == (StepPace("A100", 4, 8.0, 100), StepPace("A100", 8, 4.0, 50))
    assert found.work == pytest.approx(1000 * 4.0 * 8 * 2.0)  # steps, seconds, workers, speed
    assert found.changeover_s == pytest.approx((120.0 + 80.0) / 2)
    assert found.lost_s == pytest.approx(400.0 / 2 + 8.0)
    assert found.snapshot_bytes == 10**9 and found.move_usd == pytest.approx(0.02)
    book = run.book()
    book.progress(run.t, 100)
    assert RunEstimator(run.store).known(run.t, book, [WEST]).uncommitted_steps == 50
    assert dataclasses.replace(found, uncommitted_steps=50).left(100) == found.work * 0.85


def test_what_a_broken_world_had_not_committed_is_lost():
    run = trained()
    run.gone(2, "preempted")
    book = run.book()
    book.progress(run.t, 100)
    assert RunEstimator(run.store).known(run.t, book, [WEST]).uncommitted_steps == 0


def test_shares_that_do_not_divide_cost_time_that_is_no_work():
    run = Telling()
    run.node(1, WEST)
    run.world(1, 1, batch=(12, 2))  # 6 micro-batches on 4 workers: two rounds, six of eight places
    run.steps(1, 1, 20, 8.0)
    assert known(run).work == pytest.approx(1000 * 8.0 * 8.0 * 6 / 8)


def test_steps_of_a_loop_that_times_none_are_timed_by_their_begins():
    run = Telling()
    run.node(1, WEST)
    run.world(1, 1)
    for step in range(1, 8):
        done = f.StepDone(step, 1, 1.0, run.t, 1.0)  # and a second between two of them
        run.say(done, seat="worker-e1")
        run.t += 2.0
    assert known(run).paces == (StepPace("A100", 4, 2.0, 6),)


def test_work_is_what_the_user_says_until_it_is_measured():
    wanted = RunGoals(deadline_s=9e4, work_s=3600.0, nodes=2)
    run = Telling()
    found = known(run, wanted)
    assert found.work == found.left(0) == 3600 * 2 * 8.0  # on two nodes of four, of speed 2
    assert not found.timed and known(trained(), wanted).timed
    assert (found.deadline_s, found.changeover_s) == (9e4, 300.0)
    assert found.left(5) is None  # of how many, nobody has said
    assert known(trained(), wanted).work == pytest.approx(64_000.0)


def test_a_learner_reads_only_what_is_new_and_bears_a_silent_bucket():
    run, silent = Telling(), []

    class Silent(MemoryStore):
        def list(self, prefix):
            if silent:
                raise StoreUnavailable("no answer")
            return super().list(prefix)

    store = run.store = Silent("memory://run", {})
    learner = RunEstimator(store)
    assert learner.known(0.0, run.book(), [WEST]).paces == ()
    run.node(1, WEST)
    run.world(1, 1)
    run.steps(1, 1, 50, 8.0)
    book = run.book()
    silent.append(True)
    first = learner.known(run.t, book, [WEST])
    assert first.paces == () and first.capacity["aws/west/a"].open
    silent.clear()
    assert learner.known(run.t + 1, book, [WEST]).paces == ()  # it does not ask in every round
    assert learner.known(run.t + LOOK_S, book, [WEST]).paces == (StepPace("A100", 4, 8.0, 50),)


@pytest.mark.parametrize("seed", range(6))
def test_seats_may_flush_in_any_order(seed):
    run = trained()
    run.say(f.NoticeSeen("m0002-x", "aws", "kill", "n1", run.t + 120), seat="agent-2")
    run.say(f.EpochLeft(2, "m0002-x", "drained"), seat="agent-2")
    run.gone(2, "drained")
    book, facts = run.book(), read_facts(run.store)
    by_seat = {}
    for stamped in facts:
        by_seat.setdefault(stamped.writer, []).append(stamped)
    rng, learned = random.Random(seed), RunTimings()
    while by_seat:  # each seat's own stay in their order
        seat = rng.choice(sorted(by_seat))
        stamped = by_seat[seat].pop(0)
        learned.add(stamped.t, stamped.fact)
        if not by_seat[seat]:
            del by_seat[seat]
    asked_s = {n: e.asked_s for n, e in book.ended.items()} | {
        n: node.asked_s for n, node in book.open.items()
    }
    learned.settle(book.offers, asked_s)
    assert learned.timings(book.offers) == {
        kind: [StepTiming(s, 50)] * (2 if s > 5 else 1)
        for kind, s in zip(learned.timings(book.offers), (8.0, 4.0), strict=True)
    }
    assert sorted(learned.changeovers_s) == [80.0, 120.0]
    assert learned.notices.announced == {2} and learned.notices.in_time(2)


def test_what_is_kept_of_a_long_run_is_bounded(monkeypatch):
    from harness.ledger import world_speed as room

    monkeypatch.setattr(room, "WORLDS_KEPT", 3)
    run = Telling()
    for n in range(1, 13):
        run.node(n, WEST)
        run.world(n, n)
        run.steps(n, 1, 10, 8.0)
    found = RunTimings()
    for stamped in read_facts(run.store):
        found.add(stamped.t, stamped.fact)
    book = run.book()
    found.settle(book.offers, {n: node.asked_s for n, node in book.open.items()})
    assert len(found.worlds) == 3 and len(found.changeovers_s) == 12
    assert sum(t.steps for each in found.timings(book.offers).values() for t in each) == 120


def test_the_typical_step_is_the_median_of_steps_not_of_timings():
    assert typical([StepTiming(1.0, 90), StepTiming(9.0, 5), StepTiming(8.0, 5)]) == 1.0
    assert typical([]) == 0.0


# ---- losses --------------------------------------------------------------------------------------
SAID = f.NoticeSeen("m0001-x", "aws", "kill", "n1", 220.0)
LEFT = f.EpochLeft(1, "m0001-x", "drained")


@pytest.mark.parametrize(
    ("told", "end", "losses", "unnoticed"),
    [
        ((), "preempted", 1, 1),
        ((SAID,), "preempted", 1, 1),  # it never left its world: nothing was saved
        ((SAID, LEFT), "preempted", 1, 0),
        ((SAID, LEFT), "drained", 1, 0),
        ((SAID, f.GraceSpent("m0001-x", 1, 220.0, 30, 20), LEFT), "preempted", 1, 1),
        ((LEFT,), "drained", 0, 0),  # the controller released it
        ((dataclasses.replace(SAID, notice="soft"), LEFT), "drained", 0, 0),
        ((SAID, f.NoticeCancelled("m0001-x", "n1"), LEFT), "drained", 0, 0),
        ((f.EpochLeft(1, "m0001-x", "failed"),), "failed", 0, 0),
    ],
)
def test_losses_are_told_apart_by_what_was_saved(told, end, losses, unnoticed):
    run = Telling()
    run.node(1, WEST)
    run.world(1, 1)
    run.t = 200.0
    run.say(*told, seat="agent-1")
    run.gone(1, end)
    seen = known(run).capacity["aws/west/a"]
    assert (seen.losses, seen.unnoticed) == (losses, unnoticed)
    assert seen.open is (not losses) and seen.node_s == 100.0


def test_an_announced_end_closes_an_offer_unless_others_stay():
    run = Telling()
    run.node(1, WEST)
    run.node(2, WEST)
    run.world(1, 1, 2)
    run.say(SAID, LEFT, seat="agent-1")
    run.gone(1, "drained")
    assert known(run).capacity["aws/west/a"].open
    said = (dataclasses.replace(SAID, member="m0002-x"), dataclasses.replace(LEFT, member="m0002-x"))
    run.say(*said, seat="agent-2")
    run.gone(2, "drained")
    seen = known(run).capacity["aws/west/a"]
    assert not seen.open and seen.losses == 2 and seen.spells[-1].open
    assert seen.since_s == run.t


def test_what_other_runs_knew_comes_before():
    prior = {WEST.name: CapacitySeen(None, 0, 0, (Spell(True, 50.0, True),), 1000.0, 3, 2)}
    run = Telling()
    seen = known(run, prior=prior).capacity[WEST.name]
    assert seen.open is None and seen.losses == 3 and len(seen.spells) == 1
    run.node(1, WEST)
    run.t += 50
    run.gone(1, "preempted")
    seen = known(run, prior=prior).capacity[WEST.name]
    assert seen.open is False and (seen.losses, seen.unnoticed, seen.node_s) == (4, 3, 1050.0)
    assert [spell.seconds for spell in seen.spells] == [50.0, 50.0]


def test_a_refusal_beside_a_node_of_ours_closes_nothing():
    book = CapacityBook()
    book.up("a", 10.0)
    refused = f.AttemptEnded(2, "no-capacity", 50.0, None, 50.0, None, "", 0.0, 0.0, 0)
    book.end("a", refused, others_up=1)
    here = {"room": 1, "room_s": 50.0, "room_node_s": 40.0, "watched_s": 40.0}
    assert book.capacity["a"] == CapacitySeen(True, 10.0, 50.0, **here)
    book.end("a", refused, others_up=0)
    assert book.capacity["a"].open is False and len(book.capacity["a"].spells) == 1


def test_room_is_what_was_left_by_a_refusal_or_a_loss_and_nodes_taken_at_once_count_once():
    book = CapacityBook()
    for n in (1, 2, 3, 4):
        book.up("a", 10.0, n)

    def end(why, gone_s, others_up):
        fact = f.AttemptEnded(1, why, 0.0, 10.0, gone_s, None, "", gone_s, 0.0, 0)
        book.end("a", fact, others_up)
        return book.capacity["a"]

    assert end("no-capacity", 60.0, 4).room == 4
    assert end("preempted", 1810.0, 3).room == 3
    seen = end("preempted", 1811.0, 2)
    assert (seen.room, seen.losses, seen.strikes) == (2, 2, 1)
    assert seen.room_node_s == 4 * 1800.0 + 3 * 1.0 and seen.watched_s == 1801.0
    # a node that leaves by itself says nothing of the room for others
    seen = end("terminated", 3000.0, 0)
    assert (seen.room, seen.room_s) == (2, 1811.0)
    # nobody looked for two hours
    assert end("no-capacity", 10200.0, 0).watched_s == 1801.0


# ---- prices --------------------------------------------------------------------------------------
def test_what_a_snapshot_costs_is_known_where_its_interval_is_derived():
    for between_s, cost in ((7200.0, 0.2 + 0.1 * 7.8), (0.0, 0.0)):
        run = trained()
        run.snapshot(2, 150, slowdown=0.1, interval_s=120.0, between_losses_s=between_s)
        found = known(run)
        assert found.lost_s == pytest.approx(60.0 + 8.0) and found.commit_s == 8.0
        assert found.snapshot_cost_s == pytest.approx(cost)


def test_prices_are_kept_as_they_change_and_outlive_their_controller():
    run = Telling()
    learner = RunEstimator(run.store, record=lambda fact: run.say(fact))
    cheaper = dataclasses.replace(WEST, usd_per_h=0.8)
    learner.known(0.0, run.book(), [WEST, EAST])
    before = learner.known(50.0, run.book(), [cheaper, EAST]).prices
    assert before[WEST.name] == ((0.0, 1.0), (50.0, 0.8)) and len(before[EAST.name]) == 1
    run.t = 700.0
    learner.known(700.0, run.book(), [cheaper, EAST])
    told = [s.fact for s in read_facts(run.store) if isinstance(s.fact, f.PricesSeen)]
    assert told == [
        f.PricesSeen({WEST.name: 1.0, EAST.name: 1.5}),
        f.PricesSeen({WEST.name: 0.8}),
    ]
    after = RunEstimator(run.store).known(800.0, run.book(), [cheaper]).prices
    assert after[WEST.name] == ((0.0, 1.0), (700.0, 0.8))
    assert learner.known(900.0, run.book(), [cheaper, EAST]).prices == before  # its own facts


def test_prices_that_other_runs_saw_are_known_from_the_beginning():
    run = Telling()
    others = {WEST.name: ((-500.0, 1.2), (-100.0, 0.9)), "gone": ((-9.0, 4.0),)}
    known = RunEstimator(run.store, prices=others).known(50.0, run.book(), [WEST, EAST]).prices
    assert known[WEST.name] == ((-500.0, 1.2), (-100.0, 0.9), (50.0, 1.0))
    assert known["gone"] == others["gone"] and known[EAST.name] == ((50.0, 1.5),)


def test_the_history_of_prices_is_bounded(monkeypatch):
    monkeypatch.setattr(learning, "MOST_OFFERS", 2)
    monkeypatch.setattr(learning, "MOST_CHANGES", 3)
    book = PriceBook()
    for i in range(9):
        book.see(100.0 * i, [dataclasses.replace(o, usd_per_h=1.0 + i) for o in (WEST, EAST, SLOW)])
    assert set(book.known) == {WEST.name, EAST.name}
    assert book.known[WEST.name] == ((600.0, 7.0), (700.0, 8.0), (800.0, 9.0))


@pytest.mark.parametrize(
    ("url", "trained", "offered", "usd"),
    [
        ("file:///run", ["aws/west"], ["aws/east"], 0.0),
        ("s3://b", ["aws/west"], ["aws/west", "aws/east"], 2.0),
        ("s3://b", ["aws/west"], ["gcp/x"], 9.0),
        ("s3://b", ["gcp/x"], ["gcp/x"], 9.0),  # it is read over the internet all the time
        ("s3://b", [], ["aws/east"], 0.0),
    ],
)
def test_what_it_costs_to_leave(url, trained, offered, usd):
    assert leave_usd(url, trained, offered, 100 * 10**9) == pytest.approx(usd)


# ---- deadline and work ---------------------------------------------------------------------------


def test_work_left():
    assert Estimates().left(0) is None
    assert Estimates(work=10.0).left(0) == 10.0
    assert Estimates(work=10.0, total_steps=10, uncommitted_steps=2).left(3) == 5.0


@pytest.mark.parametrize(
    ("now", "news"),
    [
        (Wait(1.0, "later", 1000.0, 5.0), False),
        (Wait(9.0, "later", 1800.0, 1.0), False),
        (Wait(1.0, "later", 2000.0, 5.0), True),
        (Wait(1.0, "later"), True),
        (Wait(1.0, "full", 1000.0), True),
    ],
)
def test_a_wait_is_told_again_when_more_is_to_be_said(now, news):
    assert now.is_news(Wait(1.0, "later", 1000.0, 5.0)) is news
    assert now.is_news(None) and not Wait(1.0, "later").is_news(Wait(2.0, "later"))
