"""The reading of this rank's batches from a script's own DataLoader over a map-style dataset: its
sampler yields all batches, and only this rank's are read. Runs in the worker.

Random draws of `dataset[i]` and the collate function are seeded by the epoch and the batch's place
in it, so they are the same whichever rank and process reads it.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import operator
import queue
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, Dataset, get_worker_info

from harness.core.batch import sample_seed
from harness.worker.batches import rng_state
from harness.worker.batches.content_hash import content_hash, contents_of
from harness.worker.batches.prefetch import fetched_ahead

PROCESSES = 8  # assumed number of processes of a node that prefetch; it is not known here
AT_ONCE = 32  # batches that are requested from a sampler at a time, after the first
MOST_AT_ONCE = 4096  # ... when they are skipped


@dataclass(frozen=True)
class AskedBatch:
    """A batch as the sampler yields it. `keys`: of the dataset; `asked`: the sampler's own value;
    `start`: number of samples before it in the epoch; `digest`: of all keys up to and including its
    own; `plain`: the keys are integers."""

    index: int
    keys: tuple[Any, ...]
    asked: Any
    start: int
    digest: int
    plain: bool

    def numbers(self) -> np.ndarray[Any, Any]:
        """Return int64 (n,): the indices, or, if the keys are not integers, the places in the
        epoch."""
        if self.plain:
            return np.array(self.keys, np.int64)
        return np.arange(self.start, self.start + len(self.keys), dtype=np.int64)


class Walk:
    """The batches of an epoch, in the sampler's order, drawn as far as they are needed. `all`:
    those not yet taken; `own`: those of them that this rank reads."""

    def __init__(
        self,
        asked: Iterator[Any],
        batched: bool,
        is_mine: Callable[[int], bool],
        memory: rng_state.SamplerMemory,
    ):
        """Draw the first batch. `asked`: the sampler's iterator; `batched`: it yields lists of
        keys; `memory`: the samplers' state, which `left` has as it was after the last draw."""
        self._asked, self._batched, self._is_mine, self._memory = asked, batched, is_mine, memory
        self.all: collections.deque[AskedBatch] = collections.deque()
        self.own: collections.deque[AskedBatch] = collections.deque()
        self.walked = self.samples = self.digest = 0
        self.ended = False
        for first in itertools.islice(asked, 1):
            self._add(first)
        # a copy of the global generators, from which the sampler continues to draw
        self._apart = rng_state.Apart(rng_state.generators_state())
        self.left = memory.taken()

    def skip(self, batches: int) -> Iterator[AskedBatch]:
        """Yield the first `batches` batches, which are not read, and remove them from `own`."""
        while self.all or self.advance(max(AT_ONCE, min(batches - self.walked, MOST_AT_ONCE))):
            if self.all[0].index >= batches:
                break
            yield self.all.popleft()
        while self.own and self.own[0].index < batches:
            self.own.popleft()

    def advance(self, at_once: int = AT_ONCE) -> bool:
        """Draw more batches from the sampler. Return False if there are none."""
        if self.ended:
            return False
        with self._apart:
            found = list(itertools.islice(self._asked, at_once))
        self.ended = len(found) < at_once
        self.left = self._memory.taken()
        for asked in found:
            self._add(asked)
        return bool(found)

    def _add(self, asked: Any) -> None:
        keys = tuple(asked) if self._batched or isinstance(asked, list) else (asked,)
        numbers = _whole(keys)
        spelled = (
            content_hash(keys).to_bytes(8, "little")
            if numbers is None
            else np.array(numbers, np.int64).tobytes()
        )
        self.digest = xxhash.xxh3_64_intdigest(self.digest.to_bytes(8, "little") + spelled)
        entry = AskedBatch(
            self.walked, numbers or keys, asked, self.samples, self.digest, numbers is not None
        )
        self.walked, self.samples = self.walked + 1, self.samples + len(keys)
        self.all.append(entry)
        if self._is_mine(entry.index):
            self.own.append(entry)


def _whole(keys: tuple[Any, ...]) -> tuple[int, ...] | None:
    try:
        return tuple(map(operator.index, keys))
    except TypeError:
        return None


@dataclass(frozen=True)
class _Asked:
    """The description of a batch for the process that reads it. `seed`: that of its epoch."""

    keys: Any
    start: int
    plain: bool
    seed: int


class _Own:
    """The batch sampler of the reading DataLoader: this rank's batches of the walk."""

    def __init__(self) -> None:
        self.walk: Walk | None = None
        self.seed = 0
        # called with each batch's indices as soon as it is drawn; [] if its keys are not integers
        self.known: Callable[[list[int]], None] = lambda keys: None

    def __iter__(self) -> Iterator[_Asked]:
        walk, seed, known, told = self.walk, self.seed, self.known, 0
        assert walk is not None
        while walk.own or walk.advance():
            for entry in itertools.islice(walk.own, told, None):
                known(list(entry.keys) if entry.plain else [])
            told = len(walk.own)
            if walk.own:
                entry, told = walk.own.popleft(), told - 1
                yield _Asked(entry.asked, entry.start, entry.plain, seed)


class _Placed(Dataset[Any]):
    """A dataset that reads a batch as a DataLoader does, with generators seeded by its place, and
    collates it too, since the collate function may draw (masks of tokens)."""

    def __init__(
        self, dataset: Any, batched: bool, collate: Callable[[Any], Any], with_trainer: bool
    ):
        """Wrap a dataset. `with_trainer`: it reads in the trainer's process, whose generators must
        be restored after each batch."""
        self.dataset, self.batched, self.collate = dataset, batched, collate
        self.with_trainer = with_trainer

    def __getitems__(self, asked: _Asked) -> tuple[np.ndarray[Any, Any] | None, Any]:
        with rng_state.lent() if self.with_trainer else contextlib.nullcontext():
            items = self._items(asked)
            contents = None
            if not asked.plain:
                contents = contents_of(items if self.batched else [items])
            return contents, self.collate(items)

    def _items(self, asked: _Asked) -> Any:
        # Once per batch, which is never divided: seeding takes as long as reading a small sample.
        seed_by(sample_seed(asked.seed, asked.start))
        if not self.batched:
            return self.dataset[asked.keys]
        if getattr(self.dataset, "__getitems__", None):
            return self.dataset.__getitems__(list(asked.keys))
        return [self.dataset[key] for key in asked.keys]


class _Begin:
    """A `worker_init_fn` that makes torch's worker info refer to the script's own dataset."""

    def __init__(self, begin: Callable[[int], None] | None):
        self.begin = begin

    def __call__(self, number: int) -> None:
        info = get_worker_info()
        assert info is not None
        # the object is frozen, but only the script reads it
        object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]
        if self.begin is not None:
            self.begin(number)


def seed_by(seed: int) -> None:
    """Seed the CPU generators of Python, numpy and torch; not the devices', which no dataset should
    use."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


class Readers:
    """A copy of the script's DataLoader, with its processes and prefetching, over this rank's
    batches only. Their data is fetched ahead, as far as the sampler has drawn."""

    def __init__(self, loader: DataLoader[Any], seed: int):
        self._seed, self._own, self._generator = seed, _Own(), torch.Generator()
        here = loader.num_workers == 0
        self._loader: DataLoader[Any] = DataLoader(
            _Placed(loader.dataset, batched(loader), loader.collate_fn, with_trainer=here),
            batch_sampler=self._own,  # type: ignore[arg-type]
            num_workers=loader.num_workers,
            collate_fn=_as_it_is,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=None if here else _Begin(loader.worker_init_fn),
            multiprocessing_context=loader.multiprocessing_context,
            generator=self._generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )

    def read(self, walk: Walk, epoch: int) -> Iterator[tuple[Any, Any]]:
        """Yield (contents or None, data) of each of this rank's batches. Contents are hashes."""
        self._own.walk, self._own.seed = walk, sample_seed(self._seed, epoch)
        self._generator.manual_seed(self._own.seed)
        known: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()
        self._own.known = known.put
        return self._ahead(iter(self._loader), known)

    def _ahead(
        self, batches: Iterator[Any], known: queue.SimpleQueue[list[int] | None]
    ) -> Iterator[Any]:
        """Yield the batches and prefetch those in `known`. A final None ends the thread that waits
        for that queue."""
        to_come: Iterator[list[int]] = iter(known.get, None)
        dataset = self._loader.dataset.dataset  # type: ignore[attr-defined]
        try:
            yield from fetched_ahead(dataset, to_come, PROCESSES, print, batches)
        finally:
            known.put(None)


def batched(loader: DataLoader[Any]) -> bool:
    """Return whether the loader makes batches of samples (False: batch_size=None)."""
    return loader.batch_sampler is not None


def _as_it_is(read: Any) -> Any:
    return read
