"""What a snapshot's bytes are called: refs, parts, the places that parts lie in, and hashes of
chunks.

Pure: no store, no torch, no clock. `manifest.py` says what a snapshot consists of.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

import blake3
import xxhash

from storage.errors import StoreError
from storage.json_text import BadObject, canonical, parsed, whole
from storage.objects import checked_key

PARTS = "snapshots/parts/"  # where all parts and part lists lie
CHUNK_NBYTES = 4 << 20  # one hash per chunk: what the smallest verified read fetches
MIN_GAP = 2  # chunks; see Part.referring
BLAKE3, HASH_NBYTES = "b3.", 16
HASH = r"(?:b3\.)?[0-9a-f]{32}"  # of a chunk
# Beyond these a part is damage. An object of 16 TiB in chunks of 4 MiB has as many chunks.
MOST_PART_NBYTES, MOST_CHUNKS = 1 << 50, 1 << 22
MOST_PART_JSON_NBYTES = 256 << 20


class SnapshotCorrupt(StoreError):
    """What is stored is not what was committed."""


def chunk_hash(data: bytes | memoryview) -> str:
    """What a chunk is known by: "b3." and 32 hex digits, the first 128 bits of its BLAKE3.

    Nobody can make other bytes with the hash of given ones (2^128 tries). Who makes both may find
    two that have the same (2^64 tries), which only a writer of the run could use.
    """
    return BLAKE3 + blake3.blake3(data).hexdigest(HASH_NBYTES)


def is_hash_of(wanted: str, data: bytes | memoryview) -> bool:
    """By the function that `wanted` names. That of formats 1 and 2, xxh3-128, has no name before
    its 32 digits; it finds accidents, no forgers."""
    if wanted.startswith(BLAKE3):
        return chunk_hash(data) == wanted
    return str(xxhash.xxh3_128_hexdigest(data)) == wanted


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
    @functools.lru_cache(maxsize=4096)  # controllers read the same listing all the time
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
class StoredRange:
    """Bytes [start, start + nbytes) of the stored object `key`, which has `of` bytes."""

    key: str
    start: int
    nbytes: int
    of: int


Known = Mapping[
    tuple[str, int], StoredRange
]  # (hash, bytes) of a chunk -> where it is stored already


@dataclass(frozen=True)
class Part:
    """A file of a snapshot. `hashes[i]` is of bytes [i * chunk_nbytes, (i + 1) * chunk_nbytes);
    all of a part are made by the same function.

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
        """`hashed`: hashes that are known already, by chunk."""
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

    @property
    def cryptographic(self) -> bool:
        """Is there nobody who can make other bytes with its hashes? So it is since format 3."""
        return all(h.startswith(BLAKE3) for h in self.hashes)

    def stored(self) -> tuple[StoredRange, ...]:
        """`places`, also when there is only one."""
        return self.places or (StoredRange(self.key, 0, self.nbytes, self.nbytes),)

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

    def known(self) -> Iterator[tuple[tuple[str, int], StoredRange]]:
        """Its chunks, for `Known`."""
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
        """Raises BadObject."""
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
        """Raises SnapshotCorrupt."""
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
        """Raises BadObject."""
        if body is None:
            return None
        found = fields_of(body, "ref", "hash")
        if not isinstance(found["hash"], str):
            raise BadObject("wanted the hash of a manifest as text")
        return cls(ref_of(found["ref"]), found["hash"])


def fields_of(body: Any, *names: str) -> dict[str, Any]:
    """An object that has these fields. Raises BadObject."""
    if not isinstance(body, dict):
        raise BadObject(f"wanted an object with {', '.join(names)}, found {type(body).__name__}")
    if missing := [name for name in names if name not in body]:
        raise BadObject(f"wanted {', '.join(missing)}, found none")
    return body


def ref_of(name: Any) -> Ref:
    """Raises BadObject."""
    if not isinstance(name, str):
        raise BadObject(f"wanted the name of a snapshot, found {type(name).__name__}")
    try:
        return Ref.parse(name)
    except ValueError as e:
        raise BadObject(str(e)) from None


def part_key(key: Any) -> str:
    """Where a part lies. Raises BadObject."""
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
