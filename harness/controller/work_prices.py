"""Prices of work on spot, as a run has seen them: what it costs now, on average in the next hours,
and how it wanders. What waits for a lower price are decided by, of one node and of a fleet.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.controller.choosing import grid, usd_per_work
from harness.core.world import Node, Offer, View
from harness.market.wandering import PricePath, PriceSwing, cheapest, swing_of

CHEAPER_LATER = "spot will be cheaper in time: waiting costs less"
# to let nodes go and begin again later must save at least so many begins on demand
WORTH_IT = 0.1
# Of tables with prices that wander, each level of which takes as much time as a table without. So
# many of their cells must be left of work, and to spare, for a wait for a lower price.
COARSE, COARSE_WORK, LEAST_WORK, LEAST_SPARE = 120, 12, 2, 8
# rounding, so that decisions that are nearly the same share what is computed
PRICE_RATIO, SWING_RATIO = 1.1, 1.25


@dataclass(frozen=True)
class WorkPrices:
    """USD for what one worker of speed 1 does in an hour. `offered`: by name, as they are now: the
    spot that is thought about, and what nodes are on."""

    view: View
    offered: Mapping[str, Offer]

    @classmethod
    def of(cls, view: View, spot: Sequence[Offer], nodes: Sequence[Node]) -> WorkPrices:
        found = {offer.name: offer for offer in spot}
        for held in {node.offer.name for node in nodes} - {*found}:
            found |= {offer.name: offer for offer in view.offers if offer.name == held}
        return cls(view, found)

    def now(self, offer: Offer) -> float:
        """A node goes by the price of its offer."""
        return usd_per_work(self.offered.get(offer.name, offer))

    def over(self, offer: Offer, usd: float, hours: float) -> float:
        """What it costs there on average in the next hours, if it costs `usd` now."""
        path = self._path(offer)
        return swing_of(path, self._until_h).over(usd, hours) if len(path) > 1 else usd

    def swing(self, among: Iterable[Offer]) -> PriceSwing | None:
        """How the price wanders on the cheapest of those; None: it was not seen to."""
        names = {offer.name: offer for offer in among}
        found = tuple(path for offer in names.values() if (path := self._path(offer)))
        if not any(len(path) > 1 for path in found):
            return None
        swing = swing_of(cheapest(found), self._until_h)
        return swing if swing.swing else None

    def _path(self, offer: Offer) -> PricePath:
        """As far as it was seen."""
        path = self.view.known.prices.get(offer.name, ())
        of_node = offer.speed * offer.workers
        return path if of_node == 1.0 else tuple((t, usd / of_node) for t, usd in path)

    @property
    def _until_h(self) -> int:
        return math.ceil(self.view.now_s / 3600)


def as_share(swing: PriceSwing, dear_usd: float) -> PriceSwing:
    """Of what work costs on demand; rounded."""
    return PriceSwing(
        rounded(swing.usual_usd / dear_usd, PRICE_RATIO),
        rounded(swing.swing, SWING_RATIO),
        rounded(swing.pull_per_h, SWING_RATIO),
    )


def coarse_grid(
    view: View, work_h: float, time_h: float, spare_h: float
) -> tuple[float, int] | None:
    """Of a table with prices that wander (`choosing.grid`); None: so little work is left, or time
    to spare, that nobody should wait for a lower price."""
    cell_h, work_cells = grid(view, work_h, time_h, COARSE, COARSE_WORK)
    enough = work_h >= LEAST_WORK * cell_h and spare_h >= LEAST_SPARE * cell_h
    return (cell_h, work_cells) if enough else None


def rounded(value: float, ratio: float) -> float:
    """To a power of it; 0 stays 0."""
    return round(ratio ** round(math.log(value, ratio)), 4) if value > 0 else 0.0
