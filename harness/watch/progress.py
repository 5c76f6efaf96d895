"""A watch as a run of its own, so that `harness launch` leads it: what it has done is committed
there, as a controller understands it.

A controller counts steps that are committed, and its run is done when the last one says so. Here a
step is a snapshot of the other run that was settled; the first few bytes of each are all there is.
"""

from __future__ import annotations

from storage.json_text import canonical
from storage.manifest import Ref
from storage.objects import ObjectStore
from storage.retention import Keep
from storage.snapshots import Snapshots


class WatchProgress:
    """The run that a controller leads. Any number of watchers may tell it. `of`: the watched
    run's URL."""

    def __init__(self, store: ObjectStore, of: str):
        self._snapshots, self._of = Snapshots(store), of

    def settled(self, count: int) -> Ref:
        """So many snapshots are done, or were given up. Raises StoreError."""
        ref = Ref(1, max(1, count))
        data = {"watched": self._of, "by": "harness watch"}
        content = {"settled": canonical({"settled": count})}
        self._snapshots.write(ref, 0, 1, content, {}, data, "watch")
        self._snapshots.commit(ref, 1)
        self._snapshots.prune(Keep(2))
        return ref

    def ended(self, count: int) -> None:
        """All is done. Raises StoreError."""
        self._snapshots.end(self.settled(count), "all snapshots are done")
