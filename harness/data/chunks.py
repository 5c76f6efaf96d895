"""Bytes of a corpus by ranged reads: the chunk is the unit of reading, of checking by hash, and of
a small cache in memory.

Knows a store and an index; nothing of tokens, documents or torch. Who has chunks nearer (a cache of
the node, its neighbours) gives a `Fetch`; it need not be trusted, since each chunk is hashed.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np

from harness.core.batch import Uint64s
from harness.core.world import BadInput
from harness.data.card import (
    CARD,
    Card,
    CorpusCorrupt,
    CorpusIndex,
    Int64Array,
    SplitCard,
    hash_of,
    index_key,
    shard_key,
)
from harness.data.foreign_shards import shards_of
from storage.errors import NotFound
from storage.objects import ObjectStore, read_into
from storage.opening import normalize, open_store

# (hash of a shard, number of its chunk) -> the bytes, as they are; raises StoreError
Fetch: TypeAlias = Callable[[str, int], bytes]
AT_ONCE = 16  # ranged reads of one process on their way together
CACHE_NBYTES = 64 << 20  # chunks that a process keeps
WITHIN_S = 300.0  # how long a store may be silent, slow or asking to wait before a reader fails
TRIES = 2  # fetches of a chunk whose hash is wrong: once more, since the way may have been at fault


class Chunks:
    """The bytes of a split, by their places in the row of its chunks. `read_nbytes`: fetched so
    far. Any thread may call it."""

    def __init__(
        self, index: CorpusIndex, fetch: Fetch, where: str, cache_nbytes: int = CACHE_NBYTES
    ):
        self.index, self.where, self._fetch = index, where, fetch
        self.read_nbytes = 0
        self._room = max(1, cache_nbytes // index.chunk_nbytes)
        self._held: OrderedDict[int, bytes] = OrderedDict()
        self._hashed = np.zeros(len(index.hashes), np.bool_)  # which were read here, and are right
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def read(self, start: int, end: int) -> bytes:
        """The bytes [start, end) of the row. Raises CorpusCorrupt, StoreError."""
        numbers = self.index.chunks_of(start, end)
        found = b"".join(self._chunk(number) for number in numbers)
        begin = start - int(self.index.starts[numbers.start]) if numbers else 0
        return found[begin : begin + end - start]

    def ahead(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetch the chunks of these ranges that are not held, several at once; no more than are
        held together."""
        wanted = dict.fromkeys(n for start, end in ranges for n in self.index.chunks_of(start, end))
        with self._lock:
            missing = [n for n in wanted if n not in self._held][: self._room]
        if len(missing) < 2:
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(AT_ONCE, "chunks")
        for _ in self._pool.map(self._chunk, missing):
            pass

    def ids(self, chunks: Int64Array) -> Uint64s:
        """As `CorpusIndex.ids`, but of their bytes as they were read here: nothing is given away
        that has another hash, so what was read once need not be held."""
        for number in chunks[~self._hashed[chunks]].tolist():
            self._chunk(number)
        return self.index.ids(chunks)

    def _chunk(self, number: int) -> bytes:
        with self._lock:
            if (held := self._held.get(number)) is not None:
                self._held.move_to_end(number)
                return held
        held = self._fetched(number)
        with self._lock:
            self.read_nbytes += len(held)
            self._held[number], self._hashed[number] = held, True
            while len(self._held) > self._room:
                self._held.popitem(last=False)
        return held

    def _fetched(self, number: int) -> bytes:
        shard, within = self.index.place(number)
        wanted = self.index.hashes[number].tobytes()
        nbytes = int(self.index.starts[number + 1] - self.index.starts[number])
        where, data = self.index.told(self.index.shard_of(number), self.where), b""
        for _ in range(TRIES):
            try:
                data = self._fetch(shard, within)
            except NotFound as e:
                raise CorpusCorrupt(
                    f"{where}: wanted a shard that the corpus consists of, found none; restore it, "
                    "or make the corpus again"
                ) from e
            if hash_of(data) == wanted:
                return data
        begin, made = self.index.origin(number)
        what = f"only {len(data)} (it was cut)" if len(data) < nbytes else "others"
        raise CorpusCorrupt(
            f"{where}: wanted the {nbytes} bytes from {begin} on as they were {made}, found "
            f"{what}, {TRIES} times; nothing of it is trained on; restore the shard, or make the "
            "corpus again; `harness data verify` names all that is damaged"
        )


class CorpusReader:
    """One split of a corpus, for any process: what is open is opened in the process that uses it,
    and never pickled. `fetch`: makes a `Fetch` of (store, bytes of a chunk); see `from_store`.
    `source`: where the files of others are now that the corpus consists of, if they were moved.
    Raises BadInput, CorpusCorrupt, StoreError."""

    def __init__(
        self,
        url: str,
        split: str,
        kind: str,
        *,
        fetch: Callable[[ObjectStore, int], Fetch] | None = None,
        cache_nbytes: int = CACHE_NBYTES,
        within_s: float = WITHIN_S,
        source: str = "",
    ):
        self.url, self._source = normalize(url), source
        self._fetch, self._cache_nbytes, self._within_s = fetch, cache_nbytes, within_s
        self._opened: tuple[int, Chunks] | None = None  # the process that did it
        self.card = card_of(self._store())
        found = self.card.split(split)
        if self.card.kind != kind:
            other = {"tokens": "Tokens", "records": "Records"}[self.card.kind]
            raise BadInput(f"{url}: wanted a corpus of {kind}, found {self.card.kind}: use {other}")
        if found is None:
            there = ", ".join(one.name for one in self.card.splits)
            raise BadInput(f"{url}: wanted the split {split!r}, found {there}")
        self.split = found

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    @property
    def chunks(self) -> Chunks:
        """Of this process: one that was forked opens its own connections."""
        if self._opened is None or self._opened[0] != os.getpid():
            store = self._store()
            index = index_of(store, self.card, self.split)
            store, index = shards_of(store, self.card, index, self._source, self._within_s)
            fetch = (self._fetch or from_store)(store, index.chunk_nbytes)
            self._opened = os.getpid(), Chunks(index, fetch, self.url, self._cache_nbytes)
        return self._opened[1]

    @property
    def index(self) -> CorpusIndex:
        return self.chunks.index

    def contents(self, ranges: Sequence[tuple[int, int]], as_read: bool) -> Int64Array:
        """int64 (n,): see `CorpusIndex.contents`. `as_read`: of the bytes that were read here, else
        as the index says."""
        begins, ends = np.array(ranges, np.int64).reshape(-1, 2).T
        source = self.chunks if as_read else self.index
        return self.index.contents(begins, ends, source.ids)

    def named(self, what: str) -> str:
        """A fingerprint: the same wherever the corpus lies, another for any other content."""
        return f"corpus:{self.card.content}:{self.split.name}:{what}"

    def _store(self) -> ObjectStore:
        return open_store(self.url, retry_within_s=self._within_s)


def from_store(store: ObjectStore, chunk_nbytes: int) -> Fetch:
    """Chunks by ranged reads of the corpus itself."""

    def fetch(shard: str, chunk: int) -> bytes:
        buffer = bytearray(chunk_nbytes)
        found = read_into(store, shard_key(shard), chunk * chunk_nbytes, memoryview(buffer))
        return bytes(memoryview(buffer)[:found])

    return fetch


def card_of(store: ObjectStore) -> Card:
    """Raises BadInput if there is no corpus, CorpusCorrupt."""
    try:
        data = store.get(CARD)
    except NotFound:
        raise BadInput(
            f"{store.url}: wanted a corpus, found no {CARD}; `harness data prepare SOURCES... "
            f"{store.url}` makes one, and goes on with one that was interrupted"
        ) from None
    return Card.decode(data, f"{store.url}/{CARD}")


def index_of(store: ObjectStore, card: Card, split: SplitCard) -> CorpusIndex:
    """Raises CorpusCorrupt."""
    key = index_key(split.index)
    try:
        data = store.get(key)
    except NotFound as e:
        raise CorpusCorrupt(f"{store.url}/{key}: wanted an index, found none") from e
    return CorpusIndex.decode(data, split, card.chunk_nbytes, f"{store.url}/{key}")
