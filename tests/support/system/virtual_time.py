"""One virtual clock, and whose turn it is. Pure.

Everything that happens is an event of some actor: a node's agent, its heartbeat, its uploader, the
workers of an epoch, a controller. Who sleeps lets all others go on meanwhile, however long they
sleep themselves; an actor that is in the middle of something has its own next events held until it
is done. So any blocking code runs here unchanged, without threads, and in the same order every
time: each event is a greenlet, and exactly one of them runs.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from greenlet import GreenletExit, getcurrent, greenlet  # type: ignore[import-untyped]

from harness.core import decoding
from harness.lab.simulation.invariants import Violation
from support.clock import speaking

T = TypeVar("T")
Happening = Callable[[], None]
WAKE = "."  # the actor of all wakings
GLANCE_S = 0.05  # between two looks of who waits for another actor
MOST_AT_ONCE = 20_000  # events and waits at one moment; more are an endless loop


class _Turn(greenlet):  # type: ignore[misc]
    """Something that happens. `actor`: whose it is."""

    actor = ""


class Kernel:
    """`protocol`: what the run's code speaks. `horizon_s`: the run must have ended by then.
    `broken`: the first rule that was broken; it is raised at the next event, whoever caught it
    first. It is made by who runs the run, in whose sleep all errors of events are raised."""

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
        self._loop = _Turn(self._run)  # its parent is who runs the run

    def now(self) -> float:
        return self.now_s

    def after(self, seconds: float, happen: Happening, actor: str = "") -> None:
        heapq.heappush(
            self._events, (self.now_s + max(0.0, seconds), next(self._order), actor, happen)
        )

    def sleep(self, seconds: float) -> None:
        """Raises what an event raised, for who runs the run."""
        if self._loop.dead:
            raise GreenletExit
        until_s = self.now_s + max(0.0, seconds)
        if self._events and self._events[0][0] <= until_s:
            me, protocol = getcurrent(), decoding.PROTOCOL
            self.after(seconds, lambda: self._wake(me), WAKE)
            back = self._loop
            if me.parent is not None and me.parent is not self._loop:  # see `begin`
                back, me.parent = me.parent, self._loop
            back.switch()
            decoding.PROTOCOL = protocol
        else:
            self.now_s = until_s
        self._judge()

    def begin(self, do: Happening) -> None:
        """Go on as soon as `do` sleeps, or is done; it then goes on by itself."""
        turn = _Turn(do, getcurrent())
        turn.actor = getattr(getcurrent(), "actor", "")
        protocol = decoding.PROTOCOL
        turn.switch()
        decoding.PROTOCOL = protocol

    def close(self) -> None:
        """Nothing happens any more: who sleeps is let go."""
        self._events.clear()
        if not self._loop.dead:
            self._loop.throw(GreenletExit)

    def pause(self, actor: str, seconds: float) -> None:
        """Nothing of this actor happens for so long."""
        self._paused_s[actor] = max(self._paused_s.get(actor, 0.0), self.now_s + seconds)

    def paused(self, actor: str) -> bool:
        """`actor`: "NAME" or "NAME/part"; a part stands still with the whole."""
        return self.paused_s(actor) > self.now_s

    def paused_s(self, actor: str) -> float:
        """Until when it stood still."""
        return self._paused_s.get(actor.partition("/")[0], 0.0)

    @contextmanager
    def acting(self, actor: str) -> Iterator[None]:
        """This actor is in the middle of something."""
        self._held[actor] = []
        try:
            yield
        finally:
            for happen in self._held.pop(actor):
                self.after(0.0, happen, actor)

    # ---- the loop --------------------------------------------------------------------------------
    def _run(self) -> None:
        while self._events:
            t, _, actor, happen = heapq.heappop(self._events)
            self.now_s = max(self.now_s, t)
            if actor and self.paused(actor):
                self._after_pause(actor, happen, actor)
            elif actor in self._held:
                self._held[actor].append(happen)
            elif actor == WAKE:
                happen()
            else:
                self.happened += 1
                turn = _Turn(lambda a=actor, h=happen: self._act(a, h), self._loop)
                turn.actor = actor
                turn.switch()
            self._judge()

    def _act(self, actor: str, happen: Happening) -> None:
        if not actor:
            happen()
            return
        speaks = self.speaks.get(actor.partition("/")[0], self.protocol)
        with self.acting(actor), speaking(speaks):
            happen()

    def _wake(self, sleeper: greenlet) -> None:
        actor = getattr(sleeper, "actor", "")
        if actor and self.paused(actor):
            self._after_pause(actor, lambda: self._wake(sleeper), WAKE)
        elif not sleeper.dead:
            sleeper.switch()

    def _after_pause(self, actor: str, happen: Happening, of: str) -> None:
        self.after(self.paused_s(actor) - self.now_s, happen, of)

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


class SimCall(Generic[T]):
    """As `bounded_store.Call`, in virtual time: a call that goes on without its caller."""

    def __init__(self, kernel: Kernel, do: Callable[[], T]):
        self._kernel, self._do = kernel, do
        self._found: T | None = None
        self._error: BaseException | None = None
        self._ended = False
        self.ended_s = 0.0
        kernel.begin(self._execute)

    def _execute(self) -> None:
        try:
            self._found = self._do()
        except GreenletExit:
            raise
        except BaseException as e:
            self._error = e
        self.ended_s, self._ended = self._kernel.now_s, True

    def wait(self, seconds: float) -> bool:
        until_s = self._kernel.now_s + seconds
        while not self._ended and self._kernel.now_s < until_s:
            self._kernel.sleep(min(GLANCE_S, until_s - self._kernel.now_s))
        return self._ended

    def answer(self) -> T:
        if self._error is not None:
            raise self._error
        return self._found  # type: ignore[return-value]


class SimLock:
    """As `threading.Lock`: who waits lets the others go on."""

    def __init__(self, kernel: Kernel):
        self._kernel, self._taken = kernel, False

    def acquire(self, blocking: bool = True, timeout: float = math.inf) -> bool:
        until_s = self._kernel.now_s + timeout
        while self._taken and self._kernel.now_s < until_s:
            self._kernel.sleep(min(GLANCE_S, until_s - self._kernel.now_s))
        if self._taken:
            return False
        self._taken = True
        return True

    def release(self) -> None:
        self._taken = False

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
