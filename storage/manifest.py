"""Manifests: what a snapshot consists of, and the hashes that prove it.

Pure: no store, no torch, no clock. A snapshot exists if and only if its manifest does, so a manifest holds nothing that
differs by who commits it: the same part lists always make the same bytes.

    PartList   what one rank wrote                    (snapshots/parts/{ref}/list-r00000.json)
    Manifest   all ranks' part lists, merged          (snapshots/manifests/{ref}.json)

Errors:
    SnapshotCorrupt   bytes are not what was committed; use an older snapshot
    SnapshotTooNew    written by a newer version of this code; nothing is wrong with it, so nobody may quarantine it
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import xxhash

from storage.objects import StoreError
from storage.weights import combined

FORMAT = 1  # of manifests and part lists
CHUNK_NBYTES = 4 << 20  # one hash per chunk: what the smallest verified read fetches

T = TypeVar("T")


class SnapshotCorrupt(StoreError):
    """What is stored is not what was committed."""


class SnapshotTooNew(StoreError):
    """A newer version of this code wrote it."""


def canonical(value: object) -> bytes:
    """The one JSON spelling that hashes are made of. Floats keep every bit (repr round-trips), NaN and inf included."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=True).encode()


def digest(data: bytes) -> str:
    """32 hex digits: blake2b-128."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def chunk_hash(data: bytes | memoryview) -> str:
    """32 hex digits: xxh3-128, at memory speed. It finds accidents, not forgers; whoever can forge a part can forge all."""
    return str(xxhash.xxh3_128_hexdigest(data))


@dataclass(frozen=True, order=True)
class Ref:
    """Names a snapshot. The order is (epoch, step): a zombie of an older epoch is never the newest, however far it ran."""

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
            raise ValueError(f"a snapshot is named like {cls(1, 200).name!r} (step-epoch); found {name!r}")
        return ref


@dataclass(frozen=True)
class Part:
    """One stored object of a snapshot. `hashes[i]` is of bytes [i * chunk_nbytes, (i + 1) * chunk_nbytes)."""

    key: str
    nbytes: int
    chunk_nbytes: int
    hashes: tuple[str, ...]

    @classmethod
    def of(cls, key: str, data: bytes | memoryview, chunk_nbytes: int = CHUNK_NBYTES) -> Part:
        view = memoryview(data).cast("B")
        starts = range(0, len(view), chunk_nbytes)
        return cls(key, len(view), chunk_nbytes, tuple(chunk_hash(view[i : i + chunk_nbytes]) for i in starts))

    def to_dict(self) -> dict[str, Any]:
        return {"key": self.key, "nbytes": self.nbytes, "chunk_nbytes": self.chunk_nbytes, "hashes": list(self.hashes)}

    @classmethod
    def from_dict(cls, body: dict[str, Any]) -> Part:
        part = cls(str(body["key"]), int(body["nbytes"]), int(body["chunk_nbytes"]), tuple(map(str, body["hashes"])))
        if part.chunk_nbytes < 1 or len(part.hashes) != -(-part.nbytes // part.chunk_nbytes):
            raise ValueError(f"{part.key}: {len(part.hashes)} hashes do not fit {part.nbytes} bytes")
        return part

    def to_json(self) -> str:
        return canonical(self.to_dict()).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Part:
        return _parsed("a part", text, cls.from_dict)


@dataclass(frozen=True)
class PartList:
    """What one rank wrote for a snapshot. `token` names its attempt; `tensors` is an index like `Manifest.tensors`."""

    ref: Ref
    rank: int
    world: int
    token: str
    parts: tuple[Part, ...]
    tensors: dict[str, Any]
    data: dict[str, Any]

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
            )

        return _parsed("a part list", text, build)


@dataclass(frozen=True)
class Manifest:
    """A committed snapshot.

    tensors: name -> {"shape": [..], "dtype": "float32", "chunks": [{"offsets": [..], "sizes": [..], "part": key, "start", "end"}]};
             a chunk is a box of the tensor, row-major and little-endian in bytes [start, end) of a part; sizes in elements.
    data:    plain JSON.
    hash:    blake2b-128 of the canonical JSON of all the rest.
    """

    version: int
    ref: Ref
    world: int
    parts: tuple[Part, ...]
    tensors: dict[str, Any]
    data: dict[str, Any]
    hash: str

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
    def _by_key(self) -> dict[str, Part]:
        return {p.key: p for p in self.parts}

    def part(self, key: str) -> Part:
        """Raises SnapshotCorrupt if the manifest names no such part."""
        try:
            return self._by_key[key]
        except KeyError:
            raise SnapshotCorrupt(f"snapshot {self.ref}: its manifest names no part {key!r}; use an older snapshot") from None

    def to_json(self) -> str:
        return _sealed(_manifest_body(self.version, self.ref, self.world, self.parts, self.tensors, self.data))

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
            )

        return _parsed("a manifest", text, build)

    @classmethod
    def merge(cls, lists: Sequence[PartList]) -> Manifest:
        """The manifest of all ranks' lists. `data` is merged in rank order, the lower rank wins; `data["weights"]` is summed.

        Raises SnapshotCorrupt if the lists contradict each other or leave a hole in a tensor.
        """
        lists = sorted(lists, key=lambda one: one.rank)
        ref, world = lists[0].ref, lists[0].world
        if any(one.ref != ref or one.world != world for one in lists) or [one.rank for one in lists] != list(range(world)):
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
        return cls(FORMAT, ref, world, parts, tensors, data, digest(canonical(_manifest_body(FORMAT, ref, world, parts, tensors, data))))


def _manifest_body(
    version: int, ref: Ref, world: int, parts: tuple[Part, ...], tensors: dict[str, Any], data: dict[str, Any]
) -> dict[str, Any]:
    return {
        "version": version,
        "ref": ref.name,
        "world": world,
        "parts": [p.to_dict() for p in parts],
        "tensors": tensors,
        "data": data,
    }


def _merged_index(ref: Ref, lists: Sequence[PartList]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for one in lists:
        for name, entry in one.tensors.items():
            into = merged.setdefault(name, {"shape": entry["shape"], "dtype": entry["dtype"], "chunks": []})
            if (into["shape"], into["dtype"]) != (entry["shape"], entry["dtype"]):
                raise SnapshotCorrupt(
                    f"snapshot {ref}: rank {one.rank} wrote {name!r} as {entry['dtype']}{entry['shape']}, a lower rank as "
                    f"{into['dtype']}{into['shape']}; give tensors that differ between ranks different names"
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
                f"snapshot {ref}: tensor {name!r} has {math.prod(entry['shape'])} elements, its chunks hold {stored}; "
                "did all ranks save the same state?"
            )
        for c in entry["chunks"]:
            if not 0 <= c["start"] <= c["end"] <= sizes.get(c["part"], -1):
                raise SnapshotCorrupt(f"snapshot {ref}: tensor {name!r} lies outside of part {c['part']!r}")


def _sealed(body: dict[str, Any]) -> str:
    return canonical({**body, "hash": digest(canonical(body))}).decode()


def _unsealed(what: str, body: dict[str, Any]) -> str:
    """Take the hash off and check it. Every format, also a later one, is hashed like this: so a damaged version number is
    told from a new one."""
    wanted, found = body.pop("hash"), digest(canonical(body))
    if found != wanted:
        raise SnapshotCorrupt(f"{what}: wanted hash {wanted}, found {found}; use an older snapshot")
    if body["version"] > FORMAT:
        raise SnapshotTooNew(f"{what} of format {body['version']}, this code reads up to {FORMAT}; update the package that reads it")
    return found


def _parsed(what: str, text: str | bytes, build: Callable[[dict[str, Any]], T]) -> T:
    try:
        return build(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError) as e:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        found = f"{len(text)} bytes that are not ({type(e).__name__}: {e})"
        raise SnapshotCorrupt(f"wanted {what}, found {found}; use an older snapshot") from e
