"""The archive of a run's facts and records: few large objects in the place of many small ones.

A writer's facts come in create-only segments of a few seconds, up to half a million in a month. A
compactor puts segments of all writers, byte by byte, into numbered volumes; makes a brief and
columns of each (`volumes.py`), which are merged into ever larger blocks (`tiers.py`); and then
deletes the segments. Of step records, which stay where they are, it keeps columns.

Right in every interleaving of compactors, readers and crashes:
  - a volume, a brief, a block is created once, and only one object of a name can be. Who is second
    takes over what the first one left undone;
  - a segment is deleted only when its volume, its steps and its brief are there. So whoever lists
    segments first, reads them, and then reads the archive, misses none;
  - a segment that is in the archive and still there (its deletion is to come, or its writer wrote
    it again) is known by its number, and counts once.

Knows a store; no clock, no thread.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from harness.bucket import tiers
from harness.bucket.layout import ARCHIVE, FACTS, SEGMENT, segment_key
from harness.bucket.tiers import Block
from harness.bucket.volumes import (
    LOST,
    TAIL,
    Brief,
    DamagedArchive,
    Volume,
    WriterSpan,
    brief_of,
    columns_of,
    digested,
    fact_of,
    joined_briefs,
    joined_columns,
    read_segment,
    reader_after,
    volume_of,
)
from harness.core import columns
from harness.core.columns import Columns
from harness.core.facts import Stamped, StepDone, Unreadable
from storage.errors import NotFound
from storage.objects import ObjectStore, get_each

BRIEF, STEPS = "brief", "steps"
FEWEST = 64  # segments that are worth a volume
MOST_NBYTES = 8 << 20  # of a volume


def raw_key(number: int) -> str:
    return f"{ARCHIVE}raw/{number:06d}"


def segments(store: ObjectStore, writers: str = "") -> dict[str, dict[int, str]]:
    """Keys of fact segments that are not archived (or not deleted yet), by writer and number, in
    order. `writers`: only those whose name begins so. What else lies there is not ours."""
    found: dict[str, dict[int, str]] = {}
    for key in store.list(FACTS + writers):
        if m := SEGMENT.fullmatch(key):
            found.setdefault(m[1], {})[int(m[2])] = key
    return {writer: dict(sorted(keys.items())) for writer, keys in found.items()}


@dataclass
class Cursor:
    """How far one writer's facts are archived: the next segment, the hash of the last line."""

    next: int = 0
    head: str = ""


# ---- reading -------------------------------------------------------------------------------------
# Facts of which a long run has many, and of which a live view shows the newest
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
    """What was archived, as far as it was read: `cursors` by writer, `end`: the next volume.
    `follows`: it is read again soon, so an old listing does no harm."""

    store: ObjectStore
    follows: bool = False
    cursors: dict[str, Cursor] = field(default_factory=dict)
    end: int = 0
    last: str = ""  # digest of the newest volume
    tail: tuple[tuple[str, str], ...] = ()  # newest steps: (writer, line)

    def read(self) -> list[tuple[Block, Brief | DamagedArchive]]:
        """Briefs that are new since the last call. Raises StoreError."""
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
        """Archived facts, but the steps, that are new since the last call. `seen`: segments to
        leave out, by (writer, number). `brief`: of what there may be much (MUCH) only the newest.
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
                    yield fact_of(writer, line)


@dataclass(frozen=True)
class Past:
    """What a run's writers told: `facts` by time, without the steps, which are rows. `newest`: a
    few of the newest steps, as they were told."""

    facts: list[Stamped]
    steps: Columns
    newest: tuple[StepDone, ...] = ()


@dataclass(frozen=True)
class Live:
    """Segments that are not archived, as they were read: by writer, in order."""

    segments: dict[str, list[tuple[int, bytes]]]

    @classmethod
    def read(cls, store: ObjectStore, writers: str = "") -> Live:
        """Before the archive is read: see the module's docstring."""
        by_writer = segments(store, writers)
        place = {key: (w, n) for w, keys in by_writer.items() for n, key in keys.items()}
        found: dict[str, list[tuple[int, bytes]]] = {}
        for key, data in get_each(store, place):
            if data is not None:
                writer, number = place[key]
                found.setdefault(writer, []).append((number, data))
        return cls(found)

    def facts(self, cursors: dict[str, Cursor]) -> Iterator[Stamped]:
        """Those that no archive holds."""
        for writer, parts in self.segments.items():
            cursor = cursors.get(writer, Cursor())
            reader = reader_after(writer, cursor.head)
            for number, data in parts:
                if number >= cursor.next:
                    yield from (stamped for _, stamped in read_segment(reader, number, data))


def read_past(store: ObjectStore) -> Past:
    """All facts of a run. Raises StoreError."""
    live, archive = Live.read(store), Archive(store)
    facts = list(archive.told(lambda writer, number: False))
    fresh = list(live.facts(archive.cursors))
    facts += [s for s in fresh if not isinstance(s.fact, StepDone)]
    live_steps = [s.fact for s in fresh if isinstance(s.fact, StepDone)]
    told = columns.of_facts(live_steps)
    tail = [fact_of(writer, line).fact for writer, line in archive.tail]
    newest = [*(fact for fact in tail if isinstance(fact, StepDone)), *live_steps]
    newest.sort(key=lambda step: (step.epoch, step.step))
    bad: list[Stamped] = []
    old = read_columns(store, STEPS, archive.end, bad)
    facts = sorted([*facts, *bad], key=lambda s: s.t)
    return Past(facts, columns.joined([old, told]), tuple(newest[-TAIL:]))


def read_columns(
    store: ObjectStore, kind: str, end: int, bad: list[Stamped], since: int = 0
) -> Columns:
    """Archived rows of the volumes from `since` on, and before `end`; the first block may begin
    sooner. `bad` takes what cannot be read."""
    found: list[Columns] = []
    for block, data in tiers.read(store, kind, since) if end else ():
        try:
            found.append(columns_of(data, block.key(kind)))
        except DamagedArchive as e:
            bad.append(Stamped(0.0, "archive", Unreadable(block.key(kind), str(e))))
    return columns.joined(found)


def read_facts(store: ObjectStore, writers: str = "", steps: bool = True) -> list[Stamped]:
    """Facts of a run (of all writers, or those whose name begins so), by time. What was changed or
    lost, or is none, is an `Unreadable` in its place: one bad object stops no reader. `steps`:
    also the steps, of which there may be millions. Raises StoreError."""
    live, found = Live.read(store, writers), list[Stamped]()
    if steps:
        cursors: dict[str, Cursor] = {}
        for _, volume in volumes(store):
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


def volumes(store: ObjectStore, first: int = 0) -> Iterator[tuple[bytes, Volume | Unreadable]]:
    """From number `first` on, in order, each with its bytes. Numbers have no gaps."""
    listed = {k for k in store.list(f"{ARCHIVE}raw/") if re.fullmatch(r"archive/raw/\d{6,9}", k)}
    end = first
    while raw_key(end) in listed:
        end += 1
    at = first
    for key, data in get_each(store, (raw_key(n) for n in range(first, end))):
        at += 1
        yield _volume(key, data)
    while True:  # not listed yet
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
    """Archives what was written. Any number of them may be at work on a run; each may die at any
    point. Raises StoreError; DamagedArchive if the archive cannot be continued."""

    def __init__(self, store: ObjectStore, fewest: int = FEWEST, most_nbytes: int = MOST_NBYTES):
        self.store, self._fewest, self._most_nbytes = store, fewest, most_nbytes
        self._archive = Archive(store)

    def compact(self, all_of_them: bool = False) -> int:
        """Archive what is worth it (`all_of_them`: whatever there is): how many segments."""
        listed = segments(self.store)  # before the archive, as every reader
        self._catch_up()
        fresh = self._fresh(listed)
        done = 0
        while fresh and (all_of_them or sum(map(len, fresh.values())) >= self._fewest):
            if not (taken := self._volume(fresh)):
                break  # others are at it, too
            done += taken
            fresh = self._fresh(fresh, deleted=True)
        end = self._archive.end
        tiers.merge(self.store, STEPS, end, joined_columns)
        tiers.merge(self.store, BRIEF, end, joined_briefs)
        return done

    def _catch_up(self) -> None:
        """Read what others have archived since."""
        for _, brief in self._archive.read():
            if isinstance(brief, DamagedArchive):
                raise brief

    def _fresh(
        self, listed: dict[str, dict[int, str]], deleted: bool = False
    ) -> dict[str, dict[int, str]]:
        """Segments to archive: each writer's, as far as there is no gap. What is archived already
        is deleted (whoever archived it died, or its writer wrote it again), unless it is."""
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
        """Make the next volume, or finish one that another has begun: how many segments."""
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
            return 0  # it was merged by others meanwhile, and is not listed yet
        for writer, segment, _ in volume.segments():
            self.store.delete(segment_key(writer, segment))
        return sum(len(run.sizes) for run in volume.runs)

    def _gather(self, fresh: dict[str, dict[int, str]]) -> tuple[tuple[WriterSpan, ...], bytes]:
        """The segments of one volume, writer by writer."""
        place = {key: (w, n) for w, keys in fresh.items() for n, key in keys.items()}
        sizes: dict[str, list[int]] = {}
        bodies, broken, nbytes = list[bytes](), set[str](), 0
        with contextlib.closing(get_each(self.store, place)) as found:
            for key, data in found:
                writer, _ = place[key]
                if data is None:  # another has archived it
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
