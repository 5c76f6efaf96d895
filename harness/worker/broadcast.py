"""Tensors that every rank takes from one rank. Runs in the worker."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn


def same_everywhere(model: nn.Module) -> None:
    """Give every rank rank 0's parameters and buffers (a model built with other randomness
    would train apart). Not of DTensors."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                if not hasattr(tensor, "to_local") and 0 not in tensor.stride():
                    _broadcast(tensor.detach())


def _broadcast(tensor: torch.Tensor) -> None:
    whole = tensor.contiguous()
    # as bytes: not every backend knows every dtype
    dist.broadcast(whole.reshape(-1).view(torch.uint8), src=0)
    if whole is not tensor:
        tensor.copy_(whole)


def share(buffers: Sequence[torch.Tensor]) -> None:
    """Give every rank rank 0's `buffers`, in one exchange for each dtype. As
    DistributedDataParallel does before each forward."""
    buffers = [b.detach() for b in buffers]
    for kind in dict.fromkeys((b.dtype, b.device) for b in buffers):
        mine = [b for b in buffers if (b.dtype, b.device) == kind]
        flat = torch.cat([b.reshape(-1) for b in mine])
        dist.broadcast(flat.view(torch.uint8), src=0)
        for b, values in zip(mine, torch.split(flat, [b.numel() for b in mine]), strict=True):
            b.copy_(values.view_as(b))
