"""One virtual clock, and whose turn it is. Pure.

Everything that happens is an event of some actor: a node's agent, its heartbeat, its uploader, the
workers of an epoch, a controller. Who sleeps lets the events of all others happen meanwhile, at any
depth; an actor that is in the middle of something has its own next events held until it is done. So
any blocking code runs here unchanged, without threads, and in the same order every time.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from harness.lab.simulation.invariants import Violation
from support.clock import speaking

Happening = Callable[[], None]
MOST_AT_ONCE = 20_000  # events and waits at one moment; more are an endless loop


class Kernel:
    """`protocol`: what the run's code speaks. `horizon_s`: the run must have ended by then.
    `broken`: the first rule that was broken; it is raised at the next event, whoever caught it
    first."""

    def __init__(self, protocol: int = 1) -> None:
        self.protocol = protocol  # of all others
        self.now_s, self.horizon_s = 0.0, math.inf
        self.broken: Violation | None = None
        self.happened = 0  # events, in all
        self._moment = (0.0, 0)  # of the last event or wait, and how many there were then
        self._events: list[tuple[float, int, str, Happening]] = []
        self._order = itertools.count()
        self._held: dict[str, list[Happening]] = {}  # of actors that are in the middle of something
        self._paused_s: dict[str, float] = {}
        self.speaks: dict[str, int] = {}  # actors of another version: their protocol

    def now(self) -> float:
        return self.now_s

    def after(self, seconds: float, happen: Happening, actor: str = "") -> None:
        heapq.heappush(
            self._events, (self.now_s + max(0.0, seconds), next(self._order), actor, happen)
        )

    def sleep(self, seconds: float) -> None:
        until_s = self.now_s + max(0.0, seconds)
        while self._events and self._events[0][0] <= until_s:
            self._next()
        self.now_s = max(self.now_s, until_s)
        self._judge()

    def pause(self, actor: str, seconds: float) -> None:
        """Nothing of this actor happens for so long."""
        self._paused_s[actor] = max(self._paused_s.get(actor, 0.0), self.now_s + seconds)

    def paused(self, actor: str) -> bool:
        return self._paused_s.get(actor, 0.0) > self.now_s

    @contextmanager
    def acting(self, actor: str) -> Iterator[None]:
        """This actor is in the middle of something."""
        self._held[actor] = []
        try:
            yield
        finally:
            for happen in self._held.pop(actor):
                self.after(0.0, happen, actor)

    def _next(self) -> None:
        t, _, actor, happen = heapq.heappop(self._events)
        self.now_s = max(self.now_s, t)
        if actor and self.paused(actor):
            self.after(self._paused_s[actor] - self.now_s, happen, actor)
        elif actor in self._held:
            self._held[actor].append(happen)
        elif actor:
            self.happened += 1
            with self.acting(actor), speaking(self.speaks.get(actor, self.protocol)):
                happen()
        else:
            self.happened += 1
            happen()
        self._judge()

    def _judge(self) -> None:
        moment, many = self._moment
        self._moment = (self.now_s, many + 1 if moment == self.now_s else 1)
        if many >= MOST_AT_ONCE:
            self.broken = self.broken or Violation(
                f"time stands still: {many} events and waits at {self.now_s:.1f} s"
            )
        if self.broken is not None:
            raise self.broken
        if self.now_s > self.horizon_s:
            raise Violation(
                f"life: at {self.now_s:.0f} s the run goes on, although there is capacity and "
                "nothing went wrong for long"
            )
