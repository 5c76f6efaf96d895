"""The reading of a script's own iterable data, all of it by every rank. Runs in the worker.

The content at a place of a stream cannot be computed, so every rank reads the whole stream and
keeps its own batches. Samples are hashed, and ranks compare their hashes now and then.

If a stream has a state (its loader's or its dataset's `state_dict`), a resumed run starts from the
one before the last step, so that the last step's batches are read again and show whether the state
is complete. Otherwise, the epoch is read again up to the place.
"""

from __future__ import annotations

import collections
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from torch.utils.data import DataLoader, IterableDataset

from harness.core.world import BadInput
from harness.worker.batches import rng_state
from harness.worker.batches.content_hash import contents_of
from storage.tensors import state_tree

_END = object()


@dataclass(frozen=True)
class Read:
    """One batch of a stream. `start`: number of samples before it in the epoch; `contents`: hashes
    of its samples; `digest`: of all samples up to and including its own."""

    index: int
    start: int
    contents: np.ndarray[Any, Any]
    data: Any
    digest: int


@dataclass(frozen=True)
class StreamMark:
    """The state of a stream after `batch` batches (`samples` samples) of an epoch."""

    batch: int
    samples: int
    digest: int
    random: rng_state.State
    state: Any

    def spelled(self) -> dict[str, Any]:
        return {**vars(self), "digest": f"{self.digest:016x}"}

    @staticmethod
    def of(spelled: Mapping[str, Any]) -> StreamMark:
        return StreamMark(**{**spelled, "digest": int(spelled["digest"], 16)})


class _HashingCollate:
    """A collate function that also returns hashes of its samples."""

    def __init__(self, collate: Callable[[Any], Any], batched: bool):
        self.collate, self.batched = collate, batched

    def __call__(self, items: Any) -> tuple[np.ndarray[Any, Any], Any]:
        return contents_of(items if self.batched else [items]), self.collate(items)


class OwnStream:
    """A script's stream, read one epoch at a time."""

    def __init__(
        self,
        loader: Any,
        micro_batches: int,
        agree: Callable[[Any], Any],
        tell: Callable[[str], None],
        lossy: bool = False,
    ):
        self.lossy = lossy  # continue from a state even if it is incomplete
        self._every, self._agree, self._tell = micro_batches, agree, tell
        self._hashed = has_plain_iter(loader)
        self._loader = copy.copy(loader) if self._hashed else loader
        if self._hashed:
            self._loader._iterator = None
            self._loader.collate_fn = _HashingCollate(
                loader.collate_fn, loader.batch_size is not None
            )
        self._here = getattr(loader, "num_workers", 0) == 0
        dataset = getattr(loader, "dataset", None)
        # the dataset, if it can be reset: it is read in this process, and has a state
        self._source = dataset if self._here and has_state(dataset) else None
        self._holder = self._loader if has_state(self._loader) else self._source
        self._fresh = None if self._source is None else copy.deepcopy(self._source.state_dict())
        self._marks: collections.deque[StreamMark] = collections.deque(maxlen=2)
        self._apart = rng_state.Apart(rng_state.generators_state())
        # digest of the first batch after a state was loaded, until the next pass begins; else None
        self._passed_first: int | None = None

    @property
    def has_state(self) -> bool:
        return self._holder is not None

    def marks(self) -> list[dict[str, Any]]:
        return [mark.spelled() for mark in self._marks]

    def open(self, mark: StreamMark | None) -> Iterator[Any]:
        """Begin to read at the beginning, or at a mark. The global generators must be as they were
        when the epoch began."""
        self._marks.clear()
        if mark is not None and self._holder is not None:
            self._holder.load_state_dict(copy.deepcopy(mark.state))
        items: Iterator[Any] = iter(self._loader)
        self._apart = rng_state.Apart(rng_state.generators_state() if mark is None else mark.random)
        return items

    def open_again(self) -> Iterator[Any]:
        """Begin at the start of the epoch in which the run was interrupted, whatever state was
        loaded since."""
        if self._source is not None:
            self._source.load_state_dict(copy.deepcopy(self._fresh))
        return self.open(None)

    def open_fresh(self) -> Iterator[Any]:
        """Begin a pass at the start of the data, even if the dataset begins each pass at the state
        that was loaded last (as Hugging Face's do)."""
        items = self.open(None)
        if self._passed_first is None:
            return items
        passed, self._passed_first = self._passed_first, None
        first = self._next(items)
        if self._source is not None and (
            first is _END or _digest(0, self._split(first)[0]) == passed
        ):
            return self.open_again()
        return iter(()) if first is _END else _chained(first, items)

    def read(self, items: Iterator[Any], mark: StreamMark | None, offset: int) -> Iterator[Read]:
        """Yield all batches from where `items` was opened. `offset`: batches of a step that earlier
        epochs have filled. Raises BadInput if ranks read different samples."""
        index, samples, digest = (mark.batch, mark.samples, mark.digest) if mark else (0, 0, 0)
        compare_at = self._every
        while compare_at <= index:
            compare_at *= 2
        while True:
            if (index + offset) % self._every == 0:
                self._note(index, samples, digest)
            if (item := self._next(items)) is _END:
                return
            contents, data = self._split(item)
            if mark is not None and index == mark.batch:
                self._passed_first = _digest(0, contents)
            digest = _digest(digest, contents)
            if index + 1 == compare_at:
                compare_at *= 2
                self._compare(index, digest)
            yield Read(index, samples, contents, data, digest)
            index, samples = index + 1, samples + len(contents)

    def _next(self, items: Iterator[Any]) -> Any:
        if not self._here:
            return next(items, _END)
        with self._apart:
            return next(items, _END)

    def _split(self, item: Any) -> tuple[np.ndarray[Any, Any], Any]:
        if self._hashed:
            contents, data = item
            return contents, data
        return contents_of([item]), item

    def _note(self, batch: int, samples: int, digest: int) -> None:
        if self._holder is None:
            return
        state = copy.deepcopy(self._holder.state_dict())
        try:
            state_tree.split(state)
        except TypeError as e:
            self._tell(
                f"harness: the state of {type(self._holder).__name__} cannot be kept in a snapshot "
                f"({e}); a resumed run reads the epoch again, up to where it was"
            )
            self._holder = None
            self._marks.clear()
            return
        self._marks.append(StreamMark(batch, samples, digest, self._apart.state, state))

    def _compare(self, index: int, digest: int) -> None:
        if digest != self._agree(digest):
            raise BadInput(
                f"this rank read other samples of the stream than rank 0, up to batch {index} of "
                "the epoch: some would be trained on twice, others never. Wanted the same stream "
                "in each process: give its shuffling a fixed seed, and do not split it by rank"
            )


def _digest(before: int, contents: np.ndarray[Any, Any]) -> int:
    return xxhash.xxh3_64_intdigest(before.to_bytes(8, "little") + contents.tobytes())


def _chained(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest


def has_state(thing: Any) -> bool:
    """Return whether its `state_dict` needs no arguments (MosaicML's wants the place)."""
    if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
        return False
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    try:
        wanted = inspect.signature(thing.state_dict).parameters.values()
    except ValueError:  # compiled functions have no signature
        return True
    return all(p.default is not p.empty or p.kind in optional for p in wanted)


def has_plain_iter(loader: Any) -> bool:
    """Return whether it iterates like torch's DataLoader (or torchdata's, which counts as well)."""
    own = type(loader).__iter__ is not DataLoader.__iter__
    return isinstance(loader, DataLoader) and (
        not own or type(loader).__module__.startswith("torchdata.stateful_dataloader")
    )


def is_mapped(loader: Any) -> bool:
    """Return whether single batches can be read, by the keys that its sampler yields."""
    return has_plain_iter(loader) and not isinstance(loader.dataset, IterableDataset)
