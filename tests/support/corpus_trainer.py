"""A training script over a corpus; the model is so small that only its data matter."""

import argparse
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

import harness
from storage.snapshots.snapshots import Snapshots
from storage.stores.store_urls import open_store

p = argparse.ArgumentParser()
p.add_argument("corpus", nargs="+", help="of several, a mixture that changes with the step")
p.add_argument("--shuffle", default=True)
p.add_argument("--die-in", type=int, default=0, help="the step in which this process is killed")
p.add_argument("--records", action="store_true")
p.add_argument("--boundaries", default="")
p.add_argument("--total", type=int, default=9)
p.add_argument("--length", type=int, default=32)
p.add_argument("--workers", type=int, default=0)
p.add_argument("--early", action="store_true", help="rank 0 opens before any exclusion list is there")
a = p.parse_args()


def numbers(record):
    """A record as 8 numbers, with noise that `run.steps` seeds by the position."""
    data = torch.frombuffer(bytearray(record["txt"][:8].ljust(8)), dtype=torch.uint8)
    return data.float() / 255 + 0.01 * torch.randn(8), data.float().mean() / 255


def killed_behind_a_snapshot(begun, within_s=120):
    """Of this world, which began with so many steps done: so that it has left some."""
    snapshots, until_s = Snapshots(open_store(os.environ["HARNESS_RUN"])), time.monotonic() + within_s
    while (kept := snapshots.latest()) is None or kept.step <= begun:
        assert time.monotonic() < until_s, f"waited {within_s} s for a snapshot"
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(257, 8), nn.Linear(8, 257)
        self.row = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.embed(x)) if x.dtype == torch.int64 else self.row(x).squeeze(1)


run = harness.attach(seed=7, snapshot_every_steps=3, reduce="exact")
torch.manual_seed(0)
model = Net()
run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
data = harness.data
sources = {
    Path(url).name: data.Records(url, decode=numbers)
    if a.records
    else data.Tokens(url, a.length, boundaries=a.boundaries)
    for url in a.corpus
}
first, *others = sources
dataset = sources[first]
if others:
    schedule = [(0, {first: 0.7, others[0]: 0.3}), (6, {first: 1, others[0]: 2})]
    dataset = data.Mixture(
        sources, schedule=schedule, ramp="linear", stairs=3, epochs={others[0]: 1}
    )
if a.early and run.rank == 0:
    dataset.exclude(0)
packed = data.packed if a.boundaries == "cu_seqlens" else None
begun = -1
for step in run.steps(
    dataset,
    total=a.total,
    global_batch=12,
    micro_batch=3,
    shuffle=a.shuffle,
    num_workers=a.workers,
    collate_fn=packed,
):
    begun = step.number - 1 if begun < 0 else begun
    for batch in step:
        if step.number == a.die_in:
            killed_behind_a_snapshot(begun)
        if a.records:
            loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        else:
            x, y = (batch["input_ids"], batch["labels"]) if packed else batch[:2]
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        step.backward(loss)
    step.update()
run.finish()
