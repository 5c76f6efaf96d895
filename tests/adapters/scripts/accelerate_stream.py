"""Two models with an optimizer each, trained together on a stream that has no length."""

import argparse
import importlib
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

p = argparse.ArgumentParser()
p.add_argument("--out", default=".")
a = p.parse_args()


class Stream(IterableDataset):
    def __iter__(self):
        g = torch.Generator().manual_seed(1)
        for _ in range(72):
            x = torch.randn(16, generator=g)
            yield x, (x.sum() > 0).long()


def main():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(1)
    one, two = nn.Linear(16, 32), nn.Linear(32, 2)
    first = torch.optim.AdamW(one.parameters(), lr=1e-2)
    second = torch.optim.SGD(two.parameters(), lr=1e-1)
    loader = DataLoader(Stream(), batch_size=4)
    one, two, first, second, loader = accelerator.prepare(one, two, first, second, loader)
    completed = 0
    for _ in range(2):
        for i, (x, y) in enumerate(loader):
            with accelerator.accumulate(one, two):
                loss = nn.functional.cross_entropy(two(one(x).relu()), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    both = [*one.parameters(), *two.parameters()]
                    accelerator.clip_grad_norm_(both, 1.0)
                for optimizer in (first, second):
                    optimizer.step()
                    optimizer.zero_grad()
            mean = accelerator.gather(loss.detach().reshape(1)).mean()
            assert mean.isfinite()
            if accelerator.sync_gradients:
                completed += 1
                if accelerator.is_main_process:
                    with open(os.path.join(a.out, "events"), "a") as f:
                        f.write(f"step {completed} {i}\n")
                if os.environ.get("DIE_AT"):
                    importlib.import_module("dying").die_at(str(completed))
    if accelerator.is_main_process:
        models = [accelerator.unwrap_model(model).state_dict() for model in (one, two)]
        weights = {f"{i} {k}": v for i, model in enumerate(models) for k, v in model.items()}
        torch.save(weights, os.path.join(a.out, "weights.pt"))
    accelerator.end_training()


main()
