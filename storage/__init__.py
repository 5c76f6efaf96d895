"""Snapshots of training state on object storage. Knows nothing of `harness`; usable alone.

`storage.save(url, state, step=...)` and `storage.load(url)` are all that most scripts need. They
are imported when first asked for, like `storage.dcp` (tensors), so that controllers and agents
need no torch.
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
from storage.files import FileStore, MemoryStore
from storage.manifest import Manifest, Part, PartList, Ref, SnapshotCorrupt, SnapshotTooNew
from storage.objects import ObjectStore
from storage.opening import open_store
from storage.remote import FsspecStore
from storage.restore import Rewind
from storage.retention import Keep
from storage.retries import Retrying
from storage.snapshots import Snapshots

if TYPE_CHECKING:
    from storage.state import load, save

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
        from storage import state

        return getattr(state, name)
    raise AttributeError(f"module 'storage' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
