"""The heartbeats of a run's members in the bucket, whatever any cloud shows. Used by code that must
not take a living node for a lost one.

Members rewrite their object (`rdzv/members/`) regularly. One whose object changes is alive; one
that recorded its goodbye is gone; one whose object is unchanged for long enough, by the observer's
own clock, is silent. Clocks are never compared, so the first look at a member proves nothing yet:
only "gone" is known at once.

Pure: knows an ObjectStore and is given a clock; tolerates objects that it cannot read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from harness.bucket.layout import (
    MEMBERS,
    PROMISE_S,
    MemberHeader,
    attempt_of,
    member_key,
    member_of,
)
from storage.errors import NotFound
from storage.stores.objects import ObjectStore

MISSED = 2.0  # a member is silent after this many missed heartbeats in a row, and LATE_S more
LATE_S = 5.0


@dataclass(frozen=True)
class MemberHeartbeat:
    """The observed state of one member."""

    member: str
    attempt: int  # 0: not launched by a controller
    gone: bool  # it recorded its goodbye
    moved: bool  # its object was seen to change, so it was alive then
    still_s: float  # seconds since its object was seen to change, or was first seen
    promise_s: float  # its promised longest time between heartbeats
    beats: int = 0  # heartbeats so far; 0: unknown

    @property
    def lived_s(self) -> float:
        """Upper bound of its agent's lifetime, in seconds, from its heartbeats; inf: unknown."""
        return self.beats * max(self.promise_s, PROMISE_S) if self.beats else math.inf

    def silent(self, least_s: float = 0.0) -> bool:
        """Return whether its heartbeats have surely ended. `least_s`: the shortest silence that
        counts."""
        return self.gone or self.still_s >= max(least_s, MISSED * self.promise_s + LATE_S)


class HeartbeatReader:
    """One observer's view of a run's members. `now`: the observer's clock, in seconds. Call `look`
    more often than members send heartbeats."""

    def __init__(self, store: ObjectStore, now: Callable[[], float]):
        self._store, self._now = store, now
        # name -> (object, time of its last change, whether it ever changed)
        self._seen: dict[str, tuple[bytes, float, bool]] = {}
        self._gone: dict[str, MemberHeartbeat] = {}  # final, since a name is used once

    def attempts(self) -> set[int]:
        """Return the attempts of all members that ever wrote an object, with one list request.
        Raises StoreError."""
        return {attempt_of(member_of(key)) for key in self._store.list(MEMBERS)} - {0}

    def look(self, attempts: Collection[int] | None = None) -> list[MemberHeartbeat]:
        """Return the state of every member that ever wrote an object (`attempts`: only of these;
        None: of all). Raises StoreError."""
        names = [name for key in self._store.list(MEMBERS) if (name := member_of(key))]
        found = [
            self._look(name) for name in names if attempts is None or attempt_of(name) in attempts
        ]
        return [beat for beat in found if beat is not None]

    def _look(self, name: str) -> MemberHeartbeat | None:
        if name in self._gone:
            return self._gone[name]
        try:
            data = self._store.get(member_key(name))
        except NotFound:
            return None
        now = self._now()
        before = self._seen.get(name)
        if before is None or before[0] != data:
            before = self._seen[name] = (data, now, before is not None)
        told, still_s = MemberHeader.of(data), now - before[1]
        beat = MemberHeartbeat(
            name, attempt_of(name), told.gone, before[2], still_s, told.promise_s, told.beats
        )
        if beat.gone:
            self._gone[name] = beat
        return beat
