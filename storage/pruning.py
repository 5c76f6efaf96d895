"""Deleting snapshots, and the parts of abandoned attempts, beside whoever writes and reads.

The order of the steps, and what it protects from, stands in `storage/snapshots.py`.
No torch, no threads, no clock, no randomness.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from storage.errors import NotFound
from storage.manifest import PARTS, PartList, Ref, SnapshotCorrupt
from storage.measured import forget, measured
from storage.retention import Keep
from storage.snapshot_keys import MANIFESTS, doom_key, doubts_of, manifest_key, ref_in

if TYPE_CHECKING:
    from storage.snapshots import Snapshots

DOOMED_KEPT = 1000  # marks; a writer whose base was pruned so many snapshots ago is not alive

# all refs -> those that stay; `retention.Keep` is one
KeepPolicy = Callable[[Collection[Ref]], Collection[Ref]]
OnBad = Callable[[Ref, str], None]
Expired = Callable[[str, bytes], bool]  # key and content of a lease -> is its owner dead?


class Pruner:
    """Deletes what a policy does not keep.

    refers, data: what committed snapshots refer to, and the numbers that their manifests tell, as
    far as they were read before; both are added to.
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
        """`Snapshots.prune` says what stays."""
        newest = self._snapshots.latest(on_bad)
        if newest is None:
            return []
        # before the manifests: a snapshot committed in between is not taken for an orphan
        objects = self._objects()
        committed, doomed = self._snapshots.manifests()
        # pruned by now, or a listing that does not show all: no moment to delete anything
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
        # Who reads is asked before, so that what is read is not doomed: it may yet turn out to be
        # the best. And after, since somebody may have begun in between.
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
            with contextlib.suppress(NotFound, SnapshotCorrupt):  # then it is the best at nothing
                manifest = self._snapshots.load(ref)
                self._refers[ref] = manifest.refers
                self._data[ref] = {n: v for n, v in manifest.data.items() if _may_decide(n, v)}
        data = dict(self._data)
        if not keep.best:
            return keep(candidates, data)
        for ref, told in measured(self._store, candidates).items():
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
        """What there is; and of that what snapshots other than `gone`, which are doomed, refer to.
        To be asked when they are.

        Quarantined ones count: their marks may be taken back. What cannot be told to refer to
        nothing refers to everything; so does everybody if the listing does not show `newest`, or
        objects that are not found: it is not to be believed then.
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
                except NotFound:  # somebody else prunes it
                    lost.add(manifest_key(ref))
                except SnapshotCorrupt:  # its part lists say the same
                    pass
            if ref in committed and ref in self._refers:
                needed |= self._refers[ref]
                continue
            if ref in committed - doomed and not lists:
                return objects, everything
            for key in lists:
                try:
                    needed |= PartList.from_json(self._store.get(key)).refers
                except NotFound:  # pruned as well
                    lost.add(key)
                except SnapshotCorrupt:
                    return objects, everything
        if lost:
            listed = {*self._store.list(MANIFESTS), *self._store.list(PARTS)}
            if lost & listed or manifest_key(newest) not in listed:
                return objects, everything
        return objects, frozenset(needed)

    def _take_back(self, ref: Ref, keys: Collection[str]) -> None:
        """First the part lists: without them nobody commits it."""
        for key in keys:
            if key.startswith((f"{PARTS}{ref.name}/list-", f"{PARTS}{ref.name}/group-")):
                self._store.delete(key)
        self._store.delete(manifest_key(ref))

    def _delete(self, ref: Ref, keys: Collection[str]) -> bool:
        """Was there anything?"""
        if not keys:
            return False
        for key in keys:
            self._store.delete(key)
        # Once more: a part list that was written after we listed lets a commit look before the
        # parts were gone.
        self._store.delete(manifest_key(ref))
        return True


def _may_decide(name: str, value: Any) -> bool:
    """Of a manifest's data, may `Keep` decide by this? The rest, which may be large, is let go."""
    return name == "metrics" or isinstance(value, int | float)
