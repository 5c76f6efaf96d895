"""The choice of the place where a fleet with a deadline works, and of the moment of a move. Used by
`deadline_policy.py`; `fleet_policy.py` decides what the fleet does in one place.

A place is worth what the rest of the run is expected to cost there, in USD: at its prices, with the
room that it is believed to have (`forecast/room_belief.py`), and with on demand for what that is
short of. The fleet asks another place only when its own has no room for more. It goes on working
meanwhile, and leaves as soon as enough nodes are ready there; a place that has too few is left
alone until what was seen of it is forgotten. A fleet on demand moves without a pause, and so also
where little time is left: with as many nodes on spot as may be lost there, and the others on
demand.

Pure.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.controller.fleet_policy import GRACE_S, FleetCase, sure_nodes
from harness.controller.forecast.room_belief import USUAL_SHARE, USUAL_SHARE_H, WatchedRoom
from harness.controller.learning import WORTH_IT
from harness.controller.offer_value import Worth
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
    open_offers,
    usd_per_work,
)

MOST_COMPARED = 16  # places, those with the cheapest spot
# A move begins only if so many begins are still in time after it, besides the last call.
BEGINS_TO_SPARE = 2.0


def fleet(view: View, left: float) -> Decision:
    """Decide for a fleet with a deadline. `left`: worker-seconds of work that remain."""
    if not view.offers:
        return Wait(LOOK_AGAIN_S, "nothing is offered")
    return FleetPlaces(view, left).decide()


def offers_at_home(view: View) -> tuple[Offer, ...]:
    """Return the offers of the place where the run's nodes are; all offers without nodes."""
    home = home_of(view, sure_nodes(view)) if view.alive else None
    return view.offers if home is None else tuple(o for o in view.offers if o.place == home)


def home_of(view: View, nodes: Sequence[Node]) -> str | None:
    """Return the place of the world that trains: of its oldest node; without nodes, of the spot
    node that was up last. None: no node was up yet."""
    if nodes:
        return min(nodes, key=lambda n: (n.up_s is None, n.attempt)).offer.place
    seen = view.known.capacity
    been = [o for o in view.offers if o.name in seen and seen[o.name].node_s > 0]
    return max(been, key=lambda o: seen[o.name].seen_s).place if been else None


@dataclass(frozen=True)
class FleetPlaces:
    """One decision about a fleet that may go from place to place."""

    view: View
    left: float

    def decide(self) -> Decision:
        nodes = sure_nodes(self.view)
        home = home_of(self.view, nodes)
        away = [node for node in nodes if node.offer.place != home]
        if away and home is not None:
            return self._moving(self._case(home), away)
        if home is None or not (nodes or home in self._by_place):
            return self._first()
        here = self._case(home)
        if len(self._by_place) > 1 and (place := self._better(here)) is not None:
            why = "the rest is expected to cost less in another place"
            return Launch(open_offers(self.view, place.spot)[0], why)
        return here.decide()

    # ---- the places ------------------------------------------------------------------------------
    @functools.cached_property
    def _by_place(self) -> dict[str, list[Offer]]:
        """The offers of each place."""
        found: dict[str, list[Offer]] = {}
        for offer in self.view.offers:
            found.setdefault(offer.place, []).append(offer)
        return found

    @functools.cached_property
    def _usual(self) -> float:
        """The share of a fleet that the places of this run usually had room for."""
        capacity, most = self.view.known.capacity, self.view.max_nodes
        each = (
            WatchedRoom.of([capacity[o.name] for o in offers if o.name in capacity], most)
            for offers in self._by_place.values()
        )
        # a place that was watched for long counts no more than the prior does
        found = WatchedRoom()
        for one in each:
            weight = min(1.0, USUAL_SHARE_H / one.hours) if one.hours else 0.0
            found += WatchedRoom(one.share_h * weight, one.hours * weight)
        return found.share(USUAL_SHARE)

    def _case(self, place: str) -> FleetCase:
        if offers := self._by_place.get(place):
            return FleetCase.of(self.view, self.left, offers, self._usual)
        # offers of nodes that are there may be hidden by wrappers: nothing can be had there
        hidden = {n.offer.name: n.offer for n in self.view.alive if n.offer.place == place}
        blocked = {**self.view.blocked, **dict.fromkeys(hidden, math.inf)}
        view = dataclasses.replace(self.view, blocked=blocked)
        return FleetCase.of(view, self.left, [*hidden.values()], self._usual)

    def _others(self, home: str | None) -> list[FleetCase]:
        """Return the places besides `home` that may have room, those with the cheapest spot."""
        spot = {p: [o for o in offers if o.spot] for p, offers in self._by_place.items()}
        names = [p for p, offers in spot.items() if p != home and open_offers(self.view, offers)]
        names.sort(key=lambda place: min(map(usd_per_work, spot[place])))
        return [self._case(place) for place in names[:MOST_COMPARED]]

    # ---- decisions -------------------------------------------------------------------------------
    def _first(self) -> Decision:
        """Decide where nothing was up yet: the place with the least expected cost is asked."""
        every = FleetCase.of(self.view, self.left, self.view.offers, self._usual)
        decision = every.decide()
        if len(self._by_place) < 2 or not isinstance(decision, Launch) or not decision.offer.spot:
            return decision
        best = min(self._others(None), key=self._expected_usd, default=None)
        return best.decide() if best is not None else decision

    def _better(self, here: FleetCase) -> FleetCase | None:
        """Return the place where the rest is expected to cost less, the move included; None: it is
        best to stay, or there is no time for a move."""
        missing = here.most - len(here.rented)
        if missing > 0 and open_offers(here.view, here.spot):
            return None  # nobody knows yet how much room there is here
        hours = here.hours
        late = hours.time - hours.work < hours.kept + (1 + BEGINS_TO_SPARE) * hours.begin
        if self.view.standing_in or (late and not (here.on_demand and here.most_on_spot)):
            return None
        stay_usd = self._stay_usd(here)
        best, most_usd = None, 0.0
        for place in self._others(self._name(here)):
            gain_usd = self._gain_usd(here, place, stay_usd)
            if gain_usd > most_usd:
                best, most_usd = place, gain_usd
        return best

    def _moving(self, here: FleetCase, away: list[Node]) -> Decision:
        """Decide while nodes (`away`) are made ready in another place."""
        place = min(away, key=lambda n: (n.up_s is None, n.attempt)).offer.place
        odd = [node for node in away if node.offer.place != place]
        if odd:
            return Terminate(odd[0].attempt, "the others cannot reach it", also=_numbers(odd[1:]))
        there, hours = self._case(place), here.hours
        ready = all(at_work(self.view, node) for node in away)
        spare_h = hours.time - hours.work - hours.kept
        late = not ready and spare_h < hours.begin
        spot = sum(node.offer.spot for node in away)
        share = spot / here.most
        if here.on_demand:
            late = False  # it works on until the others are ready
        if not late and len(away) < here.most and (room := self._room(here, there, spot)):
            return Launch(room[0], "the whole fleet goes there")
        if late or self._there_usd(here, there, share, self._yet_h(away, hours.begin)) >= (
            self._stay_usd(here)
        ):
            why = "the last call comes before a move" if late else "too few nodes can be had there"
            return Terminate(away[0].attempt, why, 0.0, _numbers(away[1:]))
        nodes = [n for n in sure_nodes(self.view) if n.offer.place == self._name(here)]
        if ready or not any(at_work(self.view, node) for node in nodes):
            why = "the whole fleet goes on in another place"
            return Terminate(nodes[0].attempt, why, GRACE_S, _numbers(nodes[1:]))
        return Wait(LOOK_AGAIN_S, "another place is made ready")

    # ---- expected costs --------------------------------------------------------------------------
    @staticmethod
    def _name(case: FleetCase) -> str:
        return (case.spot or case.dear)[0].place

    def _yet_h(self, nodes: Sequence[Node], begin_h: float) -> float:
        """Return the hours until all of these nodes train."""
        asked_s = max((n.asked_s for n in nodes if not at_work(self.view, n)), default=None)
        if asked_s is None:
            return 0.0
        return max(0.0, begin_h - (self.view.now_s - asked_s) / 3600)

    def _stay_usd(self, here: FleetCase) -> float:
        """Return the expected cost of the rest in the fleet's own place."""
        share, yet_h = len(here.rented) / here.most, self._yet_h(here.rented, here.hours.begin)
        begun_usd = share * here.prices[1] * yet_h
        return begun_usd + here.rest_usd(share, bool(here.bought), 0.0, yet_h)

    def _room(self, here: FleetCase, there: FleetCase, spot: int) -> list[Offer]:
        """Return what may be asked for there, beside so many nodes on `spot`. A fleet on demand has
        as many of those there as are safe, and the others on demand."""
        most = here.most_on_spot if here.on_demand else here.most
        room = open_offers(self.view, there.spot) if spot < most else []
        return room or (open_offers(self.view, there.dear) if here.on_demand and spot else [])

    def _there_usd(self, here: FleetCase, there: FleetCase, share: float, begin_h: float) -> float:
        """Return the expected cost of the rest if `share` of the fleet begins there, and works here
        until then; with the others on demand if all of it is on demand here."""
        work = [node for node in (*here.rented, *here.bought) if at_work(self.view, node)]
        meanwhile_usd = sum(node.usd_per_h for node in (*here.rented, *here.bought)) * begin_h
        begun_usd = share * there.prices[1] * begin_h
        if here.on_demand:
            begun_usd += (1 - share) * there.prices[0] * begin_h
        done_h = len(work) / here.most * begin_h
        rest_usd = there.rest_usd(share, here.on_demand, done_h, begin_h)
        return meanwhile_usd + begun_usd + rest_usd

    def _gain_usd(self, here: FleetCase, there: FleetCase, stay_usd: float) -> float:
        """Return what it is worth to ask another place: what a move saves, where enough nodes can
        be had there, less what is paid for those that are too few."""
        begin_h, gain_usd = there.hours.begin, 0.0
        move_usd = self._worth.move_usd(there.spot[0]) + WORTH_IT * begin_h * here.prices[1]
        most = here.most_on_spot / here.most if here.on_demand else 1.0
        for room, chance in there.room.chances():
            share = min(room, most)
            if share <= 0 or chance <= 0.01:
                continue
            usd = self._there_usd(here, there, share, begin_h) + move_usd
            tried_usd = share * there.prices[1] * begin_h
            gain_usd += chance * max(stay_usd - usd, -tried_usd)
        return gain_usd

    def _expected_usd(self, there: FleetCase) -> float:
        """Return the expected cost of all of the work there."""
        begin_h = there.hours.begin
        return sum(
            chance
            * (share * there.prices[1] * begin_h + there.rest_usd(share, False, 0.0, begin_h))
            for share, chance in there.room.chances()
            if chance > 0.01
        )

    @functools.cached_property
    def _worth(self) -> Worth:
        view = self.view
        home = view.known.home or home_of(view, sure_nodes(view)) or ""
        return Worth(dataclasses.replace(view, known=dataclasses.replace(view.known, home=home)))


def _numbers(nodes: Sequence[Node]) -> tuple[int, ...]:
    return tuple(node.attempt for node in nodes)
