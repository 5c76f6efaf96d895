"""Signed heads: what a run's bucket must hold at least, said by who has the run's key.

    heads/{number:08d}.json     create-only; each names the one before it

A head is written just before an object that decides something (a manifest, an epoch, a mark), and
has its hash, the number of each writer's segments of facts and of the archive's volumes, and a
signature. So such an object that no head names is a forgery, and what is less than a head says was
cut off. Segments of facts are signed by themselves (`Chain.seal`). The key is never in the bucket;
what it proves is in docs/PROOF.md, and looked at by `views/audit_signed.py`.

`SignedStore` does it for everything that a process writes; without a key nothing is different.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field

from harness.bucket.archive import Live, raw_key, segments, volumes
from harness.bucket.layout import EPOCHS, HEADS, IDENTITY, SETUP
from harness.core.fact_lines import is_sealed
from harness.core.signing import SigningKey, key_in
from harness.core.values import Amount, BadObject, Natural, canonical, decoded, digest, word
from storage.errors import NotFound, StoreError
from storage.objects import (
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
from storage.restore import ALLOWED
from storage.snapshot_keys import ENDED, MANIFESTS, QUARANTINE

HEAD_NBYTES = 64 << 20  # the first one names all that was there before it
PURPOSE = "head"
# where objects lie that a head must name
NAMED = (IDENTITY, SETUP, EPOCHS, MANIFESTS, QUARANTINE, ALLOWED)
_HEAD = re.compile(r"heads/(\d{8,12})\.json")


def head_key(number: int) -> str:
    return f"{HEADS}{number:08d}.json"


def head_numbers(store: ObjectStore) -> list[int]:
    """Ascending. Raises StoreError."""
    found = (_HEAD.fullmatch(key) for key in store.list(HEADS))
    return sorted(int(one[1]) for one in found if one)


def is_named(key: str) -> bool:
    """Must a head name it? A `.doomed` mark says nothing of the newest snapshot; a prune makes
    many."""
    if key.startswith(MANIFESTS):
        return key.endswith((".json", ENDED))
    return key.startswith(NAMED)


@dataclass(frozen=True)
class Head:
    """`prev`: hash of the head before it, as it lies there; "": it is the first. `names`: key ->
    hash of what its signer is about to create; of the first one also what was there, unsigned.
    `facts`: writer -> segments that it has written, of who has any outside of the archive;
    `volumes`: of the archive. `older`: of the first head, writer -> hash of the last line of facts
    that nobody signed."""

    number: Natural
    prev: str
    by: str
    t: Amount
    names: dict[str, str]
    facts: dict[str, Natural]
    volumes: Natural
    older: dict[str, str] = field(default_factory=dict)
    signature: str = ""

    @classmethod
    def decode(cls, data: bytes) -> Head:
        """Raises BadObject."""
        return decoded(cls, data, most_nbytes=HEAD_NBYTES)

    def unsigned(self) -> bytes:
        body = asdict(self)
        del body["signature"]
        return canonical(body)

    def encode(self) -> bytes:
        return canonical(asdict(self))


def last_lines(store: ObjectStore) -> dict[str, tuple[int, bytes]]:
    """How many segments of facts each writer has, and its last line. Reads the whole archive.
    Raises StoreError, BadObject."""
    live, found = Live.read(store).segments, dict[str, tuple[int, bytes]]()
    for _, volume in volumes(store):
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
    """Writes the heads of one process. Any number of them may be at work on a run."""

    def __init__(self, store: ObjectStore, key: SigningKey, by: str, now: Callable[[], float]):
        self._store, self.key, self._by, self._now = store, key, by, now
        self._lock = threading.Lock()
        self._newest: tuple[int, str] | None = None  # number and hash; None: not looked yet
        self._volumes: int | None = None

    def sign(self, names: Mapping[str, str]) -> None:
        """One more head. `names`: key -> hash of what is about to be created. Raises
        StoreError."""
        with self._lock:
            if self._newest is None:
                numbers = head_numbers(self._store)
                self._newest = self._at(numbers[-1]) if numbers else (0, "")
            while True:
                number, prev = self._newest
                data = self._head(number + 1, prev, names).encode()
                if not self._store.create(head_key(number + 1), data):
                    self._newest = self._at(number + 1)  # another's, which came first
                    if self._newest[1] != digest(data):
                        continue
                self._newest = number + 1, digest(data)
                return

    def _at(self, number: int) -> tuple[int, str]:
        return number, digest(self._store.get(head_key(number)))

    def _head(self, number: int, prev: str, names: Mapping[str, str]) -> Head:
        # before the archive is looked at, as by every reader
        live = {writer: max(keys) + 1 for writer, keys in segments(self._store).items()}
        older: dict[str, str] = {}
        if number == 1:
            lines = last_lines(self._store)
            older = {
                writer: digest(line)
                for writer, (_, line) in lines.items()
                if not is_sealed(writer, line, self.key)
            }
            live |= {writer: count for writer, (count, _) in lines.items()}
            names = {**dict(_there(self._store)), **names}
        head = Head(number, prev, self._by, self._now(), dict(names), live, self._count(), older)
        return Head(**{**asdict(head), "signature": self.key.sign(PURPOSE, head.unsigned())})

    def _count(self) -> int:
        """Volumes of the archive: what is new since it was asked last is looked for by name."""
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
    """Objects that a head must name, and that are there."""
    keys = [key for prefix in NAMED for key in store.list(prefix) if is_named(key)]
    for key, data in get_each(store, keys):
        if data is not None:
            yield key, digest(data)


class SignedStore:
    """A store through which nothing that decides is created before a head names it."""

    def __init__(self, inner: ObjectStore, signer: Signer):
        self.inner, self.url, self.signer = inner, inner.url, signer

    def create(self, key: str, data: bytes | memoryview) -> bool:
        if is_named(key):
            with contextlib.suppress(NotFound):  # as it is most often
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
    """The same store, for who writes to it with the key that its environment names; without one as
    it is. Raises BadInput."""
    key = key_in(environ)
    return store if key is None else SignedStore(store, Signer(store, key, word(by, 200), now))


def key_for(store: ObjectStore) -> SigningKey | None:
    """What is written through this store is signed with it; None: nothing is."""
    return store.signer.key if isinstance(store, SignedStore) else None


def sign_off(store: ObjectStore) -> None:
    """Have a head say how many facts there are now: at the end of who leads, or of a node. If the
    store does not let us, it says less."""
    if isinstance(store, SignedStore):
        with contextlib.suppress(StoreError):
            store.signer.sign({})
