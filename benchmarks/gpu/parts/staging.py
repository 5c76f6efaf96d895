"""Snapshots that are taken beside the training are, byte for byte, the state at rest.

`Training` provokes races on purpose: the state is not computed yet when the copy begins, what the
copy need not keep is changed at once after `begin`, and the rest at once after `wait`, all without
the host waiting for the device. What is compared with is cloned in the stream's own order.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import torch
from torch import nn

from benchmarks.gpu.bench import ROOT, Bench, environment
from harness.worker.snapshotter import filled_of, tensor_of
from harness.worker.training_state import between_updates
from storage import Ref, Snapshots, open_store
from storage.snapshots.staging import Segment, Segments, Stage
from storage.tensors import dcp
from storage.tensors.dcp import Saver, Staged, split
from storage.tensors.loading import destinations, like_parameters, load

ROUNDS = 30
SLEEP_CYCLES = 30_000_000  # some 20 ms of an H100
SNAPSHOTS, EARLY = 100, 20
GROWTH_NBYTES = 32 << 20  # host memory that may come and go
MAY_GROW = ("host memory", "the device's reserved memory")
SANITIZER_S = 20.0
Tensors = dict[str, torch.Tensor]


WANTED_S = 5.0  # a check begins only with so much time left


def run(bench: Bench) -> None:
    if bench.tiny:
        torch.set_num_threads(1)
    with contextlib.closing(Memory(bench)) as memory:
        bench.attempt("snapshots beside the training", lambda b: races(b, memory), WANTED_S)
        bench.attempt("a missing wait", lambda b: missing_wait(b, memory), WANTED_S)
        bench.attempt("frozen tensors", lambda b: frozen(b, memory), WANTED_S)
        bench.attempt("a restore onto the device", lambda b: restored(b, memory), WANTED_S)
        bench.attempt("the saver's own memory", own_memory, WANTED_S)
        bench.attempt("memory after many snapshots", lambda b: flat(b, memory), WANTED_S)
        bench.attempt("a restore on a stream", lambda b: restored_on_stream(b, memory), WANTED_S)
        bench.attempt("memory is unpinned", lambda b: unpinned(b, memory), WANTED_S)
    bench.attempt("memory at the address of a former segment", same_address, WANTED_S)
    bench.attempt("compute-sanitizer", sanitized, WANTED_S)


# ---- a training ----------------------------------------------------------------------------------
class Model(nn.Module):
    def __init__(self, width: int, device: torch.device):
        super().__init__()

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device) * 0.02

        self.big = nn.Parameter(drawn(width, width + 1))  # on a GPU more than one slice
        self.turned = nn.Parameter(drawn(77, width).t())
        self.low = nn.Parameter(drawn(width).bfloat16())
        self.factor = nn.Parameter(torch.tensor(0.5, device=device))
        self.norm = nn.BatchNorm1d(width + 1, device=device)  # its buffers change in a forward
        n = 1000 if width < 1000 else 3_000_000
        self.frozen = nn.Parameter(drawn(n), requires_grad=False)
        self.frozen_low = nn.Parameter(drawn(333).half(), requires_grad=False)
        self.register_buffer("none", torch.empty(0, 5, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * (1 + self.low.float()) * self.factor + self.frozen[:1]
        parts = self.norm(x @ self.big), x @ self.turned
        return torch.stack([part.square().mean() for part in parts]).sum()


class Training:
    """A training on the device, with tensors of all kinds beside it. `steps`: AdamW's way of
    stepping, fused or foreach. `own_stream`: it runs on a stream of the user's."""

    def __init__(self, bench: Bench, seed: int, steps: str, own_stream: bool = False):
        torch.manual_seed(seed)
        self.gpu, self.device = not bench.tiny, bench.device
        width = 40 + seed % 7 if bench.tiny else 2900 + 67 * (seed % 7)
        self.stream = torch.cuda.Stream() if self.gpu and own_stream else None
        self.beside = torch.cuda.Stream() if self.gpu else None
        with self.running():
            self.model = Model(width, self.device)
            trained = [p for p in self.model.parameters() if p.requires_grad]
            self.optimizer = torch.optim.AdamW(trained, lr=1e-3, **{steps: True})
            self.x = torch.randn(64, width, device=self.device)
            shape = (9, 101, 8) if bench.tiny else (9, 1001, 64)
            base = torch.arange(shape[0] * shape[1] * shape[2], device=self.device).view(shape)
            self.ema: dict[str, torch.Tensor] = {  # only updates change them
                "int64": base.clone(),
                "every second": base.float()[:, ::2],
                "fp16": base.half().contiguous(),
                "0-d": torch.zeros((), dtype=torch.float64, device=self.device),
                "empty": torch.empty(3, 0, device=self.device),
                "host": torch.arange(100_001),
                "complex": torch.randn(100, 3, dtype=torch.complex64, device=self.device),
            }
            self.now: dict[str, torch.Tensor] = {  # anything may change them
                "turned": torch.randn(201, 999, device=self.device).t(),
                "count": torch.zeros((), dtype=torch.int64, device=self.device),
                "host": torch.get_rng_state(),
            }
            self.update()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        if self.stream is None:
            yield
        else:
            with torch.cuda.stream(self.stream):
                yield

    def forward_backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.x).backward()

    def update(self) -> None:
        self.forward_backward()
        self.optimizer.step()

    def tensors(self) -> tuple[Tensors, dict[str, Any]]:
        found: tuple[Tensors, dict[str, Any]] = split(
            {
                "model": self.model.state_dict(),
                "optimizer": {"0": self.optimizer.state_dict()},
                "ema": self.ema,
                "now": self.now,
            }
        )
        return found

    def later(self, tensors: Tensors) -> set[str]:
        return between_updates(self.model, tensors, {"ema"})

    def still(self, tensors: Tensors) -> set[str]:
        return {name for name in tensors if "frozen" in name}

    def delay(self) -> None:
        """Keep the device busy, so that what is queued from here on is late."""
        if self.gpu:
            torch.cuda._sleep(SLEEP_CYCLES)

    def change(self, tensors: Tensors, names: set[str]) -> None:
        """Change every element, in place, queued on the current stream."""
        with torch.no_grad():
            for name in sorted(names):
                tensors[name].add_(1)


class Memory:
    """Two segments of a stage, pinned, as a worker and the uploader of its node have them."""

    def __init__(self, bench: Bench):
        self.stage = Stage(bench.folder, 8 << 30)
        self.made = Segments(self.stage.folder, self.stage.budget_nbytes)
        self.segments: list[Segment] = []
        self.pinned: list[bool] = []
        self._turn = 0
        self._room = 8 << 20 if bench.tiny else 320 << 20  # of each: more than any state here

    def take(self, nbytes: int) -> Segment:
        """Return the segment whose turn it is."""
        self._turn += 1
        if not self.segments:
            for _ in range(2):
                path = self.made.create(max(nbytes, self._room)).path
                assert path is not None
                segment = Segment.open(path).touch()
                self.segments.append(segment)
                self.pinned.append(dcp.pin(tensor_of(segment), segment))
        segment = self.segments[self._turn % 2]
        assert segment.nbytes >= nbytes, (segment.nbytes, nbytes)
        return segment

    def close(self) -> None:
        dcp.unpin()
        self.segments.clear()
        self.stage.close()


def at_rest(tensors: Tensors) -> Tensors:
    """Return copies, in the order of the current stream; the host does not wait."""
    return {name: t.detach().clone() for name, t in tensors.items()}


def bytes_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def differing(staged: Staged, wanted: Tensors) -> list[str]:
    """Return the names of tensors whose bytes in the snapshot are not those of `wanted`."""
    files, index = staged.files(), staged.layout.index
    assert set(index) == set(wanted), set(index) ^ set(wanted)
    wrong = []
    for name, t in wanted.items():
        chunks = index[name]["chunks"]
        found = [
            np.frombuffer(files[c["part"]][c["start"] : c["end"]], np.uint8) for c in chunks
        ] or [np.empty(0, np.uint8)]
        if not np.array_equal(np.concatenate(found) if len(found) > 1 else found[0], bytes_of(t)):
            wrong.append(name)
    return wrong


# ---- checks --------------------------------------------------------------------------------------
def races(bench: Bench, memory: Memory) -> None:
    rounds = 8 if bench.tiny else ROUNDS
    each = 2 if bench.tiny else 5
    kinds = [(steps, own) for own in (False, True) for steps in ("fused", "foreach")]
    wrong: dict[str, list[str]] = {}
    count: dict[str, int] = {}
    blocked, changed, nbytes = [], [], 0
    for first in range(0, rounds, each):
        if bench.left_s < 20 and first:
            bench.missing(f"rounds {first} to {rounds}", f"{bench.left_s:.0f} s were left")
            break
        steps, own_stream = kinds[first // each % len(kinds)]
        training = Training(bench, first, steps, own_stream)
        with training.running():
            saver = Saver(Snapshots(open_store(str(bench.folder / "races"))), own_memory=False)
            tensors, _ = training.tensors()
            still = training.still(tensors)
            saver.plan(tensors, still)
            nbytes = max(nbytes, saver.nbytes)
            for k in range(first, min(first + each, rounds)):
                where = "a stream of the user's" if own_stream else "the default stream"
                what = f"AdamW {steps}, {where}"
                staged, wanted, touched = one_round(training, saver, memory, k, blocked)
                staged.arrive()
                if training.gpu:
                    torch.cuda.synchronize()
                count[what] = count.get(what, 0) + 1
                wrong.setdefault(what, []).extend(f"{k}: {n}" for n in differing(staged, wanted))
                changed += touched
                staged.release()
    for what, names in wrong.items():
        bench.checked(
            f"{what}: snapshots beside the training are byte for byte the state at rest",
            not names,
            ", ".join(names)[:400] or f"{count[what]} rounds of up to {nbytes / 1e6:.0f} MB",
        )
    bench.checked(
        "nothing that a snapshot keeps is seen as changed before `wait`",
        not changed,
        ", ".join(changed)[:300],
    )
    if bench.tiny:
        bench.missing("the stage's memory is pinned", "no GPU")
    else:
        bench.checked(
            "the stage's memory is pinned",
            all(memory.pinned) and all(tensor_of(s).is_pinned() for s in memory.segments),
            f"{len(memory.segments)} segments of {memory.segments[0].nbytes / 1e6:.0f} MB; "
            f"{locked()}",
        )
    bench.measured(
        "longest time that the host stood in `begin` and `wait`, with 20 ms of kernels queued",
        1e3 * max(blocked),
        "ms",
        note="other parts share the GPU; frozen tensors are hashed behind those kernels",
    )


def one_round(
    training: Training, saver: Saver, memory: Memory, k: int, blocked: list[float]
) -> tuple[Staged, Tensors, list[str]]:
    """Return the snapshot, what it must be, and what it calls changed before `wait`. Queues an
    update, then the copy, then the next step, and never waits for the device."""
    training.delay()
    training.update()
    if training.gpu and k % 3 == 1:  # an update on another stream, which the current one awaits
        current, beside = torch.cuda.current_stream(), training.beside
        assert beside is not None
        beside.wait_stream(current)
        with torch.cuda.stream(beside):
            training.delay()
            tensors, _ = training.tensors()
            training.change(tensors, training.later(tensors) - training.still(tensors))
        current.wait_stream(beside)
    tensors, _ = training.tensors()
    later, still = training.later(tensors), training.still(tensors)
    wanted = at_rest(tensors)
    segment = memory.take(saver.nbytes)
    t0 = time.perf_counter()
    if k % 2:
        staged = saver.begin(tensors, later, tensor_of(segment), still, filled_of(segment))
    else:  # nothing is taken as unchanged: all of it is copied
        segment.filled = None
        staged = saver.begin(tensors, later, tensor_of(segment))
    took = time.perf_counter() - t0
    training.change(tensors, set(tensors) - later)
    training.forward_backward()
    touched = staged.touched()
    t0 = time.perf_counter()
    staged.wait()
    blocked.append(took + time.perf_counter() - t0)
    training.optimizer.step()
    training.change(tensors, later - still)
    return staged, wanted, touched


def missing_wait(bench: Bench, memory: Memory) -> None:
    """The same comparison sees an update that did not wait. The copy is held back on purpose."""
    training = Training(bench, 1, "foreach")
    saver = Saver(Snapshots(open_store(str(bench.folder / "races"))), own_memory=False)
    tensors, _ = training.tensors()
    saver.plan(tensors)
    wanted, segment = at_rest(tensors), memory.take(saver.nbytes)
    segment.filled = None
    if training.gpu:
        with torch.cuda.stream(dcp._side_stream(tensors["model/big"].device)):
            training.delay()
    else:
        saver._beside.run(lambda: time.sleep(0.2))
    later = training.later(tensors)
    staged = saver.begin(tensors, later, tensor_of(segment))
    training.change(tensors, later)
    bench.settle()
    staged.arrive()
    wrong = differing(staged, wanted)
    bench.checked(
        "a missing wait is seen by this comparison", bool(wrong), f"{len(wrong)} tensors differ"
    )
    bench.checked("and `touched` names what was changed", set(wrong) <= set(staged.touched()))


def frozen(bench: Bench, memory: Memory) -> None:
    """Tensors that training leaves alone: copied once, hashed each time, copied again when changed.
    """
    training = Training(bench, 2, "foreach")
    saver = Saver(Snapshots(open_store(str(bench.folder / "races"))), own_memory=False)
    tensors, _ = training.tensors()
    later, still = training.later(tensors), training.still(tensors)
    saver.plan(tensors, still)
    segment = memory.take(saver.nbytes)
    segment.filled = None
    buffer, filled, wrong, prints = tensor_of(segment), filled_of(segment), [], []
    for k in range(4):
        training.delay()
        if k == 2:
            training.change(tensors, {"model/frozen"})  # behind the delay
        wanted = at_rest(tensors)
        staged = saver.begin(tensors, later, buffer, still, filled)
        staged.wait()
        training.change(tensors, later - still)
        staged.arrive()
        bench.settle()
        wrong += [f"{k}: {name}" for name in differing(staged, wanted)]
        prints.append(staged.still())
    at = next(
        place
        for item, (place, _) in zip(staged.layout.items, staged.layout.places, strict=True)
        if item.index.fqn == "model/frozen"
    )
    right = set(prints[0]) == set(prints[2]) and len(prints[0]) == len(still)
    bench.checked("frozen tensors are in each snapshot, byte for byte", not wrong, ", ".join(wrong))
    bench.checked(
        "only a frozen tensor that was changed has another fingerprint",
        right
        and prints[0] == prints[1]
        and prints[2] == prints[3]
        and {p for p in prints[0] if prints[0][p] != prints[2][p]} == {at},
    )
    buffer[at : at + 8] = 77  # a mark that a second copy would remove
    staged = saver.begin(tensors, later, buffer, still, filled)
    staged.arrive()
    bench.checked(
        "a frozen tensor that the memory already holds is not copied again",
        bool((buffer[at : at + 8] == 77).all()),
    )
    segment.filled = None


def restored(bench: Bench, memory: Memory) -> None:
    """A snapshot that is committed to a store and loaded onto the device again."""
    folder = bench.folder / "store"
    snapshots = Snapshots(open_store(str(folder)))
    training = Training(bench, 3, "fused")
    saver = Saver(snapshots, own_memory=False)
    tensors, plain = training.tensors()
    saver.plan(tensors)
    training.delay()
    training.update()
    wanted, segment = at_rest(tensors), memory.take(saver.nbytes)
    segment.filled = None
    staged = saver.begin(tensors, training.later(tensors), tensor_of(segment))
    staged.wait()
    training.optimizer.step()
    training.change(tensors, set(tensors))
    manifest = saver.write(staged, Ref(1, 1), {"state": plain}, "t")
    assert manifest is not None
    found = Snapshots(open_store(str(folder))).latest()
    assert found is not None
    assert found.ref == manifest.ref
    fresh = Training(bench, 3, "fused")
    fresh.optimizer = torch.optim.AdamW(fresh.optimizer.param_groups[0]["params"], fused=True)
    have, _ = fresh.tensors()
    like = like_parameters({"optimizer": {"0": fresh.optimizer}})
    into = destinations(found, have, like)
    load(snapshots, found, into)
    bench.settle()
    wrong = [
        name
        for name, t in wanted.items()
        if name not in into or not np.array_equal(bytes_of(t), bytes_of(into[name]))
    ]
    placed = [n for n in into if n.endswith("exp_avg") and into[n].device != bench.device]
    bench.checked(
        "a committed snapshot is loaded onto the device byte for byte",
        not wrong and not placed,
        ", ".join([*wrong, *placed])[:300] or f"{len(into)} tensors, {found.nbytes / 1e6:.0f} MB",
    )
    shutil.rmtree(folder, ignore_errors=True)


def restored_on_stream(bench: Bench, memory: Memory) -> None:
    """What the user's stream has queued before a load comes before it."""
    if bench.tiny:
        bench.missing("a load comes behind what the user's stream has queued", "no GPU")
        return
    folder = bench.folder / "store"
    snapshots = Snapshots(open_store(str(folder)))
    n = 8 << 20  # read in several pieces, by several threads
    tensors = {"x": torch.arange(n, device=bench.device, dtype=torch.int32)}
    saver = Saver(snapshots, own_memory=False)
    saver.plan(tensors)
    segment = memory.take(saver.nbytes)
    segment.filled = None
    manifest = saver.write(saver.begin(tensors, (), tensor_of(segment)), Ref(1, 1), {}, "t")
    assert manifest is not None
    into = {"x": torch.zeros_like(tensors["x"])}
    bench.settle()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20 * SLEEP_CYCLES)
        into["x"].fill_(7)
        load(snapshots, manifest, into)
        found = into["x"].clone()
    bench.settle()
    bench.checked(
        "a load comes behind what the user's stream has queued", torch.equal(found, tensors["x"])
    )
    shutil.rmtree(folder, ignore_errors=True)


def own_memory(bench: Bench) -> None:
    """Without an agent: the saver's own buffer, pinned by torch."""
    before = host_nbytes()
    training = Training(bench, 4, "foreach")
    saver = Saver(Snapshots(open_store(str(bench.folder / "races"))))
    tensors, _ = training.tensors()
    saver.plan(tensors)
    wrong = []
    for k in range(4):
        training.delay()
        training.update()
        tensors, _ = training.tensors()
        wanted = at_rest(tensors)
        if k % 2:
            staged = saver.stage(tensors)
        else:
            staged = saver.begin(tensors, training.later(tensors))
            staged.wait()
        training.change(tensors, set(tensors) if k % 2 else training.later(tensors))
        staged.arrive()
        bench.settle()
        wrong += [f"{k}: {name}" for name in differing(staged, wanted)]
        pinned = staged.buffer is not None and staged.buffer.is_pinned()
        staged.release()
    bench.checked(
        "snapshots in the saver's own memory are byte for byte the state at rest",
        not wrong and (pinned or bench.tiny),
        ", ".join(wrong)[:300] or ("pinned" if pinned else "not pinned"),
    )
    if bench.tiny:
        bench.missing("torch's pinned memory is given back", "no GPU")
        return
    held_then, nbytes = host_nbytes(), saver.nbytes
    del staged, saver
    gc.collect()
    bench.settle()
    # torch looks at what was given back when as much is wanted again: it must not need more
    again = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    after = host_nbytes()
    del again
    owned = [one.get("allocated_bytes.current", 0) for one in (before, held_then, after)]
    note = f"{nbytes / 1e6:.0f} MB of state; torch owns before, with and after it: "
    note += ", ".join(f"{one / 1e6:.0f}" for one in owned) + " MB"
    kept = owned[1] - owned[0]
    bench.checked(
        "torch's pinned memory is given back", nbytes <= kept and owned[2] == owned[1], note
    )


def flat(bench: Bench, memory: Memory) -> None:
    """Memory after few and after many snapshots, of the device and of the host."""
    training = Training(bench, 5, "fused")
    saver = Saver(Snapshots(open_store(str(bench.folder / "races"))), own_memory=False)
    tensors, _ = training.tensors()
    still = training.still(tensors)
    saver.plan(tensors, still)
    count, early_at = (20, 5) if bench.tiny else (SNAPSHOTS, EARLY)
    seen: dict[int, dict[str, float]] = {}
    staged: Any = None
    for k in range(1, count + 1):
        tensors, _ = training.tensors()
        segment = memory.take(saver.nbytes)
        if k <= 2:
            segment.filled = None
        staged = saver.begin(
            tensors, training.later(tensors), tensor_of(segment), still, filled_of(segment)
        )
        training.forward_backward()
        staged.wait()
        training.optimizer.step()
        staged.arrive()
        staged.release()
        if k in (early_at, count):
            bench.settle()
            gc.collect()
            seen[k] = held(memory)
    del staged
    early, last = seen[early_at], seen[count]
    for what in early:
        # other parts take and free memory of the whole device meanwhile
        if what == "the whole device's memory in use":
            bench.measured(
                f"MB more of {what}, snapshot {count} against {early_at}",
                (last[what] - early[what]) / 1e6,
                "MB",
                note="other parts share the GPU",
            )
            continue
        bench.checked(
            f"{what} is no more after {count} snapshots than after {early_at}",
            last[what] - early[what] <= GROWTH_NBYTES * (what in MAY_GROW),
            f"{early[what] / 1e6:.1f} and {last[what] / 1e6:.1f} MB",
        )


def held(memory: Memory) -> dict[str, float]:
    found: dict[str, float] = {"host memory": psutil.Process().memory_info().rss}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        found |= {
            "the device's allocated memory": torch.cuda.memory_allocated(),
            "the device's reserved memory": torch.cuda.memory_reserved(),
            "the whole device's memory in use": total - free,
            "torch's pinned memory": host_nbytes().get("allocated_bytes.current", 0),
            "the stage's pinned memory": sum(dcp._pins.values()) * memory.segments[0].nbytes,
        }
    return found


def host_nbytes() -> dict[str, Any]:
    if not torch.cuda.is_available() or not hasattr(torch.cuda, "host_memory_stats"):
        return {}
    return dict(torch.cuda.host_memory_stats())


def locked() -> str:
    """Return what Linux says of this process' locked and pinned pages."""
    lines = Path("/proc/self/status").read_text().splitlines()
    wanted = [line.split() for line in lines if line.startswith(("VmLck", "VmPin"))]
    return ", ".join(" ".join(words) for words in wanted)


def unpinned(bench: Bench, memory: Memory) -> None:
    if bench.tiny:
        bench.missing("the stage's memory is unpinned again", "no GPU")
        return
    count = len(dcp._pins)
    bench.settle()
    dcp.unpin()
    bench.checked(
        "the stage's memory is unpinned again",
        count >= 2 and not any(tensor_of(s).is_pinned() for s in memory.segments),
        f"{count} segments; {locked()}",
    )


def same_address(bench: Bench) -> None:
    """A segment that is let go while it is pinned (the state's structure has changed), and another
    that the system maps at its address: copies must arrive in the new one."""
    nbytes, what = 8 << 20, "memory at the address of a former pinned segment gets the copy"
    pattern = torch.arange(nbytes // 4, dtype=torch.int32, device=bench.device).view(torch.uint8)
    first = Segment.anonymous(nbytes).touch()
    buffer = tensor_of(first)
    dcp.pin(buffer, first)
    buffer.copy_(pattern, non_blocking=True)
    bench.settle()
    at = buffer.data_ptr()
    del buffer, first
    gc.collect()
    tried = []
    for _ in range(16):
        tried.append(Segment.anonymous(nbytes).touch())
        buffer = tensor_of(tried[-1])
        if buffer.data_ptr() == at:
            break
    else:
        bench.missing(what, "the system mapped no new memory at that address")
        return
    claimed = dcp.pin(buffer, tried[-1])
    buffer.copy_(pattern, non_blocking=True)
    bench.settle()
    right = torch.equal(buffer, pattern.cpu())
    bench.checked(what, right, f"pin() says {claimed}")
    dcp.unpin()


def sanitized(bench: Bench) -> None:
    what = "compute-sanitizer finds nothing in a snapshot beside a step"
    tool = shutil.which("compute-sanitizer")
    if tool is None or bench.tiny:
        bench.missing(what, "no GPU" if bench.tiny else "no compute-sanitizer on the PATH")
        return
    if bench.left_s < SANITIZER_S + 5:
        bench.missing(what, f"{bench.left_s:.0f} s were left")
        return
    command = [tool, "--tool", "memcheck", "--error-exitcode", "99", sys.executable, "-m", __name__]
    process = subprocess.Popen(
        [*command, str(bench.folder)],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=SANITIZER_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        bench.missing(what, f"it took longer than {SANITIZER_S:.0f} s")
        return
    lines = [line for line in said.splitlines() if line.strip()]
    if "ERROR SUMMARY" not in said:
        bench.missing(what, f"it did not run: {lines[-1][:200] if lines else process.returncode}")
        return
    summary = next(line for line in lines if "ERROR SUMMARY" in line)
    bench.checked(what, process.returncode == 0 and "alike" in lines, summary[:200])


def tiny_round(folder: Path) -> None:
    """One small snapshot beside a step; for compute-sanitizer."""
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    x = torch.arange(100_000.0, device=device)
    saver = Saver(Snapshots(open_store(str(folder / "sanitized"))), own_memory=False)
    saver.plan({"x": x})
    segment = Segment.anonymous(saver.nbytes).touch()
    buffer = tensor_of(segment)
    dcp.pin(buffer, segment)
    wanted = x.clone()
    with patch.object(dcp, "SLICE_NBYTES", 1 << 16):
        staged = saver.begin({"x": x}, {"x"}, buffer)
    staged.wait()
    x.add_(1)
    staged.arrive()
    print("alike" if not differing(staged, {"x": wanted}) else "unlike", flush=True)


if __name__ == "__main__":
    tiny_round(Path(sys.argv[1]))
