"""Files of tokens that are mapped into memory: nanoGPT's `.bin` (no header), llm.c's and
modded-nanogpt's (a header of 256 int32), and Megatron's `.bin` beside its `.idx`.

The tokens of all files follow one another; headers are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from harness.core.world import BadInput
from harness.data.card import DTYPES, TOKENS
from harness.data.formats.format import (
    U32,
    ForeignFile,
    ForeignFiles,
    ForeignFormat,
    IndexSettings,
    SourceFolder,
)
from harness.data.formats.streamed_file import FilePass
from harness.data.prepare.units import StoredFile

HEADER_NBYTES = 256 * U32.itemsize
HEADERS = {(20240520, 1): "uint16", (20240801, 7): "uint32"}  # (magic, version) -> dtype
MEGATRON_MAGIC = b"MMIDIDX\0\0"
MEGATRON_HEAD = np.dtype(
    [("magic", "S9"), ("version", "<u8"), ("dtype", "u1"), ("n", "<u8"), ("documents", "<u8")]
)
MEGATRON_DTYPES = {1: "uint8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
BLOCK_ROWS = 1 << 20  # rows of an .idx that are in memory together


# ---- nanoGPT, llm.c ------------------------------------------------------------------------------
def _find(folder: SourceFolder, asked: IndexSettings) -> ForeignFiles | None:
    keys = folder.ending(".bin") if not asked.layout else list(folder.keys)
    if not keys:
        return None
    found = [_with_header(folder, file) for file in folder.sized(keys)]
    dtype = _one([dtype or asked.dtype or "uint16" for _, dtype in found], folder)
    return ForeignFiles(tuple(file for file, _ in found), TOKENS, dtype=dtype)


def _one(dtypes: list[str], folder: SourceFolder) -> str:
    """Return the only dtype. Raises BadInput if there are several."""
    if len(set(dtypes)) == 1:
        return dtypes[0]
    raise BadInput(
        f"{folder.store.url}: wanted files of one kind of tokens, found "
        f"{', '.join(sorted(set(dtypes)))}; name some of them, such as FOLDER/train*"
    )


def _with_header(folder: SourceFolder, file: ForeignFile) -> tuple[ForeignFile, str]:
    """Return (file, dtype according to its header); the dtype is "" without a header. Raises
    BadInput."""
    head = np.frombuffer(folder.store.get(file.key, 0, 3 * U32.itemsize), "u1")
    magic, version, tokens = head.view(U32).tolist() if len(head) == 12 else (0, 0, 0)
    dtype = HEADERS.get((magic, version), "")
    if not dtype:
        return file, ""
    wanted = HEADER_NBYTES + tokens * DTYPES[dtype].itemsize
    if file.nbytes != wanted:
        raise BadInput(
            f"{folder.store.url}/{file.key}: wanted {wanted} bytes, as its header says, found "
            f"{file.nbytes}; restore it"
        )
    return replace(file, start=HEADER_NBYTES), dtype


# ---- Megatron ------------------------------------------------------------------------------------
def _find_megatron(folder: SourceFolder, asked: IndexSettings) -> ForeignFiles | None:
    stems = [{key.removesuffix(end) for key in folder.ending(end)} for end in (".idx", ".bin")]
    pairs = sorted(set.intersection(*stems))
    if not pairs:
        return None
    files = folder.sized([f"{key}.bin" for key in pairs])
    dtypes = []
    for file, beside in zip(files, folder.sized([f"{key}.idx" for key in pairs]), strict=True):
        dtype, nbytes = _megatron(folder, beside)
        dtypes.append(dtype)
        if nbytes != file.nbytes:
            raise BadInput(
                f"{folder.store.url}/{file.key}: wanted {nbytes} bytes of tokens one after the "
                f"other, as {beside.key} says, found {file.nbytes}; restore it"
            )
    return ForeignFiles(tuple(files), TOKENS, dtype=_one(dtypes, folder))


def _megatron(folder: SourceFolder, index: ForeignFile) -> tuple[str, int]:
    """Return (dtype, bytes of all tokens) according to an .idx. Raises BadInput."""
    stream = StoredFile(folder.store, index.key, index.nbytes)
    head = np.frombuffer(stream.read(MEGATRON_HEAD.itemsize) or b"", "u1")
    row = head.view(MEGATRON_HEAD)[0] if len(head) == MEGATRON_HEAD.itemsize else None
    if row is None or head[:9].tobytes() != MEGATRON_MAGIC or int(row["version"]) != 1:
        raise BadInput(
            f"{folder.store.url}/{index.key}: wanted the index of Megatron's tokens "
            "(MMIDIDX, version 1), found something else"
        )
    if (dtype := MEGATRON_DTYPES.get(int(row["dtype"]), "")) not in DTYPES:
        raise BadInput(
            f"{folder.store.url}/{index.key}: wanted tokens that are whole numbers, "
            f"found its type {int(row['dtype'])}"
        )
    sizes = _lengths(stream, int(row["n"]))
    return dtype, sum(sizes) * DTYPES[dtype].itemsize


def _lengths(stream: StoredFile, n: int) -> Iterator[int]:
    for at in range(0, n, BLOCK_ROWS):
        data = stream.read(4 * min(BLOCK_ROWS, n - at)) or b""
        yield int(np.frombuffer(data, "<i4").astype(np.int64).sum())


# ---- any -----------------------------------------------------------------------------------------
def scan_tokens(
    passing: FilePass, file: ForeignFile, found: ForeignFiles, asked: IndexSettings
) -> None:
    """Scan a file of tokens. Raises BadInput if its content cannot be tokens."""
    dtype = DTYPES[found.dtype]
    passing.skip(file.start)
    if file.nbytes < file.start or (file.nbytes - file.start) % dtype.itemsize:
        raise BadInput(
            f"{passing.url}: wanted tokens of {dtype.itemsize} bytes from byte {file.start} on, "
            f"found {file.nbytes} bytes in all; say what they are: --dtype"
        )
    largest, ends = -1, 0
    for block in passing.blocks(file.nbytes):
        tokens = np.frombuffer(block, dtype)
        if int(tokens.min()) < 0:
            raise BadInput(f"{passing.url}: wanted tokens from 0 on, found {int(tokens.min())}")
        largest = max(largest, int(tokens.max()))
        ends += int((tokens == asked.eos).sum())
    items = (file.nbytes - file.start) // dtype.itemsize
    passing.close(items, documents=ends, largest=largest)


TOKEN_FILES = ForeignFormat("tokens", _find, scan_tokens)
MEGATRON = ForeignFormat("megatron", _find_megatron, scan_tokens, is_sure=True)
