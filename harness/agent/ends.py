"""How an epoch's end is judged, what follows, and when a failure that repeats stops the run.

Pure: from what was seen of workers and peers (exit codes, who hung, who failed first, who is lost)
to a typed end. `TABLE` is read from above: the first row that fits is the end; `AFTER` says what
the agent does then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from harness.bucket.layout import Epoch, Member
from harness.core.facts import WorkerFailed
from harness.core.world import DRAINED, FENCED, FINISHED, RESIZE, STOPPED, UNFIT
from harness.node.marks import Want

ORDERLY = (FINISHED, DRAINED, RESIZE, STOPPED)  # codes of workers that end as they should
# said of ourselves at once when a worker of ours has failed by itself, for those whose workers feel
# it
FAILING = "failing"

# said of ourselves when the world is about to change and our script has no session, for those whose
# scripts have none either
CHANGING = "changing"

# the same failure of the script at the same committed step: stop, it will not get better
SAME_FAILURE_LIMIT = 3
# signals from outside (out of memory, an operator) and hangs may be bad luck for longer
SAME_KILL_LIMIT = 10
# epochs that ended by some failure, of whomever, one after the other without a new snapshot: stop
# as well
FRUITLESS_LIMIT = 20
# ... of a script without a session, whose progress we cannot see: that ended within so long
FRUITLESS_S = 600.0

SAVING_S = 60.0  # for others that may still be saving, after a planned end
LINGER_S = 0.2  # for workers to end by themselves once it is known which one failed
WORDS_S = 3.0  # ... while it is not: they need time to write their own error
PLANNED_S = 30.0  # for our workers to end after a peer's did as planned
PEER_LEFT_S = 1.0  # ... after a peer's have failed
BATCH_S = 5.0  # for others that are warming up already to join together with who is ready

# What a worker's error is like when the connection to another rank breaks. A hint that makes us
# look at the others, and no proof.
LOST_TYPES = (
    "DistError",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "ConnectionError",
    "ConnectionResetError",
    "ConnectionRefusedError",
    "ConnectionAbortedError",
    "BrokenPipeError",
)
LOST_WORDS = (
    "Connection closed by peer",
    "Connection reset",
    "Connection refused",
    "Broken pipe",
    "connectFullMesh",
    "Socket Timeout",
    "NCCL",
    "ncclRemoteError",
    "Timed out waiting",
    "timed out after",
    "recvValue failed",
    "failed to recv",
    "Read error",
    "Write error",
    "Socket closed",
    "EADDRINUSE",
    "Application timeout",
)
WHY_UNFINISHED = (
    "the script exited 0 before the run's last step was committed as such: let it end by itself "
    "(no os._exit), or call run.finish() after its last step"
)


class End(Enum):
    """How an epoch ended for this node; the value is `facts.EpochLeft.why`."""

    FINISHED = "finished"  # the run has ended, and the bucket says so
    UNFINISHED = "unfinished"  # the script ended with 0, but not the run
    DRAINED = "drained"  # this node leaves, as it was asked to
    RESIZE = "resize"  # the world changes
    STOPPED = "stopped"  # the run was stopped
    FENCED = "fenced"  # somebody newer has taken over
    UNFIT = "unfit"  # the node cannot go on
    PEER_LOST = "peer-lost"  # our workers are victims, or were told to end
    FAILED = "failed"  # the script, on this node
    KILLED = "killed"  # by a signal from outside
    HUNG = "hung"


# ---- evidence ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class WorkerEnd:
    """What is seen of one of our workers. `error`, `text`: type and words of what ended it."""

    rank: int
    code: int  # of one that is at work, or that even SIGKILL did not end: -9
    error: str = ""
    text: str = ""
    failed_s: float = float("inf")  # when; of use only beside the others of this node
    at_work: bool = False
    hung: str = ""  # in words
    guilty: bool = False  # of the hang; else it was waiting for others
    ended_by_us: bool = False  # it was still at work
    tail: tuple[str, ...] = ()  # of its log

    @property
    def has_failed(self) -> bool:
        return not self.at_work and self.code not in ORDERLY

    @property
    def suspect(self) -> bool:
        """Has it failed as workers do whose peer was lost? Its words prove nothing: see
        `Evidence.victims`."""
        if self.hung or not self.has_failed:
            return False
        return self.error in LOST_TYPES or any(sign in self.text for sign in LOST_WORDS)

    @property
    def to_blame(self) -> bool:
        """Has it ended by a fault of its own, for all that can be seen of it alone?"""
        return self.has_failed and not self.suspect


@dataclass(frozen=True)
class Evidence:
    """All that is known at the end of an epoch. `codes`: what our workers' ends count as."""

    codes: tuple[int, ...]
    workers: tuple[WorkerEnd, ...] = ()
    leaving: bool = False
    unfit: bool = False
    attached: bool = True  # the script has a session
    told: Want = Want.NOTHING  # what a script without one was told by a signal
    run_over: bool = True  # False: we answer for the run, and its end is not committed
    lost: str = ""  # another member that is dead, gone, or has failed, or whose line fell

    def all_in(self, codes: Collection[int]) -> bool:
        return all(c in codes for c in self.codes)

    @cached_property
    def failed(self) -> tuple[WorkerEnd, ...]:
        """Workers that did not end as they should, and were not at work when we ended them."""
        return tuple(
            w
            for w in self.workers
            if w.code not in (FINISHED, RESIZE) and (w.hung or not w.ended_by_us)
        )

    @property
    def asks_for_witness(self) -> bool:
        """Nothing but words speaks against a peer: only the others can prove that it was one of
        them."""
        return bool(self.failed) and all(w.suspect for w in self.failed)

    @cached_property
    def victims(self) -> frozenset[int]:
        """Ranks whose error looks like a victim's *and* beside whom somebody else was lost:
        another worker of this node, or a member."""
        suspects = [w for w in self.failed if w.suspect]
        victims = {
            w.rank for w in [*suspects, *(w for w in self.failed if w.hung and not w.guilty)]
        }
        if self.asks_for_witness and not self.lost:
            # nobody else was lost before it, so it was the first
            victims.discard(min(suspects, key=lambda w: w.failed_s).rank)
        return frozenset(victims)

    @property
    def culprit(self) -> WorkerEnd | None:
        """The first that is nobody's victim."""
        return next((w for w in self.failed if w.rank not in self.victims), None)

    @property
    def signature(self) -> str:
        """Of our own failure: who fails like this again has the same one. "": it was another's."""
        worker = self.culprit
        if worker is None:
            return ""
        return worker.error if worker.code < 0 else f"{worker.error}: {worker.text[:300]}"

    def facts(self, member: str, epoch: int) -> list[WorkerFailed]:
        """What is written down of those that failed."""
        told = []
        for w in self.failed:
            victim = w.rank in self.victims
            error, text = ("PeerLost", w.text[:200]) if victim else (w.error, w.text[:2000])
            told.append(WorkerFailed(member, epoch, w.rank, w.code, error, text, "\n".join(w.tail)))
        return told


# ---- the table -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class EndRule:
    end: End
    when: Callable[[Evidence], bool]


TABLE = (
    # killed by us, or by their GPU
    EndRule(End.UNFIT, lambda e: e.unfit and not e.all_in(ORDERLY)),
    # it heard the notice in its own way; whether it is done only it knows
    EndRule(End.DRAINED, lambda e: e.leaving and not e.attached),
    EndRule(End.STOPPED, lambda e: e.told is Want.STOP and not e.attached),
    EndRule(End.RESIZE, lambda e: e.told is Want.RESIZE and not e.attached),
    EndRule(End.UNFINISHED, lambda e: e.all_in((FINISHED,)) and not e.run_over),
    EndRule(End.FINISHED, lambda e: e.all_in((FINISHED,))),
    EndRule(End.STOPPED, lambda e: STOPPED in e.codes),
    EndRule(End.DRAINED, lambda e: DRAINED in e.codes),
    EndRule(End.FENCED, lambda e: FENCED in e.codes),
    EndRule(End.DRAINED, lambda e: e.all_in((FINISHED, RESIZE)) and e.leaving),
    EndRule(End.RESIZE, lambda e: e.all_in((FINISHED, RESIZE))),
    # broken off: whose fault was it?
    EndRule(End.PEER_LOST, lambda e: e.culprit is None),
    EndRule(End.HUNG, lambda e: e.culprit is not None and bool(e.culprit.hung)),
    EndRule(End.KILLED, lambda e: e.culprit is not None and e.culprit.code < 0),
    EndRule(End.FAILED, lambda e: True),
)
BROKEN_OFF = (End.PEER_LOST, End.HUNG, End.KILLED, End.FAILED)

AGAIN = None  # no exit: settle, then wait for the next epoch
AFTER: dict[End, int | None] = {
    End.FINISHED: FINISHED,
    End.UNFINISHED: STOPPED,  # and the run is stopped: more tries would only burn money
    End.DRAINED: DRAINED,  # UNFIT, of an unfit node
    End.STOPPED: STOPPED,
    End.FENCED: FENCED,
    End.UNFIT: UNFIT,
    End.RESIZE: AGAIN,
    End.PEER_LOST: AGAIN,
    End.HUNG: AGAIN,
    End.KILLED: AGAIN,
    End.FAILED: AGAIN,
}


def classify(evidence: Evidence) -> End:
    return next(row.end for row in TABLE if row.when(evidence))


def exit_code(end: End, unfit: bool, worn_out: bool) -> int | None:
    """The agent's; AGAIN: it goes on. `worn_out`: its workers have hung too often."""
    code = AFTER[end]
    return UNFIT if (end is End.DRAINED and unfit) or (code is AGAIN and worn_out) else code


# ---- while workers and peers end -----------------------------------------------------------------
@dataclass(frozen=True)
class EndWait:
    """After the first of our workers has ended: `others_s` for the others to end as well,
    `evidence_s` for a lost member to be known. `to_blame`: one of ours has failed by itself."""

    others_s: float
    evidence_s: float = 0.0
    to_blame: bool = False


def patience(
    workers: Iterable[WorkerEnd], alone: bool, silence_s: float, told: bool = False
) -> EndWait:
    """`alone`: no other member is in the epoch; `silence_s`: after it, who is dead is known;
    `told`: they were asked to end, and do it in their own ways."""
    workers = list(workers)
    if told or not any(w.has_failed for w in workers):
        return EndWait(SAVING_S)
    if any(w.to_blame for w in workers):
        return EndWait(LINGER_S, to_blame=True)
    return EndWait(WORDS_S, evidence_s=0.0 if alone else silence_s)


def lost_member(members: Iterable[Member], us: str, epoch: int, fell: Callable[[str], bool]) -> str:
    """Another member of this epoch that is dead, gone, or has failed, or whose line fell; "": all
    are fine, as far as can be told."""
    for m in members:
        if m.member == us or m.end == End.FINISHED.value:
            continue
        left = m.epoch > epoch or (m.epoch == epoch and (m.state == "ready" or m.end == FAILING))
        if left or m.state in ("gone", "dead") or fell(m.member):
            return m.member
    return ""


@dataclass(frozen=True)
class PeersSaid:
    """Why our workers are to be ended, and as what that counts; "": they go on. `since_s`: when
    the first peer was seen to have left."""

    why: str = ""
    since_s: float | None = None
    planned: bool = False
    changing: bool = False  # one of them leaves the world, or makes room in it


def hear_peers(epoch: int, peers: Sequence[Member], since_s: float | None, now: float) -> PeersSaid:
    """What the other members of our epoch say of themselves."""
    if dead := [p.member for p in peers if p.state == "dead"]:
        return PeersSaid(f"lost {', '.join(dead)}", since_s)
    # told to go between its seal and its start
    if absent := [p.member for p in peers if p.state == "gone" and p.epoch < epoch]:
        return PeersSaid(f"{', '.join(absent)} went before its workers began", since_s, True)
    left = [
        p
        for p in peers
        if p.epoch > epoch or (p.state in ("ready", "gone") and p.end != End.FINISHED.value)
    ]
    changing = any(p.end == CHANGING and p.epoch == epoch for p in peers)
    if not left:
        return PeersSaid(since_s=since_s, changing=changing)
    since_s = since_s or now
    planned = all(p.end in ("resize", "drained", "stopped", "") for p in left)
    if now - since_s > (PLANNED_S if planned else PEER_LEFT_S):
        who = left[0].member
        return PeersSaid(f"{who} has left this epoch and our workers did not notice", since_s)
    return PeersSaid(since_s=since_s, changing=changing or planned)


def make_room(alive: Iterable[Member], place: str, waited_s: float) -> bool:
    """Somebody has waited so long to get in: shall the world be made anew for it now? Others that
    are warming up in our place join together with it."""
    warming = any(m.state == "warming" and m.place == place for m in alive)
    return not warming or waited_s >= BATCH_S


# ---- failures that repeat ------------------------------------------------------------------------
@dataclass(frozen=True)
class Fruitless:
    """Epochs in a row without a new snapshot, of which the newest is of `step`. Without a
    controller nobody else counts what commits nothing."""

    epochs: int = 0
    step: int = -1

    def broken_off(self, committed: int, attached: bool, lasted_s: float) -> Fruitless:
        """An epoch of ours was, after `lasted_s`."""
        unseen = not attached and lasted_s >= FRUITLESS_S
        again = not unseen and committed <= self.step
        return Fruitless(self.epochs + 1 if again else 1, max(self.step, committed))


def why_no_more(me: Member, last: Epoch, fruitless: Fruitless, end: End | None) -> str:
    """Why the run is to be stopped instead of tried again; "": it is not. `me`: what we say of
    ourselves, our last failure included; `end`: of our last epoch."""
    failure = me.failure
    if failure.startswith("BadInput"):
        return failure.removeprefix("BadInput: ")
    again = failure and (failure, me.failure_step) == (last.failure, last.failure_step)
    limit = SAME_KILL_LIMIT if failure.startswith(("SIG", "Hung")) else SAME_FAILURE_LIMIT
    if "StoreUnavailable" in failure:
        limit = FRUITLESS_LIMIT  # a silent bucket is nobody's fault: for as long as anything is
    # whoever made an epoch after it has counted it already
    times = last.streak + (last.epoch <= me.epoch)
    if again and times >= limit:
        return (
            f"crash loop: the script failed {times} times in a row at the same point "
            f"(after step {me.failure_step}): {failure}. Mend the script, then launch again: the "
            f"run resumes at step {me.failure_step}."
        )
    if fruitless.epochs >= FRUITLESS_LIMIT:
        how = end.value if end else ""
        return (
            f"{fruitless.epochs} epochs in a row ended without a new snapshot after step "
            f"{max(0, fruitless.step)} (the last: {how}{', ' + failure if failure else ''}); see "
            "the workers' logs, then launch again."
        )
    return ""
