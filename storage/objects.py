"""Objects in a bucket: the small interface that everything durable is written through.

`open_store("s3://bucket/prefix")`, `gs://`, `az://`, `file:///path`, `memory://name`, or a plain path. Buckets are spoken to by
obstore (`storage/fast.py`) where it can be, else by fsspec. Knows nothing of snapshots, torch or harness. Keys are '/'-separated and
relative to the store's URL. What a store really does is found by `probe` (`storage/probe.py`).

Errors:
    StoreError             the store said no; the message says what to do
      ├─ NotFound          no such object
      ├─ StoreRefused      it lets us do nothing: credentials, permission, missing bucket, full disk
      └─ StoreUnavailable  it did not answer or asked to slow down; the outcome of a write is UNKNOWN

A store that has answered does not lose its bucket or its permissions for good in the middle of a run, but tokens expire, policies are
rolled out, and metadata servers time out. So a refusal by a store that has answered is told as StoreUnavailable until it has lasted
PATIENCE_S (`Patience`). One that never answered refuses at once.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import fsspec
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_exponential, wait_random

log = logging.getLogger("storage")

RETRY_WITHIN_S = 60.0  # how long a store may be silent before callers hear of it
PATIENCE_S = 900.0  # how long a store that has answered may refuse before it is believed; the variable STORAGE_PATIENCE_S changes it
SPELL_GAP_S = 120.0  # two refusals that are further apart, with nothing asked between them, are of two spells
BLOCK_NBYTES = 64 << 20  # of what fsspec uploads of a larger object at once
BACKENDS = ("obstore", "fsspec")
Keys = list[str]  # in classes, where `list` is a method
T = TypeVar("T")


class StoreError(Exception):
    """The store said no."""


class NotFound(StoreError):
    """No such object."""


class StoreRefused(StoreError):
    """It lets us do nothing: no credentials, no permission, no such bucket, no space."""


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


MAX_KEY_BYTES = 1024  # of a key; what S3, GCS and Azure allow


def why_not_a_key(key: str) -> str:
    """What is wrong with a key, "" if nothing: a store's keys name objects under its own root and nothing else."""
    parts = key.split("/")
    if not key or "" in parts:
        return "it has an empty part" if key.strip("/") else "it is empty"
    if "." in parts or ".." in parts:
        return "it has a part '.' or '..'"
    if "\\" in key or any(ord(c) < 32 or ord(c) == 127 for c in key):
        return "it has a backslash or a control character"
    return f"it has more than {MAX_KEY_BYTES} bytes" if len(key.encode("utf-8", "replace")) > MAX_KEY_BYTES else ""


def checked_key(key: str, under: str = "") -> str:
    """The same key, if it is one, and lies under the prefix `under`. Of keys that somebody else wrote (manifests, part lists, markers):
    they may name files anywhere on this machine. Raises ValueError.
    """
    why = why_not_a_key(key) or ("" if key.startswith(under) else f"it does not lie under {under}")
    if why:
        raise ValueError(f"wanted the key of an object{f' under {under}' if under else ''}, found {key!r}: {why}")
    return key


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
    url: str,
    *,
    retry_within_s: float = RETRY_WITHIN_S,
    answered: bool = False,
    backend: str = "",
    environ: Mapping[str, str] = os.environ,
    **options: Any,
) -> ObjectStore:
    """A store rooted at `url`; transient failures are retried for `retry_within_s` seconds.

    `answered`: it is known to be there and to let us read and write, so that a refusal is taken for an outage for
    STORAGE_PATIENCE_S seconds. Who starts a process can tell it the same by the variable STORAGE_ANSWERED, the store's URL.

    `options` are spelled as for the cloud's fsspec filesystem (credentials by each cloud's own conventions when absent). `backend`: who
    speaks to a bucket, "obstore" or "fsspec"; by default (also of the variable STORAGE_BACKEND) obstore wherever it can. Raises StoreError.
    """
    url = normalize(url)
    scheme = url.partition("://")[0]
    if scheme == "memory":
        return MemoryStore(url)
    patience = Patience(_patience_s(environ), answered or environ.get("STORAGE_ANSWERED") == url)
    if scheme == "file":
        return Retrying(FileStore(url, **options), retry_within_s, patience)
    inner = _remote(url, backend or environ.get("STORAGE_BACKEND", ""), environ, options)
    return Retrying(inner, retry_within_s, patience)


def _patience_s(environ: Mapping[str, str]) -> float:
    text = environ.get("STORAGE_PATIENCE_S", "")
    try:
        found = float(text or PATIENCE_S)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise StoreError(f"STORAGE_PATIENCE_S: wanted a number of seconds, found {text!r}")
    return found


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


# What network file systems say while their server restarts or a lease is renewed.
FALTERING = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOTCONN, errno.ECONNRESET, errno.EAGAIN}

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


def _refuse_to_leave(url: str, key: str) -> None:
    """No key leads out of its store, whoever made it: an absolute one, or one with "..", would be another file of this machine."""
    if why := why_not_a_key(key):
        raise StoreError(f"{url}: {key!r} is no key of an object here: {why}; whoever named it is damaged, or means harm")


class FileStore:
    """`file://`: atomic by rename (put) and by link (create-only). `durable` adds fsync."""

    def __init__(self, url: str, durable: bool = False):
        self.url, self._durable = url, durable
        self._root = Path(url.removeprefix("file://"))

    def _path(self, key: str) -> Path:
        _refuse_to_leave(self.url, key)
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
                raise StoreRefused(f"{path.parent}: this folder cannot be made ({e.strerror}); check the path of the run URL") from e
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

    def _walk(self, folder: Path) -> Iterator[tuple[str, Keys, Keys]]:
        """A folder that is not there holds nothing; one that cannot be read is no empty one."""

        def failed(e: OSError) -> None:
            if not isinstance(e, FileNotFoundError | NotADirectoryError):
                raise e

        with self._answers(""):
            yield from os.walk(folder, onerror=failed)

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
        _refuse_to_leave(self.url, key)
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
def no_bucket(where: str) -> StoreRefused:
    return StoreRefused(f"{where}: the bucket does not exist; create it or name another in the run URL")


def denied(where: str, e: object) -> StoreRefused:
    return StoreRefused(f"{where}: permission denied ({e}); check the credentials and the bucket's policy")


def full(where: str, e: object) -> StoreRefused:
    return StoreRefused(f"{where}: {e}: the store is full; free some space, raise the quota, or choose another run URL")


def no_credentials(where: str, e: object) -> StoreRefused:
    return StoreRefused(f"{where}: no credentials found ({e}); log in the way your cloud's own tools do")


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


class Patience:
    """What a store's refusal means: an outage, while the store has answered before and has refused for less than `patience_s`.

    Each kind of operation is judged by itself, since each may have a permission of its own: who may read but never write is told so at
    once. Knows no store; `monotonic` in seconds.
    """

    KINDS = ("read", "list", "write", "delete")

    def __init__(self, patience_s: float = PATIENCE_S, answered: bool = False, monotonic: Callable[[], float] = time.monotonic):
        self.patience_s, self._monotonic = patience_s, monotonic
        self._answered = set(self.KINDS if answered else ())
        self._spells: dict[str, tuple[float, float]] = {}  # kind -> its first refusal in a row, its last one

    @contextlib.contextmanager
    def judge(self, kind: str) -> Iterator[None]:
        """Around one call. StoreRefused becomes StoreUnavailable where it need not be final."""
        try:
            yield
        except StoreUnavailable:
            raise
        except StoreRefused as e:
            raise self._judged(kind, e) from e
        except NotFound:
            self._hear(kind)
            raise
        self._hear(kind)

    def _hear(self, kind: str) -> None:
        self._answered.add(kind)
        self._spells.pop(kind, None)

    def _judged(self, kind: str, e: StoreRefused) -> StoreError:
        if kind not in self._answered:
            return e
        now = self._monotonic()
        first_s, last_s = self._spells.get(kind, (now, now))
        if now - last_s > SPELL_GAP_S:
            first_s = now
        self._spells[kind] = first_s, now
        if now - first_s < self.patience_s:
            return StoreUnavailable(f"{e} (it has answered before, so this counts as an outage for {self.patience_s:g} s)")
        return StoreRefused(f"{e} (it has said so for {now - first_s:.0f} s, although it had answered before)")


class Retrying:
    """Repeats calls that were not answered. A `create` whose outcome is unknown is settled by reading back. `patience`: with refusals."""

    def __init__(self, inner: ObjectStore, within_s: float = RETRY_WITHIN_S, patience: Patience | None = None):
        self.inner, self.url = inner, inner.url
        self._patience = patience or Patience()
        self._retry = retry(
            retry=retry_if_exception_type(StoreUnavailable),
            wait=wait_exponential(multiplier=0.1, max=5.0) + wait_random(0.0, 0.5),
            stop=stop_after_delay(within_s),
            reraise=True,
        )

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        return self._call("read", self.inner.get, key, start, end)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._call("write", self.inner.put, key, data)

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

        return self._call("write", once)

    def list(self, prefix: str) -> list[str]:
        return self._call("list", self.inner.list, prefix)

    def delete(self, key: str) -> None:
        self._call("delete", self.inner.delete, key)

    def size(self, key: str) -> int:
        return self._call("read", self.inner.size, key)

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        return self._call("read", read_into, self.inner, key, start, buffer)

    def _call(self, kind: str, do: Callable[..., T], *words: Any) -> T:
        def once() -> T:
            with self._patience.judge(kind):
                return do(*words)

        return self._retry(once)()

    def abort_stale_uploads(self, older_than_s: float) -> Keys:
        return self._retry(abort_stale_uploads)(self.inner, older_than_s)

    @property
    def puts_at_once(self) -> int:
        return puts_at_once(self.inner)

    @puts_at_once.setter
    def puts_at_once(self, requests: int) -> None:
        limit_puts(self.inner, requests)
