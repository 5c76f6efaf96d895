"""Snapshots: the commit protocol, the newest valid one, verified reads, quarantine, pruning.

No torch, no threads, no clock, no randomness: it runs unchanged in the deterministic simulation.
Any caller may die between any two store calls, and any number of callers may do anything at once;
what holds is:

    write   parts, under names of this attempt only -> this rank's part list (create-only)
    commit  all ranks' part lists -> look that no base is doomed -> the manifest (create-only, the
            same bytes whoever writes it) -> look that nothing was pruned
    read    manifests only; every byte is hashed; what is bad is passed over. Whether it is the
            snapshot that is bad or who reads it is judged by `storage/restore.py`, which alone
            marks
    prune   of snapshots older than the newest whole one: doom (create-only, for good) -> look who
            reads -> part lists -> manifest -> look who refers -> parts that nobody refers to ->
            manifest again

Part lists go first in `prune` and are looked at again at the end of `commit`. So of a late commit
and a prune of the same snapshot either the commit sees that the lists are gone and takes its
manifest back, or the prune deletes that manifest.

Chunks of a part may lie in objects of an older snapshot, its base. A base is doomed before the
prune looks who refers to its objects, and is looked at after the part lists that refer to them are
there. So either the commit sees that the base is doomed, or the prune sees the part lists. The same
with who reads: they say so, and then look whether the snapshot is doomed.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any

from storage.errors import NotFound, StoreUnavailable
from storage.groups import GROUP_RANKS, gather, read_all
from storage.json_text import canonical
from storage.manifest import PARTS as PARTS
from storage.manifest import Manifest, Part, PartList, Ref, SnapshotCorrupt
from storage.marks import mark, why_of
from storage.objects import ObjectStore, read_into, size_each
from storage.parts import CHUNK_NBYTES, Known, is_hash_of
from storage.pruning import Expired, KeepPolicy, OnBad, Pruner
from storage.snapshot_keys import (
    DOOM,
    MANIFESTS,
    QUARANTINE,
    READING,
    doubts_of,
    ended_key,
    host_word,
    lease_key,
    list_key,
    manifest_key,
    part_prefix,
    quarantine_key,
    ref_in,
    refs_in,
)

VERIFY_NBYTES = 32 << 20  # read at once by `verify`
# times that one snapshot may be listed and then not be found, before the store is said to
# contradict itself
RELISTS = 5
# of an object must be referred to, or its chunks are stored again: nothing old is kept for the sake
# of a little
WORTH = 0.5

Memory = Callable[[int], memoryview]


class Snapshots:
    """The snapshots of one run. `store` is rooted at the run's URL."""

    pruner = Pruner
    group_ranks = GROUP_RANKS

    def __init__(self, store: ObjectStore, chunk_nbytes: int = CHUNK_NBYTES):
        self.store, self.chunk_nbytes = store, chunk_nbytes
        # of committed snapshots, which never change
        self._refers: dict[Ref, frozenset[str]] = {}
        self._told: dict[Ref, Mapping[str, Any]] = {}

    # ---- writing ---------------------------------------------------------------------------------
    def write(
        self,
        ref: Ref,
        rank: int,
        world: int,
        files: Mapping[str, bytes | memoryview],
        tensors: dict[str, Any],
        data: dict[str, Any] | Callable[[], dict[str, Any]],
        token: str,
        base: Manifest | None = None,
        hashed: Mapping[str, Mapping[int, str]] | None = None,
    ) -> PartList:
        """Store what one rank has of a snapshot, and return the part list that stands for that
        rank.

        files:   name -> bytes. tensors: index whose chunks say `"part": <file name>`. data: plain
                 JSON, or what makes it, called when the parts are put (which a store may do in the
                 background).
        token:   unique to this attempt (and the same when it is repeated after StoreUnavailable,
                 which is safe).
        base:    the newest committed snapshot that the caller knows of; chunks that it has are not
                 stored again. If it is pruned before the commit, nothing is committed.
        hashed:  file name -> chunk -> its hash, of chunks that the caller has hashed before.
        The list returned is an earlier attempt's if that one was first; then our parts are garbage
        that `prune` collects.
        """
        if not 0 <= rank < world:
            raise ValueError(f"rank must be in [0, {world}); found {rank}")
        for name in (token, *files):
            if not re.fullmatch(r"[A-Za-z0-9_.\-]+", name):
                raise ValueError(
                    f"tokens and file names are letters, digits and ._-; found {name!r}"
                )
        keys = {name: f"{part_prefix(ref, rank)}{token}-{name}" for name in files}
        base = base if base is not None and base.ref < ref else None
        parts = tuple(
            Part.of(keys[name], content, self.chunk_nbytes, (hashed or {}).get(name))
            for name, content in files.items()
        )
        if base is not None:
            known = _worth(base.known, parts)
            parts = tuple(part.referring(known) for part in parts)
        for part, content in zip(parts, files.values(), strict=True):
            at = 0
            for place in part.stored():
                if place.key.startswith(part.key):
                    self.store.put(
                        place.key,
                        memoryview(content)[at : at + place.nbytes] if part.places else content,
                    )
                at += place.nbytes
        index = {
            name: {**entry, "chunks": [{**c, "part": keys[c["part"]]} for c in entry["chunks"]]}
            for name, entry in tensors.items()
        }
        data = data() if callable(data) else data
        # Through JSON and back, so that what we return equals what others will read (tuples are
        # lists then).
        mine = PartList.from_json(
            PartList(
                ref, rank, world, token, parts, index, data, base.link if base else None
            ).to_json()
        )
        if self.store.create(list_key(ref, rank), mine.to_json().encode()):
            return mine
        try:
            return PartList.from_json(self.store.get(list_key(ref, rank)))
        except NotFound:
            # pruned meanwhile, so something newer is committed; `commit` will say None
            return mine

    def commit(self, ref: Ref, world: int, rank: int | None = None) -> Manifest | None:
        """Write the manifest if all `world` part lists are there. Anybody may call it, any number
        of times. `rank`: of a world of many, do that rank's part of the work only
        (storage/groups.py); when it has waited long, None does all.

        The committed manifest, whoever committed it; None while lists are missing, or if the
        snapshot or its base was pruned meanwhile (then `hopeless` says so). Raises SnapshotCorrupt
        if the lists contradict each other.
        """
        if world < 1:
            raise ValueError(f"a world has at least 1 rank; found {world}")
        keys = [list_key(ref, r) for r in range(world)]
        many = world > self.group_ranks
        try:
            lists = (
                gather(self.store, ref, keys, self.group_ranks, rank)
                if many
                else self._lists(ref, keys)
            )
            if lists is None:
                return self._found(ref, keys, rank if many else None)
            manifest = Manifest.merge(lists)
            if not self.stay(manifest.bases) or not self.store.create(
                manifest_key(ref), manifest.to_json().encode()
            ):
                manifest = self.load(ref)
        except NotFound:  # not committed, or pruned while we read
            return None
        return self._stays(manifest, keys)

    def _lists(self, ref: Ref, keys: list[str]) -> list[PartList] | None:
        """All part lists, if they are there. Raises SnapshotCorrupt if there are more."""
        present = set(self.store.list(f"{PARTS}{ref.name}/list-"))
        if not present.issuperset(keys):
            return None
        extra = present.difference(keys)
        if extra:
            raise SnapshotCorrupt(
                f"snapshot {ref}: wanted part lists of {len(keys)} ranks, found also "
                f"{', '.join(sorted(extra))}; an epoch has one world: start a new epoch for "
                "another one"
            )
        return [PartList.from_json(text) for text in read_all(self.store, keys)]

    def _found(self, ref: Ref, keys: list[str], rank: int | None) -> Manifest | None:
        """The manifest that another committed. Raises NotFound. `rank`: of many, which leaves it
        to whoever wrote the manifest to look whether all that it names is there."""
        manifest = self.load(ref)
        return manifest if rank is None or self.store.list(keys[rank]) else None

    def _stays(self, manifest: Manifest, keys: list[str]) -> Manifest | None:
        """Is all that a manifest names still there, now that it is written? Else it is taken
        back: see the module's docstring."""
        ref = manifest.ref
        present = set(self.store.list(f"{PARTS}{ref.name}/"))
        if not present.issuperset(keys) or not present.issuperset(
            manifest.objects.keys() - manifest.refers
        ):
            if not self.store.list(manifest_key(ref)) and ref not in self.manifests()[1]:
                raise StoreUnavailable(
                    f"snapshot {ref}: {self.store.url} does not list its manifest, which is "
                    "written: ask again later"
                )
            self.store.delete(manifest_key(ref))
            return None
        return manifest

    def stay(self, bases: Collection[Ref]) -> bool:
        """Are they committed, not doomed, not quarantined? To be asked when what refers to them
        is there for all to see."""
        if not bases:
            return True
        committed, doomed = self.manifests()
        return committed.difference(doomed).difference(self.quarantined()).issuperset(bases)

    def hopeless(self, ref: Ref, base: Ref | None) -> bool:
        """Can a snapshot that is not committed yet never be, since it or its base was pruned or
        quarantined?"""
        _, doomed = self.manifests()
        return ref in doomed or not (base is None or self.stay([base]))

    # ---- reading ---------------------------------------------------------------------------------
    def refs(self) -> list[Ref]:
        """All committed snapshots that are neither doomed nor quarantined, newest first."""
        committed, doomed = self.manifests()
        return sorted(committed - doomed - self.quarantined(), reverse=True)

    def manifests(self) -> tuple[set[Ref], set[Ref]]:
        """Committed snapshots and doomed ones, of one moment."""
        keys = self.store.list(MANIFESTS)
        return refs_in(k for k in keys if k.endswith(".json")), refs_in(
            k.removesuffix(DOOM) for k in keys if k.endswith(DOOM)
        )

    def load(self, ref: Ref) -> Manifest:
        """Raises NotFound (not committed), SnapshotCorrupt, SnapshotTooNew."""
        manifest = Manifest.from_json(self.store.get(manifest_key(ref)))
        if manifest.ref != ref:
            raise SnapshotCorrupt(
                f"snapshot {ref}: its manifest is that of {manifest.ref}; use an older snapshot"
            )
        return manifest

    def check(self, manifest: Manifest) -> None:
        """All parts are there and have their sizes (one small request each). Raises
        SnapshotCorrupt."""
        with contextlib.closing(size_each(self.store, manifest.objects)) as sizes:
            for key, found in sizes:
                if found is None:
                    raise SnapshotCorrupt(
                        f"snapshot {manifest.ref}: its manifest names {len(manifest.objects)} "
                        f"objects, {key} is gone; use an older snapshot"
                    )
                if found != manifest.objects[key]:
                    raise SnapshotCorrupt(
                        f"snapshot {manifest.ref}: {key} should have {manifest.objects[key]} "
                        f"bytes, found {found}; use an older snapshot"
                    )

    def verify(
        self, manifest: Manifest, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Read and hash every byte; look that the manifest before it in the chain, if it is still
        there, is the one that it was.

        `progress(bytes done, bytes in all)`. Raises SnapshotCorrupt.
        """
        self.check(manifest)
        if manifest.previous is not None:
            broken = False
            with contextlib.suppress(NotFound, SnapshotCorrupt):  # pruned, or damaged itself
                found_hash = self.load(manifest.previous.ref).hash
                broken = found_hash != manifest.previous.hash
            if broken:
                raise SnapshotCorrupt(
                    f"snapshot {manifest.ref} follows {manifest.previous.ref} with the hash "
                    f"{manifest.previous.hash}, which now has {found_hash}: one of the two "
                    "manifests is of another run; use an older snapshot"
                )
        done, memory = 0, scratch()
        for part in manifest.parts:
            at_once = max(1, VERIFY_NBYTES // part.chunk_nbytes) * part.chunk_nbytes
            for start in range(0, part.nbytes, at_once):
                end = min(start + at_once, part.nbytes)
                self.read_into(manifest, part.key, start, end, memory)
                done += end - start
                if progress is not None:
                    progress(done, manifest.nbytes)

    def read(self, manifest: Manifest, part_key: str, start: int, end: int) -> bytes:
        """Bytes [start, end) of a part, verified; whole hash chunks are fetched. Raises
        SnapshotCorrupt."""
        return bytes(self.read_into(manifest, part_key, start, end, _fresh))

    def read_into(
        self, manifest: Manifest, part_key: str, start: int, end: int, memory: Memory
    ) -> memoryview:
        """The same, in memory that the caller has and may use again: `memory(nbytes)` gives at
        least so many writable bytes."""
        part = manifest.part(part_key)
        if not 0 <= start <= end <= part.nbytes:
            raise ValueError(f"{part_key} has bytes [0, {part.nbytes}); wanted [{start}, {end})")
        if start == end:
            return memoryview(b"")
        size = part.chunk_nbytes
        first, last = start // size, -(-end // size)
        low, high = first * size, min(last * size, part.nbytes)
        view = memory(high - low)[: high - low]
        at = 0
        for key, from_, to in part.locate(low, high):
            try:
                found = read_into(self.store, key, from_, view[at : at + to - from_])
            except NotFound:
                raise SnapshotCorrupt(
                    f"snapshot {manifest.ref}: {key} is gone; use an older snapshot"
                ) from None
            if found != to - from_:
                raise SnapshotCorrupt(
                    f"snapshot {manifest.ref}: {key} should have bytes [{from_}, {to}), found "
                    f"{found} of them; use an older snapshot"
                )
            at += found
        for i in range(first, last):
            if not is_hash_of(part.hashes[i], view[i * size - low : (i + 1) * size - low]):
                raise SnapshotCorrupt(
                    f"snapshot {manifest.ref}: {part_key}, bytes from {i * size}: hash differs "
                    "from what was written; use an older snapshot"
                )
        return view[start - low : end - low]

    def ended(self, manifest: Manifest) -> str:
        """Why this is the run's last snapshot, in words; "": it is not, as far as anybody has
        said. One small request at most."""
        if manifest.data.get("final"):
            return str(manifest.data.get("ended") or "finished")
        try:
            return why_of(self.store.get(ended_key(manifest.ref)), "finished")
        except NotFound:
            return ""

    def end(self, ref: Ref, why: str) -> None:
        """Say that the run has ended with this committed snapshot. The first word stays."""
        self.store.create(ended_key(ref), mark(ref, why))

    def latest(self, on_bad: OnBad | None = None) -> Manifest | None:
        """The newest snapshot whose manifest is good and whose parts have their sizes; None if
        there is none.

        Bad ones are told to `on_bad(ref, why)` and passed over. Nothing is marked: who only looks
        cannot tell a bad snapshot from a bad look (`storage/restore.py` can). StoreUnavailable
        travels: silence proves nothing, nor does a store that lists what it does not find.
        """
        refs, doubted, passed, lost = self.refs(), None, set[Ref](), Counter[Ref]()
        while refs:
            ref = refs.pop(0)
            try:
                manifest = self.load(ref)
                self.check(manifest)
                return manifest
            except NotFound as e:
                # pruned since we listed it: so there is a newer one now, and going on would end too
                # old
                lost[ref] += 1
                if lost[ref] > RELISTS:
                    raise StoreUnavailable(
                        f"snapshot {ref} is listed, and not found: the store contradicts itself"
                    ) from e
                refs = [r for r in self.refs() if r not in passed]
                continue
            except SnapshotCorrupt as e:
                why = str(e)
            # Look twice: if parts are gone because somebody prunes then the manifest, which goes
            # first, is gone by now.
            if doubted != ref:
                doubted = ref
                refs.insert(0, ref)
                continue
            passed.add(ref)
            if on_bad is not None:
                on_bad(ref, why)
        return None

    # ---- marking and deleting --------------------------------------------------------------------
    def quarantine(self, ref: Ref, why: str) -> None:
        """Do not use this snapshot (until somebody reads it whole and takes the mark back). The
        first reason stays."""
        self.store.create(quarantine_key(ref), mark(ref, why))

    def pardon(self, ref: Ref) -> None:
        """It was read whole: take its mark back, and what was said against it."""
        self.unmark(ref)
        for key in self.store.list(doubts_of(ref)):
            self.store.delete(key)

    def unmark(self, ref: Ref) -> None:
        """Take the mark back; what hosts said stays."""
        self.store.delete(quarantine_key(ref))

    def doubt(self, ref: Ref, host: str, why: str) -> None:
        """A host says that it cannot read it whole. Alone that is no proof: two hosts' word is."""
        self.store.create(
            f"{doubts_of(ref)}{host_word(host)}.json",
            mark(ref, why, host=host),
        )

    def doubters(self, ref: Ref) -> set[str]:
        """Hosts that could not read it whole, as `doubt` names them in keys."""
        prefix = doubts_of(ref)
        return {key.removeprefix(prefix).removesuffix(".json") for key in self.store.list(prefix)}

    def quarantined(self) -> set[Ref]:
        """Marked snapshots; `why` says why."""
        return refs_in(self.store.list(QUARANTINE))

    def why(self, ref: Ref) -> str:
        """Why a snapshot is quarantined. Raises NotFound."""
        found = self.store.get(quarantine_key(ref))
        return why_of(found, "its mark is unreadable")

    def prune(
        self,
        keep: KeepPolicy,
        on_bad: OnBad | None = None,
        expired: Expired = lambda key, beat: False,
    ) -> list[Ref]:
        """Delete what `keep` does not keep, and the parts of abandoned attempts. Returns the refs
        deleted, newest first.

        Never touches the newest whole snapshot, or anything newer (it may be being written), or one
        that is being read, or what others refer to, or a snapshot of a greater step than the newest
        one's: that is work which the new line of training has still to do again. Quarantined ones
        go when they are older than all that stay. Safe to repeat after an error, and beside
        writers, readers and other pruners. `expired(lease, beat)`: is whoever wrote that lease
        surely dead? (`leases.Watch`)
        """
        return self.pruner(self, self._refers, self._told).prune(keep, on_bad, expired)

    # ---- who reads -------------------------------------------------------------------------------
    def begin_reading(self, ref: Ref, token: str) -> bool:
        """Ask that it is not pruned while we read it: `leases.reading` does, and goes on
        asking. False: it is doomed already."""
        self.still_reading(ref, token, 0)
        committed, doomed = self.manifests()
        if ref in committed and ref not in doomed:
            return True
        self.end_reading(ref, token)
        return False

    def still_reading(self, ref: Ref, token: str, beat: int) -> None:
        """`beat` grows: a lease that stands still is a dead reader's."""
        self.store.put(lease_key(ref, token), canonical({"ref": ref.name, "beat": beat}))

    def end_reading(self, ref: Ref, token: str) -> None:
        self.store.delete(lease_key(ref, token))

    def being_read(self, expired: Expired = lambda key, beat: False) -> set[Ref]:
        """Snapshots that somebody reads; leases of the dead are removed."""
        found = set()
        for key in self.store.list(READING):
            ref = ref_in(key.rpartition("/")[0])
            if ref is None:
                continue
            try:
                beat = self.store.get(key)
            except NotFound:
                continue
            if expired(key, beat):
                self.store.delete(key)
            else:
                found.add(ref)
        return found


def _fresh(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))


def scratch() -> Memory:
    """Memory that is used again and again, for one thread: new memory costs a page fault every
    4 KiB."""
    have = memoryview(bytearray())

    def memory(nbytes: int) -> memoryview:
        nonlocal have
        if len(have) < nbytes:
            have = memoryview(bytearray(nbytes))
        return have

    return memory


def _worth(known: Known, parts: Collection[Part]) -> Known:
    """Without the objects of which little would be referred to."""
    found = {
        chunk: known[chunk]
        for p in parts
        for i, h in enumerate(p.hashes)
        if (chunk := (h, p.chunk_nbytes_of(i))) in known
    }
    used: defaultdict[str, int] = defaultdict(int)
    for place in found.values():
        used[place.key] += place.nbytes
    return {chunk: place for chunk, place in found.items() if used[place.key] >= WORTH * place.of}
