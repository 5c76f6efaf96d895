"""Who beats in the bucket, and since when things are as they are: the recovery loop's short memory.

Pure. What lies here may be forgotten without harm.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container
from dataclasses import dataclass, field

from harness.bucket.beats import Beat, Beats

LISTEN_S = 5.0  # between two looks at who beats, while the cloud does not show everybody
SEEK_S = 60.0  # between two looks for members that nobody knows of


@dataclass
class Since:
    """When something began, by attempt."""

    unseen_s: dict[int, float] = field(default_factory=dict)  # intended, not shown by the cloud
    told_s: dict[int, float] = field(default_factory=dict)  # told to go
    asked_s: dict[int, float] = field(default_factory=dict)  # asked to leave


@dataclass
class BeatListener:
    """Who beats in the bucket, as of the last look."""

    beats: Beats
    heard: list[Beat] = field(default_factory=list)
    heard_s: float = -math.inf
    members: set[int] = field(default_factory=set)  # attempts that ever had one
    sought_s: float = -math.inf

    def strangers(self, now: float, *known: Container[int]) -> set[int]:
        """Attempts that have a member, and that nobody intended as far as is known."""
        if now - self.sought_s >= SEEK_S:
            self.members, self.sought_s = self.beats.attempts(), now
        return {n for n in self.members if not any(n in attempts for attempts in known)}

    @property
    def unsilent(self) -> set[int]:
        """Attempts whose members were not yet seen to be silent, or gone."""
        return {beat.attempt for beat in self.heard if not beat.silent()}

    def listen(self, attempts: Collection[int], now: float) -> list[Beat]:
        """What is heard of these; the last answer, if that was a moment ago."""
        if attempts and now - self.heard_s >= LISTEN_S:
            self.heard, self.heard_s = self.beats.look(attempts), now
        return self.heard
