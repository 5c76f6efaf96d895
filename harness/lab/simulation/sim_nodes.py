"""Simulated nodes that simply train: what a controller sees of a run.

Nodes that are up in one place make the steps together, as fast as all of them are. Each
`snapshot_every` steps they commit a snapshot. A node that is lost takes all steps since with it;
one that was told before leaves after a snapshot. How members agree, share work, save and restore is
not modelled: docs/design/SIMULATION.md says where the real code for that is simulated.

Pure.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.bucket.layout import member_key
from harness.bucket.orders import asked_to_leave, stop_order
from harness.core.world import DRAINED, FINISHED, STOPPED, Offer, meeting_place
from storage.errors import StoreRefused, StoreUnavailable
from storage.snapshots.manifest import Ref
from storage.snapshots.retention import Keep
from storage.snapshots.snapshots import Snapshots

if TYPE_CHECKING:
    from harness.lab.simulation.simulation import Simulation

LOOK_S, BEAT_S = 5.0, 10.0  # between two looks at the orders, and between two heartbeats
UPLOAD_S = (0.2, 4.0)
FORM_S = (1.0, 4.0)  # until nodes have agreed to train together
RESTORE_S = (2.0, 10.0)
NOTICED_S = (2.0, 10.0)  # until the others know that a node is lost
EXIT_S = (0.2, 3.0)


@dataclass(frozen=True)
class SimulatedTraining:
    """The simulated training. `step_s`: time of a step on one node of speed 1."""

    total_steps: int = 300
    snapshot_every: int = 20
    step_s: float = 6.0
    boot_s: float = 20.0


@dataclass
class Team:
    """Nodes that train together from step `first` on. `made`: the newest step that was counted."""

    epoch: int
    attempts: frozenset[int]
    first: int
    begin_s: float
    step_s: float
    made: int
    ending: bool = False  # it makes its last snapshot
    broken: bool = False  # it has lost a node

    def step_at(self, t: float) -> int:
        return self.first + max(0, math.floor((t - self.begin_s) / self.step_s))

    def time_of(self, step: int) -> float:
        return self.begin_s + (step - self.first) * self.step_s


class SimNodes:
    """All nodes of a run. `ready`: booted, and not asked to leave; `leaving`: their exit codes."""

    def __init__(self, sim: Simulation, job: SimulatedTraining):
        self.sim, self.clock, self.rng, self.job = sim, sim.clock, sim.rng, job
        self.ready: dict[int, Offer] = {}
        self.leaving: dict[int, int] = {}
        self.team: Team | None = None
        self.trained_last: frozenset[int] = frozenset()
        self.forming = False
        self.epochs = self.steps_done = self.committed = 0

    def soon(self, range_s: tuple[float, float], do: Callable[[], None]) -> None:
        """Call `do` after a random time, and again later if the bucket does not answer."""
        self.clock.after(self.rng.uniform(*range_s), lambda: self._try(do))

    def _try(self, do: Callable[[], None]) -> None:
        try:
            do()
        except (StoreUnavailable, StoreRefused):
            self.soon((0.5, 2.0), do)

    # ---- the life of a node ----------------------------------------------------------------------
    def boot(self, attempt: int, offer: Offer) -> None:
        """Boot a node that the cloud has given."""
        boot_s, weather = self.job.boot_s, self.sim.weather
        self.soon((0.5 * boot_s, 1.5 * boot_s), functools.partial(self._enter, attempt, offer))
        if not self.sim.cloud.calm and self.rng.random() < weather.flaky:
            self.soon((1.0, 600.0), lambda: self.sim.cloud.end(attempt, 1, "exited"))

    def _enter(self, attempt: int, offer: Offer) -> None:
        if not self.sim.cloud.all[attempt].alive:
            return
        if self.sim.weather.elsewhere:
            self._beat(attempt)
        self.ready[attempt] = offer
        if self.team is None or self._place() == offer.place:
            self._regroup()
        self.soon((0.0, LOOK_S), lambda: self._look(attempt))

    def _look(self, attempt: int) -> None:
        """Carry out orders, as an agent does all the time."""
        if attempt not in self.ready:
            return
        bucket = self.sim.bucket()
        if self.committed == self.job.total_steps:
            self._ask_to_leave(attempt, FINISHED)
        elif stop_order(bucket) is not None:
            self._ask_to_leave(attempt, STOPPED)
        elif asked_to_leave(bucket, attempt):
            self.notice(attempt)
        else:
            self.soon((LOOK_S, LOOK_S), lambda: self._look(attempt))

    def notice(self, attempt: int) -> None:
        """Tell a node that it has to go."""
        self._ask_to_leave(attempt, DRAINED)

    def _ask_to_leave(self, attempt: int, code: int) -> None:
        if self.ready.pop(attempt, None) is None:
            return
        if self.team and attempt in self.team.attempts:
            self.leaving[attempt] = code
            self._regroup()
        else:
            self._exit(attempt, code)

    def _exit(self, attempt: int, code: int) -> None:
        self.soon(EXIT_S, lambda: self.sim.cloud.end(attempt, code, "exited"))

    def lost(self, attempt: int) -> None:
        """Remove a node that is gone, for whatever reason."""
        self.ready.pop(attempt, None)
        self.leaving.pop(attempt, None)
        if self.sim.weather.elsewhere and self.sim.cloud.all[attempt].reason == "exited":
            self._say(attempt, "gone", -1)
        team = self.team
        if team and attempt in team.attempts:
            team.broken = True
            self._count(team, min(team.step_at(self.clock.now()), self.job.total_steps))
            self.team = None
            self.soon(NOTICED_S, self._form)

    # ---- heartbeats ------------------------------------------------------------------------------
    def _beat(self, attempt: int, count: int = 0) -> None:
        """Write heartbeats to the bucket; only in worlds where a controller needs them."""
        if self.sim.cloud.all[attempt].alive:
            self._say(attempt, "in", count)
            self.clock.after(BEAT_S, lambda: self._beat(attempt, count + 1))

    def _say(self, attempt: int, state: str, count: int) -> None:
        body = {"attempt": attempt, "state": state, "beat": count, "beat_s": BEAT_S}
        self.sim.store.put(member_key(f"m{attempt:04d}-sim"), json.dumps(body).encode())

    # ---- training together -----------------------------------------------------------------------
    def _place(self) -> str:
        return meeting_place(
            [(offer.place, 1, n in self.trained_last) for n, offer in self.ready.items()]
        )

    def _regroup(self) -> None:
        """Let the nodes that train stop at the next step, with a snapshot, and form a new team."""
        team = self.team
        if team is None:
            self._form()
        elif not team.ending:
            team.ending = True
            step = min(team.step_at(self.clock.now()) + 1, self.job.total_steps)
            self._at(team, step, lambda: self._save(team, step, last=True))

    def _form(self) -> None:
        leaving, self.leaving = self.leaving, {}
        for attempt, code in leaving.items():
            self._exit(attempt, code)
        if not self.forming:
            self.forming = True
            self.soon(FORM_S, self._begin)

    def _begin(self) -> None:
        self.forming = False
        if self.team is not None or not self.ready or self.committed == self.job.total_steps:
            return
        where = self._place()
        members = {n: offer for n, offer in self.ready.items() if offer.place == where}
        if len(members) < self.sim.run.min_nodes:
            return  # whoever comes forms it
        self.epochs += 1
        begin_s = self.clock.now() + self.rng.uniform(*RESTORE_S)
        step_s = self.job.step_s / sum(offer.speed for offer in members.values())
        first, attempts = self.committed, frozenset(members)
        self.team = team = Team(self.epochs, attempts, first, begin_s, step_s, first)
        self.trained_last = attempts
        self._go_on(team, first)

    def _go_on(self, team: Team, step: int) -> None:
        """Train until the next snapshot, or the script's bug."""
        every, bug = self.job.snapshot_every, self.sim.weather.fails_at_step
        to = min((step // every + 1) * every, self.job.total_steps)
        to = to if bug is None else min(to, max(bug, team.first + 1))
        self._at(team, to, lambda: self._reach(team, to))

    def _reach(self, team: Team, step: int) -> None:
        bug = self.sim.weather.fails_at_step
        if team.ending:
            return
        if bug is not None and step >= bug:
            for attempt in team.attempts:
                self.sim.cloud.end(attempt, 1, "exited")
            return
        self._save(team, step)
        if step < self.job.total_steps:
            self._go_on(team, step)

    def _at(self, team: Team, step: int, do: Callable[[], None]) -> None:
        """Call `do` when the step is made, unless a node is lost before."""
        wait_s = max(0.0, team.time_of(step) - self.clock.now())
        self.clock.after(wait_s, lambda: None if team.broken else do())

    def _count(self, team: Team, step: int) -> None:
        self.steps_done += max(0, step - team.made)
        team.made = max(team.made, step)

    # ---- snapshots -------------------------------------------------------------------------------
    def _save(self, team: Team, step: int, last: bool = False) -> None:
        self._count(team, step)
        self.soon(UPLOAD_S, lambda: self._commit(team, step, last))

    def _commit(self, team: Team, step: int, last: bool) -> None:
        if team.broken:
            return
        if step > self.committed:
            snapshots, ref = Snapshots(self.sim.bucket()), Ref(team.epoch, step)
            data = {"final": step == self.job.total_steps}
            files = {"state.bin": f"state after {step}".encode()}
            snapshots.write(ref, 0, 1, files, {}, data, "sim")
            snapshots.commit(ref, 1)
            self.committed = step
            snapshots.prune(Keep(last=3))
        if self.team is team and (last or self.committed == self.job.total_steps):
            if self.committed == self.job.total_steps:
                self.leaving = dict.fromkeys(team.attempts, FINISHED)
                self.ready = {n: o for n, o in self.ready.items() if n not in team.attempts}
            self.team = None
            self._form()
