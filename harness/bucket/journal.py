"""Transport of facts and step records to the bucket and back. Every seat has one Journal, whose
facts form one chain.

An object store has no append, so a writer's facts become numbered create-only segments. A writer
that dies loses at most what it had not flushed; flushed facts are complete.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from harness.bucket.archive import (  # the reading side of the journal
    STEPS,
    Archive,
    read_columns,
    read_facts,
    segments,
)
from harness.bucket.layout import FACTS, SAMPLES, segment_key
from harness.bucket.signed_heads import run_key, signer_of
from harness.bucket.volumes import fact_in_line, read_segment
from harness.core import step_records
from harness.core import step_records as rec
from harness.core.facts import Chain, ChainReader, Fact, Stamped
from harness.core.signing import RunKey
from harness.core.step_records import Columns
from storage.errors import NotFound
from storage.stores.objects import ObjectStore, get_each

Listener = Callable[[Stamped], None]


class Journal:
    """The journal of one writer's facts. `record` is cheap and never touches the store; `flush`
    makes facts durable.

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
        self._signs = signer_of(store) is not None
        self._key: RunKey | None = None  # None: not read yet, or nothing is signed
        self._pending: list[str] = []
        # the segment being written, and its number of pending lines
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
        """Write all recorded facts to the bucket. Raises StoreError; facts that could not be
        written are kept for a retry."""
        with self._flushing:
            while True:
                # if set, an earlier flush got no answer: retry with identical bytes
                if self._sealed is None:
                    if not self._pending:
                        return
                    if self._signs and self._key is None:
                        self._key = run_key(self.store)
                    with self._lock:
                        if self._key is not None:
                            self._pending.append(self._chain.seal(self._now(), self._key))
                        lines = list(self._pending)
                    self._sealed = ("\n".join(lines) + "\n").encode(), len(lines)
                data, count = self._sealed
                at = segment_key(self.writer, self._seq)
                if not self.store.create(at, data):
                    self._is_ours(at, data)
                self._seq, self._sealed = self._seq + 1, None
                with self._lock:
                    del self._pending[:count]

    def _is_ours(self, key: str, data: bytes) -> None:
        """Check that the existing segment is ours, from a flush without an answer. Raises
        RuntimeError if another process wrote it."""
        with contextlib.suppress(NotFound):  # it was ours, and is archived by now
            if self.store.get(key) != data:
                raise RuntimeError(
                    f"{key}: another process writes under the same name; writers must be unique"
                )

    def read(self) -> list[Stamped]:
        """Return the facts of this run's controllers by time: all that a new controller needs.
        Raises StoreError."""
        return read_facts(self.store, "controller-", steps=False)


@dataclass
class Follower:
    """A reader of the facts that are new since the last call, for live views. It does not check
    hashes (`harness prove verify` does). A line that is not a fact becomes an `Unreadable`.

    Of facts archived before the first call it returns those that a live view needs: the newest
    steps, and only the newest of numerous kinds (archive.MUCH). `most`: segments that one call
    reads, except the first call; the rest comes with the next calls (None: no limit). `whole`: it
    returns all archived facts except the steps, which `archived_steps` returns.
    """

    store: ObjectStore
    prefix: str = FACTS
    most: int | None = None
    whole: bool = False
    # numbers of segments that were read and are not known to be archived, by writer
    _seen: dict[str, set[int]] = field(default_factory=dict)
    _archive: Archive = field(init=False)
    _begun: bool = False
    _steps_end: int = 0  # volume up to which `archived_steps` has returned steps
    # facts read by a poll that a store error then ended
    _unread: list[Stamped] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._archive = Archive(self.store, follows=True)

    def poll(self) -> list[Stamped]:
        """Return the new facts by time. Raises StoreError; facts read until then come with the next
        call."""
        writers = self.prefix.removeprefix(FACTS)
        cursors = self._archive.cursors
        place = {
            key: (writer, number)
            for writer, keys in segments(self.store, writers).items()
            for number, key in keys.items()
            if number not in self._seen.get(writer, ())
            and (writer not in cursors or number >= cursors[writer].next)
        }
        wanted = list(place) if self.most is None or not self._begun else list(place)[: self.most]
        for key, data in get_each(self.store, wanted):
            if data is None:
                continue  # it is in the archive by now
            writer, number = place[key]
            lines = read_segment(ChainReader(writer, hashes=False), number, data)
            self._unread += (stamped for _, stamped in lines)
            self._seen.setdefault(writer, set()).add(number)
        self._unread += self._archived(writers)
        self._begun = True
        new, self._unread = sorted(self._unread, key=lambda s: s.t), []
        return new

    def archived_steps(self) -> Columns:
        """Return the steps archived since the last call, as far as `poll` has read the archive.
        `poll` may have returned some of them as facts. Raises StoreError."""
        end = self._archive.end
        if self._steps_end == end:
            return step_records.NONE
        found = read_columns(self.store, STEPS, end, [], self._steps_end)
        self._steps_end = end
        return found

    def _archived(self, writers: str) -> Iterator[Stamped]:
        """Yield new archived facts. Call it after reading the segments: see archive.py."""
        end = self._archive.end
        yield from self._archive.told(
            lambda writer, number: number in self._seen.get(writer, ()),
            writers,
            brief=not self.whole,
        )
        if end == self._archive.end:
            return
        if not self._begun and not self.whole:
            for writer, line in self._archive.tail:
                if writer.startswith(writers):
                    yield fact_in_line(writer, line)
        for writer, cursor in self._archive.cursors.items():
            if writer in self._seen:
                self._seen[writer] = {n for n in self._seen[writer] if n >= cursor.next}


def records_to(store: ObjectStore, key: str, head: str) -> list[rec.StepRecord]:
    """Return the records of one object, of which the last has the hash `head`. Raises NotFound,
    step_records.BrokenRecords, StoreError."""
    records = rec.decode(store.get(key), key)
    if not records or records[-1].h != head:
        raise rec.BrokenRecords(
            f"{key}: wanted records that end in {head[:16]}, found others; `harness prove verify` "
            "tells more"
        )
    return records


def read_records(
    store: ObjectStore, head_key: str, head: str, genesis: str
) -> list[rec.StepRecord]:
    """Read the chain of step records that ends at `head` (as named by a manifest), in order.

    It walks backwards from object to object by hash. Raises step_records.BrokenRecords,
    which names what does not fit; StoreError.
    """
    by_head = rec.heads(store.list(SAMPLES))
    parts: list[list[rec.StepRecord]] = []  # newest first
    key, want = head_key, head
    while want != genesis:
        try:
            part = records_to(store, key, want)
        except NotFound:
            raise rec.BrokenRecords(f"{key}: missing, but later records follow from it") from None
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
