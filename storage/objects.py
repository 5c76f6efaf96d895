"""Objects in a bucket: the small interface that everything durable is written through.

`open_store("s3://bucket/prefix")`, `gs://`, `az://`, `file:///path`, `memory://name`, or a plain
path. Buckets are spoken to by obstore (`storage/fast.py`) where it can be, else by fsspec. Knows
nothing of snapshots, torch or harness. Keys are '/'-separated and relative to the store's URL. What
a store really does is found by `probe` (`storage/probe.py`).

Errors:
    StoreError             the store said no; the message says what to do
      ├─ WrongInput        no store can have this URL, or this setting
      ├─ NotFound          no such object
      ├─ StoreRefused      it lets us do nothing: credentials, permission, missing bucket, full disk
      └─ StoreUnavailable  it did not answer or asked to slow down; the outcome of a write is
                           UNKNOWN

A store that has answered does not lose its bucket or its permissions for good in the middle of a
run, but tokens expire, policies are rolled out, and metadata servers time out. So a refusal by a
store that has answered is told as StoreUnavailable until it has lasted PATIENCE_S (`Patience`). One
that never answered refuses at once.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice
from typing import Protocol, TypeVar, runtime_checkable

from storage.errors import NotFound, StoreError

T = TypeVar("T")
Keys = list[str]  # in classes, where `list` is a method
# waits until so many more bytes may be sent: is it still to be slow? Raises if they never may
Gate = Callable[[int], bool]


@runtime_checkable
class ObjectStore(Protocol):
    """What the commit protocol needs of a store. Reads see every completed write (S3, GCS,
    Azure, POSIX do)."""

    url: str

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        """The bytes [start, end) of an object. Raises NotFound."""

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write or replace, atomically: readers see the old or the new object, never a mixture."""

    def create(self, key: str, data: bytes | memoryview) -> bool:
        """Write if absent. True: ours is there. False: another was there first (and still is)."""

    def list(self, prefix: str) -> list[str]:
        """All keys that begin with `prefix`, sorted."""

    def delete(self, key: str) -> None:
        """Remove; no error if it is not there."""

    def size(self, key: str) -> int:
        """Bytes of an object. Raises NotFound."""


@runtime_checkable
class ReadsInto(Protocol):
    """A store that can read to where the bytes are wanted. All of ours can; `read_into` works
    with any."""

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        """Fill `buffer` (writable, bytes) with the object's bytes from `start`: how many there
        were. Raises NotFound.

        Of a large buffer several ranges are read at once, so the object must not be replaced
        meanwhile.
        """


@runtime_checkable
class PutsPaced(Protocol):
    """A store that can send an object bit by bit."""

    def put_paced(self, key: str, data: bytes | memoryview, gate: Gate) -> None:
        """As `put`, but `gate` is asked before each piece. What it raises travels, and then nothing
        is left of this object, or the old one stays."""


@runtime_checkable
class ReadsAtOnce(Protocol):
    """A store that may be read from several threads, and gains by it. Others (a simulated one, one
    in memory) are read by one request after the other, in order."""

    reads_at_once: int


@runtime_checkable
class HasFolders(Protocol):
    """A store that can name the folders right below its URL without listing all that is in
    them."""

    def folders(self) -> Keys:
        """Names, sorted."""


@runtime_checkable
class HasUploads(Protocol):
    """A store in which uploads that were never finished stay, out of sight and on the bill."""

    def abort_stale_uploads(self, older_than_s: float) -> Keys:
        """Drop unfinished uploads that began at least so long ago: their keys. Clocks differ,
        so be generous (hours)."""


UNPRINTABLE = re.compile(r"[\\\x00-\x1f\x7f]")  # what no key has
MAX_KEY_BYTES = 1024  # of a key; what S3, GCS and Azure allow


def why_not_a_key(key: str) -> str:
    """What is wrong with a key, "" if nothing: a store's keys name objects under its own root
    and nothing else."""
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
    """The same key, if it is one, and lies under the prefix `under`. Of keys that somebody else
    wrote (manifests, part lists, markers): they may name files anywhere on this machine. Raises
    ValueError.
    """
    why = why_not_a_key(key) or ("" if key.startswith(under) else f"it does not lie under {under}")
    if why:
        raise ValueError(
            f"wanted the key of an object{f' under {under}' if under else ''}, found {key!r}: {why}"
        )
    return key


def read_into(store: ObjectStore, key: str, start: int, buffer: memoryview) -> int:
    """See `ReadsInto`. For any store."""
    if isinstance(store, ReadsInto):
        return store.read_into(key, start, buffer)
    return copy_into(store.get(key, start, start + buffer.nbytes), buffer)


def put_paced(store: ObjectStore, key: str, data: bytes | memoryview, gate: Gate) -> None:
    """See `PutsPaced`. For any store; to one that cannot, a whole object is one piece."""
    if isinstance(store, PutsPaced):
        store.put_paced(key, data, gate)
    else:
        gate(memoryview(data).nbytes)
        store.put(key, data)


def reads_at_once(store: ObjectStore) -> int:
    """Small objects that `get_each` reads at once. For any store."""
    found = store.reads_at_once if isinstance(store, ReadsAtOnce) else 1
    return found if isinstance(found, int) else 1  # a wrapper may answer to every name


def get_each(
    store: ObjectStore, keys: Iterable[str]
) -> Generator[tuple[str, bytes | None], None, None]:
    """(key, content) of many small objects, in their order, several on their way at once; None:
    there is no such object. Holds no more than those in memory. Raises StoreError."""
    return _each(store, store.get, keys)


def size_each(
    store: ObjectStore, keys: Iterable[str]
) -> Generator[tuple[str, int | None], None, None]:
    """(key, bytes) of many objects, as `get_each`."""
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
    """See `HasUploads`. For any store; nothing to do in one that keeps none (Azure drops them
    itself after a week)."""
    return store.abort_stale_uploads(older_than_s) if isinstance(store, HasUploads) else []


def folders(store: ObjectStore) -> list[str]:
    """Names of the folders right below a store's URL, sorted. For any store; of one that cannot
    name them everything is listed. Raises StoreError."""
    if isinstance(store, HasFolders):
        return store.folders()
    return folders_of(store.list(""))


def folders_of(keys: Iterable[str]) -> list[str]:
    """First parts of keys that have several, sorted."""
    return sorted({key.partition("/")[0] for key in keys if "/" in key})


def copy_into(found: bytes | memoryview, buffer: memoryview) -> int:
    if len(found) > buffer.nbytes:
        raise StoreError(
            f"the store gave {len(found)} bytes where {buffer.nbytes} were asked for: it ignores "
            "ranges; use another store"
        )
    buffer.cast("B")[: len(found)] = found
    return len(found)
