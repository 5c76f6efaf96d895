"""The threads that put a snapshot's parts, a few at once, those that come first in order first."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass

from storage.manifest import Ref
from storage.objects import ObjectStore
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
    slowdown: float = 0.0
    requests: int = 0


class Lanes:
    """A few threads that put parts, those of the ref that comes first in `order` first."""

    def __init__(self, n: int, nice: int):
        self.order: dict[Ref, int] = {}
        self._tasks: list[tuple[Ref, int, Callable[[], int], Future[None]]] = []
        self._condition = threading.Condition()
        self._numbers = itertools.count()
        self._n, self._nice, self._started = n, nice, 0
        self._busy, self._busy_since_s, self._limit = 0, 0.0, n
        self.sent_nbytes = 0
        self._sent_nbytes, self._sent_s, self._period_nbytes = 0.0, 0.0, 0

    def submit(self, ref: Ref, task: Callable[[], int]) -> Future[None]:
        """`task` returns the bytes that it moved."""
        future: Future[None] = Future()
        with self._condition:
            self._tasks.append((ref, next(self._numbers), task, future))
            self._condition.notify()
            if self._started < self._n:
                self._started += 1
                threading.Thread(target=self._work, name="upload-lane", daemon=True).start()
        return future

    @property
    def busy(self) -> int:
        return self._busy

    @property
    def limit(self) -> int:
        """So many puts at once; those that are on their way go on."""
        return self._limit

    @limit.setter
    def limit(self, puts: int) -> None:
        with self._condition:
            self._limit = puts
            self._condition.notify_all()

    @property
    def nbytes_per_s(self) -> float:
        with self._condition:
            sent_s = self._sent_s + (time.monotonic() - self._busy_since_s if self._busy else 0.0)
            nbytes = self._sent_nbytes + self._period_nbytes
            return nbytes / sent_s if nbytes and sent_s > 0 else 20e6

    def _work(self) -> None:
        be_nice(self._nice)
        while True:
            with self._condition:
                while not self._tasks or self._busy >= self._limit:
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
                self._condition.notify()  # who waits for the limit
                self._period_nbytes += nbytes
                self.sent_nbytes += nbytes
                if self._busy == 0:  # older measurements count half as much each time
                    self._sent_s = self._sent_s / 2 + time.monotonic() - self._busy_since_s
                    self._sent_nbytes, self._period_nbytes = (
                        self._sent_nbytes / 2 + self._period_nbytes,
                        0,
                    )
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)


class Ahead:
    """The store for one `Snapshots.write`: parts are put by the lanes, and everything else
    waits until they are there."""

    def __init__(
        self,
        inner: ObjectStore,
        lanes: Lanes,
        one: Running,
        left_s: Callable[[Running], float | None],
    ):
        self._inner, self.url, self._lanes, self._one, self._left_s = (
            inner,
            inner.url,
            lanes,
            one,
            left_s,
        )
        self._ahead: list[Future[None]] = []

    def put(self, key: str, data: bytes | memoryview) -> None:
        nbytes = memoryview(data).nbytes

        def one_part() -> int:
            self._left_s(self._one)
            self._inner.put(key, data)
            self._one.left -= nbytes
            return nbytes

        self._ahead.append(self._lanes.submit(self._one.job.ref, one_part))

    def _arrive(self) -> ObjectStore:
        """All parts are stored. Raises the first error, after none of them is under way any
        more; OutOfTime at once."""
        ahead, self._ahead = self._ahead, []
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


def be_nice(nice: int) -> None:
    """This thread only gets what the training leaves. Linux: a thread's own number; elsewhere
    nothing."""
    if nice:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
