"""What a watcher holds: snapshots that wait for it, and the claim of the one that it does.

A hold is a reader's lease (`storage/leases.py`): a prune passes the snapshot over, and a watcher
that dies holds nothing for longer than that lease.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

from harness.bucket.side_jobs import SideJobs
from storage.errors import StoreError
from storage.leases import reading
from storage.manifest import Ref
from storage.snapshots import Snapshots


class HeldSnapshots:
    """Snapshots that are not pruned while this process lives."""

    def __init__(self, snapshots: Snapshots):
        self._snapshots = snapshots
        self._held: dict[Ref, contextlib.ExitStack] = {}

    def keep(self, wanted: Sequence[Ref]) -> list[Ref]:
        """Hold these, and no others. Returns those that are pruned already. Raises StoreError."""
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
    """Else the store could not be told that we read it, and will be told again."""
    committed, doomed = snapshots.manifests()
    return ref not in committed or ref in doomed


@contextlib.contextmanager
def beating(jobs: SideJobs, ref: Ref, number: int, every_s: float) -> Iterator[threading.Event]:
    """Our claim beats while the body runs. The event is set when it is lost: another watcher took
    it over, since it could not beat in time, or settled it."""
    done, lost = threading.Event(), threading.Event()

    def beat() -> None:
        n = 0
        while not done.wait(every_s) and not lost.is_set():
            n += 1
            with contextlib.suppress(StoreError):  # the next one may get through
                jobs.beat(ref, number, n)
                if not jobs.is_ours(ref, number):
                    lost.set()

    thread = threading.Thread(target=beat, name="claim", daemon=True)
    thread.start()
    try:
        yield lost
    finally:
        done.set()
        thread.join()  # or its last word would come after ours
