"""Copies of snapshots from one store to another, and a preview of a prune. No torch.

`copy` copies committed snapshots: objects first, each hashed as it is read, the manifest last and
create-only. Objects that already exist are hashed where they are, so a copy can be interrupted at
any time and started again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from storage.errors import NotFound, StoreError
from storage.snapshots.manifest import Manifest, Part, Ref, SnapshotCorrupt, chunk_hash
from storage.snapshots.reader_leases import reading
from storage.snapshots.retention import KeepPolicy
from storage.snapshots.snapshot_keys import manifest_key, quarantine_key
from storage.snapshots.snapshots import Snapshots
from storage.stores.objects import Keys, ObjectStore, read_into, why_not_a_key

# objects under way at once, each wholly in memory (dcp cuts a rank's bytes into files of 256 MiB)
LANES = 2

CopyProgress = Callable[[Ref, int, int], None]  # snapshot, bytes done, bytes in all


@dataclass(frozen=True)
class Exported:
    """The files that `storage.export` has written."""

    files: tuple[str, ...]
    tensors: int
    nbytes: int  # bytes of the tensors
    tied: dict[str, str]  # omitted tensor -> the one with the same contents


@dataclass(frozen=True)
class Copied:
    ref: Ref
    state: str  # "copied" | "there" (already) | "pruned" (at the source, meanwhile)
    nbytes: int  # bytes sent
    found: int = 0  # bytes that were already there, and are right


def copy(
    source: ObjectStore,
    target: ObjectStore,
    refs: Iterable[Ref],
    *,
    extra: Collection[str] = (),
    progress: CopyProgress | None = None,
) -> list[Copied]:
    """Copy committed snapshots, in the order of `refs`. `extra`: keys of other objects, copied
    before them, create-only (invalid keys, which a bucket may list, are left out).

    Raises StoreError if another run's snapshot or object is at the target; SnapshotCorrupt if the
    source's bytes are not what was committed (then that snapshot is not committed at the target).
    """
    for key in (k for k in extra if not why_not_a_key(k)):
        _same_or_create(target, key, source.get(key))
    found = []
    for ref in refs:
        with reading(Snapshots(source), ref):
            found.append(_copy_one(source, target, ref, progress))
    return found


def _copy_one(
    source: ObjectStore, target: ObjectStore, ref: Ref, progress: CopyProgress | None
) -> Copied:
    key = manifest_key(ref)
    try:
        text = source.get(key)
        manifest = Snapshots(source).load(ref)
        if _is_there(target, key, text):
            return Copied(ref, "there", 0, manifest.nbytes)
        if target.list(quarantine_key(ref)):
            raise StoreError(
                f"{target.url}: snapshot {ref} is quarantined there; remove its mark, or copy to "
                "another URL"
            )
        wanted = objects(manifest)
        total, done, sent = sum(one.nbytes for one in wanted.values()), 0, 0
        with ThreadPoolExecutor(LANES, "copy") as pool:
            running = [
                pool.submit(_copy_object, source, target, ref, key, one)
                for key, one in wanted.items()
            ]
            try:
                for one, future in zip(wanted.values(), running, strict=True):
                    done, sent = done + one.nbytes, sent + future.result()
                    if progress is not None:
                        progress(ref, done, total)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
    except NotFound:
        return Copied(ref, "pruned", 0)
    _same_or_create(target, key, text)
    return Copied(ref, "copied", sent, total - sent)


def _copy_object(source: ObjectStore, target: ObjectStore, ref: Ref, key: str, wanted: Part) -> int:
    """Copy one object and return the bytes sent: 0 if they are already there."""
    buffer = memoryview(bytearray(wanted.nbytes))
    try:
        if (
            target.size(key) == wanted.nbytes
            and read_into(target, key, 0, buffer) == wanted.nbytes
            and _bad(wanted, buffer) is None
        ):
            return 0
    except NotFound:
        pass
    found = read_into(source, key, 0, buffer)
    if found != wanted.nbytes or source.size(key) != wanted.nbytes:
        raise SnapshotCorrupt(
            f"snapshot {ref}: {key} should have {wanted.nbytes} bytes, found {found}; copy an "
            "older snapshot"
        )
    bad = _bad(wanted, buffer)
    if bad is not None:
        raise SnapshotCorrupt(
            f"snapshot {ref}: {key}, bytes from {bad}: hash differs from what was written; copy an "
            "older snapshot"
        )
    target.put(key, buffer)
    return wanted.nbytes


def objects(manifest: Manifest) -> dict[str, Part]:
    """Return all stored objects that a snapshot's bytes lie in, by key, including those of older
    snapshots."""
    return manifest.stored


def _bad(wanted: Part, data: memoryview) -> int | None:
    """Return where the first wrong chunk begins, or None. Chunks that the snapshot does not use
    have no hash."""
    for i, of in enumerate(wanted.hashes):
        start = i * wanted.chunk_nbytes
        if of and chunk_hash(data[start : start + wanted.chunk_nbytes]) != of:
            return start
    return None


def _is_there(target: ObjectStore, key: str, text: bytes) -> bool:
    try:
        found = target.get(key)
    except NotFound:
        return False
    if found != text:
        raise StoreError(
            f"{target.url}: {key} is there and differs: another run's; copy to another URL"
        )
    return True


def _same_or_create(target: ObjectStore, key: str, text: bytes) -> None:
    if not target.create(key, text):
        _is_there(target, key, text)


# ---- preview of a prune --------------------------------------------------------------------------
class Pretended:
    """A store for dry runs: reads are real, writes and deletes only seem to happen. `deleted`: key
    -> its size."""

    def __init__(self, inner: ObjectStore):
        self.inner, self.url = inner, inner.url
        self.deleted: dict[str, int] = {}
        self._written: dict[str, bytes] = {}

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        if key in self._written:
            return self._written[key][start:end]
        self._look(key)
        return self.inner.get(key, start, end)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._written[key] = bytes(data)

    def create(self, key: str, data: bytes | memoryview) -> bool:
        if key in self.list(key):
            return False
        self.put(key, data)
        return True

    def list(self, prefix: str) -> Keys:
        here = {key for key in self.inner.list(prefix) if key not in self.deleted}
        return sorted(here | {key for key in self._written if key.startswith(prefix)})

    def delete(self, key: str) -> None:
        self._written.pop(key, None)
        if key not in self.deleted:
            with contextlib.suppress(NotFound):
                self.deleted[key] = self.inner.size(key)

    def size(self, key: str) -> int:
        if key in self._written:
            return len(self._written[key])
        self._look(key)
        return self.inner.size(key)

    def _look(self, key: str) -> None:
        if key in self.deleted:
            raise NotFound(f"{self.url}/{key}")


def would_prune(store: ObjectStore, keep: KeepPolicy) -> tuple[list[Ref], dict[str, int]]:
    """Return what `Snapshots.prune` would delete now: snapshots (and orphaned parts, under the refs
    they were meant for), and objects with their sizes."""
    pretended = Pretended(store)
    gone = Snapshots(pretended).prune(keep)
    return gone, pretended.deleted
