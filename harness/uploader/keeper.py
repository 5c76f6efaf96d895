"""Keeps a long run's bucket small: archives facts and records, takes away members that are gone.

A process beside the first member of an epoch (`agent/helpers.py`):

    python -m harness.uploader.keeper URL [--once]

It may be killed at any point, and two may be at work at once. What it does not get done, the next
one does; nothing that it deletes is missed (`archive.py`, `sweep`). `--once`: archive everything
there is, and end; for runs that nobody keeps any more, and for those of older versions.

It starts while a world forms, which may be a recovery on a small machine, and then rests. So what
it needs is imported after the first rest, and it gives way to the training all along.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from harness.core.last_words import keep_secrets
from harness.node.processes import die_with_parent

if TYPE_CHECKING:
    from storage.objects import ObjectStore

NICE = 10
REST_S = 120.0  # between two looks at the facts, which cost a listing each
SELDOM = 5  # so many looks at the facts for one at records and members
# A member that was silent for so long is taken away. Should it come back, its next beat makes its
# object anew.
DEAD_S = 900.0


class Keeper:
    """One run's. `now`: its own clock, in seconds."""

    def __init__(self, store: ObjectStore, now: Callable[[], float]):
        from harness.bucket.archive import Compactor
        from harness.bucket.beats import Beats
        from harness.bucket.recorded import RecordCompactor

        self._store = store
        self._facts, self._records = Compactor(store), RecordCompactor(store)
        self._beats = Beats(store, now)
        self._looks = 0

    def tend(self) -> None:
        """One look, and what follows from it. Raises StoreError, DamagedArchive."""
        self._facts.compact()
        if self._looks % SELDOM == 0:
            self._records.compact()
            self.sweep()
        self._looks += 1

    def sweep(self) -> int:
        """Take away members that said goodbye or are dead: how many. What they said last, facts
        have told; living members never need a dead one's object."""
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
    from storage.opening import open_store

    store = open_store(words[0])
    if once:
        Keeper(store, time.monotonic).archive_all()
        return 0
    keeper = None
    while True:
        keeper = keeper or Keeper(store, time.monotonic)
        try:
            keeper.tend()
        except (StoreError, DamagedArchive) as e:
            # the bucket is silent, or somebody must look at it: nothing else depends on us
            print(f"harness: the bucket of {store.url} was not tidied: {e}", flush=True)
            keeper = None
        time.sleep(REST_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
