"""What lies in a run's bucket: every key and every object of it, with one decoder each.

Pure. Knows no store: the modules beside it read and write (`orders.py`, `epochs.py`, `lease.py`,
`journal.py`). The rules of all decoders, and their one error, are in `core/values.py`; lines of
facts and of step records are decoded in `core/facts.py` and `core/records.py`; what W&B, MLflow
and TensorBoard are told, in `streamed.py`; limits that nodes keep, in `limits.py`; what snapshots
consist of belongs to `storage` (`storage/manifest.py`, `storage/marks.py`). The table of all
objects, with bounds and what damage does, is in docs/ARCHITECTURE.md.

A key that is not named as here is somebody else's: it is passed over.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from harness.core import records, values
from harness.core.masking import masked, masked_deep
from harness.core.values import (
    Amount,
    BadObject,
    Count,
    Natural,
    NewerProtocol,
    Port,
    amount,
    built,
    canonical,
    check_protocol,
    decoded,
    digest,
    parsed,
    protocol_of,
    spoken,
    stamped,
    word,
)
from storage.objects import checked_key

# ---- keys ----------------------------------------------------------------------------------------
IDENTITY = "run.json"  # create-only: what the run is
LEASES = "lease/"
CONTROL = "control/"
STOP_KEY = "control/stop.json"  # the whole run drains, and nobody comes back by itself
SNAPSHOT = "control/snapshot-"  # + anything: all ranks snapshot and go on
# + attempt: written by the agent of a node that may not stay, and taken back by it
DOUBT = "control/doubt-"
LEAVE = "control/leave-"  # + attempt: written by the controller, to have a node snapshot and leave
LIMITS_KEY = "control/limits.json"  # rewritten by who leads: what agents keep when nobody does
FACTS = "facts/"
ARCHIVE = "archive/"  # what long runs were archived to: archive.py, recorded.py
SAMPLES = records.SAMPLES
MEMBERS, EPOCHS, CLOSED = "rdzv/members/", "rdzv/epochs/", "rdzv/closed/"
SECRET = "rdzv/secret.json"  # create-only: what nodes that serve chunks to each other must know
CHUNKS = "rdzv/chunks/"  # create-only, by member: where its chunks are served
TRACKERS = "trackers/"
PROFILES = "profiles/"  # + epoch, rank, steps: traces, which nothing here reads
SETUP = "setup/"  # create-only: how the run was set up (setups.py)
HEADS = "heads/"  # create-only: what there must be at least, signed (heads.py)
LOGBOOK = "logbook/"  # create-only: what people write about the run (notes.py)
WATCH = "watch/"  # + name: what side jobs have done (side_jobs.py)

# ---- bounds --------------------------------------------------------------------------------------
SMALL_NBYTES = 64 << 10  # of what one member or controller says of itself
EPOCH_NBYTES = 4 << 20  # some hundred bytes for each of thousands of members
LONGEST = 4000  # letters of a reason
TAIL_LINES, TAIL_LETTERS = 200, 2000  # of a worker's log that travels with an order
PROMISE_S = 10.0  # between two beats of a member that does not say how often it beats
LONGEST_S = 60.0  # nobody promises so little that its death would not be noticed
MOST_TTL_S = 600.0  # no controller is believed to need longer between two beats
USUAL_TTL_S = 20.0  # of a lease term that does not say

_NAME = r"([^/]+)"
_TERM = re.compile(r"lease/(\d{6,12})\.json")
_EPOCH = re.compile(r"rdzv/epochs/([0-9]{6,12})\.json")
_MEMBER = re.compile(rf"rdzv/members/{_NAME}\.json")
SEGMENT = re.compile(rf"facts/{_NAME}/(\d{{6,12}})\.jsonl")


def term_key(term: int, suffix: str = "json") -> str:
    """`suffix` "beat": what the holder of that term rewrites."""
    return f"{LEASES}{term:06d}.{suffix}"


def newest_term(keys: Iterable[str]) -> int:
    """The newest term among what lies under `lease/`; 0: none."""
    return max((int(found[1]) for key in keys if (found := _TERM.fullmatch(key))), default=0)


def epoch_key(epoch: int) -> str:
    return f"{EPOCHS}{epoch:06d}.json"


def epoch_of(key: str) -> int:
    """The number in the key of an epoch; 0: it is another key."""
    found = _EPOCH.fullmatch(key)
    return int(found[1]) if found else 0


def closed_key(epoch: int) -> str:
    return f"{CLOSED}{epoch:06d}.json"


def member_key(member: str) -> str:
    return f"{MEMBERS}{member}.json"


def member_of(key: str) -> str:
    """Whose object it is; "": it is another key."""
    found = _MEMBER.fullmatch(key)
    return found[1] if found else ""


def attempt_of(member: str) -> int:
    """Members are named `m<attempt>-<random>`; 0: no controller launched it."""
    found = member.removeprefix("m").partition("-")[0]
    return int(found) if found.isascii() and found.isdigit() and len(found) <= 12 else 0


def chunks_key(member: str) -> str:
    return f"{CHUNKS}{member}.json"


def order_key(kind: str, attempt: int) -> str:
    """`kind`: DOUBT or LEAVE."""
    return f"{kind}{attempt:06d}.json"


def segment_key(writer: str, number: int) -> str:
    return f"{FACTS}{writer}/{number:06d}.jsonl"


def profile_key(epoch: int, rank: int, first: int, last: int, name: str) -> str:
    """Of what a rank saw of the steps `first` to `last`. `name`: what kind of file it is."""
    return f"{PROFILES}e{epoch:06d}/r{rank:05d}-{first:010d}-{last:010d}.{name}"


def published_key(tracker: str, first: int) -> str:
    """Of the batch of steps that begins with `first`."""
    return f"{TRACKERS}{tracker}/{first:010d}.json"


def claim_key(tracker: str, first: int) -> str:
    return f"{TRACKERS}{tracker}/claims/{first:010d}.json"


# ---- run.json ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Identity:
    """What must stay the same for the whole run. `body`: all of it, also what a newer version
    wrote; the chain of step records begins with its hash. Samples: 0 is an iterable dataset."""

    version: Count = 1
    seed: int = 0
    samples: Natural = 0
    global_batch: Natural = 0
    micro_batch: Natural = 0
    shuffle: bool = False
    data: str = ""
    model: str = ""
    reduce: str = ""
    contents: bool = False
    body: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def decode(cls, data: bytes) -> Identity:
        """Raises BadObject, NewerProtocol."""
        body = parsed(data, most_nbytes=SMALL_NBYTES, finite=True)
        if isinstance(body, dict):
            check_protocol(body)
        found = built(cls, {**body, "body": body} if isinstance(body, dict) else body)
        if found.version > values.RUN_VERSION:
            raise NewerProtocol(
                f"the run is of version {found.version}, this code reads up to "
                f"{values.RUN_VERSION}; update the package here"
            )
        return found

    @property
    def micro_batches(self) -> int:
        """That a step consists of; 0: it does not say."""
        return self.global_batch // self.micro_batch if self.micro_batch else 0


# ---- rendezvous ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Member:
    """What a member says of itself. `epoch` is the last one it took part in (0: none yet)."""

    member: str
    # "warming": not ready yet | "ready": wants a new epoch | "in": its workers run | "gone":
    # goodbye
    state: str
    epoch: Natural
    addr: str
    probe_port: Port  # where its lines are had
    master_port: Port  # free at the moment; used if this member gets rank 0
    nproc: Count
    attempt: Natural = 0
    speed: Amount = 1.0
    beat: Natural = 0
    end: str = ""  # how its last epoch ended for it: facts.EpochLeft.why
    failure: str = ""  # signature of the script's failure that ended its last epoch
    failure_step: Natural = 0  # newest committed step when it failed
    place: str = ""  # who is in one place reach each other; an epoch is in one place
    beat_s: Amount = 0.0  # a promise: its object is rewritten at least so often; 0: as everybody's
    key: str = ""  # what callers of its lines must know; "": written by an older version
    protocol: Natural = field(default_factory=spoken)

    @classmethod
    def decode(cls, data: bytes) -> Member:
        """Raises BadObject, NewerProtocol."""
        return decoded(cls, data, most_nbytes=SMALL_NBYTES)

    def encode(self) -> bytes:
        return json.dumps(masked_deep(_as_ever(dataclasses.asdict(self)))).encode()


@dataclass(frozen=True)
class Epoch:
    """One world. Ranks are dense: the i-th member has ranks [sum(nproc[:i]), sum(nproc[:i+1]))."""

    epoch: Natural
    members: tuple[str, ...]
    nproc: tuple[Count, ...]
    speeds: tuple[Amount, ...]  # per member
    addr: str  # of rank 0's node
    port: Port
    reason: str  # "start" | "grow" | "shrink" | "loss" | "restart"
    streak: Natural = 0  # how often in a row the script has failed so without any new commit
    failure: str = ""
    failure_step: Natural = 0
    # ranks that hold one copy of the model together: replica i has ranks [i * this, (i + 1) * this)
    replica_ranks: Count = 1
    mesh: str = ""  # how the ranks of one copy share it, as core/mesh.py spells it
    protocol: Natural = field(default_factory=spoken)

    @property
    def world(self) -> int:
        """Ranks."""
        return sum(self.nproc)

    def ranks(self, member: str) -> range:
        i = self.members.index(member)
        start = sum(self.nproc[:i])
        return range(start, start + self.nproc[i])

    @classmethod
    def decode(cls, data: bytes) -> Epoch:
        """Raises BadObject, NewerProtocol."""
        found = decoded(cls, data, most_nbytes=EPOCH_NBYTES)
        if not found.members or not len(found.members) == len(found.nproc) == len(found.speeds):
            raise BadObject(
                "wanted members with a number of workers and a speed each, found "
                f"{len(found.members)}, {len(found.nproc)} and {len(found.speeds)}"
            )
        if found.replica_ranks < 1 or found.world % found.replica_ranks:
            raise BadObject(
                f"wanted whole replicas of {found.replica_ranks} ranks, found {found.world} ranks"
            )
        return found

    def encode(self) -> bytes:
        """As it lies in the bucket; `h` is its hash, so that an audit sees a changed byte."""
        body = json.loads(json.dumps(masked_deep(_as_ever(dataclasses.asdict(self)))))
        return json.dumps({**body, "h": digest(canonical(body))}).encode()


# what came later than the first members and epochs
USUAL = {"key": "", "replica_ranks": 1, "mesh": ""}


def _as_ever(body: dict[str, Any]) -> dict[str, Any]:
    """Without what is usual and came later, so that older versions and hashes are as ever."""
    kept = {k: v for k, v in body.items() if k not in USUAL or v != USUAL[k]}
    return stamped(kept)


NO_EPOCH = Epoch(0, (), (), (), "", 0, "none")


@dataclass(frozen=True)
class Glance:
    """What anybody can tell of a member's object, whatever version wrote it."""

    gone: bool = False  # it said goodbye
    promise_s: float = PROMISE_S  # it beats at least so often
    beats: int = 0  # so many it has made; 0: nobody knows

    @classmethod
    def of(cls, data: bytes) -> Glance:
        """Never fails: an object that cannot be read is somebody's all the same."""
        try:
            body = parsed(data, most_nbytes=SMALL_NBYTES)
        except BadObject:
            return cls()
        if not isinstance(body, dict):
            return cls()
        said_s = amount(body.get("beat_s"))
        promise_s = said_s if 0.0 < said_s <= LONGEST_S else PROMISE_S
        made = body.get("beat")
        beats = made if type(made) is int and made > 0 else 0
        return cls(body.get("state") == "gone", promise_s, beats)


@dataclass(frozen=True)
class ChunkServerAt:
    """Where a member serves chunks of snapshots to its peers."""

    addr: str
    port: Port

    @classmethod
    def decode(cls, data: bytes) -> ChunkServerAt:
        """Raises BadObject."""
        body = parsed(data, most_nbytes=SMALL_NBYTES)
        if not isinstance(body, list) or len(body) != 2:
            raise BadObject(f"wanted an address and a port, found {type(body).__name__}")
        found = built(cls, {"addr": body[0], "port": body[1]})
        if not found.addr or not found.port:
            raise BadObject(f"wanted an address and a port, found {body!r:.60}")
        return found

    def encode(self) -> bytes:
        return json.dumps([self.addr, self.port]).encode()


def secret_of(data: bytes) -> str:
    """What peers must know, as we make it. Raises BadObject for anything else, such as an empty
    one that strangers could guess."""
    found = parsed(data, most_nbytes=SMALL_NBYTES)
    if not isinstance(found, str) or not 32 <= len(found) <= 256 or not found.isascii():
        raise BadObject("wanted a secret of at least 32 letters, found something else")
    return found


# ---- lease ---------------------------------------------------------------------------------------
RELEASED = b"released"  # a beat: a successor need not wait


@dataclass(frozen=True)
class Term:
    """What `lease/{term}.json` says. `newer`: a newer version of this code leads the run."""

    holder: str = "another controller"
    ttl_s: Amount = USUAL_TTL_S
    newer: int = 0  # its protocol; 0: we can read it
    heeds: Natural = 0  # whose stop order lay there when this term was taken: it goes on to stand

    @classmethod
    def decode(cls, data: bytes) -> Term:
        """Never fails: who holds a term holds it, whatever is in there."""
        try:
            body = parsed(data, most_nbytes=SMALL_NBYTES)
            protocol = protocol_of(body) if isinstance(body, dict) else 1
        except BadObject:
            return cls()
        newer = protocol if protocol > values.PROTOCOL else 0
        try:
            found = built(cls, {**body, "newer": newer} if isinstance(body, dict) else body)
        except BadObject:
            return cls(newer=newer)
        return found if 0 < found.ttl_s <= MOST_TTL_S else cls(found.holder, newer=newer)

    def encode(self) -> bytes:
        body: dict[str, Any] = {"holder": self.holder, "ttl_s": self.ttl_s}
        return json.dumps(
            stamped({**body, **({"heeds": self.heeds} if self.heeds else {})})
        ).encode()


# ---- orders --------------------------------------------------------------------------------------
UNSAID = "stop requested"


@dataclass(frozen=True)
class StopOrder:
    """Why the run shall stop, and who says so. `failed`: it cannot go on as it is; else it may
    be launched again."""

    reason: str
    by: str = ""
    failed: bool = False
    log_tail: tuple[str, ...] = ()  # of the worker that failed
    term: int = 0  # of the controller that says so; 0: a person or an agent

    def to_json(self) -> bytes:
        body = masked_deep(dataclasses.asdict(self))
        return json.dumps({k: v for k, v in body.items() if k != "term" or v}).encode()

    @classmethod
    def from_json(cls, data: bytes) -> StopOrder:
        """Never fails: whoever leaves an object at the key of an order means it, also an empty
        one, one without a reason, and one that is no JSON."""
        if not data.strip():
            return cls(UNSAID)
        try:
            body = parsed(data)
        except BadObject:
            body = None
        if not isinstance(body, dict):
            return cls(f"{UNSAID} ({STOP_KEY} is unreadable)")
        reason, tail = word(body.get("reason"), LONGEST), body.get("log_tail")
        lines = [line for line in tail if isinstance(line, str)] if isinstance(tail, list) else []
        return cls(
            reason=reason if reason.strip() else UNSAID,
            by=word(body.get("by"), LONGEST),
            failed=body.get("failed") is True,
            log_tail=tuple(line[:TAIL_LETTERS] for line in lines[-TAIL_LINES:]),
            term=_term_in(body),
        )


def order_by(by: str, reason: str = "", term: int = 0) -> bytes:
    """An order whose key says all (SNAPSHOT, DOUBT, LEAVE, CLOSED); its words are for people, and
    nothing reads them. `term`: of the controller that gives it; 0: a person or an agent."""
    said = {"by": by, "reason": masked(reason), "term": term}
    return json.dumps({k: v for k, v in said.items() if k == "by" or v}).encode()


def ordered_in(data: bytes) -> int:
    """The term of the controller that gave an order of `order_by`; 0: a person, an agent, or nobody
    can say. Never fails."""
    try:
        body = parsed(data, most_nbytes=SMALL_NBYTES)
    except BadObject:
        return 0
    return _term_in(body) if isinstance(body, dict) else 0


def _term_in(body: dict[str, Any]) -> int:
    said = body.get("term")
    return said if type(said) is int and 0 < said < 10**12 else 0


# ---- trackers ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Published:
    """Marker of a batch of steps that a tracker has published. `files`: what lies in `folder`,
    with hashes."""

    last: Natural
    folder: str
    files: dict[str, str]
    head: str = ""  # hash of the last step's record
    first: Natural = 0
    version: Count = 1
    run_id: str = ""
    t: Amount = 0.0

    @classmethod
    def decode(cls, data: bytes, first: int) -> Published:
        """Of the batch that begins with `first`. Raises BadObject."""
        found = decoded(cls, data)
        if found.last < first:
            raise BadObject(f"wanted a last step from {first} on, found {found.last}")
        try:
            if found.folder:
                checked_key(found.folder.removesuffix("/"), TRACKERS)
            for name in found.files:
                checked_key(name)
        except ValueError as e:
            raise BadObject(str(e)) from None
        return found

    def encode(self) -> bytes:
        return canonical(dataclasses.asdict(self))


@dataclass(frozen=True)
class Claim:
    """Who publishes a batch at the moment, and since when (wall clock)."""

    by: str
    t: Amount

    @classmethod
    def decode(cls, data: bytes) -> Claim:
        """Raises BadObject."""
        return decoded(cls, data, most_nbytes=SMALL_NBYTES)

    def encode(self) -> bytes:
        return canonical(dataclasses.asdict(self))
