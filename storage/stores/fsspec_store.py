"""Access to buckets through fsspec, and what all bucket clients share."""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractFileSystem

from storage.errors import NotFound, StoreError, StoreRefused, StoreUnavailable, WrongInput
from storage.stores.folder_store import refuse_to_leave
from storage.stores.objects import all_of, copy_into

if TYPE_CHECKING:
    from storage.stores.objects import Gate, Keys

log = logging.getLogger("storage")
BLOCK_NBYTES = 64 << 20  # part size of fsspec's uploads of larger objects
PACED_NBYTES = 8 << 20  # part size of paced uploads; some clients accept no less than 5 MiB
READS_AT_ONCE = 8  # small objects read at once


def _obstore_knows(url: str) -> bool:
    return url.partition("://")[0] in ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")


class FsspecStore:
    """A store on any fsspec filesystem. Create-only writes use the store's own condition (S3
    If-None-Match, GCS generation 0, Azure If-None-Match), which fsspec spells `mode="create"`."""

    def __init__(self, url: str, **options: Any):
        self.url = url
        _refuse_overwriting(url)
        try:
            self._fs, path = fsspec.core.url_to_fs(
                url, **{"use_listings_cache": False, "skip_instance_cache": True, **options}
            )
        except ImportError as e:  # the package for this scheme is not installed
            other = "; or install obstore, which speaks it as well" if _obstore_knows(url) else ""
            raise WrongInput(f"{url}: {e}{other}") from e
        except ValueError as e:  # there is no such scheme
            raise WrongInput(
                f"{url}: {e}; wanted a folder (file://), s3://, gs://, az://, or another scheme "
                "that fsspec knows"
            ) from e
        except (TypeError, OSError) as e:
            raise WrongInput(
                f"{url}: fsspec cannot open it by its URL ({type(e).__name__}: {e}); use s3://, "
                "gs://, az:// or a folder (file://)"
            ) from e
        self._root = str(path).rstrip("/")
        self._named = KeyFilter(url)
        self.reads_at_once = READS_AT_ONCE

    def _path(self, key: str) -> str:
        refuse_to_leave(self.url, key)
        return f"{self._root}/{key}"

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        if end is not None and end <= (start or 0):
            self.size(key)  # raises NotFound if there is none
            return b""
        with self._answers(key):
            try:
                data = bytes(self._fs.cat_file(self._path(key), start=start, end=end))
            except Exception as e:  # each implementation has its own class, as for `create`
                if _says(e, "InvalidRange", "range not satisfiable"):
                    return b""  # the object ends before `start`
                raise
        if end is not None:
            return data
        # no filesystem of fsspec tells what a read should have brought, so it takes a request more
        return all_of(f"{self.url}/{key}", data, self.size(key) - (start or 0))

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._put(key, data, lambda nbytes: False, BLOCK_NBYTES)

    def put_paced(self, key: str, data: bytes | memoryview, gate: Gate) -> None:
        self._put(key, data, gate, PACED_NBYTES)

    def _put(self, key: str, data: bytes | memoryview, gate: Gate, block: int) -> None:
        view = memoryview(data).cast("B")
        with self._answers(key):
            if len(view) <= block:
                gate(len(view))
                self._fs.pipe_file(self._path(key), bytes(view))  # the clients accept only bytes
                return
            file = self._fs.open(self._path(key), "wb", block_size=block)
            try:
                for start in range(0, len(view), block):
                    gate(len(view[start : start + block]))
                    file.write(view[start : start + block])
            except BaseException:
                file.discard()  # not `close`, which would complete a truncated object
                file.closed = True  # otherwise the garbage collector would close it
                raise
            file.close()

    def create(self, key: str, data: bytes | memoryview) -> bool:
        with self._answers(key):
            try:
                self._fs.pipe_file(self._path(key), bytes(data), mode="create")
            except Exception as e:
                # each fsspec implementation has its own class for this; `_is_conflict` knows them
                if isinstance(e, NotImplementedError) or (
                    isinstance(e, TypeError) and "mode" in str(e)
                ):
                    raise StoreError(
                        f"{self.url}: wanted create-only writes, this kind of store has none in "
                        "fsspec; use another"
                    ) from e
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
        return sorted(
            self._named(k for k in keys if k and k.startswith(prefix) and not k.endswith("/"))
        )

    def folders(self) -> Keys:
        with self._answers(""):
            try:
                found = self._fs.ls(self._root or "/", detail=True)
            except FileNotFoundError:
                return []
        names = (str(one["name"]).rstrip("/") for one in found if one["type"] == "directory")
        return sorted(self._named({name.rpartition("/")[2] for name in names}))

    def delete(self, key: str) -> None:
        with contextlib.suppress(NotFound), self._answers(key):
            self._fs.rm_file(self._path(key))

    def size(self, key: str) -> int:
        with self._answers(key):
            found = self._fs.info(self._path(key))
            if found.get("type") == "directory":
                raise NotFound(f"{self.url}/{key}: it is a folder")
            return int(found["size"])

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        return copy_into(self.get(key, start, start + buffer.nbytes), buffer)

    def abort_stale_uploads(self, older_than_s: float) -> Keys:
        """Abort stale uploads on S3 and return their keys. Other clouds drop unfinished uploads
        (Google's resumable ones, Azure's blocks) after a week."""
        if not hasattr(self._fs, "call_s3"):
            return []
        bucket, _, prefix = self._root.partition("/")
        with self._answers(""):
            return abort_s3_uploads(
                self._fs.call_s3, bucket, prefix + "/" if prefix else "", older_than_s
            )

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
        except Exception as e:
            # client libraries raise their own hierarchies (botocore, google, azure), none of which
            # may leak
            if is_ours(e):
                raise
            name = type(e).__name__
            if name in ("NoCredentialsError", "DefaultCredentialsError", "PartialCredentialsError"):
                raise no_credentials(where, e) from e
            raise StoreUnavailable(f"{where}: {name}: {e}") from e


# schemes of fsspec that accept the condition "only if absent" but overwrite the object
OVERWRITING = {"http", "https", "jupyter", "jlab", "generic", "dir", "simplecache"}


def _refuse_overwriting(url: str) -> None:
    """Raise WrongInput for stores on which fsspec cannot create an object only if absent in one
    step, before any request. It would emulate that with an empty file that others see, or not at
    all."""
    scheme = url.partition("://")[0].partition("::")[0]
    try:
        kind = fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError):
        return  # the caller reports it, with what to install
    generic, name = (
        (AsyncFileSystem, "_pipe_file")
        if issubclass(kind, AsyncFileSystem)
        else (AbstractFileSystem, "pipe_file")
    )
    if scheme in OVERWRITING or getattr(kind, name) is getattr(generic, name):
        raise WrongInput(
            f"{url}: fsspec's {scheme}:// has no create-only writes, on which commits stand; use "
            "s3://, gs://, az:// or a folder (file://), which may be mounted from there"
        )


# Errors for a bucket's refusals, shared by all clients.
def no_bucket(where: str) -> StoreRefused:
    return StoreRefused(
        f"{where}: the bucket does not exist; create it or name another in the run URL"
    )


def denied(where: str, e: object) -> StoreRefused:
    return StoreRefused(
        f"{where}: permission denied ({e}); check the credentials and the bucket's policy"
    )


def full(where: str, e: object) -> StoreRefused:
    return StoreRefused(
        f"{where}: {e}: the store is full; free some space, raise the quota, or choose another run "
        "URL"
    )


def no_credentials(where: str, e: object) -> StoreRefused:
    return StoreRefused(
        f"{where}: no credentials found; log in the way your cloud's own tools do ({e})"
    )


# error texts of S3-compatible stores and quotas
FULL = ("QuotaExceeded", "StorageFull", "InsufficientStorage", "No space left")


def abort_s3_uploads(
    call: Callable[..., Any], bucket: str, prefix: str, older_than_s: float
) -> list[str]:
    """Abort stale multipart uploads and return their keys relative to `prefix`, sorted.
    `call(operation, **arguments)`: an S3 client."""
    gone, marker, cutoff = [], dict[str, str](), time.time() - older_than_s
    while True:
        page = call("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **marker)
        for one in page.get("Uploads", []):
            began: datetime = one["Initiated"]
            if one["Key"].startswith(prefix) and began.timestamp() <= cutoff:
                call(
                    "abort_multipart_upload",
                    Bucket=bucket,
                    Key=one["Key"],
                    UploadId=one["UploadId"],
                )
                gone.append(one["Key"][len(prefix) :])
        if not page.get("IsTruncated"):
            return sorted(gone)
        marker = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


def list_s3_keys(
    list_page: Callable[..., Any], bucket: str, root: str, prefix: str
) -> Iterator[str]:
    """Yield all keys that begin with `prefix`, relative to `root`, valid or not. `list_page`: an S3
    client's list_objects_v2."""
    more: dict[str, str] = {}
    while True:
        page = list_page(Bucket=bucket, Prefix=root + prefix, **more)
        yield from (
            one["Key"][len(root) :]
            for one in page.get("Contents", [])
            if not one["Key"].endswith("/")
        )
        if not page.get("IsTruncated"):
            return
        more = {"ContinuationToken": page["NextContinuationToken"]}


class KeyFilter:
    """A filter for keys that every store can name. It logs once about others, which somebody else
    put there."""

    def __init__(self, url: str):
        self._url, self._told = url, False

    def __call__(self, keys: Iterable[str]) -> Iterator[str]:
        for key in keys:
            if not {"", ".", ".."} & set(key.split("/")):
                yield key
            elif not self._told:
                self._told = True
                say = (
                    "%s: left out %r, which is none of ours, and others like it: keys have no "
                    "empty parts and no dots"
                )
                log.warning(say, self._url, key)


def is_ours(e: Exception) -> bool:
    """Return whether an error is a bug in a program, and not from a service or the network: those
    have classes of client libraries, or are OSErrors."""
    return (
        type(e).__module__ == "builtins" and not isinstance(e, EOFError | RuntimeError)
    ) or isinstance(e, NotImplementedError)


def _is_conflict(e: BaseException) -> bool:
    """Return whether a create-only write lost. s3fs hides it as the cause of OSError(EINVAL); gcsfs
    and adlfs raise FileExistsError.

    S3's 409 ConditionalRequestConflict is different: it means "try again", so it stays
    StoreUnavailable and is retried.
    """
    return any(
        isinstance(one, FileExistsError) or "PreconditionFailed" in str(one) for one in _causes(e)
    )


def _says(e: BaseException, *words: str) -> bool:
    """Return whether the error or one of its causes contains one of these words."""
    return any(word.lower() in str(one).lower() for one in _causes(e) for word in words)


def _causes(e: BaseException | None) -> Iterator[BaseException]:
    while e is not None:
        yield e
        e = e.__cause__
