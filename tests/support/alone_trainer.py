"""A trainer that believes that it is alone, moved by `own_loop` as adapters move theirs."""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn

from harness.adapters import framework_claim
from harness.loops.own_loop import own_loop, script_world
from support.trainer_parts import Numbers

p = argparse.ArgumentParser()
p.add_argument("--epochs", type=int, default=4)
p.add_argument("--sleep-s", type=float, default=0.0)
p.add_argument("--accumulation", type=int, default=6)
p.add_argument("--destroy", action="store_true", help="the script ends its process group")
a = p.parse_args()
SAMPLES, B = 100, 4  # 25 micro-batches: steps of 6, 6, 6, 6 and 1

run = framework_claim.claim("accelerate")
assert run is not None and framework_claim.claim("transformers") is None
assert not dist.is_initialized() and "RANK" not in os.environ
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = Numbers(SAMPLES)
M = a.accumulation * script_world(run)
run.prepare(model, optimizer)
loop = own_loop(
    run, micro_batches=M, micro_batch=B, data="numbers", seed=7, adapter="accelerate"
)
if a.destroy:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    assert dist.get_world_size() == 1
micro_per_epoch = SAMPLES // B
steps_per_epoch = -(-micro_per_epoch // M)
print(f"begins at {run.step}", flush=True)
while run.step < a.epochs * steps_per_epoch:
    epoch, at = divmod(run.step, steps_per_epoch)
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch)).tolist()
    count = min(M, micro_per_epoch - at * M)
    step = loop.begin(micro_batches=count)
    for m in step.mine:
        first = (at * M + m) * B
        rows = order[first : first + B]
        step.micro(m)
        step.read(m, keys=rows)
        x, y = zip(*(data[i] for i in rows), strict=True)
        loss = nn.functional.cross_entropy(model(torch.stack(x)), torch.stack(y))
        (loss / count).backward()
        step.done(m, loss, len(rows))
    step.sync()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    step.end(lr=1e-2)
    loop.boundary()
    time.sleep(a.sleep_s)
loop.finished()
if a.destroy:
    dist.destroy_process_group()
print("after the training", torch.rand(1).item(), flush=True)
