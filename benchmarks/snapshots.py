"""What a snapshot costs the training, here and with its peers, interleaved in one run. One process, CPU or GPU. No assertions.

    python benchmarks/snapshots.py --layers 19               # 0.96 GB of parameters and AdamW state, to a local folder, with fsync
    python benchmarks/snapshots.py --layers 5 --rounds 5     # 0.25 GB
    python benchmarks/snapshots.py --adapters                # what the second snapshot sends when only adapters are trained
    python benchmarks/snapshots.py --store s3://bucket/x     # AWS_ENDPOINT_URL and credentials as usual; only what can write there

Every round takes each way once, in an order that rotates, twice over: while training goes on (blocked_s: how long the training thread
stood still, in the snapshot and before the next optimizer step; drain_x: step time until it is durable over that without a snapshot), and
at rest (rest_s: blocked when nothing can overlap; durable_s; cpu_s of all our processes per GB). `memory` runs each way once in a process
of its own: the peak of the proportional set size of the whole process tree above that before the snapshot, in MB.
The first round warms up and is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from harness.nearby import NearbyConfig
from harness.session import _between_updates, _tensor_of
from harness.uploader import Line, Local, Remote, Server
from storage import Ref, Snapshots, open_store
from storage.dcp import Saver, load, split
from storage.objects import read_into
from storage.staging import Beside, Stage
from storage.upload import Job

DRAIN_LIMIT_S = 300.0


class Training:
    def __init__(self, flags: argparse.Namespace):
        torch.manual_seed(0)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = nn.Sequential(*[nn.Linear(flags.width, flags.width, bias=False) for _ in range(flags.layers)]).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.x = torch.randn(flags.batch, flags.width, device=self.device)
        self.step()
        self.nbytes = sum(t.numel() * t.element_size() for t in split(self.state())[0].values())

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": [self.optimizer.state_dict()]}

    def step(self, before_optimizer: Any = lambda: 0.0) -> tuple[float, float]:
        """Seconds of the step, and of those that `before_optimizer` took."""
        t0 = time.perf_counter()
        self.model(self.x).square().mean().backward()
        t1 = time.perf_counter()
        before_optimizer()
        waited = time.perf_counter() - t1
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - t0, waited


class Way:
    """`begin` blocks the training; `before_optimizer` may block it once more; `durable` is a future."""

    def __init__(self, training: Training, folder: str):
        self.training, self.folder, self.n = training, folder, 0

    def place(self) -> str:
        self.n += 1
        return f"{self.folder}/{type(self).__name__.lower()}-{os.getpid()}-{self.n}"

    def before_optimizer(self) -> None: ...

    def begin(self) -> Future[Any]:
        raise NotImplementedError

    def load(self) -> None: ...

    def close(self) -> None: ...


def done(value: Any = None) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class Ours(Way):
    """Copied beside the training, sent by the uploader process."""

    own_process = True

    def __init__(self, training: Training, folder: str):
        super().__init__(training, folder)
        self.url = self.place()
        self.store = opened(self.url)
        self.saver = Saver(Snapshots(self.store), own_memory=False)
        self.tensors, _ = split(training.state())
        self.saver.plan(self.tensors)
        self.sender = Beside("send")
        local = Local(self.store, lambda job, outcome: None)
        if self.own_process:
            self.stage = Stage()
            order = json.dumps([self.url, str(self.stage.folder), self.stage.budget_nbytes])
            self.process = subprocess.Popen([sys.executable, __file__, "--serve", order], stdin=subprocess.PIPE)
            Line(self.stage.folder, connect_s=60.0).close()
            self.courier: Any = Remote(self.stage.folder, 1, 0, local)
        else:
            self.courier = local
        self.courier.give_back(self.courier.segment(self.saver.nbytes))
        self.staged: Any = None
        self.manifest: Any = None

    def begin(self) -> Future[Any]:
        self.n += 1
        tensors, plain = split(self.training.state())
        self.tensors = tensors
        assert self.saver.fits(tensors)
        segment = self.courier.segment(self.saver.nbytes)
        staged = self.staged = self.saver.begin(tensors, _between_updates(self.training.model, tensors), _tensor_of(segment))
        future: Future[Any] = Future()
        job = Job(Ref(1, self.n), 0, 1, f"t{self.n}", staged.layout.files, staged.layout.index, {"state": plain}, weights="model/",
                  keep={"last": 1, "every": 0}, note={"t_start": time.time(), "stall_s": 0.0, "why": "interval"})  # fmt: skip

        def send() -> None:
            staged.arrive()
            self.courier.send(job, segment, future.set_result)

        self.sender.run(send)
        return future

    def before_optimizer(self) -> None:
        if self.staged is not None:
            self.staged.wait()

    def load(self) -> None:
        snapshots = Snapshots(self.store)
        manifest = snapshots.latest()
        assert manifest is not None
        load(snapshots, manifest, {name: torch.empty_like(t) for name, t in self.tensors.items()})

    def close(self) -> None:
        if self.own_process:
            self.process.kill()
            self.process.wait()
            self.stage.close()


class OursInThread(Ours):
    """The same without an agent: threads of the trainer's process."""

    own_process = False


class BareCopy(Way):
    """The lower limit: one memcpy of the state to warm memory, and no snapshot."""

    def begin(self) -> Future[Any]:
        tensors = list(split(self.training.state())[0].values())
        if not hasattr(self, "buffers"):
            self.buffers = [torch.empty(t.shape, dtype=t.dtype).fill_(0) for t in tensors]
        for t, b in zip(tensors, self.buffers, strict=True):
            if t.is_cuda:
                b.copy_(t)
            else:
                np.copyto(b.numpy(), t.numpy())
        return done()


class BarePut(Way):
    """The limit of a bucket: the same number of bytes in one multipart put by the fastest client, and read in parallel ranges."""

    def __init__(self, training: Training, folder: str):
        super().__init__(training, folder)
        self.url = self.place()
        self.store = opened(self.url)
        self.bytes = memoryview(np.random.default_rng(0).bytes(training.nbytes))
        self.into = memoryview(bytearray(training.nbytes))

    def begin(self) -> Future[Any]:
        self.store.put("all", self.bytes)
        return done()

    def load(self) -> None:
        with ThreadPoolExecutor(8) as pool:
            starts = range(0, len(self.bytes), 32 << 20)
            list(pool.map(lambda at: read_into(self.store, "all", at, self.into[at : at + (32 << 20)]), starts))


class Adapters(Ours):
    """Frozen weights and small adapters, as with LoRA: what the second snapshot sends."""

    own_process = False

    def __init__(self, training: Training, folder: str):
        self.frozen = {f"model/{i}.w": p.detach().clone() for i, p in enumerate(training.model.parameters())}
        self.small = {f"model/{i}.a": torch.zeros(16, w.shape[-1]) for i, w in enumerate(self.frozen.values())}
        self.small |= {f"optimizer/{i}/{m}": torch.zeros(16, w.shape[-1]) for i, w in enumerate(self.frozen.values()) for m in "mv"}
        super().__init__(training, folder)

    def measure(self) -> None:
        snapshots, saver = Snapshots(self.store), Saver(Snapshots(self.store))
        tensors = {**self.frozen, **self.small}
        saver.plan(tensors)
        for step in (1, 2, 3):
            for t in self.small.values():
                t.add_(1)
            t0 = time.perf_counter()
            manifest = saver.write(saver.stage(tensors), Ref(1, step), {}, "t")
            assert manifest is not None
            seconds, sent = time.perf_counter() - t0, manifest.own_nbytes
            changed = sum(t.numel() * t.element_size() for t in self.small.values())
            print(f"adapters: snapshot {step} of {manifest.nbytes / 1e6:.1f} MB ({changed / 1e6:.2f} MB of them change) "
                  f"sent {sent / 1e6:.2f} MB in {seconds:.3f} s")  # fmt: skip
        snapshots.verify(manifest)


class TorchSave(Way):
    def begin(self) -> Future[Any]:
        self.path = self.place()
        with open(self.path, "wb") as f:
            torch.save(self.training.state(), f)
            f.flush()
            os.fsync(f.fileno())
        return done()

    def load(self) -> None:
        torch.load(self.path, weights_only=True)


class DcpSave(Way):
    def begin(self) -> Future[Any]:
        self.path = self.place()
        dcp.save(split(self.training.state())[0], storage_writer=dcp.FileSystemWriter(self.path), no_dist=True)
        return done()

    def load(self) -> None:
        tensors = {name: torch.empty_like(t) for name, t in split(self.training.state())[0].items()}
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(self.path), no_dist=True)


class DcpFsspec(Way):
    def begin(self) -> Future[Any]:
        self.path = self.place()
        dcp.save(split(self.training.state())[0], storage_writer=FsspecWriter(self.path), no_dist=True)
        return done()

    def load(self) -> None:
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        tensors = {name: torch.empty_like(t) for name, t in split(self.training.state())[0].items()}
        dcp.load(tensors, storage_reader=FsspecReader(self.path), no_dist=True)


class DcpAsync(Way):
    """dcp.async_save with its best stager without a GPU: into shared memory that is used again."""

    kind = AsyncCheckpointerType.THREAD

    def __init__(self, training: Training, folder: str):
        super().__init__(training, folder)
        pinned = training.device.type == "cuda"
        self.stager = DefaultStager(StagingOptions(pinned, True, pinned, False))

    def writer(self, path: str) -> Any:
        return dcp.FileSystemWriter(path)

    def begin(self) -> Future[Any]:
        answer: Any = dcp.async_save(
            split(self.training.state())[0], storage_writer=self.writer(self.place()), async_checkpointer_type=self.kind,
            async_stager=self.stager,
        )  # fmt: skip
        future: Future[Any] = getattr(answer, "upload_completion", answer)
        return future


class DcpAsyncProcess(DcpAsync):
    kind = AsyncCheckpointerType.PROCESS


class DcpAsyncFsspec(DcpAsync):
    def writer(self, path: str) -> Any:
        return FsspecWriter(path)


FOLDER_WAYS = (Ours, OursInThread, BareCopy, TorchSave, DcpSave, DcpFsspec, DcpAsync, DcpAsyncProcess)
BUCKET_WAYS = (Ours, BareCopy, BarePut, DcpFsspec, DcpAsyncFsspec)


def opened(url: str) -> Any:
    return open_store(url, durable=True) if "://" not in url else open_store(url)


def serve(order: str) -> None:
    url, folder, budget = json.loads(order)
    os.nice(10)
    server = Server(opened(url), Path(folder), budget, "bench", NearbyConfig())
    threading.Thread(target=server.serve, daemon=True).start()
    sys.stdin.read()
    os._exit(0)


def tree_cpu_s() -> float:
    total = 0.0
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def tree_pss() -> int:
    me = psutil.Process()
    total = 0
    for process in [me, *me.children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total


def one_round(way: Way) -> dict[str, float]:
    training = way.training
    base = statistics.median(training.step()[0] for _ in range(3))
    t0 = time.perf_counter()
    future = way.begin()
    blocked = time.perf_counter() - t0
    seconds, waited = training.step(way.before_optimizer)
    steps = [seconds - waited]
    while not future.done() and time.perf_counter() - t0 < DRAIN_LIMIT_S:
        steps.append(training.step()[0])
    future.result(DRAIN_LIMIT_S)
    found = {"base_step_s": base, "blocked_s": blocked + waited, "drain_x": statistics.mean(steps) / base}
    cpu, t0 = tree_cpu_s(), time.perf_counter()
    future = way.begin()
    way.before_optimizer()
    found["rest_s"] = time.perf_counter() - t0
    future.result(DRAIN_LIMIT_S)
    found["durable_s"] = time.perf_counter() - t0
    found["cpu_s_per_gb"] = (tree_cpu_s() - cpu) / (training.nbytes / 1e9)
    t0 = time.perf_counter()
    way.load()
    found["load_s"] = time.perf_counter() - t0
    return found


def memory(kind: type[Way], flags: argparse.Namespace) -> float:
    """Peak extra MB of the first and second snapshot of one way, in this (fresh) process."""
    training = Training(flags)
    before = tree_pss()
    way = kind(training, flags.folder)
    peak, stop = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not stop.wait(0.02):
            peak = max(peak, tree_pss())

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(2):
        future = way.begin()
        training.step(way.before_optimizer)
        future.result(DRAIN_LIMIT_S)
    stop.set()
    watcher.join()
    way.close()
    return (peak - before) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=19)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of torch; leave a core to the drain")
    parser.add_argument("--store", default="", help="URL prefix instead of a temporary folder")
    parser.add_argument("--ways", default="", help="comma-separated; default: all that can write there")
    parser.add_argument("--adapters", action="store_true", help="measure only what a second snapshot sends when most weights are frozen")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--measure-memory", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.serve:
        serve(flags.serve)
    torch.set_num_threads(flags.threads)
    if not dist.is_initialized():  # async_save wants a group
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if flags.measure_memory:
        print(json.dumps(memory(globals()[flags.measure_memory], flags)))
        sys.stdout.flush()
        os._exit(0)
    temporary = None if flags.store else tempfile.mkdtemp(prefix="snapshots-")
    flags.folder = flags.store or temporary
    kinds = [k for k in (BUCKET_WAYS if flags.store else FOLDER_WAYS) if not flags.ways or k.__name__ in flags.ways.split(",")]
    training = Training(flags)
    if flags.adapters:
        way = Adapters(training, flags.folder)
        way.measure()
        os._exit(0)
    ways = [kind(training, flags.folder) for kind in kinds]
    print(f"{training.nbytes / 1e9:.2f} GB of state on {training.device}, {flags.threads} thread(s), {flags.rounds} rounds, {flags.folder}")
    found: dict[str, list[dict[str, float]]] = {type(w).__name__: [] for w in ways}
    try:
        with contextlib.suppress(KeyboardInterrupt):  # then what was measured so far is printed
            for i in range(flags.rounds + 1):
                for way in ways[i % len(ways) :] + ways[: i % len(ways)]:
                    result = one_round(way)
                    if i:
                        found[type(way).__name__].append(result)
                    if temporary and not isinstance(way, Ours):
                        for old in Path(temporary).glob(f"{type(way).__name__.lower()}-*"):
                            shutil.rmtree(old, ignore_errors=True) if old.is_dir() else old.unlink()
        columns = ("blocked_s", "drain_x", "rest_s", "durable_s", "cpu_s_per_gb", "load_s", "base_step_s")
        print(f"{'median (min-max)':18}" + "".join(f"{c:>24}" for c in columns) + f"{'memory_mb':>12}")
        for name, results in ((name, results) for name, results in found.items() if results):
            cells = []
            for c in columns:
                values = [r[c] for r in results]
                cells.append(f"{statistics.median(values):.4g} ({min(values):.3g}-{max(values):.3g})")
            extra = "" if flags.no_memory else f"{memory_of(name, flags):.0f}"
            print(f"{name:18}" + "".join(f"{c:>24}" for c in cells) + f"{extra:>12}", flush=True)
    finally:
        for way in ways:
            way.close()
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)
    os._exit(0)  # async_save leaves a process that does not end by itself


def memory_of(name: str, flags: argparse.Namespace) -> float:
    words = [
        "--measure-memory",
        name,
        "--folder",
        flags.folder,
        "--layers",
        flags.layers,
        "--width",
        flags.width,
        "--threads",
        flags.threads,
    ]
    ended = subprocess.run([sys.executable, __file__, *map(str, words)], capture_output=True, text=True, timeout=600)
    return float(ended.stdout.splitlines()[-1]) if ended.returncode == 0 else float("nan")


if __name__ == "__main__":
    main()
