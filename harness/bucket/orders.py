"""What people, controllers and agents ask of a run in its bucket: the keys, and the one reader and
writer of a stop order.

Pure: knows a store's interface, and nothing of who acts on an order. Whoever leaves an object at
the key of an order means it, whatever is in there: an empty one, one without a reason and one that
is no JSON are orders as well. (`control/doubt-*` and `control/leave-*`, by attempt, are in
`world.py`.)
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from storage.errors import NotFound
from storage.objects import ObjectStore

CONTROL = "control/"
STOP_KEY = "control/stop.json"  # the whole run drains, and nobody comes back by itself
SNAPSHOT = "control/snapshot-"  # + anything: all ranks snapshot and go on
UNSAID = "stop requested"
LONGEST = 4000  # letters of a reason


@dataclass(frozen=True)
class StopOrder:
    """Why the run shall stop, and who says so. `failed`: it cannot go on as it is; else it may
    be launched again."""

    reason: str
    by: str = ""
    failed: bool = False
    log_tail: tuple[str, ...] = ()  # of the worker that failed

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> StopOrder:
        """Never fails: see the module's docstring."""
        if not data.strip():
            return cls(UNSAID)
        try:
            body = json.loads(data)
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            return cls(f"{UNSAID} ({STOP_KEY} is unreadable)")
        reason, by, tail = body.get("reason"), body.get("by"), body.get("log_tail")
        return cls(
            reason=reason[:LONGEST] if isinstance(reason, str) and reason.strip() else UNSAID,
            by=by if isinstance(by, str) else "",
            failed=body.get("failed") is True,
            log_tail=tuple(line for line in tail if isinstance(line, str))
            if isinstance(tail, list)
            else (),
        )


def stop_order(store: ObjectStore) -> StopOrder | None:
    """The run's, if somebody asked it to stop. Raises StoreError."""
    try:
        return StopOrder.from_json(store.get(STOP_KEY))
    except NotFound:
        return None


def ask_to_stop(store: ObjectStore, order: StopOrder) -> bool:
    """False: it was asked before, and that order stands. Raises StoreError."""
    return store.create(STOP_KEY, order.to_json())
