"""What a node remembers: its time in one epoch, its epochs so far, when to look at what next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from harness.agent.ends import End, Fruitless
from harness.bucket.layout import NO_EPOCH, Epoch
from harness.node.marks import Want

# the loop stood still for so long: nobody else's silence is judged by that time
FROZEN_S = 3.0


@dataclass
class Due:
    """When to look at what next, by our own clock. `round_s`: when we last looked at anything."""

    round_s: float
    _next_s: dict[str, float] = field(default_factory=dict)

    def now(self, what: str, now: float, every_s: float) -> bool:
        """Is it time for this? Then the next time is in `every_s`."""
        if now < self._next_s.get(what, 0.0):
            return False
        self._next_s[what] = now + every_s
        return True

    def at_once(self, what: str) -> None:
        self._next_s[what] = 0.0

    def slept_s(self, now: float) -> float:
        """For how long we were stopped, or the machine paused, since the last round; 0: not."""
        gap_s, self.round_s = now - self.round_s, now
        return gap_s if gap_s > FROZEN_S else 0.0


@dataclass
class Stay:
    """Our time in one epoch. All times by our own clock; None: not yet."""

    epoch: Epoch = NO_EPOCH
    entered_s: float = 0.0
    absent: set[str] = field(default_factory=set)  # members of it that are gone or dead
    first_end_s: float | None = None  # of a worker of ours
    peer_left_s: float | None = None
    waiting_since_s: float | None = None  # somebody who wants in
    # a script without a session was told of this by a signal, and when
    told: Want = Want.NOTHING
    told_s: float | None = None


@dataclass
class EpochMemory:
    """What is remembered of this node's epochs."""

    left_s: float  # since then we are in none
    beats: bool = False  # our heartbeat in the bucket has begun
    reason: str = ""  # in words, of our own end
    end: End | None = None  # of the last one
    tail: tuple[str, ...] = ()  # of the log of the worker that failed
    fruitless: Fruitless = field(default_factory=Fruitless)
    # what we shall say of ourselves once our uploads are done, and when we say it anyway
    ready: dict[str, Any] = field(default_factory=dict)
    settle_until_s: float = 0.0
