"""Pacing of a snapshot's upload: slow enough for the training beside it not to notice, full speed
where somebody waits.

Threads that hash or send call the gate before each piece. A token bucket over bytes opens it, at a
rate that the training's own steps determine. At a deadline, or when the training waits for a
snapshot, it opens fully at once, for requests under way too.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import platform
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from storage.snapshots.upload import Running, UploadPool


# Lowest priority, for processors and disks, of the threads that hash and send while nobody waits
# for them.

LAST, AT_NICE, FIRST = "last", "at nice", "first"
TASKS = Path("/proc/self/task")
RUNTIME = "tokio"  # prefix of the names of obstore's threads
# glibc has no wrapper for ioprio_set; system call numbers by processor
IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
IOPRIO_WHO_PROCESS, IOPRIO_SHIFT, IOPRIO_IDLE, IOPRIO_NONE = 1, 13, 3, 0


class IdlePriority:
    """Priority of a group of threads. `idle`: members may wait in the idle class. `trainers`:
    processes that keep the processors they are bound to, if any, for themselves meanwhile."""

    def __init__(self, nice: int = 0, idle: bool = False):
        self._nice, self._idle = nice, idle
        self._members: set[int] = set()
        self._lock, self._place = threading.Lock(), AT_NICE
        self._all_cores = _cores(0)
        self.trainers: set[int] = set()

    @contextlib.contextmanager
    def member(self) -> Iterator[None]:
        """Make this thread a member while the body runs."""
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
        """Set the place of all members: LAST, AT_NICE or FIRST."""
        with self._lock:
            if not self._idle or place == self._place:
                return
            self._place = place
            # twice, to catch threads that a member has started meanwhile
            for _ in range(2):
                self._put(self._members | set(_others()))

    def _put(self, threads: Iterable[int]) -> None:
        cores = self._all_cores - set().union(*map(_cores, self.trainers))
        if self._place == FIRST or not cores:
            cores = self._all_cores
        for tid in threads:
            with contextlib.suppress(OSError):  # the thread has ended, or this is not permitted
                _schedule(tid, idle=self._place == LAST)
                os.setpriority(os.PRIO_PROCESS, tid, 0 if self._place == FIRST else self._nice)
            with contextlib.suppress(OSError):
                if cores and cores != _cores(tid):
                    os.sched_setaffinity(tid, cores)


def be_nice(nice: int) -> None:
    """Lower the priority of this thread, so that it gets only what the training leaves. On Linux
    each thread has its own nice value; elsewhere nothing is done."""
    if nice:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)


def can_come_back(nice: int = 0) -> bool:
    """Return whether a thread of this process that waits in the idle class, or at `nice`, could go
    first again. A trial thread finds out."""
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
    """Put a thread into the idle class or take it out. Raises OSError (not permitted),
    AttributeError (not on Linux)."""
    policy = os.SCHED_IDLE if idle else os.SCHED_OTHER
    os.sched_setscheduler(tid, policy, os.sched_param(0))
    number = IOPRIO_SET.get(platform.machine())
    if number is not None:  # disks without I/O classes ignore it
        kind = IOPRIO_IDLE if idle else IOPRIO_NONE
        _libc().syscall(number, IOPRIO_WHO_PROCESS, tid, kind << IOPRIO_SHIFT)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _others() -> list[int]:
    """Return the threads that a client library started, and those in the idle class because their
    starter was in it."""
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
    """Return the processors that a process may run on; empty if unknown."""
    try:
        return set(os.sched_getaffinity(pid))
    except (OSError, AttributeError):
        return set()


# Search for the rate at which a snapshot can be sent without slowing the training beside it.
# Pure: no clock, no threads, no store.

FELT = 0.02  # share of a step's time: a greater lengthening counts as a slowdown
FASTER, SHYLY, SLOWER = 1.5, 1.05, 0.6  # factors that a window applies to the rate
SHY_WINDOWS = 40  # windows of small steps after a slowdown
LEAST_STEPS, MOST_STEPS = 5, 20  # steps of a window, if enough was sent in them
WINDOW_NBYTES = 16 << 20  # bytes needed to measure the cost of sending: a few requests
REMEMBERED_STEPS = 2000  # limit for the steps of a long window
SURE = 3.0  # standard errors between a mean and a threshold that it surely differs from
OLD = 0.8  # weight of the earlier spread of step times after each window
NEAR = 1.2  # factor: sending faster than this says nothing about the rate


def typical_s(steps_s: Collection[float]) -> float:
    """Return the mean of the steps that are at most twice as long as the median, since a longer one
    contains other work, such as a validation. Needs at least one."""
    return statistics.fmean(_typical(steps_s))


def _typical(steps_s: Collection[float]) -> list[float]:
    most_s = 2 * statistics.median(steps_s)
    return [s for s in steps_s if s <= most_s]


def slowdown(steps_s: Collection[float], base_s: float) -> float:
    """Return how much longer steps were than `base_s`: 0.1 is a tenth. 0 also where too few steps
    were seen, or they vary too much, to tell."""
    if len(steps_s) < LEAST_STEPS or base_s <= 0:
        return 0.0
    mean, spread, n = _compared(steps_s, base_s)
    return mean if mean > SURE * spread / math.sqrt(n) else 0.0


def _compared(steps_s: Collection[float], base_s: float) -> tuple[float, float, int]:
    """Return the slowdown of the typical steps, its standard deviation, and their number."""
    kept = [s / base_s - 1.0 for s in _typical(steps_s)]
    mean = math.fsum(kept) / len(kept)
    return mean, math.sqrt(math.fsum((x - mean) ** 2 for x in kept) / (len(kept) - 1)), len(kept)


class RateSearch:
    """A search for `rate`, the bytes per second that do not slow the training, as far as known; 0:
    unknown. A previously learned rate is trusted, and varied from there in small steps."""

    def __init__(self, rate: float = 0.0):
        self.rate, self._shy = rate, SHY_WINDOWS if rate > 0 else 0
        # step times, relative to an undisturbed one
        self._steps_x: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        self._sent, self._sent_s, self._pace = 0, 0.0, 0.0  # totals of this window
        self._spread = 0.0  # spread of step times in earlier windows

    def observe(self, step_s: float, base_s: float, nbytes: int, n: int, pace: float) -> None:
        """Record `n` training steps of `step_s` seconds each (`base_s` undisturbed), while `nbytes`
        bytes were sent at an allowed `pace` bytes per second. Windows may span snapshots."""
        if step_s <= 0 or base_s <= 0 or not 0 < pace < math.inf:
            return
        if not 1 / NEAR <= pace / (self._pace or pace) <= NEAR:
            self._begin()
        if not self._steps_x:
            self._pace = pace
        self._steps_x.append(step_s / base_s)
        self._sent, self._sent_s = self._sent + nbytes, self._sent_s + n * step_s
        if len(self._steps_x) < LEAST_STEPS or self._sent < WINDOW_NBYTES:
            return
        longer, spread, typical = _compared(self._steps_x, 1.0)
        error = max(spread, self._spread) / math.sqrt(typical)
        if typical >= MOST_STEPS or abs(longer - FELT) >= SURE * error:
            sent = self._sent / self._sent_s
            # requests are large, so a window holds one more or less; a slow store sends far less
            # than allowed
            sent = pace if sent > SLOWER * pace else sent
            if longer > FELT + error:
                self._was_felt(sent)
            elif longer <= FELT:  # in between nothing can be concluded
                self._was_not_felt(sent)
            self._spread = OLD * self._spread + (1 - OLD) * spread
            self._begin()

    def _begin(self) -> None:
        """Start a new window."""
        self._steps_x.clear()
        self._sent, self._sent_s = 0, 0.0

    def _was_not_felt(self, sent: float) -> None:
        """Raise the rate after a window in which `sent` bytes per second caused no slowdown."""
        self.rate = max(self.rate, sent * (SHYLY if self._shy else FASTER))
        self._shy = max(0, self._shy - 1)

    def _was_felt(self, sent: float) -> None:
        if self.rate <= 0 or sent <= NEAR * self.rate:
            self.rate, self._shy = SLOWER * sent, SHY_WINDOWS

    def allowed(self, left_nbytes: float, left_s: float) -> float:
        """Return the bytes per second to send at: the rate without a slowdown, or more if `left_s`
        seconds require it; infinite (full speed) when they have passed."""
        if left_s <= 0:
            return math.inf
        return max(self.rate, left_nbytes / left_s)


# looks at the training per step, within a shortest and a longest pause (LOOK_S, seconds)
LOOKS_PER_STEP = 4
LOOK_S = (0.2, 0.5)
FASTER_BY = 1.1  # growth of the rate at which waiting threads are woken
SAFE = 0.8  # share of a job's time that is planned with; rates vary
LEAST_RATE = 64 << 10  # bytes per second; the least rate, so that something always moves
LITTLE_NBYTES = 4 << 20  # bytes too few to be noticed, as they are one request: sent at once
WORK = 1.2  # factor on the bytes: hashing and summing them takes its share of the bucket
HASH_SHARE = 0.1  # share of a sent byte that a hashed or summed byte counts
LATE = 1.5  # factor on the initially needed rate: beyond it the job has fallen behind


@dataclass(frozen=True)
class TrainingSeen:
    """An observation of the training: `steps` done, the last of them at `t_s` (monotonic). `waits`:
    the training waits for us."""

    steps: int
    waits: bool
    t_s: float


# returns the observation at a job's `beside.watch`; None: nobody trains there
TrainingWatch = Callable[[str], TrainingSeen | None]


class TokenBucket:
    """A token bucket of `rate` bytes per second that saves up none. Each taker proceeds when those
    before it are paid for. Pure: `now` in seconds."""

    def __init__(self, now: float):
        self.rate, self._t = math.inf, now
        self._taken = self._paid = 0.0

    def set(self, rate: float, now: float) -> None:
        """Set the rate from now on, also for those already waiting."""
        self._pay(now)
        self.rate = rate

    def take(self, nbytes: float, now: float) -> float:
        """Queue a request for `nbytes` and return its turn, for `wait_s`."""
        self._pay(now)
        turn = self._taken
        self._taken += nbytes
        return turn

    def wait_s(self, turn: float, now: float) -> float:
        """Return the seconds until that turn at the present rate; 0: go."""
        self._pay(now)
        return max(0.0, turn - self._paid) / self.rate

    def _pay(self, now: float) -> None:
        paid = self._taken if self.rate == math.inf else self._paid + self.rate * (now - self._t)
        self._paid, self._t = min(self._taken, paid), now


class Pacer:
    """Operates the gate, sets the lanes, and watches the training while a job is sent.

    `sending`: returns the jobs that are not yet written. `draining`: there is a deadline.
    """

    def __init__(
        self,
        lanes: UploadPool,
        sending: Callable[[], list[Running]],
        watch: TrainingWatch,
        line: IdlePriority,
        now: Callable[[], float] = time.monotonic,
    ):
        self._lanes, self._sending, self._watch, self._line = lanes, sending, watch, line
        self._now, self._bucket, self._changed = now, TokenBucket(now()), threading.Condition()
        self.search, self._world = RateSearch(), 0
        self.draining = self._waits = self._looking = False
        self._passed = 0  # bytes that have passed the gate

    @property
    def rate(self) -> float:
        """Bytes per second; infinite: full speed."""
        return self._bucket.rate

    @property
    def paced(self) -> bool:
        return self.rate < math.inf

    @property
    def surely(self) -> float:
        """Bytes per second that the store has taken, at least."""
        return self.search.rate / FASTER

    def gate(self, nbytes: int) -> bool:
        """Wait until a piece may be sent, and return whether sending is paced (a
        `storage.stores.objects.Gate`). Waits no longer than the jobs being sent have time."""
        with self._changed:
            turn = self._bucket.take(nbytes, self._now())
            while (wait_s := self._bucket.wait_s(turn, self._now())) > 0:
                self._changed.wait(min(wait_s, LOOK_S[1]))
                self._set()
            self._passed += nbytes
            return self.paced

    def hashing(self, nbytes: int) -> None:
        """Wait likewise before `nbytes` bytes are hashed."""
        self.gate(round(HASH_SHARE * nbytes))

    def begin(self, one: Running) -> None:
        """Start pacing for a job that is sent from now on."""
        job = one.job
        with self._changed:
            if self._world != job.world or (not self.search.rate and job.beside.pace):
                self.search, self._world = RateSearch(job.beside.pace), job.world
            self._set()
            if job.beside.may_last and not self._looking:
                self._looking = True
                threading.Thread(target=self._look, name="upload-pace", daemon=True).start()

    def set(self) -> None:
        """Recompute rate and priority after what was reported or observed has changed."""
        with self._changed:
            self._set()

    def _set(self) -> None:
        now, sending, before = self._now(), self._sending(), self.rate
        hurry, rate, place = self.draining or self._waits, math.inf, AT_NICE
        left = WORK * sum(one.left for one in sending)
        may_last = all(one.job.beside.may_last for one in sending) and left > LITTLE_NBYTES
        if may_last and not hurry:
            left_s = min(one.t_start + SAFE * one.job.beside.within_s - now for one in sending)
            rate = max(LEAST_RATE, self.search.allowed(left, left_s))
            first = WORK * sum(one.job.nbytes / one.job.beside.within_s for one in sending) / SAFE
            place = FIRST if left_s <= 0 else LAST if left <= LATE * first * left_s else AT_NICE
        self._bucket.set(rate, now)
        if rate > FASTER_BY * before:
            self._changed.notify_all()
        self._lanes.paced = self.paced
        self._line.stand(FIRST if hurry else place)

    # ---- the training ----------------------------------------------------------------------------
    def _look(self) -> None:
        """Watch the training for as long as a job is sent beside it."""
        last: _Since | None = None
        try:
            while (one := self._watched()) is not None:
                last = self._look_at(one, last)
                step_s = one.job.beside.step_s
                time.sleep(min(max(step_s / LOOKS_PER_STEP, LOOK_S[0]), LOOK_S[1]))
        except BaseException:
            self._rest()
            raise

    def _watched(self) -> Running | None:
        with self._changed:
            one = next((one for one in self._sending() if one.job.beside.may_last), None)
            if one is None:
                self._rest()  # within the lock: a job that begins from now on starts a new watcher
            return one

    def _rest(self) -> None:
        """Record that nobody watches any more."""
        with self._changed:
            self._waits = self._looking = False
            self._set()

    def _look_at(self, one: Running, last: _Since | None) -> _Since | None:
        """Look once at the training and judge the steps since `last`, the previously seen one.
        Returns what to compare with next time."""
        beside, seen = one.job.beside, self._watch(one.job.beside.watch)
        self._waits = seen is None or seen.waits  # a trainer that is gone is not disturbed
        self.set()
        pace = self.rate
        if seen is None or not self.paced:
            return None
        here = _Since(beside.watch, seen.steps, seen.t_s, self._passed)
        if last is None or last.watch != beside.watch or seen.steps < last.steps:
            return _Since(beside.watch, seen.steps, 0.0, 0)  # that step began before the sending
        n = seen.steps - last.steps
        if not n:
            return last
        if last.t_s:
            step_s = (seen.t_s - last.t_s) / n
            # the mean of several short steps counts as one, since it varies less
            self.search.observe(step_s, beside.step_s, here.passed - last.passed, n, pace)
            for other in self._sending():
                other.steps_s.append(step_s)
        return here


@dataclass(frozen=True)
class _Since:
    """The end of a training step at `watch`; `t_s` 0: time unknown. `passed`: bytes until then."""

    watch: str
    steps: int
    t_s: float
    passed: int
