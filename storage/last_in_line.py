"""The threads that hash and send, last in line for processors and disks while nobody waits.

A thread that joins is nice. Where the system lets it come back, it also waits in the idle class
(SCHED_IDLE, idle I/O) until it is told to go first: from then on others wait for it. Who may not
raise a priority again, as most containers may not, is never put there, for a snapshot that is to be
saved within a notice must not starve. The threads of a client library's runtime are found by their
names. Linux; elsewhere nothing is done. Knows nothing of snapshots.

    line = LastInLine(nice=10, idle=can_come_back())
    with line.member(): ...        a thread's life
    line.stand(LAST)               or AT_NICE, or FIRST; all members
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

LAST, AT_NICE, FIRST = "last", "at nice", "first"
TASKS = Path("/proc/self/task")
RUNTIME = "tokio"  # so do the names of threads begin that obstore starts
# glibc has no wrapper for ioprio_set: numbers of the call, by processor
IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
IOPRIO_WHO_PROCESS, IOPRIO_SHIFT, IOPRIO_IDLE, IOPRIO_NONE = 1, 13, 3, 0


class LastInLine:
    """`idle`: members may wait in the idle class. `trainers`: processes whose processors are left
    to them meanwhile, where they are bound to some."""

    def __init__(self, nice: int = 0, idle: bool = False):
        self._nice, self._idle = nice, idle
        self._members: set[int] = set()
        self._lock, self._place = threading.Lock(), AT_NICE
        self._all_cores = _cores(0)
        self.trainers: set[int] = set()

    @contextlib.contextmanager
    def member(self) -> Iterator[None]:
        """This thread, until it leaves."""
        me = threading.get_native_id()
        with self._lock:
            be_nice(self._nice)
            self._members.add(me)
            if self._idle:
                self._put([me])
        try:
            yield
        finally:
            with self._lock:
                self._members.discard(me)

    def stand(self, place: str) -> None:
        """All members: LAST, AT_NICE or FIRST."""
        with self._lock:
            if not self._idle or place == self._place:
                return
            self._place = place
            # twice: those that one of them has started meanwhile
            for _ in range(2):
                self._put(self._members | set(_others()))

    def _put(self, threads: Iterable[int]) -> None:
        cores = self._all_cores - set().union(*map(_cores, self.trainers))
        if self._place == FIRST or not cores:
            cores = self._all_cores
        for tid in threads:
            with contextlib.suppress(OSError):  # it has ended, or we may not
                _schedule(tid, idle=self._place == LAST)
                os.setpriority(os.PRIO_PROCESS, tid, 0 if self._place == FIRST else self._nice)
            with contextlib.suppress(OSError):
                if cores and cores != _cores(tid):
                    os.sched_setaffinity(tid, cores)


def be_nice(nice: int) -> None:
    """This thread only gets what the training leaves. Linux: a thread's own number; elsewhere
    nothing."""
    if nice:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


def can_come_back(nice: int = 0) -> bool:
    """Could a thread of this process that waits in the idle class, or at `nice`, go first again?
    Tried out by one that is made for it."""
    found: list[bool] = []

    def attempt() -> None:
        me = threading.get_native_id()
        try:
            be_nice(nice)
            _schedule(me, idle=True)
            _schedule(me, idle=False)
            os.setpriority(os.PRIO_PROCESS, me, 0)
            found.append(os.sched_getscheduler(me) == os.SCHED_OTHER)
        except (OSError, AttributeError):
            found.append(False)

    trial = threading.Thread(target=attempt, name="last-in-line")
    trial.start()
    trial.join()
    return found == [True]


def _schedule(tid: int, idle: bool) -> None:
    """Raises OSError (not allowed), AttributeError (not on Linux)."""
    policy = os.SCHED_IDLE if idle else os.SCHED_OTHER
    os.sched_setscheduler(tid, policy, os.sched_param(0))
    number = IOPRIO_SET.get(platform.machine())
    if number is not None:  # a disk without such classes takes no notice
        kind = IOPRIO_IDLE if idle else IOPRIO_NONE
        _libc().syscall(number, IOPRIO_WHO_PROCESS, tid, kind << IOPRIO_SHIFT)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _others() -> list[int]:
    """Threads that a client library has started, and those that wait in the idle class because
    whoever started them did."""
    found = []
    with contextlib.suppress(OSError):
        for task in TASKS.iterdir():
            with contextlib.suppress(OSError):  # it has just ended
                tid = int(task.name)
                idle = os.sched_getscheduler(tid) == os.SCHED_IDLE
                if idle or (task / "comm").read_text().startswith(RUNTIME):
                    found.append(tid)
    return found


def _cores(pid: int) -> set[int]:
    """That a process may run on; none: it is not known."""
    try:
        return set(os.sched_getaffinity(pid))
    except (OSError, AttributeError):
        return set()


__all__ = ["AT_NICE", "FIRST", "LAST", "LastInLine", "can_come_back"]
