"""This rank's batches of a script's own DataLoader over a map-style dataset: its sampler is asked
for all of them, and only the own ones are read. Runs in the worker.

Whatever `dataset[i]` and the collate function draw is seeded by the epoch and the batch's place in
it, so it is the same whichever rank, and whichever of its processes, reads it.
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
from harness.core.world import BadInput
from harness.worker import chance
from harness.worker.content_hashes import content_hash, contents_of
from harness.worker.loader import is_map_style
from harness.worker.prefetch import fetched_ahead

SPLITTING = ("streaming.base.", "litdata.streaming.")  # modules of MosaicML and of LitData
PROCESSES = 8  # of a node that fetch ahead, for all that is known here
AT_ONCE = 32  # batches that a sampler is asked for at a time, after the first
MOST_AT_ONCE = 4096  # ... when they are passed over


@dataclass(frozen=True)
class AskedBatch:
    """A batch as its sampler spells it: `keys` of the dataset, `start`: samples of the epoch before
    it, `digest` of all keys up to and with it. `plain`: the keys are whole numbers."""

    index: int
    keys: tuple[Any, ...]
    asked: Any
    start: int
    digest: int
    plain: bool

    def numbers(self) -> np.ndarray[Any, Any]:
        """int64 (n,): indices, or where they are none the places in the epoch."""
        if self.plain:
            return np.array(self.keys, np.int64)
        return np.arange(self.start, self.start + len(self.keys), dtype=np.int64)


class Walk:
    """All batches of an epoch, in the sampler's order, as far as anybody wants to know them."""

    def __init__(
        self,
        asked: Iterator[Any],
        batched: bool,
        is_mine: Callable[[int], bool],
        memory: chance.SamplerMemory,
    ):
        """`asked`: what the sampler gives; the first of it is drawn here and now. `batched`: it
        gives lists of keys. `memory`: of the samplers; `left`: what they were behind the last
        answer."""
        self._asked, self._batched, self._is_mine, self._memory = asked, batched, is_mine, memory
        self.all: collections.deque[AskedBatch] = collections.deque()
        self.own: collections.deque[AskedBatch] = collections.deque()
        self.walked = self.samples = self.digest = 0
        self.ended = False
        for first in itertools.islice(asked, 1):
            self._add(first)
        # the global generators, which a sampler may go on with
        self._apart = chance.Apart(chance.taken())
        self.left = memory.taken()

    def skip(self, batches: int) -> Iterator[AskedBatch]:
        """Pass over the first ones, which nobody reads."""
        while self.all or self.advance(max(AT_ONCE, min(batches - self.walked, MOST_AT_ONCE))):
            if self.all[0].index >= batches:
                break
            yield self.all.popleft()
        while self.own and self.own[0].index < batches:
            self.own.popleft()

    def advance(self, at_once: int = AT_ONCE) -> bool:
        """Ask the sampler for more. False: there are none."""
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
    """What a reading process is told of a batch. `seed`: of its epoch."""

    keys: Any
    start: int
    plain: bool
    seed: int


class _Own:
    """The batch sampler of who reads: this rank's batches of the walk."""

    def __init__(self) -> None:
        self.walk: Walk | None = None
        self.seed = 0
        # hears of each as soon as the sampler has said it; of plain keys
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
    """Reads a batch as a DataLoader does, with generators seeded by its place, and collates it:
    that may draw, too (masks of tokens)."""

    def __init__(
        self, dataset: Any, batched: bool, collate: Callable[[Any], Any], with_trainer: bool
    ):
        """`with_trainer`: the generators are the trainer's, which goes on as if nothing had been
        drawn."""
        self.dataset, self.batched, self.collate = dataset, batched, collate
        self.with_trainer = with_trainer

    def __getitems__(self, asked: _Asked) -> tuple[np.ndarray[Any, Any] | None, Any]:
        with chance.lent() if self.with_trainer else contextlib.nullcontext():
            items = self._items(asked)
            contents = None
            if not asked.plain:
                contents = contents_of(items if self.batched else [items])
            return contents, self.collate(items)

    def _items(self, asked: _Asked) -> Any:
        # Once for the batch, which is never divided: seeding takes as long as reading a small
        # sample does.
        seed_by(sample_seed(asked.seed, asked.start))
        if not self.batched:
            return self.dataset[asked.keys]
        if getattr(self.dataset, "__getitems__", None):
            return self.dataset.__getitems__(list(asked.keys))
        return [self.dataset[key] for key in asked.keys]


class _Begin:
    """`worker_init_fn`: shows the script its own dataset."""

    def __init__(self, begin: Callable[[int], None] | None):
        self.begin = begin

    def __call__(self, number: int) -> None:
        info = get_worker_info()
        assert info is not None
        # it is frozen; nobody but the script reads it
        object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]
        if self.begin is not None:
            self.begin(number)


def seed_by(seed: int) -> None:
    """Python's, numpy's and torch's generators of the CPU; not the devices', which no dataset
    should use."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


class Readers:
    """The script's DataLoader once more, with its processes and prefetching, over own batches
    only. What these lie in is fetched ahead, as far as the sampler was asked."""

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
        """(contents or None, data) of each own batch."""
        self._own.walk, self._own.seed = walk, sample_seed(self._seed, epoch)
        self._generator.manual_seed(self._own.seed)
        known: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()
        self._own.known = known.put
        return self._ahead(iter(self._loader), known)

    def _ahead(
        self, batches: Iterator[Any], known: queue.SimpleQueue[list[int] | None]
    ) -> Iterator[Any]:
        """`known` ends with None, for the thread that waits there."""
        to_come: Iterator[list[int]] = iter(known.get, None)
        dataset = self._loader.dataset.dataset  # type: ignore[attr-defined]
        try:
            yield from fetched_ahead(dataset, to_come, PROCESSES, print, batches)
        finally:
            known.put(None)


def batched(loader: DataLoader[Any]) -> bool:
    """Does it make batches of samples (no: batch_size=None)?"""
    return loader.batch_sampler is not None


def _as_it_is(read: Any) -> Any:
    return read


def refuse_a_part(dataset: Any, world: int) -> None:
    """Raises BadInput for a stream that would give each rank a part of its own, where every rank
    must read the same."""
    read = dataset.dataset if isinstance(dataset, DataLoader) else dataset
    kinds = {kind.__module__ for kind in type(read).__mro__}
    if not any(kind.startswith(SPLITTING) for kind in kinds):
        return
    if is_map_style(dataset) or world > 1:
        raise BadInput(
            f"{type(dataset).__name__} shares itself over the ranks, so that each of {world} would "
            "see a part of the data; give run.steps harness.data.ByIndex(dataset) of the "
            "StreamingDataset, which any number of ranks reads whole, or `harness data index` its "
            "files"
        )
