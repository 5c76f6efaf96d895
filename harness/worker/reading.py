"""Micro-batches read ahead: by the processes of an ordinary DataLoader, or by a thread of this one.
Runs in the worker.

To take a micro-batch over from another process costs this one more than to read tokens itself. So
a dataset that says so (`by_thread`) is read by a thread where its order keeps neighbours together,
and `num_workers` only says how far ahead: as far as so many processes would be.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from storage.errands import start_thread

T = TypeVar("T")
FACTOR = 2  # micro-batches that a process reads ahead, as torch has it
OF_PROCESSES = (  # options of a DataLoader
    "num_workers",
    "prefetch_factor",
    "persistent_workers",
    "multiprocessing_context",
    "timeout",
    "in_order",
)


def may_be_thread(dataset: Any, collate_fn: Any, in_turns: Sequence[int]) -> bool:
    """Does nothing of it draw from the generators that training draws from, and is reading it so
    light that a thread does best? `in_turns`: samples that are read in turns, of each source; 0: of
    all."""
    if may_draw(dataset) or may_draw(collate_fn):
        return False
    by_thread = getattr(dataset, "by_thread", None)
    if by_thread is None or not in_turns or 0 in in_turns:
        return False
    return bool(by_thread(*in_turns))


def may_draw(it: Any) -> bool:
    """May a dataset or a collate function draw? Of a script's own we cannot know, unless it says
    `draws = False`. None: torch's own function, which does not."""
    return it is not None and getattr(it, "draws", True) is not False


def stacked(samples: list[Any]) -> Any:
    """As torch's own collate function; tuples of arrays without torch, whose copies would take all
    processors for a moment, beside the training."""
    first = samples[0]
    if type(first) is not tuple or not all(type(one) is np.ndarray for one in first):
        return default_collate(samples)
    columns = zip(*samples, strict=True)
    try:
        return [torch.from_numpy(np.stack(column)) for column in columns]
    except (TypeError, ValueError):  # shapes that differ, no numbers: torch says it best
        return default_collate(samples)


class MicroReader:
    """`keyed`: a dataset of (position, index); `batch_sampler`: those of each micro-batch. `light`:
    see `may_be_thread`. `options`: of a DataLoader."""

    def __init__(
        self, keyed: Any, batch_sampler: Iterable[Any], collate_fn: Any, light: bool, **options: Any
    ):
        self.ahead = 0  # micro-batches that a thread reads ahead; 0: none does
        processes = options.get("num_workers", 0)
        if light and processes and options.get("worker_init_fn") is None:
            self.ahead = processes * (options.get("prefetch_factor") or FACTOR)
            options = {name: of for name, of in options.items() if name not in OF_PROCESSES}
        self._loader: DataLoader[Any] = DataLoader(
            keyed, batch_sampler=batch_sampler, collate_fn=collate_fn, **options
        )

    def __iter__(self) -> Iterator[Any]:
        """One pass. Forks its processes at once; a thread begins with the first micro-batch that
        is asked for."""
        batches = iter(self._loader)
        return read_ahead(batches, self.ahead) if self.ahead else batches


@dataclass(frozen=True)
class _Ended:
    """There is no more; or what reading raised."""

    error: BaseException | None


def read_ahead(batches: Iterator[T], ahead: int) -> Generator[T, None, None]:
    """The same, of which a thread has so many ready. Raises what reading them raises. Once it is
    closed the thread ends with what it is reading."""
    ready: queue.Queue[T | _Ended] = queue.Queue(ahead)
    closed = threading.Event()
    # pinned memory belongs to the device of who pins it
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def stop() -> None:
        closed.set()
        _empty(ready)  # it may wait for room; only it puts, so it waits no more

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
    except BaseException as e:  # whatever it is, who asked for it shall hear of it
        ready.put(_Ended(e))
    else:
        ready.put(_Ended(None))


def _empty(ready: queue.Queue[Any]) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            ready.get_nowait()
