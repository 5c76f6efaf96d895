"""How hard the sending of a snapshot may press the training beside it. Pure: no clock, no threads,
no store.

A level is how many puts are on their way at once, and how many requests each of them makes; level 0
is full speed. What a level is worth is measured in windows of a few training steps: how much slower
they were than undisturbed ones, and what was sent meanwhile. The level is sought that costs the
training the least time per byte. To send less at once is no use by itself: when steps are half as
much slower for twice as long, nothing is gained, and the faster level is taken. Slower steps that
are not our doing are found out in the same way: they stay slow at a lower level.

    throttle.observe(level, slowdown, nbytes, seconds)        after each window
    throttle.allowed(left_nbytes, left_s)    the level to send at now; never so low that it would
                                             end too late
"""

from __future__ import annotations

import math

TOLERATED = 0.05  # of a step's time; noise, and not worth a later snapshot
BETTER = 0.8  # of the cost of another level is less, beyond noise
SAFE = 0.7  # of the time that is left may be planned with at a low level; rates vary
FORGET_AFTER = 50  # windows: then all levels are tried again


def levels(puts: int, requests: int) -> tuple[tuple[int, int], ...]:
    """(puts at once, requests at once of each), full speed first: the puts are halved, then the
    requests of the last one."""
    found = [(puts, requests)]
    while puts > 1:
        found.append((puts := puts // 2, requests))
    while requests > 1:
        found.append((puts, requests := requests // 2))
    return tuple(found)


class Throttle:
    """Seeks the best of `n` levels, from one snapshot to the next: tries each lower one while
    steps are slow, then takes the best."""

    def __init__(self, n: int):
        self._n, self.level = n, 0
        # training seconds lost per byte; infinite: there was no time to try
        self._cost: dict[int, float] = {}
        self._rate: dict[int, float] = {}  # bytes per second
        self._windows = 0

    def observe(self, level: int, slowdown: float, nbytes: int, seconds: float) -> None:
        """A window: all of it at `level`; steps took 1 + `slowdown` times as long as
        undisturbed ones; `nbytes` left in `seconds`."""
        if nbytes <= 0 or seconds <= 0 or not 0 <= level < self._n:
            return
        lost_s = slowdown / (1.0 + slowdown) * seconds if slowdown > TOLERATED else 0.0
        self._rate[level] = nbytes / seconds
        self._cost[level] = (lost_s / nbytes + self._cost.get(level, lost_s / nbytes)) / 2
        if level < self.level:
            self._cost[self.level] = math.inf
        self._windows += 1
        if self._windows >= FORGET_AFTER:  # anew: the machine may be another by now
            self._cost, self._windows, self.level = {}, 0, 0
            return
        slowest = max(self._cost)
        if 0.0 < self._cost[slowest] < math.inf and slowest + 1 < self._n:
            self.level = slowest + 1
            return
        self.level = min(self._cost)
        for one in sorted(self._cost):
            if self._cost[one] < BETTER * self._cost[self.level]:
                self.level = one

    def rate(self, level: int) -> float | None:
        """Bytes per second at a level; of one that was never tried a cautious guess from the
        next faster one. None: nobody knows."""
        known = [n for n in self._rate if n <= level]
        return self._rate[max(known)] / 2 ** (level - max(known)) if known else None

    def allowed(self, left_nbytes: float, left_s: float) -> int:
        """The lowest speed that is wanted and still ends within `left_s`; 0, full speed, if
        none does or nothing is known yet."""
        for level in range(self.level, 0, -1):
            rate = self.rate(level)
            if rate is not None and left_nbytes <= rate * left_s * SAFE:
                return level
        return 0


__all__ = ["Throttle", "levels"]
