"""Belief about the room that a place has for a fleet: how many of its nodes last had room there,
and how many usually have. A count ages: it is forgotten at the rate at which counts change.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.core.estimates import CapacitySeen

# Prior: the share of a fleet that a place has room for. It weighs as much as so many hours.
USUAL_SHARE, USUAL_SHARE_H = 0.6, 6.0


@dataclass(frozen=True)
class WatchedRoom:
    """The room of some places while it was watched: `share_h`: hours of the whole fleet that had
    room, of `hours`."""

    share_h: float = 0.0
    hours: float = 0.0

    @classmethod
    def of(cls, seen: Iterable[CapacitySeen], most: int) -> WatchedRoom:
        """Return that of one place. `seen`: its offers, whose rooms add up."""
        found = list(seen)
        hours = max((s.watched_s for s in found), default=0.0) / 3600
        share_h = sum(s.room_node_s for s in found) / 3600 / most
        return cls(min(hours, share_h), hours)

    def __add__(self, other: WatchedRoom) -> WatchedRoom:
        return WatchedRoom(self.share_h + other.share_h, self.hours + other.hours)

    def share(self, towards: float = USUAL_SHARE) -> float:
        """Return the mean share, shrunk towards another."""
        return (towards * USUAL_SHARE_H + self.share_h) / (USUAL_SHARE_H + self.hours)


@dataclass(frozen=True)
class RoomBelief:
    """The room of one place, as shares of the fleet. `last`: as last seen; `sure`: the probability
    that it is still so; `usual`: its mean."""

    usual: float
    last: float = 0.0
    sure: float = 0.0

    @classmethod
    def of(
        cls,
        seen: Sequence[CapacitySeen],
        most: int,
        now_s: float,
        usual: float,
        changes_per_h: float,
    ) -> RoomBelief:
        """Return the belief of a place. `seen`: its spot offers that were ever seen."""
        counted = [(s.room, s.room_s) for s in seen if s.room is not None]
        if not counted:
            return cls(usual)
        age_h = max(0.0, now_s - max(at_s for _, at_s in counted)) / 3600
        last = min(1.0, sum(room for room, _ in counted) / most)
        return cls(usual, last, math.exp(-changes_per_h * age_h))

    def chances(self) -> tuple[tuple[float, float], ...]:
        """Return the shares that it may have room for, each with its probability. What is
        forgotten is as usual: none, all, or the mean."""
        new = 1 - self.sure
        return (
            (self.last, self.sure),
            (0.0, new * (1 - self.usual) / 2),
            (1.0, new * self.usual / 2),
            (self.usual, new / 2),
        )
