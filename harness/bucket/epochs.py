"""Members and epochs as they lie in the bucket.  Every process reads them; the agent's
rendezvous writes them."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from harness.core.facts import canonical, digest
from storage.errors import NotFound
from storage.objects import ObjectStore

MEMBERS, EPOCHS = "rdzv/members/", "rdzv/epochs/"


@dataclass(frozen=True)
class Member:
    """What a member says of itself. `epoch` is the last one it took part in (0: none yet)."""

    member: str
    # "warming": not ready yet | "ready": wants a new epoch | "in": its workers run | "gone":
    # goodbye
    state: str
    epoch: int
    addr: str
    probe_port: int  # where its lines are had
    master_port: int  # free at the moment; used if this member gets rank 0
    nproc: int
    attempt: int = 0
    speed: float = 1.0
    beat: int = 0
    end: str = ""  # how its last epoch ended for it: facts.EpochLeft.why
    failure: str = ""  # signature of the script's failure that ended its last epoch
    failure_step: int = 0  # newest committed step when it failed
    place: str = ""  # who is in one place reach each other; an epoch is in one place
    beat_s: float = 0.0  # a promise: its object is rewritten at least so often; 0: as everybody's
    key: str = ""  # what callers of its lines must know; "": written by an older version


@dataclass(frozen=True)
class Epoch:
    """One world. Ranks are dense: the i-th member has ranks [sum(nproc[:i]), sum(nproc[:i+1]))."""

    epoch: int
    members: tuple[str, ...]
    nproc: tuple[int, ...]
    speeds: tuple[float, ...]  # per member
    addr: str  # of rank 0's node
    port: int
    reason: str  # "start" | "grow" | "shrink" | "loss" | "restart"
    streak: int = 0  # how often in a row the script has failed like this without any new commit
    failure: str = ""
    failure_step: int = 0

    @property
    def world(self) -> int:
        return sum(self.nproc)

    def ranks(self, member: str) -> range:
        i = self.members.index(member)
        start = sum(self.nproc[:i])
        return range(start, start + self.nproc[i])


NO_EPOCH = Epoch(0, (), (), (), "", 0, "none")


def epoch_key(epoch: int) -> str:
    return f"{EPOCHS}{epoch:06d}.json"


def encode_epoch(epoch: Epoch) -> bytes:
    """As it lies in the bucket; `h` is its hash, so that an audit sees a changed byte."""
    body = json.loads(json.dumps(asdict(epoch)))
    return json.dumps({**body, "h": digest(canonical(body))}).encode()


T = TypeVar("T", Member, Epoch)
KINDS: dict[str, Callable[[Any], bool]] = {  # by annotation: what JSON may hold there
    "str": lambda v: isinstance(v, str),
    "int": lambda v: type(v) is int and v >= 0,
    "float": lambda v: type(v) in (int, float) and math.isfinite(v) and v >= 0,
}


def decode(kind: type[T], data: bytes) -> T:
    """A member or an epoch as it lies in the bucket. Unknown fields are ignored. Raises
    ValueError if what it says makes no sense."""
    try:
        body = json.loads(data)
    except RecursionError as e:
        raise ValueError("wanted JSON, found brackets without end") from e
    if not isinstance(body, dict):
        raise ValueError(f"wanted a JSON object, found {type(body).__name__}")
    values: dict[str, Any] = {}
    for f in fields(kind):
        if f.name not in body:
            continue
        value, many = body[f.name], re.fullmatch(r"tuple\[(\w+), \.\.\.\]", str(f.type))
        fits = KINDS[many[1] if many else str(f.type)]
        if not (isinstance(value, list) and all(map(fits, value)) if many else fits(value)):
            raise ValueError(f"wanted {f.name} of type {f.type}, found {value!r:.60}")
        values[f.name] = tuple(value) if many else value
    try:
        found = kind(**values)
    except TypeError as e:
        raise ValueError(str(e)) from e
    ports = (found.probe_port, found.master_port) if isinstance(found, Member) else (found.port,)
    if max(ports) > 65535:
        raise ValueError(f"wanted ports up to 65535, found {max(ports)}")
    if isinstance(found, Epoch) and not (
        found.members and len(found.members) == len(found.nproc) == len(found.speeds)
    ):
        raise ValueError(
            f"wanted members with a number of workers and a speed each, found {len(found.members)}"
        )
    return found


def read_epoch(store: ObjectStore, epoch: int) -> Epoch:
    """Raises NotFound; ValueError for an object that is no epoch of this number."""
    found = decode(Epoch, store.get(epoch_key(epoch)))
    if found.epoch != epoch:
        raise ValueError(f"wanted epoch {epoch}, found {found.epoch}")
    return found


def epoch_numbers(store: ObjectStore) -> list[int]:
    """Numbers that are taken, ascending; by what does not matter."""
    found = (
        re.fullmatch(r"([0-9]{6,})\.json", key.removeprefix(EPOCHS)) for key in store.list(EPOCHS)
    )
    return sorted(int(m[1]) for m in found if m)


def newest_epoch(store: ObjectStore) -> Epoch:
    for number in reversed(epoch_numbers(store)):
        with contextlib.suppress(NotFound, ValueError):
            return read_epoch(store, number)
    return NO_EPOCH
