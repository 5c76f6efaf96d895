"""A market, played without the bookkeeping of the recovery loop: hundreds of markets in seconds.

The same market, nodes, bill and views as in `market_replay.py`, with neither bucket nor facts: a
decision costs microseconds besides what the policy takes. A test compares it with that replay. It
is for forecasts, which need hundreds of markets; policies are judged by the real replay.

Pure: no torch, sockets, wall clock or global randomness.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.controller import combinators
from harness.controller.forecast.price_process import PricePath
from harness.controller.learning import PriceBook
from harness.core.estimates import CapacitySeen
from harness.core.facts import AttemptEnded
from harness.core.world import MOST_PLACES, Launch, Node, Policy, Stop, Terminate, View
from harness.ledger.attempts import CapacityBook, OfferBackoff
from harness.planner.market_nodes import MarketFleet, ReplayJob
from harness.planner.market_replay import ReplayResult, result_of
from harness.planner.traces import ZoneTrace

MOST_ROUNDS = 10_000  # decisions in one tick; a policy that decides more often has to wait


def play(
    zones: Sequence[ZoneTrace],
    first: int,
    job: ReplayJob,
    policy: Policy,
    *,
    seed: int = 0,
    seen: Mapping[str, CapacitySeen] | None = None,
    prices: Mapping[str, PricePath] | None = None,
    places: Mapping[str, str] | None = None,
    on_demand: bool = True,
    budget_usd: float | None = None,
) -> ReplayResult:
    """Play a policy from tick `first` of aligned zones on, as `market_replay.replay` does. `seen`:
    what is known of their capacity before, on a clock that is 0 at the beginning; `prices`: the
    same for their prices. `places`: of zones that are not their own place. `on_demand`: it is
    offered."""
    fleet = MarketFleet(zones, first, job, places, on_demand)
    return _QuickMarket(fleet, job, seed, seen, prices).play(policy, budget_usd)


@dataclass
class _QuickTally:
    """The counters that a real run's book has. `ended_usd`: cost of nodes that are gone, at the
    prices at which they were launched."""

    ended_usd: float = 0.0
    losses: int = 0
    attempts: int = 0
    committed: int = 0
    progress_s: float = 0.0


class _QuickMarket:
    """A reduced form of the recovery loop, its book and its bucket."""

    def __init__(
        self,
        fleet: MarketFleet,
        job: ReplayJob,
        seed: int,
        seen: Mapping[str, CapacitySeen] | None,
        prices: Mapping[str, PricePath] | None,
    ):
        self.job, self.fleet = job, fleet
        self.full = OfferBackoff(random.Random(seed), 0.5 * self.fleet.tick_s)
        self.seen, self.tally = CapacityBook(dict(seen or {})), _QuickTally()
        self.prices = PriceBook(before=prices)
        self.instead_of: dict[int, int] = {}  # attempt -> the one that it replaces
        self.knows = fleet.known(self.seen.capacity, self.prices.known)

    def play(self, policy: Policy, budget_usd: float | None) -> ReplayResult:
        alone = self._limited(policy, budget_usd)
        beside = self._limited(combinators.replacing(policy), budget_usd)
        reason = ""
        while self.fleet.bill.done_s is None and not reason:
            reason = self._decide(alone, beside)
            if not reason:
                self._pass()
        for attempt in list(self.fleet.nodes):
            self._end(self.fleet.end(attempt, self.fleet.now_s), self.fleet.now_s, "terminated")
        return result_of(self.fleet, "stopped" if reason else "done", reason)

    def _limited(self, policy: Policy, budget_usd: float | None) -> Policy:
        if budget_usd is not None:
            policy = combinators.within_budget(policy, usd=budget_usd)
        return combinators.within_hours(policy, hours=self.job.limit_h)

    # ---- decisions -------------------------------------------------------------------------------
    def _decide(self, alone: Policy, beside: Policy) -> str:
        """Decide until the policy waits. Return why it stops, or "". `beside`: the same policy,
        used while a replacement and the node that it replaces both exist; the latter is then told
        to leave."""
        now, fleet = self.fleet.now_s, self.fleet
        for _ in range(MOST_ROUNDS):
            view = self._view(now)
            decision = (beside if view.standing_in else alone)(view)
            if isinstance(decision, Launch) and self._has_place(decision):
                self._launch(decision, now)
                continue
            if isinstance(decision, Terminate):
                for attempt in (decision.attempt, *decision.also):
                    self._end(fleet.end(attempt, now), now, "terminated")
            return decision.reason if isinstance(decision, Stop) else ""
        return ""

    def _view(self, now: float) -> View:
        tally, alive = self.tally, tuple(self.fleet.nodes.values())
        offers = self.fleet.offers()
        self.prices.see(now, offers)
        prices, uncommitted = self.prices.known, self.fleet.uncommitted_steps
        if prices is not self.knows.prices or uncommitted != self.knows.uncommitted_steps:
            self.knows = dataclasses.replace(
                self.knows, prices=prices, uncommitted_steps=uncommitted
            )
        spent = sum((now - (n.up_s or 0.0)) / 3600 * n.offer.usd_per_h for n in alive)
        return View(
            now_s=now,
            started_s=0.0,
            min_nodes=self.job.nodes[0],
            max_nodes=self.job.nodes[1],
            alive=alive,
            offers=offers,
            blocked=dict(self.full.until_s),
            committed_step=tally.committed,
            last_progress_s=tally.progress_s,
            spent_usd=tally.ended_usd + spent,
            attempts=tally.attempts,
            losses=tally.losses,
            leave_s=2 * self.fleet.tick_s,
            standing_in={n: old for n, old in self.instead_of.items() if old in self.fleet.nodes},
            known=self.knows,
        )

    def _has_place(self, decision: Launch) -> bool:
        """Return whether the recovery loop would allow this launch."""
        alive = self.fleet.nodes
        replaced = {old for old in self.instead_of.values() if old in alive}
        if decision.instead_of in replaced:
            return False
        places = [
            n.offer.place
            for n in alive.values()
            if n.attempt not in replaced and n.attempt != decision.instead_of
        ]
        place = decision.offer.place
        return places.count(place) < self.job.nodes[1] and len({*places, place}) <= MOST_PLACES

    def _launch(self, decision: Launch, now: float) -> None:
        self.tally.attempts += 1
        attempt, name = self.tally.attempts, decision.offer.name
        if self.fleet.launch(attempt, decision.offer).alive:
            self.full.gave(name)
            self.seen.up(name, now, self.fleet.up_of(name))
            if decision.instead_of is not None:
                self.instead_of[attempt] = decision.instead_of
            return
        committed = self.tally.committed
        fact = AttemptEnded(attempt, "no-capacity", now, None, now, None, "", 0.0, 0.0, committed)
        self.seen.end(name, fact, self.fleet.up_of(name))
        self.full.refused(name, now)

    def _end(self, node: Node | None, at_s: float, end: str) -> None:
        """Count a node that is gone."""
        if node is None:
            return
        self.instead_of.pop(node.attempt, None)
        up_s, name = node.up_s or 0.0, node.offer.name
        usd = (at_s - up_s) / 3600 * node.offer.usd_per_h
        self.tally.ended_usd += usd
        self.tally.losses += end == "preempted"
        committed = self.tally.committed
        fact = AttemptEnded(
            node.attempt, end, up_s, up_s, at_s, None, end, at_s - up_s, usd, committed
        )
        self.seen.end(name, fact, self.fleet.up_of(name))

    # ---- time ------------------------------------------------------------------------------------
    def _pass(self) -> None:
        """Execute and bill the tick's work; then advance the market."""
        fleet, tally = self.fleet, self.tally
        fleet.work()
        done_s = fleet.bill.done_s
        if done_s is not None:
            for attempt in list(fleet.nodes):
                self._end(fleet.end(attempt, done_s), done_s, "finished")
        for attempt in fleet.too_many():
            self._end(fleet.take(attempt), fleet.now_s, "preempted")
        if (step := fleet.steps()) > tally.committed:
            tally.committed, tally.progress_s = step, fleet.now_s
