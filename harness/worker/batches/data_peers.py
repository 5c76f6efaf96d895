"""Reading of data through the caches of the other nodes of a world. Runs in the worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from harness.uploader.node_tiers import data_peers
from harness.uploader.senders import SnapshotSender
from storage.stores.objects import ObjectStore
from storage.tiers.tiers import Tier


@runtime_checkable
class ReadsNearby(Protocol):
    """A dataset that keeps what it reads in caches of its node, like those of `harness.data`."""

    @property
    def caches(self) -> Mapping[str, int]:
        """The folders of its caches, each with its limit in bytes."""

    def ask_peers(self, peers: Tier | None, nodes: int, once: bool) -> None:
        """Read through the caches of other nodes from now on; `peers` None: no longer. `nodes`,
        `once`: see `harness.data.chunk_reader.Chunks.ask_peers`. Any thread may call it."""


class DataPeers:
    """The other nodes' caches, as datasets of this process use them. `courier`: to this node's
    uploader, which is met on the first call; `nodes`: in this world."""

    def __init__(self, courier: Callable[[], SnapshotSender], store: ObjectStore, nodes: int):
        self._courier, self._store, self._nodes = courier, store, nodes

    def meet(self, dataset: object, once: bool) -> None:
        """Connect a dataset to the other nodes' caches in a thread; return at once. `once`: each
        item is read by one node only in a pass over the data."""
        if not isinstance(dataset, ReadsNearby):
            return
        dataset.ask_peers(None, 1, once)  # drops the peers of the previous world
        if self._nodes > 1 and dataset.caches:
            threading.Thread(
                target=self._meet, args=(dataset, once), name="data-peers", daemon=True
            ).start()

    def _meet(self, dataset: ReadsNearby, once: bool) -> None:
        courier, told = self._courier(), dict[str, object]()
        for folder, nbytes in dataset.caches.items():
            told = courier.open_data(folder, nbytes)
        if (peers := data_peers(told, self._store)) is not None:
            dataset.ask_peers(peers, self._nodes, once)
