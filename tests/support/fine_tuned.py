"""A training script that begins with weights of others, on the mesh that HARNESS_MESH says."""

import argparse
import json
import sys
from pathlib import Path

import torch
from torch import nn

import harness
from storage.export.safetensors import SafetensorsFiles

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import models

p = argparse.ArgumentParser()
p.add_argument("--from", dest="source", required=True)
a = p.parse_args()


class Tokens:
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return torch.randint(256, (17,), generator=torch.Generator().manual_seed(i))


read = [0]


class Counting(SafetensorsFiles):
    def read_into(self, part, start, end, memory):
        read[0] += end - start
        return super().read_into(part, start, end, memory)


run = harness.attach(seed=1, snapshot_every_steps=4)
with torch.device("meta" if run.world > 1 else "cpu"):
    model = models.Transformer(harness.model_shape(a.source), 16)
if run.world > 1:
    sys.modules["harness.meshes.pretrained"].SafetensorsFiles = Counting
    harness.tensor_parallel(model, run, models.PLAN)
    harness.fsdp2(model, run)
harness.load_pretrained(model, a.source, run)
if run.world > 1:
    every = [None] * run.world
    torch.distributed.all_gather_object(every, read[0])
    if run.rank == 0:
        reads = Path(a.source) / "reads.json"
        reads.write_text(json.dumps(dict(enumerate(every))))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
run.prepare(model, optimizer)
for step in run.steps(Tokens(), total=4, global_batch=8, micro_batch=2):
    for x in step:
        logits = model(x[:, :-1])
        step.backward(nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten()))
    step.update(clip_norm=1.0)
