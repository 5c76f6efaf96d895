"""The ledger adds up to the nanosecond, whatever the timeline, and tells the story of a known
one."""

from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.bucket.archive import read_facts
from harness.bucket.journal import read_records
from harness.core import facts as f
from harness.core import step_records as rec
from harness.ledger.bill import BUCKETS, NANO, PRECEDENCE, apportion, ns, paint
from harness.ledger.ledger import Ledger
from storage.snapshots.snapshots import Snapshots
from support.histories import EAST, IDENTITY, T0, TOTAL, whole_run


def ledger_of(h, until=None):
    """The ledger of a history, or of its beginning as seen at `until`."""
    named = Snapshots(h.store).latest().data["samples"]
    records = read_records(h.store, named["key"], named["head"], rec.genesis(IDENTITY))
    stamped = read_facts(h.store)
    if until is not None:
        stamped = [s for s in stamped if s.t <= until]
        committed = max(
            (s.fact.step for s in stamped if isinstance(s.fact, f.SnapshotCommitted)), default=0
        )
        records = [r for r in records if r.step <= committed and r.t <= until]
    return Ledger.of(stamped, records, h.t if until is None else until)


@pytest.fixture(scope="module")
def history():
    return whole_run()


@pytest.fixture(scope="module")
def ledger(history):
    return ledger_of(history)


def check(ledger: Ledger) -> None:
    """What holds for every ledger."""
    for a in ledger.attempts:
        if a.up_s is None:
            assert a.segments == ()
            assert a.billed_ns == 0
            continue
        at = ns(a.up_s)
        for begin, end, bucket in a.segments:
            assert begin == at, "a gap or an overlap"
            assert end > begin
            assert bucket in BUCKETS
            at = end
        if a.gone_s is not None:
            assert at == max(ns(a.up_s), ns(a.gone_s))
            assert a.billed_ns == max(0, ns(a.gone_s) - ns(a.up_s))
        assert all(v >= 0 for v in a.ns.values())
        assert all(v >= 0 for v in a.nusd.values())
        assert a.billed_ns == sum(a.ns[b] for b in BUCKETS) == sum(e - b for b, e, _ in a.segments)
        for b in BUCKETS:  # money follows time
            if a.billed_ns:
                assert abs(a.nusd[b] - a.billed_nusd * a.ns[b] / a.billed_ns) <= 1
    for b in BUCKETS:
        assert ledger.ns[b] == sum(a.ns[b] for a in ledger.attempts)
        assert ledger.nusd[b] == sum(a.nusd[b] for a in ledger.attempts)
    assert 0 <= ledger.goodput <= 1


# ---- the known story -----------------------------------------------------------------------------
def test_every_second_of_the_story_is_counted(history, ledger):
    check(ledger)
    ended = {
        s.fact.attempt: s.fact
        for s in read_facts(history.store)
        if isinstance(s.fact, f.AttemptEnded)
    }
    assert {a.attempt for a in ledger.attempts} == set(ended) == set(range(1, 9))
    for a in ledger.attempts:
        assert a.billed_s == pytest.approx(ended[a.attempt].billed_s, abs=1e-6)
        assert a.billed_nusd == round(ended[a.attempt].usd * NANO)
    assert ledger.usd == pytest.approx(history.spent, abs=1e-8)


def test_useful_time_is_that_of_the_committed_records(history, ledger):
    named = Snapshots(history.store).latest().data["samples"]
    records = read_records(history.store, named["key"], named["head"], rec.genesis(IDENTITY))
    assert len(records) == TOTAL
    assert ledger.ns["useful"] / NANO == pytest.approx(
        sum(r.dt * r.world for r in records), abs=1e-3
    )
    worlds = {e.epoch: e.world for e in ledger.epochs}
    committed = [
        s.fact for s in read_facts(history.store) if isinstance(s.fact, f.SnapshotCommitted)
    ]
    assert ledger.ns["snapshot"] / NANO == pytest.approx(
        0.05 * sum(worlds[c.epoch] for c in committed), abs=1e-3
    )


def test_the_epochs_tell_why_they_ended(ledger):
    rows = [
        (e.epoch, e.world, e.accumulation, e.first_step, e.last_step, e.steps_lost, e.ended)
        for e in ledger.epochs
    ]
    assert rows == [
        (1, 2, 8, 1, 32, 0, "node 4 joined"),
        (2, 3, 6, 33, 51, 0, "notice: node 2 left"),
        (3, 2, 8, 52, 67, 7, "node 1 lost without notice"),
        (4, 1, 16, 61, 75, 0, "notice: node 4 left"),
        (5, 2, 8, 76, TOTAL, 0, "finished"),
    ]
    assert ledger.steps_lost == 7
    assert ledger.epochs[0].gap_s is None
    for before, after in zip(ledger.epochs, ledger.epochs[1:], strict=False):
        assert after.gap_s == pytest.approx(after.first_s - before.last_s, abs=1e-6)
        assert before.lost_s >= after.gap_s - 1e-6  # and what must be redone
    third = ledger.epochs[2]
    assert third.lost_s == pytest.approx(redone_steps(ledger) + ledger.epochs[3].gap_s, abs=1e-6)


def redone_steps(ledger):
    """Seconds of steps 61 to 67, which were done and lost."""
    last = ns(ledger.epochs[2].last_s)
    killed = next(a for a in ledger.attempts if a.attempt == 1)
    return (
        sum(
            min(end, last) - begin
            for begin, end, bucket in killed.segments
            if bucket == "redone" and begin < last
        )
        / NANO
    )


def test_a_death_before_the_last_flush_is_work_lost_until_it_died(history, ledger):
    killed = next(a for a in ledger.attempts if a.attempt == 1)
    assert killed.segments[-1][2] == "redone"
    assert killed.segments[-1][1] == ns(killed.gone_s)
    survivor = next(a for a in ledger.attempts if a.attempt == 4)
    after = next(bucket for begin, _, bucket in survivor.segments if begin == ns(killed.gone_s))
    assert after == "reform"


def test_notices_are_committed_in_time(ledger):
    assert [(n.attempt, n.kind, n.grace_s, n.step, n.in_time) for n in ledger.notices] == [
        ("2", "kill", pytest.approx(120.0), 51, True),
        ("4", "kill", pytest.approx(120.0), 75, True),
    ]
    assert all(0.8 < n.commit_s < 4 for n in ledger.notices)


def test_costs_against_on_demand(ledger):
    cost = ledger.cost
    assert cost.known
    assert cost.spot_usd == pytest.approx(ledger.usd)
    assert cost.on_demand_usd == pytest.approx(ledger.billed_s / 3600 * 1.861)
    assert cost.saved == pytest.approx(1 - cost.spot_usd / cost.on_demand_usd)
    assert ledger.ns["useful"] / NANO / 3600 * 1.861 < cost.undisturbed_usd < cost.on_demand_usd


@given(st.floats(0, 400))
@settings(max_examples=60, deadline=None)
def test_it_adds_up_at_any_moment(after):
    h = STORY
    check(ledger_of(h, T0 + after))


STORY = whole_run()


def test_steps_after_the_newest_snapshot_are_not_lost_while_their_world_lives(history):
    at = next(
        s.t
        for s in read_facts(history.store)
        if isinstance(s.fact, f.StepDone) and s.fact.step == 27
    )
    live = ledger_of(history, at)
    assert live.steps_lost == 0
    assert live.ns["redone"] == 0
    assert live.epochs[-1].ended == ""


# ---- small worlds --------------------------------------------------------------------------------
def stamp(*facts):
    return [f.Stamped(t, "w", fact) for t, fact in facts]


OFFER = asdict(EAST)


def test_a_node_whose_agent_never_began_was_provisioned():
    found = Ledger.of(
        stamp(
            (0.0, f.AttemptIntended(1, OFFER)),
            (60.0, f.AttemptEnded(1, "preempted", 0.0, 10.0, 60.0, None, "", 50.0, 0.5)),
        ),
        [],
        100.0,
    )
    assert found.ns["provision"] == 50 * NANO == found.billed_ns
    assert found.nusd["provision"] == NANO // 2


def test_a_node_is_idle_while_others_train():
    facts = stamp(
        (0.0, f.AttemptUp(1, 0.0)),
        (0.0, f.AttemptUp(2, 0.0)),
        (1.0, f.AgentStarted("m1", 1, "h", 1, "", 1)),
        (1.0, f.AgentStarted("m2", 2, "h", 1, "", 1)),
        (2.0, f.EpochStarted(1, ("m1", "m2"), 2, "start")),
        (20.0, f.StepDone(1, 1, 1.0, 10.0, 10.0, 1, 0)),
        (21.0, f.SessionEnded(1, 1, "resize")),
        (22.0, f.EpochStarted(2, ("m1",), 1, "shrink")),
        (40.0, f.StepDone(2, 2, 1.0, 30.0, 10.0, 1, 0)),
        (41.0, f.SessionEnded(2, 2, "resize")),
        (42.0, f.EpochStarted(3, ("m1", "m2"), 2, "grow")),
        (60.0, f.StepDone(3, 3, 1.0, 50.0, 10.0, 1, 0)),
        (61.0, f.SessionEnded(3, 3, "finished")),
        (70.0, f.AttemptEnded(1, "finished", 0.0, 0.0, 70.0, 0, "", 70.0, 0.0)),
        (70.0, f.AttemptEnded(2, "finished", 0.0, 0.0, 70.0, 0, "", 70.0, 0.0)),
    )
    records = [
        rec.StepRecord(i, i, 1, (1,), 1, "", 1.0, 1.0, 0.0, 20.0 * i, 10.0) for i in (1, 2, 3)
    ]
    found = Ledger.of(facts, records, 70.0)
    check(found)
    one, two = ({b: v // NANO for b, v in a.ns.items() if v} for a in found.attempts)
    begin = {"provision": 1, "start": 9}
    assert one == {**begin, "useful": 30, "reform": 20, "drain": 10}
    assert two == {**begin, "useful": 20, "reform": 20, "idle": 10, "drain": 10}


def test_a_snapshots_stall_is_taken_from_the_step_that_it_overlaps():
    facts = stamp(
        (0.0, f.AttemptUp(1, 0.0)),
        (1.0, f.AgentStarted("m1", 1, "h", 1, "", 1)),
        (2.0, f.EpochStarted(1, ("m1",), 1, "start")),
        (20.0, f.SnapshotCommitted(1, 1, 10, 2.0, 5.0, "interval", 15.0)),
    )
    found = Ledger.of(
        facts, [rec.StepRecord(1, 1, 1, (1,), 1, "", 1.0, 1.0, 0.0, 20.0, 10.0)], 20.0
    )
    assert {b: v // NANO for b, v in found.ns.items() if v} == {
        "provision": 1,
        "start": 9,
        "useful": 8,
        "snapshot": 2,
    }


def test_nodes_without_a_controller_are_counted_until_their_last_sign_of_life():
    facts = stamp(
        (0.0, f.AgentStarted("m0000-aa", 0, "h", 1, "", 1)),
        (5.0, f.EpochStarted(1, ("m0000-aa",), 1, "start")),
        (20.0, f.StepDone(1, 1, 1.0, 10.0, 10.0, 1, 0)),
        (25.0, f.SessionEnded(1, 1, "finished")),
        (30.0, f.AgentEnded("m0000-aa", 0, "finished")),
    )
    found = Ledger.of(
        facts, [rec.StepRecord(1, 1, 1, (1,), 1, "", 1.0, 1.0, 0.0, 20.0, 10.0)], 1000.0
    )
    check(found)
    assert [(a.name, a.billed_s, a.end) for a in found.attempts] == [("m0000-aa", 30.0, "finished")]
    assert found.goodput == pytest.approx(1 / 3)


def self_launched(*more):
    """A node of a plain `sky launch`: launched at -60, set up from -40 on; its agent lives from 0
    to 30."""
    found = f.NodeFound(
        *("m0000-aa", "aws", "us-east-1", "us-east-1a", "p5.48xlarge", "H100:8", True),
        usd_per_h=18.0, on_demand_usd_per_h=72.0, launched_s=-60.0, setup_s=-40.0, cluster="c",
    )  # fmt: skip
    return stamp(
        (0.0, f.AgentStarted("m0000-aa", 0, "h", 1, "", 1)),
        (1.0, found),
        (5.0, f.EpochStarted(1, ("m0000-aa",), 1, "start")),
        (20.0, f.StepDone(1, 1, 1.0, 10.0, 10.0, 1, 0)),
        (25.0, f.SessionEnded(1, 1, "finished")),
        (30.0, f.AgentEnded("m0000-aa", 0, "finished")),
        *more,
    )


STEP = [rec.StepRecord(1, 1, 1, (1,), 1, "", 1.0, 1.0, 0.0, 20.0, 10.0)]


def test_a_node_that_nobody_of_ours_launched_has_a_bill():
    found = Ledger.of(self_launched(), STEP, 1000.0)
    check(found)
    (row,) = found.attempts
    assert (row.offer, row.spot) == ("aws/us-east-1/us-east-1a/p5.48xlarge", True)
    assert {b: v // NANO for b, v in row.ns.items() if v} == {
        "provision": 20, "setup": 40, "start": 10, "useful": 10, "drain": 10,
    }  # fmt: skip
    assert row.billed_nusd == NANO * 90 * 18 // 3600
    assert found.cost.known
    assert found.cost.saved == pytest.approx(0.75)


def test_skypilot_knows_how_long_a_node_lived_after_its_agent():
    bill = f.NodeBilled("m0000-aa", -61.0, 50.0, 17.0, "c")
    found = Ledger.of(self_launched((900.0, bill)), STEP, 1000.0)
    check(found)
    assert found.ns["drained"] == 20 * NANO
    assert found.billed_ns == 111 * NANO
    assert found.attempts[0].usd_per_h == 18.0  # the agent's word, where there is one
    still = f.NodeBilled("m0000-aa", -61.0, None, 17.0, "c")
    there = Ledger.of(self_launched((900.0, still)), STEP, 1000.0)
    check(there)
    assert there.ns["drained"] == (900 - 30) * NANO  # until that was told


def test_a_node_that_trains_is_there_until_it_is_silent():
    facts = self_launched()[:4]
    now = Ledger.of(facts, STEP, 100.0).attempts[0]
    assert (now.gone_s, now.billed_s) == (None, 160.0)
    later = Ledger.of(facts, STEP, 1000.0).attempts[0]
    assert (later.gone_s, later.billed_s) == (20.0, 80.0)


def test_agents_that_followed_each_other_on_one_machine_share_its_bill():
    first = self_launched()[1].fact
    facts = self_launched(
        (100.0, f.AgentStarted("m0000-bb", 0, "h", 1, "", 2)),
        (101.0, f.NodeFound(**{**asdict(first), "member": "m0000-bb"})),
        (130.0, f.AgentEnded("m0000-bb", 0, "finished")),
    )
    found = Ledger.of(facts, STEP, 1000.0)
    check(found)
    assert [a.billed_s for a in found.attempts] == [160.0, 30.0]
    assert found.ns["drained"] == 70 * NANO  # between the two


def test_time_that_the_typical_rank_waits_for_the_slowest_is_not_useful():
    told = f.StepsTimed(1, 1, 1, {"forward": 1.0}, own_s=(5.0, 6.0, 9.0), own_ranks=(0, 1))
    found = Ledger.of(self_launched((26.0, told)), STEP, 1000.0)
    check(found)
    assert (found.ns["straggle"], found.ns["useful"]) == (3 * NANO, 7 * NANO)
    plain = Ledger.of(self_launched(), STEP, 1000.0)
    assert found.cost.undisturbed_usd == pytest.approx(plain.cost.undisturbed_usd)


def test_the_last_word_on_an_attempt_counts():
    lost = f.AttemptEnded(1, "lost", 0.0, None, 5.0, None, "never launched", 0.0, 0.0)
    bill = f.AttemptEnded(1, "terminated", 0.0, 3.0, 13.0, None, "terminated", 10.0, 0.25)
    found = Ledger.of(stamp((5.0, lost), (14.0, bill)), [], 20.0)
    assert found.billed_s == 10.0
    assert found.usd == pytest.approx(0.25)


def test_a_notice_that_came_too_late():
    facts = stamp(
        (0.0, f.AttemptUp(1, 0.0)),
        (1.0, f.AgentStarted("m1", 1, "h", 1, "", 1)),
        (2.0, f.EpochStarted(1, ("m1",), 1, "start")),
        (20.0, f.NoticeSeen("m1", "gcp", "kill", "a", 21.0)),
        (20.5, f.NoticeSeen("m1", "signal", "kill", "SIGTERM", 50.0)),
        (29.0, f.SnapshotCommitted(1, 1, 10, 2.0, 5.0, "notice", 24.0)),
    )
    found = Ledger.of(facts, [], 30.0)
    assert [(n.commit_s, n.grace_s, n.in_time) for n in found.notices] == [(9.0, 1.0, False)]


# ---- any timeline --------------------------------------------------------------------------------
TIME = st.floats(0, 1000, allow_nan=False)
ATTEMPT = st.integers(1, 4)
EPOCH = st.integers(1, 5)
STRANGER = st.sampled_from(["m0000-aa", "m0000-bb", "m0000-cc"])
MEMBER = ATTEMPT.map(lambda a: f"m{a:04d}-ff") | STRANGER
FACT = st.one_of(
    st.builds(f.AttemptIntended, ATTEMPT, st.just(OFFER)),
    st.builds(f.AttemptUp, ATTEMPT, TIME),
    st.builds(
        lambda a, x, y, usd, end: f.AttemptEnded(
            a, end, x, min(x, y), max(x, y), None, "", abs(x - y), usd
        ),
        ATTEMPT,
        TIME,
        TIME,
        st.floats(0, 100),
        st.sampled_from(["preempted", "drained", "finished"]),
    ),
    st.builds(lambda a: f.AgentStarted(f"m{a:04d}-ff", a, "h", 1, "", 1), ATTEMPT),
    st.builds(f.AgentEnded, MEMBER, st.integers(0, 40), st.text(max_size=3)),
    st.builds(
        f.NoticeSeen, MEMBER, st.just("aws"), st.just("kill"), st.just("i"), st.none() | TIME
    ),
    st.builds(
        f.EpochStarted,
        EPOCH,
        st.lists(MEMBER, unique=True, max_size=4).map(tuple),
        st.integers(1, 4),
        st.just("start"),
    ),
    st.builds(
        f.EpochLeft,
        EPOCH,
        MEMBER,
        st.sampled_from(["finished", "drained", "resize", "peer-lost", "killed"]),
    ),
    st.builds(
        f.NodeFound,
        STRANGER,
        usd_per_h=st.none() | st.floats(0, 100),
        launched_s=st.none() | TIME,
        setup_s=st.none() | TIME,
    ),
    st.builds(lambda m: f.AgentStarted(m, 0, "h", 1, "", 1), STRANGER),
    st.builds(f.NodeBilled, STRANGER, TIME, st.none() | TIME, st.none() | st.floats(0, 100)),
    st.builds(
        lambda epoch, step, own: f.StepsTimed(epoch, step, step + 3, {}, tuple(sorted(own))),
        EPOCH,
        st.integers(1, 20),
        st.lists(st.floats(0, 9), min_size=3, max_size=3),
    ),
    st.builds(f.SessionEnded, EPOCH, st.integers(0, 20), st.sampled_from(["finished", "resize"])),
    st.builds(
        f.StepDone,
        st.integers(1, 20),
        EPOCH,
        st.floats(),
        TIME,
        st.floats(0, 50),
        st.just(1),
        st.just(1),
    ),
    st.builds(
        f.SnapshotCommitted,
        st.integers(1, 20),
        EPOCH,
        st.just(1),
        st.floats(0, 9),
        st.floats(0, 9),
        st.just("interval"),
        TIME,
    ),
)
RECORD = st.builds(
    lambda step, epoch, t, dt: rec.StepRecord(step, epoch, 1, (1,), 1, "", 1.0, 1.0, 0.0, t, dt),
    st.integers(1, 20), EPOCH, TIME, st.floats(0, 50),
)  # fmt: skip


@given(st.lists(st.tuples(TIME, FACT), max_size=60), st.lists(RECORD, max_size=20), TIME)
@settings(max_examples=250, deadline=None)
def test_any_timeline_adds_up(timed, records, now):
    check(Ledger.of(stamp(*timed), records, now))


AT = st.integers(-50, 150)


@given(
    st.lists(st.tuples(AT, AT, st.sampled_from(PRECEDENCE))),
    st.integers(0, 60),
    st.integers(0, 100),
)
def test_paint_covers_once_and_keeps_precedence(layers, start, length):
    end = start + length
    painted = paint(layers, start, end)
    assert [t for a, b, _ in painted for t in range(a, b)] == list(range(start, end))
    for a, b, bucket in painted:
        for t in (a, b - 1):
            covering = [p for x, y, p in layers if x <= t < y]
            assert bucket == min(covering, key=PRECEDENCE.index, default="reform")


@given(
    st.integers(0, 10**12),
    st.lists(st.integers(0, 10**15), min_size=len(BUCKETS), max_size=len(BUCKETS)),
)
def test_apportioning_loses_nothing(amount, weights):
    shares = apportion(amount, dict(zip(BUCKETS, weights, strict=True)))
    assert sum(shares.values()) == amount
    assert min(shares.values()) >= 0
