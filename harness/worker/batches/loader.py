"""The loader of this rank's micro-batches, in order, read ahead across steps. Runs in the worker.

The samples of step k are a pure function of (seed, k) (batch.py), so there is nothing to save and
nothing to re-shard: a resumed or resized run reads the same positions. Randomness in `dataset[i]`
(augmentation) is seeded by position.

The items of an iterable dataset cannot be computed from their positions; only reading the stream
shows them. So each item is hashed before it is collated (`content_hash`), and the sum of the hashes
goes into the step's record.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import queue
import random
import sys
import threading
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
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from harness.core.batch import Batching, Plan, in_turns, indices_at, sample_seed
from harness.core.world import BadInput
from harness.worker.batches.content_hash import content_hash, contents_of, spell
from harness.worker.batches.prefetch import fetched_ahead
from storage.tensor_threads import start_thread

# The reading of micro-batches ahead of their use, by the processes of an ordinary DataLoader or
# by a thread of this process.

T = TypeVar("T")
FACTOR = 2  # micro-batches that a process reads ahead, as torch has it
OF_PROCESSES = (  # DataLoader options that only apply to processes
    "num_workers",
    "prefetch_factor",
    "persistent_workers",
    "multiprocessing_context",
    "timeout",
    "in_order",
)


def may_be_thread(dataset: Any, collate_fn: Any, in_turns: Sequence[int]) -> bool:
    """Return whether a thread should read the dataset: reading must be cheap, and must not draw
    from the generators that training draws from. `in_turns`: for each source, the number of samples
    that are read in turns; 0: all."""
    if may_draw(dataset) or may_draw(collate_fn):
        return False
    by_thread = getattr(dataset, "by_thread", None)
    if by_thread is None or not in_turns or 0 in in_turns:
        return False
    return bool(by_thread(*in_turns))


def may_draw(it: Any) -> bool:
    """Return whether a dataset or a collate function may draw random numbers. One of the script's
    own is assumed to, unless it has `draws = False`. None: torch's own function, which does not."""
    return it is not None and getattr(it, "draws", True) is not False


def stacked(samples: list[Any]) -> Any:
    """Collate samples like torch's own function. Tuples of arrays are stacked by numpy, since
    torch's copies would briefly take all processors from the training."""
    first = samples[0]
    if type(first) is not tuple or not all(type(one) is np.ndarray for one in first):
        return default_collate(samples)
    columns = zip(*samples, strict=True)
    try:
        return [torch.from_numpy(np.stack(column)) for column in columns]
    except (TypeError, ValueError):  # different shapes, or not numbers: torch's error says it best
        return default_collate(samples)


class MicroReader:
    """A reader of micro-batches. `keyed`: a dataset whose keys are (position, index);
    `batch_sampler`: the keys of each micro-batch. `light`: the result of `may_be_thread`.
    `options`: those of a DataLoader."""

    def __init__(
        self, keyed: Any, batch_sampler: Iterable[Any], collate_fn: Any, light: bool, **options: Any
    ):
        self.ahead = 0  # micro-batches that a thread reads ahead; 0: no thread
        processes = options.get("num_workers", 0)
        if light and processes and options.get("worker_init_fn") is None:
            self.ahead = processes * (options.get("prefetch_factor") or FACTOR)
            options = {name: of for name, of in options.items() if name not in OF_PROCESSES}
        self._loader: DataLoader[Any] = DataLoader(
            keyed, batch_sampler=batch_sampler, collate_fn=collate_fn, **options
        )

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass. Processes are forked at once; a thread starts when the first micro-batch is
        requested."""
        batches = iter(self._loader)
        return read_ahead(batches, self.ahead) if self.ahead else batches


@dataclass(frozen=True)
class _Ended:
    """The end of the micro-batches: with the error that reading raised, or None."""

    error: BaseException | None


def read_ahead(batches: Iterator[T], ahead: int) -> Generator[T, None, None]:
    """Yield the same micro-batches; a thread reads up to `ahead` of them in advance. Raises what
    reading them raises. Once this generator is closed, the thread ends after its current read."""
    ready: queue.Queue[T | _Ended] = queue.Queue(ahead)
    closed = threading.Event()
    # pinned memory belongs to the current device of the thread that pins it
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def stop() -> None:
        closed.set()
        _empty(ready)  # the thread may wait for room; nothing else puts, so it will not wait again

    start_thread("reading", functools.partial(_read, batches, ready, closed, device), stop)
    try:
        while True:
            found = ready.get()
            if isinstance(found, _Ended):
                if found.error is not None:
                    raise found.error
                return
            yield found
    finally:
        stop()


def _read(
    batches: Iterator[T],
    ready: queue.Queue[T | _Ended],
    closed: threading.Event,
    device: int | None,
) -> None:
    try:
        if device is not None:
            torch.cuda.set_device(device)
        for batch in batches:
            ready.put(batch)
            if closed.is_set():
                _empty(ready)
                return
    except BaseException as e:  # any error is raised again in the consumer
        ready.put(_Ended(e))
    else:
        ready.put(_Ended(None))


def _empty(ready: queue.Queue[Any]) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            ready.get_nowait()


Collate: TypeAlias = Callable[[list[Any]], Any]
Keyed: TypeAlias = tuple[int, int, Any, int | None]
KEYS_AT_ONCE = 2048


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of b samples. `positions`, `samples`: int64 (b,), positions in the order of
    training and indices in the dataset. `data`: what the collate function returned.

    `contents`, int64 (b,): hashes of the samples, for a stream or a dataset that knows them
    (`has_contents`), else None. `items`: the items as read, for a stream only.
    """

    positions: np.ndarray[Any, Any]
    samples: np.ndarray[Any, Any]
    data: Any
    contents: np.ndarray[Any, Any] | None = None
    items: tuple[Any, ...] = ()

    def pin_memory(self) -> MicroBatch:
        """Return a copy with pinned data. A DataLoader calls this for batches of unknown types."""
        pinned = pin_memory(self.data)  # type: ignore[no-untyped-call]
        return dataclasses.replace(self, data=pinned)


def seed_everything(seed: int) -> None:
    """Seed Python, numpy (if it is imported) and torch on the CPU and on every GPU."""
    random.seed(seed)
    if "numpy" in sys.modules:
        np.random.seed(seed % 2**32)
    # Not torch.manual_seed: without a GPU, each call queues a seed for every backend that may be
    # initialized later, with a stack trace.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)


def determine(
    device: torch.device, reduce: str, asked: bool | None, environ: MutableMapping[str, str]
) -> None:
    """Make torch use deterministic kernels: kernels that add in a varying order would defeat exact
    sums. `asked`: see `attach(deterministic=...)`; `environ`: of this process."""
    if asked or (asked is None and reduce != "fast" and device.type == "cuda"):
        environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # warn_only would leave attention's backward as it is, without determinism
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False
    if reduce != "fast":
        # otherwise the code that torch.compile makes for a shape depends on the shapes before it,
        # and so on when the process began
        environ.setdefault("TORCH_DYNAMO_AUTOMATIC_DYNAMIC_SHAPES", "0")
        if (dynamo := sys.modules.get("torch._dynamo.config")) is not None:
            dynamo.automatic_dynamic_shapes = False  # type: ignore[attr-defined]


class _Keyed(Dataset[Any]):
    """A dataset of (position, index) keys. Random numbers that a sample's transform draws depend on
    (seed, position). Items are (position, index, sample, hash of the sample or None)."""

    def __init__(self, dataset: Any, seed: int, collate: Collate | None):
        self.dataset, self.seed = dataset, seed
        self._collate_draws = may_draw(collate)
        self._has_contents = has_contents(dataset)
        # A dataset that draws nothing is read by whole micro-batches without seeding, which takes
        # longer than reading a sample.
        self._draws = may_draw(dataset)

    def __getitems__(self, keys: list[tuple[int, int]]) -> list[Keyed]:
        """Return the items of a micro-batch. A dataset with `read_ahead` fetches them together."""
        indices = [index for _, index in keys]
        if self._draws:
            if (read_ahead := getattr(self.dataset, "read_ahead", None)) is not None:
                read_ahead(indices)
            samples = [self._sample(*key) for key in keys]
        else:
            together = getattr(self.dataset, "__getitems__", None)
            samples = together(indices) if together else [self.dataset[i] for i in indices]
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
        # not torch.manual_seed, since generators of devices are not used here
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
    """A reader of samples by position and index. Random numbers drawn in `dataset[i]` depend on the
    seed and the position only. `in_turns`: see `may_be_thread`."""

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
        """Return a loader that reads ahead. `options`: as for a DataLoader."""
        return MicroReader(self._keyed, batch_sampler, self._collate, self._light, **options)


class _Order:
    """The batch sampler: this rank's micro-batches of steps `first` to `total`."""

    def __init__(self, batching: Batching, plan: Plan, rank: int, first: int, total: int):
        self.batching, self.micros, self.first, self.total = (
            batching,
            plan.micros(rank),
            first,
            total,
        )

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        b, micros = self.batching, self.micros
        # Several steps at a time, since an order takes about as long for one as for many.
        at_once = max(1, KEYS_AT_ONCE // (len(micros) * b.micro_batch or 1))
        for step in range(self.first, self.total + 1, at_once):
            keys = _keys(b, range(step, min(step + at_once, self.total + 1)), micros)
            for start in range(0, len(keys), b.micro_batch):
                yield keys[start : start + b.micro_batch]


def _keys(b: Batching, steps: range, micros: range) -> list[tuple[int, int]]:
    """Return (position, index) of each sample of micro-batches `micros` of each of `steps`."""
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
    """Yield this rank's micro-batches of steps `first` to `total`, in order. Their data is fetched
    ahead if the dataset can say where it lies; `processes` and `tell`: see `Prefetch`."""
    order = _Order(batching, plan, rank, first, total)
    lanes = len(plan.micros(rank))
    reader = Reader(dataset, batching.seed, collate_fn, in_turns(batching, lanes))
    # Forks its processes before threads that fetch are started.
    batches = iter(reader.ahead(order, num_workers=num_workers, pin_memory=pin))
    to_come = ([index for _, index in keys] for keys in order)
    yield from fetched_ahead(dataset, to_come, processes, tell, batches)


def read_again(dataset: Any, batching: Batching, step: int, micro: int, collate_fn: Any) -> Any:
    """Read the data of one micro-batch of a map-style dataset in this process, for a step that is
    repeated."""
    keys = _keys(batching, range(step, step + 1), range(micro, micro + 1))
    return Reader(dataset, batching.seed, collate_fn).read(keys).data


class Stream:
    """An iterable dataset. Every rank reads the whole stream and keeps its own micro-batches, so
    the samples of a step do not depend on the world; this costs reading, not training. The
    dataset's `state_dict` is part of the snapshot.

    A pass ends when the iterator ends, and the next begins with a new iterator. Some datasets
    (Hugging Face's) begin every pass after `load_state_dict` at the loaded place, not at the
    beginning. Such a pass is detected by its first item, or by having none; then the state that the
    dataset had at first is loaded.
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
        # hash of the first item of that pass; None: the pass had no items
        self._passed_first: int | None = None

    def state_dict(self) -> Any:
        """Return the dataset's state, at a step boundary."""
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
        """Return the first item of a new pass. Raises BadInput if the dataset is empty."""
        # First comes the rest of a pass that an earlier session began.
        if self._iterator is None and self._resumed:
            self._iterator = iter(self.dataset)
            for item in self._iterator:
                self._passed_first = content_hash(item)
                return item
        self._iterator = iter(self.dataset)
        item = next(self._iterator, _NOTHING)
        if self._resumed:
            self._resumed = False
            # It began at the loaded place again, not at the beginning.
            if item is _NOTHING or content_hash(item) == self._passed_first:
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
        """Yield this rank's micro-batches of one step. Exhaust it before the next step or a
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
        """Collate a micro-batch of the stream again. Raises BadInput if the script has changed the
        items in place."""
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
    """Return whether this is a map-style dataset that knows hashes of its samples, as those of
    `harness.data` do, by a method `content_ids(indices)` -> int64 (n,)."""
    return is_map_style(dataset) and callable(getattr(dataset, "content_ids", None))


def fingerprint(dataset: Any) -> str:
    """Return the dataset's own `fingerprint` if it has one, else a hash of a few of its samples,
    the same in every process; for an iterable dataset the name of its type; for datasets by name
    (`datasets.DatasetDict`) the fingerprint of each.
    """
    own = getattr(dataset, "fingerprint", None)
    if own is not None:
        return str(own() if callable(own) else own)
    if isinstance(dataset, Mapping) and 0 not in dataset:
        every = {str(name): fingerprint(each) for name, each in dataset.items()}
        return f"named:{xxhash.xxh3_128_hexdigest(repr(sorted(every.items())).encode())}"
    if not is_map_style(dataset):
        return type(dataset).__qualname__
    n, h = len(dataset), xxhash.xxh3_128()
    for i in sorted({0, n - 1, *(n * k // 7 for k in range(1, 7))}):
        seed_everything(i)
        spell(h, dataset[i], ())
    return f"sampled:{h.hexdigest()}"


def same_when_read_again(dataset: Any, seed: int) -> bool:
    """Return whether samples of a map-style dataset depend on index and seeded generators only.
    Reads a few of them twice.

    This detects, most of the time, a dataset that draws from a generator of its own
    (np.random.default_rng(), os.urandom).
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
    """Return the data with tensors, and everything else with a method `to`, moved to the device
    without blocking; also inside tuples, lists, mappings, dataclasses and ordinary objects that
    have them as attributes. Containers are copied, not changed, unless they have a method `to`."""
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
    except TypeError:  # its `to` takes only a device
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
    """Return a copy of a dataclass or ordinary object with its own tensors moved. Attributes that
    are ordinary objects are not searched."""
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
        object.__setattr__(twin, name, value)  # works for frozen dataclasses too
    return twin
