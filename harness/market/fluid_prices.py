"""What the rest of a fleet's work will cost where prices of spot wander: the programme of
`fluid.py`, in which the fleet may also leave spot for as long as it is dear.

The price has the levels of `wandering.py`. While nobody is there, the room that spot has goes on
changing as it does for a fleet that is. To come back costs a changeover of what spot has room for.

Costs are in hours of the whole fleet on demand. Pure.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness.market.fluid import LEVELS, FleetTerms, drift
from harness.market.lookahead import LATE
from harness.market.wandering import (
    hours_until_one,
    level_after,
    level_factor,
    level_factors,
    level_moves,
    place_below,
)

NOBODY, RENTED, BOUGHT = 0, 1, 2  # who is there: nobody, spot, and on demand for what is missing
MOST_PRICED = 16  # tables that are kept


@dataclass(frozen=True)
class PricedFleetTerms:
    """`fleet`: its price is what spot usually costs. `swing`, `pull_per_h`: how it wanders around
    that (`wandering.PriceSwing`)."""

    fleet: FleetTerms
    swing: float
    pull_per_h: float


@dataclass(frozen=True)
class PricedFleetOutlook:
    """Least expected costs: [cells of time left, who is there, level of the price, level of spot's
    share, cells of work left]. `level`: of the price now."""

    terms: PricedFleetTerms
    costs: NDArray[np.float32]
    level: float = 0.0

    @property
    def price(self) -> float:
        """Of spot, now, as a share of on demand."""
        return self.terms.fleet.price * level_factor(self.terms.swing, self.level)

    def begin(self, share: float, work_h: float, time_h: float) -> float:
        """Take the share of the fleet that spot has room for, keep it for a cell of time, and then
        do what is best."""
        begin_h = self.terms.fleet.changeover_h
        begun = share * self.price * begin_h
        return begun + self.keep(share, work_h, time_h - begin_h)

    def keep(self, share: float, work_h: float, time_h: float) -> float:
        """Go on with that share on spot for a cell of time, and then do what is best."""
        fleet = self.terms.fleet
        spot_h = share * fleet.cell_h if share >= fleet.least - 1e-9 else 0.0
        done_h = spot_h * _works_on(fleet)
        return spot_h * self.price + self._after(RENTED, share, work_h - done_h, time_h)

    def wait(self, share: float, work_h: float, time_h: float) -> float:
        """Have nobody there for a cell of time, and then do what is best."""
        return self._after(NOBODY, share, work_h, time_h)

    def cheaper_in_h(self, share: float, work_h: float, time_h: float) -> float:
        """How long it takes on average until the price is one at which spot is begun; not longer
        than the time that there is to spare."""
        begins = []
        for level in range(len(level_factors(self.terms.swing))):
            at = dataclasses.replace(self, level=float(level))
            begins.append(at.begin(share, work_h, time_h) <= at.wait(share, work_h, time_h))
        spare_h = max(0.0, time_h - work_h - self.terms.fleet.changeover_h)
        return hours_until_one(self.terms.pull_per_h, self.level, begins, spare_h)

    def _after(self, there: int, share: float, work_h: float, time_h: float) -> float:
        """What the rest costs in a cell of time, on average."""
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
    """Solve it, backwards over time."""
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
    rented_done = (trains * share * _works_on(fleet)).astype(np.float32)
    rented_usd = (trains * share * price * cell_h).astype(np.float32)
    begin_rented = (share * np.minimum(1.0, price) * fleet.changeover_h).astype(np.float32)
    begin_bought = ((1 - share) * fleet.changeover_h).astype(np.float32)
    for r in range(1, fleet.time_cells + 1):
        after = np.einsum("pq,mqsw->mpsw", price_moved, costs[r - 1])
        nobody, rented, bought = moved @ after
        spare_h = (r - places) * cell_h
        spot = np.minimum(share, np.clip(spare_h / fleet.kept_h, 0.0, 1.0))
        usd = (1 - spot * (1 - np.minimum(1.0, price))) * cell_h
        bought = _worked(bought, 1 - spot * (1 - _works_on(fleet))) + usd
        rented = _worked(rented, rented_done) + rented_usd
        late = spare_h < fleet.kept_h
        rented[..., late] = np.inf
        nobody[..., late] = np.inf
        trained = np.minimum(rented, bought + begin_bought)
        here = costs[r]
        np.minimum(nobody, trained + begin_rented, out=here[NOBODY])
        # who is there may be let go at any time
        np.minimum(trained, here[NOBODY], out=here[RENTED])
        np.minimum(bought, here[RENTED], out=here[BOUGHT])
        here[..., 0] = 0.0
    return PricedFleetOutlook(terms, costs)


def _works_on(fleet: FleetTerms) -> float:
    """Every loss costs the work of a begin: the share of its work that spot gets done."""
    return 1 - min(0.5, fleet.loss_per_h * fleet.changeover_h)


def _worked(costs: NDArray[np.float32], done: NDArray[np.floating]) -> NDArray[np.floating]:
    """When so many cells of work are done, at most one."""
    found = costs * (1 - done)
    found[..., 1:] += costs[..., :-1] * (done[..., 1:] if done.shape[-1] > 1 else done)
    return found
