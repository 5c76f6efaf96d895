"""Host memory for staged snapshots: segments, and the folder of shared ones that outlives a worker.
No torch.

A `Segment` is writable memory of a fixed size: anonymous (of this process), or a file in a RAM disk
that several processes map. A `Stage` is the folder of such files that one owner, the node agent,
holds. It is locked for as long as the owner lives, however it ends, so `sweep` can find what a
killed owner left. A budget limits what all its segments take.

Errors:
    StageFull   the budget, the RAM disk or the memory is too small; the message says which and what
                to do
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from storage.errors import StoreError
from storage.private_folders import is_ours

PREFIX = "spotharness-stage-"
PAGE_NBYTES = 4096
RAM_DISK = Path("/dev/shm")


class StageFull(StoreError):
    """No memory for another staged snapshot."""


class Segment:
    """Memory of `nbytes` bytes. `path`: the file that other processes map, None for memory of this
    process."""

    def __init__(self, memory: mmap.mmap, path: Path | None = None):
        self.path, self.nbytes = path, len(memory)
        self.view = memoryview(memory)
        self.filled: Any = None  # the writer's own knowledge of the content

    @classmethod
    def anonymous(cls, nbytes: int) -> Segment:
        return cls(mmap.mmap(-1, max(1, nbytes)))

    @classmethod
    def create(cls, path: Path, nbytes: int) -> Segment:
        """Create a file and allocate its memory now, not at the first write. Raises StageFull."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, max(1, nbytes))
            else:
                os.ftruncate(fd, max(1, nbytes))
            return cls(mmap.mmap(fd, max(1, nbytes)), path)
        except OSError as e:
            path.unlink(missing_ok=True)
            if e.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise
            raise StageFull(
                f"{path.parent}: no room for {_mib(nbytes)} of a staged snapshot, "
                f"{_mib(shutil.disk_usage(path.parent).free)} are free; enlarge the RAM disk "
                "(docker: --shm-size), or choose a folder with --set stage_dir=FOLDER"
            ) from e
        finally:
            os.close(fd)

    @classmethod
    def open(cls, path: Path, writable: bool = True) -> Segment:
        """Map a file that another process created. Raises FileNotFoundError."""
        fd = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
        try:
            return cls(
                mmap.mmap(fd, 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ), path
            )
        finally:
            os.close(fd)

    def touch(self) -> Segment:
        """Fault in every page now (and not during the first copy). For a background thread: it does
        not hold the GIL."""
        pages = np.frombuffer(self.view, np.uint8)[::PAGE_NBYTES]
        np.bitwise_or(pages, 0, out=pages)  # rewrites the present values
        return self


class Stage:
    """The folder of one owner's segments. `budget_nbytes`: limit of all together; None: half of
    what the RAM disk and the memory have free."""

    def __init__(self, parent: Path | None = None, budget_nbytes: int | None = None):
        parent = parent or default_parent()
        parent.mkdir(parents=True, exist_ok=True)
        name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(3)}"
        # `sweep` does not look for this name, so a folder that it finds always has its lock
        new = parent / f".{name}"
        new.mkdir(mode=0o700)
        self._lock = os.open(new / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.folder = parent / name
        new.rename(self.folder)
        self.budget_nbytes = free_nbytes(parent) // 2 if budget_nbytes is None else budget_nbytes

    def close(self) -> None:
        """Remove everything; a process that still maps a segment keeps its memory."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


class Segments:
    """The segments in a stage's folder, created and counted within the budget. Used by one process;
    thread-safe."""

    def __init__(self, folder: Path, budget_nbytes: int):
        self.folder, self.budget_nbytes = folder, budget_nbytes
        self._sizes: dict[Path, int] = {}
        self._lock = threading.Lock()

    def create(self, nbytes: int) -> Segment:
        """Create a segment within the budget. Raises StageFull."""
        path = self.folder / f"{secrets.token_hex(6)}.segment"
        with self._lock:
            taken = sum(self._sizes.values())
            if taken + nbytes > self.budget_nbytes:
                raise StageFull(
                    f"the stage's budget is {_mib(self.budget_nbytes)}, {_mib(taken)} are taken, "
                    f"{_mib(nbytes)} more are wanted for a staged snapshot; --set stage_gib=MORE"
                )
            self._sizes[path] = nbytes
        try:
            return Segment.create(path, nbytes)
        except BaseException:
            with self._lock:
                self._sizes.pop(path, None)
            raise

    def drop(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        with self._lock:
            self._sizes.pop(path, None)


def default_parent() -> Path:
    return (
        RAM_DISK
        if RAM_DISK.is_dir() and os.access(RAM_DISK, os.W_OK)
        else Path(os.environ.get("TMPDIR", "/tmp"))
    )


def free_nbytes(parent: Path) -> int:
    return min(shutil.disk_usage(parent).free, psutil.virtual_memory().available)


def sweep(parent: Path | None = None) -> list[Path]:
    """Remove the folders of dead owners and return them. An owner is recognized by its lock, not by
    its pid (containers share a RAM disk, but not pids)."""
    gone = []
    for folder in filter(is_ours, (parent or default_parent()).glob(f"{PREFIX}*")):
        try:
            fd = os.open(folder / "lock", os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # it is just being removed
            continue
        try:
            with contextlib.suppress(BlockingIOError):  # its owner lives
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
                gone.append(folder)
        finally:
            os.close(fd)
    return gone


def _mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):,.0f} MiB"
