"""How much of a snapshot is on its way at once: as the throttle says, and all of it where somebody
waits."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from storage.lanes import Lanes, Running
from storage.objects import ObjectStore, limit_puts, puts_at_once
from storage.throttle import Throttle, levels

WINDOW_STEPS = 3  # steps whose median says how fast the training goes
LOOKS_PER_STEP = 8  # at the training, within a longest and a shortest time between two
LOOK_S = (0.02, 0.5)

# what a job's `watch` says: steps done; does the training wait for us? None: unknown
TrainingWatch = Callable[[str], tuple[int, bool] | None]


class Pacer:
    """Sets the limits of lanes and store, and watches the training while a job is sent.

    sending: the jobs that are not yet written. draining: there is a deadline, so send all at once.
    """

    def __init__(
        self,
        store: ObjectStore,
        lanes: Lanes,
        sending: Callable[[], list[Running]],
        watch: TrainingWatch,
    ):
        self._store, self._lanes, self._sending, self._watch = store, lanes, sending, watch
        self._levels, self.level = levels(lanes.limit, puts_at_once(store)), 0
        self.throttle, self.draining = Throttle(len(self._levels)), False
        self._lock, self._watching = threading.Lock(), False

    @property
    def requests(self) -> int:
        """Puts, times requests of each, that are sent at once now."""
        return math.prod(self._levels[self.level])

    def set(self, hurry: bool = False) -> int:
        """Set how much may be on its way: as the throttle says, or all of it when there is a
        deadline or somebody waits. The level."""
        with self._lock:
            sending = self._sending()
            left = sum(one.left for one in sending)
            left_s = min(
                (one.t_start + one.job.within_s - time.monotonic() for one in sending), default=0.0
            )
            level = 0 if hurry or self.draining else self.throttle.allowed(left, left_s)
            watched = next(
                (
                    one
                    for one in sending
                    if one.job.watch and one.job.step_s > 0 and one.job.within_s > 0
                ),
                None,
            )
            begin, self._watching = (
                watched is not None and not self._watching,
                self._watching or watched is not None,
            )
            self.level, (self._lanes.limit, requests) = level, self._levels[level]
            limit_puts(self._store, requests)
        if begin:
            threading.Thread(
                target=self._look, args=(watched,), name="upload-pace", daemon=True
            ).start()
        return level

    def _look(self, one: Running) -> None:
        """Watches the training for as long as this job is sent."""
        pause_s = min(max(one.job.step_s / LOOKS_PER_STEP, LOOK_S[0]), LOOK_S[1])
        window, before = _Window(-1, 0, 0.0), list[float]()
        while one in self._sending():
            seen = self._watch(one.job.watch)
            waits = seen is not None and seen[1]
            level, now, sent = self.set(hurry=waits), time.monotonic(), self._lanes.sent_nbytes
            if (
                seen is None
                or waits
                or window.level != level
                or self._lanes.busy > self._lanes.limit
            ):
                window = _Window(level, sent, now)
            if seen is not None:
                window.look(seen[0], now)
            if window.steps_s:
                slowdown = window.slowdown(one.job.step_s)
                one.slowdown = max(0.0, statistics.median([*before, slowdown]))
                if len(window.steps_s) >= WINDOW_STEPS and sent > window.sent:
                    before.append(slowdown)
                    self.throttle.observe(level, slowdown, sent - window.sent, now - window.t_start)
                    window = replace(window, sent=sent, t_start=now, steps_s=[])
            time.sleep(pause_s)
        if len(window.steps_s) == WINDOW_STEPS - 1:  # it was short; better so than never
            sent, now = self._lanes.sent_nbytes, time.monotonic()
            self.throttle.observe(
                window.level,
                window.slowdown(one.job.step_s),
                sent - window.sent,
                now - window.t_start,
            )
        with self._lock:
            self._watching = False
        self.set()  # for who comes next


@dataclass
class _Window:
    """Some steps of the training while the level was the same."""

    level: int
    sent: int  # bytes, when it began
    t_start: float
    steps_s: list[float] = field(default_factory=list)
    last: tuple[int, float] | None = None  # steps done, and when that was first seen

    def look(self, steps: int, now: float) -> None:
        if self.last is None:
            self.last = steps, -1.0  # how long ago it ended nobody knows
        elif steps != self.last[0]:
            if self.last[1] >= 0 and steps > self.last[0]:
                self.steps_s += [(now - self.last[1]) / (steps - self.last[0])] * (
                    steps - self.last[0]
                )
            self.last = steps, now

    def slowdown(self, step_s: float) -> float:
        return statistics.median(self.steps_s) / step_s - 1.0
