"""Shards as a unit of work makes them, and the note that says which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from harness.core.values import BadObject, canonical, parsed
from harness.data.card import (
    END,
    HASH_NBYTES,
    RECORDS,
    CorpusCorrupt,
    ShardEntry,
    hash_of,
    shard_key,
)
from storage.objects import ObjectStore

SHARD_NBYTES = 64 << 20


class ShardWriter:
    """The shards of one split of one unit, each written when it is full; no more than one is held.
    `entries`: of those that are written; `documents`: that were added."""

    def __init__(self, store: ObjectStore, kind: str, chunk_nbytes: int, shard_nbytes: int):
        self.entries: list[ShardEntry] = []
        self.documents = 0
        self._store, self._kind = store, kind
        self._chunk_nbytes, self._shard_nbytes = chunk_nbytes, shard_nbytes
        self._held, self._items = bytearray(), 0
        self._ends: list[int] = []  # of records

    def add(self, data: bytes | memoryview, items: int, ends_document: bool = True) -> None:
        """Tokens as they will lie, or one record. Raises StoreError."""
        self._held += data
        self._items += items
        self.documents += ends_document
        if self._kind == RECORDS:
            self._ends.append(len(self._held))
        if len(self._held) >= self._shard_nbytes:
            self.close()

    def close(self) -> None:
        """Write what is held. Its name is its content, so who did this before has done the same."""
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
    """What a unit has become, by the name of the split: documents, and shards in their order."""

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
        """Raises CorpusCorrupt."""
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
