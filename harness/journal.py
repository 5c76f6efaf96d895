"""Carries facts and step records to the bucket and back. Every seat has one Journal; its facts are one chain.

An object store has no append, so a writer's facts become numbered create-only segments. A writer that dies loses at
most what it had not flushed; what it flushed is whole.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from harness import records as rec
from harness.facts import Chain, Fact, Stamped, check_chain, parse
from storage.objects import NotFound, ObjectStore

Listener = Callable[[Stamped], None]


class Journal:
    """Records facts of one writer. `record` is cheap and never touches the store; `flush` makes durable.

    `writer` must be unique in the run: "<seat>-<something random or fenced>".
    """

    def __init__(self, store: ObjectStore, writer: str, now: Callable[[], float], listeners: tuple[Listener, ...] = ()):
        self.store, self.writer, self._now, self._listeners = store, writer, now, listeners
        self._chain, self._seq = Chain(writer), 0
        self._pending: list[str] = []
        self._lock = threading.Lock()
        self._flushing = threading.Lock()

    def record(self, fact: Fact) -> None:
        with self._lock:
            t = self._now()
            self._pending.append(self._chain.line(t, fact))
        for listener in self._listeners:
            listener(Stamped(t, self.writer, fact))

    def flush(self) -> None:
        """After this the facts recorded before are in the bucket. Raises StoreError; what failed is kept and tried again."""
        with self._flushing:
            with self._lock:
                lines = list(self._pending)
            if not lines:
                return
            key = f"facts/{self.writer}/{self._seq:06d}.jsonl"
            data = ("\n".join(lines) + "\n").encode()
            if not self.store.create(key, data) and self.store.get(key) != data:
                raise RuntimeError(f"{key}: another process writes under the same name; writers must be unique")
            self._seq += 1
            with self._lock:
                del self._pending[: len(lines)]

    def read(self) -> list[Stamped]:
        """All facts of the run, by time."""
        return read_facts(self.store)


def segments(store: ObjectStore) -> dict[str, list[str]]:
    """Keys of all fact segments, in order, by writer."""
    by_writer: dict[str, list[str]] = {}
    for key in store.list("facts/"):
        by_writer.setdefault(key.split("/")[1], []).append(key)
    return by_writer


def read_facts(store: ObjectStore) -> list[Stamped]:
    """All facts of a run, sorted by time. Raises facts.BrokenChain if one was changed or lost."""
    facts: list[Stamped] = []
    for writer, keys in segments(store).items():
        facts += check_chain(writer, _lines(store, keys))
    return sorted(facts, key=lambda s: s.t)


def _lines(store: ObjectStore, keys: list[str]) -> Iterator[str]:
    for key in keys:
        yield from store.get(key).decode(errors="replace").splitlines()


@dataclass
class Follower:
    """Reads only what is new since the last call; for live views. Does not check hashes (`harness verify` does)."""

    store: ObjectStore
    prefix: str = "facts/"
    _seen: set[str] = field(default_factory=set)

    def poll(self) -> list[Stamped]:
        new: list[Stamped] = []
        for key in self.store.list(self.prefix):
            if key in self._seen:
                continue
            self._seen.add(key)
            writer = key.split("/")[1]
            for line in self.store.get(key).decode().splitlines():
                body = json.loads(line)
                new.append(Stamped(body["t"], writer, parse(body)))
        return sorted(new, key=lambda s: s.t)


def read_records(store: ObjectStore, head_key: str, head: str, genesis: str) -> list[rec.StepRecord]:
    """The chain of step records that ends at `head` (as named by a manifest), first step first.

    Walks backwards from object to object by hash. Raises records.BrokenRecords naming what does not fit.
    """
    by_head = {key.rsplit("-", 1)[1].removesuffix(".jsonl"): key for key in store.list("samples/")}
    parts: list[list[rec.StepRecord]] = []  # newest first
    key, want = head_key, head
    while want != genesis:
        try:
            part = rec.decode(store.get(key), key)
        except NotFound:
            raise rec.BrokenRecords(f"{key}: missing, but later records follow from it") from None
        if not part or part[-1].h != want:
            raise rec.BrokenRecords(f"{key}: does not end with record {want[:16]} that its successor follows")
        parts.append(part)
        want = part[0].prev
        if want != genesis:
            if want[:16] not in by_head:
                raise rec.BrokenRecords(f"records before step {part[0].step} are missing (wanted one ending in {want[:16]})")
            key = by_head[want[:16]]
    chain = [record for part in reversed(parts) for record in part]
    if chain and chain[0].step != 1:
        raise rec.BrokenRecords(f"the first record is of step {chain[0].step}, wanted step 1")
    return chain
