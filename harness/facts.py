"""Facts: immutable records of what happened. Dashboards, ledgers, reports and audits are renderings of them.

Pure. A fact becomes one line of JSON; the lines of one writer are chained by hash, so a changed, lost or reordered
fact is found (`check_chain`). `journal.py` carries them to the bucket.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

KINDS: dict[str, type[Fact]] = {}


def canonical(value: object) -> bytes:
    """The one JSON spelling that hashes are made of. Floats keep every bit (repr round-trips)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=True).encode()


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


@dataclass(frozen=True)
class Fact:
    """Base of all facts; the subclass name is the kind."""

    kind: ClassVar[str] = "Fact"

    def __init_subclass__(cls) -> None:
        cls.kind = cls.__name__
        KINDS[cls.kind] = cls


@dataclass(frozen=True)
class Stamped:
    """A fact with when and by whom. `t` is wall-clock seconds (UTC)."""

    t: float
    writer: str
    fact: Fact


# ---- controller -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class LeaseTaken(Fact):
    term: int
    holder: str


@dataclass(frozen=True)
class RunAsked(Fact):
    """What the user asked for, once per `harness launch`."""

    task: str
    min_nodes: int
    max_nodes: int
    policy: str
    market: str = ""
    budget_usd: float | None = None


@dataclass(frozen=True)
class AttemptIntended(Fact):
    """Written before the cloud is asked, so that no node is ever lost sight of."""

    attempt: int
    offer: dict[str, Any]  # world.Offer as a dict
    reason: str = ""


@dataclass(frozen=True)
class AttemptUp(Fact):
    attempt: int
    up_s: float


@dataclass(frozen=True)
class AttemptEnded(Fact):
    """The attempt is surely gone. asked_s/up_s/gone_s are wall-clock seconds. Another one for the same attempt replaces
    it: a node that was given up as "lost" turned up after all, and this is its bill."""

    attempt: int
    end: str  # "finished" | "drained" | "preempted" | "failed" | "terminated" | "no-capacity" | "lost" | "unfit"
    asked_s: float
    up_s: float | None
    gone_s: float
    exit_code: int | None
    reason: str
    billed_s: float
    usd: float
    committed_step: int = 0  # of the run when this was recorded; breakers count what ends without progress


@dataclass(frozen=True)
class AttemptDoubted(Fact):
    """The node may not stay (a soft notice, or an end that is near), or may after all; the controller looks for another."""

    attempt: int
    doubted: bool


@dataclass(frozen=True)
class Decided(Fact):
    """A decision that changed something (waits are written once per change of reason)."""

    decision: str  # "launch" | "release" | "terminate" | "wait" | "stop"
    reason: str


@dataclass(frozen=True)
class RunEnded(Fact):
    outcome: str  # "done" | "stopped" | "failed"
    reason: str
    committed_step: int


# ---- agent ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class AgentStarted(Fact):
    member: str
    attempt: int
    host: str
    nproc: int
    accelerator: str
    pid: int


@dataclass(frozen=True)
class NoticeSeen(Fact):
    member: str
    source: str  # "aws", "signal", "file", "user"
    notice: str  # kind: "kill" | "soft" | "maintenance"
    id: str
    deadline_s: float | None  # wall clock


@dataclass(frozen=True)
class NoticeCancelled(Fact):
    member: str
    id: str


@dataclass(frozen=True)
class NoticeAcknowledged(Fact):
    """The cloud was told that we have gone. `heard`: it answered."""

    member: str
    id: str
    heard: bool


@dataclass(frozen=True)
class EpochStarted(Fact):
    """Written by the member that created the epoch object."""

    epoch: int
    members: tuple[str, ...]
    world: int  # ranks
    reason: str  # "start" | "grow" | "shrink" | "loss" | "restart"


@dataclass(frozen=True)
class EpochLeft(Fact):
    """One member's workers of that epoch have ended."""

    epoch: int
    member: str
    why: str  # "finished" | "drained" | "resize" | "peer-lost" | "failed" | "killed" | "hung" | "unfit" | "stopped" | "unfinished"


@dataclass(frozen=True)
class WorkerFailed(Fact):
    member: str
    epoch: int
    rank: int
    exit_code: int
    error: str  # type of the exception, or the name of the signal
    message: str
    log_tail: str


@dataclass(frozen=True)
class WorkerHung(Fact):
    """No sign of life for longer than its bound. `guilty`: it was not merely waiting for others."""

    member: str
    epoch: int
    rank: int
    step: int
    place: str  # progress.Place, in lower case
    silent_s: float
    guilty: bool
    what: str


@dataclass(frozen=True)
class GraceSpent(Fact):
    """A notice's deadline is here and the workers have not left: what will be lost, and what is safe."""

    member: str
    epoch: int
    deadline_s: float  # wall clock
    step: int  # where the workers are; -1: they never said
    committed_step: int
    verdict: str


@dataclass(frozen=True)
class HealthSeen(Fact):
    """Something that a GPU (or its driver) reported, and what is done about it."""

    member: str
    gpu: str
    what: str  # "xid 79", "ecc", "recovery action", "silent", ...
    message: str
    action: str  # health.Action, in lower case


@dataclass(frozen=True)
class AgentEnded(Fact):
    member: str
    exit_code: int
    reason: str


# ---- worker -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class SessionStarted(Fact):
    """Rank 0 of an epoch is ready to train. `shares`: micro-batches per rank and step."""

    epoch: int
    world: int
    resumed_step: int
    resumed_epoch: int  # 0: nothing to resume
    total_steps: int
    global_batch: int
    micro_batch: int
    shares: tuple[int, ...]
    reduce: str
    parallel: str
    device: str
    restore_s: float
    tier: str = "bucket"


@dataclass(frozen=True)
class StepDone(Fact):
    """Live metrics of one step (rank 0). The durable record is the step record in `samples/`."""

    step: int
    epoch: int
    loss: float
    t_start: float
    seconds: float
    samples: int
    tokens: int
    lr: float = 0.0
    grad_norm: float | None = None
    mfu: float | None = None


@dataclass(frozen=True)
class Validated(Fact):
    step: int
    epoch: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class SnapshotCommitted(Fact):
    step: int
    epoch: int
    nbytes: int
    stall_s: float  # how long training stood still for it
    commit_s: float  # from the safe point to the commit
    why: str  # "interval" | "notice" | "resize" | "request" | "final"
    t_start: float  # safe point, wall clock
    weights: str = ""  # hash of the model's weights, where it was made
    slowdown: float = 0.0  # of the steps beside rank 0's sending: 0.1 is a tenth longer; 0 also if it was too short to tell
    requests: int = 0  # that rank 0's node had on their way at once in the end (storage/throttle.py); 0: not known


@dataclass(frozen=True)
class SnapshotReplicated(Fact):
    """A committed snapshot is in a second bucket as well. `usd`: estimate of what bringing `nbytes` there cost."""

    step: int
    epoch: int
    url: str
    nbytes: int
    seconds: float
    usd: float


@dataclass(frozen=True)
class SnapshotFailed(Fact):
    step: int
    epoch: int
    why: str


@dataclass(frozen=True)
class DrainVerdict(Fact):
    """Said once of every snapshot share that was on its way while a node had a deadline, and final when it is said."""

    member: str
    step: int
    epoch: int
    rank: int
    committed: bool
    last_good_step: int  # the newest committed snapshot of the run when this was said
    expected: bool  # what was forecast when the share arrived, from the measured bandwidth and the time left
    left_s: float  # at that moment
    need_s: float


@dataclass(frozen=True)
class SnapshotQuarantined(Fact):
    step: int
    epoch: int
    why: str


@dataclass(frozen=True)
class GuardTripped(Fact):
    step: int
    epoch: int
    what: str  # "non-finite loss", "loss spike", ...
    value: float


@dataclass(frozen=True)
class Warned(Fact):
    """Something that weakens a promise, named; training goes on."""

    step: int
    epoch: int
    what: str


@dataclass(frozen=True)
class SessionEnded(Fact):
    """Rank 0 left the epoch on purpose. `step` is committed."""

    epoch: int
    step: int
    why: str  # "finished" | "drained" | "resize" | "stopped"


# ---- lines ------------------------------------------------------------------------------------------------------
class Chain:
    """Turns one writer's facts into chained JSON lines."""

    def __init__(self, writer: str):
        self.writer, self.head = writer, digest(writer.encode())

    def line(self, t: float, fact: Fact) -> str:
        body = {"fact": fact.kind, "t": t, **dataclasses.asdict(fact), "prev": self.head}
        self.head = digest(canonical(body))
        return json.dumps({**body, "h": self.head}, separators=(",", ":"))


class BrokenChain(ValueError):
    """A fact was changed, lost or reordered; the message names writer and line."""


def check_chain(writer: str, lines: Iterable[str]) -> Iterator[Stamped]:
    """Yield the facts of one writer's lines, in order. Raises BrokenChain at the first line that does not fit."""
    head = digest(writer.encode())
    for number, line in enumerate(lines, 1):
        try:
            body = json.loads(line)
            found = body.pop("h")
        except (ValueError, KeyError, AttributeError) as e:
            raise BrokenChain(f"facts of {writer}, line {number}: not a fact ({e})") from e
        if body.get("prev") != head or digest(canonical(body)) != found:
            raise BrokenChain(f"facts of {writer}, line {number} ({body.get('fact')}): changed, lost or out of order")
        head = found
        yield Stamped(body["t"], writer, parse(body))


def parse(body: dict[str, Any]) -> Fact:
    """A fact from its JSON body. Unknown kinds and fields (written by a newer version) are tolerated."""
    cls = KINDS.get(body.get("fact", ""))
    if cls is None:
        return Fact()
    names = {f.name: f for f in dataclasses.fields(cls)}
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in body.items() if k in names}
    return cls(**values)
