"""A training script that ends in one of many ways, named by its first argument."""

import sys

import torch

import harness

how = sys.argv[1]
run = harness.attach(snapshot_every_steps=100)
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
run.prepare(model, torch.optim.AdamW(model.parameters()))
data = torch.utils.data.TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(1)))


def loop(total, leave_at=0):
    for step in run.steps(data, total=total, global_batch=8, micro_batch=4):
        for (x,) in step:
            step.backward(model(x).square().mean())
        step.update()
        if step.number == leave_at:
            if how == "raise":
                raise ValueError("planned")
            return


if how in ("own", "apart"):
    run.resume()
    for k in range(1, 4):
        run.safe_point(k + (run.rank if how == "apart" else 0))
elif how == "epochs":
    for total in (2, 4, 6):
        loop(total)
        run.log(half=run.sum(1.0))
elif how == "pauses":
    for at in (2, 4, 0):
        loop(6, at)
elif how == "finish":
    loop(6, 3)
    run.finish()
    run.finish()
else:
    loop(6, 0 if how == "whole" else 3)
