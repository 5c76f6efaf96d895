"""How long a snapshot of a sharded model takes until it is durable, against the ranks that share
the work, and what of it is stored. CPU, gloo. No assertions.

    # HSDP: copies of two ranks, 1 to 4 of them; each rank's way to the bucket takes 60 MB/s
    python benchmarks/mesh_snapshots.py
    python benchmarks/mesh_snapshots.py --meshes "dp_shard=2 x 2,dp_shard=2;tp=2 x 2" --mb-per-s 0

Each rank is a process that sends its share by the engine's own saver and uploader, to a folder.
Processes of one computer share its cores and its disk, so a rank's way to the bucket is made as
narrow as a node's network would be (`--mb-per-s`; 0: as it is, which shows the computer and not the
sharing). durable_s: from the hand-over on all ranks to the commit. stored: bytes of the snapshot's
objects. Look at `uptime` before you believe it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import harness
from harness.core.mesh import parse
from harness.worker.training_state import between_updates
from storage import Ref, Snapshots, open_store
from storage.snapshots.upload import Uploader, UploadJob, UploadOutcome
from storage.stores.objects import ObjectStore
from storage.tensors.dcp import Saver
from storage.tensors.state_tree import split

MESHES = "dp_shard=1 x 1,dp_shard=2 x 1,dp_shard=2 x 2,dp_shard=2 x 3,dp_shard=2 x 4"


class Narrow:
    """A store to which this process sends at most `nbytes_per_s`, as over one network card."""

    def __init__(self, inner: ObjectStore, nbytes_per_s: float):
        self._inner, self._nbytes_per_s, self.url = inner, nbytes_per_s, inner.url
        self._card = threading.Lock()
        self.get, self.list = inner.get, inner.list
        self.delete, self.size = inner.delete, inner.size

    def _travel(self, nbytes: int) -> None:
        if self._nbytes_per_s:
            with self._card:
                time.sleep(nbytes / self._nbytes_per_s)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._travel(len(data))
        self._inner.put(key, data)

    def create(self, key: str, data: bytes | memoryview) -> bool:
        self._travel(len(data))
        return self._inner.create(key, data)


class Net(nn.Module):
    def __init__(self, width: int, layers: int):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def rank_saves(flags: argparse.Namespace, folder: str) -> list[float]:
    """Seconds until each snapshot was committed."""
    run = harness.attach(seed=1)
    model = harness.fsdp2(Net(flags.width, flags.layers), run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    control, took_s = run._peers.control, []
    store = Narrow(open_store(folder), flags.mb_per_s * 1e6)
    saver = Saver(Snapshots(store), control, own_memory=False)
    for step in range(1, flags.rounds + 2):  # the first warms up
        model(torch.randn(2, flags.width)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        tensors, plain = split({"model": model.state_dict(), "optimizer": [optimizer.state_dict()]})
        saver.plan(tensors)
        buffer = torch.zeros(saver.nbytes, dtype=torch.uint8)
        staged = saver.begin(tensors, between_updates(model, tensors), buffer)
        staged.wait()
        ref, layout = Ref(1, step), staged.layout
        if control is not None:
            dist.barrier(control)
        job = UploadJob(
            *(ref, saver.rank, saver.world, f"t{saver.rank}", layout.files, layout.index),
            {"state": plain},
        )
        told: queue.SimpleQueue[UploadOutcome] = queue.SimpleQueue()
        t0 = time.perf_counter()
        Uploader(store).submit(job, buffer.numpy().data, told.put)
        outcome = told.get(timeout=300)
        took_s.append(time.perf_counter() - t0)
        if outcome.state != "committed":
            raise RuntimeError(outcome.error)
    if control is not None:
        dist.barrier(control)
    return took_s[1:]


def world_saves(flags: argparse.Namespace, words: str, world: int, folder: str) -> float:
    """The median of rounds, by rank 0."""
    tree = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(tree), str(tree / "tests")]
    from support.worlds import fork, free_port

    port = free_port()

    def saves(rank: int) -> None:
        os.environ |= {
            **{"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world)},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            **{"HARNESS_MESH": words, "GLOO_SOCKET_IFNAME": "lo"},
        }
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            took_s = rank_saves(flags, folder)
        if rank == 0:
            Path(folder, "took").write_text(str(statistics.median(took_s)))

    fork(world, saves, f"{words} on {world} ranks")
    return float(Path(folder, "took").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--meshes", default=MESHES, help="words, with ; between, and copies")
    parser.add_argument("--mb-per-s", type=float, default=60.0, help="of each rank; 0: no limit")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    load, cores = os.getloadavg()[0], os.cpu_count()
    print(f"load {load:.0f} on {cores} cores, {flags.mb_per_s:g} MB/s a rank")
    print(f"{'mesh':>20} copies ranks stored MB  most MB durable_s")
    for row in flags.meshes.split(","):
        words, _, copies = (part.strip() for part in row.replace(";", ",").partition(" x "))
        world = int(copies) * parse(words).copy_ranks
        with tempfile.TemporaryDirectory() as folder:
            took_s = world_saves(flags, words, world, folder)
            manifest = Snapshots(open_store(folder)).latest()
            assert manifest is not None
            by_rank: dict[str, int] = {}
            for key, part in manifest.stored.items():
                writer = key.rpartition("/")[2][:6]
                by_rank[writer] = by_rank.get(writer, 0) + part.nbytes
        stored, most = sum(by_rank.values()) / 1e6, max(by_rank.values()) / 1e6
        print(f"{words:>20} {copies:>6} {world:>5} {stored:>9.1f} {most:>8.1f} {took_s:>9.2f}")


if __name__ == "__main__":
    main()
