"""How many tokens each expert was given, over all micro-batches of a step on all replicas: what
routers balance by without an auxiliary loss. Runs in the worker.

Counts are whole numbers, so their sum is the same on any world. What a forward counts belongs to
the micro-batch that it is of; fillers, evaluations and what a backward computes again count
nothing.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from harness.core.world import BadInput
from harness.worker.peers import Peers


class Balanced(Protocol):
    """A router (an nn.Module) that is balanced once per step."""

    expert_load: torch.Tensor
    """(experts,) int64, a buffer that is not saved: forwards add the tokens that they give to
    each."""

    def rebalance(self, load: torch.Tensor) -> None:
        """Behind the last micro-batch. `load`: as `expert_load`, of the whole step; the same on
        all ranks."""


class Loads:
    """Those of a model's routers. `watches`: there are any."""

    def __init__(self, model: nn.Module, peers: Peers):
        """Raises BadInput."""
        # not by isinstance: from Python 3.12 on that sees no buffers
        self._routers: list[Any] = [
            m for m in model.modules() if hasattr(m, "expert_load") and hasattr(m, "rebalance")
        ]
        self._peers = peers
        self._micro: int | None = None  # whose forward runs; None: of none that counts
        self._found: dict[int, torch.Tensor] = {}  # by micro-batch: of all routers
        self.watches = bool(self._routers)
        if self.watches and peers.replica_ranks > 1:
            raise BadInput(
                f"{type(self._routers[0]).__name__} counts the tokens of its rank: wanted ranks "
                f"with samples of their own, found replicas of {peers.replica_ranks} ranks; use a "
                "mesh of dp_shard and ep"
            )

    def take_up(self, micro: int, counts: bool) -> None:
        """The next forwards are of this micro-batch. `counts`: it is no filler."""
        self._micro = micro if counts else None
        if counts:
            self._found.pop(micro, None)  # it may come again
        self._clear()

    def note(self) -> None:
        """A backward of it begins."""
        if self.watches and self._micro is not None:
            load = torch.cat([router.expert_load for router in self._routers])
            self._found[self._micro] = load + self._found.get(self._micro, 0)
            self._clear()

    def _clear(self) -> None:
        for router in self._routers:
            router.expert_load.zero_()

    def settle(self) -> None:
        """Behind the last micro-batch of a step, on all ranks: balance."""
        if not self.watches:
            return
        every = torch.cat([torch.zeros_like(router.expert_load) for router in self._routers])
        for load in self._found.values():
            every += load
        if self._peers.control is not None:
            dist.all_reduce(every)
        sizes = [len(router.expert_load) for router in self._routers]
        with torch.no_grad():
            for router, load in zip(self._routers, torch.split(every, sizes), strict=True):
                router.rebalance(load)
        self._found.clear()
