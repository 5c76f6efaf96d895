"""The cost of an omniscient planner: the least cost of finishing some work by a deadline, on one
node at a time, if the whole market is known in advance. Policies are measured against it.

In each tick the node is on spot in a zone that has one, on demand in any zone, or nowhere. A node
is billed from its begin until it leaves or is done, and makes no progress for the first
`changeover_s` (a launch, a restore); a begin in another zone than the last one also costs
`move_usd`. A spot node is lost at the end of a tick whose successor has none; the planner knows
this and loses no work. Exact for decisions at ticks: dynamic programming backwards over time, with
the remaining work as a vector of whole parts of a tick. The planner makes no begin that would be
lost during its changeover, so a begin is one jump over that.

Pure.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from harness.core.world import BadInput
from harness.planner.traces import ZoneTrace

NOWHERE, ON_DEMAND = -1, -2
MOST_PARTS = 60  # of a tick
MOST_CELLS = 2e9  # ticks x parts of work x places: about half a minute
AS_GOOD_USD = 1e-9  # among plans this close in cost the one that ends sooner is chosen
CHOICES_KEPT = 6e7  # in memory at once; the others are computed again


@dataclass(frozen=True)
class WorkToDo:
    """The work to be done. Hours of one node without interruption; USD per hour of spot and on
    demand, where a zone has no prices. `moves`: USD of a move from each zone to each, in their
    order; empty: `move_usd` between any two. `usd_per_hour_late`: the work costs so much more in
    each tick that begins after `due_hours`; the deadline is when it must be done at any price."""

    hours: float
    deadline_hours: float
    changeover_s: float
    spot_usd_per_h: float
    on_demand_usd_per_h: float
    move_usd: float = 0.0
    moves: tuple[tuple[float, ...], ...] = ()
    due_hours: float = math.inf
    usd_per_hour_late: float = 0.0


@dataclass(frozen=True)
class Optimum:
    """The best plan, at `usd`. `plan`: the node's place in each tick: an index of a zone, NOWHERE
    or ON_DEMAND. `finish_h`: hours until the work is done."""

    usd: float
    plan: tuple[int, ...]
    finish_h: float


def parts_of(tick_s: float, *spans_s: float) -> int:
    """Return the number of parts of a tick in which all spans are whole numbers. If that is too
    many, return (nearly) as many as the first span needs."""
    each = [Fraction(span_s / tick_s).limit_denominator(MOST_PARTS) for span_s in spans_s]
    found = math.lcm(*(ratio.denominator for ratio in each))
    return found if found <= MOST_PARTS else each[0].denominator


def optimum(zones: Sequence[ZoneTrace], first: int, work: WorkToDo) -> Optimum:
    """Return the best plan from tick `first` of aligned `zones` on. Ticks beyond the trace have no
    spot. Raises BadInput if the deadline cannot be met even on demand."""
    spans_s = (work.changeover_s, work.hours * 3600, work.deadline_hours * 3600)
    table = _table(zones, first, work, parts_of(zones[0].tick_s, *spans_s))
    if not table.can_be_done():
        raise BadInput(
            f"{work.hours:g} h of work and a begin of {work.changeover_s:g} s do not fit into a "
            f"deadline of {work.deadline_hours:g} h, even on demand"
        )
    return table.solve()


def least_costs(zones: Sequence[ZoneTrace], first: int, work: WorkToDo) -> NDArray[np.float64]:
    """Return USD for each amount of work up to `work.hours`, in parts of a tick (`parts_of` a
    changeover); infinite if it cannot be done in time. Raises BadInput."""
    return _table(zones, first, work, parts_of(zones[0].tick_s, work.changeover_s)).costs()


def _table(zones: Sequence[ZoneTrace], first: int, work: WorkToDo, k: int) -> _Table:
    tick_s = zones[0].tick_s
    left = math.ceil(work.hours * 3600 / tick_s * k - 1e-9)
    ahead = round(work.changeover_s / tick_s * k)
    most = int(work.deadline_hours * 3600 / tick_s * k + 1e-9)
    table = _Table(zones, first, work, k, left, ahead, most)
    if table.ticks * left * len(table.zone_of) > MOST_CELLS:
        raise BadInput(
            f"{table.ticks} ticks of {tick_s:g} s and {left} parts of work are too many for the "
            "exact optimum; give a longer tick"
        )
    return table


@dataclass(frozen=True)
class _Costs:
    """Least costs from a tick on, by the remaining work. `idle`: being nowhere, by the zone of the
    last node; `running`: for each of the next ticks, being at each place at full speed."""

    idle: NDArray[np.float64]
    running: tuple[NDArray[np.float64], ...]


@dataclass(frozen=True)
class _Choices:
    """The cheapest choices in one tick. `begin`: from nowhere, the place to begin at, or NOWHERE;
    `leave`: at each place, True if it is better to be nowhere."""

    begin: NDArray[np.int16]
    leave: NDArray[np.bool_]


class _Table:
    """The table of the programme. Places: spot in each zone, then on demand: in each zone if moves
    cost something, else one for all."""

    def __init__(
        self,
        zones: Sequence[ZoneTrace],
        first: int,
        work: WorkToDo,
        parts: int,
        left: int,
        ahead: int,
        most: int,
    ):
        self.parts, self.left = parts, left
        self.moves = _moves(work, len(zones))
        apart = bool(self.moves.any())
        # the deadline may lie within the last tick; then only this many of its parts count
        self.ticks = ticks = -(-most // parts)
        self.last_parts = most - (ticks - 1) * parts
        self.tick_h, self.zones = zones[0].tick_s / 3600, len(zones)
        # a begin takes this many ticks; the last one may make some progress
        self.begin_ticks, self.begin_parts = -(-ahead // parts), -ahead % parts
        others = self.moves[~np.eye(len(zones), dtype=bool)]
        self.alike = not len(others) or float(np.ptp(others)) == 0  # all moves cost the same
        each_zone = range(len(zones))
        self.zone_of = [*(z if apart else 0 for z in each_zone), *(each_zone if apart else [0])]
        places = len(self.zone_of)
        self.open = np.zeros((ticks, places), dtype=bool)
        dear = [zone.on_demand(work.on_demand_usd_per_h) for zone in zones]
        self.usd = np.zeros((ticks, places))
        self.usd[:, len(zones) :] = np.array(dear if apart else [min(dear)]) * self.tick_h
        self.open[:, len(zones) :] = True
        due = np.arange(ticks) * self.tick_h >= work.due_hours - 1e-9
        self.late_usd = np.where(due, work.usd_per_hour_late * self.tick_h, 0.0)
        for z, zone in enumerate(zones):
            nodes = zone.nodes[first : first + ticks]
            self.open[: len(nodes), z] = nodes > 0
            prices = None if zone.usd_per_h is None else zone.usd_per_h[first : first + ticks]
            each = work.spot_usd_per_h if prices is None else prices
            self.usd[: len(nodes), z] = each * self.tick_h
        self.usd += self.late_usd[:, None]

    def solve(self) -> Optimum:
        """Solve backwards over all ticks, then go forwards along the choices. Those of early ticks
        are kept as far as there is room; the rest is computed again from costs kept on the way."""
        kept = max(1, int(CHOICES_KEPT // (2 * len(self.zone_of) * (self.left + 1))))
        costs, after = self._end(), dict[int, _Costs]()
        choices: list[_Choices] = []
        for tick in range(self.ticks - 1, -1, -1):
            if (tick + 1) % kept == 0 or tick == self.ticks - 1:
                after[tick], choices = costs, []
            costs, chosen = self._step(tick, costs)
            choices.append(chosen)
        # the node was nowhere before, so the first begin is no move
        zone = int(np.argmin(costs.idle[:, self.left]))
        return self._follow(zone, float(costs.idle[zone, self.left]), choices[::-1], after)

    def can_be_done(self) -> bool:
        """Return whether the work can be done on demand from the first tick on."""
        ahead = self.begin_ticks * self.parts - self.begin_parts
        return self.left + ahead <= (self.ticks - 1) * self.parts + self.last_parts

    def costs(self) -> NDArray[np.float64]:
        """Return the least costs by the remaining work, from the first tick on."""
        costs = self._end()
        for tick in range(self.ticks - 1, -1, -1):
            costs, _ = self._step(tick, costs)
        least: NDArray[np.float64] = costs.idle.min(axis=0)
        return least

    def _end(self) -> _Costs:
        done = np.full(self.left + 1, math.inf)
        done[0] = 0.0
        running = np.tile(done, (len(self.zone_of), 1))
        return _Costs(
            np.tile(done, (max(self.zone_of) + 1, 1)), (running,) * max(1, self.begin_ticks)
        )

    def _step(self, tick: int, after: _Costs) -> tuple[_Costs, _Choices]:
        stay = self._then(after.running[0], self.parts, tick, 1)
        begun = stay
        if self.begin_ticks:
            begun = self._then(after.running[-1], self.begin_parts, tick, self.begin_ticks)
        idle = after.idle.copy()
        idle[:, 1:] += self.late_usd[tick]
        begin = np.full(idle.shape, NOWHERE, np.int16)
        move_usd = float(self.moves.max())
        everywhere, cheapest = _cheapest(begun + move_usd if self.alike else begun)
        for zone in range(len(idle)):
            if not self.alike:
                everywhere, cheapest = _cheapest(begun + self.moves[zone, self.zone_of][:, None])
            better = everywhere <= idle[zone] + AS_GOOD_USD
            idle[zone][better], begin[zone][better] = everywhere[better], cheapest[better]
            for place in np.flatnonzero(self.open[tick]) if self.alike and move_usd else ():
                if self.zone_of[place] == zone:
                    better = begun[place] <= idle[zone] + AS_GOOD_USD
                    idle[zone][better], begin[zone][better] = begun[place][better], place
        nowhere = idle[self.zone_of]
        leave = nowhere < stay - AS_GOOD_USD
        running = np.where(leave, nowhere, stay)
        kept = (running, *after.running)[: max(1, self.begin_ticks)]
        return _Costs(idle, kept), _Choices(begin, leave)

    def _then(
        self, after: NDArray[np.float64], progress: int, tick: int, ticks: int
    ) -> NDArray[np.float64]:
        """Return the costs of being at each place for some ticks that make `progress` together."""
        found = np.full_like(after, math.inf)
        open_ = self.open[tick : tick + ticks].all(axis=0)
        if tick + ticks <= self.ticks:
            usd, last_usd = self.usd[tick : tick + ticks].sum(axis=0), self.usd[tick + ticks - 1]
            found[open_, progress:] = after[open_, : max(0, self.left + 1 - progress)]
            # a node that is done within the last tick pays for that fraction of it
            used = self.parts - progress + np.arange(min(progress, self.left) + 1)
            unpaid = (1 - used / self.parts) * last_usd[open_, None]
            in_time = used <= self._parts_of(tick + ticks - 1)
            found[open_, : len(used)] = np.where(in_time, -unpaid, math.inf)
            found += usd[:, None]
        found[:, 0] = 0.0  # no work is left
        return found

    def _parts_of(self, tick: int) -> int:
        """Return the parts of a tick that lie before the deadline."""
        return self.last_parts if tick == self.ticks - 1 else self.parts

    def _follow(
        self, zone: int, usd: float, choices: list[_Choices], after: dict[int, _Costs]
    ) -> Optimum:
        plan: list[int] = []
        left, place, begun = self.left, NOWHERE, 0
        while left > 0 and len(plan) < self.ticks:
            if not choices:
                choices = self._again(len(plan), after)
            chosen, choices = choices[0], choices[1:]
            if begun > 0:  # the begin is in progress
                begun -= 1
                left -= 0 if begun else self.begin_parts
            elif place != NOWHERE and not chosen.leave[place, left]:
                left -= self.parts
            else:
                place = int(chosen.begin[zone, left])
                if place != NOWHERE:
                    zone = self.zone_of[place]
                    begun = self.begin_ticks - 1
                    left -= self.parts if begun < 0 else 0 if begun else self.begin_parts
            at = ON_DEMAND if place >= self.zones else place
            plan.append(at)
        return Optimum(usd, tuple(plan), (len(plan) + left / self.parts) * self.tick_h)

    def _again(self, first: int, after: dict[int, _Costs]) -> list[_Choices]:
        """Compute again the choices from a tick on that were not kept."""
        last = min(tick for tick in after if tick >= first)
        costs, found = after[last], list[_Choices]()
        for tick in range(last, first - 1, -1):
            costs, chosen = self._step(tick, costs)
            found.append(chosen)
        return found[::-1]


def _cheapest(begun: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """Return (cost, place) of the cheapest begin for each amount of remaining work."""
    place = begun.argmin(axis=0)
    return np.take_along_axis(begun, place[None], axis=0)[0], place


def _moves(work: WorkToDo, zones: int) -> NDArray[np.float64]:
    """Return USD of a move from each zone to each."""
    found = np.array(work.moves) if work.moves else np.full((zones, zones), work.move_usd)
    np.fill_diagonal(found, 0.0)
    return found


# The cost of an omniscient planner with many nodes: the least cost of some node-hours of work by
# a deadline, with any number of nodes up to a limit in each tick.

SHARES = 5000  # parts into which the work of all slots is cut


def fleet_optimum_usd(
    zones: Sequence[ZoneTrace], first: int, work: WorkToDo, nodes: int, one_place: bool = False
) -> float:
    """Return the least cost from tick `first` of aligned zones on. `work.hours`: of all nodes
    together. `one_place`: nodes of different zones form one fleet. Raises BadInput if the deadline
    cannot be met even on demand."""
    tick_s = zones[0].tick_s
    per_tick = parts_of(tick_s, work.changeover_s)
    least_h = work.hours / nodes + work.changeover_s / 3600
    if least_h > work.deadline_hours + 1e-9:
        raise BadInput(
            f"{work.hours:g} node-hours of work take {nodes} nodes {least_h:.4g} h, even on "
            f"demand; found a deadline of {work.deadline_hours:g} h"
        )
    parts = math.ceil(work.hours * 3600 / tick_s * per_tick - 1e-9)
    grain = max(1, parts // SHARES)
    most = int(work.deadline_hours * 3600 / tick_s + 1e-9) * per_tick
    each = dataclasses.replace(
        work,
        hours=min(most, parts) / per_tick * tick_s / 3600,
        move_usd=work.move_usd / nodes,
        moves=_fleet_moves(work, nodes),
        usd_per_hour_late=work.usd_per_hour_late / nodes,
    )
    market = [_merged(zones, work)] if one_place else list(zones)
    known: dict[bytes, NDArray[np.float64]] = {}
    total = np.full(-(-parts // grain) + 1, math.inf)
    total[0] = 0.0
    for slot in range(1, nodes + 1):
        rooms = [(zone.nodes >= slot).astype(np.int64) for zone in market]
        key = b"".join(room.tobytes() for room in rooms)
        if key not in known:
            slots = [dataclasses.replace(z, nodes=r) for z, r in zip(market, rooms, strict=True)]
            known[key] = least_costs(slots, first, each)[::grain]
        total = _shared(total, known[key])
    return float(total[-1])


def _shared(one: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the least sum of both costs, by the work done together."""
    found = np.full_like(one, math.inf)
    for share, usd in enumerate(other[: len(one)].tolist()):
        if math.isfinite(usd):
            np.minimum(found[share:], one[: len(one) - share] + usd, out=found[share:])
    # whatever can do more work can do less
    return np.minimum.accumulate(found[::-1])[::-1]


def _fleet_moves(work: WorkToDo, nodes: int) -> tuple[tuple[float, ...], ...]:
    """Return USD of the moves of one of so many nodes, which may lead over other zones: others of
    the fleet may have been there meanwhile."""
    if not work.moves:
        return ()
    least = _moves(work, len(work.moves))
    for over in range(len(least)):
        least = np.minimum(least, least[:, over, None] + least[over])
    return tuple(map(tuple, (least / nodes).tolist()))


def _merged(zones: Sequence[ZoneTrace], work: WorkToDo) -> ZoneTrace:
    """Return one zone with the nodes of all zones, each at the lowest price."""
    dear = min(zone.on_demand(work.on_demand_usd_per_h) for zone in zones)
    nodes = np.sum([zone.nodes for zone in zones], axis=0)
    prices = [zone.usd_per_h for zone in zones if zone.usd_per_h is not None]
    least = np.min(prices, axis=0) if len(prices) == len(zones) else None
    return dataclasses.replace(
        zones[0], nodes=nodes, usd_per_h=least, on_demand_usd_per_h=dear
    )
