"""Buckets through obstore (Rust): large buffers leave and arrive in parallel parts, uncopied, and
without Python's lock.

Knows s3://, gs:// and az://. A store is opened in the process that uses it, not before a fork.
`ObstoreUnusable` says why obstore cannot be used (`storage/bucket_clients.py`); `open_store` then
takes fsspec.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np

from storage.bucket_clients import (
    NO_CREDENTIALS,
    ObstoreUnusable,
    azure_client,
    gcs_client,
    s3_client,
)
from storage.errors import NotFound, StoreError, StoreRefused, StoreUnavailable
from storage.objects import Gate, Keys, folders_of
from storage.remote import (
    FULL,
    KeyFilter,
    abort_s3_uploads,
    denied,
    full,
    is_ours,
    list_s3_keys,
    no_bucket,
    no_credentials,
)

try:
    import obstore
    from obstore import exceptions as errors
except ImportError:
    obstore = None  # type: ignore[assignment]

PART_NBYTES = 16 << 20  # of an upload
PACED_NBYTES = 5 << 20  # ... that is sent bit by bit: what S3 takes at least
READ_NBYTES = 8 << 20  # of a parallel read
AT_ONCE = 8  # requests of one call
# of all calls that write, for each processor: more only take it from one another
WRITES_PER_PROCESSOR = 4
SMALL_AT_ONCE = 32  # small objects that `get_each` reads at once
MAX_PARTS = 9000  # S3 allows 10000
REQUEST_TIMEOUT_S = 300.0  # of one request: a part at 430 kB/s with all of `AT_ONCE` on their way
CONNECT_TIMEOUT_S = 10.0
SILENCE_TIMEOUT_S = 60.0  # of a read
PART_RETRIES = 3  # of one part: a lost connection shall not cost the whole object


class FastStore:
    """`s3://`, `gs://` or `az://` through obstore. Does not retry calls (`Retrying` does), only
    parts of large ones."""

    def __init__(self, url: str, environ: Mapping[str, str], **options: Any):
        if obstore is None:
            raise ObstoreUnusable("it is not installed (pip install obstore)")
        self.url = url
        scheme, _, rest = url.partition("://")
        bucket, _, prefix = rest.partition("/")
        self._bucket, self._prefix, self._s3 = bucket, prefix, None
        self.reads_at_once = SMALL_AT_ONCE
        self._writes_at_once = max(AT_ONCE, WRITES_PER_PROCESSOR * (os.cpu_count() or AT_ONCE))
        self._writing, self._lock = 0, threading.Lock()  # calls
        self._with_strange_keys: set[str] = set()  # folders that obstore cannot list
        self._named = KeyFilter(url)
        match scheme:
            case "s3" | "s3a":
                build, self._s3 = s3_client(bucket, dict(options), environ)
            case "gs" | "gcs":
                build = gcs_client(bucket, dict(options), environ)
            case "az" | "abfs" | "abfss":
                build = azure_client(bucket, dict(options), environ)
            case _:
                raise ObstoreUnusable(f"{scheme}:// is not one of its own")
        timeouts = {
            "timeout": f"{REQUEST_TIMEOUT_S:g}s",
            "connect_timeout": f"{CONNECT_TIMEOUT_S:g}s",
        }
        # http only where the endpoint says so: a server of one's own.
        client: dict[str, Any] = {"allow_http": True, **timeouts}
        once = {"max_retries": 0, "retry_timeout": timedelta(seconds=REQUEST_TIMEOUT_S)}
        again = {"max_retries": PART_RETRIES, "retry_timeout": timedelta(seconds=30.0)}
        with self._answers(""):
            # A conditional write that is repeated unseen would lose against itself.
            self._once = build(prefix=prefix or None, client_options=client, retry_config=once)
            self._parts = build(prefix=prefix or None, client_options=client, retry_config=again)
            reading = {**client, "read_timeout": f"{SILENCE_TIMEOUT_S:g}s"}
            self._reads = build(prefix=prefix or None, client_options=reading, retry_config=again)

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        with self._answers(key):
            try:
                if start is None and end is None:
                    return obstore.get(self._once, key).bytes().to_bytes()
                if end is None:
                    return (
                        obstore.get(self._once, key, options={"range": {"offset": start or 0}})
                        .bytes()
                        .to_bytes()
                    )
                if end <= (start or 0):
                    self.size(key)  # NotFound
                    return b""
                return obstore.get_range(self._reads, key, start=start or 0, end=end).to_bytes()
            except errors.BaseError as e:
                if _is_beyond(e):
                    return b""
                raise

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        view = np.frombuffer(buffer, np.uint8)

        def piece(first: int) -> int:
            last = min(first + READ_NBYTES, len(view))
            with self._answers(key):
                try:
                    arrived: Any = obstore.get_range(
                        self._reads, key, start=start + first, end=start + last
                    )
                    found = np.frombuffer(arrived, np.uint8)
                except errors.BaseError as e:
                    if _is_beyond(e):
                        return 0
                    raise
            np.copyto(view[first : first + len(found)], found)  # without Python's lock
            return len(found)

        firsts = range(0, len(view), READ_NBYTES)
        if len(firsts) < 2:
            return sum(map(piece, firsts))
        with ThreadPoolExecutor(min(AT_ONCE, len(firsts)), "read") as pool:
            pieces = [pool.submit(piece, first) for first in firsts]
            try:
                done = 0
                for first, one in zip(firsts, pieces, strict=True):
                    if done == first:  # behind a gap nothing counts
                        done += one.result()
                    else:
                        one.result()
                return done
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def put(self, key: str, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        with self._answers(key), self._share() as at_once:
            if len(view) <= PART_NBYTES:
                obstore.put(self._parts, key, view, use_multipart=False)
            else:
                part = max(PART_NBYTES, -(-len(view) // MAX_PARTS))
                obstore.put(
                    self._parts,
                    key,
                    view,
                    use_multipart=True,
                    chunk_size=part,
                    max_concurrency=at_once,
                )

    def put_paced(self, key: str, data: bytes | memoryview, gate: Gate) -> None:
        """A request each time that a piece is full: the least that S3 takes."""
        view = memoryview(data).cast("B")
        if len(view) <= PACED_NBYTES:
            gate(len(view))
            self.put(key, view)
            return
        piece = max(PACED_NBYTES, -(-len(view) // MAX_PARTS))
        with (
            self._answers(key),  # within: an error aborts the upload
            self._share() as at_once,
            obstore.open_writer(
                self._parts, key, buffer_size=piece, max_concurrency=at_once
            ) as writer,
        ):
            for start in range(0, len(view), piece):
                some = view[start : start + piece]
                gate(len(some))
                writer.write(some)

    @contextlib.contextmanager
    def _share(self) -> Iterator[int]:
        """Around a call that writes: how many requests it may have on its way, beside those of the
        calls before it."""
        with self._lock:
            self._writing += 1
            at_once = max(2, min(AT_ONCE, self._writes_at_once // self._writing))
        try:
            yield at_once
        finally:
            with self._lock:
                self._writing -= 1

    def create(self, key: str, data: bytes | memoryview) -> bool:
        with self._answers(key):
            try:
                obstore.put(self._once, key, memoryview(data).cast("B"), mode="create")
            except (errors.AlreadyExistsError, errors.PreconditionError) as e:
                # S3's 409: somebody else is at it; try again
                if "ConditionalRequestConflict" in str(e):
                    raise StoreUnavailable(f"{self.url}/{key}: {_short(e)}") from e
                return False
            return True

    def list(self, prefix: str) -> list[str]:
        folder = prefix.rpartition("/")[0]
        with self._answers(prefix):
            if folder not in self._with_strange_keys:
                try:
                    found = obstore.list(self._once, folder or None, chunk_size=1000).collect()
                    return sorted(one["path"] for one in found if one["path"].startswith(prefix))
                except errors.InvalidPathError as e:
                    # one key that obstore cannot name, such as a//b, costs the whole page
                    if self._s3 is None:
                        hint = "delete that object, or set STORAGE_BACKEND=fsspec"
                        raise StoreError(
                            f"{self.url}/{prefix}: wanted keys that can be listed, found one: "
                            f"{_short(e)}; {hint}"
                        ) from e
                    self._with_strange_keys.add(folder)
            keys = list_s3_keys(
                self._client.list_objects_v2,
                self._bucket,
                self._prefix + "/" if self._prefix else "",
                prefix,
            )
        return sorted(self._named(keys))

    def folders(self) -> Keys:
        with self._answers(""):
            try:
                found = obstore.list_with_delimiter(self._once, None)["common_prefixes"]
            except errors.InvalidPathError:  # see `list`
                return folders_of(self.list(""))
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)

    def delete(self, key: str) -> None:
        with contextlib.suppress(NotFound), self._answers(key):
            obstore.delete(self._once, key)

    def size(self, key: str) -> int:
        with self._answers(key):
            return int(obstore.head(self._once, key)["size"])

    def abort_stale_uploads(self, older_than_s: float) -> Keys:
        """S3 only (obstore has no call for it, botocore does). On GCS set a lifecycle rule;
        Azure drops blocks by itself."""
        if self._s3 is None:
            return []
        with self._answers(""):
            client = self._client
            return abort_s3_uploads(
                lambda operation, **arguments: getattr(client, operation)(**arguments),
                self._bucket,
                self._prefix + "/" if self._prefix else "",
                older_than_s,
            )

    @functools.cached_property
    def _client(self) -> Any:
        """botocore's, for what obstore cannot do."""
        assert self._s3 is not None
        return self._s3()

    @contextlib.contextmanager
    def _answers(self, key: str) -> Iterator[None]:
        where = f"{self.url}/{key}"
        try:
            yield
        except StoreError:
            raise
        except FileNotFoundError as e:
            raise _not_found(where, str(e)) from e
        except (errors.PermissionDeniedError, errors.UnauthenticatedError) as e:
            if NO_CREDENTIALS in str(e):
                raise StoreRefused(f"{where}: {NO_CREDENTIALS}") from e
            raise denied(where, _short(e)) from e
        except errors.BaseError as e:
            raise _error(where, e) from e
        except Exception as e:
            # of credential providers and of botocore; each has a tree of its own, and none may leak
            if is_ours(e) and not isinstance(e, OSError):
                raise
            raise _error(where, e) from e


def _not_found(where: str, text: str) -> StoreError:
    codes = set(re.findall(r"<Code>(\w+)</Code>", text))
    if (
        codes & {"NoSuchBucket", "ContainerNotFound"}
        or "The specified bucket does not exist" in text
    ):
        return no_bucket(where)
    if "NoSuchUpload" in codes:  # somebody aborted it; it can be begun again
        return StoreUnavailable(f"{where}: the upload was aborted by others")
    return NotFound(where)


def _error(where: str, e: Exception) -> StoreError:
    text = str(e)
    if "NoSuchBucket" in text or "ContainerNotFound" in text:
        return no_bucket(where)
    if any(word in text for word in FULL):
        return full(where, _short(e))
    if (
        type(e).__name__ in ("NoCredentialsError", "PartialCredentialsError")
        or "must be specified" in text
        or _is_without_identity(text)
    ):
        return no_credentials(where, _short(e))
    if (
        "PermanentRedirect" in text
        or "AuthorizationHeaderMalformed" in text
        or "redirect without LOCATION" in text
    ):
        return StoreRefused(
            f"{where}: the bucket is in another region ({_short(e)}); set AWS_REGION to the "
            "bucket's"
        )
    return StoreUnavailable(f"{where}: {_short(e)}")


def _is_without_identity(text: str) -> bool:
    """Was a machine's metadata server asked for credentials, where there is none (or none for
    us)? One that has trouble says 5xx."""
    asked = "169.254.169.254" in text or "metadata.google.internal" in text
    return asked and not re.search(r"status code: (5\d\d|429)", text)


def _is_beyond(e: Exception) -> bool:
    """The object ends before the range begins."""
    return "416 " in str(e) or "InvalidRange" in str(e)


def _short(e: Exception) -> str:
    """obstore appends pages of debugging, and addresses may carry signatures."""
    return re.sub(r"\?\S+", "?...", " ".join(str(e).partition("\n\nDebug source")[0].split()))[:600]
