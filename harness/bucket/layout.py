"""The layout of a run's bucket: every key and every object in it, with one decoder each.

Pure. It knows no store: the modules beside it read and write (`orders.py`,
`controller_lease.py`, `journal.py`). The rules of all decoders, and their single error, are in
`core/decoding.py`; lines of facts and of step records are decoded in `core/facts.py` and
`core/step_records.py`; data for W&B, MLflow and TensorBoard in `look/trackers/stream_objects.py`;
limits that nodes enforce in `controller_lease.py`; the contents of snapshots belong to `storage`
(`storage/snapshots/manifest.py`, `storage/snapshots/snapshots.py`). The table of all objects, with
bounds and the effect of damage, is in docs/design/BUCKET.md.

Keys in any other form are not ours, and are skipped.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from harness.core import decoding, step_records
from harness.core.decoding import (
    Amount,
    Count,
    Natural,
    NewerProtocol,
    Port,
    amount,
    built,
    check_protocol,
    decoded,
    protocol_of,
    stamped,
    word,
    written_protocol,
)
from harness.core.masking import masked, masked_deep
from storage.canonical_json import BadObject, canonical, digest, parsed
from storage.errors import NotFound
from storage.stores.objects import ObjectStore, checked_key

# ---- keys ----------------------------------------------------------------------------------------
IDENTITY = "run.json"  # create-only: the run's identity
LEASES = "lease/"
CONTROL = "control/"
# + number: create-only, the identity of each later training (phases.py); agents see them in the
# listing that they make anyway
PHASES = "control/phases/"
STOP_KEY = "control/stop.json"  # the whole run drains, and no node rejoins automatically
SNAPSHOT = "control/snapshot-"  # + anything: all ranks snapshot and go on
# + attempt: written, and withdrawn, by the agent of a node that may not stay
DOUBT = "control/doubt-"
LEAVE = "control/leave-"  # + attempt: written by the controller, to have a node snapshot and leave
# + step, member: written by the agent of a node whose workers hung too often, the last time then
HUNG = "control/hung-"
LIMITS_KEY = "control/limits.json"  # rewritten by the controller: limits for when there is none
FACTS = "facts/"
ARCHIVE = "archive/"  # the archive of long runs: archive.py
SAMPLES = step_records.SAMPLES
MEMBERS, EPOCHS, CLOSED = "rdzv/members/", "rdzv/epochs/", "rdzv/closed/"
SECRET = "rdzv/secret.json"  # create-only: secret of nodes that serve chunks to each other
CHUNKS = "rdzv/chunks/"  # create-only, by member: address of its chunk server
TRACKERS = "trackers/"
PROFILES = "profiles/"  # + epoch, rank, steps: traces, which no code here reads
SETUP = "setup/"  # create-only: the run's setups (setup_objects.py)
HEADS = "heads/"  # create-only: signed lower bounds of the bucket's content (signed_heads.py)
LOGBOOK = "logbook/"  # create-only: notes that people write about the run (setup_report.py)
WATCH = "watch/"  # + name: claims and outcomes of side jobs (side_jobs.py)

# ---- bounds --------------------------------------------------------------------------------------
SMALL_NBYTES = 64 << 10  # of an object that describes one member or controller
EPOCH_NBYTES = 4 << 20  # a few hundred bytes for each of thousands of members
LONGEST = 4000  # characters of a reason
TAIL_LINES, TAIL_LETTERS = 200, 2000  # of a worker's log that travels with an order
PROMISE_S = 10.0  # between two heartbeats of a member that gives no interval
LONGEST_S = 60.0  # greatest accepted heartbeat interval, so that a death is noticed
MOST_TTL_S = 600.0  # greatest accepted timeout of a controller
USUAL_TTL_S = 20.0  # timeout of a lease term that gives none

_NAME = r"([^/]+)"
_PHASE = re.compile(r"control/phases/([0-9]{6,12})\.json")
_TERM = re.compile(r"lease/(\d{6,12})\.json")
_EPOCH = re.compile(r"rdzv/epochs/([0-9]{6,12})\.json")
_MEMBER = re.compile(rf"rdzv/members/{_NAME}\.json")
SEGMENT = re.compile(rf"facts/{_NAME}/(\d{{6,12}})\.jsonl")


def term_key(term: int, suffix: str = "json") -> str:
    """Return the key of a lease term. `suffix` "beat": the heartbeat that its holder rewrites."""
    return f"{LEASES}{term:06d}.{suffix}"


MOST_TERMS_MISSED = 100_000  # between two terms of a listing that misses some


def newest_term(keys: Iterable[str]) -> int:
    """Return the newest term among the keys under `lease/`; 0 if there is none. Terms follow one
    another: a number far beyond the one before it was put there by somebody else, and would leave
    no next one."""
    newest = 0
    for term in sorted(int(found[1]) for key in keys if (found := _TERM.fullmatch(key))):
        if term - newest > MOST_TERMS_MISSED:
            break
        newest = term
    return newest


def epoch_key(epoch: int) -> str:
    return f"{EPOCHS}{epoch:06d}.json"


def epoch_of(key: str) -> int:
    """Return the number in a generation's key; 0 for another key."""
    found = _EPOCH.fullmatch(key)
    return int(found[1]) if found else 0


def phase_key(phase: int) -> str:
    """Return the key of a phase's identity. `phase`: 1 for the script's first training."""
    return IDENTITY if phase == 1 else f"{PHASES}{phase:06d}.json"


def phase_of(key: str) -> int:
    """Return the number in the key of a later phase's identity; 0 for another key."""
    found = _PHASE.fullmatch(key)
    return int(found[1]) if found else 0


def closed_key(epoch: int) -> str:
    return f"{CLOSED}{epoch:06d}.json"


def member_key(member: str) -> str:
    return f"{MEMBERS}{member}.json"


def member_of(key: str) -> str:
    """Return the member in a member's key; "" for another key."""
    found = _MEMBER.fullmatch(key)
    return found[1] if found else ""


def attempt_of(member: str) -> int:
    """Return the attempt of a member, named `m<attempt>-<random>`; 0 if it was not launched by a
    controller."""
    found = member.removeprefix("m").partition("-")[0]
    return int(found) if found.isascii() and found.isdigit() and len(found) <= 12 else 0


def chunks_key(member: str) -> str:
    return f"{CHUNKS}{member}.json"


def order_key(kind: str, attempt: int) -> str:
    """Return the key of an order or doubt about an attempt. `kind`: DOUBT or LEAVE."""
    return f"{kind}{attempt:06d}.json"


def segment_key(writer: str, number: int) -> str:
    return f"{FACTS}{writer}/{number:06d}.jsonl"


def profile_key(epoch: int, rank: int, first: int, last: int, name: str) -> str:
    """Return the key of a rank's profile of the steps `first` to `last`. `name`: kind of file."""
    return f"{PROFILES}e{epoch:06d}/r{rank:05d}-{first:010d}-{last:010d}.{name}"


def published_key(tracker: str, first: int) -> str:
    """Return the key of a tracker's marker for the batch of steps that begins with `first`."""
    return f"{TRACKERS}{tracker}/{first:010d}.json"


def claim_key(tracker: str, first: int) -> str:
    return f"{TRACKERS}{tracker}/claims/{first:010d}.json"


# ---- run.json ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Identity:
    """The values that must stay the same for the whole run, or for one phase of it. `body`: the
    whole object, including fields of a newer version; the chain of step records begins with its
    hash. `samples`: 0 for an iterable dataset. `begins`: the steps of the phases before."""

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
    phase: Count = 1
    begins: Natural = 0
    body: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def decode(cls, data: bytes) -> Identity:
        """Decode run.json. Raises BadObject, NewerProtocol."""
        body = parsed(data, most_nbytes=SMALL_NBYTES, finite=True)
        if isinstance(body, dict):
            check_protocol(body)
        found = built(cls, {**body, "body": body} if isinstance(body, dict) else body)
        if found.version > decoding.RUN_VERSION:
            raise NewerProtocol(
                f"the run is of version {found.version}, this code reads up to "
                f"{decoding.RUN_VERSION}; update the package here"
            )
        return found

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step; 0: unknown."""
        return self.global_batch // self.micro_batch if self.micro_batch else 0


# ---- rendezvous ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Member:
    """A member's description of itself. `epoch`: the last generation that it took part in (0: none
    yet)."""

    member: str
    # "warming": not ready yet | "ready": wants a new generation | "away": was ready, and its bucket
    # does not answer | "in": its workers run | "gone": it has left
    state: str
    epoch: Natural
    addr: str
    probe_port: Port  # where it serves its lines
    master_port: Port  # free at the moment; used if this member gets rank 0
    nproc: Count
    attempt: Natural = 0
    speed: Amount = 1.0
    beat: Natural = 0
    withdrawals: Natural = 0  # how often it went away: it enters no generation that named it before
    end: str = ""  # how its last generation ended for it: facts.EpochLeft.why
    failure: str = ""  # signature of the script's failure that ended its last generation
    failure_step: Natural = 0  # last step that was done before it failed
    place: str = ""  # members of one place reach each other; a generation is in one place
    beat_s: Amount = 0.0  # promised seconds between heartbeats, at most; 0: the default
    key: str = ""  # secret that callers of its lines need
    stays: bool = False  # its workers' processes would go on in the next generation
    # whom it reaches, by lines that are up both ways; None: it has no lines
    reach: tuple[str, ...] | None = None
    protocol: Natural = field(default_factory=written_protocol)

    @classmethod
    def decode(cls, data: bytes) -> Member:
        """Decode a member. Raises BadObject, NewerProtocol."""
        return decoded(cls, data, most_nbytes=SMALL_NBYTES)

    def encode(self) -> bytes:
        return json.dumps(masked_deep(stamped(dataclasses.asdict(self)))).encode()


@dataclass(frozen=True)
class Epoch:
    """One rendezvous generation: a world and its members. Ranks are dense: the i-th member has
    ranks [sum(nproc[:i]), sum(nproc[:i+1]))."""

    epoch: Natural
    members: tuple[str, ...]
    nproc: tuple[Count, ...]
    speeds: tuple[Amount, ...]  # per member
    addr: str  # of rank 0's node
    port: Port
    reason: str  # "start" | "grow" | "shrink" | "loss" | "restart"
    streak: Natural = 0  # consecutive equal failures of the script without a new commit
    failure: str = ""
    failure_step: Natural = 0
    # ranks that hold one copy of the model together: replica i has ranks [i * this, (i + 1) * this)
    replica_ranks: Count = 1
    mesh: str = ""  # device mesh of one model copy, in the text form of core/mesh.py
    withdrawals: tuple[Natural, ...] = ()  # those of its members when it named them; (): none yet
    halvings: Natural = 0  # of the script's micro-batch, since memory ran out so often
    protocol: Natural = field(default_factory=written_protocol)

    @property
    def world(self) -> int:
        """World size: the number of ranks."""
        return sum(self.nproc)

    def ranks(self, member: str) -> range:
        i = self.members.index(member)
        start = sum(self.nproc[:i])
        return range(start, start + self.nproc[i])

    def is_left_by(self, m: Member) -> bool:
        """Return whether `m`, a member of this generation, is done with it: it waits for another,
        or has gone away since this one named it and does not enter it."""
        named = dict(zip(self.members, self.withdrawals, strict=False)).get(m.member, 0)
        return m.withdrawals > named or (m.state == "ready" and m.epoch >= self.epoch)

    @classmethod
    def decode(cls, data: bytes) -> Epoch:
        """Decode a generation. Raises BadObject, NewerProtocol."""
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
        """Encode the object for the bucket. `h` is its hash, so that an audit detects changes."""
        body = json.loads(json.dumps(masked_deep(stamped(dataclasses.asdict(self)))))
        return json.dumps({**body, "h": digest(canonical(body))}).encode()


# why a run ended whose script had no session (`Snapshots.ended`)
WITHOUT_SESSION = "the script exited 0"
NO_EPOCH = Epoch(0, (), (), (), "", 0, "none")


@dataclass(frozen=True)
class MemberHeader:
    """The fields of a member's object that can be read whatever version wrote it."""

    gone: bool = False  # it recorded its goodbye
    promise_s: float = PROMISE_S  # promised longest time between heartbeats
    beats: int = 0  # heartbeats so far; 0: unknown

    @classmethod
    def of(cls, data: bytes) -> MemberHeader:
        """Decode what is readable. Never fails: an unreadable object still belongs to a member."""
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
    """The address at which a member serves chunks of snapshots to its peers."""

    addr: str
    port: Port

    @classmethod
    def decode(cls, data: bytes) -> ChunkServerAt:
        """Decode an address. Raises BadObject."""
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
    """Decode the secret of peers. Raises BadObject for one that we would not make, such as an empty
    one that strangers could guess."""
    found = parsed(data, most_nbytes=SMALL_NBYTES)
    if not isinstance(found, str) or not 32 <= len(found) <= 256 or not found.isascii():
        raise BadObject("wanted a secret of at least 32 letters, found something else")
    return found


# ---- lease ---------------------------------------------------------------------------------------
RELEASED = b"released"  # a heartbeat: a successor need not wait


@dataclass(frozen=True)
class Term:
    """The content of `lease/{term}.json`. `newer`: set if a newer version of this code controls the
    run."""

    holder: str = "another controller"
    ttl_s: Amount = USUAL_TTL_S
    newer: int = 0  # protocol of the newer version; 0: not newer
    heeds: Natural = 0  # term of the stop order that existed at its start and stays valid; 0: none

    @classmethod
    def decode(cls, data: bytes) -> Term:
        """Decode a term. Never fails: a term is held whatever its object contains."""
        try:
            body = parsed(data, most_nbytes=SMALL_NBYTES)
            protocol = protocol_of(body) if isinstance(body, dict) else 1
        except BadObject:
            return cls()
        newer = protocol if protocol > decoding.PROTOCOL else 0
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
    """An order to stop the run. `by`: its author. `failed`: the run cannot go on as it is;
    otherwise it may be launched again."""

    reason: str
    by: str = ""
    failed: bool = False
    log_tail: tuple[str, ...] = ()  # of the worker that failed
    term: int = 0  # of the ordering controller; 0: a person or an agent

    def to_json(self) -> bytes:
        body = masked_deep(dataclasses.asdict(self))
        return json.dumps({k: v for k, v in body.items() if k != "term" or v}).encode()

    @classmethod
    def from_json(cls, data: bytes) -> StopOrder:
        """Decode an order. Never fails: any object at the key of an order counts, including an
        empty one, one without a reason, and one that is not JSON."""
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
    """Encode an order that is fully defined by its key (SNAPSHOT, DOUBT, LEAVE, CLOSED). `by` and
    `reason` are for people only. `term`: of the ordering controller; 0: a person or an agent."""
    said = {"by": by, "reason": masked(reason), "term": term}
    return json.dumps({k: v for k, v in said.items() if k == "by" or v}).encode()


def ordered_in(data: bytes) -> int:
    """Return the term of the controller that gave an order of `order_by`; 0 for a person or an
    agent, or if unreadable. Never fails."""
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
    """The marker of a batch of steps that a tracker has published. `files`: name -> hash of the
    files in `folder`."""

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
        """Decode the marker of the batch that begins with `first`. Raises BadObject."""
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
    """A claim on a batch. `by`: its current publisher; `t`: wall clock of the claim."""

    by: str
    t: Amount

    @classmethod
    def decode(cls, data: bytes) -> Claim:
        """Decode a claim. Raises BadObject."""
        return decoded(cls, data, most_nbytes=SMALL_NBYTES)

    def encode(self) -> bytes:
        return canonical(dataclasses.asdict(self))


# Generations (the code's `epoch`) in the bucket: every process reads them; the node agent's
# rendezvous writes them. Their contents and keys are in `layout.py`.


def read_epoch(store: ObjectStore, epoch: int) -> Epoch:
    """Read a generation. Raises NotFound; BadObject if the object is not the generation of this
    number; NewerProtocol."""
    found = Epoch.decode(store.get(epoch_key(epoch)))
    if found.epoch != epoch:
        raise BadObject(f"wanted generation {epoch}, found {found.epoch}")
    return found


def epoch_numbers(store: ObjectStore) -> list[int]:
    """Return the generation numbers that are taken, ascending, whatever their objects contain."""
    return sorted(number for key in store.list(EPOCHS) if (number := epoch_of(key)))


def newest_epoch(store: ObjectStore) -> Epoch:
    """Return the newest readable generation, or NO_EPOCH. Damaged ones are skipped. Raises
    NewerProtocol."""
    for number in reversed(epoch_numbers(store)):
        try:
            return read_epoch(store, number)
        except NewerProtocol:
            raise
        except (NotFound, BadObject):
            continue
    return NO_EPOCH
