"""What guards cost: seconds per step with the default guards and without, interleaved in one
session whose weights are the same either way. CPU or GPU. No assertions.

    python benchmarks/guards.py                       # one rank, the examples' GPT of 1 M
    python benchmarks/guards.py --ranks 2 --micros 4

Blocks of steps take turns, after enough steps for the guards' windows to be full. The first step of
a block is not counted. wall_x, cpu_x: with over without, medians of ratios of neighbouring blocks
(cpu: of the thread that trains; it minds less who else uses the machine). judge_us: a judgement
alone, in microseconds. Look at `uptime` before you believe wall_x.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.multiprocessing as mp

import harness
from harness.guards.guard_rules import Guards, StepRules

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from gpt import GPT, SIZES

FULL = 140  # steps until the windows are full

# wall clock and time of the thread, of blocks with guards (True) and without
Taken = dict[bool, list[tuple[float, float]]]


def train(rank: int, port: int, folder: str, flags: argparse.Namespace) -> None:
    os.environ |= {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(flags.ranks)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "HARNESS_RUN": folder},
        "GLOO_SOCKET_IFNAME": "lo",
    }
    torch.set_num_threads(flags.threads)
    run = harness.attach(snapshot_every_steps=1 << 30, guards="default")
    model = GPT(SIZES[flags.size], flags.seq, 0.0, False)
    run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    data = torch.randint(256, (4096, flags.seq + 1))
    training, block = run._work.training, flags.block
    with_guards = training.hooks
    without = replace(with_guards, judge=None, before_micro=with_guards.before_micro[:-1])
    taken: Taken = {True: [], False: []}
    before = 0.0, 0.0
    size = {"global_batch": flags.micros * flags.ranks * flags.micro_batch}
    total = FULL + 2 * block * flags.rounds
    for step in run.steps(data, total=total, micro_batch=flags.micro_batch, **size):
        at, within = divmod(step.number - FULL - 1, block)
        now = time.perf_counter(), time.thread_time()
        if step.number > FULL:
            guarded = at % 2 == 0
            training.hooks = with_guards if guarded else without
            if within > 1:
                taken[guarded].append((now[0] - before[0], now[1] - before[1]))
        before = now
        for batch in step:
            loss = torch.nn.functional.cross_entropy(
                model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
            )
            step.backward(loss)
        step.update(clip_norm=1.0)
    if rank == 0:
        report(taken, block - 2)


def report(taken: Taken, each: int) -> None:
    """Print the ratios. `each`: counted steps of a block."""

    def blocks(guarded: bool, place: int) -> list[float]:
        values = [one[place] for one in taken[guarded]]
        return [sum(values[i : i + each]) for i in range(0, len(values), each)]

    ratios = [
        statistics.median(a / b for a, b in zip(blocks(True, i), blocks(False, i), strict=True))
        for i in (0, 1)
    ]
    seconds = statistics.median(one[0] for one in taken[False])
    rules, n = StepRules(Guards()), 2000
    for step in range(300):
        rules.judge(step, 1.0 + step % 7 / 100, 1.0 + step % 5 / 100)
    begin = time.perf_counter()
    for step in range(300, 300 + n):
        rules.judge(step, 1.0 + step % 7 / 100, 1.0 + step % 5 / 100)
    judge_us = 1e6 * (time.perf_counter() - begin) / n
    print(
        f"step {1e3 * seconds:.1f} ms  wall_x {ratios[0]:.4f}  cpu_x {ratios[1]:.4f}  "
        f"judge_us {judge_us:.0f}  blocks {len(blocks(True, 0))} of {each} steps"
    )


if __name__ == "__main__":
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--ranks", type=int, default=1)
    p.add_argument("--size", default="1m", choices=sorted(SIZES))
    p.add_argument("--seq", type=int, default=64)
    p.add_argument("--micros", type=int, default=2, help="micro-batches of a rank in a step")
    p.add_argument("--micro-batch", type=int, default=4)
    p.add_argument("--block", type=int, default=12, help="steps")
    p.add_argument("--rounds", type=int, default=20)
    p.add_argument("--threads", type=int, default=1)
    flags = p.parse_args()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, (port, folder, flags), nprocs=flags.ranks)
