"""The least expected cost of the rest of a fleet's work, if all later decisions are optimal: a
dynamic programme over the work, the time and the room on spot that are left.

`fleet_outlook` assumes constant prices. In `priced_fleet_outlook` prices wander, and the fleet may
also leave spot while it is expensive: the price has the levels of `price_process.py`. While no node
runs, the room on spot changes as it does for a running fleet. A return costs a changeover of the
share that spot has room for.

Costs are in hours of the whole fleet on demand. Pure.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness.controller.forecast.dynamic_program import LATE
from harness.controller.forecast.price_process import (
    chances,
    hours_until_one,
    level_after,
    level_factor,
    level_factors,
    level_moves,
    place_below,
)

# The least expected cost of the rest of a fleet's work, if all later decisions are optimal: a
# dynamic programme over the remaining work and time, and over the share of the fleet that spot
# has room for.

LEVELS = 5  # shares on spot: 0, 1/4, ... 1
WITHOUT, WITH = 0, 1  # the missing share is replaced on demand, or not
MOST_FLEETS = 64  # cached tables


@dataclass(frozen=True)
class FleetTerms:
    """The parameters of a table. `loss_per_h`: of one node; `share`: the mean share of the fleet
    that spot has; `least`: the share of the fleet without which nothing is trained. Prices,
    changeover and cells are as in `dynamic_program.Terms`. `kept_h`: the time that must stay
    in reserve for the share of the fleet that is missing, or may be lost at once."""

    loss_per_h: float
    share: float
    least: float
    price: float
    changeover_h: float
    kept_h: float
    cell_h: float
    time_cells: int
    work_cells: int
    again: float = 0.0  # share of the work of a whole fleet on spot that losses make it do again

    def works_on(self, share: float) -> float:
        """Return the share of its work that gets done with `share` of the fleet on spot: every loss
        costs the work of a begin, and what was not saved."""
        return 1 - min(0.5, self.loss_per_h * self.changeover_h + self.again * share)


@dataclass(frozen=True)
class FleetOutlook:
    """Least expected costs: [cells of time left, without or with on demand, level, cells of work
    left]; work is in hours of the whole fleet."""

    terms: FleetTerms
    costs: NDArray[np.float32]

    def saved(self, share: float, work_h: float, time_h: float) -> float:
        """Return the saving if the missing nodes run on demand from now on, in hours of the fleet
        on demand. `share` of the fleet is on spot."""
        return self._at(WITHOUT, share, work_h, time_h) - self._at(WITH, share, work_h, time_h)

    def rest(self, bought: bool, share: float, work_h: float, time_h: float) -> float:
        """Return the cost of the rest. `bought`: the missing nodes run on demand now."""
        return self._at(WITH if bought else WITHOUT, share, work_h, time_h)

    def _at(self, bought: int, share: float, work_h: float, time_h: float) -> float:
        i, f = place_below(time_h / self.terms.cell_h, self.terms.time_cells)
        j, g = place_below(share * (LEVELS - 1), LEVELS - 1)
        k, h = place_below(work_h / self.terms.cell_h, self.terms.work_cells)
        corner = self.costs[i : i + 2, bought, j : j + 2, k : k + 2].astype(np.float64)
        sides = corner[..., 0] * (1 - h) + corner[..., 1] * h
        edge = sides[:, 0] * (1 - g) + sides[:, 1] * g
        return float(edge[0] * (1 - f) + edge[1] * f)


def drift(terms: FleetTerms) -> NDArray[np.float32]:
    """Return the chances to go from level to level in one cell: nodes are lost one by one at their
    rate, and arrive at the rate that keeps the average."""
    rate = np.zeros((LEVELS, LEVELS))
    for level in range(LEVELS):
        if level:
            rate[level, level - 1] = terms.loss_per_h * level
        if level < LEVELS - 1:
            # as in a market with very many places, each of which is open for that share of time
            open_per_h = terms.loss_per_h * terms.share / max(0.05, 1 - terms.share)
            rate[level, level + 1] = open_per_h * (LEVELS - 1 - level)
    np.fill_diagonal(rate, -rate.sum(axis=1))
    found: NDArray[np.float32] = chances(rate, terms.cell_h).astype(np.float32)
    return found


@functools.lru_cache(maxsize=MOST_FLEETS)
def fleet_outlook(terms: FleetTerms) -> FleetOutlook:
    """Solve the programme backwards over time."""
    works, cell_h = terms.work_cells + 1, terms.cell_h
    costs = np.empty((terms.time_cells + 1, 2, LEVELS, works), np.float32)
    costs[0] = LATE * cell_h * np.arange(works)
    moved = drift(terms)
    share = np.linspace(0.0, 1.0, LEVELS, dtype=np.float32)[:, None]
    begin = (1 - share) * np.float32(terms.changeover_h)
    places = np.arange(works, dtype=np.float32)
    trains = share >= terms.least - 1e-9
    works_on = np.vectorize(terms.works_on)(share)
    off_done = (trains * share * works_on).astype(np.float32)
    off_usd = (trains * share * terms.price * cell_h).astype(np.float32)
    lost, saved = np.float32(1 - terms.works_on(1.0)), np.float32(1 - terms.price)
    for r in range(1, terms.time_cells + 1):
        off, on = moved @ costs[r - 1]
        spare_h = (r - places) * np.float32(cell_h)
        spot = np.minimum(share, np.clip(spare_h / np.float32(terms.kept_h), 0.0, 1.0))
        on = _worked(on, 1 - spot * lost) + (1 - spot * saved) * np.float32(cell_h)
        off = _worked(off, off_done) + off_usd
        off[:, spare_h < terms.kept_h] = np.inf
        # on demand may be released at any time; beginning it has a cost
        here = costs[r]
        np.minimum(off, on + begin, out=here[WITHOUT])
        np.minimum(on, here[WITHOUT], out=here[WITH])
        here[..., 0] = 0.0
    return FleetOutlook(terms, costs)


# running: nothing, spot, or spot and on demand for the missing share
NOBODY, RENTED, BOUGHT = 0, 1, 2
MOST_PRICED = 16  # cached tables


@dataclass(frozen=True)
class PricedFleetTerms:
    """The parameters of a table. `fleet`: its price is the usual one of spot. `swing`,
    `pull_per_h`: how the price wanders around that (`price_process.PriceSwing`)."""

    fleet: FleetTerms
    swing: float
    pull_per_h: float


@dataclass(frozen=True)
class PricedFleetOutlook:
    """Least expected costs: [cells of time left, what runs, price level, level of spot's share,
    cells of work left]. `level`: of the current price."""

    terms: PricedFleetTerms
    costs: NDArray[np.float32]
    level: float = 0.0

    @property
    def price(self) -> float:
        """Current price of spot, as a share of on demand."""
        return self.terms.fleet.price * level_factor(self.terms.swing, self.level)

    def begin(self, share: float, work_h: float, time_h: float) -> float:
        """Return the cost of taking the share of the fleet that spot has room for, keeping it for a
        cell of time, and then acting optimally."""
        begin_h = self.terms.fleet.changeover_h
        begun = share * self.price * begin_h
        return begun + self.keep(share, work_h, time_h - begin_h)

    def keep(self, share: float, work_h: float, time_h: float) -> float:
        """Return the cost of keeping that share on spot for one cell of time."""
        fleet = self.terms.fleet
        spot_h = share * fleet.cell_h if share >= fleet.least - 1e-9 else 0.0
        done_h = spot_h * fleet.works_on(share)
        return spot_h * self.price + self._after(RENTED, share, work_h - done_h, time_h)

    def wait(self, share: float, work_h: float, time_h: float) -> float:
        """Return the cost of running nothing for a cell of time, and then acting optimally."""
        return self._after(NOBODY, share, work_h, time_h)

    def cheaper_in_h(self, share: float, work_h: float, time_h: float) -> float:
        """Return the mean hours until the price is low enough to begin on spot, at most the spare
        time."""
        begins = []
        for level in range(len(level_factors(self.terms.swing))):
            at = dataclasses.replace(self, level=float(level))
            begins.append(at.begin(share, work_h, time_h) <= at.wait(share, work_h, time_h))
        spare_h = max(0.0, time_h - work_h - self.terms.fleet.changeover_h)
        return hours_until_one(self.terms.pull_per_h, self.level, begins, spare_h)

    def _after(self, there: int, share: float, work_h: float, time_h: float) -> float:
        """Return the mean cost of the rest, a cell of time from now."""
        fleet = self.terms.fleet
        i, f = place_below(time_h / fleet.cell_h - 1, fleet.time_cells)
        k, h = place_below(work_h / fleet.cell_h, fleet.work_cells)
        corner = self.costs[i : i + 2, there, :, :, k : k + 2].astype(np.float64)
        sides = corner[..., 0] * (1 - h) + corner[..., 1] * h
        found = sides[0] * (1 - f) + sides[1] * f
        j, g = place_below(share * (LEVELS - 1), LEVELS - 1)
        moved = drift(fleet).astype(np.float64)
        of_price = level_after(self.terms.pull_per_h, self.level, fleet.cell_h)
        return float(of_price @ found @ (moved[j] * (1 - g) + moved[j + 1] * g))


@functools.lru_cache(maxsize=MOST_PRICED)
def priced_fleet_outlook(terms: PricedFleetTerms) -> PricedFleetOutlook:
    """Solve the programme backwards over time."""
    fleet = terms.fleet
    works, cell_h = fleet.work_cells + 1, fleet.cell_h
    factors = np.array(level_factors(terms.swing))
    places = np.arange(works)
    costs = np.empty((fleet.time_cells + 1, 3, len(factors), LEVELS, works), np.float32)
    costs[0] = LATE * cell_h * places
    moved = drift(fleet)
    price_moved = level_moves(terms.pull_per_h, cell_h).astype(np.float32)
    share = np.linspace(0.0, 1.0, LEVELS)[:, None]
    price = fleet.price * factors[:, None, None]
    trains = share >= fleet.least - 1e-9
    works_on = np.vectorize(fleet.works_on)(share)
    rented_done = (trains * share * works_on).astype(np.float32)
    rented_usd = (trains * share * price * cell_h).astype(np.float32)
    begin_rented = (share * np.minimum(1.0, price) * fleet.changeover_h).astype(np.float32)
    begin_bought = ((1 - share) * fleet.changeover_h).astype(np.float32)
    for r in range(1, fleet.time_cells + 1):
        after = np.einsum("pq,mqsw->mpsw", price_moved, costs[r - 1])
        nobody, rented, bought = moved @ after
        spare_h = (r - places) * cell_h
        spot = np.minimum(share, np.clip(spare_h / fleet.kept_h, 0.0, 1.0))
        usd = (1 - spot * (1 - np.minimum(1.0, price))) * cell_h
        bought = _worked(bought, 1 - spot * (1 - fleet.works_on(1.0))) + usd
        rented = _worked(rented, rented_done) + rented_usd
        late = spare_h < fleet.kept_h
        rented[..., late] = np.inf
        nobody[..., late] = np.inf
        trained = np.minimum(rented, bought + begin_bought)
        here = costs[r]
        np.minimum(nobody, trained + begin_rented, out=here[NOBODY])
        # running nodes may be released at any time
        np.minimum(trained, here[NOBODY], out=here[RENTED])
        np.minimum(bought, here[RENTED], out=here[BOUGHT])
        here[..., 0] = 0.0
    return PricedFleetOutlook(terms, costs)


def _worked(costs: NDArray[np.float32], done: NDArray[np.floating]) -> NDArray[np.floating]:
    """Return the costs after `done` cells of work, at most one."""
    found = costs * (1 - done)
    found[..., 1:] += costs[..., :-1] * (done[..., 1:] if done.shape[-1] > 1 else done)
    return found
