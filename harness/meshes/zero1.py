"""ZeRO-1 as a function applied to an optimizer: each rank holds the state of its own rows, and
updates only these. Runs in the worker.

While the optimizer steps, its parameters are DTensors: views of this rank's rows of each whole
parameter, cut as FSDP2 cuts them. The state tensors made from them are too, so storage keeps each
row once, and any other world can load it, with or without ZeRO-1. After the step, every rank
receives the rows of the others. An elementwise optimizer (SGD, Adam, Lion, ...) computes the same
as without ZeRO-1. For others, DTensor either computes over all ranks or raises.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from harness.core.world import BadInput
from harness.worker import alone
from harness.worker.gradients.exact_sums import check_elementwise
from harness.worker.gradients.parallel import buckets_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from harness.worker.session import Session

# optimizers that are not elementwise, in ways that DTensor does not support (torch 2.13)
WHOLE = ("Adafactor", "LBFGS", "Muon", "SparseAdam")


@alone.world.inside()
def zero1(optimizer: torch.optim.Optimizer, run: Session) -> torch.optim.Optimizer:
    """Shard the optimizer's state over all ranks (ZeRO-1): each rank holds its part of the state,
    and the whole model. Call it before the first step. It returns the same object.

    The weights are the same as without ZeRO-1, to the bit if the optimizer is elementwise. A
    sharded model does not need it: `fsdp2` shards the optimizer as well. Raises BadInput, also for
    optimizers that use more than one element at a time.
    """
    peers, kind = run._peers, type(optimizer).__name__
    held = list(_parameters(optimizer))
    if peers.copy_ranks > 1 or any(hasattr(p, "to_local") for p in held):
        raise BadInput(
            f"zero1({kind}): wanted parameters that every rank has whole, found a model that lies "
            "on a mesh, whose optimizer is sharded with it; leave zero1 out, or the mesh and fsdp2"
        )
    if kind in WHOLE:
        raise BadInput(
            f"zero1({kind}): wanted an optimizer that treats each element by itself, such as "
            "SGD or AdamW; this one looks at whole matrices or at all parameters: leave zero1 out"
        )
    if optimizer.state:
        raise BadInput(
            f"zero1({kind}): wanted an optimizer that has not stepped yet; call it right behind "
            "its constructor"
        )
    if run.reduce != "fast":
        check_elementwise([optimizer], "zero1")
    if peers.world > 1:
        mesh = init_device_mesh(run.device.type, (peers.world,))
        ShardedUpdate(optimizer, mesh, peers.everyone)
    return optimizer


class ShardedUpdate:
    """The hooks that make an optimizer step on this rank's rows, and exchange them afterwards."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, group: dist.ProcessGroup | None
    ):
        self._mesh, self._group = mesh, group
        self._wholes: list[list[nn.Parameter]] = []  # whole parameters by group, during a step
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._end)
        # storage asks for it: see `harness.worker.optimizer_state.as_stepped`
        steps: Any = optimizer
        steps.as_stepped = functools.partial(self._as_stepped, optimizer)

    def _as_stepped(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return an object with the optimizer's `param_groups` while it steps: DTensors of this
        rank's rows."""
        return SimpleNamespace(
            param_groups=[
                {"params": [self.rows(p) for p in group["params"]]}
                for group in optimizer.param_groups
            ]
        )

    def rows(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows as a DTensor view; a 0-d tensor is replicated."""
        whole = whole.detach()
        return DTensor.from_local(
            self._mine(whole) if whole.ndim else whole,
            self._mesh,
            [Shard(0) if whole.ndim else Replicate()],
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )

    def _mine(self, whole: torch.Tensor) -> torch.Tensor:
        most = self._most(whole)
        first = min(self._mesh.get_local_rank() * most, len(whole))
        return whole[first : first + most]

    def _most(self, whole: torch.Tensor) -> int:
        """Return the number of rows of rank 0; no other rank has more."""
        return -(-len(whole) // self._mesh.size())

    def _begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(value is not None for value in (*args[1:], *kwargs.values())):
            raise BadInput("zero1: wanted optimizer.step() without a closure")
        self._wholes = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [self.rows(p) for p in group["params"]]
        for p, mine in self._pairs(optimizer):
            if p.grad is not None:
                mine.grad = self.rows(p.grad)
            _move(optimizer.state, p, mine)

    def _end(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for p, mine in self._pairs(optimizer):
            _move(optimizer.state, mine, p)
        for group, wholes in zip(optimizer.param_groups, self._wholes, strict=True):
            group["params"] = wholes
        self._wholes = []
        self._gather([p for p in _parameters(optimizer) if p.grad is not None and p.ndim])

    def _pairs(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[Any, Any]]:
        for group, wholes in zip(optimizer.param_groups, self._wholes, strict=True):
            yield from zip(wholes, group["params"], strict=True)

    def _gather(self, parameters: Sequence[nn.Parameter]) -> None:
        """Gather all rows of these parameters, preparing a bucket while another is in flight."""
        under_way: list[tuple[list[nn.Parameter], torch.Tensor, Any]] = []
        for bucket in buckets_of(parameters):
            under_way.append((bucket, *self._send(bucket)))
            if len(under_way) > 1:
                self._take_over(*under_way.pop(0))
        for one in under_way:
            self._take_over(*one)

    def _send(self, bucket: list[nn.Parameter]) -> tuple[torch.Tensor, Any]:
        """Begin to gather the rows of a bucket. Return (ranks, columns), each rank's rows padded to
        the size of rank 0's, and the work to wait for."""
        widths = [self._width(p) for p in bucket]
        mine = bucket[0].new_zeros(sum(widths))
        for p, place in zip(bucket, torch.split(mine, widths), strict=True):
            rows = self._mine(p.detach()).reshape(-1)
            place[: len(rows)] = rows
        every = mine.new_empty(self._mesh.size(), len(mine))
        # the name since torch 2.13, or the old one
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        return every, gather(every.view(-1), mine, group=self._group, async_op=True)

    def _take_over(self, bucket: list[nn.Parameter], every: torch.Tensor, work: Any) -> None:
        work.wait()
        places = torch.split(every, [self._width(p) for p in bucket], 1)
        for p, place in zip(bucket, places, strict=True):
            p.detach().copy_(place.reshape(-1)[: p.numel()].view(p.shape))

    def _width(self, p: nn.Parameter) -> int:
        return self._most(p) * p[:1].numel()


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _move(state: Any, key: Any, to: Any) -> None:
    if key in state:
        state[to] = state.pop(key)
