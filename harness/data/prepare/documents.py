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

from harness.core.user_functions import imported, with_options
from harness.core.world import BadInput
from harness.data.card import RECORDS
from harness.data.prepare.units import (
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
# A few MiB that are compressed, or a sparse file in a tar, may stand for more than memory holds.
MOST_DOCUMENT_NBYTES = 1 << 30
ROWS = 1024  # rows of a table that are in memory together
# errors that packages raise for a file of another kind, or one that was cut
DAMAGED = (EOFError, gzip.BadGzipFile, lzma.LZMAError, tarfile.TarError, zlib.error)
DEFAULT_FIELDS = {"jsonl": "text", "parquet": "text", "arrow": "text", "tar": "txt"}


@dataclass(frozen=True)
class DocumentRules:
    """Rules for how files become documents. `kind`: tokens or records; `field`: the field with the
    text ("" means the format's default); `separator`: what stands between the documents of a text
    file ("" means that a file is one document); `errors`: how bytes that are not UTF-8 are handled,
    "strict" or "replace"."""

    kind: str
    field: str = ""
    separator: str = ""
    errors: str = "strict"

    @property
    def may_cut(self) -> bool:
        """True if readers can find the beginning of a document from any place of a text file. A
        separator whose end equals its beginning makes that impossible. Text without a separator is
        cut at ends of lines."""
        between = self.separator.encode()
        if self.kind == RECORDS:
            return False
        return not any(between.endswith(between[:n]) for n in range(1, len(between)))


def documents(extent: Extent, how: DocumentRules) -> Iterator[Document]:
    """Yield the documents of a piece of a file: texts, records, or arrays of token ids. Raises
    BadInput, OSError, StoreError."""
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
            yield {"__key__": within.encode(), ending: _whole(stream, extent.file)}
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
            yield _whole(stream, extent.file)
    else:  # a piece of a large file counts as a document
        yield b"\n".join(_delimited(extent, b"\n"))


def _whole(stream: BinaryIO, file: SourceFile) -> bytes:
    """Return all that is left of the stream as one document. Raises BadInput."""
    held = bytearray()
    while data := stream.read(READ_NBYTES):
        held += data
        if len(held) > MOST_DOCUMENT_NBYTES:
            raise _too_long(file.name)
    return bytes(held)


def _too_long(name: str) -> BadInput:
    return BadInput(
        f"{name}: wanted documents of at most {MOST_DOCUMENT_NBYTES >> 20} MiB, found a longer "
        "one; say where its documents end (--separator, or a line of JSON for each), or split it"
    )


def _delimited(extent: Extent, between: bytes) -> Iterator[bytes]:
    """Yield the documents that begin in [start, end) of a file, without the separators."""
    if extent.whole:
        with decompressed(extent.file) as stream:
            yield from (data for _, data in _split(stream, 0, between, extent.file.name))
        return
    with opened(extent.file) as stream:
        # a document begins at `start` exactly if a separator ends right before it
        at = max(0, extent.start - len(between))
        stream.seek(at)
        found = _split(stream, at, between, extent.file.name)
        if extent.start:
            next(found, None)
        for begin, data in found:
            if begin >= extent.end:
                return
            yield data


def _split(
    stream: BinaryIO, at: int, between: bytes, name: str
) -> Iterator[tuple[int, bytes]]:
    """Yield (position, document) from here on. `name`: of the file. Raises BadInput."""
    held = bytearray()
    looked = 0  # no separator begins before this position
    while data := stream.read(READ_NBYTES):
        held += data
        begin = 0
        while (end := held.find(between, max(begin, looked))) >= 0:
            yield at + begin, bytes(held[begin:end])
            begin = looked = end + len(between)
        del held[:begin]
        at += begin
        looked = max(0, len(held) - len(between) + 1)
        if len(held) > MOST_DOCUMENT_NBYTES:
            raise _too_long(name)
    if held:
        yield at, bytes(held)


def _of_line(line: bytes, how: DocumentRules, file: SourceFile) -> Document:
    if how.kind == RECORDS:
        return {"json": line}
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as e:
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
    """Yield the batches of an Arrow file, in the stream format or in the file format."""
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
    """Yield (dotted name, value): bytes as they are, structures flattened (`image.bytes`), all else
    as JSON."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from flat_fields(value, f"{before}{name}.")
        elif isinstance(value, bytes):
            yield f"{before}{name}", value
        else:
            yield f"{before}{name}", json.dumps(value, default=str, ensure_ascii=False).encode()


# ---- tar -----------------------------------------------------------------------------------------
class _Member(tarfile.TarInfo):
    """Tar header class that makes a damaged header an error. By default tarfile treats it as the
    end."""

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
    """Yield WebDataset samples: (begin and end in the stream, with headers and padding; fields). A
    sample is the consecutive files with equal names up to the first dot after the folder. Raises
    tarfile.TarError."""
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
            if member.size > MOST_DOCUMENT_NBYTES:
                raise tarfile.ReadError(
                    f"{member.name} says that it has {member.size} bytes, more than "
                    f"{MOST_DOCUMENT_NBYTES >> 20} MiB"
                )
            content = tar.extractfile(member)
            assert content is not None  # it is a regular file
            sample[ending or "data"] = content.read()
            end = tar.offset  # after its padding
    if sample:
        yield (begin, end), sample


def _text_of(record: Fields, how: DocumentRules, file: SourceFile) -> str:
    return _decoded(_field(record, how, file), how, file)


# ---- a function ----------------------------------------------------------------------------------
def _of_function(extent: Extent, how: DocumentRules) -> Iterator[Document]:
    """Yield the documents that `function(part, parts)` gives: texts, records, or token ids."""
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
    """Import the function that a source names. Raises BadInput."""
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
    try:
        found.encode()
    except UnicodeEncodeError as e:  # JSON may escape half a pair: "\\ud800"
        if how.errors == "replace":
            return found.encode(errors="replace").decode()
        raise BadInput(
            f"{file.name}: wanted Unicode text in the field {_field_name(how, file)!r}, found "
            f"{found[e.start : e.start + 1]!r}, half of a pair; --errors replace takes it with a "
            "sign for what is none"
        ) from e
    return found


def pieces(text: str, most: int) -> Iterable[str]:
    """Yield a long text in pieces of at most `most` characters, as a tokenizer gets them. Each is
    cut after its last line end, or else at its last space, if there is one."""
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
