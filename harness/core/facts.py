"""Facts: immutable records of what happened. Dashboards, ledgers, reports and audits render them.

Pure. A fact becomes one line of JSON; one writer's lines are chained by hash (`fact_lines.py`), so
a changed, lost or reordered fact is found. `journal.py` carries them to the bucket.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from harness.core.values import Amount, Count, Natural, Reading

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
    """In the place of what could not be read. Made by readers; nobody writes it. `t` of its
    stamp is that of the fact before."""

    where: str  # the segment's key and the line
    why: str

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


del KINDS["Unreadable"]  # a line that calls itself so is of an unknown kind


@dataclass(frozen=True, slots=True)
class Stamped:
    """A fact with when and by whom. `t` is wall-clock seconds (UTC)."""

    t: float
    writer: str
    fact: Fact


# ---- controller ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class LeaseTaken(Fact):
    term: int
    holder: str = ""
    counted_s: float | None = None  # of the time since the last controller; None: all of it


@dataclass(frozen=True)
class RunAsked(Fact):
    """What the user asked for, once per `harness launch`."""

    task: str
    min_nodes: int
    max_nodes: int
    policy: str
    market: str = ""
    budget_usd: float | None = None
    max_hours: float | None = None
    deadline_s: float | None = None  # wall clock
    work_h: float | None = None  # that all of it takes on max_nodes nodes, undisturbed


@dataclass(frozen=True)
class PricesSeen(Fact):
    """USD an hour, by offer: of those that are new, or cost something else than was told."""

    usd_per_h: dict[str, Reading]


@dataclass(frozen=True)
class AttemptIntended(Fact):
    """Written before the cloud is asked, so that no node is ever lost sight of."""

    attempt: int
    offer: dict[str, Any]  # world.Offer as a dict
    reason: str = ""
    instead_of: int | None = None  # the attempt that is released when this one is at work


@dataclass(frozen=True)
class AttemptUp(Fact):
    attempt: int
    up_s: float


@dataclass(frozen=True)
class AttemptEnded(Fact):
    """The attempt is surely gone. asked_s/up_s/gone_s are wall-clock seconds. Another one for the
    same attempt replaces it: a node that was given up as "lost" turned up after all, and this is
    its bill."""

    attempt: int
    # "finished" | "drained" | "preempted" | "failed" | "terminated" | "no-capacity" | "lost" |
    # "unfit" | "refused"
    end: str
    asked_s: float
    up_s: float | None
    gone_s: float
    exit_code: int | None
    reason: str
    billed_s: Amount
    usd: Amount
    # of the run when this was recorded; breakers count what ends without progress
    committed_step: int = 0


@dataclass(frozen=True)
class AttemptDoubted(Fact):
    """The node may not stay (a soft notice, or an end that is near), or may after all; the
    controller looks for another."""

    attempt: int
    doubted: bool


@dataclass(frozen=True)
class Decided(Fact):
    """A decision that changed something (waits are written when what they say changes)."""

    decision: str  # "launch" | "release" | "terminate" | "wait" | "stop" | "skip"
    reason: str = ""
    expected_s: Reading | None = None  # of a wait that was chosen: when it is probably over
    saving_usd: Reading | None = None  # ... and what it should save


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
    """The cloud was told that we have gone. `heard`: it answered."""

    member: str
    id: str = ""
    heard: bool = False


@dataclass(frozen=True)
class EpochStarted(Fact):
    """Written by the member that created the epoch object."""

    epoch: int
    members: tuple[str, ...]
    world: Count  # ranks
    reason: str = ""  # "start" | "grow" | "shrink" | "loss" | "restart"


@dataclass(frozen=True)
class EpochLeft(Fact):
    """One member's workers of that epoch have ended."""

    epoch: int
    member: str
    # "finished" | "drained" | "resize" | "peer-lost" | "failed" | "killed" | "hung" | "unfit" |
    # "stopped" | "unfinished"
    why: str


@dataclass(frozen=True)
class WorkerFailed(Fact):
    member: str
    epoch: int
    rank: int
    exit_code: int
    error: str = ""  # type of the exception, or the name of the signal
    message: str = ""
    log_tail: str = ""


@dataclass(frozen=True)
class WorkerHung(Fact):
    """No sign of life for longer than its bound. `guilty`: it was not merely waiting for others."""

    member: str
    epoch: int
    rank: int
    step: int
    place: str  # progress.WorkerPhase, in lower case
    silent_s: float
    guilty: bool
    what: str = ""


@dataclass(frozen=True)
class GraceSpent(Fact):
    """A notice's deadline is here and the workers have not left: what will be lost, and what is
    safe."""

    member: str
    epoch: int
    deadline_s: float  # wall clock
    step: int  # where the workers are; -1: they never said
    committed_step: int
    verdict: str = ""


@dataclass(frozen=True)
class HealthSeen(Fact):
    """Something that a GPU (or its driver) reported, and what is done about it."""

    member: str
    gpu: str
    what: str  # "xid 79", "ecc", "recovery action", "silent", ...
    message: str = ""
    action: str = ""  # health.Action, in lower case


@dataclass(frozen=True)
class NodeFound(Fact):
    """Where this machine stands and what an hour of it costs, as its agent found out; told again
    when more is known. "" and None: not known. It is the bill of a node that no controller of ours
    launched (plain `sky launch`, managed jobs)."""

    member: str
    cloud: str = ""
    region: str = ""
    zone: str = ""
    instance_type: str = ""
    accelerators: str = ""  # "H100:8"
    spot: bool | None = None
    usd_per_h: Reading | None = None
    on_demand_usd_per_h: Reading | None = None
    launched_s: float | None = None  # wall clock: since when it is paid for
    setup_s: float | None = None  # wall clock: when the task's `setup` began on it
    cluster: str = ""  # SkyPilot's name
    job: str = ""  # SkyPilot's id of the task or managed job
    source: str = ""  # who said so: "skypilot", "catalog", "aws", "environment", ...


@dataclass(frozen=True)
class NodeBilled(Fact):
    """What SkyPilot says of a node that no controller of ours launched: from when to when it is
    billed, and the price of one such node. Told by `harness costs --ask-sky`, since no node can
    tell how long it lived after its agent's end."""

    member: str
    launched_s: float  # wall clock
    gone_s: float | None  # wall clock; None: it was still there when this was told
    usd_per_h: Reading | None = None
    cluster: str = ""


@dataclass(frozen=True)
class NodeMeasured(Fact):
    """What a node's hardware did on average since its agent told it before (about a minute).
    Names: "cpu/percent", "memory/percent", "net/sent_bytes_per_s", "gpu0/percent",
    "gpu0/memory_percent", "gpu0/celsius", "gpu0/watts", ..."""

    member: str
    seconds: float
    metrics: dict[str, Reading]


@dataclass(frozen=True)
class HelperEnded(Fact):
    """A process beside rank 0 ended though it should run; it is started again, ever more slowly."""

    member: str
    helper: str  # "trackers" | "replica" | "keeper" | "alerts"
    exit_code: int
    why: str = ""  # the last line of its log


@dataclass(frozen=True)
class AgentEnded(Fact):
    member: str
    exit_code: int
    reason: str = ""


# ---- worker --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class SessionStarted(Fact):
    """Rank 0 of an epoch is ready to train. `shares`: micro-batches per replica and step."""

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
    tier: str = "bucket"  # of rank 0
    read_nbytes: dict[str, Natural] = field(default_factory=dict)  # of all ranks, by tier


@dataclass(frozen=True)
class SetupChanged(Fact):
    """A world is set up otherwise than the one that began the run, and in a way that was not told
    before. `changes`: each a setups.Difference; `setup`: digest of how it is set up."""

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
    """Where the time of steps `first` to `last` went, told by rank 0 every ten seconds or so.
    `seconds`: of one step, mean over steps and ranks, by phase (`PHASES`); they add up to the mean
    wall-clock time from one step's begin to the next one's. Spreads over ranks: of a rank's own
    time in a step (all but waiting for others), and of its mean loss. `read_...`: data that all
    ranks read since it was told before, by where it came from: a URL's scheme, or "cache"."""

    epoch: int
    first: int
    last: int
    seconds: dict[str, Reading]
    own_s: tuple[Reading, ...] = ()  # least, median, most
    own_ranks: tuple[int, ...] = ()  # of the least, of the most
    loss: tuple[Reading, ...] = ()  # least, median, most
    loss_ranks: tuple[int, ...] = ()
    hfu: Reading | None = None  # with recomputed activations, where counted
    mfu: Reading | None = None  # of the wall-clock time that `seconds` add up to
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
    "snapshot",  # training stood still for one
    "harness",  # bookkeeping of ours
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
    """Numbers of a step besides the loss. `by`: the watch whose side job made them of the step's
    snapshot, as "eval"; "": the training itself. One that is told again (a watcher died before it
    could say that it was done) counts once: the first of its watch, epoch and step."""

    step: int
    epoch: int
    metrics: dict[str, Reading]
    by: str = ""
    seconds: float = 0.0  # that the side job took


@dataclass(frozen=True)
class SnapshotCommitted(Fact):
    step: int
    epoch: int
    nbytes: int
    stall_s: float  # how long training stood still for it
    commit_s: float  # from the safe point to the commit
    why: str  # "interval" | "notice" | "drain" | "resize" | "stop" | "request" | "final" | "own"
    t_start: float  # safe point, wall clock
    weights: str = ""  # hash of the model's weights, where it was made
    # of steps beside rank 0's sending: 0.1 is a tenth longer; 0 also if it was too short to tell
    slowdown: float = 0.0
    pace: float = 0.0  # bytes per second from rank 0's node that steps do not feel; 0: not known
    # until the next is due, and the time between losses from which that was derived; 0: not known
    interval_s: float = 0.0
    between_losses_s: float = 0.0


@dataclass(frozen=True)
class SnapshotReplicated(Fact):
    """A committed snapshot is in a second bucket as well. `usd`: estimate of what that cost."""

    step: int
    epoch: int
    url: str
    nbytes: int
    seconds: float
    usd: float


@dataclass(frozen=True)
class SnapshotExported(Fact):
    """A person wrote its weights as safetensors, somewhere. `files`: their names. `dtype`: what
    floats became; "": they stayed."""

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
    """Said once of every snapshot share that was on its way while a node had a deadline, and
    final when it is said."""

    member: str
    step: int
    epoch: int
    rank: int
    committed: bool
    last_good_step: int  # the newest committed snapshot of the run when this was said
    # what was forecast when the share arrived, from the measured bandwidth and the time left
    expected: bool
    left_s: Reading  # at that moment
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
    what: str  # "non-finite loss", "loss spike", ...
    value: Reading


@dataclass(frozen=True)
class Warned(Fact):
    """Something that weakens a promise, named; training goes on."""

    step: int
    epoch: int
    what: str = ""


@dataclass(frozen=True)
class SessionEnded(Fact):
    """Rank 0 left the epoch on purpose. `step` is committed."""

    epoch: int
    step: int
    why: str = ""  # "finished" | "drained" | "resize" | "stopped"
