"""A training script of a small language model on a mesh: sharded within copies, its sequences split
over the ranks of `cp`, as HARNESS_MESH says; or whole on one rank."""

import hashlib
import json
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import harness
from support.contexts_rows import WORDS, Sequences, rotated
from support.trainer_parts import dawdle, flags

LENGTH, SIZE, HEADS = 24, 16, 2

p = flags()
p.add_argument("--whole", action="store_true")
p.add_argument("--tokens", action="store_true", help="some are not counted")
p.add_argument("--dropout", type=float, default=0.0)
p.add_argument("--batch-norm", action="store_true")
p.add_argument("--length", type=int, default=LENGTH)
a = p.parse_args()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(SIZE), nn.Dropout(a.dropout)
        self.qkv, self.out = nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, SIZE)
        self.up, self.down = nn.Linear(SIZE, 36), nn.Linear(36, SIZE)

    def forward(self, x, positions):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, k = rotated(q, positions), rotated(k, positions)
        seen = harness.attention(q, k, v, run).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(seen))
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, SIZE), nn.Linear(SIZE, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        if a.batch_norm:
            self.unused = nn.BatchNorm1d(SIZE)

    def forward(self, x, positions):
        x = self.words(x)
        for block in self.blocks:
            x = block(x, positions)
        return self.head(x)


run = harness.attach(seed=1, snapshot_every_steps=a.every, reduce=a.reduce)
model = Net()
if not a.whole:
    harness.fsdp2(model, run)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
run.prepare(model, optimizer)
for step in run.steps(Sequences(a.length, a.tokens), total=a.total, global_batch=24, micro_batch=4):
    for x, y in step:
        x, y, positions = harness.split_context(run, x, y, torch.arange(a.length)[None])
        loss = nn.functional.cross_entropy(model(x, positions).flatten(0, 1), y.flatten())
        step.backward(loss, weight=float((y >= 0).sum()) if a.tokens else None)
    step.update(clip_norm=0.5)
    dawdle(step, a.go)
state = model.state_dict().values()
whole = [v.full_tensor() if isinstance(v, DTensor) else v for v in state]
local = [v.to_local() if isinstance(v, DTensor) else v for v in state]
if a.out and run.rank == 0:
    said = {
        "weights": hashlib.sha256(b"".join(v.numpy().tobytes() for v in whole)).hexdigest(),
        "held": sum(v.numel() for v in local) / sum(v.numel() for v in whole),
        "replicas": run.replicas,
    }
    Path(a.out).write_text(json.dumps(said))
