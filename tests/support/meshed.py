"""A training script whose model lies on a mesh: sharded within copies, and by tensor parallelism
within replicas, as HARNESS_MESH says; or whole on one rank."""

import hashlib
import json
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import harness
from support.number_rows import Numbers
from support.trainer_parts import dawdle, flags

p = flags()
p.add_argument("--whole", action="store_true")
p.add_argument("--plain", action="store_true", help="the mesh is there, the model is not sharded")
p.add_argument("--apart", action="store_true", help="the second copy has other shards")
p.add_argument("--sleep-s", type=float, default=0.0, help="in each step")
a = p.parse_args()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 36), nn.Linear(36, 16)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(16, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = self.drop(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


run = harness.attach(seed=1, snapshot_every_steps=a.every, reduce=a.reduce)
model = Net()
if not (a.whole or a.plain):
    if "tp" in run.mesh.mesh_dim_names and run.mesh["tp"].size() > 1:
        for block in model.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, run.mesh["tp"], plan)
    harness.fsdp2(model, run)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
run.prepare(model, optimizer)
if a.apart and run.rank == run.world - 1:
    with torch.no_grad():
        model.blocks[0].up.weight.to_local().add_(0.5)
for step in run.steps(Numbers(), total=a.total, global_batch=24, micro_batch=4):
    time.sleep(a.sleep_s)
    for x, y in step:
        step.backward(nn.functional.cross_entropy(model(x), y))
    step.update(clip_norm=0.5)
    dawdle(step, a.go)
held = sum(
    v.to_local().numel() if isinstance(v, DTensor) else v.numel() for v in model.parameters()
)
state = model.state_dict().values()
whole = [v.full_tensor() if isinstance(v, DTensor) else v for v in state]
if a.out and run.rank == 0:
    weights = hashlib.sha256(b"".join(v.numpy().tobytes() for v in whole)).hexdigest()
    total = float(sum(v.double().abs().sum() for v in whole))
    numel = sum(v.numel() for v in whole)
    said = {"weights": weights, "sum": total, "held": held / numel, "replicas": run.replicas}
    Path(a.out).write_text(json.dumps(said))
