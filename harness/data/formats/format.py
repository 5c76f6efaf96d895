"""The interface of foreign formats: what indexing and reading need from one.

    find    which files of a folder are the dataset, and what its card says about them
    scan    one pass over a file: its shards, and where each item begins and ends
    opened  a reader that returns an item of a corpus as a record

A format knows nothing of hashes and jobs. Nothing is ever unpickled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from harness.core.world import BadInput
from harness.data.card import (
    CHUNK_NBYTES,
    MOST_CARD_NBYTES,
    RECORDS,
    Card,
    CorpusCorrupt,
    FieldCard,
)
from harness.data.chunk_reader import Chunks
from harness.data.formats.streamed_file import FilePass
from storage.canonical_json import BadObject, parsed
from storage.errors import NotFound
from storage.stores.objects import ObjectStore, size_each

INDEX = "index.json"  # in datasets that have one
U32 = np.dtype("<u4")
# (number of the item, its bytes [begin, end) of the row) -> its fields
ItemReader: TypeAlias = Callable[[int, tuple[int, int]], dict[str, bytes]]


@dataclass(frozen=True)
class IndexSettings:
    """Everything that decides an index, except the files. `layout`: a format; "" means detected.
    For tokens: `eos` (-1 means unknown), and `dtype` for files that do not state it.
    `chunk_nbytes`: 0 means the format's default."""

    layout: str = ""
    eos: int = -1
    dtype: str = ""
    chunk_nbytes: int = 0


@dataclass(frozen=True)
class ForeignFile:
    """A file of a dataset. `items`: their number according to the dataset's own index (-1 means
    unknown); `start`: the byte at which they begin, as far as that is known before the scan."""

    key: str
    nbytes: int
    items: int = -1
    start: int = 0


@dataclass(frozen=True)
class ForeignFiles:
    """The files of a dataset that a format has found in a folder, in their order."""

    files: tuple[ForeignFile, ...]
    kind: str = RECORDS
    fields: tuple[FieldCard, ...] = ()
    dtype: str = ""


@dataclass(frozen=True)
class SourceFolder:
    """A foreign folder, of which only the objects `keys` count."""

    store: ObjectStore
    keys: tuple[str, ...]

    @functools.cached_property
    def index(self) -> dict[str, Any]:
        """The folder's index.json; {} if there is none, or if it is no JSON object."""
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
        """Return the files with their sizes. Raises BadInput for one that is missing."""
        found = []
        for key, nbytes in size_each(self.store, keys):
            if nbytes is None:
                raise BadInput(
                    f"{self.store.url}/{key}: wanted a file of the dataset, found none; restore it"
                )
            found.append(ForeignFile(key, nbytes))
        return found


class EncodedRecord(dict[str, bytes]):
    """A record's fields as bytes; `encodings`: the encoding of each, in its format's terms."""

    def __init__(self, fields: Sequence[FieldCard], values: Sequence[bytes]):
        super().__init__(zip((one.name for one in fields), values, strict=True))
        self.encodings = {one.name: one.encoding for one in fields}


@dataclass(frozen=True)
class ForeignFormat:
    """A foreign format. `find` returns None if a folder has no dataset of this format, and raises
    BadInput for one that cannot be read. `scan` raises BadInput for a file of another kind.
    `chunk_nbytes`: the chunk size that suits it. `is_sure`: a folder in which it was found holds no
    other."""

    name: str
    find: Callable[[SourceFolder, IndexSettings], ForeignFiles | None]
    scan: Callable[[FilePass, ForeignFile, ForeignFiles, IndexSettings], None]
    opened: Callable[[Card, Chunks], ItemReader] | None = None  # for records
    chunk_nbytes: int = CHUNK_NBYTES
    is_sure: bool = False


def refused(where: str, found: str) -> BadInput:
    """Return the error for a dataset that cannot be read in place."""
    return BadInput(
        f"{where}: wanted files that can be read by ranges, found {found}; write the dataset again "
        "without it, or make a corpus of it: `harness data prepare --records "
        "python:pkg.module:function DEST`, with a function that gives its records"
    )


def scan_offsets(passing: FilePass, file: ForeignFile) -> None:
    """Scan a file that begins with the number of its items and the start of each and the end of the
    last, uint32 (n + 2,). Raises BadInput."""
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


def split_values(data: bytes, sizes: Sequence[int], where: str) -> list[bytes]:
    """Return the values that lie one after the other. Raises CorpusCorrupt if they do not fill the
    bytes."""
    if sum(sizes) != len(data):
        raise CorpusCorrupt(f"{where}: wanted values of {sizes} bytes, found {len(data)} in all")
    out, at = [], 0
    for size in sizes:
        out.append(data[at : at + size])
        at += size
    return out
