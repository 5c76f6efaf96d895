"""Is a corpus what its card says, to the byte? Reads all of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from harness.data.card import Card, CorpusIndex, hash_of, shard_key
from harness.data.foreign_shards import ForeignShards, shards_of
from harness.data.opening import index_of
from storage.errors import NotFound
from storage.objects import ObjectStore, read_into

AT_ONCE = 8
BLOCK_NBYTES = 8 << 20  # of a read


@dataclass(frozen=True)
class ShardDamage:
    """What is wrong with one object."""

    key: str
    what: str


def damaged(
    store: ObjectStore,
    card: Card,
    tell: Callable[[int], None] = lambda n: None,
    source: str = "",
) -> Iterator[ShardDamage]:
    """All that is wrong, shard by shard. `tell`: bytes that were read; `source`: see
    `CorpusReader`. Raises CorpusCorrupt for an index that is damaged, StoreError."""
    for split in card.splits:
        shards, index = shards_of(store, card, index_of(store, card, split), source)
        check = functools.partial(_wrong, shards, index, tell)
        with ThreadPoolExecutor(AT_ONCE, "verify") as pool:
            for found in pool.map(check, range(len(index.shards))):
                if found is not None:
                    yield found


def _wrong(
    store: ObjectStore, index: CorpusIndex, tell: Callable[[int], None], shard: int
) -> ShardDamage | None:
    key, nbytes = shard_key(index.name(shard)), int(index.shards["nbytes"][shard])
    told = index.told(shard, store.url).removeprefix(f"{store.url}/")
    store = store.alone(shard) if isinstance(store, ForeignShards) else store
    try:
        if (found := store.size(key)) != nbytes:
            return ShardDamage(told, f"wanted {nbytes} bytes, found {found}")
        what = _wrong_chunk(store, index, shard, key, tell)
        return ShardDamage(told, what) if what else None
    except NotFound:
        return ShardDamage(told, f"wanted a shard of {nbytes} bytes, found none")


def _wrong_chunk(
    store: ObjectStore, index: CorpusIndex, shard: int, key: str, tell: Callable[[int], None]
) -> str:
    """What is wrong with a shard's bytes, "" if nothing."""
    size, nbytes = index.chunk_nbytes, int(index.shards["nbytes"][shard])
    chunk = int(index.first_chunks[shard])
    block = max(1, BLOCK_NBYTES // size) * size
    buffer = bytearray(min(block, nbytes))
    for start in range(0, nbytes, block):
        view = memoryview(buffer)[: min(block, nbytes - start)]
        found = read_into(store, key, start, view)
        for at in range(0, len(view), size):
            data = view[at : min(at + size, found)]
            if hash_of(data) != index.hashes[chunk].tobytes():
                begin, made = index.origin(chunk)
                return f"the bytes from {begin} on are not what was {made}"
            chunk += 1
        tell(len(view))
    return ""
