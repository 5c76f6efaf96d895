"""Summing over copies of a model that a foreign trainer has split over the ranks of each. Runs in
the worker.

Within a copy the trainer does everything: FSDP2 gathers parameters and averages gradients there.
What is left is the sum over copies of what each rank holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from harness.worker.gradients.parallel import BUCKET_BYTES, local_part
from harness.worker.gradients.sharding import copies_of


class SummedCopies:
    """The strategy of a model that is split within a replica. `across`: the ranks that hold the
    same parts of all copies; `within`: the ranks of this copy; `deferred`: FSDP2 averages within
    the copy in its last micro-batch only, else in each."""

    name, equal_rounds, may_repeat = "copies", False, False
    sums = "fast"

    def __init__(
        self,
        model: nn.Module,
        across: dist.ProcessGroup,
        within: dist.ProcessGroup,
        deferred: bool = True,
    ):
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.replica_ranks = dist.get_world_size(within)
        self._across, self._within = across, within
        self._copies = dist.get_world_size(across)
        self._held_by = [self._holders(p) for p in self.parameters]
        modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
        inside = {id(child) for m in modules for child in m.modules() if child is not m}
        self._roots = [m for m in modules if id(m) not in inside and deferred]

    def _holders(self, p: Any) -> int:
        """Return how many ranks of a copy hold the same elements of a parameter."""
        ranks = self.replica_ranks
        return copies_of(p, ranks) if hasattr(p, "placements") else ranks

    def start(self, micro_batches: int) -> None: ...

    def micro(self, last: bool, filler: bool = False) -> None:
        """Let FSDP2 reduce within the copy in the backward of the copy's own last micro-batch,
        wherever that lies in the trainer's accumulation."""
        for root in self._roots:
            root.set_requires_gradient_sync(last)
            root.set_is_last_backward(last)

    def micro_done(self) -> None: ...

    def again(self) -> bool:
        return False

    def reduce(self) -> None:
        for p in self.parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        if self._copies == 1:
            return
        for bucket in _buckets(self._grads()):
            flat = torch.cat([grad.reshape(-1) for grad in bucket])
            dist.all_reduce(flat, group=self._across)
            parts = torch.split(flat, [grad.numel() for grad in bucket])
            for grad, summed in zip(bucket, parts, strict=True):
                grad.copy_(summed.view_as(grad))

    def divide(self, weight: float | torch.Tensor) -> None:
        for grad in self._grads():
            grad.div_(weight.to(grad.device) if isinstance(weight, torch.Tensor) else weight)

    def norm(self) -> torch.Tensor:
        """Return the norm of all gradients; an element on several ranks of the copy counts once."""
        squares = [
            torch.linalg.vector_norm(local_part(p.grad), dtype=torch.float32) ** 2 / count
            for p, count in zip(self.parameters, self._held_by, strict=True)
            if p.grad is not None
        ]
        total = torch.stack(squares).sum()
        dist.all_reduce(total, group=self._within)
        return total.sqrt()

    def clip(self, coefficient: torch.Tensor) -> None:
        for grad in self._grads():
            grad.mul_(coefficient.to(grad))

    def zero(self) -> None:
        for p in self.parameters:
            p.grad = None

    def share_found_inf(self, scaler: Any, optimizer: Any) -> None:
        """Make the ranks of a copy skip the step together; all copies have the same gradients."""
        for found in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._within)

    def _grads(self) -> list[torch.Tensor]:
        return [local_part(p.grad) for p in self.parameters if p.grad is not None]


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
