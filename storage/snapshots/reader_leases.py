"""Leases on snapshots for long reads, and detection of dead readers. No torch.

    with reading(snapshots, manifest.ref):         # nobody prunes it meanwhile
        load(snapshots, manifest, tensors)
    snapshots.prune(keep, expired=watch)    # watch = Watch(), of a process that prunes repeatedly

A lease is a small object that its reader rewrites with a growing number. The lease of a dead reader
stops changing, and a process that has seen no change for LEASE_S seconds by its own clock may
remove it. The clocks of two machines are never compared. A process that prunes only once cannot
wait so long and respects every lease.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator

from storage.errors import StoreError
from storage.snapshots.manifest import Ref
from storage.snapshots.snapshots import Snapshots

LEASE_S = 120.0  # seconds without a change after which a lease's reader counts as dead
BEAT_S = LEASE_S / 4


class Watch:
    """Detects expired leases over repeated calls; passed to `Snapshots.prune` as `expired`."""

    def __init__(self, lease_s: float = LEASE_S, now: Callable[[], float] = time.monotonic):
        self._lease_s, self._now = lease_s, now
        self._seen: dict[str, tuple[bytes, float]] = {}

    def __call__(self, key: str, beat: bytes) -> bool:
        last, since_s = self._seen.get(key, (b"", 0.0))
        if last != beat:
            self._seen[key] = beat, self._now()
            return False
        return self._now() - since_s >= self._lease_s


@contextlib.contextmanager
def reading(snapshots: Snapshots, ref: Ref, beat_s: float = BEAT_S) -> Iterator[bool]:
    """Hold a lease on `ref` while the body runs, so that nobody prunes it.

    Yields True if the lease is held; False if the snapshot is already doomed or the lease could not
    be written. `beat_s`: seconds between two heartbeats.
    """
    token, done = f"{secrets.token_hex(6)}", threading.Event()
    try:
        ours = snapshots.begin_reading(ref, token)
    except StoreError:  # reading works without write permission
        ours = False

    def beat() -> None:
        n = 0
        while not done.wait(beat_s):
            n += 1
            with contextlib.suppress(StoreError):  # the next heartbeat may get through
                snapshots.still_reading(ref, token, n)

    thread = threading.Thread(target=beat, name="lease", daemon=True)
    if ours:
        thread.start()
    try:
        yield ours
    finally:
        done.set()
        if ours:
            thread.join()  # otherwise its last heartbeat could follow our removal of the lease
            with contextlib.suppress(StoreError):
                snapshots.end_reading(ref, token)


def held(
    snapshots: Snapshots, choose: Callable[[], Ref | None], lease: contextlib.ExitStack
) -> Ref | None:
    """Return the snapshot that `choose` gives, under a lease that lasts until `lease` is closed.
    Without write permission it is read without a lease."""
    found = None
    for _ in range(3):
        found = choose()
        if found is None or lease.enter_context(reading(snapshots, found)):
            break  # otherwise it has just been pruned, and there is a newer one
    return found


__all__ = ["BEAT_S", "LEASE_S", "Watch", "held", "reading"]
