"""Tiers: places nearer than the bucket that may hold bytes of a snapshot, and verified reads
through them.

The unit is the hash chunk of a part. The manifest gives its hash, and a tier files a chunk under
that hash and its length. So equal chunks of several snapshots are stored there once, and no tier
has to be trusted: a chunk with a wrong hash is dropped and the next tier is read. Only the bucket
decides what exists; a tier may lose anything at any time.

    memory   SegmentTier, what was staged; FolderTier in /dev/shm      survives the worker
    disk     FolderTier on a disk                                      survives the agent
    peer     PeerTier, ChunkServer                                     survives the node
    bucket                                                             survives all

Knows nothing of torch or harness. An error of a tier counts as a miss; errors of the bucket are
passed on unchanged.
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

from storage.errors import NotFound, StoreError
from storage.snapshots.manifest import Manifest, Part, PartList, chunk_id, is_chunk
from storage.snapshots.staging import Segment
from storage.stores.objects import ObjectStore, copy_into, read_into
from storage.tiers.folder_tier import FolderTier
from storage.tiers.peer_transport import PeerTier

# chunks that one process of a node fetches while the others wait: one request of 8 MiB
BLOCK_CHUNKS = 2
# seconds to wait for another process to fetch a block before fetching it ourselves
NODE_WAIT_S = 60.0

OnWrong = Callable[[str, str], None]  # (tier's name, what was wrong)


class Tier(Protocol):
    """A place that may hold chunks. Its contents are neither trusted nor required."""

    name: str

    def get(self, id: str) -> bytes | memoryview | None:
        """Return the bytes filed under `id`, unverified; None if there are none or the tier does
        not answer."""

    def put(self, chunks: Mapping[str, bytes | memoryview]) -> int:
        """File chunks, dropping the least recently used ones to make room. Returns how many were
        filed."""

    def drop(self, id: str) -> None:
        """Remove a chunk; no error if it is not there."""


class SegmentTier:
    """Parts of one snapshot where they were staged. Nothing is copied, and nothing can be added."""

    name = "memory"

    def __init__(self, parts: Iterable[Part], places: Mapping[str, tuple[str, int, int]]):
        """Index the staged parts. `places`: part key -> (file, start, end)."""
        self._chunks: dict[str, memoryview] = {}
        files: dict[str, Segment] = {}
        for part in parts:
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
    """Whole chunks of a part, and the memory for their bytes. `start`: the position in the part
    that the memory begins at."""

    part: Part
    start: int
    memory: memoryview

    def place(self, first: int, last: int) -> memoryview:
        """Return the memory of chunks [first, last)."""
        size = self.part.chunk_nbytes
        return self.memory[first * size - self.start : last * size - self.start]

    def id(self, i: int) -> str:
        return chunk_id(self.part, i)


class Tiered:
    """A store that reads the parts of one snapshot from the nearest tier with right bytes;
    everything else goes to the bucket.

    `tiers` are ordered nearest first. `on_wrong(tier, what)` is called for wrong bytes in a tier,
    which are dropped there. Chunks that come from a peer or the bucket are left in the FolderTiers
    and, if there is one, fetched once per node: other processes wait for them, at most
    `node_wait_s` seconds. `replica` opens a second bucket, which is read where the first is
    damaged.
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
        # by tier's name; "bucket" and "replica" count as tiers
        self.read_nbytes: Counter[str] = Counter()

    @property
    def tier(self) -> str:
        """Sources of the bytes read so far, nearest first: "memory", "memory+bucket". "bucket"
        before any read."""
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
        """Read straight into `buffer`: a restore has little memory to spare beside the state."""
        part, end = self._parts.get(key), start + buffer.nbytes
        if part is None or not _whole(part, start, end):
            return read_into(self._far, key, start, buffer)
        wanted = _Wanted(part, start, buffer.cast("B"))
        first, last = start // part.chunk_nbytes, -(-end // part.chunk_nbytes)
        found: dict[int, int] = {}  # chunk -> bytes of it that are in place
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
        """Fetch the chunks [low, high) of one block that are not `found`, from peers or the bucket,
        by one process of this node at a time."""
        # two hex digits: at most 256 lock files, not one per block
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
                # filed there while we waited
                if (data := self._right(self._folders, id)) is not None:
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
                    # bytes that are wrong everywhere are detected by the caller
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
        """Return a chunk that is wrong in the bucket, read from the second bucket; None if it has
        none."""
        # "": only other snapshots use the chunk
        if self._open_replica is None or not part.hashes[i]:
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

    # ---- passed on to the bucket ----
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
    """Return whether [start, end) consists of whole chunks; anything less cannot be verified."""
    size = part.chunk_nbytes
    return start % size == 0 and (end % size == 0 or end == part.nbytes)


def blocks_of_part(part: Part, content: memoryview) -> Iterator[dict[str, bytes | memoryview]]:
    """Yield a part in the form that a tier's `put` takes, BLOCK_CHUNKS chunks at a time."""
    size = part.chunk_nbytes
    for low in range(0, len(part.hashes), BLOCK_CHUNKS):
        yield {
            chunk_id(part, i): content[i * size : (i + 1) * size]
            for i in range(low, min(low + BLOCK_CHUNKS, len(part.hashes)))
        }


def share(manifest: Manifest, ids: Collection[str]) -> float:
    """Return the share of the snapshot's bytes, in [0, 1], whose chunks are among `ids`."""
    sizes = {id: int(id.rpartition("-")[2]) for id in chunks_of([manifest])}
    return sum(nbytes for id, nbytes in sizes.items() if id in ids) / max(1, sum(sizes.values()))


def chunks_of(manifests: Iterable[Manifest | PartList]) -> set[str]:
    return {
        chunk_id(part, i) for m in manifests for part in m.parts for i in range(len(part.hashes))
    }


def _runs(numbers: Sequence[int]) -> list[list[int]]:
    """Group consecutive numbers: [1, 2, 5] -> [[1, 2], [5]]."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][-1] + 1 == n:
            runs[-1].append(n)
        else:
            runs.append([n])
    return runs
