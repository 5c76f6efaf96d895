"""Facts: immutable records of what happened. Dashboards, ledgers, reports and audits render them.

Pure. A fact becomes one line of JSON; one writer's lines are chained by hash, so
a changed, lost or reordered fact is found. `journal.py` carries them to the bucket.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from dataclasses import dataclass, field
from typing import Any, ClassVar

from harness.core.decoding import (
    MOST_T,
    PROTOCOL,
    Amount,
    Count,
    Natural,
    NewerProtocol,
    Reading,
    built,
    check_protocol,
    number,
    stamped,
)
from harness.core.masking import masked_deep
from harness.core.signing import SigningKey
from storage.canonical_json import BadObject, canonical, digest, parsed

KINDS: dict[str, type[Fact]] = {}


@dataclass(frozen=True)
class Fact:
    """Base of all facts; the subclass name is the kind."""

    kind: ClassVar[str] = "Fact"

    def __init_subclass__(cls) -> None:
        cls.kind = cls.__name__
        KINDS[cls.kind] = cls


@dataclass(frozen=True)
class Unreadable(Fact):
    """A placeholder for something that could not be read. Readers make it; it is never written. The
    `t` of its stamp is that of the previous fact."""

    where: str  # the segment's key and the line
    why: str

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


del KINDS["Unreadable"]  # a line of this kind counts as an unknown kind


@dataclass(frozen=True, slots=True)
class Stamped:
    """A fact with its time and its writer. `t` is wall-clock seconds (UTC)."""

    t: float
    writer: str
    fact: Fact


# ---- controller ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class LeaseTaken(Fact):
    term: int
    holder: str = ""
    counted_s: float | None = None  # counted part of the time since the last controller; None: all


@dataclass(frozen=True)
class RunAsked(Fact):
    """The user's request, recorded once per `harness launch`."""

    task: str
    min_nodes: int
    max_nodes: int
    policy: str
    market: str = ""
    budget_usd: float | None = None
    max_hours: float | None = None
    deadline_s: float | None = None  # wall clock
    work_h: float | None = None  # hours that the whole run takes on max_nodes nodes, undisturbed


@dataclass(frozen=True)
class PricesSeen(Fact):
    """Prices in USD per hour, by offer: of offers that are new, or whose price has changed since it
    was last recorded."""

    usd_per_h: dict[str, Reading]


@dataclass(frozen=True)
class AttemptIntended(Fact):
    """The intent to launch an attempt, written before the request to the cloud, so that no node is
    ever lost track of."""

    attempt: int
    offer: dict[str, Any]  # world.Offer as a dict
    reason: str = ""
    instead_of: int | None = None  # the attempt to release when this one is at work


@dataclass(frozen=True)
class AttemptUp(Fact):
    attempt: int
    up_s: float


@dataclass(frozen=True)
class AttemptEnded(Fact):
    """The attempt is surely gone. asked_s/up_s/gone_s are wall-clock seconds. A later fact for the
    same attempt replaces this one: a node that was given up as "lost" turned up after all, and the
    later fact has its bill."""

    attempt: int
    # "finished" | "drained" | "preempted" | "failed" | "terminated" | "no-capacity" | "lost" |
    # "unfit" | "refused" | "killed" (its command, by a signal that nobody asked for)
    end: str
    asked_s: float
    up_s: float | None
    gone_s: float
    exit_code: int | None
    reason: str
    billed_s: Amount
    usd: Amount
    # of the run when this was recorded; breakers count attempts that end without progress
    committed_step: int = 0


@dataclass(frozen=True)
class AttemptDoubted(Fact):
    """The node may not stay (a soft notice, or an end that is near), so the controller looks for
    another; or (`doubted` False) the doubt is withdrawn."""

    attempt: int
    doubted: bool


@dataclass(frozen=True)
class Decided(Fact):
    """A decision that changed something. A wait is recorded when its content changes."""

    decision: str  # "launch" | "release" | "terminate" | "wait" | "stop" | "skip"
    reason: str = ""
    expected_s: Reading | None = None  # probable end of a wait that was chosen
    saving_usd: Reading | None = None  # expected saving of that wait


@dataclass(frozen=True)
class RunEnded(Fact):
    outcome: str  # "done" | "stopped" | "failed"
    reason: str = ""
    committed_step: int = 0


# ---- agent ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class AgentStarted(Fact):
    member: str
    attempt: int
    host: str = ""
    nproc: Count = 1
    accelerator: str = ""
    pid: int = 0


@dataclass(frozen=True)
class NoticeSeen(Fact):
    member: str
    source: str  # "aws", "signal", "file", "user"
    notice: str  # kind: "kill" | "soft" | "maintenance"
    id: str = ""
    deadline_s: float | None = None  # wall clock


@dataclass(frozen=True)
class NoticeCancelled(Fact):
    member: str
    id: str


@dataclass(frozen=True)
class NoticeAcknowledged(Fact):
    """The cloud was notified that the node has left. `heard`: the cloud answered."""

    member: str
    id: str = ""
    heard: bool = False


@dataclass(frozen=True)
class EpochStarted(Fact):
    """A generation (the code's `epoch`) began. Written by the member that created its object."""

    epoch: int
    members: tuple[str, ...]
    world: Count  # ranks
    reason: str = ""  # "start" | "grow" | "shrink" | "loss" | "restart"


@dataclass(frozen=True)
class EpochLeft(Fact):
    """One member's workers of that generation have ended."""

    epoch: int
    member: str
    # "finished" | "drained" | "resize" | "peer-lost" | "failed" | "killed" | "hung" | "unfit" |
    # "stopped" | "unfinished"
    why: str


# Names of failures in which memory ran out: an allocation failed, or the kernel killed the worker.
OUT_OF_MEMORY, OOM_KILLED = "OutOfMemoryError", "OomKilled"
MEMORY_RAN_OUT = (OUT_OF_MEMORY, OOM_KILLED)


@dataclass(frozen=True)
class WorkerFailed(Fact):
    member: str
    epoch: int
    rank: int
    exit_code: int
    error: str = ""  # exception type, signal name, or one of `MEMORY_RAN_OUT`
    message: str = ""
    log_tail: str = ""


@dataclass(frozen=True)
class WorkerHung(Fact):
    """A worker's heartbeat exceeded its timeout. `guilty`: it was not merely waiting for others."""

    member: str
    epoch: int
    rank: int
    step: int
    place: str  # heartbeat.WorkerPhase, in lower case
    silent_s: float
    guilty: bool
    what: str = ""


@dataclass(frozen=True)
class StackSeen(Fact):
    """The stack of a silent worker's main thread, before its generation ended. `collective`: the
    one that it waited in, and the line that called it; "": none. `frames`: the innermost calls
    first, each FILE:LINE FUNCTION."""

    member: str
    epoch: int
    rank: int
    step: int
    collective: str
    frames: tuple[str, ...] = ()


@dataclass(frozen=True)
class GraceSpent(Fact):
    """A notice's deadline has come and the workers have not left: the steps after `committed_step`
    will be lost, those up to it are safe."""

    member: str
    epoch: int
    deadline_s: float  # wall clock
    step: int  # current step of the workers; -1: never reported
    committed_step: int
    verdict: str = ""


@dataclass(frozen=True)
class HealthSeen(Fact):
    """A report of a GPU (or its driver), and the action taken."""

    member: str
    gpu: str
    what: str  # "xid 79", "ecc", "recovery action", "silent", ...
    message: str = ""
    action: str = ""  # `gpu_health.Action`, in lower case


@dataclass(frozen=True)
class NodeFound(Fact):
    """The place of a machine and its price per hour, as its agent found out; recorded again when
    more is known. "" and None: unknown. It is the bill of a node that was not launched by our
    controller (plain `sky launch`, managed jobs)."""

    member: str
    cloud: str = ""
    region: str = ""
    zone: str = ""
    instance_type: str = ""
    accelerators: str = ""  # "H100:8"
    spot: bool | None = None
    usd_per_h: Reading | None = None
    on_demand_usd_per_h: Reading | None = None
    launched_s: float | None = None  # wall clock: start of billing
    setup_s: float | None = None  # wall clock: start of the task's `setup` on it
    cluster: str = ""  # SkyPilot's name
    job: str = ""  # SkyPilot's id of the task or managed job
    source: str = ""  # origin of the data: "skypilot", "catalog", "aws", "environment", ...


@dataclass(frozen=True)
class NodeBilled(Fact):
    """SkyPilot's data on a node that was not launched by our controller: its billed period and the
    price of one such node. Recorded by `harness runs costs --ask-sky`, since a node cannot report
    how long it lived after its agent's end."""

    member: str
    launched_s: float  # wall clock
    gone_s: float | None  # wall clock; None: it still existed when this was recorded
    usd_per_h: Reading | None = None
    cluster: str = ""


@dataclass(frozen=True)
class NodeMeasured(Fact):
    """Averages of a node's hardware metrics since its agent's previous report (about a minute).
    Names: "cpu/percent", "memory/percent", "disk/percent" (used space of the disk with the
    node's folder), "disk/read_bytes_per_s", "net/sent_bytes_per_s", "gpu0/percent",
    "gpu0/memory_percent", "gpu0/celsius", "gpu0/watts", ..."""

    member: str
    seconds: float
    metrics: dict[str, Reading]


@dataclass(frozen=True)
class HelperEnded(Fact):
    """A process beside rank 0, or a node's uploader, ended though it should run, or was killed as
    it hung; it is restarted with backoff."""

    member: str
    helper: str  # "trackers" | "replica" | "keeper" | "alerts" | "uploader"
    exit_code: int
    why: str = ""  # what its log or its silence says


@dataclass(frozen=True)
class AgentEnded(Fact):
    member: str
    exit_code: int
    reason: str = ""


# ---- worker --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class SessionStarted(Fact):
    """Rank 0 of a generation is ready to train. `shares`: micro-batches per replica and step.
    `first_ranks`: the ranks that the global batch of an unchanged script was made for; 0: the
    script names its global batch itself."""

    epoch: int
    world: int
    resumed_step: int
    resumed_epoch: int  # 0: nothing to resume
    total_steps: int
    global_batch: int
    micro_batch: int
    shares: tuple[int, ...] = ()
    reduce: str = ""
    parallel: str = ""
    device: str = ""
    restore_s: float = 0.0
    tier: str = "bucket"  # tier that rank 0 restored from
    read_nbytes: dict[str, Natural] = field(default_factory=dict)  # of all ranks, by tier
    first_ranks: Count = 0


@dataclass(frozen=True)
class SetupChanged(Fact):
    """A world's setup differs from that of the world that began the run, in a way that was not
    recorded before. `changes`: each a setup_record.Difference; `setup`: digest of the new setup."""

    epoch: int
    setup: str
    action: str  # "warned" | "accepted" | "refused"
    changes: tuple[dict[str, str], ...] = ()
    more: Count = 0  # changes that are not listed


@dataclass(frozen=True)
class StepDone(Fact):
    """Live metrics of one step (rank 0). The durable record is the step record in `samples/`."""

    step: int
    epoch: int
    loss: Reading
    t_start: float
    seconds: float
    samples: int = 0
    tokens: int = 0
    lr: Reading = 0.0
    grad_norm: Reading | None = None
    mfu: Reading | None = None


@dataclass(frozen=True)
class StepsTimed(Fact):
    """The time of steps `first` to `last` by phase, reported by rank 0 about every ten seconds.
    `seconds`: of one step, mean over steps and ranks, by phase (`PHASES`); they add up to the mean
    wall-clock time from one step's begin to the next one's. `own_s` and `loss` are spreads over
    ranks: of a rank's own time in a step (all but waiting for others), and of its mean loss.
    `read_...`: data that all ranks read since the previous report, by URL scheme or "cache"."""

    epoch: int
    first: int
    last: int
    seconds: dict[str, Reading]
    own_s: tuple[Reading, ...] = ()  # least, median, most
    own_ranks: tuple[int, ...] = ()  # ranks of the least and the most
    loss: tuple[Reading, ...] = ()  # least, median, most
    loss_ranks: tuple[int, ...] = ()
    hfu: Reading | None = None  # including recomputed activations, where counted
    mfu: Reading | None = None  # over the wall-clock time that `seconds` add up to
    samples: int = 0  # of one step, over all replicas
    tokens: int = 0
    read_nbytes: dict[str, Natural] = field(default_factory=dict)
    read_requests: Natural = 0


PHASES = (
    "data",  # waiting for micro-batches
    "forward",  # the script between a micro-batch and `backward`
    "backward",
    "communication",  # exposed: waiting for other ranks' gradients and numbers
    "optimizer",  # clipping, optimizers, schedulers
    "snapshot",  # training stalled for one
    "harness",  # our bookkeeping
    "other",  # the script between steps: validation, logging
)


@dataclass(frozen=True)
class ProfileTaken(Fact):
    """A rank's traces of some steps are in the bucket."""

    epoch: int
    rank: int
    first: int
    last: int
    keys: tuple[str, ...]
    nbytes: int = 0


@dataclass(frozen=True)
class Validated(Fact):
    """Numbers of a step besides the loss. `by`: the watch whose side job computed them from the
    step's snapshot, such as "eval"; "": the training itself. A repeated fact (a watcher died before
    it could record that it was done) counts once: the first of its watch, generation and step."""

    step: int
    epoch: int
    metrics: dict[str, Reading]
    by: str = ""
    seconds: float = 0.0  # duration of the side job


@dataclass(frozen=True)
class SnapshotCommitted(Fact):
    step: int
    epoch: int
    nbytes: int
    stall_s: float  # how long training stalled for it
    commit_s: float  # from the safe point to the commit
    why: str  # "interval" | "notice" | "drain" | "resize" | "stop" | "request" | "final" | "own"
    t_start: float  # safe point, wall clock
    weights: str = ""  # hash of the model's weights, if it was computed
    # of steps during rank 0's upload: 0.1 is a tenth longer; 0 also if it was too short to measure
    slowdown: float = 0.0
    pace: float = 0.0  # upload bytes per second of rank 0's node without slowdown; 0: unknown
    # time until the next one is due, and the time between losses that it follows from; 0: unknown
    interval_s: float = 0.0
    between_losses_s: float = 0.0


@dataclass(frozen=True)
class SnapshotReplicated(Fact):
    """A committed snapshot is in a second bucket as well. `usd`: estimated cost of the copy."""

    step: int
    epoch: int
    url: str
    nbytes: int
    seconds: float
    usd: float


@dataclass(frozen=True)
class SnapshotExported(Fact):
    """A person exported a snapshot's weights as safetensors. `files`: their names. `dtype`: the
    type that floats were converted to; "": unchanged."""

    step: int
    epoch: int
    files: tuple[str, ...] = ()
    tensors: int = 0
    nbytes: int = 0
    dtype: str = ""


@dataclass(frozen=True)
class SnapshotFailed(Fact):
    step: int
    epoch: int
    why: str = ""


@dataclass(frozen=True)
class DrainVerdict(Fact):
    """The outcome of a snapshot share that was being uploaded while its node had a deadline;
    recorded once for each, and final."""

    member: str
    step: int
    epoch: int
    rank: int
    committed: bool
    last_good_step: int  # the newest committed snapshot of the run when this was recorded
    # the forecast when the share arrived, from the measured bandwidth and the remaining time
    expected: bool
    left_s: Reading  # remaining at that moment
    need_s: Reading


@dataclass(frozen=True)
class SnapshotQuarantined(Fact):
    step: int
    epoch: int
    why: str = ""


@dataclass(frozen=True)
class GuardTripped(Fact):
    step: int
    epoch: int
    what: str  # "non-finite", LOSS_SPIKE, ...
    value: Reading


LOSS_SPIKE = "loss spike"  # of GuardTripped


@dataclass(frozen=True)
class StepSkipped(Fact):
    """The guards have skipped a step's update: its samples are consumed, the weights are as before.
    `micro_batches`, `ranks`: where the loss or a gradient was not finite; (): not known, or the
    norm of the whole was too great. `samples`: these micro-batches' samples, for people."""

    step: int
    epoch: int
    why: str
    loss: Reading
    grad_norm: Reading
    micro_batches: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    samples: str = ""


NOT_ELASTIC = "not elastic: nothing is saved"  # a warning about a script without a session


@dataclass(frozen=True)
class Warned(Fact):
    """A named condition that weakens a promise; training goes on."""

    step: int
    epoch: int
    what: str = ""


@dataclass(frozen=True)
class SessionEnded(Fact):
    """Rank 0 left the generation on purpose. `step` is committed, except for a rewind."""

    epoch: int
    step: int
    why: str = ""  # "finished" | "drained" | "resize" | "stopped" | "rewind"


# Facts as lines of JSON, chained by hash: writing, reading, and detecting changes.

NUMBERS = {int, float, bool, type(None)}
UNIONS = {typing.Union, types.UnionType}


@functools.cache
def holds_numbers_only(kind: str) -> bool:
    """Return whether every field of facts of this kind is a number (or None), so that its lines
    need neither masking nor, in the first protocol, a stamp."""
    cls = KINDS.get(kind, Unreadable)
    hints = typing.get_type_hints(cls)
    found: set[Any] = set()
    for one in dataclasses.fields(cls):
        hint = hints[one.name]
        found |= {*typing.get_args(hint)} if typing.get_origin(hint) in UNIONS else {hint}
    return found <= NUMBERS and "protocol" not in hints and PROTOCOL == 1


class Chain:
    """A writer's facts as chained JSON lines. `head`: hash of the last line."""

    def __init__(self, writer: str):
        self.writer, self.head = writer, digest(writer.encode())

    def line(self, t: float, fact: Fact) -> str:
        told = dataclasses.asdict(fact)
        if holds_numbers_only(fact.kind):  # no secret can stand in it, and steps are many
            return self._chained({"fact": fact.kind, "t": t, **told, "prev": self.head})
        said = {"fact": fact.kind, "t": t, **masked_deep(told), "prev": self.head}
        return self._chained(stamped(said))

    def seal(self, t: float, key: SigningKey) -> str:
        """Return a signed line that ends a segment, so that no line of it can be left out. Readers
        that do not know it skip it, like every unknown kind."""
        body: dict[str, Any] = {"fact": SEAL, "t": t, "prev": self.head}
        body["s"] = key.sign(_purpose(self.writer), canonical(body))
        return self._chained(body)

    def _chained(self, body: dict[str, Any]) -> str:
        self.head = digest(canonical(body))
        return json.dumps({**body, "h": self.head}, separators=(",", ":"))


SEAL = "Signed"


def _purpose(writer: str) -> str:
    return f"facts of {writer}"


def is_sealed(writer: str, line: bytes, key: SigningKey) -> bool:
    """Return whether `line` is a segment's last line by this writer, signed with this key."""
    try:
        body = parsed(line)
    except BadObject:
        return False
    if not isinstance(body, dict) or body.get("fact") != SEAL:
        return False
    body.pop("h", None)
    signature = body.pop("s", None)
    return key.holds(_purpose(writer), canonical(body), signature)


def is_spelled(body: Any, line: bytes) -> bool:
    """Return whether `line` is this JSON in the one spelling used for facts and records."""
    try:
        return json.dumps(body, separators=(",", ":")).encode() == line
    except RecursionError:
        return False


class ChainReader:
    """A reader of one writer's lines, in order. `head`: hash of the last line (at first, of the one
    before the first; "": none); None: that line was unreadable, and this was reported. `hashes`:
    detect changed lines, and lines that follow a lost one."""

    def __init__(self, writer: str, head: str = "", hashes: bool = True):
        self.writer, self._hashes = writer, hashes
        self.head: str | None = head or digest(writer.encode())
        self.t = 0.0

    def read(self, where: str, line: str) -> list[Stamped]:
        """Return the line's fact, or an `Unreadable` in its place or before it."""
        try:
            body = parsed(line)
            if not isinstance(body, dict):
                raise BadObject(f"wanted a JSON object, found {type(body).__name__}")
            found = body.pop("h", "")
            if self._hashes and digest(canonical(body)) != found:
                raise BadObject(f"{body.get('fact')!r:.60} was changed: its hash does not fit")
        except BadObject as e:
            self.head = None
            return [self._unread(where, f"not a fact as it was written ({e})")]
        told: list[Stamped] = []
        if self._hashes and self.head not in (None, body.get("prev")):
            why = "what came before it was changed, lost or put out of order"
            told.append(self._unread(where, why))
        self.head = str(found)
        try:
            fact, t = parse(body), number(body.get("t"), 0.0, MOST_T)
        except NewerProtocol as e:
            return [*told, self._unread(where, str(e))]
        except BadObject as e:
            why = f"wanted the fields of {body.get('fact')!r:.60}, found other ones ({e})"
            return [*told, self._unread(where, why)]
        self.t = t
        return [*told, Stamped(t, self.writer, fact)]

    def _unread(self, where: str, why: str) -> Stamped:
        return Stamped(self.t, self.writer, Unreadable(where, why))


def parse(body: dict[str, Any]) -> Fact:
    """Build a fact from its JSON body. Unknown kinds and fields (written by a newer version) are
    tolerated.

    Raises BadObject if a field without a default is missing, or a field has the wrong type;
    NewerProtocol.
    """
    check_protocol(body)
    kind = body.get("fact")
    cls = KINDS.get(kind) if isinstance(kind, str) else None
    return Fact() if cls is None else built(cls, body)
