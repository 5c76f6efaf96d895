"""The card and the index of a corpus, which whoever reads it begins with.

An index has 16 bytes for each chunk, so that of a large corpus is large itself. It is known by its
hash, as chunks are, so it is kept in the node's cache for the other processes of the node, and for
those that a resize starts.
"""

from __future__ import annotations

from harness.core.world import BadInput
from harness.data.card import CARD, Card, CorpusCorrupt, CorpusIndex, SplitCard, index_key
from harness.data.node_cache import NodeCache
from storage.chunks import is_chunk
from storage.errors import NotFound
from storage.objects import ObjectStore
from storage.parts import BLAKE3

KEPT_NBYTES = 256 << 10  # an index that is as large; a smaller one is here as soon as its size is


def card_of(store: ObjectStore) -> Card:
    """Raises BadInput if there is no corpus, CorpusCorrupt, StoreError."""
    try:
        data = store.get(CARD)
    except NotFound:
        raise BadInput(
            f"{store.url}: wanted a corpus, found no {CARD}; `harness data prepare SOURCES... "
            f"{store.url}` makes one, and goes on with one that was interrupted"
        ) from None
    return Card.decode(data, f"{store.url}/{CARD}")


def index_of(
    store: ObjectStore, card: Card, split: SplitCard, cache: NodeCache | None = None
) -> CorpusIndex:
    """Raises CorpusCorrupt, StoreError."""
    key = index_key(split.index)
    try:
        data = _index(store, key, split, card.chunk_nbytes, cache)
    except NotFound as e:
        raise CorpusCorrupt(f"{store.url}/{key}: wanted an index, found none") from e
    return CorpusIndex.decode(data, split, card.chunk_nbytes, f"{store.url}/{key}")


def _index(
    store: ObjectStore, key: str, split: SplitCard, chunk_nbytes: int, cache: NodeCache | None
) -> bytes:
    """Raises NotFound, StoreError."""
    least_nbytes = 16 * split.nbytes // chunk_nbytes
    if cache is None or least_nbytes < KEPT_NBYTES:
        return store.get(key)
    id = f"{BLAKE3}{split.index}-{store.size(key)}"
    with cache.turn([id]):
        if (data := cache.get(id)) is None or not is_chunk(id, data):
            data = store.get(key)
            if is_chunk(id, data):  # else who decodes it says what is wrong
                cache.put({id: data})
    return data
