"""Loops over `run.loader` for the tests: epochs, custom samplers, schedulers by epoch, early
stopping."""

import argparse
import hashlib
import json
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import harness

p = argparse.ArgumentParser()
p.add_argument("--samples", type=int, default=46)  # two full steps of 20, and one of 6
p.add_argument("--reduce", default="fast")
p.add_argument("--order", default="shuffle")
p.add_argument("--drop-last", action="store_true")
p.add_argument("--workers", type=int, default=0)
p.add_argument("--epochs", type=int, default=3)
p.add_argument("--plain", action="store_true", help="the epochs are a range, as in a tutorial")
p.add_argument("--leave-at", type=int, default=0)
p.add_argument("--stop-at", type=int, default=0)
p.add_argument("--stop-behind", type=int, default=-1, help="this epoch")
p.add_argument("--most", type=int, default=0, help="micro-batches in an epoch")
p.add_argument("--spike", action="store_true", help="a gradient does not fit")
p.add_argument("--out", required=True)
a = p.parse_args()


class Points(torch.utils.data.Dataset):
    fingerprint = "points"

    def __len__(self):
        return a.samples

    def __getitem__(self, i):
        x = torch.randn(8, generator=torch.Generator().manual_seed(i))
        return x + 0.1 * torch.randn(8), (x.sum() > 0).long(), i


class ByRank(torch.utils.data.Sampler):
    """Shares out by itself, which it must not."""

    def __len__(self):
        return a.samples

    def __iter__(self):
        return iter(range(run.rank, a.samples + run.rank))


run = harness.attach(seed=3, reduce=a.reduce, snapshot_every_steps=2)
torch.manual_seed(0)
dataset = Points()
weights = [1.0 + i % 3 for i in range(a.samples)]
sampler = {
    "weighted": lambda: torch.utils.data.WeightedRandomSampler(weights, a.samples),
    "random": lambda: torch.utils.data.RandomSampler(dataset, generator=torch.Generator()),
    "by-rank": ByRank,
    "distributed": lambda: torch.utils.data.DistributedSampler(dataset, 1, 0),
}.get(a.order, lambda: None)()
loader = run.loader(
    dataset,
    global_batch=20,
    micro_batch=5,
    sampler=sampler,
    shuffle=a.order == "shuffle",
    drop_last=a.drop_last,
    num_workers=a.workers,
)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
assert loader.accumulation and len(loader) and loader.steps  # schedulers ask before `prepare`
by_epoch = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


class Told:
    """What the script has seen at the ends of epochs: saved with the rest."""

    def __init__(self):
        self.lines = []

    def state_dict(self):
        return {"lines": list(self.lines)}

    def load_state_dict(self, state):
        self.lines = list(state["lines"])


told = Told()
run.prepare(model, optimizer, state={"by_epoch": by_epoch, "told": told})
seen = []
for epoch in range(a.epochs) if a.plain else loader.epochs(a.epochs):
    if a.plain:
        if epoch < loader.epoch:
            continue
        loader.set_epoch(epoch)
    for i, (x, y, which) in enumerate(loader):
        loss = cross_entropy(model(x), y)
        if a.spike and loader.step.number == 4:
            loss = loss * 1e8
        loader.step.backward(loss)
        seen.append([loader.step.number, loader.epoch, which.tolist()])
        if loader.ends_step:
            loader.step.update(clip_norm=1.0)
            assert loader.step.epoch == epoch
            number = loader.step.number
            if number == a.leave_at and run.epoch == 1:
                os._exit(9)
            if number == a.stop_at and run.rank == run.world - 1:
                run.stop("the loss is small enough")
        if i + 1 == a.most:
            break
    told.lines.append([epoch, run.step, torch.rand(1).item()])
    by_epoch.step()
    if epoch == a.stop_behind and run.rank == 0:
        run.stop("it has converged")
out = {
    "weights": hashlib.sha256(
        b"".join(v.contiguous().numpy().tobytes() for v in model.state_dict().values())
    ).hexdigest(),
    "lines": told.lines,
    "seen": seen,
    "len": len(loader),
    "accumulation": loader.accumulation,
    "step": run.step,
}
Path(f"{a.out}-{run.rank}").write_text(json.dumps(out))
