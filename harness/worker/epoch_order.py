"""In which order a loop of epochs reads its samples, where it is in it, and how a step is cut out
of it. Runs in the worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from harness.core.batch import Batching, indices_at, seed_for
from harness.core.world import BadInput
from harness.worker.loader import seed_everything
from harness.worker.own_loop import DataPlace

SampleKeys = list[tuple[int, int]]  # (position, index) of each sample


class LoaderPlace(DataPlace):
    """Where in the data the next step begins: `position`: samples consumed so far; `epoch`: passes
    that are over; `steps`: of this one that are."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = self.steps = 0

    def advance(self, samples: int, ends_epoch: bool) -> None:
        self.position += samples
        self.epoch += ends_epoch
        self.steps = 0 if ends_epoch else self.steps + 1

    def go_on(self, epoch: int) -> None:
        """To the beginning of a later one."""
        self.epoch, self.steps = epoch, 0

    def state_dict(self) -> dict[str, int]:
        return {**super().state_dict(), "epoch": self.epoch, "steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        super().load_state_dict(state)
        self.epoch, self.steps = int(state["epoch"]), int(state["steps"])


@dataclass(frozen=True)
class Cut:
    """One step of an epoch, as this rank sees it. `shares`: micro-batches of each replica;
    `given`: what this rank reads, in order; those from `own` on are fillers, which count
    nothing."""

    samples: int
    ends_epoch: bool
    shares: tuple[int, ...]
    given: list[tuple[int, SampleKeys]]  # number of the micro-batch, and what it consists of
    own: int


class EpochOrder:
    """The order of a dataset's samples in each epoch."""

    def __init__(self, dataset: Any, sampler: Any, shuffle: bool, seed: int):
        if sampler is not None and shuffle:
            raise BadInput("run.loader(sampler=..., shuffle=True): wanted one of them")
        if not isinstance(shuffle, bool) or hasattr(dataset, "sample_order"):
            what = "a mixture" if isinstance(shuffle, bool) else f"shuffle={shuffle!r}"
            raise BadInput(
                f"run.loader(...): wanted shuffle=True, False or a sampler, found {what}, whose "
                "order goes by steps that do not end with an epoch; use run.steps(...)"
            )
        if isinstance(sampler, DistributedSampler):
            raise BadInput(
                "run.loader(sampler=DistributedSampler(...)): the loader shares the data out by "
                "itself; leave it out, and say shuffle=True"
            )
        self._sampler, self._shuffle, self._seed = sampler, shuffle, seed
        self._samples = len(dataset)

    @property
    def name(self) -> str:
        if self._sampler is not None:
            return type(self._sampler).__qualname__
        return "shuffled" if self._shuffle else "in order"

    @property
    def keeps_neighbours(self) -> bool:
        return self._sampler is None and not self._shuffle

    @property
    def scatters(self) -> bool:
        """What a sampler does, nobody knows."""
        return self._shuffle

    def __len__(self) -> int:
        """Samples in an epoch."""
        return self._samples if self._sampler is None else len(self._sampler)

    def of(self, epoch: int) -> list[int]:
        """Indices. A sampler draws from generators that are seeded here, so it depends on seed and
        epoch only."""
        if self._sampler is None:
            first = epoch * self._samples
            batching = Batching(self._samples, 1, 1, self._seed, self._shuffle)
            at = np.arange(first, first + self._samples)
            order: list[int] = indices_at(batching, at).tolist()
            return order
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        seed = seed_for(self._seed, epoch, 0)
        if isinstance(own := getattr(self._sampler, "generator", None), torch.Generator):
            own.manual_seed(seed)
        seed_everything(seed)
        return [int(index) for index in self._sampler]
