"""Carries facts and step records to the bucket and back. Every seat has one Journal; its facts are
one chain.

An object store has no append, so a writer's facts become numbered create-only segments. A writer
that dies loses at most what it had not flushed; what it flushed is whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from harness.bucket.layout import FACTS, SAMPLES, SEGMENT, segment_key
from harness.core import records as rec
from harness.core.facts import Chain, Fact, Stamped, read_chain
from storage.errors import NotFound
from storage.objects import ObjectStore

Listener = Callable[[Stamped], None]


class Journal:
    """Records facts of one writer. `record` is cheap and never touches the store; `flush` makes
    durable.

    `writer` must be unique in the run: "<seat>-<something random or fenced>".
    """

    def __init__(
        self,
        store: ObjectStore,
        writer: str,
        now: Callable[[], float],
        listeners: tuple[Listener, ...] = (),
    ):
        self.store, self.writer, self._now, self._listeners = store, writer, now, listeners
        self._chain, self._seq = Chain(writer), 0
        self._pending: list[str] = []
        # the segment on its way, and how many lines it takes with it
        self._sealed: tuple[bytes, int] | None = None
        self._lock = threading.Lock()
        self._flushing = threading.Lock()

    def record(self, fact: Fact) -> None:
        with self._lock:
            t = self._now()
            self._pending.append(self._chain.line(t, fact))
        for listener in self._listeners:
            listener(Stamped(t, self.writer, fact))

    def flush(self) -> None:
        """After this the facts recorded before are in the bucket. Raises StoreError; what
        failed is kept and tried again."""
        with self._flushing:
            while True:
                # else an earlier flush was not answered: the very same bytes again
                if self._sealed is None:
                    with self._lock:
                        lines = list(self._pending)
                    if not lines:
                        return
                    self._sealed = ("\n".join(lines) + "\n").encode(), len(lines)
                data, count = self._sealed
                key = segment_key(self.writer, self._seq)
                if not self.store.create(key, data) and self.store.get(key) != data:
                    raise RuntimeError(
                        f"{key}: another process writes under the same name; writers must be unique"
                    )
                self._seq, self._sealed = self._seq + 1, None
                with self._lock:
                    del self._pending[:count]

    def read(self) -> list[Stamped]:
        """What the controllers of this run have written, by time: all that a new one must know."""
        return read_facts(self.store, "controller-")


def segments(store: ObjectStore, writers: str = "") -> dict[str, list[str]]:
    """Keys of fact segments, in order, by writer. `writers`: only those whose name begins so.
    What else lies there is not ours."""
    by_writer: dict[str, list[tuple[int, str]]] = {}
    for key in store.list(f"{FACTS}{writers}"):
        if found := SEGMENT.fullmatch(key):
            by_writer.setdefault(found[1], []).append((int(found[2]), key))
    return {writer: [key for _, key in sorted(keys)] for writer, keys in by_writer.items()}


def read_facts(store: ObjectStore, writers: str = "") -> list[Stamped]:
    """Facts of a run (of all writers, or those whose name begins so), by time. What was changed or
    lost, or is none, is an `Unreadable` in its place: one bad object stops no reader. Raises
    StoreError."""
    found: list[Stamped] = []
    for writer, keys in segments(store, writers).items():
        found += read_chain(writer, _lines(store, keys))
    return sorted(found, key=lambda s: s.t)


def _lines(store: ObjectStore, keys: list[str]) -> Iterator[tuple[str, str]]:
    """(where, line)"""
    for key in keys:
        for number, line in enumerate(store.get(key).decode(errors="replace").splitlines(), 1):
            yield f"{key}, line {number}", line


@dataclass
class Follower:
    """Reads only what is new since the last call; for live views. Does not check hashes (`harness
    verify` does). What is no fact is an `Unreadable`."""

    store: ObjectStore
    prefix: str = FACTS
    _seen: set[str] = field(default_factory=set)
    # read by a poll that the store then broke off
    _unread: list[Stamped] = field(default_factory=list)

    def poll(self) -> list[Stamped]:
        for key in self.store.list(self.prefix):
            if key in self._seen or not (found := SEGMENT.fullmatch(key)):
                continue
            self._unread += read_chain(found[1], _lines(self.store, [key]), hashes=False)
            self._seen.add(key)
        new, self._unread = sorted(self._unread, key=lambda s: s.t), []
        return new


def read_records(
    store: ObjectStore, head_key: str, head: str, genesis: str
) -> list[rec.StepRecord]:
    """The chain of step records that ends at `head` (as named by a manifest), first step first.

    Walks backwards from object to object by hash. Raises records.BrokenRecords naming what does not
    fit.
    """
    by_head = rec.heads(store.list(SAMPLES))
    parts: list[list[rec.StepRecord]] = []  # newest first
    key, want = head_key, head
    while want != genesis:
        try:
            part = rec.decode(store.get(key), key)
        except NotFound:
            raise rec.BrokenRecords(f"{key}: missing, but later records follow from it") from None
        if not part or part[-1].h != want:
            raise rec.BrokenRecords(
                f"{key}: does not end with record {want[:16]} that its successor follows"
            )
        parts.append(part)
        want = part[0].prev
        if want != genesis:
            if want[:16] not in by_head:
                raise rec.BrokenRecords(
                    f"records before step {part[0].step} are missing (wanted one ending in "
                    f"{want[:16]})"
                )
            key = by_head[want[:16]]
    chain = [record for part in reversed(parts) for record in part]
    if chain and chain[0].step != 1:
        raise rec.BrokenRecords(f"the first record is of step {chain[0].step}, wanted step 1")
    return chain
