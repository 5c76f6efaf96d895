"""A training loop around Fabric as its documentation writes them: it knows nothing of the
harness."""

import argparse
import importlib
import os
import sys
import time
from pathlib import Path

import torch
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

p = argparse.ArgumentParser()
p.add_argument("--epochs", type=int, default=3)
p.add_argument("--samples", type=int, default=52)
p.add_argument("--by-hand", type=int, default=1, help="accumulate by the script's own counter")
p.add_argument("--elastic", type=int, default=0, help="accumulate, by the elastic Fabric")
p.add_argument("--dropout", type=float, default=0.0)
p.add_argument("--sleep-s", type=float, default=0.0)
p.add_argument("--split", action="store_true", help="a model on two ranks, by FSDP2")
p.add_argument("--second", action="store_true", help="a second optimizer")
p.add_argument("--folder", default=os.environ.get("EVENTS", "."))
a = p.parse_args()
Path(a.folder).mkdir(exist_ok=True)
if a.elastic:
    from harness.adapters.lightning import Fabric
else:
    from lightning.fabric import Fabric



def parallelize(model, mesh):
    for part in (model[0], model):
        fully_shard(part, mesh=mesh["data_parallel"])
    return model


fabric = Fabric(
    accelerator="cpu",
    devices=2 if a.split else 1,
    strategy=ModelParallelStrategy(parallelize, 2, 1) if a.split else "auto",
    **({"accumulate": a.elastic} if a.elastic else {}),
)
fabric.launch()
fabric.seed_everything(7)


def say(what):
    if fabric.is_global_zero:
        with Path(a.folder, "events").open("a") as file:
            file.write(f"{what}\n")


made = torch.Generator().manual_seed(1)
x = torch.randn(a.samples, 8, generator=made)
y = x.sum(1, keepdim=True) + 0.1 * torch.randn(a.samples, 1, generator=made)
train = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)
val = DataLoader(TensorDataset(x[:16], y[:16]), batch_size=8)
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(a.dropout), nn.Linear(32, 1))
if a.split:  # an optimizer of the whole parameters would train none
    model = fabric.setup(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
if a.split:
    optimizer = fabric.setup_optimizers(optimizer)
else:
    model, optimizer = fabric.setup(net, optimizer)
if a.second:
    fabric.setup_optimizers(torch.optim.SGD(net.parameters(), lr=1e-3))
train, val = fabric.setup_dataloaders(train, val)
for epoch in fabric.epochs(a.epochs) if a.elastic else range(a.epochs):
    model.train()
    for i, (rows, wanted) in enumerate(train):
        if "LOSE" in os.environ:
            lost = str(Path(a.folder, "lost"))
            importlib.import_module("dying").lose_one(f"{epoch},{i}", lost)
        time.sleep(a.sleep_s)
        loss = nn.functional.mse_loss(model(rows), wanted)
        fabric.backward(loss / a.by_hand)
        if (i + 1) % a.by_hand:
            continue
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if "DIE_AT" in os.environ:  # the tests' own
            importlib.import_module("dying").die_at(f"{epoch},{i}")
    model.eval()
    with torch.no_grad():
        losses = [nn.functional.mse_loss(model(rows), wanted) for rows, wanted in val]
    rate, mean = scheduler.get_last_lr()[0], fabric.all_reduce(torch.stack(losses).mean())
    say(f"validated_{epoch}_{float(mean):.5f}_{rate:.7f}")
weights = [p.detach() for p in model.state_dict().values()]
total = sum(float((w.full_tensor() if a.split else w).double().sum()) for w in weights)
if fabric.is_global_zero:
    Path(a.folder, "ended").write_text(repr(total))
sys.stdout.flush()
