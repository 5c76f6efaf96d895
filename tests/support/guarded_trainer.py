"""A training whose samples and steps go wrong as its flags say, under guards: `run.steps` or
`run.loader`, replicated or sharded."""

import argparse
import hashlib
import json
from pathlib import Path

import torch
from torch import nn

import harness

SAMPLES, GLOBAL, MICRO, TOTAL = 400, 24, 4, 60


class Rows(torch.utils.data.Dataset):
    """Sample i is a function of i; the poisoned ones are far too large, with the wrong label."""

    fingerprint = "rows"

    def __init__(self, poisoned):
        self.poisoned = poisoned

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        x = torch.randn(16, generator=torch.Generator().manual_seed(i))
        y = (x.sum() > 0).long()
        return (1000.0 * x, 1 - y, i) if i in self.poisoned else (x, y, i)


def numbers(text):
    return {int(word) for word in text.split(",") if word}


p = argparse.ArgumentParser()
p.add_argument("--loop", default="steps")
p.add_argument("--parallel", default="ddp")
p.add_argument("--reduce", default="exact")
p.add_argument("--guards", default=None)
p.add_argument("--seed", type=int, default=1)
p.add_argument("--total", type=int, default=TOTAL)
p.add_argument("--every", type=int, default=10)
p.add_argument("--clip", type=float, default=None)
p.add_argument("--poisoned", type=numbers, default=set(), help="samples that are far too large")
p.add_argument("--nan", type=numbers, default=set(), help="samples whose loss is NaN")
p.add_argument("--inf", type=numbers, default=set(), help="samples with an infinite gradient")
p.add_argument("--spike", type=numbers, default=set(), help="steps whose loss is 50 times as large")
p.add_argument("--leave-out", type=numbers, default=set(), help="steps without an update")
p.add_argument("--rewarm", type=lambda text: [*map(int, text.split(","))], default=[0, 0],
               help="LAST,STEPS: the learning rate rises for so many steps after the last")
p.add_argument("--nan-from", type=int, default=1 << 30, help="every loss is NaN from this step on")
p.add_argument("--norm", action="store_true", help="with BatchNorm")
p.add_argument("--own-step", action="store_true", help="the script steps its optimizer itself")
p.add_argument("--out", default="")


def infinite(out):
    """The gradient of what these outputs are made of has an infinity in it; their loss is finite."""
    out.register_hook(lambda grad: grad.index_fill(1, torch.tensor([0]), float("inf")))


def loss_of(model, batch, number):
    x, y, at = batch
    out = model(x)
    if a.inf & set(at.tolist()):
        infinite(out)
    loss = nn.functional.cross_entropy(out, y)
    if a.nan & set(at.tolist()) or number >= a.nan_from:
        loss = loss * float("nan")
    return loss * 50.0 if number in a.spike else loss


def update(step):
    if step.number in a.leave_out:
        step.sync()
        optimizer.zero_grad()
        scheduler.step()
        step.done()
        return
    last, steps = a.rewarm
    if last < step.number <= last + steps:
        step.sync()
        group = optimizer.param_groups[0]
        kept, group["lr"] = group["lr"], group["lr"] * ((step.number - last) / (steps + 1))
        optimizer.step()
        group["lr"] = kept
        scheduler.step()
        step.done()
        return
    if not a.own_step:
        step.update(clip_norm=a.clip)
        return
    step.sync(a.clip)
    optimizer.step()  # of gradients that are None: nothing
    scheduler.step()
    step.done()


if __name__ == "__main__":
    a = p.parse_args()
    run = harness.attach(
        seed=a.seed, snapshot_every_steps=a.every, reduce=a.reduce, guards=a.guards
    )
    torch.manual_seed(a.seed - 1)
    middle = nn.BatchNorm1d(32) if a.norm else nn.ReLU()
    model = nn.Sequential(nn.Linear(16, 32), middle, nn.Linear(32, 2))
    if a.parallel == "fsdp2":
        model = harness.fsdp2(model, run, [model[0], model[2]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k / 50))
    run.prepare(model, optimizer, scheduler)
    sizes = {"global_batch": GLOBAL, "micro_batch": MICRO}
    if a.loop == "steps":
        for step in run.steps(Rows(a.poisoned), total=a.total, **sizes):
            for batch in step:
                step.backward(loss_of(model, batch, step.number))
            update(step)
    else:
        loader = run.loader(Rows(a.poisoned), shuffle=True, **sizes)
        for _ in loader.epochs(-(-a.total // loader.steps)):
            for batch in loader:
                loader.step.backward(loss_of(model, batch, loader.step.number))
                if loader.ends_step:
                    update(loader.step)
    if a.out:
        whole = [
            v.full_tensor() if hasattr(v, "full_tensor") else v for v in model.state_dict().values()
        ]
        bits = b"".join(v.cpu().contiguous().numpy().tobytes() for v in whole)
        found = {
            "weights": hashlib.sha256(bits).hexdigest(),
            "finite": all(bool(torch.isfinite(v).all()) for v in whole),
            "schedule": scheduler.last_epoch,
        }
        if run.rank == 0:
            Path(a.out).write_text(json.dumps(found))
