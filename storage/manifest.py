"""Manifests: what a snapshot consists of, and the hashes that prove it.

Pure: no store, no torch, no clock. A snapshot exists if and only if its manifest does, so a
manifest holds nothing that differs by who commits it: the same part lists always make the same
bytes.

    PartList   what one rank wrote                    (snapshots/parts/{ref}/list-r00000.json)
    Manifest   all ranks' part lists, merged          (snapshots/manifests/{ref}.json)

Unknown fields are kept out and hashed with the rest. Errors:
    SnapshotCorrupt   bytes are not what was committed; use an older snapshot
    SnapshotTooNew    written by a newer version of this code; nothing is wrong with it, so nobody
                      may quarantine it
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from storage.errors import StoreError
from storage.json_text import BadObject, canonical, digest, parsed, whole
from storage.parts import BLAKE3, MOST_PART_NBYTES, Known, Link, fields_of, ref_of
from storage.parts import PARTS as PARTS
from storage.parts import Part as Part
from storage.parts import Ref as Ref
from storage.parts import SnapshotCorrupt as SnapshotCorrupt
from storage.weights import combined

# of manifests and part lists; 1 had no `places`, `previous` and `bases`, and hashes of chunks were
# xxh3 before CRYPTOGRAPHIC
FORMAT = CRYPTOGRAPHIC = 3
# Beyond these a manifest is damage: 35 bytes for a chunk of 4 MiB, some hundred for each piece of a
# tensor; brackets of the user's own state.
MOST_MANIFEST_NBYTES, MOST_STATE_DEPTH = 1 << 30, 256
MOST_RANKS, MOST_DIMENSIONS = 1 << 20, 64

T = TypeVar("T")


class SnapshotTooNew(StoreError):
    """A newer version of this code wrote it."""


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
            fields_of(body, "rank", "token")
            if not isinstance(body["token"], str):
                raise BadObject("wanted the token of an attempt as text")
            world = whole(body["world"], 1, MOST_RANKS)
            return cls(
                ref=ref_of(body["ref"]),
                rank=whole(body["rank"], 0, world - 1),
                world=world,
                token=body["token"],
                parts=_parts_of(body),
                tensors=_index_of(body["tensors"]),
                data=body["data"],
                previous=Link.from_dict(body.get("previous")),
                version=body["version"],
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
            bases = body.get("bases", [])
            if not isinstance(bases, list):
                raise BadObject("wanted a list of bases")
            return cls(
                version=body["version"],
                ref=ref_of(body["ref"]),
                world=whole(body["world"], 1, MOST_RANKS),
                parts=_parts_of(body),
                tensors=_index_of(body["tensors"]),
                data=body["data"],
                hash=found,
                previous=Link.from_dict(body.get("previous")),
                bases=tuple(map(ref_of, bases)),
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
        version = max(one.version for one in lists)
        if min(one.version for one in lists) < CRYPTOGRAPHIC <= version:
            raise SnapshotCorrupt(
                f"snapshot {ref}: wanted part lists with hashes of one kind, found formats "
                f"{sorted({one.version for one in lists})}: the ranks run different versions of "
                "this package; give all the same one"
            )
        parts = tuple(p for one in lists for p in one.parts)
        tensors = _merged_index(ref, lists)
        data: dict[str, Any] = {}
        for one in lists:
            data = {**one.data, **data}
        sums = [str(one.data["weights"]) for one in lists if one.data.get("weights")]
        if len(sums) > 1:  # each rank's is of its share
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
    """Take the hash off and check it, and what all formats have. Every format, also a later one, is
    hashed like this: so a damaged version number is told from a new one."""
    wanted, found = body.pop("hash"), digest(canonical(body))
    if found != wanted:
        raise SnapshotCorrupt(
            f"{what}: wanted hash {wanted!r:.60}, found {found}; use an older snapshot"
        )
    if whole(body["version"], 1) > FORMAT:
        raise SnapshotTooNew(
            f"{what} of format {body['version']}, this code reads up to {FORMAT}; update the "
            "package that reads it"
        )
    fields_of(body, "ref", "world", "parts", "tensors", "data")
    if not isinstance(body["parts"], list) or not isinstance(body["data"], dict):
        raise BadObject("wanted a list of parts, and data as an object")
    return found


def _parts_of(body: dict[str, Any]) -> tuple[Part, ...]:
    """Each with hashes of the function that the format has, so that a chunk of a new format is
    never believed for an old hash. Raises BadObject."""
    parts, new = tuple(map(Part.from_dict, body["parts"])), body["version"] >= CRYPTOGRAPHIC
    for part in parts:
        if any(h.startswith(BLAKE3) != new for h in part.hashes):
            raise BadObject(
                f"{part.key}: wanted hashes of chunks as format {body['version']} has them, found "
                "those of another"
            )
    return parts


def _index_of(tensors: Any) -> dict[str, Any]:
    """An index of tensors that is one. Raises BadObject."""
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
