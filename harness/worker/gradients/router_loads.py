"""Counts of the tokens that a model's routers give to each expert, over all micro-batches of a step
on all replicas. Routers use them to balance without an auxiliary loss, with or without
`harness.expert_parallel`. Runs in the worker."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness.core.world import BadInput
from harness.worker.process_group import Peers


class Loads:
    """The token counts of a model's routers. `watches`: the model has such routers.

    A router has `expert_load`, an int64 buffer (experts,) that is not saved, to which forwards add
    the tokens that they give to each; and `rebalance(load)`, which is called after the last
    micro-batch with the whole step's counts, the same on all ranks."""

    def __init__(self, model: nn.Module, peers: Peers):
        """Raises BadInput if the model has routers and a replica has several ranks."""
        # not by isinstance, which does not see buffers from Python 3.12 on
        self._routers: list[Any] = [
            m for m in model.modules() if hasattr(m, "expert_load") and hasattr(m, "rebalance")
        ]
        self._peers = peers
        self._micro: int | None = None  # the micro-batch whose forward counts; None: none
        self._found: dict[int, torch.Tensor] = {}  # micro-batch -> the counts of all routers
        self.watches = bool(self._routers)
        if self.watches and peers.replica_ranks > 1:
            raise BadInput(
                f"{type(self._routers[0]).__name__} counts the tokens of its rank: wanted ranks "
                f"with samples of their own, found replicas of {peers.replica_ranks} ranks; use a "
                "mesh of dp_shard and ep"
            )

    def take_up(self, micro: int, counts: bool, more: bool = False) -> None:
        """Attribute the next forwards to this micro-batch. `counts`: it is no filler. `more`: they
        add to its earlier forwards, which routers do not see (they need a whole model)."""
        self._micro = micro if counts else None
        if counts:
            self._found.pop(micro, None)  # left from before a repetition of the step
        self._clear()

    def note(self) -> None:
        """Add up the counts of the micro-batch's forward, when a backward of it begins."""
        if self._micro is not None:
            load = torch.cat([router.expert_load for router in self._routers])
            self._found[self._micro] = load + self._found.get(self._micro, 0)
            self._clear()

    def _clear(self) -> None:
        for router in self._routers:
            router.expert_load.zero_()

    def forget(self) -> None:
        """Drop the counts of a step whose update is skipped."""
        self._found.clear()

    def settle(self, micro_batches: int = 0, some_idle: bool = False) -> None:
        """Balance the routers, after the last micro-batch of a step, on all ranks. It needs neither
        argument, as it adds up whatever was counted."""
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
