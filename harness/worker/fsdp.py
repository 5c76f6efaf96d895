"""FSDP2 as one call: `harness.fsdp2`. Runs in the worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import nn

from harness.worker.sharding import shard

if TYPE_CHECKING:
    from harness.worker.session import Session


def fsdp2(model: nn.Module, run: Session, blocks: list[nn.Module] | None = None) -> nn.Module:
    """Shard the model over all ranks (FSDP2). Call before the optimizer is made: it replaces the
    parameters.

    `blocks` (default: the members of every ModuleList) are sharded one after the other, so no
    device ever holds the whole model. A model on the meta device (`with torch.device("meta")`) gets
    its values by each module's `reset_parameters()`, from `attach`'s seed and the module's name:
    the same on any number of ranks. Raises BadInput for a module there that has none.
    """
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    shard(model, run.device, blocks, run.seed)
    return model
