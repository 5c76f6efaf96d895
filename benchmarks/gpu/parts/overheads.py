"""What single features add to a step on the device: exact sums, the marks of step timing, the copy
of a step's numbers for votes; and what NVML's reading and fingerprints take."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.exact import Way
from benchmarks.gpu.bench import Bench
from harness.agent.gpu_health import FakeNvml, NvmlReader
from harness.node.marks import Want
from harness.worker import replica_check
from harness.worker.step import to_host
from harness.worker.step_timing import (
    BACKWARD,
    COMMUNICATION,
    DATA,
    FORWARD,
    HARNESS,
    OPTIMIZER,
    PhaseTimer,
    marks_of,
)
from harness.worker.votes import Votes
from storage.tensors.dcp import fingerprint

BARE = "the same step without"
STEPS = 3  # micro-batches of one turn, at least
CALLS = 300
READINGS = 20
DETERMINISTIC = ", deterministic kernels"


def flags_of(bench: Bench, micros: int = 1) -> argparse.Namespace:
    tiny = bench.tiny
    return argparse.Namespace(
        size="1m" if tiny else "124m",
        seq=32 if tiny else 1024,
        micros=micros,
        micro_batch=2 if tiny else 16,
        ranks=1,
        parallel="ddp",
    )


class Step:
    """A step of `benchmarks/exact.py` in bf16, its blocks compiled on a GPU. `reduce`: how its
    gradients are summed."""

    def __init__(self, bench: Bench, reduce: str, micros: int = 1):
        flags = flags_of(bench, micros)
        self.way = Way(reduce, flags, bench.device)
        model = self.way.model
        if not bench.tiny:
            for block in model.blocks:
                block.compile()
        model.forward = torch.autocast(bench.device.type, torch.bfloat16)(model.forward)
        g = torch.Generator().manual_seed(0)
        shape = (flags.micros, flags.micro_batch, flags.seq + 1)
        self.tokens = torch.randint(256, shape, generator=g).to(bench.device)
        self.way._lap = lambda t: 0.0  # a step does not wait for the device in its middle

    def __call__(self) -> None:
        self.way.step(self.tokens)

    def deterministic(self) -> None:
        """Make a step as `attach(reduce="exact")` sets torch on a GPU."""
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        try:
            self()
        finally:
            torch.use_deterministic_algorithms(False)


def times(count: int, do: Callable[[], Any]) -> Callable[[], None]:
    def several() -> None:
        for _ in range(count):
            do()

    return several


def percent(found: dict[str, float], what: str, base: str) -> float:
    return 100 * (found[what] / found[base] - 1)


def exact(bench: Bench) -> None:
    """Measure sums beside float sums; and apart, deterministic kernels, which exact sums need."""
    for micros in (1, 4):
        steps = {name: Step(bench, name, micros) for name in ("fast", "exact", "exact32")}
        count = max(1, STEPS // micros)
        ways: dict[str, Callable[[], Any]] = {
            name: times(count, step) for name, step in steps.items()
        }
        for name in ("fast", "exact"):
            ways[name + DETERMINISTIC] = times(count, steps[name].deterministic)
        rounds = 2 if bench.tiny else 5
        found = bench.in_turns(ways, rounds, warm=2)  # the first step of exact sums is done twice
        ms = {name: 1e3 * s / count for name, s in found.items()}
        for name, base in (
            ("exact", "fast"),
            ("exact32", "fast"),
            ("exact" + DETERMINISTIC, "fast" + DETERMINISTIC),
            ("fast" + DETERMINISTIC, "fast"),
        ):
            note = f"{percent(ms, name, base):+.2f} %; bf16, compiled blocks; {rounds} rounds"
            what = f"step of {micros} micro-batches with sums {name}"
            bench.measured(what, ms[name], "ms", base, ms[base], note)
        if micros == 1:
            where_it_goes(steps["exact"])


def where_it_goes(step: Step) -> None:
    """Print what the device and the host do in a step with exact sums."""
    with torch.profiler.profile() as profile:
        step()
        step()
    print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=12))
    if step.way.device.type == "cuda":
        print(profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=30))


def marks_and_votes(bench: Bench) -> None:
    """Measure a step with what a session adds to it: marks, and its numbers on the host."""
    step, device = Step(bench, "fast"), bench.device
    timer, votes = PhaseTimer(marks_of(device)), Votes(None, leads=True)
    floats = torch.zeros(4, dtype=torch.float64, device=device)
    number, pending = 0, list[Any]()

    def marked() -> None:
        """Take the eight marks around one step, and evaluate those of the step before."""
        nonlocal number
        number += 1
        timer.begin(number)
        for phase in (HARNESS, DATA, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER):
            timer.enter(phase)
        step()
        if number > 1:
            timer.settle()
        timer.end()

    def voted() -> None:
        """Copy a step's numbers to the host, and wait for those of the step before."""
        step()
        wants = torch.zeros(len(Want), dtype=torch.int64)
        votes.cast(wants, 1, {Want.SNAPSHOT: lambda _: False})
        on_host, copied = to_host(floats)
        pending.append((on_host, copied))
        if len(pending) > 1:
            before, event = pending.pop(0)
            if event is not None:
                event.synchronize()
            before.tolist()

    ways: dict[str, Callable[[], Any]] = {
        BARE: times(STEPS, step),
        "marks": times(STEPS, marked),
        "votes": times(STEPS, voted),
    }
    rounds = 2 if bench.tiny else 11
    found = bench.in_turns(ways, rounds, warm=2)
    ms = {name: 1e3 * s / STEPS for name, s in found.items()}
    for name, says in (("marks", "the eight marks of step timing"), ("votes", "votes")):
        note = f"{percent(ms, name, BARE):+.2f} %; {rounds} rounds"
        bench.measured(f"step with {says}", ms[name], "ms", BARE, ms[BARE], note)
    bench.checked(
        "the timer has timed the steps", timer.steps > 0, f"{timer.steps} of {number} steps"
    )
    alone(bench)


def alone(bench: Bench) -> None:
    """Measure the same calls without a step between them: what the host spends on them."""
    timer, votes = PhaseTimer(marks_of(bench.device)), Votes(None, leads=True)
    floats = torch.zeros(4, dtype=torch.float64, device=bench.device)
    number = 0

    def marks() -> None:
        nonlocal number
        number += 1
        timer.begin(number)
        for phase in (HARNESS, DATA, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER):
            timer.enter(phase)
        timer.end()
        timer.settle()

    def numbers() -> None:
        wants = torch.zeros(len(Want), dtype=torch.int64)
        votes.cast(wants, 1, {Want.SNAPSHOT: lambda _: False})
        on_host, copied = to_host(floats)
        if copied is not None:
            copied.synchronize()
        on_host.tolist()

    calls = CALLS // 10 if bench.tiny else CALLS
    found = bench.in_turns({"m": times(calls, marks), "n": times(calls, numbers)}, 3)
    for key, what in (("m", "eight marks and their evaluation"), ("n", "votes and their copy")):
        us = 1e6 * found[key] / calls
        bench.measured(f"{what}, alone", us, "us", note=f"mean of {calls} calls, waited for")


def health(bench: Bench) -> None:
    """Measure a look of the health probe, which runs in a process of its own every five seconds."""
    if bench.tiny:
        lines = Path(bench.folder / "nvml")
        lines.write_text('{"gpus": 1}\n')
        nvml: Any = FakeNvml(lines)
    else:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            bench.missing("NVML's reading", "no module pynvml (pip install nvidia-ml-py)")
            return
    reader = NvmlReader(nvml)
    findings = list(reader.look())
    measured = reader.measure()
    bench.checked("NVML tells of the GPU's temperature", any("celsius" in m for m in measured))
    count = 3 if bench.tiny else READINGS
    ways = {
        "look": times(count, lambda: list(reader.look())),
        "measure": times(count, reader.measure),
    }
    found = bench.in_turns(ways, 3)
    for name, says in (("look", "counters and states"), ("measure", "use and temperature")):
        note = f"of {len(reader.names)} GPU; {len(findings)} findings"
        bench.measured(f"NVML's reading: {says}", 1e3 * found[name] / count, "ms", note=note)


def fingerprints(bench: Bench) -> None:
    """Measure fingerprints of a state on the device, and ranks' comparison of it."""
    pieces, numel = (2, 1 << 14) if bench.tiny else (15, 1 << 24)  # 1.007 GB
    state = {f"model/{i}": torch.randn(numel, device=bench.device) for i in range(pieces)}
    copies = {name: torch.empty_like(t) for name, t in state.items()}

    def copy() -> None:
        for name, t in state.items():
            copies[name].copy_(t)

    found = bench.in_turns(
        {
            "prints": lambda: [fingerprint(t) for t in state.values()],
            "held": lambda: replica_check.held(state, {}).total(),
            "copy": copy,
        },
        2 if bench.tiny else 5,
    )
    nbytes = sum(t.nbytes for t in state.values())
    peer, ms = "copy on the device", {name: 1e3 * s for name, s in found.items()}
    note = f"{nbytes / 1e9 / found['prints']:.0f} GB/s"
    what = f"of {nbytes / 1e9:.3g} GB on the device"
    bench.measured(f"fingerprints {what}", ms["prints"], "ms", peer, ms["copy"], note)
    bench.measured(f"comparison between ranks {what}", ms["held"], "ms", peer, ms["copy"])
    copy()
    same = replica_check.held(state, {}).total() == replica_check.held(copies, {}).total()
    copies["model/1"][numel // 2] += 1
    other = replica_check.held(copies, {}).total() != replica_check.held(state, {}).total()
    bench.checked("equal states have equal fingerprints, one changed number shows", same and other)


def run(bench: Bench) -> None:
    # before CUDA's first product: exact sums ask for it
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if bench.tiny:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(bench.device)
    for what, measure in (
        ("exact sums", exact),
        ("marks and votes", marks_and_votes),
        ("fingerprints", fingerprints),
        ("NVML's reading", health),
    ):
        bench.attempt(what, measure, wanted_s=1.0 if bench.tiny else 6.0)
        if not bench.tiny:
            with contextlib.suppress(RuntimeError):
                torch.cuda.empty_cache()
