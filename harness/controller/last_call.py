"""A deadline kept for any policy: on-demand nodes as late as possible, and early enough.

Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from harness.controller.choosing import LOOK_AGAIN_S, fill, open_offers, usd_per_work
from harness.controller.value import staying
from harness.core.world import (
    BadInput,
    Decision,
    Launch,
    Node,
    Offer,
    Policy,
    Terminate,
    View,
    Wait,
    meeting_place,
)


def by_deadline(policy: Policy, *, hours: float | None = None) -> Policy:
    """`policy`, until no time is left for another interruption; from then on only on-demand nodes
    are launched, up to `max_nodes`, where the others are, and what is up there stays.

    `hours`: from when this launch of the run began; without it, the deadline of `--deadline`. Where
    the work that is left is not known (`Knowledge.left`), or nothing is on demand, `policy`
    decides.
    """
    if hours is not None and not hours > 0:
        raise BadInput(f"by_deadline: wanted hours above 0, found {hours:g}")
    return _ByDeadline(policy, hours)


@dataclasses.dataclass(frozen=True)
class _ByDeadline:
    """What `by_deadline` returns, and describes.

    A launch takes `changeover_s`. Two of them are kept back: one for the launch at the last call,
    one for all that it takes to replace, one after the other, spot nodes that are lost later; and
    what each of those may take along. Whoever launches a spot node so late that it may be lost
    before it was of use needs a third.
    """

    policy: Policy
    hours: float | None

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
        spare_s -= view.known.lost_s * len(spot)
        changeover_s = view.known.changeover_s
        if spare_s <= 2 * changeover_s:
            return self._last_call(view, surest, spot, left, remaining_s)
        decision = self.policy(view)
        match decision:
            case Launch(offer) if offer.spot and spare_s <= 3 * changeover_s:
                return self._last_call(view, surest, spot, left, remaining_s)
            case Terminate(attempt, _, _, also) if spare_s <= 4 * changeover_s and any(
                not node.offer.spot for node in view.alive if node.attempt in (attempt, *also)
            ):
                return Wait(LOOK_AGAIN_S, "on-demand nodes stay: the deadline is near")
        return decision

    def _last_call(
        self, view: View, surest: Offer, spot: list[Node], left: float, remaining_s: float
    ) -> Decision:
        """Only what is never taken away is in time now."""
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


def _home(view: View) -> str | None:
    """Where those are that train together; None: nobody is anywhere."""
    found = [(n.offer.place, n.offer.workers, n.up_s is not None) for n in view.alive]
    return meeting_place(found) if found else None


def _power(offer: Offer) -> float:
    """Worker-seconds of work in a second of a node."""
    return offer.speed * offer.workers


def _seconds(view: View, left: float, offers: Iterable[Offer]) -> float:
    """That nodes of these offers need for the work."""
    found = list(offers)
    ranks = sum(offer.workers for offer in found)
    rate = sum(map(_power, found)) * view.known.efficiency(ranks)
    return left / rate if rate > 0 else float("inf")


def _surest(view: View, on_demand: list[Offer], left: float, remaining_s: float) -> Offer:
    """The on-demand offer to count on: the one that nodes are there of already; of those that are
    open, or else of all, the one with the cheapest work. It must be in time; the fastest if none
    is."""
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
