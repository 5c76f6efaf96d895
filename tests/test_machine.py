"""The life of a session: every row of the transition table, and what must hold in all of them."""

import itertools
from dataclasses import replace

import pytest

from harness.core.world import DRAINED, RESIZE, STOPPED, UNFIT
from harness.node.marks import Mark, Want
from harness.worker.machine import (
    AFTER_THE_END,
    TABLE,
    TRAINED_NOTHING,
    Asked,
    Begun,
    Do,
    Ended,
    Finished,
    HostsUnfit,
    Interval,
    Leave,
    Looped,
    Phase,
    Reached,
    Refuse,
    Seen,
    SessionState,
    Snapshot,
    Turn,
    apart,
    end_words,
    save_end,
    turn,
    where,
    why_of,
    winner,
)

AGENT = SessionState(by_script=True)  # an agent waits for the script's end
ALONE = SessionState(by_script=False)
SAVED = Seen(step=30, total=30, saved_step=30)
OPEN = Seen(step=7, total=30)  # nothing is saved
WANTS = [Want.SNAPSHOT, Want.RESIZE, Want.DRAIN, Want.STOP]
EVENTS = [
    Begun(),
    Looped(),
    Reached(),
    Finished(),
    Ended(),
    HostsUnfit(True),
    HostsUnfit(False),
    *(Asked(want) for want in Want),
]


def at(phase, state=AGENT, looped=False):
    return replace(state, phase=phase, looped=looped)


LOOPING, COMPLETE = at(Phase.LOOPING, looped=True), at(Phase.COMPLETE, looped=True)
FINAL = (Snapshot("final", True), Do.LAND)


# ---- what is done --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("state", "event", "seen", "wanted"),
    [
        # the script begins
        (AGENT, Begun(), OPEN, Turn(at(Phase.TRAINING))),
        (at(Phase.TRAINING), Begun(), OPEN, Turn(at(Phase.TRAINING))),
        (LOOPING, Begun(), OPEN, Turn(LOOPING)),
        (COMPLETE, Begun(), OPEN, Turn(COMPLETE)),
        (at(Phase.OVER), Begun(), OPEN, Turn(at(Phase.OVER))),
        # `steps`
        (AGENT, Looped(), OPEN, Turn(LOOPING, (Do.RESUME,))),
        (at(Phase.TRAINING), Looped(), OPEN, Turn(LOOPING, (Do.RESUME,))),
        (LOOPING, Looped(), OPEN, Turn(LOOPING, (Do.GO_ON,))),
        (COMPLETE, Looped(), OPEN, Turn(LOOPING, (Do.GO_ON,))),
        (at(Phase.OVER), Looped(), OPEN, Turn(at(Phase.OVER, looped=True), (Do.RESUME,))),
        (
            at(Phase.OVER, looped=True),
            Looped(),
            OPEN,
            Turn(at(Phase.OVER, looped=True), (Refuse(AFTER_THE_END),)),
        ),
        # it comes to its total: with an agent, alone, alone and saved already
        (LOOPING, Reached(), OPEN, Turn(COMPLETE, (Snapshot("final"), Do.LAND), (Do.PART,))),
        (LOOPING, Reached(), SAVED, Turn(COMPLETE, (), (Do.PART,))),
        (
            at(Phase.LOOPING, ALONE),
            Reached(),
            OPEN,
            Turn(at(Phase.COMPLETE, ALONE), FINAL, (Do.TELL_END, Do.PART)),
        ),
        (
            at(Phase.LOOPING, ALONE),
            Reached(),
            SAVED,
            Turn(at(Phase.COMPLETE, ALONE), (Do.MARK_END,), (Do.TELL_END, Do.PART)),
        ),
        # `finish`
        (
            LOOPING,
            Finished(),
            OPEN,
            Turn(at(Phase.OVER, looped=True), (*FINAL, Do.MARK_END), (Leave("finished"),)),
        ),
        (
            COMPLETE,
            Finished(),
            SAVED,
            Turn(at(Phase.OVER, looped=True), (Do.MARK_END,), (Leave("finished"),)),
        ),
        (at(Phase.OVER), Finished(), OPEN, Turn(at(Phase.OVER))),
        # the script has ended with status 0
        (at(Phase.OVER), Ended(), OPEN, Turn(at(Phase.OVER))),
        (AGENT, Ended(), OPEN, Turn(AGENT, (Refuse(TRAINED_NOTHING),))),
        (ALONE, Ended(), OPEN, Turn(ALONE)),
        (COMPLETE, Ended(), SAVED, Turn(at(Phase.OVER, looped=True), (Do.MARK_END_ALONE,))),
        (COMPLETE, Ended(), replace(SAVED, leads=False), Turn(at(Phase.OVER, looped=True))),
        (at(Phase.COMPLETE, ALONE), Ended(), SAVED, Turn(at(Phase.OVER, ALONE))),
        (
            LOOPING,
            Ended(),
            OPEN,
            Turn(
                at(Phase.OVER, looped=True),
                (Do.COMPARE_STEPS, *FINAL, Do.MARK_END),
                (Leave("finished"),),
            ),
        ),
        (
            at(Phase.TRAINING, ALONE),
            Ended(),
            SAVED,
            Turn(at(Phase.OVER, ALONE), (Do.COMPARE_STEPS, Do.MARK_END), (Leave("finished"),)),
        ),
        # hosts that cannot read what others can
        (
            at(Phase.TRAINING),
            HostsUnfit(mine=True),
            OPEN,
            Turn(at(Phase.OVER), (), (Leave("unfit", UNFIT),)),
        ),
        (
            at(Phase.TRAINING),
            HostsUnfit(mine=False),
            OPEN,
            Turn(at(Phase.OVER), (), (Leave("resize", RESIZE),)),
        ),
    ],
)
def test_the_table(state, event, seen, wanted):
    assert turn(state, event, seen) == wanted


def test_the_table_has_a_row_for_every_phase_and_event():
    assert {type(event) for event in EVENTS} == {*TABLE, Asked, HostsUnfit}
    for rows in TABLE.values():
        assert None in rows or {*Phase} <= {*rows}


@pytest.mark.parametrize("phase", [Phase.TRAINING, Phase.LOOPING, Phase.COMPLETE])
@pytest.mark.parametrize("event", [Ended(), Looped()])
def test_without_a_bucket_the_scripts_end_ends_nothing(phase, event):
    state = SessionState(phase, looped=True, by_script=True, stored=False)
    wanted = (
        Turn(state) if event == Ended() else Turn(replace(state, phase=Phase.LOOPING), (Do.GO_ON,))
    )
    assert turn(state, event, OPEN) == wanted


# ---- what is asked -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("want", "left"),
    [
        (Want.RESIZE, Leave("resize", RESIZE)),
        (Want.DRAIN, Leave("drained", DRAINED)),
        (Want.STOP, Leave("stopped", STOPPED)),
    ],
)
def test_who_is_asked_to_leave_leaves_behind_a_committed_snapshot(want, left):
    why = {Want.RESIZE: "resize", Want.DRAIN: "drain", Want.STOP: "stop"}[want]
    over = at(Phase.OVER, looped=True)
    asked = turn(LOOPING, Asked(want), OPEN)
    assert asked == Turn(over, (Snapshot(why), Do.LAND), (left,))
    on_its_way = turn(LOOPING, Asked(want), replace(OPEN, flight_step=7))
    assert on_its_way == Turn(over, (Do.LAND,), (left,))
    another = turn(LOOPING, Asked(want), replace(OPEN, flight_step=6))
    assert another == asked


@pytest.mark.parametrize("want", WANTS)
def test_a_run_at_its_last_step_finishes_instead_of_leaving(want):
    assert turn(LOOPING, Asked(want), replace(SAVED, saved_step=-1)) == Turn(LOOPING)
    past = replace(SAVED, step=31)
    assert turn(LOOPING, Asked(want), past) == Turn(LOOPING)


def test_a_loop_of_ones_own_has_no_last_step():
    training, seen = at(Phase.TRAINING), Seen(step=7)
    assert turn(training, Asked(Want.DRAIN), seen).after == (Leave("drained", DRAINED),)


def test_a_snapshot_is_made_and_training_goes_on():
    assert turn(LOOPING, Asked(Want.SNAPSHOT), OPEN) == Turn(LOOPING, (Snapshot("interval"),))
    request = Asked(Want.SNAPSHOT, Mark(Want.SNAPSHOT, "harness snapshot"))
    assert turn(LOOPING, request, OPEN) == Turn(LOOPING, (Do.ANSWER, Snapshot("request")))
    at_the_end = turn(LOOPING, request, SAVED)
    assert at_the_end == Turn(LOOPING, (Do.ANSWER,))
    assert turn(LOOPING, Asked(Want.NOTHING), OPEN) == Turn(LOOPING)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (Asked(Want.SNAPSHOT), "interval"),
        (Asked(Want.SNAPSHOT, signalled=Want.SNAPSHOT), "request"),
        (Asked(Want.SNAPSHOT, Mark(Want.SNAPSHOT, "notice: aws")), "request"),
        (Asked(Want.SNAPSHOT, Mark(Want.DRAIN, "notice: aws")), "interval"),
        (Asked(Want.RESIZE), "resize"),
        (Asked(Want.DRAIN, Mark(Want.DRAIN, "touched by hand")), "drain"),
        (Asked(Want.DRAIN, Mark(Want.DRAIN, "notice: aws")), "notice"),
        (Asked(Want.RESIZE, Mark(Want.RESIZE, "signal 15")), "notice"),
        (Asked(Want.DRAIN, signalled=Want.DRAIN), "drain"),
        (Asked(Want.STOP), "stop"),
    ],
)
def test_why_a_snapshot_is_made(asked, why):
    assert why_of(asked) == why


@pytest.mark.parametrize(
    ("votes", "want"),
    [
        ([3, 0, 0, 0, 0], Want.NOTHING),
        ([2, 1, 0, 0, 0], Want.SNAPSHOT),
        ([5, 1, 1, 0, 0], Want.RESIZE),
        ([5, 9, 9, 1, 0], Want.DRAIN),
        ([5, 9, 9, 9, 1], Want.STOP),
        ([0, 0, 0, 0, 0], Want.NOTHING),
    ],
)
def test_the_greatest_want_wins(votes, want):
    assert winner(votes) is want


# ---- the end -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("seen", "acts"),
    [
        (SAVED, ()),
        (replace(SAVED, saved_step=29), FINAL),
        (replace(SAVED, pending=True), FINAL),
        (replace(SAVED, unsaved=True), FINAL),
        (Seen(step=30, flight_step=30), (Do.LAND,)),
        (Seen(step=30, flight_step=20, saved_step=20), FINAL),
        (Seen(step=30, flight_step=30, pending=True), FINAL),
        (Seen(step=30, flight_step=30, unsaved=True), (Do.LAND, *FINAL)),
    ],
)
def test_the_end_is_saved_once(seen, acts):
    assert save_end(seen, final=True) == acts


def test_what_is_said_of_the_end():
    assert where(Seen(step=7)) == "step 7" and where(OPEN) == "step 7 of 30"
    assert end_words(OPEN) == "ended early at step 7 of 30"
    assert end_words(SAVED) == "step 30 of 30 is the last"
    assert end_words(Seen(step=7)) == "step 7 is the last"
    assert end_words(replace(OPEN, until=7)) == "step 7 of 30 is the last"
    assert apart({7}) == "" and "(3, 7)" in apart({7, 3})


# ---- in all of them ------------------------------------------------------------------------------
def every_turn():
    states = [
        SessionState(*values)
        for values in itertools.product(Phase, (False, True), (False, True), (False, True))
    ]
    seens = [
        Seen(7, total, 1 << 62, saved, flight, pending, unsaved, leads)
        for total, saved, flight, pending, unsaved, leads in itertools.product(
            (0, 7, 30), (-1, 7), (None, 6, 7), (False, True), (False, True), (False, True)
        )
    ]
    for state, event, seen in itertools.product(states, EVENTS, seens):
        yield state, event, seen, turn(state, event, seen)


def test_what_holds_in_every_turn():
    n = 0
    for state, event, seen, done in every_turn():
        n += 1
        assert (done.state.by_script, done.state.stored) == (state.by_script, state.stored)
        assert state.looped <= done.state.looped
        if state.phase is Phase.OVER:  # nothing leaves it
            assert done.state.phase is Phase.OVER
        acts = (*done.first, *done.after)
        leaves = [act for act in acts if isinstance(act, Leave)]
        if leaves:  # it is the last thing, and what was trained is committed
            assert acts[-1:] == tuple(leaves) and done.state.phase is Phase.OVER
            if not isinstance(event, HostsUnfit):
                assert Do.LAND in done.first or seen.saved_step == seen.step
        if done.state.phase is Phase.COMPLETE and state.phase is not Phase.COMPLETE:
            assert Do.LAND in done.first or seen.saved_step == seen.step
        if any(isinstance(act, Refuse) for act in acts):
            assert len(acts) == 1 and done.state.phase is state.phase
        for before, act in itertools.pairwise(acts):  # a final snapshot is waited for
            assert not isinstance(before, Snapshot) or not before.final or act is Do.LAND
        assert len([act for act in acts if isinstance(act, Snapshot)]) <= 1
        same = turn(state, event, replace(seen, leads=not seen.leads))
        collective = [act for act in acts if act is not Do.MARK_END_ALONE]
        others = [act for act in (*same.first, *same.after) if act is not Do.MARK_END_ALONE]
        assert collective == others and same.state == done.state  # on every rank
    assert n == 40 * len(EVENTS) * 144


# ---- when a snapshot is due ----------------------------------------------------------------------
@pytest.mark.parametrize(
    ("interval", "step_s", "stall_s", "commit_s", "seconds"),
    [
        (Interval(every_steps=20), 0.5, 1.0, 1.0, 10.0),
        (Interval(every_steps=20), 0.0, 1.0, 1.0, 0.0),
        (Interval(every_s=3.0), 0.5, 1.0, 100.0, 3.0),
        (Interval(every_s=0.0), 0.5, 1.0, 100.0, 0.0),
        (Interval(), 0.5, 1e-4, 0.0, 10.0),
        (Interval(), 0.5, 0.5, 1.0, 59.667),  # Daly's, for a loss an hour
        (Interval(), 0.5, 0.5, 100.0, 300.0),
        (Interval(), 0.5, 1e4, 1.0, 1800.0),
    ],
)
def test_how_long_an_interval_is(interval, step_s, stall_s, commit_s, seconds):
    assert interval.seconds(step_s, stall_s, commit_s) == pytest.approx(seconds, abs=1e-3)


def test_when_a_snapshot_is_due():
    by_steps = Interval(every_s=1.0, every_steps=5)
    assert [step for step in range(1, 12) if by_steps.due(step, 99.0, 0.0)] == [5, 10]
    assert Interval().due(3, 10.0, 10.0) and not Interval().due(5, 9.9, 10.0)
