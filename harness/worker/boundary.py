"""The life of a session as a state machine: from events to the acts that follow. Runs in the
worker. Pure: no torch, no clock, no reading or writing.

`next_turn(state, event, seen)` returns the acts to perform first, the state once they are done, and
the acts to perform in that state. `Boundary` performs them in order. All ranks pass the same state,
event and `BoundaryInputs` (except `BoundaryInputs.leads`, which is true on rank 0 only), so all act
alike.

A phase of the session is no phase of the run (`bucket/phases.py`): the session passes through its
own in each of those.

    phase      event      acts                                                      next phase
    COMPLETE   TrainsAgain   -                                                      ATTACHED
    others     TrainsAgain   refuse: the training before has not come to its end    the same
    any        Begun      -                                                         TRAINING
    any        Looped     resume; go on if there was a loop before                  LOOPING
    OVER       Looped     refuse if there was a loop before                         OVER
    any        VoteResult see `asked`: answer, snapshot, land; leave with a code    OVER if it left
    any        ScriptLeft land; leave with a code                                   OVER
    any        HostsUnfit leave: this host for good, the others to form a world without it   OVER
    any        Rewound    leave, to go on from an older snapshot                    OVER
    any        Overfull   leave, for a smaller world; refuse if there is none, or no agent  OVER
    any        Reached    save the end, record that it ended if no agent waits; -   COMPLETE
                          if an earlier process did all of that
    OVER       Finished   -                                                         OVER
    others     Finished   save the end, mark it, leave                              OVER
    OVER       Ended      -                                                         OVER
    ATTACHED   Ended      refuse, if an agent waits for the end; else -             ATTACHED
    COMPLETE   Ended      rank 0 marks the end, if an agent waits for it; refuse    OVER
                          if the run went on behind it
    others     Ended      compare the ranks' steps, then like Finished              OVER

OVER is never left.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from harness.core.facts import SessionEnded, SessionStarted
from harness.core.world import RESIZE, UNFIT, BadInput
from harness.node.heartbeat import WorkerPhase
from harness.node.marks import EXIT_CODE, Mark, Want
from harness.worker import alone
from harness.worker.resuming.resume import Resume, UnfitHosts
from harness.worker.snapshotter import StagingBuffers
from harness.worker.step_timing import HARNESS, SNAPSHOT

if TYPE_CHECKING:
    from harness.worker.step import Work
    from harness.worker.step_log import Pending

NO_MARK = Mark(Want.NOTHING, "")


class Phase(Enum):
    """The phase of a session between `attach` and the script's end."""

    ATTACHED = "attached"  # nothing has been resumed or trained
    TRAINING = "training"  # resumed, or in a loop of the script's own
    LOOPING = "looping"  # `steps` was called
    COMPLETE = "complete"  # a loop reached its total, which is committed
    OVER = "over"  # finished, or left on request


@dataclass(frozen=True)
class SessionState:
    phase: Phase = Phase.ATTACHED
    looped: bool = False  # `steps` was called before
    by_script: bool = False  # an agent waits for the script's end
    stored: bool = True  # the run has a bucket


@dataclass(frozen=True)
class BoundaryInputs:
    """The facts about a session that decisions depend on, at the time of an event."""

    step: int  # optimizer updates done
    total: int = 0  # the last step of the script's loop; 0: unknown
    until: int = 1 << 62  # a replay's last step
    saved_step: int = -1  # step of the newest snapshot that is surely committed
    flight_step: int | None = None  # step of the snapshot under way; None: no snapshot is
    pending: bool = False  # the last step's numbers have not arrived yet
    unsaved: bool = False  # there are step records that no snapshot carries
    keeps: bool = False  # the nodes can keep the state in memory for the next world
    leads: bool = True  # this is rank 0
    enough: str = ""  # why the script ends the run here; "": it does not
    passed: bool = False  # the phase of the run that this is came to its end in an earlier process


# ---- events --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class TrainsAgain:
    """Event: the script begins another training, the run's next phase."""


@dataclass(frozen=True)
class Begun:
    """Event: the script resumes, or is at a safe point of its own loop."""


@dataclass(frozen=True)
class Looped:
    """Event: the script has called `steps`, or a trainer begins its loop."""


@dataclass(frozen=True)
class VoteResult:
    """Event: the ranks have agreed at a step boundary what is wanted."""

    want: Want
    mark: Mark = NO_MARK
    signalled: Want = Want.NOTHING


@dataclass(frozen=True)
class Reached:
    """Event: the loop has reached its total."""


@dataclass(frozen=True)
class Finished:
    """Event: the script has called `finish`."""


@dataclass(frozen=True)
class Ended:
    """Event: the script has ended with status 0."""


@dataclass(frozen=True)
class ScriptLeft:
    """Event: the script has saved its own checkpoint and leaves as requested."""

    want: Want


@dataclass(frozen=True)
class HostsUnfit:
    """Event: some hosts cannot read what others can. `mine`: this is one of them."""

    mine: bool


@dataclass(frozen=True)
class Overfull:
    """Event: the world has more ranks than a step has work for. `smaller`: some of its members can
    form a world that has not; `what`: an explanation for people."""

    smaller: bool
    what: str


@dataclass(frozen=True)
class Rewound:
    """Event: the guards have ordered to go on from an older snapshot."""


SessionEvent = (
    TrainsAgain
    | Begun
    | Looped
    | VoteResult
    | Reached
    | Finished
    | Ended
    | ScriptLeft
    | HostsUnfit
    | Overfull
    | Rewound
)


# ---- acts ----------------------------------------------------------------------------------------
class BoundaryAction(Enum):
    """Acts without arguments."""

    RESUME = "load the newest snapshot"
    GO_ON = "do what the last loop left open, and tell that another begins"
    ANSWER = "a snapshot that was asked for is made now"
    KEEP_AHEAD = "take the turn in keeping states in the nodes' memory"
    KEEP = "keep the state in the nodes' memory; if no node can, in a committed snapshot"
    LAND = "wait until the snapshot on its way is committed; its failure is ours"
    MARK_END = "all agree, and rank 0 marks the newest snapshot as the run's last"
    MARK_END_ALONE = "mark it, and tell that the session has ended; no rank need wait for another"
    TELL_END = "tell that the session has ended"
    COMPARE_STEPS = "all ranks must be at the same step"
    PART = "nobody hangs up while another still talks"


@dataclass(frozen=True)
class Snapshot:
    """Act: take a snapshot. `final`: it is the run's last."""

    why: str
    final: bool = False


@dataclass(frozen=True)
class Leave:
    """Act: record the end and part from the other ranks. `code`: the status with which the process
    exits at once; None: the script continues."""

    why: str
    code: int | None = None


@dataclass(frozen=True)
class Refuse:
    """Act: raise BadInput with this text."""

    what: str


SessionAct = BoundaryAction | Snapshot | Leave | Refuse


@dataclass(frozen=True)
class Transition:
    """The acts that follow from an event: `first` in the old state, then `after` in the new one.
    After a failure in `first` the old state remains."""

    state: SessionState
    first: tuple[SessionAct, ...] = ()
    after: tuple[SessionAct, ...] = ()


# ---- the table -----------------------------------------------------------------------------------
def next_turn(state: SessionState, event: SessionEvent, seen: BoundaryInputs) -> Transition:
    """Return the acts and the state that follow from `event`."""
    if isinstance(event, VoteResult):
        return asked(state, event, seen)
    if isinstance(event, HostsUnfit):
        leave = Leave("unfit", UNFIT) if event.mine else Leave("resize", RESIZE)
        return Transition(enter(state, Phase.OVER), after=(leave,))
    if isinstance(event, Rewound):
        return Transition(enter(state, Phase.OVER), after=(Leave("rewind", RESIZE),))
    if isinstance(event, Overfull):
        if not (event.smaller and state.by_script):
            return Transition(state, (Refuse(event.what),))
        return Transition(enter(state, Phase.OVER), after=(Leave("resize", RESIZE),))
    if isinstance(event, ScriptLeft):
        leave = Leave(LEFT[event.want], EXIT_CODE[event.want])
        return Transition(enter(state, Phase.OVER), (BoundaryAction.LAND,), (leave,))
    rows = TABLE[type(event)]
    return rows.get(state.phase, rows[None])(state, seen)


def asked(state: SessionState, event: VoteResult, seen: BoundaryInputs) -> Transition:
    """Return what follows when the ranks agree on a want. A run at its last step, or one that its
    script ends there, does not leave, since it is about to finish."""
    want = event.want
    done = seen.step >= seen.total > 0 or bool(seen.enough)
    if want in (Want.NOTHING, Want.KEEP_AHEAD):
        keeps = want is Want.KEEP_AHEAD and not done
        return Transition(state, (BoundaryAction.KEEP_AHEAD,) if keeps else ())
    why = why_of_vote(event)
    first: tuple[SessionAct, ...] = (BoundaryAction.ANSWER,) if why == "request" else ()
    if not done and seen.flight_step != seen.step:
        first += (Snapshot(why),)
    if want is Want.SNAPSHOT or done:
        return Transition(state, first)
    leave = Leave(LEFT[want], EXIT_CODE[want])
    if want is Want.GROW and seen.keeps and seen.flight_step is None:
        return Transition(enter(state, Phase.OVER), (BoundaryAction.KEEP,), (leave,))
    return Transition(enter(state, Phase.OVER), (*first, BoundaryAction.LAND), (leave,))


WHY = {
    Want.SNAPSHOT: "interval",
    Want.GROW: "resize",
    Want.RESIZE: "resize",
    Want.DRAIN: "drain",
    Want.STOP: "stop",
}
LEFT = {Want.GROW: "resize", Want.RESIZE: "resize", Want.DRAIN: "drained", Want.STOP: "stopped"}


def why_of_vote(event: VoteResult) -> str:
    """Return why the snapshot is made, as one word for the facts."""
    if event.want is Want.SNAPSHOT:
        by_people = Want.SNAPSHOT in (event.mark.want, event.signalled)
        return "request" if by_people else WHY[event.want]
    return "notice" if event.mark.why.startswith(("notice", "signal")) else WHY[event.want]


def enter(state: SessionState, phase: Phase) -> SessionState:
    """Return the state in this phase; OVER is never left."""
    return state if state.phase is Phase.OVER else replace(state, phase=phase)


def save_end(seen: BoundaryInputs, final: bool) -> tuple[SessionAct, ...]:
    """Return the acts that make the current step committed. If no snapshot is among them, the step
    was committed already, and its manifest may not mark it as the last."""
    acts: tuple[SessionAct, ...] = ()
    saved_step = seen.saved_step
    if not seen.pending and seen.flight_step == seen.step:
        acts, saved_step = (BoundaryAction.LAND,), seen.step
    if saved_step != seen.step or seen.pending or seen.unsaved:
        acts += (Snapshot("final", final), BoundaryAction.LAND)
    return acts


def _trains_again(state: SessionState, seen: BoundaryInputs) -> Transition:
    return Transition(replace(state, phase=Phase.ATTACHED, looped=False))


def _trains_too_early(state: SessionState, seen: BoundaryInputs) -> Transition:
    return Transition(state, (Refuse(TRAINS_TOO_EARLY),))


def _begun(state: SessionState, seen: BoundaryInputs) -> Transition:
    begun = state.phase is not Phase.ATTACHED
    return Transition(state if begun else enter(state, Phase.TRAINING))


def _looped(state: SessionState, seen: BoundaryInputs) -> Transition:
    if not state.looped:
        first: SessionAct = BoundaryAction.RESUME
    elif state.phase is Phase.OVER:
        return Transition(state, (Refuse(AFTER_THE_END),))
    else:
        first = BoundaryAction.GO_ON
    return Transition(replace(enter(state, Phase.LOOPING), looped=True), (first,))


def _reached(state: SessionState, seen: BoundaryInputs) -> Transition:
    """Return the acts that commit what was trained, whatever the script does next. If an agent
    waits for the script's end, only that end decides whether the run is over; without an agent the
    end of the run is recorded here."""
    if seen.passed:
        return Transition(enter(state, Phase.COMPLETE))
    first = save_end(seen, final=not state.by_script)
    told: tuple[SessionAct, ...] = ()
    if not state.by_script:
        told = (BoundaryAction.TELL_END,)
        if not any(isinstance(act, Snapshot) for act in first):
            first += (BoundaryAction.MARK_END,)
    return Transition(enter(state, Phase.COMPLETE), first, (*told, BoundaryAction.PART))


def _finished(state: SessionState, seen: BoundaryInputs) -> Transition:
    first = (*save_end(seen, final=True), BoundaryAction.MARK_END)
    return Transition(enter(state, Phase.OVER), first, (Leave("finished"),))


def _ended_before_it_began(state: SessionState, seen: BoundaryInputs) -> Transition:
    if not (state.stored and state.by_script):
        return Transition(state)
    return Transition(state, (Refuse(TRAINED_NOTHING),))


def _ended_complete(state: SessionState, seen: BoundaryInputs) -> Transition:
    if not state.stored:
        return Transition(state)
    if seen.passed:
        return Transition(state, (Refuse(TRAINED_LESS),))
    alone = seen.leads and state.by_script
    return Transition(enter(state, Phase.OVER), (BoundaryAction.MARK_END_ALONE,) if alone else ())


def _ended_on_the_way(state: SessionState, seen: BoundaryInputs) -> Transition:
    if not state.stored:
        return Transition(state)
    if seen.passed:
        return Transition(state, (Refuse(TRAINED_LESS),))
    finished = _finished(state, seen)
    return replace(finished, first=(BoundaryAction.COMPARE_STEPS, *finished.first))


def _nothing(state: SessionState, seen: BoundaryInputs) -> Transition:
    return Transition(state)


TABLE: dict[
    type, dict[Phase | None, Callable[[SessionState, BoundaryInputs], Transition]]
] = {  # None: other phases
    TrainsAgain: {Phase.COMPLETE: _trains_again, None: _trains_too_early},
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
TRAINS_TOO_EARLY = (
    "the script begins another training, and the one before it has not come to its end: wanted one "
    "after the other; a training that is given up, or ends with an error that the script catches, "
    "cannot be told from one that goes on. Make it a run of its own, or run with --adapt none"
)
TRAINED_LESS = (
    "the script ended with status 0 after a training that this run has gone on behind: it trained "
    "more often when the run began; run it as it was then, or use a new run URL"
)
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
    """Return the greatest want that some rank has. `votes[w]` > 0: some rank wants w."""
    return max((w for w in Want if votes[w] > 0), default=Want.NOTHING)


def where_it_ends(seen: BoundaryInputs) -> str:
    return f"step {seen.step} of {seen.total}" if seen.total else f"step {seen.step}"


def end_words(seen: BoundaryInputs) -> str:
    """Return how the run ended, for people; a manifest keeps it."""
    if seen.enough:
        return f"ended early at {where_it_ends(seen)}: {seen.enough}"
    early = seen.step < min(seen.total, seen.until)
    return (
        f"ended early at {where_it_ends(seen)}" if early else f"{where_it_ends(seen)} is the last"
    )


def apart(steps: set[int]) -> str:
    """Return why ranks at these steps cannot end the run together; "": they can."""
    if len(steps) <= 1:
        return ""
    return (
        f"the ranks left the training at different steps ({', '.join(map(str, sorted(steps)))}), "
        "so it has no final state: decide together (run.sum) when to leave the loop, and call "
        "run.finish() there"
    )


# Execution of the acts that the session's state machine decides.


class Boundary:
    """The executor of a session's acts. `total`: the last step that the script requested; `until`:
    the step at which a replay stops; `votes_late`: see `attach`."""

    def __init__(
        self,
        work: Work,
        hold: StagingBuffers,
        resume: Resume,
        state: SessionState,
        until: int,
        late: bool,
    ):
        self._work, self._hold, self._resume = work, hold, resume
        self._peers, self._run = work.peers, work.run
        self._state = state
        self.total, self.until, self.votes_late = 0, until, late
        self.enough = ""  # why the script ends the run here, agreed by all ranks; "": it does not
        # the last step, whose votes are not acted upon yet (`votes_late`)
        self._counted: Pending | None = None

    @property
    def has_looped(self) -> bool:
        """True if a training loop has begun in the present phase."""
        return self._state.looped

    def next_phase(self) -> None:
        """Begin the run's next phase: another training of the script, with a state of its own.
        Raises BadInput if the one before has not come to its end."""
        self.turn(TrainsAgain())
        self.total, self.enough, self._counted = 0, "", None
        self._work.votes.enough = ""
        self._hold.plan_anew()
        self._run.next_phase()

    @alone.world.inside()
    def turn(self, event: SessionEvent) -> None:
        """Perform the acts that follow from the event, and change the state. Raises BadInput,
        SystemExit, and whatever the acts raise."""
        self._peers.need_world()
        turn = next_turn(self._state, event, self._seen())
        for act in turn.first:
            self._do(act)
        self._state = turn.state
        for act in turn.after:
            self._do(act)

    def _seen(self) -> BoundaryInputs:
        log, snapshotter = self._work.log, self._work.snapshotter
        return BoundaryInputs(
            step=self._run.step,
            total=self.total,
            until=self.until,
            saved_step=snapshotter.saved_step,
            flight_step=snapshotter.flight_step,
            pending=log.pending is not None,
            unsaved=bool(log.unsaved),
            enough=self.enough,
            leads=self._peers.rank == 0,
            keeps=self._work.same.keeps,
            passed=self._run.phase.ends == self._run.step,
        )

    def _do(self, act: SessionAct) -> None:
        match act:
            case Snapshot(why, final):
                ended = end_words(self._seen()) if final else ""
                own_loop = self._work.feed.batching is None
                self._work.timer.enter(SNAPSHOT)
                self._work.snapshotter.take(why, ended, own_loop)
            case Leave(why, code):
                self._leave(why)
                if code is not None:
                    sys.stdout.flush()
                    sys.exit(code)
            case Refuse(what):
                raise BadInput(what)
            case BoundaryAction.RESUME:
                self.resume()
            case BoundaryAction.GO_ON:
                self._go_on()
            case BoundaryAction.ANSWER:
                self._work.votes.answered()
            case BoundaryAction.KEEP_AHEAD:
                self._work.timer.enter(SNAPSHOT)
                self._peers.life.tell(WorkerPhase.STAGING, self._run.step)
                assert self._work.ahead is not None
                self._work.ahead.turn(own_loop=self._work.feed.batching is None)
            case BoundaryAction.KEEP:
                if not self._peers.sum(float(self._work.same.keep())):
                    self._do(Snapshot(WHY[Want.GROW]))
                    self._do(BoundaryAction.LAND)
            case BoundaryAction.LAND:
                self._work.snapshotter.land(must=True)
            case BoundaryAction.MARK_END:
                self._peers.agree(self._mark_end)
            case BoundaryAction.MARK_END_ALONE:
                self._mark_end()
                self._tell_end("finished")
            case BoundaryAction.TELL_END:
                self._work.log.conclude()
                self._tell_end("finished")
            case BoundaryAction.COMPARE_STEPS:
                self._compare_steps()
            case BoundaryAction.PART:
                self._peers.life.tell(WorkerPhase.LEAVING)
                self._work.log.conclude()
                self._run.flush()
                self._peers.barrier()
                self._hang_up_at_exit()

    def boundary(self) -> None:
        """Agree between two steps on what to do, and do it, on all ranks at the same boundary.

        With `votes_late` (on a GPU) the votes of step k are counted after step k + 1, so that no
        step waits for another rank's host.
        """
        pending = self._work.log.pending
        self._work.timer.enter(HARNESS)
        self._peers.life.tell(WorkerPhase.REDUCE)
        if not self.votes_late and pending is not None:
            self._work.log.settle()
            self.count(pending.votes, pending.enough)
        elif self._counted is not None:
            self.count(self._counted.votes, self._counted.enough)
        self._counted = pending
        self._work.timer.enter(SNAPSHOT)
        training = self._work.training
        self._hold.prepare(training.state, training.frozen.left_alone)

    def count(self, votes: torch.Tensor, enough: int = 0) -> None:
        """Act on the ranks' votes, summed over ranks. `enough`: the number of ranks whose script
        wants the run to end."""
        if enough:
            self.hear_enough()
        want = winner(votes.tolist())
        if want is not Want.NOTHING:
            self._work.log.settle()
            if want is not Want.SNAPSHOT:  # no further step follows
                self._work.timer.rest()
            self.turn(self._work.votes.asked(want))

    def hear_enough(self) -> None:
        """Find out whether the script on any rank wants the run to end. All ranks call this at the
        same point."""
        if not self.enough:
            said = self._peers.gather(self._work.votes.enough)
            self.enough = next((why for why in said if why), "")

    def resume(self) -> None:
        """Load the newest snapshot, if there is one, and record that the session has started."""
        t0 = time.time()
        self.turn(Begun())
        self._peers.life.tell(WorkerPhase.RESTORE)
        try:
            manifest = self._resume.restore()
        except UnfitHosts as e:
            self.turn(HostsUnfit(e.mine))
            raise
        kept = self._resume.kept
        if manifest is not None or kept is not None or self._run.phase.number == 1:
            self._work.snapshotter.resumed(manifest, kept)
        if kept is not None:
            self._run.step = kept.step
            self._peers.print(
                f"harness: goes on from step {kept.step}, whose state survivors of generation "
                f"{kept.epoch} have kept"
            )
        elif manifest is not None:
            self._run.step = manifest.step
            self._peers.print(
                f"harness: resumed from step {manifest.step} (of generation {manifest.epoch})"
            )
        self._resume.check(manifest)
        self._work.rhythm.begin(self._work.log.unsaved_s(time.time()))
        if self._run.phase.ends == self._run.step:
            self._peers.print(f"harness: {self._run.phase.label} is done, and not done again")
        else:
            parent = self._work.snapshotter.parent
            resumed_epoch = parent.epoch if parent and kept is None else 0
            self._tell_start(resumed_epoch, time.time() - t0)

    def _go_on(self) -> None:
        """Begin another loop: finish what the last loop left open, and keep the state."""
        if self._work.log.pending is not None:
            self.boundary()
        parent = self._work.snapshotter.parent
        self._tell_start(parent.epoch if parent else 0, 0.0)

    def _tell_start(self, resumed_epoch: int, restore_s: float) -> None:
        feed, on_gpu = self._work.feed, self._peers.device.type == "cuda"
        batching = feed.batching
        self._run.fact(
            SessionStarted(
                epoch=self._run.epoch,
                world=self._peers.world,
                resumed_step=self._resume.step,
                resumed_epoch=resumed_epoch,
                total_steps=self.total,
                global_batch=batching.global_batch if batching else 0,
                micro_batch=batching.micro_batch if batching else 0,
                shares=feed.plan.shares if batching else (),
                reduce=self._work.training.reduce,
                parallel=self._work.training.parallel,
                device=torch.cuda.get_device_name(self._peers.device) if on_gpu else "cpu",
                restore_s=restore_s,
                tier=self._resume.tier,
                read_nbytes=self._resume.read_nbytes,
                first_ranks=feed.first_ranks,
            )
        )

    def _compare_steps(self) -> None:
        """Raise BadInput unless the script has ended at the same step on all ranks. Where it goes
        on on some, these wait in a sum, and the agent sees that."""
        self._peers.life.tell(WorkerPhase.ENDED)
        where = where_it_ends(self._seen())
        if self._peers.control is not None and not dist.is_initialized():
            raise BadInput(
                f"the script ended at {where} without its process group: call "
                "run.finish() before destroying that"
            )
        if what := apart(self._peers.gather_steps(self._run.step)):
            raise BadInput(what)
        self._peers.life.tell(WorkerPhase.LEAVING)
        self._peers.print(f"harness: the script ended at {where}; the run ends with it")

    def _mark_end(self) -> None:
        """Mark the newest snapshot as the run's last, on rank 0. Its manifest has the mark already
        if that was known when it was committed."""
        newest, snapshots = self._work.snapshotter.parent, self._run.snapshots
        if not self._run.url or newest is None:
            return
        if not snapshots.ended(snapshots.load(newest)):
            snapshots.end(newest, end_words(self._seen()))

    # ---- leaving ---------------------------------------------------------------------------------
    def _tell_end(self, why: str) -> None:
        self._run.fact(SessionEnded(self._run.epoch, self._run.step, why))

    def _leave(self, why: str) -> None:
        self._peers.life.tell(WorkerPhase.LEAVING)
        self._work.log.conclude()
        self._tell_end(why)
        self._run.close()
        self._peers.barrier()
        self._hang_up_at_exit()

    def _hang_up_at_exit(self) -> None:
        atexit.unregister(self._hang_up)  # so that it is registered only once
        atexit.register(self._hang_up)

    def go_on(self) -> None:
        """Leave nothing for the process' end: it goes on in another world."""
        atexit.unregister(self._hang_up)

    def _hang_up(self) -> None:
        self._run.close()  # writes what the script logged after its last step
        with alone.world.inside():
            if dist.is_initialized():
                dist.destroy_process_group()
