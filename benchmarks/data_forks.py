"""How long a rank waits for the processes that read for it, as it does after each resize: they are
forked from it, so its ordinary memory counts. No assertions.

    python benchmarks/data_forks.py
    python benchmarks/data_forks.py --gib 0,4,16 --workers 2,8

first: from `run.steps`' first micro-batch being asked for to its being there, of samples that cost
nothing to read. pages: 4 KiB, or large ones (THP_MEM_ALLOC_ENABLE=1 lets torch take them, where
/sys/kernel/mm/transparent_hugepage/enabled is not "never"). Medians of rounds in which both take
turns, each in a process of its own, whose first try warms up and is not counted.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import time
import warnings
from typing import Any

TIMES = 5  # in each process


class Numbers:
    """Samples that cost nothing."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, i: int) -> int:
        return i


def child(gib: int, workers: int) -> float:
    """Seconds to the first micro-batch, beside so much memory."""
    import torch

    from harness.core.batch import Batching, plan
    from harness.worker.batches.loader import map_style

    warnings.simplefilter("ignore")  # that there are fewer processors
    held: list[Any] = [torch.ones(1 << 28) for _ in range(gib)]
    batching, found = Batching(len(Numbers()), 8, 8, 1), []
    for _ in range(TIMES + 1):
        began_s = time.perf_counter()
        batches = map_style(Numbers(), batching, plan(1, 1), 0, 1, 9, None, workers, False)
        next(batches)
        found.append(time.perf_counter() - began_s)
        batches.close()
    del held
    return statistics.median(found[1:])


def first_s(gib: int, workers: int, large: str) -> float:
    """What `child` says in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--child", str(gib), str(workers)],
        env={**os.environ, "THP_MEM_ALLOC_ENABLE": large},
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--gib", default="0,8", help="of ordinary memory that the rank has")
    parser.add_argument("--workers", default="2,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", nargs=2, type=int, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.child:
        print(child(*a.child))
        return
    cases = list(itertools.product(map(int, a.gib.split(",")), map(int, a.workers.split(","))))
    for gib, workers in cases:
        rows = [[first_s(gib, workers, large) for large in ("0", "1")] for _ in range(a.rounds)]
        small, large = (1e3 * statistics.median(column) for column in zip(*rows, strict=True))
        print(
            f"{gib:3} GiB, {workers} processes: first after {small:7.0f} ms with 4 KiB pages, "
            f"{large:5.0f} ms with large ones  ({small / large:.1f}x)"
        )
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors, {a.rounds} rounds")


if __name__ == "__main__":
    main()
