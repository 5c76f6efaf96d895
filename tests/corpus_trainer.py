"""A training script over a corpus; the model is so small that only its data matter."""

import argparse

import torch
from torch import nn

import harness

p = argparse.ArgumentParser()
p.add_argument("corpus")
p.add_argument("--records", action="store_true")
p.add_argument("--boundaries", default="")
p.add_argument("--total", type=int, default=9)
p.add_argument("--length", type=int, default=32)
p.add_argument("--workers", type=int, default=0)
p.add_argument("--early", action="store_true", help="rank 0 opens before any exclusion list is there")
a = p.parse_args()


def numbers(record):
    """A record as 8 numbers, with noise that `run.steps` seeds by the position."""
    data = torch.frombuffer(bytearray(record["txt"][:8].ljust(8)), dtype=torch.uint8)
    return data.float() / 255 + 0.01 * torch.randn(8), data.float().mean() / 255


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(257, 8), nn.Linear(8, 257)
        self.row = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.embed(x)) if x.dtype == torch.int64 else self.row(x).squeeze(1)


run = harness.attach(seed=7, snapshot_every_steps=3, reduce="exact")
torch.manual_seed(0)
model = Net()
run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
data = harness.data
dataset = (
    data.Records(a.corpus, decode=numbers)
    if a.records
    else data.Tokens(a.corpus, a.length, boundaries=a.boundaries)
)
if a.early and run.rank == 0:
    dataset.exclude(0)
packed = data.packed if a.boundaries == "cu_seqlens" else None
for step in run.steps(
    dataset, total=a.total, global_batch=12, micro_batch=3, num_workers=a.workers, collate_fn=packed
):
    for batch in step:
        if a.records:
            loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        else:
            x, y = (batch["input_ids"], batch["labels"]) if packed else batch[:2]
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        step.backward(loss)
    step.update()
run.finish()
