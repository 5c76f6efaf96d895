"""Nodes of one world read data through each other's caches. Runs in the worker.

Each node's cache of data is opened to the others by its uploader, and a dataset is given what asks
them (`harness/uploader/nearby.py`). That takes a thread a moment, in which the bucket is read; a
resize does it again, since the nodes are others then.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from harness.uploader.nearby import data_peers
from harness.worker.hold import Hold
from storage.objects import ObjectStore
from storage.tiers import Tier


@runtime_checkable
class ReadsNearby(Protocol):
    """A dataset that keeps what it reads in caches of its node, as `harness.data`'s do."""

    @property
    def caches(self) -> Mapping[str, int]:
        """Folder -> its bound in bytes."""

    def ask_peers(self, peers: Tier | None, nodes: int, once: bool) -> None:
        """Read through other nodes' caches from now on, None: no longer; `nodes`, `once`: see
        `harness.data.chunks.Chunks`. Any thread may call it."""


class DataPeers:
    """`nodes`: of this world."""

    def __init__(self, hold: Hold, store: ObjectStore, nodes: int):
        self._hold, self._store, self._nodes = hold, store, nodes

    def meet(self, dataset: object, once: bool) -> None:
        """Returns at once. `once`: a pass reads each item on one node only."""
        if not isinstance(dataset, ReadsNearby):
            return
        dataset.ask_peers(None, 1, once)  # those of the world before
        if self._nodes > 1 and dataset.caches:
            threading.Thread(
                target=self._meet, args=(dataset, once), name="data-peers", daemon=True
            ).start()

    def _meet(self, dataset: ReadsNearby, once: bool) -> None:
        courier, told = self._hold.courier, dict[str, object]()
        for folder, nbytes in dataset.caches.items():
            told = courier.open_data(folder, nbytes)
        if (peers := data_peers(told, self._store)) is not None:
            dataset.ask_peers(peers, self._nodes, once)
