"""Context parallelism: the ranks of `cp` share the positions of each sequence. Runs in the worker.

A sequence is cut into twice as many chunks as there are ranks. Rank r has the r-th chunk from the
front and the r-th from the back, so that under a causal mask all ranks have the same amount of work
(later positions attend to more). Each rank computes its own positions only; attention gathers keys
and values of all positions. torch's `context_parallel` does not support CPU attention kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import _functional_collectives as funcol
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from harness.core.batch import seed_for
from harness.core.world import BadInput

if TYPE_CHECKING:
    from harness.worker.session import Session


def split_context(run: Session, *tensors: torch.Tensor, dim: int = 1) -> tuple[torch.Tensor, ...]:
    """Return this rank's positions of each tensor along `dim`: inputs, targets, and the positions
    themselves for models that encode them (`torch.arange(length)[None]`). Without `cp` the tensors
    are returned whole.

    Afterwards each rank of `cp` has random numbers of its own (dropout of its positions) until the
    next micro-batch. Raises BadInput for a length that is no multiple of twice `cp`.
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
    """Compute `scaled_dot_product_attention` of this rank's positions to all positions. Tensors are
    (batch, heads, positions, size), with the positions that `split_context` returned. Apply
    whatever depends on a position (RoPE) before. Without `cp` it is torch's own function."""
    ranks, place = _ranks(run), _place(run)
    how: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
    if ranks == 1:
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal, **how)

    both = torch.cat([key, value], -1)  # one exchange for both
    # torch 2.13 renamed the function
    name = "all_gather_single_autograd"
    gather = getattr(funcol, name if hasattr(funcol, name) else "all_gather_tensor_autograd")
    gathered = gather(both.contiguous(), 0, run.mesh["cp"].get_group())
    # (batch, heads, positions, size): each rank's chunk from the front, then that from the back
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
    """Give each rank of a replica its own random numbers inside the block; outside, all draw the
    same. Needed for dropout of what is split between them (columns under `tp`). The numbers depend
    on (seed, step, micro-batch) and the rank's place in its replica, not on other replicas;
    activation checkpointing draws the same numbers again."""
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
    """Return a seed for this place. Every rank draws one number, so their generators stay equal."""
    return seed_for(int(torch.randint(2**62, ())), place, 0)


def _seed(seed: int) -> None:
    """Seed torch's generators only; see `seed_everything`."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)
