"""Nodes on a recorded market: which are given, what they do, which are taken, and what they cost.

The mechanics of every replay, `market_replay.py` and `fast_replay.py`. Time passes in the market's
ticks. A node is given if its zone has room, is billed from then on at the price of each tick, for
at least a minute as clouds do, and trains `changeover_s` later. At a tick's beginning the nodes for
which their zone has no more room are taken, the newest first. With `lost_s` the newest work of all,
of so many seconds, is in no snapshot yet, and is lost whenever nodes that were training are taken.

As in a real run, nodes train together if they reach each other, that is in one place: where the
last world was, for as long as one of its nodes remains. While one node replaces another there may
be more nodes than the job may have; the surplus waits.

Pure.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from harness.controller.forecast.price_process import PricePath
from harness.core.estimates import CapacitySeen, Estimates
from harness.core.world import Node, NodeState, Offer
from harness.planner.optimum import WorkToDo
from harness.planner.traces import ZoneTrace

STEP_S = 60.0  # duration of a step on all nodes
LEAST_BILLED_S = 60.0  # of each node: AWS and GCP bill by the second after the first minute
ON_DEMAND = "/on-demand"  # suffix of the names of on-demand offers

# (a node's offer, given at (hours), gone at (hours), whether it was preempted)
NodeSpan: TypeAlias = tuple[str, float, float, bool]


@dataclass(frozen=True)
class ReplayJob:
    """The job to replay. `nodes`: the fewest that can train, and the most. `work_h`: hours on the
    most nodes, undisturbed; `deadline_h`: hours from the window's beginning. Prices are those of
    one node, where the zone has none. `move_usd`: cost of a start in another place than the node
    before; `moves`: (from, to, USD) of those that cost something else. `one_place`: nodes in
    different zones train together, and a move costs nothing (zones of one region).

    `snapshot_s`: time between two snapshots; 0 means one in every tick. `unnoticed`: the share of
    nodes that are preempted without a notice, and so lose all work since the newest snapshot;
    `pause_s`: how long the others then stand still. `step_s`: duration of a step on all nodes;
    smaller ones only cost time. `usd_per_hour_late`: price of an hour after the deadline; None: it
    is to be kept."""

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
    moves: tuple[tuple[str, str, float], ...] = ()
    usd_per_hour_late: float | None = None

    @property
    def total_steps(self) -> int:
        return max(1, round(self.work_h * 3600 / self.step_s))

    @property
    def work(self) -> float:
        """Node-seconds of the whole work."""
        return self.work_h * 3600 * self.nodes[1]

    def on_demand(self, zones: Sequence[ZoneTrace]) -> list[float]:
        """Return USD per hour of a node on demand in each zone."""
        return [zone.on_demand(self.on_demand_usd_per_h) for zone in zones]

    def undisturbed_usd(self, usd_per_h: float) -> float:
        """Return the bill of all the work on all nodes, at that price of each, undisturbed."""
        return self.nodes[1] * (self.work_h + self.changeover_s / 3600) * usd_per_h

    def moved_usd(self, source: str, target: str) -> float:
        """Return USD for a start in the place `target` after one in `source`."""
        if self.one_place or source in ("", target):
            return 0.0
        return self._moves.get((source, target), self.move_usd)

    @functools.cached_property
    def _moves(self) -> dict[tuple[str, str], float]:
        return {(source, target): usd for source, target, usd in self.moves}

    def to_do(self, zones: Sequence[ZoneTrace]) -> WorkToDo:
        """Return the work of all nodes in these zones, as an optimum takes it."""
        names = [zone.zone for zone in zones]
        pairs = tuple(tuple(self.moved_usd(a, b) for b in names) for a in names)
        late_h, late_usd = 0, self.usd_per_hour_late or 0.0
        if late_usd:  # beyond this it costs more than all of the work on demand, in time
            all_usd = self.undisturbed_usd(max(self.on_demand(zones)))
            late_h = math.ceil(min(all_usd / late_usd, self.limit_h - self.deadline_h))
        return WorkToDo(
            self.work_h * self.nodes[1],
            self.deadline_h + late_h,
            self.changeover_s,
            self.spot_usd_per_h,
            self.on_demand_usd_per_h,
            0.0 if self.one_place else self.move_usd,
            pairs if self.moves and not self.one_place else (),
            self.deadline_h,
            late_usd,
        )

    @property
    def limit_h(self) -> float:
        """Hours after which an unfinished run has failed: far beyond any deadline that can be
        kept."""
        return 4 * self.deadline_h + 4 * self.work_h + 24


@dataclass
class FleetBill:
    """The work and cost of all nodes so far. `work`: node-seconds that are done; `done_s`: when all
    of the work was."""

    usd: float = 0.0
    paid_s: float = 0.0
    on_demand_s: float = 0.0
    work: float = 0.0
    done_s: float | None = None
    moves: int = 0
    losses: int = 0

    def add(self, nodes: int, usd_per_h: float, seconds: float, spot: bool) -> None:
        """Bill this many nodes of one price."""
        self.usd += nodes * usd_per_h * seconds / 3600
        self.paid_s += nodes * seconds
        self.on_demand_s += 0.0 if spot else nodes * seconds

    @property
    def goodput(self) -> float:
        """Share of the paid node-hours that became kept work."""
        return self.work / self.paid_s if self.paid_s else 0.0


@dataclass
class _Training:
    """The nodes at work, by place. `begins_s`: when those that do not train yet will begin; `home`:
    the place of the last world."""

    at_work: Counter[str] = field(default_factory=Counter)
    begins_s: dict[int, float] = field(default_factory=dict)
    home: str = ""

    def gone(self, node: Node) -> bool:
        """Remove a node, and return whether it was at work."""
        if self.begins_s.pop(node.attempt, None) is not None:
            return False
        self.at_work[node.offer.place] -= 1
        return True


@dataclass
class _Saved:
    """The newest snapshot: when it was made, and the work in it. `overdue`: the accumulated
    fraction of a loss without notice, which spreads their share evenly."""

    at_s: float = 0.0
    work: float = 0.0
    overdue: float = 0.5

    def misses(self, unnoticed: float) -> bool:
        """Return whether this loss comes without a notice."""
        self.overdue += unnoticed
        if self.overdue < 1.0:
            return False
        self.overdue -= 1.0
        return True


class MarketFleet:
    """The nodes that exist (`nodes`), from tick `first` of aligned zones on. Beyond the zones' end
    there is no spot. Ticks are counted from `first`. `places`: of zones that are not their own
    place. `on_demand`: it is offered."""

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
        self._usd_per_h = dict[str, list[float]]()  # in each tick; the last one goes on
        for z in zones:
            spot = None if z.usd_per_h is None else z.usd_per_h[first:until].tolist()
            self._usd_per_h[z.zone] = spot or [job.spot_usd_per_h]
            self._usd_per_h[z.zone + ON_DEMAND] = [z.on_demand(job.on_demand_usd_per_h)]
        self._places = {
            z.zone: "" if job.one_place else (places or {}).get(z.zone, z.zone) for z in zones
        }
        self._on_demand = on_demand
        self.nodes: dict[int, Node] = {}
        self._by_offer: dict[str, dict[int, Node]] = {}
        self.bill, self.spans = FleetBill(), list[NodeSpan]()
        self._training, self._place = _Training(), ""  # place of the newest node
        self._offers: tuple[list[float], tuple[Offer, ...]] = [], ()
        self._saved = _Saved()

    @property
    def now_s(self) -> float:
        return self.tick * self.tick_s

    def known(
        self, capacity: Mapping[str, CapacitySeen], prices: Mapping[str, PricePath]
    ) -> Estimates:
        """Return what a policy may use for forecasts, besides what was seen of offers."""
        job = self.job
        return Estimates(
            total_steps=job.total_steps,
            work=job.work,
            changeover_s=job.changeover_s,
            look_s=self.tick_s,
            lost_s=job.lost_s,
            uncommitted_steps=self.uncommitted_steps,
            move_usd=job.move_usd,
            moves={} if job.one_place else {(a, b): usd for a, b, usd in job.moves},
            deadline_s=job.deadline_h * 3600,
            usd_per_hour_late=job.usd_per_hour_late,
            capacity=capacity,
            prices=prices,
        )

    def offers(self) -> tuple[Offer, ...]:
        """Return the offers, cheapest first; the same objects while prices do not change."""
        prices = [self._price(name) for name in self._rooms]
        if prices != self._offers[0]:
            found = list[Offer]()
            for name, usd in zip(self._rooms, prices, strict=True):
                place, dear = self._places[name], self._price(name + ON_DEMAND)
                found.append(Offer(usd, name, on_demand_usd_per_h=dear, place=place))
                if self._on_demand:
                    found.append(Offer(dear, name + ON_DEMAND, False, place=place))
            self._offers = prices, tuple(sorted(found))
        return self._offers[1]

    # ---- requests --------------------------------------------------------------------------------
    def launch(self, attempt: int, offer: Offer) -> Node:
        """Return the node that is given, or one without capacity."""
        now = self.now_s
        there = self._by_offer.setdefault(offer.name, {})
        if offer.spot and len(there) >= self._room(offer.name):
            return Node(attempt, offer, NodeState.NO_CAPACITY, now, gone_s=now)
        at_work_s = now + self.job.changeover_s
        node = Node(attempt, offer, NodeState.UP, now, now, at_work_s=at_work_s)
        self.nodes[attempt] = there[attempt] = node
        self._training.begins_s[attempt] = at_work_s
        if self._place not in ("", offer.place) and not self.job.one_place:
            self.bill.usd += self.job.moved_usd(self._place, offer.place)
            self.bill.moves += 1
        self._place = offer.place
        return node

    def end(self, attempt: int, at_s: float, taken: bool = False) -> Node | None:
        """Remove a node, and return it as it was; None if it does not exist."""
        node = self.nodes.pop(attempt, None)
        if node is None:
            return None
        del self._by_offer[node.offer.name][attempt]
        self._training.gone(node)
        up_s = node.up_s or 0.0
        if (unbilled_s := LEAST_BILLED_S - (at_s - up_s)) > 0:
            self.bill.add(1, node.usd_per_h, unbilled_s, node.offer.spot)
        self.spans.append((node.offer.name, up_s / 3600, at_s / 3600, taken))
        return node

    def up_of(self, name: str) -> int:
        """Return the number of nodes of an offer."""
        return len(self._by_offer.get(name, ()))

    # ---- what happens ----------------------------------------------------------------------------
    def work(self) -> None:
        """Execute and bill the tick's work, up to where the work is done; then begin the next
        tick."""
        since_s, bill = self.now_s, self.bill
        end_s = self._train(since_s, since_s + self.tick_s)
        seconds = end_s - since_s
        for name, there in self._by_offer.items():
            if there:
                spot = not name.endswith(ON_DEMAND)
                bill.add(len(there), self._price(name), seconds, spot)
        if bill.work >= self.job.work - 1e-6 and bill.done_s is None:
            bill.done_s = end_s
        self.tick += 1

    def too_many(self) -> list[int]:
        """Return the attempts for which there is no more room."""
        found: list[int] = []
        for name in self._rooms:
            there = self._by_offer.get(name, {})
            if len(there) > (room := self._room(name)):
                found += sorted(there)[room:][::-1]
        return found

    def take(self, attempt: int) -> Node | None:
        """Preempt a node, and return it as it was; None if it is gone."""
        node, training, bill = self.nodes.get(attempt), self._training, self.bill
        if node is None:
            return None
        if attempt not in training.begins_s and node.offer.place == training.home:
            saved = self._saved
            if not saved.misses(self.job.unnoticed):  # a notice leaves time for a snapshot
                self._save()
            bill.work = saved.work
            self._pause(attempt)
        bill.losses += 1
        return self.end(attempt, self.now_s, taken=True)

    def steps(self) -> int:
        """Return the number of steps that are in a snapshot now."""
        job, bill, saved = self.job, self.bill, self._saved
        if bill.done_s is not None:
            return job.total_steps
        if self.now_s - saved.at_s >= job.snapshot_s - 1e-6:
            self._save()
        return self._steps_of(saved.work)

    @property
    def uncommitted_steps(self) -> int:
        """Number of steps that are done, but in no snapshot yet."""
        return self._steps_of(self.bill.work) - self._steps_of(self._saved.work)

    # ---- one tick --------------------------------------------------------------------------------
    def _save(self) -> None:
        """Make a snapshot. The newest `lost_s` of the world's work are not in it."""
        world = min(self._training.at_work[self._training.home], self.job.nodes[1])
        saved_work = self.bill.work - self.job.lost_s * world
        self._saved.at_s, self._saved.work = self.now_s, max(self._saved.work, saved_work)

    def _steps_of(self, work: float) -> int:
        # the epsilon corrects rounding: sums of seconds may make a finished step lack a billionth
        return int(self.job.total_steps * work / self.job.work + 1e-9)

    def _pause(self, without: int) -> None:
        """Pause the nodes that trained with a node that is taken."""
        training, until_s = self._training, self.now_s + self.job.pause_s
        for attempt, node in self.nodes.items() if self.job.pause_s else ():
            if attempt != without and node.offer.place == training.home:
                if attempt not in training.begins_s:
                    training.at_work[training.home] -= 1
                training.begins_s[attempt] = max(until_s, training.begins_s.get(attempt, 0.0))

    def _room(self, zone: str) -> int:
        rooms = self._rooms[zone]
        return int(rooms[self.tick]) if self.tick < len(rooms) else 0

    def _price(self, name: str) -> float:
        prices = self._usd_per_h[name]
        return float(prices[min(self.tick, len(prices) - 1)])

    def _train(self, since_s: float, until_s: float) -> float:
        """Add the work from `since_s` to `until_s`, or until all is done; return when that was."""
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
        """Return when the nodes train: none before the job's minimum of nodes is at work."""
        least = self.job.nodes[0]
        if len(starts) < least:
            return []
        return [max(start_s, starts[least - 1]) for start_s in starts]

    def _done_at(self, starts: list[float], until_s: float) -> float:
        """Return when the work is done by nodes that begin at `starts` (ascending); at latest
        `until_s`."""
        left = self.job.work - self.bill.work
        if left > len(starts) * self.tick_s:
            return until_s
        for workers, start_s in enumerate(starts, 1):
            next_s = starts[workers] if workers < len(starts) else math.inf
            if start_s + left / workers <= min(next_s, until_s):
                return start_s + left / workers
            left -= workers * (next_s - start_s)
        return until_s
