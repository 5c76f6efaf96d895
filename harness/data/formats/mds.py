"""MDS, the format of MosaicML's streaming: shards that `index.json` names, each with where its
samples begin in front; a sample is its columns' bytes behind the sizes of those that have no fixed
one.

As mosaicml-streaming 0.13 writes it (version 2 of the format).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from harness.core.world import BadInput
from harness.data.card import Card, CorpusCorrupt, FieldCard
from harness.data.chunks import Chunks
from harness.data.formats.passing import FilePass
from harness.data.formats.seam import (
    INDEX,
    U32,
    EncodedRecord,
    ForeignFile,
    ForeignFiles,
    ForeignFormat,
    IndexSettings,
    ItemReader,
    SourceFolder,
    cut,
    refused,
    scan_offsets,
)


def _find(folder: SourceFolder, asked: IndexSettings) -> ForeignFiles | None:
    shards = folder.index.get("shards")
    if not isinstance(shards, list):
        return None
    where = f"{folder.store.url}/{INDEX}"
    try:
        rows = [_row(row, where) for row in shards]
        fields = [
            tuple(map(FieldCard, row["column_names"], row["column_encodings"], _sizes(row)))
            for row in shards
        ]
    except (KeyError, TypeError, AttributeError) as e:
        raise BadInput(f"{where}: wanted the index of an MDS dataset, found none: {e!r}") from e
    if len(set(fields)) > 1:
        raise refused(where, "shards whose columns differ")
    files = [
        replace(file, items=items)
        for file, (_, items) in zip(folder.sized([key for key, _ in rows]), rows, strict=True)
    ]
    return ForeignFiles(tuple(files), fields=fields[0] if fields else ())


def _row(row: dict[str, Any], where: str) -> tuple[str, int]:
    """(key, samples) of a shard. Raises BadInput."""
    if row["format"] != "mds" or row["version"] != 2:
        raise refused(where, f"shards of the format {row['format']!r}, version {row['version']!r}")
    if row["compression"] or row["zip_data"]:
        raise refused(where, f"compressed shards ({row['compression']})")
    return str(row["raw_data"]["basename"]), int(row["samples"])


def _sizes(row: dict[str, Any]) -> list[int]:
    return [int(size or 0) for size in row["column_sizes"]]


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
        return EncodedRecord(card.fields, cut(data[head:], sizes, f"sample {item}"))

    return read


MDS = ForeignFormat("mds", _find, _scan, _opened, is_sure=True)
