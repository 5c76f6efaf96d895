"""Data fetched ahead, in the order in which this rank will read it. Runs in the worker.

The plan says what a rank reads from now on, so a thread walks ahead of the DataLoader and brings
near what its next micro-batches lie in, by many requests at once: so many bytes ahead, and no more.
The first micro-batches come first. What it fetches is what the plan of this world says; another
world makes another loader, and so another one of these. Knows any dataset that has the methods of
`ReadsAhead`, as `harness.data`'s have.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from harness.core.traffic import Traffic
from harness.core.world import HarnessError
from storage.errors import StoreError

T = TypeVar("T")
AT_ONCE = 16  # requests on their way
LATE_S = 10.0  # a wait for data that is told of
MOST_MICROS = 4096  # micro-batches that it looks ahead
# times what may be ahead: what was used lately counts as near, and of blocks that are read side by
# side as much again as is in use may be ahead
IN_USE = 4
BREATHS = 8  # one part of so many of what may be ahead is asked for at a time
TELL_EVERY_S = 60.0  # ... and again after so long
SEEN, LEAST_S = 10, 1e-3  # readings from which a rate is told


class DataPiece(Protocol):
    """Something that samples lie in, hashable."""

    @property
    def nbytes(self) -> int: ...

    def joined(self, other: Any) -> DataPiece | None:
        """Both as one, if one request can fetch them."""

    def warm(self) -> None:
        """Bring it near: what is read of it soon is read from there. Any thread may. Raises
        nothing: who reads it hears of what is wrong."""


@runtime_checkable
class ReadsAhead(Protocol):
    """A dataset whose samples lie in pieces of a store. `traffic`: of each store in this
    process."""

    @property
    def traffic(self) -> Sequence[Traffic]: ...

    def pieces(self, indices: Sequence[int]) -> Sequence[DataPiece]:
        """What these samples lie in. May read what says so. Raises HarnessError, StoreError."""

    def ahead_nbytes(self, processes: int) -> int:
        """The most that may be fetched ahead by one of so many processes of this node; 0: nothing
        may."""


class _Window:
    """Pieces of micro-batches to come, and those that were needed lately, which are near still: of
    these at most `recent_nbytes`.

    `taken`: micro-batches that were given; `ahead_nbytes`: of pieces that none was given of so far;
    `in_use_nbytes`: of those that some were given of, and others need.
    """

    def __init__(self, recent_nbytes: int) -> None:
        self.taken = self.ahead_nbytes = self.in_use_nbytes = 0
        # these; and of each piece the last micro-batch that it is known to be needed for
        self._unused: set[DataPiece] = set()
        self._last: dict[DataPiece, int] = {}
        self._micros: deque[tuple[int, list[DataPiece]]] = deque()
        self._recent: dict[DataPiece, None] = {}  # the oldest first
        self._recent_room = recent_nbytes

    def __len__(self) -> int:
        return len(self._micros)

    def is_near(self, piece: DataPiece) -> bool:
        return piece in self._last or piece in self._recent

    def is_needed(self, piece: DataPiece) -> bool:
        return piece in self._last

    def add(self, number: int, pieces: Iterable[DataPiece], fresh: Sequence[DataPiece]) -> None:
        """A micro-batch, and which of its pieces are not near."""
        self._micros.append((number, list(pieces)))
        for piece in pieces:
            self._last[piece] = number
            if piece in self._recent:
                del self._recent[piece]
                self._recent_room += piece.nbytes
                self.in_use_nbytes += piece.nbytes
        self._unused.update(fresh)
        self.ahead_nbytes += sum(piece.nbytes for piece in fresh)

    def take(self) -> None:
        """The next micro-batch was given."""
        self.taken += 1
        while self._micros and self._micros[0][0] < self.taken:
            number, pieces = self._micros.popleft()
            for piece in pieces:
                if piece in self._unused:
                    self._unused.remove(piece)
                    self.ahead_nbytes -= piece.nbytes
                    self.in_use_nbytes += piece.nbytes
                if self._last[piece] == number:
                    del self._last[piece]
                    self.in_use_nbytes -= piece.nbytes
                    self._recent[piece] = None
                    self._recent_room -= piece.nbytes
            while self._recent_room < 0:
                oldest = next(iter(self._recent))
                del self._recent[oldest]
                self._recent_room += oldest.nbytes


class Prefetch:
    """Of one loader. `batches`: indices of each micro-batch to come. `tell`: hears of waits of
    `late_s` and more, from a thread of its own. See the module."""

    def __init__(
        self,
        dataset: ReadsAhead,
        batches: Iterable[Sequence[int]],
        processes: int,
        tell: Callable[[str], object],
        late_s: float = LATE_S,
    ):
        self._dataset, self._batches, self._tell = dataset, batches, tell
        self._late_s = late_s
        self._most_nbytes = dataset.ahead_nbytes(processes)
        self._window = _Window(IN_USE * self._most_nbytes)
        self._enough_nbytes = 0  # as soon as no more is ahead, there is room for what waits for it
        lock = threading.Lock()
        self._room, self._asked = threading.Condition(lock), threading.Condition(lock)
        self._closed = threading.Event()
        self._waits_s = math.inf
        self._queue: deque[DataPiece] = deque()
        # daemons: a store that is silent shall keep nobody from leaving
        for do in (self._walk, self._watch, *[self._fetch] * AT_ONCE):
            threading.Thread(target=do, name="prefetch", daemon=True).start()

    @property
    def ahead_nbytes(self) -> int:
        """Of pieces that no micro-batch was given of so far."""
        return self._window.ahead_nbytes

    def over(self, batches: Iterator[T]) -> Iterator[T]:
        """The micro-batches themselves, one after the other. Ends with them, or when nobody wants
        more of them."""
        try:
            while True:
                self._waits_s = time.monotonic()
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                finally:
                    self._waits_s = math.inf
                self.taken()
                yield batch
        finally:
            self.close()

    def taken(self) -> None:
        """The next micro-batch was given to the script."""
        with self._room:
            self._window.take()
            if self._window.ahead_nbytes <= self._enough_nbytes:
                self._room.notify()

    def close(self) -> None:
        with self._room:
            self._closed.set()
            self._room.notify()
            self._asked.notify_all()

    def _walk(self) -> None:
        for number, indices in enumerate(self._batches):
            pieces: Sequence[DataPiece] = ()
            # who reads it hears of what is wrong
            with contextlib.suppress(HarnessError, StoreError):
                pieces = self._dataset.pieces(indices)
            if not self._admit(number, dict.fromkeys(pieces)):
                return

    def _admit(self, number: int, pieces: dict[DataPiece, None]) -> bool:
        """Wait for room, and have fetched what is not near. False: closed."""
        with self._room:
            window, breath = self._window, 0
            while True:
                fresh = [piece for piece in pieces if not window.is_near(piece)]
                more = sum(piece.nbytes for piece in fresh)
                # blocks that are read side by side end side by side, and others follow
                most = max(self._most_nbytes, window.in_use_nbytes)
                most = min(most, IN_USE * self._most_nbytes)
                self._enough_nbytes = max(0, most - breath * (most // BREATHS) - more)
                fits = window.ahead_nbytes <= self._enough_nbytes
                if self._closed.is_set() or (fits and len(window) < MOST_MICROS):
                    break
                breath = 1  # then for several at a time, so that neighbours come by one request
                self._room.wait()
            if self._closed.is_set() or number < window.taken:  # it was read meanwhile
                return not self._closed.is_set()
            window.add(number, pieces, fresh)
            self._queue += fresh
            self._asked.notify()
        return True

    def _fetch(self) -> None:
        while (piece := self._next()) is not None:
            piece.warm()

    def _next(self) -> DataPiece | None:
        """What is to be fetched next, with its neighbours; None: closed."""
        with self._asked:
            self._asked.wait_for(lambda: self._closed.is_set() or self._queue)
            if self._closed.is_set():
                return None
            piece = self._queue.popleft()
            while not self._window.is_needed(piece) and self._queue:  # it was read meanwhile
                piece = self._queue.popleft()
            while self._queue and (both := piece.joined(self._queue[0])) is not None:
                self._queue.popleft()
                piece = both
            if self._queue:
                self._asked.notify()  # each wakes the next, so that none wakes for nothing
            return piece

    def _watch(self) -> None:
        """Names what a rank waits for, while it waits."""
        seen: deque[tuple[float, int]] = deque(maxlen=SEEN)
        told_s = -math.inf
        while not self._closed.wait(self._late_s / SEEN):
            now_s = time.monotonic()
            seen.append((now_s, sum(one.nbytes[one.far] for one in self._dataset.traffic)))
            waited_s = now_s - self._waits_s  # once: it may end meanwhile
            if waited_s >= self._late_s and now_s - told_s >= TELL_EVERY_S:
                told_s = now_s
                (then_s, before), (_, read) = seen[0], seen[-1]
                rate = (read - before) / max(now_s - then_s, LEAST_S)
                self._tell(self._late(now_s, waited_s, rate))

    def _late(self, now_s: float, waited_s: float, rate: float) -> str:
        """`rate`: bytes a second."""
        said = f"waited {waited_s:.0f} s for its next micro-batch so far"
        every = [one.oldest() for one in self._dataset.traffic]
        since_s, what = min(every, default=(math.inf, ""))
        if not what:
            return f"{said}; nothing is on its way from a store: what reads and decodes is slow"
        return (
            f"{said}: its store is slow: {what} has been on its way for {now_s - since_s:.0f} s, "
            f"at {rate / 1e6:.2f} MB/s in all"
        )


def fetched_ahead(
    dataset: object,
    to_come: Iterable[Sequence[int]],
    processes: int,
    tell: Callable[[str], object],
    batches: Iterator[T],
) -> Generator[T, None, None]:
    """The micro-batches themselves; what they lie in is fetched ahead if the dataset can say what
    that is. For the rest see `Prefetch`."""
    with contextlib.ExitStack() as stack:
        if isinstance(batches, Generator):
            stack.enter_context(contextlib.closing(batches))
        if isinstance(dataset, ReadsAhead) and dataset.ahead_nbytes(processes):
            batches = Prefetch(dataset, to_come, processes, tell).over(batches)
        yield from batches
