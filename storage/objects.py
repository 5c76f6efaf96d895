"""Objects in a bucket: the small interface that everything durable is written through.

`open_store("s3://bucket/prefix")`, `gs://`, `az://`, `file:///path`, `memory://name`, or a plain path. Buckets are spoken to by
obstore (`storage/fast.py`) where it can be, else by fsspec. Knows nothing of snapshots, torch or harness. Keys are '/'-separated and
relative to the store's URL. What a store really does is found by `probe` (`storage/probe.py`).

Errors:
    StoreError             the store said no: permission, missing bucket, full disk; the message says what to do
      ├─ NotFound          no such object
      └─ StoreUnavailable  it did not answer or asked to slow down; the outcome of a write is UNKNOWN
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import fsspec
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_exponential, wait_random

log = logging.getLogger("storage")

RETRY_WITHIN_S = 60.0  # how long a store may be silent before callers hear of it
BLOCK_NBYTES = 64 << 20  # of what fsspec uploads of a larger object at once
BACKENDS = ("obstore", "fsspec")
Keys = list[str]  # in classes, where `list` is a method


class StoreError(Exception):
    """The store said no."""


class NotFound(StoreError):
    """No such object."""


class StoreUnavailable(StoreError):
    """No answer; whether a write happened is unknown."""


@runtime_checkable
class ObjectStore(Protocol):
    """What the commit protocol needs of a store. Reads see every completed write (S3, GCS, Azure, POSIX do)."""

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
    """A store that can read to where the bytes are wanted. All of ours can; `read_into` works with any."""

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        """Fill `buffer` (writable, bytes) with the object's bytes from `start`: how many there were. Raises NotFound.

        Of a large buffer several ranges are read at once, so the object must not be replaced meanwhile.
        """


@runtime_checkable
class PutsInPieces(Protocol):
    """A store that sends a large object by several requests at once."""

    puts_at_once: int  # requests of one put; may be lowered, for the puts that begin from then on


@runtime_checkable
class HasUploads(Protocol):
    """A store in which uploads that were never finished stay, out of sight and on the bill."""

    def abort_stale_uploads(self, older_than_s: float) -> Keys:
        """Drop unfinished uploads that began at least so long ago: their keys. Clocks differ, so be generous (hours)."""


def read_into(store: ObjectStore, key: str, start: int, buffer: memoryview) -> int:
    """See `ReadsInto`. For any store."""
    if isinstance(store, ReadsInto):
        return store.read_into(key, start, buffer)
    return _copy_into(store.get(key, start, start + buffer.nbytes), buffer)


def puts_at_once(store: ObjectStore) -> int:
    """Requests that one put makes at once. For any store."""
    return store.puts_at_once if isinstance(store, PutsInPieces) else 1


def limit_puts(store: ObjectStore, requests: int) -> None:
    """No more than so many requests of one put at once, from the next put on. For any store."""
    if isinstance(store, PutsInPieces):
        store.puts_at_once = requests


def abort_stale_uploads(store: ObjectStore, older_than_s: float) -> list[str]:
    """See `HasUploads`. For any store; nothing to do in one that keeps none (Azure drops them itself after a week)."""
    return store.abort_stale_uploads(older_than_s) if isinstance(store, HasUploads) else []


def _copy_into(found: bytes | memoryview, buffer: memoryview) -> int:
    if len(found) > buffer.nbytes:
        raise StoreError(f"the store gave {len(found)} bytes where {buffer.nbytes} were asked for: it ignores ranges; use another store")
    buffer.cast("B")[: len(found)] = found
    return len(found)


def open_store(
    url: str, *, retry_within_s: float = RETRY_WITHIN_S, backend: str = "", environ: Mapping[str, str] = os.environ, **options: Any
) -> ObjectStore:
    """A store rooted at `url`; transient failures are retried for `retry_within_s` seconds.

    `options` are spelled as for the cloud's fsspec filesystem (credentials by each cloud's own conventions when absent). `backend`: who
    speaks to a bucket, "obstore" or "fsspec"; by default (also of the variable STORAGE_BACKEND) obstore wherever it can. Raises StoreError.
    """
    url = normalize(url)
    scheme = url.partition("://")[0]
    if scheme == "memory":
        return MemoryStore(url)
    if scheme == "file":
        return FileStore(url, **options)
    return Retrying(_remote(url, backend or environ.get("STORAGE_BACKEND", ""), environ, options), retry_within_s)


def _remote(url: str, backend: str, environ: Mapping[str, str], options: dict[str, Any]) -> ObjectStore:
    if backend not in ("", *BACKENDS):
        raise StoreError(f"{url}: wanted one of {', '.join(BACKENDS)} as STORAGE_BACKEND, found {backend!r}")
    if backend != "fsspec":
        from storage import fast

        try:
            return fast.FastStore(url, environ=environ, **options)
        except fast.Unfit as e:
            if backend == "obstore":
                raise StoreError(f"{url}: obstore cannot be used: {e}; leave STORAGE_BACKEND out") from e
    return FsspecStore(url, **options)


def normalize(url: str) -> str:
    """`runs/x` -> `file:///abs/runs/x`; URLs are returned without a trailing slash."""
    if "://" not in url:
        return f"file://{Path(url).expanduser().resolve().as_posix()}"  # not as_uri: it would quote spaces, fsspec does not
    return url.rstrip("/")


_memory: dict[str, bytes] = {}  # memory:// of this process; fsspec's own has no create-only write
_memory_lock = threading.Lock()


class MemoryStore:
    """`memory://name`: of this process, for tests and simulation. Every call is atomic."""

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
        return _copy_into(self.get(key, start, start + buffer.nbytes), buffer)


class FileStore:
    """`file://`: atomic by rename (put) and by link (create-only). `durable` adds fsync."""

    def __init__(self, url: str, durable: bool = False):
        self.url, self._durable = url, durable
        self._root = Path(url.removeprefix("file://"))

    def _path(self, key: str) -> Path:
        return self._root / key

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        with self._answers(key), open(self._path(key), "rb") as f:
            if start is None and end is None:
                return f.read()
            f.seek(start or 0)
            return f.read() if end is None else f.read(end - (start or 0))

    @contextlib.contextmanager
    def _temporary(self, key: str, data: bytes | memoryview) -> Iterator[tuple[Path, Path]]:
        path = self._path(key)
        temporary = path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp"
        with self._answers(key):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except (FileNotFoundError, NotADirectoryError) as e:
                raise StoreError(f"{path.parent}: this folder cannot be made ({e.strerror}); check the path of the run URL") from e
            try:
                with open(temporary, "wb", buffering=0) as f:
                    view, at = memoryview(data).cast("B"), 0
                    while at < len(view):
                        at += f.write(view[at:])
                    if self._durable:
                        os.fsync(f.fileno())
                yield temporary, path
            finally:
                temporary.unlink(missing_ok=True)

    def put(self, key: str, data: bytes | memoryview) -> None:
        with self._temporary(key, data) as (temporary, path):
            os.replace(temporary, path)

    def create(self, key: str, data: bytes | memoryview) -> bool:
        with self._temporary(key, data) as (temporary, path):
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            return True

    def list(self, prefix: str) -> list[str]:
        folder = self._path(prefix if prefix.endswith("/") else prefix.rpartition("/")[0])
        found = []
        for parent, _, names in os.walk(folder):
            base = os.path.relpath(parent, self._root)
            for name in names:
                if name.startswith(".") and name.endswith(".tmp"):
                    continue
                key = name if base == "." else f"{base}/{name}"
                if key.startswith(prefix):
                    found.append(key)
        return sorted(found)

    def delete(self, key: str) -> None:
        with self._answers(key):
            self._path(key).unlink(missing_ok=True)

    def size(self, key: str) -> int:
        with self._answers(key):
            return self._path(key).stat().st_size

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        view, done = buffer.cast("B"), 0
        with self._answers(key), open(self._path(key), "rb", buffering=0) as f:
            f.seek(start)
            while done < len(view):  # one read gives 2 GiB at most
                n = f.readinto(view[done:])
                if not n:
                    break
                done += n
        return done

    def abort_stale_uploads(self, older_than_s: float) -> Keys:
        """Temporary files of writers that died. Those of living ones are younger than any sensible `older_than_s`."""
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
            hint = {
                errno.ENOSPC: "the disk is full; free some space or choose another run URL",
                errno.EACCES: "permission denied; choose a run URL that you may write to",
                errno.EPERM: "permission denied; choose a run URL that you may write to",
                errno.EROFS: "the file system is read-only; choose another run URL",
            }.get(e.errno or 0, "check the path")
            raise StoreError(f"{self.url}/{key}: {e.strerror or e}: {hint}") from e


class FsspecStore:
    """Any fsspec filesystem. Create-only writes use the store's own condition (S3 If-None-Match, GCS generation 0,
    Azure If-None-Match), which fsspec spells `mode="create"`."""

    def __init__(self, url: str, **options: Any):
        self.url = url
        try:
            self._fs, path = fsspec.core.url_to_fs(url, **{"use_listings_cache": False, "skip_instance_cache": True, **options})
        except (ImportError, ValueError) as e:  # the package of this scheme is not installed, or there is no such scheme
            raise StoreError(f"{url}: {e}; or install obstore, which speaks s3://, gs:// and az://") from e
        self._root = str(path).rstrip("/")
        self._named = Named(url)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        if end is not None and end <= (start or 0):
            self.size(key)  # NotFound
            return b""
        with self._answers(key):
            try:
                return bytes(self._fs.cat_file(self._path(key), start=start, end=end))
            except Exception as e:  # a class of its own in every implementation, as for `create`
                if _says(e, "InvalidRange", "range not satisfiable"):
                    return b""  # the object ends before `start`
                raise

    def put(self, key: str, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        with self._answers(key):
            if len(view) <= BLOCK_NBYTES:
                self._fs.pipe_file(self._path(key), bytes(view))  # their clients take nothing else
                return
            file = self._fs.open(self._path(key), "wb", block_size=BLOCK_NBYTES)
            try:
                for start in range(0, len(view), BLOCK_NBYTES):
                    file.write(view[start : start + BLOCK_NBYTES])
            except BaseException:
                file.discard()  # and not `close`, which would finish the object as far as it got
                file.closed = True  # or the garbage collector would
                raise
            file.close()

    def create(self, key: str, data: bytes | memoryview) -> bool:
        with self._answers(key):
            try:
                self._fs.pipe_file(self._path(key), bytes(data), mode="create")
            except Exception as e:  # each fsspec implementation has its own class for this; `_is_conflict` knows them
                if isinstance(e, TypeError) and "mode" in str(e):
                    raise StoreError(f"{self.url}: wanted create-only writes, this kind of store has none in fsspec; use another") from e
                if not _is_conflict(e):
                    raise
                return False
            return True

    def list(self, prefix: str) -> list[str]:
        folder, _, _ = prefix.rpartition("/")
        with self._answers(prefix):
            try:
                found = self._fs.find(self._path(folder) if folder else self._root)
            except FileNotFoundError:
                return []
        keys = (str(p)[len(self._root) :].removeprefix("/") for p in found)
        return sorted(self._named(k for k in keys if k and k.startswith(prefix) and not k.endswith("/")))

    def delete(self, key: str) -> None:
        with contextlib.suppress(NotFound), self._answers(key):
            self._fs.rm_file(self._path(key))

    def size(self, key: str) -> int:
        with self._answers(key):
            return int(self._fs.info(self._path(key))["size"])

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        return _copy_into(self.get(key, start, start + buffer.nbytes), buffer)

    def abort_stale_uploads(self, older_than_s: float) -> Keys:
        """S3 only. Google's resumable uploads and Azure's blocks are dropped by the cloud after a week."""
        if not hasattr(self._fs, "call_s3"):
            return []
        bucket, _, prefix = self._root.partition("/")
        with self._answers(""):
            return abort_s3_uploads(self._fs.call_s3, bucket, prefix + "/" if prefix else "", older_than_s)

    @contextlib.contextmanager
    def _answers(self, key: str) -> Iterator[None]:
        where = f"{self.url}/{key}"
        try:
            yield
        except StoreError:
            raise
        except FileNotFoundError as e:
            if _says(e, "NoSuchBucket", "specified bucket", "specified container"):
                raise no_bucket(where) from e
            raise NotFound(where) from e
        except PermissionError as e:
            raise denied(where, e) from e
        except (OSError, TimeoutError) as e:
            if getattr(e, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or _says(e, *FULL):
                raise full(where, e) from e
            raise StoreUnavailable(f"{where}: {e}") from e
        except Exception as e:  # client libraries raise their own trees (botocore, google, azure); none may leak
            if _is_ours(e):
                raise
            name = type(e).__name__
            if name in ("NoCredentialsError", "DefaultCredentialsError", "PartialCredentialsError"):
                raise no_credentials(where, e) from e
            raise StoreUnavailable(f"{where}: {name}: {e}") from e


# What a bucket's refusals are told as, whoever speaks to it.
def no_bucket(where: str) -> StoreError:
    return StoreError(f"{where}: the bucket does not exist; create it or name another in the run URL")


def denied(where: str, e: object) -> StoreError:
    return StoreError(f"{where}: permission denied ({e}); check the credentials and the bucket's policy")


def full(where: str, e: object) -> StoreError:
    return StoreError(f"{where}: {e}: the store is full; free some space, raise the quota, or choose another run URL")


def no_credentials(where: str, e: object) -> StoreError:
    return StoreError(f"{where}: no credentials found ({e}); log in the way your cloud's own tools do")


FULL = ("QuotaExceeded", "StorageFull", "InsufficientStorage", "No space left")  # words of S3-compatible stores and quotas


def abort_s3_uploads(call: Callable[..., Any], bucket: str, prefix: str, older_than_s: float) -> list[str]:
    """`call(operation, **arguments)`: an S3 client. Keys relative to `prefix`."""
    gone, marker, cutoff = [], dict[str, str](), time.time() - older_than_s
    while True:
        page = call("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **marker)
        for one in page.get("Uploads", []):
            began: datetime = one["Initiated"]
            if one["Key"].startswith(prefix) and began.timestamp() <= cutoff:
                call("abort_multipart_upload", Bucket=bucket, Key=one["Key"], UploadId=one["UploadId"])
                gone.append(one["Key"][len(prefix) :])
        if not page.get("IsTruncated"):
            return sorted(gone)
        marker = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


def list_s3_keys(list_page: Callable[..., Any], bucket: str, root: str, prefix: str) -> Iterator[str]:
    """Keys relative to `root` that begin with `prefix`, whatever they look like. `list_page`: an S3 client's list_objects_v2."""
    more: dict[str, str] = {}
    while True:
        page = list_page(Bucket=bucket, Prefix=root + prefix, **more)
        yield from (one["Key"][len(root) :] for one in page.get("Contents", []) if not one["Key"].endswith("/"))
        if not page.get("IsTruncated"):
            return
        more = {"ContinuationToken": page["NextContinuationToken"]}


class Named:
    """Lets pass the keys that every store can name; tells once of others, which somebody else put there."""

    def __init__(self, url: str):
        self._url, self._told = url, False

    def __call__(self, keys: Iterable[str]) -> Iterator[str]:
        for key in keys:
            if not {"", ".", ".."} & set(key.split("/")):
                yield key
            elif not self._told:
                self._told = True
                say = "%s: left out %r, which is none of ours, and others like it: keys have no empty parts and no dots"
                log.warning(say, self._url, key)


def _is_ours(e: Exception) -> bool:
    """A fault in a program, and no answer of a service or of the way there: those have classes of client libraries, or are OSErrors."""
    return (type(e).__module__ == "builtins" and not isinstance(e, EOFError | RuntimeError)) or isinstance(e, NotImplementedError)


def _is_conflict(e: BaseException) -> bool:
    """Did a create-only write lose? s3fs hides it as the cause of OSError(EINVAL); gcsfs and adlfs raise FileExistsError.

    S3's 409 ConditionalRequestConflict is not that: it says "try again", so it stays StoreUnavailable and is retried.
    """
    return any(isinstance(one, FileExistsError) or "PreconditionFailed" in str(one) for one in _causes(e))


def _says(e: BaseException, *words: str) -> bool:
    """Do the error or its causes contain one of these words?"""
    return any(word.lower() in str(one).lower() for one in _causes(e) for word in words)


def _causes(e: BaseException | None) -> Iterator[BaseException]:
    while e is not None:
        yield e
        e = e.__cause__


class Retrying:
    """Repeats calls that were not answered. A `create` whose outcome is unknown is settled by reading back."""

    def __init__(self, inner: ObjectStore, within_s: float = RETRY_WITHIN_S):
        self.inner, self.url = inner, inner.url
        self._retry = retry(
            retry=retry_if_exception_type(StoreUnavailable),
            wait=wait_exponential(multiplier=0.1, max=5.0) + wait_random(0.0, 0.5),
            stop=stop_after_delay(within_s),
            reraise=True,
        )

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        return self._retry(self.inner.get)(key, start, end)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._retry(self.inner.put)(key, data)

    def create(self, key: str, data: bytes | memoryview) -> bool:
        unknown = False

        def once() -> bool:
            nonlocal unknown
            try:
                created = self.inner.create(key, data)
            except StoreUnavailable:
                unknown = True
                raise
            if created or not unknown:
                return created
            # An earlier try of ours may have succeeded unheard: then the object holds exactly our bytes.
            try:
                return self.inner.get(key) == data
            except NotFound:  # it was deleted meanwhile, whoever made it: nobody is there first, so try again
                raise StoreUnavailable(f"{self.url}/{key}: created and deleted by others at the same time") from None

        return self._retry(once)()

    def list(self, prefix: str) -> list[str]:
        return self._retry(self.inner.list)(prefix)

    def delete(self, key: str) -> None:
        self._retry(self.inner.delete)(key)

    def size(self, key: str) -> int:
        return self._retry(self.inner.size)(key)

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        return self._retry(read_into)(self.inner, key, start, buffer)

    def abort_stale_uploads(self, older_than_s: float) -> Keys:
        return self._retry(abort_stale_uploads)(self.inner, older_than_s)

    @property
    def puts_at_once(self) -> int:
        return puts_at_once(self.inner)

    @puts_at_once.setter
    def puts_at_once(self, requests: int) -> None:
        limit_puts(self.inner, requests)
