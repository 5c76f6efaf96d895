"""How fast a snapshot may be sent so that the training beside it does not feel it. Pure: no clock,
no threads, no store.

The rate is found by trying. While the steps beside the sending are not longer than undisturbed ones
it grows, and it falls where they are; how many steps are looked at before that is said follows from
how much they vary. After it was felt once it grows in small steps only, for a while. A rate that
nobody feels says nothing of a deadline: what must be there in time is sent as fast as that needs.

    search.observe(step_s, base_s, nbytes, n, pace)   after each step, or few, beside the sending
    search.allowed(left_nbytes, left_s)               bytes per second to send at now
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection

FELT = 0.02  # of a step's time: longer by this is felt
FASTER, SHYLY, SLOWER = 1.5, 1.05, 0.6  # what a window makes of the rate
SHY_WINDOWS = 40  # after one in which it was felt
LEAST_STEPS, MOST_STEPS = 5, 20  # of a window, if enough was sent in them
WINDOW_NBYTES = 16 << 20  # that say what sending costs: a few requests
REMEMBERED_STEPS = 2000  # of a window that takes long
SURE = 3.0  # standard errors that a mean is away from what it is compared with
OLD = 0.8  # of how much steps are known to vary, is left after a window
NEAR = 1.2  # times the rate: what was sent faster than this says nothing of it


def typical_s(steps_s: Collection[float]) -> float:
    """Mean of those that are no more than twice as long as the median: a validation between two
    steps is not theirs. Of at least one."""
    return statistics.fmean(_typical(steps_s))


def _typical(steps_s: Collection[float]) -> list[float]:
    most_s = 2 * statistics.median(steps_s)
    return [s for s in steps_s if s <= most_s]


def slowdown(steps_s: Collection[float], base_s: float) -> float:
    """How much longer steps were than `base_s`: 0.1 is a tenth. 0 also where too few were seen, or
    they vary too much, to tell."""
    if len(steps_s) < LEAST_STEPS or base_s <= 0:
        return 0.0
    mean, spread, n = _compared(steps_s, base_s)
    return mean if mean > SURE * spread / math.sqrt(n) else 0.0


def _compared(steps_s: Collection[float], base_s: float) -> tuple[float, float, int]:
    """Slowdown of the typical ones, its standard deviation, and how many they are."""
    kept = [s / base_s - 1.0 for s in _typical(steps_s)]
    mean = math.fsum(kept) / len(kept)
    return mean, math.sqrt(math.fsum((x - mean) ** 2 for x in kept) / (len(kept) - 1)), len(kept)


class RateSearch:
    """`rate`: bytes per second that are not felt, as far as is known; 0: nothing is. One that was
    learned before is trusted, and tried out from there in small steps."""

    def __init__(self, rate: float = 0.0):
        self.rate, self._shy = rate, SHY_WINDOWS if rate > 0 else 0
        self._steps_x: deque[float] = deque(maxlen=REMEMBERED_STEPS)  # times an undisturbed one
        self._sent, self._sent_s, self._pace = 0, 0.0, 0.0  # in this window
        self._spread = 0.0  # of steps in those before

    def observe(self, step_s: float, base_s: float, nbytes: int, n: int, pace: float) -> None:
        """`n` steps of the training took `step_s` each, `base_s` when nothing is sent; `nbytes`
        left meanwhile, and `pace` bytes per second might have. Windows may span snapshots."""
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
            sent = pace if sent > SLOWER * pace else sent
            if longer > FELT + error:
                self._was_felt(sent)
            elif longer <= FELT:  # in between nobody can tell
                self._was_not_felt(sent)
            self._spread = OLD * self._spread + (1 - OLD) * spread
            self._begin()

    def _begin(self) -> None:
        """A new window."""
        self._steps_x.clear()
        self._sent, self._sent_s = 0, 0.0

    def _was_not_felt(self, sent: float) -> None:
        """For a window so many bytes per second left."""
        self.rate = max(self.rate, sent * (SHYLY if self._shy else FASTER))
        self._shy = max(0, self._shy - 1)

    def _was_felt(self, sent: float) -> None:
        if self.rate <= 0 or sent <= NEAR * self.rate:
            self.rate, self._shy = SLOWER * sent, SHY_WINDOWS

    def allowed(self, left_nbytes: float, left_s: float) -> float:
        """Bytes per second: the rate that is not felt, and at least what ends within `left_s`.
        Infinite, full speed, when that is over."""
        if left_s <= 0:
            return math.inf
        return max(self.rate, left_nbytes / left_s)


__all__ = ["RateSearch", "slowdown", "typical_s"]
