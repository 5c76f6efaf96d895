"""What people, controllers and agents ask of a run in its bucket: reading and writing orders, and
which of them stand.

An order of a controller carries the term of its lease. It stands until a newer term is taken. A
controller that was paused between its look at the lease and its write asks too late, and nobody
obeys it. A stop order that lay there when the next term was taken goes on to stand: that term says
so (`Term.heeds`), and who took it carries the order out. What people and agents ask for has no
term, and stands until it is taken back.

Pure: knows a store's interface, and nothing of who acts on an order. Keys, and what orders consist
of, are in `layout.py`.
"""

from __future__ import annotations

from harness.bucket.layout import (
    LEAVE,
    Term,
    order_by,
    order_key,
    ordered_in,
    term_key,
)
from harness.bucket.layout import SNAPSHOT as SNAPSHOT
from harness.bucket.layout import STOP_KEY as STOP_KEY
from harness.bucket.layout import StopOrder as StopOrder
from storage.errors import NotFound
from storage.objects import ObjectStore


def stop_order(store: ObjectStore) -> StopOrder | None:
    """The run's, if somebody asked it to stop and that stands. Raises StoreError."""
    try:
        order = StopOrder.from_json(store.get(STOP_KEY))
    except NotFound:
        return None
    return order if _stands(store, order.term, handed_on=True) else None


def ask_to_stop(store: ObjectStore, order: StopOrder) -> bool:
    """False: it was asked before, and that order stands. Raises StoreError."""
    if store.create(STOP_KEY, order.to_json()):
        return True
    if stop_order(store) is not None:
        return False
    store.put(STOP_KEY, order.to_json())  # in place of a late order, which nobody obeys
    return True


def asked_to_leave(store: ObjectStore, attempt: int) -> bool:
    """Is the node of this attempt to snapshot and leave? Raises StoreError."""
    try:
        term = ordered_in(store.get(order_key(LEAVE, attempt)))
    except NotFound:
        return False
    return _stands(store, term)


def ask_to_leave(store: ObjectStore, attempt: int, reason: str, term: int) -> bool:
    """In the name of the controller of this term. False: it was asked before, and that stands.
    Raises StoreError."""
    key, body = order_key(LEAVE, attempt), order_by("controller", reason, term)
    if store.create(key, body):
        return True
    if asked_to_leave(store, attempt):
        return False
    store.put(key, body)
    return True


def _stands(store: ObjectStore, term: int, handed_on: bool = False) -> bool:
    """Does an order of this term stand? `handed_on`: later terms may have taken it over."""
    newest = term
    while newest:
        try:
            after = Term.decode(store.get(term_key(newest + 1)))
        except NotFound:
            return True  # nobody has led the run since
        if not handed_on or after.heeds != term:
            return False
        newest += 1
    return True
