"""A lease that ensures one controller at a time, with create-only writes alone, and the limits that
nodes keep when no controller lives. Used by every process that runs `recovery.recover`.

`lease/{term}.json` is created once and never changed: its creator holds that term. The holder
rewrites `lease/{term}.beat`, its heartbeat; a challenger watches that by *its own* clock, so clocks
are never compared, and takes term n+1 when the heartbeat has been unchanged for the holder's
`ttl_s`, or records that the lease was released. The holder looks for term n+1 before every act.
Between that look and the act lies a window that no bucket can close; acts are therefore idempotent
(an attempt number is launched once) and a successor cleans up what it did not expect.

Pure: knows an ObjectStore and a Clock; knows nothing of clouds or processes.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from dataclasses import dataclass, field

from harness.bucket.layout import LEASES, LIMITS_KEY, RELEASED, Term, newest_term, term_key
from harness.bucket.orders import stop_order
from harness.core import decoding
from harness.core.decoding import Amount, Natural, decoded, stamped
from harness.core.world import Clock, Fenced
from storage.canonical_json import BadObject
from storage.errors import NotFound, StoreError
from storage.stores.objects import ObjectStore

# long enough for a slow bucket; short enough that a restarted controller hardly has to wait
TTL_S = 5.0


def sign_of_life(store: ObjectStore, term: int = 0) -> tuple[int, bytes]:
    """Return (newest term, its heartbeat) for observers; (0, b"") if there was never a controller.
    `term`: the last result, which reduces this to two small reads without a list (0: unknown).
    Raises StoreUnavailable."""
    if not term:
        term = newest_term(store.list(LEASES))
        if not term:
            return 0, b""
    while True:
        try:
            store.get(term_key(term + 1))
        except NotFound:
            break
        term += 1
    try:
        return term, store.get(term_key(term, "beat"))
    except NotFound:
        return term, b""


@dataclass
class Lease:
    """The lease of a run's controller. Call `acquire`, then `renew` every round and `check` before
    every act; both raise Fenced when a newer term exists.

    `holder` must be unique to this controller ("host:pid:random"). With `standby`, a challenger
    waits for as long as the holder lives; without, it raises Fenced as soon as it has seen a
    heartbeat of the holder.
    """

    store: ObjectStore
    clock: Clock
    holder: str
    ttl_s: float = TTL_S
    standby: bool = False
    term: int = 0  # 0: not held
    _beats: int = 0
    _beat_s: float = 0.0

    def acquire(self) -> int:
        """Wait until the newest term is surely over, then take the next one. Return the term.
        Raises Fenced, also if a newer version of this code has controlled the run."""
        while True:
            term = self._newest()
            # our own term, after an interruption, needs no wait
            if term and term != self.term and not self._is_over(term):
                # its heartbeat moved and we are on standby
                continue
            # we carry out a stop order of an earlier controller if it exists by now
            standing = stop_order(self.store)
            heeds = standing.term if standing else 0
            taken = Term(self.holder, self.ttl_s, heeds=heeds)
            if self.store.create(term_key(term + 1), taken.encode()):
                self.term = term + 1
                self._beat(b"1")
                return self.term

    def renew(self) -> None:
        """Write a heartbeat if a third of `ttl_s` has passed since the last one. Raises Fenced."""
        self.check()
        if self.clock.now() - self._beat_s >= self.ttl_s / 3:
            self._beats += 1
            self._beat(str(self._beats + 1).encode())

    def check(self) -> None:
        """Raise Fenced if we do not hold the newest term."""
        if not self.term:
            raise Fenced("this controller does not hold the lease of the run")
        try:
            # terms have no gaps: a creator of a term has seen the one before
            body = self.store.get(term_key(self.term + 1))
        except NotFound:
            return
        raise Fenced(
            f"{Term.decode(body).holder} has taken over this run (term {self.term + 1}, ours was "
            f"{self.term})"
        )

    def release(self) -> None:
        """Release the lease, so that a successor need not wait."""
        self.store.put(term_key(self.term, "beat"), RELEASED)
        self.term = 0

    def _beat(self, body: bytes) -> None:
        self.store.put(term_key(self.term, "beat"), body)
        self._beat_s = self.clock.now()

    def _newest(self) -> int:
        return newest_term(self.store.list(LEASES))

    def _read_beat(self, term: int) -> bytes:
        try:
            return self.store.get(term_key(term, "beat"))
        except NotFound:
            return b""  # the holder died, or is about to write its first heartbeat

    def _is_over(self, term: int) -> bool:
        """Watch one term. Return True when its `ttl_s` has passed without a heartbeat or it was
        released, False when it is alive and we are on standby; otherwise raise Fenced."""
        taken = Term.decode(self.store.get(term_key(term)))
        if taken.newer:  # its facts would be misunderstood, and nodes lost track of
            raise Fenced(
                f"{self.store.url} was led by a newer version of this code (term {term} is "
                f"protocol {taken.newer}, this code speaks {decoding.PROTOCOL}); update the "
                "package here and launch again. The nodes of the run go on"
            )
        first, since_s = self._read_beat(term), self.clock.now()
        while (beat := self._read_beat(term)) == first and beat != RELEASED:
            if self.clock.now() - since_s >= taken.ttl_s:
                return True
            self.clock.sleep(taken.ttl_s / 5)
        if beat != RELEASED and not self.standby:
            raise Fenced(
                f"{taken.holder} is already leading this run (term {term}); stop it first, or wait "
                "on standby"
            )
        return beat == RELEASED


# The remaining allowance of a run, which its nodes enforce when no controller leads it.


@dataclass(frozen=True)
class AttemptPrice:
    """The price of an open attempt. `yet_s`: for how long it is billed if it has to leave now."""

    attempt: Natural
    usd_per_h: Amount
    yet_s: Amount


@dataclass(frozen=True)
class RunLimits:
    """The limits of a run's cost and duration as of their writing. Nodes enforce them when no
    controller leads the run. A controller rewrites them at least every `every_s`, and before each
    launch. None: no limit of that kind."""

    term: Natural  # of the controller that wrote them
    version: Natural  # increases with each write of one term
    every_s: Amount
    launch_s: Amount  # the longest that a launch is expected to take
    budget_usd: Amount | None = None
    spent_usd: Amount = 0.0
    left_s: Amount | None = None  # until the limit of hours
    leaderless_s: Amount | None = None  # nodes drain after this long without a controller
    attempts: tuple[AttemptPrice, ...] = ()

    @classmethod
    def decode(cls, data: bytes) -> RunLimits:
        """Decode the object at LIMITS_KEY. Raises BadObject, NewerProtocol."""
        return decoded(cls, data)

    def encode(self) -> bytes:
        return json.dumps(stamped(dataclasses.asdict(self))).encode()


def run_limits(store: ObjectStore) -> RunLimits | None:
    """Return the limits that nodes enforce without a controller, or None if there are none or they
    cannot be read. Raises StoreError."""
    try:
        return RunLimits.decode(store.get(LIMITS_KEY))
    except (NotFound, BadObject):
        return None


# The lease of a controller whose loop may be busy: a thread of its own renews it.

# a loop without a completed round for so long counts as hung: longer than clouds and buckets may
# take in one round
BUSY_S = 900.0


@dataclass
class KeptLease(Lease):
    """A `Lease` that a thread renews several times in each `ttl_s`, whatever its holder does
    meanwhile. Call `close` at the end if it was not released."""

    busy_limit_s: float = BUSY_S
    _guard: threading.RLock = field(default_factory=threading.RLock, repr=False)
    _over: threading.Event = field(default_factory=threading.Event, repr=False)
    _keeper: threading.Thread | None = field(default=None, repr=False)
    _round_s: float = 0.0  # when the loop began its last round

    def acquire(self) -> int:
        self.close()
        term = super().acquire()
        self._round_s, self._over = self.clock.now(), threading.Event()
        self._keeper = threading.Thread(
            target=self._keep, args=(self._over,), name="lease", daemon=True
        )
        self._keeper.start()
        return term

    def renew(self) -> None:
        self._round_s = self.clock.now()
        with self._guard:
            super().renew()

    def release(self) -> None:
        self.close()
        super().release()

    def close(self) -> None:
        """Stop renewing the lease; it expires when its `ttl_s` is over."""
        self._over.set()
        if self._keeper is not None:
            with self._guard:  # a renewal under way ends before what follows
                self._keeper = None

    def _keep(self, over: threading.Event) -> None:
        while not over.wait(self.ttl_s / 6):
            if self.clock.now() - self._round_s > self.busy_limit_s:
                continue
            try:
                with self._guard:
                    if not over.is_set():
                        super().renew()
            except Fenced:
                return  # the loop checks the lease before its next act
            except StoreError:
                continue  # retried soon; the lease may be lost meanwhile


# ---- the controller's heartbeat ------------------------------------------------------------------
@dataclass
class LeaseWatch:
    """A watch on the lease's heartbeat by our own clock. It determines whether a controller lives:
    True, False, or `None` (not known yet)."""

    store: ObjectStore
    _term: int = 0  # the newest term that was found
    _seen: tuple[int, bytes] = (0, b"")
    _since_s: float = 0.0
    _moved: bool = False

    def look(self, now: float) -> bool | None:
        sign = sign_of_life(self.store, self._term)
        self._term, beat = sign
        if not self._term or beat == RELEASED:
            return False
        if sign != self._seen:
            self._moved = bool(self._seen[0])  # the first heartbeat that we read may be old
            self._seen, self._since_s = sign, now
        if now - self._since_s < TTL_S * 1.5:
            return True if self._moved else None
        return False
