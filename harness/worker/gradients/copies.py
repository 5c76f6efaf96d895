"""Summing over copies of a model that a foreign trainer has split over the ranks of each. Runs in
the worker.

Within a copy the trainer does everything: FSDP2 gathers parameters and averages gradients there.
What is left is the sum over copies of what each rank holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from harness.worker.gradients.parallel import BUCKET_BYTES, InParts
from harness.worker.gradients.sharding import copies_of


class SummedCopies(InParts):
    """The strategy of a model that is split within a replica. `across`: the ranks that hold the
    same parts of all copies; `within`: the ranks of this copy; `deferred`: FSDP2 averages within
    the copy in its own last micro-batch, wherever that lies in the trainer's accumulation; else in
    each."""

    name, equal_rounds = "copies", False

    def __init__(
        self,
        model: nn.Module,
        across: dist.ProcessGroup,
        within: dist.ProcessGroup,
        deferred: bool = True,
    ):
        super().__init__(model, within)
        self.replica_ranks = dist.get_world_size(within)
        self._copies_of = [copies_of(p, self.replica_ranks) for p in self.parameters]
        self._across = across
        if not deferred:
            self._roots = []

    def reduce(self) -> None:
        for p in self.parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        sum_over(self._across, self._local())


def sum_over(group: dist.ProcessGroup, grads: Iterable[torch.Tensor]) -> None:
    """Add up over `group` what each of its ranks holds, in place."""
    if group.size() == 1:
        return
    for bucket in _buckets(grads):
        flat = torch.cat([grad.reshape(-1) for grad in bucket])
        dist.all_reduce(flat, group=group)
        parts = torch.split(flat, [grad.numel() for grad in bucket])
        for grad, summed in zip(bucket, parts, strict=True):
            grad.copy_(summed.view_as(grad))


def _buckets(grads: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield runs of neighbouring gradients of one dtype and device, of about BUCKET_BYTES each, so
    that the sums need no second copy of all of them."""
    bucket: list[torch.Tensor] = []
    nbytes = 0
    for grad in grads:
        like = bucket and (bucket[0].dtype, bucket[0].device) == (grad.dtype, grad.device)
        if bucket and (not like or nbytes >= BUCKET_BYTES):
            yield bucket
            bucket, nbytes = [], 0
        bucket.append(grad)
        nbytes += grad.numel() * grad.element_size()
    if bucket:
        yield bucket
