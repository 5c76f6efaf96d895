"""A deadline with several nodes: all the spot that can be had, and on demand what is missing when
the work that is left is worth it. Used by `deadline.py`.

Spot does a piece of work for the same price on one node as on many, so as many as there are take
part. On demand makes up for what is missing as soon as the rest costs less with it than without
(`market/fluid.py`), and always when the time that is left just suffices with a whole fleet: the
last call.

Pure.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from harness.controller.choosing import (
    LOOK_AGAIN_S,
    at_work,
    began_s,
    every,
    grid,
    not_at_work,
    open_offers,
    until_next,
    usd_per_work,
)
from harness.controller.fleet_prices import PLACES, FleetAtPrice, by_cost, moved, snapshots_at
from harness.controller.work_prices import CHEAPER_LATER
from harness.core.world import Decision, Launch, Node, Offer, Terminate, View, Wait
from harness.market.fluid import FleetOutlook, FleetTerms, fleet_outlook

GRACE_S = 300.0  # for a node that is released to snapshot and leave
SAFE = 1.1  # times the usual changeover is kept back for the last one
# What is usual of one node: taken so often an hour; and the share of a fleet that spot has. Each
# counts for so much of what is seen.
USUAL_LOSS_PER_H, USUAL_LOSSES = 0.2, 2.0
USUAL_SHARE, USUAL_SHARE_H = 0.6, 6.0
# A market may be so many times as restless as it was: time is kept for as many begins.
RESTLESS = 2.0
CELLS, WORK_CELLS, RATIO = 300, 16, 1.3


@dataclass(frozen=True)
class FleetHours:
    """`work`: what the whole fleet needs for the rest; `time`: until the deadline; `begin`: from
    asking for a node until it trains; `kept`: what is kept back for a begin after a loss; `lost`:
    of everybody's work, with each node that is taken."""

    work: float
    time: float
    begin: float
    kept: float
    lost: float

    def safe(self, share: float, rented: int) -> bool:
        """May that share of the fleet be missing, or lost at once, or `rented` nodes one after the
        other, and the rest still be done on demand in time?"""
        return self.time - self.work >= share * self.kept + rented * self.lost


@dataclass(frozen=True)
class FleetCase:
    """One decision about a fleet of `most` nodes. `rented`: on spot; `bought`: on demand; offers
    are of the place where the fleet is, the cheapest work first."""

    view: View
    most: int
    hours: FleetHours
    rented: tuple[Node, ...]
    bought: tuple[Node, ...]
    spot: tuple[Offer, ...]
    dear: tuple[Offer, ...]

    @classmethod
    def of(cls, view: View, left: float) -> FleetCase:
        most = max(1, view.max_nodes - len(view.doubted))
        doubted = view.doubted
        nodes = [n for n in view.alive if n.attempt not in doubted] if doubted else view.alive
        offers = _here(view, nodes)
        one = min([o for o in offers if not o.spot] or offers, key=usd_per_work)
        ranks = most * one.workers
        work_h = left / (3600 * one.speed * ranks * view.known.efficiency(ranks))
        time_h = ((view.known.deadline_s or 0.0) - view.now_s) / 3600
        begin_h = max(view.known.changeover_s, view.launch_s) / 3600
        kept_h = SAFE * begin_h + view.known.look_s / 3600
        return cls(
            view,
            most,
            FleetHours(work_h, time_h, begin_h, kept_h, view.known.lost_s / 3600),
            tuple(n for n in nodes if n.offer.spot),
            tuple(n for n in nodes if not n.offer.spot),
            by_cost(view, most, [o for o in offers if o.spot], work_h),
            tuple(sorted((o for o in offers if not o.spot), key=usd_per_work)),
        )

    def decide(self) -> Decision:
        room = open_offers(self.view, (*self.dear, *self.spot))
        dear = [o for o in room if not o.spot]
        spot = [o for o in room if o.spot and (not dear or self._pays(o, dear[0]))]
        replaced = self._replaced()
        rented, most = len(self.rented), self.most
        missing = most - (rented + len(self.bought) - len(replaced))
        if done := self._settled():
            return done
        if cheaper_later := self._for_price():
            return cheaper_later
        if spot and missing > 0 and (self._safe(rented + missing + 1) or not dear):
            return self._ask(spot[0], "spot has room for more of the fleet")
        if missing > 0 and dear:
            if not self._safe(rented + missing):
                return self._ask(dear[0], "the last call: a whole fleet")
            idle = 0 < len(self.rented) < self.view.min_nodes  # paid for, and too few to train
            if idle or self._short() or self._saved() > self._missing_usd(missing):
                why = "what is left costs less with the missing nodes on demand"
                return self._ask(dear[0], why)
        free = [node for node in self.bought if node.attempt not in replaced]
        if free and spot and self._safe(rented + missing + 1):
            if self._worth_changing(free[-1], spot[0]):
                return self._ask(spot[0], "spot instead of on demand", free[-1])
        elif free and self._may_go():
            return Terminate(
                free[-1].attempt, "spot alone will be in time, and costs less", GRACE_S
            )
        return Wait(until_next(self.view), "the fleet is as it should be")

    def _for_price(self) -> Decision | None:
        """Nobody stays, or begins, while spot is dear and there is time enough: for a whole fleet
        on demand, and for the losses to come."""
        if self.bought or not self.dear:
            return None
        if not self._safe(self.most + 1) or not moved(self.view, self.spot) or self._short():
            return None
        rooms = open_offers(self.view, self.spot)[:PLACES]
        names = {offer.name for offer in rooms} | {node.offer.name for node in self.rented}
        among = [offer for offer in self.spot if offer.name in names]
        if not among:
            return None
        case = FleetAtPrice(
            self.view,
            self.most,
            len(self.rented) / self.most if self.rented else min(1.0, self._share()),
            self.rented,
            tuple(among),
            self.dear[0],
            self.hours.work,
            self.hours.time - self.view.known.look_s / 3600,
            self._terms(),
        )
        if not self.rented:
            return case.wait()
        if not case.lets_go():
            return None
        first, *others = (node.attempt for node in self.rented)
        return Terminate(first, CHEAPER_LATER, GRACE_S, tuple(others))

    def _safe(self, nodes: int) -> bool:
        """... when so many are on spot or missing, and some have yet to begin."""
        missing = nodes + self._begun
        return self.hours.safe(missing / self.most, min(nodes, len(self.rented) + 1))

    @functools.cached_property
    def _begun(self) -> int:
        """How many have yet to begin, besides those that stand in for others."""
        begun = not_at_work(self.view, self.rented + self.bought)
        return sum(node.attempt not in self.view.standing_in for node in begun)

    def _replaced(self) -> set[int]:
        """Nodes in whose stead a spot node is there."""
        stand_ins = self.view.standing_in
        rented = {node.attempt for node in self.rented} if stand_ins else set[int]()
        return {old for new, old in stand_ins.items() if new in rented}

    # ---- parts of it -----------------------------------------------------------------------------
    def _ask(self, offer: Offer, why: str, beside: Node | None = None) -> Decision:
        if beside is None and len(self.view.alive) >= self.view.max_nodes + len(
            self.view.standing_in
        ):
            return Wait(LOOK_AGAIN_S, "all nodes are there")
        why += every(snapshots_at(self.view, self.most, offer).interval_s)
        return Launch(offer, why, None if beside is None else beside.attempt)

    def _settled(self) -> Decision | None:
        """Nodes on demand go when the spot nodes that stand in for them are at work."""
        if not self.view.standing_in:
            return None
        there = {node.attempt for node in self.bought}
        done = [
            self.view.standing_in[node.attempt]
            for node in self.rented
            if self.view.standing_in.get(node.attempt) in there and at_work(self.view, node)
        ]
        if not done:
            return None
        why = "the spot node in its stead is at work"
        return Terminate(done[0], why, GRACE_S, tuple(done[1:]))

    def _short(self, more_h: float = 0.0) -> bool:
        """Is less time left over than the losses to come may cost? Without it there would be no
        more time for spot, however much of it there is."""
        hours = self.hours
        begins = RESTLESS * self._loss_per_h * self._share() * hours.time
        losses_h = begins * (hours.begin + self.most * hours.lost)
        return hours.time - hours.work < hours.kept + losses_h + more_h

    def _missing_usd(self, missing: int) -> float:
        """Of beginning them on demand, in hours of the fleet; with what makes it worth a change."""
        return 1.1 * self.hours.begin * missing / self.most

    def _may_go(self) -> bool:
        """Will spot alone be in time, at less cost?"""
        trains = len(self.rented) >= self.view.min_nodes or not self.rented
        return trains and not self._short(2 * self.hours.begin) and self._saved() <= 0

    def _pays(self, offer: Offer, dear: Offer) -> bool:
        """Is spot cheaper when everybody's work is counted that goes with a node that is taken?"""
        pace = snapshots_at(self.view, self.most, offer)
        again = self._loss_per_h * self.most * pace.lost_s / 3600
        return usd_per_work(offer) * (1 + pace.share) < (1 - again) * usd_per_work(dear)

    def _worth_changing(self, bought: Node, offer: Offer) -> bool:
        here, there = usd_per_work(bought.offer), usd_per_work(offer)
        stay_h = min(self.hours.work, 1 / self._loss_per_h)
        return (here - there) * stay_h > 2 * there * self.hours.begin

    @functools.cached_property
    def _loss_per_h(self) -> float:
        node_h, losses = self._node_h
        return (USUAL_LOSSES + losses) / (USUAL_LOSSES / USUAL_LOSS_PER_H + node_h)

    @functools.cached_property
    def _node_h(self) -> tuple[float, int]:
        """Hours that spot nodes were up here, added up, and how many were taken."""
        now_s, begins_s = self.view.now_s, began_s(self.rented)
        node_s = sum([now_s - at_s for at_s in begins_s if at_s is not None and at_s < now_s])
        losses = 0
        for offer in self.spot:
            if seen := self.view.known.capacity.get(offer.name):
                node_s, losses = node_s + seen.node_s, losses + seen.losses
        return node_s / 3600, losses

    def _share(self) -> float:
        """Of the fleet, that spot has had on average."""
        node_h, _ = self._node_h
        ran_h = max(0.0, self.view.now_s - self.view.started_s) / 3600
        seen = min(self.most * ran_h, node_h)
        return (USUAL_SHARE * USUAL_SHARE_H * self.most + seen) / (
            self.most * (USUAL_SHARE_H + ran_h)
        )

    def _saved(self) -> float:
        outlook, hours = self.outlook(), self.hours
        share = min(1.0, len(self.rented) / self.most)
        return outlook.saved(share, hours.work, hours.time - self.view.known.look_s / 3600)

    def outlook(self) -> FleetOutlook:
        """What the rest costs, at the rates that were seen."""
        return fleet_outlook(self._terms())

    def _terms(self) -> FleetTerms:
        dear = usd_per_work(self.dear[0]) if self.dear else math.inf
        spot = usd_per_work(self.spot[0]) if self.spot else dear
        view, hours = self.view, self.hours
        cell_h, work_cells = grid(view, hours.work, hours.time, CELLS, WORK_CELLS)
        return FleetTerms(
            _rounded(self._loss_per_h),
            round(min(0.95, self._share()), 1),
            view.min_nodes / self.most,
            min(1.0, _rounded(spot / dear, 1.1)) if self.dear else 0.3,
            round(hours.begin, 4),
            round(hours.kept, 4),
            cell_h,
            CELLS + 1,
            work_cells,
        )


def fleet(view: View, left: float) -> Decision:
    """`left`: worker-seconds of work that is still to be done."""
    if not view.offers:
        return Wait(LOOK_AGAIN_S, "nothing is offered")
    return FleetCase.of(view, left).decide()


def _here(view: View, nodes: Sequence[Node]) -> list[Offer]:
    """The offers of the place where most of the fleet is; of all places while there is none."""
    if not nodes:
        return list(view.offers)
    places = Counter([n.offer.place for n in nodes])
    home = max(places, key=places.__getitem__)
    return [o for o in view.offers if o.place == home] or list(view.offers)


def _rounded(value: float, ratio: float = RATIO) -> float:
    return round(ratio ** round(math.log(max(value, 1e-3), ratio)), 4)
