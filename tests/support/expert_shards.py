"""Saves mixtures of experts and their optimizer on several meshes, and loads each on every other.
Forks its ranks: torch is imported once.

`python -m support.expert_shards FOLDER` ends with an assertion, or prints for each mesh the hash of
the weights in its snapshot, and the bytes that are stored.
"""

import functools
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import harness
from storage import Ref, Snapshots, open_store
from support.reshard import check, fork, import_all, save, stepped

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from moe import Mixture, MoE

MESHES = {  # ranks: of the world
    "dp_shard=1": 1,
    "dp_shard=2": 2,
    "dp_shard=2,ep=2": 2,
    "dp_shard=3": 3,
    "dp_shard=2,ep=2 twice": 4,
    "dp_shard=4,ep=2": 4,  # whole experts for FSDP: two on each rank of ep
    "dp_shard=4,ep=4": 4,
    "dp_shard=8,ep=4": 8,  # columns of them: one is on each
}


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(MoE(8, Mixture(4, 2, hidden)) for hidden in (16, 24))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def build(mesh, seed):
    """A model, with an optimizer that has its state."""
    os.environ.update(RANK=str(dist.get_rank()), WORLD_SIZE=str(dist.get_world_size()))
    sizes = dict(word.split("=") for word in mesh.split(" ")[0].split(","))
    run = harness.attach(seed=seed, mesh={name: int(size) for name, size in sizes.items()})
    model = Layers()
    harness.expert_parallel(model, run, [block.experts for block in model.blocks])
    if run.world > 1:
        harness.fsdp2(model, run)
    return model, stepped(model, torch.randn(12, 8))


def save_one(folder, mesh):
    save(f"{folder}/{mesh}", *build(mesh, seed=0))


def check_every(folder, mesh):
    model, optimizer = build(mesh, seed=1)
    for saved_on, ranks in MESHES.items():
        check(f"{folder}/{saved_on}", ranks, model, optimizer)


if __name__ == "__main__":
    import_all()
    folder = sys.argv[1]
    for work in (save_one, check_every):
        for mesh, ranks in MESHES.items():
            fork(ranks, f"{folder}/{work.__name__} {mesh}", functools.partial(work, folder, mesh))
    for mesh, ranks in MESHES.items():
        manifest = Snapshots(open_store(f"{folder}/{mesh}")).load(Ref(1, ranks))
        nbytes = sum(part.nbytes for part in manifest.stored.values())
        print(manifest.data["weights"], nbytes, mesh, sep="\t")
