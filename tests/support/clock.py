"""A clock that tests play, and code of another version. Needs no satellite."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from harness.core import decoding


class PlayedClock:
    """A clock whose time passes while somebody sleeps; planned events happen meanwhile, in
    order. `horizon_s`: whoever sleeps beyond it goes on for ever."""

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
        assert until_s <= self.horizon_s, f"at {until_s:.0f} s it still goes on"

    def after(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + seconds, next(self._order), happen))


@contextmanager
def speaking(protocol: int) -> Iterator[None]:
    """The code inside is of the version that speaks this."""
    before, decoding.PROTOCOL = decoding.PROTOCOL, protocol
    try:
        yield
    finally:
        decoding.PROTOCOL = before
