"""Evaluation within a training, shared out over the ranks where only losses are wanted of it. Runs
in the worker.

All ranks go through all batches, as many at a time as there are ranks. Of these each computes one,
and then all have the losses of all, so the Trainer sees what it would see alone.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from harness.adapters.hf_company import Company
from harness.adapters.hf_hooks import Hooks, Original
from harness.adapters.hf_meters import Meters

# whose compute_loss and prediction_step keep nothing of a batch but what `Meters` knows
KNOWN = ("transformers", "trl")


def shares_losses(trainer: Any) -> bool:
    """Are losses all that this Trainer's own evaluations want, of methods that keep no more?"""
    kind = type(trainer)
    methods = (kind.compute_loss, kind.prediction_step)
    known = all(method.__module__.partition(".")[0] in KNOWN for method in methods)
    return known and (trainer.compute_metrics is None or trainer.args.prediction_loss_only)


class EvaluationRounds:
    """In the place of an evaluation's DataLoader: as many batches at a time as there are ranks,
    then one after the other. All else is the DataLoader's."""

    def __init__(self, theirs: Any, ranks: int):
        self.theirs, self._ranks = theirs, ranks
        self.round: list[Any] = []  # batches of the round; `at`: the one that was given out last
        self.at = 0

    def __getattr__(self, name: str) -> Any:
        if name == "theirs":  # of an object that is being made
            raise AttributeError(name)
        return getattr(self.theirs, name)

    def __len__(self) -> int:
        return len(self.theirs)

    def __iter__(self) -> Iterator[Any]:
        theirs = self.theirs
        # accelerate's own, which would say that it has ended when its last round is read
        batches = iter(getattr(theirs, "base_dataloader", theirs))
        begin, end = getattr(theirs, "begin", None), getattr(theirs, "end", None)
        if begin is not None:
            begin()
        self.round = list(itertools.islice(batches, self._ranks))
        while self.round:
            following = list(itertools.islice(batches, self._ranks))
            for at, batch in enumerate(self.round):
                self.at = at
                if not following and at == len(self.round) - 1 and begin is not None:
                    theirs.end_of_dataloader = True  # accelerate counts its samples otherwise
                yield batch
            self.round = following
        if end is not None:
            end()


class SharedEvaluation:
    """`prediction_step` of a Trainer, during its training."""

    def __init__(self, trainer: Any, company: Company):
        self._trainer, self._company = trainer, company
        self._meters = Meters.of(trainer, "eval")
        self._rounds: EvaluationRounds | None = None
        self._losses: list[float | None] = []  # of the round

    @contextlib.contextmanager
    def over(self, dataloader: Any) -> Iterator[EvaluationRounds]:
        """What to evaluate over."""
        rounds = self._rounds = EvaluationRounds(dataloader, self._company.ranks)
        hooks = Hooks()
        hooks.put(self._trainer, "prediction_step", self._prediction_step)
        try:
            yield rounds
        finally:
            hooks.clear()
            self._rounds = None

    def _prediction_step(
        self, original: Original, model: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, None, None]:
        rounds, rank = self._rounds, self._company.rank
        assert rounds is not None
        if rounds.at == 0:
            if self._meters is not None:
                self._meters.begin()
            mine: float | None = None
            if rank < len(rounds.round):
                loss, *_ = original(model, rounds.round[rank], *args, **kwargs)
                mine = None if loss is None else float(loss)
                if self._meters is not None:
                    self._meters.take(rank)
            self._losses = self._company.gather(mine)
            if self._meters is not None:
                self._meters.merge(self._company.gather)
        found = self._losses[rounds.at]
        if found is None:
            return None, None, None
        return torch.tensor(found, device=self._trainer.args.device), None, None
