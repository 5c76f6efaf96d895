"""A script of Accelerate with two training loops: a model is trained, and then trained on other
data together with a new head, each time until an evaluation says that it is enough."""

import argparse
import importlib
import json
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

p = argparse.ArgumentParser()
p.add_argument("--out", default=".")
p.add_argument("--one-set", action="store_true", help="everything is prepared at once")
a = p.parse_args()


def data(seed, n):
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sum(1, keepdim=True))


def at(accelerator, where):
    if os.environ.get("DIE_AT") and accelerator.is_main_process:
        importlib.import_module("dying").die_at(where, os.path.join(a.out, f"died {where}"))


def evaluated(accelerator, model, loader):
    model.eval()
    losses = []
    for x, y in loader:
        with torch.no_grad():
            loss = nn.functional.mse_loss(model(x), y, reduction="none")
        losses.append(accelerator.gather_for_metrics(loss))
    model.train()
    return float(torch.cat(losses).double().mean())


def train(accelerator, name, model, optimizer, loader, held, epochs, enough=0.0):
    scores = []
    for epoch in range(epochs):
        for step, (x, y) in enumerate(loader):
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            at(accelerator, f"{name} {epoch} {step}")
        scores.append(evaluated(accelerator, model, held))
        if accelerator.is_main_process:
            with open(os.path.join(a.out, "events"), "a") as f:
                f.write(f"{name} {epoch}\n")
        if scores[-1] < enough:
            break
    return scores


def main():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(5)
    body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    first = torch.optim.AdamW(body.parameters(), lr=1e-2)
    loaders = DataLoader(data(1, 80), batch_size=4, shuffle=True), DataLoader(data(2, 10), 4)
    body, first, loader, held = accelerator.prepare(body, first, *loaders)
    other = DataLoader(data(3, 48), batch_size=3, shuffle=True)
    if a.one_set:
        other = accelerator.prepare(other)
    scores = train(accelerator, "body", body, first, loader, held, 4, 8.5)
    at(accelerator, "between")
    head = nn.Linear(1, 1)  # drawn as the first training has left the generators
    start = head.weight.item()
    whole = nn.Sequential(body, head)
    second = torch.optim.SGD(whole.parameters(), lr=1e-2)
    if not a.one_set:
        whole, second, other = accelerator.prepare(whole, second, other)
    more = train(accelerator, "whole", whole, second, other, held, 9, 1.26 * scores[-1])
    if accelerator.is_main_process:
        with open(os.path.join(a.out, "end"), "w") as f:
            json.dump([scores, start, more], f)
        torch.save(accelerator.unwrap_model(whole).state_dict(), os.path.join(a.out, "weights.pt"))
    accelerator.end_training()


main()
