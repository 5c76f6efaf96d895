"""A state of Megatron's kinds on real ranks (gloo): saved through our storage, or loaded and
compared. Prints "same" or what differs."""

import argparse
import io

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

from harness.adapters.megatron import LoadSharded, SaveSharded

p = argparse.ArgumentParser()
p.add_argument("what", choices=["save", "load"])
p.add_argument("folder")
p.add_argument("url")
p.add_argument("--wide", action="store_true", help="want another shape")
a = p.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
LAYERS, ROWS = 4, 8
whole = {
    "embedding": torch.arange(ROWS * 3.0).view(ROWS, 3),
    "layers": torch.arange(LAYERS * 10.0, LAYERS * 16.0).view(LAYERS, 6),
    "norm": torch.full((5,), 2.5, dtype=torch.bfloat16),
    "gated": torch.arange(100.0, 100 + 2 * ROWS).view(2 * ROWS),
}


def part(tensor, empty):
    return torch.zeros_like(tensor) if empty else tensor.clone()


def build(key, tensor, replica_id, flattened_range):
    """Two halves that are split over ranks each by itself, as Megatron's gated MLP is."""
    return [
        ShardedTensor.from_rank_offsets(key, half, (0, place * world + rank, 2 * world))
        for place, half in enumerate(tensor.chunk(2))
    ]


def state(empty):
    rows = whole["embedding"].chunk(world)[rank]
    mine = range(rank * LAYERS // world, (rank + 1) * LAYERS // world)
    halves = torch.cat([half.chunk(world)[rank] for half in whole["gated"].chunk(2)])
    said = None if empty else io.BytesIO(f"of {rank % 2}".encode())
    return {
        "embedding": ShardedTensor.from_rank_offsets(
            "embedding", part(rows, empty), (0, rank, world)
        ),
        "layers": [
            ShardedTensor.from_rank_offsets(
                "layers", part(whole["layers"][i], empty), (0, i, LAYERS), prepend_axis_num=1
            )
            for i in mine
        ],
        "norm": ShardedTensor.from_rank_offsets(
            "norm", part(whole["norm"], empty), replica_id=rank
        ),
        "gated": ShardedTensorFactory("gated", part(halves, empty), build, torch.cat),
        "extra": ShardedObject("extra", said, (1,), (0,), replica_id=rank),
        "here": LocalNonpersistentObject(rank),
        "iteration": 0 if empty else 7,
    }


if a.what == "save":
    dist_checkpointing.save(state(False), a.folder, sharded_strategy=SaveSharded(a.url, 7))
    print("same")
else:
    wanted = state(True)
    if a.wide:
        wanted["norm"] = ShardedTensor.from_rank_offsets("norm", torch.zeros(6), replica_id=rank)
    found = dist_checkpointing.load(wanted, a.folder, sharded_strategy=LoadSharded(a.url, 7))
    expected = state(False)
    same = {
        "embedding": torch.equal(found["embedding"], expected["embedding"].data),
        "layers": all(
            torch.equal(x, y.data) for x, y in zip(found["layers"], expected["layers"], strict=True)
        ),
        "norm": torch.equal(found["norm"], expected["norm"].data),
        "gated": torch.equal(found["gated"], expected["gated"].data),
        "extra": found["extra"].getvalue() == b"of 0",
        "plain": (found["iteration"], found["here"]) == (7, rank),
    }
    wrong = [name for name, ok in same.items() if not ok]
    print("same" if not wrong else f"other: {wrong}")
dist.destroy_process_group()
