"""A loop whose products are float8, or whose optimizer keeps its state in few bits."""

import argparse
import hashlib

import torch
from dying import die_at
from torch import nn

import harness

p = argparse.ArgumentParser()
p.add_argument("--recipe", default="")
p.add_argument("--bits", default="", help="of torchao.optim: 8bit, 4bit, Fp8")
p.add_argument("--sharded", action="store_true")
p.add_argument("--bf16", action="store_true")
p.add_argument("--total", type=int, default=8)
a = p.parse_args()


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 200

    def __getitem__(self, i):
        x = torch.randn(64, generator=torch.Generator().manual_seed(i))
        return x, (x.sum() > 0).long()


run = harness.attach(seed=1, snapshot_every_steps=3)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Linear(64, 2))
if a.bf16:
    model.to(torch.bfloat16)
if a.recipe:
    harness.float8(model, a.recipe, emulate=True)
if a.sharded:
    harness.fsdp2(model, run)
made = torch.optim.AdamW
if a.bits:
    import torchao.optim

    made = getattr(torchao.optim, f"AdamW{a.bits}")
optimizer = made(model.parameters(), lr=1e-3)
run.prepare(model, optimizer)
for step in run.steps(Rows(), total=a.total, global_batch=64, micro_batch=16):
    for x, y in step:
        found = model(x.to(model[0].weight.dtype)).float()
        step.backward(nn.functional.cross_entropy(found, y))
    step.update()
    die_at(str(step.number))
state = list(model.state_dict().values())
whole = [(v.full_tensor() if hasattr(v, "full_tensor") else v).float() for v in state]
run.print("weights", hashlib.sha256(b"".join(v.numpy().tobytes() for v in whole)).hexdigest())
kinds = {
    type(getattr(v, "_local_tensor", v)).__name__
    for own in optimizer.state.values()
    for v in own.values()
}
run.print("kinds", *sorted(kinds))
