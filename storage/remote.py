"""Buckets through fsspec, and what all clients of buckets share."""

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
from storage.files import refuse_to_leave
from storage.objects import copy_into

if TYPE_CHECKING:
    from storage.objects import Gate, Keys

log = logging.getLogger("storage")
BLOCK_NBYTES = 64 << 20  # of what fsspec uploads of a larger object at once
PACED_NBYTES = 8 << 20  # ... bit by bit; some clients take no less than 5 MiB
READS_AT_ONCE = 8  # small objects


class FsspecStore:
    """Any fsspec filesystem. Create-only writes use the store's own condition (S3 If-None-Match,
    GCS generation 0, Azure If-None-Match), which fsspec spells `mode="create"`."""

    def __init__(self, url: str, **options: Any):
        self.url = url
        _refuse_overwriting(url)
        try:
            self._fs, path = fsspec.core.url_to_fs(
                url, **{"use_listings_cache": False, "skip_instance_cache": True, **options}
            )
        except (ImportError, ValueError) as e:
            # the package of this scheme is not installed, or there is no such scheme
            raise WrongInput(
                f"{url}: {e}; or install obstore, which speaks s3://, gs:// and az://"
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
        self._put(key, data, lambda nbytes: False, BLOCK_NBYTES)

    def put_paced(self, key: str, data: bytes | memoryview, gate: Gate) -> None:
        self._put(key, data, gate, PACED_NBYTES)

    def _put(self, key: str, data: bytes | memoryview, gate: Gate, block: int) -> None:
        view = memoryview(data).cast("B")
        with self._answers(key):
            if len(view) <= block:
                gate(len(view))
                self._fs.pipe_file(self._path(key), bytes(view))  # their clients take nothing else
                return
            file = self._fs.open(self._path(key), "wb", block_size=block)
            try:
                for start in range(0, len(view), block):
                    gate(len(view[start : start + block]))
                    file.write(view[start : start + block])
            except BaseException:
                file.discard()  # and not `close`, which would finish the object as far as it got
                file.closed = True  # or the garbage collector would
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
            return int(self._fs.info(self._path(key))["size"])

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        return copy_into(self.get(key, start, start + buffer.nbytes), buffer)

    def abort_stale_uploads(self, older_than_s: float) -> Keys:
        """S3 only. Google's resumable uploads and Azure's blocks are dropped by the cloud after
        a week."""
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
            # client libraries raise their own trees (botocore, google, azure); none may leak
            if is_ours(e):
                raise
            name = type(e).__name__
            if name in ("NoCredentialsError", "DefaultCredentialsError", "PartialCredentialsError"):
                raise no_credentials(where, e) from e
            raise StoreUnavailable(f"{where}: {name}: {e}") from e


# of fsspec's: they take the wish that an object be written only if it is absent, and overwrite it
OVERWRITING = {"http", "https", "jupyter", "jlab", "generic", "dir", "simplecache"}


def _refuse_overwriting(url: str) -> None:
    """Refuse by name, and before anything is asked, kinds of stores that fsspec cannot have write
    an object only if it is absent, in one step: it would make them out of an empty file that others
    see, or not at all. Raises WrongInput."""
    scheme = url.partition("://")[0].partition("::")[0]
    try:
        kind = fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError):
        return  # it is told with what to install
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


# What a bucket's refusals are told as, whoever speaks to it.
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
        f"{where}: no credentials found ({e}); log in the way your cloud's own tools do"
    )


# words of S3-compatible stores and quotas
FULL = ("QuotaExceeded", "StorageFull", "InsufficientStorage", "No space left")


def abort_s3_uploads(
    call: Callable[..., Any], bucket: str, prefix: str, older_than_s: float
) -> list[str]:
    """`call(operation, **arguments)`: an S3 client. Keys relative to `prefix`."""
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
    """Keys relative to `root` that begin with `prefix`, whatever they look like. `list_page`:
    an S3 client's list_objects_v2."""
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
    """Lets pass the keys that every store can name; tells once of others, which somebody else
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
    """A fault in a program, and no answer of a service or of the way there: those have classes
    of client libraries, or are OSErrors."""
    return (
        type(e).__module__ == "builtins" and not isinstance(e, EOFError | RuntimeError)
    ) or isinstance(e, NotImplementedError)


def _is_conflict(e: BaseException) -> bool:
    """Did a create-only write lose? s3fs hides it as the cause of OSError(EINVAL); gcsfs and adlfs
    raise FileExistsError.

    S3's 409 ConditionalRequestConflict is not that: it says "try again", so it stays
    StoreUnavailable and is retried.
    """
    return any(
        isinstance(one, FileExistsError) or "PreconditionFailed" in str(one) for one in _causes(e)
    )


def _says(e: BaseException, *words: str) -> bool:
    """Do the error or its causes contain one of these words?"""
    return any(word.lower() in str(one).lower() for one in _causes(e) for word in words)


def _causes(e: BaseException | None) -> Iterator[BaseException]:
    while e is not None:
        yield e
        e = e.__cause__
