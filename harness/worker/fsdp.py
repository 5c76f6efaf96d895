"""FSDP2 as one call: `harness.fsdp2`. Runs in the worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from harness.core.world import BadInput
from harness.worker.materialize import Init
from harness.worker.pipeline import Pipeline
from harness.worker.sharding import FSDP_DIMS, ShardGroups, fsdp_mesh, is_sharded, shard

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
    """Shard the model over all ranks, or over those of `attach(mesh={"dp_shard": ...})` (FSDP2);
    then gradients are summed within a copy of the model first, and over copies next. What is split
    by tensor parallelism over `run.mesh["tp"]`, or by `expert_parallel`, is so before;
    checkpointing and compiling of blocks come between (docs/MESHES.md). Call before the optimizer
    is made: it replaces the parameters.

    `blocks` (default: the members of every ModuleList) are sharded one after the other, so no
    device ever holds the whole model, but the largest of them, or what lies in none (the root). Of
    a `harness.pipeline` each stage is sharded over the ranks that have it. A model on the meta
    device (`with torch.device("meta")`) gets its values from `init(name, tensor)`, called for each
    parameter and buffer there with the whole of it, to be set in place; without `init` by each
    module's `reset_parameters()`. They are drawn from `attach`'s seed and the name of the parameter
    or module: the same on any mesh, and on one rank.

    `mp_policy`: torch's. Parameters keep their own type for optimizer and snapshots, and are
    computed with in `param_dtype`. Exact sums take gradients as they were computed and round once,
    to the parameter's type: `reduce_dtype` is for fast ones. `reshard_after_forward`: as of
    `fully_shard`. `offload`: parameters, gradients and optimizer state lie in the host's memory; on
    a CPU they do anyway.

    Raises BadInput for modules on the meta device that nothing gives values to, and for what does
    not go together.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy

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
