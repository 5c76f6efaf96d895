"""The policy for a deadline with several nodes: all available spot, and missing nodes on demand
when that pays. Used by `deadline_policy.py`.

Spot does a piece of work for the same price on one node as on many, so every available spot node
takes part. On demand replaces missing nodes as soon as the rest costs less with it than without
(`controller/forecast/fleet_program.py`), and always when the remaining time just suffices with a
whole fleet: the last call.

Pure.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.controller.forecast.fleet_program import (
    FleetOutlook,
    FleetTerms,
    PricedFleetOutlook,
    PricedFleetTerms,
    fleet_outlook,
    priced_fleet_outlook,
)
from harness.controller.forecast.room_belief import RoomBelief, WatchedRoom
from harness.controller.forecast.spell_rates import losses_per_h
from harness.controller.learning import (
    CHEAPER_LATER,
    COARSE,
    WORTH_IT,
    WorkPrices,
    as_share,
    coarse_grid,
)
from harness.controller.offer_value import useful_share
from harness.core.estimates import CapacitySeen, SnapshotPace
from harness.core.world import (
    LOOK_AGAIN_S,
    Decision,
    Launch,
    Node,
    Offer,
    Terminate,
    View,
    Wait,
    at_work,
    began_s,
    every,
    grid,
    not_at_work,
    open_offers,
    until_next,
    usd_per_work,
)

# The choice of the cheapest spot for a fleet, and of waiting for a lower price.

PLACES = 32  # number of the cheapest spot offers that are compared


def snapshots_at(view: View, most: int, offer: Offer) -> SnapshotPace:
    """Return the snapshot pace of a fleet on `offer`, at the rate at which work is lost there."""
    seen = view.known.capacity.get(offer.name) if offer.spot else None
    return view.known.snapshots(seen, most)


def by_cost(view: View, most: int, spot: Sequence[Offer], work_h: float) -> tuple[Offer, ...]:
    """Return spot offers, the best first: by the price of work. The `PLACES` cheapest are ordered
    by its average over the stay and by the share of useful work that snapshots and losses leave, as
    far as that is known."""
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
    """Return whether the price of any of these offers was seen to change."""
    return any(len(view.known.prices.get(offer.name, ())) > 1 for offer in spot)


@dataclass(frozen=True)
class FleetAtPrice:
    """A fleet of `most` nodes. `share`: share of it that is, or would be, on spot. `rented`: its
    spot nodes; `among`: their offers, and spot that is available now; `dear`: the cheapest on
    demand. `work_h`: hours of work left for the whole fleet; `time_h`: hours left. `terms`: of its
    cost at constant prices."""

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
        """Return whether it costs less to release all spot nodes and begin again when spot is
        cheaper."""
        if not any(at_work(self.view, node) for node in self.rented):
            return False
        later = self._later
        return later is not None and self._saved(later, later.keep(*self._left)) > 0

    def wait(self) -> Wait | None:
        """Return a wait until spot is cheap enough, for as long as that takes on average; None if
        waiting does not pay. Its saving is against beginning now and going on at any price."""
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
        """Return what a wait of one cell saves against `now`, in hours of the fleet on demand."""
        return now - later.wait(*self._left) - WORTH_IT * self.terms.changeover_h

    @property
    def _left(self) -> tuple[float, float, float]:
        return self.share, self.work_h, self.time_h

    @functools.cached_property
    def _later(self) -> PricedFleetOutlook | None:
        """The expected cost of the rest with wandering prices; None if prices do not change, or
        too little work or time is left."""
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
        """The current price of work on the cheapest offer of `among`."""
        return min(map(self._prices.now, self.among))


GRACE_S = 300.0  # for a node that is released to snapshot and leave
SAFE = 1.1  # the usual changeover times this is reserved for the last one
# Prior: preemptions of one node per hour. It weighs as much as so many observed strikes.
USUAL_LOSS_PER_H, USUAL_STRIKES = 0.2, 2.0
# Prior: nodes that are taken at once, on average; it weighs as much as one strike. Of a large fleet
# a strike takes more, but fewer than in proportion: the root of its nodes. Reserves of time do not
# rely on that.
USUAL_AT_ONCE = 1.7
# Time is reserved for this many times the begins that the observed losses would cause.
RESTLESS = 2.0
CELLS, WORK_CELLS, RATIO = 300, 16, 1.3
UNKNOWN_PRICE = 0.3  # of spot, as a share of on demand, where on demand is not offered


@dataclass(frozen=True)
class FleetHours:
    """Hours that are left. `work`: needed by the whole fleet for the rest; `time`: until the
    deadline; `begin`: from the request for a node until it trains; `kept`: reserved for a begin
    after a loss; `lost`: work of the whole fleet that is lost whenever nodes are taken."""

    work: float
    time: float
    begin: float
    kept: float
    lost: float

    def safe(self, share: float, spot: int, strikes: float, idle: float) -> bool:
        """Return whether the rest can still be done on demand in time if `share` of the fleet is
        missing, or lost: at once, or one by one until it is replaced. Each loss of one of the
        `spot` nodes takes the newest work of all, but no work twice. `strikes`: losses in a row
        that are expected at most; `idle`: hours of the whole fleet until all that was asked for is
        at work."""
        one_by_one = share * self.kept + spot * self.lost
        of_all = self.kept + max(1.0, strikes) * self.lost
        return self.time - self.work - idle >= min(one_by_one, of_all)


@dataclass(frozen=True)
class FleetCase:
    """One decision about a fleet of `most` nodes in one place. `rented`: on spot; `bought`: on
    demand; offers (`spot`, `dear`) are those of the place, the cheapest work first. `usual`: the
    share of the fleet that places usually have room for."""

    view: View
    most: int
    hours: FleetHours
    rented: tuple[Node, ...]
    bought: tuple[Node, ...]
    spot: tuple[Offer, ...]
    dear: tuple[Offer, ...]
    usual: float

    @classmethod
    def of(cls, view: View, left: float, offers: Sequence[Offer], usual: float) -> FleetCase:
        """Return the case of the place of these offers. `left`: worker-seconds of work."""
        most = max(1, view.max_nodes - len(view.doubted))
        places = {offer.place for offer in offers}
        nodes = [n for n in sure_nodes(view) if n.offer.place in places]
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
            usual,
        )

    def decide(self) -> Decision:
        room = open_offers(self.view, (*self.dear, *self.spot))
        dear = [o for o in room if not o.spot]
        spot = [o for o in room if o.spot and (not dear or self._pays(o, dear[0]))]
        replaced = self._replaced()
        rented, most = len(self.rented), self.most
        # those on demand that begin beside spot are more than the fleet needs
        missing = max(0, most - (rented + len(self.bought) - len(replaced)))
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
        if dear and (lost := self._may_be_lost()) is not None:
            return self._ask(dear[0], "the last call: on demand, beside spot", lost)
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
        """Return a wait for a lower price, or the release of all nodes for one, if there is time
        enough for a whole fleet on demand and for the losses to come; None otherwise."""
        if self.bought or not self.dear or not moved(self.view, self.spot[:PLACES]):
            return None
        if not self._safe(self.most + 1) or self._short():
            return None
        rooms = open_offers(self.view, self.spot)[:PLACES]
        names = {offer.name for offer in rooms} | {node.offer.name for node in self.rented}
        among = [offer for offer in self.spot if offer.name in names]
        if not among:
            return None
        case = FleetAtPrice(
            self.view,
            self.most,
            len(self.rented) / self.most if self.rented else min(1.0, self.room.usual),
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

    @property
    def on_demand(self) -> bool:
        """Return whether the whole fleet is at work on demand."""
        return not self.rented and sum(at_work(self.view, n) for n in self.bought) >= self.most

    @functools.cached_property
    def most_on_spot(self) -> int:
        """The greatest number of nodes that may be on spot while the others are on demand."""
        return next((n for n in range(self.most, 0, -1) if self._safe(n)), 0)

    def _safe(self, nodes: int, backed: int = 0) -> bool:
        """Return `FleetHours.safe` for `nodes` nodes that are on spot or missing. `backed`: nodes
        on spot besides, whose replacements begin."""
        at_once = self._at_once(USUAL_AT_ONCE)
        begin = self._loss_per_h * self.most / at_once * self.hours.begin
        spot = nodes + backed
        strikes = min(spot / at_once, begin + 2 * math.sqrt(begin))
        return self.hours.safe(nodes / self.most, spot, strikes, self._idle_h)

    @functools.cached_property
    def _idle_h(self) -> float:
        """Hours of the whole fleet until all nodes train, besides those that stand in for
        others."""
        now_s, begin_h = self.view.now_s, SAFE * self.hours.begin
        begun = not_at_work(self.view, self.rented + self.bought)
        alone = [node for node in begun if node.attempt not in self.view.standing_in]
        yet_h = sum(max(0.0, begin_h - (now_s - node.asked_s) / 3600) for node in alone)
        return yet_h / self.most

    def _replaced(self) -> set[int]:
        """Return the nodes that a spot node is about to replace."""
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
        """Release on-demand nodes whose replacements on spot are at work; None without any."""
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
        """Return whether less spare time is left than the losses to come may cost. Once it is
        spent, there is no time for spot any more, however much of it there is."""
        hours = self.hours
        begins = RESTLESS * self._loss_per_h * self.room.usual * hours.time
        losses_h = begins * hours.begin + self._again * self.room.usual * hours.time
        return hours.time - hours.work < hours.kept + losses_h + more_h

    def _missing_usd(self, missing: int) -> float:
        """Return the cost of beginning the missing nodes on demand, in hours of the fleet, plus a
        margin that makes a change worthwhile."""
        return 1.1 * self.hours.begin * missing / self.most

    def _may_be_lost(self) -> Node | None:
        """Return a spot node to be replaced since there is no time any more for the work that goes
        with it; None if there is none."""
        if not self.hours.lost:
            return None
        # a node that is backed by one on demand takes work along, and needs no other begin
        backed = {*self.view.standing_in, *self.view.standing_in.values()}
        alone = [node for node in self.rented if node.attempt not in backed]
        others = len(self.rented) - len(alone)
        return alone[0] if alone and not self._safe(len(alone), others) else None

    def _may_go(self) -> bool:
        """Return whether spot alone will be in time, at less cost."""
        trains = len(self.rented) >= self.view.min_nodes or not self.rented
        return trains and not self._short(2 * self.hours.begin) and self._saved() <= 0

    def _pays(self, offer: Offer, dear: Offer) -> bool:
        """Return whether spot is cheaper even with the fleet's work that preemptions lose."""
        share = self._snapshots.share
        return usd_per_work(offer) * (1 + share) < (1 - self._again) * usd_per_work(dear)

    @functools.cached_property
    def _again(self) -> float:
        """The share of its work that a whole fleet on spot does again, since losses undo it."""
        if not self.spot:
            return 0.0
        # two strikes in a row lose the work between them once
        return 1 - math.exp(-self._strikes_per_h * self._snapshots.lost_s / 3600)

    @functools.cached_property
    def _strikes_per_h(self) -> float:
        """Number of moments per hour at which nodes of a whole fleet on spot are taken here."""
        usual = max(USUAL_AT_ONCE, math.sqrt(self.most))
        return self._loss_per_h * self.most / self._at_once(usual)

    @functools.cached_property
    def _snapshots(self) -> SnapshotPace:
        """The snapshot pace on the best spot offer here."""
        return snapshots_at(self.view, self.most, self.spot[0])

    def _worth_changing(self, bought: Node, offer: Offer) -> bool:
        here, there = usd_per_work(bought.offer), usd_per_work(offer)
        stay_h = min(self.hours.work, 1 / self._loss_per_h)
        return (here - there) * stay_h > 2 * there * self.hours.begin

    @functools.cached_property
    def _loss_per_h(self) -> float:
        node_h, losses = self._node_h
        # nodes that are taken at once are one observation
        weight = USUAL_STRIKES * max(1.0, self._at_once(USUAL_AT_ONCE))
        return (weight + losses) / (weight / USUAL_LOSS_PER_H + node_h)

    def _at_once(self, usual: float) -> float:
        """Return how many nodes are taken at once on average here. `usual`: in other places."""
        losses = sum(seen.losses for seen in self._seen)
        strikes = min(losses, sum(seen.strikes for seen in self._seen))
        return (usual + losses) / (1 + strikes)

    @functools.cached_property
    def _node_h(self) -> tuple[float, int]:
        """(hours that spot nodes were up here in total, number of preemptions)."""
        now_s, begins_s = self.view.now_s, began_s(self.rented)
        node_s = sum([now_s - at_s for at_s in begins_s if at_s is not None and at_s < now_s])
        node_s += sum(seen.node_s for seen in self._seen)
        return node_s / 3600, sum(seen.losses for seen in self._seen)

    @functools.cached_property
    def _seen(self) -> list[CapacitySeen]:
        capacity = self.view.known.capacity
        return [capacity[offer.name] for offer in self.spot if offer.name in capacity]

    @functools.cached_property
    def room(self) -> RoomBelief:
        """The room on spot here. A count changes as fast as nodes are lost and come back."""
        watched = WatchedRoom.of(self._seen, self.most)
        usual = min(0.95, watched.share(self.usual))
        changes_per_h = self._loss_per_h / (1 - usual)
        return RoomBelief.of(self._seen, self.most, self.view.now_s, usual, changes_per_h)

    def _saved(self) -> float:
        outlook, hours = self.outlook(), self.hours
        share = min(1.0, len(self.rented) / self.most)
        return outlook.saved(share, hours.work, hours.time - self.view.known.look_s / 3600)

    def rest_usd(self, share: float, bought: bool, done_h: float, later_h: float) -> float:
        """Return the expected USD for the rest, if `share` of the fleet is on spot here and the
        others are `bought` or missing. It is `later_h` from now, and `done_h` of work are done
        until then."""
        hours, (hour_usd, _) = self.hours, self.prices
        time_h = hours.time - later_h - self.view.known.look_s / 3600
        work_h = max(0.0, hours.work - done_h)
        return self.outlook().rest(bought, min(1.0, share), work_h, time_h) * hour_usd

    @functools.cached_property
    def prices(self) -> tuple[float, float]:
        """USD for an hour of the whole fleet here, on demand and on spot."""
        spot = self.spot[0].usd_per_h if self.spot else math.inf
        dear = self.dear[0].usd_per_h if self.dear else spot / UNKNOWN_PRICE
        return self.most * dear, self.most * min(spot, dear)

    def outlook(self) -> FleetOutlook:
        """Return the expected cost of the rest, at the observed rates."""
        return fleet_outlook(self._terms())

    def _terms(self) -> FleetTerms:
        dear = usd_per_work(self.dear[0]) if self.dear else math.inf
        spot = usd_per_work(self.spot[0]) if self.spot else dear
        view, hours = self.view, self.hours
        cell_h, work_cells = grid(view, hours.work, hours.time, CELLS, WORK_CELLS)
        return FleetTerms(
            _rounded(self._loss_per_h),
            round(self.room.usual, 1),
            view.min_nodes / self.most,
            min(1.0, _rounded(spot / dear, 1.1)) if self.dear else UNKNOWN_PRICE,
            round(hours.begin, 4),
            round(hours.kept, 4),
            cell_h,
            CELLS + 1,
            work_cells,
            round(self._again, 2),
        )


def sure_nodes(view: View) -> tuple[Node, ...]:
    """Return the alive nodes that may stay."""
    if not view.doubted:
        return view.alive
    return tuple(node for node in view.alive if node.attempt not in view.doubted)


def _rounded(value: float, ratio: float = RATIO) -> float:
    return round(ratio ** round(math.log(max(value, 1e-3), ratio)), 4)
