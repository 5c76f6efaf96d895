"""MDS, the format of MosaicML's streaming: shards that `index.json` names, each of which begins
with the places of its samples. A sample is its columns' bytes, after the sizes of those columns
that have no fixed size.

As mosaicml-streaming 0.13 writes it (version 2 of the format).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from harness.core.world import BadInput
from harness.data.card import Card, CorpusCorrupt, FieldCard
from harness.data.chunk_reader import Chunks
from harness.data.formats.format import (
    INDEX,
    U32,
    EncodedRecord,
    ForeignFile,
    ForeignFiles,
    ForeignFormat,
    IndexSettings,
    ItemReader,
    SourceFolder,
    refused,
    scan_offsets,
    split_values,
)
from harness.data.formats.streamed_file import FilePass


def _find(folder: SourceFolder, asked: IndexSettings) -> ForeignFiles | None:
    shards = folder.index.get("shards")
    if not isinstance(shards, list):
        return None
    where = f"{folder.store.url}/{INDEX}"
    try:
        rows = [_row(row, where) for row in shards]
        fields = [_fields(row) for row in shards]
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as e:
        raise BadInput(f"{where}: wanted the index of an MDS dataset, found none: {e!r}") from e
    if len(set(fields)) > 1:
        raise refused(where, "shards whose columns differ")
    files = [
        replace(file, items=items)
        for file, (_, items) in zip(folder.sized([key for key, _ in rows]), rows, strict=True)
    ]
    return ForeignFiles(tuple(files), fields=fields[0] if fields else ())


def _row(row: dict[str, Any], where: str) -> tuple[str, int]:
    """Return (key, samples) of a shard. Raises BadInput."""
    if row["format"] != "mds" or row["version"] != 2:
        raise refused(where, f"shards of the format {row['format']!r}, version {row['version']!r}")
    if row["compression"] or row["zip_data"]:
        raise refused(where, f"compressed shards ({row['compression']})")
    return str(row["raw_data"]["basename"]), _count(row["samples"])


def _fields(row: dict[str, Any]) -> tuple[FieldCard, ...]:
    """Return a shard's columns. Raises what a wrong index makes Python raise."""
    names, encodings, sizes = row["column_names"], row["column_encodings"], row["column_sizes"]
    if not all(isinstance(text, str) for text in (*names, *encodings)):
        raise TypeError("a column's name or encoding is no text")
    if not len(names) == len(encodings) == len(sizes):
        raise ValueError(f"{len(names)} names of columns, {len(encodings)} encodings")
    if len(set(names)) != len(names):
        raise ValueError("two columns of one name")
    return tuple(
        FieldCard(name, encoding, _count(size or 0))
        for name, encoding, size in zip(names, encodings, sizes, strict=True)
    )


def _count(value: Any) -> int:
    """Return a number of samples or bytes. Raises TypeError, ValueError."""
    if type(value) is not int:
        raise TypeError(f"wanted a whole number, found {str(value)[:40]!r}")
    if not 0 <= value < 1 << 48:
        raise ValueError(f"wanted a number that is not negative and possible, found {value:.3g}")
    return value


def _scan(passing: FilePass, file: ForeignFile, found: ForeignFiles, asked: IndexSettings) -> None:
    scan_offsets(passing, file)


def _opened(card: Card, chunks: Chunks) -> ItemReader:
    fixed = [one.nbytes for one in card.fields]
    loose = [i for i, nbytes in enumerate(fixed) if not nbytes]
    head = U32.itemsize * len(loose)

    def read(item: int, place: tuple[int, int]) -> dict[str, bytes]:
        data = chunks.read(*place)
        if len(data) < head:
            raise CorpusCorrupt(f"sample {item}: wanted the sizes of its columns, found {data!r}")
        sizes = list(fixed)
        for i, size in zip(loose, np.frombuffer(data, U32, len(loose)).tolist(), strict=True):
            sizes[i] = size
        return EncodedRecord(card.fields, split_values(data[head:], sizes, f"sample {item}"))

    return read


MDS = ForeignFormat("mds", _find, _scan, _opened, is_sure=True)
