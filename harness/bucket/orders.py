"""What people, controllers and agents ask of a run in its bucket: reading and writing a stop order.

Pure: knows a store's interface, and nothing of who acts on an order. Keys, and what orders consist
of, are in `layout.py`.
"""

from __future__ import annotations

from harness.bucket.layout import SNAPSHOT as SNAPSHOT
from harness.bucket.layout import STOP_KEY as STOP_KEY
from harness.bucket.layout import StopOrder as StopOrder
from storage.errors import NotFound
from storage.objects import ObjectStore


def stop_order(store: ObjectStore) -> StopOrder | None:
    """The run's, if somebody asked it to stop. Raises StoreError."""
    try:
        return StopOrder.from_json(store.get(STOP_KEY))
    except NotFound:
        return None


def ask_to_stop(store: ObjectStore, order: StopOrder) -> bool:
    """False: it was asked before, and that order stands. Raises StoreError."""
    return store.create(STOP_KEY, order.to_json())
