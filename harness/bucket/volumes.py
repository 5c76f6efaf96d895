"""Archived facts as bytes: a volume as it was written, and the summaries of it that views read.

    archive/raw/<n>            segments of many writers, byte by byte. Volumes are chained by hash;
                               only `harness prove verify`, and readers of every step as a fact,
                               need them
    archive/brief/<block>      every fact of some volumes except the steps, line by line as written;
                               measurements are evenly thinned out (`thinned_lines`)
    archive/steps/<block>      their steps as columns (core/step_records.py)

Brief and steps are made from a volume by `digested` alone, so every process makes the same bytes,
and `harness prove verify` makes them again.

Pure.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from harness.bucket.layout import ARCHIVE, segment_key
from harness.core import step_records
from harness.core.decoding import number
from harness.core.facts import ChainReader, Stamped, StepDone, Unreadable, parse
from harness.core.step_records import ROW, Columns
from storage.canonical_json import digest, parsed, whole
from storage.errors import StoreUnavailable
from storage.stores.objects import ObjectStore, get_each

# Increasingly large blocks of a growing log, so that a reader of a long log needs few requests.

FANOUT = 16
MOST_LEVEL = 4
LOOKS = 10  # most attempts to read a log that is being merged repeatedly


@dataclass(frozen=True)
class Block:
    """A block of a log. `index`: its number within its level. It holds the volumes from `first` up
    to, but not including, `end`."""

    level: int
    index: int

    @property
    def volumes(self) -> int:
        """Number of volumes in the block."""
        return int(FANOUT**self.level)

    @property
    def first(self) -> int:
        return self.index * self.volumes

    @property
    def end(self) -> int:
        return self.first + self.volumes

    def key(self, kind: str) -> str:
        return f"{ARCHIVE}{kind}/{self.level}-{self.index:06d}"

    def parts(self) -> list[Block]:
        """Return the blocks that it is merged from."""
        first = self.index * FANOUT
        return [Block(self.level - 1, i) for i in range(first, first + FANOUT)]


def blocks(store: ObjectStore, kind: str) -> set[Block]:
    """Return the blocks that are listed. Other objects under the prefix are not ours."""
    prefix = f"{ARCHIVE}{kind}/"
    named = (re.fullmatch(r"([0-4])-(\d{6,9})", key[len(prefix) :]) for key in store.list(prefix))
    return {Block(int(m[1]), int(m[2])) for m in named if m}


def read(
    store: ObjectStore, kind: str, since: int = 0, surely: bool = True
) -> list[tuple[Block, bytes]]:
    """Return the blocks that hold volumes from `since` on, in order; the first may begin earlier.
    Raises StoreError.

    This is correct while others merge: a small block that is gone is in a larger one, so the log is
    listed again. A listing may be stale, so with `surely` the objects themselves are requested
    where it ends or has a gap; callers that read again soon do not need that.
    """
    held: dict[Block, bytes] = {}
    for _ in range(LOOKS):
        found = _once(store, kind, since, held, surely)
        if found is not None:
            return found
    raise StoreUnavailable(
        f"{store.url}/{ARCHIVE}{kind}/: wanted blocks that stay while they are read, found others "
        f"at each of {LOOKS} looks; try again"
    )


def _once(
    store: ObjectStore, kind: str, since: int, held: dict[Block, bytes], surely: bool
) -> list[tuple[Block, bytes]] | None:
    """Try `read` once. Return None if a listed block is gone. `held`: blocks that were read before;
    new ones are added."""
    there = blocks(store, kind)
    chosen: list[Block] = []
    at = since
    while True:
        block = _at(there, at)
        if block is None and surely:
            block = _unlisted(store, kind, _holding(at) if there else [Block(0, 0)], held)
        if block is None:
            break
        # a block merged in the meantime contains the earlier ones, so they are dropped
        chosen = [b for b in chosen if b.end <= block.first] + [block]
        at = block.end
    missing = [b for b in chosen if b not in held]
    by_key = {b.key(kind): b for b in missing}
    for key, data in get_each(store, by_key):
        if data is not None:
            held[by_key[key]] = data
    if not all(b in held for b in chosen):
        return None
    return [(b, held[b]) for b in chosen]


def _at(there: set[Block], volume: int) -> Block | None:
    """Return the largest block that holds this volume, or None."""
    return next((b for b in reversed(_holding(volume)) if b in there), None)


def _holding(volume: int) -> list[Block]:
    return [Block(level, volume // int(FANOUT**level)) for level in range(MOST_LEVEL + 1)]


def _unlisted(
    store: ObjectStore, kind: str, wanted: list[Block], held: dict[Block, bytes]
) -> Block | None:
    """Return the largest of the `wanted` blocks that exists although it is not listed, or None. All
    that exist are added to `held`."""
    by_key = {b.key(kind): b for b in wanted}
    found = {by_key[key]: data for key, data in get_each(store, by_key) if data is not None}
    held.update(found)
    return max(found, key=lambda b: b.level, default=None)


def merge(store: ObjectStore, kind: str, end: int, join: Callable[[list[bytes]], bytes]) -> int:
    """Make every large block whose volumes are all below `end`, and delete its parts. Return how
    many were made. Any number of processes may do so at the same time, and die at any point.
    Raises StoreError."""
    there, made = blocks(store, kind), 0
    for level in range(1, MOST_LEVEL + 1):
        parts_there = {b.index // FANOUT for b in there if b.level == level - 1}
        for index in sorted(parts_there):
            whole = Block(level, index)
            if whole.end > end:
                continue
            parts = whole.parts()
            if whole not in there:
                found = [data for _, data in get_each(store, (b.key(kind) for b in parts))]
                contents = [data for data in found if data is not None]
                if len(contents) < len(parts):
                    continue  # another process has merged them, or the listing is stale: next time
                made += store.create(whole.key(kind), join(contents))
                there.add(whole)
            for part in parts:
                if part in there:
                    store.delete(part.key(kind))
                    there.discard(part)
    return made


VERSION = 1
HEAD_NBYTES = 64 << 20  # of a block: a few words for each of its runs of segments
TAIL = 32  # newest steps that a brief keeps as they were recorded, for live views
UNREAD, LOST = "unreadable", "?"
# Facts that are recorded at regular intervals for ever, of which a brief keeps MOST_MEASURED
MEASUREMENT = re.compile(r'\{"fact":"(?:NodeMeasured|StepsTimed)","t":(\d+(?:\.\d+)?),')
MEASURES = re.compile(rb'\{"fact":"(?:NodeMeasured|StepsTimed)"')
MOST_MEASURED, FINEST_S, COARSEST_S = 512, 60, 60 << 16


class DamagedArchive(ValueError):
    """An archived object is not as it was written; the message names it."""


@dataclass(frozen=True)
class WriterSpan:
    """Consecutive segments of one writer. `sizes`: of each segment, bytes in a volume or lines in a
    brief. `head`: hash of the line before the first (volume) or of the last line (brief)."""

    writer: str
    first: int  # segment
    sizes: tuple[int, ...]
    head: str

    @property
    def end(self) -> int:
        return self.first + len(self.sizes)


def reader_after(writer: str, head: str) -> ChainReader:
    """Return a reader of a writer's lines after the one with hash `head`; `LOST`: that line could
    not be read."""
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
        """Yield (writer, number, content) of each segment."""
        at = 0
        for run in self.runs:
            for i, size in enumerate(run.sizes):
                yield run.writer, run.first + i, self.body[at : at + size]
                at += size

    def lines(self) -> Iterator[tuple[WriterSpan, int, ChainReader, str, Stamped]]:
        """Yield (run, segment, reader of its writer, line, fact) for every line. A line that does
        not follow from the one before comes twice, first with an `Unreadable`."""
        at = 0
        for run in self.runs:
            reader = reader_after(run.writer, run.head)
            for i, size in enumerate(run.sizes):
                for line, stamped in read_segment(reader, run.first + i, self.body[at : at + size]):
                    yield run, run.first + i, reader, line, stamped
                at += size


def read_segment(reader: ChainReader, number: int, data: bytes) -> Iterator[tuple[str, Stamped]]:
    """Yield (line, fact) for every line of a segment."""
    where = segment_key(reader.writer, number)
    for i, line in enumerate(data.decode(errors="replace").splitlines(), 1):
        for stamped in reader.read(f"{where}, line {i}", line):
            yield line, stamped


def volume_of(data: bytes, key: str) -> Volume:
    """Decode a volume. Raises DamagedArchive."""
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
    """The facts of some volumes without the steps. `last`: digest of its newest volume. `tail`: its
    newest steps: (writer, line). `every`: of each writer's measurements it keeps one per this many
    seconds; 0: all."""

    last: str
    runs: tuple[WriterSpan, ...]
    tail: tuple[tuple[str, str], ...]
    body: bytes
    every: int = 0

    def encode(self) -> bytes:
        said = {"last": self.last, "tail": self.tail, "every": self.every}
        return sealed(said, self.runs, self.body)

    def lines(self) -> Iterator[tuple[str, int, str]]:
        """Yield (writer, segment, line) of each line; see `fact_in_line`."""
        lines = iter(self.body.decode(errors="replace").split("\n"))
        for run in self.runs:
            for i, count in enumerate(run.sizes):
                for _ in range(count):
                    yield run.writer, run.first + i, next(lines)


BriefLine = tuple[str, int, str]  # writer, segment, line


def thinned_lines(lines: Sequence[BriefLine], every: int) -> tuple[list[BriefLine], int]:
    """Drop most of the measurements if there are too many. Return the lines, and the seconds
    between two measurements of one writer (`every`: those of the input). Thinned parts give the
    same result as the whole: the first measurement of each span stays, and spans only double."""
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
    """Return the lines that are the first of their writer and span of `every` seconds (0: all)."""
    if not every:
        return set(marks)
    found: dict[tuple[str, float], int] = {}
    for i, (writer, t) in marks.items():
        found.setdefault((writer, t // every), i)
    return set(found.values())


def fact_in_line(writer: str, line: str) -> Stamped:
    """Return the fact in a line of a brief. Its hash is not checked, as the brief's covers it."""
    try:
        body = parsed(line)
        if UNREAD in body:
            return Stamped(body["t"], writer, Unreadable(*body[UNREAD]))
        return Stamped(number(body.get("t")), writer, parse(body))
    except (ValueError, TypeError, AttributeError) as e:
        return Stamped(0.0, writer, Unreadable(f"archived facts of {writer}", str(e)))


def digested(volume: Volume, raw: bytes) -> tuple[bytes, bytes]:
    """Return the encoded brief and the encoded steps of a volume. `raw`: the volume's bytes."""
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
    return brief.encode(), encode_columns(step_records.of_facts(steps))


def _brief(
    last: str,
    runs: Sequence[WriterSpan],
    tail: Sequence[tuple[str, str]],
    lines: Sequence[BriefLine],
    every: int,
) -> Brief:
    """Build a brief from lines, thinned if necessary. The sizes of `runs` are recomputed."""
    kept, every = thinned_lines(lines, every)
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
    """Decode a brief. Raises DamagedArchive."""
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
    """Join consecutive briefs into one. Raises DamagedArchive."""
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
    """Decode steps. Raises DamagedArchive."""
    _, _, at = opened(data, key)
    if (nbytes := len(data) - at) % ROW.itemsize:
        raise DamagedArchive(f"{key}: wanted rows of {ROW.itemsize} bytes, found {nbytes} bytes")
    return step_records.from_bytes(data, at)


def joined_columns(parts: Sequence[bytes]) -> bytes:
    """Join consecutive steps into one object. Raises DamagedArchive."""
    return encode_columns(step_records.joined(columns_of(d, "steps to be merged") for d in parts))


# ---- one head line, then the content -------------------------------------------------------------
def sealed(head: dict[str, Any], runs: Sequence[WriterSpan], body: bytes) -> bytes:
    told = [[run.writer, run.first, run.sizes, run.head] for run in runs]
    full = {"archive": VERSION, **head, "runs": told, "body": digest(body)}
    line = json.dumps(full, separators=(",", ":"))
    return f"{digest(line.encode())} {line}\n".encode() + body


def unsealed(data: bytes, key: str) -> tuple[dict[str, Any], tuple[WriterSpan, ...], bytes]:
    """Return an object's head without the runs, the runs, and the content. Raises
    DamagedArchive."""
    head, runs, at = opened(data, key)
    return head, runs, data[at:]


def opened(data: bytes, key: str) -> tuple[dict[str, Any], tuple[WriterSpan, ...], int]:
    """Return an object's head without the runs, the runs, and the offset of the content, which may
    be too large to copy. Raises DamagedArchive."""
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
