"""This rank's micro-batches, in order, with ordinary DataLoader workers that prefetch across steps. Runs in the worker.

What step k consumes is a pure function of (seed, k) (batch.py), so there is nothing to save and nothing to re-shard:
a resumed or resized run asks for the same positions. Randomness in `dataset[i]` (augmentation) is seeded by position.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, Dataset, default_collate

from harness.batch import Batching, Plan, indices, sample_seed
from harness.world import BadInput


@dataclass(frozen=True)
class MicroBatch:
    """`positions`, `samples`: int64 (b,), where in the stream and which of the dataset; `data` as the collate function made it."""

    positions: np.ndarray[Any, Any]
    samples: np.ndarray[Any, Any]
    data: Any


def seed_everything(seed: int) -> None:
    """Python, numpy (if the script uses it) and torch on every device."""
    random.seed(seed)
    if "numpy" in sys.modules:
        np.random.seed(seed % 2**32)
    # Not torch.manual_seed: without a GPU it queues a seed for every backend that may come, with a stack trace, at every call.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)


class _Keyed(Dataset[Any]):
    """Reads (position, index) pairs; whatever the sample's own transform draws is a function of (seed, position)."""

    def __init__(self, dataset: Any, seed: int):
        self.dataset, self.seed = dataset, seed

    def __getitem__(self, key: tuple[int, int]) -> tuple[int, int, Any]:
        position, index = key
        seed = sample_seed(self.seed, position)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed: the devices' generators are not used here
        return position, index, self.dataset[index]


class _Collate:
    def __init__(self, collate: Callable[[list[Any]], Any] | None):
        self.collate = collate or default_collate

    def __call__(self, items: list[tuple[int, int, Any]]) -> MicroBatch:
        positions, samples, data = zip(*items, strict=True)
        return MicroBatch(np.array(positions, np.int64), np.array(samples, np.int64), self.collate(list(data)))


class _Order:
    """The batch sampler: this rank's micro-batches of all steps to come."""

    def __init__(self, batching: Batching, plan: Plan, rank: int, first: int, total: int):
        self.batching, self.micros, self.first, self.total = batching, plan.micros(rank), first, total

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        b = self.batching
        for step in range(self.first, self.total + 1):
            for micro in self.micros:
                start = (step - 1) * b.global_batch + micro * b.micro_batch
                yield [(start + i, int(index)) for i, index in enumerate(indices(b, step, micro))]


def map_style(
    dataset: Any, batching: Batching, plan: Plan, rank: int, first: int, total: int, collate_fn: Any, num_workers: int, pin: bool
) -> Iterator[MicroBatch]:
    """Micro-batches of this rank for steps first..total, in order."""
    loader: DataLoader[Any] = DataLoader(
        _Keyed(dataset, batching.seed),
        batch_sampler=_Order(batching, plan, rank, first, total),  # type: ignore[arg-type]
        collate_fn=_Collate(collate_fn),
        num_workers=num_workers,
        pin_memory=pin,
    )
    yield from loader


class Stream:
    """An iterable dataset. Every rank walks the whole stream and keeps its own micro-batches, so the samples of a step do not
    depend on the world; what that costs is reading, not training. The dataset's `state_dict` travels in the snapshot."""

    def __init__(self, dataset: Any, batching: Batching, plan: Plan, rank: int, collate_fn: Any):
        if not (hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")):
            raise BadInput(
                f"{type(dataset).__name__} is iterable but has no state_dict/load_state_dict, so a resumed run could not go on where it "
                "was; give it both (torchdata's nodes have them), or use a map-style dataset (__getitem__ and __len__)"
            )
        self.dataset, self.batching, self.mine = dataset, batching, set(plan.micros(rank))
        self.collate = collate_fn or default_collate
        self._iterator: Iterator[Any] | None = None

    def _next(self) -> Any:
        for _ in range(2):
            if self._iterator is None:
                self._iterator = iter(self.dataset)
            try:
                return next(self._iterator)
            except StopIteration:
                self._iterator = None  # the stream begins again
        raise BadInput("the iterable dataset is empty: its iterator ended at once; wanted at least one sample")

    def step(self, step: int) -> Iterator[MicroBatch]:
        """This rank's micro-batches of one step; must be exhausted before the next step or a snapshot."""
        b = self.batching
        for micro in range(b.micro_batches):
            items = [self._next() for _ in range(b.micro_batch)]
            if micro in self.mine:
                start = (step - 1) * b.global_batch + micro * b.micro_batch
                positions = np.arange(start, start + b.micro_batch, dtype=np.int64)
                yield MicroBatch(positions, positions, self.collate(items))


def is_map_style(dataset: Any) -> bool:
    return hasattr(dataset, "__getitem__") and isinstance(dataset, Sized)


def fingerprint(dataset: Any) -> str:
    """Its own `fingerprint` if it has one, else a hash of a few of its samples."""
    own = getattr(dataset, "fingerprint", None)
    if own is not None:
        return str(own() if callable(own) else own)
    if not is_map_style(dataset):
        return type(dataset).__qualname__
    n, h = len(dataset), xxhash.xxh3_128()
    for i in sorted({0, n - 1, *(n * k // 7 for k in range(1, 7))}):
        seed_everything(i)
        _feed(h, dataset[i])
    return f"sampled:{h.hexdigest()}"


def same_when_read_again(dataset: Any, seed: int) -> bool:
    """Is a sample a function of its index and of the seeded generators? Reads a few of a map-style dataset twice.

    What draws from a generator of its own (np.random.default_rng(), os.urandom) is found here, most of the time.
    """
    keyed = _Keyed(dataset, seed)
    for index in sorted({0, len(dataset) // 2, len(dataset) - 1}):
        seen = []
        for _ in range(2):
            h = xxhash.xxh3_128()
            _feed(h, keyed[index, index][2])
            seen.append(h.digest())
        if seen[0] != seen[1]:
            return False
    return True


def _feed(h: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        h.update(f"{value.dtype}{tuple(value.shape)}".encode())
        h.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray):
        h.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=repr):
            h.update(repr(key).encode())
            _feed(h, value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            _feed(h, item)
    else:
        h.update(repr(value).encode())


def to_device(data: Any, device: torch.device) -> Any:
    """Tensors inside tuples, lists and dicts, moved without blocking."""
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=True)
    if isinstance(data, dict):
        return {k: to_device(v, device) for k, v in data.items()}
    if isinstance(data, tuple):
        return type(data)(*(to_device(v, device) for v in data)) if hasattr(data, "_fields") else tuple(to_device(v, device) for v in data)
    if isinstance(data, list):
        return [to_device(v, device) for v in data]
    return data
