"""The life of a session as a state machine: what was asked, and what it has to do. Pure: no torch,
no clock, nothing is read or written here.

`turn(state, event, seen)` says what to do first, the state that holds once that is done, and what
to do in it. `hands.py` performs the acts, in their order. All ranks give the
same state, event and `Seen` (of `Seen.leads` only rank 0 knows), so all do the same.

    phase      event      acts                                                      then
    any        Begun      -                                                         TRAINING
    any        Looped     resume; if there was a loop before: go on                 LOOPING
    OVER       Looped     if there was a loop before: refuse                        OVER
    any        Asked      see `asked`: answer, snapshot, land; leave with a code    OVER if it left
    any        Gone       land; leave with a code                                   OVER
    any        HostsUnfit leave: this host for good, the others to form a world without it   OVER
    any        Overfull   leave, for a smaller world; refuse if there is none, or no agent  OVER
    any        Reached    save the end, tell that it ended if no agent waits        COMPLETE
    OVER       Finished   -                                                         OVER
    others     Finished   save the end, mark it, leave                              OVER
    OVER       Ended      -                                                         OVER
    ATTACHED   Ended      refuse, if an agent waits for the end; else -             ATTACHED
    COMPLETE   Ended      rank 0 marks the end, if an agent waits for it            OVER
    others     Ended      compare the ranks' steps, then as Finished                OVER

Nothing leaves OVER.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from harness.core.losses import ASSUMED_S, derived_interval_s
from harness.core.world import RESIZE, UNFIT
from harness.node.marks import EXIT_CODE, Mark, Want

NO_MARK = Mark(Want.NOTHING, "")


class Phase(Enum):
    """Where a session is between `attach` and the script's end."""

    ATTACHED = "attached"  # nothing was resumed or trained
    TRAINING = "training"  # resumed, or in a loop of the script's own
    LOOPING = "looping"  # `steps` was called
    COMPLETE = "complete"  # ... and came to its total, which is committed
    OVER = "over"  # finished, or left because it was asked to


@dataclass(frozen=True)
class SessionState:
    phase: Phase = Phase.ATTACHED
    looped: bool = False  # `steps` was called before
    by_script: bool = False  # an agent waits for the script's end
    stored: bool = True  # the run has a bucket


@dataclass(frozen=True)
class Seen:
    """What the hands know when an event comes."""

    step: int  # optimizer updates done
    total: int = 0  # of `steps`; 0: not known
    until: int = 1 << 62  # a replay's last step
    saved_step: int = -1  # of the newest snapshot that is surely committed
    flight_step: int | None = None  # of the snapshot that is on its way
    pending: bool = False  # the last step's numbers are still on their way
    unsaved: bool = False  # there are step records that no snapshot carries
    leads: bool = True  # this is rank 0
    enough: str = ""  # why the script ends the run here


# ---- events --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Begun:
    """The script resumes, or is at a safe point of its own loop."""


@dataclass(frozen=True)
class Looped:
    """The script has called `steps`."""


@dataclass(frozen=True)
class Asked:
    """The ranks have agreed at a step boundary what is wanted."""

    want: Want
    mark: Mark = NO_MARK
    signalled: Want = Want.NOTHING


@dataclass(frozen=True)
class Reached:
    """The loop came to its total."""


@dataclass(frozen=True)
class Finished:
    """The script has called `finish`."""


@dataclass(frozen=True)
class Ended:
    """The script has ended with status 0."""


@dataclass(frozen=True)
class Gone:
    """The script has saved in its own way, and leaves as it was asked to."""

    want: Want


@dataclass(frozen=True)
class HostsUnfit:
    """Some hosts cannot read what others can. `mine`: this is one of them."""

    mine: bool


@dataclass(frozen=True)
class Overfull:
    """The world has more ranks than a step has work for. `smaller`: some of its members can form
    one that has not; `what`: for people."""

    smaller: bool
    what: str


SessionEvent = Begun | Looped | Asked | Reached | Finished | Ended | Gone | HostsUnfit | Overfull


# ---- acts ----------------------------------------------------------------------------------------
class Do(Enum):
    """Acts that need no more words."""

    RESUME = "load the newest snapshot"
    GO_ON = "do what the last loop left open, and tell that another begins"
    ANSWER = "a snapshot that was asked for is made now"
    LAND = "wait until the snapshot on its way is committed; its failure is ours"
    MARK_END = "all agree, and rank 0 marks the newest snapshot as the run's last"
    MARK_END_ALONE = "mark it, and tell that the session has ended; no rank need wait for another"
    TELL_END = "tell that the session has ended"
    COMPARE_STEPS = "all ranks must be at the same step"
    PART = "nobody hangs up while another still talks"


@dataclass(frozen=True)
class Snapshot:
    why: str
    final: bool = False


@dataclass(frozen=True)
class Leave:
    """Tell it, and part. `code`: what the process exits with at once; None: the script goes on."""

    why: str
    code: int | None = None


@dataclass(frozen=True)
class Refuse:
    """Raise BadInput."""

    what: str


SessionAct = Do | Snapshot | Leave | Refuse


@dataclass(frozen=True)
class Turn:
    """`first`, in `state` as it was; then `state`; then `after` in it. Who fails in `first` stays
    where it was."""

    state: SessionState
    first: tuple[SessionAct, ...] = ()
    after: tuple[SessionAct, ...] = ()


# ---- the table -----------------------------------------------------------------------------------
def turn(state: SessionState, event: SessionEvent, seen: Seen) -> Turn:
    """What `event` leads to."""
    if isinstance(event, Asked):
        return asked(state, event, seen)
    if isinstance(event, HostsUnfit):
        leave = Leave("unfit", UNFIT) if event.mine else Leave("resize", RESIZE)
        return Turn(enter(state, Phase.OVER), after=(leave,))
    if isinstance(event, Overfull):
        if not (event.smaller and state.by_script):
            return Turn(state, (Refuse(event.what),))
        return Turn(enter(state, Phase.OVER), after=(Leave("resize", RESIZE),))
    if isinstance(event, Gone):
        leave = Leave(LEFT[event.want], EXIT_CODE[event.want])
        return Turn(enter(state, Phase.OVER), (Do.LAND,), (leave,))
    rows = TABLE[type(event)]
    return rows.get(state.phase, rows[None])(state, seen)


def asked(state: SessionState, event: Asked, seen: Seen) -> Turn:
    """The ranks agree on a want. A run at its last step, or that its script ends there, finishes
    instead of leaving."""
    want = event.want
    if want is Want.NOTHING:
        return Turn(state)
    why = why_of(event)
    done = seen.step >= seen.total > 0 or bool(seen.enough)
    first: tuple[SessionAct, ...] = (Do.ANSWER,) if why == "request" else ()
    if not done and seen.flight_step != seen.step:
        first += (Snapshot(why),)
    if want is Want.SNAPSHOT or done:
        return Turn(state, first)
    leave = Leave(LEFT[want], EXIT_CODE[want])
    return Turn(enter(state, Phase.OVER), (*first, Do.LAND), (leave,))


WHY = {
    Want.SNAPSHOT: "interval",
    Want.RESIZE: "resize",
    Want.DRAIN: "drain",
    Want.STOP: "stop",
}
LEFT = {Want.RESIZE: "resize", Want.DRAIN: "drained", Want.STOP: "stopped"}


def why_of(event: Asked) -> str:
    """Why the snapshot is made, in one word: it stands in the facts."""
    if event.want is Want.SNAPSHOT:
        by_people = Want.SNAPSHOT in (event.mark.want, event.signalled)
        return "request" if by_people else WHY[event.want]
    return "notice" if event.mark.why.startswith(("notice", "signal")) else WHY[event.want]


def enter(state: SessionState, phase: Phase) -> SessionState:
    """Nothing leaves OVER."""
    return state if state.phase is Phase.OVER else replace(state, phase=phase)


def save_end(seen: Seen, final: bool) -> tuple[SessionAct, ...]:
    """See to it that the step at which we are is committed. Without a snapshot among the acts it
    was already, and may not be known to be the last."""
    acts: tuple[SessionAct, ...] = ()
    saved_step = seen.saved_step
    if not seen.pending and seen.flight_step == seen.step:
        acts, saved_step = (Do.LAND,), seen.step
    if saved_step != seen.step or seen.pending or seen.unsaved:
        acts += (Snapshot("final", final), Do.LAND)
    return acts


def _begun(state: SessionState, seen: Seen) -> Turn:
    begun = state.phase is not Phase.ATTACHED
    return Turn(state if begun else enter(state, Phase.TRAINING))


def _looped(state: SessionState, seen: Seen) -> Turn:
    if not state.looped:
        first: SessionAct = Do.RESUME
    elif state.phase is Phase.OVER:
        return Turn(state, (Refuse(AFTER_THE_END),))
    else:
        first = Do.GO_ON
    return Turn(replace(enter(state, Phase.LOOPING), looped=True), (first,))


def _reached(state: SessionState, seen: Seen) -> Turn:
    """What was trained is safe from here on, whatever the script does next. Whether the run ends
    with it only the script's end tells, and who waits for that is an agent. Without one nobody
    acts on it before."""
    first = save_end(seen, final=not state.by_script)
    told: tuple[SessionAct, ...] = ()
    if not state.by_script:
        told = (Do.TELL_END,)
        if not any(isinstance(act, Snapshot) for act in first):
            first += (Do.MARK_END,)
    return Turn(enter(state, Phase.COMPLETE), first, (*told, Do.PART))


def _finished(state: SessionState, seen: Seen) -> Turn:
    first = (*save_end(seen, final=True), Do.MARK_END)
    return Turn(enter(state, Phase.OVER), first, (Leave("finished"),))


def _ended_before_it_began(state: SessionState, seen: Seen) -> Turn:
    if not (state.stored and state.by_script):
        return Turn(state)
    return Turn(state, (Refuse(TRAINED_NOTHING),))


def _ended_complete(state: SessionState, seen: Seen) -> Turn:
    if not state.stored:
        return Turn(state)
    alone = seen.leads and state.by_script
    return Turn(enter(state, Phase.OVER), (Do.MARK_END_ALONE,) if alone else ())


def _ended_on_the_way(state: SessionState, seen: Seen) -> Turn:
    if not state.stored:
        return Turn(state)
    finished = _finished(state, seen)
    return replace(finished, first=(Do.COMPARE_STEPS, *finished.first))


def _nothing(state: SessionState, seen: Seen) -> Turn:
    return Turn(state)


TABLE: dict[
    type, dict[Phase | None, Callable[[SessionState, Seen], Turn]]
] = {  # None: other phases
    Begun: {None: _begun},
    Looped: {None: _looped},
    Reached: {None: _reached},
    Finished: {Phase.OVER: _nothing, None: _finished},
    Ended: {
        Phase.OVER: _nothing,
        Phase.ATTACHED: _ended_before_it_began,
        Phase.COMPLETE: _ended_complete,
        None: _ended_on_the_way,
    },
}
AFTER_THE_END = (
    "run.steps(...) after run.finish(): the run has ended; call finish after the last loop only"
)
TRAINED_NOTHING = (
    "the script ended with status 0 after harness.attach() and trained nothing: wanted "
    "run.steps(...), or run.resume() and run.finish() around a loop of its own; end with another "
    "status if that is a failure"
)


# ---- words and numbers ---------------------------------------------------------------------------
def winner(votes: Sequence[int]) -> Want:
    """`votes[w]` > 0: some rank wants w. The greatest want wins."""
    return max((w for w in Want if votes[w] > 0), default=Want.NOTHING)


def where(seen: Seen) -> str:
    return f"step {seen.step} of {seen.total}" if seen.total else f"step {seen.step}"


def end_words(seen: Seen) -> str:
    """How the run ended, for people; a manifest keeps it."""
    if seen.enough:
        return f"ended early at {where(seen)}: {seen.enough}"
    early = seen.step < min(seen.total, seen.until)
    return f"ended early at {where(seen)}" if early else f"{where(seen)} is the last"


def apart(steps: set[int]) -> str:
    """Why ranks at these steps cannot end the run together; "": they can."""
    if len(steps) <= 1:
        return ""
    return (
        f"the ranks left the training at different steps ({', '.join(map(str, sorted(steps)))}), "
        "so it has no final state: decide together (run.sum) when to leave the loop, and call "
        "run.finish() there"
    )


@dataclass(frozen=True)
class Interval:
    """How often to snapshot: every so many steps, or seconds, or (neither) derived from what a
    snapshot costs."""

    every_s: float | None = None
    every_steps: int | None = None

    @property
    def derived(self) -> bool:
        return not self.every_steps and self.every_s is None

    def seconds(
        self, step_s: float, cost_s: float, commit_s: float, between_s: float = ASSUMED_S
    ) -> float:
        """Between two snapshots. `step_s`: of one step; `cost_s`: of training that a snapshot
        costs; `commit_s`: from its begin to its commit; `between_s`: between two losses without
        one. 0: unknown, since they are counted in steps and no step was measured."""
        if self.every_steps:
            return self.every_steps * step_s
        if self.every_s is not None:
            return self.every_s
        return derived_interval_s(cost_s, commit_s, between_s)

    def due(self, step: int, since_s: float, seconds: float) -> bool:
        """At this step, `since_s` after the last one. `seconds`: what the method of that name
        says."""
        return step % self.every_steps == 0 if self.every_steps else since_s >= seconds
