"""A simulated world for the real recovery loop, lease, journal and commit protocol. For users ("what would this policy have
cost?", `harness simulate`) as much as for tests (`invariants.py` watches every event).

Everything follows from the seed. Time is virtual: it passes only while a controller sleeps or calls something. Controllers run the real
`recovery.recover`; they are made to die, or to be overtaken by another one, at random operations. Nodes hold simulated
members that form epochs, train, write snapshots through the real `storage.snapshots` (each rank its own part, at
its own time), drain when told, or go on as zombies when the cloud believes them gone. From `calm_s` on nothing goes
wrong any more and there is capacity: then the run must end.

Pure: no threads, sockets, wall clock or global randomness.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import json
import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from harness.bucket.journal import Journal, read_facts
from harness.bucket.lease import Lease
from harness.bucket.orders import STOP_KEY, StopOrder
from harness.controller.policies import cheapest, resolve
from harness.controller.recovery import Outcome, RunSpec, recover
from harness.core.facts import Stamped, Unreadable, digest
from harness.core.world import (
    DRAINED,
    FINISHED,
    LEAVE,
    STOPPED,
    UNFIT,
    CloudUnavailable,
    Fenced,
    Node,
    NodeState,
    Offer,
    Policy,
    World,
    meeting_place,
)
from harness.proof import invariants
from harness.proof.invariants import Acted, Changed, Checker, Damaged, Event, Violation, Written, record_hash
from storage.faults import Crash, FaultyStore, corrupt
from storage.manifest import Manifest, Ref
from storage.objects import MemoryStore, NotFound, ObjectStore, Patience, StoreError, StoreRefused, StoreUnavailable
from storage.restore import Looks, Restore, Rewind
from storage.retention import Keep
from storage.snapshots import Snapshots

T = TypeVar("T")
GENESIS = digest(b"simulated run")

OFFERS = (
    Offer(1.0, "aws/us-east-1a", accelerator="H100", gpus=8, on_demand_usd_per_h=4.0),
    Offer(1.3, "gcp/us-central1-b", accelerator="H100", gpus=8, on_demand_usd_per_h=4.0, speed=1.1),
    Offer(1.6, "aws/eu-west-1c", accelerator="H100", gpus=8, on_demand_usd_per_h=4.4, speed=0.9),
)
ON_DEMAND = Offer(4.0, "aws/us-east-1a/on-demand", spot=False, accelerator="H100", gpus=8, on_demand_usd_per_h=4.0)


@dataclass(frozen=True)
class Weather:
    """What the world does to a run until `calm_s`. Rates are per hour and node; chances are per operation unless said otherwise."""

    offers: tuple[Offer, ...] = OFFERS
    calm_s: float = 1800.0
    available: float = 0.7  # share of time in which a spot offer has machines
    spell_s: float = 400.0  # mean time between two changes of that
    launch_s: tuple[float, float] = (5.0, 60.0)
    kills_per_h: float = 3.0
    noticed: float = 0.6  # share of losses that are announced
    grace_s: float = 30.0
    zombies: float = 0.2  # share of unannounced losses that go on unseen for a while
    flaky: float = 0.02  # chance that a node's script fails once
    rot: float = 0.0  # chance that a committed snapshot is damaged later
    cloud_errors: float = 0.02
    store_errors: float = 0.003
    flips: float = 0.0  # chance that bytes of a part are damaged on their way to who restores it
    bad_readers: float = 0.0  # share of nodes on which they always are
    denials_per_h: float = 0.0  # spells in which the store says 404 of all snapshots, and may list none
    crashes: float = 0.002  # of a controller
    overtakings: float = 0.001  # a controller hangs, and another one takes over
    restart_s: float = 30.0  # at most until somebody starts a dead controller again
    refused_s: tuple[float, float] = (0.0, 0.0)  # from when to when the bucket says 403 to everybody
    fails_at_step: int | None = None  # the script has a bug there
    stop_at_s: float | None = None  # a person asks for it
    refusals: float = 0.0  # chance that the bucket begins to refuse a controller (403), for up to half an hour
    elsewhere: float = 0.0  # chance that a controller speaks to another API server, which shows only what was launched through it

    @classmethod
    def of(cls, rng: random.Random) -> Weather:
        """Each seed has its own mixture, and some things not at all: bugs hide in combinations, and in calm too."""

        def sometimes(low: float, high: float) -> float:
            return rng.choice((0.0, 1.0, 1.0)) * rng.uniform(low, high)

        reads = random.Random(repr(rng.getstate()[1][:4]))  # of its own, so that the rest of a world is what it was without
        return cls(
            offers=(*OFFERS[: rng.randint(1, 3)], *([ON_DEMAND] if rng.random() < 0.3 else [])),
            calm_s=rng.uniform(0, 2400),
            available=rng.uniform(0.2, 1.0),
            spell_s=rng.uniform(60, 900),
            kills_per_h=sometimes(1, 12),
            noticed=rng.random(),
            grace_s=rng.choice((5.0, 30.0, 120.0)),
            zombies=sometimes(0.1, 0.6),
            flaky=sometimes(0.0, 0.03),
            rot=sometimes(0.0, 0.1),
            cloud_errors=sometimes(0.005, 0.1),
            store_errors=sometimes(0.001, 0.01),
            flips=reads.choice((0.0, 0.02, 0.2)),
            bad_readers=reads.choice((0.0, 0.0, 0.05, 0.2)),
            denials_per_h=reads.choice((0.0, 2.0, 20.0)),
            crashes=sometimes(0.0005, 0.02),
            overtakings=sometimes(0.0005, 0.01),
            fails_at_step=rng.randint(1, 300) if rng.random() < 0.05 else None,
            stop_at_s=rng.uniform(0, 2000) if rng.random() < 0.05 else None,
        )


@dataclass(frozen=True)
class Job:
    """The simulated training. `step_s` is what one node of speed 1 needs for a step."""

    total_steps: int = 300
    snapshot_every: int = 20
    step_s: float = 6.0
    boot_s: float = 20.0
    micro_batches: int = 8


@dataclass(frozen=True)
class Build:
    """What the controllers and members of a simulation are built of. Tests put a broken part in, to see that it is found."""

    lease: type[Lease] = Lease
    journal: type[Journal] = Journal
    snapshots: type[Snapshots] = Snapshots
    restore: type[Restore] = Restore
    store: Callable[[dict[str, bytes]], ObjectStore] = lambda objects: MemoryStore("memory://sim", objects)
    recover: Callable[..., Outcome] = recover
    patience: Callable[[Callable[[], float]], Patience] = lambda monotonic: Patience(answered=True, monotonic=monotonic)


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
    weather: Weather = field(repr=False)


def simulate(
    seed: int,
    policy: Policy = cheapest,
    run: RunSpec | None = None,
    weather: Weather | None = None,
    job: Job | None = None,
    build: Build | None = None,
) -> SimResult:
    """One run in one simulated world. Raises invariants.Violation, with the line that reproduces it."""
    rng = random.Random(seed)
    weather = weather or Weather.of(rng)
    run = run or RunSpec(1, rng.randint(1, 4), poll_s=5.0, exit_grace_s=60.0, max_hours_without_progress=2.0)
    sim = Simulation(seed, rng, policy, run, weather, job or Job(), build or Build())
    try:
        return sim.play()
    except Violation as e:
        raise Violation(f"{e}\n  reproduce it: harness simulate --seed {seed}") from e


def simulate_many(seeds: Iterable[int], policy: Policy = cheapest, run: RunSpec | None = None, **world: object) -> Iterator[SimResult]:
    """Lazily, one after the other; the first broken rule raises."""
    return (simulate(seed, policy, run, **world) for seed in seeds)  # type: ignore[arg-type]


def command(seeds: int, seed: int | None, first: int, policy: str) -> int:
    """`harness simulate`: prints what came of it; 1 if a rule was broken."""
    chosen = resolve(policy)
    results: list[SimResult] = []
    try:
        for result in simulate_many([seed] if seed is not None else range(first, first + seeds), chosen):
            results.append(result)
            if result.outcome == "failed" or seed is not None:
                print(f"seed {result.seed}: {result.outcome} at step {result.committed_step}: {result.reason}")
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
            usd, losses = statistics.median(r.usd for r in some), statistics.median(r.attempts for r in some)
            redone = sum(r.steps_redone for r in some) / max(1, sum(r.committed_step for r in some))
            print(f"{len(some):5} {outcome:8} median: {hours:.2f} h, {usd:.2f} USD, {losses:g} nodes used; steps done twice: {redone:.1%}")
    print(f"{len(results)} worlds, every rule held in each of them ({policy})")
    return 0


# ---- time -----------------------------------------------------------------------------------------------------------
class VirtualClock:
    """Events happen, in order, while somebody sleeps."""

    def __init__(self) -> None:
        self.now_s, self.horizon_s = 0.0, math.inf
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        until_s = self.now_s + max(0.0, seconds)
        while self._events and self._events[0][0] <= until_s:
            t, _, happen = heapq.heappop(self._events)
            self.now_s = max(self.now_s, t)
            happen()
        self.now_s = until_s
        if until_s > self.horizon_s:
            raise Violation(f"life: at {until_s:.0f} s the run goes on, although there is capacity and nothing went wrong for long")

    def after(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + seconds, next(self._order), happen))


class WatchedStore:
    """Tells the checkers of every object that lands."""

    def __init__(self, inner: ObjectStore, clock: VirtualClock, emit: Callable[[Event], None]):
        self.inner, self.url, self._clock, self._emit = inner, inner.url, clock, emit
        self.get, self.list, self.delete, self.size = inner.get, inner.list, inner.delete, inner.size

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._write(key, data, lambda: self.inner.put(key, data))

    def create(self, key: str, data: bytes | memoryview) -> bool:
        return self._write(key, data, lambda: self.inner.create(key, data))

    def _write(self, key: str, data: bytes | memoryview, write: Callable[[], T]) -> T:
        try:
            before: bytes | None = self.inner.get(key)
        except NotFound:
            before = None
        written = write()
        if written is not False:
            self._emit(Written(self._clock.now(), key, bytes(data), before))
        return written


class Refused:
    """A store that says no to everybody for a while, seen with the patience that `open_store` has with it."""

    def __init__(self, inner: ObjectStore, patience: Patience, refuses: Callable[[], bool]):
        self.inner, self.url, self._patience, self._refuses = inner, inner.url, patience, refuses

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        return self._call("read", lambda: self.inner.get(key, start, end))

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._call("write", lambda: self.inner.put(key, data))

    def create(self, key: str, data: bytes | memoryview) -> bool:
        return self._call("write", lambda: self.inner.create(key, data))

    def list(self, prefix: str) -> list[str]:
        return self._call("list", lambda: self.inner.list(prefix))

    def delete(self, key: str) -> None:
        self._call("delete", lambda: self.inner.delete(key))

    def size(self, key: str) -> int:
        return self._call("read", lambda: self.inner.size(key))

    def _call(self, kind: str, do: Callable[[], T]) -> T:
        with self._patience.judge(kind):
            if self._refuses():
                raise StoreRefused(f"{self.url}: 403 Forbidden (simulated)")
            return do()


# ---- the cloud ------------------------------------------------------------------------------------------------------
class SimCloud:
    """Offers whose capacity comes and goes; nodes that start slowly and are taken away, with or without a word."""

    def __init__(self, weather: Weather, clock: VirtualClock, rng: random.Random, emit: Callable[[Event], None]):
        self.weather, self.clock, self.rng, self._emit = weather, clock, rng, emit
        self.all: dict[int, Node] = {}
        self.available = {o.name: not o.spot or rng.random() < weather.available for o in weather.offers}
        self.members: Members | None = None
        for offer in weather.offers:
            if offer.spot and 0 < weather.available < 1:
                self._next_spell(offer)

    @property
    def calm(self) -> bool:
        return self.clock.now() >= self.weather.calm_s

    # -- what controllers may call
    def offers(self) -> Sequence[Offer]:
        return self.weather.offers

    def launch(self, attempt: int, offer: Offer) -> None:
        if attempt not in self.all:
            self._set(Node(attempt, offer, NodeState.PENDING, asked_s=self.clock.now()))
            self.clock.after(self.rng.uniform(*self.weather.launch_s), lambda: self._arrive(attempt))

    def nodes(self) -> Sequence[Node]:
        lag_s = 0.0 if self.calm else 4.0  # a cloud's lists are a little behind
        return [n for n in self.all.values() if n.asked_s + lag_s * (n.attempt % 2) <= self.clock.now()]

    def terminate(self, attempt: int) -> None:
        if attempt in self.all:
            self.clock.after(self.rng.uniform(1, 8), lambda: self.end(attempt, None, "terminated"))

    # -- what happens
    def _set(self, node: Node) -> None:
        self.all[node.attempt] = node
        self._emit(Changed(self.clock.now(), node))

    def _arrive(self, attempt: int) -> None:
        node = self.all[attempt]
        if not node.alive:
            return
        now = self.clock.now()
        if not (self.calm or self.available[node.offer.name]):
            self._set(dataclasses.replace(node, state=NodeState.NO_CAPACITY, gone_s=now))
            return
        self._set(dataclasses.replace(node, state=NodeState.UP, up_s=now))
        if self.members:
            self.members.boot(attempt, node.offer)
        if node.offer.spot and self.weather.kills_per_h:
            self.clock.after(self.rng.expovariate(self.weather.kills_per_h) * 3600, lambda: self._take(attempt))

    def _next_spell(self, offer: Offer) -> None:
        share = self.weather.available if self.available[offer.name] else 1 - self.weather.available
        self.clock.after(self.rng.expovariate(1 / (2 * self.weather.spell_s * max(share, 0.02))), lambda: self._turn(offer))

    def _turn(self, offer: Offer) -> None:
        if self.calm:
            return
        self.available[offer.name] = not self.available[offer.name]
        if not self.available[offer.name]:  # most machines of the place are taken, at about the same time
            for node in list(self.all.values()):
                if node.offer.name == offer.name and node.state is NodeState.UP and self.rng.random() < 0.7:
                    self.clock.after(self.rng.uniform(0, 20), lambda a=node.attempt: self._take(a))  # type: ignore[misc]
        self._next_spell(offer)

    def _take(self, attempt: int) -> None:
        if self.calm or not self.all[attempt].alive:
            return
        if self.rng.random() < self.weather.noticed:
            if self.members:
                self.members.notice(attempt)
            self.clock.after(self.weather.grace_s, lambda: self.end(attempt, None, "preempted"))
        else:
            self.end(attempt, None, "preempted", zombie=self.rng.random() < self.weather.zombies)

    def end(self, attempt: int, exit_code: int | None, reason: str, zombie: bool = False) -> None:
        node = self.all[attempt]
        if node.alive:
            self._set(dataclasses.replace(node, state=NodeState.GONE, gone_s=self.clock.now(), exit_code=exit_code, reason=reason))
            if self.members:
                self.members.lost(attempt, zombie)


# ---- members --------------------------------------------------------------------------------------------------------
@dataclass
class Member:
    attempt: int
    offer: Offer
    ready: bool = False  # booted, and not told to leave
    dead: bool = False
    seen: Ref | None = None  # the newest snapshot that its agent saw committed
    bad_reader: bool = False
    zombie_until_s: float = 0.0  # dead for the cloud and for its peers; still writes until then


@dataclass
class Team:
    """One epoch's members at work."""

    epoch: int
    members: list[Member]
    start_s: float
    step_s: float
    first: int  # the step resumed from
    head: str
    recorded: int
    lines: dict[int, str] = field(default_factory=dict)  # step records since the last committed step
    resumed: str = ""
    draining: str = ""
    over: bool = False  # its members have left it, or know that it is broken
    broken_s: float = math.inf  # a member is gone: no step completes any more
    committed: set[int] = field(default_factory=set)

    def step_at(self, t: float) -> int:
        return self.first + max(0, math.floor((min(t, self.broken_s) - self.start_s) / self.step_s))

    def time_of(self, step: int) -> float:
        return self.start_s + (step - self.first) * self.step_s


class Members:
    """All node agents and workers. They share nothing but the bucket; their events are atomic, their uploads are not."""

    def __init__(self, sim: Simulation):
        self.sim, self.clock, self.rng, self.job = sim, sim.clock, sim.rng, sim.job
        self.all: dict[int, Member] = {}
        self.team: Team | None = None
        self.forming = False
        self.epochs = self.steps_done = 0

    @property
    def snapshots(self) -> Snapshots:
        return self.sim.build.snapshots(self.sim.member_store())

    def retry(self, do: Callable[[], None]) -> None:
        """A member whose store does not answer tries again."""
        try:
            do()
        except StoreUnavailable:
            self.clock.after(self.rng.uniform(0.5, 2), lambda: self.retry(do))
        except StoreRefused as e:  # its agent believes that, and ends
            self.sim.outcome = self.sim.outcome or Outcome("failed", str(e), 0)

    # -- the life of a node
    def boot(self, attempt: int, offer: Offer) -> None:
        bad = not self.sim.cloud.calm and self.sim.reads.random() < self.sim.weather.bad_readers
        member = self.all[attempt] = Member(attempt, offer, bad_reader=bad)
        self.clock.after(self.rng.uniform(0.5, 1.5) * self.job.boot_s, lambda: self.retry(lambda: self.ready(member)))
        if not self.sim.cloud.calm and self.rng.random() < self.sim.weather.flaky:
            self.clock.after(self.rng.uniform(1, 600), lambda: self.sim.cloud.end(attempt, 1, "exited"))

    def beat(self, member: Member, count: int = 0) -> None:
        """What it says of itself in the bucket, as real ones do; only where somebody may need it."""
        if not member.dead:
            self.say(member, "in", count)
            self.clock.after(10.0, lambda: self.beat(member, count + 1))

    def say(self, member: Member, state: str, count: int) -> None:
        body = {"attempt": member.attempt, "state": state, "beat": count, "beat_s": 10.0}
        self.sim.store.put(f"rdzv/members/m{member.attempt:04d}-sim.json", json.dumps(body).encode())

    def ready(self, member: Member) -> None:
        if member.dead:
            return
        if self.sim.weather.elsewhere:
            self.beat(member)
        if self.stop_asked():
            self.leave(member, STOPPED)
            return
        member.ready = True
        self.clock.after(5.0, lambda: self.retry(lambda: self.look(member)))
        if self.team and not self.team.over:
            if member.offer.place == self.team.members[0].offer.place:
                self.drain(self.team, "resize")
        else:
            self.form_soon()

    def look(self, member: Member) -> None:
        """What an agent does all the time: is the run over, or to be stopped?"""
        if member.dead:
            return
        if member.ready and self.sim.member_store().list(f"{LEAVE}{member.attempt:06d}.json"):
            self.notice(member.attempt)
        if self.team is None or self.team.over or member not in self.team.members:
            newest = self.snapshots.latest()
            if (newest and newest.data["final"]) or self.stop_asked():
                self.leave(member, FINISHED if newest and newest.data["final"] else STOPPED)
                return
            if self.team is None or self.team.over:
                self.form_soon()
        elif self.stop_asked():
            self.drain(self.team, "stop")
        self.clock.after(5.0, lambda: self.retry(lambda: self.look(member)))

    def stop_asked(self) -> bool:
        return bool(self.sim.member_store().list(STOP_KEY))

    def leave(self, member: Member, code: int) -> None:
        member.ready = False
        self.clock.after(self.rng.uniform(0.2, 3), lambda: self.sim.cloud.end(member.attempt, code, "exited"))

    def notice(self, attempt: int) -> None:
        member = self.all.get(attempt)
        if member is None or member.dead:
            return
        member.ready = False
        if self.team and not self.team.over and member in self.team.members:
            self.drain(self.team, "drain")
        else:
            self.leave(member, DRAINED)

    def lost(self, attempt: int, zombie: bool) -> None:
        member = self.all.get(attempt)
        if member is None or member.dead:
            return
        member.dead, member.ready = True, False
        if self.sim.weather.elsewhere and self.sim.cloud.all[attempt].reason == "exited":
            self.say(member, "gone", -1)
        if zombie:
            member.zombie_until_s = self.clock.now() + self.rng.uniform(30, 300)
        team = self.team
        if team is None or member not in team.members or team.over:
            return
        if zombie and len(team.members) == 1:  # it trains on, for itself
            self.team = None
            self.clock.after(self.rng.uniform(30, 300), lambda: setattr(team, "over", True))
        else:
            team.broken_s = min(team.broken_s, self.clock.now())
            self.clock.after(self.rng.uniform(2, 10), lambda: self.dissolve(team))

    def dissolve(self, team: Team) -> None:
        if not team.over:
            team.over = True
            self.form_soon()

    # -- epochs
    def form_soon(self) -> None:
        if not self.forming:
            self.forming = True
            self.clock.after(self.rng.uniform(1, 4), lambda: self.retry(self.form))

    def form(self) -> None:
        members = [m for m in self.all.values() if m.ready]
        if members:
            were = self.team.members if self.team else []
            where = meeting_place([(m.offer.place, 1, m in were) for m in members])
            members = [m for m in members if m.offer.place == where]
        if len(members) < self.sim.run.min_nodes or (self.team and not self.team.over):
            self.forming = False
            return
        store = self.sim.member_store()
        epoch = 1 + max((int(k[-11:-5]) for k in store.list("rdzv/epochs/")), default=0)
        restored = restore(self.sim, members, epoch)
        newest = restored.manifest
        for member, code in restored.leave:
            self.leave(member, code)
        if restored.leave:
            self.forming = False
            return
        if newest and newest.data["final"]:
            self.forming = False
            for member in members:
                self.leave(member, FINISHED)
            return
        body: dict[str, object] = {"epoch": epoch, "members": [m.attempt for m in members], "resume": newest.ref.name if newest else None}
        if not store.create(f"rdzv/epochs/{epoch:06d}.json", json.dumps(body).encode()):
            raise StoreUnavailable("another member was first, or a write of ours took effect unheard: look again")
        self.forming, self.epochs = False, self.epochs + 1
        speed = sum(m.offer.speed for m in members)
        first, head = (newest.step, newest.data["samples"]["head"]) if newest else (0, GENESIS)
        restored_s = self.clock.now() + self.rng.uniform(2, 10) + restored.waited_s
        self.team = team = Team(epoch, members, restored_s, self.job.step_s / speed, first, head, first)
        team.resumed = newest.ref.name if newest else ""
        for member in members:
            member.seen = max(filter(None, (member.seen, newest.ref if newest else None)), default=None)
        self.milestone(team, self.next_stop(first))

    def next_stop(self, step: int) -> int:
        every = self.job.snapshot_every
        step = min((step // every + 1) * every, self.job.total_steps)
        bug = self.sim.weather.fails_at_step
        return step if bug is None or self.team is None else min(step, max(bug, self.team.first + 1))

    def milestone(self, team: Team, step: int) -> None:
        self.clock.after(max(0.0, team.time_of(step) - self.clock.now()), lambda: self.reach(team, step))

    def reach(self, team: Team, step: int) -> None:
        """A step at which a snapshot is due."""
        if team.over or team.draining or team.broken_s <= team.time_of(step):
            return
        bug = self.sim.weather.fails_at_step
        if bug is not None and step >= bug:
            for member in team.members:
                self.sim.cloud.end(member.attempt, 1, "exited")
            return
        self.snapshot(team, step)
        if step < self.job.total_steps:
            self.milestone(team, self.next_stop(step))

    def drain(self, team: Team, why: str) -> None:
        """Stop at the next step boundary, with a snapshot."""
        if team.draining or team.over or team.broken_s < math.inf:
            return
        team.draining = why
        step = max(team.step_at(self.clock.now()) + 1, team.recorded)
        if step > self.job.total_steps:
            return  # its last snapshot is on its way
        wait_s = max(0.0, team.time_of(step) - self.clock.now())
        self.clock.after(wait_s, lambda: self.drained_at(team, step))

    def drained_at(self, team: Team, step: int) -> None:
        if team.over or team.broken_s < math.inf:
            return
        if step == team.first or step in team.committed:
            self.committed(team, step)
        else:
            self.snapshot(team, step)

    # -- snapshots
    def snapshot(self, team: Team, step: int) -> None:
        """Its records are those since the last one that is committed, as a session's are."""
        for k in range(team.recorded + 1, step + 1):
            consumed = self.consumed(k, len(team.members))
            record: dict[str, str | int] = {"step": k, "epoch": team.epoch, "digest": consumed, "prev": team.head}
            team.head = record_hash(record)
            team.lines[k] = json.dumps({**record, "h": team.head})
            self.steps_done += 1
        team.recorded = max(team.recorded, step)
        first = min(team.lines, default=step)
        key = f"samples/{first:010d}-{step:010d}-{team.head[:16]}.jsonl"
        records = "\n".join(team.lines[k] for k in sorted(team.lines)).encode()
        data: dict[str, object] = {"samples": {"key": key, "head": team.head, "first": first, "last": step}}
        data |= {"final": step == self.job.total_steps, "resumed": team.resumed}
        for rank, member in enumerate(team.members):
            upload = Upload(team, member, rank, step, f"state after {team.head} of rank {rank}", data if rank == 0 else {}, (key, records))
            self.clock.after(self.rng.uniform(0.2, 4), lambda u=upload: self.retry(lambda: self.upload(u)))  # type: ignore[misc]

    def consumed(self, step: int, world: int) -> str:
        """Sum of what the ranks loaded; the same for any world, or something is wrong."""
        shares = (range(rank, self.job.micro_batches, world) for rank in range(world))
        return f"{sum(_sample_hash(step, i) for share in shares for i in share) % 2**64:x}"

    def upload(self, up: Upload) -> None:
        if up.member.dead and self.clock.now() > up.member.zombie_until_s:
            return
        if up.member.dead and not up.late:  # a zombie is slow
            up.late = True
            self.clock.after(self.rng.uniform(5, 100), lambda: self.retry(lambda: self.upload(up)))
            return
        if up.rank == 0:
            self.sim.member_store().create(*up.records)
        ref, world = Ref(up.team.epoch, up.step), len(up.team.members)
        token, files = f"m{up.member.attempt}", {"state.bin": up.state.encode()}
        self.snapshots.write(ref, up.rank, world, files, {}, up.data, token)
        self.commit(up, ref, world, self.clock.now() + 120.0)

    def commit(self, up: Upload, ref: Ref, world: int, until_s: float) -> None:
        if manifest := self.snapshots.commit(ref, world):
            self.committed(up.team, up.step)
            self.snapshots.prune(Keep(last=3))
            if not self.sim.cloud.calm and self.rng.random() < self.sim.weather.rot:
                how = self.rng.choice(("flip", "truncate", "delete"))
                self.clock.after(self.rng.uniform(1, 100), lambda: self.rot(manifest, how))
        elif self.sim.denials and self.clock.now() < until_s and not up.member.dead:  # other ranks are still at it, or their lists denied
            self.clock.after(2.0, lambda: self.retry(lambda: self.commit(up, ref, world, until_s)))

    def rot(self, manifest: Manifest, how: str) -> None:
        try:
            corrupt(self.sim.store, manifest.parts[0].key, how, self.rng)  # type: ignore[arg-type]
        except NotFound:
            return  # pruned already
        self.sim.emit(Damaged(self.clock.now(), manifest.ref))

    def committed(self, team: Team, step: int) -> None:
        """What the team does when a snapshot of it is durable."""
        if team.over or (step in team.committed and not team.draining):
            return
        team.committed.add(step)
        for done in [k for k in team.lines if k <= step]:
            del team.lines[done]
        for member in team.members:
            member.seen = max(member.seen or Ref(0, 0), Ref(team.epoch, step))
        if step == self.job.total_steps:
            team.over = True
            for member in team.members:
                self.leave(member, FINISHED)
        elif team.draining and step >= team.recorded:
            team.over = True
            for member in team.members:
                if team.draining == "stop":
                    self.leave(member, STOPPED)
                elif not member.ready:
                    self.leave(member, DRAINED)
            self.form_soon()


@dataclass
class Upload:
    team: Team
    member: Member
    rank: int
    step: int
    state: str
    data: dict[str, object]
    records: tuple[str, bytes]  # key and content
    late: bool = False


def _sample_hash(step: int, micro: int) -> int:
    return ((step * 1_000_003 + micro) * 0x9E3779B97F4A7C15 + 0x1234567) & (2**64 - 1)


def expected_samples(job: Job, step: int) -> str:
    """What a step must have consumed: a pure function of the step."""
    return f"{sum(_sample_hash(step, i) for i in range(job.micro_batches)) % 2**64:x}"


# ---- reading ------------------------------------------------------------------------------------------------------------
class Eyes:
    """The bucket as it is read, by `member` if one is named: what restores it may get flipped bytes, a bad reader always does, and there
    are spells in which the store denies all snapshots. Time passes for who looks again, and for nobody else."""

    def __init__(self, sim: Simulation, inner: ObjectStore, member: Member | None = None):
        self.sim, self.inner, self.url, self.member, self.waited_s = sim, inner, inner.url, member, 0.0
        self.put, self.create, self.delete = inner.put, inner.create, inner.delete

    def sleep(self, seconds: float) -> None:
        self.waited_s += seconds

    def denied(self, key: str, listing: bool = False) -> bool:
        t = self.sim.clock.now() + self.waited_s
        spells = (lists for start, end, lists in self.sim.denials if start <= t < end)
        return key.startswith("snapshots/") and any(not (listing and lists) for lists in spells)

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        if self.denied(key):
            raise NotFound(f"{self.url}/{key} (for a while)")
        found = self.inner.get(key, start, end)
        if self.member is None or not key.endswith("state.bin") or not found:
            return found
        damaged = self.member.bad_reader or (not self.sim.cloud.calm and self.sim.reads.random() < self.sim.weather.flips)
        return bytes([found[0] ^ 1]) + found[1:] if damaged else found

    def list(self, prefix: str) -> list[str]:
        return [] if self.denied(prefix, listing=True) else self.inner.list(prefix)

    def size(self, key: str) -> int:
        if self.denied(key):
            raise NotFound(f"{self.url}/{key} (for a while)")
        return self.inner.size(key)


@dataclass(frozen=True)
class Restored:
    """What a world resumes from, and how long its looks took; or who leaves instead, with which exit code."""

    manifest: Manifest | None
    waited_s: float = 0.0
    leave: Sequence[tuple[Member, int]] = ()


def restore(sim: Simulation, members: Sequence[Member], epoch: int) -> Restored:
    """As a session does: the first member chooses, all read, and what they find is judged."""
    store, build = sim.store if sim.cloud.calm else sim._faulty, sim.build
    hosts = {f"node-{m.attempt}": Eyes(sim, store, m) for m in members}
    each = {
        host: build.restore(
            build.snapshots(eyes), host, Looks(lambda eyes=eyes: eyes, eyes.sleep),  # type: ignore[misc]
            epoch=epoch, seen=max((m.seen for m in members if m.seen), default=None),
        )
        for host, eyes in hosts.items()
    }  # fmt: skip
    chooser = next(iter(each.values()))
    try:
        while ref := chooser.choose():
            found = {host: one.read(ref, lambda snapshots, look: _whole(snapshots, ref)) for host, one in each.items()}
            bad = {host: why for host, (_, why) in found.items() if why}
            if not bad:
                chooser.done(ref)
                return Restored(next(iter(found.values()))[0], max(eyes.waited_s for eyes in hosts.values()))
            if unfit := chooser.blame(ref, bad, refuted=len(bad) < len(found)):
                return Restored(None, leave=[(m, UNFIT) for m in members if f"node-{m.attempt}" in unfit])
    except Rewind as e:
        sim.refused = str(e)
        sim.member_store().create(STOP_KEY, json.dumps({"reason": sim.refused, "by": "a member", "failed": True}).encode())
        return Restored(None, leave=[(m, STOPPED) for m in members])
    return Restored(None, max(eyes.waited_s for eyes in hosts.values()))


def _whole(snapshots: Snapshots, ref: Ref) -> Manifest:
    manifest = snapshots.load(ref)
    snapshots.verify(manifest)
    return manifest


# ---- controllers ----------------------------------------------------------------------------------------------------
class Seat:
    """One controller's eyes and hands. Every operation takes time; at each the controller may die, before or after it took
    effect, or hang while another one takes over. It is the store and the cloud that this controller sees."""

    def __init__(self, sim: Simulation, depth: int, dies_s: float = math.inf):
        self.sim, self.depth, self.dies_s = sim, depth, dies_s
        self.url = sim.store.url
        self.lease: Lease | None = None
        self.server = "another" if sim.weather.elsewhere and sim.rng.random() < sim.weather.elsewhere and not sim.cloud.calm else "usual"
        self.refused_until_s = 0.0
        self.blind = False  # the bucket's last answer was none, or no

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
        """An operation on the bucket, as this controller is answered."""
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
        if key.startswith("facts/"):  # read by hundreds at a takeover, with no effect: nothing to see in between
            return self.sim.store.get(key, start, end)
        return self.store("get", lambda: self.sim.controller_store().get(key, start, end))

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.store("put", lambda: self.sim.controller_store().put(key, data))

    def create(self, key: str, data: bytes | memoryview) -> bool:
        return self.store("create", lambda: self.sim.controller_store().create(key, data))

    def list(self, prefix: str) -> list[str]:
        return self.store("list", lambda: self.sim.controller_store().list(prefix))

    def delete(self, key: str) -> None:
        self.store("delete", lambda: self.sim.controller_store().delete(key))

    def size(self, key: str) -> int:
        return self.store("size", lambda: self.sim.controller_store().size(key))

    # -- Cloud
    def offers(self) -> Sequence[Offer]:
        return self.sim.cloud.offers()

    def nodes(self) -> Sequence[Node]:
        return self.ask("nodes", lambda: [n for n in self.sim.cloud.nodes() if self.knows(n.attempt)])

    def launch(self, attempt: int, offer: Offer) -> None:
        def ask() -> None:
            self.sim.servers.setdefault(attempt, self.server)
            self.sim.cloud.launch(attempt, offer)

        self.act("launch", attempt, ask)

    def terminate(self, attempt: int) -> None:
        self.act("terminate", attempt, lambda: self.sim.cloud.terminate(attempt) if self.knows(attempt) else None)

    def knows(self, attempt: int) -> bool:
        """Was it launched through the API server that this controller speaks to?"""
        return self.sim.servers.get(attempt, self.server) == self.server

    def act(self, what: str, attempt: int, operation: Callable[[], None]) -> None:
        def effect() -> None:
            self.sim.emit(Acted(self.sim.clock.now(), self.lease.term if self.lease else 0, what, attempt, self.blind))
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


class Simulation:
    """Builds the world, keeps somebody at the wheel, and lets the checkers see everything."""

    def __init__(self, seed: int, rng: random.Random, policy: Policy, run: RunSpec, weather: Weather, job: Job, build: Build):
        self.seed, self.rng, self.policy, self.run, self.weather, self.job, self.build = seed, rng, policy, run, weather, job, build
        self.clock = VirtualClock()
        self.checkers: list[Checker] = []
        self.store = WatchedStore(build.store({}), self.clock, self.emit)
        self._faulty = FaultyStore(self.store, rng, unavailable=weather.store_errors / 2, unknown=weather.store_errors / 2)
        self._patience = build.patience(self.clock.now)
        self.reads = random.Random(f"reads {seed}")  # what happens to reads; of its own
        self.denials = self._denials()
        self.damaged: set[Ref] = set()  # by the world
        self.cloud = SimCloud(weather, self.clock, rng, self.emit)
        self.members = self.cloud.members = Members(self)
        self.controllers = 0
        self.servers: dict[int, str] = {}  # by attempt: the API server that launched it
        self.outcome: Outcome | None = None
        self.refused = ""  # why it asked for a person
        ledger = invariants.Ledger(estimated=self.servers if weather.elsewhere else ())
        self.ledger = ledger
        self.checkers += [
            invariants.WriteOnce(),
            invariants.OneHand(),
            invariants.Seeing(),
            invariants.IntendedFirst(),
            invariants.NodeLimit(run.max_nodes),
            invariants.NothingLeft(),
            invariants.Whole(self.store.inner),
            invariants.NewestCounts(self.store.inner),
            invariants.GreatestStep(self.store.inner),
            invariants.SamplesOnce(self.store.inner, GENESIS, lambda step: expected_samples(job, step)),
            ledger,
        ]
        if run.budget_usd is not None:
            # One attempt: what all nodes cost from the last look of a controller that dies to the end of the grace its successor gives.
            slack_s = run.exit_grace_s + weather.restart_s + 300
            dearest = max(o.usd_per_h for o in weather.offers)
            self.checkers.append(invariants.Budget(run.budget_usd, run.max_nodes * dearest * slack_s / 3600, ledger))
        slowest = min(o.speed for o in weather.offers)
        work_s = 2 * job.total_steps * job.step_s / slowest
        limit_s = run.max_hours_without_progress * 3600 if weather.calm_s == math.inf or weather.fails_at_step else 0.0
        self.clock.horizon_s = (0.0 if weather.calm_s == math.inf else weather.calm_s) + work_s + limit_s + 1800
        if weather.stop_at_s is not None:
            request = StopOrder("somebody asked for it", "user").to_json()
            self.clock.after(weather.stop_at_s, lambda: self.store.put(STOP_KEY, request))

    def _denials(self) -> list[tuple[float, float, bool]]:
        """From when until when the store says 404 of all snapshots, and whether it lists them nevertheless."""
        spells, t = list[tuple[float, float, bool]](), 0.0
        calm_s = min(self.weather.calm_s, 86_400.0)
        while self.weather.denials_per_h and (t := t + self.reads.expovariate(self.weather.denials_per_h / 3600)) < calm_s:
            # Not longer than a restore looks again while nothing is listed: the very first snapshot leaves no trace but itself.
            length_s, lists = self.reads.choice(((0.005, False), (8.0, False), (60.0, True)))
            spells.append((t, min(calm_s, t + length_s), lists))
        return spells

    def emit(self, event: Event) -> None:
        if isinstance(event, Damaged):
            self.damaged.add(event.ref)
        for checker in self.checkers:
            checker.see(event)

    def member_store(self) -> ObjectStore:
        if self.cloud.calm:
            return self.store
        since_s, until_s = self.weather.refused_s
        seen: ObjectStore = Eyes(self, self._faulty)
        return Refused(seen, self._patience, lambda: since_s <= self.clock.now() < until_s) if until_s else seen

    controller_store = member_store

    def play(self) -> SimResult:
        while self.outcome is None:
            self.lead(depth=0)
            if self.outcome is None:
                self.clock.sleep(self.rng.uniform(1, self.weather.restart_s))
        self.clock.sleep(600)  # whatever was on its way lands now
        for checker in self.checkers:
            checker.at_end()
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
            usd=self.ledger.usd,
            facts=facts,
            attempts=sum(n.up_s is not None for n in self.cloud.all.values()),
            controllers=self.controllers,
            epochs=self.members.epochs,
            steps_redone=max(0, self.members.steps_done - committed),
            weather=self.weather,
        )

    def check_life(self, outcome: Outcome) -> None:
        """If it can end well, it does; otherwise it says why not."""
        weather, run = self.weather, self.run
        excused = (
            weather.fails_at_step is not None
            or weather.stop_at_s is not None
            # The world spoiled more than a run may pass over by itself, or several readers say so who are bad themselves.
            or (self.refused and len(self.damaged) + sum(m.bad_reader for m in self.members.all.values()) > 1)
            or weather.calm_s == math.inf
            or run.budget_usd is not None
            or run.max_hours is not None
        )
        if (outcome.outcome != "done" and not excused) or not outcome.reason:
            raise Violation(f"life: {outcome.outcome} ({outcome.reason}) at {self.clock.now():.0f} s, although it could have ended")

    def lead(self, depth: int, dies_s: float = math.inf) -> None:
        """One controller, from its start to its end, of whatever kind."""
        self.controllers += 1
        seat, name = Seat(self, depth, dies_s), f"controller-{self.controllers}"
        seat.lease = self.build.lease(seat, self.clock, name, ttl_s=15.0)
        world = World(self.clock, seat, seat, random.Random(self.rng.random()))
        journal = self.build.journal(seat, name, self.clock.now)
        try:
            outcome = self.build.recover(self.run, self.policy, world, journal, seat.lease)
        except (Crash, Fenced, CloudUnavailable, StoreError):
            return  # dead, or not needed, or in trouble of its own
        self.outcome = self.outcome or outcome

    def overtake(self, what: str) -> None:
        """A controller hangs in an operation for so long that another one leads meanwhile.

        Not for longer than `lost_after_s` between its look at the lease and a launch: nothing can fence that but the cloud itself.
        """
        hangs_s = 15.0 * 1.5 + self.rng.uniform(0, 0.8 * self.run.lost_after_s if what == "launch" else 600)
        back_s = self.clock.now() + hangs_s
        self.lead(depth=1, dies_s=back_s)
        self.clock.sleep(max(0.0, back_s - self.clock.now()) * self.rng.random())
