"""The other ranks, as the Trainer's parts need them. Runs in the worker."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from harness.worker.session import Session


class Company:
    """All ranks call each of these together, in the same order."""

    def __init__(self, run: Session):
        self._peers = run._peers
        self.alone = self._peers.control is None
        self.rank, self.ranks = self._peers.rank, self._peers.world
        self.leads = self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """Each rank's, in their order."""
        return self._peers.gather(value)

    def first(self, value: Callable[[], Any]) -> Any:
        """Rank 0's, which alone computes it."""
        return self._peers.agree(value)

    def value_of_first(self, value: Any) -> Any:
        return self._peers.agree(lambda: value)

    def total(self, numbers: list[float]) -> list[float]:
        """Their sums over ranks. Exact where one rank has a number and the others have 0."""
        if self.alone:
            return numbers
        every = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(every, group=self._peers.control)
        return [float(value) for value in every]

    @contextlib.contextmanager
    def leader_first(self, of_each_node: bool) -> Iterator[None]:
        """The first rank (of each node, or of all) does what follows, and then the others do."""
        first = (self._peers.local_rank if of_each_node else self._peers.rank) == 0
        if not first:
            self._peers.barrier()
        try:
            yield
        finally:
            if first:
                self._peers.barrier()
