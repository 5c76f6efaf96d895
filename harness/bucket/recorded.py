"""Step records as columns: what a report needs of a million of them, by a few requests.

The records themselves stay where they are (`samples/`), each object for ever: they are the proof.
A compactor makes an entry of each object (where its chain begins and ends, which worlds made it,
what was measured) and columns of its steps, and puts those of many objects into blocks, which are
merged as those of facts are (`tiers.py`). Who reads the chain follows the hashes from entry to
entry. `harness verify` reads the objects, and compares.

    archive/records/<block>

Knows a store; no clock, no thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harness.bucket import tiers
from harness.bucket.layout import SAMPLES
from harness.bucket.tiers import Block
from harness.bucket.volumes import DamagedArchive, opened, sealed
from harness.core import columns
from harness.core import records as rec
from harness.core.columns import Columns, Committed
from storage.objects import ObjectStore, get_each

RECORDS = "records"
FEWEST = 32  # objects that are worth a block


@dataclass(frozen=True)
class RecordsPart:
    """One object of records. `prev`: hash of the record before its first. `worlds`, `metrics`: see
    columns.Committed."""

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
    return sealed({"entries": entries}, (), columns.joined(p.rows for p in kept).tobytes())


def decode(data: bytes, where: str) -> list[RecordsPart]:
    """Raises DamagedArchive."""
    head, _, start = opened(data, where)
    at, found = 0, list[RecordsPart]()
    try:
        rows = columns.from_bytes(data, start)
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
    """Raises DamagedArchive."""
    return encode(part for data in blocks for part in decode(data, "records to be merged"))


# ---- reading -------------------------------------------------------------------------------------
@dataclass
class Recorded:
    """The objects of records that were read, by key, archived or not."""

    store: ObjectStore
    parts: dict[str, RecordsPart] = field(default_factory=dict)
    end: int = 0  # the archive's next block
    damage: list[str] = field(default_factory=list)

    def read_archive(self) -> None:
        """What is new in it. Raises StoreError."""
        for block, data in tiers.read(self.store, RECORDS, self.end):
            self.end = block.end
            try:
                self.parts |= {part.key: part for part in decode(data, block.key(RECORDS))}
            except DamagedArchive as e:
                self.damage.append(str(e))

    def read_rest(self) -> dict[str, rec.BrokenRecords]:
        """Objects that are not archived; those that cannot be read, and why. Raises StoreError."""
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
    """The chain of step records that ends at `named` (by a manifest), as columns, first step first.
    Raises records.BrokenRecords naming what does not fit, StoreError."""
    found = Recorded(store)
    found.read_archive()
    bad = found.read_rest()
    chain = list(_backwards(found.parts, bad, named, genesis))[::-1]
    rows = columns.joined(part.rows for part in chain)
    if len(rows) and rows["step"][0] != 1:
        raise rec.BrokenRecords(f"the first record is of step {rows['step'][0]}, wanted step 1")
    steps: Any = rows["step"]
    if len(rows) and not (np.diff(steps) == 1).all():
        raise rec.BrokenRecords("records of steps that do not follow one another")
    return committed_of(chain)


def committed_of(chain: list[RecordsPart]) -> Committed:
    """Of objects one after the other."""
    return Committed(
        columns.joined(part.rows for part in chain),
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
    """Makes entries and columns of what was recorded. Any number of them may be at work; each may
    die at any point. Raises StoreError; DamagedArchive if the archive cannot be continued."""

    def __init__(self, store: ObjectStore, fewest: int = FEWEST):
        self._fewest, self._recorded = fewest, Recorded(store)

    def compact(self, all_of_them: bool = False) -> int:
        """How many objects."""
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
        if not done:  # too few, or another was first: the next time
            for key in fresh:
                del found.parts[key]
        tiers.merge(found.store, RECORDS, found.end, joined)
        return done
