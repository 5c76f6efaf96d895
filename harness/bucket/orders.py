"""Orders that people, controllers and node agents give to a run in its bucket: reading and writing
them, and deciding which are valid.

An order of a controller carries the term of its lease (a fencing token). It is valid until a newer
term is taken. A controller that was paused between its look at the lease and its write is too late,
and its order is ignored. A stop order that existed when the next term was taken stays valid: that
term records it (`Term.heeds`), and its holder carries the order out. Orders of people and node
agents have no term, and are valid until withdrawn.

Pure: it knows a store's interface, but not which process acts on an order. Keys and contents of
orders are in `layout.py`.
"""

from __future__ import annotations

from harness.bucket.layout import (
    LEAVE,
    STOP_KEY,
    StopOrder,
    Term,
    order_by,
    order_key,
    ordered_in,
    term_key,
)
from storage.errors import NotFound
from storage.stores.objects import ObjectStore


def stop_order(store: ObjectStore) -> StopOrder | None:
    """Return the run's stop order, or None if there is no valid one. Raises StoreError."""
    try:
        order = StopOrder.from_json(store.get(STOP_KEY))
    except NotFound:
        return None
    return order if _stands(store, order.term, handed_on=True) else None


def ask_to_stop(store: ObjectStore, order: StopOrder) -> bool:
    """Give a stop order. Return False if an earlier one is still valid. Raises StoreError."""
    if store.create(STOP_KEY, order.to_json()):
        return True
    if stop_order(store) is not None:
        return False
    store.put(STOP_KEY, order.to_json())  # replaces an invalid order
    return True


def asked_to_leave(store: ObjectStore, attempt: int) -> bool:
    """Return whether the node of this attempt has to snapshot and leave. Raises StoreError."""
    try:
        term = ordered_in(store.get(order_key(LEAVE, attempt)))
    except NotFound:
        return False
    return _stands(store, term)


def ask_to_leave(store: ObjectStore, attempt: int, reason: str, term: int) -> bool:
    """Order a node to leave, in the name of the controller of this term. Return False if an earlier
    order is still valid. Raises StoreError."""
    key, body = order_key(LEAVE, attempt), order_by("controller", reason, term)
    if store.create(key, body):
        return True
    if asked_to_leave(store, attempt):
        return False
    store.put(key, body)
    return True


def _stands(store: ObjectStore, term: int, handed_on: bool = False) -> bool:
    """Return whether an order of this term is valid. `handed_on`: later terms may have taken it
    over."""
    newest = term
    while newest:
        try:
            after = Term.decode(store.get(term_key(newest + 1)))
        except NotFound:
            return True  # no later controller
        if not handed_on or after.heeds != term:
            return False
        newest += 1
    return True
