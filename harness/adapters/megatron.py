"""Megatron-Core's sharded state dict in our storage: save and load strategies for its
`dist_checkpointing`. Runs in the worker.

    dist_checkpointing.save(state, folder, sharded_strategy=SaveSharded(url, step))
    state = dist_checkpointing.load(state, folder, sharded_strategy=LoadSharded(url, step))

Each tensor is stored whole, once, in hashed parts, however it is sharded over ranks (tensor,
pipeline, expert, data parallel), and can be loaded onto any other layout; nothing is unpickled. The
state that Megatron calls common stays a small file in `folder`. docs/trainers/megatron.md describes
how preemption notices and data reach it.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import storage
from harness.core import batch
from harness.core.world import BadInput
from storage.tensors.flat_shards import Pieces

try:
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
    from megatron.core.dist_checkpointing.mapping import (
        ShardedObject,
        ShardedTensor,
        is_main_replica,
    )
    from megatron.core.dist_checkpointing.strategies.base import (
        LoadShardedStrategy,
        SaveShardedStrategy,
    )
except ImportError as e:
    raise BadInput(
        f"harness.adapters.megatron wants megatron-core ({e}); pip install megatron-core, or use a "
        "mesh of ours (docs/MESHES.md)"
    ) from e

BACKEND, VERSION = "spotharness", 1  # names in Megatron's metadata.json
TENSORS, OBJECTS = "tensors", "objects"  # top-level keys of the stored state
BYTES = "bytes of a file"  # marks an object that was an io.BytesIO


def own_samples(
    samples: int, global_batch: int, micro_batch: int, step: int, seed: int = 0
) -> list[list[int]]:
    """Return the dataset indices of each micro-batch that this rank's replica does in `step`, by
    our plan over Megatron's data-parallel group. `samples`: size of the dataset. Each sample of the
    step belongs to exactly one replica. Raises BadInput."""
    batching = batch.Batching(samples, global_batch, micro_batch, seed)
    plan = batch.plan(batching.micro_batches, parallel_state.get_data_parallel_world_size())
    micros = plan.micros(parallel_state.get_data_parallel_rank())
    return [batch.indices(batching, step, micro).tolist() for micro in micros]


class SaveSharded(SaveShardedStrategy):  # type: ignore[misc] # Megatron has no types
    """A strategy that stores the sharded part as the snapshot of `step` at `url`. It is committed
    on all ranks when `save` returns. `keep`: as in `storage.save`."""

    def __init__(self, url: str, step: int, keep: int | storage.Keep = 3):
        super().__init__(BACKEND, VERSION)
        self.url, self.step, self.keep = url, step, keep

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Save the state. Raises what `storage.save` does."""
        state = {
            TENSORS: pieces_of(sharded_state_dict),
            OBJECTS: _objects_of(sharded_state_dict),
        }
        storage.save(self.url, state, step=self.step, keep=self.keep)


class LoadSharded(LoadShardedStrategy):  # type: ignore[misc] # Megatron has no types
    """A strategy that loads the sharded part of the snapshot of `step` at `url` on any layout."""

    def __init__(self, url: str, step: int):
        self.url, self.step = url, step

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        if loaded_backend != BACKEND:
            raise BadInput(
                f"LoadSharded: wanted a checkpoint that SaveSharded made, found {loaded_backend!r} "
                "in its metadata.json; leave sharded_strategy out to load that"
            )

    def check_version_compatibility(self, loaded_version: int) -> None:
        if loaded_version != VERSION:
            raise BadInput(f"LoadSharded: wanted version {VERSION}, found {loaded_version}")

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> Any:
        """Fill the tensors of `sharded_state_dict` in place, and return it with values. Raises
        storage.StateMismatch for another shape, and what `storage.load` does."""
        into = {TENSORS: pieces_of(sharded_state_dict, all_replicas=True)}
        objects = storage.load(self.url, step=self.step, into=into)[OBJECTS]
        return dict_list_map_inplace(lambda one: _value(one, objects), sharded_state_dict)

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        found = storage.load(self.url, step=self.step, only=[TENSORS], alone=True)[TENSORS]
        return {
            key: ShardedTensor.from_rank_offsets(key, tensor).without_data()
            for key, tensor in found.items()
        }

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> dict[str, Any]:
        found = storage.load(self.url, step=self.step, only=[OBJECTS], alone=True)[OBJECTS]
        objects = {key: ShardedObject.empty_from_unique_key(key) for key in found}
        return self.load_tensors_metadata(checkpoint_dir) | objects


def pieces_of(sharded_state_dict: dict[str, Any], all_replicas: bool = False) -> dict[str, Pieces]:
    """Return this rank's pieces of every tensor that any rank knows, by key. `all_replicas`: also
    pieces that another rank holds and saves. Collective. Raises BadInput if ranks disagree."""
    known: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    boxes: dict[str, dict[tuple[int, ...], torch.Tensor]] = {}
    device = torch.device("cpu")
    for one in nested_values(sharded_state_dict):
        if not isinstance(one, ShardedTensor):
            continue
        known[one.key] = tuple(one.global_shape), one.dtype
        if one.data is None:
            one.init_data(device)
        device = one.data.device
        if all_replicas or is_main_replica(one.replica_id):
            whole = one.data.detach()[(None,) * one.prepend_axis_num]
            boxes.setdefault(one.key, {})[tuple(one.global_offset)] = whole
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, known)
    agreed: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for rank, theirs in enumerate(every):
        for key, found in theirs.items():
            if agreed.setdefault(key, found) != found:
                raise BadInput(
                    f"{key!r} is {found} on rank {rank}, and {agreed[key]} on a lower one; wanted "
                    "the same global shape and dtype on all"
                )
    return {
        key: Pieces(shape, boxes.get(key, {}), dtype, device)
        for key, (shape, dtype) in sorted(agreed.items())
    }


def _objects_of(sharded_state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the objects of all ranks, which are small, by Megatron's unique key. Collective."""
    mine = {
        one.unique_key: {BYTES: one.data.getvalue()}
        if isinstance(one.data, io.BytesIO)
        else one.data
        for one in nested_values(sharded_state_dict)
        if isinstance(one, ShardedObject) and is_main_replica(one.replica_id)
    }
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return {key: value for theirs in every for key, value in sorted(theirs.items())}


def _value(one: Any, objects: dict[str, Any]) -> Any:
    """Return the value for a place of the state dict after the load. Raises BadInput."""
    if isinstance(one, ShardedTensor):
        return one.data
    if one.unique_key not in objects:
        raise BadInput(
            f"wanted the object {one.unique_key!r}, found {len(objects)} others; objects, unlike "
            "tensors, are loaded onto the same layout only"
        )
    found = objects[one.unique_key]
    return io.BytesIO(found[BYTES]) if isinstance(found, dict) and BYTES in found else found
