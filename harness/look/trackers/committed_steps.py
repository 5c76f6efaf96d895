"""The committed steps of a run, as publishers read them: from the newest manifest backwards, only
as far as needed.

It knows records and snapshots.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from harness.bucket.journal import records_to
from harness.bucket.layout import SAMPLES
from harness.core import step_records
from harness.core import step_records as rec
from harness.core.step_records import Columns, Committed
from harness.look.trackers.tracker_registry import RunInfo
from storage.errors import NotFound
from storage.snapshots.manifest import SnapshotCorrupt
from storage.snapshots.snapshots import Snapshots
from storage.stores.objects import ObjectStore

MAX_BATCH_STEPS = 10_000  # per batch; limits memory when a publisher starts late


def committed(
    store: ObjectStore, info: RunInfo, first: int, limit: int = MAX_BATCH_STEPS
) -> tuple[list[rec.StepRecord], bool]:
    """Return the records of committed steps from `first` on (at most `limit`), and whether they
    reach the end of a finished run.

    Walks the chain from the newest manifest back to `first`, not to the beginning of the run.
    """
    snapshots = Snapshots(store)
    refs = snapshots.refs()
    manifest = snapshots.load(refs[0]) if refs else None
    named = rec.named(manifest.data) if manifest else None
    if manifest is None or not named or manifest.step < first:
        return [], bool(manifest and snapshots.ended(manifest))
    by_head = rec.heads(store.list(SAMPLES))
    key, want, genesis = named.key, named.head, rec.genesis(info.identity)
    parts: list[list[rec.StepRecord]] = []
    while True:
        part = records_to(store, key, want)
        parts.append([r for r in part if r.step >= first])
        # a late publisher needs only the beginning; do not hold the rest
        if sum(map(len, parts)) > 2 * limit:
            _drop_newest(parts, limit)
        want = part[0].prev
        if part[0].step <= first or want == genesis:
            break
        if want[:16] not in by_head:
            raise rec.BrokenRecords(
                f"records before step {part[0].step} are missing (wanted one ending in {want[:16]})"
            )
        key = by_head[want[:16]]
    chain = [r for part in reversed(parts) for r in part][:limit]
    return chain, bool(snapshots.ended(manifest)) and bool(chain) and chain[
        -1
    ].step == manifest.step


def _drop_newest(parts: list[list[rec.StepRecord]], limit: int) -> None:
    """Drop the newest objects as long as `limit` records remain; `parts` is newest first."""
    while len(parts) > 1 and sum(map(len, parts[1:])) >= limit:
        del parts[0]


@dataclass(frozen=True)
class Newest:
    """The newest readable manifest's reference to records. `epoch`: of the snapshot."""

    epoch: int
    step: int
    key: str
    head: str


def newest(store: ObjectStore) -> Newest | None:
    """Return the newest reference. None: nothing is committed, or no manifest names records.

    Raises StoreError.
    """
    snapshots = Snapshots(store)
    for ref in snapshots.refs():
        try:
            named = rec.named(snapshots.load(ref).data)
        except (NotFound, SnapshotCorrupt):  # just pruned, or bad: try the next older one
            continue
        return Newest(ref.epoch, ref.step, named.key, named.head) if named else None
    return None


@dataclass(frozen=True)
class _Part:
    """One object of records, reduced to what ledgers need."""

    rows: Columns
    samples: NDArray[np.int64]  # of each record
    worlds: dict[int, tuple[int, tuple[int, ...]]]
    head: str  # hash of its last record


@dataclass
class Lineage:
    """The committed records as columns without metrics, for ledgers. `refresh` adds new ones."""

    store: ObjectStore
    info: RunInfo
    _parts: list[_Part] = field(default_factory=list)
    _all: _Part | None = None  # joined

    def refresh(self) -> None:
        """Read new records. Raises StoreError, BrokenRecords."""
        found = newest(self.store)
        if found is None or (self._parts and found.head == self._parts[-1].head):
            return
        key, want, genesis = found.key, found.head, rec.genesis(self.info.identity)
        ends = {part.head: n for n, part in enumerate(self._parts, 1)}
        parts: list[_Part] = []
        by_head: dict[str, str] = {}
        while want != genesis and want not in ends:
            records = records_to(self.store, key, want)
            parts.append(_part(records))
            want = records[0].prev
            if want != genesis and want not in ends:
                by_head = by_head or rec.heads(self.store.list(SAMPLES))
                if want[:16] not in by_head:
                    raise rec.BrokenRecords(f"records before step {records[0].step} are missing")
                key = by_head[want[:16]]
        self._parts = [*self._parts[: ends.get(want, 0)], *reversed(parts)]
        self._all = None

    def until(self, t: float) -> tuple[Committed, int]:
        """Return the steps that were done by `t` (wall clock, s), and how many samples they had."""
        if self._all is None:
            self._all = _Part(
                step_records.joined(part.rows for part in self._parts),
                np.concatenate([np.empty(0, np.int64), *(part.samples for part in self._parts)]),
                {e: world for part in self._parts for e, world in part.worlds.items()},
                "",
            )
        done = self._all.rows["end"] <= t
        rows = self._all.rows[done]
        return Committed(rows, self._all.worlds, {}), int(self._all.samples[done].sum())


def _part(records: list[rec.StepRecord]) -> _Part:
    return _Part(
        step_records.of_records(records),
        np.array([r.samples for r in records], np.int64),
        {r.epoch: (r.world, tuple(r.shares)) for r in records},
        records[-1].h,
    )
