"""One split of a corpus, opened separately in each process that reads it.

Open stores and chunks in memory belong to the process that opened them. A forked process opens its
own, or requests chunks from the one that it was forked from (`forked_reader.py`).
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from harness.core.world import BadInput
from harness.data.card import Card, CorpusIndex, Int64Array, card_of, index_of, shard_key
from harness.data.chunk_cache import LOCAL, opened
from harness.data.chunk_reader import CACHE_NBYTES, TRIES, Chunks, Fetch, FetchRun
from harness.data.forked_reader import Parent, can_serve
from storage.stores.objects import Keys, ObjectStore, read_into
from storage.stores.store_urls import normalize, open_store

# Reading of the shards of a corpus whose shards are parts of foreign files.


class ForeignShards:
    """A corpus' own store, in which reads of a shard's key are redirected to the foreign file that
    contains the shard. `opened` returns the store of those files."""

    def __init__(self, store: ObjectStore, index: CorpusIndex, opened: Callable[[], ObjectStore]):
        self.url, self._store = store.url, store
        self._index, self._source = index, functools.cache(opened)
        self._places = {
            shard_key(index.name(i)): (place, int(index.shards["nbytes"][i]))
            for i, place in reversed(list(enumerate(index.places)))
        }

    def alone(self, shard: int) -> ForeignShards:
        """Return a store with this one shard only. Equal shards share a key; here each is read at
        its own place."""
        at = slice(shard, shard + 1)
        one = replace(self._index, shards=self._index.shards[at], places=self._index.places[at])
        return ForeignShards(self._store, one, self._source)

    def read_into(self, key: str, start: int, buffer: memoryview) -> int:
        if (found := self._places.get(key)) is None:
            return read_into(self._store, key, start, buffer)
        place, nbytes = found
        view = buffer[: max(0, nbytes - start)]
        return read_into(self._source(), place.key, place.start + start, view)

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        if (found := self._places.get(key)) is None:
            return self._store.get(key, start, end)
        place, nbytes = found
        first, last = min(start or 0, nbytes), nbytes if end is None else min(end, nbytes)
        return self._source().get(place.key, place.start + first, place.start + max(first, last))

    def size(self, key: str) -> int:
        """Return the size of an object. A shard's size differs from the index by as much as its
        file has grown or shrunk."""
        if (found := self._places.get(key)) is None:
            return self._store.size(key)
        place, nbytes = found
        return max(0, nbytes + self._source().size(place.key) - place.file_nbytes)

    def list(self, prefix: str) -> Keys:
        return self._store.list(prefix)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._store.put(key, data)

    def create(self, key: str, data: bytes | memoryview) -> bool:
        return self._store.create(key, data)

    def delete(self, key: str) -> None:
        self._store.delete(key)


def shards_of(
    store: ObjectStore, card: Card, index: CorpusIndex, source: str = "", within_s: float = 60.0
) -> tuple[ObjectStore, CorpusIndex]:
    """Return the store to read a corpus' shards from, and the index, which names their places.
    `source`: the current URL of the foreign files, if they were moved. Raises BadInput."""
    if not card.layout:
        if source:
            raise BadInput(f"{store.url}: wanted no source: this corpus has all its data itself")
        return store, index
    url = normalize(source or card.source)
    made = ForeignShards(store, index, lambda: open_store(url, retry_within_s=within_s))
    return made, replace(index, source=url)


# default limit of memory for chunks that are read in turns
HELD_NBYTES = 256 << 20
MANY_TIMES = 4  # from this multiple of the wanted bytes on, a warning about the cost is due
SPARE = 8  # a share of 1/SPARE is added: blocks begin and end within chunks
WITHIN_S = 300.0  # how long a store may be silent, slow or throttling before a reader fails


class CorpusReader:
    """One split of a corpus, for any process: stores and chunks are opened in the process that uses
    them, and never pickled. `fetch`: makes a `Fetch` from (store, bytes of a chunk); see
    `from_store`. `cache`, `disk_nbytes`: the node's cache (see `node_cache.opened`). `source`: the
    current URL of the foreign files of which the corpus consists, if they were moved. Raises
    BadInput, CorpusCorrupt, StoreError."""

    def __init__(
        self,
        url: str,
        split: str,
        kind: str,
        *,
        fetch: Callable[[ObjectStore, int], Fetch] | None = None,
        cache_nbytes: int | None = None,
        cache: str | os.PathLike[str] | None = "",
        disk_nbytes: int | None = None,
        within_s: float = WITHIN_S,
        source: str = "",
    ):
        self.url, self._source = normalize(url), source
        self._fetch, self._within_s = fetch, within_s
        self._cache_nbytes = CACHE_NBYTES if cache_nbytes is None else cache_nbytes
        self._most_nbytes = HELD_NBYTES if cache_nbytes is None else cache_nbytes
        self._disk = cache, disk_nbytes
        self._opened: tuple[int, Chunks] | None = None  # with the process that opened them
        self._parent: Parent | None = None
        self._own: tuple[int, ObjectStore] | None = None  # (process, its store of the corpus)
        self.card = card_of(self.store)
        found = self.card.split(split)
        if self.card.kind != kind:
            other = {"tokens": "Tokens", "records": "Records"}[self.card.kind]
            raise BadInput(f"{url}: wanted a corpus of {kind}, found {self.card.kind}: use {other}")
        if found is None:
            there = ", ".join(one.name for one in self.card.splits)
            raise BadInput(f"{url}: wanted the split {split!r}, found {there}")
        self.split = found
        if can_serve(self._far_url):
            self._open()  # before any process is forked

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None, "_parent": None, "_own": None}

    @property
    def chunks(self) -> Chunks:
        """The chunks that this process has opened."""
        if self._opened is None or self._opened[0] != os.getpid():
            return self._open()
        return self._opened[1]

    @property
    def index(self) -> CorpusIndex:
        return self.chunks.index

    def contents(self, ranges: Sequence[tuple[int, int]], as_read: bool) -> Int64Array:
        """Return identifiers of the ranges' contents, int64 (n,): see `CorpusIndex.contents`.
        `as_read`: from the bytes that were read here, else from the index alone."""
        begins, ends = np.array(ranges, np.int64).reshape(-1, 2).T
        source = self.chunks if as_read else self.index
        return self.index.contents(begins, ends, source.ids)

    def named(self, what: str) -> str:
        """Return a fingerprint: the same wherever the corpus is stored, and different for other
        content."""
        return f"corpus:{self.card.content}:{self.split.name}:{what}"

    def may_hold(self, nbytes: int) -> bool:
        """Return whether this many adjacent bytes may be kept in memory."""
        return self._with_spare(nbytes) <= self._most_nbytes

    def hold(self, nbytes: int) -> None:
        """Keep this many adjacent bytes in memory, since they are read in turns."""
        self._cache_nbytes = max(self._cache_nbytes, self._with_spare(nbytes))
        self.chunks.keep(self._cache_nbytes)

    def _with_spare(self, nbytes: int) -> int:
        return nbytes + nbytes // SPARE + SPARE * self.index.chunk_nbytes

    def scattered(self, item_nbytes: int, nodes: int) -> str:
        """Return why this many nodes that read items of this size in random order fetch many times
        the bytes of these; "" if they do not."""
        chunks, whole = self.chunks, int(self.index.starts[-1])
        near = chunks.cache.nbytes if chunks.cache else chunks.room * self.index.chunk_nbytes
        times = self.index.chunk_nbytes / max(1, item_nbytes)
        if self._far_url.startswith(LOCAL) or times < MANY_TIMES or nodes * near >= whole:
            return ""
        caches = "a cache" if nodes == 1 else f"{nodes} caches"
        return (
            f"samples of {item_nbytes} bytes are read in no order from {self._far_url}, where each "
            f"takes a chunk of {self.index.chunk_nbytes}: up to {times:.0f} times the bytes, since "
            f"{caches} of {near / 2**20:.4g} MiB cannot hold all {whole / 2**20:.4g} MiB; "
            'run.steps(..., shuffle="blocks") keeps neighbours together'
        )

    @property
    def _far_url(self) -> str:
        """URL of the data, which may be foreign files elsewhere."""
        return normalize(self._source or self.card.source) if self.card.layout else self.url

    @property
    def store(self) -> ObjectStore:
        """The corpus' own store, opened in this process."""
        if self._own is None or self._own[0] != os.getpid():
            self._own = os.getpid(), open_store(self.url, retry_within_s=self._within_s)
        return self._own[1]

    def _open(self) -> Chunks:
        """Open the chunks in this process. A forked process uses its parent's index and reads
        through it."""
        parent, before = self._parent, self._opened
        if parent is not None and before is not None:
            theirs = before[1]
            cache = theirs.cache
            if cache is not None:  # a forked process makes its own
                cache = opened(self._far_url, cache.folder, cache.nbytes)
            made = Chunks(
                theirs.index, theirs._fetch, self.url, self._cache_nbytes, cache, parent.ask
            )
        else:
            cache = opened(self._far_url, *self._disk)
            index = index_of(self.store, self.card, self.split, cache)
            store, index = shards_of(self.store, self.card, index, self._source, self._within_s)
            fetch = (self._fetch or from_store)(store, index.chunk_nbytes)
            runs = None if self._fetch else runs_from_store(store, index.chunk_nbytes)
            made = Chunks(index, fetch, self.url, self._cache_nbytes, cache, fetch_run=runs)
            if can_serve(self._far_url):
                _ = index.starts  # computed before any process is forked, and under a lock
                self._parent = Parent(made.serve, self._within_s * TRIES)
                weakref.finalize(self, self._parent.close).atexit = False
        self._opened = os.getpid(), made
        return made


def from_store(store: ObjectStore, chunk_nbytes: int) -> Fetch:
    """Return a `Fetch` that reads chunks of the corpus itself by ranged reads."""
    run = runs_from_store(store, chunk_nbytes)
    return lambda shard, chunk: run(shard, chunk, 1)


def runs_from_store(store: ObjectStore, chunk_nbytes: int) -> FetchRun:
    def fetch(shard: str, chunk: int, count: int) -> bytes:
        start = chunk * chunk_nbytes
        return store.get(shard_key(shard), start, start + chunk_nbytes * count)

    return fetch
