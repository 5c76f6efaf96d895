"""Numbers that are told of a snapshot after its commit, such as an evaluation's.

    measure(snapshots.store, ref, "eval", {"eval/loss": 2.1})
    snapshots.prune(Keep(last=3, best="eval/loss:min"))          # counts them

Pure. Each teller writes one create-only object beside the manifest, which never changes. Tell it
while the snapshot is being read (`storage/leases.py`): then no prune decides without it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping

from storage.json_text import MOST_INT, BadObject, canonical, parsed
from storage.manifest import Ref
from storage.objects import ObjectStore, get_each
from storage.snapshot_keys import MEASURED, measured_key, ref_in

MOST_NBYTES = 64 << 10


def measure(store: ObjectStore, ref: Ref, by: str, metrics: Mapping[str, float]) -> bool:
    """Tell it. `by`: letters, digits and ._-, who says so. False: that teller has told it before,
    and the first word stays. Raises ValueError, StoreError."""
    if not re.fullmatch(r"[A-Za-z0-9_.\-]{1,64}", by):
        raise ValueError(f"wanted 1 to 64 letters, digits and ._- as a name, found {by!r}")
    body = canonical({"ref": ref.name, "metrics": dict(metrics)})
    if len(body) > MOST_NBYTES:
        raise ValueError(f"wanted at most {MOST_NBYTES} bytes of numbers, found {len(body)}")
    return store.create(measured_key(ref, by), body)


def measured(store: ObjectStore, refs: Collection[Ref]) -> dict[Ref, dict[str, float]]:
    """What was told of these snapshots, by everybody. What is unreadable says nothing. Raises
    StoreError."""
    found: defaultdict[Ref, dict[str, float]] = defaultdict(dict)
    keys = [key for key in store.list(MEASURED) if ref_in(key) in refs]
    for key, data in get_each(store, keys):
        ref = ref_in(key)
        if data is not None and ref is not None:  # None: it was pruned meanwhile
            found[ref] |= metrics_of(data)
    return dict(found)


def forget(store: ObjectStore, refs: Collection[Ref]) -> None:
    """These snapshots are deleted. Raises StoreError."""
    for key in store.list(MEASURED):
        if ref_in(key) in refs:
            store.delete(key)


def metrics_of(data: bytes) -> dict[str, float]:
    """As one teller told them. Never fails: what is no number says nothing."""
    try:
        body = parsed(data, most_nbytes=MOST_NBYTES)
    except BadObject:
        return {}
    metrics = body.get("metrics") if isinstance(body, dict) else None
    if not isinstance(metrics, dict):
        return {}
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, float) or (type(value) is int and abs(value) <= MOST_INT)
    }
