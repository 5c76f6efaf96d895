"""A training script of Accelerate with averages of the weights that it registers nowhere, and with
pictures of its weights after each epoch: nothing in it knows of the harness."""

import argparse
import importlib
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

p = argparse.ArgumentParser()
p.add_argument("--out", default=".")
p.add_argument("--epochs", type=int, default=3)
p.add_argument("--statistics", action="store_true", help="reads the data before it prepares")
p.add_argument("--twice", action="store_true", help="trains a second time, on other data")
a = p.parse_args()


class Average:
    """An average as a library writes it: it has a state_dict."""

    def __init__(self, parameters, decay=0.9):
        self.decay, self.steps = decay, 0
        self.shadow = [p.clone().detach() for p in parameters]

    @torch.no_grad()
    def step(self, parameters):
        self.steps += 1
        for mean, p in zip(self.shadow, parameters, strict=True):
            mean.sub_((1 - self.decay) * (mean - p))

    def state_dict(self):
        return {"decay": self.decay, "steps": self.steps, "shadow": self.shadow}

    def load_state_dict(self, state):
        self.decay, self.steps, self.shadow = state["decay"], state["steps"], state["shadow"]


class ByName:
    """An average as scripts write it for themselves: through `.data`, begun with the first step."""

    def __init__(self):
        self.means = {}

    def update(self, model):
        for name, p in model.named_parameters():
            if name not in self.means:
                self.means[name] = p.data.clone()
            self.means[name].data.mul_(0.5).add_(p.data, alpha=0.5)


def main():
    accelerator = Accelerator(log_with="tensorboard", project_dir=a.out)
    accelerator.init_trackers("pictures")
    set_seed(5)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    frozen = nn.Linear(8, 8).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    train = DataLoader(data, batch_size=4, shuffle=True)
    if a.statistics:
        train = accelerator.prepare(train)
        total = sum(batch.sum() for batch, _ in train)
        print(
            "statistics", len(train), float(accelerator.reduce(total)) == float(total), flush=True
        )
    model, optimizer, train = accelerator.prepare(model, optimizer, train)
    average, by_name, averaged = Average(model.parameters()), ByName(), AveragedModel(model)
    trace = torch.zeros(100)
    done = 0
    for epoch in range(a.epochs):
        for x, y in train:
            loss = nn.functional.mse_loss(model(frozen(x)), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            average.step(model.parameters())
            by_name.update(model)
            averaged.update_parameters(model)
            trace = trace * 0.9 + next(model.parameters()).detach().reshape(-1)[:100]
            done += 1
            accelerator.log({"done": done}, step=done)
            if os.environ.get("DIE_AT") and accelerator.is_main_process:
                died = os.path.join(a.out, "died")
                importlib.import_module("dying").die_at(str(done), died)
        if accelerator.is_main_process:
            tracker = accelerator.get_tracker("tensorboard", unwrap=True)
            tracker.add_histogram("weights", next(model.parameters()).detach(), epoch)
    if a.twice:
        for x, y in accelerator.prepare(DataLoader(data, batch_size=4)):
            accelerator.backward(nn.functional.mse_loss(model(x), y))
    if accelerator.is_main_process:
        means = {
            "average": average.shadow,
            "steps": average.steps,
            "by_name": by_name.means,
            "averaged": dict(averaged.state_dict()),
            "trace": trace,
        }
        torch.save(means, os.path.join(a.out, "means.pt"))
        model.load_state_dict(averaged.module.state_dict())  # as diffusers' examples end
    accelerator.end_training()


main()
