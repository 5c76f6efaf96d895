"""The prefetching of data, in the order in which this rank will read it. Runs in the worker.

The plan determines what a rank will read, so a thread walks ahead of the DataLoader and fetches the
data of its next micro-batches with many concurrent requests, up to a limit in bytes, the first
micro-batches first. It follows the plan of this world; another world makes another loader, and
with it another prefetcher. It works with any dataset that has the methods of `ReadsAhead`, such as
those of `harness.data`.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from harness.core.read_traffic import Traffic
from harness.core.world import HarnessError
from storage.errors import StoreError

T = TypeVar("T")
AT_ONCE = 16  # concurrent requests
LATE_S = 10.0  # a wait for data that is reported
MOST_MICROS = 4096  # micro-batches that it looks ahead
# Factor on the limit of bytes ahead. Up to so many bytes, recently used pieces still count as near;
# and if blocks are read side by side, as many bytes may be ahead as are in use, up to this.
IN_USE = 4
BREATHS = 8  # pieces are requested in portions of 1/BREATHS of the limit of bytes ahead
TELL_EVERY_S = 60.0  # the interval between reports of one long wait
SEEN, LEAST_S = 10, 1e-3  # readings that a rate is computed from, and their least span


class DataPiece(Protocol):
    """A hashable part of a store that contains samples."""

    @property
    def nbytes(self) -> int: ...

    def joined(self, other: Any) -> DataPiece | None:
        """Return this piece and `other` as one, if one request can fetch both; else None."""

    def warm(self) -> None:
        """Fetch the piece, so that reads soon after are local. Any thread may call it. It raises
        nothing: the reader gets the errors."""


@runtime_checkable
class ReadsAhead(Protocol):
    """A dataset whose samples lie in pieces of a store. `traffic`: that of each store in this
    process."""

    @property
    def traffic(self) -> Sequence[Traffic]: ...

    def pieces(self, indices: Sequence[int]) -> Sequence[DataPiece]:
        """Return the pieces that contain these samples. It may read an index for that. Raises
        HarnessError, StoreError."""

    def ahead_nbytes(self, processes: int) -> int:
        """Return the most bytes that one of `processes` processes of this node may fetch ahead; 0:
        none."""


class _Window:
    """The pieces of upcoming micro-batches, and the recently needed ones, which still are near: at
    most `recent_nbytes` of them.

    `taken`: number of micro-batches delivered; `ahead_nbytes`: of pieces from which none was
    delivered so far; `in_use_nbytes`: of pieces from which some were delivered and others will be.
    """

    def __init__(self, recent_nbytes: int) -> None:
        self.taken = self.ahead_nbytes = self.in_use_nbytes = 0
        # the pieces of ahead_nbytes; and the last micro-batch that is known to need each piece
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
        """Add a micro-batch with its pieces. `fresh`: those that are not near."""
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
        """Record that the next micro-batch was delivered."""
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
    """The prefetcher of one loader (see the module). `batches`: sample indices of each upcoming
    micro-batch. `tell`: called, in a separate thread, with a text about each wait of at least
    `late_s` seconds."""

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
        self._enough_nbytes = 0  # `_walk` is woken when no more bytes than this are ahead
        lock = threading.Lock()
        self._room, self._asked = threading.Condition(lock), threading.Condition(lock)
        self._closed = threading.Event()
        self._waits_s = math.inf
        self._queue: deque[DataPiece] = deque()
        # daemons, so that a silent store cannot keep the process from ending
        for do in (self._walk, self._watch, *[self._fetch] * AT_ONCE):
            threading.Thread(target=do, name="prefetch", daemon=True).start()

    @property
    def ahead_nbytes(self) -> int:
        """Bytes of pieces from which no micro-batch was delivered so far."""
        return self._window.ahead_nbytes

    def over(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield the micro-batches of `batches`, and note how long each is waited for. The
        prefetcher is closed at their end, or with the generator."""
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
        """Record that the next micro-batch was delivered to the script."""
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
            # the reader of the data gets the error
            with contextlib.suppress(HarnessError, StoreError):
                pieces = self._dataset.pieces(indices)
            if not self._admit(number, dict.fromkeys(pieces)):
                return

    def _admit(self, number: int, pieces: dict[DataPiece, None]) -> bool:
        """Wait for room, then queue the pieces that are not near. Return False once closed."""
        with self._room:
            window, breath = self._window, 0
            while True:
                fresh = [piece for piece in pieces if not window.is_near(piece)]
                more = sum(piece.nbytes for piece in fresh)
                # blocks that are read side by side end about together, and as many others follow
                most = max(self._most_nbytes, window.in_use_nbytes)
                most = min(most, IN_USE * self._most_nbytes)
                self._enough_nbytes = max(0, most - breath * (most // BREATHS) - more)
                fits = window.ahead_nbytes <= self._enough_nbytes
                if self._closed.is_set() or (fits and len(window) < MOST_MICROS):
                    break
                breath = 1  # wait for a whole portion, so that one request can fetch neighbours
                self._room.wait()
            if self._closed.is_set() or number < window.taken:  # read in the meantime
                return not self._closed.is_set()
            window.add(number, pieces, fresh)
            self._queue += fresh
            self._asked.notify()
        return True

    def _fetch(self) -> None:
        while (piece := self._next()) is not None:
            piece.warm()

    def _next(self) -> DataPiece | None:
        """Return the next piece to fetch, joined with its neighbours; None: closed."""
        with self._asked:
            self._asked.wait_for(lambda: self._closed.is_set() or self._queue)
            if self._closed.is_set():
                return None
            piece = self._queue.popleft()
            while not self._window.is_needed(piece) and self._queue:  # read in the meantime
                piece = self._queue.popleft()
            while self._queue and (both := piece.joined(self._queue[0])) is not None:
                self._queue.popleft()
                piece = both
            if self._queue:
                self._asked.notify()  # each thread wakes the next, so that none wakes in vain
            return piece

    def _watch(self) -> None:
        """Report long waits, and what they are for, while they last."""
        seen: deque[tuple[float, int]] = deque(maxlen=SEEN)
        told_s = -math.inf
        while not self._closed.wait(self._late_s / SEEN):
            now_s = time.monotonic()
            seen.append((now_s, sum(one.nbytes[one.far] for one in self._dataset.traffic)))
            waited_s = now_s - self._waits_s  # read once: the wait may end at any time
            if waited_s >= self._late_s and now_s - told_s >= TELL_EVERY_S:
                told_s = now_s
                (then_s, before), (_, read) = seen[0], seen[-1]
                rate = (read - before) / max(now_s - then_s, LEAST_S)
                self._tell(self._late(now_s, waited_s, rate))

    def _late(self, now_s: float, waited_s: float, rate: float) -> str:
        """Describe a wait. `rate`: bytes per second that are read from stores."""
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
) -> Iterator[T]:
    """Return the micro-batches of `batches`, with their pieces fetched ahead if the dataset can
    name them; otherwise `batches` itself. For the other arguments see `Prefetch`."""
    if not isinstance(dataset, ReadsAhead) or not dataset.ahead_nbytes(processes):
        return batches
    return _with_pieces(Prefetch(dataset, to_come, processes, tell), batches)


def _with_pieces(prefetch: Prefetch, batches: Iterator[T]) -> Generator[T, None, None]:
    with contextlib.ExitStack() as stack:
        if isinstance(batches, Generator):
            stack.enter_context(contextlib.closing(batches))
        yield from prefetch.over(batches)
