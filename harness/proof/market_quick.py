"""A market, played without the paperwork of the recovery loop: hundreds of markets in seconds.

The same market, nodes, bill and views as in `market_replay.py`, with neither bucket nor facts: a
decision costs microseconds besides what the policy takes. A test holds it to that replay. For
forecasts, which need hundreds of markets; what a policy is judged by is the real replay.

Pure: no torch, sockets, wall clock or global randomness.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from harness.controller import policies
from harness.controller.book import FullOffers
from harness.controller.capacity import CapacityBook
from harness.core.facts import AttemptEnded
from harness.core.known import CapacitySeen, Knowledge
from harness.core.world import (
    Launch,
    Node,
    NodeState,
    Offer,
    Policy,
    Stop,
    Terminate,
    View,
)
from harness.market.traces import ZoneTrace
from harness.proof.market_replay import ON_DEMAND, STEP_S, ReplayJob, ReplayResult

MOST_ROUNDS = 10_000  # decisions in one tick; a policy that asks more often waits


def play(
    zones: Sequence[ZoneTrace],
    first: int,
    job: ReplayJob,
    policy: Policy,
    *,
    seed: int = 0,
    seen: Mapping[str, CapacitySeen] | None = None,
    budget_usd: float | None = None,
) -> ReplayResult:
    """From tick `first` of aligned zones on, as `market_replay.replay` does. `seen`: what is known
    of their capacity before, on a clock that is 0 at the beginning."""
    return _QuickMarket(zones, first, job, seed, seen).play(policy, budget_usd)


@dataclass
class _QuickFleet:
    """The nodes that are there, what they have done and cost."""

    nodes: dict[int, Node] = field(default_factory=dict)
    usd: float = 0.0
    ended_usd: float = 0.0  # of those that are gone, at the prices that they were launched for
    paid_s: float = 0.0
    on_demand_s: float = 0.0
    work: float = 0.0
    done_s: float | None = None
    place: str = ""
    moves: int = 0
    losses: int = 0
    attempts: int = 0
    committed: int = 0
    progress_s: float = 0.0


class _QuickMarket:
    """Zones by name, as plain lists from the first tick on."""

    def __init__(
        self,
        zones: Sequence[ZoneTrace],
        first: int,
        job: ReplayJob,
        seed: int,
        seen: Mapping[str, CapacitySeen] | None,
    ):
        self.job, self.tick_s, self.tick = job, zones[0].tick_s, 0
        self.limit_h = 4 * job.deadline_h + 4 * job.work_h + 24
        until = first + math.ceil(self.limit_h * 3600 / self.tick_s) + 1
        self.rooms = {z.zone: z.nodes[first:until].tolist() for z in zones}
        self.usd_per_h: dict[str, list[float] | None] = {
            z.zone: None if z.usd_per_h is None else z.usd_per_h[first:until].tolist()
            for z in zones
        }
        self.total_steps = max(1, round(job.work_h * 3600 / STEP_S))
        self.work = job.work_h * 3600 * job.nodes[1]
        self.full = FullOffers(random.Random(seed), 0.5 * self.tick_s)
        self.seen = CapacityBook(dict(seen or {}))
        self.fleet, self.spans = _QuickFleet(), list[tuple[str, float, float, bool]]()
        self.knows = Knowledge(
            total_steps=self.total_steps,
            work=self.work,
            changeover_s=job.changeover_s,
            lost_s=job.lost_s,
            move_usd=job.move_usd,
            deadline_s=job.deadline_h * 3600,
            capacity=self.seen.capacity,
        )
        self._offers: tuple[list[float], tuple[Offer, ...]] = [], ()

    def play(self, policy: Policy, budget_usd: float | None) -> ReplayResult:
        if budget_usd is not None:
            policy = policies.within_budget(policy, usd=budget_usd)
        policy = policies.within_hours(policy, hours=self.limit_h)
        reason = ""
        while self.fleet.done_s is None and not reason:
            reason = self._decide(policy)
            if not reason:
                self._pass()
        return self._result(reason)

    # ---- decisions -------------------------------------------------------------------------------
    def _decide(self, policy: Policy) -> str:
        """Until the policy waits. Why it stops, if it does."""
        offers, now = self._offered(), self.tick * self.tick_s
        for _ in range(MOST_ROUNDS):
            decision = policy(self._view(offers, now))
            if isinstance(decision, Launch) and self._has_place(decision):
                self._launch(decision.offer, now)
                continue
            if isinstance(decision, Terminate):
                for attempt in (decision.attempt, *decision.also):
                    self._end(attempt, now, "terminated")
            return decision.reason if isinstance(decision, Stop) else ""
        return ""

    def _view(self, offers: tuple[Offer, ...], now: float) -> View:
        fleet = self.fleet
        alive = tuple(fleet.nodes.values())
        spent = sum((now - (n.up_s or 0.0)) / 3600 * n.offer.usd_per_h for n in alive)
        return View(
            now_s=now,
            started_s=0.0,
            min_nodes=self.job.nodes[0],
            max_nodes=self.job.nodes[1],
            alive=alive,
            offers=offers,
            blocked=dict(self.full.until_s),
            committed_step=fleet.committed,
            last_progress_s=fleet.progress_s,
            spent_usd=fleet.ended_usd + spent,
            attempts=fleet.attempts,
            losses=fleet.losses,
            leave_s=2 * self.tick_s,
            known=self.knows,
        )

    def _offered(self) -> tuple[Offer, ...]:
        """Cheapest first; the same ones for as long as prices are."""
        prices = [self._price(name) for name in self.rooms]
        if prices != self._offers[0]:
            dear, found = self.job.on_demand_usd_per_h, list[Offer]()
            for name, usd in zip(self.rooms, prices, strict=True):
                found.append(Offer(usd, name, on_demand_usd_per_h=dear, place=name))
                found.append(Offer(dear, name + ON_DEMAND, False, place=name))
            self._offers = prices, tuple(sorted(found))
        return self._offers[1]

    def _has_place(self, decision: Launch) -> bool:
        """As the recovery loop says."""
        places = [
            n.offer.place for n in self.fleet.nodes.values() if n.attempt != decision.instead_of
        ]
        place = decision.offer.place
        return places.count(place) < self.job.nodes[1] and len({*places, place}) <= 2

    def _launch(self, offer: Offer, now: float) -> None:
        fleet, name = self.fleet, offer.name
        fleet.attempts += 1
        there = sum(n.offer.name == name for n in fleet.nodes.values())
        if offer.spot and there >= self._room(name):
            fact = AttemptEnded(
                fleet.attempts, "no-capacity", now, None, now, None, "", 0.0, 0.0, fleet.committed
            )
            self.seen.end(name, fact, False)
            self.full.refused(name, now)
            return
        fleet.nodes[fleet.attempts] = Node(
            fleet.attempts,
            offer,
            NodeState.UP,
            now,
            now,
            at_work_s=now + self.job.changeover_s,
        )
        if fleet.place not in ("", offer.place):
            fleet.usd += self.job.move_usd
            fleet.moves += 1
        fleet.place = offer.place
        self.full.gave(name)
        self.seen.up(name, now)

    def _end(self, attempt: int, at_s: float, end: str) -> None:
        node = self.fleet.nodes.pop(attempt, None)
        if node is None:
            return
        up_s = node.up_s or 0.0
        usd = (at_s - up_s) / 3600 * node.offer.usd_per_h
        self.fleet.ended_usd += usd
        self.fleet.losses += end == "preempted"
        self.spans.append((node.offer.name, up_s / 3600, at_s / 3600, end == "preempted"))
        others_up = any(n.offer.name == node.offer.name for n in self.fleet.nodes.values())
        fact = AttemptEnded(
            attempt, end, up_s, up_s, at_s, None, end, at_s - up_s, usd, self.fleet.committed
        )
        self.seen.end(node.offer.name, fact, others_up)

    # ---- time ------------------------------------------------------------------------------------
    def _room(self, name: str) -> int:
        rooms = self.rooms[name]
        return rooms[self.tick] if self.tick < len(rooms) else 0

    def _price(self, name: str) -> float:
        prices = self.usd_per_h[name]
        if prices is None:
            return self.job.spot_usd_per_h
        return prices[min(self.tick, len(prices) - 1)]

    def _pass(self) -> None:
        """The tick is worked off and paid; then the market moves on."""
        since_s = self.tick * self.tick_s
        self._work(since_s)
        self.tick += 1
        if self.fleet.done_s is None:
            self._take()
        fleet = self.fleet
        step = int(self.total_steps * fleet.work / self.work)
        if step > fleet.committed:
            fleet.committed, fleet.progress_s = step, since_s + self.tick_s

    def _work(self, since_s: float) -> None:
        fleet = self.fleet
        if not fleet.nodes:
            return
        end_s = self._done_at(since_s)
        seconds = end_s - since_s
        for node in fleet.nodes.values():
            fleet.work += max(0.0, end_s - max(since_s, node.at_work_s or 0.0))
            spot = node.offer.spot
            usd_per_h = self._price(node.offer.name) if spot else self.job.on_demand_usd_per_h
            fleet.usd += usd_per_h * seconds / 3600
            fleet.paid_s += seconds
            fleet.on_demand_s += 0.0 if spot else seconds
        if fleet.work >= self.work - 1e-6:
            fleet.done_s = end_s
            for attempt in list(fleet.nodes):
                self._end(attempt, end_s, "finished")

    def _done_at(self, since_s: float) -> float:
        """When the work is done, within the tick that began then; else its end."""
        until_s, left = since_s + self.tick_s, self.work - self.fleet.work
        starts = sorted(max(since_s, n.at_work_s or 0.0) for n in self.fleet.nodes.values())
        for workers, start_s in enumerate(starts, 1):
            next_s = starts[workers] if workers < len(starts) else math.inf
            if start_s + left / workers <= min(next_s, until_s):
                return start_s + left / workers
            left -= workers * (next_s - start_s)
        return until_s

    def _take(self) -> None:
        """Those that a zone has no room for any more are taken, the newest first."""
        by_name: dict[str, list[int]] = {}
        for node in self.fleet.nodes.values():
            if node.offer.spot:
                by_name.setdefault(node.offer.name, []).append(node.attempt)
        for name in self.rooms:
            attempts = sorted(by_name.get(name, ()), reverse=True)
            for attempt in attempts[: max(0, len(attempts) - self._room(name))]:
                lost = self.job.lost_s * len(self.fleet.nodes)
                kept = self.fleet.committed * self.work / self.total_steps
                self.fleet.work = max(kept, self.fleet.work - lost)
                self._end(attempt, self.tick * self.tick_s, "preempted")

    def _result(self, reason: str) -> ReplayResult:
        fleet = self.fleet
        for attempt in list(fleet.nodes):
            self._end(attempt, self.tick * self.tick_s, "terminated")
        finish_h = math.inf if fleet.done_s is None else fleet.done_s / 3600
        return ReplayResult(
            usd=fleet.usd,
            finish_h=finish_h,
            missed=finish_h > self.job.deadline_h + 1e-6,
            launches=len(self.spans),
            moves=fleet.moves,
            losses=fleet.losses,
            on_demand_h=fleet.on_demand_s / 3600,
            spot_h=(fleet.paid_s - fleet.on_demand_s) / 3600,
            goodput=fleet.work / fleet.paid_s if fleet.paid_s else 0.0,
            outcome="stopped" if reason else "done",
            reason=reason,
            spans=tuple(sorted(self.spans, key=lambda span: span[1:])),
        )
