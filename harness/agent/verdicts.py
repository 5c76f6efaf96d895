"""The judgement of how a generation (the code's `epoch`) ended for this node, what follows, and
when a repeated failure stops the run. Called by the agent's loop. Pure: it is given the evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from harness.bucket.layout import Epoch, Member
from harness.core.facts import MEMORY_RAN_OUT, OOM_KILLED, OUT_OF_MEMORY, WorkerFailed
from harness.core.world import DRAINED, FENCED, FINISHED, RESIZE, STOPPED, UNFIT
from harness.node.heartbeat import WorkerPhase
from harness.node.marks import Want

ORDERLY = (FINISHED, DRAINED, RESIZE, STOPPED)  # exit codes of workers that end in an orderly way
# our member's `end` when the world is about to change and our script has no session, for peers
# whose scripts have none either
CHANGING = "changing"

# same failure of the script after the same step, with none done since: retries do not help
SAME_FAILURE_LIMIT = 3
# signals from outside (out of memory, an operator) and hangs may be bad luck for longer
SAME_KILL_LIMIT = 10
# generations in a row that any failure ended without a new snapshot: the run stops as well
FRUITLESS_LIMIT = 20
# without a session progress is not visible: generations that lasted longer do not count
FRUITLESS_S = 600.0

SAVING_S = 60.0  # for other workers that may still be saving, after a planned end
LINGER_S = 0.2  # for workers to end on their own once the failed one is known
WORDS_S = 3.0  # ... while it is not known: they need time to write their own error
PLANNED_S = 30.0  # for our workers to end after a peer's ended as planned
PEER_LEFT_S = 1.0  # ... after a peer's have failed
BATCH_S = 5.0  # for members that are warming up to join together with those that are ready

# Errors of a worker when the connection to another rank breaks. In a world of several nodes nobody
# can tell whose fault that was, so it counts as a loss; on a single node somebody here was first.
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
# error of workers that wait in different collectives: the script's own, though we kill them
MISMATCH = "CollectiveMismatch"
SCRIPT = ("the script", "Mend the script")  # what failed in a crash loop, and what to do
LESS = (
    "use a smaller micro_batch (with run.steps, --set oom=halve does so by itself), or nodes with "
    "more memory"
)
HINTS = {
    "SIGKILL": "The kernel does so when memory runs out: use less of it, or nodes with more",
    OOM_KILLED: f"The kernel killed it for memory: {LESS}",
    OUT_OF_MEMORY: f"Its log says what held the memory: {LESS}",
}
WHY_UNFINISHED = (
    "the script exited 0 before the run's last step was committed as such: let it end by itself "
    "(no os._exit), or call run.finish() after its last step"
)


WHY_APART = (
    "the script ended with status 0 on rank {ended} while it went on on rank {waiting}, which "
    "waits for it in a sum: wanted it to leave its loop at the same step on every rank; decide "
    "together (run.sum), or call run.stop(reason) on one rank"
)


SMALLEST = (
    "memory ran out after step {step} with one sample in a micro-batch, which cannot be halved "
    "(--set oom=halve): use nodes with more memory, or a model or samples that need less. {said}"
)


HUNG_EVERYWHERE = (
    "workers of this node hung {hangs} times, the last time after step {step}, where a node before "
    "it was worn out too, so it is no node's fault: see the stacks in the logs; does the script "
    "call a collective on some ranks only?"
)


class End(Enum):
    """The end of a generation for this node; the value is `facts.EpochLeft.why`."""

    FINISHED = "finished"  # the run has ended, and its end is committed
    UNFINISHED = "unfinished"  # the script ended with 0, but not the run
    DRAINED = "drained"  # this node leaves on request
    RESIZE = "resize"  # the world changes
    STOPPED = "stopped"  # the run was stopped
    FENCED = "fenced"  # a newer generation has taken over
    UNFIT = "unfit"  # the node cannot go on
    PEER_LOST = "peer-lost"  # our workers are victims, or were ended by us
    FAILED = "failed"  # the script, on this node
    KILLED = "killed"  # by a signal from outside
    HUNG = "hung"


# ---- evidence ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class WorkerEnd:
    """Evidence about one of our workers. `error`, `text`: type and message of its failure."""

    rank: int
    code: int  # exit code; -9 of one that is at work, or that even SIGKILL did not end
    error: str = ""
    text: str = ""
    failed_s: float = float("inf")  # time of failure, comparable only within this node
    at_work: bool = False
    hung: str = ""  # how it hung, in words; "": it did not
    guilty: bool = False  # it caused the hang; otherwise it was waiting for others
    ended_by_us: bool = False  # we ended it while it was still at work
    tail: tuple[str, ...] = ()  # last lines of its log
    place: WorkerPhase | None = None  # by its last heartbeat; None: it never sent one

    @property
    def has_failed(self) -> bool:
        return not self.at_work and self.code not in ORDERLY

    @property
    def suspect(self) -> bool:
        """True if it failed as workers do whose peer was lost; see `Evidence.victims`."""
        if self.hung or not self.has_failed or self.error in MEMORY_RAN_OUT:
            return False
        return self.error in LOST_TYPES or any(sign in self.text for sign in LOST_WORDS)

    @property
    def to_blame(self) -> bool:
        """True if it ended by its own fault, as far as this worker alone shows."""
        return self.has_failed and not self.suspect


@dataclass(frozen=True)
class Evidence:
    """All evidence at the end of a generation. `codes`: exit codes that count for our workers."""

    codes: tuple[int, ...]
    workers: tuple[WorkerEnd, ...] = ()
    leaving: bool = False
    unfit: bool = False
    attached: bool = True  # the script has a session
    told: Want = Want.NOTHING  # the request that a script without a session got by a signal
    run_over: bool = True  # False: we are responsible for the run's end, and it is not committed
    alone: bool = True  # this node is the whole world

    def all_in(self, codes: Collection[int]) -> bool:
        return all(c in codes for c in self.codes)

    @cached_property
    def failed(self) -> tuple[WorkerEnd, ...]:
        """Workers that hung, or that failed before we ended them."""
        return tuple(
            w
            for w in self.workers
            if w.code not in (FINISHED, RESIZE) and (w.hung or not w.ended_by_us)
        )

    @cached_property
    def victims(self) -> frozenset[int]:
        """Ranks whose error looks like a victim's. If all do on a node that is alone, no other node
        can be the cause: the first of them is."""
        suspects = [w for w in self.failed if w.suspect]
        victims = {
            w.rank for w in [*suspects, *(w for w in self.failed if w.hung and not w.guilty)]
        }
        if suspects and self.alone and len(suspects) == len(self.failed):
            victims.discard(min(suspects, key=lambda w: w.failed_s).rank)
        return frozenset(victims)

    @property
    def culprit(self) -> WorkerEnd | None:
        """The first failed worker that is not a victim; None if all are."""
        return next((w for w in self.failed if w.rank not in self.victims), None)

    @property
    def apart(self) -> str:
        """The reason to stop the run, if the script has ended on some ranks while others hang in a
        sum that these would have to join; else "", also if a worker failed, which may be why."""
        there: dict[WorkerPhase | None, int] = {w.place: w.rank for w in self.workers}
        ours = all(w.hung or w.ended_by_us for w in self.workers)
        if not (ours and any(w.hung for w in self.workers)):
            return ""
        ended, waiting = there.get(WorkerPhase.ENDED), there.get(WorkerPhase.REDUCE)
        if ended is None or waiting is None:
            return ""
        return WHY_APART.format(ended=ended, waiting=waiting)

    @property
    def signature(self) -> str:
        """A text that is equal for equal failures of ours; "" if the failure was another node's."""
        worker = self.culprit
        if worker is None:
            return ""
        if worker.error == MISMATCH:  # where the usual ranks wait may differ
            return f"{worker.error}: {worker.text.partition(';')[0][:300]}"
        # what memory held differs each time
        alone = worker.code < 0 or worker.error in MEMORY_RAN_OUT
        return worker.error if alone else f"{worker.error}: {worker.text[:300]}"

    def facts(self, member: str, epoch: int) -> list[WorkerFailed]:
        """Return a fact for each failed worker."""
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
    # a script without a session handled the notice in its own way; only it knows whether it is done
    EndRule(End.DRAINED, lambda e: e.leaving and not e.attached),
    EndRule(End.STOPPED, lambda e: e.told is Want.STOP and not e.attached),
    EndRule(End.RESIZE, lambda e: e.told in (Want.GROW, Want.RESIZE) and not e.attached),
    EndRule(End.UNFINISHED, lambda e: e.all_in((FINISHED,)) and not e.run_over),
    EndRule(End.FINISHED, lambda e: e.all_in((FINISHED,))),
    EndRule(End.STOPPED, lambda e: STOPPED in e.codes),
    EndRule(End.DRAINED, lambda e: DRAINED in e.codes),
    EndRule(End.FENCED, lambda e: FENCED in e.codes),
    EndRule(End.DRAINED, lambda e: e.all_in((FINISHED, RESIZE)) and e.leaving),
    EndRule(End.RESIZE, lambda e: e.all_in((FINISHED, RESIZE))),
    # the script has left its loop on some ranks only
    EndRule(End.UNFINISHED, lambda e: bool(e.apart)),
    # broken off: the culprit decides
    EndRule(End.PEER_LOST, lambda e: e.culprit is None),
    EndRule(End.HUNG, lambda e: e.culprit is not None and bool(e.culprit.hung)),
    EndRule(End.KILLED, lambda e: e.culprit is not None and e.culprit.code < 0),
    EndRule(End.FAILED, lambda e: True),
)
BROKEN_OFF = (End.PEER_LOST, End.HUNG, End.KILLED, End.FAILED)

AGAIN = None  # no exit: settle, then wait for the next generation
AFTER: dict[End, int | None] = {
    End.FINISHED: FINISHED,
    End.UNFINISHED: STOPPED,  # the run is stopped too: more tries would only cost money
    End.DRAINED: DRAINED,  # UNFIT for an unfit node
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


def agent_exit_code(end: End, unfit: bool, worn_out: bool) -> int | None:
    """Return the agent's exit code, or AGAIN. `worn_out`: its workers have hung too often."""
    code = AFTER[end]
    return UNFIT if (end is End.DRAINED and unfit) or (code is AGAIN and worn_out) else code


# ---- while workers and peers end -----------------------------------------------------------------
def patience_s(workers: Iterable[WorkerEnd], told: bool = False) -> float:
    """Return the seconds to wait for our other workers to end after the first has. `told`: the
    script was asked to end, and does it in its own way."""
    workers = list(workers)
    if told or not any(w.has_failed for w in workers):
        return SAVING_S
    return LINGER_S if any(w.to_blame for w in workers) else WORDS_S


@dataclass(frozen=True)
class PeerVerdict:
    """The reason to end our workers ("": they go on), and whether that was `planned`. `since_s`:
    when the first peer was seen to have left."""

    why: str = ""
    since_s: float | None = None
    planned: bool = False
    changing: bool = False  # one of them leaves the world, or makes room in it


def hear_peers(
    world: Epoch, peers: Sequence[Member], entered_s: float, since_s: float | None, now: float
) -> PeerVerdict:
    """Return what follows for our workers from the states of the other members of `world`, which we
    entered at `entered_s`. `since_s`: see `PeerVerdict`."""
    epoch = world.epoch
    if dead := [p.member for p in peers if p.state == "dead"]:
        return PeerVerdict(f"lost {', '.join(dead)}", since_s)
    # a peer left between the creation of the generation and its start
    if absent := [p.member for p in peers if p.state == "gone" and p.epoch < epoch]:
        return PeerVerdict(f"{', '.join(absent)} went before its workers began", since_s, True)
    if blind := [p.member for p in peers if p.state == "away" and world.is_left_by(p)]:
        why = f"{', '.join(blind)} does not come: the bucket does not answer it"
        return PeerVerdict(why, since_s, True)
    # what it last read of the bucket does not name it yet
    late = [p.member for p in peers if p.state == "ready" and p.epoch < epoch]
    if late and now - entered_s > PLANNED_S:
        return PeerVerdict(f"{', '.join(late)} does not come", since_s)
    left = [
        p
        for p in peers
        if p.epoch > epoch
        or (p.epoch == epoch and p.state in ("ready", "gone") and p.end != End.FINISHED.value)
    ]
    changing = any(p.end == CHANGING and p.epoch == epoch for p in peers)
    if not left:
        return PeerVerdict(changing=changing)
    since_s = since_s or now
    planned = all(p.end in ("resize", "drained", "stopped", "") for p in left)
    if now - since_s > (PLANNED_S if planned else PEER_LEFT_S):
        who = left[0].member
        return PeerVerdict(f"{who} has left, and our workers did not notice", since_s)
    return PeerVerdict(since_s=since_s, changing=changing or planned)


def make_room(alive: Iterable[Member], place: str, waited_s: float) -> bool:
    """Return whether the world should be rebuilt now for a member that has waited `waited_s`.
    Others that are warming up in our place join together with it, within `BATCH_S`."""
    warming = any(m.state == "warming" and m.place == place for m in alive)
    return not warming or waited_s >= BATCH_S


# ---- failures that repeat ------------------------------------------------------------------------
@dataclass(frozen=True)
class Fruitless:
    """The number of generations in a row without a new snapshot, the newest of which is of `step`,
    or a newer state that this node has `kept`. Agents count them, since there may be no controller
    that does."""

    epochs: int = 0
    step: int = -1
    kept: int = -1

    def broken_off(self, committed: int, kept: int, attached: bool, lasted_s: float) -> Fruitless:
        """Return the count after a generation of ours was broken off after `lasted_s`."""
        unseen = not attached and lasted_s >= FRUITLESS_S
        again = not unseen and committed <= self.step and kept <= self.kept
        epochs = self.epochs + 1 if again else 1
        return Fruitless(epochs, max(self.step, committed), max(self.kept, kept))


def why_no_more(me: Member, last: Epoch, fruitless: Fruitless, end: End | None) -> str:
    """Return why the run must be stopped instead of tried again; "" if it must not. `me`: our
    member with our last failure; `end`: of our last generation."""
    failure = me.failure
    if failure.startswith("BadInput"):
        return failure.removeprefix("BadInput: ")
    again = failure and (failure, me.failure_step) == (last.failure, last.failure_step)
    by_others = failure.startswith(("SIG", "Hung", OOM_KILLED))
    limit = SAME_KILL_LIMIT if by_others else SAME_FAILURE_LIMIT
    if "StoreUnavailable" in failure:
        limit = FRUITLESS_LIMIT  # an outage of the bucket is not the script's fault
    # a generation after that failure has counted it already
    times = last.streak + (last.epoch <= me.epoch)
    if again and times >= limit:
        what, mend = ("a worker", "See its log") if by_others else SCRIPT
        mend = HINTS.get(failure, mend)
        verb = "was killed" if failure.startswith(("SIG", OOM_KILLED)) else "failed"
        return (
            f"crash loop: {what} {verb} {times} times in a row at the same point "
            f"(after step {me.failure_step}): {failure}. {mend}, then launch again: the "
            f"run resumes at step {max(0, fruitless.step)}."
        )
    if fruitless.epochs >= FRUITLESS_LIMIT:
        how = end.value if end else ""
        return (
            f"{fruitless.epochs} generations in a row ended without a new snapshot after step "
            f"{max(0, fruitless.step)} (the last: {how}{', ' + failure if failure else ''}); see "
            "the workers' logs, then launch again."
        )
    return ""
