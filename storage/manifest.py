"""Manifests: what a snapshot consists of, and the hashes that prove it.

Pure: no store, no torch, no clock. A snapshot exists if and only if its manifest does, so a
manifest holds nothing that differs by who commits it: the same part lists always make the same
bytes.

    PartList   what one rank wrote                    (snapshots/parts/{ref}/list-r00000.json)
    Manifest   all ranks' part lists, merged          (snapshots/manifests/{ref}.json)

Errors:
    SnapshotCorrupt   bytes are not what was committed; use an older snapshot
    SnapshotTooNew    written by a newer version of this code; nothing is wrong with it, so nobody
                      may quarantine it
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, TypeVar

import xxhash

from storage.errors import StoreError
from storage.objects import checked_key
from storage.weights import combined

PARTS = "snapshots/parts/"  # where all parts and part lists lie
FORMAT = 2  # of manifests and part lists; 1 had no `places`, `previous` and `bases`
CHUNK_NBYTES = 4 << 20  # one hash per chunk: what the smallest verified read fetches
MIN_GAP = 2  # chunks; see Part.referring

T = TypeVar("T")


class SnapshotCorrupt(StoreError):
    """What is stored is not what was committed."""


class SnapshotTooNew(StoreError):
    """A newer version of this code wrote it."""


def canonical(value: object) -> bytes:
    """The one JSON spelling that hashes are made of. Floats keep every bit (repr round-trips),
    NaN and inf included."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=True).encode()


def digest(data: bytes) -> str:
    """32 hex digits: blake2b-128."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def chunk_hash(data: bytes | memoryview) -> str:
    """32 hex digits: xxh3-128, at memory speed. It finds accidents, not forgers; whoever can
    forge a part can forge all."""
    return str(xxhash.xxh3_128_hexdigest(data))


@dataclass(frozen=True, order=True)
class Ref:
    """Names a snapshot. The order is (epoch, step): a zombie of an older epoch is never the
    newest, however far it ran."""

    epoch: int
    step: int

    @property
    def name(self) -> str:
        return f"{self.step:010d}-e{self.epoch:06d}"

    def __str__(self) -> str:
        return self.name

    @classmethod
    def parse(cls, name: str) -> Ref:
        """The inverse of `name`. Raises ValueError."""
        found = re.fullmatch(r"([0-9]{10,})-e([0-9]{6,})", name)
        ref = cls(epoch=int(found[2]), step=int(found[1])) if found else None
        if ref is None or ref.name != name:
            raise ValueError(
                f"a snapshot is named like {cls(1, 200).name!r} (step-epoch); found {name!r}"
            )
        return ref


@dataclass(frozen=True)
class Place:
    """Bytes [start, start + nbytes) of the stored object `key`, which has `of` bytes."""

    key: str
    start: int
    nbytes: int
    of: int


Known = Mapping[tuple[str, int], Place]  # (hash, bytes) of a chunk -> where it is stored already


@dataclass(frozen=True)
class Part:
    """A file of a snapshot. `hashes[i]` is of bytes [i * chunk_nbytes, (i + 1) * chunk_nbytes).

    places: where its bytes lie, in order, cut between chunks: in objects of its own, or in those of
    older snapshots that had the
            same chunks. Empty: all of them in the object `key`.
    """

    key: str
    nbytes: int
    chunk_nbytes: int
    hashes: tuple[str, ...]
    places: tuple[Place, ...] = ()

    @classmethod
    def of(cls, key: str, data: bytes | memoryview, chunk_nbytes: int = CHUNK_NBYTES) -> Part:
        view = memoryview(data).cast("B")
        starts = range(0, len(view), chunk_nbytes)
        return cls(
            key,
            len(view),
            chunk_nbytes,
            tuple(chunk_hash(view[i : i + chunk_nbytes]) for i in starts),
        )

    def stored(self) -> tuple[Place, ...]:
        """`places`, also when there is only one."""
        return self.places or (Place(self.key, 0, self.nbytes, self.nbytes),)

    def locate(self, start: int, end: int) -> Iterator[tuple[str, int, int]]:
        """The bytes [start, end) as (object, start, end), in order."""
        at = 0
        for place in self.stored():
            low, high = max(start, at), min(end, at + place.nbytes)
            if low < high:
                yield place.key, place.start + low - at, place.start + high - at
            at += place.nbytes

    def chunk_nbytes_of(self, i: int) -> int:
        return min(self.chunk_nbytes, self.nbytes - i * self.chunk_nbytes)

    def known(self) -> Iterator[tuple[tuple[str, int], Place]]:
        """Its chunks, for `Known`."""
        chunk, place_ends = 0, 0
        for place in self.stored():
            first, place_ends = place_ends, place_ends + place.nbytes
            while chunk < len(self.hashes) and chunk * self.chunk_nbytes < place_ends:
                n = self.chunk_nbytes_of(chunk)
                yield (
                    (self.hashes[chunk], n),
                    Place(place.key, place.start + chunk * self.chunk_nbytes - first, n, place.of),
                )
                chunk += 1

    def referring(self, known: Known, min_gap: int = MIN_GAP) -> Part:
        """The same part, with the chunks that are `known` left where they are, and an object of its
        own for each run of others.

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
        places: list[Place] = []
        for here, run in itertools.groupby(range(len(found)), key=lambda i: found[i] is not None):
            chunks = list(run)
            if not here:
                nbytes = sum(map(self.chunk_nbytes_of, chunks))
                places.append(Place(f"{self.key}.{chunks[0]:05d}", 0, nbytes, nbytes))
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
    def from_dict(cls, body: dict[str, Any]) -> Part:
        places = tuple(
            Place(checked_key(str(key), PARTS), int(start), int(nbytes), int(of))
            for key, start, nbytes, of in body.get("places", ())
        )
        key = checked_key(str(body["key"]), PARTS)
        part = cls(
            key,
            int(body["nbytes"]),
            int(body["chunk_nbytes"]),
            tuple(map(str, body["hashes"])),
            places,
        )
        if part.chunk_nbytes < 1 or len(part.hashes) != -(-part.nbytes // part.chunk_nbytes):
            raise ValueError(
                f"{part.key}: {len(part.hashes)} hashes do not fit {part.nbytes} bytes"
            )
        if sum(p.nbytes for p in part.stored()) != part.nbytes or any(
            p.start < 0 or p.start + p.nbytes > p.of for p in places
        ):
            raise ValueError(f"{part.key}: its places do not make up {part.nbytes} bytes")
        return part

    def to_json(self) -> str:
        return canonical(self.to_dict()).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Part:
        return _parsed("a part", text, cls.from_dict)


@dataclass(frozen=True)
class Link:
    """A committed snapshot and the hash of its manifest."""

    ref: Ref
    hash: str

    def to_dict(self) -> dict[str, str]:
        return {"ref": self.ref.name, "hash": self.hash}

    @classmethod
    def from_dict(cls, body: dict[str, str] | None) -> Link | None:
        return None if body is None else cls(Ref.parse(body["ref"]), str(body["hash"]))


@dataclass(frozen=True)
class PartList:
    """What one rank wrote for a snapshot. `token` names its attempt; `tensors` is an index like
    `Manifest.tensors`; `previous` is the newest committed snapshot that it knew, the only one whose
    places its parts may name."""

    ref: Ref
    rank: int
    world: int
    token: str
    parts: tuple[Part, ...]
    tensors: dict[str, Any]
    data: dict[str, Any]
    previous: Link | None = None
    version: int = FORMAT

    @property
    def refers(self) -> frozenset[str]:
        """Objects of older snapshots that its parts lie in."""
        return _foreign(self.ref, self.parts)

    def to_json(self) -> str:
        more = {"previous": self.previous and self.previous.to_dict()} if self.version > 1 else {}
        return _sealed(
            {
                "version": self.version,
                "ref": self.ref.name,
                "rank": self.rank,
                "world": self.world,
                "token": self.token,
                "parts": [p.to_dict() for p in self.parts],
                "tensors": self.tensors,
                "data": self.data,
                **more,
            }
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> PartList:
        """Raises SnapshotCorrupt, SnapshotTooNew."""

        def build(body: dict[str, Any]) -> PartList:
            _unsealed("part list", body)
            return cls(
                ref=Ref.parse(body["ref"]),
                rank=int(body["rank"]),
                world=int(body["world"]),
                token=str(body["token"]),
                parts=tuple(Part.from_dict(p) for p in body["parts"]),
                tensors=body["tensors"],
                data=body["data"],
                previous=Link.from_dict(body.get("previous")),
                version=int(body["version"]),
            )

        return _parsed("a part list", text, build)


@dataclass(frozen=True)
class Manifest:
    """A committed snapshot.

    tensors: name -> {"shape": [..], "dtype": "float32", "chunks": [{"offsets": [..], "sizes": [..],
    "part": key, "start", "end"}]};
             a chunk is a box of the tensor, row-major and little-endian in bytes [start, end) of a
             part; sizes in elements.
    data:    plain JSON.
    hash:    blake2b-128 of the canonical JSON of all the rest.
    previous: the newest snapshot that was committed when rank 0 wrote its share: so the manifests
    are a chain.
    bases:   snapshots whose objects some parts lie in; without them (pruned before the commit) it
             must not be committed.
    """

    version: int
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
        """Bytes of all parts."""
        return sum(p.nbytes for p in self.parts)

    @functools.cached_property
    def objects(self) -> dict[str, int]:
        """All stored objects that its bytes lie in, older snapshots' included: key -> size."""
        return {place.key: place.of for p in self.parts for place in p.stored()}

    @functools.cached_property
    def stored(self) -> dict[str, Part]:
        """Those objects by key, as parts of one place each; the hash of a chunk that is of
        other snapshots alone is ""."""
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
        """Objects of older snapshots that its parts lie in."""
        return _foreign(self.ref, self.parts)

    @functools.cached_property
    def known(self) -> Known:
        """Its chunks, for who stores the next snapshot."""
        return {chunk: place for p in self.parts for chunk, place in p.known()}

    @property
    def link(self) -> Link:
        return Link(self.ref, self.hash)

    @functools.cached_property
    def _by_key(self) -> dict[str, Part]:
        return {p.key: p for p in self.parts}

    def part(self, key: str) -> Part:
        """Raises SnapshotCorrupt if the manifest names no such part."""
        try:
            return self._by_key[key]
        except KeyError:
            raise SnapshotCorrupt(
                f"snapshot {self.ref}: its manifest names no part {key!r}; use an older snapshot"
            ) from None

    def to_json(self) -> str:
        more = (self.previous, self.bases) if self.version > 1 else ()
        return _sealed(
            _manifest_body(
                self.version, self.ref, self.world, self.parts, self.tensors, self.data, *more
            )
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Raises SnapshotCorrupt, SnapshotTooNew."""

        def build(body: dict[str, Any]) -> Manifest:
            found = _unsealed("manifest", body)
            return cls(
                version=int(body["version"]),
                ref=Ref.parse(body["ref"]),
                world=int(body["world"]),
                parts=tuple(Part.from_dict(p) for p in body["parts"]),
                tensors=body["tensors"],
                data=body["data"],
                hash=found,
                previous=Link.from_dict(body.get("previous")),
                bases=tuple(map(Ref.parse, body.get("bases", ()))),
            )

        return _parsed("a manifest", text, build)

    @classmethod
    def merge(cls, lists: Sequence[PartList]) -> Manifest:
        """The manifest of all ranks' lists. `data` is merged in rank order, the lower rank wins;
        `data["weights"]` is summed.

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
        if len(sums) > 1:  # each rank's is of its share
            data["weights"] = combined(sums)
        _check_index(ref, parts, tensors)
        previous, version = lists[0].previous, max(one.version for one in lists)
        bases = tuple(
            sorted({one.previous.ref for one in lists if one.previous is not None and one.refers})
        )
        if any(one.refers and (one.previous is None or one.previous.ref >= ref) for one in lists):
            raise SnapshotCorrupt(
                f"snapshot {ref}: a part list refers to objects of others and names no older "
                "snapshot that they are of"
            )
        body = _manifest_body(
            version, ref, world, parts, tensors, data, *((previous, bases) if version > 1 else ())
        )
        return cls(
            version, ref, world, parts, tensors, data, digest(canonical(body)), previous, bases
        )


def _manifest_body(
    version: int,
    ref: Ref,
    world: int,
    parts: tuple[Part, ...],
    tensors: dict[str, Any],
    data: dict[str, Any],
    *more: Any,
) -> dict[str, Any]:
    body = {
        "version": version,
        "ref": ref.name,
        "world": world,
        "parts": [p.to_dict() for p in parts],
        "tensors": tensors,
        "data": data,
    }
    if more:
        previous, bases = more
        body |= {"previous": previous and previous.to_dict(), "bases": [b.name for b in bases]}
    return body


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
                f"chunks hold {stored}; "
                "did all ranks save the same state?"
            )
        for c in entry["chunks"]:
            if not 0 <= c["start"] <= c["end"] <= sizes.get(c["part"], -1):
                raise SnapshotCorrupt(
                    f"snapshot {ref}: tensor {name!r} lies outside of part {c['part']!r}"
                )


def _sealed(body: dict[str, Any]) -> str:
    return canonical({**body, "hash": digest(canonical(body))}).decode()


def _unsealed(what: str, body: dict[str, Any]) -> str:
    """Take the hash off and check it. Every format, also a later one, is hashed like this: so a
    damaged version number is told from a new one."""
    wanted, found = body.pop("hash"), digest(canonical(body))
    if found != wanted:
        raise SnapshotCorrupt(f"{what}: wanted hash {wanted}, found {found}; use an older snapshot")
    if body["version"] > FORMAT:
        raise SnapshotTooNew(
            f"{what} of format {body['version']}, this code reads up to {FORMAT}; update the "
            "package that reads it"
        )
    return found


def _parsed(what: str, text: str | bytes, build: Callable[[dict[str, Any]], T]) -> T:
    try:
        return build(json.loads(text))
    # UnicodeDecodeError and JSONDecodeError are ValueErrors; Infinity is JSON to Python, and so is
    # what is nested too deep for it.
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as e:
        found = f"{len(text)} bytes that are not ({type(e).__name__}: {e})"
        raise SnapshotCorrupt(f"wanted {what}, found {found}; use an older snapshot") from e
