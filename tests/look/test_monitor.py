"""The live view: a fold of facts that does not mind their order, drawn on terminals and told in
lines elsewhere."""

import io
import json
import random
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from harness.bucket.archive import read_facts
from harness.bucket.controller_lease import LeaseWatch
from harness.bucket.journal import Follower, Journal
from harness.core import facts as f
from harness.ledger.run_state import RunState
from harness.look.reports.live_view import (
    LiveView,
    decision_line,
    describe,
    follow,
    number_rows,
    progress_line,
    render,
    split_line,
    status,
)
from storage.errors import NotFound, StoreUnavailable
from storage.stores.folder_store import MemoryStore
from support.histories import T0, TOTAL, whole_run

STORY = whole_run()
FACTS = read_facts(STORY.store)


def state_at(seconds: float) -> RunState:
    return folded([s for s in FACTS if s.t <= T0 + seconds])


def folded(stamped) -> RunState:
    state = RunState()
    for s in stamped:
        state.add(s)
    return state


def drawn(state, now, **more):
    out = io.StringIO()
    Console(file=out, width=160, force_terminal=False).print(render(state, now, **more))
    return out.getvalue()


def seen(state: RunState, now: float):
    """All that anybody can see of a state."""
    nodes = [
        (n.name, state.node_state(n, now), n.bill(now).seconds, state.ranks(n.member))
        for n in state.shown_nodes(now)
    ]
    found = (
        state.run_state,
        state.step,
        state.epoch,
        state.world,
        state.rates(),
        state.spent(now),
        state.over,
    )
    return (drawn(state, now), nodes, found, state.committed, state.refused)


# ---- the fold ------------------------------------------------------------------------------------
def test_it_knows_who_trains_where():
    state = state_at(90)
    assert (state.run_state, state.epoch, state.world, state.accumulation) == ("training", 2, 3, 6)
    assert 33 <= state.step <= 51
    assert state.total == TOTAL
    assert [(n.name, state.node_state(n, T0 + 90)[1]) for n in state.shown_nodes(T0 + 90)] == [
        (x, "training") for x in ("1", "2", "4")
    ]
    assert [state.ranks(n.member) for n in state.shown_nodes(T0 + 90)] == [
        range(0, 1),
        range(1, 2),
        range(2, 3),
    ]
    rates = state.rates()
    assert rates["steps_per_s"] == pytest.approx(1 / 0.81, rel=0.15)
    assert rates["tokens_per_s"] == pytest.approx(128 * rates["samples_per_s"])
    assert rates["mfu"] == pytest.approx(0.31)


def test_a_notice_counts_down():
    notice = next(s for s in FACTS if isinstance(s.fact, f.NoticeSeen))
    state = folded([s for s in FACTS if s.t <= notice.t])
    node = state.nodes[state.attempt_of[notice.fact.member]]
    assert state.node_state(node, notice.t + 20) == ("bold yellow", "notice, 100 s left")
    state.add(
        f.Stamped(notice.t + 21, "x", f.NoticeCancelled(notice.fact.member, notice.fact.id))
    )
    assert state.node_state(node, notice.t + 22)[1] == "training"


def test_a_rewind_lowers_the_step():
    resumed = next(s for s in FACTS if isinstance(s.fact, f.SessionStarted) and s.fact.epoch == 4)
    before = folded([s for s in FACTS if s.t < resumed.t])
    after = folded([s for s in FACTS if s.t <= resumed.t])
    assert (before.step, after.step) == (67, 60)
    assert after.snapshot[1].step == 60
    assert folded([s for s in FACTS if s.t <= resumed.t + 6]).step in (61, 62, 63)


def test_a_snapshot_whose_writer_died_unheard_is_known_from_the_resume():
    state = state_at(90)
    assert state.committed[0] == 32
    assert state.committed[1] is not None
    state.add(
        f.Stamped(
            T0 + 91,
            "w",
            f.SessionStarted(3, 1, 47, 2, TOTAL, 64, 4, (16,), "fast", "ddp", "cpu", 0.1),
        )
    )
    assert state.committed == (47, None)
    assert ("snapshot", "step 47") in number_rows(state, T0 + 92)


def test_money_is_that_of_the_bills():
    paid, on_demand = state_at(1e6).spent(STORY.t)
    assert paid == pytest.approx(STORY.spent)
    assert on_demand > paid
    alive, _ = state_at(60).spent(T0 + 60)
    # nodes 1 and 2, up at 20 and 29 s
    assert alive == pytest.approx((40 + 31) * 1.10 / 3600, rel=0.01)


def test_an_outage_and_the_end():
    assert state_at(200).run_state == "waiting for capacity"
    assert state_at(200).step == 75
    done = state_at(1e6)
    assert (done.run_state, done.over, done.step) == ("done", True, TOTAL)
    done.add(f.Stamped(STORY.t + 100, "controller-2", f.RunAsked("t", 1, 1, "p")))
    assert not done.over  # launched again


def test_a_node_that_nobody_of_ours_launched_costs_money_too():
    member = "m0000-ab"
    found = f.NodeFound(
        *(member, "aws", "us-east-2", "us-east-2a", "p5.48xlarge", "H100:8", True),
        usd_per_h=36.0,
        on_demand_usd_per_h=72.0,
        launched_s=T0 - 90,
    )
    facts = [
        f.Stamped(T0, "w", f.AgentStarted(member, 0, "h", 8, "", 1)),
        f.Stamped(T0 + 1, "w", found),
    ]
    for order in (facts, facts[::-1]):
        state = folded(order)
        assert state.spent(T0 + 10) == (1.0, 2.0)
        assert "aws/us-east-2/us-east-2a/p5.48xlarge" in drawn(state, T0 + 10)
        state.add(f.Stamped(T0 + 20, "w", f.AgentEnded(member, 0, "finished")))
        assert state.spent(T0 + 500)[0] == pytest.approx(1.1)
        state.add(f.Stamped(T0 + 600, "cli", f.NodeBilled(member, T0 - 100, T0 + 100)))
        assert state.spent(T0 + 900)[0] == pytest.approx(2.0)


def test_a_run_without_a_controller_ends_with_its_session():
    member = "m0000-ab"
    state = folded(
        f.Stamped(T0 + i, "w", fact)
        for i, fact in enumerate(
            [
                f.AgentStarted(member, 0, "h", 4, "", 1), f.EpochStarted(1, (member,), 4, "start"),
                f.SessionStarted(1, 4, 0, 0, 10, 8, 1, (2, 2, 2, 2), "fast", "ddp", "cpu", 0.1),
            ]
        )
    )  # fmt: skip
    assert state.run_state == "training"
    assert state.ranks(member) == range(0, 4)
    assert "no controller" not in drawn(state, T0 + 5, controller=False)
    state.add(f.Stamped(T0 + 9, "w", f.SessionEnded(1, 10, "finished")))
    assert (state.run_state, state.over) == ("finished", True)


def test_who_is_left_over_is_a_warm_spare():
    """A world of whole copies has no room for it now."""
    facts = [f.AgentStarted(f"m000{i}-a", i, "h", 1, "", 1) for i in (1, 2, 3)]
    facts.append(f.EpochStarted(1, ("m0001-a", "m0002-a"), 2, "start"))
    session = f.SessionStarted(1, 2, 0, 0, 9, 8, 4)
    for told, words in ((facts, "ready"), ([*facts, session], "warm spare")):
        state = folded(f.Stamped(T0 + i, "w", fact) for i, fact in enumerate(told))
        assert state.node_state(state.nodes["3"], T0 + 9)[1] == words


@given(st.integers(0, 10**9), st.floats(20, 370))
@settings(max_examples=40, deadline=None)
def test_order_does_not_matter(seed, until):
    facts = [s for s in FACTS if s.t <= T0 + until]
    # Seats flush at their own pace: each fact is seen up to two seconds late, but one writer's stay
    # in order (as segments do).
    rng = random.Random(seed)
    delay = {w: rng.uniform(0, 2) for w in {s.writer for s in facts}}
    shuffled = sorted(facts, key=lambda s: s.t + delay[s.writer])
    assert seen(folded(shuffled), T0 + until) == seen(folded(facts), T0 + until)


def test_the_decision_and_its_reason_are_shown_waiting_included():
    state = state_at(200)
    assert decision_line(state, T0 + 200).startswith("wait: every offer is full (")
    assert "decided wait: every offer is full" in drawn(state, T0 + 200)
    state.add(f.Stamped(T0 + 150, "c", f.Decided("launch", "older")))  # comes late
    assert state.decided[1].decision == "wait"
    assert decision_line(state_at(1e6), T0 + 1000) == ""  # it is over


def test_where_a_steps_time_goes_is_one_line():
    state = state_at(90)
    assert split_line(state) == ""  # nobody told
    split = dict.fromkeys(f.PHASES, 0.1) | {"backward": 0.3, "data": float("nan")}
    own = (0.5, 0.6, 0.75)
    state.add(f.Stamped(T0 + 91, "w", f.StepsTimed(2, 40, 44, split, own, (0, 2))))
    line = split_line(state)
    assert line.startswith("step 0.9 s: 33 % backward, 11 % ") and "data" not in line
    assert line.endswith("; slowest rank 2 (+25 %)") and line in drawn(state, T0 + 92)
    state.add(f.Stamped(T0 + 93, "w", f.StepsTimed(1, 60, 64, {"data": 9.0})))  # of an old world
    assert split_line(state) == line


def test_dollars_per_million_tokens_are_of_the_steps_that_count():
    state, now = state_at(1e6), STORY.t
    wanted = state.spent(now)[0] / (TOTAL * 64 * 128) * 1e6
    assert state.usd_per_million_tokens(now) == pytest.approx(wanted)
    assert ("per M tokens", f"${wanted:.3f}") in number_rows(state, now)
    assert RunState().usd_per_million_tokens(now) is None


def test_alerts_that_fire_are_shown_the_worst_last():
    store, clock = MemoryStore("memory://alerts", {}), Ticker()
    journal = Journal(store, "agent-m1", clock.now)
    journal.record(f.HealthSeen("m1", "0", "xid 79", "it has fallen off the bus", "drain"))
    journal.record(f.NoticeSeen("m1", "aws", "kill", "n-1", T0 + 120.0))
    journal.flush()
    out = io.StringIO()
    view = LiveView(store, Console(file=out, width=160, force_terminal=False), clock.now)
    view.read()
    assert [a.rule for a in view.firing()] == ["notice-seen", "gpu-health"]
    view.console.print(view.screen())
    assert "xid 79" in out.getvalue() and "info node m1 will be preempted" in out.getvalue()
    clock.t += 10_000
    assert view.firing() == []


def test_every_fact_can_be_described():
    for s in FACTS:
        told = describe(s.fact, RunState())
        assert told is None or (told[1] and isinstance(told[0], str))


def test_terminal_codes_of_others_are_not_passed_on():
    state = folded(
        [
            f.Stamped(
                T0, "a", f.WorkerFailed("m1", 1, 0, 1, "Oops", "\x1b[2J\x07boom [bold]x[/]", "")
            )
        ]
    )
    text = drawn(state, T0)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "boom [bold]x[/]" in text


# ---- following -----------------------------------------------------------------------------------
class Ticker:
    """A clock that sleeping moves; at given times something happens."""

    def __init__(self, at=T0):
        self.t, self.todo = at, []

    def now(self):
        return self.t

    def sleep(self, seconds):
        self.t += seconds
        while self.todo and self.todo[0][0] <= self.t:
            self.todo.pop(0)[1]()


def replay(store, clock):
    """The story written into `store` as the clock goes on."""
    journals = {}

    def say(s):
        journal = journals.setdefault(s.writer, Journal(store, s.writer, lambda: journal.at))
        journal.at = s.t
        journal.record(s.fact)
        journal.flush()

    clock.todo += [(s.t, lambda s=s: say(s)) for s in FACTS]


def test_without_a_terminal_it_is_plain_lines():
    store, clock, out = MemoryStore("memory://replay", {}), Ticker(), io.StringIO()
    replay(store, clock)
    state = follow(
        store,
        lambda: clock.t > T0 + 2000,
        Console(file=out, width=60),
        now=clock.now,
        sleep=clock.sleep,
    )
    assert state.over
    assert clock.t < T0 + 400
    lines = out.getvalue().splitlines()
    assert all(c.isprintable() for line in lines for c in line)
    assert all(line[2] == line[5] == ":" for line in lines), "one event, one line; never wrapped"
    assert sum("snapshot of step" in line and "committed" in line for line in lines) == 14
    assert any("node 1: preempted (killed)" in line for line in lines)
    assert not any("no-capacity" in line or "asking" in line for line in lines)
    assert any(
        "waiting for capacity  step 75/120" in line and "no capacity 2 times" in line for line in lines
    )
    assert any("generation 2 (grow): 3 ranks on 3 nodes (1 2 4)" in line for line in lines)
    progress = [line for line in lines if f"/{TOTAL}" in line]
    assert 15 < len(progress) < 80  # every few seconds
    assert any(
        "loss" in line and "tokens/s" in line and "left" in line for line in progress
    )
    assert any(
        "loss" in line and "spent $" in line and "simulated" in line
        for line in progress
    )
    assert max(map(len, progress)) <= 80
    stamps = [line[:8] for line in lines if not re.search(r"  step \d", line)]
    assert stamps == sorted(stamps), "events are told in the order of their times"
    resumed = [line for line in lines if "resumed from step" in line]
    assert any(" 0 steps lost" in line for line in resumed)
    assert any(re.search(r"[1-9]\d* steps? lost", line) for line in resumed)


def test_on_a_terminal_it_draws_and_leaves_the_last_picture():
    store, clock, out = MemoryStore("memory://drawn", {}), Ticker(), io.StringIO()
    replay(store, clock)
    console = Console(file=out, width=140, height=40, force_terminal=True, color_system=None)
    follow(
        store, lambda: clock.t > T0 + 2000, console, now=clock.now, sleep=clock.sleep, poll_s=20.0
    )
    text = out.getvalue()
    assert "\x1b[" in text
    assert "training" in text
    assert text.rstrip().endswith(("run done: finished at step 120", "\x1b[?25h"))


def test_once_prints_one_picture():
    out = io.StringIO()
    follow(STORY.store, lambda: True, Console(file=out, width=120), now=lambda: STORY.t)
    assert out.getvalue().count("step 120 of 120") == 1
    assert "done" in out.getvalue()


def test_a_finished_run_ends_the_view_unless_it_is_being_launched_again():
    clock, out = Ticker(STORY.t), io.StringIO()
    follow(
        STORY.store, lambda: False, Console(file=out, width=120), now=clock.now, sleep=clock.sleep
    )
    assert clock.t == STORY.t
    assert "earlier events" in out.getvalue()
    stop_s = clock.t + 30
    follow(
        STORY.store,
        lambda: clock.t > stop_s,
        Console(file=out),
        until_ended=False,
        now=clock.now,
        sleep=clock.sleep,
    )
    assert clock.t > stop_s


class Flaky:
    """A store whose every third read is not answered."""

    def __init__(self, inner):
        self.inner, self.url, self.calls = inner, inner.url, 0

    def get(self, key, start=None, end=None):
        self.calls += 1
        if self.calls % 3 == 0:
            raise StoreUnavailable("slow down")
        return self.inner.get(key, start, end)

    def list(self, prefix):
        return self.inner.list(prefix)


def test_a_silent_bucket_loses_no_fact():
    store = Flaky(STORY.store)
    follower, found = Follower(store), []
    for _ in range(5000):
        try:
            found += follower.poll()
        except StoreUnavailable:
            continue
        break
    assert sorted(map(repr, found)) == sorted(map(repr, FACTS))
    view = LiveView(Flaky(STORY.store), Console(quiet=True), now=lambda: STORY.t)
    for _ in range(2000):
        view.read()
    assert view.state.step == TOTAL


def test_a_long_silence_is_shown():
    class Silent(Flaky):
        def list(self, prefix):
            raise StoreUnavailable("nothing")

    clock = Ticker()
    view = LiveView(Silent(STORY.store), Console(quiet=True), now=clock.now)
    view.read()
    clock.t += 9
    view.read()
    out = io.StringIO()
    Console(file=out, width=100).print(view.screen())
    assert "has not answered for 9 s" in out.getvalue()


# ---- status and the controller -------------------------------------------------------------------
def test_status_is_json():
    body = status(STORY.store, now=lambda: STORY.t)
    json.dumps(body, allow_nan=False)
    assert (body["state"], body["step"], body["total_steps"], body["over"]) == (
        "done",
        TOTAL,
        TOTAL,
        True,
    )
    assert body["snapshot"]["step"] == TOTAL
    assert body["controller_alive"] is False
    assert body["spent_usd"] == pytest.approx(STORY.spent)
    assert [n["name"] for n in body["nodes"]] == ["7", "8"]


def test_status_in_the_middle():
    store, clock = MemoryStore("memory://middle", {}), Ticker()
    replay(store, clock)
    clock.sleep(90)
    store.create("lease/000001.json", b'{"holder":"h","ttl_s":5.0}')

    def sleep(seconds):
        clock.t += seconds
        store.put("lease/000001.beat", str(clock.t).encode())

    sleep(0)
    body = status(store, now=clock.now, sleep=sleep)
    assert (body["state"], body["world"], body["accumulation"], body["controller_alive"]) == (
        "training",
        3,
        6,
        True,
    )
    assert [n["ranks"] for n in body["nodes"]] == [[0], [1], [2]]
    assert body["rates"]["tokens_per_s"] > 0


def test_the_heart_beat_tells():
    store = MemoryStore("memory://lease", {})
    watch = LeaseWatch(store)
    assert watch.look(0) is False  # never led
    store.create("lease/000001.json", b"{}")
    store.put("lease/000001.beat", b"1")
    assert watch.look(1) is None  # may be old
    store.put("lease/000001.beat", b"2")
    assert watch.look(2) is True
    assert watch.look(8) is True
    assert watch.look(11) is False
    store.create("lease/000002.json", b"{}")
    with pytest.raises(NotFound):
        store.get("lease/000002.beat")
    assert watch.look(12) is True  # somebody took over
    store.put("lease/000002.beat", b"released")
    assert watch.look(13) is False


def test_the_progress_line_fits_any_state():
    assert progress_line(RunState(), T0) == "waiting for capacity  step 0"
    assert "step 120/120" in progress_line(state_at(1e6), STORY.t)


def test_an_interval_is_said_as_long_as_it_holds():
    state = state_at(90)
    ref, last = state.snapshot
    state.snapshot = ref, replace(last, interval_s=10.0)
    _, taken_s = state.committed
    assert "(19 s ago, every 10 s)" in dict(number_rows(state, taken_s + 19))["snapshot"]
    assert "(21 s ago)" in dict(number_rows(state, taken_s + 21))["snapshot"]
