"""The news that members pass on about each other in a big world: records, and doubts (pure).

In a big world no member has lines to all others (membership.py), so news travels from member to
member. A record is accepted only if it is newer, by its owner's own count, than the known one; a
doubt is only a reason to check. Each is passed on once, so that news stops everywhere.

Wire, one line each: `@name beat record` and `?name beat grade`, after the name and the record of
the sender.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

MOST_NAMES = 8192  # members that are kept; later ones are not passed on
CACHED = 2048  # parsed records and lines that are cached, since they arrive repeatedly
RELAY_S = 0.005  # news within this time is passed on together
AGAIN_S = 5.0  # shortest time between two relays of the same doubt
NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


class Grade(IntEnum):
    """The strength of a doubt about a member, as reported by one of its followers."""

    SILENT = 1  # its line fell silent, or broke and could not be reconnected
    REFUSED = 2  # ... and its machine answers that no such member is there
    DEAD = 3  # the follower found it dead


GRADES = {b"%d" % grade: grade for grade in Grade}  # by their text on the wire


@dataclass(frozen=True)
class GossipReport:
    """The hearsay at one moment."""

    records: dict[str, bytes] = field(default_factory=dict)  # new ones only
    doubts: dict[str, Grade] = field(default_factory=dict)
    callers: frozenset[str] = frozenset()  # callers that proved to belong to the run


@dataclass(frozen=True)
class _Record:
    beat: int
    text: bytes
    meaning: dict[str, Any]  # everything but name and heartbeat


@dataclass(frozen=True)
class _Doubt:
    beat: int
    grade: Grade
    told_s: float


@dataclass
class Gossip:
    """The news that the member `me` has received. Methods return the line to pass on; b"": none."""

    me: str
    records: dict[str, _Record] = field(default_factory=dict)
    doubts: dict[str, _Doubt] = field(default_factory=dict)
    _told: dict[str, _Doubt] = field(default_factory=dict)
    _news: dict[str, bytes] = field(default_factory=dict)  # records since `overheard`

    def learn(self, name: str, text: bytes) -> bytes:
        """Add a record of `name`, from itself, from the bucket or by hearsay."""
        text = without_key(text)
        owner, new = _read(text)
        known = self.records.get(name)
        if new is None or name == self.me or owner != name:
            return b""
        beat = new.beat
        if (known and beat <= known.beat) or (not known and len(self.records) >= MOST_NAMES):
            return b""
        self.records[name] = new
        self._news[name] = text
        if name in self.doubts and self.doubts[name].beat < beat:
            del self.doubts[name]
        # a heartbeat without a change matters only to direct followers
        return b"" if known and known.meaning == new.meaning else self._record_line(name)

    def doubt(self, name: str, grade: Grade, now: float, beat: int = -1) -> bytes:
        """Add a doubt about a member, as of its record `beat` (-1: the newest)."""
        if name == self.me or (name not in self.doubts and len(self.doubts) >= MOST_NAMES):
            return b""
        known = self.records[name].beat if name in self.records else 0
        if 0 <= beat < known:
            return b""  # a newer record was received since
        new, told = _Doubt(max(beat, known), grade, now), self._told.get(name)
        old = self.doubts.get(name)
        if old is None or (new.beat, grade) > (old.beat, old.grade):
            self.doubts[name] = new
        again = told and (new.beat, grade) <= (told.beat, told.grade)
        if told and again and now - told.told_s < AGAIN_S:
            return b""
        self._told[name] = new
        return _doubt_line(name, new)

    def clear(self, name: str) -> None:
        """Remove the doubt about a member: our own line to it is up."""
        self.doubts.pop(name, None)

    def hear(self, line: bytes, now: float, is_up: bool) -> tuple[str, bytes]:
        """Process a line of gossip. Return the member's name ("": nothing is new), and the line to
        pass on. `is_up`: our own line to that member is up, so no doubt counts."""
        words = line[1:].split(b" ", 2)
        name = subject(line)
        try:
            kind, beat, rest = line[:1], int(words[1]), words[2]
        except (IndexError, ValueError):
            return "", b""
        if not name:
            return "", b""
        if kind == b"@":
            known = self.records.get(name)
            if known and beat <= known.beat:
                return "", b""
            on = self.learn(name, rest)
            return (name if on else ""), on
        grade = GRADES.get(rest)
        if is_up or grade is None:
            return "", b""
        on = self.doubt(name, grade, now, beat)
        return (name if on else ""), on

    def all(self) -> bytes:
        """Return all records and doubts, for a new follower."""
        records = b"".join(self._record_line(name) for name in self.records)
        return records + b"".join(_doubt_line(n, d) for n, d in self.doubts.items())

    def overheard(self, callers: frozenset[str]) -> GossipReport:
        """Return the records since the last call, all doubts, and `callers`."""
        news, self._news = self._news, {}
        return GossipReport(news, {n: d.grade for n, d in self.doubts.items()}, callers)

    def _record_line(self, name: str) -> bytes:
        record = self.records[name]
        return f"@{name} {record.beat} ".encode() + record.text + b"\n"


@functools.lru_cache(maxsize=CACHED)
def without_key(record: bytes) -> bytes:
    """Return a member's record without its key, which is in the bucket and never travels."""
    if b'"key"' not in record:
        return record
    try:
        body = json.loads(record)
        body.pop("key")
    except (ValueError, RecursionError, AttributeError, KeyError):
        return record
    return json.dumps(body).encode()


@functools.lru_cache(maxsize=CACHED)
def _read(text: bytes) -> tuple[str, _Record | None]:
    """Parse a record into (owner, record), or ("", None) if it is invalid."""
    try:
        body = json.loads(text)
        beat, owner = body.pop("beat"), body.pop("member")
        body.pop("beat_s", None)
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError):
        return "", None
    good = isinstance(owner, str) and type(beat) is int and b"\n" not in text
    return (owner, _Record(beat, text, body)) if good else ("", None)


@functools.lru_cache(maxsize=CACHED)
def subject(line: bytes) -> str:
    """Return the member that a line of gossip is about; "" if the line is invalid."""
    name = line[1:].partition(b" ")[0].decode(errors="replace")
    return name if line[:1] in (b"@", b"?") and NAME.fullmatch(name) else ""


def _doubt_line(name: str, doubt: _Doubt) -> bytes:
    return f"?{name} {doubt.beat} {int(doubt.grade)}\n".encode()


@dataclass
class Relays:
    """Lines to be passed on soon, together, except to members that have them already."""

    due_s: float = float("inf")
    lines: dict[bytes, set[str]] = field(default_factory=dict)

    def add(self, line: bytes, now: float, whose: str) -> None:
        """Add a line that came from `whose`; "": from us."""
        self.lines.setdefault(line, set()).add(whose)
        self.due_s = min(self.due_s, now + RELAY_S)

    def has(self, line: bytes, whose: str) -> bool:
        """Return whether this line is waiting already; if so, note that `whose` has it too."""
        if line in self.lines:
            self.lines[line].add(whose)
        return line in self.lines

    def take(self, names: Iterable[str]) -> dict[str, bytes]:
        """Return the bytes to send to each of these members, and clear the lines."""
        lines, self.lines, self.due_s = self.lines, {}, float("inf")
        everything, sources = b"".join(lines), set[str]().union(*lines.values())
        return {
            name: everything
            if name not in sources
            else b"".join(line for line, known in lines.items() if name not in known)
            for name in names
        }
