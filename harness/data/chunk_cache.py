"""One cache of chunks for each node, on its disk, shared by all processes of its user.

    FOLDER/chunks/b3.3f0c...-262144     a chunk, named by its hash and its length
    FOLDER/locks/                       locks for filling the cache, and for fetching chunks

The same chunk of two corpora or runs is one file. Nothing in it is trusted, since each reader
hashes its chunks, and nothing in it is needed: if it cannot be written, a warning is issued and
reading continues without it. There is no daemon; a process's death releases its locks, and its
half-written files are removed when room is made.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from harness.core.world import BadInput
from storage.errors import StoreError
from storage.private_folders import own_folder
from storage.tiers.folder_tier import FolderTier

FOLDER, GIB = "HARNESS_DATA_CACHE", "HARNESS_DATA_CACHE_GIB"  # environment variables
NONE = "off"
LOCAL = ("file://", "memory://")  # what is read from there is local already
FREE_SHARE = 10  # by default the limit is one part in this many of the free disk
# Bounds of the default limit: a smaller cache is useless, a larger one has too many files.
LEAST_NBYTES, MOST_NBYTES = 16 << 20, 64 << 30
TURN_WAIT_S = 60.0  # wait for another process's fetch of a chunk; then we fetch it ourselves
TURNS = 3  # hex digits: chunks share 16 to the power of this many locks


class NodeCache:
    """Chunks by their names (`storage/snapshots/manifest.py`). Any thread may call it; a forked
    process makes
    its own."""

    def __init__(self, folder: Path, nbytes: int):
        """Open the cache. Raises OSError, StoreError if the folder cannot be written or is another
        user's."""
        self.folder, self.nbytes = folder, nbytes
        self._tier = FolderTier("cache", own_folder(folder), nbytes, over=True)
        self._lock = threading.Lock()  # keeps our threads from polling for the file's lock
        self._warned = False

    def get(self, id: str) -> bytes | None:
        return self._tier.get(id)

    def touch(self, id: str) -> bool:
        """Mark a chunk that will be read soon as used. Returns False if it is not cached."""
        return self._tier.touch(id)

    def put(self, chunks: Mapping[str, bytes]) -> None:
        """Write chunks, whose hashes were checked, by name."""
        with self._lock:
            filed = self._tier.put(chunks)
        if filed < len(chunks) and not self._warned:
            self._warned = True
            _warn(f"{self.folder} takes no more now (a full disk?); data are read without it")

    def drop(self, id: str) -> None:
        self._tier.drop(id)

    @contextlib.contextmanager
    def turn(self, ids: Iterable[str]) -> Iterator[None]:
        """Hold the right to fetch these chunks: one process of the node at a time, except that
        after TURN_WAIT_S it proceeds without."""
        with contextlib.ExitStack() as stack:
            # the same order in all processes, so that they cannot deadlock
            for digits in sorted({id.partition(".")[2][:TURNS] for id in ids}):
                stack.enter_context(self._tier.locked(f"fetch-{digits}", TURN_WAIT_S))
            yield


def opened(
    url: str,
    cache: str | os.PathLike[str] | None = "",
    disk_nbytes: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> NodeCache | None:
    """Return the cache for data at `url`. `cache`: a folder; "" means HARNESS_DATA_CACHE, by
    default the user's cache folder, but no cache for a corpus that is a local folder; None or "off"
    means no cache. `disk_nbytes`: its limit; None means HARNESS_DATA_CACHE_GIB, by default a tenth
    of the disk's free space and the cache's content, at most 64 GiB. Returns None for no cache, and
    also, with a warning, if it cannot be used. Raises BadInput."""
    where = NONE if cache is None else os.fspath(cache) or environ.get(FOLDER, "")
    bound = _bound(disk_nbytes, environ)
    if where == NONE or bound == 0 or (not where and url.startswith(LOCAL)):
        return None
    folder = Path(where).expanduser() if where else _of_user(environ)
    try:
        own_folder(folder)
        if bound is None:
            filed = FolderTier("cache", folder, 0).filed_nbytes
            bound = (shutil.disk_usage(folder).free + filed) // FREE_SHARE
            bound = min(MOST_NBYTES, bound)
        if bound < LEAST_NBYTES and disk_nbytes is None:
            raise OSError(f"its disk has room for {bound >> 20} MiB only")
        return NodeCache(folder, bound)
    except (OSError, RuntimeError, StoreError) as e:  # no home, no room, no permission, not ours
        _warn(f"{folder} cannot be used ({e}); data are read without it")
        return None


def _of_user(environ: Mapping[str, str]) -> Path:
    root = environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if root else Path("~/.cache").expanduser()) / "spotharness" / "data"


def _bound(disk_nbytes: int | None, environ: Mapping[str, str]) -> int | None:
    if disk_nbytes is not None:
        if isinstance(disk_nbytes, bool) or not isinstance(disk_nbytes, int) or disk_nbytes < 0:
            raise BadInput(f"disk_nbytes={disk_nbytes!r}: wanted bytes, 0 for no cache on disk")
        return disk_nbytes
    if not (text := environ.get(GIB, "")):
        return None
    return gib_nbytes(text)


def gib_nbytes(text: str) -> int:
    """Parse HARNESS_DATA_CACHE_GIB into bytes. Raises BadInput."""
    with contextlib.suppress(ValueError):
        if math.isfinite(found := float(text)) and found >= 0:
            return int(found * 2**30)
    raise BadInput(f"{GIB}={text[:80]!r}: wanted GiB, 0 for no cache on disk")


def _warn(what: str) -> None:
    warnings.warn(f"the cache of data {what}", RuntimeWarning, stacklevel=3)
