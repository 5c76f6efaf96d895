"""Side jobs of a run in its bucket: which watcher does which snapshot, and what came of it.

A watch is a name; any number of watchers may share it, and do each snapshot once. Create-only:

    watch/{name}/claims/{ref}-{number:04d}.json    a watcher does this snapshot
    watch/{name}/claims/{ref}-{number:04d}.beat    rewritten by its holder only
    watch/{name}/done/{ref}.json                   it was done, or given up

A claim is over when its beat has stood still for `lease_s` by the observer's own clock, or says
that it was given back; then number n + 1 can be created, once. Who has settled a snapshot deletes
its claims; who claims one looks afterwards whether it was settled meanwhile.

Pure: knows an ObjectStore and is given a clock.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from harness.bucket.layout import SMALL_NBYTES, WATCH
from harness.core.masking import masked_deep
from harness.core.values import Amount, BadObject, Natural, Reading, canonical, decoded
from storage.errors import NotFound
from storage.leases import Watch
from storage.manifest import Ref
from storage.objects import ObjectStore, get_each

LEASE_S = 60.0  # a watcher whose claim stands still for so long is taken for dead
MOST_LEASE_S = 3600.0  # nobody is believed to need longer between two beats
GIVEN_BACK = b"given back"  # a beat: the next one need not wait
NO_BEAT = b"-"  # it was claimed a moment ago
NAME = re.compile(r"[A-Za-z0-9_.\-]{1,40}")  # of a watch

_CLAIM = re.compile(r"-(\d{4,9})\.json")
_DONE = re.compile(r"watch/[^/]+/done/([^/]+)\.json")


@dataclass(frozen=True)
class SideClaim:
    """Who does a snapshot. `lease_s`: its beat moves at least so often, or it is dead."""

    by: str = ""
    lease_s: Amount = LEASE_S

    @classmethod
    def of(cls, data: bytes) -> SideClaim:
        """Never fails: whoever holds a claim holds it, whatever is in there."""
        try:
            found = decoded(cls, data, most_nbytes=SMALL_NBYTES)
        except BadObject:
            return cls()
        return found if 0 < found.lease_s <= MOST_LEASE_S else cls(found.by)

    def encode(self) -> bytes:
        return canonical(masked_deep(dataclasses.asdict(self)))


@dataclass(frozen=True)
class SideOutcome:
    """What came of a snapshot's side job. `metrics`: as they are told; `why`: of a failure."""

    state: str  # "done" | "failed"
    metrics: dict[str, Reading] = field(default_factory=dict)
    tries: Natural = 1
    seconds: Amount = 0.0
    by: str = ""
    why: str = ""

    @classmethod
    def of(cls, data: bytes) -> SideOutcome:
        """Never fails: what is settled stays so."""
        try:
            return decoded(cls, data)
        except BadObject as e:
            return cls("failed", why=f"its outcome is unreadable: {e}")

    def encode(self) -> bytes:
        return canonical(masked_deep(dataclasses.asdict(self)))


class SideJobs:
    """One watch, as one watcher of it sees it. `holder`: unique to that watcher. `now`: its own
    clock, in seconds."""

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
        """Snapshots that were done or given up. Raises StoreError."""
        return set(self._done())

    def outcomes(self) -> dict[Ref, SideOutcome]:
        """Of all that are settled. Raises StoreError."""
        keys = {key: ref for ref, key in self._done().items()}
        found = get_each(self._store, keys)
        return {keys[key]: SideOutcome.of(data) for key, data in found if data is not None}

    def outcome(self, ref: Ref) -> SideOutcome | None:
        """None: it is not settled. Raises StoreError."""
        try:
            return SideOutcome.of(self._store.get(self._done_key(ref)))
        except NotFound:
            return None

    def forget_failed(self) -> int:
        """Let what failed be done again. How many those are. Raises StoreError."""
        failed = [ref for ref, outcome in self.outcomes().items() if outcome.state != "done"]
        for ref in failed:
            self._clear(ref)  # first: or its dead watchers would count again
            self._store.delete(self._done_key(ref))
        return len(failed)

    # ---- claims ----------------------------------------------------------------------------------
    def claim(self, ref: Ref) -> int:
        """The number of our claim, which has to beat from now on; 0: somebody else does it, or it
        is settled. Raises StoreError."""
        before = self._numbers(ref)
        newest = max(before, default=0)
        if newest and not self._is_over(ref, newest):
            return 0
        body = SideClaim(self._holder, self._lease_s)
        if not self._store.create(self._claim_key(ref, newest + 1), body.encode()):
            return 0
        self.beat(ref, newest + 1, 0)
        if self.outcome(ref) is not None:  # settled since we looked, and its claims deleted
            self._clear(ref)
            return 0
        return newest + 1

    def beat(self, ref: Ref, number: int, n: int) -> None:
        """Show that we live; `n` grows. Raises StoreError."""
        self._store.put(self._beat_key(ref, number), canonical({"by": self._holder, "beat": n}))

    def is_ours(self, ref: Ref, number: int) -> bool:
        """Has nobody taken it over, or settled it? Raises StoreError."""
        try:
            self._store.get(self._claim_key(ref, number + 1))
            return False
        except NotFound:
            return self.outcome(ref) is None

    def give_back(self, ref: Ref, number: int) -> None:
        """The next one need not wait. Raises StoreError."""
        self._store.put(self._beat_key(ref, number), GIVEN_BACK)

    def deaths(self, ref: Ref, number: int) -> int:
        """How many watchers died while they held it before claim `number`. Raises StoreError."""
        keys = [self._beat_key(ref, n) for n in self._numbers(ref) if n < number]
        return sum(data != GIVEN_BACK for _, data in get_each(self._store, keys))

    def settle(self, ref: Ref, outcome: SideOutcome) -> bool:
        """Say what came of it, for good. False: somebody else has. Raises StoreError."""
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
                except ValueError:  # somebody else's
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
