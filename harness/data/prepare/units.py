"""The sources of a corpus: files anywhere, cut into units of work.

A unit is some files, or a piece of a large one. Its number and its content follow from the names
and sizes of the sources alone, so any number of processes and machines makes the same shards.
"""

from __future__ import annotations

import fnmatch
import functools
import glob
import importlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from harness.core.world import BadInput
from storage.errors import NotFound
from storage.stores.objects import ObjectStore, read_into, size_each
from storage.stores.store_urls import open_store

FUNCTION = "python:"  # prefix of a source that is a function: python:pkg.module:function?name=value
BUFFER_NBYTES = 4 << 20  # buffer of a file that is read from a store
ENDINGS = {  # by the end of a name without the compression's; others are text
    "jsonl": (".jsonl", ".ndjson"),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
    "tar": (".tar",),
}
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
BESIDE_ARROW = ("dataset_info.json", "state.json", "dataset_dict.json")  # datasets' metadata


@dataclass(frozen=True)
class SourceFile:
    """A source file. `name`: a path or a URL; for a function `FUNCTION` and its path. `root`: the
    folder that was named, if the file lies in one."""

    name: str
    nbytes: int
    root: str = ""

    @property
    def within(self) -> str:
        """The file's path in the folder that was named, or its own name."""
        beyond = self.name.removeprefix(self.root.rstrip("/") + "/") if self.root else self.name
        return beyond if beyond != self.name else self.name.rpartition("/")[2]

    @functools.cached_property  # read for each document
    def format(self) -> str:
        if self.name.startswith(FUNCTION):
            return "function"
        name = uncompressed(self.name.lower())
        return next((kind for kind, ends in ENDINGS.items() if name.endswith(ends)), "text")

    @property
    def is_compressed(self) -> bool:
        return self.name.lower().endswith(COMPRESSED)


def uncompressed(name: str) -> str:
    """Return the name without the ending of its compression; letter case is kept."""
    ending = next((one for one in COMPRESSED if name.lower().endswith(one)), "")
    return name[: len(name) - len(ending)]


@dataclass(frozen=True)
class Extent:
    """A piece of a file: the bytes [start, end) of text and lines, row groups of Parquet (end -1
    means all), or the part `start` of `end` of a function. `whole`: the piece is all of the
    file."""

    file: SourceFile
    start: int
    end: int
    whole: bool = True

    @property
    def nbytes(self) -> int:
        """Approximate size in bytes, for progress."""
        return self.file.nbytes if self.whole else min(self.end - self.start, self.file.nbytes)


@dataclass(frozen=True)
class WorkUnit:
    number: int
    extents: tuple[Extent, ...]


# ---- which files ---------------------------------------------------------------------------------
def source_files(sources: Sequence[str]) -> list[SourceFile]:
    """Return paths, folders, globs and URLs as files, in the order given, those of one source
    sorted. Raises BadInput, StoreError."""
    out: list[SourceFile] = []
    for source in sources:
        source = source.removeprefix("file://")
        if source.startswith(FUNCTION):
            found = [SourceFile(source, 0)]
        elif "://" in source:
            found = _remote(source)
        else:
            found = _local(source)
        if not found:
            raise BadInput(
                f"{source}: wanted a file, a folder, a glob or a URL of some, found nothing there; "
                "check the spelling"
            )
        if any(file.format == "arrow" for file in found):
            found = [file for file in found if not file.name.endswith(BESIDE_ARROW)]
        out += found
    return out


def _local(source: str) -> list[SourceFile]:
    if Path(source).is_dir():
        root, paths = str(Path(source)), (p for p in Path(source).rglob("*") if p.is_file())
    else:
        root = str(Path(above_pattern(source)))
        paths = (p for p in map(Path, glob.glob(source, recursive=True)) if p.is_file())
    return [SourceFile(str(p), p.stat().st_size, root) for p in sorted(paths)]


def above_pattern(source: str) -> str:
    """Return the folder above the first part of a glob that is a pattern; without a pattern, the
    parent."""
    first = next((i for i, letter in enumerate(source) if letter in "*?["), len(source))
    return source[:first].rpartition("/")[0]


def _remote(source: str) -> list[SourceFile]:
    if not glob.has_magic(source):
        folder, _, name = source.rstrip("/").rpartition("/")
        if not folder.endswith("/"):  # otherwise `name` is a bucket
            try:
                return [SourceFile(source, store_of(folder).size(name))]
            except NotFound:
                pass
        root, pattern = source.rstrip("/"), "*"
    else:
        root = above_pattern(source)
        pattern = source[len(root) + 1 :]
    store = store_of(root)
    found = size_each(store, fnmatch.filter(store.list(""), pattern))
    return [  # for a file that is gone by now, size() raises
        SourceFile(f"{root}/{key}", store.size(key) if nbytes is None else nbytes, root)
        for key, nbytes in found
    ]


@functools.cache
def store_of(url: str) -> ObjectStore:
    return open_store(url)


# ---- units ---------------------------------------------------------------------------------------
def units_of(
    files: Sequence[SourceFile], unit_nbytes: int, cut_text: bool, parts: int
) -> list[WorkUnit]:
    """Return the units of these files. `cut_text`: a large text file may be cut (that needs a
    separator which can be found from any place); `parts`: units of a function. Raises BadInput."""
    units: list[WorkUnit] = []
    together: list[Extent] = []

    def close() -> None:
        if together:
            units.append(WorkUnit(len(units), tuple(together)))
            together.clear()

    for file in files:
        pieces = list(_pieces(file, unit_nbytes, cut_text, parts))
        if len(pieces) > 1 or sum(e.nbytes for e in together) + file.nbytes > unit_nbytes:
            close()
        if len(pieces) == 1:
            together += pieces
            continue
        for piece in pieces:
            together.append(piece)
            close()
    close()
    return units


def _pieces(file: SourceFile, unit_nbytes: int, cut_text: bool, parts: int) -> Iterator[Extent]:
    if file.format == "function":
        for part in range(parts):
            yield Extent(file, part, parts, parts == 1)
        return
    cut = file.nbytes > unit_nbytes and not file.is_compressed
    if cut and file.format == "parquet":
        sizes = row_groups(file)
        start = held = 0
        for group, nbytes in enumerate(sizes):
            if held and held + nbytes > unit_nbytes:
                yield Extent(file, start, group, False)
                start, held = group, 0
            held += nbytes
        yield Extent(file, start, len(sizes), False)
    elif cut and (file.format == "jsonl" or (file.format == "text" and cut_text)):
        for start in range(0, file.nbytes, unit_nbytes):
            yield Extent(file, start, min(start + unit_nbytes, file.nbytes), False)
    else:
        yield Extent(file, 0, -1 if file.format == "parquet" else file.nbytes)


def row_groups(file: SourceFile) -> list[int]:
    """Return the bytes of each row group of a Parquet file. Raises BadInput."""
    parquet = needed("pyarrow.parquet", "pyarrow", file.name)
    with opened(file) as stream:
        found = parquet.ParquetFile(stream).metadata
        return [found.row_group(i).total_byte_size for i in range(found.num_row_groups)]


# ---- reading them --------------------------------------------------------------------------------
class FileByRanges(io.RawIOBase):
    """A seekable file whose bytes are fetched when read. `nbytes`: its size."""

    def __init__(self, nbytes: int):
        super().__init__()
        self._nbytes, self._at = nbytes, 0

    def fill(self, start: int, view: memoryview) -> None:
        """Fill all of `view` with the bytes from `start` on."""
        raise NotImplementedError

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._nbytes}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._nbytes - self._at)]
        if len(view):
            self.fill(self._at, view)
        self._at += len(view)
        return len(view)


class StoredFile(FileByRanges):
    """An object of a store, as a file."""

    def __init__(self, store: ObjectStore, key: str, nbytes: int):
        super().__init__(nbytes)
        self._store, self._key = store, key

    def fill(self, start: int, view: memoryview) -> None:
        """Fill all of `view` from the object. Raises StoreError, OSError."""
        if read_into(self._store, self._key, start, view) < len(view):
            raise OSError(f"{self._store.url}/{self._key}: it became shorter while it was read")


def opened(file: SourceFile) -> BinaryIO:
    """Open the file's raw, possibly compressed bytes; seekable. Raises StoreError, OSError."""
    if "://" not in file.name:
        return open(file.name, "rb")
    folder, _, name = file.name.rpartition("/")
    stored = StoredFile(store_of(folder), name, file.nbytes)
    return io.BufferedReader(stored, BUFFER_NBYTES)


def decompressed(file: SourceFile) -> BinaryIO:
    """Open the file's decompressed content. Raises BadInput."""
    stream, ending = opened(file), Path(file.name.lower()).suffix
    if ending == ".zst":
        found: BinaryIO = needed("zstandard", "zstandard", file.name).open(stream, "rb")
        return found
    if ending in COMPRESSED:
        module = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma"}[ending]
        made: BinaryIO = needed(module, module, file.name).open(stream)
        return made
    return stream


def needed(module: str, package: str, what: str) -> Any:
    """Import an optional package. Raises BadInput that says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise BadInput(
            f"{what}: needs the package {package}, which is not installed here ({e}); "
            f"`pip install {package}`"
        ) from e
