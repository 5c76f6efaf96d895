"""How long steps took on all ranks, by phase: gathered now and then, and told by rank 0. Runs in
the worker.

Rank 0 finds that it is time, and says so among the numbers that all ranks add up for a step anyway.
When these have arrived, all ranks begin one small gather, and look at it a step later, when it has
long been done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from harness.core.facts import PHASES, StepsTimed
from harness.core.traffic import CACHE, PEER, Traffic
from harness.worker.rates import Rates
from harness.worker.run import Run
from harness.worker.timing import COMMUNICATION, PhaseTimer

# how often: every ten seconds at first, and not quite so often in a long run
LEAST_EVERY_S, MOST_EVERY_S, SHARE = 10.0, 60.0, 1 / 60
# what a rank says: seconds by phase, then these
LOSS, WEIGHT, FLOPS, FAR, PEERS, NEAR, REQUESTS = range(len(PHASES), len(PHASES) + 7)

NOTHING = (0.0, 0.0, 0.0)


@dataclass
class Gathering:
    """What ranks say of so many steps; there when `work` has ended."""

    last: int
    steps: int
    every: list[torch.Tensor]  # by rank
    work: Any = None


class StepTimes:
    """`traffic`: what this rank's process has read so far."""

    def __init__(self, run: Run, rates: Rates, timer: PhaseTimer):
        self._run, self._rates, self._timer = run, rates, timer
        # sums of loss, weight and FLOP: of this rank, not told yet; and of the newest step, whose
        # time is known when the next one begins
        self._done, self._newest = NOTHING, NOTHING
        self._samples = self._peak_gflops = 0
        self.traffic: Callable[[], Sequence[Traffic]] = tuple
        self._read = np.zeros(4)  # as it was told
        self._gathering: Gathering | None = None
        self._began_s = self._asked_s = time.monotonic()

    def due(self) -> bool:
        """Rank 0: shall the ranks tell?"""
        now_s = time.monotonic()
        every_s = min(MOST_EVERY_S, max(LEAST_EVERY_S, SHARE * (now_s - self._began_s)))
        if not self._run.url or now_s - self._asked_s < every_s:
            return False
        self._asked_s = now_s
        return True

    def note(self, loss: float, weight: float, micros: int, samples: int, peak_gflops: int) -> None:
        """A step's numbers have arrived. `loss`, `weight`: sums over what this rank has done;
        `micros`: how many micro-batches it did, those again that were done again; the rest: of all
        ranks."""
        self._add_newest()
        self._newest = (loss, weight, self._rates.flops_per_micro * micros)
        self._samples, self._peak_gflops = samples, peak_gflops

    def _add_newest(self) -> None:
        (a, b, c), (loss, weight, flops) = self._done, self._newest
        self._done, self._newest = (a + loss, b + weight, c + flops), NOTHING

    def gather(self) -> None:
        """Begin to. All ranks come here after the same step."""
        if not self._timer.steps:
            return
        seconds, steps, last = self._timer.take_seconds()
        read = self._read_so_far()
        said = [*seconds, *self._done, *np.maximum(read - self._read, 0).tolist()]
        self._done, self._read = NOTHING, read
        mine, group = torch.tensor(said, dtype=torch.float64), self._run.peers.control
        found = self._gathering = Gathering(last, steps, [mine])
        if group is not None:
            found.every = [torch.empty_like(mine) for _ in range(self._run.peers.world)]
            found.work = dist.all_gather(found.every, mine, group=group, async_op=True)

    def collect(self) -> None:
        """What was gathered, if anything: rank 0 tells it."""
        found, self._gathering = self._gathering, None
        if found is None:
            return
        if found.work is not None:
            found.work.wait()
        if self._run.peers.rank == 0:
            self._run.fact(self._told(found))

    def _read_so_far(self) -> NDArray[np.float64]:
        """Bytes from afar, from other nodes and from the node's own cache, and requests."""
        there = self.traffic()
        by = [(one.nbytes, one.far, one.requests) for one in there]
        of = [(found[far], found[PEER], found[CACHE], requests) for found, far, requests in by]
        total: NDArray[np.float64] = np.array(of, float).reshape(-1, 4).sum(0)
        return total

    def conclude(self) -> None:
        """All ranks leave, at the same point: what is left is told."""
        if self._run.url:
            self.collect()
            self._timer.close()
            self._add_newest()
            self.gather()
            self.collect()

    def _told(self, found: Gathering) -> StepsTimed:
        table = torch.stack(found.every).numpy()  # (ranks, what each says)
        spent = table[:, : len(PHASES)] / found.steps
        step_s = float(spent.sum(1).mean())
        own_s, own_ranks = _spread(spent.sum(1) - spent[:, COMMUNICATION])
        did = np.flatnonzero(table[:, WEIGHT] > 0)  # of a replica only its first rank says it
        loss, places = _spread(table[did, LOSS] / table[did, WEIGHT])
        rates, samples = self._rates, self._samples
        flops = float(table[:, FLOPS].sum()) / found.steps
        return StepsTimed(
            epoch=self._run.epoch,
            first=found.last - found.steps + 1,
            last=found.last,
            seconds=dict(zip(PHASES, spent.mean(0).tolist(), strict=True)),
            own_s=own_s,
            own_ranks=own_ranks,
            loss=loss,
            loss_ranks=tuple(int(did[place]) for place in places),
            hfu=rates.hfu(flops, step_s, self._peak_gflops),
            mfu=rates.mfu(samples, step_s, self._peak_gflops),
            samples=samples,
            tokens=samples * rates.tokens_per_sample,
            read_nbytes=self._read_by(*table[:, FAR : NEAR + 1].sum(0)),
            read_requests=int(table[:, REQUESTS].sum()),
        )

    def _read_by(self, far: float, peers: float, near: float) -> dict[str, int]:
        """By where it came from; of sources in several stores the first is taken for all."""
        schemes = [one.far for one in self.traffic()]
        names = (*schemes[:1], PEER, CACHE)
        return {name: int(n) for name, n in zip(names, (far, peers, near), strict=False) if n}


def _spread(values: NDArray[Any]) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Least, median, most; and where the first and the last of these are."""
    if not len(values):
        return (), ()
    least, most = int(values.argmin()), int(values.argmax())
    return (
        (float(values[least]), float(np.median(values)), float(values[most])),
        (least, most),
    )
