"""The first step of a script that accumulates gradients by itself: nobody knows how many iterations
it has until the script lets its optimizer step. Runs in the worker.

Each round of it is shared out by itself. What the step consists of is told to the real one, which
begins when its length is known; a resumed run knows it from run.json.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch

from harness.bucket.layout import IDENTITY, Identity
from harness.core.batch import plan
from harness.core.values import BadObject
from harness.worker.own_loop import OwnStep, WhatWasRead, begin_micro
from harness.worker.session import Session
from storage.errors import NotFound


def accumulation_of(run: Session, ranks: int) -> int:
    """Rounds of a step of the run, as it was begun; 0: it has not been. `ranks`: of its first
    world."""

    def look() -> int:
        with contextlib.suppress(NotFound, BadObject):
            if run.run_url:
                body = Identity.decode(run.store.get(IDENTITY)).body
                return int(body["global_batch"]) // int(body["micro_batch"]) // ranks
        return 0

    return int(run._peers.agree(look))


@dataclass
class FirstStep:
    """Takes what an `OwnStep` takes, and tells it on."""

    run: Session
    mine: range = range(0)
    number: int = 1
    rounds: int = 0
    _reads: list[tuple[int, Any, Any]] = field(default_factory=list)
    _done: list[tuple[int, torch.Tensor | float, float]] = field(default_factory=list)

    def micro(self, m: int) -> None:
        begin_micro(self.run._work, self.number, m, self.run.seed, last=False)

    def idle(self) -> None:
        self.run._work.training.statistics.norms.rest()

    def read(
        self, m: int, keys: WhatWasRead | None = None, contents: WhatWasRead | None = None
    ) -> None:
        self._reads.append((m, keys, contents))

    def done(self, m: int, loss: torch.Tensor | float, weight: float) -> None:
        self._done.append((m, loss, weight))

    def hold(self) -> None:
        """Nothing is sent before the length is known."""

    def backward_begins(self) -> None: ...

    def tell(self, step: OwnStep) -> None:
        """What was done is what that step consists of, so far."""
        step.some_idle = True
        for m, keys, contents in self._reads:
            step.read(m, keys, contents)
        for m, loss, weight in self._done:
            step.done(m, loss, weight)


def share_of_round(ranks: int, world: int, rank: int) -> range:
    """This rank's micro-batches of each round of such a step. `ranks`: of the first world."""
    sharing = min(ranks, world)
    return plan(ranks, sharing).micros(rank) if rank < sharing else range(0)
