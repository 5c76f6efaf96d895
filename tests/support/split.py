"""A training script whose model is split between the two ranks of a replica, for the tests of
replica groups: tensor parallelism by torch's own plan, summed by a strategy of the script's own.

With `--whole` the same model on one rank a replica; with `--twice` each rank of a replica holds all
of it and does all of its work, in exact sums.
"""

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import harness
from harness.worker.gradients.exact_sums import ExactReplicated
from support.number_rows import Numbers

p = argparse.ArgumentParser()
p.add_argument("--total", type=int, default=12)
p.add_argument("--every", type=int, default=3)
p.add_argument("--whole", action="store_true")
p.add_argument("--twice", action="store_true")
p.add_argument("--reduce", default="fast")
p.add_argument("--replica-ranks", type=int, default=None)
p.add_argument("--strategy", default="split", help="split, or none: what harness would take")
p.add_argument("--stray", action="store_true", help="each rank of a replica reads other rows")
p.add_argument("--apart", action="store_true", help="the second replica has other shards")
p.add_argument("--clip", type=float, default=0.5)
p.add_argument("--go", default="", help="a file: until it is there the steps are slow")
p.add_argument("--out", default="")
a = p.parse_args()


class Stray(torch.utils.data.IterableDataset):
    """Splits itself by rank, as streams like to do."""

    def __init__(self, rank):
        self.next = rank

    def __iter__(self):
        while True:
            i, self.next = self.next, self.next + 2
            yield Numbers()[i]

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


class Split:
    """Gradients are summed over the ranks at the same place of all replicas; what is sharded lies
    on one rank of each replica, and counts once in the norm."""

    name, equal_rounds, may_repeat, sums = "split", False, False, "fast"

    def __init__(self, model, mesh):
        self.replica_ranks = mesh["ranks"].size()
        self.across, self.inside = mesh["replicas"].get_group(), mesh["ranks"].get_group()
        self.parameters = list(model.parameters())

    def start(self, micro_batches): ...

    def micro(self, last, filler=False): ...

    def micro_done(self): ...

    def again(self):
        return False

    def _local(self):
        for p in self.parameters:
            if p.grad is not None:
                sharded = isinstance(p, DTensor) and any(at.is_shard() for at in p.placements)
                yield (p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad), sharded

    def reduce(self):
        for grad, _ in self._local():
            dist.all_reduce(grad, group=self.across)

    def divide(self, weight):
        for grad, _ in self._local():
            grad.div_(weight)

    def norm(self):
        squares = torch.zeros(2)
        for grad, sharded in self._local():
            squares[int(sharded)] += grad.square().sum()
        dist.all_reduce(squares[1:], group=self.inside)
        return squares.sum().sqrt()

    def clip(self, coefficient):
        for grad, _ in self._local():
            grad.mul_(coefficient)

    def zero(self):
        for p in self.parameters:
            p.grad = None

    def share_found_inf(self, scaler, optimizer): ...


class Twice(ExactReplicated):
    def __init__(self, model, mesh):
        super().__init__(model, group=mesh["replicas"].get_group())
        self.replica_ranks = mesh["ranks"].size()


run = harness.attach(
    seed=1, snapshot_every_steps=a.every, reduce=a.reduce, replica_ranks=a.replica_ranks
)
torch.manual_seed(run.replica)  # what replicas begin with is the first one's
model = nn.Sequential(nn.Dropout(0.1), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
strategy = None
if not a.whole and a.strategy == "split":
    if a.twice:
        strategy = Twice(model, run.mesh)
    else:
        plan = {"1": ColwiseParallel(), "3": RowwiseParallel()}
        model = parallelize_module(model, run.mesh["ranks"], plan)
        strategy = Split(model, run.mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
run.prepare(model, optimizer, strategy=strategy)
if a.apart and run.replica == 1:
    with torch.no_grad():
        model[1].weight.to_local().add_(0.5)
data = Stray(run.rank) if a.stray else Numbers()
for step in run.steps(data, total=a.total, global_batch=24, micro_batch=4):
    for x, y in step:
        step.backward(nn.functional.cross_entropy(model(x), y))
    step.update(clip_norm=a.clip)
    if a.go and not Path(a.go).exists():
        time.sleep(0.2 if step.number <= a.total // 2 else 3.0)
run.log(replicas=run.sum(1.0))
whole = [v.full_tensor() if isinstance(v, DTensor) else v for v in model.state_dict().values()]
if a.out and run.rank == 0:
    weights = hashlib.sha256(b"".join(v.numpy().tobytes() for v in whole)).hexdigest()
    total = float(sum(v.double().abs().sum() for v in whole))
    place = [run.replicas, run.replica_ranks, run.replica]
    Path(a.out).write_text(json.dumps({"weights": weights, "sum": total, "place": place}))
sys.exit(0)
