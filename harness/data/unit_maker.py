"""One unit of work of `harness data prepare`: its documents become shards. Runs in a process of its
own, many beside each other; what it makes depends on the unit and the settings alone.

In memory: one shard of each split, and a batch of text on its way through the tokenizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import blake3
import numpy as np

from harness.core.world import BadInput
from harness.data.card import CHUNK_NBYTES, DTYPES, HASH_NBYTES, RECORDS, WORK
from harness.data.documents import Document, DocumentRules, documents, pieces
from harness.data.framing import framed
from harness.data.near import NearRule, Sketcher
from harness.data.shards import SHARD_NBYTES, ShardWriter, UnitNote
from harness.data.sources import WorkUnit
from harness.data.tokenizing import TokenIds, Tokenizer, tokenizer_of
from storage.objects import ObjectStore

TRAIN, VALIDATION = "train", "validation"
BATCH_LETTERS = 1 << 20  # of text that a tokenizer is given at once
TELL_NBYTES = 1 << 20
Tell = Callable[[int], None]


@dataclass(frozen=True)
class CorpusSettings:
    """All that decides what a corpus is, but for its sources. `held_out`: the share of documents
    for validation; `unit_nbytes`: of sources, that are done at once; `parts`: units of a
    function. `near`: the Jaccard similarity from which on one of two documents is dropped; 0: none
    is."""

    reading: DocumentRules
    tokenizer: str = "bytes"
    eos: str = ""
    held_out: float = 0.0
    seed: int = 0
    dedup: bool = False
    chunk_nbytes: int = CHUNK_NBYTES
    shard_nbytes: int = SHARD_NBYTES
    unit_nbytes: int = SHARD_NBYTES
    parts: int = 16
    near: float = 0.0


class UnitMaker:
    """`work`: the folder of this plan's notes. `tell`: bytes of sources that are done."""

    def __init__(
        self, store: ObjectStore, settings: CorpusSettings, work: str, tell: Tell = lambda n: None
    ):
        self._store, self._settings, self._work, self._tell = store, settings, work, tell
        self._seed = settings.seed.to_bytes(8, "little")

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer | None:
        """Records have none, and hashing documents needs none."""
        s = self._settings
        return None if s.reading.kind == RECORDS else tokenizer_of(s.tokenizer, s.eos)

    @functools.cached_property
    def _sketcher(self) -> Sketcher:
        return Sketcher(NearRule.of(self._settings.near))

    def hash(self, unit: WorkUnit) -> None:
        """Leave the hashes of its documents, one after the other: for `duplicates`, or of their
        bands, for `near_duplicates`."""
        key = self._sketcher.keys if self._settings.near else _hash
        found = b"".join(map(key, self._documents(unit)))
        self._store.create(hashes_key(self._work, unit.number), found)

    def make(self, unit: WorkUnit, dropped: frozenset[int] = frozenset()) -> None:
        """Its shards, then its note. `dropped`: numbers of documents to leave out. Raises BadInput,
        StoreError."""
        s = self._settings
        writers = {
            name: ShardWriter(self._store, s.reading.kind, s.chunk_nbytes, s.shard_nbytes)
            for name in (TRAIN, VALIDATION)
        }
        kept = (one for i, one in enumerate(self._documents(unit)) if i not in dropped)
        if self._tokenizer is None:
            for one in kept:
                writers[self._split_of(one)].add(_raw(one), 1)
        else:
            self._tokens(self._tokenizer, kept, writers)
        for writer in writers.values():
            writer.close()
        note = UnitNote({n: (w.documents, tuple(w.entries)) for n, w in writers.items()})
        self._store.create(note_key(self._work, unit.number), note.encode())

    def _documents(self, unit: WorkUnit) -> Iterator[Document]:
        """Those that are not empty."""
        for extent in unit.extents:
            left = extent.nbytes
            seen = 0
            for document in documents(extent, self._settings.reading):
                if len(document):
                    yield document
                    seen += len(document)
                if seen >= TELL_NBYTES:
                    told = min(seen, left)
                    self._tell(told)
                    left, seen = left - told, 0
            self._tell(left)

    def _split_of(self, document: Document) -> str:
        """By the document's content and the seed alone."""
        if not self._settings.held_out:
            return TRAIN
        found = blake3.blake3(self._seed).update(_raw(document)).digest(8)
        share = int.from_bytes(found, "little") / 2**64
        return VALIDATION if share < self._settings.held_out else TRAIN

    def _tokens(
        self, tokenizer: Tokenizer, kept: Iterator[Document], writers: dict[str, ShardWriter]
    ) -> None:
        batch: list[tuple[ShardWriter, str, bool]] = []
        letters = 0

        def flush() -> None:
            nonlocal letters
            found = tokenizer.encode([text for _, text, _ in batch])
            for (writer, _, is_last), ids in zip(batch, found, strict=True):
                _add(writer, tokenizer, ids, is_last)
            batch.clear()
            letters = 0

        for document in kept:
            writer = writers[self._split_of(document)]
            if not isinstance(document, str):
                flush()
                _add(writer, tokenizer, np.asarray(document), True)
                continue
            parts = list(pieces(document, BATCH_LETTERS))
            for i, text in enumerate(parts):
                batch.append((writer, text, i == len(parts) - 1))
                letters += len(text)
                if letters >= BATCH_LETTERS:
                    flush()
        flush()


def _add(writer: ShardWriter, tokenizer: Tokenizer, ids: TokenIds, is_last: bool) -> None:
    """Raises BadInput for ids that could not be told from the end of a document, or are none."""
    if len(ids) and ids.dtype.kind != "u" and (ids.dtype.kind != "i" or ids.min() < 0):
        raise BadInput(f"wanted ids of tokens from 0 on, found {ids.dtype}, {ids.min()} among them")
    if len(ids) and (ids.max() >= tokenizer.vocabulary or (ids == tokenizer.eos).any()):
        raise BadInput(
            f"--tokenizer {tokenizer.name}: wanted ids below {tokenizer.vocabulary} in a document, "
            f"and not {tokenizer.eos}, which stands behind each; found {ids.max()}, or that; "
            "name another token that no text has: --eos TOKEN"
        )
    out = np.empty(len(ids) + is_last, DTYPES[tokenizer.dtype])
    out[: len(ids)] = ids
    if is_last:
        out[-1] = tokenizer.eos
    writer.add(out.tobytes(), len(out), is_last)


def _hash(document: Document) -> bytes:
    return blake3.blake3(_raw(document)).digest(HASH_NBYTES)


def _raw(document: Document) -> bytes:
    """What a document is known by."""
    if isinstance(document, str):
        return document.encode(errors="surrogatepass")
    if isinstance(document, dict):
        return framed(document)
    return document.astype("<u4").tobytes()


def note_key(work: str, unit: int) -> str:
    return f"{work}unit-{unit:08d}"


def hashes_key(work: str, unit: int) -> str:
    return f"{work}hashes-{unit:08d}"


def work_folder(plan: str) -> str:
    return f"{WORK}{plan}/"
