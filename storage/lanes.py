"""The threads that put a snapshot's parts, a few at once, those that come first in order first."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from storage.last_in_line import LastInLine
from storage.manifest import Ref
from storage.objects import Gate, ObjectStore, put_paced
from storage.upload_job import UploadJob, UploadOutcome

LOOK_AGAIN_S = 0.5  # whether a deadline has been set meanwhile


@dataclass(eq=False)
class Running:
    """A job on its way."""

    job: UploadJob
    view: memoryview
    done: Callable[[UploadOutcome], None]
    number: int
    left: int  # bytes still to send
    t_start: float
    written: bool = False
    steps_s: list[float] = field(default_factory=list)  # of the training beside it
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def sent(self, nbytes: int) -> None:
        """So many bytes less are left; several lanes may say so."""
        with self._lock:
            self.left -= nbytes


class Lanes:
    """A few threads that put parts, those of the ref that comes first in `order` first."""

    def __init__(self, n: int, line: LastInLine):
        self.order: dict[Ref, int] = {}
        self._tasks: list[tuple[Ref, int, Callable[[], int], Future[None]]] = []
        self._condition = threading.Condition()
        self._numbers = itertools.count()
        self._n, self.line, self._started = n, line, 0
        self._busy, self._busy_since_s, self._paced = 0, 0.0, False
        self._sent_nbytes, self._sent_s, self._period_nbytes = 0.0, 0.0, 0

    def submit(self, ref: Ref, task: Callable[[], int]) -> Future[None]:
        """`task` returns the bytes that it moved at full speed."""
        future: Future[None] = Future()
        with self._condition:
            self._tasks.append((ref, next(self._numbers), task, future))
            self._condition.notify()
            if self._started < self._n:
                self._started += 1
                threading.Thread(target=self._work, name="upload-lane", daemon=True).start()
        return future

    @property
    def paced(self) -> bool:
        """One put at a time; those that are on their way go on. What is sent meanwhile says
        nothing of how fast we could be."""
        return self._paced

    @paced.setter
    def paced(self, paced: bool) -> None:
        with self._condition:
            if paced != self._paced:
                self._learn()
                self._paced = paced
                self._condition.notify_all()

    def _learn(self) -> None:
        """A time in which something was on its way is over. Older ones count half as much each
        time."""
        now = time.monotonic()
        if self._busy_since_s and not self._paced and self._period_nbytes:
            self._sent_s = self._sent_s / 2 + now - self._busy_since_s
            self._sent_nbytes = self._sent_nbytes / 2 + self._period_nbytes
        self._busy_since_s, self._period_nbytes = now if self._busy else 0.0, 0

    @property
    def nbytes_per_s(self) -> float:
        with self._condition:
            sent_s, nbytes = self._sent_s, self._sent_nbytes
            if self._busy and not self._paced:
                sent_s += time.monotonic() - self._busy_since_s
                nbytes += self._period_nbytes
            return nbytes / sent_s if nbytes and sent_s > 0 else 20e6

    def _work(self) -> None:
        with self.line.member():
            self._serve()

    def _serve(self) -> None:
        while True:
            with self._condition:
                while not self._tasks or self._busy >= (1 if self._paced else self._n):
                    self._condition.wait()
                chosen = min(self._tasks, key=lambda t: (self.order.get(t[0], 1 << 30), t[1]))
                self._tasks.remove(chosen)
                if self._busy == 0:
                    self._busy_since_s = time.monotonic()
                self._busy += 1
            _, _, task, future = chosen
            nbytes, error = 0, None
            try:
                nbytes = task()
            except Exception as e:  # for who waits for the future
                error = e
            with self._condition:
                self._busy -= 1
                self._condition.notify()  # who waits for its turn
                self._period_nbytes += nbytes
                if self._busy == 0:
                    self._learn()
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)


class Ahead:
    """The store for one `Snapshots.write`: parts are put by the lanes, and everything else
    waits until they are there. `gate`: that what is paced goes through."""

    def __init__(
        self,
        inner: ObjectStore,
        lanes: Lanes,
        one: Running,
        left_s: Callable[[Running], float | None],
        gate: Gate,
    ):
        self._inner, self.url, self._lanes, self._one = inner, inner.url, lanes, one
        self._left_s, self._gate = left_s, gate
        self._ahead: list[Future[None]] = []
        self._unchanged = one.job.nbytes  # bytes that need not be sent

    def put(self, key: str, data: bytes | memoryview) -> None:
        nbytes = memoryview(data).nbytes
        self._unchanged -= nbytes

        def one_part() -> int:
            self._left_s(self._one)
            if not self._lanes.paced:
                self._inner.put(key, data)
                self._one.sent(nbytes)
                return nbytes
            return self._put_paced(key, data, nbytes)

        self._ahead.append(self._lanes.submit(self._one.job.ref, one_part))

    def _put_paced(self, key: str, data: bytes | memoryview, nbytes: int) -> int:
        """The bytes that went at full speed in the end."""
        gone = slow = 0

        def gate(piece: int) -> bool:
            nonlocal gone, slow
            paced = self._gate(piece)
            self._left_s(self._one)
            more = min(piece, nbytes - gone)  # a store that tries again asks for the same again
            gone, slow = gone + more, slow + more * paced
            self._one.sent(more)
            return paced

        try:
            put_paced(self._inner, key, data, gate)
        except BaseException:
            self._one.sent(-gone)
            raise
        self._one.sent(nbytes - gone)
        return nbytes - slow

    def _arrive(self) -> ObjectStore:
        """All parts are stored. Raises the first error, after none of them is under way any
        more; OutOfTime at once."""
        ahead, self._ahead = self._ahead, []
        self._one.sent(self._unchanged)
        self._unchanged = 0
        errors = []
        for future in ahead:
            while not future.done():
                left_s = self._left_s(self._one)
                wait([future], LOOK_AGAIN_S if left_s is None else min(left_s, LOOK_AGAIN_S))
            errors += [e] if (e := future.exception()) is not None else []
        if errors:
            raise errors[0]
        self._left_s(self._one)
        return self._inner

    def create(self, key: str, data: bytes | memoryview) -> bool:
        return self._arrive().create(key, data)

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        return self._arrive().get(key, start, end)

    def list(self, prefix: str) -> list[str]:
        return self._arrive().list(prefix)

    def delete(self, key: str) -> None:
        self._arrive().delete(key)

    def size(self, key: str) -> int:
        return self._arrive().size(key)
