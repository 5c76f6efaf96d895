"""Shards models on real ranks. Forks its ranks: torch is imported once. Prints a line of JSON for
each world, a list over ranks.

`python -m support.sharding ways`: two ranks, every way that is taken or refused: what `prepare` would
do; "sums" where the gradients and their norm are those of one process that does the whole batch.
`python -m support.sharding meta`: one to three ranks, what models on the meta device begin with.
"""

import functools
import hashlib
import importlib
import json
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from harness.worker.gradients.exact_sums import exact_strategy_for
from harness.worker.gradients.parallel import Sharded, strategy_for
from harness.worker.gradients.sharding import check_unwrapped, drawn_by_shard, shard
from support import worlds

WORLD, CPU = 2, torch.device("cpu")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x)


def line():
    return init_device_mesh("cpu", (WORLD,))


def whole(model, **how):
    for block in model.blocks:
        fully_shard(block, **how)
    fully_shard(model, **how)


def ignored(model):
    fully_shard(model, mesh=line(), ignored_params={model.head.weight})


def partly(model):
    fully_shard(model.blocks[0], mesh=line())


def hsdp(model):
    whole(model, mesh=init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("copies", "shards")))


def tensor_parallel(model):
    parallelize_module(
        model, line(), {"blocks.0": ColwiseParallel(), "blocks.1": RowwiseParallel()}
    )


def by_hand(model):
    mesh = line()
    for name, p in list(model.head.named_parameters()):
        setattr(model.head, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))
    fully_shard(model.blocks[0], mesh=mesh)
    fully_shard(model.blocks[1], mesh=mesh)


def backwards(model):
    whole(model, mesh=DeviceMesh("cpu", [1, 0]))


def alone(model):
    whole(model, mesh=mesh_of_one())


def mesh_of_one():
    return DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("apart", "alone"))["alone"]


def mixed(model):
    fully_shard(model.blocks[0], mesh=mesh_of_one())
    fully_shard(model, mesh=line())


def wrapped(model):
    return nn.parallel.DistributedDataParallel(model)


def ours(model):
    shard(model, CPU)


def root_only(model):
    fully_shard(model, mesh=line())


def no_root(model):
    for part in (*model.blocks, model.head):
        fully_shard(part, mesh=line())


def columns(model):
    whole(model, mesh=line(), shard_placement_fn=lambda p: Shard(p.ndim - 1))


def frozen(model):
    model.head.requires_grad_(False)
    for block in model.blocks:
        fully_shard(block, mesh=line())


def unsharded(model):
    pass


REFUSED = (ignored, partly, hsdp, tensor_parallel, by_hand, backwards, alone, mixed, wrapped)
TAKEN = (ours, root_only, no_root, columns, frozen, unsharded)


def outcome(way, exact):
    """What comes of it: refused, not summed, or summed."""
    torch.manual_seed(0)
    model, alone = Net(), Net()
    alone.load_state_dict(model.state_dict())
    try:
        model = way(model) or model
        check_unwrapped(model)  # as run.steps does
        strategy = exact_strategy_for(model, "exact") if exact else strategy_for(model)
        wrong = not_summed(model, strategy, alone)
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return (
        f"wrong: {', '.join(wrong)}"
        if wrong
        else f"sums ({'sharded' if isinstance(strategy, Sharded) else 'whole'})"
    )


def not_summed(model, strategy, alone):
    """One step, and the same in one process."""
    data = torch.randn(WORLD * 3, 4, 6)
    strategy.start(WORLD * 3)
    strategy.zero()
    repeat = True
    while repeat:
        for i in range(3):
            strategy.micro(last=i == 2)
            model(data[3 * dist.get_rank() + i]).square().sum().backward()
            strategy.micro_done()
        repeat = strategy.again()
    strategy.reduce()
    strategy.divide(7.0)
    for x in data:
        (alone(x).square().sum() / 7.0).backward()
    wrong = []
    for (name, p), reference in zip(model.named_parameters(), alone.parameters(), strict=True):
        if p.requires_grad:
            grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            if not torch.allclose(grad, reference.grad, rtol=1e-4, atol=1e-6):
                wrong.append(name)
    trained = [
        a.grad
        for p, a in zip(model.parameters(), alone.parameters(), strict=True)
        if p.requires_grad
    ]
    if not torch.allclose(strategy.norm(), nn.utils.get_total_norm(trained), rtol=1e-4):
        wrong.append("the norm")
    return wrong


class Odd(nn.Module):
    """Of modules that hold parameters beside their children, with a tie and a buffer; its rows
    divide by no world."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(6, 2, 12) for _ in range(2))
        self.batch = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight


class Mute(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Module()
        self.inner.scale = nn.Parameter(torch.ones(3))


def from_meta(rank, world):
    """A hash of what a model on the meta device begins with."""
    torch.manual_seed(rank)  # the script's own randomness does not matter
    with torch.device("meta"):
        model = Odd()
    shard(model, CPU, seed=5)
    assert model.head.weight is model.embed.weight
    whole = {
        name: v.full_tensor() if isinstance(v, DTensor) else v
        for name, v in model.state_dict().items()
    }
    assert model.batch.running_var.tolist() == [1.0] * 6 and all(
        bool(v.isfinite().all()) for v in whole.values()
    )
    hashed = hashlib.sha256(
        b"".join(v.detach().contiguous().numpy().tobytes() for v in whole.values())
    ).hexdigest()
    with torch.device("meta"):
        mute = Mute()
    try:
        shard(mute, CPU)
        refused = ""
    except Exception as e:
        refused = f"{type(e).__name__}: {e}"
    return {
        "from meta": hashed,
        "mute": refused,
        "drawn": drawn_by_shard(model, dist.group.WORLD),
        "by shard": by_shard(),
    }


def by_shard():
    """What people do without us: every rank draws its own rows."""
    with torch.device("meta"):
        model = Net()
    whole(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    model.to_empty(device="cpu")
    for part in (*model.blocks, model.head):
        torch.manual_seed(0)
        part.reset_parameters()
    return drawn_by_shard(model, dist.group.WORLD)


def ways(rank, world):
    found = {way.__name__: outcome(way, exact=False) for way in (*REFUSED, *TAKEN)}
    return found | {f"exact {way.__name__}": outcome(way, exact=True) for way in (*REFUSED, *TAKEN)}


def rank_main(rank, world, folder, what):
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/{world}", world), rank=rank, world_size=world
    )
    every = [None] * world
    dist.all_gather_object(every, what(rank, world))
    if rank == 0:
        print(json.dumps(every), flush=True)
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    # what every rank would import later
    for name in ("torch._dynamo", "torch.distributed.tensor.parallel"):
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        what, sizes = (ways, (WORLD,)) if sys.argv[1] == "ways" else (from_meta, (1, 2, 3))
        for world in sizes:
            work = functools.partial(rank_main, world=world, folder=folder, what=what)
            worlds.fork(world, work)
