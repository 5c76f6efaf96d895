"""FSDP2 as one call: `harness.fsdp2`. Runs in the worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from harness.core.world import BadInput
from harness.meshes.pipeline import Pipeline
from harness.worker.gradients.sharding import (
    FSDP_DIMS,
    Init,
    ShardGroups,
    fsdp_mesh,
    is_sharded,
    shard,
)

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from harness.core.mesh import ModelMesh
    from harness.worker.session import Session


def fsdp2(
    model: nn.Module,
    run: Session,
    blocks: list[nn.Module] | None = None,
    *,
    init: Init | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | int | None = None,
    offload: bool = False,
) -> nn.Module:
    """Shard the model with FSDP2 over all ranks, or over those of `attach(mesh={"dp_shard": ...})`,
    where gradients are summed first within a copy of the model and then over copies; return the
    model. Apply tensor parallelism over `run.mesh["tp"]` and `expert_parallel` before; checkpoint
    and compile blocks in between (docs/MESHES.md). Call it before the optimizer is made, since it
    replaces the parameters.

    `blocks` (default: the members of every ModuleList) are sharded one after the other, so a device
    never holds the whole model, at most the largest block or what lies in no block (the root). Each
    stage of a `harness.pipeline` is sharded over the ranks that have it. A model on the meta device
    (`with torch.device("meta")`) is initialized by `init(name, tensor)`, called for each parameter
    and buffer there with the whole tensor, to be set in place; without `init` by each module's
    `reset_parameters()`. Random values depend on `attach`'s seed and the name of the parameter or
    module: they are the same on any mesh, and on one rank.

    `mp_policy`: torch's. Parameters keep their own dtype for optimizer and snapshots, and are used
    in `param_dtype`. Exact sums take gradients as they were computed and round once, to the
    parameter's dtype; `reduce_dtype` matters for fast sums only. `reshard_after_forward`: see
    `fully_shard`. `offload`: keep parameters, gradients and optimizer state in host memory; on a
    CPU they are there anyway.

    Raises BadInput for modules on the meta device that nothing initializes, and for combinations
    that are not supported.
    """
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    peers = run._peers
    asked = {"mp_policy": mp_policy, "reshard_after_forward": reshard_after_forward}
    how: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    if offload:
        how["offload_policy"] = CPUOffloadPolicy(pin_memory=run.device.type == "cuda")
    if peers.model_mesh is not None and peers.model_mesh.tp > 1:
        _check_split(model, peers.model_mesh, reshard_after_forward)
    groups = None
    if peers.model_mesh is not None:
        alike = peers.across
        if peers.parts > 1:
            alike = run.mesh[(*FSDP_DIMS, "cp")]._flatten("alike").get_group()
        groups = ShardGroups(fsdp_mesh(run.mesh), alike, peers.same_stage, peers.expert_mesh)
    for part in model.parts if isinstance(model, Pipeline) else [model]:
        shard(part, run.device, blocks, run.seed, groups, init, **how)
    return model


def _check_split(
    model: nn.Module, mesh: ModelMesh, reshard_after_forward: bool | int | None
) -> None:
    if not is_sharded(model):
        raise BadInput(
            f"mesh {mesh}: wanted a model of which tensor parallelism splits some, found none "
            'split; call parallelize_module(block, run.mesh["tp"], plan) before harness.fsdp2, and '
            "before blocks are checkpointed or compiled (a plan's names do not reach into what "
            "those wrap), or leave tp out of the mesh"
        )
    if type(reshard_after_forward) is int:
        raise BadInput(
            f"harness.fsdp2(reshard_after_forward={reshard_after_forward}) with the mesh {mesh}: "
            "torch cannot do this with what tp splits; wanted True, False or None"
        )
