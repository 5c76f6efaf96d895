"""Threads that handle tensors: errands done in order, and an end before the interpreter's. Knows no
torch.

While the interpreter ends, a thread that asks for Python's lock is ended where it stands. Amid an
operator of torch, or a tensor that is being freed, that aborts the process: "terminate called
without an active exception". So each is told to stop, and waited for, before that begins.
"""

from __future__ import annotations

import atexit
import functools
import queue
import threading
import time
import weakref
from collections.abc import Callable

EXIT_S = 5.0  # for all of them at the process' end; who takes longer waits for a store

_lock = threading.Lock()
_started: dict[threading.Thread, Callable[[], None]] = {}


def start_thread(
    name: str, work: Callable[[], None], stop: Callable[[], None] = lambda: None
) -> threading.Thread:
    """A daemon that handles tensors, started: a store that is silent shall keep nobody from
    leaving. `stop`: asks it to end soon, from any thread; harmless when repeated."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    with _lock:
        for ended in [one for one in _started if not one.is_alive()]:
            del _started[ended]
        thread.start()
        _started[thread] = stop
    return thread


@atexit.register
def end_threads() -> None:
    """Stop them, and wait until they have ended, EXIT_S at most. `os._exit` needs none of it."""
    deadline_s = time.monotonic() + EXIT_S
    with _lock:
        started = dict(_started)
    for stop in started.values():
        stop()
    for thread in started:
        thread.join(max(0.0, deadline_s - time.monotonic()))


class ErrandThread:
    """A thread that does errands in order and is there already: to start one makes the caller
    wait for Python's lock, often 5 ms. It ends when nobody has this any more."""

    def __init__(self, name: str):
        errands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._errands = errands
        last = functools.partial(errands.put, None)
        start_thread(name, functools.partial(_work, errands), last)
        weakref.finalize(self, last).atexit = False  # `end_threads` sees to it

    def run(self, errand: Callable[[], None]) -> None:
        """Returns at once. The errand answers for its own errors."""
        self._errands.put(errand)


def _work(errands: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (errand := errands.get()) is not None:
        errand()
        del errand  # what it holds; a thread that waits keeps no tensors
