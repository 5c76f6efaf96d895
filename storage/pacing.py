"""How fast a snapshot leaves: as the training beside it does not feel, at full speed where somebody
waits.

Whoever hashes or sends asks the gate before each piece. A token bucket over bytes opens it, and the
training's own steps say how wide (`throttle.py`). At a deadline, or when the training stands still
for a snapshot, it is wide open at once, for what is in the middle of a request as well.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from storage.lanes import Lanes, Running
from storage.last_in_line import AT_NICE, FIRST, LAST, LastInLine
from storage.throttle import FASTER, RateSearch

LOOKS_PER_STEP = 4  # at the training, within a longest and a shortest time between two
LOOK_S = (0.2, 0.5)
FASTER_BY = 1.1  # times the rate: then those who wait are told
SAFE = 0.8  # of a job's time is planned with; rates vary
LEAST_RATE = 64 << 10  # bytes per second; never so slow that nothing moves
LITTLE_NBYTES = 4 << 20  # that nobody feels, as they are one request: all at once
WORK = 1.2  # times the bytes: hashing them, and summing them up, has its share of the bucket
HASH_SHARE = 0.1  # of a byte that is sent, for one that is hashed or summed up
LATE = 1.5  # times the rate that was needed at first: it has not got what it should have


@dataclass(frozen=True)
class TrainingSeen:
    """`steps` done, the last of them at `t_s` (monotonic); does the training wait for us?"""

    steps: int
    waits: bool
    t_s: float


# what is seen where a job's `beside.watch` says; None: nobody trains there
TrainingWatch = Callable[[str], TrainingSeen | None]


class TokenBucket:
    """`rate` bytes per second, of which none are saved up. Each taker goes when those before it
    are paid for. Pure: `now` in seconds."""

    def __init__(self, now: float):
        self.rate, self._t = math.inf, now
        self._taken = self._paid = 0.0

    def set(self, rate: float, now: float) -> None:
        """From now on; for those who wait as well."""
        self._pay(now)
        self.rate = rate

    def take(self, nbytes: float, now: float) -> float:
        """Whose turn it is, for `wait_s`."""
        self._pay(now)
        turn = self._taken
        self._taken += nbytes
        return turn

    def wait_s(self, turn: float, now: float) -> float:
        """Until then, at this rate; 0: go."""
        self._pay(now)
        return max(0.0, turn - self._paid) / self.rate

    def _pay(self, now: float) -> None:
        paid = self._taken if self.rate == math.inf else self._paid + self.rate * (now - self._t)
        self._paid, self._t = min(self._taken, paid), now


class Pacer:
    """Holds the gate, sets the lanes, and watches the training while a job is sent.

    `sending`: the jobs that are not yet written. `draining`: there is a deadline.
    """

    def __init__(
        self,
        lanes: Lanes,
        sending: Callable[[], list[Running]],
        watch: TrainingWatch,
        line: LastInLine,
        now: Callable[[], float] = time.monotonic,
    ):
        self._lanes, self._sending, self._watch, self._line = lanes, sending, watch, line
        self._now, self._bucket, self._changed = now, TokenBucket(now()), threading.Condition()
        self.search, self._world = RateSearch(), 0
        self.draining = self._waits = self._looking = False
        self._passed = 0  # bytes, through the gate

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
        """`storage.objects.Gate`, for a piece that is about to be sent. Waits no longer than the
        jobs that are sent have time."""
        with self._changed:
            turn = self._bucket.take(nbytes, self._now())
            while (wait_s := self._bucket.wait_s(turn, self._now())) > 0:
                self._changed.wait(min(wait_s, LOOK_S[1]))
                self._set()
            self._passed += nbytes
            return self.paced

    def hashing(self, nbytes: int) -> None:
        """The same before so many bytes are hashed."""
        self.gate(round(HASH_SHARE * nbytes))

    def begin(self, one: Running) -> None:
        """This job is sent from now on."""
        job = one.job
        with self._changed:
            if self._world != job.world or (not self.search.rate and job.beside.pace):
                self.search, self._world = RateSearch(job.beside.pace), job.world
            self._set()
            if job.beside.may_last and not self._looking:
                self._looking = True
                threading.Thread(target=self._look, name="upload-pace", daemon=True).start()

    def set(self) -> None:
        """What was said or seen has changed."""
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
        """For as long as there is something to look at."""
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
                self._rest()  # at once: who begins from now on starts another
            return one

    def _rest(self) -> None:
        """Nobody looks any more."""
        with self._changed:
            self._waits = self._looking = False
            self._set()

    def _look_at(self, one: Running, last: _Since | None) -> _Since | None:
        """`last`: the step that was seen before; what is since then is judged."""
        beside, seen = one.job.beside, self._watch(one.job.beside.watch)
        self._waits = seen is None or seen.waits  # who is gone feels nothing
        self.set()
        pace = self.rate
        if seen is None or not self.paced:
            return None
        here = _Since(beside.watch, seen.steps, seen.t_s, self._passed)
        if last is None or last.watch != beside.watch or seen.steps < last.steps:
            return _Since(beside.watch, seen.steps, 0.0, 0)  # it began before we sent
        n = seen.steps - last.steps
        if not n:
            return last
        if last.t_s:
            step_s = (seen.t_s - last.t_s) / n
            # of several short ones it is the mean, and counts as one, as that varies less
            self.search.observe(step_s, beside.step_s, here.passed - last.passed, n, pace)
            for other in self._sending():
                other.steps_s.append(step_s)
        return here


@dataclass(frozen=True)
class _Since:
    """The end of a step of the training at `watch`; 0: when is not known. `passed`: bytes until
    then."""

    watch: str
    steps: int
    t_s: float
    passed: int
