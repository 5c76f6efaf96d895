"""A training script whose model has mixtures of experts, which lie over `ep` as HARNESS_MESH says;
or all on one rank."""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import harness
from support.number_rows import Numbers
from support.trainer_parts import dawdle, flags

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from moe import Mixture, MoE

p = flags()
p.add_argument("--uneven", action="store_true", help="ten micro-batches a step: some are given fillers")
p.add_argument("--again", action="store_true", help="activations are computed again in the backward")
p.add_argument("--meta", action="store_true", help="the model comes from the meta device")
p.add_argument("--whole", action="store_true", help="expert_parallel is left out")
a = p.parse_args()
MIXTURE = Mixture(experts=4, top_k=2, hidden=16, speed=0.01)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), MoE(8, MIXTURE)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    """A row of 16 numbers is a sequence of four tokens."""

    def __init__(self):
        super().__init__()
        self.up, self.head = nn.Linear(4, 8), nn.Linear(32, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        x = self.up(x.unflatten(-1, (4, 4)))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if a.again else block(x)
        return self.head(x.flatten(1))


run = harness.attach(seed=1, snapshot_every_steps=a.every, reduce=a.reduce)
with torch.device("meta" if a.meta else "cpu"):
    model = Net()
if not a.whole:
    harness.expert_parallel(model, run, [block.mlp.experts for block in model.blocks])
if a.meta or "HARNESS_MESH" in os.environ:
    harness.fsdp2(model, run)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
run.prepare(model, optimizer)
loads = []
for step in run.steps(Numbers(), total=a.total, global_batch=40 if a.uneven else 24, micro_batch=4):
    for x, y in step:
        step.backward(nn.functional.cross_entropy(model(x), y))
    step.update(clip_norm=0.5)
    model.eval()
    with torch.no_grad():
        model(x)  # counts nothing
    model.train()
    dawdle(step, a.go)
held = sum(
    v.to_local().numel() if isinstance(v, DTensor) else v.numel()
    for v in model.blocks[0].mlp.experts.parameters()
)
state = model.state_dict()
whole = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in state.items()}
if a.out and run.rank == 0:
    weights = hashlib.sha256(b"".join(v.numpy().tobytes() for v in whole.values())).hexdigest()
    said = {
        "weights": weights,
        "sum": float(sum(v.double().abs().sum() for v in whole.values())),
        "held": held / (3 * 4 * 8 * 16),
        "bias": [whole[f"blocks.{i}.mlp.router.expert_bias"].tolist() for i in range(2)],
    }
    Path(a.out).write_text(json.dumps(said))
