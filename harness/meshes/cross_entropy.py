"""Cross-entropy of a language model's head that never holds all logits at once:
`harness.chunked_cross_entropy`. Runs in the worker.

torch's own `linear_cross_entropy(..., options=LinearCrossEntropyOptions())` (from 2.13 on) does the
same on one rank; this one also supports heads that tensor parallelism splits by rows, and older
versions of torch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness.core.world import BadInput


def chunked_cross_entropy(
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    chunks: int = 8,
    reduction: str = "mean",
    ignore_index: int = -100,
) -> torch.Tensor:
    """Return `cross_entropy(hidden @ head_weight.T, targets)`, 0-d float32, computed with the
    logits of one chunk of tokens at a time. `hidden` (..., dim); `head_weight` (vocabulary, dim),
    or a DTensor whose rows tensor parallelism splits, and then `hidden` is the same on its ranks;
    `targets` (...), int64; tokens of `ignore_index` are left out. `reduction`: "mean" (over the
    other tokens; 0 if there are none) or "sum".

    Both gradients are computed with the loss, so `backward` may be called only once, and second
    derivatives are not available. With FSDP2 call it inside the forward of the module that holds
    `head_weight`, where that is whole. Raises BadInput.
    """
    if reduction not in ("mean", "sum") or chunks < 1:
        raise BadInput(
            "chunked_cross_entropy: wanted reduction 'mean' or 'sum' and at least 1 chunk, found "
            f"{reduction!r} and {chunks}"
        )
    if hasattr(hidden, "full_tensor"):
        hidden = hidden.full_tensor()
    weight, first, group = _rows(head_weight)
    dim = weight.shape[-1]
    if hidden.shape != (*targets.shape, dim):
        raise BadInput(
            f"chunked_cross_entropy: wanted hidden of shape {(*targets.shape, dim)} for targets "
            f"{tuple(targets.shape)} and a head {tuple(head_weight.shape)}, found "
            f"{tuple(hidden.shape)}"
        )
    if not torch.is_grad_enabled():
        hidden, weight = hidden.detach(), weight.detach()
    rows, wanted = hidden.reshape(-1, dim), targets.reshape(-1)
    counts = wanted != ignore_index
    amount = counts.sum().clamp(min=1) if reduction == "mean" else 1
    scale = counts.float() / amount  # the factor of each token's loss
    loss: torch.Tensor = _Chunked.apply(rows, weight, wanted, scale, first, group, chunks)  # type: ignore[no-untyped-call]
    return loss


def _rows(head_weight: Any) -> tuple[torch.Tensor, int, dist.ProcessGroup | None]:
    """Return this rank's rows of the head, the index of the first of them, and the group of ranks
    that share the rows (None: all rows are here). Raises BadInput for another layout."""
    if not hasattr(head_weight, "placements"):
        return head_weight, 0, None
    mesh = head_weight.device_mesh
    sharded = [(d, at) for d, at in enumerate(head_weight.placements) if not at.is_replicate()]
    names = mesh.mesh_dim_names or ()
    if not sharded:
        return head_weight.to_local(), 0, None
    if len(sharded) > 1 or not sharded[0][1].is_shard(0) or "dp_shard" in names or not names:
        raise BadInput(
            "chunked_cross_entropy: wanted a head that is whole, or whose rows tensor parallelism "
            f"shares out (ColwiseParallel), found {head_weight.placements} on the mesh "
            f"{names or tuple(mesh.shape)}; with FSDP2 call it inside the forward of the module "
            "that holds the head's weight"
        )
    dim = sharded[0][0]
    most = -(-head_weight.shape[0] // mesh.size(dim))  # rows of each rank but the last ones
    first = min(most * mesh.get_local_rank(dim), head_weight.shape[0])
    return head_weight.to_local(), first, mesh.get_group(dim)


class _Chunked(torch.autograd.Function):
    """The sum of scaled losses of tokens (n, dim), from this rank's rows of the head (v, dim),
    targets (n,) and the factor of each token's loss (n,). `first`: index of the first of these
    rows; `group`: the ranks that share the rows; None: all rows are here."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        scale: torch.Tensor,
        first: int,
        group: dist.ProcessGroup | None,
        chunks: int,
    ) -> torch.Tensor:
        by_rows, by_weight, *_ = ctx.needs_input_grad
        d_rows = torch.empty_like(rows) if by_rows else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if by_weight else None
        loss = torch.zeros((), dtype=torch.float32, device=rows.device)
        size = max(1, -(-len(rows) // chunks))
        for at in range(0, len(rows), size):
            some = slice(at, at + size)
            logits = nn.functional.linear(rows[some], weight).float()
            top = logits.amax(1) if len(weight) else logits.new_full((len(logits),), -torch.inf)
            _over(group, top, dist.ReduceOp.MAX)
            place = targets[some] - first
            mine = (place >= 0) & (place < len(weight))  # tokens whose target's row is here
            place = place.where(mine, 0)[:, None]
            probabilities = logits.sub_(top[:, None])
            right = torch.zeros_like(top)
            if len(weight):
                right = probabilities.gather(1, place)[:, 0].where(mine, 0)
            sums = probabilities.exp_().sum(1)
            both = torch.stack([sums, right])
            _over(group, both, dist.ReduceOp.SUM)
            sums, right = both
            loss += ((sums.log() - right) * scale[some]).sum()
            probabilities.mul_((scale[some] / sums)[:, None])
            if len(weight):
                probabilities.scatter_add_(1, place, -(scale[some] * mine)[:, None])
            if d_weight is not None:
                d_weight.addmm_(probabilities.T, rows[some].float())
            if d_rows is not None:
                d_rows[some] = (probabilities.to(weight.dtype) @ weight).to(rows.dtype)
        if d_rows is not None:
            _over(group, d_rows, dist.ReduceOp.SUM)
        ctx.made = (d_rows, None if d_weight is None else d_weight.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> Any:
        if ctx.made is None:
            raise BadInput("chunked_cross_entropy: backward was called a second time; once only")
        made, ctx.made = ctx.made, None
        grads = (None if one is None else one.mul_(outer[0].to(one.dtype)) for one in made)
        return (*grads, None, None, None, None, None)


def _over(group: dist.ProcessGroup | None, values: torch.Tensor, op: Any) -> None:
    if group is not None:
        dist.all_reduce(values, op=op, group=group)
