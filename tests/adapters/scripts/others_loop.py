"""A loop over a dataset or a loader of others, as it is; the model is so small that only its data
matter."""

import argparse
import os

# the ranks of these tests are of one machine, which streaming's shared memory must know
os.environ.update(LOCAL_RANK=os.environ["RANK"], LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"])

import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

import harness

p = argparse.ArgumentParser()
p.add_argument("kind")
p.add_argument("folder")
p.add_argument("--total", type=int, default=9)
a = p.parse_args()
run = harness.attach(seed=7, snapshot_every_steps=2, reduce="exact")


def mosaic():
    import streaming

    # what a process left that was killed
    streaming.base.util.clean_stale_shared_memory()
    return streaming.StreamingDataset(local=a.folder, batch_size=3, shuffle=True, shuffle_seed=5)


def lit():
    import litdata

    return litdata.StreamingDataset(a.folder, shuffle=True, seed=5)


def loader_of(name):
    import litdata
    import streaming

    if name == "mosaic":
        return streaming.StreamingDataLoader(mosaic(), batch_size=1)
    return litdata.StreamingDataLoader(lit(), batch_size=1)


class Numbers(torch.utils.data.IterableDataset):
    """What StatefulDataLoader reads: a stream with a place."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < 40:
            self.at += 1
            yield {"i": self.at - 1}
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


datasets = {
    "mosaic": lambda: harness.data.ByIndex(mosaic()),
    "lit": lambda: harness.data.ByIndex(lit()),
    "mosaic bare": mosaic,
    "lit bare": lit,
    "mosaic loader": lambda: loader_of("mosaic"),
    "lit loader": lambda: loader_of("lit"),
    "stateful": lambda: StatefulDataLoader(Numbers(), batch_size=None),
    "stateful processes": lambda: StatefulDataLoader(Numbers(), batch_size=None, num_workers=1),
}
torch.manual_seed(0)
model = nn.Embedding(64, 1)
run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in run.steps(datasets[a.kind](), total=a.total, global_batch=6, micro_batch=2):
    for batch in step:
        step.backward((model(batch["i"].flatten()) - 1).square().mean())
    step.update()
run.finish()
