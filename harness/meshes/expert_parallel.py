"""Expert parallelism as one call: `harness.expert_parallel`. Runs in the worker.

A layer's experts are divided among the ranks of `ep`, a whole number for each. A rank sends the
rows that its own samples route to an expert to the rank that has it, and gets the results back in
the same order. Rows are neither dropped nor padded: ranks first exchange how many rows they send.

    rank     0                        1
    has      experts 0, 1             experts 2, 3
    rows     a0 a1 a2 a3              b0 b1 b2 b3       (for experts 0, 1, 2, 3)
    works    a0 b0 | a1 b1            a2 b2 | a3 b3     by expert, then rank, then original order

So an expert sees the rows of all ranks of `ep` together, and when the backward ends, the gradient
of its parameters is the sum over these ranks; FSDP2 sums it over the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from harness.core.world import BadInput
from harness.worker.process_group import same_everywhere

if TYPE_CHECKING:
    from harness.worker.session import Session


def expert_parallel(model: nn.Module, run: Session, experts: Sequence[nn.Module]) -> nn.Module:
    """Divide the experts of each layer among the ranks of `ep`, in a mesh such as
    {"dp_shard": 8, "ep": 4}, and return the model; without `ep` nothing changes. Call it before
    `harness.fsdp2`, which shards each rank's experts over the other ranks.

    `experts`: the modules of `model` that hold them, one for each layer. The first dimension of
    each parameter counts experts, and `forward(rows, counts)` takes rows (n, ...) sorted by expert
    and the number of rows of each expert, (experts,) int64; it returns n rows. It needs no change:
    it is called with the rows of all ranks for the experts that this rank has, with their counts
    and their parameters. Raises BadInput.
    """
    mesh = run._peers.expert_mesh
    if mesh is None:
        return model
    names = {id(module): name for name, module in model.named_modules()}
    for module in experts:
        if id(module) not in names:
            raise BadInput(
                f"expert_parallel: wanted modules of the model, found a {type(module).__name__} "
                "that is none of them"
            )
        _check(module, names[id(module)], mesh["ep"].size())
        if not any(p.is_meta for p in module.parameters()):  # else fsdp2 initializes them later
            module.to(run.device)
            same_everywhere(module)
        give_out(module, mesh["ep"])
    return model


def _check(module: nn.Module, name: str, ranks: int) -> None:
    shapes = {n: tuple(p.shape) for n, p in module.named_parameters()}
    counts = {shape[0] if shape else 0 for shape in shapes.values()}
    if len(counts) != 1 or 0 in counts or counts.pop() % ranks:
        raise BadInput(
            f"{name or 'the model itself'}: wanted parameters whose first dimension is the "
            f"experts', a multiple of ep={ranks}; found {shapes or 'none'}"
        )
    if len(list(module.modules())) > 1:
        raise BadInput(
            f"{name or 'the model itself'}: wanted a module that holds all experts in parameters "
            f"of its own, such as (experts, out, in); found modules in it"
        )


def give_out(module: nn.Module, mesh: Any) -> None:
    """Replace the module's parameters, which are equal on all ranks of the one-dimensional `mesh`,
    by equal parts, one on each rank, and let its `forward` exchange rows."""
    for name, p in list(module.named_parameters()):
        part = distribute_tensor(p.detach(), mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(part, p.requires_grad))
    module.forward = _sent_there_and_back(module, mesh.get_group())


def _sent_there_and_back(
    experts: nn.Module, group: dist.ProcessGroup
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    forward, ranks = experts.forward, group.size()

    def dispatch(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        arriving = torch.empty_like(counts)  # (ranks * own experts,)
        dist.all_to_all_single(arriving, counts.contiguous(), group=group)
        both = torch.stack([counts, arriving]).view(2, ranks, -1).sum(2)
        sent, received = both.tolist()  # waits for the device, only once
        rows = _exchanged(rows, sent, received, group)
        own = torch.arange(len(counts) // ranks, device=rows.device).repeat(ranks)
        order = own.repeat_interleave(arriving, output_size=len(rows)).argsort(stable=True)
        with _own_parts(experts):
            out = forward(rows.index_select(0, order), arriving.view(ranks, -1).sum(0))
        out = out.index_select(0, order.argsort())
        return _exchanged(out, received, sent, group)

    return dispatch


@contextlib.contextmanager
def _own_parts(module: nn.Module) -> Iterator[None]:
    """Make the module's parameters ordinary tensors inside the block: this rank's experts."""
    parameters: dict[str, Any] = module._parameters
    held = dict(parameters)
    parameters.update((name, p.to_local()) for name, p in held.items() if p is not None)
    try:
        yield
    finally:
        parameters.update(held)


class _AllToAll(torch.autograd.Function):
    """An all-to-all of rows (n, ...): the first `sent[0]` go to the group's first rank, and so on.
    Returns the received rows, in the order of ranks. The backward sends gradients back."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        sent: list[int],
        received: list[int],
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.back = received, sent, group
        came = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(came, rows.contiguous(), received, sent, group=group)
        return came

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _exchanged(grads[0], *ctx.back), None, None, None


def _exchanged(
    rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    came: torch.Tensor = _AllToAll.apply(  # type: ignore[no-untyped-call]
        rows, sent, received, group
    )
    return came
