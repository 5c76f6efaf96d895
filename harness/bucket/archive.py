"""The archive of a run's facts and records: few large objects instead of many small ones.

A writer's facts come in create-only segments of a few seconds, up to half a million in a month. A
compactor puts segments of all writers, byte by byte, into numbered volumes; makes a brief and
columns of each (`volumes.py`), which are merged into increasingly large blocks (`tiers.py`); and
then deletes the segments. Step records stay where they are; the archive keeps columns of them.

It is correct in every interleaving of compactors, readers and crashes:
  - a volume, a brief, a block is created once, under a unique name. A second compactor completes
    what the first one left undone;
  - a segment is deleted only when its volume, its steps and its brief exist. So a reader that lists
    segments first, reads them, and then reads the archive, misses none;
  - a segment that is archived but still exists (its deletion is due, or its writer wrote it again)
    is recognised by its number, and counts once.

It knows a store, but no clock and no thread.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harness.bucket import volumes
from harness.bucket import volumes as tiers
from harness.bucket.layout import ARCHIVE, FACTS, SAMPLES, SEGMENT, segment_key
from harness.bucket.volumes import (
    LOST,
    TAIL,
    Block,
    Brief,
    DamagedArchive,
    Volume,
    WriterSpan,
    brief_of,
    columns_of,
    digested,
    fact_in_line,
    joined_briefs,
    joined_columns,
    opened,
    read_segment,
    reader_after,
    sealed,
    volume_of,
)
from harness.core import step_records
from harness.core import step_records as rec
from harness.core.facts import Stamped, StepDone, Unreadable
from harness.core.step_records import Columns, Committed
from storage.errors import NotFound
from storage.stores.objects import ObjectStore, get_each

BRIEF, STEPS = "brief", "steps"
FEWEST_SEGMENTS = 64  # least segments for a new volume
MOST_NBYTES = 8 << 20  # of a volume, not counting its last segment


def raw_key(number: int) -> str:
    return f"{ARCHIVE}raw/{number:06d}"


def segments(store: ObjectStore, writers: str = "") -> dict[str, dict[int, str]]:
    """Return the keys of fact segments that are not archived (or not deleted yet), by writer and
    number, in order. `writers`: prefix of the writers' names. Other objects there are not ours."""
    found: dict[str, dict[int, str]] = {}
    for key in store.list(FACTS + writers):
        if m := SEGMENT.fullmatch(key):
            found.setdefault(m[1], {})[int(m[2])] = key
    return {writer: dict(sorted(keys.items())) for writer, keys in found.items()}


@dataclass
class Cursor:
    """The archive's progress with one writer: its next segment, and the hash of its last line."""

    next: int = 0
    head: str = ""


# ---- reading -------------------------------------------------------------------------------------
# Facts that are numerous in a long run; a live view shows only the newest
MUCH = tuple(
    f'{{"fact":"{kind}"'
    for kind in (
        "EpochLeft",
        "WorkerFailed",
        "Validated",
        "DrainVerdict",
        "NodeMeasured",
        "StepsTimed",
    )
)
MUCH_KEPT = 4000  # lines


@dataclass
class Archive:
    """The archive, as far as it was read. `cursors`: progress by writer; `end`: the next volume.
    `follows`: it is read again soon, so a stale listing does no harm."""

    store: ObjectStore
    follows: bool = False
    cursors: dict[str, Cursor] = field(default_factory=dict)
    end: int = 0
    last: str = ""  # digest of the newest volume
    tail: tuple[tuple[str, str], ...] = ()  # newest steps: (writer, line)

    def read(self) -> list[tuple[Block, Brief | DamagedArchive]]:
        """Return the briefs that are new since the last call. Raises StoreError."""
        found: list[tuple[Block, Brief | DamagedArchive]] = []
        for block, data in tiers.read(self.store, BRIEF, self.end, surely=not self.follows):
            try:
                brief = brief_of(data, block.key(BRIEF))
            except DamagedArchive as e:
                found.append((block, e))
            else:
                found.append((block, brief))
                self.last, self.tail = brief.last, brief.tail or self.tail
                for run in brief.runs:
                    cursor = self.cursors.setdefault(run.writer, Cursor())
                    if run.end > cursor.next:
                        cursor.next, cursor.head = run.end, run.head
            self.end = block.end
        return found

    def told(
        self, seen: Callable[[str, int], bool], writers: str = "", brief: bool = False
    ) -> Iterator[Stamped]:
        """Yield archived facts, except steps, that are new since the last call. `seen`: whether to
        leave out a segment (writer, number). `brief`: of numerous kinds (MUCH) only the newest.
        """
        before = {writer: cursor.next for writer, cursor in self.cursors.items()}
        found = self.read()
        for block, content in found:
            if isinstance(content, DamagedArchive):
                yield Stamped(0.0, "archive", Unreadable(block.key(BRIEF), str(content)))
                continue
            recent = not brief or block.level == 0 or block is found[-1][0]
            kept_from = 0 if not brief else sum(sum(r.sizes) for r in content.runs) - MUCH_KEPT
            for i, (writer, number, line) in enumerate(content.lines()):
                if not writer.startswith(writers) or number < before.get(writer, 0):
                    continue
                if line.startswith(MUCH) and not (recent and i >= kept_from):
                    continue
                if not seen(writer, number):
                    yield fact_in_line(writer, line)


@dataclass(frozen=True)
class Past:
    """Everything that a run's writers recorded. `facts`: by time, without the steps, which are
    rows. `newest`: a few of the newest steps, as they were recorded."""

    facts: list[Stamped]
    steps: Columns
    newest: tuple[StepDone, ...] = ()


@dataclass(frozen=True)
class Live:
    """The content of segments that are not archived, by writer, in order."""

    segments: dict[str, list[tuple[int, bytes]]]

    @classmethod
    def read(cls, store: ObjectStore, writers: str = "") -> Live:
        """Read the segments. Do so before reading the archive: see the module's docstring."""
        by_writer = segments(store, writers)
        place = {key: (w, n) for w, keys in by_writer.items() for n, key in keys.items()}
        found: dict[str, list[tuple[int, bytes]]] = {}
        for key, data in get_each(store, place):
            if data is not None:
                writer, number = place[key]
                found.setdefault(writer, []).append((number, data))
        return cls(found)

    def facts(self, cursors: dict[str, Cursor]) -> Iterator[Stamped]:
        """Yield the facts that are not archived. `cursors`: the archive's progress."""
        for writer, parts in self.segments.items():
            cursor = cursors.get(writer, Cursor())
            reader = reader_after(writer, cursor.head)
            for number, data in parts:
                if number >= cursor.next:
                    yield from (stamped for _, stamped in read_segment(reader, number, data))


def read_past(store: ObjectStore) -> Past:
    """Read all facts of a run. Raises StoreError."""
    live, archive = Live.read(store), Archive(store)
    facts = list(archive.told(lambda writer, number: False))
    fresh = list(live.facts(archive.cursors))
    facts += [s for s in fresh if not isinstance(s.fact, StepDone)]
    live_steps = [s.fact for s in fresh if isinstance(s.fact, StepDone)]
    told = step_records.of_facts(live_steps)
    tail = [fact_in_line(writer, line).fact for writer, line in archive.tail]
    newest = [*(fact for fact in tail if isinstance(fact, StepDone)), *live_steps]
    newest.sort(key=lambda step: (step.epoch, step.step))
    bad: list[Stamped] = []
    old = read_columns(store, STEPS, archive.end, bad)
    facts = sorted([*facts, *bad], key=lambda s: s.t)
    return Past(facts, step_records.joined([old, told]), tuple(newest[-TAIL:]))


def read_columns(
    store: ObjectStore, kind: str, end: int, bad: list[Stamped], since: int = 0
) -> Columns:
    """Return the archived rows of the volumes from `since` on; none if `end` is 0. The first block
    may begin earlier. Unreadable blocks are appended to `bad`. Raises StoreError."""
    found: list[Columns] = []
    for block, data in tiers.read(store, kind, since) if end else ():
        try:
            found.append(columns_of(data, block.key(kind)))
        except DamagedArchive as e:
            bad.append(Stamped(0.0, "archive", Unreadable(block.key(kind), str(e))))
    return step_records.joined(found)


def read_facts(store: ObjectStore, writers: str = "", steps: bool = True) -> list[Stamped]:
    """Read the facts of a run by time. `writers`: prefix of the writers' names ("": all). Lines
    that were changed or lost, or are not facts, become an `Unreadable`: one bad object stops no
    reader. `steps`: include the steps, of which there may be millions. Raises StoreError."""
    live, found = Live.read(store, writers), list[Stamped]()
    if steps:
        cursors: dict[str, Cursor] = {}
        for _, volume in read_volumes(store):
            if isinstance(volume, Unreadable):
                found.append(Stamped(0.0, "archive", volume))
                continue
            for run, _, reader, _, stamped in volume.lines():
                if run.writer.startswith(writers):
                    found.append(stamped)
                    cursors[run.writer] = Cursor(run.end, reader.head or LOST)
        found += live.facts(cursors)
    else:
        archive = Archive(store)
        found += archive.told(lambda writer, number: False, writers)
        found += (s for s in live.facts(archive.cursors) if not isinstance(s.fact, StepDone))
    return sorted(found, key=lambda s: s.t)


def read_volumes(store: ObjectStore, first: int = 0) -> Iterator[tuple[bytes, Volume | Unreadable]]:
    """Yield (bytes, volume) from number `first` on, in order. Numbers have no gaps."""
    listed = {k for k in store.list(f"{ARCHIVE}raw/") if re.fullmatch(r"archive/raw/\d{6,9}", k)}
    end = first
    while raw_key(end) in listed:
        end += 1
    at = first
    for key, data in get_each(store, (raw_key(n) for n in range(first, end))):
        at += 1
        yield _volume(key, data)
    while True:  # volumes that are not listed yet
        try:
            data = store.get(raw_key(at))
        except NotFound:
            return
        yield _volume(raw_key(at), data)
        at += 1


def _volume(key: str, data: bytes | None) -> tuple[bytes, Volume | Unreadable]:
    if data is None:
        return b"", Unreadable(key, "listed, and not there")
    try:
        return data, volume_of(data, key)
    except DamagedArchive as e:
        return data, Unreadable(key, str(e))


# ---- writing -------------------------------------------------------------------------------------
class Compactor:
    """A compactor of facts. Any number of them may be at work on a run; each may die at any point.
    Raises StoreError; DamagedArchive if the archive cannot be continued."""

    def __init__(
        self, store: ObjectStore, fewest: int = FEWEST_SEGMENTS, most_nbytes: int = MOST_NBYTES
    ):
        self.store, self._fewest, self._most_nbytes = store, fewest, most_nbytes
        self._archive = Archive(store)

    def compact(self, all_of_them: bool = False) -> int:
        """Archive segments while there are enough (`all_of_them`: any number). Return how many were
        archived."""
        listed = segments(self.store)  # before the archive, like every reader
        self._catch_up()
        fresh = self._fresh(listed)
        done = 0
        while fresh and (all_of_them or sum(map(len, fresh.values())) >= self._fewest):
            if not (taken := self._volume(fresh)):
                break  # other compactors are at work too
            done += taken
            fresh = self._fresh(fresh, deleted=True)
        end = self._archive.end
        tiers.merge(self.store, STEPS, end, joined_columns)
        tiers.merge(self.store, BRIEF, end, joined_briefs)
        return done

    def _catch_up(self) -> None:
        """Read what other compactors have archived since. Raises DamagedArchive."""
        for _, brief in self._archive.read():
            if isinstance(brief, DamagedArchive):
                raise brief

    def _fresh(
        self, listed: dict[str, dict[int, str]], deleted: bool = False
    ) -> dict[str, dict[int, str]]:
        """Return the segments to archive: each writer's, up to the first gap. Segments that are
        archived already (their compactor died, or their writer wrote them again) are deleted,
        unless `deleted` says that this was done."""
        fresh: dict[str, dict[int, str]] = {}
        for writer, keys in listed.items():
            at = self._archive.cursors.get(writer, Cursor()).next
            for number, key in keys.items():
                if number < at:
                    if not deleted:
                        self.store.delete(key)
                elif number == at:
                    fresh.setdefault(writer, {})[number] = key
                    at += 1
        return fresh

    def _volume(self, fresh: dict[str, dict[int, str]]) -> int:
        """Make the next volume, or finish one that another compactor began. Return its number of
        segments."""
        number = self._archive.end
        runs, body = self._gather(fresh)
        if not runs:
            return 0
        volume = Volume(number, self._archive.last, runs, body)
        raw = volume.encode()
        if not self.store.create(raw_key(number), raw):
            raw = self.store.get(raw_key(number))
            volume = volume_of(raw, raw_key(number))
            if (volume.number, volume.prev) != (number, self._archive.last):
                raise DamagedArchive(
                    f"{raw_key(number)}: wanted volume {number} after {self._archive.last!r}, "
                    f"found volume {volume.number} after {volume.prev!r}"
                )
        brief, steps = digested(volume, raw)
        self.store.create(Block(0, number).key(STEPS), steps)
        self.store.create(Block(0, number).key(BRIEF), brief)
        self._catch_up()
        if self._archive.end <= number:
            return 0  # others have merged it in the meantime, and the block is not listed yet
        for writer, segment, _ in volume.segments():
            self.store.delete(segment_key(writer, segment))
        return sum(len(run.sizes) for run in volume.runs)

    def _gather(self, fresh: dict[str, dict[int, str]]) -> tuple[tuple[WriterSpan, ...], bytes]:
        """Read the segments of one volume, writer by writer. Return their spans and content."""
        place = {key: (w, n) for w, keys in fresh.items() for n, key in keys.items()}
        sizes: dict[str, list[int]] = {}
        bodies, broken, nbytes = list[bytes](), set[str](), 0
        with contextlib.closing(get_each(self.store, place)) as found:
            for key, data in found:
                writer, _ = place[key]
                if data is None:  # another compactor has archived it
                    broken.add(writer)
                elif writer not in broken:
                    sizes.setdefault(writer, []).append(len(data))
                    bodies.append(data)
                    nbytes += len(data)
                if nbytes >= self._most_nbytes:
                    break
        cursors = {w: self._archive.cursors.get(w, Cursor()) for w in sizes}
        runs = (WriterSpan(w, cursors[w].next, tuple(s), cursors[w].head) for w, s in sizes.items())
        return tuple(runs), b"".join(bodies)


# Step records as columns: the numbers that a report needs of a million steps, in a few requests.

RECORDS = "records"
FEWEST_OBJECTS = 32  # least objects in a new block


@dataclass(frozen=True)
class RecordsPart:
    """The entry of one object of records. `prev`: hash of the record before its first. `worlds`,
    `metrics`: see step_records.Committed."""

    key: str
    prev: str
    head: str
    worlds: list[tuple[int, int, list[int]]]  # epoch, ranks, shares
    metrics: list[tuple[int, dict[str, float]]]
    rows: Columns

    @classmethod
    def of(cls, key: str, records: list[rec.StepRecord]) -> RecordsPart:
        found = Committed.of(records)
        worlds = [(e, world, list(shares)) for e, (world, shares) in found.worlds.items()]
        metrics = list(found.metrics.items())
        return cls(key, records[0].prev, records[-1].h, worlds, metrics, found.rows)


def encode(parts: Iterable[RecordsPart]) -> bytes:
    kept = list(parts)
    entries = [[p.key, p.prev, p.head, p.worlds, p.metrics, len(p.rows)] for p in kept]
    return sealed({"entries": entries}, (), step_records.joined(p.rows for p in kept).tobytes())


def decode(data: bytes, where: str) -> list[RecordsPart]:
    """Decode a block. Raises DamagedArchive."""
    head, _, start = opened(data, where)
    at, found = 0, list[RecordsPart]()
    try:
        rows = step_records.from_bytes(data, start)
        for key, prev, end, worlds, metrics, count in head["entries"]:
            named = [(int(e), int(w), list(map(int, shares))) for e, w, shares in worlds]
            told = [(int(step), dict(values)) for step, values in metrics]
            found.append(
                RecordsPart(str(key), str(prev), str(end), named, told, rows[at : at + count])
            )
            at += count
    except (KeyError, TypeError, ValueError) as e:
        raise DamagedArchive(f"{where}: wanted entries of records, found others ({e})") from e
    return found


def joined(blocks: list[bytes]) -> bytes:
    """Join consecutive blocks into one. Raises DamagedArchive."""
    return encode(part for data in blocks for part in decode(data, "records to be merged"))


# ---- reading -------------------------------------------------------------------------------------
@dataclass
class Recorded:
    """The objects of records read so far, by key, archived or not."""

    store: ObjectStore
    parts: dict[str, RecordsPart] = field(default_factory=dict)
    end: int = 0  # the archive's next block
    damage: list[str] = field(default_factory=list)

    def read_archive(self) -> None:
        """Read the blocks that are new in the archive. Raises StoreError."""
        for block, data in volumes.read(self.store, RECORDS, self.end):
            self.end = block.end
            try:
                self.parts |= {part.key: part for part in decode(data, block.key(RECORDS))}
            except DamagedArchive as e:
                self.damage.append(str(e))

    def read_rest(self) -> dict[str, rec.BrokenRecords]:
        """Read the objects that are not archived. Return those that are broken, with their errors.
        Raises StoreError."""
        bad: dict[str, rec.BrokenRecords] = {}
        listed = rec.heads(self.store.list(SAMPLES)).values()
        for key, data in get_each(self.store, (k for k in listed if k not in self.parts)):
            if data is None:
                continue
            try:
                if not (records := rec.decode(data, key)):
                    raise rec.BrokenRecords(f"{key}: it is empty")
                self.parts[key] = RecordsPart.of(key, records)
            except rec.BrokenRecords as e:
                bad[key] = e
        return bad


def read_committed(store: ObjectStore, named: rec.RecordsRef, genesis: str) -> Committed:
    """Read the chain of step records that ends at `named` (by a manifest), as columns, first step
    first. Raises step_records.BrokenRecords, which names what does not fit; StoreError."""
    found = Recorded(store)
    found.read_archive()
    bad = found.read_rest()
    chain = list(_backwards(found.parts, bad, named, genesis))[::-1]
    rows = step_records.joined(part.rows for part in chain)
    if len(rows) and rows["step"][0] != 1:
        raise rec.BrokenRecords(f"the first record is of step {rows['step'][0]}, wanted step 1")
    steps: Any = rows["step"]
    if len(rows) and not (np.diff(steps) == 1).all():
        raise rec.BrokenRecords("records of steps that do not follow one another")
    return committed_of(chain)


def committed_of(chain: list[RecordsPart]) -> Committed:
    """Join the entries of consecutive objects."""
    return Committed(
        step_records.joined(part.rows for part in chain),
        {epoch: (world, tuple(s)) for part in chain for epoch, world, s in part.worlds},
        {step: values for part in chain for step, values in part.metrics},
    )


def _backwards(
    parts: dict[str, RecordsPart],
    bad: dict[str, rec.BrokenRecords],
    named: rec.RecordsRef,
    genesis: str,
) -> Iterator[RecordsPart]:
    by_head = rec.heads([*parts, *bad])
    key, want = named.key, named.head
    while want != genesis:
        if key in bad:
            raise bad[key]
        if key not in parts:
            raise rec.BrokenRecords(f"{key}: missing, but later records follow from it")
        part = parts[key]
        if part.head != want:
            raise rec.BrokenRecords(
                f"{key}: does not end with record {want[:16]} that its successor follows"
            )
        yield part
        want = part.prev
        if want != genesis:
            if want[:16] not in by_head:
                first = int(part.rows["step"][0])
                raise rec.BrokenRecords(
                    f"records before step {first} are missing (wanted one ending in {want[:16]})"
                )
            key = by_head[want[:16]]


# ---- writing -------------------------------------------------------------------------------------
class RecordCompactor:
    """A compactor of step records into entries and columns. Any number of them may be at work; each
    may die at any point. Raises StoreError; DamagedArchive if the archive cannot be continued."""

    def __init__(self, store: ObjectStore, fewest: int = FEWEST_OBJECTS):
        self._fewest, self._recorded = fewest, Recorded(store)

    def compact(self, all_of_them: bool = False) -> int:
        """Archive the objects that are not archived yet, if there are enough (`all_of_them`: any
        number). Return how many were archived."""
        found = self._recorded
        found.read_archive()
        if found.damage:
            raise DamagedArchive(found.damage[0])
        known = set(found.parts)
        found.read_rest()
        fresh = sorted(set(found.parts) - known)
        done = 0
        if len(fresh) >= self._fewest or (all_of_them and fresh):
            data = encode(found.parts[key] for key in fresh)
            if found.store.create(Block(0, found.end).key(RECORDS), data):
                done, found.end = len(fresh), found.end + 1
        if not done:  # too few, or another compactor was first: try again next time
            for key in fresh:
                del found.parts[key]
        volumes.merge(found.store, RECORDS, found.end, joined)
        return done
