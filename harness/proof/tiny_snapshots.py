"""Snapshots so tiny that thousands can be taken, and what must hold of them."""

from __future__ import annotations

import random
import time

from storage.manifest import Manifest, Ref
from storage.snapshots import Snapshots
from storage.upload import Uploader, UploadJob

RANKS, STEPS, LIVES = 2, 4, 10
FROZEN_NBYTES, TRAINED_NBYTES, CHUNK_NBYTES = 24 << 10, 6 << 10, 4 << 10


class Broken(AssertionError):
    """What must hold did not. The message says how to see it again."""


def content(ref: Ref, rank: int) -> bytes:
    """A rank's bytes: most are the same in all snapshots."""
    frozen, own = random.Random(rank), random.Random(f"{ref} {rank}")
    return frozen.randbytes(FROZEN_NBYTES) + own.randbytes(TRAINED_NBYTES)


def job(ref: Ref, rank: int, world: int = RANKS, keep: int = 2) -> UploadJob:
    nbytes = FROZEN_NBYTES + TRAINED_NBYTES
    files = {"0000.bin": (0, FROZEN_NBYTES // 2), "0001.bin": (FROZEN_NBYTES // 2, nbytes)}
    sizes = [end - start for start, end in files.values()]
    chunks = [
        {"offsets": [sum(sizes[:i])], "sizes": [n], "part": name, "start": 0, "end": n}
        for i, (name, n) in enumerate(zip(files, sizes, strict=True))
    ]
    tensors = {f"model/w{rank}": {"shape": [nbytes], "dtype": "uint8", "chunks": chunks}}
    note = {"t_start": time.time(), "stall_s": 0.0, "why": "interval"}
    return UploadJob(
        ref,
        rank,
        world,
        f"t{rank}",
        files,
        tensors,
        {"step": ref.step},
        "model/",
        note=note,
        keep={"last": keep} if rank == 0 else None,
    )


def whole(snapshots: Snapshots, manifest: Manifest) -> bool:
    """Verified, and the bytes are those that its ranks had."""
    snapshots.verify(manifest)
    for rank in range(manifest.world):
        (entry,) = (entry for name, entry in manifest.tensors.items() if name == f"model/w{rank}")
        parts = [snapshots.read(manifest, c["part"], c["start"], c["end"]) for c in entry["chunks"]]
        if b"".join(parts) != content(manifest.ref, rank):
            return False
    return True


def with_small_chunks(uploader: Uploader) -> None:
    uploader.snapshots.chunk_nbytes = CHUNK_NBYTES
