"""FSDP2 as one call: `harness.fsdp2`. Runs in the worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from harness.worker.pipeline import Pipeline
from harness.worker.sharding import FSDP_DIMS, shard

if TYPE_CHECKING:
    from harness.worker.session import Session


def fsdp2(model: nn.Module, run: Session, blocks: list[nn.Module] | None = None) -> nn.Module:
    """Shard the model over all ranks, or over those of `attach(mesh={"dp_shard": ...})` (FSDP2);
    then gradients are summed within a copy of the model first, and over copies next. What is split
    by tensor parallelism over `run.mesh["tp"]` is so before. Call before the optimizer is made: it
    replaces the parameters.

    `blocks` (default: the members of every ModuleList) are sharded one after the other, so no
    device ever holds the whole model. Of a `harness.pipeline` each stage is sharded over the ranks
    that have it. A model on the meta device (`with torch.device("meta")`) gets
    its values by each module's `reset_parameters()`, from `attach`'s seed and the module's name:
    the same on any number of ranks. Raises BadInput for a module there that has none.
    """
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    peers = run._peers
    for part in model.parts if isinstance(model, Pipeline) else [model]:
        if peers.model_mesh is None:
            shard(part, run.device, blocks, run.seed)
        else:
            mesh = run.mesh[FSDP_DIMS]
            shard(part, run.device, blocks, run.seed, mesh, peers.across, peers.same_stage)
    return model
