"""Side jobs of a run in its bucket: the watcher that works on each snapshot, and its outcome.

A watch is a name; any number of watchers may share it and process each snapshot once. Create-only:

    watch/{name}/claims/{ref}-{number:04d}.json    a watcher works on this snapshot
    watch/{name}/claims/{ref}-{number:04d}.beat    rewritten, only by its holder
    watch/{name}/done/{ref}.json                   it was done, or given up

A claim is over when its heartbeat has been unchanged for `lease_s` by the observer's own clock, or
records that it was given back; then number n + 1 can be created, once. The watcher that settles a
snapshot deletes its claims; one that claims a snapshot checks afterwards that it is not settled.

Pure: knows an ObjectStore and is given a clock.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from harness.bucket.layout import SMALL_NBYTES, WATCH
from harness.core.decoding import Amount, Natural, Reading, decoded
from harness.core.facts import Fact, SnapshotCommitted, Stamped, Validated
from harness.core.masking import masked_deep
from storage.canonical_json import BadObject, canonical
from storage.errors import NotFound
from storage.snapshots.manifest import Ref
from storage.snapshots.reader_leases import Watch
from storage.snapshots.retention import lineage
from storage.stores.objects import ObjectStore, get_each

LEASE_S = 60.0  # timeout after which a watcher whose claim is unchanged counts as dead
MOST_LEASE_S = 3600.0  # greatest accepted time between two heartbeats
GIVEN_BACK = b"given back"  # a heartbeat: the next watcher need not wait
NO_BEAT = b"-"  # no heartbeat yet: it was claimed a moment ago
NAME = re.compile(r"[A-Za-z0-9_.\-]{1,40}")  # of a watch

_CLAIM = re.compile(r"-(\d{4,9})\.json")
_DONE = re.compile(r"watch/[^/]+/done/([^/]+)\.json")


@dataclass(frozen=True)
class SideClaim:
    """A watcher's claim on a snapshot. `lease_s`: its timeout, in seconds between heartbeats."""

    by: str = ""
    lease_s: Amount = LEASE_S

    @classmethod
    def of(cls, data: bytes) -> SideClaim:
        """Decode a claim. Never fails: a claim is held whatever its object contains."""
        try:
            found = decoded(cls, data, most_nbytes=SMALL_NBYTES)
        except BadObject:
            return cls()
        return found if 0 < found.lease_s <= MOST_LEASE_S else cls(found.by)

    def encode(self) -> bytes:
        return canonical(masked_deep(dataclasses.asdict(self)))


@dataclass(frozen=True)
class SideOutcome:
    """The outcome of a snapshot's side job. `metrics`: as reported; `why`: reason of a failure."""

    state: str  # "done" | "failed"
    metrics: dict[str, Reading] = field(default_factory=dict)
    tries: Natural = 1
    seconds: Amount = 0.0
    by: str = ""
    why: str = ""

    @classmethod
    def of(cls, data: bytes) -> SideOutcome:
        """Decode an outcome. Never fails: a settled snapshot stays settled."""
        try:
            return decoded(cls, data)
        except BadObject as e:
            return cls("failed", why=f"its outcome is unreadable: {e}")

    def encode(self) -> bytes:
        return canonical(masked_deep(dataclasses.asdict(self)))


class SideJobs:
    """One watcher's view of a watch. `holder`: unique to that watcher. `now`: its own clock, in
    seconds."""

    def __init__(
        self,
        store: ObjectStore,
        name: str,
        holder: str,
        lease_s: float = LEASE_S,
        *,
        now: Callable[[], float],
    ):
        self._store, self.name, self._holder, self._lease_s = store, name, holder, lease_s
        self._now = now
        self._still: dict[float, Watch] = {}  # by lease

    # ---- outcomes --------------------------------------------------------------------------------
    def settled(self) -> set[Ref]:
        """Return the snapshots that were done or given up. Raises StoreError."""
        return set(self._done())

    def outcomes(self) -> dict[Ref, SideOutcome]:
        """Return the outcomes of all settled snapshots. Raises StoreError."""
        keys = {key: ref for ref, key in self._done().items()}
        found = get_each(self._store, keys)
        return {keys[key]: SideOutcome.of(data) for key, data in found if data is not None}

    def outcome(self, ref: Ref) -> SideOutcome | None:
        """Return the outcome of one snapshot, or None if it is not settled. Raises StoreError."""
        try:
            return SideOutcome.of(self._store.get(self._done_key(ref)))
        except NotFound:
            return None

    def forget_failed(self) -> int:
        """Let failed side jobs be done again. Return how many there are. Raises StoreError."""
        failed = [ref for ref, outcome in self.outcomes().items() if outcome.state != "done"]
        for ref in failed:
            self._clear(ref)  # first, so that its dead watchers do not count again
            self._store.delete(self._done_key(ref))
        return len(failed)

    # ---- claims ----------------------------------------------------------------------------------
    def claim(self, ref: Ref) -> int:
        """Claim a snapshot. Return the number of our claim, which needs heartbeats from now on, or
        0 if another watcher has it or it is settled. Raises StoreError."""
        before = self._numbers(ref)
        newest = max(before, default=0)
        if newest and not self._is_over(ref, newest):
            return 0
        body = SideClaim(self._holder, self._lease_s)
        if not self._store.create(self._claim_key(ref, newest + 1), body.encode()):
            return 0
        self.beat(ref, newest + 1, 0)
        if self.outcome(ref) is not None:  # settled since our look, with its claims deleted
            self._clear(ref)
            return 0
        return newest + 1

    def beat(self, ref: Ref, number: int, n: int) -> None:
        """Write a heartbeat; `n` must grow. Raises StoreError."""
        self._store.put(self._beat_key(ref, number), canonical({"by": self._holder, "beat": n}))

    def is_ours(self, ref: Ref, number: int) -> bool:
        """Return whether no other watcher has taken it over or settled it. Raises StoreError."""
        try:
            self._store.get(self._claim_key(ref, number + 1))
            return False
        except NotFound:
            return self.outcome(ref) is None

    def give_back(self, ref: Ref, number: int) -> None:
        """Give the claim back, so that the next watcher need not wait. Raises StoreError."""
        self._store.put(self._beat_key(ref, number), GIVEN_BACK)

    def deaths(self, ref: Ref, number: int) -> int:
        """Return how many watchers died holding a claim before `number`. Raises StoreError."""
        keys = [self._beat_key(ref, n) for n in self._numbers(ref) if n < number]
        return sum(data != GIVEN_BACK for _, data in get_each(self._store, keys))

    def settle(self, ref: Ref, outcome: SideOutcome) -> bool:
        """Record the final outcome. Return False if another watcher has done so. Raises
        StoreError."""
        first = self._store.create(self._done_key(ref), outcome.encode())
        self._clear(ref)
        return first

    # ---- keys ------------------------------------------------------------------------------------
    def _is_over(self, ref: Ref, number: int) -> bool:
        key = self._claim_key(ref, number)
        try:
            lease_s = max(self._lease_s, SideClaim.of(self._store.get(key)).lease_s)
        except NotFound:  # it is being settled
            return False
        try:
            beat = self._store.get(self._beat_key(ref, number))
        except NotFound:
            beat = NO_BEAT
        watch = self._still.setdefault(lease_s, Watch(lease_s, self._now))
        return beat == GIVEN_BACK or watch(key, beat)

    def _numbers(self, ref: Ref) -> list[int]:
        prefix = self._claims_of(ref)
        found = (_CLAIM.fullmatch(key[len(prefix) - 1 :]) for key in self._store.list(prefix))
        return sorted(int(one[1]) for one in found if one)

    def _clear(self, ref: Ref) -> None:
        for key in self._store.list(self._claims_of(ref)):
            self._store.delete(key)

    def _done(self) -> dict[Ref, str]:
        found: dict[Ref, str] = {}
        for key in self._store.list(f"{WATCH}{self.name}/done/"):
            if named := _DONE.fullmatch(key):
                try:
                    found[Ref.parse(named[1])] = key
                except ValueError:  # not our key
                    continue
        return found

    def _claims_of(self, ref: Ref) -> str:
        return f"{WATCH}{self.name}/claims/{ref.name}-"

    def _claim_key(self, ref: Ref, number: int) -> str:
        return f"{self._claims_of(ref)}{number:04d}.json"

    def _beat_key(self, ref: Ref, number: int) -> str:
        return f"{self._claims_of(ref)}{number:04d}.beat"

    def _done_key(self, ref: Ref) -> str:
        return f"{WATCH}{self.name}/done/{ref.name}.json"


# The metrics that side jobs measured on a run's snapshots, in the form that reports show. Pure.


@dataclass(frozen=True)
class SideJobRows:
    """One watch: its metrics by step, oldest first. Their names lack the watch's name."""

    name: str
    rows: tuple[tuple[int, dict[str, float]], ...]
    seconds: float  # median time per snapshot

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics, losses first."""
        found = {name for _, metrics in self.rows for name in metrics}
        return sorted(found, key=lambda name: ("loss" not in name, name))

    def lowest(self, name: str) -> int:
        """Return the step with the lowest value of a loss; 0: not a loss, or never finite."""
        found = [
            (metrics[name], step)
            for step, metrics in self.rows
            if math.isfinite(metrics.get(name, math.nan))
        ]
        return min(found)[1] if "loss" in name and found else 0


def side_jobs(
    facts: Iterable[Stamped], committed: Iterable[SnapshotCommitted]
) -> list[SideJobRows]:
    """Return the metrics by watch, each snapshot once, only for the lineage of the newest one."""
    refs = {Ref(one.epoch, one.step) for one in committed}
    line = set(lineage(refs))
    found: dict[str, dict[Ref, Validated]] = {}
    for fact in _of_watches(s.fact for s in facts):
        ref = Ref(fact.epoch, fact.step)
        if ref in line or ref not in refs:  # the fact of its commit was lost with its writer
            found.setdefault(fact.by, {}).setdefault(ref, fact)
    return [_rows(name, list(told.values())) for name, told in sorted(found.items())]


def _of_watches(facts: Iterable[Fact]) -> Iterable[Validated]:
    return (fact for fact in facts if isinstance(fact, Validated) and fact.by)


def _rows(name: str, told: list[Validated]) -> SideJobRows:
    seconds = sorted(fact.seconds for fact in told)
    rows = [
        (fact.step, {key.removeprefix(f"{name}/"): value for key, value in fact.metrics.items()})
        for fact in sorted(told, key=lambda fact: (fact.step, fact.epoch))
    ]
    return SideJobRows(name, tuple(rows), seconds[len(seconds) // 2])
