"""When the next snapshot is due: the clock and the measurements beneath `machine.Interval`. Runs in
the worker.

A derived interval follows from what a snapshot costs the training, as measured, and from how often
worlds are lost here without one, as this run has seen it (`core/losses.py`).
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from harness.core.losses import RunLosses, cost_s
from harness.worker.machine import Interval
from storage.throttle import FELT, typical_s

CALM_STEPS = 5  # that say how long a step takes
SENDINGS = 5  # the newest, that say what sending costs
SENDING = 0.5  # of the interval may pass until the commit, so that nobody feels it
# what is felt in an interval gets a longer one, and what is not in time a shorter one
LONGER, SHORTER = 1.5, 0.97
UNSURE_S = 60.0  # until a pace is known, what is sent has the time of an interval of this


class Rhythm:
    """`stall_s`: for how long the last snapshot stopped the training. `commit_s`: from its begin
    to its commit, when it is sent as fast as it can be, as far as that is known. `pace`: bytes per
    second from this node that the training has not felt; 0: not known."""

    def __init__(
        self,
        interval: Interval,
        losses: RunLosses = RunLosses(),
        now: Callable[[], float] = time.monotonic,
    ):
        self._interval, self._losses, self._now = interval, losses, now
        self.stall_s = 0.01
        self.commit_s = self.pace = 0.0
        self._where = ""  # the pace was learned: world and store
        # in so long an interval what is sent is hardly felt; what the last one cost that was
        self._roomy_s = self._felt_s = 0.0
        self._slowed_s: deque[float] = deque(maxlen=SENDINGS)  # by which steps took longer
        self._began_s = self._last_s = now()
        self._calm_steps_s: deque[float] = deque(maxlen=4 * CALM_STEPS)
        self._updated_s, self._calm = 0.0, False

    def resumed(self, data: Any, where: str = "") -> None:
        """This world goes on from a snapshot with this `data`; None: from none. `where`: its size
        and its store; what another pace was learned for says nothing."""
        self._losses = self._losses.resumed(data)
        self._began_s = self._now()
        self._where, said = where, data.get("pace") if isinstance(data, dict) else None
        if isinstance(said, dict) and said.get("where") == where:
            rate = said.get("nbytes_per_s")
            if isinstance(rate, (int, float)) and 0 < rate < math.inf:
                self.pace = float(rate)

    def pace_data(self) -> dict[str, Any]:
        """What the next world may begin with."""
        return {"nbytes_per_s": round(self.pace), "where": self._where}

    def begin(self) -> None:
        """A snapshot was just taken, or loaded."""
        self._last_s = self._now()

    def landed(self, commit_s: float, slowdown: float, within_s: float = 0.0) -> None:
        """A snapshot was committed. `slowdown`: of the steps beside its sending. `within_s`: it was
        allowed to take so long, so that it did says nothing of how fast it could have been."""
        self.commit_s = commit_s if commit_s > within_s else min(self.commit_s, commit_s)
        slowed_s = cost_s(self.stall_s, slowdown, commit_s) - self.stall_s
        unsure_s = FELT * commit_s if within_s > 0 and not self.pace else 0.0  # nobody could tell
        self._slowed_s.append(max(slowed_s, unsure_s))
        if within_s > 0 and slowdown > FELT:
            self._roomy_s, self._felt_s = LONGER * within_s / SENDING, slowed_s
        else:
            self._roomy_s *= SHORTER

    def due(self, step: int) -> bool:
        return self._interval.due(step, self._now() - self._last_s, self.interval_s())

    def interval_s(self) -> float:
        """Between two snapshots. 0: unknown.

        A derived one is never longer than this world had trained when the last one was made, unless
        an hour between losses would make it so: calm that was seen before says little about a world
        that has just begun. Nor is it so short that a snapshot could only be sent as fast as the
        training feels, as long as that costs more than the work that a longer one loses.
        """
        if not self._interval.derived:
            return self._interval.seconds(self.calm_step_s, 0.0, 0.0)
        costs = 0.0, self.cost_s, self.commit_s
        learned_s = self._interval.seconds(*costs, self.between_losses_s)
        usual_s = self._interval.seconds(*costs)
        felt_s = self._interval.seconds(0.0, self.stall_s + self._felt_s, self.commit_s)
        bounded_s = min(learned_s, max(usual_s, self._last_s - self._began_s))
        return max(bounded_s, min(self._roomy_s, felt_s))

    @property
    def within_s(self) -> float:
        """A snapshot may take so long for the sake of the training's speed."""
        unsure_s = UNSURE_S if self._interval.derived and not self.pace else 0.0
        return SENDING * max(unsure_s, self.interval_s())

    @property
    def cost_s(self) -> float:
        """Of training, for one snapshot: it stands still, then steps beside the sending are
        slower."""
        return self.stall_s + (statistics.median(self._slowed_s) if self._slowed_s else 0.0)

    @property
    def between_losses_s(self) -> float:
        """Mean time between losses without a snapshot, as far as this run knows. 0: the interval
        does not depend on it."""
        if not self._interval.derived:
            return 0.0
        seen, nodes = self._losses.here, self._losses.nodes
        return seen.later(self._now() - self._began_s, nodes).between_s(nodes)

    def losses(self, why: str) -> dict[str, Any]:
        """What the next world must know, in a snapshot that is made because of `why`."""
        return self._losses.to_data(why, self._now() - self._began_s)

    def note_step(self, calm: bool) -> None:
        """How long a step takes while no snapshot is on its way (`calm`), for who sends the next
        one."""
        now = time.perf_counter()
        if calm and self._calm:
            self._calm_steps_s.append(now - self._updated_s)
        self._updated_s, self._calm = now, calm

    @property
    def calm_step_s(self) -> float:
        """0: too few were seen."""
        return typical_s(self._calm_steps_s) if len(self._calm_steps_s) >= CALM_STEPS else 0.0
