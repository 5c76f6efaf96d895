"""Every store call fails once, and every class of damage is done."""

from __future__ import annotations

import random
import threading
from collections import Counter

from harness.proof.lives import LIFE_S
from harness.proof.tiny_snapshots import (
    CHUNK_NBYTES,
    RANKS,
    Broken,
    content,
    job,
    whole,
    with_small_chunks,
)
from storage.faults import FaultyStore, Mode, corrupt
from storage.files import MemoryStore
from storage.manifest import Manifest, Ref, SnapshotCorrupt
from storage.objects import ObjectStore
from storage.snapshots import Snapshots
from storage.upload import Uploader, UploadOutcome


def short_run(store: ObjectStore) -> set[Ref]:
    """Three snapshots of two ranks by the upload engine, one lane, in this process. What was
    reported committed."""
    committed: set[Ref] = set()
    uploaders = [Uploader(store, lanes=1, commit_timeout_s=0.05) for _ in range(RANKS)]
    for uploader in uploaders:
        with_small_chunks(uploader)
    for step in (1, 2, 3):
        ref = Ref(1, step)
        for rank in range(RANKS):
            done = threading.Event()

            def heard(outcome: UploadOutcome, done: threading.Event = done) -> None:
                if outcome.state == "committed":
                    committed.add(outcome.ref)
                done.set()

            uploaders[rank].submit(
                job(ref, rank, keep=1), memoryview(bytearray(content(ref, rank))), heard
            )
            done.wait(LIFE_S)
    return committed


def every_call(modes: tuple[Mode, ...], every: int = 1) -> Counter[str]:
    """Each call of a short run fails once, in each mode. Raises Broken."""
    counting = FaultyStore(MemoryStore(objects={}), random.Random(0))
    short_run(counting)
    found = Counter[str]()
    for mode in modes:
        for call in range(1, counting.calls + 1, every):
            inner = MemoryStore(objects={})
            committed = short_run(FaultyStore(inner, random.Random(0), fail_call=call, mode=mode))
            snapshots = Snapshots(inner, CHUNK_NBYTES)
            newest = snapshots.latest()
            if committed and (newest is None or newest.ref < max(committed)):
                raise Broken(
                    f"call {call}, {mode}: {max(committed)} was reported, the newest valid "
                    f"snapshot is {newest and newest.ref}"
                )
            if newest is not None and not whole(snapshots, newest):
                raise Broken(
                    f"call {call}, {mode}: {newest.ref} has other bytes than its ranks had"
                )
            found[mode] += 1
    return found


def _commit(snapshots: Snapshots, ref: Ref, base: Manifest | None) -> Manifest:
    for rank in range(RANKS):
        one, view = job(ref, rank), memoryview(content(ref, rank))
        files = {name: view[start:end] for name, (start, end) in one.files.items()}
        snapshots.write(ref, rank, RANKS, files, one.tensors, one.data, one.token, base)
    manifest = snapshots.commit(ref, RANKS)
    assert manifest is not None
    return manifest


DAMAGE = (
    "bit flip",
    "truncation",
    "missing",
    "stale",
    "mixed parts",
    "zombie write",
    "wrong store object",
)


def damaged(how: str, seed: int) -> tuple[bool, bool]:
    """Snapshots 1 to 3 are committed, then 3 is damaged. Was it caught, and was 2, or what is
    right, used instead?"""
    rng, store = random.Random(f"{how} {seed}"), MemoryStore(objects={})
    snapshots = Snapshots(store, CHUNK_NBYTES)
    base = _commit(snapshots, Ref(2, 1), None)
    for step in (2, 3):
        base = _commit(snapshots, Ref(2, step), base if step == 3 else None)
    own = sorted(base.objects.keys() - base.refers)  # what it shares with 2 spoils both
    manifest_key, key = f"snapshots/manifests/{base.ref.name}.json", rng.choice(own)
    right = Ref(2, 2)
    match how:
        case "bit flip":
            corrupt(store, rng.choice([key, manifest_key]), "flip", rng)
        case "truncation":
            corrupt(store, rng.choice([key, manifest_key]), rng.choice(["truncate", "empty"]), rng)
        case "missing":
            store.delete(key)
        case "stale":  # the bytes that the snapshot before had at that place
            rank = int(key.rpartition("/r")[2][:5])
            store.put(key, content(Ref(2, 2), rank)[-store.size(key) :])
        case "mixed parts":
            corrupt(store, own[0], "swap", rng, other=own[1])
        # a writer of an older epoch, further on by its own count, overwrites and commits
        case "zombie write":
            _commit(snapshots, Ref(1, 99), None)
            if rng.random() < 0.5:
                store.put(key, rng.randbytes(store.size(key)))
            else:
                right = base.ref
        case "wrong store object":
            if rng.random() < 0.5:
                store.put(manifest_key, store.get(f"snapshots/manifests/{Ref(2, 1).name}.json"))
            else:
                store.put(key, content(Ref(7, 7), 0)[: store.size(key)])
    caught: list[Ref] = []

    def bad(ref: Ref, why: str) -> None:
        caught.append(ref)
        snapshots.quarantine(ref, why)

    while (newest := snapshots.latest(bad)) is not None:
        try:
            if not whole(snapshots, newest):
                return False, False
            break
        except SnapshotCorrupt as e:
            snapshots.quarantine(newest.ref, str(e))
            caught.append(newest.ref)
    fell_back = newest is not None and newest.ref == right
    return (right == base.ref or base.ref in snapshots.quarantined()), fell_back
