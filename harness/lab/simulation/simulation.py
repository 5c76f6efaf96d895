"""A simulated world for the real recovery loop, lease, journal and orders. For users
("what would this policy have cost?", `harness market simulate`) as well as for tests
(`invariants.py` watches every event).

Everything follows from the seed. Time is virtual: it passes only while a controller sleeps or calls
something. Controllers run the real `recovery.recover`; they die, or are overtaken by another one,
at random operations. Nodes simply train (`sim_nodes.py`): they commit snapshots, drain on orders
and notices, fail or are lost. From `calm_s` on nothing goes wrong any more and there is capacity:
then the run must end.

Pure: no threads, sockets, wall clock or global randomness.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness.bucket.archive import read_facts
from harness.bucket.controller_lease import Lease
from harness.bucket.journal import Journal
from harness.bucket.layout import FACTS, STOP_KEY, StopOrder
from harness.controller.policies import cheapest, resolve
from harness.controller.recovery import RunOutcome, recover
from harness.controller.run_limits import RunSpec
from harness.core.facts import Stamped, Unreadable
from harness.core.world import CloudUnavailable, Fenced, Node, Offer, Policy, World
from harness.lab.simulation import invariants
from harness.lab.simulation.invariants import Acted, Checker, SimulationEvent, Violation
from harness.lab.simulation.sim_nodes import SimNodes, SimulatedTraining
from harness.lab.simulation.sim_world import (
    FaultRates,
    Refused,
    SimCloud,
    VirtualClock,
    WatchedStore,
)
from storage.errors import NotFound, StoreError
from storage.stores.folder_store import SortedStore
from storage.stores.objects import ObjectStore
from storage.stores.retries import Patience
from storage.testing.faulty_store import Crash, FaultyStore

if TYPE_CHECKING:
    from harness.lab.simulation.sim_world import T


@dataclass(frozen=True)
class SimulationBuild:
    """The classes of which a simulation builds its controllers and bucket. Tests insert a broken
    one, to see that its fault is found."""

    lease: type[Lease] = Lease
    journal: type[Journal] = Journal
    store: Callable[[], ObjectStore] = SortedStore
    recover: Callable[..., RunOutcome] = recover


@dataclass(frozen=True)
class SimResult:
    seed: int
    outcome: str
    reason: str
    committed_step: int
    elapsed_s: float
    usd: float  # what the cloud charges
    facts: tuple[Stamped, ...]
    attempts: int  # that had a node
    controllers: int  # how many led the run, one after the other
    epochs: int
    steps_redone: int
    weather: FaultRates = field(repr=False)


def simulate(
    seed: int,
    policy: Policy = cheapest,
    run: RunSpec | None = None,
    weather: FaultRates | None = None,
    job: SimulatedTraining | None = None,
    build: SimulationBuild | None = None,
) -> SimResult:
    """Simulate one run in one world. Raises invariants.Violation, with the line that reproduces
    it."""
    rng = random.Random(seed)
    weather = weather or FaultRates.of(rng)
    run = run or RunSpec(
        1, rng.randint(1, 4), poll_s=5.0, exit_grace_s=60.0, max_hours_without_progress=2.0
    )
    sim = Simulation(
        seed, rng, policy, run, weather, job or SimulatedTraining(), build or SimulationBuild()
    )
    try:
        return sim.play()
    except Violation as e:
        raise Violation(f"{e}\n  reproduce it: harness market simulate --seed {seed}") from e


def simulate_many(
    seeds: Iterable[int], policy: Policy = cheapest, run: RunSpec | None = None, **world: object
) -> Iterator[SimResult]:
    """Yield results lazily, one after the other; the first broken rule raises."""
    return (simulate(seed, policy, run, **world) for seed in seeds)  # type: ignore[arg-type]


def command(seeds: int, seed: int | None, first: int, policy: str) -> int:
    """Run `harness market simulate`: print the results; return 1 if a rule was broken."""
    chosen = resolve(policy)
    results: list[SimResult] = []
    try:
        for result in simulate_many(
            [seed] if seed is not None else range(first, first + seeds), chosen
        ):
            results.append(result)
            if result.outcome == "failed" or seed is not None:
                print(
                    f"seed {result.seed}: {result.outcome} at step {result.committed_step}: "
                    f"{result.reason}"
                )
    except Violation as e:
        print(f"after {len(results)} good worlds: {e}")
        return 1
    if seed is not None:
        print(f"  {results[0].weather}")
        for stamped in results[0].facts:
            print(f"{stamped.t:9.1f} s  {stamped.writer}  {stamped.fact}")
    for outcome in ("done", "stopped", "failed"):
        if some := [r for r in results if r.outcome == outcome]:
            hours = statistics.median(r.elapsed_s for r in some) / 3600
            usd, losses = (
                statistics.median(r.usd for r in some),
                statistics.median(r.attempts for r in some),
            )
            redone = sum(r.steps_redone for r in some) / max(1, sum(r.committed_step for r in some))
            print(
                f"{len(some):5} {outcome:8} median: {hours:.2f} h, {usd:.2f} USD, {losses:g} nodes "
                f"used; steps done twice: {redone:.1%}"
            )
    print(f"{len(results)} worlds, every rule held in each of them ({policy})")
    return 0


# ---- controllers ---------------------------------------------------------------------------------
class Seat:
    """The world as one controller sees it, as its store and its cloud. Every operation takes time;
    at each the controller may die, before or after it took effect, or hang while another one takes
    over."""

    def __init__(self, sim: Simulation, depth: int, dies_s: float = math.inf):
        self.sim, self.depth, self.dies_s = sim, depth, dies_s
        self.url = sim.store.url
        self.lease: Lease | None = None
        self.server = (
            "another"
            if sim.weather.elsewhere
            and sim.rng.random() < sim.weather.elsewhere
            and not sim.cloud.calm
            else "usual"
        )
        self.refused_until_s = 0.0
        self.blind = False  # the bucket refused or did not answer the last request

    def do(self, what: str, operation: Callable[[], T]) -> T:
        sim, weather = self.sim, self.sim.weather
        sim.clock.sleep(sim.rng.uniform(0.0, 0.05))
        if sim.clock.now() > self.dies_s:
            raise Crash
        if sim.cloud.calm:
            return operation()
        chance = sim.rng.random()
        if chance < weather.crashes:
            if chance < weather.crashes / 2:
                operation()
            raise Crash
        if chance < weather.crashes + weather.overtakings and self.depth == 0:
            sim.overtake(what)
        return operation()

    def store(self, what: str, operation: Callable[[], T]) -> T:
        """Execute an operation on the bucket, or refuse it as this controller's bucket does."""
        sim, now = self.sim, self.sim.clock.now()
        if sim.weather.refusals and not sim.cloud.calm and sim.rng.random() < sim.weather.refusals:
            self.refused_until_s = now + sim.rng.uniform(10, 1800)
        self.blind = True
        if now < self.refused_until_s:
            sim.clock.sleep(0.05)
            raise StoreError(f"{what}: 403 (injected)")
        try:
            found = self.do(what, operation)
        except NotFound:
            self.blind = False
            raise
        self.blind = False
        return found

    # -- ObjectStore
    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        # a takeover reads hundreds of facts, without effects that others could interleave with
        if key.startswith(FACTS):
            return self.sim.store.get(key, start, end)
        return self.store("get", lambda: self.sim.bucket().get(key, start, end))

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.store("put", lambda: self.sim.bucket().put(key, data))

    def create(self, key: str, data: bytes | memoryview) -> bool:
        return self.store("create", lambda: self.sim.bucket().create(key, data))

    def list(self, prefix: str) -> list[str]:
        return self.store("list", lambda: self.sim.bucket().list(prefix))

    def delete(self, key: str) -> None:
        self.store("delete", lambda: self.sim.bucket().delete(key))

    def size(self, key: str) -> int:
        return self.store("size", lambda: self.sim.bucket().size(key))

    # -- Cloud
    def offers(self) -> Sequence[Offer]:
        return self.sim.cloud.offers()

    def nodes(self) -> Sequence[Node]:
        return self.ask(
            "nodes", lambda: [n for n in self.sim.cloud.nodes() if self.knows(n.attempt)]
        )

    def launch(self, attempt: int, offer: Offer) -> None:
        def ask() -> None:
            self.sim.servers.setdefault(attempt, self.server)
            self.sim.cloud.launch(attempt, offer)

        self.act("launch", attempt, ask)

    def terminate(self, attempt: int) -> None:
        self.act(
            "terminate",
            attempt,
            lambda: self.sim.cloud.terminate(attempt) if self.knows(attempt) else None,
        )

    def knows(self, attempt: int) -> bool:
        """Return whether the node was launched through the API server that this controller uses."""
        return self.sim.servers.get(attempt, self.server) == self.server

    def act(self, what: str, attempt: int, operation: Callable[[], None]) -> None:
        def effect() -> None:
            self.sim.emit(
                Acted(
                    self.sim.clock.now(),
                    self.lease.term if self.lease else 0,
                    what,
                    attempt,
                    self.blind,
                )
            )
            operation()

        self.ask(what, effect)

    def ask(self, what: str, operation: Callable[[], T]) -> T:
        def answered() -> T:
            chance = self.sim.rng.random()
            errors = 0.0 if self.sim.cloud.calm else self.sim.weather.cloud_errors
            if chance < errors / 2:
                raise CloudUnavailable(f"{what}: no answer (nothing was done)")
            result = operation()
            if chance < errors:
                raise CloudUnavailable(f"{what}: no answer (it was done)")
            return result

        return self.do(what, answered)


# ---- the world -----------------------------------------------------------------------------------
@dataclass
class SimRules:
    """All invariants, and the bill."""

    ledger: invariants.LedgerChecker
    checkers: list[Checker]

    @classmethod
    def of(
        cls,
        run: RunSpec,
        weather: FaultRates,
        job: SimulatedTraining,
        store: ObjectStore,
        billed: dict[int, str],
    ) -> SimRules:
        """Return the rules for a run. `store`: unwatched; `billed`: the attempts whose bill may
        have to be estimated."""
        ledger = invariants.LedgerChecker(estimated=billed if weather.elsewhere else ())
        checkers: list[Checker] = [
            invariants.WriteOnce(),
            invariants.SingleController(),
            invariants.Seeing(),
            invariants.IntendedFirst(),
            invariants.NodeLimit(run.max_nodes),
            invariants.NothingLeft(),
            invariants.DoneIsDone(store, job.total_steps),
            ledger,
        ]
        if run.budget_usd is not None:
            # One attempt costs at most what all nodes cost from the last look of a controller that
            # dies to the end of the grace period that its successor gives.
            slack_s = run.exit_grace_s + weather.restart_s + 300
            dearest = max(o.usd_per_h for o in weather.offers)
            checkers.append(
                invariants.Budget(run.budget_usd, run.max_nodes * dearest * slack_s / 3600, ledger)
            )
        return cls(ledger, checkers)

    def see(self, event: SimulationEvent) -> None:
        for checker in self.checkers:
            checker.see(event)

    def at_end(self) -> None:
        for checker in self.checkers:
            checker.at_end()


def _horizon_s(run: RunSpec, weather: FaultRates, job: SimulatedTraining) -> float:
    """Return the time by which the run must have ended."""
    slowest = min(o.speed for o in weather.offers)
    work_s = 2 * job.total_steps * job.step_s / slowest
    calm = weather.calm_s != math.inf
    limited = not calm or weather.fails_at_step
    limit_s = run.max_hours_without_progress * 3600 if limited else 0.0
    return (weather.calm_s if calm else 0.0) + work_s + limit_s + 1800


class Simulation:
    """The simulation: builds the world, keeps a controller running, and shows every event to the
    checkers."""

    def __init__(
        self,
        seed: int,
        rng: random.Random,
        policy: Policy,
        run: RunSpec,
        weather: FaultRates,
        job: SimulatedTraining,
        build: SimulationBuild,
    ):
        self.seed, self.rng, self.policy, self.build = seed, rng, policy, build
        self.run, self.weather = run, weather
        self.clock, self.controllers = VirtualClock(), 0
        self.outcome: RunOutcome | None = None
        self.servers: dict[int, str] = {}  # by attempt: the API server that launched it
        self.store = WatchedStore(build.store(), self.clock, self.emit)
        self.rules = SimRules.of(run, weather, job, self.store.inner, self.servers)
        half, (since_s, until_s) = weather.store_errors / 2, weather.refused_s
        self.hostile_store = Refused(
            FaultyStore(self.store, rng, unavailable=half, unknown=half),
            Patience(answered=True, monotonic=self.clock.now),
            lambda: since_s <= self.clock.now() < until_s,
        )
        self.cloud = SimCloud(weather, self.clock, rng, self.emit)
        self.nodes = self.cloud.inside = SimNodes(self, job)
        self.clock.horizon_s = _horizon_s(run, weather, job)
        if weather.stop_at_s is not None:
            request = StopOrder("somebody asked for it", "user").to_json()
            self.clock.after(weather.stop_at_s, lambda: self.store.put(STOP_KEY, request))

    def emit(self, event: SimulationEvent) -> None:
        self.rules.see(event)

    def bucket(self) -> ObjectStore:
        """Return the bucket as everybody has it now."""
        return self.store if self.cloud.calm else self.hostile_store

    def play(self) -> SimResult:
        while self.outcome is None:
            self.lead(depth=0)
            if self.outcome is None:
                self.clock.sleep(self.rng.uniform(1, self.weather.restart_s))
        self.clock.sleep(600)  # operations on their way take effect
        self.rules.at_end()
        self.check_life(self.outcome)
        facts = tuple(read_facts(self.store))
        if lost := [s.fact for s in facts if isinstance(s.fact, Unreadable)]:
            raise Violation(f"facts: wanted every line as it was written, found {lost[0]}")
        committed = self.outcome.committed_step
        return SimResult(
            seed=self.seed,
            outcome=self.outcome.outcome,
            reason=self.outcome.reason,
            committed_step=committed,
            elapsed_s=max((s.t for s in facts), default=0.0),
            usd=self.rules.ledger.usd,
            facts=facts,
            attempts=sum(n.up_s is not None for n in self.cloud.all.values()),
            controllers=self.controllers,
            epochs=self.nodes.epochs,
            steps_redone=max(0, self.nodes.steps_done - committed),
            weather=self.weather,
        )

    def check_life(self, outcome: RunOutcome) -> None:
        """Check that the run ended well if it could, and gave a reason. Raises Violation."""
        weather, run = self.weather, self.run
        excused = (
            weather.fails_at_step is not None
            or weather.stop_at_s is not None
            or weather.calm_s == math.inf
            or run.budget_usd is not None
            or run.max_hours is not None
        )
        if (outcome.outcome != "done" and not excused) or not outcome.reason:
            raise Violation(
                f"life: {outcome.outcome} ({outcome.reason}) at {self.clock.now():.0f} s, although "
                "it could have ended"
            )

    def lead(self, depth: int, dies_s: float = math.inf) -> None:
        """Run one controller, from its start to its end, whatever ends it."""
        self.controllers += 1
        seat, name = Seat(self, depth, dies_s), f"controller-{self.controllers}"
        seat.lease = self.build.lease(seat, self.clock, name, ttl_s=15.0)
        world = World(self.clock, seat, seat, random.Random(self.rng.random()))
        journal = self.build.journal(seat, name, self.clock.now)
        try:
            outcome = self.build.recover(self.run, self.policy, world, journal, seat.lease)
        except (Crash, Fenced, CloudUnavailable, StoreError):
            return  # dead, or not needed, or in trouble that is its own
        self.outcome = self.outcome or outcome

    def overtake(self, what: str) -> None:
        """Hang a controller in an operation for so long that another one leads meanwhile.

        Between its look at the lease and a launch it hangs no longer than `lost_after_s`: only the
        cloud itself could fence such a launch.
        """
        hangs_s = 15.0 * 1.5 + self.rng.uniform(
            0, 0.8 * self.run.lost_after_s if what == "launch" else 600
        )
        back_s = self.clock.now() + hangs_s
        self.lead(depth=1, dies_s=back_s)
        self.clock.sleep(max(0.0, back_s - self.clock.now()) * self.rng.random())
