"""Objects in a bucket: the small interface through which everything durable is written.

`open_store("s3://bucket/prefix")`, `gs://`, `az://`, `file:///path`, `memory://name`, or a plain
path. Buckets are accessed through obstore (`storage/stores/obstore_store.py`) where possible,
otherwise through
fsspec. Knows nothing of snapshots, torch or harness. Keys are '/'-separated and relative to the
store's URL. `probe` (`storage/stores/probe.py`) finds out what a store really does.

Errors:
    StoreError             the store refused; the message says what to do
      ├─ WrongInput        no store can have this URL, or this setting
      ├─ NotFound          no such object
      ├─ StoreRefused      nothing is allowed: credentials, permission, missing bucket, full disk
      └─ StoreUnavailable  it did not answer or asked to slow down; the outcome of a write is
                           UNKNOWN

A store that has answered does not lose its bucket or its permissions for good in the middle of a
run, but tokens expire, policies are rolled out, and metadata servers time out. So a refusal by a
store that has answered before is raised as StoreUnavailable until it has lasted PATIENCE_S seconds
(`Patience`). A store that never answered is refused at once.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from typing import Protocol, TypeVar, runtime_checkable

from storage.errors import NotFound, StoreError, StoreUnavailable

T = TypeVar("T")
Keys = list[str]  # for classes in which `list` is a method
# gate(nbytes): waits until that many more bytes may be sent and returns whether to stay slow;
# raises if they may never be sent
Gate = Callable[[int], bool]


@runtime_checkable
class ObjectStore(Protocol):
    """The operations that the commit protocol needs of a store. Reads see every completed write (as
    on S3, GCS, Azure, POSIX). Who reads to an object's end gets all of it, or StoreUnavailable
    (`all_of`)."""

    url: str

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        """Return the bytes [start, end) of an object. Raises NotFound."""

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write or replace, atomically: readers see the old or the new object, never a mixture."""

    def create(self, key: str, data: bytes | memoryview) -> bool:
        """Write an object if it does not exist. True: ours was written. False: another was there
        first (and still is)."""

    def list(self, prefix: str) -> list[str]:
        """Return all keys that begin with `prefix`, sorted."""

    def delete(self, key: str) -> None:
        """Delete an object; no error if it does not exist."""

    def size(self, key: str) -> int:
        """Return the size of an object in bytes. Raises NotFound."""


@runtime_checkable
class ReadsInto(Protocol):
    """A store that can read directly into the caller's memory. All of ours can; the function
    `read_into` works with any store."""

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        """Fill `buffer` (writable, bytes) with the object's bytes from `start` and return how many
        there were. Raises NotFound.

        Several ranges are read at once for a large buffer, so the object must not be replaced
        meanwhile.
        """


@runtime_checkable
class PutsPaced(Protocol):
    """A store that can send an object piece by piece."""

    def put_paced(self, key: str, data: bytes | memoryview, gate: Gate) -> None:
        """Write like `put`, but call `gate` before each piece. An error of `gate` is passed on;
        then nothing is left of this object, or the old one stays."""


@runtime_checkable
class ReadsAtOnce(Protocol):
    """A store that may be read from several threads, and is faster for it. Others (simulated, in
    memory) get one request after the other, in order."""

    reads_at_once: int


@runtime_checkable
class HasFolders(Protocol):
    """A store that can name the folders right below its URL without listing their contents."""

    def folders(self) -> Keys:
        """Return the names, sorted."""


@runtime_checkable
class HasUploads(Protocol):
    """A store in which unfinished uploads remain, invisible but billed."""

    def abort_stale_uploads(self, older_than_s: float) -> Keys:
        """Abort unfinished uploads that began at least `older_than_s` seconds ago and return their
        keys. Clocks differ, so be generous (hours)."""


UNPRINTABLE = re.compile(r"[\\\x00-\x1f\x7f]")  # characters that no key may contain
MAX_KEY_BYTES = 1024  # the limit of S3, GCS and Azure


def why_not_a_key(key: str) -> str:
    """Return what is wrong with a key, or "" if nothing is. A store's keys name objects under its
    own root and nothing else."""
    parts = key.split("/")
    if not key or "" in parts:
        return "it has an empty part" if key.strip("/") else "it is empty"
    if "." in parts or ".." in parts:
        return "it has a part '.' or '..'"
    if UNPRINTABLE.search(key):
        return "it has a backslash or a control character"
    return (
        f"it has more than {MAX_KEY_BYTES} bytes"
        if len(key.encode("utf-8", "replace")) > MAX_KEY_BYTES
        else ""
    )


def checked_key(key: str, under: str = "") -> str:
    """Return the key if it is valid and lies under the prefix `under`; raise ValueError otherwise.
    Use it for keys that somebody else wrote (manifests, part lists, markers), which might name
    files anywhere on this machine."""
    why = why_not_a_key(key) or ("" if key.startswith(under) else f"it does not lie under {under}")
    if why:
        raise ValueError(
            f"wanted the key of an object{f' under {under}' if under else ''}, found {key!r}: {why}"
        )
    return key


def read_into(store: ObjectStore, key: str, start: int, buffer: memoryview) -> int:
    """Read into `buffer` as `ReadsInto.read_into` does, from any store."""
    if isinstance(store, ReadsInto):
        return store.read_into(key, start, buffer)
    return copy_into(store.get(key, start, start + buffer.nbytes), buffer)


def put_paced(store: ObjectStore, key: str, data: bytes | memoryview, gate: Gate) -> None:
    """Write as `PutsPaced.put_paced` does, to any store; one that cannot gets the whole object as
    one piece."""
    if isinstance(store, PutsPaced):
        store.put_paced(key, data, gate)
    else:
        gate(memoryview(data).nbytes)
        store.put(key, data)


def reads_at_once(store: ObjectStore) -> int:
    """Return how many small objects `get_each` reads at once from a store; 1 if it does not say."""
    found = store.reads_at_once if isinstance(store, ReadsAtOnce) else 1
    return found if isinstance(found, int) else 1  # a wrapper may have every attribute


def all_of(where: str, data: bytes, nbytes: int) -> bytes:
    """Return what was read of an object that has `nbytes` bytes from there on. Raises
    StoreUnavailable if only a part of them came: it may be valid by itself, and reading it again
    helps."""
    if len(data) < nbytes:
        raise StoreUnavailable(f"{where}: wanted {nbytes} bytes, found {len(data)}")
    return data


def get_each(
    store: ObjectStore, keys: Iterable[str]
) -> Generator[tuple[str, bytes | None], None, None]:
    """Yield (key, content) of many small objects, in their order, reading several at once. The
    content is None if there is no such object. Holds only the objects under way in memory. Raises
    StoreError."""
    return _each(store, store.get, keys)


def size_each(
    store: ObjectStore, keys: Iterable[str]
) -> Generator[tuple[str, int | None], None, None]:
    """Yield (key, size in bytes) of many objects, as `get_each` does."""
    return _each(store, store.size, keys)


def _each(
    store: ObjectStore, ask: Callable[[str], T], keys: Iterable[str]
) -> Generator[tuple[str, T | None], None, None]:
    def one(key: str) -> T | None:
        try:
            return ask(key)
        except NotFound:
            return None

    wanted = iter(keys)
    first = list(islice(wanted, 2))
    ahead = reads_at_once(store) if len(first) > 1 else 1
    first += islice(wanted, max(0, ahead - len(first)))
    if ahead < 2:
        for key in chain(first, wanted):
            yield key, one(key)
        return
    with ThreadPoolExecutor(len(first), "get") as pool:
        coming = deque((key, pool.submit(one, key)) for key in first)
        try:
            while coming:
                key, found = coming.popleft()
                answer = found.result()
                if (another := next(wanted, None)) is not None:
                    coming.append((another, pool.submit(one, another)))
                yield key, answer
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def abort_stale_uploads(store: ObjectStore, older_than_s: float) -> list[str]:
    """Abort unfinished uploads as `HasUploads` does, in any store. Does nothing in a store that
    keeps none (Azure drops them itself after a week)."""
    return store.abort_stale_uploads(older_than_s) if isinstance(store, HasUploads) else []


def folders(store: ObjectStore) -> list[str]:
    """Return the names of the folders right below a store's URL, sorted. A store that cannot name
    them is listed completely. Raises StoreError."""
    if isinstance(store, HasFolders):
        return store.folders()
    return folders_of(store.list(""))


def folders_of(keys: Iterable[str]) -> list[str]:
    """Return the distinct first parts of keys that have several parts, sorted."""
    return sorted({key.partition("/")[0] for key in keys if "/" in key})


def copy_into(found: bytes | memoryview, buffer: memoryview) -> int:
    if len(found) > buffer.nbytes:
        raise StoreError(
            f"the store gave {len(found)} bytes where {buffer.nbytes} were asked for: it ignores "
            "ranges; use another store"
        )
    buffer.cast("B")[: len(found)] = found
    return len(found)
