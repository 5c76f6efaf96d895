"""Stores in memory and in a folder."""

from __future__ import annotations

import bisect
import contextlib
import errno
import os
import stat
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from storage.errors import NotFound, StoreError, StoreRefused, StoreUnavailable
from storage.stores.objects import Keys, all_of, copy_into, why_not_a_key

if TYPE_CHECKING:
    from storage.stores.objects import Gate

# Errors of network file systems while their server restarts or a lease is renewed.
FALTERING = {
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENOTCONN,
    errno.ECONNRESET,
    errno.EAGAIN,
}
MOST_NAME_NBYTES = 255  # bytes of a file name, on Linux and macOS
# Errors of file systems that cannot sync a folder (FUSE, some network file systems).
NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}
SECRETS = "secret"  # names of files that begin so are for their owner only
READS_AT_ONCE = 8  # small files read at once; they may lie on a network
PIECE_NBYTES = 4 << 20  # size of the pieces of a paced write
# objects of memory:// in this process; fsspec's own has no create-only write
_memory: dict[str, bytes] = {}
_memory_lock = threading.Lock()


class MemoryStore:
    """Store for `memory://name`, within this process; for tests and simulation. Every call is
    atomic."""

    def __init__(self, url: str = "memory://", objects: dict[str, bytes] | None = None):
        self.url = url.rstrip("/")
        self._objects = _memory if objects is None else objects
        self._root = "" if objects is not None else self.url.removeprefix("memory:") + "/"

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        try:
            return self._objects[self._root + key][start:end]
        except KeyError:
            raise NotFound(f"{self.url}/{key}") from None

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._objects[self._root + key] = bytes(data)

    def create(self, key: str, data: bytes | memoryview) -> bool:
        with _memory_lock:
            if self._root + key in self._objects:
                return False
            self._objects[self._root + key] = bytes(data)
            return True

    def list(self, prefix: str) -> list[str]:
        full = self._root + prefix
        return sorted(k[len(self._root) :] for k in list(self._objects) if k.startswith(full))

    def delete(self, key: str) -> None:
        self._objects.pop(self._root + key, None)

    def size(self, key: str) -> int:
        return len(self.get(key))

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        return copy_into(self.get(key, start, start + buffer.nbytes), buffer)


def refuse_to_leave(url: str, key: str) -> None:
    """Raise StoreError for a key that leads out of its store. An absolute key, or one with "..",
    would name another file of this machine, whoever made it."""
    if why := why_not_a_key(key):
        raise StoreError(
            f"{url}: {key!r} is no key of an object here: {why}; whoever named it is damaged, or "
            "means harm"
        )


def _open_file(path: str, flags: int) -> int:
    """Open a regular file; anything else raises FileNotFoundError. A pipe or a device in the place
    of an object would never answer, or answer forever."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FileNotFoundError(errno.ENOENT, "it is no file", path)
    return fd


def _owners_only(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class FileStore:
    """Store for `file://`: atomic by rename (put) and by link (create-only).

    `durable`: a completed write survives a loss of power. The bytes are on the disk before the file
    gets its name; the name, deletions, and every folder on the way are on it before the call
    returns. What is named `secret...` can be read by its owner only (mode 0600).
    """

    def __init__(self, url: str, durable: bool = False):
        self.url, self._durable = url, durable
        self.reads_at_once = READS_AT_ONCE
        self._root = Path(url.removeprefix("file://"))
        self._lasting: set[Path] = set()  # folders known to be on the disk

    def _path(self, key: str) -> Path:
        """Return the path of a key. Raises StoreError for an invalid key, and for one that a link
        leads elsewhere."""
        refuse_to_leave(self.url, key)
        path = str(self._root)
        for part in key.split("/"):
            path = f"{path}/{part}"
            if os.path.islink(path):
                raise StoreError(
                    f"{self.url}: {key!r} leads out of this folder: {path} is a link; remove it"
                )
        return Path(path)

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        with self._answers(key), open(self._path(key), "rb", opener=_open_file) as f:
            first = f.seek(start or 0)
            if end is not None:
                return f.read(end - first)
            return all_of(f"{self.url}/{key}", f.read(), os.fstat(f.fileno()).st_size - first)

    @contextlib.contextmanager
    def _temporary(
        self, key: str, data: bytes | memoryview, gate: Gate = lambda nbytes: False
    ) -> Iterator[tuple[Path, Path]]:
        path = self._path(key)
        if any(len(os.fsencode(part)) > MOST_NAME_NBYTES for part in path.parts):
            raise StoreError(
                f"{self.url}: a folder cannot hold {key!r}: each part of a key has at most "
                f"{MOST_NAME_NBYTES} bytes here"
            )
        temporary = path.parent / f".{uuid.uuid4().hex}.tmp"
        with self._answers(key):
            try:
                self._make(path.parent)
            except (FileNotFoundError, NotADirectoryError) as e:
                raise StoreRefused(
                    f"{path.parent}: this folder cannot be made ({e.strerror}); check the path of "
                    "the run URL"
                ) from e
            try:
                opener = _owners_only if path.name.startswith(SECRETS) else None
                with open(temporary, "wb", buffering=0, opener=opener) as f:
                    view, at = memoryview(data).cast("B"), 0
                    while at < len(view):
                        some = view[at : at + PIECE_NBYTES]
                        if gate(len(some)):
                            at += f.write(some)
                            _let_go(f.fileno(), at)
                        else:
                            at += f.write(view[at:])
                    if self._durable:
                        os.fsync(f.fileno())
                yield temporary, path
            finally:
                temporary.unlink(missing_ok=True)
            # also if another writer was first: the caller will rely on the object
            if self._durable:
                _sync_folder(path.parent)

    def _make(self, folder: Path) -> None:
        """Create a folder within the root, with all its parents."""
        if not self._durable:
            folder.mkdir(parents=True, exist_ok=True)
            return
        if folder in self._lasting and folder.is_dir():
            return
        way = [folder, *folder.parents][:-1]
        for one in way:
            if not one.exists():
                self._lasting.discard(one)
        folder.mkdir(parents=True, exist_ok=True)
        # also folders that another process has just made: it may not have synced them yet
        device = folder.stat().st_dev
        for one in reversed(way):
            if one not in self._lasting and one.parent.stat().st_dev == device:
                try:
                    _sync_folder(one.parent)
                # the root's parents may be closed to us; only the root was given
                except PermissionError:
                    if one.is_relative_to(self._root) and one != self._root:
                        raise
            self._lasting.add(one)

    def put(self, key: str, data: bytes | memoryview) -> None:
        with self._temporary(key, data) as (temporary, path):
            os.replace(temporary, path)

    def put_paced(self, key: str, data: bytes | memoryview, gate: Gate) -> None:
        """Write in pieces. Each is on the disk before the next, so none has to wait for earlier
        ones, and leaves the page cache, where it would displace what the training reads."""
        with self._temporary(key, data, gate) as (temporary, path):
            os.replace(temporary, path)

    def create(self, key: str, data: bytes | memoryview) -> bool:
        with self._temporary(key, data) as (temporary, path):
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            return True

    def list(self, prefix: str) -> list[str]:
        inside = prefix.rpartition("/")[0]
        folder = self._path(inside) if inside else self._root
        found = []
        for parent, _, names in self._walk(folder):
            base = os.path.relpath(parent, self._root)
            for name in names:
                if name.startswith(".") and name.endswith(".tmp"):
                    continue
                key = name if base == "." else f"{base}/{name}"
                if key.startswith(prefix):
                    found.append(key)
        return sorted(found)

    def folders(self) -> Keys:
        with contextlib.suppress(NotFound), self._answers(""), os.scandir(self._root) as found:
            return sorted(one.name for one in found if one.is_dir())
        return []

    def _walk(self, folder: Path) -> Iterator[tuple[str, Keys, Keys]]:
        """Walk a folder. A missing folder is empty; an unreadable one raises."""

        def failed(e: OSError) -> None:
            if not isinstance(e, FileNotFoundError | NotADirectoryError):
                raise e

        with self._answers(""):
            yield from os.walk(folder, onerror=failed)

    def delete(self, key: str) -> None:
        with self._answers(key):
            path = self._path(key)
            try:
                path.unlink()
            except FileNotFoundError:
                return
            if self._durable:
                _sync_folder(path.parent)

    def size(self, key: str) -> int:
        with self._answers(key):
            found = self._path(key).stat()
            if stat.S_ISDIR(found.st_mode):
                raise NotFound(f"{self.url}/{key}: it is a folder")
            return found.st_size

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        view, done = buffer.cast("B"), 0
        with self._answers(key), open(self._path(key), "rb", buffering=0, opener=_open_file) as f:
            f.seek(start)
            while done < len(view):  # one read returns at most 2 GiB
                n = f.readinto(view[done:])
                if not n:
                    break
                done += n
        return done

    def abort_stale_uploads(self, older_than_s: float) -> Keys:
        """Remove temporary files of dead writers and return their keys. Those of living writers are
        younger than any sensible `older_than_s` (seconds)."""
        gone = []
        for path in self._root.rglob(".*.tmp"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime <= time.time() - older_than_s:
                    path.unlink()
                    gone.append(path.relative_to(self._root).as_posix())
        return sorted(gone)

    @contextlib.contextmanager
    def _answers(self, key: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError) as e:
            raise NotFound(f"{self.url}/{key}") from e
        except OSError as e:
            if e.errno == errno.ENAMETOOLONG:  # no such object can exist
                raise NotFound(f"{self.url}/{key}: {e.strerror}") from e
            if e.errno in FALTERING:
                raise StoreUnavailable(f"{self.url}/{key}: {e.strerror}") from e
            hint = {
                errno.ENOSPC: "the disk is full; free some space or choose another run URL",
                errno.EDQUOT: "the quota is used up; free some space or choose another run URL",
                errno.EACCES: "permission denied; choose a run URL that you may write to",
                errno.EPERM: "permission denied; choose a run URL that you may write to",
                errno.EROFS: "the file system is read-only; choose another run URL",
            }.get(e.errno or 0, "check the path")
            raise StoreRefused(f"{self.url}/{key}: {e.strerror or e}: {hint}") from e


def _let_go(fd: int, nbytes: int) -> None:
    """Flush the first `nbytes` bytes of a file to the disk and out of the page cache."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(fd)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, nbytes, os.POSIX_FADV_DONTNEED)


def _sync_folder(folder: Path) -> None:
    """Sync a folder, so that its current entries survive a loss of power."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno not in NO_FOLDER_SYNC:
            raise
    finally:
        os.close(fd)


class SortedStore(MemoryStore):
    """A store in memory with sorted keys: listing a prefix costs only what it finds."""

    def __init__(self, url: str = "memory://sim"):
        super().__init__(url, {})
        self._sorted: list[str] = []

    def put(self, key: str, data: bytes | memoryview) -> None:
        if key not in self._objects:
            bisect.insort(self._sorted, key)
        self._objects[key] = bytes(data)

    def create(self, key: str, data: bytes | memoryview) -> bool:
        if key in self._objects:
            return False
        self.put(key, data)
        return True

    def list(self, prefix: str) -> Keys:
        first = bisect.bisect_left(self._sorted, prefix)
        last = first
        while last < len(self._sorted) and self._sorted[last].startswith(prefix):
            last += 1
        return self._sorted[first:last]

    def delete(self, key: str) -> None:
        if self._objects.pop(key, None) is not None:
            del self._sorted[bisect.bisect_left(self._sorted, key)]
