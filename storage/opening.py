"""A URL to a store."""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage.errors import StoreError, WrongInput
from storage.files import FileStore, MemoryStore
from storage.remote import FsspecStore
from storage.retries import PATIENCE_S, RETRY_WITHIN_S, Patience, Retrying

if TYPE_CHECKING:
    from storage.objects import ObjectStore

BACKENDS = ("obstore", "fsspec")
WANTED = "wanted s3://BUCKET/PATH, gs://BUCKET/PATH, az://CONTAINER/PATH, file:///PATH or a path"
MOST_LETTERS = 1024  # of a URL, as of a key in the clouds' buckets
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
    """A store rooted at `url`; transient failures are retried for `retry_within_s` seconds.

    `answered`: it is known to be there and to let us read and write, so that a refusal is taken for
    an outage for STORAGE_PATIENCE_S seconds. Who starts a process can tell it the same by the
    variable STORAGE_ANSWERED, the store's URL.

    A folder's writes survive a loss of power, unless the variable STORAGE_FSYNC is 0 or the option
    `durable` False.

    `options` are spelled as for the cloud's fsspec filesystem (credentials by each cloud's own
    conventions when absent). `backend`: who speaks to a bucket, "obstore" or "fsspec"; by default
    (also of the variable STORAGE_BACKEND) obstore wherever it can. Raises StoreError, WrongInput.
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
        from storage.bucket_clients import ObstoreUnusable
        from storage.fast import FastStore

        try:
            return FastStore(url, environ=environ, **options)
        except ObstoreUnusable as e:
            if backend == "obstore":
                raise StoreError(
                    f"{url}: obstore cannot be used: {e}; leave STORAGE_BACKEND out"
                ) from e
    return FsspecStore(url, **options)


def normalize(url: str) -> str:
    """`runs/x` -> `file:///abs/runs/x`; URLs are returned without a trailing slash. Raises
    WrongInput for what no store can have, and for a URL with a secret: it would be in every record
    of a run."""
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
    """Raises WrongInput."""
    if (scheme := path.partition(":")[0]) in (*_BUCKETS, "file") and ":" in path:
        raise WrongInput(f"{path!r} is no URL of a store: {WANTED}; two slashes follow {scheme}:")
    try:
        # not as_uri: it would quote spaces, fsspec does not
        return f"file://{Path(path).expanduser().resolve().as_posix()}"
    except (OSError, RuntimeError, ValueError) as e:
        raise WrongInput(f"{path!r} is no path of a folder ({e}); {WANTED}") from e


def _check_folder(url: str) -> None:
    """Raises WrongInput for a path that can be no folder."""
    path = Path(url.removeprefix("file://"))
    try:
        while not path.exists() and path != path.parent:
            path = path.parent
        is_other = not path.is_dir()
    except OSError as e:  # ENAMETOOLONG and the like; the others may pass
        if e.errno not in (errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL):
            return
        raise WrongInput(f"{url[:100]}: can be no folder ({e.strerror}); {WANTED}") from e
    if is_other:
        raise WrongInput(f"{url}: wanted a folder, found {path}, which is none; {WANTED}")
