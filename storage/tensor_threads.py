"""Threads that handle tensors: they run tasks in order, and end before the interpreter does. No
torch.

A thread that requests Python's lock while the interpreter shuts down is ended where it stands. Amid
a torch operator, or while a tensor is freed, that aborts the process: "terminate called without an
active exception". So each thread is asked to stop, and waited for, before that begins.
"""

from __future__ import annotations

import atexit
import functools
import queue
import threading
import time
import weakref
from collections.abc import Callable

EXIT_S = 5.0  # seconds for all threads at exit; one that takes longer waits for a store

_lock = threading.Lock()
_started: dict[threading.Thread, Callable[[], None]] = {}


def start_thread(
    name: str, work: Callable[[], None], stop: Callable[[], None] = lambda: None
) -> threading.Thread:
    """Start a daemon thread that handles tensors and return it. A store that does not answer cannot
    keep a daemon from exiting. `stop` asks it to end soon, from any thread; it may be repeated."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    with _lock:
        for ended in [one for one in _started if not one.is_alive()]:
            del _started[ended]
        thread.start()
        _started[thread] = stop
    return thread


@atexit.register
def end_threads() -> None:
    """Stop all threads and wait, at most EXIT_S seconds, until they end. `os._exit` needs no such
    wait."""
    deadline_s = time.monotonic() + EXIT_S
    with _lock:
        started = dict(_started)
    for stop in started.values():
        stop()
    for thread in started:
        thread.join(max(0.0, deadline_s - time.monotonic()))


class TensorThread:
    """A running thread that executes errands in order, and ends when this object is
    garbage-collected. Starting a thread for each would make the caller wait for Python's lock,
    often 5 ms."""

    def __init__(self, name: str):
        errands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._errands = errands
        last = functools.partial(errands.put, None)
        start_thread(name, functools.partial(_work, errands), last)
        weakref.finalize(self, last).atexit = False  # `end_threads` does that at exit

    def run(self, errand: Callable[[], None]) -> None:
        """Queue an errand and return at once. The errand must handle its own errors."""
        self._errands.put(errand)


def _work(errands: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (errand := errands.get()) is not None:
        errand()
        del errand  # frees what the errand holds: a waiting thread must keep no tensors
