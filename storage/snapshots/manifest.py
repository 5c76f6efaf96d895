"""Manifests: what a snapshot consists of, and the hashes that prove it.

Pure: no store, no torch, no clock. A snapshot exists if and only if its manifest does. A manifest
depends on nothing but the part lists: the same lists always make the same bytes, whoever commits.

    PartList   what one rank wrote                    (snapshots/parts/{ref}/list-r00000.json)
    Manifest   all ranks' part lists, merged          (snapshots/manifests/{ref}.json)

Unknown fields are ignored but hashed with the rest. Errors:
    SnapshotCorrupt   bytes are not what was committed; use an older snapshot
    SnapshotTooNew    written by a newer version of this code; nothing is wrong with it, so nobody
                      may quarantine it
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, TypeVar

import blake3

from storage.canonical_json import BadObject, canonical, digest, parsed, whole
from storage.errors import StoreError
from storage.snapshots.tensor_hash import combined
from storage.stores.objects import checked_key

# Names for the bytes of a snapshot: refs, parts, the places that parts lie in, and hashes of
# chunks.

PARTS = "snapshots/parts/"  # prefix of all parts and part lists
CHUNK_NBYTES = 4 << 20  # one hash per chunk, which is the smallest verified read
MIN_GAP = 2  # chunks; see Part.referring
BLAKE3, HASH_NBYTES = "b3.", 16
HASH = re.escape(BLAKE3) + "[0-9a-f]{32}"  # hash of a chunk
# Limits beyond which a part counts as damaged. An object of 16 TiB in chunks of 4 MiB has that many
# chunks.
MOST_PART_NBYTES, MOST_CHUNKS = 1 << 50, 1 << 22
MOST_PART_JSON_NBYTES = 256 << 20


class SnapshotCorrupt(StoreError):
    """The stored bytes are not what was committed."""


def chunk_hash(data: bytes | memoryview) -> str:
    """Return the hash that identifies a chunk: "b3." and 32 hex digits, the first 128 bits of its
    BLAKE3.

    Nobody can make other bytes with the hash of given ones (2^128 tries). Whoever makes both may
    find two with the same hash (2^64 tries), which only a writer of the run could use.
    """
    return BLAKE3 + blake3.blake3(data).hexdigest(HASH_NBYTES)


@dataclass(frozen=True, order=True)
class Ref:
    """The name of a snapshot. The order is (generation, step), so a zombie of an older generation
    (the code's `epoch`) is never the newest, however far it ran."""

    epoch: int
    step: int

    @property
    def name(self) -> str:
        return f"{self.step:010d}-e{self.epoch:06d}"

    def __str__(self) -> str:
        return self.name

    @classmethod
    @functools.lru_cache(maxsize=4096)  # controllers read the same listing again and again
    def parse(cls, name: str) -> Ref:
        """Return the ref with this `name`. Raises ValueError."""
        found = re.fullmatch(r"([0-9]{10,})-e([0-9]{6,})", name)
        ref = cls(epoch=int(found[2]), step=int(found[1])) if found else None
        if ref is None or ref.name != name:
            raise ValueError(
                f"a snapshot is named like {cls(1, 200).name!r} (step-generation); found {name!r}"
            )
        return ref


@dataclass(frozen=True)
class StoredRange:
    """Bytes [start, start + nbytes) of the stored object `key`, which has `of` bytes."""

    key: str
    start: int
    nbytes: int
    of: int


Known = Mapping[
    tuple[str, int], StoredRange
]  # (hash, size) of a chunk -> where it is already stored


@dataclass(frozen=True)
class Part:
    """A file of a snapshot. `hashes[i]` covers bytes [i * chunk_nbytes, (i + 1) * chunk_nbytes).

    places: where its bytes lie, in order, cut between chunks: in objects of its own, or in those of
            older snapshots that had the same chunks. Empty: all of them in the object `key`.
    """

    key: str
    nbytes: int
    chunk_nbytes: int
    hashes: tuple[str, ...]
    places: tuple[StoredRange, ...] = ()

    @classmethod
    def of(
        cls,
        key: str,
        data: bytes | memoryview,
        chunk_nbytes: int = CHUNK_NBYTES,
        hashed: Mapping[int, str] | None = None,
    ) -> Part:
        """Return the part for `data`. `hashed`: hashes that are already known, by chunk."""
        view, hashed = memoryview(data).cast("B"), hashed or {}
        starts = range(0, len(view), chunk_nbytes)
        return cls(
            key,
            len(view),
            chunk_nbytes,
            tuple(
                hashed.get(i) or chunk_hash(view[start : start + chunk_nbytes])
                for i, start in enumerate(starts)
            ),
        )

    def stored(self) -> tuple[StoredRange, ...]:
        """Return `places`, or the one place in its own object if there are none."""
        return self.places or (StoredRange(self.key, 0, self.nbytes, self.nbytes),)

    def locate(self, start: int, end: int) -> Iterator[tuple[str, int, int]]:
        """Yield the bytes [start, end) as (object, start, end), in order."""
        at = 0
        for place in self.stored():
            low, high = max(start, at), min(end, at + place.nbytes)
            if low < high:
                yield place.key, place.start + low - at, place.start + high - at
            at += place.nbytes

    def chunk_nbytes_of(self, i: int) -> int:
        return min(self.chunk_nbytes, self.nbytes - i * self.chunk_nbytes)

    def known(self) -> Iterator[tuple[tuple[str, int], StoredRange]]:
        """Yield its chunks as entries of `Known`."""
        chunk, place_ends = 0, 0
        for place in self.stored():
            first, place_ends = place_ends, place_ends + place.nbytes
            while chunk < len(self.hashes) and chunk * self.chunk_nbytes < place_ends:
                n = self.chunk_nbytes_of(chunk)
                yield (
                    (self.hashes[chunk], n),
                    StoredRange(
                        place.key, place.start + chunk * self.chunk_nbytes - first, n, place.of
                    ),
                )
                chunk += 1

    def referring(self, known: Known, min_gap: int = MIN_GAP) -> Part:
        """Return the same part with its `known` chunks left where they are, and one object of its
        own for each run of other chunks.

        Fewer than `min_gap` known chunks between two others are stored again: they are not worth a
        request.
        """
        found = [known.get((h, self.chunk_nbytes_of(i))) for i, h in enumerate(self.hashes)]
        for here, run in itertools.groupby(range(len(found)), key=lambda i: found[i] is not None):
            chunks = list(run)
            if here and len(chunks) < min_gap and chunks[0] > 0 and chunks[-1] < len(found) - 1:
                for i in chunks:
                    found[i] = None
        if not any(found):
            return self
        places: list[StoredRange] = []
        for here, run in itertools.groupby(range(len(found)), key=lambda i: found[i] is not None):
            chunks = list(run)
            if not here:
                nbytes = sum(map(self.chunk_nbytes_of, chunks))
                places.append(StoredRange(f"{self.key}.{chunks[0]:05d}", 0, nbytes, nbytes))
                continue
            for i in chunks:
                place, last = found[i], places[-1] if places else None
                assert place is not None
                if (
                    last is not None
                    and last.key == place.key
                    and last.start + last.nbytes == place.start
                ):
                    places[-1] = replace(last, nbytes=last.nbytes + place.nbytes)
                else:
                    places.append(place)
        return replace(self, places=tuple(places))

    def to_dict(self) -> dict[str, Any]:
        body = {
            "key": self.key,
            "nbytes": self.nbytes,
            "chunk_nbytes": self.chunk_nbytes,
            "hashes": list(self.hashes),
        }
        return {**body, "places": [list(astuple(p)) for p in self.places]} if self.places else body

    @classmethod
    def from_dict(cls, body: Any) -> Part:
        """Parse a part. Raises BadObject."""
        found = fields_of(body, "key", "nbytes", "chunk_nbytes", "hashes")
        key, nbytes = part_key(found["key"]), whole(found["nbytes"], 0, MOST_PART_NBYTES)
        size, hashes = whole(found["chunk_nbytes"], 1, MOST_PART_NBYTES), found["hashes"]
        if not isinstance(hashes, list) or not all(
            isinstance(h, str) and re.fullmatch(HASH, h) for h in hashes
        ):
            raise BadObject(f"{key}: wanted a list of hashes, each like {chunk_hash(b'')!r}")
        if len(hashes) != -(-nbytes // size):
            raise BadObject(f"{key}: {len(hashes)} hashes do not fit {nbytes} bytes")
        places = found.get("places", [])
        if not isinstance(places, list):
            raise BadObject(f"{key}: wanted a list of places")
        part = cls(key, nbytes, size, tuple(hashes), tuple(map(_place, places)))
        if sum(p.nbytes for p in part.stored()) != nbytes or any(
            p.start + p.nbytes > p.of or p.of > MOST_CHUNKS * size for p in part.places
        ):
            raise BadObject(f"{key}: its places do not make up {nbytes} bytes")
        return part

    def to_json(self) -> str:
        return canonical(self.to_dict()).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Part:
        """Parse a part from JSON. Raises SnapshotCorrupt."""
        try:
            return cls.from_dict(parsed(text, most_nbytes=MOST_PART_JSON_NBYTES))
        except BadObject as e:
            found = f"{len(text)} bytes that are not ({e})"
            raise SnapshotCorrupt(f"wanted a part, found {found}; use an older snapshot") from e


@dataclass(frozen=True)
class Link:
    """A committed snapshot and the hash of its manifest."""

    ref: Ref
    hash: str

    def to_dict(self) -> dict[str, str]:
        return {"ref": self.ref.name, "hash": self.hash}

    @classmethod
    def from_dict(cls, body: Any) -> Link | None:
        """Parse a link; None gives None. Raises BadObject."""
        if body is None:
            return None
        found = fields_of(body, "ref", "hash")
        if not isinstance(found["hash"], str):
            raise BadObject("wanted the hash of a manifest as text")
        return cls(ref_of(found["ref"]), found["hash"])


def fields_of(body: Any, *names: str) -> dict[str, Any]:
    """Return `body` if it is an object with these fields. Raises BadObject."""
    if not isinstance(body, dict):
        raise BadObject(f"wanted an object with {', '.join(names)}, found {type(body).__name__}")
    if missing := [name for name in names if name not in body]:
        raise BadObject(f"wanted {', '.join(missing)}, found none")
    return body


def ref_of(name: Any) -> Ref:
    """Parse the name of a snapshot. Raises BadObject."""
    if not isinstance(name, str):
        raise BadObject(f"wanted the name of a snapshot, found {type(name).__name__}")
    try:
        return Ref.parse(name)
    except ValueError as e:
        raise BadObject(str(e)) from None


def part_key(key: Any) -> str:
    """Return `key` if it is a valid key of a part. Raises BadObject."""
    if not isinstance(key, str):
        raise BadObject(f"wanted the key of a part, found {type(key).__name__}")
    try:
        return checked_key(key, PARTS)
    except ValueError as e:
        raise BadObject(str(e)) from None


def _place(body: Any) -> StoredRange:
    if not isinstance(body, list) or len(body) != 4:
        raise BadObject("wanted a place as key, start, length and size of the object")
    key, *numbers = body
    return StoredRange(part_key(key), *(whole(n, 0, MOST_PART_NBYTES) for n in numbers))


# Names of chunks, made of hash and length.

CHUNK_ID = re.compile(HASH + "-[0-9]{1,12}")


def chunk_id(part: Part, i: int) -> str:
    """Return the name of chunk `i` of a part in every tier: its hash and its length in bytes."""
    return f"{part.hashes[i]}-{min(part.nbytes - i * part.chunk_nbytes, part.chunk_nbytes)}"


def is_chunk(id: str, data: bytes | memoryview) -> bool:
    wanted, _, nbytes = id.rpartition("-")
    return nbytes == str(len(data)) and chunk_hash(data) == wanted


# The format of manifests and part lists. Raise it when older code would misunderstand a new one.
FORMAT = 3
# Limits beyond which a manifest counts as damaged: 35 bytes for a chunk of 4 MiB, some hundred for
# each piece of a tensor; brackets of the user's own state.
MOST_MANIFEST_NBYTES, MOST_STATE_DEPTH = 1 << 30, 256
MOST_RANKS, MOST_DIMENSIONS = 1 << 20, 64

T = TypeVar("T")


class SnapshotTooNew(StoreError):
    """The snapshot was written by a newer version of this code."""


@dataclass(frozen=True)
class PartList:
    """The record of what one rank wrote for a snapshot. `token` names its attempt; `tensors` is an
    index like `Manifest.tensors`; `previous` is the newest committed snapshot that the rank knew,
    the only one whose places its parts may name."""

    ref: Ref
    rank: int
    world: int
    token: str
    parts: tuple[Part, ...]
    tensors: dict[str, Any]
    data: dict[str, Any]
    previous: Link | None = None

    @property
    def refers(self) -> frozenset[str]:
        """Keys of the older snapshots' objects that its parts lie in."""
        return _foreign(self.ref, self.parts)

    def to_json(self) -> str:
        return _sealed(
            {
                "version": FORMAT,
                "ref": self.ref.name,
                "rank": self.rank,
                "world": self.world,
                "token": self.token,
                "parts": [p.to_dict() for p in self.parts],
                "tensors": self.tensors,
                "data": self.data,
                "previous": self.previous and self.previous.to_dict(),
            }
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> PartList:
        """Parse a part list. Raises SnapshotCorrupt, SnapshotTooNew."""

        def build(body: dict[str, Any]) -> PartList:
            _unsealed("part list", body)
            fields_of(body, "rank", "token", "previous")
            if not isinstance(body["token"], str):
                raise BadObject("wanted the token of an attempt as text")
            world = whole(body["world"], 1, MOST_RANKS)
            return cls(
                ref=ref_of(body["ref"]),
                rank=whole(body["rank"], 0, world - 1),
                world=world,
                token=body["token"],
                parts=tuple(map(Part.from_dict, body["parts"])),
                tensors=_index_of(body["tensors"]),
                data=body["data"],
                previous=Link.from_dict(body["previous"]),
            )

        return _parsed("a part list", text, build)


@dataclass(frozen=True)
class Manifest:
    """A committed snapshot.

    tensors:  name -> {"shape": [..], "dtype": "float32", "chunks": [{"offsets": [..],
              "sizes": [..], "part": key, "start", "end"}]}; a chunk is a box of the tensor,
              row-major and little-endian in bytes [start, end) of a part; sizes in elements.
    data:     plain JSON.
    hash:     blake2b-128 of the canonical JSON of all the rest.
    previous: the newest snapshot that was committed when rank 0 wrote its share, so that the
              manifests form a chain.
    bases:    snapshots in whose objects some parts lie; if one of them is pruned before the
              commit, this snapshot must not be committed.
    """

    ref: Ref
    world: int
    parts: tuple[Part, ...]
    tensors: dict[str, Any]
    data: dict[str, Any]
    hash: str
    previous: Link | None = None
    bases: tuple[Ref, ...] = ()

    @property
    def step(self) -> int:
        return self.ref.step

    @property
    def epoch(self) -> int:
        return self.ref.epoch

    @property
    def nbytes(self) -> int:
        """Size of all parts together, in bytes."""
        return sum(p.nbytes for p in self.parts)

    @functools.cached_property
    def objects(self) -> dict[str, int]:
        """Sizes in bytes, by key, of all stored objects that its bytes lie in, older snapshots'
        included."""
        return {place.key: place.of for p in self.parts for place in p.stored()}

    @functools.cached_property
    def stored(self) -> dict[str, Part]:
        """Stored objects by key, as parts of one place each. A chunk that only other snapshots use
        has the hash ""."""
        hashes: dict[str, list[str]] = {}
        sizes: dict[str, tuple[int, int]] = {}
        for part in self.parts:
            for (found, _), place in part.known():
                slots = hashes.setdefault(place.key, [""] * -(-place.of // part.chunk_nbytes))
                slots[place.start // part.chunk_nbytes] = found
                sizes[place.key] = place.of, part.chunk_nbytes
        return {key: Part(key, *sizes[key], tuple(slots)) for key, slots in hashes.items()}

    @property
    def own_nbytes(self) -> int:
        """Bytes that were stored for this snapshot, and not for an older one."""
        return sum(nbytes for key, nbytes in self.objects.items() if key not in self.refers)

    @functools.cached_property
    def refers(self) -> frozenset[str]:
        """Keys of the older snapshots' objects that its parts lie in."""
        return _foreign(self.ref, self.parts)

    @functools.cached_property
    def known(self) -> Known:
        """Chunks that the next snapshot need not store again."""
        return {chunk: place for p in self.parts for chunk, place in p.known()}

    @property
    def link(self) -> Link:
        return Link(self.ref, self.hash)

    @functools.cached_property
    def _by_key(self) -> dict[str, Part]:
        return {p.key: p for p in self.parts}

    def part(self, key: str) -> Part:
        """Return the part with this key. Raises SnapshotCorrupt if the manifest names none."""
        try:
            return self._by_key[key]
        except KeyError:
            raise SnapshotCorrupt(
                f"snapshot {self.ref}: its manifest names no part {key!r}; use an older snapshot"
            ) from None

    def to_json(self) -> str:
        return _sealed(self._body())

    def _body(self) -> dict[str, Any]:
        return {
            "version": FORMAT,
            "ref": self.ref.name,
            "world": self.world,
            "parts": [p.to_dict() for p in self.parts],
            "tensors": self.tensors,
            "data": self.data,
            "previous": self.previous and self.previous.to_dict(),
            "bases": [b.name for b in self.bases],
        }

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Parse a manifest. Raises SnapshotCorrupt, SnapshotTooNew."""

        def build(body: dict[str, Any]) -> Manifest:
            found = _unsealed("manifest", body)
            bases = fields_of(body, "previous", "bases")["bases"]
            if not isinstance(bases, list):
                raise BadObject("wanted a list of bases")
            return cls(
                ref=ref_of(body["ref"]),
                world=whole(body["world"], 1, MOST_RANKS),
                parts=tuple(map(Part.from_dict, body["parts"])),
                tensors=_index_of(body["tensors"]),
                data=body["data"],
                hash=found,
                previous=Link.from_dict(body["previous"]),
                bases=tuple(map(ref_of, bases)),
            )

        return _parsed("a manifest", text, build)

    @classmethod
    def merge(cls, lists: Sequence[PartList]) -> Manifest:
        """Return the manifest of all ranks' lists. `data` is merged in rank order, the lower rank
        wins; `data["weights"]` is summed.

        Raises SnapshotCorrupt if the lists contradict each other or leave a hole in a tensor.
        """
        lists = sorted(lists, key=lambda one: one.rank)
        ref, world = lists[0].ref, lists[0].world
        if any(one.ref != ref or one.world != world for one in lists) or [
            one.rank for one in lists
        ] != list(range(world)):
            found = ", ".join(f"{one.ref} rank {one.rank} of {one.world}" for one in lists)
            raise SnapshotCorrupt(
                f"snapshot {ref}: wanted one part list of each of {world} ranks; found {found}. "
                "An epoch has one world: start a new epoch for another one"
            )
        parts = tuple(p for one in lists for p in one.parts)
        tensors = _merged_index(ref, lists)
        data: dict[str, Any] = {}
        for one in lists:
            data = {**one.data, **data}
        sums = [str(one.data["weights"]) for one in lists if one.data.get("weights")]
        if len(sums) > 1:  # each rank hashed its own share
            try:
                data["weights"] = combined(sums)
            except ValueError as e:
                raise SnapshotCorrupt(f"snapshot {ref}: hashes of weights: {e}") from e
        _check_index(ref, parts, tensors)
        previous = lists[0].previous
        bases = tuple(
            sorted({one.previous.ref for one in lists if one.previous is not None and one.refers})
        )
        if any(one.refers and (one.previous is None or one.previous.ref >= ref) for one in lists):
            raise SnapshotCorrupt(
                f"snapshot {ref}: a part list refers to objects of others and names no older "
                "snapshot that they are of"
            )
        made = cls(ref, world, parts, tensors, data, "", previous, bases)
        return replace(made, hash=digest(canonical(made._body())))


def _foreign(ref: Ref, parts: Sequence[Part]) -> frozenset[str]:
    return frozenset(
        place.key for p in parts for place in p.places if f"/{ref.name}/" not in place.key
    )


def _merged_index(ref: Ref, lists: Sequence[PartList]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for one in lists:
        for name, entry in one.tensors.items():
            into = merged.setdefault(
                name, {"shape": entry["shape"], "dtype": entry["dtype"], "chunks": []}
            )
            if (into["shape"], into["dtype"]) != (entry["shape"], entry["dtype"]):
                raise SnapshotCorrupt(
                    f"snapshot {ref}: rank {one.rank} wrote {name!r} as "
                    f"{entry['dtype']}{entry['shape']}, a lower rank as "
                    f"{into['dtype']}{into['shape']}; give tensors that differ between ranks "
                    "different names"
                )
            into["chunks"].extend(entry["chunks"])
    for entry in merged.values():
        entry["chunks"].sort(key=lambda c: c["offsets"])
    return merged


def _check_index(ref: Ref, parts: Sequence[Part], tensors: dict[str, Any]) -> None:
    sizes = {p.key: p.nbytes for p in parts}
    for name, entry in tensors.items():
        stored = sum(math.prod(c["sizes"]) for c in entry["chunks"])
        if stored != math.prod(entry["shape"]):
            raise SnapshotCorrupt(
                f"snapshot {ref}: tensor {name!r} has {math.prod(entry['shape'])} elements, its "
                f"chunks hold {stored}; did all ranks save the same state?"
            )
        for c in entry["chunks"]:
            if not 0 <= c["start"] <= c["end"] <= sizes.get(c["part"], -1):
                raise SnapshotCorrupt(
                    f"snapshot {ref}: tensor {name!r} lies outside of part {c['part']!r}"
                )


def _sealed(body: dict[str, Any]) -> str:
    return canonical({**body, "hash": digest(canonical(body))}).decode()


def _unsealed(what: str, body: dict[str, Any]) -> str:
    """Remove and return the hash after checking it and the fields that all formats have. Every
    format, later ones included, is hashed the same way, so a damaged version number is
    distinguishable from a new one."""
    wanted, found = body.pop("hash"), digest(canonical(body))
    if found != wanted:
        raise SnapshotCorrupt(
            f"{what}: wanted hash {wanted!r:.60}, found {found}; use an older snapshot"
        )
    if whole(body["version"], FORMAT) > FORMAT:
        raise SnapshotTooNew(
            f"{what} of format {body['version']}, this code reads up to {FORMAT}; update the "
            "package that reads it"
        )
    fields_of(body, "ref", "world", "parts", "tensors", "data")
    if not isinstance(body["parts"], list) or not isinstance(body["data"], dict):
        raise BadObject("wanted a list of parts, and data as an object")
    return found


def _index_of(tensors: Any) -> dict[str, Any]:
    """Return `tensors` if it is a valid index of tensors. Raises BadObject."""
    if not isinstance(tensors, dict):
        raise BadObject(f"wanted an index of tensors, found {type(tensors).__name__}")
    for name, entry in tensors.items():
        fields_of(entry, "shape", "dtype", "chunks")
        if not isinstance(entry["dtype"], str) or not isinstance(entry["chunks"], list):
            raise BadObject(f"tensor {name!r:.60}: wanted a dtype and chunks")
        _sizes(entry["shape"])
        for chunk in entry["chunks"]:
            fields_of(chunk, "offsets", "sizes", "part", "start", "end")
            _sizes(chunk["offsets"])
            _sizes(chunk["sizes"])
            if not isinstance(chunk["part"], str):
                raise BadObject(f"tensor {name!r:.60}: wanted the key of a part")
            start = whole(chunk["start"], 0, MOST_PART_NBYTES)
            whole(chunk["end"], start, MOST_PART_NBYTES)
    return tensors


def _sizes(values: Any) -> None:
    if not isinstance(values, list) or len(values) > MOST_DIMENSIONS:
        raise BadObject(f"wanted sizes of at most {MOST_DIMENSIONS} dimensions")
    for value in values:
        whole(value, 0)


def _parsed(what: str, text: str | bytes, build: Callable[[dict[str, Any]], T]) -> T:
    try:
        body = parsed(text, most_nbytes=MOST_MANIFEST_NBYTES, most_depth=MOST_STATE_DEPTH)
        return build(fields_of(body, "hash", "version"))
    except BadObject as e:
        found = f"{len(text)} bytes that are not ({e})"
        raise SnapshotCorrupt(f"wanted {what}, found {found}; use an older snapshot") from e
