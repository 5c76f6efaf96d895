"""Reading a snapshot for long, and knowing when a reader is dead. Clocks of two machines are never
compared. No torch.

    with reading(snapshots, manifest.ref):         # nobody prunes it meanwhile
        load(snapshots, manifest, tensors)
    snapshots.prune(keep, expired=watch)    # watch = Watch(), of a process that prunes repeatedly

A lease is a small object that its reader rewrites, with a number that grows. A reader that dies
lets it stand still, and who has seen it stand still for LEASE_S by its own clock may remove it. Who
prunes only once waits for nobody and respects every lease.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator

from storage.errors import StoreError
from storage.manifest import Ref
from storage.snapshots import Snapshots

LEASE_S = 120.0  # a lease that stands still for so long is a dead reader's
BEAT_S = LEASE_S / 4


class Watch:
    """Which leases stand still, as `Snapshots.prune` asks it."""

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
    """Nobody prunes it while the body runs. True if so; False if it is doomed already, or the
    store could not be told."""
    token, done = f"{secrets.token_hex(6)}", threading.Event()
    try:
        ours = snapshots.begin_reading(ref, token)
    except StoreError:  # who may not write can still read
        ours = False

    def beat() -> None:
        n = 0
        while not done.wait(beat_s):
            n += 1
            with contextlib.suppress(StoreError):  # the next one may get through
                snapshots.still_reading(ref, token, n)

    thread = threading.Thread(target=beat, name="lease", daemon=True)
    if ours:
        thread.start()
    try:
        yield ours
    finally:
        done.set()
        if ours:
            thread.join()  # or its last word would come after ours
            with contextlib.suppress(StoreError):
                snapshots.end_reading(ref, token)


def held(
    snapshots: Snapshots, choose: Callable[[], Ref | None], lease: contextlib.ExitStack
) -> Ref | None:
    """The snapshot that `choose` gives, which nobody prunes until `lease` is closed. Where we may
    not write we read without."""
    found = None
    for _ in range(3):
        found = choose()
        if found is None or lease.enter_context(reading(snapshots, found)):
            break  # else it was pruned just now, and there is a newer one
    return found


__all__ = ["BEAT_S", "LEASE_S", "Watch", "held", "reading"]
