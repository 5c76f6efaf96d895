"""A URL to a store."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storage.errors import StoreError
from storage.files import FileStore, MemoryStore
from storage.remote import FsspecStore
from storage.retries import PATIENCE_S, RETRY_WITHIN_S, Patience, Retrying

if TYPE_CHECKING:
    from storage.objects import ObjectStore

BACKENDS = ("obstore", "fsspec")


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
    (also of the variable STORAGE_BACKEND) obstore wherever it can. Raises StoreError.
    """
    url = normalize(url)
    scheme = url.partition("://")[0]
    if scheme == "memory":
        return MemoryStore(url)
    patience = Patience(_patience_s(environ), answered or environ.get("STORAGE_ANSWERED") == url)
    if scheme == "file":
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
        raise StoreError(f"STORAGE_PATIENCE_S: wanted a number of seconds, found {text!r}")
    return found


def _remote(
    url: str, backend: str, environ: Mapping[str, str], options: dict[str, Any]
) -> ObjectStore:
    if backend not in ("", *BACKENDS):
        raise StoreError(
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
    """`runs/x` -> `file:///abs/runs/x`; URLs are returned without a trailing slash."""
    if "://" not in url:
        # not as_uri: it would quote spaces, fsspec does not
        return f"file://{Path(url).expanduser().resolve().as_posix()}"
    return url.rstrip("/")
