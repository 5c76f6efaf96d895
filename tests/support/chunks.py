"""A snapshot of known chunks, and reads of it through tiers."""

import random

from storage import Manifest, MemoryStore, Ref, Snapshots
from storage.tiers.tiers import blocks_of_part

CHUNK = 1 << 10
BODY = random.Random(7).randbytes(21 * CHUNK + 77)
REF = Ref(1, 5)


def commit(store: MemoryStore, ref: Ref = REF, body: bytes = BODY) -> Manifest:
    snapshots = Snapshots(store, CHUNK)
    chunk = {"offsets": [0], "sizes": [len(body)], "part": "a.bin", "start": 0, "end": len(body)}
    snapshots.write(
        ref,
        0,
        1,
        {"a.bin": body},
        {"w": {"shape": [len(body)], "dtype": "uint8", "chunks": [chunk]}},
        {},
        "t",
    )
    manifest = snapshots.commit(ref, 1)
    assert manifest is not None
    return manifest


def fill(tiers, manifest: Manifest, body: bytes = BODY) -> None:
    for chunks in blocks_of_part(manifest.parts[0], memoryview(body)):
        for tier in tiers:
            tier.put(chunks)


def read(store, manifest: Manifest, start: int = 0, end: int = len(BODY)) -> bytes:
    return Snapshots(store, CHUNK).read(manifest, manifest.parts[0].key, start, end)
