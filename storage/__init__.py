"""Snapshots of training state on object storage. The package knows nothing of `harness` and is
usable alone.

`storage.save(url, state, step=...)` and `storage.load(url)` are all that most scripts need. They
are imported on first use, like `storage.tensors.dcp` (tensors), so that controllers and agents need
no
torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from storage.errors import (
    NoSnapshot,
    NotFound,
    StateMismatch,
    StepBehind,
    StoreError,
    StoreRefused,
    StoreUnavailable,
    UnsupportedValue,
)
from storage.snapshots.manifest import (
    Manifest,
    Part,
    PartList,
    Ref,
    SnapshotCorrupt,
    SnapshotTooNew,
)
from storage.snapshots.restore import Rewind
from storage.snapshots.retention import Keep
from storage.snapshots.snapshots import Snapshots
from storage.stores.folder_store import FileStore, MemoryStore
from storage.stores.fsspec_store import FsspecStore
from storage.stores.objects import ObjectStore
from storage.stores.retries import Retrying
from storage.stores.store_urls import open_store

if TYPE_CHECKING:
    from storage.save_load import load, save

__all__ = [
    "FileStore",
    "FsspecStore",
    "Keep",
    "Manifest",
    "MemoryStore",
    "NoSnapshot",
    "NotFound",
    "ObjectStore",
    "Part",
    "PartList",
    "Ref",
    "Retrying",
    "Rewind",
    "SnapshotCorrupt",
    "SnapshotTooNew",
    "Snapshots",
    "StateMismatch",
    "StepBehind",
    "StoreError",
    "StoreRefused",
    "StoreUnavailable",
    "UnsupportedValue",
    "load",
    "open_store",
    "save",
]


def __getattr__(name: str) -> Any:
    if name in ("load", "save"):
        from storage import save_load

        return getattr(save_load, name)
    raise AttributeError(f"module 'storage' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
