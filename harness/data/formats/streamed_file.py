"""One pass over a foreign file: it is read once in order, hashed chunk by chunk, and cut into
shards where its format says.

Memory holds one block and one chunk, however large the file is.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import blake3
import numpy as np

from harness.data.card import HASH_NBYTES, CorpusCorrupt, Int64Array, ShardEntry, hash_of
from harness.data.prepare.units import StoredFile
from storage.canonical_json import BadObject, canonical, parsed
from storage.stores.objects import ObjectStore

BLOCK_NBYTES = 8 << 20  # bytes of one read
NO_PLACES = np.zeros((0, 2), np.int64)
_PLACE = np.dtype("<i8")


@dataclass(frozen=True)
class FoundShard:
    """A shard of a file, beginning at its byte `start`. `places`: int64 (items, 2), the bytes of
    the file at which each item begins and ends; empty for tokens, and where items can only be read
    together. For tokens: `documents` that end in it, and the `largest` token (-1 means none)."""

    start: int
    entry: ShardEntry
    places: Int64Array
    documents: int = 0
    largest: int = -1


class FilePass:
    """A pass over one file. `shards`: those that are closed. `tell` is called with the bytes that
    have passed. Raises StoreError, OSError for a file that became shorter."""

    def __init__(
        self,
        store: ObjectStore,
        key: str,
        nbytes: int,
        chunk_nbytes: int,
        tell: Callable[[int], None] = lambda n: None,
    ):
        self.url, self.key, self.nbytes = f"{store.url}/{key}", key, nbytes
        self.shards: list[FoundShard] = []
        self._store, self._chunk_nbytes, self._tell = store, chunk_nbytes, tell
        self.start = self.at = 0
        self._stream = self.opened()
        self._hash, self._hashes, self._held = blake3.blake3(), bytearray(), bytearray()

    def opened(self) -> io.BufferedReader:
        """Open the file again, for formats that must look at its end first."""
        return io.BufferedReader(StoredFile(self._store, self.key, self.nbytes), BLOCK_NBYTES)

    def skip(self, nbytes: int) -> None:
        """Skip this many bytes, in front of a shard."""
        self.start = self.at = self._stream.seek(self.at + nbytes)

    def read(self, nbytes: int) -> bytes:
        """Return the next bytes; fewer at the end of the file."""
        data = self._stream.read(nbytes)
        self.at += len(data)
        self._hash.update(data)
        self._held += data
        size = self._chunk_nbytes
        full = len(self._held) // size * size
        for begin in range(0, full, size):
            self._hashes += hash_of(memoryview(self._held)[begin : begin + size])
        del self._held[:full]
        self._tell(len(data))
        return data

    def blocks(self, end: int) -> Iterator[bytes]:
        """Yield what comes before the byte `end`, in large pieces."""
        while self.at < end and (data := self.read(min(BLOCK_NBYTES, end - self.at))):
            yield data

    def close(
        self,
        items: int,
        places: Int64Array = NO_PLACES,
        *,
        end: int = -1,
        documents: int = 0,
        largest: int = -1,
    ) -> None:
        """End the shard at the byte `end`, by default at the end of the file."""
        for _ in self.blocks(self.nbytes if end < 0 else end):
            pass
        if self._held:
            self._hashes += hash_of(bytes(self._held))
        name = self._hash.digest(HASH_NBYTES)
        entry = ShardEntry(name, self.at - self.start, items, bytes(self._hashes))
        self.shards.append(FoundShard(self.start, entry, places, documents, largest))
        self._hash, self._hashes, self._held = blake3.blake3(), bytearray(), bytearray()
        self.start = self.at


def encoded(shards: list[FoundShard]) -> bytes:
    """Return the note that a file has been read: its shards."""
    head, body = [], []
    for s in shards:
        e = s.entry
        numbers = [s.start, e.nbytes, e.items, len(e.hashes), len(s.places), s.documents, s.largest]
        head.append([e.name.hex(), *numbers])
        body += [e.hashes, s.places.astype(_PLACE).tobytes()]
    return b"".join((canonical(head), b"\n", *body))


def decoded(data: bytes, where: str) -> list[FoundShard]:
    """Return the shards of such a note. Raises CorpusCorrupt."""
    line, _, rest = data.partition(b"\n")
    out, at = [], 0
    try:
        for name, start, nbytes, items, hashed, placed, documents, largest in parsed(
            line, most_nbytes=len(data)
        ):
            entry = ShardEntry(bytes.fromhex(name), nbytes, items, rest[at : at + hashed])
            places = np.frombuffer(rest, _PLACE, 2 * placed, at + hashed).reshape(-1, 2)
            out.append(FoundShard(start, entry, places.astype(np.int64), documents, largest))
            at += hashed + places.nbytes
    except (BadObject, TypeError, ValueError) as e:
        raise CorpusCorrupt(f"{where}: wanted the note of a file, found {e}") from e
    if at != len(rest):
        raise CorpusCorrupt(f"{where}: the note of a file was cut")
    return out
