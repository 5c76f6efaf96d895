"""A training script with the faults that people make: for the tests of `harness check`, and for
docs/CHECK.md."""

import copy

import torch
from torch import nn

import harness


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        x = torch.randn(8, generator=torch.Generator().manual_seed(i))
        return x, x.sum().view(1)


def main():
    run = harness.attach(seed=0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    average = copy.deepcopy(model)
    coin = torch.Generator().manual_seed(5)
    seen, heads, losses = 0, 0, []
    run.prepare(model, optimizer)
    for step in run.steps(Numbers(), total=9, global_batch=12, micro_batch=2):
        share = len(run.plan.micros(run.rank))
        for x, y in step:
            loss = nn.functional.mse_loss(model(x), y)
            step.backward(loss / share)
            seen += len(x)
        step.update()
        losses.append(step.loss)
        heads += int(torch.rand(1, generator=coin) < 0.5)
        with torch.no_grad():
            for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(p, 0.1)
        torch.save(model.state_dict(), "newest.pt")


main()
