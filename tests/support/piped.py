"""A training script whose model is a pipeline of stages, on whatever mesh HARNESS_MESH says; or
whole on one rank."""

import hashlib
import json
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import harness
from support.number_rows import Numbers
from support.trainer_parts import dawdle, flags

p = flags()
p.add_argument("--schedule", default="1f1b")
p.add_argument("--cuts", nargs="*")
p.add_argument("--meta", action="store_true", help="built on the meta device")
p.add_argument("--norm", default="LayerNorm", choices=["LayerNorm", "BatchNorm1d", "SyncBatchNorm"])
p.add_argument("--drop", type=float, default=0.1)
p.add_argument("--tokens", action="store_true", help="the loss says how much it stands for")
p.add_argument("--scaler", action="store_true")
p.add_argument("--groups", action="store_true", help="two groups of parameters")
p.add_argument("--ema", action="store_true")
p.add_argument("--fault", default="", choices=["", "tied", "loose", "shape", "order", "whole"])
a = p.parse_args()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = getattr(nn, a.norm)(16)
        self.up, self.down, self.drop = nn.Linear(16, 36), nn.Linear(36, 16), nn.Dropout(a.drop)

    def forward(self, x):
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, 2)
        if a.fault == "loose":
            self.shift = nn.Parameter(torch.zeros(16))
        if a.fault == "tied":
            self.blocks[3].up.weight = self.blocks[0].up.weight

    def forward(self, x):
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


def mean(output, targets):
    loss = nn.functional.cross_entropy(output, targets)
    return (loss, float(1 + targets.sum())) if a.tokens else loss


def uneven(rows):
    x, y = torch.utils.data.default_collate(rows)
    count = len(y) - int(y.sum()) % 2
    return x[:count], y[:count]


run = harness.attach(seed=1, snapshot_every_steps=a.every, reduce=a.reduce)
with torch.device("meta" if a.meta else "cpu"):
    model = Net()
pipe = model
if a.fault != "whole":
    pipe = harness.pipeline(model, run, mean, schedule=a.schedule, cuts=a.cuts)
    sizes = dict(zip(run.mesh.mesh_dim_names, run.mesh.shape, strict=True)) if run.world > 1 else {}
    if sizes.get("tp", 1) > 1:
        for part in pipe.parts:
            for block in part.blocks:
                plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(block, run.mesh["tp"], plan)
    if sizes.get("tp", 1) * sizes.get("dp_shard", 1) > 1:
        harness.fsdp2(pipe, run)
parameters = list(pipe.parameters())
if a.fault == "order":
    parameters.reverse()
if a.groups:
    decayed = [p for p in parameters if p.ndim > 1]
    rest = [p for p in parameters if p.ndim == 1]
    parameters = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(parameters, lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=4) if a.scaler else None
ema = torch.optim.swa_utils.AveragedModel(pipe) if a.ema else None
run.prepare(pipe, optimizer, scaler=scaler, state={"ema": ema} if ema else None)
collate = uneven if a.fault == "shape" else None
for step in run.steps(
    Numbers(), total=a.total, global_batch=24, micro_batch=4, collate_fn=collate
):
    step.pipeline()
    step.update(clip_norm=0.5)
    if ema:
        ema.update_parameters(pipe)
    dawdle(step, a.go)
state = pipe.state_dict()
whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}
if a.out:
    hashes = {k: hashlib.sha256(v.numpy().tobytes()).hexdigest() for k, v in whole.items()}
    total = {k: float(v.double().abs().sum()) for k, v in whole.items()}
    held = sum(
        v.to_local().numel() if isinstance(v, DTensor) else v.numel() for v in pipe.parameters()
    )
    said = {"hashes": hashes, "sums": total, "held": held, "replicas": run.replicas}
    Path(f"{a.out}.{run.rank}").write_text(json.dumps(said))
