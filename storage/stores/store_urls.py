"""Opening of the store at a URL."""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage.errors import StoreError, WrongInput
from storage.stores.bounded_store import Bounded
from storage.stores.folder_store import FileStore, MemoryStore
from storage.stores.fsspec_store import FsspecStore
from storage.stores.retries import PATIENCE_S, RETRY_WITHIN_S, Patience, Retrying

if TYPE_CHECKING:
    from storage.stores.objects import ObjectStore

BACKENDS = ("obstore", "fsspec")
WANTED = "wanted s3://BUCKET/PATH, gs://BUCKET/PATH, az://CONTAINER/PATH, file:///PATH or a path"
MOST_LETTERS = 1024  # limit for a URL, the same as for a key in the clouds' buckets
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::[A-Za-z][A-Za-z0-9+.-]*)*")
_BUCKETS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
# a bucket, an access point of S3, or a container with its account
_BUCKET = re.compile(r"[A-Za-z0-9][\w.-]{0,221}(@[\w.-]{1,253})?|arn:[\w:/.-]{1,200}", re.ASCII)


def open_store(
    url: str,
    *,
    retry_within_s: float = RETRY_WITHIN_S,
    answered: bool = False,
    backend: str = "",
    environ: Mapping[str, str] = os.environ,
    **options: Any,
) -> ObjectStore:
    """Return a store rooted at `url`; transient failures are retried for `retry_within_s` seconds.

    `answered`: the store is known to exist and to allow reads and writes, so a refusal counts as an
    outage for STORAGE_PATIENCE_S seconds. A parent process can pass this on with the variable
    STORAGE_ANSWERED, the store's URL.

    Writes to a folder survive a loss of power, unless the variable STORAGE_FSYNC is 0 or the option
    `durable` is False.

    `options` are spelled as for the cloud's fsspec filesystem (without credentials, each cloud's
    own conventions apply). `backend`: "obstore" or "fsspec", the client for a bucket; the default
    is the variable STORAGE_BACKEND, else obstore wherever it can be used. Raises StoreError,
    WrongInput.
    """
    url = normalize(url)
    scheme = url.partition("://")[0]
    if scheme == "memory":
        return MemoryStore(url)
    patience = Patience(_patience_s(environ), answered or environ.get("STORAGE_ANSWERED") == url)
    if scheme == "file":
        _check_folder(url)
        durable = options.pop("durable", environ.get("STORAGE_FSYNC") != "0")
        return Retrying(FileStore(url, durable, **options), retry_within_s, patience)
    inner = _remote(url, backend or environ.get("STORAGE_BACKEND", ""), environ, options)
    return Retrying(inner, retry_within_s, patience)


def _patience_s(environ: Mapping[str, str]) -> float:
    text = environ.get("STORAGE_PATIENCE_S", "")
    try:
        found = float(text or PATIENCE_S)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise WrongInput(f"STORAGE_PATIENCE_S: wanted a number of seconds, found {text!r}")
    return found


def _remote(
    url: str, backend: str, environ: Mapping[str, str], options: dict[str, Any]
) -> ObjectStore:
    if backend not in ("", *BACKENDS):
        raise WrongInput(
            f"{url}: wanted one of {', '.join(BACKENDS)} as STORAGE_BACKEND, found {backend!r}"
        )
    if backend != "fsspec":
        from storage.stores.obstore_store import FastStore, ObstoreUnusable

        try:
            fast = FastStore(url, environ=environ, **options)
            return Bounded(fast, fast.bounds, reads_bounded=True)
        except ObstoreUnusable as e:
            if backend == "obstore":
                raise StoreError(
                    f"{url}: obstore cannot be used: {e}; leave STORAGE_BACKEND out"
                ) from e
    return Bounded(FsspecStore(url, **options))


def normalize(url: str) -> str:
    """Return `url` without a trailing slash; `runs/x` becomes `file:///abs/runs/x`. Raises
    WrongInput for a URL that no store can have, and for one with a secret, which would be in every
    record of a run."""
    if not url.strip():
        raise WrongInput(f"{url!r} is no URL of a store: {WANTED}, found nothing")
    if not url.isprintable() or len(url) > MOST_LETTERS:
        what = f"{len(url)} letters" if url.isprintable() else "control characters or broken text"
        raise WrongInput(f"{url[:60]!r} is no URL of a store: {WANTED}, found {what}")
    if "://" not in url:
        return _of_path(url)
    scheme, _, rest = url.partition("://")
    rest = rest.rstrip("/") if scheme != "file" or rest.strip("/") else rest[:1]
    if not _SCHEME.fullmatch(scheme) or not (rest or scheme == "memory"):
        raise WrongInput(f"{url!r} is no URL of a store: {WANTED}")
    bucket = rest.partition("/")[0]
    if ":" in bucket.partition("@")[0] and "@" in bucket:
        raise WrongInput(
            f"{scheme}://...@{bucket.rpartition('@')[2]}: found a password in the URL, which a run "
            "writes into all its records; give it as your cloud's own tools take it"
        )
    if scheme in _BUCKETS and "?" in rest and "=" in rest.partition("?")[2]:
        raise WrongInput(
            f"{scheme}://{rest.partition('?')[0]}?...: found a query, such as a signature; "
            f"{WANTED}, and credentials as your cloud's own tools take them"
        )
    if scheme in _BUCKETS and not _BUCKET.fullmatch(bucket):
        raise WrongInput(f"{url!r}: {bucket!r} is no name of a bucket; {WANTED}")
    return f"{scheme}://{rest}"


def _of_path(path: str) -> str:
    """Return the file:// URL of a path. Raises WrongInput."""
    if (scheme := path.partition(":")[0]) in (*_BUCKETS, "file") and ":" in path:
        raise WrongInput(f"{path!r} is no URL of a store: {WANTED}; two slashes follow {scheme}:")
    try:
        # not as_uri: it would quote spaces, which fsspec does not
        return f"file://{Path(path).expanduser().resolve().as_posix()}"
    except (OSError, RuntimeError, ValueError) as e:
        raise WrongInput(f"{path!r} is no path of a folder ({e}); {WANTED}") from e


def _check_folder(url: str) -> None:
    """Raise WrongInput for a path that cannot be a folder."""
    path = Path(url.removeprefix("file://"))
    try:
        while not path.exists() and path != path.parent:
            path = path.parent
        is_other = not path.is_dir()
    except OSError as e:  # only errors of the path itself are wrong input; others may pass
        if e.errno not in (errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL):
            return
        raise WrongInput(f"{url[:100]}: can be no folder ({e.strerror}); {WANTED}") from e
    if is_other:
        raise WrongInput(f"{url}: wanted a folder, found {path}, which is none; {WANTED}")
