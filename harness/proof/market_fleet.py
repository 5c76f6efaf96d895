"""Nodes on a recorded market: which are given, what they do, which are taken, and what they cost.

The mechanics of every replay, `market_replay.py` and `market_quick.py`. Time passes in the market's
ticks. A node is given if its zone has room, is billed from then on at the price of each tick, and
trains `changeover_s` later. At a tick's beginning those that their zone has no room for any more
are taken, the newest first. With `lost_s` one that was at work takes that much of the work of all
along, as far as it is not committed.

As in a real run, nodes train together where they reach each other, which is in one place: where the
last world was, for as long as somebody of it is there. Of more nodes than the job may have, which
are there while one replaces another, the others wait.

Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from harness.core.known import CapacitySeen, Knowledge
from harness.core.world import Node, NodeState, Offer
from harness.market.traces import ZoneTrace
from harness.market.wandering import PricePath

STEP_S = 60.0  # of a step on all nodes
ON_DEMAND = "/on-demand"  # ends the names of on-demand offers

# a node's offer, from when it was given until it was gone (hours), whether it was taken away
NodeSpan: TypeAlias = tuple[str, float, float, bool]


@dataclass(frozen=True)
class ReplayJob:
    """What is to be done. `nodes`: the fewest that can train, and the most. `work_h`: hours that it
    takes on the most, undisturbed; `deadline_h`: hours from the window's beginning. Prices are of
    one node, where the trace has none. `move_usd`: of a begin in another place than the node
    before. `one_place`: nodes in different zones train together, and a move costs nothing (zones of
    one region).

    `snapshot_s`: between two snapshots; 0: one in every tick. `unnoticed`: the share of the nodes
    that are taken without a notice, and so with all work since the newest snapshot; `pause_s`: for
    so long the others stand still then. `step_s`: of a step on all nodes; finer ones only cost
    time."""

    work_h: float
    deadline_h: float
    nodes: tuple[int, int] = (1, 1)
    changeover_s: float = 600.0
    lost_s: float = 0.0
    move_usd: float = 0.0
    spot_usd_per_h: float = 1.0
    on_demand_usd_per_h: float = 3.0
    one_place: bool = False
    snapshot_s: float = 0.0
    unnoticed: float = 0.0
    pause_s: float = 0.0
    step_s: float = STEP_S

    @property
    def total_steps(self) -> int:
        return max(1, round(self.work_h * 3600 / self.step_s))

    @property
    def work(self) -> float:
        """Node-seconds."""
        return self.work_h * 3600 * self.nodes[1]

    @property
    def limit_h(self) -> float:
        """Who is not done by then has failed: far beyond any deadline that can be kept."""
        return 4 * self.deadline_h + 4 * self.work_h + 24


@dataclass
class FleetBill:
    """What the nodes have done and cost. `work`: node-seconds that are done; `done_s`: when all of
    it was."""

    usd: float = 0.0
    paid_s: float = 0.0
    on_demand_s: float = 0.0
    work: float = 0.0
    done_s: float | None = None
    moves: int = 0
    losses: int = 0

    @property
    def goodput(self) -> float:
        """Work that was kept, as a share of the node-hours that were paid for."""
        return self.work / self.paid_s if self.paid_s else 0.0


@dataclass
class _Training:
    """Who is at work, by place. `begins_s`: of those that are not yet, when they will be; `home`:
    the place where the last world was."""

    at_work: Counter[str] = field(default_factory=Counter)
    begins_s: dict[int, float] = field(default_factory=dict)
    home: str = ""

    def gone(self, node: Node) -> bool:
        """Was it at work?"""
        if self.begins_s.pop(node.attempt, None) is not None:
            return False
        self.at_work[node.offer.place] -= 1
        return True


@dataclass
class _Saved:
    """The newest snapshot: when it was made, and the work in it. `overdue`: how much of a loss
    without notice is still owed, so that their share comes out evenly."""

    at_s: float = 0.0
    work: float = 0.0
    overdue: float = 0.5

    def misses(self, unnoticed: float) -> bool:
        """Does this loss come without a notice?"""
        self.overdue += unnoticed
        if self.overdue < 1.0:
            return False
        self.overdue -= 1.0
        return True


class MarketFleet:
    """The nodes that are there (`nodes`), from tick `first` of aligned zones on. Beyond their end
    there is no spot. Ticks are counted from there. `places`: of zones that are no place of their
    own. `on_demand`: is it offered?"""

    def __init__(
        self,
        zones: Sequence[ZoneTrace],
        first: int,
        job: ReplayJob,
        places: Mapping[str, str] | None = None,
        on_demand: bool = True,
    ):
        self.job, self.tick_s, self.tick = job, zones[0].tick_s, 0
        until = first + math.ceil(job.limit_h * 3600 / self.tick_s) + 1
        self._rooms = {z.zone: z.nodes[first:until].tolist() for z in zones}
        self._usd_per_h = {
            z.zone: None if z.usd_per_h is None else z.usd_per_h[first:until].tolist()
            for z in zones
        }
        self._places = {
            z.zone: "" if job.one_place else (places or {}).get(z.zone, z.zone) for z in zones
        }
        self._on_demand = on_demand
        self.nodes: dict[int, Node] = {}
        self._by_offer: dict[str, dict[int, Node]] = {}
        self.bill, self.spans = FleetBill(), list[NodeSpan]()
        self._training, self._place = _Training(), ""  # where the last node was given
        self._offers: tuple[list[float], tuple[Offer, ...]] = [], ()
        self._saved = _Saved()

    @property
    def now_s(self) -> float:
        return self.tick * self.tick_s

    def known(
        self, capacity: Mapping[str, CapacitySeen], prices: Mapping[str, PricePath]
    ) -> Knowledge:
        """What a policy may forecast by, besides what was seen of offers."""
        job = self.job
        return Knowledge(
            total_steps=job.total_steps,
            work=job.work,
            changeover_s=job.changeover_s,
            look_s=self.tick_s,
            lost_s=job.lost_s,
            move_usd=job.move_usd,
            deadline_s=job.deadline_h * 3600,
            capacity=capacity,
            prices=prices,
        )

    def offers(self) -> tuple[Offer, ...]:
        """Cheapest first; the same ones for as long as prices are."""
        prices = [self._price(name) for name in self._rooms]
        if prices != self._offers[0]:
            dear, found = self.job.on_demand_usd_per_h, list[Offer]()
            for name, usd in zip(self._rooms, prices, strict=True):
                place = self._places[name]
                found.append(Offer(usd, name, on_demand_usd_per_h=dear, place=place))
                if self._on_demand:
                    found.append(Offer(dear, name + ON_DEMAND, False, place=place))
            self._offers = prices, tuple(sorted(found))
        return self._offers[1]

    # ---- what is asked for -----------------------------------------------------------------------
    def launch(self, attempt: int, offer: Offer) -> Node:
        """The node that is given, or one without capacity."""
        now = self.now_s
        there = self._by_offer.setdefault(offer.name, {})
        if offer.spot and len(there) >= self._room(offer.name):
            return Node(attempt, offer, NodeState.NO_CAPACITY, now, gone_s=now)
        at_work_s = now + self.job.changeover_s
        node = Node(attempt, offer, NodeState.UP, now, now, at_work_s=at_work_s)
        self.nodes[attempt] = there[attempt] = node
        self._training.begins_s[attempt] = at_work_s
        if self._place not in ("", offer.place) and not self.job.one_place:
            self.bill.usd += self.job.move_usd
            self.bill.moves += 1
        self._place = offer.place
        return node

    def end(self, attempt: int, at_s: float, taken: bool = False) -> Node | None:
        """Have it gone; as it was. None: it is not there."""
        node = self.nodes.pop(attempt, None)
        if node is None:
            return None
        del self._by_offer[node.offer.name][attempt]
        self._training.gone(node)
        self.spans.append((node.offer.name, (node.up_s or 0.0) / 3600, at_s / 3600, taken))
        return node

    # ---- what happens ----------------------------------------------------------------------------
    def work(self) -> None:
        """The tick is worked off and paid, up to where the work is done; the next one begins."""
        since_s, bill = self.now_s, self.bill
        end_s = self._train(since_s, since_s + self.tick_s)
        seconds = end_s - since_s
        for name, there in self._by_offer.items():
            if there:
                on_demand = name.endswith(ON_DEMAND)
                usd_per_h = self.job.on_demand_usd_per_h if on_demand else self._price(name)
                bill.usd += len(there) * usd_per_h * seconds / 3600
                bill.paid_s += len(there) * seconds
                bill.on_demand_s += len(there) * seconds if on_demand else 0.0
        if bill.work >= self.job.work - 1e-6 and bill.done_s is None:
            bill.done_s = end_s
        self.tick += 1

    def too_many(self) -> list[int]:
        """Those that there is no room for now."""
        found: list[int] = []
        for name in self._rooms:
            there = self._by_offer.get(name, {})
            if len(there) > (room := self._room(name)):
                found += sorted(there)[room:][::-1]
        return found

    def take(self, attempt: int, committed: int) -> Node | None:
        """One of them is taken away, after so many committed steps; as it was."""
        node, training, bill = self.nodes.get(attempt), self._training, self.bill
        if node is None:
            return None
        if attempt not in training.begins_s and node.offer.place == training.home:
            world = min(training.at_work[training.home], self.job.nodes[1])
            kept, saved = committed * self.job.work / self.job.total_steps, self._saved
            if saved.misses(self.job.unnoticed):
                bill.work = max(kept, saved.work)
            else:
                bill.work = max(kept, bill.work - self.job.lost_s * world)
                saved.at_s, saved.work = self.now_s, bill.work  # a notice leaves time for one
            self._pause(attempt)
        bill.losses += 1
        return self.end(attempt, self.now_s, taken=True)

    def steps(self) -> int:
        """That are in a snapshot now."""
        job, bill, saved = self.job, self.bill, self._saved
        if bill.done_s is not None:
            return job.total_steps
        if self.now_s - saved.at_s >= job.snapshot_s - 1e-6:
            saved.at_s, saved.work = self.now_s, bill.work
        # sums of seconds, so a step that is done may lack a billionth
        return int(job.total_steps * saved.work / job.work + 1e-9)

    # ---- one tick --------------------------------------------------------------------------------
    def _pause(self, without: int) -> None:
        """Those that trained with a node that is taken stand still for a while."""
        training, until_s = self._training, self.now_s + self.job.pause_s
        for attempt, node in self.nodes.items() if self.job.pause_s else ():
            if attempt != without and node.offer.place == training.home:
                if attempt not in training.begins_s:
                    training.at_work[training.home] -= 1
                training.begins_s[attempt] = max(until_s, training.begins_s.get(attempt, 0.0))

    def _room(self, zone: str) -> int:
        rooms = self._rooms[zone]
        return int(rooms[self.tick]) if self.tick < len(rooms) else 0

    def _price(self, zone: str) -> float:
        prices = self._usd_per_h[zone]
        if prices is None:
            return self.job.spot_usd_per_h
        return float(prices[min(self.tick, len(prices) - 1)])

    def _train(self, since_s: float, until_s: float) -> float:
        """Add what is done from then until then, or until all is; when that was."""
        training, most = self._training, self.job.nodes[1]
        soon = sorted(
            (at_s, self.nodes[attempt].offer.place, attempt)
            for attempt, at_s in training.begins_s.items()
            if at_s < until_s
        )
        if not training.at_work[training.home]:
            places = training.at_work.most_common(1)
            if places and places[0][1] > 0:
                training.home = places[0][0]
            elif soon:
                first = Counter(place for at_s, place, _ in soon if at_s == soon[0][0])
                training.home = first.most_common(1)[0][0]
        starts = [since_s] * min(most, training.at_work[training.home])
        starts += [max(since_s, at_s) for at_s, place, _ in soon if place == training.home]
        starts = self._world(starts[:most])
        for _, place, attempt in soon:
            del training.begins_s[attempt]
            training.at_work[place] += 1
        end_s = self._done_at(starts, until_s)
        self.bill.work += sum(max(0.0, end_s - start_s) for start_s in starts)
        return end_s

    def _world(self, starts: list[float]) -> list[float]:
        """Nobody trains before the job's least number of nodes is at work."""
        least = self.job.nodes[0]
        if len(starts) < least:
            return []
        return [max(start_s, starts[least - 1]) for start_s in starts]

    def _done_at(self, starts: list[float], until_s: float) -> float:
        """When the work is done by those that begin then (ascending); at latest `until_s`."""
        left = self.job.work - self.bill.work
        if left > len(starts) * self.tick_s:
            return until_s
        for workers, start_s in enumerate(starts, 1):
            next_s = starts[workers] if workers < len(starts) else math.inf
            if start_s + left / workers <= min(next_s, until_s):
                return start_s + left / workers
            left -= workers * (next_s - start_s)
        return until_s
