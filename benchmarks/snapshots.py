"""What a snapshot costs the training, here and with its peers, interleaved in one run; the targets
beside it. CPU or GPU. No assertions.

    # 1 GB of parameters and AdamW state, to a local folder, with fsync
    python benchmarks/snapshots.py
    # ... to an S3 server on this machine, which it starts
    python benchmarks/snapshots.py --store seaweed
    # AWS_ENDPOINT_URL and credentials as usual
    python benchmarks/snapshots.py --store s3://bucket/x
    # ... which has a processor core of its own
    python benchmarks/snapshots.py --store seaweed --apart
    # ten minutes of training at the default interval, with steps of 2 s, with each way in turn
    python benchmarks/snapshots.py --store seaweed --run-minutes 10 --steps-ms 2000
    # what the second snapshot sends when only adapters are trained
    python benchmarks/snapshots.py --adapters

Every round takes each way once, in an order that rotates. While training goes on, those that
overlap with it: blocked_s (how long the training thread stood still, in the snapshot and before the
next optimizer step), drain_x (step time until it is durable, over that without a snapshot), lost_s
(what the steps until then took longer, and blocked_s) and beside_s (until it is durable). notice_s:
of one that is on its way at its pace, the seconds from a notice until it is durable. At rest:
rest_s (blocked when nothing can overlap), durable_s, cpu_s of all our processes (not the server)
per GB; paced_cpu is that of the uploader while training goes on. load_s: onto two
processes that have a half of each tensor, from what one process wrote. memory_mb, of each way in a
process of its own: the peak of the proportional set size of the process tree in two snapshots,
above that of training alone (a stage in RAM is one copy of the state). Ratios are medians of the
ratios within a round. The first round warms up and is not counted. Look at `uptime` before you
believe it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
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

from harness.node.heartbeat import ProgressFile, WorkerPhase
from harness.uploader.handoff import InProcessSender, UploaderClient, UploaderConnection
from harness.worker.snapshot_timer import SENDING, Interval, Rhythm
from harness.worker.snapshotter import tensor_of
from harness.worker.training_state import between_updates
from storage import Keep, Ref, Snapshots, open_store
from storage.snapshots.pacer import typical_s
from storage.snapshots.staging import Stage
from storage.snapshots.upload import TrainingBeside, UploadJob, UploadOutcome
from storage.stores.objects import read_into
from storage.tensor_threads import TensorThread
from storage.tensors.dcp import Saver
from storage.tensors.loading import load
from storage.tensors.state_tree import split

DRAIN_LIMIT_S = 300.0
READERS = 2  # the world that loads
WITHIN_S = SENDING * 60.0  # of an interval of a minute, as the session would say
BASE_S, BASE_STEPS = 3.0, 5  # at least, before and after: how long steps take at rest
BUCKET = "bench-bucket"


class Training:
    def __init__(self, flags: argparse.Namespace):
        torch.manual_seed(0)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = nn.Sequential(
            *[nn.Linear(flags.width, flags.width, bias=False) for _ in range(flags.layers)]
        ).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.x = torch.randn(flags.batch, flags.width, device=self.device)
        self.progress, self.steps, self.base_s = (
            ProgressFile(f"{tempfile.gettempdir()}/progress-{os.getpid()}"),
            0,
            0.0,
        )
        self.step()
        if flags.steps_ms:
            self.calibrate(flags.steps_ms / 1e3)
        self.nbytes = sum(t.numel() * t.element_size() for t in split(self.state())[0].values())

    def calibrate(self, step_s: float) -> None:
        """The batch with which a step takes so long, by a line through two of them."""
        width = self.x.shape[1]
        taken = []
        for rows in (16, 256):
            self.x = torch.randn(rows, width, device=self.device)
            self.step()
            taken.append(statistics.median(self.step()[0] for _ in range(5)))
        per_row_s = max(1e-9, (taken[1] - taken[0]) / (256 - 16))
        rows = round(16 + (step_s - taken[0]) / per_row_s)
        if rows < 1:
            raise SystemExit(
                f"wanted steps of {step_s * 1e3:.0f} ms, found {taken[0] * 1e3:.0f} ms with 16 "
                "rows: ask for fewer --layers"
            )
        self.x = torch.randn(rows, width, device=self.device)
        self.step()

    def base(self) -> list[float]:
        """Seconds of steps while nothing else goes on."""
        until_s, found = time.perf_counter() + BASE_S, list[float]()
        while len(found) < BASE_STEPS or time.perf_counter() < until_s:
            found.append(self.step()[0])
        return found

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
        self.steps += 1
        self.progress.tell(WorkerPhase.COMPUTE, self.steps)
        return time.perf_counter() - t0, waited


class Way:
    """`begin` blocks the training and returns a future of its being durable; `before_optimizer`
    may block it once more."""

    overlaps = False  # with the training: worth a look at what that feels of it
    reads = ""  # what a reader is told to load it by
    within_s = 0.0  # it may take so long, as training goes on; 0: that does not
    pace = 0.0

    def __init__(self, training: Training, folder: str):
        self.training, self.folder, self.n = training, folder, 0

    def place(self) -> str:
        self.n += 1
        return f"{self.folder}/{type(self).__name__.lower()}-{os.getpid()}-{self.n}"

    def before_optimizer(self) -> None: ...

    def begin(self) -> Future[Any]:
        raise NotImplementedError

    def where(self) -> str:
        """Of what was saved last."""
        return ""

    def close(self) -> None: ...


def done(value: Any = None) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class Ours(Way):
    """Copied beside the training, sent by the uploader process."""

    own_process, overlaps, reads = True, True, "ours"

    def __init__(self, training: Training, folder: str):
        super().__init__(training, folder)
        self.url = self.place()
        self.store = opened(self.url)
        self.saver = Saver(Snapshots(self.store), own_memory=False)
        self.tensors, _ = split(training.state())
        self.saver.plan(self.tensors)
        self.sender = TensorThread("send")
        local = InProcessSender(self.store, lambda job, outcome: None)
        if self.own_process:
            self.stage = Stage()
            order = json.dumps([self.url, str(self.stage.folder), self.stage.budget_nbytes])
            self.process = subprocess.Popen(
                [sys.executable, "-c", SERVE, order], stdin=subprocess.PIPE, start_new_session=True
            )
            UploaderConnection(self.stage.folder, connect_s=60.0).close()
            self.courier: Any = UploaderClient(self.stage.folder, 1, 0, local)
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
        staged = self.staged = self.saver.begin(
            tensors, between_updates(self.training.model, tensors), tensor_of(segment)
        )
        future: Future[Any] = Future()
        note = {"t_start": time.time(), "stall_s": 0.0, "why": "interval"}
        job = UploadJob(
            Ref(1, self.n),
            0,
            1,
            f"t{self.n}",
            staged.layout.files,
            staged.layout.index,
            {"state": plain},
            weights="model/",
            beside=TrainingBeside(
                self.training.base_s, self.within_s, self.pace, self.training.progress.path
            ),
            note=note,
        )

        def send() -> None:
            staged.arrive()
            self.courier.send(job, segment, future.set_result)

        self.sender.run(send)
        return future

    def before_optimizer(self) -> None:
        if self.staged is not None:
            self.staged.wait()

    def cpu_s(self) -> float:
        """Of the uploader."""
        if not self.own_process:
            return 0.0
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system

    def drain(self, seconds: float | None) -> None:
        """A notice comes (None: it is called off)."""
        line = UploaderConnection(self.stage.folder)
        line.ask("drain", deadline_s=None if seconds is None else time.time() + seconds)
        line.close()

    def where(self) -> str:
        return self.url

    def close(self) -> None:
        if self.own_process:
            self.process.kill()
            self.process.wait()
            self.stage.close()


class OursAtFullSpeed(Ours):
    """The same, as if somebody waited for each snapshot."""

    def begin(self) -> Future[Any]:
        self.within_s = 0.0
        return super().begin()


class OursInThread(Ours):
    """The same without an agent: threads of the trainer's process."""

    own_process = False


class BareCopy(Way):
    """The lower limit: one memcpy of the state to warm memory, and no snapshot."""

    def begin(self) -> Future[Any]:
        tensors = list(split(self.training.state())[0].values())
        if not hasattr(self, "buffers"):
            self.buffers = [
                torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda).fill_(0) for t in tensors
            ]
        for t, b in zip(tensors, self.buffers, strict=True):
            if t.is_cuda:
                b.copy_(t, non_blocking=True)
            else:
                np.copyto(b.numpy(), t.numpy())
        if self.training.device.type == "cuda":
            torch.cuda.synchronize()
        return done()


class BarePut(Way):
    """The limit of a store: the same number of bytes in one (multipart) put by the fastest
    client, and read in parallel ranges."""

    reads = "bare"

    def __init__(self, training: Training, folder: str):
        super().__init__(training, folder)
        self.url = self.place()
        self.store = opened(self.url)
        self.bytes = memoryview(np.random.default_rng(0).bytes(training.nbytes))

    def begin(self) -> Future[Any]:
        self.store.put("all", self.bytes)
        return done()

    def where(self) -> str:
        return self.url


class Adapters(Ours):
    """Frozen weights and small adapters, as with LoRA: what the second snapshot sends."""

    own_process = False

    def __init__(self, training: Training, folder: str):
        self.frozen = {
            f"model/{i}.w": p.detach().clone() for i, p in enumerate(training.model.parameters())
        }
        self.small = {
            f"model/{i}.a": torch.zeros(16, w.shape[-1]) for i, w in enumerate(self.frozen.values())
        }
        self.small |= {
            f"optimizer/{i}/{m}": torch.zeros(16, w.shape[-1])
            for i, w in enumerate(self.frozen.values())
            for m in "mv"
        }
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
            print(
                f"adapters: snapshot {step} of {manifest.nbytes / 1e6:.1f} MB ({changed / 1e6:.2f} "
                f"MB of them change) sent {sent / 1e6:.2f} MB in {seconds:.3f} s"
            )
        snapshots.verify(manifest)


class TorchSave(Way):
    def begin(self) -> Future[Any]:
        self.path = self.place()
        with open(self.path, "wb") as f:
            torch.save(self.training.state(), f)
            f.flush()
            os.fsync(f.fileno())
        return done()


class DcpSave(Way):
    def begin(self) -> Future[Any]:
        self.path = self.place()
        dcp.save(
            split(self.training.state())[0],
            storage_writer=dcp.FileSystemWriter(self.path),
            no_dist=True,
        )
        return done()


class DcpFsspec(Way):
    reads = "dcp"

    def begin(self) -> Future[Any]:
        self.path = self.place()
        dcp.save(
            split(self.training.state())[0], storage_writer=FsspecWriter(self.path), no_dist=True
        )
        return done()

    def where(self) -> str:
        return self.path


class DcpAsync(Way):
    """dcp.async_save with its best stager without a GPU: into shared memory that is used again."""

    kind, overlaps = AsyncCheckpointerType.THREAD, True

    def __init__(self, training: Training, folder: str):
        super().__init__(training, folder)
        pinned = training.device.type == "cuda"
        self.stager = DefaultStager(StagingOptions(pinned, True, pinned, False))

    def writer(self, path: str) -> Any:
        return dcp.FileSystemWriter(path)

    def begin(self) -> Future[Any]:
        answer: Any = dcp.async_save(
            split(self.training.state())[0],
            storage_writer=self.writer(self.place()),
            async_checkpointer_type=self.kind,
            async_stager=self.stager,
        )
        future: Future[Any] = getattr(answer, "upload_completion", answer)
        return future


class DcpAsyncProcess(DcpAsync):
    kind = AsyncCheckpointerType.PROCESS


class DcpAsyncFsspec(DcpAsync):
    def writer(self, path: str) -> Any:
        return FsspecWriter(path)


FOLDER_WAYS = (Ours, BareCopy, BarePut, TorchSave, DcpSave, DcpFsspec, DcpAsync)
BUCKET_WAYS = (Ours, BareCopy, BarePut, DcpFsspec, DcpAsyncFsspec)
MORE_WAYS = (OursInThread, OursAtFullSpeed, DcpAsyncProcess)  # by --ways


def opened(url: str) -> Any:
    return open_store(url, durable=True) if "://" not in url else open_store(url)


# The uploader process, which imports no torch; `main` of `harness.uploader.handoff` but for the
# fsync.
SERVE = """
import json, os, sys, threading
from pathlib import Path
from harness.uploader.node_tiers import NearbyConfig
from harness.uploader.handoff import NICE, STACK_NBYTES, UploadServer
from storage.snapshots.pacer import IdlePriority as LastInLine, can_come_back
from storage.stores.store_urls import open_store
url, folder, budget = json.loads(sys.argv[1])
os.nice(NICE)
threading.stack_size(STACK_NBYTES)
store = open_store(url, **({} if "://" in url else {"durable": True}))
line = LastInLine(NICE, idle=can_come_back(NICE))
server = UploadServer(store, Path(folder), budget, "bench", NearbyConfig(), line)
threading.Thread(target=server.serve, daemon=True).start()
sys.stdin.read()
os._exit(0)
"""


def tree_cpu_s() -> float:
    total = 0.0
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            if process.name() == "weed":  # the server, which would hide what its clients cost
                continue
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


def one_round(way: Way, readers: Readers) -> dict[str, float]:
    """Each part begins when what was written before is on the disk: a server here shares it."""
    training, found = way.training, dict[str, float]()
    os.sync()
    if way.overlaps:
        calm = training.base()
        training.base_s, way.within_s = typical_s(calm), WITHIN_S
        uploader_s = way.cpu_s() if isinstance(way, Ours) else 0.0
        t0 = time.perf_counter()
        future = way.begin()
        blocked = time.perf_counter() - t0
        seconds, waited = training.step(way.before_optimizer)
        steps = [seconds - waited]
        while not future.done() and time.perf_counter() - t0 < DRAIN_LIMIT_S:
            steps.append(training.step()[0])
        future.result(DRAIN_LIMIT_S)
        beside_s = time.perf_counter() - t0
        base = typical_s(calm + training.base())
        lost = blocked + waited + sum(steps) - len(steps) * base
        found = {
            "base_step_s": base,
            "blocked_s": blocked + waited,
            "drain_x": statistics.mean(steps) / base,
            "lost_s": lost,
            "beside_s": beside_s,
        }
        if isinstance(way, Ours) and way.own_process:
            found["paced_cpu"] = (way.cpu_s() - uploader_s) / (training.nbytes / 1e9)
            found["notice_s"] = noticed(way)
        way.within_s = 0.0
    os.sync()
    cpu, t0 = tree_cpu_s(), time.perf_counter()
    future = way.begin()
    way.before_optimizer()
    found["rest_s"] = time.perf_counter() - t0
    future.result(DRAIN_LIMIT_S)
    found["durable_s"] = time.perf_counter() - t0
    found["cpu_s_per_gb"] = (tree_cpu_s() - cpu) / (training.nbytes / 1e9)
    if way.reads:
        found["load_s"] = readers.load(way.reads, way.where())
    return found


def noticed(way: Ours) -> float:
    """Seconds from a notice, in the middle of a paced snapshot, until that is durable."""
    os.sync()
    future = way.begin()
    way.training.step(way.before_optimizer)
    t0 = time.perf_counter()
    way.drain(DRAIN_LIMIT_S)
    future.result(DRAIN_LIMIT_S)
    seconds = time.perf_counter() - t0
    way.drain(None)
    return seconds


def run_for(way: Way | None, training: Training, minutes: float) -> dict[str, float]:
    """Train for so long, with snapshots at the default interval; None: without any."""
    rhythm, calm, commits = Rhythm(Interval()), list[float](), list[float]()
    future: Future[Any] | None = None
    n, blocked_s, began, t_begin, beside = 0, 0.0, time.perf_counter(), 0.0, list[float]()
    while time.perf_counter() - began < 60 * minutes:
        if way is not None and future is None and rhythm.due(n):
            way.within_s, way.pace = rhythm.within_s, rhythm.pace
            training.base_s, t_begin = rhythm.calm_step_s, time.perf_counter()
            future = way.begin()
            stall_s, first = time.perf_counter() - t_begin, True
            rhythm.begin()
        quiet = future is None
        seconds, waited = training.step(
            way.before_optimizer if way is not None and not quiet else lambda: 0.0
        )
        n += 1
        rhythm.note_step(quiet)
        (calm if quiet else beside).append(seconds - waited)
        if not quiet and first:
            rhythm.stall_s, first = stall_s + waited, False
            blocked_s += rhythm.stall_s
        if future is not None and future.done():
            told, commit_s = future.result(), time.perf_counter() - t_begin
            commits.append(commit_s)
            ours = told if isinstance(told, UploadOutcome) else None
            assert ours is None or ours.state == "committed", ours
            rhythm.landed(commit_s, ours.slowdown if ours else 0.0, way.within_s if ours else 0.0)
            rhythm.pace, future = (ours.pace if ours else 0.0) or rhythm.pace, None
            if way is not None:
                clear(way)
    wall_s = time.perf_counter() - began
    if future is not None:
        future.result(DRAIN_LIMIT_S)
    base = statistics.fmean(calm)
    slower_s = sum(beside) - len(beside) * base
    return {
        "wall_s": wall_s,
        "steps": n,
        "calm_step_s": base,
        "snapshots": len(commits),
        "interval_s": rhythm.interval_s(),
        "durable_s": statistics.median(commits) if commits else math.nan,
        "blocked_s": blocked_s,
        "slower_s": slower_s,
        "cost_pct": 100 * (blocked_s + slower_s) / wall_s,
        "pace_mb_s": rhythm.pace / 1e6,
    }


def long_runs(ways: list[Way], training: Training, minutes: float) -> None:
    """Training alone first and last, each way between. cost_pct: steps beside a sending against the
    others of the same run; alone_pct: all steps against those of training alone, which says as
    much where the machine does not change."""
    found: dict[str, list[dict[str, float]]] = {}
    for way in (None, *ways, None):
        told = run_for(way, training, minutes if way else max(0.5, minutes / 5))
        name = type(way).__name__ if way else "alone"
        found.setdefault(name, []).append(told)
        print(f"{name}: load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    alone_s = statistics.fmean(told["wall_s"] / told["steps"] for told in found["alone"])
    for told in itertools.chain(*found.values()):
        told["alone_pct"] = 100 * (told["wall_s"] / told["steps"] / alone_s - 1)
    columns = list(found["alone"][0])
    print(f"{'':16}" + "".join(f"{c:>13}" for c in columns))
    for name, all_told in found.items():
        for told in all_told:
            print(f"{name:16}" + "".join(f"{told[c]:13.4g}" for c in columns), flush=True)
    if "Ours" in found:
        cost = found["Ours"][0]["cost_pct"]
        print(f"\nall snapshots together, percent of the training: {cost:.2f}".ljust(104), end=" ")
        print(f"{'<= 1':10}{'yes' if cost <= 1 else 'NO'}")


# ---- the world that loads ------------------------------------------------------------------------
class Readers:
    """Processes that are there before the clock starts. Each has its rows of every matrix, as
    FSDP2 shards them."""

    def __init__(self, training: Training):
        shapes = {
            name: [list(t.shape), str(t.dtype).removeprefix("torch.")]
            for name, t in split(training.state())[0].items()
        }
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self._processes = []
        for rank in range(READERS):
            order = json.dumps([rank, port, shapes])
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, __file__, "--read", order],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    start_new_session=True,  # an interrupt is for us
                )
            )
        self._answers()

    def load(self, how: str, where: str) -> float:
        """Seconds until all have it."""
        t0 = time.perf_counter()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps([how, where]) + "\n")
            process.stdin.flush()
        self._answers()
        return time.perf_counter() - t0

    def _answers(self) -> None:
        for process in self._processes:
            assert process.stdout is not None
            while (line := process.stdout.readline()) != "ready\n":
                if not line:
                    raise SystemExit("a reader died; its error is above")

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def read(order: str) -> None:
    """One of them."""
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    rank, port, shapes = json.loads(order)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=READERS
    )
    mesh = init_device_mesh("cpu", (READERS,))
    tensors: dict[str, torch.Tensor] = {}
    for name, (shape, kind) in shapes.items():
        local = torch.zeros(
            [shape[0] // READERS, *shape[1:]] if shape else [], dtype=getattr(torch, kind)
        )
        tensors[name] = DTensor.from_local(local, mesh, [Shard(0)]) if shape else local
    mine = memoryview(
        bytearray(b"\1")
        * sum(t.numel() * t.element_size() // (READERS if t.dim() else 1) for t in tensors.values())
    )
    print("ready", flush=True)
    for line in sys.stdin:
        how, where = json.loads(line)
        match how:
            case "ours":
                snapshots = Snapshots(opened(where))
                manifest = snapshots.latest()
                assert manifest is not None
                load(snapshots, manifest, tensors)
            case "dcp":
                dcp.load(tensors, storage_reader=FsspecReader(where))
            case "bare":
                store = opened(where)
                with ThreadPoolExecutor(8) as pool:
                    starts = range(0, len(mine), 32 << 20)
                    list(
                        pool.map(
                            lambda at: read_into(
                                store,  # noqa: B023
                                "all",
                                rank * len(mine) + at,
                                mine[at : at + (32 << 20)],
                            ),
                            starts,
                        )
                    )
        print("ready", flush=True)
    os._exit(0)


def memory(kind: type[Way], flags: argparse.Namespace) -> float:
    """Peak MB of two snapshots of one way above the peak of training alone, in this (fresh)
    process and its children."""
    training, way = Training(flags), None
    peaks = []
    for begun in (False, True):
        peak, stop = 0, threading.Event()

        def watch(stop: threading.Event = stop) -> None:
            nonlocal peak
            while not stop.wait(0.1):
                peak = max(peak, tree_pss())

        watcher = threading.Thread(target=watch)
        watcher.start()
        if begun:
            way = kind(training, flags.folder)
        for _ in range(2):
            if way is None:
                training.step()
                continue
            future = way.begin()
            training.step(way.before_optimizer)
            future.result(DRAIN_LIMIT_S)
        stop.set()
        watcher.join()
        peaks.append(peak)
    assert way is not None
    way.close()
    return (peaks[1] - peaks[0]) / 1e6


@contextlib.contextmanager
def place(store: str, apart: bool = False) -> Iterator[str]:
    """The folder, or a prefix of a bucket. `apart`: the server has the last core, we the rest."""
    if store not in ("", "seaweed"):
        yield store
        return
    with tempfile.TemporaryDirectory(prefix="snapshots-", ignore_cleanup_errors=True) as folder:
        if not store:
            yield folder
            return
        tree = Path(__file__).resolve().parents[1]
        sys.path[:0] = [str(tree), str(tree / "tests")]
        import fsspec

        from support import buckets

        cores = sorted(os.sched_getaffinity(0))
        if apart and len(cores) < 2:
            raise SystemExit("--apart wants at least two processor cores")
        if apart:
            pin({cores[-1]})  # it inherits that
        with buckets.weed(Path(folder)) as options:
            if apart:
                pin(set(cores[:-1]))
            names = {
                "AWS_ACCESS_KEY_ID": "key",
                "AWS_SECRET_ACCESS_KEY": "secret",
                "AWS_ENDPOINT_URL": "endpoint_url",
            }
            os.environ |= {variable: options[name] for variable, name in names.items()} | {
                "AWS_REGION": "us-east-1"
            }
            fsspec.filesystem("s3").mkdir(BUCKET)
            yield f"s3://{BUCKET}/x"


def pin(cores: set[int]) -> None:
    """This process to some cores, and what it starts."""
    for task in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(task), cores)


def clear(way: Way) -> None:
    """Old ones go, beside the clock: nobody is charged for that."""
    if isinstance(way, Ours):
        Snapshots(way.store).prune(Keep(1))
    elif not isinstance(way, BarePut):
        import fsspec

        fs, root = fsspec.url_to_fs(way.folder)
        for old in fs.glob(f"{root}/{type(way).__name__.lower()}-{os.getpid()}-*"):
            fs.rm(old, recursive=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--threads", type=int, default=1, help="of torch; leave a core to the drain"
    )
    parser.add_argument(
        "--store", default="", help='"seaweed", or a URL prefix, instead of a temporary folder'
    )
    parser.add_argument(
        "--ways",
        default="",
        help="comma-separated; default: the targets' peers that can write there",
    )
    parser.add_argument(
        "--apart",
        action="store_true",
        help="with --store seaweed: the server gets a processor core of its own",
    )
    parser.add_argument(
        "--run-minutes",
        type=float,
        default=0.0,
        help="train for so long at the default interval, with each of --ways",
    )
    parser.add_argument(
        "--steps-ms", type=float, default=0.0, help="how long a step takes, by its batch"
    )
    parser.add_argument(
        "--adapters",
        action="store_true",
        help="measure only what a second snapshot sends when most weights are frozen",
    )
    parser.add_argument(
        "--memory",
        default="Ours",
        help="comma-separated ways whose memory is measured, or all; default: ours",
    )
    parser.add_argument("--read", help=argparse.SUPPRESS)
    parser.add_argument("--measure-memory", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    if flags.read:
        read(flags.read)
    torch.set_num_threads(flags.threads)
    if not dist.is_initialized():  # async_save wants a group
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if flags.measure_memory:
        print(json.dumps(memory(globals()[flags.measure_memory], flags)))
        sys.stdout.flush()
        os._exit(0)
    with place(flags.store, flags.apart) as flags.folder:
        measure(flags)
    sys.stdout.flush()
    os._exit(0)  # async_save leaves a process that does not end by itself


def measure(flags: argparse.Namespace) -> None:
    usual = BUCKET_WAYS if flags.store else FOLDER_WAYS
    kinds = [
        k
        for k in (*usual, *MORE_WAYS)
        if (k.__name__ in flags.ways.split(",") if flags.ways else k in usual)
    ]
    training = Training(flags)
    if flags.adapters:
        Adapters(training, flags.folder).measure()
        return
    load_1m = os.getloadavg()[0]
    print(
        f"{training.nbytes / 1e9:.2f} GB of state on {training.device}, {flags.threads} "
        f"thread(s), {flags.rounds} rounds, {flags.store or 'a folder'}; load of the machine "
        f"before: {load_1m:.1f}",
        flush=True,
    )
    if flags.run_minutes:
        kinds = [k for k in kinds if k.overlaps]
        ways = [kind(training, flags.folder) for kind in kinds]
        try:
            long_runs(ways, training, flags.run_minutes)
        finally:
            for way in ways:
                way.close()
        return
    ways, readers = [kind(training, flags.folder) for kind in kinds], Readers(training)
    found: dict[str, list[dict[str, float]]] = {type(w).__name__: [] for w in ways}
    extra: dict[str, float] = {}
    try:
        with contextlib.suppress(KeyboardInterrupt):  # then what was measured so far is printed
            for i in range(flags.rounds + 1):
                for way in ways[i % len(ways) :] + ways[: i % len(ways)]:
                    result = one_round(way, readers)
                    if i:
                        found[type(way).__name__].append(result)
                    clear(way)
                print(
                    f"round {i} of {flags.rounds}, load {os.getloadavg()[0]:.1f}",
                    file=sys.stderr,
                    flush=True,
                )
    finally:
        readers.close()
        for way in ways:
            way.close()
    for name in found:
        if flags.memory == "all" or name in flags.memory.split(","):
            extra[name] = memory_of(name, flags)
    show(found, extra)
    lost = 0.25 if flags.apart else 0.5
    verdicts(found, extra, training.nbytes, bool(flags.store), lost)


def show(found: dict[str, list[dict[str, float]]], extra: dict[str, float]) -> None:
    columns = (
        "blocked_s",
        "drain_x",
        "lost_s",
        "beside_s",
        "notice_s",
        "rest_s",
        "durable_s",
        "cpu_s_per_gb",
        "paced_cpu",
        "load_s",
        "base_step_s",
    )
    print(f"{'median (min-max)':16}" + "".join(f"{c:>22}" for c in columns) + f"{'memory_mb':>11}")
    for name, results in found.items():
        cells = []
        for c in columns:
            values = [r[c] for r in results if c in r]
            cells.append(
                f"{statistics.median(values):.3g} ({min(values):.3g}-{max(values):.3g})"
                if values
                else ""
            )
        print(
            f"{name:16}"
            + "".join(f"{c:>22}" for c in cells)
            + (f"{extra[name]:11.0f}" if name in extra else ""),
            flush=True,
        )


def verdicts(
    found: dict[str, list[dict[str, float]]],
    extra: dict[str, float],
    nbytes: int,
    bucket: bool,
    lost: float,
) -> None:
    """Every target, by the ratios within the rounds: median (min-max). `lost`: wanted of the
    training's seconds."""
    background = "DcpAsyncFsspec" if bucket else "DcpAsync"

    def line(
        what: str,
        column: str,
        peer: str,
        target: str,
        over: bool = False,
        own: str = "",
        worst: bool = False,
    ) -> None:
        """`over`: the peer's over ours (a speed), else ours over the peer's (a cost). `worst`: of
        the rounds, not the median."""
        pairs = [
            (o[own or column], p[column])
            for o, p in zip(found.get("Ours", []), found.get(peer, []), strict=False)
            if column in p
        ]
        if not pairs:
            return
        ratios = [p / o if over else o / p for o, p in pairs]
        middle = max(ratios) if worst else statistics.median(ratios)
        bound = float(target.split()[1])
        met = middle >= bound if target.startswith(">=") else middle <= bound
        print(
            f"{what:58}{peer:16}{middle:8.3g} ({min(ratios):.3g}-{max(ratios):.3g})".ljust(104)
            + f"{target:10}{'yes' if met else 'NO'}"
        )

    print("\n" + f"{'target':58}{'peer':16}{'ratio':>8}".ljust(105) + f"{'wanted':10}met")
    line("blocked while training, over its best async save", "blocked_s", background, "<= 0.2")
    line("blocked when nothing can overlap, over the bare copy", "rest_s", "BareCopy", "<= 1.1")
    line("training while it drains, over that beside its drain", "drain_x", background, "<= 1.0")
    what = "seconds of training lost until durable, over its save's"
    line(what, "lost_s", background, f"<= {lost}")
    line(f"{what}: worst round", "lost_s", background, "<= 1.0", worst=True)
    taken = [o["beside_s"] for o in found.get("Ours", [])]
    if taken:
        print(
            f"{'durable beside the training, seconds of half an interval':74}{max(taken):8.3g}"
            f" (the longest)".ljust(104)
            + f"<= {WITHIN_S:<7g}"
            f"{'yes' if max(taken) <= WITHIN_S else 'NO'}"
        )
    line(
        "durable after a notice, speed over a bare put",
        "durable_s",
        "BarePut",
        ">= 0.8",
        over=True,
        own="notice_s",
    )
    if bucket:  # fsspec does not sync what it writes to a folder
        line(
            "durable, speed over dcp.save through fsspec",
            "durable_s",
            "DcpFsspec",
            ">= 2",
            over=True,
        )
    line(
        "durable, speed over a bare put of the same bytes",
        "durable_s",
        "BarePut",
        ">= 0.8",
        over=True,
    )
    line(
        "load onto another world, speed over DCP through fsspec",
        "load_s",
        "DcpFsspec",
        ">= 2",
        over=True,
    )
    line(
        "load onto another world, speed over a bare parallel read",
        "load_s",
        "BarePut",
        ">= 0.7",
        over=True,
    )
    for peer in found:
        if peer not in ("Ours", "OursInThread", "BareCopy", "BarePut"):
            line("CPU seconds per GB saved", "cpu_s_per_gb", peer, "<= 1.0")
    if "Ours" in extra:
        over_mb = extra["Ours"] - nbytes / 1e6
        print(
            f"{'peak extra memory, MB above one copy of the state':74}{over_mb:8.0f}".ljust(104)
            + f"{'<= 256':10}{'yes' if over_mb <= 256 else 'NO'}"
        )


def memory_of(name: str, flags: argparse.Namespace) -> float:
    options = {
        "measure-memory": name,
        "folder": flags.folder,
        "layers": flags.layers,
        "width": flags.width,
        "threads": flags.threads,
        "batch": flags.batch,
    }
    words = [word for option, value in options.items() for word in (f"--{option}", str(value))]
    ended = subprocess.run(
        [sys.executable, __file__, *words], capture_output=True, text=True, timeout=600
    )
    return float(ended.stdout.splitlines()[-1]) if ended.returncode == 0 else float("nan")


if __name__ == "__main__":
    main()
