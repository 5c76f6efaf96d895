"""Which spot costs a fleet least, and whether it costs less to wait for a lower price. Used by
`fleet.py`.

To wait, all of its spot nodes go, or none is asked for: what is worth it for one is worth it for
all.

Pure.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.controller.choosing import at_work, until_next, usd_per_work
from harness.controller.value import useful_share
from harness.controller.work_prices import (
    CHEAPER_LATER,
    COARSE,
    WORTH_IT,
    WorkPrices,
    as_share,
    coarse_grid,
)
from harness.core.known import SnapshotPace
from harness.core.world import Node, Offer, View, Wait
from harness.market.fluid import FleetTerms
from harness.market.fluid_prices import (
    PricedFleetOutlook,
    PricedFleetTerms,
    priced_fleet_outlook,
)
from harness.market.rates import losses_per_h

PLACES = 32  # so many of the cheapest spot offers are compared


def snapshots_at(view: View, most: int, offer: Offer) -> SnapshotPace:
    """As a fleet there makes them, at the rate at which work is lost there."""
    seen = view.known.capacity.get(offer.name) if offer.spot else None
    return view.known.snapshots(seen, most)


def by_cost(view: View, most: int, spot: Sequence[Offer], work_h: float) -> tuple[Offer, ...]:
    """The best first: by the price of work, and of those with the lowest also by what it is over
    the stay, and by what snapshots and losses there leave of it, as far as that is known."""
    known, found = view.known, sorted(spot, key=usd_per_work)
    if len(found) < 2 or not (known.snapshot_cost_s or moved(view, found[:PLACES])):
        return tuple(found)
    prices = WorkPrices.of(view, found[:PLACES], ())

    def usd(offer: Offer) -> float:
        seen = known.capacity.get(offer.name)
        losses = losses_per_h(seen)
        # a fleet stays as long as one of its nodes does
        price = prices.over(offer, usd_per_work(offer), work_h)
        if not known.snapshot_cost_s:
            return price
        return price / useful_share(known, losses, known.snapshots(seen, most), most)

    return (*sorted(found[:PLACES], key=usd), *found[PLACES:])


def moved(view: View, spot: Iterable[Offer]) -> bool:
    """Was the price of any of these seen to change?"""
    return any(len(view.known.prices.get(offer.name, ())) > 1 for offer in spot)


@dataclass(frozen=True)
class FleetAtPrice:
    """A fleet of `most` nodes. `share`: of it, that spot has, or would have. `rented`: its nodes on
    spot; `among`: their offers, and the spot that may be had now; `dear`: the cheapest on demand.
    `work_h`, `time_h`: what is left of both, in hours of the whole fleet. `terms`: of its costs
    where prices stand still."""

    view: View
    most: int
    share: float
    rented: tuple[Node, ...]
    among: tuple[Offer, ...]
    dear: Offer
    work_h: float
    time_h: float
    terms: FleetTerms

    def lets_go(self) -> bool:
        """Does it cost less to let all spot go, and to begin again when it is cheaper?"""
        if not any(at_work(self.view, node) for node in self.rented):
            return False
        later = self._later
        return later is not None and self._saved(later, later.keep(*self._left)) > 0

    def wait(self) -> Wait | None:
        """Until spot is as cheap as it should be, as long as that takes on average; None: it is, or
        nobody should wait. What it saves is against beginning now, and going on whatever the price
        is."""
        if (later := self._later) is None:
            return None
        if (saved := self._saved(later, later.begin(*self._left))) <= 0:
            return None
        swing, dear_usd = self._prices.swing(self.among), usd_per_work(self.dear)
        assert swing is not None
        on_h = self.work_h + self.terms.changeover_h
        on = on_h * swing.over(self._lowest, self.work_h) / dear_usd
        saved = max(saved, on - later.wait(*self._left))
        until_s = self.view.now_s + 3600 * later.cheaper_in_h(*self._left)
        saved_usd = saved * self.dear.usd_per_h * self.most
        return Wait(until_next(self.view), CHEAPER_LATER, until_s, saved_usd)

    def _saved(self, later: PricedFleetOutlook, now: float) -> float:
        """By nobody being there for a cell of time, in hours of the fleet on demand."""
        return now - later.wait(*self._left) - WORTH_IT * self.terms.changeover_h

    @property
    def _left(self) -> tuple[float, float, float]:
        return self.share, self.work_h, self.time_h

    @functools.cached_property
    def _later(self) -> PricedFleetOutlook | None:
        """What the rest costs where prices wander; None: they stand still, or too little work or
        time is left."""
        swing = self._prices.swing(self.among)
        spare_h = self.time_h - self.work_h - self.terms.changeover_h
        cells = coarse_grid(self.view, self.work_h, self.time_h, spare_h)
        if swing is None or cells is None:
            return None
        dear_usd, (cell_h, work_cells) = usd_per_work(self.dear), cells
        share = as_share(swing, dear_usd)
        fleet = dataclasses.replace(
            self.terms,
            price=share.usual_usd,
            cell_h=cell_h,
            time_cells=COARSE + 1,
            work_cells=work_cells,
        )
        found = priced_fleet_outlook(PricedFleetTerms(fleet, share.swing, share.pull_per_h))
        return dataclasses.replace(found, level=share.level(self._lowest / dear_usd))

    @functools.cached_property
    def _prices(self) -> WorkPrices:
        return WorkPrices.of(self.view, self.among, self.rented)

    @property
    def _lowest(self) -> float:
        """The price of work now on the cheapest of those."""
        return min(map(self._prices.now, self.among))
