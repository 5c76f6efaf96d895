"""Probe of a store's real behaviour. Knows the ObjectStore protocol only.

The commit protocol relies on a few promises (`Probe`); S3-compatible servers break them silently,
by ignoring a condition they do not know. `probe` tests them with temporary keys, `require` refuses
a store that would lose training, and `record` stores the result in the bucket for those who only
want to read it (`known`).

There is no substitute for create-only writes: unique names and reading back tell a writer what is
there now, not that nobody replaces it a moment later. So two controllers could lead, and two worlds
commit, at once. Such a store is refused.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass, fields

from storage.canonical_json import BadObject, parsed
from storage.errors import NotFound, StoreError
from storage.stores.objects import ObjectStore, read_into

KEY = "control/store.json"
GOOD = "AWS S3, GCS, Azure, R2, MinIO, Ceph, SeaweedFS"


@dataclass(frozen=True)
class Probe:
    """Promises that were seen to hold; the commit protocol needs all of them."""

    read_after_write: bool  # reads return what was written, and then its replacement
    create_only: bool  # a create-only write leaves an existing object alone, and reports it
    list_after_write: bool  # lists show what was just written, and not what was just deleted
    size: bool  # the reported size of an object is right
    ranges: bool  # reads of ranges return that range, also beyond the end

    @property
    def missing(self) -> list[str]:
        """Names of the promises that do not hold."""
        return [f.name for f in fields(self) if not getattr(self, f.name)]


WHY = {
    "read_after_write": "what was written could not be read back",
    "create_only": (
        "it overwrites on a create-only write (If-None-Match is ignored), so commits "
        "would not be safe"
    ),
    "list_after_write": (
        "its lists do not show what was just written or deleted, so snapshots would be overlooked"
    ),
    "size": "it gives wrong sizes of objects, so damage would be overlooked",
    "ranges": "it gives more or other bytes than those asked for",
}


def probe(store: ObjectStore, token: str = "") -> Probe:
    """Test a store with a few small objects under `control/`, which are deleted again. Raises
    StoreError if it refuses writes."""
    key = f"control/probe-{token or secrets.token_hex(6)}"
    first = store.create(key, b"0123456789")
    try:
        read = store.get(key) == b"0123456789"
        size = read and store.size(key) == 10
        again = store.create(key, b"second")
        kept = store.get(key)
        create_only = first and not again and kept == b"0123456789"
        store.put(key, b"0123456789" * 2)
        read = read and store.get(key) == b"0123456789" * 2
        buffer = bytearray(8)
        ranges = store.get(key, 3, 7) == b"3456" and store.get(key, 20, 30) == b""
        ranges = (
            ranges and read_into(store, key, 17, memoryview(buffer)) == 3 and buffer[:3] == b"789"
        )
        listed = store.list(key) == [key]
    except NotFound:  # a just written object was not found
        return Probe(False, False, False, False, False)
    finally:
        store.delete(key)
    return Probe(read, create_only, listed and store.list(key) == [], size, ranges)


def require(store: ObjectStore) -> Probe:
    """Return the result of `probe`, or raise a StoreError with what is missing and a remedy. A
    promise must be seen broken twice: an answer may have been damaged on its way."""
    found = probe(store)
    if found.missing:
        found = probe(store)
    if found.missing:
        reasons = "; ".join(WHY[name] for name in found.missing)
        raise StoreError(
            f"{store.url}: {reasons}; use a store with conditional writes and consistent reads "
            f"({GOOD})"
        )
    return found


def record(store: ObjectStore, found: Probe) -> None:
    """Store the result in the bucket."""
    store.put(KEY, json.dumps(asdict(found)).encode())


def known(store: ObjectStore) -> Probe | None:
    """Return the last recorded result; None if there is none, or it is from a version of this code
    that tested less."""
    try:
        return decode(store.get(KEY))
    except (NotFound, BadObject):
        return None


def decode(data: bytes) -> Probe:
    """Parse a recorded result. Unknown fields are ignored. Raises BadObject."""
    body = parsed(data)
    names = [f.name for f in fields(Probe)]
    if not isinstance(body, dict) or not all(type(body.get(name)) is bool for name in names):
        raise BadObject(f"wanted {', '.join(names)}, each true or false")
    return Probe(**{name: body[name] for name in names})
