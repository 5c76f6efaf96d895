"""What a node decides, without a node: the tables of `node_state.py` and `verdicts.py`, row by row."""

from dataclasses import replace

import pytest

from harness.agent import verdicts as ends
from harness.agent.gpu_health import Action, GpuFinding, HealthVerdict
from harness.agent.node_state import (
    LAST_WORDS_S,
    AgentState,
    DrainUploads,
    Entered,
    FlushBeforeKill,
    FoundUnfit,
    GpuJudged,
    Left,
    NewcomersWait,
    NodePhase,
    NotifyWorkers,
    Now,
    PeersChange,
    PollNow,
    Ready,
    Record,
    Released,
    Rules,
    Signalled,
    Slept,
    SnapshotAsked,
    StopOrdered,
    Tick,
    Unled,
    WorkersHung,
    WriteLog,
    WriteMark,
    last_words,
    step,
    too_late,
)
from harness.agent.verdicts import (
    AFTER,
    AGAIN,
    BROKEN_OFF,
    TABLE,
    End,
    Evidence,
    Fruitless,
    WorkerEnd,
    agent_exit_code,
    classify,
    hear_peers,
    make_room,
    patience_s,
    why_no_more,
)
from harness.bucket.layout import NO_EPOCH, Epoch, Member
from harness.core.facts import HealthSeen, NoticeCancelled, NoticeSeen
from harness.core.world import DRAINED, FENCED, FINISHED, RESIZE, STOPPED, UNFIT
from harness.node.heartbeat import Limits, ProgressFile, WorkerHeartbeat, WorkerPhase
from harness.node.marks import Want
from harness.notices.notice import Cancelled, Notice, Noticed

NOW = Now(own_s=100.0, wall_s=1000.0)
RULES = Rules("m", grace_s=30.0, drain_lead_s=120.0, doubt_ahead_s=900.0, unfit_grace_s=60.0)
NODE = AgentState(RULES, warm_by_s=60.0, life=NodePhase.IN)


def after(*events, node=NODE, now=NOW):
    """The node after all of them, and the acts of the last one."""
    acts = ()
    for event in events:
        node, acts = step(node, event, now)
    return node, acts


def notice(kind, deadline_s=None, name="n1", **more):
    return Noticed(Notice("aws", kind, name, deadline_s, **more))


def judged(action, what="xid 79"):
    return GpuJudged(HealthVerdict(GpuFinding("GPU-1", what, 79, "fell off the bus"), action, "it is gone"))


# ---- life ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("before", "event", "then"),
    [
        (NodePhase.WARMING, Ready(), NodePhase.READY),
        (NodePhase.READY, Entered(), NodePhase.IN),
        (NodePhase.IN, Left(), NodePhase.SETTLING),
        (NodePhase.SETTLING, Ready(), NodePhase.READY),
    ],
)
def test_a_nodes_life(before, event, then):
    node, acts = after(event, node=replace(NODE, life=before))
    assert (node.life, acts) == (then, ())


def test_what_was_wanted_of_one_epochs_workers_is_not_wanted_of_the_nexts():
    node, _ = after(SnapshotAsked("a"), Left(), Ready())
    assert node.wanted  # its deadlines bound the uploads
    assert after(Entered(), node=node)[0].wanted == {}


def test_a_newcomer_is_ready_when_it_is_warm_or_must_go_and_unfit_when_it_stays_cold():
    node = replace(NODE, life=NodePhase.WARMING)
    assert node.may_join(warm=True) and not node.may_join(warm=False)
    assert replace(node, leaving="SIGTERM").may_join(warm=False)
    assert replace(node, life=NodePhase.READY).may_join(warm=False)
    assert not node.too_cold(59.0, warm=False) and node.too_cold(60.0, warm=False)
    assert not node.too_cold(60.0, warm=True)
    slept, _ = after(Slept(7.0), node=node)
    assert not slept.too_cold(66.0, warm=False) and slept.too_cold(67.0, warm=False)


def test_a_signals_grace_ends_and_a_second_signal_hurries():
    first, _ = after(Signalled("SIGTERM"))
    ends_s = NOW.own_s + first.rules.grace_s - LAST_WORDS_S
    assert not first.grace_over(ends_s - 0.1) and first.grace_over(ends_s)
    assert [first.left_s(ends_s + s, most_s=1.5) for s in (0.0, 2.0, 9.0)] == [1.5, 1.0, 0.0]
    same = step(first, Signalled("SIGTERM"), Now(NOW.own_s + 1.0, NOW.wall_s + 1.0))
    assert same == (first, ())
    second, _ = step(first, Signalled("SIGINT"), Now(NOW.own_s + 9.0, NOW.wall_s + 9.0))
    assert second.grace_by_s == NOW.own_s + 9.0 + 5.0


# ---- what is wanted of the workers ---------------------------------------------------------------
@pytest.mark.parametrize(
    ("event", "mark", "leaving"),
    [
        (SnapshotAsked("snapshot"), WriteMark(Want.SNAPSHOT, "snapshot", None), ""),
        (StopOrdered(), WriteMark(Want.STOP, "stop", None), ""),
        (NewcomersWait(), WriteMark(Want.GROW, "grow", None), ""),
        (Released(), WriteMark(Want.RESIZE, "leave", None), "released"),
        (Unled("nobody"), WriteMark(Want.RESIZE, "leaderless", None), "nobody"),
        (Signalled("SIGTERM"), WriteMark(Want.RESIZE, "signal:SIGTERM", 1030.0), "SIGTERM"),
        (notice("soft", 1500.0), WriteMark(Want.SNAPSHOT, "notice:n1", None), ""),
        (notice("kill", 1120.0), WriteMark(Want.RESIZE, "notice:n1", 1120.0), "aws notice"),
        (notice("kill"), WriteMark(Want.RESIZE, "notice:n1", None), "aws notice"),
        (notice("maintenance"), WriteMark(Want.RESIZE, "notice:n1", None), "aws notice"),
        (notice("maintenance", 1120.0), WriteMark(Want.RESIZE, "notice:n1", 1120.0), "aws notice"),
        (notice("maintenance", 1121.0), None, ""),  # not yet
        (judged(Action.IGNORE), None, ""),
        (judged(Action.COUNT), None, ""),
        (judged(Action.SNAPSHOT), WriteMark(Want.SNAPSHOT, "health:xid 79", None), ""),
        (
            judged(Action.DRAIN),
            WriteMark(Want.RESIZE, "health:unfit", 1060.0),
            "unfit: GPU GPU-1: xid 79 (fell off the bus)",
        ),
        (judged(Action.KILL), None, "unfit: GPU GPU-1: xid 79 (fell off the bus)"),
        (WorkersHung(True), None, ""),
        (FoundUnfit("it cannot read"), None, ""),
        (Tick(), None, ""),
    ],
)
def test_what_an_event_asks_of_the_workers_and_of_the_node(event, mark, leaving):
    node, acts = after(event)
    assert [a for a in acts if isinstance(a, WriteMark)] == ([mark] if mark else [])
    assert node.leaving == leaving
    # who must go tells its uploads until when, and those workers that have no session
    if leaving and mark:
        assert NotifyWorkers() in acts
        until = [a for a in acts if isinstance(a, DrainUploads)]
        assert until == ([] if mark.deadline_s is None else [DrainUploads(mark.deadline_s)])


def test_the_greatest_want_reigns_and_of_equal_ones_the_first():
    node, _ = after(Signalled("SIGTERM"), notice("kill", 1010.0), SnapshotAsked("a"))
    assert node.reigning() == ("signal:SIGTERM", (Want.RESIZE, 1030.0))
    node, acts = after(StopOrdered(), node=node)
    assert acts == (WriteMark(Want.STOP, "stop", 1010.0), NotifyWorkers())


def test_the_same_want_is_one_request_but_each_snapshot_is_its_own():
    assert after(StopOrdered(), StopOrdered())[1] == ()
    assert after(Released(), Released())[1] == (NotifyWorkers(),)
    assert len(after(SnapshotAsked("a"), SnapshotAsked("a"))[1]) == 1


def test_uploads_have_until_the_first_of_all_deadlines():
    node, acts = after(Signalled("SIGTERM"), notice("kill", 1120.0))
    assert DrainUploads(1030.0) in acts and node.deadline_s() == 1030.0
    assert node.settle_s(1010.0, usual_s=5.0) == 20.0 and node.settle_s(2000.0, usual_s=5.0) == 0.0
    assert NODE.settle_s(1010.0, usual_s=5.0) == 5.0


def test_news_is_written_down_before_it_is_acted_upon():
    acts = after(notice("kill", 1120.0))[1]
    assert acts[:2] == (PollNow(), Record(NoticeSeen("m", "aws", "kill", "n1", 1120.0)))
    acts = after(Signalled("SIGINT"))[1]
    assert acts[0] == Record(NoticeSeen("m", "signal", "kill", "SIGINT", 1030.0))
    acts = after(Unled("nobody"))[1]
    assert acts[:2] == (
        Record(NoticeSeen("m", "lease", "kill", "nobody", None)),
        WriteLog("nobody; this node drains"),
    )
    acts = after(judged(Action.COUNT))[1]
    assert acts[0] == Record(HealthSeen("m", "GPU-1", "xid 79", "fell off the bus", "count"))
    assert isinstance(acts[1], WriteLog) and len(after(judged(Action.IGNORE))[1]) == 1


def test_an_end_that_is_known_long_before_is_heeded_when_it_is_near_and_once():
    node, _ = after(notice("maintenance", 2000.0))
    assert after(Tick(), node=node) == (node, ())
    node, acts = after(Tick(), node=node, now=Now(100.0, 1880.0))
    assert node.leaving and WriteMark(Want.RESIZE, "notice:n1", 2000.0) in acts
    assert after(Tick(), node=node, now=Now(100.0, 1881.0)) == (node, ())


def test_the_mark_tells_the_earliest_deadline_whoever_reigns():
    """Workers measure by it whether the rest of a step still fits."""
    first, sooner = notice("kill", 1500.0), notice("kill", 1030.0, "n2")
    node, acts = after(first, sooner)
    assert WriteMark(Want.RESIZE, "notice:n1", 1030.0) in acts
    assert WriteMark(Want.STOP, "stop", 1030.0) in after(StopOrdered(), node=node)[1]
    acts = after(Cancelled(sooner.notice), node=node)[1]
    assert WriteMark(Want.RESIZE, "notice:n1", 1500.0) in acts


# ---- a notice is taken back ----------------------------------------------------------------------
def test_a_notice_that_is_taken_back_is_forgotten():
    told = notice("kill", 1120.0)
    node, acts = after(told, Cancelled(told.notice))
    assert node == NODE
    assert acts == (
        Record(NoticeCancelled("m", "n1")),
        DrainUploads(None),
        WriteMark(Want.NOTHING, "", None),
    )


@pytest.mark.parametrize(
    ("other", "stays"),
    [
        (Signalled("SIGTERM"), False),
        (notice("kill", 1500.0, "n2"), False),
        (Released(), False),
        (judged(Action.DRAIN), False),
        (judged(Action.KILL), False),
        (NewcomersWait(), True),
        (SnapshotAsked("a"), True),
    ],
)
def test_it_stays_only_if_nothing_else_bids_it_go(other, stays):
    told = notice("kill", 1120.0)
    node, _ = after(told, other, Cancelled(told.notice))
    assert bool(node.leaving) is not stays and "n1" not in node.notices


def test_a_mark_that_still_says_the_same_is_not_written_again():
    told = notice("soft")
    acts = after(told, StopOrdered(), Cancelled(told.notice))[1]
    assert not [a for a in acts if isinstance(a, WriteMark)]


# ---- doubt, deadlines, unfitness -----------------------------------------------------------------
@pytest.mark.parametrize(
    ("event", "doubtful"),
    [
        (notice("kill", 9000.0), True),
        (notice("soft"), True),
        (notice("soft", pause=True), False),
        (notice("maintenance", 1900.0), True),
        (notice("maintenance", 1901.0), False),
        (Signalled("SIGTERM"), False),
    ],
)
def test_when_another_node_is_looked_for(event, doubtful):
    assert after(event)[0].doubtful(NOW.wall_s) is doubtful


def test_last_words_are_said_once_near_a_deadline_and_not_for_a_snapshot():
    node, _ = after(notice("kill", 1120.0), notice("soft", 1120.0, "n2"), Released())
    assert after(Tick(), node=node, now=Now(0.0, 1120.0 - LAST_WORDS_S - 0.1))[1] == ()
    late = Now(0.0, 1120.0 - LAST_WORDS_S)
    assert after(Tick(), node=replace(node, life=NodePhase.SETTLING), now=late)[1] == ()
    node, acts = after(Tick(), node=node, now=late)
    assert acts == (FlushBeforeKill("notice:n1", 1120.0),)
    assert after(Tick(), node=node, now=late) == (node, ())
    assert last_words(7, 5, saving=False).endswith("boundary; step 5 is committed")
    assert "workers at step 7); the bucket is silent" in last_words(7, -1, saving=True)
    assert "may come too late" in last_words(7, -1, True, "and may come too late ")


def test_what_is_lost_with_a_step_that_ends_too_late_is_said():
    said = too_late(7, 5, 11.6)
    assert said.startswith("step 8 will end 12 s after the deadline; unless the workers drop it")
    assert said.endswith("what is committed is step 5, so it and 2 more steps will be lost")
    assert too_late(7, 6, 1.0).endswith("step 6, so it and 1 more step will be lost")
    assert too_late(7, 7, 1.0).endswith("step 7, so it will be lost")
    assert too_late(7, -1, 1.0).endswith("the bucket is silent")
    assert too_late(7, 5, -0.1) == ""


def test_a_heartbeat_shows_when_the_step_under_way_ends(tmp_path):
    file, pulse = ProgressFile(str(tmp_path / "sign")), WorkerHeartbeat(tmp_path / "sign", Limits())
    for done, now in ((0, 100.0), (1, 130.0), (2, 150.0)):
        file.tell(step=done)
        pulse.look(now)
        assert pulse.step_ends_s == (170.0 if done == 2 else None)


def test_workers_on_a_sick_gpu_have_until_their_grace_is_over_or_nothing():
    node, _ = after(judged(Action.DRAIN))
    assert not node.overdue(159.9) and node.overdue(160.0) and node.gone_code == UNFIT
    worse, acts = after(judged(Action.KILL), node=node)
    assert worse.overdue(NOW.own_s) and not [a for a in acts if isinstance(a, WriteMark)]
    assert after(judged(Action.DRAIN), node=worse)[0].unfit_by_s == worse.unfit_by_s
    assert not NODE.overdue(1e9) and NODE.gone_code == DRAINED


def test_only_hangs_of_its_own_are_counted_and_the_first_reason_stands():
    assert after(WorkersHung(True), WorkersHung(False), WorkersHung(True))[0].hangs == 2
    assert after(FoundUnfit("first"), FoundUnfit("second"))[0].unfit == "first"


# ---- how an epoch ended --------------------------------------------------------------------------
def worker(code, rank=0, error="ValueError", text="bad", **more):
    return WorkerEnd(rank, code, error, text, **more)


def lost(code=1, rank=0, **more):
    return worker(code, rank, "RuntimeError", "Connection closed by peer", **more)


def seen(*workers, **more):
    return Evidence(tuple(w.code for w in workers), workers, **more)


def codes(*numbers, **more):
    return seen(*(worker(c, i) for i, c in enumerate(numbers)), **more)


OURS = worker(-9, 1, "SIGKILL", ended_by_us=True)  # at work until we ended it
ENDED = worker(-9, ended_by_us=True, place=WorkerPhase.ENDED)  # its script, with status 0
WAITING = worker(-9, 1, "Hung", hung="silent", ended_by_us=True, place=WorkerPhase.REDUCE)
CASES = [  # evidence, end, row of TABLE
    (codes(1, unfit=True), End.UNFIT, 0),
    (codes(UNFIT, RESIZE, unfit=True), End.UNFIT, 0),
    (codes(-9, leaving=True, attached=False, unfit=True), End.UNFIT, 0),
    (codes(1, leaving=True, attached=False), End.DRAINED, 1),
    (codes(0, leaving=True, attached=False), End.DRAINED, 1),
    (codes(STOPPED, leaving=True, attached=False, unfit=True), End.DRAINED, 1),
    (codes(0, 1, told=Want.STOP, attached=False), End.STOPPED, 2),
    (codes(0, -10, told=Want.RESIZE, attached=False), End.RESIZE, 3),  # in whatever way it ended
    (codes(0, 0, told=Want.RESIZE), End.FINISHED, 5),  # a session says itself how it ends
    (codes(0, 0, run_over=False), End.UNFINISHED, 4),
    (codes(0, 0), End.FINISHED, 5),
    (codes(0, 0, leaving=True), End.FINISHED, 5),  # it was done before it was gone
    (codes(STOPPED, STOPPED), End.STOPPED, 6),
    (codes(DRAINED, STOPPED, 1), End.STOPPED, 6),
    (codes(DRAINED, DRAINED), End.DRAINED, 7),
    (codes(1, DRAINED, FENCED), End.DRAINED, 7),
    (codes(FENCED, RESIZE), End.FENCED, 8),
    (codes(FENCED, 1), End.FENCED, 8),
    (codes(RESIZE, RESIZE, leaving=True), End.DRAINED, 9),
    (codes(RESIZE, RESIZE), End.RESIZE, 10),
    (codes(0, RESIZE), End.RESIZE, 10),
    (seen(ENDED, WAITING), End.UNFINISHED, 11),
    (seen(ENDED, WAITING, OURS), End.UNFINISHED, 11),
    (seen(ENDED, WAITING, lost(rank=2), alone=False), End.PEER_LOST, 12),  # that may be why
    (seen(ENDED, WAITING, worker(-9, 2, "SIGKILL")), End.KILLED, 14),
    (seen(ENDED, replace(WAITING, hung="", ended_by_us=True)), End.PEER_LOST, 12),  # a peer died
    (seen(replace(ENDED, place=WorkerPhase.LEAVING), WAITING), End.PEER_LOST, 12),
    (seen(OURS), End.PEER_LOST, 12),  # nothing failed here
    (seen(lost(), lost(rank=1), alone=False), End.PEER_LOST, 12),
    (seen(lost(), OURS, alone=False), End.PEER_LOST, 12),  # whoever broke it, nobody can tell
    (seen(worker(-9, hung="silent", guilty=False)), End.PEER_LOST, 12),  # it waited for others
    (seen(worker(-9, error="Hung", hung="silent", guilty=True, ended_by_us=True)), End.HUNG, 13),
    (seen(lost(), worker(-9, 1, "Hung", hung="x", guilty=True)), End.HUNG, 13),
    (seen(worker(-9, error="SIGKILL")), End.KILLED, 14),
    (seen(lost(), worker(-11, 1, "SIGSEGV")), End.KILLED, 14),
    (seen(worker(1), OURS), End.FAILED, 15),
    (seen(lost(), worker(1, 1)), End.FAILED, 15),
    (seen(lost(failed_s=2.0), lost(rank=1, failed_s=1.0)), End.FAILED, 15),
    (seen(lost(), OURS), End.FAILED, 15),  # its words prove nothing where nobody else is
    (codes(RESIZE, 1, leaving=True), End.FAILED, 15),
]


@pytest.mark.parametrize(("evidence", "end", "row"), CASES)
def test_the_table_of_ends(evidence, end, row):
    assert classify(evidence) is end is TABLE[row].end
    assert [r.when(evidence) for r in TABLE].index(True) == row


def test_every_row_has_a_case_and_every_end_a_row_and_what_follows():
    assert {row for _, _, row in CASES} == set(range(len(TABLE)))
    assert {row.end for row in TABLE} == set(End) == set(AFTER)
    assert {end for end in End if AFTER[end] is AGAIN} == {End.RESIZE, *BROKEN_OFF}


@pytest.mark.parametrize(
    ("end", "unfit", "worn_out", "code"),
    [
        (End.FINISHED, True, True, FINISHED),
        (End.UNFINISHED, False, False, STOPPED),
        (End.DRAINED, False, False, DRAINED),
        (End.DRAINED, True, False, UNFIT),
        (End.STOPPED, True, False, STOPPED),
        (End.FENCED, False, False, FENCED),
        (End.UNFIT, True, False, UNFIT),
        (End.RESIZE, False, False, AGAIN),
        (End.FAILED, False, False, AGAIN),
        (End.KILLED, False, False, AGAIN),
        (End.PEER_LOST, False, False, AGAIN),
        (End.HUNG, False, False, AGAIN),
        (End.HUNG, False, True, UNFIT),
    ],
)
def test_what_the_agent_does_then(end, unfit, worn_out, code):
    assert agent_exit_code(end, unfit, worn_out) == code


def test_who_is_a_victim_is_written_down_as_one_and_only_the_culprit_signs():
    evidence = seen(lost(), worker(1, 1, tail=("one", "two")), OURS)
    first, second = evidence.facts("m", 4)
    assert (first.error, second.error, second.log_tail) == ("PeerLost", "ValueError", "one\ntwo")
    assert evidence.culprit.rank == 1 and evidence.signature == "ValueError: bad"
    assert seen(lost(), alone=False).signature == ""
    assert seen(worker(-9, error="SIGKILL", text="killed by SIGKILL")).signature == "SIGKILL"


@pytest.mark.parametrize(
    ("workers", "for_s"),
    [
        ([worker(RESIZE), worker(-9, 1, at_work=True)], ends.SAVING_S),
        ([worker(1), worker(-9, 1, at_work=True)], ends.LINGER_S),
        ([lost(), worker(1, 1)], ends.LINGER_S),
        ([lost(), worker(-9, 1, at_work=True)], ends.WORDS_S),
    ],
)
def test_how_long_the_others_are_waited_for(workers, for_s):
    assert patience_s(workers, told=True) == ends.SAVING_S and patience_s(workers) == for_s


# ---- what peers say ------------------------------------------------------------------------------
def member(name="m2", state="in", epoch=3, **more):
    return Member(name, state, epoch, "127.0.0.1", 1, 2, 1, **more)


WORLD = Epoch(3, ("m1", "m2"), (1, 1), (1.0, 1.0), "127.0.0.1", 1, "grow", withdrawals=(0, 0))


@pytest.mark.parametrize(
    ("peer", "now", "why", "planned"),
    [
        (member(), 99.0, "", False),
        (member(state="dead"), 10.0, "lost m2", False),
        (member(state="gone", epoch=2), 10.0, "m2 went before its workers began", True),
        (member(state="gone", end="finished"), 99.0, "", False),
        (member(state="ready", end="failed"), 11.0, "", False),
        (member(state="ready", end="failed"), 11.1, "m2 has left", False),
        (member(epoch=4, end="killed"), 11.1, "m2 has left", False),
        (member(state="ready", end="resize"), 40.0, "", False),
        (member(state="gone", end="drained"), 40.1, "m2 has left", False),
        # not there yet: its bucket is slow, and what it says is about the generation before
        (member(state="ready", epoch=2, end="killed"), 40.0, "", False),
        (member(state="ready", epoch=2, end="killed"), 40.1, "m2 does not come", False),
        (member(state="away", epoch=2), 10.0, "", False),  # as it was when it was named
        (member(state="away", epoch=2, withdrawals=1), 10.0, "m2 does not come", True),
    ],
)
def test_when_peers_end_our_epoch(peer, now, why, planned):
    since_s = hear_peers(WORLD, [peer], 10.0, None, 10.0).since_s
    said = hear_peers(WORLD, [peer], 10.0, since_s, now)
    assert said.why.startswith(why) and bool(said.why) is bool(why) and said.planned is planned


def test_peers_say_that_the_world_changes():
    for peer, changing in [
        (member(), False),
        (member(end=ends.CHANGING), True),
        (member(epoch=2, end=ends.CHANGING), False),  # of another epoch
        (member(state="ready", end="drained"), True),
        (member(state="ready", epoch=2, end="resize"), False),  # not there yet
        (member(state="ready", end="failed"), False),
    ]:
        assert hear_peers(WORLD, [peer], 10.0, None, 10.0).changing is changing
    assert after(PeersChange(), PeersChange())[1] == ()
    assert after(PeersChange())[1] == (WriteMark(Want.RESIZE, "peers", None), NotifyWorkers())


def test_who_warms_up_in_our_place_joins_together_with_who_waits():
    warming = member(state="warming", place="a")
    assert make_room([], "a", 0.0) and make_room([warming], "b", 0.0)
    assert not make_room([warming], "a", ends.BATCH_S - 0.1)
    assert make_room([warming], "a", ends.BATCH_S)


# ---- failures that repeat ------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("failure", "streak", "stops"),
    [
        ("ValueError: bad", 1, False),
        ("ValueError: bad", 2, True),
        ("SIGKILL", 8, False),
        ("SIGKILL", 9, True),
        ("Hung", 8, False),
        ("Hung", 9, True),
        ("StoreError: StoreUnavailable", 18, False),
        ("StoreError: StoreUnavailable", 19, True),
        ("BadInput: wanted another batch", 0, True),
        ("", 99, False),
    ],
)
def test_when_the_same_failure_stops_the_run(failure, streak, stops):
    me = member("m", failure=failure, failure_step=10)
    last = replace(NO_EPOCH, failure=failure, failure_step=10, streak=streak)
    assert bool(why_no_more(me, last, Fruitless(), End.FAILED)) is stops
    if not failure.startswith("BadInput"):  # at another step it is another one
        assert why_no_more(me, replace(last, failure_step=9), Fruitless(), End.FAILED) == ""


def test_a_failure_that_the_next_epoch_has_counted_is_not_counted_twice():
    """Another member may have made it before we looked: then it is counted there already."""
    me = member("m", epoch=2, failure="ValueError: bad", failure_step=10)
    last = replace(NO_EPOCH, epoch=3, failure=me.failure, failure_step=10, streak=2)
    assert why_no_more(me, last, Fruitless(), End.FAILED) == ""
    assert why_no_more(replace(me, epoch=3), last, Fruitless(), End.FAILED)


def test_the_run_is_stopped_with_words_that_help():
    me = member("m", failure="BadInput: wanted a multiple of 4")
    assert why_no_more(me, NO_EPOCH, Fruitless(), None) == "wanted a multiple of 4"
    me = member("m", failure="ValueError: bad", failure_step=10)
    last = replace(NO_EPOCH, failure=me.failure, failure_step=10, streak=2)
    said = why_no_more(me, last, Fruitless(1, 8), End.FAILED)
    assert "the script failed 3 times in a row at the same point (after step 10)" in said
    assert "the run resumes at step 8" in said
    killed, last = replace(me, failure="SIGKILL"), replace(last, failure="SIGKILL", streak=9)
    said = why_no_more(killed, last, Fruitless(1, 8), End.KILLED)
    assert "a worker was killed 10 times" in said and "memory" in said and "script" not in said
    said = why_no_more(me, NO_EPOCH, Fruitless(20, -1), End.PEER_LOST)
    assert "20 generations in a row" in said and "(the last: peer-lost, ValueError: bad)" in said
    assert why_no_more(me, NO_EPOCH, Fruitless(19, 4), End.PEER_LOST) == ""


def test_epochs_without_a_new_snapshot_are_counted():
    found = Fruitless().broken_off(committed=0, kept=-1, attached=True, lasted_s=1.0)
    assert found == Fruitless(1, 0)  # step 0: none is committed yet
    found = found.broken_off(0, -1, True, 1.0).broken_off(0, -1, True, 1.0)
    assert found == Fruitless(3, 0)
    assert found.broken_off(5, -1, True, 1.0) == Fruitless(1, 5)
    assert found.broken_off(0, 7, True, 1.0) == Fruitless(1, 0, 7)
    assert found.broken_off(0, -1, True, ends.FRUITLESS_S) == Fruitless(4, 0)
    # of a script without a session the progress is not seen, so time counts
    assert found.broken_off(0, -1, False, ends.FRUITLESS_S) == Fruitless(1, 0)
    assert found.broken_off(0, -1, False, 1.0) == Fruitless(4, 0)
