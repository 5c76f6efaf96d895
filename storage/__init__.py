"""Snapshots of training state on object storage. Knows nothing of `harness`; usable alone.

`storage.dcp` (tensors) is not imported here, so that controllers and agents need no torch.
"""

from storage.errors import NotFound, StoreError, StoreRefused, StoreUnavailable
from storage.files import FileStore, MemoryStore
from storage.manifest import Manifest, Part, PartList, Ref, SnapshotCorrupt, SnapshotTooNew
from storage.objects import ObjectStore
from storage.opening import open_store
from storage.remote import FsspecStore
from storage.retention import Keep
from storage.retries import Retrying
from storage.snapshots import Snapshots

__all__ = [
    "FileStore",
    "FsspecStore",
    "Keep",
    "Manifest",
    "MemoryStore",
    "NotFound",
    "ObjectStore",
    "Part",
    "PartList",
    "Ref",
    "Retrying",
    "SnapshotCorrupt",
    "SnapshotTooNew",
    "Snapshots",
    "StoreError",
    "StoreRefused",
    "StoreUnavailable",
    "open_store",
]
