"""Facts: immutable records of what happened. Dashboards, ledgers, reports and audits are renderings
of them.

Pure. A fact becomes one line of JSON; the lines of one writer are chained by hash, so a changed,
lost or reordered fact is found. `journal.py` carries them to the bucket.

Readers go on whatever a bucket holds: unknown kinds and fields (of a newer version) are ignored,
missing fields get their defaults, and any other line becomes an `Unreadable`, which says where and
why. `harness verify` calls that a violation.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

T = TypeVar("T")
KINDS: dict[str, type[Fact]] = {}
Reading = Annotated[float, "a measurement: may be NaN or infinite"]
Count = Annotated[int, "of things that readers go through one by one"]
# Beyond these a number is damage. MOST_T: wall clock, the year 5138.
MOST_INT, MOST_FLOAT, MOST_COUNT, MOST_T = 2**53, 1e15, 10**6, 1e11


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
class Unreadable(Fact):
    """In the place of what could not be read. Made by readers; nobody writes it. `t` of its
    stamp is that of the fact before."""

    where: str  # the segment's key and the line
    why: str

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


del KINDS["Unreadable"]  # a line that calls itself so is of an unknown kind


@dataclass(frozen=True)
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
    """The attempt is surely gone. asked_s/up_s/gone_s are wall-clock seconds. Another one for the
    same attempt replaces
    it: a node that was given up as "lost" turned up after all, and this is its bill."""

    attempt: int
    # "finished" | "drained" | "preempted" | "failed" | "terminated" | "no-capacity" | "lost" |
    # "unfit"
    end: str
    asked_s: float
    up_s: float | None
    gone_s: float
    exit_code: int | None
    reason: str
    billed_s: float
    usd: float
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
    """A decision that changed something (waits are written once per change of reason)."""

    decision: str  # "launch" | "release" | "terminate" | "wait" | "stop" | "skip"
    reason: str = ""


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
    place: str  # progress.Place, in lower case
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
class AgentEnded(Fact):
    member: str
    exit_code: int
    reason: str = ""


# ---- worker --------------------------------------------------------------------------------------
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
    shares: tuple[int, ...] = ()
    reduce: str = ""
    parallel: str = ""
    device: str = ""
    restore_s: float = 0.0
    tier: str = "bucket"


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
class Validated(Fact):
    step: int
    epoch: int
    metrics: dict[str, Reading]


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
    # of the steps beside rank 0's sending: 0.1 is a tenth longer; 0 also if it was too short to
    # tell
    slowdown: float = 0.0
    # that rank 0's node had on their way at once in the end (storage/throttle.py); 0: not known
    requests: int = 0


@dataclass(frozen=True)
class SnapshotReplicated(Fact):
    """A committed snapshot is in a second bucket as well. `usd`: estimate of what bringing
    `nbytes` there cost."""

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


# ---- lines ---------------------------------------------------------------------------------------
class Chain:
    """Turns one writer's facts into chained JSON lines."""

    def __init__(self, writer: str):
        self.writer, self.head = writer, digest(writer.encode())

    def line(self, t: float, fact: Fact) -> str:
        body = {"fact": fact.kind, "t": t, **dataclasses.asdict(fact), "prev": self.head}
        self.head = digest(canonical(body))
        return json.dumps({**body, "h": self.head}, separators=(",", ":"))


def loaded(text: str | bytes) -> Any:
    """JSON of a bucket. Raises ValueError, also for what is nested too deep for Python."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def is_spelled(body: Any, line: bytes) -> bool:
    """Is it the one spelling of this JSON in which facts and records are written?"""
    try:
        return json.dumps(body, separators=(",", ":")).encode() == line
    except RecursionError:
        return False


def read_chain(
    writer: str, lines: Iterable[tuple[str, str]], hashes: bool = True, head: str = ""
) -> Iterator[Stamped]:
    """The facts of one writer, from (where, line) in order; an `Unreadable` for each line that is
    none, was changed, or follows one that is lost. `hashes`: look for the latter two. `head`: hash
    of the line before the first ("": there is none)."""
    reader = ChainReader(writer, head, hashes)
    for where, line in lines:
        yield from reader.read(where, line)


class ChainReader:
    """Reads one writer's lines in order. `head`: hash of the last line; None: it could not be read,
    and that is told already."""

    def __init__(self, writer: str, head: str = "", hashes: bool = True):
        self.writer, self._hashes = writer, hashes
        self.head: str | None = head or digest(writer.encode())
        self.t = 0.0

    def read(self, where: str, line: str) -> list[Stamped]:
        """One fact, or an `Unreadable` in its place or before it."""
        try:
            body = loaded(line)
            found = body.pop("h", "")
            if self._hashes and digest(canonical(body)) != found:
                raise ValueError(f"{body.get('fact')} was changed: its hash does not fit")
        except (ValueError, TypeError, AttributeError, RecursionError) as e:
            self.head = None
            return [self._unread(where, f"not a fact as it was written ({e})")]
        told: list[Stamped] = []
        if self._hashes and self.head not in (None, body.get("prev")):
            told.append(
                self._unread(where, "what came before it was changed, lost or put out of order")
            )
        self.head = str(found)
        try:
            fact, t = parse(body), number(body.get("t"), 0.0, MOST_T)
        except TypeError as e:
            why = f"wanted the fields of {body.get('fact')}, found other ones ({e})"
            return [*told, self._unread(where, why)]
        self.t = t
        return [*told, Stamped(t, self.writer, fact)]

    def _unread(self, where: str, why: str) -> Stamped:
        return Stamped(self.t, self.writer, Unreadable(where, why))


def parse(body: dict[str, Any]) -> Fact:
    """A fact from its JSON body. Unknown kinds and fields (written by a newer version) are
    tolerated.

    Raises TypeError if a field that has no default is missing, or one is of another type than its
    kind says.
    """
    kind = body.get("fact")
    cls = KINDS.get(kind) if isinstance(kind, str) else None
    return Fact() if cls is None else built(cls, body)


# ---- values from a bucket ------------------------------------------------------------------------
def number(value: Any, low: float = -MOST_FLOAT, high: float = MOST_FLOAT) -> float:
    """A finite number in [low, high]. Raises TypeError."""
    if type(value) not in (int, float) or not low <= value <= high:
        raise TypeError(f"wanted a number in [{low:g}, {high:g}], found {_brief(value)}")
    return value  # type: ignore[no-any-return]


def amount(value: Any) -> float:
    """A price, a speed or a count of free form: a number from 0 on, else 0 (unknown)."""
    return float(value) if type(value) in (int, float) and 0 <= value <= MOST_FLOAT else 0.0


def built(cls: type[T], body: dict[str, Any]) -> T:
    """A dataclass from JSON: lists become tuples, unknown fields are ignored, types are
    checked. Raises TypeError."""
    values: dict[str, Any] = {}
    for name, check in _checks(cls):  # type: ignore[arg-type]
        if name in body:
            try:
                values[name] = check(body[name])
            except TypeError as e:
                raise TypeError(f"{name}: {e}") from None
    return cls(**values)


Checked = Callable[[Any], Any]


@functools.cache
def _checks(cls: type[Any]) -> tuple[tuple[str, Checked], ...]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return tuple((f.name, _check_of(hints[f.name])) for f in dataclasses.fields(cls))


def _check_of(hint: Any) -> Checked:
    """What turns a JSON value into one of this type, or raises TypeError."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return lambda value: value
    if hint is float:
        return number
    if origin is Annotated:
        return _reading if inside[0] is float else functools.partial(_whole, low=0, high=MOST_COUNT)
    if hint is int:
        return _whole
    if origin in (typing.Union, types.UnionType):
        check = _check_of(next(i for i in inside if i is not type(None)))
        return lambda value: None if value is None else check(value)
    if origin is tuple:
        check = _check_of(inside[0])
        return lambda value: tuple(check(v) for v in _of(list, value))
    if origin is dict:
        check = _check_of(inside[1])
        return lambda value: {k: check(v) for k, v in _of(dict, value).items()}
    return functools.partial(_of, hint)


def _of(kind: type[Any], value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError(f"wanted {kind.__name__}, found {_brief(value)}")
    return value


def _whole(value: Any, low: int = -MOST_INT, high: int = MOST_INT) -> Any:
    if type(value) is not int or not low <= value <= high:
        raise TypeError(f"wanted a whole number in [{low}, {high}], found {_brief(value)}")
    return value


def _reading(value: Any) -> Any:
    if type(value) is not float:
        _whole(value)
    return value


def _brief(value: Any) -> str:
    return (
        type(value).__name__
        if isinstance(value, (list, dict)) or value is None
        else f"{value!r:.40}"
    )
