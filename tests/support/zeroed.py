"""A training script whose optimizer is sharded over the ranks (ZeRO-1), or whole on each."""

import hashlib
import json
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import harness
from support.number_rows import Numbers
from support.trainer_parts import dawdle, flags

p = flags()
p.add_argument("--whole", action="store_true", help="the optimizer is not sharded")
p.add_argument("--scaler", action="store_true")
p.add_argument("--optimizer", default="AdamW")
p.add_argument("--fused", action="store_true")
p.add_argument("--bad", default="", help="what cannot be")
a = p.parse_args()


class Net(nn.Module):
    """Rows that no world divides, a number, what is frozen, and a buffer that forwards change."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 67), nn.BatchNorm1d(67), nn.Linear(67, 2)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return self.down(self.scale * self.norm(torch.tanh(self.up(self.drop(self.frozen(x))))))


def bytes_of(optimizer):
    tensors = [t for state in optimizer.state.values() for t in state.values()]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(t.untyped_storage().nbytes() for t in local)


run = harness.attach(seed=1, snapshot_every_steps=a.every, reduce=a.reduce)
model = Net()
if a.bad == "sharded":
    harness.fsdp2(model.up, run)
groups = [
    {"params": [p for p in model.parameters() if p.ndim > 1]},
    {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
]
more = {"SGD": {"momentum": 0.9}, "AdamW": {"fused": a.fused}}.get(a.optimizer, {})
optimizer = getattr(torch.optim, a.optimizer)(groups, lr=1e-2, **more)
if not a.whole:
    assert harness.zero1(optimizer, run) is optimizer
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if a.scaler else None
run.prepare(model, optimizer, scheduler, scaler)
for step in run.steps(Numbers(), total=a.total, global_batch=24, micro_batch=4):
    for x, y in step:
        step.backward(nn.functional.cross_entropy(model(x), y))
    step.update(clip_norm=0.5)
    dawdle(step, a.go)
if a.out:
    weights = b"".join(v.numpy().tobytes() for v in model.state_dict().values())
    said = {"weights": hashlib.sha256(weights).hexdigest(), "state": bytes_of(optimizer)}
    Path(f"{a.out}.{run.rank}").write_text(json.dumps(said))
