"""Foreign formats that are read in place: a small file for each, behind one interface
(`format.py`)."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from harness.core.batch import sample_hash
from harness.core.world import BadInput
from harness.data.card import Card, CorpusCorrupt, Int64Array
from harness.data.chunk_reader import Chunks
from harness.data.formats.format import ForeignFormat, ItemReader
from harness.data.formats.litdata import LITDATA
from harness.data.formats.mds import MDS
from harness.data.formats.parquet import PARQUET
from harness.data.formats.tar import TAR
from harness.data.formats.token_files import MEGATRON, TOKEN_FILES

# in the order of detection: formats that an index.json identifies come first
FORMATS: dict[str, ForeignFormat] = {
    one.name: one for one in (MDS, LITDATA, MEGATRON, TAR, PARQUET, TOKEN_FILES)
}


# Items of a corpus that consists of foreign files: the place of each, and its fields.

PLACE = np.dtype("<u8")  # a table of items holds two for each: its begin and end in the row


class ForeignItems:
    """The places and the contents of items in foreign files. Any thread may call it. Raises
    BadInput for a format of a newer version."""

    def __init__(self, card: Card, chunks: Chunks):
        index = chunks.index
        self.chunks = chunks
        self._table = int(index.shard_starts[len(index.places)])  # start of the table in the row
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
        assert self._opened is not None  # the corpus has records, so its format can read them
        return self._opened(self._card, self.chunks)

    def record(self, item: int, place: tuple[int, int]) -> dict[str, bytes]:
        """Return the fields of an item. Raises CorpusCorrupt, StoreError; BadInput for a missing
        package."""
        return self._read(item, place)

    def ranges(self, items: Sequence[int]) -> list[tuple[int, int]]:
        """Return the byte ranges of the row in which the items lie: each item's own, or its whole
        shard where items can only be read together."""
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
        """Fetch these items with several reads at once. Items that are read together are not
        fetched ahead; their first read fetches them."""
        if self._has_table:
            self.chunks.ahead(self.ranges(items))

    def apart(self, contents: Int64Array, items: Sequence[int]) -> Int64Array:
        """Return content hashes that differ per item: items that are read together are hashed with
        their numbers."""
        if self._has_table:
            return contents
        return sample_hash(np.array(items, np.int64), contents).view(np.int64)
