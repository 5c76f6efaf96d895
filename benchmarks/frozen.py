"""What a snapshot costs where training leaves most of the model alone: adapters on a base of 300
MB, saved by a worker's own parts (saver, uploader) into a folder, all in this process. No
assertions.

    python benchmarks/frozen.py
    python benchmarks/frozen.py --base-mb 1000 --rounds 5

Two ways, interleaved: with what training leaves alone named ("left alone"), and as if all were
trained ("all"), which still sends no chunk twice but copies and hashes everything. Of the second
snapshot and those after it: bytes stored, seconds and processor seconds from the copy's beginning
to the commit. Look at `uptime` before you believe it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from harness.worker.snapshotter import StagingBuffers
from storage import Ref, Snapshots, open_store
from storage.snapshots.upload import Uploader, UploadJob
from storage.tensors import dcp
from storage.tensors.dcp import Filled

SIDE, RANK = 2048, 16  # of a square matrix of the base, and of its adapter


class Worker:
    """Its state, and two buffers in turn, as a session has them."""

    def __init__(self, folder: Path, base_mb: int, left_alone: bool):
        self.store = open_store(str(folder))
        self.tensors: dict[str, torch.Tensor] = {}
        for i in range(max(1, base_mb * 10**6 // (SIDE * SIDE * 4))):
            self.tensors[f"model/{i}.base"] = torch.randn(SIDE, SIDE)
            for name in ("a", "b"):
                self.tensors[f"model/{i}.{name}"] = torch.randn(SIDE, RANK)
                for moment in ("exp_avg", "exp_avg_sq"):
                    self.tensors[f"optimizer/0/{i}.{name}/{moment}"] = torch.randn(SIDE, RANK)
        self.trained = [t for name, t in self.tensors.items() if not name.endswith("base")]
        self.still = {n for n in self.tensors if n.endswith("base")} if left_alone else set()
        self.saver = dcp.Saver(Snapshots(self.store), own_memory=False)
        self.saver.plan(self.tensors, self.still)
        self.buffers = [torch.zeros(self.saver.nbytes, dtype=torch.uint8) for _ in range(2)]
        self.filled = [Filled(), Filled()]
        self.hold = StagingBuffers(None, None, None)  # type: ignore[arg-type]
        self.uploader, self.step = Uploader(self.store), 0

    def save(self) -> tuple[float, float, int]:
        """Seconds, processor seconds, bytes stored."""
        for t in self.trained:
            t.add_(1)
        self.step += 1
        begun_s, cpu_s = time.perf_counter(), time.process_time()
        buffer = self.buffers[self.step % 2]
        staged = self.saver.begin(
            self.tensors, set(self.tensors), buffer, self.still, self.filled[self.step % 2]
        )
        staged.arrive()
        ref, told = Ref(1, self.step), threading.Event()
        job = UploadJob(
            ref,
            0,
            1,
            "t",
            dict(staged.layout.files),
            staged.layout.index,
            {},
            weights="model/",
            keep={"last": 2},
            unchanged=self.hold.since_last(staged, f"t {ref.name}"),
        )
        self.uploader.submit(job, buffer.numpy().data, lambda outcome: told.set())
        if not told.wait(600):
            raise SystemExit("no commit within 600 s")
        took_s, used_s = time.perf_counter() - begun_s, time.process_time() - cpu_s
        return took_s, used_s, Snapshots(self.store).load(ref).own_nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-mb", type=int, default=300, help="bytes of the base, in MB")
    parser.add_argument("--rounds", type=int, default=6, help="snapshots after the second")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        workers = {
            way: Worker(Path(folder) / way.replace(" ", "-"), args.base_mb, way == "left alone")
            for way in ("left alone", "all")
        }
        base = sum(t.nbytes for t in workers["all"].tensors.values())
        trained = sum(t.nbytes for t in workers["all"].trained)
        print(f"state {base / 1e6:.0f} MB, of which adapters and their moments {trained / 1e6:.1f}")
        found: dict[str, list[tuple[float, float, int]]] = {way: [] for way in workers}
        for _ in range(args.rounds + 2):
            for way, worker in workers.items():
                found[way].append(worker.save())
        for way, rows in found.items():
            for name, some in (("first", rows[:1]), ("second", rows[1:2]), ("later", rows[2:])):
                columns = zip(*some, strict=True)
                took_s, used_s, nbytes = map(statistics.median, columns)
                print(
                    f"{way:10} {name:6} {nbytes / 1e6:8.2f} MB stored, {took_s:6.3f} s, "
                    f"{used_s:6.3f} s of processor"
                )
    sys.stdout.flush()
    os._exit(0)  # lanes and errands that run on while the process ends can abort it


if __name__ == "__main__":
    main()
