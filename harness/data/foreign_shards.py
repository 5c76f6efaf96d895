"""Where bytes of a corpus' shards are read if they are files of others.

A corpus that `harness data index` has made holds no data: its card names a folder of others, and
its index which bytes of which files are shards. All else (chunks, hashes, caches) is as in any
corpus.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from harness.core.world import BadInput
from harness.data.card import Card, CorpusIndex, shard_key
from storage.objects import Keys, ObjectStore, read_into
from storage.opening import normalize, open_store


class ForeignShards:
    """A corpus' own store, in which shards lie elsewhere: what is asked for by a shard's key is
    read from the file that it is a part of. `opened`: gives the store of those files."""

    def __init__(self, store: ObjectStore, index: CorpusIndex, opened: Callable[[], ObjectStore]):
        self.url, self._store = store.url, store
        self._index, self._source = index, functools.cache(opened)
        self._places = {
            shard_key(index.name(i)): (place, int(index.shards["nbytes"][i]))
            for i, place in reversed(list(enumerate(index.places)))
        }

    def alone(self, shard: int) -> ForeignShards:
        """With one shard: of several that are equal, each is read where it lies itself."""
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
        """Of a shard: as much longer or shorter as its file has become since."""
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
    """The store to read a corpus' shards from, and the index, which names where they lie. `source`:
    where files of others are now, if they were moved. Raises BadInput."""
    if not card.layout:
        if source:
            raise BadInput(f"{store.url}: wanted no source: this corpus has all its data itself")
        return store, index
    url = normalize(source or card.source)
    made = ForeignShards(store, index, lambda: open_store(url, retry_within_s=within_s))
    return made, replace(index, source=url)
