"""LitData's chunks, which `index.json` names: each begins with the places of its items; an item is
the bytes of its leaves after their sizes, or tokens alone.

As litdata 0.2 writes them without compression; the names of leaves are those of torch's pytrees.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from harness.core.world import BadInput
from harness.data.card import DTYPES, TOKENS, Card, FieldCard
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
from harness.data.formats.token_files import scan_tokens

# by the numbers in its encodings; "" for a type that numpy does not have
_C = ("float32", "float32", "float64", "float64", "complex64", "complex64", "complex128")
TORCH_DTYPES = (
    *(*_C, "complex128", "float16", "float16", "", "uint8", "int8", "int16", "int16"),
    *("int32", "int32", "int64", "int64", "bool", "uint16"),
)
NUMPY_DTYPES = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16"),
    *("float32", "float64", "complex64", "complex128", "bool"),
)
ROWS_OF = {"no_header_tensor": TORCH_DTYPES, "no_header_numpy": NUMPY_DTYPES}
LOADERS = ("PyTreeLoader", "TokensLoader")


def dtype_of(encoding: str) -> str:
    """Return the numpy dtype of an encoding ("int32" for "no_header_tensor:16"); "" if it is
    unknown."""
    name, _, number = encoding.partition(":")
    dtypes = ROWS_OF.get(name, ())
    return dtypes[int(number)] if number.isdecimal() and int(number) < len(dtypes) else ""


def _find(folder: SourceFolder, asked: IndexSettings) -> ForeignFiles | None:
    chunks, config = folder.index.get("chunks"), folder.index.get("config")
    if not isinstance(chunks, list) or not isinstance(config, dict):
        return None
    where = f"{folder.store.url}/{INDEX}"
    for name in ("compression", "compression_level", "ipc_compression", "encryption"):
        if config.get(name):
            raise refused(where, f"{name} {config[name]!r}")
    loader = config.get("item_loader") or LOADERS[0]
    if loader not in LOADERS:
        raise refused(where, f"chunks of its {loader}")
    try:
        encodings = [str(one) for one in config["data_format"]]
        named = folder.sized([str(row["filename"]) for row in chunks])
        items = [int(row["chunk_size"]) for row in chunks]
        if loader == LOADERS[1] or (chunks and all(row.get("dim") for row in chunks)):
            return _of_tokens(named, items, encodings[0], where)
        names = list(_leaves(json.loads(config["data_spec"])[1]))
        fields = tuple(map(FieldCard, names, encodings))
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as e:
        raise BadInput(f"{where}: wanted the index of LitData's chunks, found none: {e!r}") from e
    if len(names) != len(encodings) or len(set(names)) != len(names):
        raise refused(where, f"the leaves {names} of the encodings {encodings}")
    files = (replace(file, items=n) for file, n in zip(named, items, strict=True))
    return ForeignFiles(tuple(files), fields=fields)


def _of_tokens(
    named: list[ForeignFile], items: list[int], encoding: str, where: str
) -> ForeignFiles:
    if (dtype := dtype_of(encoding)) not in DTYPES:
        raise refused(where, f"tokens as {encoding} ({dtype or 'not known'})")
    files = (
        replace(file, start=U32.itemsize * (n + 2)) for file, n in zip(named, items, strict=True)
    )
    return ForeignFiles(tuple(files), TOKENS, dtype=dtype)


def _leaves(spec: dict[str, Any], before: str = "") -> Iterator[str]:
    """Yield the names of a tree's leaves in their order: keys and numbers, joined by dots. A tree
    that is a single leaf has the name "data"."""
    if spec["type"] is None:
        yield before or "data"
        return
    children, context = spec["children_spec"], json.loads(spec["context"] or "null")
    # keys of a dict; null for a list or a tuple
    names = context if isinstance(context, list) else range(len(children))
    for name, child in zip(names, children, strict=True):
        yield from _leaves(child, f"{before}.{name}" if before else str(name))


def _scan(passing: FilePass, file: ForeignFile, found: ForeignFiles, asked: IndexSettings) -> None:
    if found.kind == TOKENS:
        scan_tokens(passing, file, found, asked)
    else:
        scan_offsets(passing, file)


def _opened(card: Card, chunks: Chunks) -> ItemReader:
    n, head = len(card.fields), U32.itemsize * len(card.fields)

    def read(item: int, place: tuple[int, int]) -> dict[str, bytes]:
        data = chunks.read(*place)
        sizes = np.frombuffer(data[:head].ljust(head, b"\0"), U32, n).tolist()
        return EncodedRecord(card.fields, split_values(data[head:], sizes, f"item {item}"))

    return read


LITDATA = ForeignFormat("litdata", _find, _scan, _opened, is_sure=True)
