"""A small training script for the tests, with a flag for everything that can go wrong."""

import argparse
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import harness


class Numbers(torch.utils.data.Dataset):
    """Sample i is a function of i (and of the sample's own randomness with --augment)."""

    fingerprint = "numbers"

    def __init__(self, n, augment=False, unseeded=False):
        self.n, self.augment, self.unseeded = n, augment, unseeded
        self.own = torch.Generator()

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        x = torch.randn(16, generator=torch.Generator().manual_seed(i))
        if self.unseeded:
            x = x + 0.1 * torch.randn(16, generator=self.own)
        if self.augment:
            x = x + 0.1 * torch.randn(16)
        return x, (x.sum() > 0).long()


class Endless(torch.utils.data.IterableDataset):
    """A stream with a state: 0, 1, 2, ..."""

    def __init__(self):
        self.next = 0

    def __iter__(self):
        while True:
            i, self.next = self.next, self.next + 1
            yield Numbers(1 << 40)[i]

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"] + a.forgetful


def wait_for_snapshot(step):
    from support.worlds import newest, until

    url = os.environ["HARNESS_RUN"]
    until(lambda: getattr(newest(url), "step", 0) >= step, f"the snapshot of step {step}")


def pause(number):
    """Between this step and the next."""
    if not a.go:
        time.sleep(a.sleep_s)
        return
    go, end_s = Path(a.go), time.monotonic() + (0.3 if number > a.total // 2 else a.sleep_s)
    while not go.exists() and (left_s := end_s - time.monotonic()) > 0:
        time.sleep(min(0.05, left_s))


class Ema:
    """Averaged weights: any object with state_dict can be registered."""

    def __init__(self, model):
        self.shadow = {k: v.detach().clone() for k, v in model.state_dict().items()}

    def update(self, model):
        for k, v in model.state_dict().items():
            self.shadow[k].lerp_(v, 0.1)

    def state_dict(self):
        return {"shadow": self.shadow}

    def load_state_dict(self, state):
        self.shadow = state["shadow"]


p = argparse.ArgumentParser()
p.add_argument("--total", type=int, default=30)
p.add_argument("--samples", type=int, default=1000)
p.add_argument("--global-batch", type=int, default=48)
p.add_argument("--micro-batch", type=int, default=4)
p.add_argument("--seed", type=int, default=1)
p.add_argument("--every", type=int, default=10)
p.add_argument("--hidden", type=int, default=64)
p.add_argument("--parallel", default="ddp")
p.add_argument("--reduce", default="fast")
p.add_argument(
    "--spike-at", type=int, default=0, help="the loss of this step is 10^8 times as large"
)
p.add_argument("--workers", type=int, default=0)
p.add_argument("--sleep-s", type=float, default=0.0, help="after each step")
p.add_argument(
    "--go",
    default="",
    help="a file: until it is there the steps of the second half take 0.3 s each, and then none "
    "sleeps; so a run lasts until the test has seen what it waits for, and no longer",
)
p.add_argument(
    "--patient", action="store_true", help="the step after a snapshot begins when it is durable"
)
p.add_argument("--iterable", action="store_true")
p.add_argument(
    "--forgetful", action="store_true", help="the stream loses a sample when it is loaded"
)
p.add_argument("--augment", action="store_true")
p.add_argument(
    "--unseeded", action="store_true", help="the dataset draws from a generator of its own"
)
p.add_argument("--norm", action="store_true", help="with BatchNorm")
p.add_argument("--tokens", action="store_true")
p.add_argument("--ema", action="store_true")
p.add_argument("--fp16", action="store_true")
p.add_argument("--nan-at", type=int, default=0)
p.add_argument("--fail-at", type=int, default=0)
p.add_argument("--signal-at", type=int, default=0, help="rank 0 sends itself SIGTERM in this step")
p.add_argument("--skip-update", action="store_true")
p.add_argument("--out", default="", help="rank 0 writes what it ended with here")
a = p.parse_args()

run = harness.attach(seed=a.seed, snapshot_every_steps=a.every, reduce=a.reduce)
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(16, a.hidden),
    nn.BatchNorm1d(a.hidden) if a.norm else nn.ReLU(),
    nn.Dropout(0.1),
    nn.Linear(a.hidden, 2),
)
if a.parallel == "fsdp2":
    model = harness.fsdp2(model, run, [model[0], model[3]])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k / 50))
ema = Ema(model) if a.ema else None
scaler = torch.amp.GradScaler(run.device.type) if a.fp16 else None
run.prepare(model, optimizer, scheduler, scaler, state={"ema": ema} if ema else {})
dataset = Endless() if a.iterable else Numbers(a.samples, a.augment, a.unseeded)
for step in run.steps(
    dataset,
    total=a.total,
    global_batch=a.global_batch,
    micro_batch=a.micro_batch,
    num_workers=a.workers,
):
    if a.patient and step.number % a.every == 1 and step.number > 1:
        wait_for_snapshot(step.number - 1)
    for x, y in step:
        with torch.autocast(run.device.type, dtype=torch.float16, enabled=a.fp16):
            logits = model(x)
        if a.tokens:  # rows count by how many positive inputs they have
            w = (x > 0).sum(1).float()
            step.backward(
                (nn.functional.cross_entropy(logits.float(), y, reduction="none") * w).sum()
                / w.sum(),
                weight=float(w.sum()),
            )
        else:
            loss = nn.functional.cross_entropy(logits.float(), y)
            loss = loss * 1e8 if step.number == a.spike_at else loss
            step.backward(loss * float("nan") if step.number == a.nan_at else loss)
    if step.number == a.fail_at:
        raise ValueError(f"planned failure at step {step.number}")
    if step.number == a.signal_at and run.rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    if not a.skip_update:
        step.update(clip_norm=1.0)
    if ema:
        ema.update(model)
    if step.number % 10 == 0:
        run.log(half=step.number / 2)
    pause(step.number)
if a.out:
    whole = [
        v.full_tensor() if hasattr(v, "full_tensor") else v for v in model.state_dict().values()
    ]
    weights = hashlib.sha256(
        b"".join(v.cpu().contiguous().numpy().tobytes() for v in whole)
    ).hexdigest()
    final = {
        "step": run.step,
        "ema": float(sum(v.double().sum() for v in ema.shadow.values())) if ema else None,
        "weights": weights,
    }
    if run.rank == 0:
        Path(a.out).write_text(json.dumps(final))
sys.exit(0)
