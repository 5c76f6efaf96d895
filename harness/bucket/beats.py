"""Who of a run still beats in the bucket, whatever any cloud shows. For whoever must not take a
living node for a lost one.

Members rewrite their object (`rdzv/members/`) all the time. One whose object changes is alive; one
that said goodbye is gone; one whose object stands still for long enough, by the observer's own
clock, is silent. No two clocks are compared, so the first look at a member proves nothing yet: only
"gone" is known at once.

Pure: knows an ObjectStore and is given a clock; tolerates objects that it cannot read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from harness.bucket.layout import MEMBERS, PROMISE_S, Glance, attempt_of, member_key, member_of
from storage.errors import NotFound
from storage.objects import ObjectStore

MISSED = 2.0  # so many beats in a row, and LATE_S, must be missed
LATE_S = 5.0


@dataclass(frozen=True)
class Beat:
    """What was seen of one member."""

    member: str
    attempt: int  # 0: no controller launched it
    gone: bool  # it said goodbye
    moved: bool  # its object was seen to change: it lived then
    still_s: float  # since its object was seen to change, or was seen first
    promise_s: float  # it beats at least so often
    beats: int = 0  # so many it has made; 0: nobody knows

    @property
    def lived_s(self) -> float:
        """Its agent lived no longer than this: a beat never took longer. inf: nobody knows."""
        return self.beats * max(self.promise_s, PROMISE_S) if self.beats else math.inf

    def silent(self, least_s: float = 0.0) -> bool:
        """Is it surely not beating any more? `least_s`: the shortest silence that counts."""
        return self.gone or self.still_s >= max(least_s, MISSED * self.promise_s + LATE_S)


class Beats:
    """One observer's view of a run's members. `now`: its own clock, in seconds; look more often
    than they beat."""

    def __init__(self, store: ObjectStore, now: Callable[[], float]):
        self._store, self._now = store, now
        # object, since when it stands still, whether it ever moved
        self._seen: dict[str, tuple[bytes, float, bool]] = {}
        self._gone: dict[str, Beat] = {}  # for ever: a name is used once

    def attempts(self) -> set[int]:
        """Of all members that ever said something; one list. Raises StoreError."""
        return {attempt_of(member_of(key)) for key in self._store.list(MEMBERS)} - {0}

    def look(self, attempts: Collection[int] | None = None) -> list[Beat]:
        """Every member that ever said something (`attempts`: of these only). Raises StoreError."""
        names = [name for key in self._store.list(MEMBERS) if (name := member_of(key))]
        found = [
            self._look(name) for name in names if attempts is None or attempt_of(name) in attempts
        ]
        return [beat for beat in found if beat is not None]

    def _look(self, name: str) -> Beat | None:
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
        told, still_s = Glance.of(data), now - before[1]
        beat = Beat(
            name, attempt_of(name), told.gone, before[2], still_s, told.promise_s, told.beats
        )
        if beat.gone:
            self._gone[name] = beat
        return beat
