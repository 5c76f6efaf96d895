"""One controller at a time, by nothing but create-only writes. Used by whoever runs
`recovery.recover`.

`lease/{term}.json` is created once and never changed: who created it holds that term. The holder
rewrites `lease/{term}.beat`; a challenger watches that by *its own* clock, so no two clocks are
ever compared, and takes term n+1 when the beat has stood still for the holder's `ttl_s`, or says
that the lease was released. The holder looks for term n+1 before every act. Between that look and
the act lies a window that no bucket can close; acts are therefore idempotent (an attempt number is
launched once) and a successor cleans up what it did not expect.

Pure: knows an ObjectStore and a Clock; knows nothing of clouds or processes.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.bucket.layout import LEASES, Term, newest_term, term_key
from harness.bucket.layout import RELEASED as RELEASED
from harness.bucket.orders import stop_order
from harness.core import values
from harness.core.world import Clock, Fenced
from storage.errors import NotFound
from storage.objects import ObjectStore

# long enough for a slow bucket; short enough that a restarted controller is not waited for
TTL_S = 5.0


def sign_of_life(store: ObjectStore, term: int = 0) -> tuple[int, bytes]:
    """(newest term, its beat), for those who only watch; (0, b""): nobody ever led. `term`: what
    was found last time, which makes it two small reads without a list. Raises StoreUnavailable."""
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
    """`acquire`, then `renew` every round and `check` before every act; both raise Fenced when a
    newer term exists.

    `holder` must be unique to this controller ("host:pid:random"). With `standby`, a challenger
    waits for as long as the holder lives; without, it raises Fenced as soon as it has seen the
    holder's heart beat.
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
        """Wait until the newest term is surely over, then take the next one. Returns the term.
        Raises Fenced, also if a newer version of this code has led the run."""
        while True:
            term = self._newest()
            # our own, after an interruption, need not be waited for
            if term and term != self.term and not self._is_over(term):
                # its beat moved and we are on standby, or somebody took the next term meanwhile
                continue
            # what an earlier controller ordered is ours to carry out, if it lies there by now
            standing = stop_order(self.store)
            heeds = standing.term if standing else 0
            taken = Term(self.holder, self.ttl_s, heeds=heeds)
            if self.store.create(term_key(term + 1), taken.encode()):
                self.term = term + 1
                self._beat(b"1")
                return self.term

    def renew(self) -> None:
        """Show that we live, if a third of the ttl has passed since we last did."""
        self.check()
        if self.clock.now() - self._beat_s >= self.ttl_s / 3:
            self._beats += 1
            self._beat(str(self._beats + 1).encode())

    def check(self) -> None:
        """Raises Fenced if we do not hold the newest term."""
        if not self.term:
            raise Fenced("this controller does not hold the lease of the run")
        try:
            # terms have no gaps: each is created by who saw the one before
            body = self.store.get(term_key(self.term + 1))
        except NotFound:
            return
        raise Fenced(
            f"{Term.decode(body).holder} has taken over this run (term {self.term + 1}, ours was "
            f"{self.term})"
        )

    def release(self) -> None:
        """A clean end: a successor need not wait."""
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
            return b""  # it died, or is about to write its first one

    def _is_over(self, term: int) -> bool:
        """Watch one term until its ttl has passed without a beat (True) or until it shows life
        (False, or Fenced)."""
        taken = Term.decode(self.store.get(term_key(term)))
        if taken.newer:  # its facts would be misunderstood, and nodes be lost sight of
            raise Fenced(
                f"{self.store.url} was led by a newer version of this code (term {term} is of "
                f"protocol {taken.newer}, this code speaks {values.PROTOCOL}); update the package "
                "here and launch again. The nodes of the run go on"
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
