"""Documents and records of a unit's files, in an order that the files alone decide."""

from __future__ import annotations

import functools
import gzip
import json
import lzma
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from harness.core.dotted import imported, with_options
from harness.core.world import BadInput
from harness.data.card import RECORDS
from harness.data.sources import (
    FUNCTION,
    Extent,
    SourceFile,
    decompressed,
    needed,
    opened,
    uncompressed,
)

Fields: TypeAlias = dict[str, bytes]
# a text, a record, or ids of tokens that a function made itself
Document: TypeAlias = "str | Fields | np.ndarray[Any, Any]"
READ_NBYTES = 1 << 20
ROWS = 1024  # of a table that are in memory together
# what packages say of a file that is none of theirs, or was cut
DAMAGED = (EOFError, gzip.BadGzipFile, lzma.LZMAError, tarfile.TarError, zlib.error)
DEFAULT_FIELDS = {"jsonl": "text", "parquet": "text", "arrow": "text", "tar": "txt"}


@dataclass(frozen=True)
class DocumentRules:
    """How files become documents. `kind`: tokens or records; `field`: the one with the text ("":
    the usual one); `separator`: what stands between documents of a text file ("": a file is one);
    `errors`: what is done about bytes that are no UTF-8, "strict" or "replace"."""

    kind: str
    field: str = ""
    separator: str = ""
    errors: str = "strict"

    @property
    def may_cut(self) -> bool:
        """Can a reader find the beginning of a document from any place of a text? Not with a
        separator whose end is like its beginning. A text without one is cut at ends of lines."""
        between = self.separator.encode()
        if self.kind == RECORDS:
            return False
        return not any(between.endswith(between[:n]) for n in range(1, len(between)))


def documents(extent: Extent, how: DocumentRules) -> Iterator[Document]:
    """Of a piece of a file: texts, or records. Raises BadInput, OSError, StoreError."""
    try:
        yield from _documents(extent, how)
    except DAMAGED as e:
        raise BadInput(
            f"{extent.file.name}: wanted a whole file of its kind ({extent.file.format}), found "
            f"that it is damaged or something else: {e}"
        ) from e


def _documents(extent: Extent, how: DocumentRules) -> Iterator[Document]:
    kind = extent.file.format
    if kind == "function":
        yield from _of_function(extent, how)
    elif kind in ("parquet", "arrow"):
        for row in _rows(extent, how):
            yield _of_row(row, how, extent.file)
    elif kind == "tar":
        with decompressed(extent.file) as stream:
            for _, record in tar_samples(stream):
                yield record if how.kind == RECORDS else _text_of(record, how, extent.file)
    elif kind == "jsonl":
        for line in _delimited(extent, b"\n"):
            if line.strip():
                yield _of_line(line, how, extent.file)
    elif how.kind == RECORDS:
        within = extent.file.within
        with decompressed(extent.file) as stream:
            ending = PurePosixPath(uncompressed(within)).suffix.lstrip(".") or "data"
            yield {"__key__": within.encode(), ending: stream.read()}
    else:
        for data in _texts(extent, how):
            if data:
                yield _decoded(data, how, extent.file)


# ---- text and lines ------------------------------------------------------------------------------
def _texts(extent: Extent, how: DocumentRules) -> Iterator[bytes]:
    if how.separator:
        yield from _delimited(extent, how.separator.encode())
    elif extent.whole:
        with decompressed(extent.file) as stream:
            yield stream.read()
    else:  # a piece of a large one counts as a document
        yield b"\n".join(_delimited(extent, b"\n"))


def _delimited(extent: Extent, between: bytes) -> Iterator[bytes]:
    """Documents that begin in [start, end) of a file, without what stands between them."""
    if extent.whole:
        with decompressed(extent.file) as stream:
            yield from (data for _, data in _split(stream, 0, between))
        return
    with opened(extent.file) as stream:
        # one begins at `start` exactly if the one before has its end right before it
        at = max(0, extent.start - len(between))
        stream.seek(at)
        found = _split(stream, at, between)
        if extent.start:
            next(found, None)
        for begin, data in found:
            if begin >= extent.end:
                return
            yield data


def _split(stream: BinaryIO, at: int, between: bytes) -> Iterator[tuple[int, bytes]]:
    """(place, document) from here on."""
    held = bytearray()
    looked = 0  # no end of a document begins before it
    while data := stream.read(READ_NBYTES):
        held += data
        begin = 0
        while (end := held.find(between, max(begin, looked))) >= 0:
            yield at + begin, bytes(held[begin:end])
            begin = looked = end + len(between)
        del held[:begin]
        at += begin
        looked = max(0, len(held) - len(between) + 1)
    if held:
        yield at, bytes(held)


def _of_line(line: bytes, how: DocumentRules, file: SourceFile) -> Document:
    if how.kind == RECORDS:
        return {"json": line}
    try:
        row = json.loads(line)
    except ValueError as e:
        raise BadInput(
            f"{file.name}: wanted a JSON object in each line, found {line[:80]!r} ({e})"
        ) from e
    return _field_of(row if isinstance(row, dict) else {}, how, file)


def _decoded(data: bytes, how: DocumentRules, file: SourceFile) -> str:
    try:
        return data.decode(errors=how.errors)
    except UnicodeDecodeError as e:
        raise BadInput(
            f"{file.name}: wanted UTF-8 text, found {data[e.start : e.start + 8]!r} ({e.reason}); "
            "--errors replace takes it with a sign for what is none"
        ) from e


# ---- tables --------------------------------------------------------------------------------------
def _rows(extent: Extent, how: DocumentRules) -> Iterator[Mapping[str, Any]]:
    file = extent.file
    if file.is_compressed:
        raise BadInput(
            f"{file.name}: wanted a {file.format} file as it is, which can be read from any place "
            "and compresses its columns itself; decompress it"
        )
    arrow = needed("pyarrow", "pyarrow", file.name)
    try:
        yield from _read_rows(extent, how, arrow)
    except (arrow.ArrowInvalid, OSError) as e:
        raise BadInput(f"{file.name}: wanted a whole {file.format} file, found: {e}") from e


def _read_rows(extent: Extent, how: DocumentRules, arrow: Any) -> Iterator[Mapping[str, Any]]:
    file = extent.file
    columns = [_field_name(how, file)] if how.kind != RECORDS else None
    with opened(file) as stream:
        if file.format == "parquet":
            parquet = needed("pyarrow.parquet", "pyarrow", file.name)
            table = parquet.ParquetFile(stream)
            if columns and columns[0] not in table.schema_arrow.names:
                _field_of(dict.fromkeys(table.schema_arrow.names), how, file)
            end = table.num_row_groups if extent.end < 0 else extent.end
            batches = table.iter_batches(ROWS, range(extent.start, end), columns)
        else:
            batches = _arrow(stream, arrow)
        for batch in batches:
            for begin in range(0, len(batch), ROWS):
                yield from batch.slice(begin, ROWS).to_pylist()


def _arrow(stream: BinaryIO, arrow: Any) -> Iterator[Any]:
    """Batches of either kind of Arrow file."""
    try:
        yield from arrow.ipc.open_stream(stream)
    except arrow.ArrowInvalid:
        stream.seek(0)
        table = arrow.ipc.open_file(stream)
        for i in range(table.num_record_batches):
            yield table.get_batch(i)


def _of_row(row: Mapping[str, Any], how: DocumentRules, file: SourceFile) -> Document:
    if how.kind != RECORDS:
        return _field_of(row, how, file)
    return dict(flat_fields(row))


def flat_fields(row: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, bytes]]:
    """Bytes as they are, structures by dotted names (`image.bytes`), all else as JSON."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from flat_fields(value, f"{before}{name}.")
        elif isinstance(value, bytes):
            yield f"{before}{name}", value
        else:
            yield f"{before}{name}", json.dumps(value, default=str, ensure_ascii=False).encode()


# ---- tar -----------------------------------------------------------------------------------------
class _Member(tarfile.TarInfo):
    """A header that is damaged ends a tar file with an error, not as if nothing came behind it."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Any:
        try:
            return super().fromtarfile(archive)
        except _BAD_HEADERS as e:
            at = archive.offset
            raise tarfile.ReadError(f"the header at byte {at}: {e}") from e


_BAD_HEADERS = (
    tarfile.InvalidHeaderError,  # type: ignore[attr-defined]
    tarfile.TruncatedHeaderError,  # type: ignore[attr-defined]
)


def tar_samples(stream: Any) -> Iterator[tuple[tuple[int, int], Fields]]:
    """Of WebDataset: files in a row whose names are alike up to the first dot behind the folder,
    and where they lie in the stream, headers and padding among them. Raises tarfile.TarError."""
    key, sample, begin, end = "", Fields(), 0, 0
    with tarfile.open(fileobj=stream, mode="r|", bufsize=READ_NBYTES, tarinfo=_Member) as tar:
        for member in tar:
            tar.members.clear()  # type: ignore[attr-defined]  # it would keep all, and looks back at none of a stream
            if not member.isreg():
                continue
            folder, _, name = member.name.rpartition("/")
            stem, _, ending = name.partition(".")
            if (found := f"{folder}/{stem}") != key and sample:
                yield (begin, end), sample
                sample = {}
            if not sample:
                key, sample = found, {"__key__": found.lstrip("/").encode()}
                begin = member.offset
            content = tar.extractfile(member)
            assert content is not None  # it is a regular file
            sample[ending or "data"] = content.read()
            end = tar.offset  # behind its padding
    if sample:
        yield (begin, end), sample


def _text_of(record: Fields, how: DocumentRules, file: SourceFile) -> str:
    return _decoded(_field(record, how, file), how, file)


# ---- a function ----------------------------------------------------------------------------------
def _of_function(extent: Extent, how: DocumentRules) -> Iterator[Document]:
    """`function(part, parts)` gives the documents of that part: texts, records, or token ids."""
    for found in function_of(extent.file)(extent.start, extent.end):
        if isinstance(found, Mapping):
            record = {str(name): bytes(value) for name, value in found.items()}
            yield record if how.kind == RECORDS else _text_of(record, how, extent.file)
        elif how.kind == RECORDS:
            raise BadInput(
                f"{extent.file.name}: wanted records (a dict of bytes by name), found "
                f"{type(found).__name__}"
            )
        elif isinstance(found, bytes):
            yield _decoded(found, how, extent.file)
        else:
            yield found if isinstance(found, str) else np.asarray(found)


@functools.cache
def function_of(file: SourceFile) -> Any:
    """Raises BadInput."""
    path, _, query = file.name.removeprefix(FUNCTION).partition("?")
    return with_options("source", path, imported("source", path), query, 2)


# ---- fields --------------------------------------------------------------------------------------
def _field_name(how: DocumentRules, file: SourceFile) -> str:
    return how.field or DEFAULT_FIELDS.get(file.format, "text")


def _field(row: Mapping[str, Any], how: DocumentRules, file: SourceFile) -> Any:
    name = _field_name(how, file)
    if row.get(name) is None:
        found = ", ".join(sorted(map(str, row))) or "none"
        raise BadInput(
            f"{file.name}: wanted the field {name!r} in each document, found "
            f"{found if name not in row else 'one that is null'}; name another: --field NAME"
        )
    return row[name]


def _field_of(row: Mapping[str, Any], how: DocumentRules, file: SourceFile) -> str:
    found = _field(row, how, file)
    if isinstance(found, bytes):
        return _decoded(found, how, file)
    if not isinstance(found, str):
        raise BadInput(
            f"{file.name}: wanted text in the field {_field_name(how, file)!r}, found "
            f"{type(found).__name__}"
        )
    return found


def pieces(text: str, most: int) -> Iterable[str]:
    """A long text in pieces of at most so many letters, cut behind the last line end in each, or
    the last space, if there is one: what a tokenizer is given at once."""
    at = 0
    while len(text) - at > most:
        end = max(text.rfind("\n", at, at + most), at - 1) + 1
        if end <= at:
            end = max(text.rfind(" ", at, at + most), at)
        if end <= at:
            end = at + most
        yield text[at:end]
        at = end
    yield text[at:]
