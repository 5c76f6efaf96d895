"""The life of a session: every row of the transition table, and what must hold in all of them."""

import itertools
from dataclasses import replace

import pytest
import torch

from harness.core.world import DRAINED, RESIZE, STOPPED, UNFIT
from harness.node.marks import Mark, Want
from harness.worker.boundary import (
    AFTER_THE_END,
    TABLE,
    TRAINED_LESS,
    TRAINED_NOTHING,
    TRAINS_TOO_EARLY,
    Begun,
    BoundaryAction,
    BoundaryInputs,
    Ended,
    Finished,
    HostsUnfit,
    Leave,
    Looped,
    Phase,
    Reached,
    Refuse,
    Rewound,
    SessionState,
    Snapshot,
    TrainsAgain,
    Transition,
    VoteResult,
    apart,
    end_words,
    next_turn,
    save_end,
    where_it_ends,
    why_of_vote,
    winner,
)
from harness.worker.snapshot_timer import Interval
from harness.worker.votes import Votes

AGENT = SessionState(by_script=True)  # an agent waits for the script's end
ALONE = SessionState(by_script=False)
SAVED = BoundaryInputs(step=30, total=30, saved_step=30)
PASSED = replace(SAVED, passed=True)  # an earlier process trained all of it
OPEN = BoundaryInputs(step=7, total=30)  # nothing is saved
WANTS = [Want.SNAPSHOT, Want.GROW, Want.RESIZE, Want.DRAIN, Want.STOP]
EVENTS = [
    TrainsAgain(),
    Begun(),
    Looped(),
    Reached(),
    Finished(),
    Ended(),
    HostsUnfit(True),
    HostsUnfit(False),
    Rewound(),
    *(VoteResult(want) for want in Want),
]


def at(phase, state=AGENT, looped=False):
    return replace(state, phase=phase, looped=looped)


LOOPING, COMPLETE = at(Phase.LOOPING, looped=True), at(Phase.COMPLETE, looped=True)
FINAL = (Snapshot("final", True), BoundaryAction.LAND)


# ---- what is done --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("state", "event", "seen", "wanted"),
    [
        # the script begins
        (AGENT, Begun(), OPEN, Transition(at(Phase.TRAINING))),
        (at(Phase.TRAINING), Begun(), OPEN, Transition(at(Phase.TRAINING))),
        (LOOPING, Begun(), OPEN, Transition(LOOPING)),
        (COMPLETE, Begun(), OPEN, Transition(COMPLETE)),
        (at(Phase.OVER), Begun(), OPEN, Transition(at(Phase.OVER))),
        # `steps`
        (AGENT, Looped(), OPEN, Transition(LOOPING, (BoundaryAction.RESUME,))),
        (at(Phase.TRAINING), Looped(), OPEN, Transition(LOOPING, (BoundaryAction.RESUME,))),
        (LOOPING, Looped(), OPEN, Transition(LOOPING, (BoundaryAction.GO_ON,))),
        (COMPLETE, Looped(), OPEN, Transition(LOOPING, (BoundaryAction.GO_ON,))),
        (at(Phase.OVER), Looped(), OPEN, Transition(at(Phase.OVER, looped=True), (BoundaryAction.RESUME,))),
        (
            at(Phase.OVER, looped=True),
            Looped(),
            OPEN,
            Transition(at(Phase.OVER, looped=True), (Refuse(AFTER_THE_END),)),
        ),
        # it comes to its total: with an agent, alone, alone and saved already
        (LOOPING, Reached(), OPEN, Transition(COMPLETE, (Snapshot("final"), BoundaryAction.LAND), (BoundaryAction.PART,))),
        (LOOPING, Reached(), SAVED, Transition(COMPLETE, (), (BoundaryAction.PART,))),
        (
            at(Phase.LOOPING, ALONE),
            Reached(),
            OPEN,
            Transition(at(Phase.COMPLETE, ALONE), FINAL, (BoundaryAction.TELL_END, BoundaryAction.PART)),
        ),
        (
            at(Phase.LOOPING, ALONE),
            Reached(),
            SAVED,
            Transition(at(Phase.COMPLETE, ALONE), (BoundaryAction.MARK_END,), (BoundaryAction.TELL_END, BoundaryAction.PART)),
        ),
        # `finish`
        (
            LOOPING,
            Finished(),
            OPEN,
            Transition(at(Phase.OVER, looped=True), (*FINAL, BoundaryAction.MARK_END), (Leave("finished"),)),
        ),
        (
            COMPLETE,
            Finished(),
            SAVED,
            Transition(at(Phase.OVER, looped=True), (BoundaryAction.MARK_END,), (Leave("finished"),)),
        ),
        (at(Phase.OVER), Finished(), OPEN, Transition(at(Phase.OVER))),
        # the script has ended with status 0
        # another training
        (COMPLETE, TrainsAgain(), SAVED, Transition(AGENT)),
        (LOOPING, TrainsAgain(), OPEN, Transition(LOOPING, (Refuse(TRAINS_TOO_EARLY),))),
        (LOOPING, Reached(), PASSED, Transition(COMPLETE)),
        (COMPLETE, Ended(), PASSED, Transition(COMPLETE, (Refuse(TRAINED_LESS),))),
        (at(Phase.OVER), Ended(), OPEN, Transition(at(Phase.OVER))),
        (AGENT, Ended(), OPEN, Transition(AGENT, (Refuse(TRAINED_NOTHING),))),
        (ALONE, Ended(), OPEN, Transition(ALONE)),
        (COMPLETE, Ended(), SAVED, Transition(at(Phase.OVER, looped=True), (BoundaryAction.MARK_END_ALONE,))),
        (COMPLETE, Ended(), replace(SAVED, leads=False), Transition(at(Phase.OVER, looped=True))),
        (at(Phase.COMPLETE, ALONE), Ended(), SAVED, Transition(at(Phase.OVER, ALONE))),
        (
            LOOPING,
            Ended(),
            OPEN,
            Transition(
                at(Phase.OVER, looped=True),
                (BoundaryAction.COMPARE_STEPS, *FINAL, BoundaryAction.MARK_END),
                (Leave("finished"),),
            ),
        ),
        (
            at(Phase.TRAINING, ALONE),
            Ended(),
            SAVED,
            Transition(at(Phase.OVER, ALONE), (BoundaryAction.COMPARE_STEPS, BoundaryAction.MARK_END), (Leave("finished"),)),
        ),
        # hosts that cannot read what others can
        (
            at(Phase.TRAINING),
            HostsUnfit(mine=True),
            OPEN,
            Transition(at(Phase.OVER), (), (Leave("unfit", UNFIT),)),
        ),
        (
            at(Phase.TRAINING),
            HostsUnfit(mine=False),
            OPEN,
            Transition(at(Phase.OVER), (), (Leave("resize", RESIZE),)),
        ),
    ],
)
def test_the_table(state, event, seen, wanted):
    assert next_turn(state, event, seen) == wanted


def test_the_table_has_a_row_for_every_phase_and_event():
    assert {type(event) for event in EVENTS} == {*TABLE, VoteResult, HostsUnfit, Rewound}
    for rows in TABLE.values():
        assert None in rows or {*Phase} <= {*rows}


@pytest.mark.parametrize("phase", [Phase.TRAINING, Phase.LOOPING, Phase.COMPLETE])
@pytest.mark.parametrize("event", [Ended(), Looped()])
def test_without_a_bucket_the_scripts_end_ends_nothing(phase, event):
    state = SessionState(phase, looped=True, by_script=True, stored=False)
    wanted = (
        Transition(state) if event == Ended() else Transition(replace(state, phase=Phase.LOOPING), (BoundaryAction.GO_ON,))
    )
    assert next_turn(state, event, OPEN) == wanted


# ---- what is asked -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("want", "left"),
    [
        (Want.GROW, Leave("resize", RESIZE)),
        (Want.RESIZE, Leave("resize", RESIZE)),
        (Want.DRAIN, Leave("drained", DRAINED)),
        (Want.STOP, Leave("stopped", STOPPED)),
    ],
)
def test_who_is_asked_to_leave_leaves_behind_a_committed_snapshot(want, left):
    why = {Want.DRAIN: "drain", Want.STOP: "stop"}.get(want, "resize")
    over = at(Phase.OVER, looped=True)
    asked = next_turn(LOOPING, VoteResult(want), OPEN)
    assert asked == Transition(over, (Snapshot(why), BoundaryAction.LAND), (left,))
    on_its_way = next_turn(LOOPING, VoteResult(want), replace(OPEN, flight_step=7))
    assert on_its_way == Transition(over, (BoundaryAction.LAND,), (left,))
    another = next_turn(LOOPING, VoteResult(want), replace(OPEN, flight_step=6))
    assert another == asked


def test_who_makes_room_for_newcomers_leaves_without_waiting_for_the_bucket():
    grow, leave = VoteResult(Want.GROW), Leave("resize", RESIZE)
    over, keeps = at(Phase.OVER, looped=True), replace(OPEN, keeps=True)
    assert next_turn(LOOPING, grow, keeps) == Transition(over, (BoundaryAction.KEEP,), (leave,))
    in_flight = next_turn(LOOPING, grow, replace(keeps, flight_step=6))
    assert in_flight == Transition(over, (Snapshot("resize"), BoundaryAction.LAND), (leave,))
    # a node that leaves takes its memory with it
    assert Snapshot("resize") in next_turn(LOOPING, VoteResult(Want.RESIZE), keeps).first


@pytest.mark.parametrize("want", WANTS)
def test_a_run_at_its_last_step_finishes_instead_of_leaving(want):
    assert next_turn(LOOPING, VoteResult(want), replace(SAVED, saved_step=-1)) == Transition(LOOPING)
    past = replace(SAVED, step=31)
    assert next_turn(LOOPING, VoteResult(want), past) == Transition(LOOPING)


def test_a_loop_of_ones_own_has_no_last_step():
    training, seen = at(Phase.TRAINING), BoundaryInputs(step=7)
    assert next_turn(training, VoteResult(Want.DRAIN), seen).after == (Leave("drained", DRAINED),)


def test_a_snapshot_is_made_and_training_goes_on():
    assert next_turn(LOOPING, VoteResult(Want.SNAPSHOT), OPEN) == Transition(LOOPING, (Snapshot("interval"),))
    request = VoteResult(Want.SNAPSHOT, Mark(Want.SNAPSHOT, "harness snapshots take"))
    assert next_turn(LOOPING, request, OPEN) == Transition(LOOPING, (BoundaryAction.ANSWER, Snapshot("request")))
    at_the_end = next_turn(LOOPING, request, SAVED)
    assert at_the_end == Transition(LOOPING, (BoundaryAction.ANSWER,))
    assert next_turn(LOOPING, VoteResult(Want.NOTHING), OPEN) == Transition(LOOPING)


def test_a_state_is_kept_ahead_unless_the_run_is_about_to_end():
    turn = next_turn(LOOPING, VoteResult(Want.KEEP_AHEAD), OPEN)
    assert turn == Transition(LOOPING, (BoundaryAction.KEEP_AHEAD,))
    last = replace(OPEN, total=OPEN.step)
    assert next_turn(LOOPING, VoteResult(Want.KEEP_AHEAD), last) == Transition(LOOPING)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (VoteResult(Want.SNAPSHOT), "interval"),
        (VoteResult(Want.SNAPSHOT, signalled=Want.SNAPSHOT), "request"),
        (VoteResult(Want.SNAPSHOT, Mark(Want.SNAPSHOT, "notice: aws")), "request"),
        (VoteResult(Want.SNAPSHOT, Mark(Want.DRAIN, "notice: aws")), "interval"),
        (VoteResult(Want.RESIZE), "resize"),
        (VoteResult(Want.DRAIN, Mark(Want.DRAIN, "touched by hand")), "drain"),
        (VoteResult(Want.DRAIN, Mark(Want.DRAIN, "notice: aws")), "notice"),
        (VoteResult(Want.RESIZE, Mark(Want.RESIZE, "signal 15")), "notice"),
        (VoteResult(Want.DRAIN, signalled=Want.DRAIN), "drain"),
        (VoteResult(Want.STOP), "stop"),
    ],
)
def test_why_a_snapshot_is_made(asked, why):
    assert why_of_vote(asked) == why


@pytest.mark.parametrize(
    ("votes", "want"),
    [
        ([3, 0, 0, 0, 0, 0, 0], Want.NOTHING),
        ([2, 1, 0, 0, 0, 0, 0], Want.KEEP_AHEAD),
        ([2, 1, 1, 0, 0, 0, 0], Want.SNAPSHOT),
        ([5, 0, 1, 1, 0, 0, 0], Want.GROW),
        ([5, 0, 1, 1, 1, 0, 0], Want.RESIZE),
        ([5, 0, 9, 9, 9, 1, 0], Want.DRAIN),
        ([5, 0, 9, 9, 9, 9, 1], Want.STOP),
        ([0, 0, 0, 0, 0, 0, 0], Want.NOTHING),
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
        (BoundaryInputs(step=30, flight_step=30), (BoundaryAction.LAND,)),
        (BoundaryInputs(step=30, flight_step=20, saved_step=20), FINAL),
        (BoundaryInputs(step=30, flight_step=30, pending=True), FINAL),
        (BoundaryInputs(step=30, flight_step=30, unsaved=True), (BoundaryAction.LAND, *FINAL)),
    ],
)
def test_the_end_is_saved_once(seen, acts):
    assert save_end(seen, final=True) == acts


def test_what_is_said_of_the_end():
    assert where_it_ends(BoundaryInputs(step=7)) == "step 7" and where_it_ends(OPEN) == "step 7 of 30"
    assert end_words(OPEN) == "ended early at step 7 of 30"
    assert end_words(SAVED) == "step 30 of 30 is the last"
    assert end_words(BoundaryInputs(step=7)) == "step 7 is the last"
    assert end_words(replace(OPEN, until=7)) == "step 7 of 30 is the last"
    assert apart({7}) == "" and "(3, 7)" in apart({7, 3})


# ---- in all of them ------------------------------------------------------------------------------
def every_turn():
    states = [
        SessionState(*values)
        for values in itertools.product(Phase, (False, True), (False, True), (False, True))
    ]
    seens = [
        BoundaryInputs(7, total, 1 << 62, saved, flight, pending, unsaved, keeps, leads)
        for total, saved, flight, pending, unsaved, keeps, leads in itertools.product(
            (0, 7, 30), (-1, 7), (None, 6, 7), *[(False, True)] * 4
        )
    ]
    for state, event, seen in itertools.product(states, EVENTS, seens):
        yield state, event, seen, next_turn(state, event, seen)


def test_what_holds_in_every_turn():
    n = 0
    for state, event, seen, done in every_turn():
        n += 1
        assert (done.state.by_script, done.state.stored) == (state.by_script, state.stored)
        assert state.looped <= done.state.looped or event == TrainsAgain()
        if state.phase is Phase.OVER:  # nothing leaves it
            assert done.state.phase is Phase.OVER
        acts = (*done.first, *done.after)
        leaves = [act for act in acts if isinstance(act, Leave)]
        if leaves:  # it is the last thing, and what was trained is committed
            assert acts[-1:] == tuple(leaves) and done.state.phase is Phase.OVER
            if not isinstance(event, HostsUnfit | Rewound):  # what it trained last was bad
                kept = BoundaryAction.KEEP in done.first and event == VoteResult(Want.GROW)
                assert kept or BoundaryAction.LAND in done.first or seen.saved_step == seen.step
        if done.state.phase is Phase.COMPLETE and state.phase is not Phase.COMPLETE:
            assert BoundaryAction.LAND in done.first or seen.saved_step == seen.step
        if any(isinstance(act, Refuse) for act in acts):
            assert len(acts) == 1 and done.state.phase is state.phase
        for before, act in itertools.pairwise(acts):  # a final snapshot is waited for
            assert not isinstance(before, Snapshot) or not before.final or act is BoundaryAction.LAND
        assert len([act for act in acts if isinstance(act, Snapshot)]) <= 1
        same = next_turn(state, event, replace(seen, leads=not seen.leads))
        collective = [act for act in acts if act is not BoundaryAction.MARK_END_ALONE]
        others = [act for act in (*same.first, *same.after) if act is not BoundaryAction.MARK_END_ALONE]
        assert collective == others and same.state == done.state  # on every rank
    assert n == 40 * len(EVENTS) * 288


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


@pytest.mark.parametrize("want", [Want.SNAPSHOT, Want.GROW])
def test_what_is_asked_for_waits_for_the_snapshot_in_flight(want):
    votes, wants = Votes(None, leads=False), torch.zeros(len(Want), dtype=torch.int64)
    votes._signal(want)
    votes.cast(wants, 1, {}, quiet=False)
    assert not wants[want]
    votes.cast(wants, 1, {}, quiet=True)
    assert wants[want] == 1
    votes._signal(Want.DRAIN)  # who must leave does not wait
    votes.cast(wants, 1, {}, quiet=False)
    assert wants[Want.DRAIN] == 1
