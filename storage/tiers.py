"""Tiers: places nearer than the bucket that may hold bytes of a snapshot, and verified reads
through them.

The unit is the hash chunk of a part. Its manifest gives its hash, so a tier files a chunk under
that hash and its length, equal chunks of several snapshots lie there once, and every tier can be
asked without trust: what does not hash right is dropped and the next tier is read. Only the bucket
decides what exists; a tier may lose anything at any time.

    memory   SegmentTier, what was staged; FolderTier in /dev/shm      survives the worker
    disk     FolderTier on a disk                                      survives the agent
    peer     PeerTier, ChunkServer                                     survives the node
    bucket                                                             survives all

Knows nothing of torch or harness. An error of a tier is a miss; errors of the bucket travel as they
are.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from storage.chunks import chunk_id, is_chunk
from storage.errors import NotFound, StoreError
from storage.folder_tiers import FolderTier
from storage.manifest import Manifest, Part
from storage.objects import ObjectStore, copy_into, read_into
from storage.peers import PeerTier
from storage.staging import Segment

# chunks that one process of a node fetches while the others wait: one request of a load, 8 MiB
BLOCK_CHUNKS = 2
NODE_WAIT_S = 60.0  # for another process of this node to fetch a block; then we fetch it ourselves

OnWrong = Callable[[str, str], None]  # (tier's name, what was wrong)


class Tier(Protocol):
    """A place that may hold chunks. Nothing in it is trusted, and nothing in it is needed."""

    name: str

    def get(self, id: str) -> bytes | memoryview | None:
        """What is filed under `id`, unverified; None if it has nothing or does not answer."""

    def put(self, chunks: Mapping[str, bytes | memoryview]) -> int:
        """File chunks, dropping the least recently used ones if there is no room. Returns how
        many were filed."""

    def drop(self, id: str) -> None:
        """Forget a chunk; no error if it is not there."""


class SegmentTier:
    """Parts of one snapshot where they were staged; nothing is copied, and nothing can be added."""

    name = "memory"

    def __init__(self, manifest: Manifest, places: Mapping[str, tuple[str, int, int]]):
        """`places`: part key -> (file, start, end)."""
        self._chunks: dict[str, memoryview] = {}
        files: dict[str, Segment] = {}
        for part in manifest.parts:
            path, start, end = places.get(part.key, ("", 0, 0))
            if end - start != part.nbytes:
                continue
            with contextlib.suppress(OSError, ValueError):  # gone, or empty
                files[path] = files.get(path) or Segment.open(Path(path), writable=False)
                view, size = files[path].view[start:end], part.chunk_nbytes
                self._chunks |= {
                    chunk_id(part, i): view[i * size : (i + 1) * size]
                    for i in range(len(part.hashes))
                }

    def get(self, id: str) -> memoryview | None:
        return self._chunks.get(id)

    def put(self, chunks: Mapping[str, bytes | memoryview]) -> int:
        return 0

    def drop(self, id: str) -> None:
        self._chunks.pop(id, None)

    def list(self) -> list[str]:
        return sorted(self._chunks)


# ---- reading through them ------------------------------------------------------------------------
@dataclass(frozen=True)
class _Wanted:
    """Whole chunks of a part, and the memory where their bytes go. `start`: its place in the
    part."""

    part: Part
    start: int
    memory: memoryview

    def place(self, first: int, last: int) -> memoryview:
        """Of chunks [first, last)."""
        size = self.part.chunk_nbytes
        return self.memory[first * size - self.start : last * size - self.start]

    def id(self, i: int) -> str:
        return chunk_id(self.part, i)


class Tiered:
    """A store whose parts of one snapshot are read from the nearest tier that has them right; all
    else is the bucket's.

    `tiers`, nearest first. `on_wrong(tier, what)` hears of wrong bytes in one; they are dropped
    there. What has to come from afar is left in the FolderTiers and, if there is one, fetched once
    per node: other processes wait for it, at most `node_wait_s`. `replica` opens a second bucket,
    which is asked for what is damaged in the first.
    """

    def __init__(
        self,
        far: ObjectStore,
        manifest: Manifest,
        tiers: Sequence[Tier],
        on_wrong: OnWrong = lambda tier, what: None,
        node_wait_s: float = NODE_WAIT_S,
        replica: Callable[[], ObjectStore] | None = None,
    ):
        self._open_replica = replica
        self._replica: ObjectStore | None = None
        self.url, self._far, self.tiers, self._on_wrong, self._node_wait_s = (
            far.url,
            far,
            list(tiers),
            on_wrong,
            node_wait_s,
        )
        self._parts = manifest.stored
        self._folders = [t for t in tiers if isinstance(t, FolderTier)]
        self._near = [t for t in tiers if not isinstance(t, PeerTier)]
        self._peers = [t for t in tiers if isinstance(t, PeerTier)]
        self._count = threading.Lock()
        self.read_nbytes: Counter[str] = Counter()  # by tier's name, "bucket" among them

    @property
    def tier(self) -> str:
        """Where the bytes read so far came from, nearest first: "memory", "memory+bucket".
        "bucket" before any read."""
        names = [*dict.fromkeys(t.name for t in self.tiers), "bucket", "replica"]
        return "+".join(name for name in names if self.read_nbytes[name]) or "bucket"

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        part = self._parts.get(key)
        low, high = start or 0, (part.nbytes if part else 0) if end is None else end
        if part is None or not _whole(part, low, high):
            return self._far.get(key, start, end)
        whole = memoryview(bytearray(high - low))
        return bytes(whole[: self.read_into(key, low, whole)])

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        """Straight to where the bytes are wanted: who restores has little room beside the state."""
        part, end = self._parts.get(key), start + buffer.nbytes
        if part is None or not _whole(part, start, end):
            return read_into(self._far, key, start, buffer)
        wanted = _Wanted(part, start, buffer.cast("B"))
        first, last = start // part.chunk_nbytes, -(-end // part.chunk_nbytes)
        found: dict[int, int] = {}  # bytes of each chunk that are in their place
        for i in range(first, last):
            if (data := self._right(self._near, wanted.id(i))) is not None:
                found[i] = copy_into(data, wanted.place(i, i + 1))
        for block in range(
            first // BLOCK_CHUNKS, (last - 1) // BLOCK_CHUNKS + 1 if last > first else 0
        ):
            from_, to = max(first, block * BLOCK_CHUNKS), min(last, (block + 1) * BLOCK_CHUNKS)
            if any(i not in found for i in range(from_, to)):
                self._fetch(wanted, from_, to, found)
        return sum(found.values())

    def _fetch(self, wanted: _Wanted, low: int, high: int, found: dict[int, int]) -> None:
        """Chunks [low, high) of one block that are not `found`, from afar, by one process of
        this node at a time."""
        # 256 files, not one a block
        part = wanted.part
        name = hashlib.blake2b(
            f"{part.key} {low // BLOCK_CHUNKS}".encode(), digest_size=1
        ).hexdigest()
        with (
            self._folders[0].locked(name, self._node_wait_s)
            if self._folders
            else contextlib.nullcontext()
        ):
            news: dict[str, bytes | memoryview] = {}
            missing: list[int] = []
            for i in range(low, high):
                if i in found:
                    continue
                id, place = wanted.id(i), wanted.place(i, i + 1)
                if (data := self._right(self._folders, id)) is not None:  # while we waited
                    found[i] = copy_into(data, place)
                elif (data := self._right(self._peers, id)) is not None:
                    found[i], news[id] = copy_into(data, place), place
                else:
                    missing.append(i)
            for run in _runs(missing):
                view = wanted.place(run[0], run[-1] + 1)
                arrived = self._from_bucket(part, run[0] * part.chunk_nbytes, view)
                self._add("bucket", arrived)
                for k, i in enumerate(run):
                    id, place = wanted.id(i), wanted.place(i, i + 1)
                    found[i] = max(0, min(arrived - k * part.chunk_nbytes, place.nbytes))
                    right = is_chunk(id, place[: found[i]])
                    if not right and (data := self._from_replica(part, i)) is not None:
                        found[i], right = copy_into(data, place), True
                    # what is wrong everywhere is for the caller to find out
                    if right:
                        news[id] = place
            if news:
                for tier in self._folders:
                    tier.put(news)

    def _from_bucket(self, part: Part, start: int, place: memoryview) -> int:
        try:
            return read_into(self._far, part.key, start, place)
        except NotFound:
            if self._open_replica is None:
                raise
            return 0

    def _from_replica(self, part: Part, i: int) -> bytes | None:
        """A chunk that is wrong in the bucket."""
        if self._open_replica is None or not part.hashes[i]:  # "": of other snapshots alone
            return None
        size, data = part.chunk_nbytes, b""
        with contextlib.suppress(StoreError, NotFound):
            self._replica = self._replica or self._open_replica()
            data = self._replica.get(part.key, i * size, min((i + 1) * size, part.nbytes))
        if not is_chunk(chunk_id(part, i), data):
            return None
        self._add("replica", len(data))
        self._on_wrong(
            "bucket",
            f"{part.key}, bytes from {i * size}: damaged in {self.url}; read from the second "
            "bucket",
        )
        return data

    def _right(self, tiers: Sequence[Tier], id: str) -> bytes | memoryview | None:
        for tier in tiers:
            data = tier.get(id)
            if data is None:
                continue
            if is_chunk(id, data):
                self._add(tier.name, len(data))
                return data
            tier.drop(id)
            self._on_wrong(
                tier.name,
                f"chunk {id} in the {tier.name} tier is not what was written; it was dropped and "
                "read elsewhere",
            )
        return None

    def _add(self, name: str, nbytes: int) -> None:
        with self._count:
            self.read_nbytes[name] += nbytes

    # ---- the bucket's ----
    def put(self, key: str, data: bytes | memoryview) -> None:
        self._far.put(key, data)

    def create(self, key: str, data: bytes | memoryview) -> bool:
        return self._far.create(key, data)

    def list(self, prefix: str) -> list[str]:
        return self._far.list(prefix)

    def delete(self, key: str) -> None:
        self._far.delete(key)

    def size(self, key: str) -> int:
        return self._far.size(key)


def _whole(part: Part, start: int, end: int) -> bool:
    """Whole chunks: of less nobody could tell whether it is right."""
    size = part.chunk_nbytes
    return start % size == 0 and (end % size == 0 or end == part.nbytes)


def blocks(part: Part, content: memoryview) -> Iterator[dict[str, bytes | memoryview]]:
    """A part as a tier's `put` takes it, a few chunks at a time."""
    size = part.chunk_nbytes
    for low in range(0, len(part.hashes), BLOCK_CHUNKS):
        yield {
            chunk_id(part, i): content[i * size : (i + 1) * size]
            for i in range(low, min(low + BLOCK_CHUNKS, len(part.hashes)))
        }


def share(manifest: Manifest, ids: Collection[str]) -> float:
    """Of the snapshot's bytes, those whose chunks are among `ids`."""
    sizes = {id: int(id.rpartition("-")[2]) for id in chunks_of([manifest])}
    return sum(nbytes for id, nbytes in sizes.items() if id in ids) / max(1, sum(sizes.values()))


def chunks_of(manifests: Iterable[Manifest]) -> set[str]:
    return {
        chunk_id(part, i) for m in manifests for part in m.parts for i in range(len(part.hashes))
    }


def _runs(numbers: Sequence[int]) -> list[list[int]]:
    """[1, 2, 5] -> [[1, 2], [5]]"""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][-1] + 1 == n:
            runs[-1].append(n)
        else:
            runs.append([n])
    return runs
