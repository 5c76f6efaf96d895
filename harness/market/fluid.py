"""What the rest of a fleet's work will cost if every later decision is as good as may be: a dynamic
programme over the work and the time that are left, and over the share of the fleet that spot has
room for.

The fleet is a fluid: any share of it may be on spot, which comes and goes at a rate per node, and
what is missing may be made up on demand, all of it or nothing (costs are linear, so nothing between
is better). To begin on demand costs a changeover of what is begun.

Costs are in hours of the whole fleet on demand. Pure.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness.market.lookahead import LATE
from harness.market.wandering import chances, place_below

LEVELS = 5  # of the share on spot: 0, 1/4, ... 1
WITHOUT, WITH = 0, 1  # what is made up on demand
MOST_FLEETS = 64  # tables that are kept


@dataclass(frozen=True)
class FleetTerms:
    """`loss_per_h`: of one node; `share`: of the fleet that spot has on average; `least`: the share
    of the fleet without which nothing is trained. Prices, changeover, cells as in
    `lookahead.Terms`. `kept_h`: the time that must be left over for as much of the fleet as is
    missing, or may be lost at once."""

    loss_per_h: float
    share: float
    least: float
    price: float
    changeover_h: float
    kept_h: float
    cell_h: float
    time_cells: int
    work_cells: int


@dataclass(frozen=True)
class FleetOutlook:
    """Least expected costs: [cells of time left, without or with on demand, level, cells of work
    left]; work is in hours of the whole fleet."""

    terms: FleetTerms
    costs: NDArray[np.float32]

    def saved(self, share: float, work_h: float, time_h: float) -> float:
        """What the rest costs less, in hours of the fleet on demand, with the missing nodes on
        demand from now on than without; `share` of the fleet is on spot."""
        return self._at(WITHOUT, share, work_h, time_h) - self._at(WITH, share, work_h, time_h)

    def _at(self, bought: int, share: float, work_h: float, time_h: float) -> float:
        i, f = place_below(time_h / self.terms.cell_h, self.terms.time_cells)
        j, g = place_below(share * (LEVELS - 1), LEVELS - 1)
        k, h = place_below(work_h / self.terms.cell_h, self.terms.work_cells)
        corner = self.costs[i : i + 2, bought, j : j + 2, k : k + 2].astype(np.float64)
        sides = corner[..., 0] * (1 - h) + corner[..., 1] * h
        edge = sides[:, 0] * (1 - g) + sides[:, 1] * g
        return float(edge[0] * (1 - f) + edge[1] * f)


def drift(terms: FleetTerms) -> NDArray[np.float32]:
    """Chances to go from level to level in one cell: nodes are lost one by one at their rate, and
    come at the one that keeps the average."""
    rate = np.zeros((LEVELS, LEVELS))
    for level in range(LEVELS):
        if level:
            rate[level, level - 1] = terms.loss_per_h * level
        if level < LEVELS - 1:
            # as in a market with ever so many places, of each of which that share is open
            open_per_h = terms.loss_per_h * terms.share / max(0.05, 1 - terms.share)
            rate[level, level + 1] = open_per_h * (LEVELS - 1 - level)
    np.fill_diagonal(rate, -rate.sum(axis=1))
    found: NDArray[np.float32] = chances(rate, terms.cell_h).astype(np.float32)
    return found


@functools.lru_cache(maxsize=MOST_FLEETS)
def fleet_outlook(terms: FleetTerms) -> FleetOutlook:
    """Solve it, backwards over time."""
    works, cell_h = terms.work_cells + 1, terms.cell_h
    costs = np.empty((terms.time_cells + 1, 2, LEVELS, works), np.float32)
    costs[0] = LATE * cell_h * np.arange(works)
    moved = drift(terms)
    shares = np.linspace(0.0, 1.0, LEVELS)
    begin = ((1 - shares) * terms.changeover_h).astype(np.float32)[:, None]
    places = np.arange(works, dtype=np.float64)
    # every loss costs the work of a begin
    works_on = 1 - min(0.5, terms.loss_per_h * terms.changeover_h)
    for r in range(1, terms.time_cells + 1):
        after = np.einsum("ij,bjw->biw", moved, costs[r - 1])
        spare_h = (r - places) * cell_h
        safe = np.clip(spare_h / terms.kept_h, 0.0, 1.0)
        both = costs[r]
        for level, share in enumerate(shares):
            spot = np.minimum(share, safe)
            done, usd = 1 - spot * (1 - works_on), 1 - spot * (1 - terms.price)
            on = np.interp(places - done, places, after[WITH, level]) + usd * cell_h
            trains = share >= terms.least - 1e-9
            done, usd = (share * works_on, share * terms.price) if trains else (0.0, 0.0)
            off = np.interp(places - done, places, after[WITHOUT, level]) + usd * cell_h
            off[spare_h < terms.kept_h] = np.inf
            # what is on demand may be let go at any time; to begin it costs
            both[WITHOUT, level] = np.minimum(off, on + begin[level])
            both[WITH, level] = np.minimum(on, both[WITHOUT, level])
        both[:, :, 0] = 0.0
    return FleetOutlook(terms, costs)
