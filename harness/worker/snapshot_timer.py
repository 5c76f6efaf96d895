"""The timing of snapshots: the interval between them, the clock and the measurements. Runs in the
worker.

A derived interval follows from the measured cost of a snapshot and from how often this run has seen
worlds being lost here without one (`core/loss_rates.py`).
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from harness.core.loss_rates import ASSUMED_S, RunLosses, cost_s, derived_interval_s
from storage.snapshots.pacer import FELT, typical_s


@dataclass(frozen=True)
class Interval:
    """The interval between snapshots: in steps, in seconds, or, if neither is given, derived from
    the cost of a snapshot."""

    every_s: float | None = None
    every_steps: int | None = None

    @property
    def derived(self) -> bool:
        return not self.every_steps and self.every_s is None

    def seconds(
        self, step_s: float, cost_s: float, commit_s: float, between_s: float = ASSUMED_S
    ) -> float:
        """Return the seconds between two snapshots; 0: unknown, since the interval is in steps and
        no step was measured. `step_s`: seconds of one step; `cost_s`: training time that a snapshot
        costs; `commit_s`: from its beginning to its commit; `between_s`: between two losses of a
        world without a snapshot."""
        if self.every_steps:
            return self.every_steps * step_s
        if self.every_s is not None:
            return self.every_s
        return derived_interval_s(cost_s, commit_s, between_s)

    def due(self, step: int, since_s: float, seconds: float) -> bool:
        """Return whether a snapshot is due at this step, `since_s` after the last one. `seconds`:
        the result of the method `seconds`."""
        return step % self.every_steps == 0 if self.every_steps else since_s >= seconds


CALM_STEPS = 5  # steps without an upload that are needed to know how long a step takes
SENDINGS = 5  # the newest uploads, from which the cost of an upload is computed
SENDING = 0.5  # share of the interval that an upload may take, so that it does not slow the steps
# factors on the interval after an upload that slowed the steps, and after one that did not
LONGER, SHORTER = 1.5, 0.97
UNSURE_S = 60.0  # until a pace is known, uploads get the time of an interval of at least this


class Rhythm:
    """The clock of snapshots. `stall_s`: how long the last snapshot stopped the training.
    `commit_s`: from its begin to its commit at full upload speed, as far as that is known. `pace`:
    bytes per second from this node that did not slow the training; 0: not known."""

    def __init__(
        self,
        interval: Interval,
        losses: RunLosses = RunLosses(),
        now: Callable[[], float] = time.monotonic,
    ):
        self._interval, self._losses, self._now = interval, losses, now
        self.stall_s = 0.01
        self.commit_s = self.pace = 0.0
        self._where = ""  # world and store for which the pace was learned
        # the interval in which an upload hardly slows steps; the cost of the last one that did
        self._roomy_s = self._felt_s = 0.0
        self._slowed_s: deque[float] = deque(maxlen=SENDINGS)  # the time that each upload cost
        self._began_s = self._last_s = now()
        self._calm_steps_s: deque[float] = deque(maxlen=4 * CALM_STEPS)
        self._updated_s, self._calm = 0.0, False
        self.is_disturbed = False  # a state is on its way to the nodes' memory
        self._due_at_s = -math.inf  # no snapshot is due before; -inf: not computed yet

    def resumed(self, data: Any, where: str = "", survived: bool = False) -> None:
        """Begin with the measurements in the `data` of the snapshot that this world resumes from;
        None: no snapshot. `where`: size of the world, and store; a pace counts only for the same
        `where`. `survived`: nodes have kept a later state, which it resumes from instead."""
        self._losses = self._losses.resumed(data, survived)
        self._began_s, self._due_at_s = self._now(), -math.inf
        self._where, said = where, data.get("pace") if isinstance(data, dict) else None
        if isinstance(said, dict) and said.get("where") == where:
            rate = said.get("nbytes_per_s")
            if isinstance(rate, (int, float)) and 0 < rate < math.inf:
                self.pace = float(rate)

    def pace_data(self) -> dict[str, Any]:
        """Return the pace in the form that `resumed` reads, for the next world."""
        return {"nbytes_per_s": round(self.pace), "where": self._where}

    def begin(self, age_s: float = 0.0) -> None:
        """Record that a snapshot was just taken, or loaded. `age_s`: how long training has gone on
        behind it, in worlds that it outlived."""
        self._last_s, self._due_at_s = self._now() - age_s, -math.inf

    def landed(self, commit_s: float, slowdown: float, within_s: float = 0.0) -> None:
        """Record that a snapshot was committed. `slowdown`: of the steps during its upload (0.1: a
        tenth longer). `within_s`: the time that it was allowed to take; if it took no longer, that
        does not show how fast it could have been."""
        self._due_at_s = -math.inf
        self.commit_s = commit_s if commit_s > within_s else min(self.commit_s, commit_s)
        slowed_s = cost_s(self.stall_s, slowdown, commit_s) - self.stall_s
        # without a known pace, a slowdown below FELT cannot be seen
        unsure_s = FELT * commit_s if within_s > 0 and not self.pace else 0.0
        self._slowed_s.append(max(slowed_s, unsure_s))
        if within_s > 0 and slowdown > FELT:
            self._roomy_s, self._felt_s = LONGER * within_s / SENDING, slowed_s
        else:
            self._roomy_s *= SHORTER

    def due(self, step: int) -> bool:
        """Return whether a snapshot is due at this step. What an interval follows from changes when
        a snapshot is taken or committed, and hardly between, so it is computed then, and once more
        when its time has come."""
        now_s = self._now()
        if now_s < self._due_at_s and not self._interval.every_steps:
            return False
        interval_s = self.interval_s()
        self._due_at_s = self._last_s + interval_s
        return self._interval.due(step, now_s - self._last_s, interval_s)

    def interval_s(self) -> float:
        """Return the seconds between two snapshots; 0: unknown.

        A derived interval is at most as long as this world had trained when the last snapshot was
        made, or as one hour between losses would make it: a quiet past says little about a world
        that has just begun. It is long enough to upload without slowing the steps, as long as that
        slowdown would cost more than the work that a longer interval loses.
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
        """Seconds that the upload of a snapshot may take, to spare the training's speed."""
        unsure_s = UNSURE_S if self._interval.derived and not self.pace else 0.0
        return SENDING * max(unsure_s, self.interval_s())

    @property
    def cost_s(self) -> float:
        """Seconds of training that one snapshot costs: a stall, then slower steps during the
        upload."""
        return self.stall_s + (statistics.median(self._slowed_s) if self._slowed_s else 0.0)

    @property
    def between_losses_s(self) -> float:
        """Mean seconds between losses, as far as this run knows. 0: the interval does not depend
        on it."""
        if not self._interval.derived:
            return 0.0
        seen, nodes = self._losses.here, self._losses.nodes
        return seen.later(self._now() - self._began_s, nodes).between_s(nodes)

    def losses(self, why: str) -> dict[str, Any]:
        """Return the losses for the next world, to be stored in a snapshot that is made because of
        `why`."""
        return self._losses.to_data(why, self._now() - self._began_s)

    def note_step(self, calm: bool) -> None:
        """Record the end of a step. `calm`: no snapshot is being uploaded; only such steps count
        for `calm_step_s`."""
        now, calm = time.perf_counter(), calm and not self.is_disturbed
        if calm and self._calm:
            self._calm_steps_s.append(now - self._updated_s)
        self._updated_s, self._calm = now, calm

    @property
    def calm_step_s(self) -> float:
        """Typical seconds of a step without an upload; 0: too few were seen."""
        return typical_s(self._calm_steps_s) if len(self._calm_steps_s) >= CALM_STEPS else 0.0
