"""Verification of a whole corpus against its card, and the documents of a split: all of them in
order, or the one around a token.

Documents that exclusion lists leave out are included, since their bytes are still there. Memory
holds one document and a block of a few MiB.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.core.world import BadInput
from harness.data.card import DTYPES, TOKENS, Card, CorpusIndex, hash_of, index_of, shard_key
from harness.data.corpus import CorpusReader, ForeignShards, shards_of
from harness.data.datasets import Records
from harness.data.prepare.tokenizers import TokenIds, Tokenizer, tokenizer_of
from storage.errors import NotFound
from storage.stores.objects import ObjectStore, read_into

# Verification of a whole corpus against its card, byte for byte.

AT_ONCE = 8
BLOCK_NBYTES = 8 << 20  # bytes of one read


@dataclass(frozen=True)
class ShardDamage:
    """Damage of one object."""

    key: str
    what: str


def damaged(
    store: ObjectStore,
    card: Card,
    tell: Callable[[int], None] = lambda n: None,
    source: str = "",
) -> Iterator[ShardDamage]:
    """Yield all damage, shard by shard. `tell` is called with the bytes that were read; `source`:
    see `CorpusReader`. Raises CorpusCorrupt for an index that is damaged, StoreError."""
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
    """Return what is wrong with a shard's bytes; "" if nothing."""
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


SCAN_NBYTES = 4 << 20  # bytes of one read of a scan
AROUND = 4096  # tokens read at once when searching for the ends of a document


class TokenRow:
    """The tokens of a split as one row, including those that end documents. Raises BadInput,
    CorpusCorrupt, StoreError."""

    def __init__(self, url: str, split: str):
        self._reader = CorpusReader(url, split, TOKENS)
        self.card = self._reader.card
        self._dtype = DTYPES[self.card.dtype]
        if self.card.eos < 0:
            raise BadInput(
                f"{url}: wanted a corpus that says where its documents end, found that it does not"
            )

    def __len__(self) -> int:
        return self._reader.split.items

    def read(self, start: int, end: int) -> TokenIds:
        """Return the tokens [start, end)."""
        size = self._dtype.itemsize
        here = start * size, end * size
        self._reader.chunks.ahead([here])
        return np.frombuffer(self._reader.chunks.read(*here), self._dtype)

    def documents(self) -> Iterator[tuple[int, TokenIds]]:
        """Yield (first token, ids without the end token) of each document, in order."""
        block, held, begin = SCAN_NBYTES // self._dtype.itemsize, list[TokenIds](), 0
        for start in range(0, len(self), block):
            tokens, at = self.read(start, min(start + block, len(self))), 0
            for end in np.flatnonzero(tokens == self.card.eos).tolist():
                held.append(tokens[at:end])
                yield begin, np.concatenate(held)
                held, at, begin = [], end + 1, start + end + 1
            held.append(tokens[at:])
        if begin < len(self):  # foreign files need not end with an end token
            yield begin, np.concatenate(held)

    def around(self, token: int) -> tuple[int, int]:
        """Return [start, end) of the document that contains this token; its end token belongs to
        it, but `end` does not include it. Raises BadInput."""
        if not 0 <= token < len(self):
            raise BadInput(f"token {token}: wanted 0 to {len(self) - 1}")
        low, start = token, 0
        while low and not start:
            before = max(0, low - AROUND)
            ends = np.flatnonzero(self.read(before, low) == self.card.eos)
            start, low = before + int(ends[-1]) + 1 if len(ends) else 0, before
        for high in range(token, len(self), AROUND):
            ends = np.flatnonzero(self.read(high, min(high + AROUND, len(self))) == self.card.eos)
            if len(ends):
                return start, high + int(ends[0])
        return start, len(self)


def tokenizer_here(card: Card, what: str) -> Tokenizer:
    """Return the corpus' own tokenizer. `what` names the caller in errors. Raises BadInput if this
    computer has no tokenizer of that name with the same hash."""
    found = tokenizer_of(card.tokenizer, str(card.eos))
    if found.hash != card.tokenizer_hash:
        raise BadInput(
            f"{what}: wanted the tokenizer {card.tokenizer} of the corpus "
            f"({card.tokenizer_hash}), found another of that name here ({found.hash})"
        )
    return found


def each_record(records: Records) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (number, fields) of each record in order. `records` must decode nothing and leave
    nothing out."""
    size = records.block_items
    for start in range(0, len(records), size):
        here: Sequence[int] = range(start, min(start + size, len(records)))
        records.read_ahead(here)
        yield from ((i, records[i]) for i in here)
