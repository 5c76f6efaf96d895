"""The policy `deadline`: finish in time at the least expected cost, on spot or on demand, here or
elsewhere, now or later.

The last call has priority: when the remaining time just suffices to begin on demand and to do the
rest there, that is decided. Until then the alternatives are compared by the expected cost of the
rest of the run (`controller/forecast/dynamic_program.py`), at the rates at which capacity was seen
to come and go (`controller/forecast/spell_rates.py`) and prices to wander
(`controller/forecast/price_process.py`). Capacity of a place is only found out by requesting a
machine.

While the remaining work is unknown (no step was timed, and the user gave no estimate), nodes are
kept up so that it becomes known. Without a deadline the cheapest available work is taken.

Pure.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from harness.controller.fleet_moves import fleet, offers_at_home
from harness.controller.fleet_policy import GRACE_S, SAFE
from harness.controller.forecast import dynamic_program
from harness.controller.forecast.dynamic_program import OPEN, Outlook, SpellRates, Terms, class_of
from harness.controller.forecast.price_process import PriceSwing
from harness.controller.forecast.spell_rates import (
    USUAL_ENDS_PER_H,
    Ends,
    closings,
    shut_since,
    spell_rates,
)
from harness.controller.learning import (
    CHEAPER_LATER,
    COARSE,
    PRICE_RATIO,
    WORTH_IT,
    WorkPrices,
    as_share,
    coarse_grid,
    rounded,
)
from harness.controller.offer_value import staying
from harness.core.estimates import CapacitySeen, SnapshotPace
from harness.core.world import (
    LOOK_AGAIN_S,
    BadInput,
    Decision,
    Launch,
    Node,
    Offer,
    Policy,
    Terminate,
    View,
    Wait,
    at_work,
    every,
    fill,
    grid,
    meeting_place,
    open_offers,
    until_next,
    usd_per_work,
)

PLACES = 32  # number of the cheapest spot offers that are considered
YOUNG_LOSSES = 0.5  # additional losses expected of a spell that begins over one that goes on
ASK_AGAIN_S = 3600.0  # a run that trains retries a cheaper place that was full after this
CELLS, WORK_CELLS = 240, 24


def deadline(
    view: View,
    *,
    deadline_h: float | None = None,
    work_h: float | None = None,
    total_steps: int | None = None,
) -> Decision:
    """Finish by the deadline at the least expected cost; see the module.

    The options override `View.known`. `deadline_h`: hours from the start of this launch of the run;
    `work_h`: hours that all of the work takes on one node without interruptions, in `total_steps`
    steps, until steps were timed: what was measured is believed rather than what was told.
    """
    view = _told(view, deadline_h, work_h, total_steps)
    if view.known.deadline_s is None:
        offers = sorted(offers_at_home(view), key=usd_per_work)
        return fill(view, offers, "no deadline is known: the cheapest work that can be had")
    left = view.known.left(view.committed_step)
    if left is None:
        return _unmeasured(view)
    if view.max_nodes - len(view.doubted) > 1:
        return fleet(view, left)
    return NodeCase.of(view, left).decide()


def _told(view: View, deadline_h: float | None, work_h: float | None, steps: int | None) -> View:
    known = view.known
    if deadline_h is not None:
        known = dataclasses.replace(known, deadline_s=view.started_s + deadline_h * 3600)
    if work_h is not None and not known.timed:
        known = dataclasses.replace(known, work=work_h * 3600)
    if steps is not None:
        known = dataclasses.replace(known, total_steps=int(steps))
    return view if known is view.known else dataclasses.replace(view, known=known)


def _unmeasured(view: View) -> Decision:
    """Keep nodes up while the remaining work is unknown: it might otherwise be late."""
    offers = offers_at_home(view)
    spot = sorted((o for o in offers if o.spot), key=usd_per_work)
    dear = sorted((o for o in offers if not o.spot), key=usd_per_work)
    room = open_offers(view, spot) or dear
    return fill(view, room, "how much work is left is not known yet: the cheapest that is there")


@dataclass(frozen=True)
class HoursLeft:
    """Hours that are left. `work`: needed by one node on demand for the rest; `time`: until the
    deadline; `begin`: from the request for a node until it trains; `look`: until the next decision;
    `lost`: work that is lost when a node is preempted."""

    work: float
    time: float
    begin: float
    look: float
    lost: float

    @property
    def spare(self) -> float:
        """Hours that remain if the work begins now, after one more begin."""
        return self.time - self.work - self.begin - self.kept

    @property
    def kept(self) -> float:
        """Hours reserved for the last begin: it may take longer than usual, and nothing is decided
        before the next look."""
        return (SAFE - 1) * self.begin + self.look + self.lost

    @property
    def useful(self) -> float:
        """Hours that may be used."""
        return self.time - self.kept


@dataclass(frozen=True)
class NodeCase:
    """One decision about one node. `spot`: the spot offers that are considered, cheapest first;
    `dear`: the on-demand offers, those first where the rest of the work costs least with a move."""

    view: View
    hours: HoursLeft
    spot: tuple[Offer, ...]
    dear: tuple[Offer, ...]
    nodes: tuple[Node, ...]  # that will stay

    @classmethod
    def of(cls, view: View, left: float) -> NodeCase:
        known = view.known
        nodes = tuple(n for n in view.alive if n.attempt not in view.doubted)
        dear = sorted((o for o in view.offers if not o.spot), key=usd_per_work)
        spot = heapq.nsmallest(PLACES, (o for o in view.offers if o.spot), key=usd_per_work)
        one = (dear or spot or [Offer(1.0, "none")])[0]
        per_h = 3600 * one.speed * one.workers * known.efficiency(one.workers)
        hours = HoursLeft(
            left / per_h,
            ((known.deadline_s or 0.0) - view.now_s) / 3600,
            max(known.changeover_s, view.launch_s) / 3600,
            known.look_s / 3600,
            known.lost_s / 3600,
        )
        case = cls(view, hours, tuple(spot), tuple(dear), nodes)
        work_h = max(left, 1.0) / 3600  # of one worker of speed 1

        def usd(offer: Offer) -> float:
            return usd_per_work(offer) + case._move_usd(offer) / work_h

        return dataclasses.replace(case, dear=tuple(sorted(dear, key=usd)))

    # ---- decisions -------------------------------------------------------------------------------
    def decide(self) -> Decision:
        rented = [n for n in self.nodes if n.offer.spot]
        bought = [n for n in self.nodes if not n.offer.spot]
        if rented and bought:
            return self._both(rented[0], bought[0])
        if len(self.nodes) > 1:
            return self._many()
        if rented:
            return self._on_spot(rented[0])
        if bought:
            return self._on_demand(bought[0])
        return self._idle()

    def _both(self, rented: Node, bought: Node) -> Decision:
        """Decide while one node is started beside the other."""
        if at_work(self.view, rented) and self.hours.spare >= 0:
            return Terminate(bought.attempt, "spot is at work", GRACE_S)
        if at_work(self.view, bought) and (self.hours.spare < 0 or rented.attempt < bought.attempt):
            return Terminate(rented.attempt, "on demand keeps the deadline", GRACE_S)
        return Wait(LOOK_AGAIN_S, "one node is begun beside the other")

    def _many(self) -> Decision:
        """Decide with several nodes of a kind: the newest is one too many, unless it is about to
        stand in for another."""
        newest, late = self.nodes[-1], self.hours.spare < 0 and bool(self.dear)
        if newest.attempt in self.view.standing_in and not late:
            return Wait(LOOK_AGAIN_S, "one node is begun beside the other")
        why = "the last call comes before a move" if late else "one node is enough"
        return Terminate(newest.attempt, why, GRACE_S)

    def _idle(self) -> Decision:
        hours, dear, rooms = self.hours, open_offers(self.view, self.dear), self._rooms
        if hours.spare < 0 and (dear or rooms):
            return self._ask((dear or rooms)[0], "the last call: on demand, to be in time")
        if not self.dear:
            return fill(self.view, rooms, "spot has capacity, and on demand is not offered")
        best, rent = self._least(lambda each: each.rent(hours.work, hours.useful))
        after, state = self._before(best), self._state(rooms, self.spot)
        wait = after.wait(state, hours.work, hours.useful, hours.look)
        buy = after.buy(state, hours.work, hours.useful)
        if (home := self._settled(self._home)) is not None:
            here, there = home
            wait = min(wait, here.wait(there, hours.work, hours.useful, hours.look))
            buy = min(buy, here.buy(there, hours.work, hours.useful))
        # a wait must save something: what the table tells apart less exactly counts as equal
        least = min(wait, buy) + after.terms.price * hours.look
        if best is not None and self._may_lose() and rent <= least:
            if self._patient(best, after):
                why = "the place of the snapshot may have spot again before a move pays"
                return Wait(until_next(self.view), why)
            why = "spot is the least that the rest can cost"
            return self._wait_for_price() or self._ask(best, why)
        if buy < wait and dear:
            return self._ask(dear[0], "no spot, and waiting for it would cost more than on demand")
        return self._wait_for_spot(after, (buy - wait) * self.dear[0].usd_per_h)

    def _patient(self, offer: Offer, after: Outlook) -> bool:
        """Return whether to wait for spot at home rather than to move to `offer`: until the time
        waited has cost as much as the move, which then costs at most twice what was necessary; and
        not at all if the wait that is expected costs more. Less time for the rest has its price."""
        home, now_s = self._home, self.view.now_s
        if not home or offer.place in ("", home):
            return False
        move_usd = self.view.known.moved_usd(home, offer.place)
        if not move_usd:
            return False
        here = [o for o in self.spot if o.place == home]
        seen = [s for o in here if (s := self.view.known.capacity.get(o.name)) is not None]
        if not seen or open_offers(self.view, here):
            return False
        waited_h = (now_s - shut_since(seen, now_s)) / 3600
        state, hours = 1 + class_of(waited_h), self.hours
        yet_h = dynamic_program.residual_h(after.terms.rates.open_per_h, waited_h)
        more_h = max(yet_h, hours.look)
        now = after.wait(state, hours.work, hours.useful, hours.look)
        later = after.wait(state, hours.work, hours.useful - more_h, hours.look)
        hour = max(0.0, later - now) / more_h
        dearer = usd_per_work(offer) - min(map(usd_per_work, here))
        stay_h = min(hours.work, 1 / self._losses_per_h(offer))
        move_usd += max(0.0, dearer) * offer.speed * stay_h
        return max(waited_h, more_h) * hour * self.dear[0].usd_per_h < move_usd

    def _may_lose(self) -> bool:
        """Return whether there is time for the last call after a loss."""
        return self.hours.spare >= self.hours.begin + self.hours.look

    def _wait_for_price(self) -> Wait | None:
        """Return a wait until spot is cheap enough, for as long as that takes on average; None if
        waiting does not pay. Its saving is against beginning now and going on at any price."""
        later, hours = self._later, self.hours
        if later is None or (saved := self._saved_later(later)) <= 0:
            return None
        for_h, dear = later.terms.cell_h, self.dear[0]
        swing = self._prices.swing(self._among) or PriceSwing(self._lowest)
        on_usd = swing.over(self._lowest, hours.work) / usd_per_work(dear)
        on = (hours.work + hours.begin) * on_usd
        saved = max(saved, on - later.wait(OPEN, hours.work, hours.useful, for_h))
        until_s = self.view.now_s + 3600 * later.cheaper_in_h(hours.work, hours.useful, for_h)
        return Wait(until_next(self.view), CHEAPER_LATER, until_s, saved * dear.usd_per_h)

    def _wait_for_spot(self, after: Outlook, saving_usd: float) -> Wait:
        """Return a wait until a place has capacity again, for as long as that takes on average."""
        now_s, seen = self.view.now_s, [s for s in self._seen(self.spot) if s is not None]
        shut_h = (now_s - shut_since(seen, now_s)) / 3600
        back_s = now_s + 3600 * dynamic_program.residual_h(after.terms.rates.open_per_h, shut_h)
        why = "spot will be back in time: waiting costs less"
        return Wait(until_next(self.view), why, back_s, max(0.0, saving_usd))

    def _on_demand(self, bought: Node) -> Decision:
        hours, rooms = self.hours, self._rooms
        if not self.dear or hours.spare < 0:
            return Wait(until_next(self.view), "on demand keeps the deadline")
        work = hours.work
        time = hours.useful - max(0.0, hours.begin - (self.view.now_s - bought.asked_s) / 3600)
        best, change = self._least(lambda each: each.change(work, time))
        after, state = self._before(best), self._state(rooms, self.spot)
        stay = after.stay(state, work, time, hours.look)
        drop = after.wait(state, work, hours.useful, hours.look)
        change = min(drop, change)
        if (home := self._settled(bought.offer.place)) is not None:
            here, there = home
            stay = min(stay, here.stay(there, work, time, hours.look))
            drop = min(drop, here.wait(there, work, hours.useful, hours.look))
        if best is not None and change < stay:
            if self._may_lose() and self._wait_for_price():
                return Terminate(bought.attempt, CHEAPER_LATER, GRACE_S)
            return self._ask(best, "spot costs less than on demand from now on", bought)
        gone = drop < stay - WORTH_IT * hours.begin and hours.spare >= hours.begin
        if gone and (home or not rooms):
            why = "spot will be back in time: waiting costs less"
            return Terminate(bought.attempt, why, GRACE_S)
        return Wait(until_next(self.view), "on demand keeps the deadline")

    def _on_spot(self, rented: Node) -> Decision:
        hours, dear = self.hours, open_offers(self.view, self.dear)
        # a loss, or a begin that takes any longer, would now come too late
        late = hours.time - hours.work < hours.begin + hours.lost
        if dear and hours.work > hours.begin and late:
            return self._ask(dear[0], "the last call: on demand, beside spot", rented)
        if not at_work(self.view, rented):
            return Wait(LOOK_AGAIN_S, "spot is begun")
        if better := self._cheaper(rented):
            return self._ask(better, "the rest costs less in another place", rented)
        if self._may_lose() and self._later and self._saved_later(self._later, rented) > 0:
            return Terminate(rented.attempt, CHEAPER_LATER, GRACE_S)
        return Wait(LOOK_AGAIN_S, "spot is at work")

    def _saved_later(self, later: Outlook, rented: Node | None = None) -> float:
        """Return what waiting for a lower price saves over beginning on spot, or going on there, in
        hours of on demand. They are compared over a whole cell, since the best moment is hardly
        better than the next."""
        hours, for_h = self.hours, later.terms.cell_h
        wait = later.wait(OPEN, hours.work, hours.useful, for_h)
        if rented is None:
            now = later.rent(hours.work, hours.useful)
        else:
            age = class_of(max(0.0, rented.been_up_s(self.view.now_s)) / 3600)
            now = later.keep(age, hours.work, hours.useful, for_h)
        return now - wait - WORTH_IT * hours.begin

    def _cheaper(self, rented: Node) -> Offer | None:
        """Return an offer that is worth a move: it must save twice the expected cost of the move
        and of the additional losses of a young spell. None if there is none."""
        hours, now_s = self.hours, self.view.now_s
        here = self._prices.now(rented.offer)
        for offer in self._rooms:
            seen = self.view.known.capacity.get(offer.name)
            full = seen and seen.open is False and now_s - seen.seen_s < ASK_AGAIN_S
            there = usd_per_work(offer)
            if full or there >= here or offer.name == rented.offer.name:
                continue
            stay_h = min(hours.work - hours.begin, 1 / self._losses_per_h(offer))
            saved = self._prices.over(rented.offer, here, stay_h) - self._prices.over(
                offer, there, stay_h
            )
            move = self._move_usd(offer)
            move += there * hours.begin + YOUNG_LOSSES * (self._loss_usd(offer) + move)
            if saved * stay_h > 2 * move:
                return offer
        return None

    # ---- expected costs --------------------------------------------------------------------------
    def _ask(self, offer: Offer, why: str, beside: Node | None = None) -> Decision:
        if beside is None and len(self.view.alive) >= self.view.max_nodes:
            return Wait(LOOK_AGAIN_S, "a node that may not stay is still there")
        why += every(self._snapshots(offer).interval_s)
        return Launch(offer, why, None if beside is None else beside.attempt)

    def _snapshots(self, offer: Offer) -> SnapshotPace:
        """Return the snapshot pace of a world there, at the rate at which work is lost there."""
        seen = self.view.known.capacity.get(offer.name) if offer.spot else None
        return self.view.known.snapshots(seen, 1)

    def _seen(self, spot: Sequence[Offer]) -> list[CapacitySeen | None]:
        return [self.view.known.capacity.get(offer.name) for offer in spot]

    def _state(self, rooms: Sequence[Offer], spot: Sequence[Offer]) -> int:
        """Return the state of a market of these offers: `OPEN` if a place may have capacity
        (`rooms`), else the class of the time since the last one closed."""
        if rooms:
            return OPEN
        seen = [s for s in self._seen(spot) if s is not None]
        shut_h = (self.view.now_s - shut_since(seen, self.view.now_s)) / 3600
        return 1 + class_of(shut_h)

    @functools.cached_property
    def outlook(self) -> Outlook:
        """The expected cost of the rest, at the observed rates and today's spot price, if the run
        goes wherever there is spot."""
        return self._outlook(self.spot, self._lowest, self._later_move)

    def _outlook(self, spot: Sequence[Offer], usd: float, move: float) -> Outlook:
        cell_h, work_cells = grid(self.view, self.hours.work, self.hours.time, CELLS, WORK_CELLS)
        price = rounded(max(usd / usd_per_work(self.dear[0]), 0.01), PRICE_RATIO)
        terms = Terms(self._rates(spot), price, self.hours.begin, cell_h, CELLS + 1, work_cells)
        return dynamic_program.outlook(dataclasses.replace(terms, move=move))

    def _rates(self, spot: Sequence[Offer]) -> SpellRates:
        held = next(
            (
                i
                for i, offer in enumerate(spot)
                if any(n.offer.name == offer.name for n in self.nodes)
            ),
            -1,
        )
        return spell_rates(self._seen(spot), self.view.now_s, held)

    @functools.cached_property
    def _later_move(self) -> float:
        """The mean cost of the move that a later begin on spot needs, in hours of on demand."""
        home = self._home or (self.spot[0].place if self.spot else "")
        usd = [self.view.known.moved_usd(home, o.place) for o in self.spot if o.place != home]
        mean = sum(usd) / len(self.spot) / self.dear[0].usd_per_h if usd and home else 0.0
        return rounded(mean, PRICE_RATIO) if mean > 0 else 0.0

    def _before(self, best: Offer | None) -> Outlook:
        """Return the expected cost of the rest before the next begin on spot. If spot has room in
        another place (`best`), that begin needs the move there now as later."""
        move = self._move_usd(best) / self.dear[0].usd_per_h if best is not None else 0.0
        if not move or not self._later_move:
            return self.outlook
        return self._outlook(self.spot, self._lowest, rounded(move, PRICE_RATIO))

    def _settled(self, place: str) -> tuple[Outlook, int] | None:
        """Return the expected cost of the rest if the run stays in `place`, and the state of its
        spot; None where that is no alternative: moves cost nothing, or there is no spot."""
        spot = [offer for offer in self.spot if offer.place == place] if self._later_move else ()
        if not spot:
            return None
        usd = min(map(self._prices.now, spot))
        return self._outlook(spot, usd, 0.0), self._state(open_offers(self.view, spot), spot)

    def _least(self, cost: Callable[[Outlook], float]) -> tuple[Offer | None, float]:
        """Return the spot offer with room that makes the rest cost least, and how much: its move,
        and then the lesser `cost` of a run that goes on from place to place, and of one that stays
        there."""
        rooms, home = self._rooms, self._home
        if not rooms or not self._later_move:
            return (rooms[0], cost(self.outlook)) if rooms else (None, math.inf)
        found = []
        for offer in dict.fromkeys([rooms[0], *(o for o in rooms if o.place == home)][:2]):
            settled = self._settled(offer.place)
            rest = min(cost(self.outlook), cost(settled[0]) if settled else math.inf)
            found.append((self._move_usd(offer) / self.dear[0].usd_per_h + rest, offer))
        usd, best = min(found, key=lambda each: each[0])
        return best, usd

    # ---- prices ----------------------------------------------------------------------------------
    @functools.cached_property
    def _later(self) -> Outlook | None:
        """The expected cost of the rest with wandering prices. It is less exact, so that it only
        decides waits for a lower price. None if prices do not change, or too little is left."""
        swing, hours = self._prices.swing(self._among), self.hours
        cells = coarse_grid(self.view, hours.work, hours.time, hours.spare)
        if not self.dear or swing is None or cells is None:
            return None
        dear, (cell_h, work_cells) = usd_per_work(self.dear[0]), cells
        share = as_share(swing, dear)
        seen = self.view.known.capacity.get(self._among[0].name)
        open_h = seen.age_s(self.view.now_s) / 3600 if seen and seen.open else 0.0
        rates = dataclasses.replace(self._rates(self.spot), open_class=class_of(open_h))
        found = dynamic_program.outlook(
            Terms(
                rates,
                share.usual_usd,
                hours.begin,
                cell_h,
                COARSE + 1,
                work_cells,
                share.swing,
                share.pull_per_h,
            )
        )
        return dataclasses.replace(found, level=share.level(self._lowest / dear))

    @functools.cached_property
    def _among(self) -> list[Offer]:
        """Spot that is available now or held; all spot offers if there is none."""
        held = [n.offer for n in self.nodes if n.offer.spot]
        return [*self._rooms, *held] or list(self.spot)

    @functools.cached_property
    def _lowest(self) -> float:
        """The current price of work on the cheapest offer of `_among`."""
        return min(map(self._prices.now, self._among), default=usd_per_work(self.dear[0]))

    @functools.cached_property
    def _prices(self) -> WorkPrices:
        return WorkPrices.of(self.view, self.spot, self.nodes)

    @functools.cached_property
    def _rooms(self) -> list[Offer]:
        """Spot offers that may have capacity, the best first: by price, by how often their machines
        are preempted, and by the cost of a move there."""
        rooms = open_offers(self.view, self.spot)
        if len(rooms) < 2:
            return rooms
        return sorted(rooms, key=lambda offer: (self._usd_per_h(offer), offer.name))

    def _usd_per_h(self, offer: Offer) -> float:
        """Return USD for an hour of one worker's work there, including losses and a move."""
        losses = self._losses_per_h(offer)
        stay_h = max(0.1, min(self.hours.work, 1 / losses))
        price = self._prices.over(offer, usd_per_work(offer), stay_h)
        price *= 1 + self._snapshots(offer).share
        return price + losses * self._loss_usd(offer) + self._move_usd(offer) / stay_h

    def _move_usd(self, offer: Offer) -> float:
        """Return USD for the snapshot to go to that offer's place."""
        home = self._home
        if not home or offer.place in ("", home):
            return 0.0
        return self.view.known.moved_usd(home, offer.place)

    def _loss_usd(self, offer: Offer) -> float:
        """Return USD for a loss there: a begin in another place, and the work to be redone."""
        price, dear = usd_per_work(offer), usd_per_work((self.dear or self.spot)[0])
        lost_h = self._snapshots(offer).lost_s / 3600
        return self.hours.begin * (price + dear) / 2 + lost_h * price

    def _losses_per_h(self, offer: Offer) -> float:
        pool = self._pool.pace()
        seen = self.view.known.capacity.get(offer.name)
        held = any(n.offer.name == offer.name for n in self.nodes)
        return USUAL_ENDS_PER_H[2] * closings(seen, self.view.now_s, held).pace(pool)

    @functools.cached_property
    def _pool(self) -> Ends:
        """The closings of all places together."""
        found = Ends()
        for seen in self._seen(self.spot):
            found += closings(seen, self.view.now_s, False)
        return found

    @functools.cached_property
    def _home(self) -> str:
        """The place of the snapshot: that of the current or last node; "" if unknown."""
        if self.nodes:
            return self.nodes[0].offer.place
        seen = self.view.known.capacity
        been = [o for o in self.view.offers if o.name in seen and seen[o.name].node_s > 0]
        return max(been, key=lambda o: seen[o.name].seen_s).place if been else self.view.known.home


# A wrapper that keeps a deadline for any policy, by on-demand nodes as late as possible.


def by_deadline(policy: Policy, *, hours: float | None = None, early: float = 0) -> Policy:
    """Return `policy` wrapped so that the run meets its deadline. `policy` decides until no time
    is left for another interruption; from then on only on-demand nodes are launched, up to
    `max_nodes`, in the place of the others, and nodes that are up there stay.

    Until then `policy` sees spot only, where any is offered: most policies would buy on demand
    whenever spot has no room. `early=1` shows it on-demand offers as well. `hours`: from the start
    of this launch of the run; without it, the deadline of `--deadline`. If the remaining work is
    unknown (`Estimates.left`), or nothing is on demand, `policy` decides. Where lateness has a
    price (`Estimates.usd_per_hour_late`), the last call comes once the lateness to be expected
    costs as much as on demand costs more than spot for the rest.
    """
    if hours is not None and not hours > 0:
        raise BadInput(f"by_deadline: wanted hours above 0, found {hours:g}")
    if early not in (0, 1):
        raise BadInput(f"by_deadline: wanted early=0 or early=1, found {early!r}")
    return _ByDeadline(policy, hours, bool(early))


@dataclasses.dataclass(frozen=True)
class _ByDeadline:
    """The policy that `by_deadline` returns and describes.

    A launch takes `changeover_s`. Time for two launches is kept back: one for the launch at the
    last call, and one to replace, one after the other, spot nodes that are lost later; also the
    work that each of those may lose. A spot node launched so late that it may be lost before it was
    useful needs time for a third.
    """

    policy: Policy
    hours: float | None
    early: bool

    def __call__(self, view: View) -> Decision:
        deadline_s = view.known.deadline_s
        if self.hours is not None:
            deadline_s = view.started_s + self.hours * 3600
        left = view.known.left(view.committed_step)
        home = _home(view)
        on_demand = [o for o in view.offers if not o.spot and home in (None, o.place)]
        if deadline_s is None or not left or not on_demand:
            return self.policy(view)
        remaining_s = deadline_s - view.now_s
        surest = _surest(view, on_demand, left, remaining_s)
        spot = [n for n in staying(view) if n.offer.spot and n.offer.place == home]
        spare_s = remaining_s - _seconds(view, left, [surest] * view.max_nodes)
        spare_s += _late_s(view, left, surest) - view.known.lost_s * len(spot)
        changeover_s = view.known.changeover_s
        if spare_s <= 2 * changeover_s:
            return self._last_call(view, surest, spot, left, remaining_s)
        decision = self._inside(view)
        match decision:
            case Launch(offer) if offer.spot and spare_s <= 3 * changeover_s:
                return self._last_call(view, surest, spot, left, remaining_s)
            case Terminate(attempt, _, _, also) if spare_s <= 4 * changeover_s and any(
                not node.offer.spot for node in view.alive if node.attempt in (attempt, *also)
            ):
                return Wait(LOOK_AGAIN_S, "on-demand nodes stay: the deadline is near")
        return decision

    def _inside(self, view: View) -> Decision:
        """Ask the policy inside, while there is time for spot."""
        spot = tuple(offer for offer in view.offers if offer.spot)
        if self.early or not spot:
            return self.policy(view)
        return self.policy(dataclasses.replace(view, offers=spot))

    def _last_call(
        self, view: View, surest: Offer, spot: list[Node], left: float, remaining_s: float
    ) -> Decision:
        """Decide when only nodes that cannot be preempted are in time."""
        why = "the deadline leaves no time for another interruption"
        home = _home(view)
        away = [node.attempt for node in view.alive if node.offer.place != home]
        if away:
            return Terminate(away[0], "the others cannot reach it", also=tuple(away[1:]))
        if len(view.alive) < view.max_nodes:
            if open_offers(view, [surest]):
                return Launch(surest, why)
            anything = [o for o in view.offers if not o.spot], view.offers
            return fill(view, next((some for some in anything if open_offers(view, some)), ()), why)
        there = [node.offer for node in staying(view)]
        slow = [node for node in spot if _power(node.offer) < 0.99 * _power(surest)]
        late = _seconds(view, left, there) > remaining_s - view.known.changeover_s
        beside = view.doubted or view.standing_in or not open_offers(view, [surest])
        if slow and late and not beside:
            slowest = min(slow, key=lambda node: (_power(node.offer), node.attempt))
            return Launch(
                surest, "too slow for the deadline: another takes its place", slowest.attempt
            )
        return Wait(LOOK_AGAIN_S, "what is there stays: the deadline is near")


def _late_s(view: View, left: float, surest: Offer) -> float:
    """Return for how many seconds it costs no more to be late than to do the rest on demand rather
    than on spot; 0.0 if lateness has no price."""
    late_usd, spot = view.known.usd_per_hour_late, [o for o in view.offers if o.spot]
    if late_usd is None or not spot:
        return 0.0
    dearer = usd_per_work(surest) - min(map(usd_per_work, spot))
    return max(0.0, dearer) * left / late_usd


def _home(view: View) -> str | None:
    """Return the place of the nodes that train together; None if there are no nodes."""
    found = [(n.offer.place, n.offer.workers, n.up_s is not None) for n in view.alive]
    return meeting_place(found) if found else None


def _power(offer: Offer) -> float:
    """Return the worker-seconds of work that a node does in a second."""
    return offer.speed * offer.workers


def _seconds(view: View, left: float, offers: Iterable[Offer]) -> float:
    """Return the seconds that nodes of these offers need for the work."""
    found = list(offers)
    ranks = sum(offer.workers for offer in found)
    rate = sum(map(_power, found)) * view.known.efficiency(ranks)
    return left / rate if rate > 0 else float("inf")


def _surest(view: View, on_demand: list[Offer], left: float, remaining_s: float) -> Offer:
    """Return the on-demand offer to count on: the one that the run has nodes of already, else the
    open one (or any, if none is open) with the cheapest work. It must be in time; if none is, the
    fastest."""
    offered = {offer.name: offer for offer in on_demand}
    bought = [offered[n.offer.name] for n in staying(view) if n.offer.name in offered]
    launch_s = view.known.changeover_s

    def in_time(offer: Offer, most_s: float) -> bool:
        return _seconds(view, left, [offer] * view.max_nodes) <= most_s

    if bought and in_time(bought[0], remaining_s - launch_s * (len(bought) < view.max_nodes)):
        return bought[0]
    among = open_offers(view, on_demand) or on_demand
    early = [offer for offer in among if in_time(offer, remaining_s - launch_s)]
    return min(early, key=usd_per_work) if early else max(among, key=_power)
