"""Is a corpus what its card says, to the byte? Reads all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from harness.data.card import Card, CorpusIndex, hash_of, shard_key
from harness.data.chunks import index_of
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
    store: ObjectStore, card: Card, tell: Callable[[int], None] = lambda n: None
) -> Iterator[ShardDamage]:
    """All that is wrong, shard by shard. `tell`: bytes that were read. Raises CorpusCorrupt for an
    index that is damaged, StoreError."""
    for split in card.splits:
        index = index_of(store, card, split)
        with ThreadPoolExecutor(AT_ONCE, "verify") as pool:
            shards = range(len(index.shards))
            for found in pool.map(lambda i, index=index: _wrong(store, index, i, tell), shards):
                if found is not None:
                    yield found


def _wrong(
    store: ObjectStore, index: CorpusIndex, shard: int, tell: Callable[[int], None]
) -> ShardDamage | None:
    key, nbytes = shard_key(index.name(shard)), int(index.shards["nbytes"][shard])
    try:
        if (found := store.size(key)) != nbytes:
            return ShardDamage(key, f"wanted {nbytes} bytes, found {found}")
        return _wrong_chunk(store, index, shard, key, tell)
    except NotFound:
        return ShardDamage(key, f"wanted a shard of {nbytes} bytes, found none")


def _wrong_chunk(
    store: ObjectStore, index: CorpusIndex, shard: int, key: str, tell: Callable[[int], None]
) -> ShardDamage | None:
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
                return ShardDamage(key, f"the bytes from {start + at} on are not what was prepared")
            chunk += 1
        tell(len(view))
    return None
