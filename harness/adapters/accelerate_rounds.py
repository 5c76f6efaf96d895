"""What an Accelerate script's training loop is given: for each iteration that it would have made in
its first world, one item. Runs in the worker.

A round is what the ranks of the first world (W0) do side by side: W0 micro-batches. The script's
body runs once for each round on every rank, so its counters, `len(loader)` and all that it does
every so many iterations are as they were. A rank's micro-batches of a step are dealt out over the
step's rounds: mostly one for each; none, where the world is greater; several, where it is smaller.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from harness.adapters.accelerate_first import FirstStep
from harness.worker.own_loop import OwnStep
from harness.worker.shares import Share


@dataclass(frozen=True)
class Round:
    """`own`: the micro-batches of the step that this rank does in it; `last`: of its step."""

    own: tuple[int, ...]
    last: bool


@dataclass
class Body:
    """One run of the loop's body. `shares`: this rank's, `done` of them done; `pending`: its
    training is not over; `loss`: of the micro-batch that is being done; `stepped`: an optimizer
    has."""

    round: Round
    shares: list[Share] = field(default_factory=list)
    pending: bool = True
    loss: torch.Tensor | None = None
    done: int = 0
    backwards: int = 0
    stepped: bool = False

    @property
    def idle(self) -> bool:
        return not self.shares


@dataclass
class StepNow:
    """A step that is being made. `scale`: of each loss; `together`: all ranks have their last
    micro-batch in the last round; `synced`: gradients are sums; `rate`: the learning rate;
    `backwards`: most in one iteration; `stepped`: optimizers that have."""

    step: OwnStep | FirstStep
    scale: float
    together: bool
    synced: bool = False
    rate: float = 0.0
    backwards: int = 0
    stepped: set[int] = field(default_factory=set)


@dataclass
class GoingThrough:
    """A resumed script's way to where it was: `done` of `target` steps. `kept`: functions and
    values that put things back."""

    target: int
    done: int = 0
    kept: list[tuple[Callable[[Any], Any], Any]] = field(default_factory=list)


def deal(own: Sequence[int], rounds: int) -> list[tuple[int, ...]]:
    """A rank's micro-batches over the rounds of a step, in order; larger parts first."""
    size, larger = divmod(len(own), rounds)
    ends = list(itertools.accumulate(size + (r < larger) for r in range(rounds)))
    return [tuple(own[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


class Interleaved:
    """The batches of all ranks of the first world, round by round, as Accelerate gives them out:
    with what it repeats to make an epoch's last round whole."""

    def __init__(self, batch_sampler: Any, ranks: int, split: bool, even: bool):
        self.batch_sampler, self._ranks, self._split, self._even = batch_sampler, ranks, split, even
        size = getattr(batch_sampler, "batch_size", None)
        self.batch_size = size // ranks if split and size else size
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))

    def _shards(self, sources: Sequence[Any]) -> list[Any]:
        from accelerate.data_loader import BatchSamplerShard

        return [
            BatchSamplerShard(source, self._ranks, rank, self._split, self._even)
            for rank, source in enumerate(sources)
        ]

    def __iter__(self) -> Iterator[Any]:
        # read once, however many look at it
        branches = itertools.tee(self.batch_sampler, self._ranks)
        sources = [_Branch(self.batch_sampler, branch) for branch in branches]
        shards = [iter(shard) for shard in self._shards(sources)]
        while True:
            found = [batch for shard in shards if (batch := next(shard, None)) is not None]
            if not found:
                return
            yield from found

    def __len__(self) -> int:
        return sum(len(shard) for shard in self._shards([self.batch_sampler] * self._ranks))


class _Branch:
    """One of several readers of a batch sampler."""

    def __init__(self, of: Any, branch: Iterator[Any]):
        self._of, self._branch = of, branch
        self.batch_size = getattr(of, "batch_size", None)
        self.drop_last = getattr(of, "drop_last", False)

    def __iter__(self) -> Iterator[Any]:
        # a shard may add to its first batches, which the others see as well
        return (list(batch) if isinstance(batch, list) else batch for batch in self._branch)

    def __len__(self) -> int:
        return len(self._of)


def every_batch(loader: Any, ranks: int, split: bool, even: bool) -> Any:
    """A DataLoader of the batches of all ranks of the first world. `loader`: the script's own."""
    if not batched(loader) or ranks == 1:
        return loader
    return _again(loader, Interleaved(loader.batch_sampler, ranks, split, even))


def whole_batches(loader: Any) -> Any:
    """As Accelerate evaluates on several ranks, for one alone: an epoch's last batch is filled up,
    and `gather_for_metrics` drops what was added. Else means over batches were others."""
    from accelerate.data_loader import BatchSamplerShard

    if not batched(loader) or getattr(loader.batch_sampler, "batch_size", None) is None:
        return loader
    return _again(loader, BatchSamplerShard(loader.batch_sampler, 1, 0))


def batched(loader: Any) -> bool:
    """Does a sampler say which samples make a batch?"""
    from torch.utils.data import IterableDataset

    return not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler is not None


def _again(loader: Any, batch_sampler: Any) -> Any:
    """The DataLoader once more, over other batches."""
    from torch.utils.data import DataLoader

    return DataLoader(
        loader.dataset,
        batch_sampler=batch_sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def length(loader: Any) -> int | None:
    """Batches of an epoch; None: nobody knows."""
    try:
        return len(loader)
    except TypeError:
        return None


class Window:
    """Shares of an epoch as far as they were looked at, and its steps. `batches`: of the epoch,
    None: not known; `done`: those of its earlier steps."""

    def __init__(self, shares: Iterator[Share], batches: int | None, done: int):
        self._shares, self._batches, self._done = shares, batches, done
        self._ahead: collections.deque[Share] = collections.deque()
        self._own: dict[int, Share] = {}
        self._taken = self._wanted = 0

    def step(self, most: int) -> int:
        """Begin the next step: its micro-batches, `most` at most; 0: the epoch is over."""
        self._done += self._taken
        self._own, self._taken = {}, 0
        if self._batches is None:
            self._fill(most + 1)
            self._wanted = min(most, len(self._ahead))
        else:
            self._wanted = min(most, max(self._batches - self._done, 0))
        return self._wanted

    @property
    def ends(self) -> bool:
        """Is this step the epoch's last?"""
        if self._batches is None:
            return len(self._ahead) + self._taken <= self._wanted
        return self._done + self._wanted >= self._batches

    def samples(self) -> int:
        """Of this step; reads all of it."""
        self._fill(self._wanted)
        return sum(share.count for share in itertools.islice(self._ahead, self._wanted))

    def take(self, micros: Sequence[int]) -> list[Share]:
        """This rank's shares with these numbers in the step."""
        while micros and self._taken <= micros[-1]:
            self._pass()
        return [self._own.pop(m) for m in micros]

    def rest(self) -> None:
        """Pass over what other ranks do in this step."""
        while self._taken < self._wanted:
            self._pass()
        if self.ends:
            self._fill(1)  # whoever reads learns that the epoch is over

    def _pass(self) -> None:
        self._fill(1)
        share = self._ahead.popleft()
        if share.mine:
            self._own[self._taken] = share
        self._taken += 1

    def _fill(self, count: int) -> None:
        while len(self._ahead) < count:
            share = next(self._shares, None)
            if share is None:
                return
            self._ahead.append(share)


def rounds_of(batches: int, ranks: int) -> int:
    """How many rounds hold so many micro-batches."""
    return math.ceil(batches / ranks)
