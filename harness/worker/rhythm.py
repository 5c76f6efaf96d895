"""When the next snapshot is due: the clock and the measurements beneath `machine.Interval`. Runs in
the worker."""

from __future__ import annotations

import statistics
import time
from collections import deque

from harness.worker.machine import Interval

CALM_STEPS = 5  # that say how long a step takes


class Rhythm:
    """`stall_s`: for how long the last snapshot stopped the training. `commit_s`: from its begin
    to its commit."""

    def __init__(self, interval: Interval):
        self._interval = interval
        self.stall_s = 0.01
        self.commit_s = 0.0
        self._last_s = time.monotonic()
        self._calm_steps_s: deque[float] = deque(maxlen=4 * CALM_STEPS)
        self._updated_s, self._calm = 0.0, False

    def begin(self) -> None:
        """A snapshot was just taken, or loaded."""
        self._last_s = time.monotonic()

    def due(self, step: int) -> bool:
        return self._interval.due(step, time.monotonic() - self._last_s, self.interval_s())

    def interval_s(self) -> float:
        """Between two snapshots. 0: unknown."""
        return self._interval.seconds(self.calm_step_s, self.stall_s, self.commit_s)

    def note_step(self, calm: bool) -> None:
        """How long a step takes while no snapshot is on its way (`calm`), for who sends the next
        one."""
        now = time.perf_counter()
        if calm and self._calm:
            self._calm_steps_s.append(now - self._updated_s)
        self._updated_s, self._calm = now, calm

    @property
    def calm_step_s(self) -> float:
        """Median; 0: too few were seen."""
        return (
            statistics.median(self._calm_steps_s) if len(self._calm_steps_s) >= CALM_STEPS else 0.0
        )
