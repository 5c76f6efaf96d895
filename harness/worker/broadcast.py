"""Tensors that every replica takes from the first one. Runs in the worker."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def same_everywhere(
    model: nn.Module,
    across: dist.ProcessGroup | None = None,
    copies: dist.ProcessGroup | None = None,
    shards: bool = True,
) -> None:
    """Give every replica the parameters and buffers of the first (a model built with other
    randomness would train apart).

    `across`: the ranks at the same place of all replicas; then DTensors, whose shards lie within a
    replica, are given too. None: every rank is a replica, and DTensors are of all. `copies`: the
    ranks at the same place of all copies, where a copy is shared by several replicas: then DTensors
    are given to these. `shards`: False for what is whole only.
    """
    if not dist.is_initialized() or dist.get_world_size(across) == 1:
        return
    of_shards = across if copies is None else copies
    tensors: Iterable[Any] = [*model.parameters(), *model.buffers()]
    with torch.no_grad():
        for tensor in tensors:
            if hasattr(tensor, "to_local"):
                if shards and of_shards is not None and dist.get_world_size(of_shards) > 1:
                    _broadcast(tensor.to_local(), of_shards)
            elif 0 not in tensor.stride():
                _broadcast(tensor.detach(), across)


def _broadcast(tensor: torch.Tensor, across: dist.ProcessGroup | None) -> None:
    whole = tensor.contiguous()
    # as bytes: not every backend knows every dtype
    dist.broadcast(whole.reshape(-1).view(torch.uint8), src=_first(across), group=across)
    if whole is not tensor:
        tensor.copy_(whole)


def share(buffers: Sequence[torch.Tensor], across: dist.ProcessGroup | None = None) -> None:
    """Give every replica the `buffers` of the first, in one exchange for each dtype. As
    DistributedDataParallel does before each forward. `across`: as in `same_everywhere`."""
    buffers = [b.to_local() if hasattr(b, "to_local") else b.detach() for b in buffers]
    for kind in dict.fromkeys((b.dtype, b.device) for b in buffers):
        mine = [b for b in buffers if (b.dtype, b.device) == kind]
        flat = torch.cat([b.reshape(-1) for b in mine])
        dist.broadcast(flat.view(torch.uint8), src=_first(across), group=across)
        for b, values in zip(mine, torch.split(flat, [b.numel() for b in mine]), strict=True):
            b.copy_(values.view_as(b))


def _first(across: dist.ProcessGroup | None) -> int:
    """The rank of the first replica, as it is called in the whole world."""
    return 0 if across is None else dist.get_global_rank(across, 0)
