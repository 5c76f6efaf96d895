"""One split of a corpus, opened in whichever process reads it.

What is open belongs to the process that opened it: its stores, its chunks in memory. One that was
forked opens its own, or asks who forked it (`forked.py`).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from harness.core.world import BadInput
from harness.data.card import CorpusIndex, Int64Array, shard_key
from harness.data.chunks import CACHE_NBYTES, TRIES, Chunks, Fetch, FetchRun
from harness.data.foreign_shards import shards_of
from harness.data.forked import Parent, can_serve
from harness.data.node_cache import LOCAL, opened
from harness.data.opening import card_of, index_of
from storage.objects import ObjectStore
from storage.opening import normalize, open_store

# of chunks in memory at most, for what is read in turns, unless it is said
HELD_NBYTES = 256 << 20
MANY_TIMES = 4  # the bytes that are wanted: then who pays for them should know
SPARE = 8  # one part of so many besides: blocks begin and end within chunks
WITHIN_S = 300.0  # how long a store may be silent, slow or asking to wait before a reader fails


class CorpusReader:
    """One split of a corpus, for any process: what is open is opened in the process that uses it,
    and never pickled. `fetch`: makes a `Fetch` of (store, bytes of a chunk); see `from_store`.
    `cache`, `disk_nbytes`: the node's cache (see `node_cache.opened`). `source`: where the files of
    others are now that the corpus consists of, if they were moved. Raises BadInput, CorpusCorrupt,
    StoreError."""

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
        self._opened: tuple[int, Chunks] | None = None  # the process that did it
        self._parent: Parent | None = None
        self._own: tuple[int, ObjectStore] | None = None  # the corpus' store, of which process
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
            self._open()  # before anybody is forked

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None, "_parent": None, "_own": None}

    @property
    def chunks(self) -> Chunks:
        """Of this process."""
        if self._opened is None or self._opened[0] != os.getpid():
            return self._open()
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

    def may_hold(self, nbytes: int) -> bool:
        """May so many bytes that lie together be kept in memory?"""
        return self._with_spare(nbytes) <= self._most_nbytes

    def hold(self, nbytes: int) -> None:
        """So many bytes that lie together are read in turns: keep them in memory."""
        self._cache_nbytes = max(self._cache_nbytes, self._with_spare(nbytes))
        self.chunks.keep(self._cache_nbytes)

    def _with_spare(self, nbytes: int) -> int:
        return nbytes + nbytes // SPARE + SPARE * self.index.chunk_nbytes

    def scattered(self, item_nbytes: int, nodes: int) -> str:
        """Why so many nodes that read items of this size all over the corpus fetch many times the
        bytes of these; "": they do not."""
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
        """Where the data lie: files of others elsewhere."""
        return normalize(self._source or self.card.source) if self.card.layout else self.url

    @property
    def store(self) -> ObjectStore:
        """The corpus' own, of this process."""
        if self._own is None or self._own[0] != os.getpid():
            self._own = os.getpid(), open_store(self.url, retry_within_s=self._within_s)
        return self._own[1]

    def _open(self) -> Chunks:
        """One that was forked opens its own connections, or asks who opened the corpus."""
        parent, before = self._parent, self._opened
        if parent is not None and before is not None:
            theirs = before[1]
            cache = theirs.cache
            if cache is not None:  # a process that was forked makes its own
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
                _ = index.starts  # computed before anybody is forked, and under a lock
                self._parent = Parent(made.serve, self._within_s * TRIES)
                weakref.finalize(self, self._parent.close).atexit = False
        self._opened = os.getpid(), made
        return made


def from_store(store: ObjectStore, chunk_nbytes: int) -> Fetch:
    """Chunks by ranged reads of the corpus itself."""
    run = runs_from_store(store, chunk_nbytes)
    return lambda shard, chunk: run(shard, chunk, 1)


def runs_from_store(store: ObjectStore, chunk_nbytes: int) -> FetchRun:
    def fetch(shard: str, chunk: int, count: int) -> bytes:
        start = chunk * chunk_nbytes
        return store.get(shard_key(shard), start, start + chunk_nbytes * count)

    return fetch
