"""What an omniscient planner would have paid: the least cost of finishing some work by a deadline,
on one node at a time, when the whole market is known in advance. The yardstick of policies.

In each tick the node is on spot in a zone that has one, on demand, or nowhere. Whoever begins
somewhere pays from then on, and makes no progress for `changeover_s` (a launch, a restore); a begin
in another zone than the last one also costs `move_usd`. A spot node is lost at the end of a tick
whose successor has none. Exact for decisions at ticks: dynamic programming backwards over time,
with the work that is left as a vector of whole parts of a tick.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from harness.core.world import BadInput
from harness.market.traces import ZoneTrace

CostVector: TypeAlias = NDArray[np.float64]

NOWHERE, ON_DEMAND = -1, -2
MOST_PARTS = 60  # of a tick


@dataclass(frozen=True)
class WorkToDo:
    """What is to be done. Hours of one node without interruption; USD per hour of spot where a
    trace has no prices, and on demand."""

    hours: float
    deadline_hours: float
    changeover_s: float
    spot_usd_per_h: float
    on_demand_usd_per_h: float
    move_usd: float = 0.0


@dataclass(frozen=True)
class Optimum:
    """`usd`; `plan`: where the node is in each tick, a zone's place in the list, NOWHERE or
    ON_DEMAND. `finish_h`: hours until the work is done."""

    usd: float
    plan: tuple[int, ...]
    finish_h: float


def parts_of(tick_s: float, changeover_s: float) -> int:
    """Into how many parts a tick is cut, so that a changeover is a whole number of them (or
    nearly)."""
    ratio = Fraction(changeover_s / tick_s).limit_denominator(MOST_PARTS)
    return max(1, ratio.denominator)


def optimum(zones: Sequence[ZoneTrace], first: int, work: WorkToDo) -> Optimum:
    """From tick `first` of aligned `zones` on. Ticks beyond the trace have no spot. Raises BadInput
    if the deadline cannot be met even on demand."""
    tick_s = zones[0].tick_s
    k = parts_of(tick_s, work.changeover_s)
    left = math.ceil(work.hours * 3600 / tick_s * k - 1e-9)
    ahead = round(work.changeover_s / tick_s * k)
    ticks = int(work.deadline_hours * 3600 / tick_s + 1e-9)
    if left + ahead > ticks * k:
        raise BadInput(
            f"{work.hours:g} h of work and a begin of {work.changeover_s:g} s do not fit into a "
            f"deadline of {work.deadline_hours:g} h, even on demand"
        )
    table = _Table(zones, first, work, k, left, ahead, ticks)
    table.solve()
    return table.follow()


class _Table:
    """Places: each zone, then on demand. Stages: how much of a changeover is still ahead, from all
    of it (0) to nothing (the last)."""

    def __init__(
        self,
        zones: Sequence[ZoneTrace],
        first: int,
        work: WorkToDo,
        parts: int,
        left: int,
        ahead: int,
        ticks: int,
    ):
        self.parts, self.left, self.ticks = parts, left, ticks
        self.tick_h = zones[0].tick_s / 3600
        self.places = len(zones) + 1
        self.move_usd = work.move_usd
        # progress made in each stage, in parts of a tick
        stages, rest = list[int](), ahead
        while rest > 0:
            stages.append(max(0, parts - rest))
            rest -= parts
        self.stages = [*stages, parts]
        self.open = np.zeros((ticks, self.places), dtype=bool)
        self.usd = np.full((ticks, self.places), work.on_demand_usd_per_h * self.tick_h)
        for z, zone in enumerate(zones):
            nodes = zone.nodes[first : first + ticks]
            self.open[: len(nodes), z] = nodes > 0
            prices = None if zone.usd_per_h is None else zone.usd_per_h[first : first + ticks]
            each = work.spot_usd_per_h if prices is None else prices
            self.usd[: len(nodes), z] = each * self.tick_h
        self.open[:, -1] = True
        # [tick][last place or nowhere-ever][...]: costs of being nowhere; chosen next place
        self.choices: list[dict[tuple[int, int], NDArray[np.int16]]] = []

    def solve(self) -> None:
        """Backwards. A state is where the node was last (which a move's cost asks for), and how
        far its changeover is; (place, -1): it is nowhere."""
        done = np.full(self.left + 1, math.inf)
        done[0] = 0.0
        last = len(self.stages) - 1
        cost: dict[tuple[int, int], CostVector] = {}
        for place in range(self.places):
            for stage in range(-1, last + 1):
                cost[place, stage] = done
        for tick in range(self.ticks - 1, -1, -1):
            run: dict[tuple[int, int], CostVector] = {}
            for place in range(self.places):
                if self.open[tick, place]:
                    for stage, progress in enumerate(self.stages):
                        run[place, stage] = self._run(
                            cost[place, min(stage + 1, last)], progress, self.usd[tick, place]
                        )
            now: dict[tuple[int, int], CostVector] = {}
            chosen: dict[tuple[int, int], NDArray[np.int16]] = {}
            for place in range(self.places):
                idle, pick = cost[place, -1].copy(), np.full(self.left + 1, NOWHERE, np.int16)
                for there in range(self.places):
                    if (there, 0) not in run:
                        continue
                    begun = run[there, 0] + (self.move_usd if there != place else 0.0)
                    begun[0] = 0.0
                    better = begun < idle
                    idle[better], pick[better] = begun[better], there
                now[place, -1], chosen[place, -1] = idle, pick
                for stage in range(last + 1):
                    stay = run.get((place, stage))
                    if stay is None:
                        now[place, stage], chosen[place, stage] = idle, pick
                        continue
                    better = stay <= idle
                    now[place, stage] = np.where(better, stay, idle)
                    # a place of its own number +1000: it stays where it is
                    chosen[place, stage] = np.where(better, place + 1000, pick).astype(np.int16)
            cost = now
            self.choices.append(chosen)
        self.choices.reverse()
        # nothing was anywhere: the first begin is no move
        self.best = min(range(self.places), key=lambda place: float(cost[place, -1][self.left]))
        self.least = float(cost[self.best, -1][self.left])

    def _run(self, after: CostVector, progress: int, usd: float) -> CostVector:
        found = np.empty_like(after)
        if progress:
            found[progress:] = after[:-progress]
            found[:progress] = 0.0
        else:
            found[:] = after
        found += usd
        found[0] = 0.0
        return found

    def follow(self) -> Optimum:
        plan: list[int] = []
        place, stage, left = self.best, -1, self.left
        while left > 0 and len(plan) < self.ticks:
            choice = int(self.choices[len(plan)][place, stage][left])
            if choice == NOWHERE:
                stage = -1
            else:
                stage = stage if choice >= 1000 else 0
                place = choice % 1000
                left -= self.stages[stage]
                stage = min(stage + 1, len(self.stages) - 1)
            at = ON_DEMAND if place == self.places - 1 else place
            plan.append(NOWHERE if choice == NOWHERE else at)
        return Optimum(self.least, tuple(plan), len(plan) * self.tick_h)
