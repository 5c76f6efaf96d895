"""Context parallelism: the ranks of `cp` share the positions of each sequence. Runs in the worker.

A sequence is cut into twice as many chunks as there are ranks. Rank r has the r-th from the front
and the r-th from the back, so all have the same work to do under a causal mask (positions in the
back attend to more). In between, a model works on its own positions only; attention gathers keys
and values of all of them. torch's `context_parallel` does not know the attention kernels of CPUs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from harness.core.batch import seed_for
from harness.core.world import BadInput

if TYPE_CHECKING:
    from harness.worker.session import Session


def split_context(run: Session, *tensors: torch.Tensor, dim: int = 1) -> tuple[torch.Tensor, ...]:
    """This rank's positions of each, along `dim`: inputs, targets, and the positions themselves for
    whoever encodes them (`torch.arange(length)[None]`). Without `cp` all of them.

    Behind it the ranks of `cp` draw at random each for itself (dropout of their positions), until
    the next micro-batch. Raises BadInput for a length that cannot be shared.
    """
    ranks, place = _ranks(run), _place(run)
    if ranks == 1:
        return tensors
    mine = []
    for t in tensors:
        size, left = divmod(t.shape[dim], 2 * ranks)
        if left:
            near = (t.shape[dim] // (2 * ranks) + 1) * 2 * ranks
            raise BadInput(
                f"split_context: wanted a length that is a multiple of {2 * ranks} (twice cp), "
                f"found {t.shape[dim]} along dimension {dim} of {tuple(t.shape)}; pad it to {near}"
            )
        both = [t.narrow(dim, chunk * size, size) for chunk in (place, 2 * ranks - 1 - place)]
        mine.append(torch.cat(both, dim))
    _seed(_drawn(place))
    return tuple(mine)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    run: Session,
    *,
    causal: bool = True,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`scaled_dot_product_attention` of this rank's positions to all of them: (batch, heads,
    positions, size) each, as `split_context` gave them. What depends on a position (RoPE) is
    applied before. Without `cp` it is torch's own."""
    ranks, place = _ranks(run), _place(run)
    how: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
    if ranks == 1:
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal, **how)
    from torch.distributed import _functional_collectives as funcol
    from torch.nn.attention.bias import causal_lower_right

    both = torch.cat([key, value], -1)  # one exchange
    # the new name, from torch 2.13 on
    name = "all_gather_single_autograd"
    gather = getattr(funcol, name if hasattr(funcol, name) else "all_gather_tensor_autograd")
    gathered = gather(both.contiguous(), 0, run.mesh["cp"].get_group())
    # (batch, heads, positions, size): from the front, and from the back
    chunks = [half for one in gathered.chunk(ranks) for half in one.chunk(2, 2)]
    ordered = torch.cat([*chunks[::2], *chunks[::-2]], 2)
    keys, values = torch.split(ordered, [key.shape[-1], value.shape[-1]], -1)
    if not causal:
        return F.scaled_dot_product_attention(query, keys, values, **how)
    found = []
    for part, chunk in zip(query.chunk(2, 2), (place, 2 * ranks - 1 - place), strict=True):
        seen = (chunk + 1) * part.shape[2]
        found.append(
            F.scaled_dot_product_attention(
                part,
                keys[:, :, :seen],
                values[:, :, :seen],
                attn_mask=causal_lower_right(part.shape[2], seen),
                **how,
            )
        )
    return torch.cat(found, 2)


@contextlib.contextmanager
def own_randomness(run: Session) -> Iterator[None]:
    """Inside, each rank of a replica draws at random for itself; outside, all draw the same. For
    dropout of what is split between them (columns under `tp`). A function of (seed, step,
    micro-batch) and the rank's place in its replica, so of no other replica; what is drawn again
    under activation checkpointing is the same."""
    mesh = run._peers.model_mesh
    inside = 1 if mesh is None else mesh.cp * mesh.tp
    if inside == 1:
        yield
        return
    seed = _drawn(run.rank % inside)
    with torch.random.fork_rng([run.device] if run.device.type == "cuda" else []):
        _seed(seed)
        yield


def _ranks(run: Session) -> int:
    return run._peers.parts


def _place(run: Session) -> int:
    return 0 if _ranks(run) == 1 else run.mesh["cp"].get_local_rank()


def _drawn(place: int) -> int:
    """A seed for this place; all ranks draw alike, so they go on alike."""
    return seed_for(int(torch.randint(2**62, ())), place, 0)


def _seed(seed: int) -> None:
    """Of torch alone; see `seed_everything`."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)
