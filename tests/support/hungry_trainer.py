"""A training that runs out of memory where its flags say, on the host: a micro-batch of more samples
than `--most` does not fit, or a worker allocates until the kernel kills it."""

import argparse
import hashlib
import json
from pathlib import Path

import torch
from torch import nn

import harness
from support.worlds import newest, until

SAMPLES, GLOBAL, MICRO, TOTAL = 400, 24, 4, 12

p = argparse.ArgumentParser()
p.add_argument("--micro", type=int, default=MICRO)
p.add_argument("--most", type=int, default=1 << 30, help="samples of a micro-batch that fit")
p.add_argument("--at", type=int, default=1, help="the step from which on no more fit")
p.add_argument("--on", type=int, default=0, help="the rank whose memory runs out")
p.add_argument("--how", default="host", help="host, gpu (as on one), or kernel")
p.add_argument("--loop", default="steps")
p.add_argument("--shuffle", default="true", help="true, or blocks")
p.add_argument("--total", type=int, default=TOTAL)
p.add_argument("--every", type=int, default=5)
p.add_argument("--out", default="")
p.add_argument(
    "--patient", action="store_true", help="the step after a snapshot begins when it is durable"
)


def forward(model, x):
    """The model's outputs, if the micro-batch fits."""
    if len(x) > a.most and step.number >= a.at and run.rank == a.on:
        if a.how == "kernel":
            eaten = []
            while True:
                eaten.append(torch.ones(1 << 22))
        if a.how == "gpu":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        torch.empty(1 << 60, dtype=torch.uint8)  # more than any machine has
    return model(x)


def wait_for_snapshot(number):
    until(lambda: getattr(newest(run.run_url), "step", 0) >= number, f"the snapshot of {number}")


if __name__ == "__main__":
    a = p.parse_args()
    run = harness.attach(seed=1, snapshot_every_steps=a.every, reduce="exact")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.prepare(model, optimizer)
    x = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
    sizes = {"global_batch": GLOBAL, "micro_batch": a.micro}
    if a.loop == "loader":
        next(iter(run.loader(data, shuffle=True, **sizes)))
    if a.loop == "safe_point":
        run.resume()
    shuffle = True if a.shuffle == "true" else a.shuffle
    for step in run.steps(data, total=a.total, shuffle=shuffle, **sizes):
        if a.patient and step.number > 1 and (step.number - 1) % a.every == 0:
            wait_for_snapshot(step.number - 1)
        for x, y in step:
            step.backward(nn.functional.cross_entropy(forward(model, x), y))
        step.update(clip_norm=1.0)
    if a.out and run.rank == 0:
        bits = b"".join(v.numpy().tobytes() for v in model.state_dict().values())
        Path(a.out).write_text(json.dumps(hashlib.sha256(bits).hexdigest()))
