"""ZeRO-1 as a function applied to an optimizer: each rank holds the state of its own rows, and
updates these. Runs in the worker.

While the optimizer steps, its parameters are DTensors: views of this rank's rows of each whole one,
cut as FSDP2 cuts them. So are the state tensors that it makes of them, and storage keeps each row
once and gives it to any other world, with or without ZeRO-1. Behind the step every rank takes over
the rows of the others. An optimizer that is elementwise (SGD, Adam, Lion, ...) does to each element
what it would do without. With others DTensor either computes over all ranks or raises.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from harness.core.world import BadInput
from harness.worker import hidden
from harness.worker.exact import check_elementwise
from harness.worker.parallel import buckets_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from harness.worker.session import Session

# look at more than an element, in ways that DTensor does not know (torch 2.13)
WHOLE = ("Adafactor", "LBFGS", "Muon", "SparseAdam")

_sharded: weakref.WeakKeyDictionary[torch.optim.Optimizer, ShardedUpdate] = (
    weakref.WeakKeyDictionary()
)


@hidden.world.inside()
def zero1(optimizer: torch.optim.Optimizer, run: Session) -> torch.optim.Optimizer:
    """Shard what the optimizer keeps over all ranks (ZeRO-1): each holds its part of the state, and
    the whole model. Call before the first step; it stays the same object, and is returned.

    The weights are those that it makes alone, to the bit if it is elementwise. For a model that is
    sharded there is nothing to do: `fsdp2` shards the optimizer as well. Raises BadInput, also for
    optimizers that look at more than one element at a time.
    """
    from torch.distributed.device_mesh import init_device_mesh

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
        _sharded[optimizer] = ShardedUpdate(optimizer, mesh, peers.everyone)
    return optimizer


def as_stepped(optimizer: torch.optim.Optimizer) -> Any:
    """What has the `param_groups` that its state is laid out like."""
    if (update := _sharded.get(optimizer)) is None:
        return optimizer
    return SimpleNamespace(
        param_groups=[
            {"params": [update.rows(p) for p in group["params"]]}
            for group in optimizer.param_groups
        ]
    )


class ShardedUpdate:
    """An optimizer's step on this rank's rows, and the exchange behind it."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, group: dist.ProcessGroup | None
    ):
        self._mesh, self._group = mesh, group
        self._wholes: list[list[nn.Parameter]] = []  # of each group, while it steps
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._end)

    def rows(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows, as a view; a single number is everybody's."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

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
        """Rows of rank 0, which no other has more of."""
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
        """All rows of these. While some are under way the next are made ready."""
        under_way: list[tuple[list[nn.Parameter], torch.Tensor, Any]] = []
        for bucket in buckets_of(parameters):
            under_way.append((bucket, *self._send(bucket)))
            if len(under_way) > 1:
                self._take_over(*under_way.pop(0))
        for one in under_way:
            self._take_over(*one)

    def _send(self, bucket: list[nn.Parameter]) -> tuple[torch.Tensor, Any]:
        """(ranks, columns): what every rank has of them, padded to what rank 0 has."""
        widths = [self._width(p) for p in bucket]
        mine = bucket[0].new_zeros(sum(widths))
        for p, place in zip(bucket, torch.split(mine, widths), strict=True):
            rows = self._mine(p.detach()).reshape(-1)
            place[: len(rows)] = rows
        every = mine.new_empty(self._mesh.size(), len(mine))
        # the new name, from torch 2.13 on
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
