"""What it costs to know where a step's time goes: seconds per step with and without marks between
its phases, interleaved in one session. CPU or GPU. No assertions.

    python benchmarks/timing.py                       # one rank, the examples' GPT of 1 M
    python benchmarks/timing.py --ranks 2 --late      # numbers that come a step late, as on a GPU
    python benchmarks/timing.py --micros 64           # many small micro-batches: many marks

Blocks of steps take turns: with marks, without. The first step of a block is not counted. wall_x,
cpu_x: with over without, medians of ratios of neighbouring blocks (cpu: of the thread that trains;
it minds less who else uses the machine). direct_x: what the parts cost, each measured alone, beside
a step's time: marks on the way, adding them up, the loss of this rank alone, and every ten seconds
a gather and a fact. Look at `uptime` before you believe wall_x.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

import harness
from harness.worker.step_timing import BACKWARD, DATA, FORWARD, OTHER, PhaseTimer

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from gpt import GPT, SIZES

# wall clock and time of the thread, of blocks with marks (True) and without
Taken = dict[bool, list[tuple[float, float]]]


def train(rank: int, port: int, folder: str, flags: argparse.Namespace) -> None:
    os.environ |= {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(flags.ranks)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "HARNESS_RUN": folder},
        "GLOO_SOCKET_IFNAME": "lo",
    }
    torch.set_num_threads(flags.threads)
    run = harness.attach(snapshot_every_steps=1 << 30, votes_late=flags.late or None)
    model = GPT(SIZES[flags.size], flags.seq, 0.0, False)
    run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    data = torch.randint(256, (4096, flags.seq + 1))
    timer, block = run._work.timer, flags.block
    taken: Taken = {True: [], False: []}
    before, steps = (0.0, 0.0), []
    size = {"global_batch": flags.micros * flags.ranks * flags.micro_batch}
    for step in run.steps(
        data, total=2 * block * flags.rounds, micro_batch=flags.micro_batch, **size
    ):
        now = time.perf_counter(), time.thread_time()
        place = (step.number - 1) % block  # the step before this one was the block's place - 1
        if step.number > 1 and place != 1:
            steps.append((now[0] - before[0], now[1] - before[1]))
        if place == 0 and steps:
            taken[(step.number - 1) // block % 2 == 1].append(medians(steps))
            steps = []
        before = now
        for x in step:
            logits = model(x[:, :-1]).float().flatten(0, 1)
            step.backward(torch.nn.functional.cross_entropy(logits, x[:, 1:].flatten()))
        step.update(clip_norm=1.0)
        if step.number % block == 0:
            timer.pause(step.number // block % 2 == 1)
    if rank == 0:
        report(taken, run, flags)


def medians(steps: list[tuple[float, float]]) -> tuple[float, float]:
    return statistics.median(w for w, _ in steps), statistics.median(c for _, c in steps)


def each(work: Callable[[], Any], times: int) -> float:
    """Seconds that it takes once: the best of five rounds."""
    rounds = []
    for _ in range(5):
        t0 = time.perf_counter()
        for _ in range(times):
            work()
        rounds.append((time.perf_counter() - t0) / times)
    return min(rounds)


def report(taken: Taken, run: Any, flags: argparse.Namespace) -> None:
    pairs = list(zip(taken[True], taken[False], strict=False))[1:]
    step_s = statistics.median(off[0] for _, off in pairs)
    wall_x, cpu_x = (statistics.median(on[i] / off[i] for on, off in pairs) for i in (0, 1))
    timer = PhaseTimer(run._work.timer._marks)
    losses = torch.zeros(flags.micros * flags.ranks, dtype=torch.float64, device=run.device)

    def one_step() -> None:
        losses.sum().view(1)
        timer.begin(1)
        for _ in range(flags.micros):
            for phase in (DATA, FORWARD, BACKWARD, OTHER):
                timer.enter(phase)
        for _ in range(16):
            timer.enter(OTHER)
        timer.end()
        timer.settle()

    marks_s = each(one_step, 200)
    times = run._work.log.times

    def tell() -> None:
        times._timer.steps = 10
        times.gather()
        times.collect()

    tell_s = each(tell, 20) if flags.ranks == 1 else 0.0  # else the other ranks have gone
    direct_x = 1 + marks_s / step_s + tell_s / 10.0
    print(
        f"{flags.size} on {flags.ranks} {run.device.type}, {flags.micros} micro-batches, "
        f"{'late' if flags.late else 'prompt'}: step {step_s * 1e3:.2f} ms   wall_x {wall_x:.4f}   "
        f"cpu_x {cpu_x:.4f}   direct_x {direct_x:.5f} (marks {marks_s * 1e6:.0f} us a step, told "
        f"{tell_s * 1e6:.0f} us every 10 s)   {len(pairs)} pairs of {flags.block} steps, load "
        f"{os.getloadavg()[0]:.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in {"ranks": 1, "micros": 4, "micro-batch": 4, "seq": 64, "threads": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rounds", type=int, default=20, help="pairs of blocks")
    parser.add_argument("--block", type=int, default=8, help="steps")
    parser.add_argument("--size", default="1m", choices=list(SIZES))
    parser.add_argument("--late", action="store_true")
    flags = parser.parse_args()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, (port, folder, flags), flags.ranks)


if __name__ == "__main__":
    main()
