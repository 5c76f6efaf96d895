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
import fcntl
import hashlib
import os
import shutil
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from storage.chunks import CHUNK_ID, chunk_id, is_chunk
from storage.errors import NotFound, StoreError
from storage.manifest import Manifest, Part
from storage.objects import ObjectStore
from storage.peers import PeerTier
from storage.staging import Segment

# chunks that one process of a node fetches while the others wait: one request of a load, 8 MiB
BLOCK_CHUNKS = 2
NODE_WAIT_S = 60.0  # for another process of this node to fetch a block; then we fetch it ourselves
FOLDER_LOCK_S = 10.0
ROOM_SHARE = 16  # of a full folder's budget one part is cleared at a time

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


class FolderTier:
    """Chunks as files, shared by all processes of a node. At most `budget_nbytes`; the least
    recently used go first.

    In /dev/shm it is the memory tier, on a disk the disk tier. A reader that has a file open keeps
    its bytes when it is dropped.
    """

    def __init__(self, name: str, folder: Path, budget_nbytes: int):
        if budget_nbytes < 0:
            raise ValueError(
                f"the budget of the {name} tier is in bytes, at least 0; found {budget_nbytes}"
            )
        self.name, self.root, self.budget_nbytes = name, folder, budget_nbytes
        self._folder = folder / "chunks"
        self._locks = folder / "locks"
        self._count = folder / "used"
        for each in (self._folder, self._locks):
            each.mkdir(parents=True, exist_ok=True)

    def get(self, id: str) -> bytes | None:
        path = self._folder / id
        try:
            data = path.read_bytes()
            os.utime(path)  # used now
            return data
        except OSError:  # not there, or a bad disk, which is a miss too
            return None

    def put(self, chunks: Mapping[str, bytes | memoryview]) -> int:
        wanted = {id: data for id, data in chunks.items() if not self._touch(id)}
        filed = len(chunks) - len(wanted)
        wanted = {id: data for id, data in wanted.items() if len(data) <= self.budget_nbytes}
        with self.locked("put", FOLDER_LOCK_S) if wanted else contextlib.nullcontext(False) as mine:
            if not mine:
                return filed
            need, used = sum(map(len, wanted.values())), self._used()
            if used is None or used + need > self.budget_nbytes:
                used = self._make_room(need, chunks)
            self._note(used + need)  # before, so that a death leaves too much and never too little
            for id, data in wanted.items():
                if used + len(data) > self.budget_nbytes:
                    break
                try:
                    self._write(id, data)
                except OSError:  # the device is smaller than the budget, or broken: go without
                    break
                used += len(data)
                filed += 1
            self._note(used)
        return filed

    def _make_room(self, need: int, stay: Collection[str]) -> int:
        """Drop the least recently used for `need` bytes, and for a share of the budget, so that the
        folder is not listed for each put. Returns the bytes that are there then."""
        there = sorted(self._entries())
        used = sum(nbytes for _, nbytes, _ in there)
        if used + need <= self.budget_nbytes:
            return used
        for _, nbytes, id in there:
            if used + max(need, self.budget_nbytes // ROOM_SHARE) <= self.budget_nbytes:
                break
            if id not in stay:
                self.drop(id)
                used -= nbytes
        return used

    def _used(self) -> int | None:
        """At most so many bytes are there (what was dropped since is not taken off); None:
        nobody counted. For who holds "put"."""
        try:
            return int(self._count.read_bytes())
        except (OSError, ValueError):
            return None

    def _note(self, used: int) -> None:
        try:
            self._count.write_bytes(b"%d" % used)
        except OSError:
            self._count.unlink(missing_ok=True)

    def drop(self, id: str) -> None:
        with contextlib.suppress(OSError):
            (self._folder / id).unlink()

    def keep(self, ids: Iterable[str]) -> int:
        """Drop other chunks that are older than the newest of `ids` (newer ones may be of a
        snapshot on its way). Returns bytes freed."""
        ids, there = set(ids), list(self._entries())
        newest_ns = max((used_ns for used_ns, _, id in there if id in ids), default=0)
        gone = [
            (nbytes, id) for used_ns, nbytes, id in there if id not in ids and used_ns < newest_ns
        ]
        for _, id in gone:
            self.drop(id)
        return sum(nbytes for nbytes, _ in gone)

    def list(self) -> list[str]:
        return sorted(id for _, _, id in self._entries())

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes, _ in self._entries())

    @contextlib.contextmanager
    def locked(self, name: str, wait_s: float) -> Iterator[bool]:
        """One process of the node, and one thread of it, at a time. False: not within `wait_s`.
        The holder's death frees it."""
        try:
            fd = os.open(self._locks / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:  # the folder is gone or the device broken
            yield False
            return
        try:
            deadline_s, mine = time.monotonic() + wait_s, False
            while not mine:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    mine = True
                if not mine and time.monotonic() >= deadline_s:
                    break
                if not mine:
                    time.sleep(0.01)
            yield mine
        finally:
            os.close(fd)

    def _touch(self, id: str) -> bool:
        try:
            os.utime(self._folder / id)
        except OSError:
            return False
        return True

    def _write(self, id: str, data: bytes | memoryview) -> None:
        new = self._folder / f".{uuid.uuid4().hex}"
        try:
            new.write_bytes(data)
            os.replace(new, self._folder / id)
        except OSError:
            new.unlink(missing_ok=True)
            raise

    def _entries(self) -> Iterator[tuple[int, int, str]]:
        """(last use in ns, bytes, id) of every chunk; what a killed writer left half written is
        none (see OwnedFolder)."""
        try:
            names = os.listdir(self._folder)
        except OSError:
            return
        for name in filter(CHUNK_ID.fullmatch, names):
            with contextlib.suppress(OSError):
                stat = os.stat(self._folder / name)
                yield stat.st_mtime_ns, stat.st_size, name


class OwnedFolder:
    """`root`/<hash of `owner`>, ours until `close` or death. Folders beside it that nobody holds
    are of dead owners and are removed.

    The same owner (a run on a node) finds its folder again after a death; another's is gone. Held
    by a shared lock on a file in it.
    """

    def __init__(self, root: Path, owner: str):
        self.path = root / f"tier-{hashlib.blake2b(owner.encode(), digest_size=8).hexdigest()}"
        while True:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                fd = os.open(self.path / "owner", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(fd, fcntl.LOCK_SH)
            except FileNotFoundError:  # a cleaner took the folder from under us
                continue
            with contextlib.suppress(FileNotFoundError):
                if os.stat(self.path / "owner").st_ino == os.fstat(fd).st_ino:
                    break
            os.close(fd)
        self._fd = fd
        for other in root.glob("tier-*"):
            if other != self.path:
                _remove_unowned(other)
        for half in self.path.glob("chunks/.*"):  # what a killed process was writing
            half.unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._fd)


def _remove_unowned(folder: Path) -> None:
    try:
        fd = os.open(folder / "owner", os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # not ours to judge: being made, or another user's
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        return
    finally:
        os.close(fd)


# ---- reading through them ------------------------------------------------------------------------
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
        if (
            part is None
            or low % part.chunk_nbytes
            or (high % part.chunk_nbytes and high != part.nbytes)
        ):
            # not whole chunks: nobody could tell whether they are right
            return self._far.get(key, start, end)
        first, last = low // part.chunk_nbytes, -(-high // part.chunk_nbytes)
        found = {
            i: data
            for i in range(first, last)
            if (data := self._right(self._near, chunk_id(part, i))) is not None
        }
        for block in range(
            first // BLOCK_CHUNKS, (last - 1) // BLOCK_CHUNKS + 1 if last > first else 0
        ):
            from_, to = max(first, block * BLOCK_CHUNKS), min(last, (block + 1) * BLOCK_CHUNKS)
            if any(i not in found for i in range(from_, to)):
                self._fetch(part, from_, to, found)
        return b"".join(found[i] for i in range(first, last))

    def _fetch(self, part: Part, low: int, high: int, found: dict[int, bytes | memoryview]) -> None:
        """Chunks [low, high) of one block that are not `found`, from afar, by one process of
        this node at a time."""
        # 256 files, not one a block
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
                id = chunk_id(part, i)
                if (data := self._right(self._folders, id)) is not None:  # while we waited
                    found[i] = data
                elif (data := self._right(self._peers, id)) is not None:
                    found[i] = news[id] = data
                else:
                    missing.append(i)
            size = part.chunk_nbytes
            for run in _runs(missing):
                view = memoryview(
                    self._from_bucket(part, run[0] * size, min((run[-1] + 1) * size, part.nbytes))
                )
                self._add("bucket", len(view))
                for k, i in enumerate(run):
                    found[i], id = view[k * size : (k + 1) * size], chunk_id(part, i)
                    if (
                        not is_chunk(id, found[i])
                        and (data := self._from_replica(part, i)) is not None
                    ):
                        found[i] = data
                    # what is wrong everywhere is for the caller to find out
                    if is_chunk(id, found[i]):
                        news[id] = found[i]
            if news:
                for tier in self._folders:
                    tier.put(news)

    def _from_bucket(self, part: Part, start: int, end: int) -> bytes:
        try:
            return self._far.get(part.key, start, end)
        except NotFound:
            if self._open_replica is None:
                raise
            return b""

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
            f"{part.key}, bytes from {i * size}: damaged in {self.url}; "
            "read from the second bucket",
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
    sizes = {id: int(id.partition("-")[2]) for id in chunks_of([manifest])}
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
