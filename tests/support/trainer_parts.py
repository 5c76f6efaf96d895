"""What the tests' training scripts share."""

import argparse
import time
from pathlib import Path

import torch


class Numbers(torch.utils.data.Dataset):
    """Sample i is a function of i."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        x = torch.randn(16, generator=torch.Generator().manual_seed(i))
        return x, (x.sum() > 0).long()


def flags():
    """A parser of those that scripts on meshes have in common."""
    p = argparse.ArgumentParser()
    p.add_argument("--total", type=int, default=12)
    p.add_argument("--every", type=int, default=3)
    p.add_argument("--reduce", default="fast")
    p.add_argument("--go", default="", help="a file: until it is there the steps are slow")
    p.add_argument("--out", default="")
    return p


def dawdle(step, go):
    """At the end of a step, unless the file `go` is there; "" waits for none."""
    if not go:
        return
    until = time.monotonic() + (0.2 if step.number <= 3 else 6.0)
    while time.monotonic() < until and not Path(go).exists():
        time.sleep(0.05)
