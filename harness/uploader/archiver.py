"""The process that keeps a long run's bucket small: it archives facts and records, and deletes the
objects of members that are gone.

It runs beside the first member of a generation (the code's `epoch`; `agent/host.py`):

    python -m harness.uploader.archiver URL [--once]

It may be killed at any point, and two may run at once. The next one finishes what it left undone;
nothing that it deletes is needed (`archive.py`, `sweep`). `--once`: archive everything and exit,
for runs that nobody keeps any more.

It starts while a world forms, possibly a recovery on a small machine. So it sleeps first, imports
what it needs only afterwards, and always runs at a low priority.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from harness.core.masking import keep_secrets
from harness.node.heartbeat import die_with_parent

if TYPE_CHECKING:
    from storage.stores.objects import ObjectStore

NICE = 10
REST_S = 120.0  # between two looks at the facts, which cost a listing each
SELDOM = 5  # looks at the facts for each look at records and members
# The object of a member that was silent for so long is deleted. If the member comes back, its next
# heartbeat creates the object again.
DEAD_S = 900.0


class LogArchiver:
    """The keeper of one run's bucket. `now`: its own clock, in seconds."""

    def __init__(self, store: ObjectStore, now: Callable[[], float]):
        from harness.bucket.archive import Compactor, RecordCompactor
        from harness.bucket.member_heartbeats import HeartbeatReader

        self._store = store
        self._facts, self._records = Compactor(store), RecordCompactor(store)
        self._beats = HeartbeatReader(store, now)
        self._looks = 0

    def tend(self) -> None:
        """Archive and sweep what is due. Raises StoreError, DamagedArchive."""
        self._facts.compact()
        if self._looks % SELDOM == 0:
            self._records.compact()
            self.sweep()
        self._looks += 1

    def sweep(self) -> int:
        """Delete the objects of members that left or died; return their number. Facts hold what
        they last reported, and living members never need a dead one's object."""
        from harness.bucket.layout import MEMBERS

        gone = [b for b in self._beats.look() if b.gone or b.silent(DEAD_S)]
        for beat in gone:
            self._store.delete(f"{MEMBERS}{beat.member}.json")
        return len(gone)

    def archive_all(self) -> None:
        self._facts.compact(all_of_them=True)
        self._records.compact(all_of_them=True)


def main(words: list[str]) -> int:
    die_with_parent()
    keep_secrets(os.environ)
    once = "--once" in words[1:]
    if not once:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, NICE)
        time.sleep(REST_S)
    from harness.bucket.volumes import DamagedArchive
    from storage.errors import StoreError
    from storage.stores.store_urls import open_store

    store = open_store(words[0])
    if once:
        LogArchiver(store, time.monotonic).archive_all()
        return 0
    keeper = None
    while True:
        keeper = keeper or LogArchiver(store, time.monotonic)
        try:
            keeper.tend()
        except (StoreError, DamagedArchive) as e:
            # The bucket does not answer, or needs a person's attention. Nothing depends on us.
            print(f"harness: the bucket of {store.url} was not tidied: {e}", flush=True)
            keeper = None
        time.sleep(REST_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
