"""The lease of a controller whose loop may be busy: a thread of its own renews it.

A cloud may take minutes to answer one call, which is longer than a lease lives; without this the
controller would be overtaken by a successor in the middle of its act. The thread vouches for a loop
that works, not for one that hangs: when the loop has not come round for `busy_limit_s`, the lease
is let go, and somebody else may lead.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from harness.bucket.lease import Lease
from harness.core.world import Fenced
from storage.errors import StoreError

# a loop that has not come round for so long does not lead any more: longer than all that clouds and
# buckets may take within one round
BUSY_S = 900.0


@dataclass
class KeptLease(Lease):
    """A `Lease` that is renewed three times in its `ttl_s`, whatever its holder does meanwhile.
    Call `close` at the end if it was not released."""

    busy_limit_s: float = BUSY_S
    _guard: threading.RLock = field(default_factory=threading.RLock, repr=False)
    _over: threading.Event = field(default_factory=threading.Event, repr=False)
    _keeper: threading.Thread | None = field(default=None, repr=False)
    _round_s: float = 0.0  # when the loop came round last

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
        """Let the lease be: it ends by itself when its `ttl_s` is over."""
        self._over.set()
        if self._keeper is not None:
            with self._guard:  # a beat that is on its way lands before what comes now
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
                return  # the loop finds out by itself, before its next act
            except StoreError:
                continue  # tried again soon; the lease may be lost meanwhile
