"""One unit of work of `harness data prepare`: its documents become shards. Runs in its own process,
many of them in parallel; the result depends on the unit and the settings alone.

Memory holds one shard of each split, and one batch of text for the tokenizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import blake3
import numpy as np

from harness.core.world import BadInput
from harness.data.card import (
    CHUNK_NBYTES,
    DTYPES,
    END,
    HASH_NBYTES,
    RECORDS,
    WORK,
    CorpusCorrupt,
    ShardEntry,
    hash_of,
    shard_key,
)
from harness.data.datasets import framed
from harness.data.prepare.dedupe import NearRule, Sketcher
from harness.data.prepare.documents import Document, DocumentRules, documents, pieces
from harness.data.prepare.tokenizers import TokenIds, Tokenizer, tokenizer_of
from harness.data.prepare.units import WorkUnit
from storage.canonical_json import BadObject, canonical, parsed
from storage.stores.objects import ObjectStore

# Shards as a unit of work makes them, and the note that lists them.

SHARD_NBYTES = 64 << 20


class ShardWriter:
    """The shards of one split of one unit. Each is written when it is full; at most one is held in
    memory. `entries`: shards that are written; `documents`: how many were added."""

    def __init__(self, store: ObjectStore, kind: str, chunk_nbytes: int, shard_nbytes: int):
        self.entries: list[ShardEntry] = []
        self.documents = 0
        self._store, self._kind = store, kind
        self._chunk_nbytes, self._shard_nbytes = chunk_nbytes, shard_nbytes
        self._held, self._items = bytearray(), 0
        self._ends: list[int] = []  # the end of each record held

    def add(self, data: bytes | memoryview, items: int, ends_document: bool = True) -> None:
        """Add tokens in their final encoding, or one record. Raises StoreError."""
        self._held += data
        self._items += items
        self.documents += ends_document
        if self._kind == RECORDS:
            self._ends.append(len(self._held))
        if len(self._held) >= self._shard_nbytes:
            self.close()

    def close(self) -> None:
        """Write what is held. The name is a hash of the content, so repeating this changes
        nothing."""
        if not self._held:
            return
        self._held += np.array(self._ends, END).tobytes()
        view = memoryview(bytes(self._held))
        self._held, self._ends, items, self._items = bytearray(), [], self._items, 0
        size = self._chunk_nbytes
        hashes = b"".join(hash_of(view[at : at + size]) for at in range(0, len(view), size))
        entry = ShardEntry(hash_of(view), len(view), items, hashes)
        self._store.create(shard_key(entry.name.hex()), view)
        self.entries.append(entry)


@dataclass(frozen=True)
class UnitNote:
    """The result of a unit, by the name of the split: its documents, and its shards in their
    order."""

    splits: Mapping[str, tuple[int, tuple[ShardEntry, ...]]]

    def encode(self) -> bytes:
        head = {
            name: [documents, [[e.name.hex(), e.nbytes, e.items, len(e.hashes)] for e in entries]]
            for name, (documents, entries) in self.splits.items()
        }
        hashes = (e.hashes for name in sorted(head) for e in self.splits[name][1])
        return b"".join((canonical(head), b"\n", *hashes))

    @staticmethod
    def decode(data: bytes, where: str) -> UnitNote:
        """Return the note that `encode` made. Raises CorpusCorrupt."""
        line, _, hashes = data.partition(b"\n")
        splits, at = {}, 0
        try:
            for name, (documents, rows) in sorted(parsed(line, most_nbytes=len(data)).items()):
                entries = []
                for shard, nbytes, items, size in rows:
                    entries.append(
                        ShardEntry(bytes.fromhex(shard), nbytes, items, hashes[at : at + size])
                    )
                    at += size
                splits[name] = documents, tuple(entries)
        except (BadObject, AttributeError, TypeError, ValueError) as e:
            raise CorpusCorrupt(f"{where}: wanted the note of a unit of work, found {e}") from e
        if at != len(hashes) or at % HASH_NBYTES:
            raise CorpusCorrupt(f"{where}: the note of a unit of work was cut")
        return UnitNote(splits)


TRAIN, VALIDATION = "train", "validation"
BATCH_LETTERS = 1 << 20  # characters of text that a tokenizer gets at once
TELL_NBYTES = 1 << 20
Tell = Callable[[int], None]


@dataclass(frozen=True)
class CorpusSettings:
    """Everything that decides a corpus' content, except its sources. `held_out`: the share of
    documents that go to validation; `unit_nbytes`: bytes of sources in one unit; `parts`: units of
    a source that is a function. `near`: the Jaccard similarity from which the later of two
    documents is dropped; 0 drops none."""

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
    """Maker of one unit's hashes and shards. `work`: the folder of this plan's notes. `tell` is
    called with the bytes of sources that were just done."""

    def __init__(
        self, store: ObjectStore, settings: CorpusSettings, work: str, tell: Tell = lambda n: None
    ):
        self._store, self._settings, self._work, self._tell = store, settings, work, tell
        self._seed = settings.seed.to_bytes(8, "little")

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer | None:
        """The tokenizer, made at first use. Records have none, and hashing documents needs none."""
        s = self._settings
        return None if s.reading.kind == RECORDS else tokenizer_of(s.tokenizer, s.eos)

    @functools.cached_property
    def _sketcher(self) -> Sketcher:
        return Sketcher(NearRule.of(self._settings.near))

    def hash(self, unit: WorkUnit) -> None:
        """Write the hashes of the unit's documents, one after the other: of whole documents for
        `duplicates`, or of their bands for `near_duplicates`."""
        key = self._sketcher.keys if self._settings.near else _hash
        found = b"".join(map(key, self._documents(unit)))
        self._store.create(hashes_key(self._work, unit.number), found)

    def make(self, unit: WorkUnit, dropped: frozenset[int] = frozenset()) -> None:
        """Write the unit's shards, then its note. `dropped`: numbers of documents to leave out.
        Raises BadInput, StoreError."""
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
        """Yield the unit's documents that are not empty."""
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
        """Return the split of a document, which follows from its content and the seed alone."""
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
    """Add the ids of a document, or of a part of it. Raises BadInput for values that are no ids of
    the vocabulary, or that equal the token which ends documents."""
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
    """Return the bytes that identify a document."""
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
