"""Carries facts and step records to the bucket and back. Every seat has one Journal; its facts are
one chain.

An object store has no append, so a writer's facts become numbered create-only segments. A writer
that dies loses at most what it had not flushed; what it flushed is whole.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from harness.bucket.archive import STEPS, Archive, read_columns, segments
from harness.bucket.archive import read_facts as read_facts  # the journal's other end
from harness.bucket.heads import key_for
from harness.bucket.layout import FACTS, SAMPLES, segment_key
from harness.bucket.volumes import fact_of, read_segment
from harness.core import columns
from harness.core import records as rec
from harness.core.columns import Columns
from harness.core.fact_lines import Chain, ChainReader
from harness.core.facts import Fact, Stamped
from storage.errors import NotFound
from storage.objects import ObjectStore, get_each

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
        self._chain, self._seq, self._key = Chain(writer), 0, key_for(store)
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
                        if not self._pending:
                            return
                        if self._key is not None:
                            self._pending.append(self._chain.seal(self._now(), self._key))
                        lines = list(self._pending)
                    self._sealed = ("\n".join(lines) + "\n").encode(), len(lines)
                data, count = self._sealed
                key = segment_key(self.writer, self._seq)
                if not self.store.create(key, data):
                    self._is_ours(key, data)
                self._seq, self._sealed = self._seq + 1, None
                with self._lock:
                    del self._pending[:count]

    def _is_ours(self, key: str, data: bytes) -> None:
        """What is there already, is it ours, of a flush that was not answered?"""
        with contextlib.suppress(NotFound):  # it was, and is archived by now
            if self.store.get(key) != data:
                raise RuntimeError(
                    f"{key}: another process writes under the same name; writers must be unique"
                )

    def read(self) -> list[Stamped]:
        """What the controllers of this run have written, by time: all that a new one must know."""
        return read_facts(self.store, "controller-", steps=False)


@dataclass
class Follower:
    """Reads only what is new since the last call; for live views. Does not check hashes (`harness
    verify` does). What is no fact is an `Unreadable`.

    Of what was archived before the first call it tells what a live view needs: the newest steps
    only, and of ends of members (archive.MUCH) only the newest. `most`: segments that one call
    reads, but the first; the rest comes with the next calls. `whole`: it tells all of that, but
    the archived steps, which `archived_steps` has.
    """

    store: ObjectStore
    prefix: str = FACTS
    most: int | None = None
    whole: bool = False
    # numbers of segments that were read, by writer, as far as they are not known to be archived
    _seen: dict[str, set[int]] = field(default_factory=dict)
    _archive: Archive = field(init=False)
    _begun: bool = False
    _steps_end: int = 0  # volume up to which `archived_steps` was told
    # read by a poll that the store then broke off
    _unread: list[Stamped] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._archive = Archive(self.store, follows=True)

    def poll(self) -> list[Stamped]:
        """Raises StoreError; what was read until then comes with the next call."""
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
        """Steps that were archived since the last call, as far as `poll` has read the archive;
        some of them it may have told as facts. Raises StoreError."""
        end = self._archive.end
        if self._steps_end == end:
            return columns.NONE
        found = read_columns(self.store, STEPS, end, [], self._steps_end)
        self._steps_end = end
        return found

    def _archived(self, writers: str) -> Iterator[Stamped]:
        """After the segments: see archive.py."""
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
                    yield fact_of(writer, line)
        for writer, cursor in self._archive.cursors.items():
            if writer in self._seen:
                self._seen[writer] = {n for n in self._seen[writer] if n >= cursor.next}


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
