"""What it costs that a chunk's hash is one that nobody can forge: this engine with BLAKE3, with the
xxh3 that it had before, and with SHA-256. No assertions, no network.

    python benchmarks/hashes.py
    python benchmarks/hashes.py --mb 4000 --rounds 9

alone: GB/s of chunks of 4 MiB that lie in memory, on one thread. The rest is done by the engine's
own parts, in this process, with a folder in /dev/shm as the bucket, which no network and no disk
slows down, so that the hash shows as much as it ever can: a snapshot from its hand-over to the
commit; a restore from the bucket, and one from the node's memory tier, where each chunk is hashed
twice. Seconds and processor seconds per GB. How long the training stands still is not in the table:
nothing is hashed in that time.

Rounds take the functions in an order that rotates; the first warms up and is not counted. Medians;
x: the median of the ratios to xxh3 within a round. Look at the load before you believe it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import xxhash

import storage.snapshots.manifest
import storage.snapshots.upload
from storage import Manifest, Ref, Snapshots, open_store
from storage.snapshots.manifest import BLAKE3, CHUNK_NBYTES, chunk_hash
from storage.snapshots.retention import Keep
from storage.snapshots.upload import Uploader, UploadJob
from storage.tensors import dcp
from storage.tensors.loading import load
from storage.tiers.folder_tier import FolderTier
from storage.tiers.tiers import Tiered, blocks_of_part

# all under one prefix, so that each is asked again when its chunks are read
FUNCTIONS: dict[str, Callable[[bytes | memoryview], str]] = {
    "xxh3": lambda data: BLAKE3 + xxhash.xxh3_128_hexdigest(data),
    "blake3": chunk_hash,
    "sha256": lambda data: BLAKE3 + hashlib.sha256(data).hexdigest()[:32],
}
Times = dict[str, tuple[float, float]]  # what was done: seconds, processor seconds


@contextmanager
def clocked(found: Times, what: str) -> Iterator[None]:
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    found[what] = time.perf_counter() - wall, time.process_time() - cpu


class Node:
    """A worker's state, its uploader, and the memory tier of its node."""

    def __init__(self, folder: Path, mb: int):
        self.tensors = {f"model/{i}": torch.randn(5000, 5000) for i in range(max(1, mb // 100))}
        self.nbytes = sum(t.nbytes for t in self.tensors.values())
        self.store = open_store(str(folder / "run"))
        self.snapshots, self.step = Snapshots(self.store), 0
        self.saver = dcp.Saver(self.snapshots, own_memory=False)
        self.saver.plan(self.tensors)
        self.buffer = torch.zeros(self.saver.nbytes, dtype=torch.uint8)
        self.uploader = Uploader(self.store)
        self.near = FolderTier("memory", folder / "near", 2 * self.nbytes)

    def round(self) -> Times:
        found: Times = {}
        self.step += 1
        for t in self.tensors.values():
            t.add_(1.0)
        staged = self.saver.begin(self.tensors, set(self.tensors), self.buffer)
        staged.arrive()
        data, ref, told = self.buffer.numpy().data, Ref(1, self.step), threading.Event()
        with clocked(found, "alone"):
            for start in range(0, self.nbytes, CHUNK_NBYTES):
                storage.snapshots.manifest.chunk_hash(data[start : start + CHUNK_NBYTES])
        layout = staged.layout
        job = UploadJob(ref, 0, 1, "t", dict(layout.files), layout.index, {}, weights="model/")
        with clocked(found, "snapshot"):
            self.uploader.submit(job, data, lambda outcome: told.set())
            if not told.wait(600):
                raise SystemExit("no commit within 600 s")
        manifest = self.snapshots.load(ref)
        with clocked(found, "restore from the bucket"):
            load(self.snapshots, manifest, self.tensors)
        self.fill(manifest)
        near = Snapshots(Tiered(self.store, manifest, [self.near]))
        with clocked(found, "restore from memory"):
            load(near, manifest, self.tensors)
        assert isinstance(near.store, Tiered) and near.store.tier == "memory"
        for id in self.near.list():
            self.near.drop(id)
        self.snapshots.prune(Keep(last=1))
        return found

    def fill(self, manifest: Manifest) -> None:
        for part in manifest.parts:
            for chunks in blocks_of_part(part, memoryview(self.store.get(part.key))):
                self.near.put(chunks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=1000, help="bytes of the state, in MB")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    names, rows = list(FUNCTIONS), dict[str, list[Times]]()
    loads = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        node = Node(Path(folder), args.mb)
        for i in range(args.rounds + 1):
            loads.append(os.getloadavg()[0])
            for name in names[i % len(names) :] + names[: i % len(names)]:
                for module in (storage.snapshots.manifest, storage.snapshots.upload):
                    vars(module)["chunk_hash"] = FUNCTIONS[name]
                rows.setdefault(name, []).append(node.round())
    print(
        f"{node.nbytes / 1e9:.2f} GB, {args.rounds} rounds, {os.cpu_count()} cores, load "
        f"{min(loads):.1f}-{max(loads):.1f}"
    )
    print(f"{'':<26}{'':<8}{'s/GB':>8}{'x':>7}{'CPU s/GB':>10}{'x':>7}")
    for what in rows["xxh3"][0]:
        for name in names:
            columns = []
            for which in (0, 1):
                mine = [times[what][which] for times in rows[name][1:]]
                base = [times[what][which] for times in rows["xxh3"][1:]]
                columns += [
                    statistics.median(mine) / node.nbytes * 1e9,
                    statistics.median(a / b for a, b in zip(mine, base, strict=True)),
                ]
            wall, wall_x, cpu, cpu_x = columns
            print(f"{what:<26}{name:<8}{wall:8.3f}{wall_x:7.2f}{cpu:10.3f}{cpu_x:7.2f}")
    sys.stdout.flush()
    os._exit(0)  # lanes and errands that run on while the process ends can abort it


if __name__ == "__main__":
    main()
