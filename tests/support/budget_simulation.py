"""What a run costs on a cloud as slow as real ones, that lies, under controllers that die.

The real recovery loop, lease, journal, orders, limits and heartbeats, at a virtual time. A launch
takes 7 to 10 minutes and is billed nearly from its beginning; a node drains for 60 to 170 s, and is
billed for another 90 to 300 s while it ends. The cloud is silent for up to 20 minutes, hides nodes,
calls living ones gone and gone ones alive, lists late, and forgets every third word to end one.
Controllers die at any call; sometimes nobody leads the run ever again. Nodes hear orders, beat, and
keep the run's limits by themselves (`agent/leaderless.py`).

Pure: everything follows from the seed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.agent.run_orders import LOOK_EVERY_S, Leaderless, LimitsKeeper
from harness.bucket.controller_lease import Lease, run_limits, sign_of_life
from harness.bucket.journal import Journal
from harness.bucket.layout import CONTROL, MEMBERS, attempt_of, member_key, member_of
from harness.bucket.orders import asked_to_leave, stop_order
from harness.controller.policies import cheapest
from harness.controller.recovery import RunOutcome, recover
from harness.controller.run_limits import RunSpec
from harness.core.world import STOPPED, CloudUnavailable, Fenced, Node, NodeState, Offer, World
from harness.lab.simulation.invariants import Violation
from harness.lab.simulation.sim_world import VirtualClock
from storage.errors import StoreError
from storage.stores.folder_store import SortedStore
from storage.testing.faulty_store import Crash
from support.system.shrink import BrokenSeed, many

HEAR_S = 10.0  # nodes look for orders so often
BEAT_S = 10.0
LOST_SHARE, NODE_S = 0.02, 60.0  # of the budget, or of each node: what may be spent beyond it
SETTLE_S = 7200.0  # after its end nothing of a run may be billed any more


@dataclass(frozen=True)
class MoneyWeather:
    """Rates are per hour; 0: never. `lies`: of the cloud. `deaths`: of the controller. `orphaned`:
    chance that nobody leads the run again after one. `losses`: nodes that the cloud takes."""

    nodes: int = 4
    budget_usd: float = 300.0
    usd_per_h: float = 55.0
    lies: float = 4.0
    deaths: float = 0.5
    orphaned: float = 0.2
    back_s: tuple[float, float] = (5.0, 1800.0)
    losses: float = 0.3
    max_hours: float | None = None

    @classmethod
    def of(cls, rng: random.Random) -> MoneyWeather:
        """Each seed has its own mixture, and some things not at all."""
        nodes = rng.randint(1, 6)
        usd_per_h = rng.choice((4.0, 30.0, 55.0))
        return cls(
            nodes=nodes,
            usd_per_h=usd_per_h,
            budget_usd=nodes * usd_per_h * rng.uniform(0.8, 2.0),
            lies=rng.choice((0.0, 4.0, 10.0)),
            deaths=rng.choice((0.0, 0.5, 2.0)),
            orphaned=rng.choice((0.0, 0.3)),
            losses=rng.choice((0.0, 0.3, 1.0)),
            max_hours=rng.uniform(0.5, 2.0) if rng.random() < 0.1 else None,
        )


@dataclass(frozen=True)
class Bill:
    """What became of a simulated run. `led`: somebody led it to its end."""

    seed: int
    outcome: RunOutcome | None
    usd: float
    budget_usd: float
    controllers: int
    nodes: int  # that were billed
    leaked_h: float

    @property
    def led(self) -> bool:
        return self.outcome is not None


@dataclass
class _Machine:
    """What a node really is, and does."""

    node: Node
    keeper: LimitsKeeper
    lease: Leaderless
    began_s: float  # billed from then on
    ended_s: float | None = None  # ... until then
    ending: bool = False
    leaving: bool = False
    agent_s: float | None = None  # its agent beats from then on
    silent_s: float | None = None  # ... until then
    goodbye: bool = False


class _Bucket(SortedStore):
    """Members in it beat, for as long as their agents live; orders reach them."""

    def __init__(self, cloud: MoneyCloud):
        super().__init__("memory://money")
        self._cloud = cloud

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        name = member_of(key) if key.startswith(MEMBERS) else ""
        return self._cloud.said(attempt_of(name)) if name else super().get(key, start, end)

    def put(self, key: str, data: bytes | memoryview) -> None:
        super().put(key, data)
        if key.startswith(CONTROL):
            self._cloud.ordered()


class MoneyCloud:
    """Nodes, as they are and as the cloud tells of them."""

    def __init__(
        self, weather: MoneyWeather, rng: random.Random, keeper: Callable[[], LimitsKeeper]
    ):
        self.weather, self.rng, self._keeper, self.clock = weather, rng, keeper, VirtualClock()
        self.store = _Bucket(self)
        self.all: dict[int, _Machine] = {}
        self.offer = Offer(weather.usd_per_h, "aws/us-east-1/p5", accelerator="H100", gpus=8)
        self.silent_s, self.lies = 0.0, dict[tuple[str, int], float]()
        if weather.lies:
            self._lie_later()

    # -- what controllers may call
    def offers(self) -> Sequence[Offer]:
        self._answer()
        return (self.offer,)

    def nodes(self) -> Sequence[Node]:
        self._answer()
        return [seen for m in self.all.values() if (seen := self._seen(m)) is not None]

    def launch(self, attempt: int, offer: Offer) -> None:
        self._answer()
        if attempt in self.all:
            return
        now = self.clock.now()
        node = Node(attempt, offer, NodeState.PENDING, now)
        self.all[attempt] = _Machine(
            node, self._keeper(), Leaderless(0.0), now + self.rng.uniform(20, 90)
        )
        if self.weather.lies:
            self.lies["hide", attempt] = now + self.rng.uniform(0, 60)
        self.clock.after(self.rng.uniform(420, 600), lambda: self._arrive(attempt))

    def terminate(self, attempt: int) -> None:
        self._answer()
        forgotten = self.weather.lies and self.rng.random() < 0.33
        hidden = self.lies.get(("hide", attempt), 0.0) > self.clock.now()
        if attempt in self.all and not forgotten and not hidden:
            self.end(attempt, None)

    # -- what it tells
    def _answer(self) -> None:
        if self.clock.now() < self.silent_s:
            raise CloudUnavailable("no answer (simulated)")

    def _seen(self, m: _Machine) -> Node | None:
        now, node, attempt = self.clock.now(), m.node, m.node.attempt
        lies = {what: self.lies.get((what, attempt), 0.0) > now for what in ("hide", "dead", "up")}
        if lies["hide"]:
            return None
        if lies["dead"] and node.state is NodeState.UP:
            gone = {"state": NodeState.GONE, "gone_s": now, "reason": "preempted"}
            return dataclasses.replace(node, **gone)  # type: ignore[arg-type]
        if lies["up"] and not node.alive and node.up_s is not None:
            return dataclasses.replace(
                node, state=NodeState.UP, gone_s=None, exit_code=None, reason=""
            )
        return node

    def _lie_later(self) -> None:
        self.clock.after(self.rng.expovariate(self.weather.lies / 3600), self._lie)

    def _lie(self) -> None:
        now, rng = self.clock.now(), self.rng
        what = rng.choice(("silent", "hide", "dead", "up"))
        if what == "silent":
            self.silent_s = now + rng.uniform(10, 1200)
        elif self.all:
            self.lies[what, rng.choice(sorted(self.all))] = now + rng.uniform(10, 600)
        self._lie_later()

    # -- what nodes do
    def said(self, attempt: int) -> bytes:
        """What its member's object says now."""
        m, now = self.all[attempt], self.clock.now()
        until_s = now if m.silent_s is None else min(now, m.silent_s)
        beat = int((until_s - (m.agent_s or 0.0)) / BEAT_S)
        state = "gone" if m.goodbye else "in"
        return json.dumps({"state": state, "beat": beat, "beat_s": BEAT_S}).encode()

    def ordered(self) -> None:
        for m in self.all.values():
            if m.agent_s is not None and not m.leaving:
                self.clock.after(self.rng.uniform(0, HEAR_S), lambda m=m: self._hear(m))  # type: ignore[misc]

    def _arrive(self, attempt: int) -> None:
        m, now = self.all[attempt], self.clock.now()
        if m.ending:
            return
        m.node = dataclasses.replace(m.node, state=NodeState.UP, up_s=m.began_s)
        m.agent_s = now
        self.store.put(member_key(f"m{attempt:04d}-sim"), b"")
        self._hear(m)
        self._keep(m)
        if self.weather.losses:
            lives_s = self.rng.expovariate(self.weather.losses / 3600)
            self.clock.after(lives_s, lambda: self.end(attempt, None))

    def _hear(self, m: _Machine) -> None:
        if stop_order(self.store) is not None or asked_to_leave(self.store, m.node.attempt):
            self._leave(m)

    def _keep(self, m: _Machine) -> None:
        """It keeps the run's limits, if nobody else does."""
        if m.leaving or m.ending:
            return
        now = self.clock.now()
        m.lease.see(now, *sign_of_life(self.store, m.lease.term))
        if m.keeper.see(now, run_limits(self.store), m.lease):
            self._leave(m)
            return
        self.clock.after(LOOK_EVERY_S, lambda: self._keep(m))

    def _leave(self, m: _Machine) -> None:
        """It drains, says goodbye, and its machine is ended."""
        if m.leaving or m.ending:
            return
        m.leaving = True

        def gone() -> None:
            if not m.ending:
                m.goodbye, m.silent_s = True, self.clock.now()
                self.end(m.node.attempt, STOPPED)

        self.clock.after(self.rng.uniform(60, 170), gone)

    def end(self, attempt: int, code: int | None) -> None:
        """The cloud ends it; it is billed meanwhile."""
        m = self.all[attempt]
        if m.ending:
            return
        m.ending, m.silent_s = True, m.silent_s or self.clock.now() + self.rng.uniform(0, 60)
        self.clock.after(self.rng.uniform(90, 300), lambda: self._gone(m, code))

    def _gone(self, m: _Machine, code: int | None) -> None:
        now = self.clock.now()
        up_s, why = min(m.began_s, now), "terminated" if code is None else "exited"
        m.ended_s = now
        m.node = dataclasses.replace(
            m.node, state=NodeState.GONE, up_s=up_s, gone_s=now, exit_code=code, reason=why
        )

    # -- the truth
    def billed_s(self, m: _Machine) -> float:
        until_s = self.clock.now() if m.ended_s is None else m.ended_s
        return max(0.0, until_s - m.began_s)

    @property
    def usd(self) -> float:
        return sum(self.billed_s(m) for m in self.all.values()) / 3600 * self.weather.usd_per_h


class _Mortal:
    """A clock and a cloud, as a controller has them that dies at `dies_s`."""

    def __init__(self, cloud: MoneyCloud, dies_s: float, rng: random.Random):
        self._cloud, self._dies_s, self._rng = cloud, dies_s, rng

    def now(self) -> float:
        return self._cloud.clock.now()

    def sleep(self, seconds: float) -> None:
        self._cloud.clock.sleep(seconds)
        self._live()

    def offers(self) -> Sequence[Offer]:
        return self._cloud.offers()

    def nodes(self) -> Sequence[Node]:
        self._live()
        return self._cloud.nodes()

    def launch(self, attempt: int, offer: Offer) -> None:
        self._act(lambda: self._cloud.launch(attempt, offer))

    def terminate(self, attempt: int) -> None:
        self._act(lambda: self._cloud.terminate(attempt))

    def _live(self) -> None:
        if self._cloud.clock.now() >= self._dies_s:
            raise Crash

    def _act(self, do: Callable[[], None]) -> None:
        """Some die just before an act, and some right after it."""
        chance = self._rng.random() if self._dies_s < math.inf else 1.0
        if chance < 0.02:
            raise Crash
        do()
        if chance < 0.04:
            raise Crash


def spend(
    seed: int,
    weather: MoneyWeather | None = None,
    recover: Callable[..., RunOutcome] = recover,
    keeper: Callable[[], LimitsKeeper] = LimitsKeeper,
) -> Bill:
    """One run that never ends by itself. Raises Violation if it cost too much or left something
    behind, with the line that reproduces it. `recover`, `keeper`: tests put broken ones in, to see
    that it is found."""
    rng = random.Random(seed)
    weather = weather or MoneyWeather.of(rng)
    cloud = MoneyCloud(weather, rng, keeper)
    run = RunSpec(
        *(1, weather.nodes, 10.0, weather.budget_usd, weather.max_hours),
        lost_after_s=90.0,
        block_limit_s=600.0,
        exit_grace_s=180.0,
        terminate_timeout_s=1800.0,
        max_attempts_without_progress=10_000,
    )
    outcome, controllers = None, 0
    while outcome is None:
        controllers += 1
        outcome = _lead(cloud, functools.partial(recover, run, cheapest), rng, controllers)
        if outcome is None and rng.random() < weather.orphaned:
            break
        cloud.clock.sleep(rng.uniform(*weather.back_s))
    # nobody leads it: until the budget would be spent by one node, or the end settles
    alone_s = 0.0 if outcome else weather.nodes * 3 * 3600.0
    cloud.clock.sleep(SETTLE_S + alone_s)
    left = [m for m in cloud.all.values() if m.ended_s is None]
    billed = [m for m in cloud.all.values() if cloud.billed_s(m)]
    leaked_h = sum(cloud.billed_s(m) for m in left) / 3600
    bill = Bill(seed, outcome, cloud.usd, weather.budget_usd, controllers, len(billed), leaked_h)
    _check(bill, weather)
    return bill


def _lead(
    cloud: MoneyCloud, recover: Callable[..., RunOutcome], rng: random.Random, number: int
) -> RunOutcome | None:
    """One controller; None: it died, or gave up."""
    deaths = cloud.weather.deaths
    now = cloud.clock.now()
    dies_s = now + rng.expovariate(deaths / 3600) if deaths else math.inf
    mortal, name = _Mortal(cloud, dies_s, rng), f"controller-{number}"
    lease = Lease(cloud.store, mortal, name, ttl_s=20.0)
    world = World(mortal, mortal, cloud.store, random.Random(rng.random()))
    try:
        journal = Journal(cloud.store, name, mortal.now)
        return recover(world, journal, lease)
    except (Crash, Fenced, CloudUnavailable, StoreError):
        return None


def _check(bill: Bill, weather: MoneyWeather) -> None:
    again = f"\n  reproduce it: support.budget_simulation.spend({bill.seed})  {weather}"
    node_usd = bill.nodes * weather.usd_per_h * NODE_S / 3600
    slack_usd = max(LOST_SHARE * bill.budget_usd, node_usd)
    if bill.usd > bill.budget_usd + slack_usd:
        raise Violation(
            f"budget: {bill.usd:.2f} USD were spent of {bill.budget_usd:.2f} (+ {slack_usd:.2f})"
            f", {bill.outcome}{again}"
        )
    if bill.leaked_h:
        raise Violation(f"leak: {bill.leaked_h:.1f} node-hours are billed after the end{again}")
    if bill.outcome is not None and bill.outcome.outcome != "stopped":
        raise Violation(f"end: wanted it stopped by a limit, found {bill.outcome}{again}")


# `python -m support money`: what many simulated runs cost, and whether any broke its budget


def one(seed: int) -> Bill | BrokenSeed:
    """A run."""
    try:
        return spend(seed)
    except Violation as e:
        return BrokenSeed(seed, str(e))


def command(seeds: int, seed: int | None, first: int, jobs: int) -> int:
    """Prints what came of it; 1 if a run cost too much or left something behind."""
    began_s = time.perf_counter()
    asked = range(first, first + seeds) if seed is None else [seed]
    found = list(many(asked, jobs, one))
    broken = [b for b in found if isinstance(b, BrokenSeed)]
    bills = [b for b in found if isinstance(b, Bill)]
    for b in broken:
        print(f"seed {b.seed}: {b.words}", flush=True)
    orphans = sum(not b.led for b in bills)
    shares = sorted(b.usd / b.budget_usd for b in bills)
    print(
        f"{len(found)} runs, {orphans} of which nobody led to their ends: {len(broken)} broke "
        "their budgets or left something behind"
    )
    if shares:
        print(
            f"spent of the budget: median {statistics.median(shares):.1%}, most {shares[-1]:.1%}; "
            f"{sum(b.controllers for b in bills)} controllers, {sum(b.nodes for b in bills)} nodes"
        )
    print(f"on {jobs} cores, in {time.perf_counter() - began_s:.0f} s")
    return 1 if broken else 0
