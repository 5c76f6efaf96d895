"""Snapshots: the commit protocol, the newest valid one, verified reads, quarantine, pruning.

No torch, no threads, no clock, no randomness: it runs unchanged in the deterministic simulation. Any caller may die
between any two store calls, and any number of callers may do anything at once; what holds is:

    write   parts, under names of this attempt only -> this rank's part list (create-only)
    commit  all ranks' part lists -> the manifest (create-only, the same bytes whoever writes it) -> look that nothing was pruned
    read    manifests only; every byte is hashed; what is bad is marked and the next older one used
    prune   part lists -> manifest -> parts -> manifest again, of snapshots older than the newest whole one

Part lists go first in `prune` and are looked at again at the end of `commit`. So of a late commit and a prune of the same
snapshot either the commit sees that the lists are gone and takes its manifest back, or the prune deletes that manifest.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any

from storage.manifest import CHUNK_NBYTES, Manifest, Part, PartList, Ref, SnapshotCorrupt, canonical, chunk_hash
from storage.objects import NotFound, ObjectStore, StoreError, StoreUnavailable

PARTS, MANIFESTS, QUARANTINE = "snapshots/parts/", "snapshots/manifests/", "snapshots/quarantine/"
VERIFY_NBYTES = 32 << 20  # read at once by `verify`

Policy = Callable[[Collection[Ref]], Collection[Ref]]  # all refs -> those that stay; `retention.Keep` is one
OnBad = Callable[[Ref, str], None]


class Snapshots:
    """The snapshots of one run. `store` is rooted at the run's URL."""

    def __init__(self, store: ObjectStore, chunk_nbytes: int = CHUNK_NBYTES):
        self.store, self.chunk_nbytes = store, chunk_nbytes

    # ---- writing ------------------------------------------------------------------------------------------------
    def write(
        self,
        ref: Ref,
        rank: int,
        world: int,
        files: Mapping[str, bytes | memoryview],
        tensors: dict[str, Any],
        data: dict[str, Any],
        token: str,
    ) -> PartList:
        """Store what one rank has of a snapshot, and return the part list that stands for that rank.

        files:   name -> bytes. tensors: index whose chunks say `"part": <file name>`. data: plain JSON.
        token:   unique to this attempt (and the same when it is repeated after StoreUnavailable, which is safe).
        The list returned is an earlier attempt's if that one was first; then our parts are garbage that `prune` collects.
        """
        if not 0 <= rank < world:
            raise ValueError(f"rank must be in [0, {world}); found {rank}")
        for name in (token, *files):
            if not re.fullmatch(r"[A-Za-z0-9_.\-]+", name):
                raise ValueError(f"tokens and file names are letters, digits and ._-; found {name!r}")
        keys = {name: f"{PARTS}{ref.name}/r{rank:05d}-{token}-{name}" for name in files}
        parts = tuple(Part.of(keys[name], content, self.chunk_nbytes) for name, content in files.items())
        for name, content in files.items():
            self.store.put(keys[name], content)
        index = {name: {**entry, "chunks": [{**c, "part": keys[c["part"]]} for c in entry["chunks"]]} for name, entry in tensors.items()}
        # Through JSON and back, so that what we return equals what others will read (tuples are lists then).
        mine = PartList.from_json(PartList(ref, rank, world, token, parts, index, data).to_json())
        if self.store.create(_list_key(ref, rank), mine.to_json().encode()):
            return mine
        try:
            return PartList.from_json(self.store.get(_list_key(ref, rank)))
        except NotFound:  # pruned meanwhile, so something newer is committed; `commit` will say None
            return mine

    def commit(self, ref: Ref, world: int) -> Manifest | None:
        """Write the manifest if all `world` part lists are there. Anybody may call it, any number of times.

        The committed manifest, whoever committed it; None while lists are missing, or if the snapshot was pruned meanwhile.
        Raises SnapshotCorrupt if the lists contradict each other.
        """
        if world < 1:
            raise ValueError(f"a world has at least 1 rank; found {world}")
        keys = [_list_key(ref, rank) for rank in range(world)]
        try:
            present = set(self.store.list(f"{PARTS}{ref.name}/list-"))
            if not present.issuperset(keys):
                return self.load(ref)
            extra = present.difference(keys)
            if extra:
                raise SnapshotCorrupt(
                    f"snapshot {ref}: wanted part lists of {world} ranks, found also {', '.join(sorted(extra))}; "
                    "an epoch has one world: start a new epoch for another one"
                )
            manifest = Manifest.merge([PartList.from_json(self.store.get(key)) for key in keys])
            if not self.store.create(_manifest_key(ref), manifest.to_json().encode()):
                manifest = self.load(ref)
        except NotFound:  # not committed, or pruned while we read
            return None
        present = set(self.store.list(f"{PARTS}{ref.name}/"))
        if not present.issuperset(keys) or not present.issuperset(p.key for p in manifest.parts):
            self.store.delete(_manifest_key(ref))  # see the module's docstring
            return None
        return manifest

    # ---- reading ------------------------------------------------------------------------------------------------
    def refs(self) -> list[Ref]:
        """All committed snapshots that are not quarantined, newest first."""
        return sorted(_refs_in(self.store.list(MANIFESTS)) - self.quarantined(), reverse=True)

    def load(self, ref: Ref) -> Manifest:
        """Raises NotFound (not committed), SnapshotCorrupt, SnapshotTooNew."""
        manifest = Manifest.from_json(self.store.get(_manifest_key(ref)))
        if manifest.ref != ref:
            raise SnapshotCorrupt(f"snapshot {ref}: its manifest is that of {manifest.ref}; use an older snapshot")
        return manifest

    def check(self, manifest: Manifest) -> None:
        """All parts are there and have their sizes (one small request each). Raises SnapshotCorrupt."""
        for part in manifest.parts:
            try:
                found = self.store.size(part.key)
            except NotFound:
                raise SnapshotCorrupt(
                    f"snapshot {manifest.ref}: its manifest names {len(manifest.parts)} parts, {part.key} is gone; use an older snapshot"
                ) from None
            if found != part.nbytes:
                raise SnapshotCorrupt(
                    f"snapshot {manifest.ref}: {part.key} should have {part.nbytes} bytes, found {found}; use an older snapshot"
                )

    def verify(self, manifest: Manifest, progress: Callable[[int, int], None] | None = None) -> None:
        """Read and hash every byte. `progress(bytes done, bytes in all)`. Raises SnapshotCorrupt."""
        self.check(manifest)
        done = 0
        for part in manifest.parts:
            at_once = max(1, VERIFY_NBYTES // part.chunk_nbytes) * part.chunk_nbytes
            for start in range(0, part.nbytes, at_once):
                end = min(start + at_once, part.nbytes)
                self.read(manifest, part.key, start, end)
                done += end - start
                if progress is not None:
                    progress(done, manifest.nbytes)

    def read(self, manifest: Manifest, part_key: str, start: int, end: int) -> bytes:
        """Bytes [start, end) of a part, verified; whole hash chunks are fetched. Raises SnapshotCorrupt."""
        part = manifest.part(part_key)
        if not 0 <= start <= end <= part.nbytes:
            raise ValueError(f"{part_key} has bytes [0, {part.nbytes}); wanted [{start}, {end})")
        if start == end:
            return b""
        size = part.chunk_nbytes
        first, last = start // size, -(-end // size)
        low, high = first * size, min(last * size, part.nbytes)
        try:
            found = self.store.get(part_key, low, high)
        except NotFound:
            raise SnapshotCorrupt(f"snapshot {manifest.ref}: {part_key} is gone; use an older snapshot") from None
        if len(found) != high - low:
            raise SnapshotCorrupt(
                f"snapshot {manifest.ref}: {part_key} should have bytes [{low}, {high}), found {len(found)} of them; use an older snapshot"
            )
        view = memoryview(found)
        for i in range(first, last):
            if chunk_hash(view[i * size - low : (i + 1) * size - low]) != part.hashes[i]:
                raise SnapshotCorrupt(
                    f"snapshot {manifest.ref}: {part_key}, bytes from {i * size}: hash differs from what was written; use an older snapshot"
                )
        return found if (low, high) == (start, end) else bytes(view[start - low : end - low])

    def latest(self, on_bad: OnBad | None = None) -> Manifest | None:
        """The newest snapshot whose manifest is good and whose parts have their sizes; None if there is none.

        Bad ones are quarantined, told to `on_bad(ref, why)`, and passed over. StoreUnavailable travels: silence proves nothing.
        """
        refs, doubted = self.refs(), None
        while refs:
            ref = refs.pop(0)
            try:
                manifest = self.load(ref)
                self.check(manifest)
                return manifest
            except NotFound:  # pruned since we listed it: so there is a newer one now, and going on would end too old
                refs = self.refs()
                continue
            except SnapshotCorrupt as e:
                why = str(e)
            # Look twice: a mark is for ever, one bad read is no proof, and if parts are gone because somebody prunes then
            # the manifest, which goes first, is gone by now.
            if doubted != ref:
                doubted = ref
                refs.insert(0, ref)
                continue
            try:
                self.quarantine(ref, why)
            except StoreUnavailable:
                raise
            except StoreError as e:  # a reader without the right to write can still use an older one
                why = f"{why} (and it could not be marked: {e})"
            if on_bad is not None:
                on_bad(ref, why)
        return None

    # ---- marking and deleting -----------------------------------------------------------------------------------
    def quarantine(self, ref: Ref, why: str) -> None:
        """Never use this snapshot again. The first reason stays."""
        self.store.create(f"{QUARANTINE}{ref.name}.json", canonical({"ref": ref.name, "why": why}))

    def quarantined(self) -> set[Ref]:
        """Marked snapshots; `why` says why."""
        return _refs_in(self.store.list(QUARANTINE))

    def why(self, ref: Ref) -> str:
        """Why a snapshot is quarantined. Raises NotFound."""
        found = self.store.get(f"{QUARANTINE}{ref.name}.json")
        try:
            return str(json.loads(found)["why"])
        except (ValueError, KeyError, TypeError):
            return "its mark is unreadable"

    def prune(self, keep: Policy, on_bad: OnBad | None = None) -> list[Ref]:
        """Delete what `keep` does not keep, and the parts of abandoned attempts. Returns the refs deleted, newest first.

        Never touches the newest whole snapshot, or anything newer (it may be being written). Quarantined ones go when they are
        older than all that stay. Safe to repeat after an error, and beside writers, readers and other pruners.
        """
        newest = self.latest(on_bad)
        if newest is None:
            return []
        objects: dict[Ref, list[str]] = defaultdict(list)
        for key in self.store.list(PARTS):  # before the manifests: a snapshot committed in between is not taken for an orphan
            ref = _ref_in(key)
            if ref is not None:
                objects[ref].append(key)
        committed, marked = _refs_in(self.store.list(MANIFESTS)), self.quarantined()
        candidates = {ref for ref in committed - marked if ref <= newest.ref}
        stay = (set(keep(candidates)) & candidates) | {newest.ref}
        oldest = min(stay)
        gone = [
            ref
            for ref in sorted(committed | set(objects), reverse=True)
            if ref < newest.ref and ref not in stay and (ref not in marked or ref < oldest)
        ]
        for ref in gone:
            self._delete(ref, objects[ref])
        return gone

    def _delete(self, ref: Ref, keys: list[str]) -> None:
        lists = [key for key in keys if key.startswith(f"{PARTS}{ref.name}/list-")]
        for key in lists:
            self.store.delete(key)
        self.store.delete(_manifest_key(ref))
        for key in keys:
            if key not in lists:
                self.store.delete(key)
        # Once more: a part list that was written after we listed lets a commit look before the parts were gone.
        self.store.delete(_manifest_key(ref))


def _list_key(ref: Ref, rank: int) -> str:
    return f"{PARTS}{ref.name}/list-r{rank:05d}.json"


def _manifest_key(ref: Ref) -> str:
    return f"{MANIFESTS}{ref.name}.json"


def _ref_in(key: str) -> Ref | None:
    """Foreign objects (editors' backups, directory markers) name no snapshot and are left alone."""
    try:
        return Ref.parse(key.split("/")[2].removesuffix(".json"))
    except ValueError:
        return None


def _refs_in(keys: list[str]) -> set[Ref]:
    return {ref for ref in map(_ref_in, keys) if ref is not None}
