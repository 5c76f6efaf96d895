"""Retention: the snapshots that are kept, numbers that were measured of them later, and the
deletion of the rest beside writers and readers. Pure but for the store it is given."""

from __future__ import annotations

import bisect
import contextlib
import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from storage.canonical_json import MOST_INT, BadObject, canonical, parsed
from storage.errors import NotFound
from storage.snapshots.manifest import PARTS, PartList, Ref, SnapshotCorrupt
from storage.snapshots.snapshot_keys import (
    MANIFESTS,
    MEASURED,
    doom_key,
    doubts_of,
    manifest_key,
    measured_key,
    ref_in,
)
from storage.stores.objects import ObjectStore, get_each

if TYPE_CHECKING:
    from storage.snapshots.snapshots import Snapshots

# Metrics that are recorded for a snapshot after its commit, such as an evaluation's.

MOST_NBYTES = 64 << 10


def measure(store: ObjectStore, ref: Ref, by: str, metrics: Mapping[str, float]) -> bool:
    """Record metrics of a snapshot; return False if this source recorded some before, which then
    stay. `by`: the source's name, of letters, digits and ._-. Raises ValueError, StoreError."""
    if not re.fullmatch(r"[A-Za-z0-9_.\-]{1,64}", by):
        raise ValueError(f"wanted 1 to 64 letters, digits and ._- as a name, found {by!r}")
    body = canonical({"ref": ref.name, "metrics": dict(metrics)})
    if len(body) > MOST_NBYTES:
        raise ValueError(f"wanted at most {MOST_NBYTES} bytes of numbers, found {len(body)}")
    return store.create(measured_key(ref, by), body)


def recorded_metrics(store: ObjectStore, refs: Collection[Ref]) -> dict[Ref, dict[str, float]]:
    """Return the metrics that all sources recorded for these snapshots; unreadable ones are
    skipped. Raises StoreError."""
    found: defaultdict[Ref, dict[str, float]] = defaultdict(dict)
    keys = [key for key in store.list(MEASURED) if ref_in(key) in refs]
    for key, data in get_each(store, keys):
        ref = ref_in(key)
        if data is not None and ref is not None:  # None: the snapshot was pruned meanwhile
            found[ref] |= parsed_metrics(data)
    return dict(found)


def forget(store: ObjectStore, refs: Collection[Ref]) -> None:
    """Delete the metrics of these snapshots, which are deleted themselves. Raises StoreError."""
    for key in store.list(MEASURED):
        if ref_in(key) in refs:
            store.delete(key)


def parsed_metrics(data: bytes) -> dict[str, float]:
    """Return the metrics that one source recorded. Never fails: values that are no numbers are
    skipped."""
    try:
        body = parsed(data, most_nbytes=MOST_NBYTES)
    except BadObject:
        return {}
    metrics = body.get("metrics") if isinstance(body, dict) else None
    if not isinstance(metrics, dict):
        return {}
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, float) or (type(value) is int and abs(value) <= MOST_INT)
    }


TAKEN = "taken_at"  # key in a manifest's data: time of its state, Unix seconds by its node's clock
AGES_H = (0.25, 2.0, 24.0)


@dataclass(frozen=True)
class Keep:
    """A policy that keeps the newest `last` snapshots and, of the line of training that led to the
    newest, the first in every `every` steps, the one with the best metric, and for each of `ages_h`
    one that is at least that old, as soon as there is one. So a run whose weights have been going
    bad for an hour has something to go back to; frequent snapshots alone would all be younger.

    Ages are measured between snapshots, so a run that stood still loses none. The snapshot for an
    age is at most about twice as old. With n ages at most 2 n snapshots are kept for them: between
    two ages the newest, and the oldest, which will be needed for the next.

    `ends`: steps whose snapshots are kept in any case, as something that cannot be made again ended
    there.

    `last` includes spare snapshots: with 1 there is nothing to fall back to if the newest is
    damaged. Snapshots of greater steps than the newest one's are kept too: the new line of training
    has yet to repeat that work.
    """

    last: int = 3
    every: int = 0  # steps; 0: keep none for this reason
    # "loss:min", "accuracy:max", "eval/loss:min": a number that was recorded after the commit
    # (storage/snapshots/retention.py), or is in the manifest's data["metrics"] or data; "": keep
    # none by
    # metric
    best: str = ""
    ages_h: tuple[float, ...] = ()  # hours
    ends: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "ages_h", tuple(sorted(self.ages_h)))
        if not all(math.isfinite(h) and h > 0 for h in self.ages_h):
            raise ValueError(f"wanted ages in hours, each above 0; found {self.ages_h}")
        if self.best and (
            not self.best.rpartition(":")[0] or self.best.rpartition(":")[2] not in ("min", "max")
        ):
            raise ValueError(
                "the best by a metric is written NAME:min or NAME:max, for example loss:min; "
                f"found {self.best!r}"
            )
        if self.last < 1 or self.every < 0:
            raise ValueError(
                f"wanted last >= 1 and every >= 0 steps (0: off); found last={self.last}, "
                f"every={self.every}"
            )

    def __call__(
        self, refs: Collection[Ref], data: Mapping[Ref, Mapping[str, Any]] | None = None
    ) -> set[Ref]:
        """Return the refs to keep. Repeating it on them (and newer ones) never drops a milestone,
        or the best.

        `data`: the manifests' data, needed only with `best` or `ages_h`. A snapshot without it, or
        without the number, is never the best, and has no age.
        """
        ordered = sorted(refs, reverse=True)
        stay = set(ordered[: self.last]) | {
            ref for ref in ordered if ref.step > ordered[0].step or ref.step in self.ends
        }
        if self.every:
            first: dict[int, Ref] = {}
            # newest first, so the value that remains is the first snapshot of its span
            for ref in lineage(ordered):
                first[ref.step // self.every] = ref
            stay.update(first.values())
        if self.best and data:
            name, _, which = self.best.rpartition(":")
            sign = 1 if which == "max" else -1
            found = [
                (sign * value, ref)
                for ref in lineage(ordered)
                if (value := metric(data.get(ref, {}), name)) is not None
            ]
            if found:
                stay.add(max(found)[1])  # of equal values the newest
        if self.ages_h and data:
            stay |= _of_each_age(lineage(ordered), data, self.ages_h)
        return stay

    @property
    def asks_manifests(self) -> bool:
        """True if it needs the manifests' data."""
        return bool(self.best or self.ages_h)


def _of_each_age(
    line: Sequence[Ref], data: Mapping[Ref, Mapping[str, Any]], ages_h: Sequence[float]
) -> set[Ref]:
    """Return the newest and the oldest between each two ages; of those below the first age only the
    oldest, of those beyond the last only the newest. `line`: newest first."""
    found: dict[int, list[Ref]] = {}
    newest_s: float | None = None
    age_s = 0.0
    for ref in line:
        taken = data.get(ref, {}).get(TAKEN)
        if not isinstance(taken, int | float) or not math.isfinite(taken):
            continue
        newest_s = taken if newest_s is None else newest_s
        # nodes' clocks differ: an older snapshot never counts as younger
        age_s = max(age_s, newest_s - taken)
        found.setdefault(bisect.bisect_right(ages_h, age_s / 3600), []).append(ref)
    last = len(ages_h)
    return {refs[0] for i, refs in found.items() if i > 0} | {
        refs[-1] for i, refs in found.items() if i < last
    }


def metric(data: Mapping[str, Any], name: str) -> float | None:
    """Return a number of a manifest's data, looking in its "metrics" first; None if it has none, or
    not a finite one."""
    metrics = data.get("metrics")
    value = (
        metrics.get(name) if isinstance(metrics, Mapping) and name in metrics else data.get(name)
    )
    return (
        float(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        else None
    )


def lineage(refs: Collection[Ref]) -> list[Ref]:
    """Return the refs that the newest grew from, newest first. Steps of an older generation beyond
    a newer one's first step were abandoned."""
    line: list[Ref] = []
    for ref in sorted(refs, reverse=True):
        if not line or ref.step < line[-1].step:
            line.append(ref)
    return line


# Deletion of snapshots, and of the parts of abandoned attempts, beside writers and readers.

DOOMED_KEPT = 1000  # marks; a writer whose base was pruned that many snapshots ago is dead

# all refs -> those to keep; `retention.Keep` is one
KeepPolicy = Callable[[Collection[Ref]], Collection[Ref]]
OnBad = Callable[[Ref, str], None]
Expired = Callable[[str, bytes], bool]  # (key, content) of a lease -> whether its reader is dead


class Pruner:
    """Deletes what a policy does not keep.

    refers, data: caches of what committed snapshots refer to, and of the numbers in their
    manifests; both are extended.
    """

    def __init__(
        self,
        snapshots: Snapshots,
        refers: dict[Ref, frozenset[str]],
        data: dict[Ref, Mapping[str, Any]],
    ):
        self._snapshots, self._store = snapshots, snapshots.store
        self._refers, self._data = refers, data

    def prune(
        self,
        keep: KeepPolicy,
        on_bad: OnBad | None = None,
        expired: Expired = lambda key, beat: False,
    ) -> list[Ref]:
        """Delete snapshots as `Snapshots.prune` documents."""
        newest = self._snapshots.latest(on_bad)
        if newest is None:
            return []
        # listed before the manifests, so that a snapshot committed in between is not taken for an
        # orphan
        objects = self._objects()
        committed, doomed = self._snapshots.manifests()
        # pruned by now, or an incomplete listing: do not delete anything now
        if newest.ref not in committed:
            return []
        marked = self._snapshots.quarantined()
        ahead = {ref for ref in committed - doomed if ref.step > newest.step}
        candidates = {ref for ref in committed - doomed - marked if ref <= newest.ref}
        stay = (set(self._chosen(keep, candidates)) & candidates) | {newest.ref}
        oldest = min(stay)
        stay |= ahead
        gone = [
            ref
            for ref in sorted(committed | set(objects), reverse=True)
            if ref < newest.ref and ref not in stay and (ref not in marked or ref < oldest)
        ]
        # Check leases before dooming, so that a snapshot that is being read is not doomed: it may
        # yet prove to be the best. Check again after it, since a reader may have begun in between.
        if gone:
            read = self._snapshots.being_read(expired)
            gone = [ref for ref in gone if ref in doomed or ref not in read]
        for ref in gone:
            if ref not in doomed:
                self._store.create(doom_key(ref), b"{}")
        if gone:
            read = self._snapshots.being_read(expired)
            gone = [ref for ref in gone if ref not in read]
        for ref in gone:
            self._take_back(ref, objects[ref])
        objects, needed = self._needed(gone, newest.ref) if gone else (objects, frozenset())
        deleted = [
            ref
            for ref in gone
            if self._delete(ref, [k for k in objects[ref] if k not in needed]) or ref in committed
        ]
        for ref in marked.intersection(deleted):
            for key in self._store.list(doubts_of(ref)):
                self._store.delete(key)
        if deleted:
            forget(self._store, doomed.union(deleted))
        for ref in sorted(doomed - committed - set(objects), reverse=True)[DOOMED_KEPT:]:
            self._store.delete(doom_key(ref))
        return deleted

    def _chosen(self, keep: KeepPolicy, candidates: set[Ref]) -> Collection[Ref]:
        if not isinstance(keep, Keep) or not keep.asks_manifests:
            return keep(candidates)
        for ref in self._data.keys() - candidates:
            del self._data[ref]
        for ref in candidates - self._data.keys():
            with contextlib.suppress(NotFound, SnapshotCorrupt):  # then it is never the best
                manifest = self._snapshots.load(ref)
                self._refers[ref] = manifest.refers
                self._data[ref] = {n: v for n, v in manifest.data.items() if _may_decide(n, v)}
        data = dict(self._data)
        if not keep.best:
            return keep(candidates, data)
        for ref, told in recorded_metrics(self._store, candidates).items():
            own = data.get(ref, {}).get("metrics")
            metrics = {**(own if isinstance(own, Mapping) else {}), **told}
            data[ref] = {**data.get(ref, {}), "metrics": metrics}
        return keep(candidates, data)

    def _objects(self) -> defaultdict[Ref, list[str]]:
        found: defaultdict[Ref, list[str]] = defaultdict(list)
        for key in self._store.list(PARTS):
            ref = ref_in(key)
            if ref is not None:
                found[ref].append(key)
        return found

    def _needed(
        self, gone: Collection[Ref], newest: Ref
    ) -> tuple[defaultdict[Ref, list[str]], frozenset[str]]:
        """Return all objects by ref, and those that snapshots other than `gone` refer to. Call it
        when `gone` are doomed.

        Quarantined snapshots count: their marks may be taken back. If it is unknown what a snapshot
        refers to, everything counts as needed; likewise if the listing does not show `newest`, or
        shows objects that are not found, as it is not reliable then.
        """
        objects = self._objects()
        committed, doomed = self._snapshots.manifests()
        needed, lost = set[str](), set[str]()
        everything = frozenset(key for keys in objects.values() for key in keys)
        if newest not in committed:
            return objects, everything
        for ref in (committed | set(objects)).difference(gone):
            lists = [key for key in objects[ref] if key.startswith(f"{PARTS}{ref.name}/list-")]
            if ref in committed and ref not in self._refers:
                try:
                    self._refers[ref] = self._snapshots.load(ref).refers
                except NotFound:  # somebody else is pruning it
                    lost.add(manifest_key(ref))
                except SnapshotCorrupt:  # its part lists contain the same
                    pass
            if ref in committed and ref in self._refers:
                needed |= self._refers[ref]
                continue
            if ref in committed - doomed and not lists:
                return objects, everything
            for key in lists:
                try:
                    needed |= PartList.from_json(self._store.get(key)).refers
                except NotFound:  # it is being pruned too
                    lost.add(key)
                except SnapshotCorrupt:
                    return objects, everything
        if lost:
            listed = {*self._store.list(MANIFESTS), *self._store.list(PARTS)}
            if lost & listed or manifest_key(newest) not in listed:
                return objects, everything
        return objects, frozenset(needed)

    def _take_back(self, ref: Ref, keys: Collection[str]) -> None:
        """Delete the manifest of a snapshot, but its part lists first: without them nobody can
        commit it."""
        for key in keys:
            if key.startswith((f"{PARTS}{ref.name}/list-", f"{PARTS}{ref.name}/group-")):
                self._store.delete(key)
        self._store.delete(manifest_key(ref))

    def _delete(self, ref: Ref, keys: Collection[str]) -> bool:
        """Delete the objects of a snapshot; return whether there were any."""
        if not keys:
            return False
        for key in keys:
            self._store.delete(key)
        # Again: a part list written after our listing may let a commit pass its check before the
        # parts were gone.
        self._store.delete(manifest_key(ref))
        return True


def _may_decide(name: str, value: Any) -> bool:
    """Return whether `Keep` may use this entry of a manifest's data. The rest, which may be large,
    is dropped."""
    return name == "metrics" or isinstance(value, int | float)
