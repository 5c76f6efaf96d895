"""Saves a model and its optimizer on each of some meshes, and loads every snapshot on every mesh.
Forks its ranks: torch is imported once.

`python -m support.reshard_meshes FOLDER` ends with an assertion, or prints for each mesh the hash of
the weights and the bytes that its snapshot has.
"""

import functools
import importlib
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import harness
from harness.lab.replay import _whole
from harness.worker.replica_check import held
from harness.worker.training_state import common
from storage import Ref, Snapshots, open_store
from storage.tensors.loading import load
from storage.tensors.state_tree import join
from support import worlds
from support.reshard import bytes_of, save_tensors, state_of, stepped

# How the ranks of a copy share it, and how many copies there are; "": each rank has a whole one. A
# mesh more is a row more (and what `build` does about its words).
MESHES = (
    *(("", 1), ("", 2), ("dp_shard=2", 1), ("dp_shard=2", 4), ("dp_shard=3", 2), ("dp_shard=4", 1)),
    *(("dp_shard=8", 1), ("tp=2", 1), ("tp=2", 3), ("tp=4", 1)),
    *(("dp_shard=2,tp=2", 1), ("dp_shard=2,tp=2", 2), ("dp_shard=4,tp=2", 1)),
)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(10), nn.Linear(10, 12), nn.Linear(12, 10)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 10), nn.Linear(10, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def build(run, words, seed):
    """A model whose rows divide by few worlds, with an optimizer that has its state. Its values do
    not depend on the mesh."""
    torch.manual_seed(seed)
    model = Net()
    if words:
        if (tp := run.mesh["tp"]).size() > 1:
            for block in model.blocks:
                parallelize_module(block, tp, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        harness.fsdp2(model, run)
    return model, stepped(model, torch.ones(2, 5))


def save(folder, row, run):
    words, _ = MESHES[row]
    model, optimizer = build(run, words, seed=0)
    tensors, plain = state_of(model, optimizer)
    save_tensors(f"{folder}/{row}", Ref(1, 1), model, tensors, plain, run._peers.control)


def check(folder, row, run):
    """Every snapshot, on this mesh: all bytes of it, and the same on every copy."""
    words, _ = MESHES[row]
    model, optimizer = build(run, words, seed=1)
    for saved_on in range(len(MESHES)):
        tensors, _ = state_of(model, optimizer)
        snapshots = Snapshots(open_store(f"{folder}/{saved_on}"))
        manifest = snapshots.load(Ref(1, 1))
        load(snapshots, manifest, tensors)
        join(tensors, manifest.data["state"])
        assert set(tensors) == set(manifest.tensors), (words, MESHES[saved_on])
        for name, t in tensors.items():
            found, wanted = bytes_of(t), _whole(snapshots, manifest, name).tobytes()
            assert found == wanted, (words, MESHES[saved_on], name)
        size = run._peers.copy_ranks
        shards = held(common(tensors), {}, within_replicas=size > 1).shards_total()
        every = run._peers.gather(shards)
        assert all(len(set(every[place::size])) == 1 for place in range(size)), (words, saved_on)
        optimizer.step()  # it can be trained on: the weights stay, its state moves


def fork(folder, row, what):
    """A world; every rank must end well."""
    words, copies = MESHES[row]
    mesh = harness.core.mesh.parse_choice(words).wanted if words else None
    world, port = copies * (mesh.copy_ranks if mesh else 1), worlds.free_port()

    def ranked(rank):
        os.environ |= {
            **{"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world)},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "HARNESS_MESH": words},
        }
        run = harness.attach(seed=1)
        what(folder, row, run)
        if run._peers.control is not None:
            dist.barrier(run._peers.control)

    worlds.fork(world, ranked, f"{what.__name__} {words}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    # what every rank would import later
    for name in (
        *("torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp"),
        *("harness.worker.session", "harness.core.mesh", "harness.meshes.fsdp"),
    ):
        importlib.import_module(name)
    do = functools.partial(fork, sys.argv[1])
    began_s = time.monotonic()
    for what in (save, check):
        for row in range(len(MESHES)):
            do(row, what)
            print(what.__name__, MESHES[row], f"{time.monotonic() - began_s:.0f} s", file=sys.stderr)
    for row, (words, copies) in enumerate(MESHES):
        manifest = Snapshots(open_store(f"{sys.argv[1]}/{row}")).load(Ref(1, 1))
        chunks = [c for entry in manifest.tensors.values() for c in entry["chunks"]]
        nbytes = sum(c["end"] - c["start"] for c in chunks)  # without what aligns them
        print(words or "whole", copies, manifest.data["weights"], nbytes)
