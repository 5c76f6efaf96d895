"""Facts as lines of JSON, chained by hash: written, read, and looked at for what was changed.

Pure. Readers go on whatever a bucket holds: unknown kinds and fields (of a newer version) are
ignored, missing fields get their defaults, and any other line becomes an `Unreadable`, which says
where and why. `harness verify` calls that a violation.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from harness.core.facts import KINDS, Fact, Stamped, Unreadable
from harness.core.masking import masked_deep
from harness.core.signing import SigningKey
from harness.core.values import (
    MOST_T,
    BadObject,
    NewerProtocol,
    built,
    canonical,
    check_protocol,
    digest,
    number,
    parsed,
    stamped,
)


class Chain:
    """Turns one writer's facts into chained JSON lines."""

    def __init__(self, writer: str):
        self.writer, self.head = writer, digest(writer.encode())

    def line(self, t: float, fact: Fact) -> str:
        told = masked_deep(dataclasses.asdict(fact))
        said = {"fact": fact.kind, "t": t, **told, "prev": self.head}
        return self._chained(stamped(said))

    def seal(self, t: float, key: SigningKey) -> str:
        """A line that ends a segment, signed: so no line of the segment can be left out. Readers
        that know nothing of it pass it over, as every unknown kind."""
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
    """Is it a line of this writer that ends a segment, signed with this key?"""
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
    """Is it the one spelling of this JSON in which facts and records are written?"""
    try:
        return json.dumps(body, separators=(",", ":")).encode() == line
    except RecursionError:
        return False


class ChainReader:
    """Reads one writer's lines in order. `head`: hash of the last line (at first: of the one before
    the first, "": there is none); None: it could not be read, and that is told already. `hashes`:
    look for what was changed, and for what follows a line that is lost."""

    def __init__(self, writer: str, head: str = "", hashes: bool = True):
        self.writer, self._hashes = writer, hashes
        self.head: str | None = head or digest(writer.encode())
        self.t = 0.0

    def read(self, where: str, line: str) -> list[Stamped]:
        """One fact, or an `Unreadable` in its place or before it."""
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
    """A fact from its JSON body. Unknown kinds and fields (written by a newer version) are
    tolerated.

    Raises BadObject if a field that has no default is missing, or one is of another type than its
    kind says; NewerProtocol.
    """
    check_protocol(body)
    kind = body.get("fact")
    cls = KINDS.get(kind) if isinstance(kind, str) else None
    return Fact() if cls is None else built(cls, body)
