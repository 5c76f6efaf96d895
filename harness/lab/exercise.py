"""A training so small that a drill can afford it a thousand times: `python -m
harness.lab.exercise`. Its sums are exact, so that its result is one hash. One sample is bad, and
guards skip its steps, so that every drill has guards to keep right too."""

from __future__ import annotations

import argparse
import os
import signal
import time

import torch
from torch import nn

import harness

BAD = 123  # the sample whose loss is NaN
GUARDS = {"warm_up": 8, "window": 16, "most_bad": 50}


class Numbers(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """A dataset in which sample i is a function of i."""

    fingerprint = "exercise"

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(16, generator=torch.Generator().manual_seed(i))
        return x * float("nan") if i == BAD else x, (x.sum() > 0).long()


def main() -> None:
    p = argparse.ArgumentParser(prog="python -m harness.lab.exercise")
    p.add_argument("--total", type=int, default=40)
    p.add_argument("--every", type=int, default=10, help="steps between snapshots")
    p.add_argument(
        "--sleep-s",
        type=float,
        default=0.03,
        help="how much longer than its arithmetic a step takes",
    )
    p.add_argument(
        "--drain-at",
        type=int,
        default=0,
        help="send ourselves SIGTERM in this step (only without an agent)",
    )
    a = p.parse_args()
    run = harness.attach(seed=1, snapshot_every_steps=a.every, reduce="exact", guards=GUARDS)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.prepare(model, optimizer)
    for step in run.steps(Numbers(), total=a.total, global_batch=48, micro_batch=4):
        for x, y in step:
            step.backward(nn.functional.cross_entropy(model(x), y))
        if step.number == a.drain_at:
            os.kill(os.getpid(), signal.SIGTERM)
        step.update(clip_norm=1.0)
        time.sleep(a.sleep_s)


if __name__ == "__main__":
    main()
