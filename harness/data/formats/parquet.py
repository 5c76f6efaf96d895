"""Parquet: an item is a row. A read of a file covers a row group, and the footer that describes it.

A row group is a shard of the index, and the footer is a shard without items. Needs pyarrow for
indexing and reading, but not for proving what was read.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from harness.core.world import BadInput
from harness.data.card import Card, CorpusCorrupt
from harness.data.chunk_reader import CACHE_NBYTES, Chunks
from harness.data.formats.format import (
    ForeignFile,
    ForeignFiles,
    ForeignFormat,
    IndexSettings,
    ItemReader,
    SourceFolder,
)
from harness.data.formats.streamed_file import FilePass
from harness.data.prepare.documents import flat_fields
from harness.data.prepare.units import FileByRanges, needed

CHUNK_NBYTES = 4 << 20  # large, since a row group is read whole
TAIL_NBYTES = 8  # after the footer: its length, and the magic


def _find(folder: SourceFolder, asked: IndexSettings) -> ForeignFiles | None:
    keys = folder.ending(".parquet")
    return ForeignFiles(tuple(folder.sized(keys))) if keys else None


def _scan(passing: FilePass, file: ForeignFile, found: ForeignFiles, asked: IndexSettings) -> None:
    parquet, arrow = (
        needed(name, "pyarrow", passing.url) for name in ("pyarrow.parquet", "pyarrow")
    )
    try:
        with passing.opened() as stream:
            meta = parquet.read_metadata(stream)
    except arrow.ArrowException as e:
        raise BadInput(f"{passing.url}: wanted a Parquet file, found none ({e}); restore it") from e
    groups = [meta.row_group(i) for i in range(meta.num_row_groups)]
    footer = file.nbytes - TAIL_NBYTES - meta.serialized_size
    starts = [min(map(_start, map(group.column, range(group.num_columns)))) for group in groups]
    if starts != sorted(starts) or footer < max([0, *starts]):
        raise BadInput(f"{passing.url}: wanted row groups one after the other, found others")
    for group, end in zip(groups, [*starts[1:], footer], strict=bool(groups)):
        passing.close(group.num_rows, end=end)
    passing.close(0)


def _start(column: Any) -> int:
    """Return the byte of the file at which a column of a row group begins."""
    pages = (column.dictionary_page_offset, column.data_page_offset)
    return min(int(at) for at in pages if at)


class _HeldPieces(FileByRanges):
    """A file of which some pieces are present, as (start, bytes), with zeros between them."""

    def __init__(self, pieces: list[tuple[int, bytes]]):
        super().__init__(max(start + len(data) for start, data in pieces))
        self._pieces = pieces

    def fill(self, start: int, view: memoryview) -> None:
        end = start + len(view)
        view[:] = bytes(len(view))
        for at, data in self._pieces:
            first, last = max(at, start), min(at + len(data), end)
            if first < last:
                view[first - start : last - start] = data[first - at : last - at]


class _RowGroups:
    """Row groups as tables, the most recent ones kept: up to `CACHE_NBYTES` of them, at least
    one."""

    def __init__(self, chunks: Chunks):
        self._chunks, self._index = chunks, chunks.index
        self._parquet = needed("pyarrow.parquet", "pyarrow", chunks.where)
        self._held: OrderedDict[int, Any] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()
        keys = [place.key for place in self._index.places]
        self._first = {key: shard for shard, key in reversed(list(enumerate(keys)))}
        self._footer = {key: shard for shard, key in enumerate(keys)}

    def row(self, item: int, place: tuple[int, int]) -> dict[str, bytes]:
        index = self._index
        shard = index.shard_of_item(item)
        with self._lock:
            if shard in self._held:
                self._held.move_to_end(shard)
            else:
                self._held[shard] = table = self._read(shard)
                self._nbytes += table.nbytes
                while len(self._held) > 1 and self._nbytes > CACHE_NBYTES:
                    self._nbytes -= self._held.popitem(last=False)[1].nbytes
            table = self._held[shard]
        (row,) = table.slice(item - int(index.item_starts[shard]), 1).to_pylist()
        return dict(flat_fields(row))

    def _read(self, shard: int) -> Any:
        key = self._index.places[shard].key
        pieces = [self._piece(one) for one in (shard, self._footer[key])]
        with self._parquet.ParquetFile(_HeldPieces(pieces)) as file:
            table = file.read_row_group(shard - self._first[key])
        if table.num_rows != int(self._index.shards["items"][shard]):
            raise CorpusCorrupt(
                f"{self._index.told(shard, self._chunks.where)}: wanted the rows of the index"
            )
        return table

    def _piece(self, shard: int) -> tuple[int, bytes]:
        begin, end = (int(at) for at in self._index.shard_starts[shard : shard + 2])
        self._chunks.ahead([(begin, end)])
        return self._index.places[shard].start, self._chunks.read(begin, end)


def _opened(card: Card, chunks: Chunks) -> ItemReader:
    return _RowGroups(chunks).row


PARQUET = ForeignFormat("parquet", _find, _scan, _opened, CHUNK_NBYTES)
