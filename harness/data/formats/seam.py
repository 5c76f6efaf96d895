"""The seam for formats of others: what indexing asks of one, and what reading asks of it.

    find    which files of a folder are the dataset, and what its card shall say of them
    scan    one file as it passes by: its shards, and where each item begins and ends
    opened  what gives an item of a corpus as a record

A format knows nothing of hashes and jobs. Nothing is ever unpickled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from harness.core.values import BadObject, parsed
from harness.core.world import BadInput
from harness.data.card import (
    CHUNK_NBYTES,
    MOST_CARD_NBYTES,
    RECORDS,
    Card,
    CorpusCorrupt,
    FieldCard,
)
from harness.data.chunks import Chunks
from harness.data.formats.passing import FilePass
from storage.errors import NotFound
from storage.objects import ObjectStore, size_each

INDEX = "index.json"  # of datasets that have one
U32 = np.dtype("<u4")
# (number of the item, its bytes [begin, end) of the row) -> its fields
ItemReader: TypeAlias = Callable[[int, tuple[int, int]], dict[str, bytes]]


@dataclass(frozen=True)
class IndexSettings:
    """All that decides what an index is, but for the files. `layout`: a format, "": it is found
    out. Of tokens: `eos` (-1: not known), `dtype` of files that do not say it. `chunk_nbytes`: 0:
    what suits the format."""

    layout: str = ""
    eos: int = -1
    dtype: str = ""
    chunk_nbytes: int = 0


@dataclass(frozen=True)
class ForeignFile:
    """`items`: as the dataset's own index says, -1: it does not; `start`: where they begin, as far
    as that is known before."""

    key: str
    nbytes: int
    items: int = -1
    start: int = 0


@dataclass(frozen=True)
class ForeignFiles:
    """What a format has found in a folder: the files in their order."""

    files: tuple[ForeignFile, ...]
    kind: str = RECORDS
    fields: tuple[FieldCard, ...] = ()
    dtype: str = ""


@dataclass(frozen=True)
class SourceFolder:
    """A folder of others, of which only the objects `keys` count."""

    store: ObjectStore
    keys: tuple[str, ...]

    @functools.cached_property
    def index(self) -> dict[str, Any]:
        """Its index.json; {}: there is none, or it is something else."""
        if INDEX not in self.keys:
            return {}
        try:
            found = parsed(self.store.get(INDEX), most_nbytes=MOST_CARD_NBYTES)
        except (NotFound, BadObject):
            return {}
        return found if isinstance(found, dict) else {}

    def ending(self, *endings: str) -> list[str]:
        return [key for key in self.keys if key.lower().endswith(endings)]

    def sized(self, keys: Sequence[str]) -> list[ForeignFile]:
        """With their bytes. Raises BadInput for one that is missing."""
        found = []
        for key, nbytes in size_each(self.store, keys):
            if nbytes is None:
                raise BadInput(
                    f"{self.store.url}/{key}: wanted a file of the dataset, found none; restore it"
                )
            found.append(ForeignFile(key, nbytes))
        return found


class EncodedRecord(dict[str, bytes]):
    """A record's fields as bytes; `encodings`: how each is encoded, in its format's words."""

    def __init__(self, fields: Sequence[FieldCard], values: Sequence[bytes]):
        super().__init__(zip((one.name for one in fields), values, strict=True))
        self.encodings = {one.name: one.encoding for one in fields}


@dataclass(frozen=True)
class ForeignFormat:
    """`find`: None if a folder has none of this format; raises BadInput for what cannot be read.
    `scan`: raises BadInput for a file that is no such. `chunk_nbytes`: that suit it. `is_sure`: a
    folder in which it was found has no other."""

    name: str
    find: Callable[[SourceFolder, IndexSettings], ForeignFiles | None]
    scan: Callable[[FilePass, ForeignFile, ForeignFiles, IndexSettings], None]
    opened: Callable[[Card, Chunks], ItemReader] | None = None  # of records
    chunk_nbytes: int = CHUNK_NBYTES
    is_sure: bool = False


def refused(where: str, found: str) -> BadInput:
    """Of a dataset that cannot be read where it lies."""
    return BadInput(
        f"{where}: wanted files that can be read by ranges, found {found}; write the dataset again "
        "without it, or make a corpus of it: `harness data prepare --records "
        "python:pkg.module:function DEST`, with a function that gives its records"
    )


def scan_offsets(passing: FilePass, file: ForeignFile) -> None:
    """A file that begins with the number of its items and where each begins, and the last one ends:
    uint32 (n + 2,). Raises BadInput."""
    n = int.from_bytes(passing.read(4), "little")
    room = (file.nbytes - 4) // 4 - 1
    if n == file.items and n <= room:
        at = np.frombuffer(passing.read(4 * (n + 1)), U32).astype(np.int64)
        if (np.diff(at) >= 0).all() and 4 * (n + 2) <= at[0] and at[-1] <= file.nbytes:
            if at[-1] < file.nbytes:
                raise refused(passing.url, "more behind its items, such as rows in Arrow")
            passing.close(n, np.stack([at[:-1], at[1:]], axis=1))
            return
    raise BadInput(
        f"{passing.url}: wanted {file.items} items that fill the file to its end, as {INDEX} says, "
        f"found another file (it says {n} items; {file.nbytes} bytes); restore it"
    )


def cut(data: bytes, sizes: Sequence[int], where: str) -> list[bytes]:
    """Values that lie one behind the other. Raises CorpusCorrupt if they do not fill the bytes."""
    if sum(sizes) != len(data):
        raise CorpusCorrupt(f"{where}: wanted values of {sizes} bytes, found {len(data)} in all")
    out, at = [], 0
    for size in sizes:
        out.append(data[at : at + size])
        at += size
    return out
