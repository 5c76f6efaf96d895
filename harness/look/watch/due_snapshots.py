"""A watcher's view of its run: which snapshots are due, and whether the run has ended. Due
snapshots are held, up to a limit.

Reads the bucket; starts no processes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from harness.bucket.member_heartbeats import HeartbeatReader
from harness.bucket.orders import stop_order
from harness.core.world import BadInput
from harness.look.watch.side_jobs import SideJobs
from storage.errors import NotFound, StoreError
from storage.snapshots.manifest import Ref, SnapshotCorrupt
from storage.snapshots.reader_leases import reading
from storage.snapshots.retention import lineage
from storage.snapshots.snapshots import Snapshots
from storage.stores.objects import ObjectStore

# The rule by which snapshots are due for a side job. Used by the watcher. Pure.


@dataclass(frozen=True)
class DueRule:
    """A rule: every `every`-th committed snapshot, or the first in every `every_steps` steps, or
    only the newest. The run's last snapshot is always due."""

    every: int = 1
    every_steps: int = 0  # 0: count snapshots
    newest: bool = False

    def __post_init__(self) -> None:
        asked = [self.every != 1, self.every_steps != 0, self.newest]
        if self.every < 1 or self.every_steps < 0 or sum(asked) > 1:
            raise BadInput(
                "wanted one of --every K (snapshots), --every-steps N (steps) and --newest; found "
                f"--every {self.every}, --every-steps {self.every_steps}"
                f"{', --newest' if self.newest else ''}"
            )


def due(
    rule: DueRule, seen: Collection[Ref], settled: Collection[Ref], final: Ref | None = None
) -> list[Ref]:
    """Return the snapshots of `seen` that are due, oldest first. `seen`: committed snapshots, and
    pruned ones; those that a newer generation (the code's `epoch`) abandoned do not count.
    `settled`: done or given up. `final`: the run's last snapshot; None: it has not ended."""
    line = lineage(seen)[::-1]
    found = _by_rule(rule, line, settled)
    if final in line and final not in settled and final not in found:
        found.append(final)
    return found


def _by_rule(rule: DueRule, line: list[Ref], settled: Collection[Ref]) -> list[Ref]:
    if rule.newest:
        return [ref for ref in line[-1:] if ref not in settled]
    found: list[Ref] = []
    if rule.every_steps:
        spans = {ref.step // rule.every_steps for ref in line if ref in settled}
        for ref in line:
            if ref.step // rule.every_steps not in spans:
                spans.add(ref.step // rule.every_steps)
                found.append(ref)
        return found
    since = 0
    for ref in line:
        since += 1
        if ref in settled:
            since = 0
        elif since >= rule.every:
            found.append(ref)
            since = 0
    return found


# The holds of a watcher: leases on snapshots that wait, and its claim on the one in work.


class HeldSnapshots:
    """The snapshots that this process protects from pruning while it lives."""

    def __init__(self, snapshots: Snapshots):
        self._snapshots = snapshots
        self._held: dict[Ref, contextlib.ExitStack] = {}

    def keep(self, wanted: Sequence[Ref]) -> list[Ref]:
        """Hold exactly these snapshots. Return those that are pruned already. Raises StoreError."""
        for ref in set(self._held).difference(wanted):
            self._held.pop(ref).close()
        return [ref for ref in wanted if ref not in self._held and not self._hold(ref)]

    def close(self) -> None:
        self.keep(())

    def _hold(self, ref: Ref) -> bool:
        with contextlib.ExitStack() as stack:
            if stack.enter_context(reading(self._snapshots, ref)):
                self._held[ref] = stack.pop_all()
                return True
        return not _is_doomed(self._snapshots, ref)


def _is_doomed(snapshots: Snapshots, ref: Ref) -> bool:
    """Return whether a snapshot is pruned or about to be. If not, writing its lease failed for
    another reason and is retried."""
    committed, doomed = snapshots.manifests()
    return ref not in committed or ref in doomed


@contextlib.contextmanager
def beating(jobs: SideJobs, ref: Ref, number: int, every_s: float) -> Iterator[threading.Event]:
    """Send heartbeats for our claim while the body runs. The yielded event is set when the claim is
    lost: another watcher took it over, since heartbeats were late, or settled the snapshot."""
    done, lost = threading.Event(), threading.Event()

    def beat() -> None:
        n = 0
        while not done.wait(every_s) and not lost.is_set():
            n += 1
            with contextlib.suppress(StoreError):  # the next heartbeat may succeed
                jobs.beat(ref, number, n)
                if not jobs.is_ours(ref, number):
                    lost.set()

    thread = threading.Thread(target=beat, name="claim", daemon=True)
    thread.start()
    try:
        yield lost
    finally:
        done.set()
        thread.join()  # so that its last heartbeat does not come after our next write


@dataclass(frozen=True)
class RunScan:
    """The findings of one look at the run."""

    due: list[Ref]
    final: Ref | None  # the run's last snapshot; None: the run has not ended
    stopped: str  # why the run was stopped and no longer trains; "": it was not
    idle_s: float  # seconds since a new snapshot was seen


class DueSnapshotScan:
    """One watcher's view of its run. `most`: the greatest number of waiting snapshots to hold;
    `current`: the snapshot in work, which is held in addition."""

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
        self.pruned: set[Ref] = set()  # due snapshots that were pruned before they were done
        self.current: Ref | None = None
        self._holds, self._beats = (
            HeldSnapshots(self.snapshots),
            HeartbeatReader(store, time.monotonic),
        )
        self._known: set[Ref] = set()  # committed, or settled
        self._due: list[Ref] = []
        self._newest: Ref | None = None
        self._newest_s = time.monotonic()  # when the newest was first seen

    def look(self) -> RunScan:
        """Look at the run. Due snapshots are listed oldest first, and the first of them are held
        from now on. Raises StoreError."""
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
        return RunScan(left, final, self._stopped(final), idle_s)

    def hold(self, ref: Ref) -> bool:
        """Hold the snapshot in work. Return False if it is pruned. Raises StoreError."""
        self.current = ref
        self._keep()
        return ref in self._known

    def is_there(self, ref: Ref) -> bool:
        """Return False if the snapshot in work was pruned, because our lease could not be written.
        Raises StoreError."""
        committed, doomed = self.snapshots.manifests()
        if ref not in committed - doomed:
            self._miss(ref)
        return ref in self._known

    def close(self) -> None:
        """Release all holds. Raises StoreError."""
        self._holds.close()

    def _keep(self) -> None:
        """Hold the snapshot in work and the first `most` of those that wait."""
        waiting = [ref for ref in self._due if ref != self.current and ref in self._known]
        now = [self.current] if self.current else []
        for ref in self._holds.keep([*now, *waiting[: self._most]]):
            self._miss(ref)

    def _miss(self, ref: Ref) -> None:
        """Record that a snapshot was pruned before it was done."""
        self._known.discard(ref)
        if ref not in self.pruned:
            self._say(f"harness snapshots watch: step {ref.step} was pruned before it was done")
            self.pruned.add(ref)

    def _final(self, newest: Ref | None) -> Ref | None:
        if newest is None:
            return None
        try:
            return newest if self.snapshots.ended(self.snapshots.load(newest)) else None
        except (NotFound, SnapshotCorrupt):  # pruned a moment ago, or bad: look again
            return None

    def _stopped(self, final: Ref | None) -> str:
        """Return why the run was stopped, once nobody trains it; "": it continues."""
        if final is not None or (order := stop_order(self._store)) is None:
            return ""
        return order.reason if all(one.silent() for one in self._beats.look()) else ""
