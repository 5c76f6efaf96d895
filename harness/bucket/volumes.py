"""Archived facts as bytes: a volume as it was written, and the digest of it that views read.

    archive/raw/<n>            segments of many writers, byte by byte. Volumes are a chain by hash;
                               only `harness verify`, and who wants every step as a fact, reads them
    archive/brief/<block>      every fact of some volumes but the steps, line by line as written;
                               of measurements some, evenly (`thinned`)
    archive/steps/<block>      their steps as columns (core/columns.py)

Brief and steps are made of a volume by `digested` and nothing else, so everybody makes the same
bytes, and `harness verify` makes them again.

Pure.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from harness.bucket.layout import segment_key
from harness.core import columns
from harness.core.columns import ROW, Columns
from harness.core.fact_lines import ChainReader, parse
from harness.core.facts import (
    Stamped,
    StepDone,
    Unreadable,
)
from harness.core.values import digest, number, parsed
from storage.json_text import whole

VERSION = 1
HEAD_NBYTES = 64 << 20  # of a block: some words for each of its runs of segments
TAIL = 32  # newest steps that a brief keeps as they were told, for live views
UNREAD, LOST = "unreadable", "?"
# Facts that come for ever at a pace of their own, of which a brief keeps so many
MEASUREMENT = re.compile(r'\{"fact":"(?:NodeMeasured|StepsTimed)","t":(\d+(?:\.\d+)?),')
MEASURES = re.compile(rb'\{"fact":"(?:NodeMeasured|StepsTimed)"')
MOST_MEASURED, FINEST_S, COARSEST_S = 512, 60, 60 << 16


class DamagedArchive(ValueError):
    """An archived object is not what was written; the message names it."""


@dataclass(frozen=True)
class WriterSpan:
    """Segments of one writer, one after the other. `sizes`: of each, bytes in a volume, lines in a
    brief. `head`: hash of the line before the first (volume), of the last one (brief)."""

    writer: str
    first: int  # segment
    sizes: tuple[int, ...]
    head: str

    @property
    def end(self) -> int:
        return self.first + len(self.sizes)


def reader_after(writer: str, head: str) -> ChainReader:
    """Of a writer's lines after the one with this hash; `LOST`: it could not be read."""
    reader = ChainReader(writer, "" if head == LOST else head)
    reader.head = None if head == LOST else reader.head
    return reader


# ---- volumes -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Volume:
    number: int
    prev: str  # digest of the volume before; "": this is the first
    runs: tuple[WriterSpan, ...]
    body: bytes

    def encode(self) -> bytes:
        return sealed({"volume": self.number, "prev": self.prev}, self.runs, self.body)

    def segments(self) -> Iterator[tuple[str, int, bytes]]:
        """(writer, number, content)"""
        at = 0
        for run in self.runs:
            for i, size in enumerate(run.sizes):
                yield run.writer, run.first + i, self.body[at : at + size]
                at += size

    def lines(self) -> Iterator[tuple[WriterSpan, int, ChainReader, str, Stamped]]:
        """Every line: its run, its segment, its writer's reader, itself, what it says (a line that
        does not follow from the one before says so first, and comes twice)."""
        at = 0
        for run in self.runs:
            reader = reader_after(run.writer, run.head)
            for i, size in enumerate(run.sizes):
                for line, stamped in read_segment(reader, run.first + i, self.body[at : at + size]):
                    yield run, run.first + i, reader, line, stamped
                at += size


def read_segment(reader: ChainReader, number: int, data: bytes) -> Iterator[tuple[str, Stamped]]:
    """(line, what it says)"""
    where = segment_key(reader.writer, number)
    for i, line in enumerate(data.decode(errors="replace").splitlines(), 1):
        for stamped in reader.read(f"{where}, line {i}", line):
            yield line, stamped


def volume_of(data: bytes, key: str) -> Volume:
    """Raises DamagedArchive."""
    head, runs, body = unsealed(data, key)
    try:
        volume = Volume(int(head["volume"]), str(head["prev"]), runs, body)
    except (KeyError, TypeError, ValueError) as e:
        raise DamagedArchive(f"{key}: wanted a volume of facts, found {head!r:.100} ({e})") from e
    if sum(sum(run.sizes) for run in runs) != len(body):
        raise DamagedArchive(f"{key}: wanted segments that fill it, found {len(body)} bytes")
    return volume


# ---- digests -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Brief:
    """`last`: digest of the newest volume in it. `tail`: its newest steps: (writer, line).
    `every`: of each writer's measurements it keeps one in so many seconds; 0: all."""

    last: str
    runs: tuple[WriterSpan, ...]
    tail: tuple[tuple[str, str], ...]
    body: bytes
    every: int = 0

    def encode(self) -> bytes:
        every = {"every": self.every} if self.every else {}  # as it was written before there was
        return sealed({"last": self.last, "tail": self.tail, **every}, self.runs, self.body)

    def lines(self) -> Iterator[tuple[str, int, str]]:
        """(writer, segment, line); see `fact_of`."""
        lines = iter(self.body.decode(errors="replace").split("\n"))
        for run in self.runs:
            for i, count in enumerate(run.sizes):
                for _ in range(count):
                    yield run.writer, run.first + i, next(lines)


BriefLine = tuple[str, int, str]  # writer, segment, line


def thinned(lines: Sequence[BriefLine], every: int) -> tuple[list[BriefLine], int]:
    """Without most of the measurements, if there are too many; and how many seconds lie between
    two of one writer then (`every`: do now). Of parts that were thinned it makes what it makes of
    the whole: of each span the first one stays, spans double, and none is shorter than before."""
    marks: dict[int, tuple[str, float]] = {}
    for i, (writer, _, line) in enumerate(lines):
        if found := MEASUREMENT.match(line):
            marks[i] = writer, float(found[1])
    kept = _firsts(marks, every)
    while len(kept) > MOST_MEASURED and every < COARSEST_S:
        every = max(FINEST_S, 2 * every)
        kept = _firsts(marks, every)
    return [line for i, line in enumerate(lines) if i not in marks or i in kept], every


def _firsts(marks: dict[int, tuple[str, float]], every: int) -> set[int]:
    """Which of these lines are the first of their writer and span."""
    if not every:
        return set(marks)
    found: dict[tuple[str, float], int] = {}
    for i, (writer, t) in marks.items():
        found.setdefault((writer, t // every), i)
    return set(found.values())


def fact_of(writer: str, line: str) -> Stamped:
    """A line of a brief, whose hash is covered by the brief's."""
    try:
        body = parsed(line)
        if UNREAD in body:
            return Stamped(body["t"], writer, Unreadable(*body[UNREAD]))
        return Stamped(number(body.get("t")), writer, parse(body))
    except (ValueError, TypeError, AttributeError) as e:
        return Stamped(0.0, writer, Unreadable(f"archived facts of {writer}", str(e)))


def digested(volume: Volume, raw: bytes) -> tuple[bytes, bytes]:
    """The brief and the steps of a volume, encoded."""
    heads: dict[str, str] = {run.writer: run.head for run in volume.runs}
    lines: list[BriefLine] = []
    steps: list[StepDone] = []
    tail: list[tuple[str, str]] = []
    for run, segment, reader, line, stamped in volume.lines():
        heads[run.writer] = reader.head or LOST
        if isinstance(stamped.fact, StepDone):
            steps.append(stamped.fact)
            tail.append((run.writer, line))
            continue
        if isinstance(stamped.fact, Unreadable):
            why = [stamped.fact.where, stamped.fact.why]
            line = json.dumps({UNREAD: why, "t": stamped.t}, separators=(",", ":"))
        lines.append((run.writer, segment, line))
    runs = tuple(dataclasses.replace(run, head=heads[run.writer]) for run in volume.runs)
    brief = _brief(digest(raw), runs, tail, lines, 0)
    return brief.encode(), encode_columns(columns.of_facts(steps))


def _brief(
    last: str,
    runs: Sequence[WriterSpan],
    tail: Sequence[tuple[str, str]],
    lines: Sequence[BriefLine],
    every: int,
) -> Brief:
    """Of lines that may be thinned. The sizes of `runs` are made anew."""
    kept, every = thinned(lines, every)
    counts = Counter((writer, segment) for writer, segment, _ in kept)
    sized = tuple(
        dataclasses.replace(
            run, sizes=tuple(counts[run.writer, run.first + i] for i in range(len(run.sizes)))
        )
        for run in runs
    )
    body = "".join(line + "\n" for _, _, line in kept).encode()
    return Brief(last, sized, tuple(tail[-TAIL:]), body, every)


def brief_of(data: bytes, key: str) -> Brief:
    """Raises DamagedArchive."""
    head, runs, body = unsealed(data, key)
    try:
        tail = tuple((str(writer), str(line)) for writer, line in head["tail"])
        last, every = str(head["last"]), whole(head.get("every", 0), 0, COARSEST_S)
    except (KeyError, TypeError, ValueError) as e:
        raise DamagedArchive(f"{key}: wanted a brief of facts, found {head!r:.100} ({e})") from e
    if sum(sum(run.sizes) for run in runs) != body.count(b"\n"):
        raise DamagedArchive(f"{key}: wanted as many lines as its head says, found others")
    return Brief(last, runs, tail, body, every)


def joined_briefs(parts: Sequence[bytes]) -> bytes:
    """Of briefs one after the other: the brief of all. Raises DamagedArchive."""
    briefs = [brief_of(data, "a brief to be merged") for data in parts]
    tail = [one for brief in briefs for one in brief.tail]
    runs = [run for brief in briefs for run in brief.runs]
    last, every = briefs[-1].last, max(brief.every for brief in briefs)
    if not any(MEASURES.search(brief.body) for brief in briefs):
        body = b"".join(brief.body for brief in briefs)
        return Brief(last, tuple(runs), tuple(tail[-TAIL:]), body, every).encode()
    lines = [line for brief in briefs for line in brief.lines()]
    return _brief(last, runs, tail, lines, every).encode()


def encode_columns(rows: Columns) -> bytes:
    body = rows.tobytes()
    return sealed({"rows": len(rows)}, (), body)


def columns_of(data: bytes, key: str) -> Columns:
    """Raises DamagedArchive."""
    _, _, at = opened(data, key)
    if (nbytes := len(data) - at) % ROW.itemsize:
        raise DamagedArchive(f"{key}: wanted rows of {ROW.itemsize} bytes, found {nbytes} bytes")
    return columns.from_bytes(data, at)


def joined_columns(parts: Sequence[bytes]) -> bytes:
    """Raises DamagedArchive."""
    return encode_columns(columns.joined(columns_of(d, "steps to be merged") for d in parts))


# ---- one head line, then the content -------------------------------------------------------------
def sealed(head: dict[str, Any], runs: Sequence[WriterSpan], body: bytes) -> bytes:
    told = [[run.writer, run.first, run.sizes, run.head] for run in runs]
    full = {"archive": VERSION, **head, "runs": told, "body": digest(body)}
    line = json.dumps(full, separators=(",", ":"))
    return f"{digest(line.encode())} {line}\n".encode() + body


def unsealed(data: bytes, key: str) -> tuple[dict[str, Any], tuple[WriterSpan, ...], bytes]:
    """Its head without the runs, the runs, the content; each as it was written."""
    head, runs, at = opened(data, key)
    return head, runs, data[at:]


def opened(data: bytes, key: str) -> tuple[dict[str, Any], tuple[WriterSpan, ...], int]:
    """As `unsealed`, but where the content begins: there may be much of it."""
    at = data.find(b"\n") + 1 or len(data)
    line, body = data[:at].removesuffix(b"\n"), memoryview(data)[at:]
    seal, _, text = line.partition(b" ")
    if digest(text).encode() != seal:
        raise DamagedArchive(f"{key}: its head was changed (the hash does not fit)")
    try:
        head = parsed(text, most_nbytes=HEAD_NBYTES)
        version = head["archive"]
        runs = tuple(
            WriterSpan(str(w), int(f), tuple(map(int, s)), str(h)) for w, f, s, h in head["runs"]
        )
        fits = head["body"] == digest(body)
    except (ValueError, TypeError, KeyError) as e:
        raise DamagedArchive(f"{key}: wanted a head of the archive's, found another ({e})") from e
    if version != VERSION:
        raise DamagedArchive(
            f"{key}: wanted version {VERSION} of the archive, found {version}; use a newer harness"
        )
    if not fits:
        raise DamagedArchive(f"{key}: its content was changed (the hash does not fit)")
    return head, runs, at
