"""A node's workers: started from its warm process, read, judged by their heartbeats, and ended.

Knows processes, files and the environment that torchrun's scripts expect; decides nothing about
generations (the code's `epoch`).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import IO

from harness.agent import flight_recorder
from harness.agent.run_orders import LOOK_EVERY_S
from harness.bucket.layout import NO_EPOCH, Epoch, Member
from harness.core.facts import Fact, WorkerFailed, WorkerHung
from harness.core.masking import masked_line
from harness.core.mesh import MeshChoice
from harness.core.world import DRAINED, FENCED, FINISHED, RESIZE, STOPPED, UNFIT
from harness.node import heartbeat, marks
from harness.node.forkserver import NO_MORE_S, Forked, ForkServerClient
from harness.node.heartbeat import DUMP_SIGNAL, WorkerPhase
from harness.node.marks import Want
from harness.node.worker_gpus import NodeHardware
from harness.uploader.node_tiers import NearbyConfig

# The configuration of a node agent. `harness run` builds it from flags and environment.


@dataclass(frozen=True)
class Timing:
    """Intervals and timeouts of an agent, in seconds."""

    beat_s: float = 1.0
    dead_s: float = 5.0
    tick_s: float = 0.3
    # between two looks for requests to the run; each is a list, which object stores bill
    control_s: float = 0.3
    flush_s: float = 1.0
    measure_s: float = 0.0  # between two facts about this machine's hardware; 0: none
    wait_limit_s: float = 3600.0  # how long to wait for a place in a generation
    # how long this node goes on without a controller; 0: no limit
    leaderless_s: float = 0.0
    lease_s: float = LOOK_EVERY_S  # between two looks at the controller's lease


@dataclass(frozen=True)
class Leaving:
    """Grace periods at a preemption notice, and what is notified."""

    grace_s: float = 30.0  # grace period assumed at a SIGTERM
    drain_lead_s: float = 120.0  # we drain this long before an end that was announced early
    # and this long before it, the controller may launch a replacement
    doubt_ahead_s: float = 900.0
    acknowledge: bool = True  # acknowledge notices after we left, where the cloud supports it
    notify_signal: str = ""  # sent to scripts without a session on a notice; "": none


@dataclass(frozen=True)
class Fitness:
    """The limits at which workers count as hung, and this node as unfit."""

    hang: heartbeat.Limits = field(default_factory=heartbeat.Limits)
    hangs_allowed: int = 3  # after so many hangs of our own workers, this node is unfit
    # "auto": by NVML; "off"; or the path of a script for the fake (harness/agent/gpu_health.py)
    gpu_health: str = "off"
    flights: bool = False  # NCCL's flight recorder is on, and read when workers hang
    unfit_grace_s: float = 60.0  # how long workers on a sick GPU have to reach a step boundary


@dataclass(frozen=True)
class Uploads:
    """The stage of snapshots, and their other tiers."""

    stage_dir: Path | None = None  # a RAM disk for staged snapshots; None: /dev/shm
    stage_nbytes: int | None = None  # limit of their size there; None: half of the free space
    # tiers of snapshots besides this node's stage
    nearby: NearbyConfig = field(default_factory=NearbyConfig)
    settle_s: float = 30.0  # how long the next generation waits for uploads of a dead worker


@dataclass(frozen=True)
class HelperConfig:
    """The processes beside the first member of a generation."""

    trackers: str = ""
    replica: str = ""  # URL of a second bucket that snapshots are copied to
    replica_cap_usd: float | None = None  # None: no limit
    # receivers of alerts, in the format of HARNESS_ALERTS: it may hold secrets
    alerts: str = field(default="", repr=False)
    alert_rules: str = ""


@dataclass(frozen=True)
class Worlds:
    """The allowed compositions of a world."""

    min_members: int = 1
    # ranks that get the same samples, if there is no mesh; only whole replicas train
    replica_ranks: int = 1
    # how ranks share one copy of the model, in order of preference; only whole copies train
    meshes: MeshChoice | None = None
    ranks: tuple[int, ...] = ()  # allowed numbers of ranks; (): any number


@dataclass(frozen=True)
class AgentConfig:
    run: str
    argv: list[str]
    nproc: int
    attempt: int
    addr: str
    node_dir: Path
    hardware: NodeHardware = field(default_factory=NodeHardware)
    place: str = ""  # nodes of one place reach each other and form a world; others wait
    worlds: Worlds = field(default_factory=Worlds)
    timing: Timing = field(default_factory=Timing)
    leaving: Leaving = field(default_factory=Leaving)
    fitness: Fitness = field(default_factory=Fitness)
    uploads: Uploads = field(default_factory=Uploads)
    beside: HelperConfig = field(default_factory=HelperConfig)
    must_adopt: bool = False  # a script without a session ends the run as failed

# The judgement of how a generation (the code's `epoch`) ended, what follows, and when a repeated
# failure stops the run.

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
SCRIPT = ("the script", "Mend the script")  # what failed in a crash loop, and what to do
HINTS = {
    "SIGKILL": "The kernel does so when memory runs out: use less of it, or nodes with more",
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
        if self.hung or not self.has_failed:
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
        return worker.error if worker.code < 0 else f"{worker.error}: {worker.text[:300]}"

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
    EndRule(End.RESIZE, lambda e: e.told is Want.RESIZE and not e.attached),
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
    epoch: int, peers: Sequence[Member], since_s: float | None, now: float
) -> PeerVerdict:
    """Return what follows for our workers from the states of the other members."""
    if dead := [p.member for p in peers if p.state == "dead"]:
        return PeerVerdict(f"lost {', '.join(dead)}", since_s)
    # a peer left between the creation of the generation and its start
    if absent := [p.member for p in peers if p.state == "gone" and p.epoch < epoch]:
        return PeerVerdict(f"{', '.join(absent)} went before its workers began", since_s, True)
    left = [
        p
        for p in peers
        if p.epoch > epoch or (p.state in ("ready", "gone") and p.end != End.FINISHED.value)
    ]
    changing = any(p.end == CHANGING and p.epoch == epoch for p in peers)
    if not left:
        return PeerVerdict(since_s=since_s, changing=changing)
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
    """The number of generations in a row without a new snapshot; the newest one is of `step`.
    Agents count them, since there may be no controller that does."""

    epochs: int = 0
    step: int = -1

    def broken_off(self, committed: int, attached: bool, lasted_s: float) -> Fruitless:
        """Return the count after a generation of ours was broken off after `lasted_s`."""
        unseen = not attached and lasted_s >= FRUITLESS_S
        again = not unseen and committed <= self.step
        return Fruitless(self.epochs + 1 if again else 1, max(self.step, committed))


def why_no_more(me: Member, last: Epoch, fruitless: Fruitless, end: End | None) -> str:
    """Return why the run must be stopped instead of tried again; "" if it must not. `me`: our
    member with our last failure; `end`: of our last generation."""
    failure = me.failure
    if failure.startswith("BadInput"):
        return failure.removeprefix("BadInput: ")
    again = failure and (failure, me.failure_step) == (last.failure, last.failure_step)
    by_others = failure.startswith(("SIG", "Hung"))
    limit = SAME_KILL_LIMIT if by_others else SAME_FAILURE_LIMIT
    if "StoreUnavailable" in failure:
        limit = FRUITLESS_LIMIT  # an outage of the bucket is not the script's fault
    # a generation after that failure has counted it already
    times = last.streak + (last.epoch <= me.epoch)
    if again and times >= limit:
        what, mend = ("a worker", HINTS.get(failure, "See its log")) if by_others else SCRIPT
        verb = "was killed" if failure.startswith("SIG") else "failed"
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


TAIL_LINES = 40
# for a killed worker to end; if it takes longer, it hangs in the kernel, and the node is unfit
KILL_S = 20.0
FORKED_WITHIN_S = 60.0  # a worker that is not forked by then hangs
DUMP_S = 1.0  # for a hung worker to write its stacks


@dataclass
class Worker:
    process: Forked
    error_file: Path
    rank: int
    pulse: heartbeat.WorkerHeartbeat
    tail: deque[str]
    reader: threading.Thread  # of its output
    ordered_s: float  # when its fork was ordered
    hung: str = ""  # how it hung, in words; "": it did not
    guilty: bool = False  # it caused the hang; otherwise it was waiting for others
    ended_by_us: bool = False  # we ended it while it was still at work

    @property
    def code(self) -> int:
        """The exit code. A worker that even SIGKILL did not end counts as killed."""
        return -signal.SIGKILL if self.process.returncode is None else self.process.returncode

    @property
    def failed_s(self) -> float:
        """The time at which its error was written; comparable only within this node."""
        with contextlib.suppress(OSError):
            return self.error_file.stat().st_mtime_ns / 1e9
        return float("inf")

    def seen(self) -> WorkerEnd:
        """Return the evidence about this worker, whether it has ended or is at work."""
        at_work = self.process.poll() is None
        error, text = ("", "") if at_work and not self.hung else self.failure()
        return WorkerEnd(
            self.rank,
            self.code,
            error,
            text,
            self.failed_s,
            at_work,
            self.hung,
            self.guilty,
            self.ended_by_us,
            tuple(self.tail),
            self.pulse.sign.place if self.pulse.sign else None,
        )

    def failure(self) -> tuple[str, str]:
        """Return (type, text) of its failure, from its error file, else from its exit code."""
        code = self.code
        if self.hung:
            return "Hung", self.hung
        with contextlib.suppress(OSError, ValueError, KeyError):
            message = json.loads(self.error_file.read_text())["message"]
            return str(message["type"]), masked_line(str(message["text"]))
        if code < 0:
            return signal.Signals(-code).name, f"killed by {signal.Signals(-code).name}"
        return "exit", f"exit code {code}"


class Workers:
    """The workers of one generation, and the warm process that they are forked from. `mark`: where
    the agent asks them for something. `record`: takes facts."""

    def __init__(self, config: AgentConfig, member: str, record: Callable[[Fact], None]):
        self._config, self._member, self._record = config, member, record
        file = config.node_dir / marks.MARK
        self.mark = marks.MarkFile(file, lambda: [w.process for w in self.all])
        self._clear_heartbeats()
        self._epoch: Epoch = NO_EPOCH
        self._warm: ForkServerClient | None = None
        self.all: list[Worker] = []

    # ---- the warm process ------------------------------------------------------------------------
    @property
    def _nursery(self) -> ForkServerClient:
        if self._warm is None:
            self._warm = self._new_nursery()
        return self._warm

    def _new_nursery(self) -> ForkServerClient:
        env = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONUNBUFFERED": "1"}
        if self._config.addr.startswith("127."):
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return ForkServerClient(env)

    def warm(self) -> bool:
        """Return whether workers can be started without an import."""
        return self._nursery.warm()

    def warm_up(self) -> None:
        """Ensure that there is a warm process to fork from: the last one may have been killed."""
        if self._nursery.ended():
            self._warm = self._new_nursery()

    def close(self) -> None:
        """End the warm process, and with it all workers."""
        self._nursery.close()

    # ---- start -----------------------------------------------------------------------------------
    def clear_signs(self) -> None:
        """Remove the mark and the heartbeats of the last generation."""
        self.mark.write(Want.NOTHING, "", None)
        for name in (marks.ATTACHED, marks.UNADOPTED):
            (self._config.node_dir / name).unlink(missing_ok=True)
        self._clear_heartbeats()
        flight_recorder.clear(self._config.node_dir)

    def _clear_heartbeats(self) -> None:
        for local_rank in range(self._config.nproc):
            heartbeat.clear(self._sign(local_rank))

    def start(self, epoch: Epoch, stage: Path, patience: float) -> None:
        """Start all of this node's workers of a generation. `patience`: see
        `heartbeat.WorkerHeartbeat`."""
        self.warm_up()
        self._epoch = epoch
        self.all = [
            self._start(rank, local_rank, stage, patience)
            for local_rank, rank in enumerate(epoch.ranks(self._member))
        ]

    def _start(self, rank: int, local_rank: int, stage: Path, patience: float) -> Worker:
        sign = self._sign(local_rank)
        error_file = self._config.node_dir / f"error-{secrets.token_hex(4)}.json"
        env = {
            **self._environment(rank, local_rank),
            "HARNESS_STAGE": stage,
            "HARNESS_PROGRESS": sign,
            "TORCHELASTIC_ERROR_FILE": error_file,
        }
        process, out = self._nursery.fork(
            {"env": {k: str(v) for k, v in env.items()}, "argv": self._config.argv}
        )
        limits = self._config.fitness.hang
        pulse = heartbeat.WorkerHeartbeat(sign, limits, patience, since_s=time.monotonic())
        tail: deque[str] = deque(maxlen=TAIL_LINES)
        reader = threading.Thread(target=_read, args=(rank, out, tail), daemon=True)
        reader.start()
        return Worker(process, error_file, rank, pulse, tail, reader, pulse.since_s)

    def _environment(self, rank: int, local_rank: int) -> dict[str, object]:
        """Return the variables that torchrun would set for a worker, and those of a session."""
        epoch = self._epoch
        speeds = [
            speed for speed, n in zip(epoch.speeds, epoch.nproc, strict=True) for _ in range(n)
        ]
        config = self._config
        recorder = (
            flight_recorder.recorder_environment(config.node_dir, os.environ)
            if config.fitness.flights
            else {}
        )
        return {
            **recorder,
            **config.hardware.environment(local_rank),
            "RANK": rank,
            "WORLD_SIZE": epoch.world,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": self._config.nproc,
            "GROUP_RANK": epoch.members.index(self._member),
            "GROUP_WORLD_SIZE": len(epoch.members),
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": epoch.world,
            "ROLE_NAME": "default",
            "MASTER_ADDR": epoch.addr,
            "MASTER_PORT": epoch.port,
            "TORCHELASTIC_RUN_ID": "harness",
            "TORCHELASTIC_RESTART_COUNT": epoch.epoch - 1,
            "TORCHELASTIC_MAX_RESTARTS": 1_000_000,
            "HARNESS_RUN": self._config.run,
            "HARNESS_REPLICA": self._config.beside.replica,
            "HARNESS_REPLICA_RANKS": epoch.replica_ranks,
            "HARNESS_MESH": epoch.mesh,
            "HARNESS_MESHES": config.worlds.meshes or "",
            "HARNESS_WORLDS": ",".join(map(str, config.worlds.ranks)),
            "HARNESS_EPOCH": epoch.epoch,
            "HARNESS_MARK": self.mark.path,
            "HARNESS_SPEEDS": json.dumps(speeds),
            "HARNESS_EPOCH_REASON": epoch.reason,
            "HARNESS_PLACE": config.place,
        }

    def _sign(self, local_rank: int) -> Path:
        return self._config.node_dir / f"progress-{local_rank}"

    def seen(self) -> list[WorkerEnd]:
        """Return the current evidence about all workers."""
        return [w.seen() for w in self.all]

    def at_work(self) -> int:
        """Return the number of workers that have not ended."""
        return sum(w.process.poll() is None for w in self.all)

    # ---- while they work -------------------------------------------------------------------------
    def attached(self) -> bool:
        """Return whether the script has a session."""
        return (self._config.node_dir / marks.ATTACHED).exists()

    def unadopted(self) -> bool:
        """Return whether the script surely trains without a session."""
        return (self._config.node_dir / marks.UNADOPTED).exists() and not self.attached()

    def signs(self) -> list[heartbeat.Sign]:
        """Return the last heartbeat of each worker that ever sent one."""
        return [w.pulse.sign for w in self.all if w.pulse.sign is not None]

    def forgive(self, seconds: float) -> None:
        """Extend all timeouts by `seconds`, for which the agent itself was suspended."""
        for worker in self.all:
            worker.pulse.forgive(seconds)
            worker.ordered_s += seconds

    def signal(self, name: str) -> None:
        """Send a signal such as "USR1" (or "SIGUSR1") to workers that run."""
        for worker in self.all:
            if worker.process.poll() is None:
                worker.process.send_signal(getattr(signal, f"SIG{name.removeprefix('SIG')}"))

    def find_hung(self, now: float) -> list[Worker]:
        """Return workers without a heartbeat for too long, and make them write their stacks."""
        hung: list[Worker] = []
        for worker in self.all:
            if worker.process.poll() is not None:
                continue
            worker.pulse.look(now)
            state = (
                heartbeat.process_state(worker.process.pid)
                if now - worker.pulse.since_s > worker.pulse.bound_s(stopped=True)
                else ""
            )
            if what := worker.pulse.hung(now, state) or self._unforked(worker, now):
                worker.hung = what
                hung.append(worker)
                self._report_hung(worker, now, state)
        if hung:
            folder = self._config.node_dir
            asked = flight_recorder.ask_ranks(
                folder, [w.rank for w in self.all if w.process.poll() is None]
            )
            deadline_s = time.monotonic() + DUMP_S
            # a stopped worker writes nothing, so the wait is limited
            while time.monotonic() < deadline_s:
                time.sleep(0.1)
            flight_recorder.wait(folder, asked)
        return hung

    def _unforked(self, worker: Worker, now: float) -> str:
        if worker.process.pid or now - worker.ordered_s <= FORKED_WITHIN_S:
            return ""
        return f"not forked for {FORKED_WITHIN_S:.0f} s: the warm process hangs"

    def _report_hung(self, worker: Worker, now: float, state: str) -> None:
        pulse = worker.pulse
        sign = pulse.sign or heartbeat.Sign(0, 0, heartbeat.WorkerPhase.START)
        worker.guilty = not pulse.waits(state)
        self._record(
            WorkerHung(
                self._member,
                self._epoch.epoch,
                worker.rank,
                sign.step,
                sign.place.name.lower(),
                now - pulse.since_s,
                worker.guilty,
                worker.hung,
            )
        )
        print(
            f"harness run: rank {worker.rank} hangs: {worker.hung}; it is asked for its stacks, "
            "then ended",
            flush=True,
        )
        if state != "T":
            with contextlib.suppress(ProcessLookupError):
                worker.process.send_signal(DUMP_SIGNAL)

    # ---- end -------------------------------------------------------------------------------------
    def end(self) -> list[int]:
        """Kill workers that are still at work. Return ranks that do not end within `KILL_S`."""
        for worker in self.all:
            worker.ended_by_us = worker.process.poll() is None
            worker.process.strike()
        until_s = time.monotonic() + KILL_S
        for worker in self.all:
            worker.process.kill(max(NO_MORE_S, until_s - time.monotonic()))
            # read its last output; limited, since a grandchild may hold the pipe open
            worker.reader.join(2.0)
            worker.pulse.look(time.monotonic())  # the step that it came to
        return [w.rank for w in self.all if w.process.returncode is None]

    def flights(self) -> list[flight_recorder.FlightDump]:
        """Return the dumps of NCCL's flight recorders, each once."""
        steps = {w.rank: w.pulse.sign.step if w.pulse.sign else 0 for w in self.all}
        return flight_recorder.collect(self._config.node_dir, steps)


def _read(rank: int, stream: IO[bytes], tail: deque[str]) -> None:
    with stream:
        for raw in stream:
            line = masked_line(raw.decode(errors="replace").rstrip("\n"))
            tail.append(line)
            print(f"[{rank}] {line}", flush=True)
