"""A training script in low precision, whole or sharded (FSDP2): fused AdamW, a GradScaler under
autocast, bf16 parameters that are rounded by chance."""

import argparse
import hashlib
import json
import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import harness
from support.number_rows import Numbers
from support.worlds import newest, until

p = argparse.ArgumentParser()
p.add_argument("--total", type=int, default=10)
p.add_argument("--reduce", default="fast")
p.add_argument("--sharded", action="store_true")
p.add_argument("--fused", action="store_true")
p.add_argument("--fp16", action="store_true", help="autocast and GradScaler; some losses overflow")
p.add_argument("--chance", action="store_true", help="bf16 parameters, rounded by chance")
p.add_argument("--die", type=int, default=0, help="in this step, once there is a snapshot")
p.add_argument("--out", default="")
a = p.parse_args()

run = harness.attach(seed=1, snapshot_every_steps=3, reduce=a.reduce)
model = nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.Linear(33, 33), nn.Linear(33, 2))
if a.chance:
    model.to(torch.bfloat16)
if a.sharded:
    harness.fsdp2(model, run)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=a.fused)
if a.chance:
    optimizer = harness.StochasticRounding(optimizer, seed=7)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3) if a.fp16 else None
run.prepare(model, optimizer, scaler=scaler)
for step in run.steps(Numbers(), total=a.total, global_batch=24, micro_batch=4):
    for x, y in step:
        with torch.autocast("cpu", dtype=torch.float16, enabled=a.fp16):
            out = model(x.to(next(model.parameters()).dtype))
            loss = nn.functional.cross_entropy(out.float(), y)
        step.backward(loss * 1e9 if a.fp16 and step.number in (2, 8) else loss)
    step.update(clip_norm=0.5)
    if step.number == a.die:
        until(lambda: newest(run.run_url) is not None, "a snapshot")
        os.kill(os.getpid(), signal.SIGKILL)
state = model.state_dict().values()
whole = [(v.full_tensor() if isinstance(v, DTensor) else v).float() for v in state]
if a.out and run.rank == 0:
    weights = hashlib.sha256(b"".join(v.numpy().tobytes() for v in whole)).hexdigest()
    scale = scaler.state_dict() if scaler else {}
    Path(a.out).write_text(json.dumps({"weights": weights, "scale": scale}))
