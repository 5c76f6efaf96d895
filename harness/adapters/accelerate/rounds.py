"""The items that an Accelerate script's training loop receives: one for each iteration that it
would have made in its first world. Runs in the worker.

A round is what the ranks of the first world (W0) do side by side: a batch each. A micro-batch has
one for each rank of a copy of the model, which is mostly a single rank. The script's body runs once
per round on every rank, so its counters, `len(loader)` and everything that it does every N
iterations stay the same. A copy's micro-batches of a step are spread over the step's rounds: mostly
one per round, none where there are more copies than at first, several where there are fewer.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from harness.bucket.layout import Identity
from harness.core.batch import plan
from harness.loops.own_loop import OwnStep, ReadingRanks, WhatWasRead, begin_micro
from harness.loops.shared_batches import Share
from harness.worker.session import Session
from storage.canonical_json import BadObject
from storage.errors import NotFound

# The first step of a script that accumulates gradients in its own loop. The number of its
# iterations is unknown until the script lets its optimizer step.


def samples_of_step(run: Session) -> int:
    """Return the samples per step that the run was created with; 0: it is new."""

    def look() -> int:
        with contextlib.suppress(NotFound, BadObject):
            if run.run_url:
                body = Identity.decode(run.store.get(run._run.phase.key)).body
                return int(body["global_batch"])
        return 0

    return int(run._peers.agree(look))


@dataclass
class FirstStep:
    """Stand in for an `OwnStep`: record all calls, and pass them on once the real step exists."""

    run: Session
    mine: range = range(0)
    number: int = 1
    rounds: int = 0
    _reads: list[tuple[int, Any, Any]] = field(default_factory=list)
    _done: list[tuple[int, torch.Tensor | float, float]] = field(default_factory=list)

    def micro(self, m: int) -> None:
        # FSDP2 has to reduce in the backward, so it does so in each; other sums come with the step
        copy_ranks = self.run.replica_ranks
        reading = ReadingRanks.of(self.run._peers, copy_ranks)
        begin_micro(self.run._work, self.number, m, self.run.seed, copy_ranks > 1, reading)

    def round(self, done: int) -> None:
        """Skip this call: the first step is not dropped."""

    def idle(self) -> None:
        self.run._work.training.norms.rest()

    def read(
        self, m: int, keys: WhatWasRead | None = None, contents: WhatWasRead | None = None
    ) -> None:
        self._reads.append((m, keys, contents))

    def done(self, m: int, loss: torch.Tensor | float, weight: float) -> None:
        self._done.append((m, loss, weight))

    def hold(self) -> None:
        """Skip this call: no gradients are sent before the length is known."""

    def backward_begins(self) -> None: ...

    def tell(self, step: OwnStep) -> None:
        """Report to `step` everything that was done so far."""
        step.some_idle = True
        for m, keys, contents in self._reads:
            step.read(m, keys, contents)
        for m, loss, weight in self._done:
            step.done(m, loss, weight)


def share_of_round(first: int, copies: int, copy: int) -> range:
    """Return the micro-batches of one of the copies of the model per round of such a step. `first`:
    copies in the first world."""
    sharing = min(first, copies)
    return plan(first, sharing).micros(copy) if copy < sharing else range(0)


@dataclass(frozen=True)
class Round:
    """One round. `own`: this rank's micro-batches in it, numbered within the step; `last`: this is
    the last round of its step."""

    own: tuple[int, ...]
    last: bool


@dataclass
class Body:
    """One run of the loop's body. `shares`: this rank's micro-batches, `done` of which are
    finished; `pending`: the training part is not over; `loss`: the loss of the current micro-batch;
    `stepped`: an optimizer has stepped."""

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
    """The step in progress. `scale`: factor of each loss; `together`: every rank has its last
    micro-batch in the last round; `synced`: gradients are summed over ranks; `rate`: the learning
    rate; `backwards`: most backward calls in one iteration; `stepped`: ids of the optimizers that
    have stepped; `begun`: rounds that have begun."""

    step: OwnStep | FirstStep
    scale: float
    together: bool
    synced: bool = False
    rate: float = 0.0
    backwards: int = 0
    stepped: set[int] = field(default_factory=set)
    begun: int = 0


@dataclass
class GoingThrough:
    """The replay of a resumed script: `done` of `target` steps. `kept`: pairs of a function and the
    value with which it restores state at the end."""

    target: int
    done: int = 0
    kept: list[tuple[Callable[[Any], Any], Any]] = field(default_factory=list)


def deal(own: Sequence[int], rounds: int) -> list[tuple[int, ...]]:
    """Split a rank's micro-batches over the rounds of a step, in order, larger parts first."""
    size, larger = divmod(len(own), rounds)
    ends = list(itertools.accumulate(size + (r < larger) for r in range(rounds)))
    return [tuple(own[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def sampler_shard() -> Any:
    """Return Accelerate's class of one rank's batches."""
    from accelerate.data_loader import BatchSamplerShard

    return BatchSamplerShard


class Interleaved:
    """The batches of all ranks of the first world, round by round, in Accelerate's order. They
    include those that it repeats to complete an epoch's last round."""

    def __init__(self, batch_sampler: Any, ranks: int, split: bool, even: bool):
        self.batch_sampler, self._ranks, self._split, self._even = batch_sampler, ranks, split, even
        size = getattr(batch_sampler, "batch_size", None)
        self.batch_size = size // ranks if split and size else size
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))

    def _shards(self, sources: Sequence[Any]) -> list[Any]:
        shard = sampler_shard()
        return [
            shard(source, self._ranks, rank, self._split, self._even)
            for rank, source in enumerate(sources)
        ]

    def __iter__(self) -> Iterator[Any]:
        # the batch sampler is read once, however many shards look at it
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
    """One of several readers of the same batch sampler."""

    def __init__(self, of: Any, branch: Iterator[Any]):
        self._of, self._branch = of, branch
        self.batch_size = getattr(of, "batch_size", None)
        self.drop_last = getattr(of, "drop_last", False)

    def __iter__(self) -> Iterator[Any]:
        # a shard may append to its first batches, which the other readers also see
        return (list(batch) if isinstance(batch, list) else batch for batch in self._branch)

    def __len__(self) -> int:
        return len(self._of)


def every_batch(loader: Any, ranks: int, split: bool, even: bool) -> Any:
    """Return a DataLoader of all first-world ranks' batches. `loader` is the script's own."""
    if not batched(loader) or ranks == 1:
        return loader
    return like_loader(loader, Interleaved(loader.batch_sampler, ranks, split, even))


def whole_batches(loader: Any) -> Any:
    """Return a loader for one rank that evaluates as Accelerate does on several: the last batch is
    filled up, and `gather_for_metrics` drops what was added. Otherwise means over batches
    differ."""
    if not batched(loader) or getattr(loader.batch_sampler, "batch_size", None) is None:
        return loader
    return like_loader(loader, sampler_shard()(loader.batch_sampler, 1, 0))


def batched(loader: Any) -> bool:
    """Return whether a sampler decides which samples make a batch."""
    from torch.utils.data import IterableDataset

    return not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler is not None


def like_loader(loader: Any, batch_sampler: Any) -> Any:
    """Return a DataLoader like `loader`, but with other batches."""
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
    """Return the number of batches in an epoch, or None if it is unknown."""
    try:
        return len(loader)
    except TypeError:
        return None


class Window:
    """A window on the shares of an epoch that were read ahead, and the epoch's steps. `batches`: of
    the epoch, None if unknown; `done`: batches of its earlier steps."""

    def __init__(self, shares: Iterator[Share], batches: int | None, done: int):
        self._shares, self._batches, self._done = shares, batches, done
        self._ahead: collections.deque[Share] = collections.deque()
        self._own: dict[int, Share] = {}
        self._taken = self._wanted = 0

    def step(self, most: int) -> int:
        """Begin the next step and return its number of micro-batches, 0 if the epoch is over."""
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
        """True if this step is the epoch's last."""
        if self._batches is None:
            return len(self._ahead) + self._taken <= self._wanted
        return self._done + self._wanted >= self._batches

    def samples(self) -> int:
        """Return the number of samples in this step. Reads all of its shares."""
        self._fill(self._wanted)
        return sum(share.count for share in itertools.islice(self._ahead, self._wanted))

    def take(self, micros: Sequence[int]) -> list[Share]:
        """Return this rank's shares for these micro-batches of the step."""
        while micros and self._taken <= micros[-1]:
            self._pass()
        return [self._own.pop(m) for m in micros]

    def rest(self) -> None:
        """Skip the micro-batches of this step that belong to other ranks."""
        while self._taken < self._wanted:
            self._pass()
        if self.ends:
            self._fill(1)  # reading one more tells the source that the epoch is over

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
    """Return the number of rounds that hold this many batches, of the ranks or of the copies."""
    return math.ceil(batches / ranks)
