"""What a snapshot costs the training on a GPU, beside torch's asynchronous save and a bare copy.

One step with a snapshot is: begin the snapshot, forward and backward, wait until the state may
change, optimizer. Blocked is the time of "begin" and "wait": as the host sees it, and as the GPU's
stream sees it (events around both). The state is at rest on the device when a snapshot begins, so
torch's stager, whose stream does not wait for the training's, copies a whole state too.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from benchmarks.gpu.bench import Bench
from benchmarks.snapshots import SERVE
from harness.node.heartbeat import ProgressFile, WorkerPhase
from harness.uploader.handoff import InProcessSender, UploaderClient, UploaderConnection
from harness.worker.snapshotter import tensor_of
from harness.worker.training_state import between_updates
from storage import Keep, Ref, Snapshots, open_store
from storage.snapshots.pacer import typical_s
from storage.snapshots.staging import RAM_DISK, Stage
from storage.snapshots.upload import TrainingBeside, UploadJob, UploadOutcome
from storage.tensor_threads import TensorThread
from storage.tensors import dcp as staging
from storage.tensors.loading import load
from storage.tensors.state_tree import split

GB = 1e9
STATE_COPIES = 3  # float32 weights and AdamW's two moments
TOKENS = 32768  # rows of a step: what one GPU often has
DURABLE_S = 60.0  # longest wait for a snapshot
PACED_S = 4.0  # what a paced snapshot may take; a session gives it half of its interval
LONGEST_S = 30.0  # of waiting for the uploader


@dataclass(frozen=True)
class Size:
    """A size of the state. `writes`: snapshots are written too, not only copied to the host;
    `more`: a paced snapshot and restoring are measured; `wanted_s`: begin it only with so much
    time left."""

    gb: float
    rounds: int
    calm_steps: int
    writes: bool
    more: bool
    wanted_s: float


SIZES = (
    Size(1, 3, 3, writes=True, more=True, wanted_s=25.0),
    Size(4, 2, 3, writes=True, more=False, wanted_s=30.0),
    Size(16, 2, 1, writes=False, more=False, wanted_s=36.0),
)
TINY = (
    Size(0.004, 1, 3, writes=True, more=True, wanted_s=3.0),
    Size(0.008, 1, 1, writes=False, more=False, wanted_s=3.0),
)


class Training:
    """A chain of matrices with AdamW, whose state has about `gb` GB."""

    def __init__(self, bench: Bench, gb: float):
        self.bench = bench
        width, rows = (128, 64) if bench.tiny else (4096, TOKENS)
        layers = max(1, round(gb * GB / (STATE_COPIES * 4 * width * width)))
        torch.manual_seed(0)
        with torch.device(bench.device):
            self.model = nn.Sequential(
                *[nn.Linear(width, width, bias=False) for _ in range(layers)]
            )
            for p in self.model.parameters():  # so that neither rows nor gradients vanish
                nn.init.normal_(p, std=width**-0.5)
            self.x = torch.randn(rows, width)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-6, fused=not bench.tiny
        )
        self.progress, self.steps = ProgressFile(str(bench.folder / f"progress-{gb}")), 0
        self.step()
        self.nbytes = sum(t.nbytes for t in split(self.state())[0].values())

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": [self.optimizer.state_dict()]}

    def forward_backward(self) -> None:
        with torch.autocast(self.bench.device.type, torch.bfloat16):
            found = self.model(self.x)
        found.float().square().mean().backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.bench.settle()
        self.steps += 1
        self.progress.tell(WorkerPhase.COMPUTE, self.steps)

    def step(self) -> float:
        """Return the seconds of a step without a snapshot."""
        t0 = time.perf_counter()
        self.forward_backward()
        self.update()
        return time.perf_counter() - t0


class Way:
    """A way to take snapshots. `writes`: they are written, not only copied to the host."""

    def __init__(self, training: Training, folder: Path, writes: bool):
        self.training, self.folder, self.writes = training, folder, writes

    def begin(self) -> Future[Any]:
        """Begin a snapshot. The future has its result when it is durable."""
        raise NotImplementedError

    def wait(self) -> None:
        """Wait until the state may change."""

    def clear(self) -> None:
        """Remove what was written, and wait until memory can be used again."""

    def close(self) -> None: ...


def done() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(None)
    return future


class Ours(Way):
    """As a session does it: copied beside the forward and backward into pinned shared memory, sent
    by the node's uploader process."""

    def __init__(self, training: Training, folder: Path, writes: bool):
        super().__init__(training, folder, writes)
        self.url = str(folder / "ours")
        self.store = open_store(self.url, durable=True)
        self.saver = staging.Saver(Snapshots(self.store), own_memory=False)
        self.saver.plan(split(training.state())[0])
        self.within_s = self.step_s = 0.0  # at full speed
        self.n, self.staged = 0, None
        self.sender = TensorThread("send")
        in_memory = folder.is_relative_to(RAM_DISK)
        self.stage = Stage(folder if in_memory else None)
        order = json.dumps([self.url, str(self.stage.folder), self.stage.budget_nbytes])
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, order], stdin=subprocess.PIPE, start_new_session=True
        )
        UploaderConnection(self.stage.folder, connect_s=LONGEST_S).close()
        local = InProcessSender(self.store, lambda job, outcome: None)
        self.courier = UploaderClient(self.stage.folder, 1, 0, local)
        segment = self.courier.segment(self.saver.nbytes)
        self.pinned = staging.pin(tensor_of(segment), segment)
        self.courier.give_back(segment)

    def begin(self) -> Future[Any]:
        self.n += 1
        training, saver = self.training, self.saver
        tensors, plain = split(training.state())
        if not saver.fits(tensors):
            raise RuntimeError("the state has another structure than the planned one")
        segment = self.segment = self.courier.segment(saver.nbytes)
        buffer = tensor_of(segment)
        staging.pin(buffer, segment)
        staged = self.staged = saver.begin(
            tensors, between_updates(training.model, tensors), buffer
        )
        if not self.writes:
            return done()
        beside = TrainingBeside(
            self.step_s if self.within_s else 0.0, self.within_s, 0.0, training.progress.path
        )
        job = UploadJob(
            Ref(1, self.n), 0, 1, f"t{self.n}", staged.layout.files, staged.layout.index,
            {"state": plain}, weights="model/", beside=beside,
            note={"t_start": time.time(), "stall_s": 0.0, "why": "interval"},
        )  # fmt: skip
        future: Future[Any] = Future()

        def send() -> None:
            try:
                staged.arrive()
                self.courier.send(job, segment, landed)
            except BaseException as e:  # raised by `result`
                future.set_exception(e)

        def landed(outcome: UploadOutcome) -> None:
            if outcome.state == "committed":
                future.set_result(outcome)
            else:
                future.set_exception(RuntimeError(f"{outcome.state}: {outcome.error}"))

        self.sender.run(send)
        return future

    def wait(self) -> None:
        if self.staged is not None:
            self.staged.wait()

    def clear(self) -> None:
        if self.staged is not None and not self.writes:
            self.staged.arrive()
            self.courier.give_back(self.segment)
        self.staged = None
        until_s = time.monotonic() + LONGEST_S
        while any(slot.busy for slot in self.courier._slots) and time.monotonic() < until_s:
            time.sleep(0.005)
        if self.writes:
            Snapshots(self.store).prune(Keep(1))

    def close(self) -> None:
        staging.unpin()
        self.process.kill()
        self.process.wait()
        self.stage.close()
        shutil.rmtree(self.folder / "ours", ignore_errors=True)


class KeptStager(DefaultStager):
    """torch's stager, which keeps its pinned memory between saves. torch 2.11's own drops it after
    each, and then cannot be used again."""

    def __init__(self, options: StagingOptions):
        super().__init__(options)
        self.release = self._state_dict_stager.close
        self._state_dict_stager.close = lambda: None  # type: ignore[method-assign]


class Dcp(Way):
    """dcp.async_save with pinned memory, copied on a stream of its own by a thread, at its best:
    the training waits for the copy only before the optimizer."""

    def __init__(self, training: Training, folder: Path, writes: bool):
        super().__init__(training, folder, writes)
        gpu = not training.bench.tiny
        self.stager = KeptStager(StagingOptions(gpu, False, True, gpu))
        # the stager knows memory by these objects
        self.storages = [t.untyped_storage() for t in split(training.state())[0].values()]
        self.n, self.staging, self.path = 0, done(), Path()

    def begin(self) -> Future[Any]:
        self.n += 1
        tensors = split(self.training.state())[0]
        if not self.writes:
            staged: Any = self.stager.stage(tensors)
            self.staging = staged
            return done()
        self.path = self.folder / f"dcp-{self.n}"
        answer: Any = dcp.async_save(
            tensors, storage_writer=dcp.FileSystemWriter(self.path), async_stager=self.stager
        )
        self.staging = answer.staging_completion
        future: Future[Any] = answer.upload_completion
        return future

    def wait(self) -> None:
        self.staging.result(LONGEST_S)

    def clear(self) -> None:
        self.staging = done()
        for old in self.folder.glob("dcp-*"):
            if old != self.path:
                shutil.rmtree(old, ignore_errors=True)

    def close(self) -> None:
        self.stager._staging_executor.shutdown(wait=True)  # type: ignore[union-attr]
        self.staging = done()
        self.release()
        for old in self.folder.glob("dcp-*"):
            shutil.rmtree(old, ignore_errors=True)

    def release(self) -> None:
        self.stager.release()
        self.storages.clear()


class BareCopy(Way):
    """The lower limit of a copy with the training at rest: all tensors into memory that is pinned
    already."""

    def __init__(self, training: Training, folder: Path, writes: bool):
        super().__init__(training, folder, writes)
        tensors = split(training.state())[0].values()
        self.buffers = [
            torch.zeros(t.shape, dtype=t.dtype, pin_memory=not training.bench.tiny)
            for t in tensors
        ]

    def begin(self) -> Future[Any]:
        for buffer, t in zip(
            self.buffers, split(self.training.state())[0].values(), strict=True
        ):
            buffer.copy_(t, non_blocking=True)
        self.training.bench.settle()
        return done()


OURS, TORCH, COPY = "ours", "DCP async_save, pinned", "copy_ to pinned memory"
KINDS: dict[str, type[Way]] = {OURS: Ours, TORCH: Dcp, COPY: BareCopy}


@dataclass
class Found:
    """What one snapshot cost. `beside_s`: seconds of the steps after the first until it was
    durable."""

    host_ms: float
    stream_ms: float
    calm_s: float
    beside_s: list[float]
    durable_s: float


class Marks:
    """Marks on the training's stream, or of the host's clock without a GPU."""

    def __init__(self, tiny: bool):
        self._tiny, self._marks = tiny, list[Any]()

    def take(self) -> None:
        if self._tiny:
            self._marks.append(time.perf_counter())
        else:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)

    def blocked_ms(self) -> float:
        """Return the milliseconds between the first two marks and between the last two."""
        a, b, c, d = self._marks
        if self._tiny:
            return 1e3 * (b - a + d - c)
        return float(a.elapsed_time(b) + c.elapsed_time(d))


def once(way: Way, calm_steps: int) -> Found:
    """Take one snapshot beside the training."""
    training = way.training
    calm = [training.step() for _ in range(calm_steps)]
    marks = Marks(training.bench.tiny)
    t0 = time.perf_counter()
    marks.take()
    future = way.begin()
    marks.take()
    t1 = time.perf_counter()
    training.forward_backward()
    marks.take()
    t2 = time.perf_counter()
    way.wait()
    marks.take()
    t3 = time.perf_counter()
    training.update()
    beside = list[float]()
    while not future.done() and time.perf_counter() - t0 < DURABLE_S:
        beside.append(training.step())
    future.result(0.1)
    durable_s = time.perf_counter() - t0
    way.clear()
    host_ms = 1e3 * (t1 - t0 + t3 - t2)
    return Found(host_ms, marks.blocked_ms(), statistics.median(calm), beside, durable_s)


def middle(found: list[Found], of: Callable[[Found], float]) -> float:
    return statistics.median(map(of, found))


def slowdown_pct(found: list[Found]) -> float | None:
    """Return how much longer the median step beside a snapshot is than the median one at rest;
    None: no step was beside one."""
    beside = [s for one in found for s in one.beside_s]
    if not beside:
        return None
    return 100 * (statistics.median(beside) / middle(found, lambda f: f.calm_s) - 1)


def room(bench: Bench, size: Size) -> str:
    """Return why there is no room for this size; "": there is."""
    nbytes = size.gb * GB
    free, memory = shutil.disk_usage(bench.folder).free, psutil.virtual_memory().available
    # the stage may take half of what is free; two snapshots, of which one is removed; torch's file
    wanted = max(2.2, 5.0 if size.writes else 0.0) * nbytes
    if free < wanted:
        return f"{bench.folder} has {free / GB:.0f} GB free, wanted {wanted / GB:.0f}"
    if memory < wanted + 3 * nbytes:
        return f"{memory / GB:.0f} GB of memory are free, wanted {(wanted + 3 * nbytes) / GB:.0f}"
    return ""


def measure(bench: Bench, size: Size) -> None:
    training = Training(bench, size.gb)
    folder = bench.folder / f"{size.gb}"
    folder.mkdir()
    name, ways = f"{training.nbytes / GB:.3g} GB", dict[str, Way]()
    try:
        for kind, make in KINDS.items():
            with bench.going_on(f"pause: {kind} can begin, {name}"):
                ways[kind] = make(training, folder, size.writes)
        found: dict[str, list[Found]] = {kind: [] for kind in ways}
        kinds = list(ways)
        for i in range(1 + size.rounds):
            if i > 1 and bench.left_s < 15.0:
                break
            for kind in kinds[i % len(kinds) :] + kinds[: i % len(kinds)]:
                if kind in ways:
                    try:
                        one = once(ways[kind], size.calm_steps)
                    except Exception as e:
                        traceback.print_exc()
                        ways.pop(kind).close()
                        bench.checked(f"pause: {kind} takes snapshots, {name}", False, str(e)[:300])
                        continue
                    if i:
                        found[kind].append(one)
        show(bench, name, size, found, ways)
        if size.more and OURS in ways and TORCH in ways:
            with bench.going_on(f"restore, {name}"):
                restore(bench, name, training, ways[OURS], ways[TORCH], folder)
            with bench.going_on(f"a paced snapshot, {name}"):
                paced(bench, name, ways[OURS])
    finally:
        for way in ways.values():
            with contextlib.suppress(Exception):
                way.close()
        ways.clear()
        shutil.rmtree(folder, ignore_errors=True)
        del training
        gc.collect()
        if not bench.tiny:
            torch.cuda.empty_cache()


def show(
    bench: Bench, name: str, size: Size, found: dict[str, list[Found]], ways: dict[str, Way]
) -> None:
    ours = found.get(OURS, [])
    if not ours:
        bench.missing(f"blocked per snapshot, {name}", "no snapshot of ours was measured")
        return
    calm_s = middle(ours, lambda f: f.calm_s)
    note = f"as the GPU's stream sees it; a step takes {1e3 * calm_s:.0f} ms; {len(ours)} rounds"
    note += "" if size.writes else "; copied to the host and not written"
    held = getattr(ways.get(OURS), "pinned", False)
    note += "" if held or bench.tiny else "; MEMORY COULD NOT BE PINNED"
    ours_ms = middle(ours, lambda f: f.stream_ms)
    for peer in (TORCH, COPY):
        if theirs := found.get(peer):
            theirs_ms = middle(theirs, lambda f: f.stream_ms)
            bench.measured(f"blocked per snapshot, {name}", ours_ms, "ms", peer, theirs_ms, note)
        else:
            bench.missing(f"blocked per snapshot, {name}, beside {peer}", "it was not measured")
    if theirs := found.get(TORCH):
        what = f"blocked per snapshot, {name}, by the host's clock"
        host_ms = [middle(f, lambda one: one.host_ms) for f in (ours, theirs)]
        bench.measured(what, host_ms[0], "ms", TORCH, host_ms[1])
    if not size.writes or TORCH not in found or not found[TORCH]:
        return
    theirs = found[TORCH]
    durable = [middle(f, lambda one: one.durable_s) for f in (ours, theirs)]
    what = f"durable in memory's folder, {name}, at full speed beside the training"
    bench.measured(what, durable[0], "s", TORCH, durable[1], "ours hashes and syncs")
    slow = [slowdown_pct(f) for f in (ours, theirs)]
    what = f"steps are longer until the snapshot is durable, {name}, at full speed"
    if slow[0] is None:
        bench.missing(what, "the snapshot was durable before the next step had ended")
    else:
        count = [sum(len(one.beside_s) for one in f) for f in (ours, theirs)]
        note = f"medians of {count[0]} steps and of the peer's {count[1]}"
        bench.measured(what, slow[0], "%", TORCH, slow[1], note)


def paced(bench: Bench, name: str, ours: Way) -> None:
    """Measure the steps beside a snapshot that may take `PACED_S`, as between two snapshots."""
    assert isinstance(ours, Ours)
    ours.step_s = typical_s([ours.training.step() for _ in range(8)])
    ours.within_s = 1.0 if bench.tiny else PACED_S
    try:
        found = once(ours, 8)
    finally:
        ours.within_s = 0.0
    slow = slowdown_pct([found])
    what = f"steps are longer until the snapshot is durable, {name}, at its pace"
    if slow is None:
        bench.missing(what, "the snapshot was durable before the next step had ended")
        return
    note = f"durable after {found.durable_s:.1f} s, wanted within {PACED_S:.0f}"
    note += f"; {len(found.beside_s)} steps"
    bench.measured(what, slow, "%", note=note)


def restore(
    bench: Bench, name: str, training: Training, ours: Way, torchs: Way, folder: Path
) -> None:
    """Measure loading a snapshot onto the device, from the folder in memory."""
    assert isinstance(ours, Ours) and isinstance(torchs, Dcp)
    for way in (ours, torchs):  # both of the same state
        future = way.begin()
        way.wait()
        future.result(DURABLE_S)
        way.clear()
    held = split(training.state())[0]
    mine = {key: torch.full_like(t, 7) for key, t in held.items()}
    snapshots = Snapshots(ours.store)
    manifest = snapshots.latest()
    if manifest is None:
        raise RuntimeError("no snapshot was found")
    saved, raw = folder / "torch.pt", folder / "raw"
    torch.save({key: t.cpu() for key, t in held.items()}, saved)
    pin = not bench.tiny
    host = torch.zeros(training.nbytes, dtype=torch.uint8, pin_memory=pin)
    with open(raw, "wb") as f:
        for t in held.values():
            f.write(t.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)

    def plain() -> None:
        with open(raw, "rb", buffering=0) as f:
            view, at = memoryview(host.numpy()), 0
            while n := f.readinto(view[at:]):
                at += n
        at = 0
        for t in mine.values():
            piece = host[at : at + t.nbytes]
            at += t.nbytes
            t.view(-1).view(torch.uint8).copy_(piece, non_blocking=True)

    def by_torch() -> None:
        loaded = torch.load(saved, map_location=bench.device, weights_only=True)
        for key, t in mine.items():
            t.copy_(loaded[key])

    ways: dict[str, Callable[[], Any]] = {
        OURS: lambda: load(snapshots, manifest, mine),
        "dcp.load": lambda: dcp.load(mine, storage_reader=dcp.FileSystemReader(torchs.path)),
        "torch.load": by_torch,
        "read into pinned memory and copy": plain,
    }
    for key, way_of in list(ways.items()):
        for t in mine.values():
            t.fill_(7)
        try:
            way_of()
            bench.settle()
            same = all(torch.equal(t, held[name_of]) for name_of, t in mine.items())
            bench.checked(f"{key} restores the state to the bit, {name}", same)
        except Exception as e:
            traceback.print_exc()
            bench.checked(f"{key} restores the state, {name}", False, str(e)[:300])
            del ways[key]
    rounds = 3 if bench.left_s > 60.0 else 1
    found = bench.in_turns(ways, rounds=rounds, warm=0)
    speed = {key: training.nbytes / GB / s for key, s in found.items()}
    if OURS in speed:
        for key in list(ways)[1:]:
            note = f"{rounds} rounds" + (
                "; ours verifies every byte" if key != "dcp.load" else ""
            )
            bench.measured(
                f"restore onto the device, {name}", speed[OURS], "GB/s", key, speed[key], note
            )


def run(bench: Bench) -> None:
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    warnings.filterwarnings("ignore", message=".*assuming the intent is to.*")
    if bench.tiny:
        torch.set_num_threads(1)
    *small, large = TINY if bench.tiny else SIZES
    for size in [large] if bench.part == "pause-large" else small:
        what = f"blocked per snapshot, {size.gb:g} GB"
        if bench.left_s < size.wanted_s:
            bench.missing(what, f"the part had {bench.left_s:.0f} s left")
            continue
        if why := room(bench, size):
            bench.missing(what, why)
            continue
        with bench.going_on(what):
            measure(bench, size)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of torch's asynchronous save may outlive it
