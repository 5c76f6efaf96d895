"""What a watcher sees of its run: which snapshots are due, and whether it has ended. What is seen
is held, as far as it shall be.

Knows the bucket; starts nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from harness.bucket.beats import Beats
from harness.bucket.orders import stop_order
from harness.bucket.side_jobs import SideJobs
from harness.watch.due import DueRule, due
from harness.watch.holds import HeldSnapshots
from storage.errors import NotFound
from storage.manifest import Ref, SnapshotCorrupt
from storage.objects import ObjectStore
from storage.snapshots import Snapshots


@dataclass(frozen=True)
class RunSeen:
    """What a look at the run has found."""

    due: list[Ref]
    final: Ref | None  # the run has ended with it
    stopped: str  # why it was stopped, and nobody trains it any more; "": it was not
    idle_s: float  # since a new snapshot was seen


class Lookout:
    """One watcher's view. `most`: snapshots that wait and are held; `current`: the one that is
    done now, which is held besides."""

    def __init__(
        self,
        store: ObjectStore,
        jobs: SideJobs,
        rule: DueRule,
        most: int,
        say: Callable[[str], None],
    ):
        self._store, self._jobs, self._rule, self._most, self._say = store, jobs, rule, most, say
        self.snapshots = Snapshots(store)
        self.settled = jobs.settled()
        self.pruned: set[Ref] = set()  # before anybody came to them
        self.current: Ref | None = None
        self._holds, self._beats = HeldSnapshots(self.snapshots), Beats(store, time.monotonic)
        self._known: set[Ref] = set()  # committed, or settled
        self._due: list[Ref] = []
        self._newest: Ref | None = None
        self._newest_s = time.monotonic()  # when it was seen first

    def look(self) -> RunSeen:
        """What is to be done, oldest first; the first of it are held from now on."""
        committed, doomed = self.snapshots.manifests()
        there = committed - doomed
        usable = there - self.snapshots.quarantined()
        newest = max(usable, default=None)
        if newest is not None and (self._newest is None or newest > self._newest):
            self._newest, self._newest_s = newest, time.monotonic()
        self._known |= usable | self.settled
        final = self._final(newest)
        wanted = due(self._rule, self._known, self.settled, final)
        for ref in [one for one in wanted if one not in there and one != self.current]:
            if self._jobs.outcome(ref) is not None:
                self.settled.add(ref)
            else:
                self._miss(ref)
        self._due = [ref for ref in wanted if ref in usable and ref not in self.settled]
        self._keep()
        left = [ref for ref in self._due if ref in self._known]
        idle_s = time.monotonic() - self._newest_s
        return RunSeen(left, final, self._stopped(final), idle_s)

    def hold(self, ref: Ref) -> bool:
        """Hold the one that is done now. False: it is pruned. Raises StoreError."""
        self.current = ref
        self._keep()
        return ref in self._known

    def is_there(self, ref: Ref) -> bool:
        """Else it was pruned though it is done now: our leases did not get through. Raises
        StoreError."""
        committed, doomed = self.snapshots.manifests()
        if ref not in committed - doomed:
            self._miss(ref)
        return ref in self._known

    def close(self) -> None:
        """Hold nothing. Raises StoreError."""
        self._holds.close()

    def _keep(self) -> None:
        """Hold what is done, and some of what waits."""
        waiting = [ref for ref in self._due if ref != self.current and ref in self._known]
        now = [self.current] if self.current else []
        for ref in self._holds.keep([*now, *waiting[: self._most]]):
            self._miss(ref)

    def _miss(self, ref: Ref) -> None:
        """It is gone before anybody did it."""
        self._known.discard(ref)
        if ref not in self.pruned:
            self._say(f"harness watch: step {ref.step} was pruned before it was done")
            self.pruned.add(ref)

    def _final(self, newest: Ref | None) -> Ref | None:
        if newest is None:
            return None
        try:
            return newest if self.snapshots.ended(self.snapshots.load(newest)) else None
        except (NotFound, SnapshotCorrupt):  # pruned a moment ago, or bad: look again
            return None

    def _stopped(self, final: Ref | None) -> str:
        """Why the run was stopped, when nobody trains it any more; "": it goes on."""
        if final is not None or (order := stop_order(self._store)) is None:
            return ""
        return order.reason if all(one.silent() for one in self._beats.look()) else ""
