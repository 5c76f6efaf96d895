"""Snapshots: the commit protocol, the newest valid one, verified reads, quarantine, pruning.

No torch, no threads, no clock, no randomness: it runs unchanged in the deterministic simulation.
Any caller may die between any two store calls, and any number of callers may do anything at once.
The protocol:

    write   parts, under names of this attempt only -> this rank's part list (create-only)
    commit  all ranks' part lists -> check that no base is doomed -> the manifest (create-only, the
            same bytes whoever writes it) -> check that nothing was pruned
    read    manifests only; every byte is hashed; bad snapshots are passed over. Only
            `storage/snapshots/restore.py` judges whether the snapshot or its reader is bad, and
            marks it
    prune   of snapshots older than the newest whole one: doom (create-only, permanent) -> check
            leases -> part lists -> manifest -> check who refers -> parts that nobody refers to ->
            manifest again

`prune` deletes part lists first, and `commit` checks them again at its end. So of a late commit and
a prune of the same snapshot, either the commit sees that the lists are gone and takes its manifest
back, or the prune deletes that manifest.

Chunks of a part may lie in objects of an older snapshot, its base. `prune` dooms a base before it
checks who refers to its objects; `commit` checks the base after the part lists that refer to it
exist. So either the commit sees that the base is doomed, or the prune sees the part lists. Readers
do the same: they write a lease, and then check whether the snapshot is doomed.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from storage.canonical_json import BadObject, canonical, parsed
from storage.errors import NotFound, StoreUnavailable
from storage.snapshots.manifest import (
    CHUNK_NBYTES,
    PARTS,
    Known,
    Manifest,
    Part,
    PartList,
    Ref,
    SnapshotCorrupt,
    chunk_hash,
)
from storage.snapshots.retention import Expired, KeepPolicy, OnBad, Pruner
from storage.snapshots.snapshot_keys import (
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
from storage.stores.objects import ObjectStore, get_each, read_into, size_each

# Part lists of many ranks, merged group by group, so that the commit of a big world is a small
# merge.

GROUP_RANKS = 100  # part lists in one object; worlds of at most this size need no groups


def groups(world: int, size: int) -> Iterator[range]:
    """Return the ranks of each group, as ranges."""
    return (range(first, min(first + size, world)) for first in range(0, world, size))


def read_all(store: ObjectStore, keys: Sequence[str]) -> list[bytes]:
    """Read several objects, as many at once as the store benefits from. Raises NotFound."""
    found = []
    with contextlib.closing(get_each(store, keys)) as coming:
        for key, data in coming:
            if data is None:
                raise NotFound(f"{store.url}/{key}")
            found.append(data)
    return found


def whole_lists(store: ObjectStore, keys: Sequence[str]) -> list[bytes]:
    """Read several part lists, as bytes. Raises NotFound, SnapshotCorrupt."""
    found = read_all(store, keys)
    for data in found:
        PartList.from_json(data)
    return found


def gather(
    store: ObjectStore, ref: Ref, list_keys: Sequence[str], size: int, rank: int | None
) -> list[PartList] | None:
    """Return all part lists of a snapshot, or None if some are missing. `list_keys`: by rank.

    Writes the object of the group that begins with `rank`; None writes those of all groups. Ranks
    other than 0 get None, since writing that object is all that they have to do.
    """
    wanted = list(groups(len(list_keys), size))
    if rank is not None and rank % size:
        return None
    folder = list_keys[0].rpartition("/")[0]
    keys = [f"{folder}/group-r{ranks[0]:05d}.json" for ranks in wanted]
    there = set(store.list(f"{folder}/group-"))
    for ranks, key in zip(wanted, keys, strict=True):
        if key not in there and rank in (None, ranks[0]):
            mine = [list_keys[r] for r in ranks]
            if set(store.list(_beginning(mine[0], mine[-1]))).issuperset(mine):
                store.create(key, b"\n".join(whole_lists(store, mine)))
                there.add(key)
    if rank or not there.issuperset(keys):
        return None
    found = read_all(store, keys)
    return [PartList.from_json(line) for data in found for line in data.split(b"\n")]


def _beginning(first: str, last: str) -> str:
    """Return the common beginning of two keys of equal length and of all keys between them."""
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=True)) if a != b), None)
    return first[:same]


# Marks beside snapshots: why a run ended with one, why one is quarantined, who doubts one.

LONGEST = 4000  # characters of a reason
MOST_NBYTES = 64 << 10


def mark(ref: Ref, why: str, **more: Any) -> bytes:
    """Return the content of a mark as it is stored in the bucket."""
    return canonical({"ref": ref.name, **more, "why": why[:LONGEST]})


def why_of(data: bytes, unsaid: str) -> str:
    """Return the reason that a mark gives, or `unsaid` if it gives none."""
    try:
        body = parsed(data, most_nbytes=MOST_NBYTES)
    except BadObject:
        return unsaid
    why = body.get("why") if isinstance(body, dict) else None
    return why[:LONGEST] if isinstance(why, str) and why.strip() else unsaid


VERIFY_NBYTES = 32 << 20  # bytes that `verify` reads at once
# how often one snapshot may be listed but not found before the store counts as contradicting itself
RELISTS = 5
# share of an object that must be referred to; otherwise its chunks are stored again, so that no old
# object is kept for the sake of a little
WORTH = 0.5

Memory = Callable[[int], memoryview]


class Snapshots:
    """The snapshots of one run. `store` is rooted at the run's URL."""

    pruner = Pruner
    group_ranks = GROUP_RANKS

    def __init__(self, store: ObjectStore, chunk_nbytes: int = CHUNK_NBYTES):
        self.store, self.chunk_nbytes = store, chunk_nbytes
        # caches of committed snapshots, which never change
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
        """Store this rank's share of a snapshot and return the part list that stands for it.

        files:   name -> bytes. tensors: index whose chunks say `"part": <file name>`. data: plain
                 JSON, or a function that returns it, called when the parts are put (which a store
                 may do in the background).
        token:   unique to this attempt (and the same when it is repeated after StoreUnavailable,
                 which is safe).
        base:    the newest committed snapshot that the caller knows of; chunks that it has are not
                 stored again. If it is pruned before the commit, nothing is committed.
        hashed:  file name -> chunk -> its hash, for chunks that the caller has hashed before.

        If an earlier attempt was first, its list is returned; then our parts are garbage that
        `prune` collects.
        """
        keys = _keys(ref, rank, world, files, token)
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
        data = data() if callable(data) else data
        # Through JSON and back, so that the result equals what others will read (tuples become
        # lists).
        mine = PartList.from_json(
            PartList(
                *(ref, rank, world, token, parts, _index(tensors, keys), data),
                base.link if base else None,
            ).to_json()
        )
        if self.store.create(list_key(ref, rank), mine.to_json().encode()):
            return mine
        try:
            return PartList.from_json(self.store.get(list_key(ref, rank)))
        except NotFound:
            # pruned meanwhile, so something newer is committed; `commit` will return None
            return mine

    def list_of(
        self,
        ref: Ref,
        rank: int,
        world: int,
        files: Mapping[str, memoryview],
        tensors: dict[str, Any],
        data: dict[str, Any],
        token: str,
    ) -> PartList:
        """Return the part list of a share that is not stored in the bucket. Arguments are those of
        `write`."""
        keys = _keys(ref, rank, world, files, token)
        parts = tuple(Part.of(keys[name], one, self.chunk_nbytes) for name, one in files.items())
        return PartList(ref, rank, world, token, parts, _index(tensors, keys), data)

    def commit(self, ref: Ref, world: int, rank: int | None = None) -> Manifest | None:
        """Write the manifest if all `world` part lists exist. Anybody may call it, any number of
        times.

        Returns the committed manifest, whoever committed it; None while lists are missing, or if
        the snapshot or its base was pruned meanwhile (then `hopeless` is True). Raises
        SnapshotCorrupt if the lists contradict each other. `rank`: in a big world, do only that
        rank's part of the work (storage/snapshots/snapshots.py); None does all, for a caller that
        has waited
        long.
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
        """Return all part lists, or None if some are missing. Raises SnapshotCorrupt if there are
        more than `keys`."""
        present = set(self.store.list(f"{PARTS}{ref.name}/list-"))
        if not present.issuperset(keys):
            return None
        extra = present.difference(keys)
        if extra:
            raise SnapshotCorrupt(
                f"snapshot {ref}: wanted part lists of {len(keys)} ranks, found also "
                f"{', '.join(sorted(extra))}; a generation has one world: start a new one "
                "for another"
            )
        return [PartList.from_json(text) for text in read_all(self.store, keys)]

    def _found(self, ref: Ref, keys: list[str], rank: int | None) -> Manifest | None:
        """Return the manifest that another caller committed, or raise NotFound. `rank`: given in a
        big world, where the manifest's writer checks that everything it names exists."""
        manifest = self.load(ref)
        return manifest if rank is None or self.store.list(keys[rank]) else None

    def _stays(self, manifest: Manifest, keys: list[str]) -> Manifest | None:
        """Return the manifest if everything that it names still exists now that it is written;
        otherwise take it back and return None (see the module's docstring)."""
        ref, wanted = manifest.ref, {*keys, *manifest.objects.keys() - manifest.refers}

        def missing() -> bool:
            return not wanted.issubset(self.store.list(f"{PARTS}{ref.name}/"))

        if not missing():
            return manifest
        committed, doomed = self.manifests()
        if ref not in doomed:
            if ref not in committed:
                raise StoreUnavailable(
                    f"snapshot {ref}: {self.store.url} does not list its manifest, which is "
                    "written: ask again later"
                )
            if not missing():  # only the first listing lacked what is there
                return manifest
        self.store.delete(manifest_key(ref))
        return None

    def stay(self, bases: Collection[Ref]) -> bool:
        """Return whether these snapshots are committed and neither doomed nor quarantined. Call it
        when what refers to them is already visible to all."""
        if not bases:
            return True
        committed, doomed = self.manifests()
        return committed.difference(doomed).difference(self.quarantined()).issuperset(bases)

    def hopeless(self, ref: Ref, base: Ref | None) -> bool:
        """Return whether an uncommitted snapshot can never be committed, since it or its base was
        pruned or quarantined."""
        _, doomed = self.manifests()
        return ref in doomed or not (base is None or self.stay([base]))

    # ---- reading ---------------------------------------------------------------------------------
    def refs(self) -> list[Ref]:
        """Return all committed snapshots that are neither doomed nor quarantined, newest first."""
        committed, doomed = self.manifests()
        return sorted(committed - doomed - self.quarantined(), reverse=True)

    def manifests(self) -> tuple[set[Ref], set[Ref]]:
        """Return the committed and the doomed snapshots, both as of one moment."""
        keys = self.store.list(MANIFESTS)
        return refs_in(k for k in keys if k.endswith(".json")), refs_in(
            k.removesuffix(DOOM) for k in keys if k.endswith(DOOM)
        )

    def load(self, ref: Ref) -> Manifest:
        """Read a snapshot's manifest. Raises NotFound (not committed), SnapshotCorrupt,
        SnapshotTooNew."""
        manifest = Manifest.from_json(self.store.get(manifest_key(ref)))
        if manifest.ref != ref:
            raise SnapshotCorrupt(
                f"snapshot {ref}: its manifest is that of {manifest.ref}; use an older snapshot"
            )
        return manifest

    def check(self, manifest: Manifest) -> None:
        """Raise SnapshotCorrupt unless all objects exist with the right sizes (one small request
        each)."""
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
        """Read and hash every byte, and check that the preceding manifest in the chain, if it still
        exists, has the recorded hash.

        `progress(bytes done, bytes in all)`. Raises SnapshotCorrupt.
        """
        self.check(manifest)
        if manifest.previous is not None:
            broken = False
            # the preceding one was pruned, or is itself damaged
            with contextlib.suppress(NotFound, SnapshotCorrupt):
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
        """Return bytes [start, end) of a part, verified; whole hash chunks are fetched. Raises
        SnapshotCorrupt."""
        return bytes(self.read_into(manifest, part_key, start, end, _fresh))

    def read_into(
        self, manifest: Manifest, part_key: str, start: int, end: int, memory: Memory
    ) -> memoryview:
        """Read like `read`, into memory that the caller may reuse: `memory(nbytes)` returns at
        least that many writable bytes."""
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
            if chunk_hash(view[i * size - low : (i + 1) * size - low]) != part.hashes[i]:
                raise SnapshotCorrupt(
                    f"snapshot {manifest.ref}: {part_key}, bytes from {i * size}: hash differs "
                    "from what was written; use an older snapshot"
                )
        return view[start - low : end - low]

    def ended(self, manifest: Manifest) -> str:
        """Return why this is the run's last snapshot, or "" if nobody has recorded that it is.
        Makes at most one small request."""
        if manifest.data.get("final"):
            return str(manifest.data.get("ended") or "finished")
        try:
            return why_of(self.store.get(ended_key(manifest.ref)), "finished")
        except NotFound:
            return ""

    def end(self, ref: Ref, why: str) -> None:
        """Record that the run ended with this committed snapshot. The first record stays."""
        self.store.create(ended_key(ref), mark(ref, why))

    def latest(self, on_bad: OnBad | None = None) -> Manifest | None:
        """Return the newest snapshot whose manifest is good and whose parts have their sizes; None
        if there is none.

        Bad ones are reported to `on_bad(ref, why)` and passed over. Nothing is marked, since a
        reader alone cannot tell a bad snapshot from a bad read (`storage/snapshots/restore.py`
        can).
        StoreUnavailable is passed on: a missing answer proves nothing, nor does a store that lists
        what it does not find.
        """
        refs, doubted, passed, lost = self.refs(), None, set[Ref](), Counter[Ref]()
        while refs:
            ref = refs.pop(0)
            try:
                manifest = self.load(ref)
                self.check(manifest)
                return manifest
            except NotFound as e:
                # pruned since it was listed, so a newer one exists now; continuing would return one
                # that is too old
                lost[ref] += 1
                if lost[ref] > RELISTS:
                    raise StoreUnavailable(
                        f"snapshot {ref} is listed, and not found: the store contradicts itself"
                    ) from e
                refs = [r for r in self.refs() if r not in passed]
                continue
            except SnapshotCorrupt as e:
                why = str(e)
            # Check twice: if a prune removes parts, the manifest, which it deletes first, is gone
            # by now.
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
        """Mark a snapshot as not to be used (until somebody reads all of it and takes the mark
        back). The first reason stays."""
        self.store.create(quarantine_key(ref), mark(ref, why))

    def pardon(self, ref: Ref) -> None:
        """Remove the mark and all doubts of a snapshot that was read whole."""
        self.unmark(ref)
        for key in self.store.list(doubts_of(ref)):
            self.store.delete(key)

    def unmark(self, ref: Ref) -> None:
        """Remove the mark; the hosts' doubts stay."""
        self.store.delete(quarantine_key(ref))

    def doubt(self, ref: Ref, host: str, why: str) -> None:
        """Record that a host cannot read all of a snapshot. One host alone is no proof; two are."""
        self.store.create(
            f"{doubts_of(ref)}{host_word(host)}.json",
            mark(ref, why, host=host),
        )

    def doubters(self, ref: Ref) -> set[str]:
        """Return the hosts that could not read all of a snapshot, as `doubt` spells them."""
        prefix = doubts_of(ref)
        return {key.removeprefix(prefix).removesuffix(".json") for key in self.store.list(prefix)}

    def quarantined(self) -> set[Ref]:
        """Return the marked snapshots; `why` gives the reason."""
        return refs_in(self.store.list(QUARANTINE))

    def why(self, ref: Ref) -> str:
        """Return why a snapshot is quarantined. Raises NotFound."""
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

        Never deletes the newest whole snapshot, anything newer (it may be being written), one that
        is being read, what others refer to, or a snapshot of a greater step than the newest one's:
        the new line of training has yet to repeat that work. Quarantined ones are deleted when they
        are older than all that stay. Safe to repeat after an error, and to run beside writers,
        readers and other pruners. `expired(lease, beat)` returns whether the writer of that lease
        is surely dead (`reader_leases.Watch`).
        """
        return self.pruner(self, self._refers, self._told).prune(keep, on_bad, expired)

    # ---- leases ----------------------------------------------------------------------------------
    def begin_reading(self, ref: Ref, token: str) -> bool:
        """Write a lease that protects a snapshot from pruning while it is read;
        `reader_leases.reading` does so and renews it. Returns False if the snapshot is already
        doomed."""
        self.still_reading(ref, token, 0)
        committed, doomed = self.manifests()
        if ref in committed and ref not in doomed:
            return True
        self.end_reading(ref, token)
        return False

    def still_reading(self, ref: Ref, token: str, beat: int) -> None:
        """Renew the lease with a growing `beat`; an unchanged lease counts as a dead reader's."""
        self.store.put(lease_key(ref, token), canonical({"ref": ref.name, "beat": beat}))

    def end_reading(self, ref: Ref, token: str) -> None:
        self.store.delete(lease_key(ref, token))

    def being_read(self, expired: Expired = lambda key, beat: False) -> set[Ref]:
        """Return the snapshots that are being read; expired leases are removed."""
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
    """Return a function that hands out the same memory again and again, for one thread: new memory
    costs a page fault every 4 KiB."""
    have = memoryview(bytearray())

    def memory(nbytes: int) -> memoryview:
        nonlocal have
        if len(have) < nbytes:
            have = memoryview(bytearray(nbytes))
        return have

    return memory


def _keys(
    ref: Ref, rank: int, world: int, files: Iterable[str], token: str
) -> dict[str, str]:
    """Return the keys of the parts of a share, by file. Raises ValueError for bad ones."""
    if not 0 <= rank < world:
        raise ValueError(f"rank must be in [0, {world}); found {rank}")
    for name in (token, *files):
        if not re.fullmatch(r"[A-Za-z0-9_.\-]+", name):
            raise ValueError(f"tokens and file names are letters, digits and ._-; found {name!r}")
    return {name: f"{part_prefix(ref, rank)}{token}-{name}" for name in files}


def _index(tensors: dict[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """Return the index with keys of parts instead of names of files."""
    return {
        name: {**entry, "chunks": [{**c, "part": keys[c["part"]]} for c in entry["chunks"]]}
        for name, entry in tensors.items()
    }


def _worth(known: Known, parts: Collection[Part]) -> Known:
    """Return `known` without the objects of which only a small share would be referred to."""
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
