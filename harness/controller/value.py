"""What useful work is expected to cost on an offer: its price, how fast it is in this world, and
what restarts, lost work and moved snapshots add to it.

Pure. What nobody knows costs nothing here: without any knowledge the order of offers is that of
their prices.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Iterable

from harness.controller.choosing import usd_per_work
from harness.core.known import Knowledge, SnapshotPace
from harness.core.prices import transfer_usd
from harness.core.world import Node, Offer, View, meeting_place
from harness.market.rates import losses_per_h

# a move pays for itself in this time at most: nobody knows what prices do later
LONGEST_STAY_H = 24.0


class Worth:
    """What one view says about the value of offers; made anew for every decision.

    `per_work`: the price of the work done, by what is said of the speed of offers. Else an hour of
    one node is worth as much as an hour of any other, until steps were timed (`Knowledge.paces`).
    """

    def __init__(self, view: View, per_work: bool = True):
        self.known = view.known
        there = staying(view)
        self.ranks = sum(node.offer.workers for node in there)
        self.nodes = view.max_nodes
        self.missing = max(1, view.max_nodes - len(there))
        found = [(n.offer.place, n.offer.workers, n.up_s is not None) for n in view.alive]
        # the place where snapshots are read for nothing
        self.home = self.known.home or meeting_place(found)
        self.measured = measured_speeds(view)
        self.per_work = per_work or bool(self.measured)
        self.sated = self._sated(len(there) >= view.min_nodes)
        # by what decides it: (useful share of paid hours, USD of egress per hour)
        self._losses: dict[tuple[str, bool, str], tuple[float, float]] = {}
        self._shares: dict[int, float] = {}

    @property
    def nothing_known(self) -> bool:
        """Then prices decide."""
        return not (
            self.measured
            or self.known.micro_batches
            or self._losses_known
            or (self.home and (self.known.move_usd or self.known.snapshot_bytes))
        )

    def best(self, offers: Iterable[Offer]) -> Offer | None:
        """Where useful work is cheapest, the first of equals; None: no offer makes any step
        shorter."""
        if self.nothing_known:
            return min(offers, key=usd_per_work if self.per_work else _usd_per_h, default=None)
        best, least = None, math.inf
        for offer in offers:
            # no offer is worth more than its price says
            if offer.usd_per_h < least * self._work(offer):
                usd = self.usd_per_useful_h(offer)
                if usd < least:
                    best, least = offer, usd
        return best

    def usd_per_useful_h(self, offer: Offer) -> float:
        """USD for an hour of useful work: of a node or, with `per_work`, of one worker of speed 1.
        Infinite: it does none."""
        work = self._work(offer)
        if not work:
            return math.inf
        useful, egress_usd_per_h = self._overheads(offer)
        return (offer.usd_per_h + egress_usd_per_h) / (work * useful)

    def cost(self, *offers: Offer) -> float:
        """The same of a world of its own of such nodes, if its shares are even."""
        usd = work = 0.0
        for offer in offers:
            useful, egress_usd_per_h = self._overheads(offer)
            usd += offer.usd_per_h + egress_usd_per_h
            work += useful * self._speed(offer)
        return usd / work if work else math.inf

    def _work(self, offer: Offer) -> float:
        """Of an hour on it, without interruptions."""
        each = offer.workers
        if each not in self._shares:
            self._shares[each] = self._even_share(each)
        return self._shares[each] * self._speed(offer)

    def _speed(self, offer: Offer) -> float:
        """Of all its workers: as measured on this accelerator. One that was not measured is as much
        faster or slower than it is said to be as those that were."""
        if not self.per_work:
            return 1.0
        ratio = self.measured.get(offer.accelerator, self.measured.get("", 1.0))
        return ratio * offer.speed * offer.workers

    def _even_share(self, each: int) -> float:
        """Share of the workers that is at work in the world that nodes of so many workers each will
        complete. It has as many of them as make its steps shortest, and no more: so many as would
        only leave each other idle are not wanted. 0: there are as many already."""
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
        """May nodes that shorten no step be left out? Only where a world that was timed shows that
        the workers are counted as they are."""
        return enough_nodes and any(pace.ranks == self.ranks for pace in self.known.paces)

    def _overheads(self, offer: Offer) -> tuple[float, float]:
        """(share of its paid hours that is useful, USD of egress in an hour)"""
        seen = self.known.capacity.get(offer.name) if offer.spot else None
        key = (offer.name if seen else "", offer.spot, offer.place)
        if key not in self._losses:
            losses = losses_per_h(seen) if self._risky(offer) else (0.0, 0.0)
            pace = self.known.snapshots(seen, self.nodes)
            if not self._losses_known:
                pace = dataclasses.replace(pace, share=0.0)
            stay_h = 1 / max(losses[0], 1 / LONGEST_STAY_H)
            useful = useful_share(self.known, losses, pace, self.nodes)
            self._losses[key] = useful, self._move_usd(offer) / stay_h
        return self._losses[key]

    def interval_s(self, offer: Offer) -> float:
        """Between two snapshots of a world there; 0: not known."""
        seen = self.known.capacity.get(offer.name) if offer.spot else None
        return self.known.snapshots(seen, self.nodes).interval_s

    def _risky(self, offer: Offer) -> bool:
        return offer.spot and self._losses_known

    @functools.cached_property
    def _losses_known(self) -> bool:
        """Something was learned of losses. Until then no offer is held to be worse than others."""
        return any(seen.node_s or seen.spells for seen in self.known.capacity.values())

    def _move_usd(self, offer: Offer) -> float:
        """For the snapshot to be read there, once."""
        if not self.home or not offer.place or offer.place == self.home:
            return 0.0
        return (
            transfer_usd(self.home, offer.place, self.known.snapshot_bytes) or self.known.move_usd
        )


def useful_share(
    known: Knowledge, losses: tuple[float, float], pace: SnapshotPace, nodes: int
) -> float:
    """Of the hours that are paid for in a world of so many nodes. `losses`: of one of them, per
    hour: all, and those without notice."""
    per_h, unnoticed_per_h = losses
    lost_h = (per_h * known.changeover_s + unnoticed_per_h * pace.lost_s * nodes) / 3600
    return (1 - pace.share) * math.exp(-lost_h)


def staying(view: View) -> list[Node]:
    """The nodes that are there and may stay."""
    leaving = {*view.doubted, *view.standing_in.values()}
    return [node for node in view.alive if node.attempt not in leaving]


def measured_speeds(view: View) -> dict[str, float]:
    """By accelerator: its measured speed, relative to `Offer.speed` and in a unit that all share.
    "": of what was not measured. Empty: nothing was."""
    known = view.known
    if not known.paces:
        return {}
    said = {o.accelerator: o.speed for o in (*view.offers, *(n.offer for n in view.alive))}
    # of several worlds of one accelerator, the one that most steps were timed in
    paces = {p.accelerator: p for p in sorted(known.paces, key=lambda p: p.steps)}
    found = {
        name: 1 / (p.step_s * p.ranks * known.efficiency(p.ranks) * said[name])
        for name, p in paces.items()
        if p.step_s > 0 and p.ranks > 0 and said.get(name, 0.0) > 0
    }
    return {**found, "": statistics.median(found.values())} if found else {}


def _usd_per_h(offer: Offer) -> float:
    return offer.usd_per_h
