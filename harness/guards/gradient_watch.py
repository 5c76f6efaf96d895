"""The gradients of each micro-batch, and the ranks and samples behind it, to tell whose fault a bad
step is. Runs in the worker."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from harness.core.batch import indices_at
from harness.worker.gradients.parallel import Sharded
from harness.worker.gradients.sharding import fsdp_groups
from harness.worker.training_state import Training

if TYPE_CHECKING:
    from harness.worker.step import Sums, Work

MOST_NAMED = 8  # micro-batches, and samples of each, in one line


class GradientWatch:
    """A look at the gradients of each micro-batch, where autograd has made them."""

    def __init__(self, gradients_of: Callable[[], Sequence[torch.Tensor]], device: torch.device):
        """`gradients_of`: returns the tensors that autograd makes gradients for on this rank, as
        far as they exist."""
        self._gradients_of, self._device = gradients_of, device
        self._hooks: list[Any] = []
        self._micro, self._counts = 0, True
        # sums of the squared gradients, by micro-batch of this rank: 0-d, float64
        self._squares: dict[int, torch.Tensor] = {}

    @property
    def is_on(self) -> bool:
        return bool(self._hooks)

    def turn(self, on: bool) -> None:
        """Begin to look, or end it."""
        if on and not self._hooks:
            self._hooks = [
                p.register_hook(self._look)  # type: ignore[no-untyped-call]
                for p in self._gradients_of()
            ]
        elif not on:
            while self._hooks:
                self._hooks.pop().remove()
        self._squares.clear()

    def take_up(self, micro: int, counts: bool, more: bool) -> None:
        """Attribute the next gradients to this micro-batch; see `StepHooks.before_micro`."""
        self._micro, self._counts = micro, counts

    def _look(self, grad: torch.Tensor) -> None:
        if not self._counts:
            return
        values = grad.coalesce().values() if grad.is_sparse else grad
        square = values.double().square().sum()
        self._squares[self._micro] = self._squares.get(self._micro, 0.0) + square

    def norms(self, micro_batches: int, alone: bool) -> list[float]:
        """Return the norm of each micro-batch's gradients in this step, on all ranks together."""
        every = torch.zeros(micro_batches, dtype=torch.float64, device=self._device)
        for micro, square in self._squares.items():
            every[micro] = square
        if not alone:
            dist.all_reduce(every)
        return [math.sqrt(square) for square in every.tolist()]

    def found(self, micro_batches: int, alone: bool) -> list[int]:
        """Return the micro-batches of all ranks with a gradient that was not finite, on all ranks
        together."""
        norms = self.norms(micro_batches, alone)
        return [micro for micro, norm in enumerate(norms) if not math.isfinite(norm)]


def whole_parameters(training: Training) -> list[torch.Tensor]:
    """Return the parameters that forwards use here; FSDP2 makes its own in the first one."""
    assert training.model is not None
    if not isinstance(training.strategy, Sharded):
        return [p for p in training.model.parameters() if p.requires_grad]
    gathered = (
        getattr(one, "_unsharded_param", None)
        for group in fsdp_groups(training.model)
        for one in group.fsdp_params
    )
    return [p for p in gathered if p is not None and p.requires_grad]


@dataclass(frozen=True)
class Culprit:
    """A micro-batch that is not finite. `ranks`: who has done it; `samples`: for people."""

    micro: int
    ranks: tuple[int, ...]
    samples: str

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        return f"micro-batch {self.micro} of rank {ranks} ({self.samples})"


def culprits(work: Work, sums: Sums, micros: Sequence[int]) -> list[Culprit]:
    """Return who has done these micro-batches of the step, and with which samples."""
    plan = work.feed.plan
    owners = [replica for replica, n in enumerate(sums.shares or plan.shares) for _ in range(n)]
    found = []
    for micro in micros:
        ranks = tuple(r for r in range(plan.ranks) if plan.replica(r) == owners[micro])
        found.append(Culprit(micro, ranks, samples_text(work, sums, micro)))
    return found


def samples_text(work: Work, sums: Sums, micro: int) -> str:
    """Return the samples of a micro-batch: indices in the dataset where the harness has chosen
    them, else positions in the order of the data."""
    batching = work.batching
    begins = sums.begins if sums.begins >= 0 else work.run.step * batching.global_batch
    first = begins + micro * batching.micro_batch
    if sums.begins >= 0 or work.feed.stream is not None:
        return f"positions {first} to {first + batching.micro_batch - 1} of the data"
    at = indices_at(batching, np.arange(first, first + batching.micro_batch)).tolist()
    more = ", ..." if len(at) > MOST_NAMED else ""
    return f"samples {', '.join(map(str, at[:MOST_NAMED]))}{more}"


class StepLines:
    """A file with a line of JSON for each step, for `harness runs bisect`: the loss, the norm, and
    both for each micro-batch as if it were the whole step."""

    def __init__(self, path: Path):
        self._path = path

    def note(
        self, work: Work, sums: Sums, numbers: tuple[float, float, float], norms: list[float]
    ) -> None:
        """Write a step's line, on rank 0. `numbers`: loss, norm, weight; `norms`: of the gradients
        of each micro-batch."""
        if work.peers.rank:
            return
        assert sums.every is not None
        loss, norm, weight = numbers
        share = len(norms) / weight if weight else math.nan
        line = {
            "step": work.run.step + 1,
            "loss": loss,
            "norm": norm,
            "losses": [share * one for one in sums.every.tolist()],
            "norms": [share * one for one in norms],
            "samples": [samples_text(work, sums, micro) for micro in range(len(norms))],
        }
        with open(self._path, "a") as file:
            file.write(json.dumps(line) + "\n")
