"""This rank's micro-batches, in order, read ahead across steps. Runs in the worker.

What step k consumes is a pure function of (seed, k) (batch.py), so there is nothing to save and
nothing to re-shard: a resumed or resized run asks for the same positions. Randomness in
`dataset[i]` (augmentation) is seeded by position.

An iterable dataset is another matter: what lies at a position is what the stream says, and nobody
can compute it. So what is read is hashed, item by item, before it is collated (`content_hash`), and
the sum over a step goes into its record.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import sys
import types
from collections.abc import (
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
    Sized,
)
from dataclasses import dataclass
from itertools import repeat
from typing import Any, TypeAlias

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset, default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from harness.core.batch import Batching, Plan, in_turns, indices_at, sample_seed
from harness.core.world import BadInput
from harness.worker.content_hashes import content_hash, contents_of, feed, spell
from harness.worker.prefetch import fetched_ahead
from harness.worker.reading import MicroReader, may_be_thread, may_draw, stacked

Collate: TypeAlias = Callable[[list[Any]], Any]
Keyed: TypeAlias = tuple[int, int, Any, int | None]
KEYS_AT_ONCE = 2048


@dataclass(frozen=True)
class MicroBatch:
    """`positions`, `samples`: int64 (b,), where in the stream and which of the dataset; `data` as
    the collate function made it.

    `contents`, int64 (b,): hashes of what was read, of a stream and of a dataset that knows them
    (`has_contents`). `items`: of a stream, what they are of.
    """

    positions: np.ndarray[Any, Any]
    samples: np.ndarray[Any, Any]
    data: Any
    contents: np.ndarray[Any, Any] | None = None
    items: tuple[Any, ...] = ()

    def pin_memory(self) -> MicroBatch:
        """What a DataLoader asks of a batch that is no tensor, list or mapping itself."""
        pinned = pin_memory(self.data)  # type: ignore[no-untyped-call]
        return dataclasses.replace(self, data=pinned)


def seed_everything(seed: int) -> None:
    """Python, numpy (if the script uses it) and torch on every device."""
    random.seed(seed)
    if "numpy" in sys.modules:
        np.random.seed(seed % 2**32)
    # Not torch.manual_seed: without a GPU it queues a seed for every backend that may come, with a
    # stack trace, at every call.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)


class _Keyed(Dataset[Any]):
    """Reads (position, index) pairs; whatever the sample's own transform draws is a function of
    (seed, position). Gives (position, index, sample, hash of what was read or None)."""

    def __init__(self, dataset: Any, seed: int, collate: Collate | None):
        self.dataset, self.seed = dataset, seed
        self._collate_draws = may_draw(collate)
        self._has_contents = has_contents(dataset)
        # one that draws nothing is read by whole micro-batches: seeding takes longer than a sample
        self._draws = may_draw(dataset)

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[Keyed]:
        """A micro-batch. A dataset with `read_ahead` fetches it at once."""
        indices = [index for _, index in keys]
        if self._draws:
            if (read_ahead := getattr(self.dataset, "read_ahead", None)) is not None:
                read_ahead(indices)
            samples = [self._sample(*key) for key in keys]
        else:
            samples = self.dataset.__getitems__(indices)
            if self._collate_draws:
                self._begin_with(keys[-1][0])
        contents = (
            self.dataset.content_ids(indices).tolist() if self._has_contents else repeat(None)
        )
        given = zip(keys, samples, contents, strict=False)
        return [(*key, sample, content) for key, sample, content in given]

    def __getitem__(self, key: tuple[int, int]) -> Keyed:
        return self.__getitems__([key])[0]

    def _sample(self, position: int, index: int) -> Any:
        self._begin_with(position)
        return self.dataset[index]

    def _begin_with(self, position: int) -> None:
        seed = sample_seed(self.seed, position)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        # not torch.manual_seed: the devices' generators are not used here
        torch.default_generator.manual_seed(seed)


class _Collate:
    def __init__(self, collate: Collate):
        self.collate = collate

    def __call__(self, items: list[Keyed]) -> MicroBatch:
        positions, samples, data, contents = zip(*items, strict=True)
        return MicroBatch(
            np.array(positions, np.int64),
            np.array(samples, np.int64),
            self.collate(list(data)),
            None if contents[0] is None else np.array(contents, np.int64),
        )


class Reader:
    """Reads samples by position and index: what is drawn in `dataset[i]` depends on the position
    only. `in_turns`: see `may_be_thread`."""

    def __init__(
        self, dataset: Any, seed: int, collate_fn: Collate | None, in_turns: Sequence[int] = ()
    ):
        self._light = may_be_thread(dataset, collate_fn, in_turns)
        if self._light and (hold := getattr(dataset, "hold", None)) is not None:
            hold(*in_turns)
        self._keyed = _Keyed(dataset, seed, collate_fn)
        self._collate = _Collate(collate_fn or (stacked if self._light else default_collate))

    def read(self, keys: list[tuple[int, int]]) -> MicroBatch:
        return self._collate(self._keyed.__getitems__(keys))

    def ahead(self, batch_sampler: Iterable[Any], **options: Any) -> MicroReader:
        """`options`: of a DataLoader."""
        return MicroReader(self._keyed, batch_sampler, self._collate, self._light, **options)


class _Order:
    """The batch sampler: this rank's micro-batches of all steps to come."""

    def __init__(self, batching: Batching, plan: Plan, rank: int, first: int, total: int):
        self.batching, self.micros, self.first, self.total = (
            batching,
            plan.micros(rank),
            first,
            total,
        )

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        b, micros = self.batching, self.micros
        # all at once: an order takes about as long for one micro-batch as for many
        at_once = max(1, KEYS_AT_ONCE // (len(micros) * b.micro_batch or 1))
        for step in range(self.first, self.total + 1, at_once):
            keys = _keys(b, range(step, min(step + at_once, self.total + 1)), micros)
            for start in range(0, len(keys), b.micro_batch):
                yield keys[start : start + b.micro_batch]


def _keys(b: Batching, steps: range, micros: range) -> list[tuple[int, int]]:
    """(position, index) of each sample of these micro-batches of each of these steps."""
    begins = (np.arange(steps.start, steps.stop) - 1) * b.global_batch
    within = np.arange(micros.start * b.micro_batch, micros.stop * b.micro_batch)
    where = (begins[:, None] + within).ravel()
    return list(zip(where.tolist(), indices_at(b, where).tolist(), strict=True))


def map_style(
    dataset: Any,
    batching: Batching,
    plan: Plan,
    rank: int,
    first: int,
    total: int,
    collate_fn: Any,
    num_workers: int,
    pin: bool,
    processes: int = 1,
    tell: Callable[[str], object] = print,
) -> Generator[MicroBatch, None, None]:
    """Micro-batches of this rank for steps first..total, in order. What they lie in is fetched
    ahead, if the dataset can say what that is; `processes` and `tell`: see `Prefetch`."""
    order = _Order(batching, plan, rank, first, total)
    lanes = len(plan.micros(rank))
    reader = Reader(dataset, batching.seed, collate_fn, in_turns(batching, lanes))
    # forks its processes, before there are threads that fetch
    batches = iter(reader.ahead(order, num_workers=num_workers, pin_memory=pin))
    to_come = ([index for _, index in keys] for keys in order)
    yield from fetched_ahead(dataset, to_come, processes, tell, batches)


def read_again(dataset: Any, batching: Batching, step: int, micro: int, collate_fn: Any) -> Any:
    """The data of one micro-batch of a map-style dataset, read here and now: what a step that
    is done again gets."""
    keys = _keys(batching, range(step, step + 1), range(micro, micro + 1))
    return Reader(dataset, batching.seed, collate_fn).read(keys).data


class Stream:
    """An iterable dataset. Every rank walks the whole stream and keeps its own micro-batches, so
    the samples of a step do not depend on the world; what that costs is reading, not training. The
    dataset's `state_dict` travels in the snapshot.

    A pass ends with the iterator and the next begins with a new one. Some datasets (Hugging Face's)
    begin every pass after `load_state_dict` where that state was, not at the beginning: such a pass
    shows by its first item, or by having none, and the state in which the dataset came is loaded
    then.
    """

    def __init__(self, dataset: Any, batching: Batching, plan: Plan, rank: int, collate_fn: Any):
        if not (hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")):
            raise BadInput(
                f"{type(dataset).__name__} is iterable but has no state_dict/load_state_dict, so a "
                "resumed run could not go on where it was; give it both (torchdata's nodes have "
                "them), or use a map-style dataset (__getitem__ and __len__)"
            )
        self.dataset, self.batching, self.mine = dataset, batching, set(plan.micros(rank))
        self.collate = collate_fn or default_collate
        self._iterator: Iterator[Any] | None = None
        self._fresh: Any = copy.deepcopy(dataset.state_dict())
        self._resumed = False  # this pass began from a loaded state
        # hash of the first item of that pass; None: it had none
        self._passed_first: int | None = None

    def state_dict(self) -> Any:
        return self.dataset.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.dataset.load_state_dict(state)
        self._iterator, self._resumed, self._passed_first = None, True, None

    def _next(self) -> Any:
        if self._iterator is None:
            return self._begin()
        try:
            return next(self._iterator)
        except StopIteration:
            return self._begin()

    def _begin(self) -> Any:
        """The first item of a new pass."""
        # the rest of a pass that an earlier session began
        if self._iterator is None and self._resumed:
            self._iterator = iter(self.dataset)
            for item in self._iterator:
                self._passed_first = content_hash(item)
                return item
        self._iterator = iter(self.dataset)
        item = next(self._iterator, _NOTHING)
        if self._resumed:
            self._resumed = False
            if item is _NOTHING or content_hash(item) == self._passed_first:  # not at the beginning
                self._iterator = None
                self.dataset.load_state_dict(copy.deepcopy(self._fresh))
                self._iterator = iter(self.dataset)
                item = next(self._iterator, _NOTHING)
        if item is _NOTHING:
            raise BadInput(
                "the iterable dataset is empty: a whole pass from its beginning gave nothing; "
                "wanted at least one sample"
            )
        return item

    def step(self, step: int) -> Iterator[MicroBatch]:
        """This rank's micro-batches of one step; must be exhausted before the next step or a
        snapshot."""
        b = self.batching
        for micro in range(b.micro_batches):
            items = [self._next() for _ in range(b.micro_batch)]
            if micro in self.mine:
                start = (step - 1) * b.global_batch + micro * b.micro_batch
                positions = np.arange(start, start + b.micro_batch, dtype=np.int64)
                yield MicroBatch(
                    positions, positions, self.collate(items), contents_of(items), tuple(items)
                )

    def collated_again(self, batch: MicroBatch) -> Any:
        """Its data once more. Raises BadInput if the script has changed the items."""
        if not np.array_equal(contents_of(batch.items), batch.contents):  # type: ignore[arg-type]
            raise BadInput(
                "a step must be done again (see step.attempt), but the script changed what the "
                "stream gave it in place, and a stream cannot be read twice; change a copy, or "
                "use a collate_fn that copies (the default one does)"
            )
        return self.collate(list(batch.items))


_NOTHING = object()


def is_map_style(dataset: Any) -> bool:
    return hasattr(dataset, "__getitem__") and isinstance(dataset, Sized)


def has_contents(dataset: Any) -> bool:
    """Does a map-style dataset know hashes of what it reads, as `harness.data` does?
    `content_ids(indices)`: int64 (n,)."""
    return is_map_style(dataset) and callable(getattr(dataset, "content_ids", None))


def fingerprint(dataset: Any, by_repr: bool = False) -> str:
    """Its own `fingerprint` if it has one, else a hash of a few of its samples; the same in every
    process.

    `by_repr`: as the first version made it, which runs that it began are known by.
    """
    own = getattr(dataset, "fingerprint", None)
    if own is not None:
        return str(own() if callable(own) else own)
    if not is_map_style(dataset):
        return type(dataset).__qualname__
    n, h = len(dataset), xxhash.xxh3_128()
    for i in sorted({0, n - 1, *(n * k // 7 for k in range(1, 7))}):
        seed_everything(i)
        feed(h, dataset[i], by_repr)
    return f"sampled:{h.hexdigest()}"


def same_when_read_again(dataset: Any, seed: int) -> bool:
    """Is a sample a function of its index and of the seeded generators? Reads a few of a map-style
    dataset twice.

    What draws from a generator of its own (np.random.default_rng(), os.urandom) is found here, most
    of the time.
    """
    keyed = _Keyed(dataset, seed, None)
    for index in sorted({0, len(dataset) // 2, len(dataset) - 1}):
        seen = []
        for _ in range(2):
            h = xxhash.xxh3_128()
            spell(h, keyed[index, index][2], ())
            seen.append(h.digest())
        if seen[0] != seen[1]:
            return False
    return True


def to_device(data: Any, device: torch.device) -> Any:
    """Tensors, and whatever has a method `to`, moved without blocking; also inside tuples, lists,
    mappings, dataclasses and ordinary objects that hold them as attributes. What holds them is
    copied, not changed, unless it has a `to` of its own."""
    if isinstance(data, (str, bytes, int, float, type(None), *CODE)):
        return data
    if callable(move := getattr(data, "to", None)):
        return _moved(move, data, device)
    if isinstance(data, Mapping):
        return _moved_mapping(data, device)
    if isinstance(data, tuple):
        moved = [to_device(v, device) for v in data]
        return type(data)._make(moved) if hasattr(data, "_make") else tuple(moved)
    if isinstance(data, list):
        return [to_device(v, device) for v in data]
    return _moved_object(data, device)


CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)


def _moved(move: Callable[..., Any], data: Any, device: torch.device) -> Any:
    try:
        moved = move(device, non_blocking=True)
    except TypeError:  # it takes a device only
        moved = move(device)
    return data if moved is None else moved


def _moved_mapping(data: Mapping[Any, Any], device: torch.device) -> Any:
    moved = {k: to_device(v, device) for k, v in data.items()}
    if type(data) is dict or not isinstance(data, MutableMapping):
        return moved
    same_kind = copy.copy(data)  # a defaultdict, a UserDict, ...
    for key, value in moved.items():
        same_kind[key] = value
    return same_kind


def _moved_object(data: Any, device: torch.device) -> Any:
    """A dataclass, or any object with attributes; only what they hold themselves is looked at."""
    if dataclasses.is_dataclass(data):
        names = [field.name for field in dataclasses.fields(data)]
    else:
        names = list(getattr(data, "__dict__", ()))
    changed = {}
    for name in names:
        value = getattr(data, name, None)
        if isinstance(value, (torch.Tensor, Mapping, tuple, list)) or dataclasses.is_dataclass(
            value
        ):
            changed[name] = to_device(value, device)
    if not changed:
        return data
    twin = copy.copy(data)
    for name, value in changed.items():
        object.__setattr__(twin, name, value)  # frozen ones as well
    return twin
