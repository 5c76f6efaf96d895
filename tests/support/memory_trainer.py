"""A training script that begins on the meta device, and saves memory in ways that its flags name,
on any mesh. `--out`: a hash of what it began with, and whether names of wrappers are stored."""

import argparse
import hashlib
import json
from pathlib import Path

import torch
import torch._dynamo
from torch.distributed.tensor import DTensor

import harness
from support.memory_ways import BF16, Net, both, split
from support.number_rows import Numbers

p = argparse.ArgumentParser()
p.add_argument("--total", type=int, default=6)
p.add_argument("--reduce", default="fast")
p.add_argument("--wrap", action="store_true", help="checkpointed and compiled")
p.add_argument("--whole", action="store_true", help="not sharded")
p.add_argument("--bf16", action="store_true")
p.add_argument("--unsplit", action="store_true", help="tp is in the mesh only")
p.add_argument("--part", type=int, help="reshard_after_forward")
p.add_argument("--offload", action="store_true")
p.add_argument("--lazy", action="store_true", help="init leaves some values out")
p.add_argument("--out", default="")
a = p.parse_args()


def init(name, tensor):
    if a.lazy and name == "head.weight":
        return
    tensor.normal_(std=0.2) if tensor.ndim > 1 else tensor.fill_(0.5)


run = harness.attach(seed=1, snapshot_every_steps=2, reduce=a.reduce)
with torch.device("cpu" if a.whole else "meta"):
    torch.manual_seed(4)
    model = Net(chunks=2)
if a.whole:
    for name, tensor in model.named_parameters():
        torch.manual_seed(len(name) + tensor.numel())
        with torch.no_grad():
            init(name, tensor)
elif "tp" in run.mesh.mesh_dim_names and run.mesh["tp"].size() > 1 and not a.unsplit:
    split(model, run.mesh["tp"])
if a.wrap:
    both(model)
if not a.whole:
    policy = BF16 if a.bf16 else None
    how = {"mp_policy": policy, "reshard_after_forward": a.part, "offload": a.offload}
    harness.fsdp2(model, run, init=init, **how)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
run.prepare(model, optimizer)


def weights():
    return [v.full_tensor() if isinstance(v, DTensor) else v for v in model.parameters()]


began = hashlib.sha256(b"".join(v.detach().numpy().tobytes() for v in weights())).hexdigest()
for step in run.steps(Numbers(), total=a.total, global_batch=8, micro_batch=2):
    for x, y in step:
        tokens = (x[:, :5].abs() * 10).long() % 30
        loss = model(tokens, (tokens + y[:, None]) % 30) / tokens.numel()
        step.backward(loss)
    step.update(clip_norm=1.0)
made = hashlib.sha256(b"".join(v.detach().numpy().tobytes() for v in weights())).hexdigest()
dynamic = torch._dynamo.config.automatic_dynamic_shapes
if a.out and run.rank == 0:
    said = {"began": began, "made": made, "dynamic": dynamic}
    Path(a.out).write_text(json.dumps(said))
