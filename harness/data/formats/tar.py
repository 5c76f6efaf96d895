"""Tar files as WebDataset reads them: an item is the consecutive members whose names are equal up
to the first dot after the folder.

An item's bytes are those of its members with their headers: a small tar.
"""

from __future__ import annotations

import io
import tarfile

import numpy as np

from harness.core.world import BadInput
from harness.data.card import Card, CorpusCorrupt
from harness.data.chunk_reader import Chunks
from harness.data.formats.format import (
    ForeignFile,
    ForeignFiles,
    ForeignFormat,
    IndexSettings,
    ItemReader,
    SourceFolder,
    refused,
)
from harness.data.formats.streamed_file import FilePass
from harness.data.prepare.documents import tar_samples

COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")


def _find(folder: SourceFolder, asked: IndexSettings) -> ForeignFiles | None:
    if keys := folder.ending(".tar"):
        return ForeignFiles(tuple(folder.sized(keys)))
    if keys := folder.ending(*COMPRESSED):
        raise refused(f"{folder.store.url}/{keys[0]}", "a compressed tar")
    return None


def _scan(passing: FilePass, file: ForeignFile, found: ForeignFiles, asked: IndexSettings) -> None:
    try:
        rows = [place for place, _ in tar_samples(passing)]
    except tarfile.TarError as e:
        raise BadInput(f"{passing.url}: wanted a tar file, found none ({e}); restore it") from e
    passing.close(len(rows), np.array(rows, np.int64).reshape(-1, 2))


def _opened(card: Card, chunks: Chunks) -> ItemReader:
    def read(item: int, place: tuple[int, int]) -> dict[str, bytes]:
        found = list(tar_samples(io.BytesIO(chunks.read(*place))))
        if len(found) != 1:
            raise CorpusCorrupt(
                f"item {item}: wanted the members of one sample, found {len(found)}"
            )
        return found[0][1]

    return read


TAR = ForeignFormat("tar", _find, _scan, _opened)
