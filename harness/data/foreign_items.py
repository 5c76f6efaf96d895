"""Items of a corpus that consists of files of others: where each lies, and its fields."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from harness.core.batch import sample_hash
from harness.core.world import BadInput
from harness.data.card import Card, CorpusCorrupt, Int64Array
from harness.data.chunks import Chunks
from harness.data.formats import FORMATS
from harness.data.formats.seam import ItemReader

PLACE = np.dtype("<u8")  # a table of items has two for each: where it begins and ends in the row


class ForeignItems:
    """Where the items of others' files lie, and what they are. Any thread may call it. Raises
    BadInput for a format of a newer version."""

    def __init__(self, card: Card, chunks: Chunks):
        index = chunks.index
        self.chunks = chunks
        self._table = int(index.shard_starts[len(index.places)])  # where it begins in the row
        self._has_table = len(index.shards) > len(index.places)
        if card.layout not in FORMATS:
            raise BadInput(
                f"{chunks.where}: wanted files in one of the formats {', '.join(FORMATS)}, found "
                f"{card.layout!r}; update the package here"
            )
        self._opened = FORMATS[card.layout].opened
        self._card = card

    @functools.cached_property
    def _read(self) -> ItemReader:
        assert self._opened is not None  # it has records
        return self._opened(self._card, self.chunks)

    def record(self, item: int, place: tuple[int, int]) -> dict[str, bytes]:
        """Raises CorpusCorrupt, StoreError; BadInput for a package that is missing."""
        return self._read(item, place)

    def ranges(self, items: Sequence[int]) -> list[tuple[int, int]]:
        """The bytes of the row in which each lies: its own, or those of all that are read
        together."""
        index = self.chunks.index
        if not self._has_table:
            shards = [index.shard_of_item(item) for item in items]
            return [(int(index.shard_starts[i]), int(index.shard_starts[i + 1])) for i in shards]
        size = 2 * PLACE.itemsize
        entries = [(self._table + item * size, self._table + (item + 1) * size) for item in items]
        self.chunks.ahead(entries)
        out = []
        for item, entry in zip(items, entries, strict=True):
            begin, end = np.frombuffer(self.chunks.read(*entry), PLACE).tolist()
            if not begin <= end <= self._table:
                raise CorpusCorrupt(f"{self.chunks.where}: item {item} ends before it begins")
            out.append((begin, end))
        return out

    def read_ahead(self, items: Sequence[int]) -> None:
        """Several reads at once; what is read together is fetched with the first of it."""
        if self._has_table:
            self.chunks.ahead(self.ranges(items))

    def apart(self, contents: Int64Array, items: Sequence[int]) -> Int64Array:
        """Contents of items that are read together, each with its number."""
        if self._has_table:
            return contents
        return sample_hash(np.array(items, np.int64), contents).view(np.int64)
