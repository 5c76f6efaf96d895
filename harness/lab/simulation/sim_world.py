"""The simulated world: clock, store, cloud and their weather."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from harness.core.world import Clock, Node, NodeState, Offer
from harness.lab.simulation.invariants import Changed, SimulationEvent, Violation, Written
from storage.errors import NotFound, StoreRefused
from storage.stores.objects import ObjectStore
from storage.stores.retries import Patience

if TYPE_CHECKING:
    from harness.lab.simulation.sim_nodes import SimNodes

T = TypeVar("T")
OFFERS = (
    Offer(1.0, "aws/us-east-1a", accelerator="H100", gpus=8, on_demand_usd_per_h=4.0),
    Offer(1.3, "gcp/us-central1-b", accelerator="H100", gpus=8, on_demand_usd_per_h=4.0, speed=1.1),
    Offer(1.6, "aws/eu-west-1c", accelerator="H100", gpus=8, on_demand_usd_per_h=4.4, speed=0.9),
)
ON_DEMAND = Offer(
    4.0, "aws/us-east-1a/on-demand", spot=False, accelerator="H100", gpus=8, on_demand_usd_per_h=4.0
)


@dataclass(frozen=True)
class FaultRates:
    """The faults and capacity of a run's world until `calm_s`. Rates are per hour and node; chances
    are per operation unless stated otherwise."""

    offers: tuple[Offer, ...] = OFFERS
    calm_s: float = 1800.0
    available: float = 0.7  # share of time in which a spot offer has machines
    spell_s: float = 400.0  # mean time between two changes of availability
    launch_s: tuple[float, float] = (5.0, 60.0)
    kills_per_h: float = 3.0
    noticed: float = 0.6  # share of losses with a notice
    grace_s: float = 30.0
    flaky: float = 0.02  # chance that a node's script fails once
    cloud_errors: float = 0.02
    store_errors: float = 0.003
    crashes: float = 0.002  # of a controller
    overtakings: float = 0.001  # a controller hangs, and another one takes over
    restart_s: float = 30.0  # the longest time until a dead controller is restarted
    # from when to when the bucket answers 403 to everybody
    refused_s: tuple[float, float] = (0.0, 0.0)
    fails_at_step: int | None = None  # a bug of the script
    stop_at_s: float | None = None  # a person's order
    # chance that the bucket begins to refuse a controller (403), for up to half an hour
    refusals: float = 0.0
    # chance that a controller uses another API server, which shows only nodes launched through it
    elsewhere: float = 0.0

    @classmethod
    def of(cls, rng: random.Random) -> FaultRates:
        """Return a seed's mixture, in which some things are absent: bugs hide in combinations, and
        in calm too."""

        def sometimes(low: float, high: float) -> float:
            return rng.choice((0.0, 1.0, 1.0)) * rng.uniform(low, high)

        return cls(
            offers=(*OFFERS[: rng.randint(1, 3)], *([ON_DEMAND] if rng.random() < 0.3 else [])),
            calm_s=rng.uniform(0, 2400),
            available=rng.uniform(0.2, 1.0),
            spell_s=rng.uniform(60, 900),
            kills_per_h=sometimes(1, 12),
            noticed=rng.random(),
            grace_s=rng.choice((5.0, 30.0, 120.0)),
            flaky=sometimes(0.0, 0.03),
            cloud_errors=sometimes(0.005, 0.1),
            store_errors=sometimes(0.001, 0.01),
            crashes=sometimes(0.0005, 0.02),
            overtakings=sometimes(0.0005, 0.01),
            fails_at_step=rng.randint(1, 300) if rng.random() < 0.05 else None,
            stop_at_s=rng.uniform(0, 2000) if rng.random() < 0.05 else None,
        )


# ---- time ----------------------------------------------------------------------------------------
class VirtualClock:
    """A virtual clock: events happen, in order, while a controller sleeps."""

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
            raise Violation(
                f"life: at {until_s:.0f} s the run goes on, although there is capacity and nothing "
                "went wrong for long"
            )

    def after(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + seconds, next(self._order), happen))


class WatchedStore:
    """A store that reports every object that lands to the checkers."""

    def __init__(
        self, inner: ObjectStore, clock: Clock, emit: Callable[[SimulationEvent], None]
    ) -> None:
        self.inner, self.url, self._clock, self._emit = inner, inner.url, clock, emit
        self.get, self.list, self.size = inner.get, inner.list, inner.size

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._write(key, data, lambda: self.inner.put(key, data))

    def create(self, key: str, data: bytes | memoryview) -> bool:
        return self._write(key, data, lambda: self.inner.create(key, data))

    def delete(self, key: str) -> None:
        self.inner.delete(key)

    def _write(self, key: str, data: bytes | memoryview, write: Callable[[], T]) -> T:
        before, written = self._found(key), write()
        if written is not False:
            self._emit(Written(self._clock.now(), key, bytes(data), before))
        return written

    def _found(self, key: str) -> bytes | None:
        try:
            return self.inner.get(key)
        except NotFound:
            return None


class Refused:
    """A store that refuses everybody for a while, with the patience that `open_store` has."""

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


# ---- the cloud -----------------------------------------------------------------------------------
class SimCloud:
    """Offers whose capacity comes and goes; nodes that start slowly and are preempted, with or
    without a notice."""

    def __init__(
        self,
        weather: FaultRates,
        clock: VirtualClock,
        rng: random.Random,
        emit: Callable[[SimulationEvent], None],
    ):
        self.weather, self.clock, self.rng, self._emit = weather, clock, rng, emit
        self.all: dict[int, Node] = {}
        self.available = {
            o.name: not o.spot or rng.random() < weather.available for o in weather.offers
        }
        self.inside: SimNodes | None = None  # what happens on the nodes
        for offer in weather.offers:
            if offer.spot and 0 < weather.available < 1:
                self._next_spell(offer)

    @property
    def calm(self) -> bool:
        return self.clock.now() >= self.weather.calm_s

    # -- the interface for controllers
    def offers(self) -> Sequence[Offer]:
        return self.weather.offers

    def launch(self, attempt: int, offer: Offer) -> None:
        if attempt not in self.all:
            self._set(Node(attempt, offer, NodeState.PENDING, asked_s=self.clock.now()))
            self.clock.after(
                self.rng.uniform(*self.weather.launch_s), lambda: self._arrive(attempt)
            )

    def nodes(self) -> Sequence[Node]:
        lag_s = 0.0 if self.calm else 4.0  # a cloud's lists lag behind
        return [
            n for n in self.all.values() if n.asked_s + lag_s * (n.attempt % 2) <= self.clock.now()
        ]

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
        if self.inside:
            self.inside.boot(attempt, node.offer)
        if node.offer.spot and self.weather.kills_per_h:
            self.clock.after(
                self.rng.expovariate(self.weather.kills_per_h) * 3600, lambda: self._take(attempt)
            )

    def _next_spell(self, offer: Offer) -> None:
        share = self.weather.available if self.available[offer.name] else 1 - self.weather.available
        self.clock.after(
            self.rng.expovariate(1 / (2 * self.weather.spell_s * max(share, 0.02))),
            lambda: self._turn(offer),
        )

    def _turn(self, offer: Offer) -> None:
        if self.calm:
            return
        self.available[offer.name] = not self.available[offer.name]
        # most machines of the place are preempted, at about the same time
        if not self.available[offer.name]:
            for node in list(self.all.values()):
                if (
                    node.offer.name == offer.name
                    and node.state is NodeState.UP
                    and self.rng.random() < 0.7
                ):
                    self.clock.after(self.rng.uniform(0, 20), lambda a=node.attempt: self._take(a))  # type: ignore[misc]
        self._next_spell(offer)

    def _take(self, attempt: int) -> None:
        if self.calm or not self.all[attempt].alive:
            return
        if self.rng.random() < self.weather.noticed:
            if self.inside:
                self.inside.notice(attempt)
            self.clock.after(self.weather.grace_s, lambda: self.end(attempt, None, "preempted"))
        else:
            self.end(attempt, None, "preempted")

    def end(self, attempt: int, exit_code: int | None, reason: str) -> None:
        node = self.all[attempt]
        if node.alive:
            self._set(
                dataclasses.replace(
                    node,
                    state=NodeState.GONE,
                    gone_s=self.clock.now(),
                    exit_code=exit_code,
                    reason=reason,
                )
            )
            if self.inside:
                self.inside.lost(attempt)
