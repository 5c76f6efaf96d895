"""Tiers that keep chunks as files, in memory or on a disk, shared by all processes of a node."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from storage.private_folders import is_ours, own_folder
from storage.snapshots.manifest import CHUNK_ID

FOLDER_LOCK_S = 10.0
LEAST_LISTED = 64  # least number of chunks to note as next to go when a full folder is listed


class FolderTier:
    """Chunks as files, shared by all processes of a node. At most `budget_nbytes` bytes; the least
    recently used go first.

    In /dev/shm it is the memory tier, on a disk the disk tier. A reader with an open file keeps its
    bytes when the chunk is dropped, unless `over` is set: then new chunks are written over dropped
    files, which is less work for the file system, and readers must verify hashes.
    """

    def __init__(self, name: str, folder: Path, budget_nbytes: int, over: bool = False):
        if budget_nbytes < 0:
            raise ValueError(
                f"the budget of the {name} tier is in bytes, at least 0; found {budget_nbytes}"
            )
        self.name, self.root, self.budget_nbytes = name, folder, budget_nbytes
        self._folder = folder / "chunks"
        self._locks = folder / "locks"
        self._count = folder / "used"
        self._over = over
        # (last use in ns, bytes, id) of the chunks that go next, from the last listing of the
        # folder
        self._oldest: deque[tuple[int, int, str]] = deque()
        for each in (self._folder, self._locks):
            each.mkdir(parents=True, exist_ok=True)

    def get(self, id: str) -> bytes | None:
        try:
            return _read(f"{self._folder}/{id}", used=True)
        except OSError:  # not there, or a bad disk, which counts as a miss
            return None

    def put(self, chunks: Mapping[str, bytes | memoryview]) -> int:
        wanted = {id: data for id, data in chunks.items() if not self.touch(id)}
        filed = len(chunks) - len(wanted)
        wanted = {id: data for id, data in wanted.items() if len(data) <= self.budget_nbytes}
        with self.locked("put", FOLDER_LOCK_S) if wanted else contextlib.nullcontext(False) as mine:
            if not mine:
                return filed
            need, used = sum(map(len, wanted.values())), self._used()
            spare: dict[str, int] = {}
            if used is None or used + need > self.budget_nbytes:
                used, spare = self._make_room(need, chunks, used)
            planned = used + need
            # noted before writing, so that a crash leaves the count too high and never too low
            self._note(planned)
            for id, data in wanted.items():
                if used + len(data) > self.budget_nbytes:
                    break
                over = spare.popitem()[0] if spare else ""
                while spare and used + len(data) + sum(spare.values()) > self.budget_nbytes:
                    self._unlink(spare.popitem()[0])
                try:
                    self._write(id, data, over)
                except OSError:  # the device is smaller than the budget, or broken: do without
                    break
                used += len(data)
                filed += 1
            for name in spare:
                self._unlink(name)
            if used != planned:
                self._note(used)
        return filed

    def _make_room(
        self, need: int, stay: Collection[str], used: int | None
    ) -> tuple[int, dict[str, int]]:
        """Drop the least recently used chunks to make room for `need` bytes. Returns the bytes that
        are left, and the names and sizes of files that may be overwritten, which do not count."""
        spare: dict[str, int] = {}
        for listed in (False, True):
            if listed or used is None:
                self._drop_halves(stay=spare)
                there = sorted(self._entries())
                used = sum(nbytes for _, nbytes, _ in there)
                self._oldest = deque(there[: max(LEAST_LISTED, len(there) // 2)])
            while self._oldest and used + need > self.budget_nbytes:
                used_ns, nbytes, id = self._oldest.popleft()
                if id not in stay and self._used_ns(id) == used_ns:
                    if name := self._spared(id):
                        spare[name] = nbytes
                    used -= nbytes
            if used + need <= self.budget_nbytes:
                break
        assert used is not None
        return used, spare

    def _used_ns(self, id: str) -> int:
        try:
            return os.stat(f"{self._folder}/{id}").st_mtime_ns
        except OSError:
            return 0

    def _spared(self, id: str) -> str:
        """Drop a chunk. Returns the name of its file if that may be overwritten, else ""."""
        name = f".{id}"
        if self._over:
            with contextlib.suppress(OSError):
                os.replace(f"{self._folder}/{id}", f"{self._folder}/{name}")
                return name
        self._unlink(id)
        return ""

    def _used(self) -> int | None:
        """Return an upper bound of the bytes in the folder (later drops are not subtracted); None
        if there is no count. The caller holds the lock "put"."""
        try:
            return int(_read(str(self._count)))
        except (OSError, ValueError):
            return None

    def _note(self, used: int) -> None:
        try:
            # always the same length, so that no half of an old number remains
            _write(str(self._count), b"%020d" % used)
        except OSError:
            self._count.unlink(missing_ok=True)

    def drop(self, id: str) -> None:
        self._oldest.clear()  # there is room now; the next listing shows how much
        self._unlink(id)

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(f"{self._folder}/{name}")

    def keep(self, ids: Iterable[str]) -> int:
        """Drop the other chunks that are older than the newest of `ids` (newer ones may belong to a
        snapshot under way). Returns bytes freed."""
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

    @property
    def filed_nbytes(self) -> int:
        """`nbytes` or somewhat more, mostly without listing the folder."""
        used = self._used()
        return self.nbytes if used is None else used

    @contextlib.contextmanager
    def locked(self, name: str, wait_s: float) -> Iterator[bool]:
        """Hold a lock that one process of the node, and one thread of it, can have at a time.
        Yields False if it was not free within `wait_s` seconds. The holder's death frees it."""
        try:
            fd = os.open(self._locks / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:  # the folder is gone or the device is broken
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

    def touch(self, id: str) -> bool:
        """Mark a chunk as used now. Returns False if it is not there."""
        try:
            os.utime(f"{self._folder}/{id}")
        except OSError:
            return False
        return True

    def _write(self, id: str, data: bytes | memoryview, over: str) -> None:
        # a name per thread: where locks do nothing, two writers may hold "put"
        new = f"{self._folder}/{over or f'.{os.getpid()}-{threading.get_ident()}'}"
        try:
            _write(new, data)
            os.replace(new, f"{self._folder}/{id}")
        except OSError:
            self._unlink(os.path.basename(new))
            raise

    def _drop_halves(self, stay: Collection[str] = ()) -> None:
        """Remove files that killed writers left half written. The caller holds "put", as every
        writer does, so nobody is still writing them."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self._folder):
                if name.startswith(".") and name not in stay:
                    self._unlink(name)

    def _entries(self) -> Iterator[tuple[int, int, str]]:
        """Yield (last use in ns, bytes, id) of every chunk; files that killed writers left half
        written are skipped."""
        try:
            names = os.listdir(self._folder)
        except OSError:
            return
        for name in filter(CHUNK_ID.fullmatch, names):
            with contextlib.suppress(OSError):
                stat = os.stat(self._folder / name)
                yield stat.st_mtime_ns, stat.st_size, name


# Few system calls: at each one Python lets its other threads run, and this thread must wait.
def _read(path: str, used: bool = False) -> bytes:
    """Return all bytes of a file. `used`: mark it as used now. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        nbytes = os.fstat(fd).st_size
        data = os.read(fd, nbytes)
        while len(data) < nbytes and (more := os.read(fd, nbytes - len(data))):
            data += more
        if used:
            os.utime(fd)
        return data
    finally:
        os.close(fd)


def _write(path: str, data: bytes | memoryview) -> None:
    """Write a file, or overwrite it in place. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        left = memoryview(data).cast("B")
        if os.fstat(fd).st_size > len(left):  # overwriting a longer file
            os.ftruncate(fd, len(left))
        while len(left):
            left = left[os.write(fd, left) :]
    finally:
        os.close(fd)


class OwnedFolder:
    """The folder `root`/<hash of `owner`>, ours until `close` or death. Folders beside it that
    nobody holds belong to dead owners and are removed.

    The same owner (a run on a node) finds its folder again after a death; another owner's is gone.
    Held by a shared lock on a file in it. Raises NotOurs if it belongs to another user.
    """

    def __init__(self, root: Path, owner: str):
        self.path = root / f"tier-{hashlib.blake2b(owner.encode(), digest_size=8).hexdigest()}"
        while True:
            try:
                own_folder(self.path)
                fd = os.open(self.path / "owner", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(fd, fcntl.LOCK_SH)
            except FileNotFoundError:  # a cleaner removed the folder meanwhile
                continue
            with contextlib.suppress(FileNotFoundError):
                if os.stat(self.path / "owner").st_ino == os.fstat(fd).st_ino:
                    break
            os.close(fd)
        self._fd = fd
        for other in root.glob("tier-*"):
            if other != self.path:
                _remove_unowned(other)
        for half in self.path.glob("chunks/.*"):  # left half written by a killed process
            half.unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._fd)


def _remove_unowned(folder: Path) -> None:
    if not is_ours(folder):
        return
    try:
        fd = os.open(folder / "owner", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # being created, or another user's
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        return
    finally:
        os.close(fd)
