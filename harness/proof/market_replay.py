"""A recorded market, replayed through the real recovery loop: what would a policy have cost there?

Real: `recovery.recover`, book, lease, journal, orders, and the policy. Played: the cloud, whose
zones have as many machines in each tick as the trace says, and the nodes, which train, and commit
snapshots without content. Time jumps from tick to tick: everybody who sleeps wakes at the next one.
So a policy decides once in a tick, as often as it likes; what is refused is refused until the next.

A node is billed from when it was given, at the trace's price, and trains `changeover_s` later.
Those that a zone has no room for any more are taken at the tick's beginning, the newest first; with
`lost_s`, each of them takes that much of the run's newest work along. Everybody else trains on.

Pure: no torch, sockets, wall clock or global randomness.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from harness.bucket.journal import Journal
from harness.bucket.layout import LEAVE, order_key
from harness.bucket.lease import Lease
from harness.controller.book import Book
from harness.controller.recovery import RunOutcome, RunSpec, recover
from harness.core.known import Knowledge
from harness.core.world import DRAINED, FINISHED, STOPPED, Node, NodeState, Offer, Policy, World
from harness.market.traces import ZoneTrace
from harness.proof.sim_world import SortedStore
from storage.manifest import Manifest, PartList, Ref
from storage.snapshot_keys import MANIFESTS, manifest_key

STEP_S = 60.0  # of a world of all nodes; finer steps only cost time
ON_DEMAND = "/on-demand"  # ends the names of on-demand offers


@dataclass(frozen=True)
class ReplayJob:
    """What is to be done. `work_h`: hours that it takes on `nodes[1]` nodes, undisturbed;
    `deadline_h`: hours from the window's beginning. Prices are of one node, where the trace has
    none."""

    work_h: float
    deadline_h: float
    nodes: tuple[int, int] = (1, 1)
    changeover_s: float = 600.0
    lost_s: float = 0.0
    move_usd: float = 0.0
    spot_usd_per_h: float = 1.0
    on_demand_usd_per_h: float = 3.0


@dataclass(frozen=True)
class ReplayResult:
    """`usd`: the bill. `finish_h`: hours until the last step was committed; infinite: never.
    `spans`: of each node its offer, from when it was given until it was gone (hours), and whether
    it was taken away."""

    usd: float
    finish_h: float
    missed: bool
    launches: int
    moves: int  # a begin in another place than the node before
    losses: int
    on_demand_h: float
    spot_h: float
    goodput: float  # work that was kept, as a share of the node-hours that were paid for
    outcome: str
    reason: str
    spans: tuple[tuple[str, float, float, bool], ...] = field(repr=False, default=())


def replay(
    zones: Sequence[ZoneTrace],
    first: int,
    job: ReplayJob,
    policy: Policy,
    *,
    seed: int = 0,
    run: RunSpec | None = None,
) -> ReplayResult:
    """From tick `first` of aligned zones on. Beyond their end there is no spot."""
    return MarketReplay(zones, first, job, policy, seed, run).play()


class TickClock:
    """Whoever sleeps wakes at the next tick."""

    def __init__(self, tick_s: float, at_tick: Callable[[], None]):
        self.tick_s, self.at_tick, self.tick = tick_s, at_tick, 0

    def now(self) -> float:
        return self.tick * self.tick_s

    def sleep(self, seconds: float) -> None:
        self.tick += 1
        self.at_tick()


@dataclass
class Fleet:
    """The nodes that are there, and what they have done."""

    nodes: dict[int, Node] = field(default_factory=dict)
    usd: float = 0.0
    paid_s: float = 0.0
    on_demand_s: float = 0.0
    work: float = 0.0  # node-seconds that are done
    done_s: float | None = None
    place: str = ""  # of the node that was given last
    moves: int = 0

    @property
    def up(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.state is NodeState.UP]


class MarketReplay:
    """The cloud, the clock, the nodes and the learner of one replay."""

    def __init__(
        self,
        zones: Sequence[ZoneTrace],
        first: int,
        job: ReplayJob,
        policy: Policy,
        seed: int,
        run: RunSpec | None,
    ):
        self.zones = {zone.zone: zone for zone in zones}
        self.first, self.job, self.policy = first, job, policy
        self.tick_s = zones[0].tick_s
        self.clock = TickClock(self.tick_s, self._tick)
        self.store = SortedStore()
        self.rng = random.Random(seed)
        self.fleet, self.spans = Fleet(), list[tuple[str, float, float, bool]]()
        self.total_steps = max(1, round(job.work_h * 3600 / STEP_S))
        self.work = job.work_h * 3600 * job.nodes[1]  # node-seconds
        self.committed = 0
        # far beyond any deadline that can be kept: then it has failed
        limit_h = 4 * job.deadline_h + 4 * job.work_h + 24
        self.run = run or RunSpec(
            *job.nodes,
            poll_s=self.tick_s,
            max_hours=limit_h,
            max_hours_without_progress=limit_h,
            max_attempts_without_progress=10**9,
            block_limit_s=0.5 * self.tick_s,
            exit_grace_s=0.0,
            launch_s=0.0,
            terminate_s=0.0,
        )
        self._offers: tuple[int, list[Offer]] = (-1, [])

    def play(self) -> ReplayResult:
        world = World(self.clock, self, self.store, self.rng)
        journal = Journal(self.store, "controller-replay", self.clock.now)
        lease = Lease(self.store, self.clock, "replay", ttl_s=10 * self.tick_s)
        outcome = recover(self.run, self.policy, world, journal, lease, self)
        return self._result(outcome)

    # ---- Cloud -----------------------------------------------------------------------------------
    def offers(self) -> Sequence[Offer]:
        if self._offers[0] != self.clock.tick:
            found = list[Offer]()
            for name in self.zones:
                spot, job = self._usd_per_h(name), self.job
                dear = job.on_demand_usd_per_h
                found.append(Offer(spot, name, on_demand_usd_per_h=dear, place=name))
                found.append(Offer(dear, name + ON_DEMAND, False, place=name))
            self._offers = (self.clock.tick, found)
        return self._offers[1]

    def launch(self, attempt: int, offer: Offer) -> None:
        now = self.clock.now()
        there = sum(n.offer.name == offer.name for n in self.fleet.up)
        has_room = not offer.spot or there < self._room(offer.name)
        self.fleet.nodes[attempt] = (
            Node(attempt, offer, NodeState.UP, now, now, at_work_s=now + self.job.changeover_s)
            if has_room
            else Node(attempt, offer, NodeState.NO_CAPACITY, now, gone_s=now)
        )
        if has_room:
            if self.fleet.place not in ("", offer.place):
                self.fleet.usd += self.job.move_usd
                self.fleet.moves += 1
            self.fleet.place = offer.place

    def nodes(self) -> Sequence[Node]:
        """Those that are there, and those that ended since somebody looked last."""
        found = list(self.fleet.nodes.values())
        self.fleet.nodes = {n.attempt: n for n in found if n.alive}
        return found

    def terminate(self, attempt: int) -> None:
        self._end(attempt, self.clock.now(), STOPPED, "terminated")

    # ---- Learner ---------------------------------------------------------------------------------
    def known(self, now_s: float, book: Book, offers: Sequence[Offer]) -> Knowledge:
        return Knowledge(
            total_steps=self.total_steps,
            work=self.work,
            changeover_s=self.job.changeover_s,
            look_s=self.tick_s,
            lost_s=self.job.lost_s,
            move_usd=self.job.move_usd,
            deadline_s=self.job.deadline_h * 3600,
            capacity=book.capacity,
        )

    # ---- what happens ----------------------------------------------------------------------------
    def _at(self, values: Sequence[float], default: float) -> float:
        tick = self.first + self.clock.tick
        return float(values[tick]) if tick < len(values) else default

    def _room(self, zone: str) -> int:
        return int(self._at(self.zones[zone].nodes, 0.0))  # type: ignore[arg-type]

    def _usd_per_h(self, zone: str) -> float:
        prices = self.zones[zone].usd_per_h
        if prices is None:
            return self.job.spot_usd_per_h
        return self._at(prices, float(prices[-1]))  # type: ignore[arg-type]

    def _end(self, attempt: int, at_s: float, code: int | None, reason: str) -> None:
        node = self.fleet.nodes.get(attempt)
        if node is None or not node.alive:
            return
        self.fleet.nodes[attempt] = dataclasses.replace(
            node, state=NodeState.GONE, gone_s=at_s, exit_code=code, reason=reason
        )
        began_h = (node.up_s or 0.0) / 3600
        self.spans.append((node.offer.name, began_h, at_s / 3600, reason == "preempted"))

    def _tick(self) -> None:
        """The tick that has just ended is worked off and paid; then the market moves on."""
        self._work(self.clock.now() - self.tick_s)
        for zone in self.zones:
            there = [n for n in self.fleet.up if n.offer.name == zone]
            for node in sorted(there, key=lambda n: -n.attempt)[: len(there) - self._room(zone)]:
                lost = self.job.lost_s * len(self.fleet.up)
                self.fleet.work = max(
                    self.committed * self.work / self.total_steps, self.fleet.work - lost
                )
                self._end(node.attempt, self.clock.now(), None, "preempted")
        self._commit()

    def _work(self, since_s: float) -> None:
        """Everybody trains from then until now, or until the work is done; who was asked to leave
        is gone."""
        leaving = set(self.store.list(LEAVE))
        up = [n for n in self.fleet.up if order_key(LEAVE, n.attempt) not in leaving]
        for node in [n for n in self.fleet.up if n not in up]:
            self._end(node.attempt, since_s, DRAINED, "exited")
        end_s = self._done_at(since_s, up)
        for node in up:
            seconds = end_s - since_s
            worked_s = max(0.0, end_s - max(since_s, node.at_work_s or 0.0))
            self.fleet.work += worked_s
            usd_per_h = self._paid(node, since_s)
            self.fleet.usd += usd_per_h * seconds / 3600
            self.fleet.paid_s += seconds
            self.fleet.on_demand_s += 0.0 if node.offer.spot else seconds
        if self.fleet.work >= self.work - 1e-6 and self.fleet.done_s is None:
            self.fleet.done_s = end_s
            for node in up:
                self._end(node.attempt, end_s, FINISHED, "exited")

    def _paid(self, node: Node, since_s: float) -> float:
        if not node.offer.spot:
            return self.job.on_demand_usd_per_h
        prices = self.zones[node.offer.name].usd_per_h
        tick = self.first + round(since_s / self.tick_s)
        if prices is None:
            return self.job.spot_usd_per_h
        return float(prices[min(tick, len(prices) - 1)])

    def _done_at(self, since_s: float, up: Sequence[Node]) -> float:
        """When the work is done, within the tick that began then; else its end."""
        until_s, left = since_s + self.tick_s, self.work - self.fleet.work
        starts = sorted(max(since_s, n.at_work_s or 0.0) for n in up)
        for workers, (start_s, next_s) in enumerate(
            zip(starts, [*starts[1:], math.inf], strict=False), 1
        ):
            if start_s + left / workers <= min(next_s, until_s):
                return start_s + left / workers
            left -= workers * (next_s - start_s)
        return until_s

    def _commit(self) -> None:
        """Whoever has done steps makes a snapshot in every tick."""
        done = self.fleet.done_s is not None
        step = self.total_steps if done else int(self.total_steps * self.fleet.work / self.work)
        if step <= self.committed:
            return
        ref, self.committed = Ref(1, step), step
        share = PartList(ref, 0, 1, "replay", (), {}, {"step": step, "final": done})
        self.store.create(manifest_key(ref), Manifest.merge([share]).to_json().encode())
        for old in self.store.list(MANIFESTS)[:-2]:
            self.store.delete(old)

    def _result(self, outcome: RunOutcome) -> ReplayResult:
        for node in self.fleet.up:
            self._end(node.attempt, self.clock.now(), STOPPED, "terminated")
        fleet, spans = self.fleet, sorted(self.spans, key=lambda span: span[1:])
        finish_h = math.inf if fleet.done_s is None else fleet.done_s / 3600
        return ReplayResult(
            usd=fleet.usd,
            finish_h=finish_h,
            missed=finish_h > self.job.deadline_h + 1e-6,
            launches=len(spans),
            moves=fleet.moves,
            losses=sum(taken for *_, taken in spans),
            on_demand_h=fleet.on_demand_s / 3600,
            spot_h=(fleet.paid_s - fleet.on_demand_s) / 3600,
            goodput=fleet.work / fleet.paid_s if fleet.paid_s else 0.0,
            outcome=outcome.outcome,
            reason=outcome.reason,
            spans=tuple(spans),
        )
