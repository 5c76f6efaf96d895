"""Which steps of a run are committed, as publishers read them: from the newest manifest backwards,
and no further than is wanted.

Knows records and snapshots.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from harness.core import records as rec
from harness.views.plugins import RunInfo
from storage.errors import NotFound
from storage.manifest import SnapshotCorrupt
from storage.objects import ObjectStore
from storage.snapshots import Snapshots

MAX_BATCH_STEPS = 10_000  # per batch; bounds memory when a publisher comes late


def committed(
    store: ObjectStore, info: RunInfo, first: int, limit: int = MAX_BATCH_STEPS
) -> tuple[list[rec.StepRecord], bool]:
    """Records of the committed steps from `first` on (at most `limit`), and whether they go to the
    end of a finished run.

    Walks the chain from the newest manifest back to `first`, not to the beginning of the run.
    """
    snapshots = Snapshots(store)
    refs = snapshots.refs()
    manifest = snapshots.load(refs[0]) if refs else None
    named = rec.named(manifest.data) if manifest else None
    if manifest is None or not named or manifest.step < first:
        return [], bool(manifest and snapshots.ended(manifest))
    by_head = rec.heads(store.list("samples/"))
    key, want, genesis = named.key, named.head, rec.genesis(info.identity)
    parts: list[list[rec.StepRecord]] = []
    while True:
        part = rec.decode(store.get(key), key)
        if not part or part[-1].h != want:
            raise rec.BrokenRecords(
                f"{key}: wanted records that end in {want[:16]}, found others; `harness verify` "
                "tells more"
            )
        parts.append([r for r in part if r.step >= first])
        # a publisher that comes late needs the beginning only; do not hold the rest
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
    """Forget the newest objects as long as `limit` records stay; `parts` is newest first."""
    while len(parts) > 1 and sum(map(len, parts[1:])) >= limit:
        del parts[0]


@dataclass(frozen=True)
class Newest:
    """What the newest readable manifest says of the records. `epoch`: of the snapshot."""

    epoch: int
    step: int
    key: str
    head: str


def newest(store: ObjectStore) -> Newest | None:
    """None: nothing is committed, or no manifest names records. Raises StoreError."""
    snapshots = Snapshots(store)
    for ref in snapshots.refs():
        try:
            named = rec.named(snapshots.load(ref).data)
        except (NotFound, SnapshotCorrupt):  # pruned a moment ago, or bad: the next older one
            continue
        return Newest(ref.epoch, ref.step, named.key, named.head) if named else None
    return None


@dataclass
class Lineage:
    """The committed records without their metrics, for ledgers: `refresh` reads only what is
    new."""

    store: ObjectStore
    info: RunInfo
    records: list[rec.StepRecord] = field(default_factory=list)
    _ends: dict[str, int] = field(default_factory=dict)  # last hash of an object -> records so far
    _head: str = ""

    def refresh(self) -> list[rec.StepRecord]:
        """Raises StoreError, BrokenRecords."""
        found = newest(self.store)
        if found is None or found.head == self._head:
            return self.records
        key, want, genesis = found.key, found.head, rec.genesis(self.info.identity)
        parts: list[list[rec.StepRecord]] = []
        by_head: dict[str, str] = {}
        while want != genesis and want not in self._ends:
            part = rec.decode(self.store.get(key), key)
            if not part or part[-1].h != want:
                raise rec.BrokenRecords(f"{key}: wanted records that end in {want[:16]}")
            parts.append(part)
            want = part[0].prev
            if want != genesis and want not in self._ends:
                by_head = by_head or rec.heads(self.store.list("samples/"))
                if want[:16] not in by_head:
                    raise rec.BrokenRecords(f"records before step {part[0].step} are missing")
                key = by_head[want[:16]]
        kept = self._ends.get(want, 0)
        del self.records[kept:]
        self._ends = {h: n for h, n in self._ends.items() if n <= kept}
        for part in reversed(parts):
            self.records += [
                dataclasses.replace(r, metrics={}, digest="", contents="", prev="", h="")
                for r in part
            ]
            self._ends[part[-1].h] = len(self.records)
        self._head = found.head
        return self.records
