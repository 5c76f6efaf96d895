"""The expected cost of useful work on an offer: its price, its speed in this world, and the
overheads of restarts, lost work and moved snapshots.

Pure. Unknown overheads count as zero: without any knowledge offers are ordered by price.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Iterable

from harness.controller.forecast.spell_rates import losses_per_h
from harness.core.estimates import Estimates, SnapshotPace
from harness.core.world import Node, Offer, View, meeting_place, usd_per_work
from harness.ledger.bill import transfer_usd

# a move must pay for itself in this time: later prices are unknown
LONGEST_STAY_H = 24.0


class Worth:
    """The value of offers by one view; created for every decision.

    `per_work`: compare the price of work, by the stated speed of offers. Otherwise an hour of any
    node is worth the same until steps were timed (`Estimates.paces`).
    """

    def __init__(self, view: View, per_work: bool = True):
        self.known = view.known
        there = staying(view)
        self.ranks = sum(node.offer.workers for node in there)
        self.nodes = view.max_nodes
        self.missing = max(1, view.max_nodes - len(there))
        found = [(n.offer.place, n.offer.workers, n.up_s is not None) for n in view.alive]
        # the place where reading snapshots costs nothing
        self.home = self.known.home or meeting_place(found)
        self.measured = measured_speeds(view)
        self.per_work = per_work or bool(self.measured)
        self.sated = self._sated(len(there) >= view.min_nodes)
        # (useful share of paid hours, USD of egress per hour), by the traits that determine them
        self._losses: dict[tuple[str, bool, str], tuple[float, float]] = {}
        self._shares: dict[int, float] = {}

    @property
    def nothing_known(self) -> bool:
        """True if only prices are known; then they decide."""
        return not (
            self.measured
            or self.known.micro_batches
            or self._losses_known
            or (self.home and self._moves_known)
        )

    def best(self, offers: Iterable[Offer]) -> Offer | None:
        """Return the offer with the cheapest useful work, the first of equals; None if no offer
        makes steps shorter."""
        if self.nothing_known:
            return min(offers, key=usd_per_work if self.per_work else _usd_per_h, default=None)
        best, least = None, math.inf
        for offer in offers:
            # overheads only raise the cost, so an offer that is too expensive without is skipped
            if offer.usd_per_h < least * self._work(offer):
                usd = self.usd_per_useful_h(offer)
                if usd < least:
                    best, least = offer, usd
        return best

    def usd_per_useful_h(self, offer: Offer) -> float:
        """Return USD for an hour of useful work: of a node or, with `per_work`, of one worker of
        speed 1. Infinite if the offer adds no work."""
        work = self._work(offer)
        if not work:
            return math.inf
        useful, egress_usd_per_h = self._overheads(offer)
        return (offer.usd_per_h + egress_usd_per_h) / (work * useful)

    def cost(self, *offers: Offer) -> float:
        """Return the same cost for a world of nodes of these offers, if its shares are even."""
        usd = work = 0.0
        for offer in offers:
            useful, egress_usd_per_h = self._overheads(offer)
            usd += offer.usd_per_h + egress_usd_per_h
            work += useful * self._speed(offer)
        return usd / work if work else math.inf

    def _work(self, offer: Offer) -> float:
        """Return the work done in an hour on the offer, without interruptions."""
        each = offer.workers
        if each not in self._shares:
            self._shares[each] = self._even_share(each)
        return self._shares[each] * self._speed(offer)

    def _speed(self, offer: Offer) -> float:
        """Return the speed of all workers of a node, as measured on this accelerator. One that was
        not measured is assumed to deviate from its stated speed like those that were."""
        if not self.per_work:
            return 1.0
        ratio = self.measured.get(offer.accelerator, self.measured.get("", 1.0))
        return ratio * offer.speed * offer.workers

    def _even_share(self, each: int) -> float:
        """Return the share of busy workers in the world that nodes of `each` workers would
        complete. It has as many nodes as make its steps shortest, and no more, since more workers
        would only be idle. 0.0 if the world has as many already."""
        known = self.known
        if not known.micro_batches:
            return 1.0
        most = self.ranks + self.missing * each
        rounds = known.rounds(most)
        if self.sated and rounds >= known.rounds(self.ranks):
            return 0.0
        enough = -(-known.micro_batches // rounds) * known.replica_ranks
        added = min(self.missing, max(1, -(-(enough - self.ranks) // each)))
        return known.efficiency(self.ranks + added * each)

    def _sated(self, enough_nodes: bool) -> bool:
        """Return whether nodes that shorten no step may be left out: only if there are enough
        nodes and a timed world confirms the count of workers."""
        return enough_nodes and any(pace.ranks == self.ranks for pace in self.known.paces)

    def _overheads(self, offer: Offer) -> tuple[float, float]:
        """Return (useful share of the offer's paid hours, USD of egress per hour)."""
        seen = self.known.capacity.get(offer.name) if offer.spot else None
        key = (offer.name if seen else "", offer.spot, offer.place)
        if key not in self._losses:
            losses = losses_per_h(seen) if self._risky(offer) else (0.0, 0.0)
            pace = self.known.snapshots(seen, self.nodes)
            if not self._losses_known:
                pace = dataclasses.replace(pace, share=0.0)
            stay_h = 1 / max(losses[0], 1 / LONGEST_STAY_H)
            useful = useful_share(self.known, losses, pace, self.nodes)
            self._losses[key] = useful, self.move_usd(offer) / stay_h
        return self._losses[key]

    def interval_s(self, offer: Offer) -> float:
        """Return the seconds between two snapshots of a world there; 0.0 if unknown."""
        seen = self.known.capacity.get(offer.name) if offer.spot else None
        return self.known.snapshots(seen, self.nodes).interval_s

    @property
    def _moves_known(self) -> bool:
        known = self.known
        return bool(known.move_usd or known.moves or known.snapshot_bytes)

    def _risky(self, offer: Offer) -> bool:
        return offer.spot and self._losses_known

    @functools.cached_property
    def _losses_known(self) -> bool:
        """True if something is known about losses. Until then all offers count as equally safe."""
        return any(seen.node_s or seen.spells for seen in self.known.capacity.values())

    def move_usd(self, offer: Offer) -> float:
        """Return the USD of egress for reading the snapshot once in the offer's place."""
        if not self.home or not offer.place or offer.place == self.home:
            return 0.0
        listed_usd = transfer_usd(self.home, offer.place, self.known.snapshot_bytes)
        return listed_usd or self.known.moved_usd(self.home, offer.place)


def useful_share(
    known: Estimates, losses: tuple[float, float], pace: SnapshotPace, nodes: int
) -> float:
    """Return the useful share of the paid hours of a world of `nodes` nodes. `losses`: losses of
    one node per hour, (all, those without notice)."""
    per_h, unnoticed_per_h = losses
    lost_h = (per_h * known.changeover_s + unnoticed_per_h * pace.lost_s * nodes) / 3600
    return (1 - pace.share) * math.exp(-lost_h)


def staying(view: View) -> list[Node]:
    """Return the alive nodes that may stay: neither doubted nor about to be replaced."""
    leaving = {*view.doubted, *view.standing_in.values()}
    return [node for node in view.alive if node.attempt not in leaving]


def measured_speeds(view: View) -> dict[str, float]:
    """Return measured speeds by accelerator, relative to `Offer.speed`, in a common unit. The key
    "" holds the value for accelerators that were not measured. Empty if nothing was measured."""
    known = view.known
    if not known.paces:
        return {}
    said = {o.accelerator: o.speed for o in (*view.offers, *(n.offer for n in view.alive))}
    # of several worlds of one accelerator, the one with the most timed steps counts
    paces = {p.accelerator: p for p in sorted(known.paces, key=lambda p: p.steps)}
    found = {
        name: 1 / (p.step_s * p.ranks * known.efficiency(p.ranks) * said[name])
        for name, p in paces.items()
        if p.step_s > 0 and p.ranks > 0 and said.get(name, 0.0) > 0
    }
    return {**found, "": statistics.median(found.values())} if found else {}


def _usd_per_h(offer: Offer) -> float:
    return offer.usd_per_h
