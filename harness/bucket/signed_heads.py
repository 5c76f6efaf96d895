"""Signed heads: lower bounds of the content of a run's bucket, signed with the run's key.

    heads/{number:08d}.json     create-only; each names the one before it

A head is written just before an object that decides something (a manifest, a generation, a mark).
It contains the object's hash, the number of each writer's segments of facts and of the archive's
volumes, and a signature. So a deciding object that no head names is a forgery, and a bucket with
less than a head states was truncated. Segments of facts have their own signatures (`Chain.seal`).
The key is never in the bucket; docs/PROOF.md describes what it proves,
`look/audit/audit_signatures.py` checks it.

`SignedStore` writes heads for everything that a process writes; without a key nothing changes.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from harness.bucket.archive import Live, raw_key, read_volumes, segments
from harness.bucket.layout import EPOCHS, HEADS, IDENTITY, PHASES, SETUP
from harness.core.decoding import Amount, Natural, decoded, word
from harness.core.signing import RunKey, SigningKey, key_in
from storage.canonical_json import BadObject, canonical, digest
from storage.errors import NotFound, StoreError
from storage.snapshots.restore import ALLOWED
from storage.snapshots.snapshot_keys import ENDED, MANIFESTS, QUARANTINE
from storage.stores.bounded_store import Prompt
from storage.stores.objects import (
    Gate,
    Keys,
    ObjectStore,
    abort_stale_uploads,
    folders,
    get_each,
    put_paced,
    read_into,
    reads_at_once,
)

HEAD_NBYTES = 64 << 20  # large, since the first head names all earlier objects
PURPOSE = "head"
# prefixes of the objects that a head must name
NAMED = (IDENTITY, PHASES, SETUP, EPOCHS, MANIFESTS, QUARANTINE, ALLOWED)
_HEAD = re.compile(r"heads/(\d{8,12})\.json")


def head_key(number: int) -> str:
    return f"{HEADS}{number:08d}.json"


def head_numbers(store: ObjectStore) -> list[int]:
    """Return the numbers of all heads, ascending. Raises StoreError."""
    found = (_HEAD.fullmatch(key) for key in store.list(HEADS))
    return sorted(int(one[1]) for one in found if one)


def is_named(key: str) -> bool:
    """Return whether a head must name the object. `.doomed` marks are exempt: they do not concern
    the newest snapshot, and a prune makes many."""
    if key.startswith(MANIFESTS):
        return key.endswith((".json", ENDED))
    return key.startswith(NAMED)


@dataclass(frozen=True)
class Head:
    """A signed head. `prev`: hash of the previous head's object; "": this is the first. `names`:
    key -> hash of objects that its signer is about to create; in the first head also those that
    existed unsigned. `facts`: writer -> number of segments that it has written, for writers with
    segments outside of the archive; `volumes`: those of the archive. `older`: in the first head,
    writer -> hash of its last line of facts, which nobody has signed for this run."""

    number: Natural
    prev: str
    by: str
    t: Amount
    names: dict[str, str]
    facts: dict[str, Natural]
    volumes: Natural
    older: dict[str, str] = field(default_factory=dict)
    signature: str = ""
    # the run's id, drawn by the signer of the first head; "": the run began before there were ids
    run: str = ""

    @classmethod
    def decode(cls, data: bytes) -> Head:
        """Decode a head. Raises BadObject."""
        return decoded(cls, data, most_nbytes=HEAD_NBYTES)

    def unsigned(self) -> bytes:
        body = self._body()
        del body["signature"]
        return canonical(body)

    def encode(self) -> bytes:
        return canonical(self._body())

    def _body(self) -> dict[str, Any]:
        body = asdict(self)
        if not self.run:
            del body["run"]
        return body


def last_lines(store: ObjectStore) -> dict[str, tuple[int, bytes]]:
    """Return the number of each writer's segments of facts, and its last line. Reads the whole
    archive. Raises StoreError, BadObject."""
    live, found = Live.read(store).segments, dict[str, tuple[int, bytes]]()
    for _, volume in read_volumes(store):
        if isinstance(volume, tuple) or not hasattr(volume, "segments"):
            raise BadObject(str(volume))
        for writer, number, data in volume.segments():
            found[writer] = number + 1, _last(data)
    for writer, parts in live.items():
        for number, data in parts:
            if number >= found.get(writer, (0, b""))[0]:
                found[writer] = number + 1, _last(data)
    return found


def _last(data: bytes) -> bytes:
    return data.rstrip(b"\n").rpartition(b"\n")[2]


class Signer:
    """A writer of heads for one process. Any number of them may be at work on a run."""

    def __init__(self, store: ObjectStore, key: SigningKey, by: str, now: Callable[[], float]):
        self._store, self.key, self._by, self._now = store, key, by, now
        self._lock = threading.Lock()
        self._newest: tuple[int, str] | None = None  # number and hash; None: not read yet
        self._volumes: int | None = None
        self._run: str | None = None  # the run's id; None: not read yet

    def of_run(self) -> RunKey:
        """Return the key that signs for this run only. Writes the first head if there is none.
        Raises StoreError."""
        with self._lock:
            unread = self._run is None
            unsigned = unread and not head_numbers(self._store)
        if unsigned:
            self.sign({})
        with self._lock:
            return RunKey(self.key, self._run_id())

    def _run_id(self) -> str:
        """Return the id that the first head states. One that this key has not signed states none,
        and the audit names it."""
        if self._run is None:
            try:
                first = Head.decode(self._store.get(head_key(1)))
                held = self.key.holds(PURPOSE, first.unsigned(), first.signature)
            except (BadObject, NotFound):
                held = False
            self._run = first.run if held else ""
        return self._run

    def sign(self, names: Mapping[str, str]) -> None:
        """Write one more head. `names`: key -> hash of objects that are about to be created. Raises
        StoreError."""
        with self._lock:
            if self._newest is None:
                numbers = head_numbers(self._store)
                self._newest = self._at(numbers[-1]) if numbers else (0, "")
            while True:
                number, prev = self._newest
                data = self._head(number + 1, prev, names).encode()
                if not self._store.create(head_key(number + 1), data):
                    self._newest = self._at(number + 1)  # another signer was first
                    if self._newest[1] != digest(data):
                        continue
                self._newest = number + 1, digest(data)
                return

    def _at(self, number: int) -> tuple[int, str]:
        return number, digest(self._store.get(head_key(number)))

    def _head(self, number: int, prev: str, names: Mapping[str, str]) -> Head:
        # list segments before the archive, like every reader
        live = {writer: max(keys) + 1 for writer, keys in segments(self._store).items()}
        older: dict[str, str] = {}
        if number == 1:
            lines = last_lines(self._store)
            older = {writer: digest(line) for writer, (_, line) in lines.items()}
            live |= {writer: count for writer, (count, _) in lines.items()}
            names = {**dict(_there(self._store)), **names}
        run = secrets.token_hex(16) if number == 1 else self._run_id()
        head = Head(
            number, prev, self._by, self._now(), dict(names), live, self._count(), older, "", run
        )
        return Head(**{**asdict(head), "signature": self.key.sign(PURPOSE, head.unsigned())})

    def _count(self) -> int:
        """Return the number of the archive's volumes. Those since the last call are found by
        name."""
        if self._volumes is None:
            self._volumes = 0
            listed = set(self._store.list(raw_key(0).rpartition("/")[0] + "/"))
            while raw_key(self._volumes) in listed:
                self._volumes += 1
        while True:
            try:
                self._store.size(raw_key(self._volumes))
            except NotFound:
                return self._volumes
            self._volumes += 1


def _there(store: ObjectStore) -> Iterator[tuple[str, str]]:
    """Yield (key, hash) of the existing objects that a head must name."""
    keys = [key for prefix in NAMED for key in store.list(prefix) if is_named(key)]
    for key, data in get_each(store, keys):
        if data is not None:
            yield key, digest(data)


class SignedStore:
    """A store that creates a deciding object only after a head names it."""

    def __init__(self, inner: ObjectStore, signer: Signer):
        self.inner, self.url, self.signer = inner, inner.url, signer

    def create(self, key: str, data: bytes | memoryview) -> bool:
        if is_named(key):
            with contextlib.suppress(NotFound):  # the usual case
                self.inner.size(key)
                return False
            self.signer.sign({key: digest(data)})
        return self.inner.create(key, data)

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        return self.inner.get(key, start, end)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.inner.put(key, data)

    def put_paced(self, key: str, data: bytes | memoryview, gate: Gate) -> None:
        put_paced(self.inner, key, data, gate)

    def list(self, prefix: str) -> Keys:
        return self.inner.list(prefix)

    def delete(self, key: str) -> None:
        self.inner.delete(key)

    def size(self, key: str) -> int:
        return self.inner.size(key)

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        return read_into(self.inner, key, start, buffer)

    def abort_stale_uploads(self, older_than_s: float) -> Keys:
        return abort_stale_uploads(self.inner, older_than_s)

    def folders(self) -> Keys:
        return folders(self.inner)

    @property
    def reads_at_once(self) -> int:
        return reads_at_once(self.inner)


def signed(
    store: ObjectStore, environ: Mapping[str, str], by: str, now: Callable[[], float]
) -> ObjectStore:
    """Return the store wrapped to sign with the key that `environ` names; without a key, return it
    unchanged. Raises BadInput."""
    key = key_in(environ)
    return store if key is None else SignedStore(store, Signer(store, key, word(by, 200), now))


def signer_of(store: ObjectStore) -> Signer | None:
    """Return the signer of writes through this store, or None."""
    if isinstance(store, Prompt):
        store = store.inner
    return store.signer if isinstance(store, SignedStore) else None


def run_key(store: ObjectStore) -> RunKey | None:
    """Return the key that signs, for this run only, what is written through this store, or None.
    Raises StoreError."""
    signer = signer_of(store)
    if signer is None:
        return None
    return store.ask("run_key", signer.of_run) if isinstance(store, Prompt) else signer.of_run()


def sign_off(store: ObjectStore) -> None:
    """Write a head with the current number of facts, at the end of a controller or a node. If the
    store fails, that head is missing and the older ones state less."""
    if isinstance(store, SignedStore):
        with contextlib.suppress(StoreError):
            store.signer.sign({})
