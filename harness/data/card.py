"""What a corpus is: its card, the one object by which it exists, and the index of each split.

    card.json            written last and create-only: a corpus exists if and only if it does
    index/HASH.idx       of a split: its shards in their order, a BLAKE3 of each chunk of them
    shards/HASH.bin      tokens: a plain little-endian array; records: their bytes, then where each
                         ends; named by their own content

Of a corpus that `harness data index` has made, shards are files of others, which stay where they
are (`card.source`); the index says where each lies in them, and behind them come shards of its own
that say where each item begins and ends.

All are named or fixed by hash from the card down, so that one digest (`Card.content`) says all that
a training may read. Nothing in it depends on when, where or by how many processes it was made. Pure
but for numpy.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, TypeAlias

import blake3
import numpy as np
from numpy.typing import NDArray

from harness.core.batch import Uint64s, sample_hash
from harness.core.values import BadObject, Natural, Within, built, canonical, digest, parsed
from harness.core.world import HarnessError
from storage.json_text import whole
from storage.objects import checked_key

CARD = "card.json"
SHARDS, INDEXES, WORK = "shards/", "index/", "work/"
FORMAT = 2  # of card and index; raised when a reader of before would misunderstand
PREPARED = 1  # what a corpus has that consists of nothing but shards of its own
MAGIC = b"harness corpus index 1\n"
HASH_NBYTES = 16  # of a BLAKE3: nobody makes other bytes that have it (storage/parts.py)
CHUNK_NBYTES = 256 << 10
MOST_CHUNK_NBYTES, MOST_CARD_NBYTES = 256 << 20, 64 << 20
DTYPES: dict[str, np.dtype[Any]] = {  # of tokens; ours are the first two
    **{"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4"), "uint8": np.dtype("u1")},
    **{"int16": np.dtype("<i2"), "int32": np.dtype("<i4"), "int64": np.dtype("<i8")},
}
END = np.dtype("<u8")  # where a record of a shard ends
TOKENS, RECORDS = "tokens", "records"
_SHARD = np.dtype([("name", "V16"), ("nbytes", "<u8"), ("items", "<u8")])

Int64Array: TypeAlias = NDArray[np.int64]
HeldOut = Annotated[float, Within(0, 1)]


class CorpusCorrupt(HarnessError):
    """What lies in a corpus is not what its card says; the message names the shard or the index,
    what was wanted and what was found."""


def hash_of(data: bytes | memoryview) -> bytes:
    """16 bytes: what chunks, shards and indexes are known by."""
    return blake3.blake3(data).digest(HASH_NBYTES)


@dataclass(frozen=True)
class SplitCard:
    """One split. `items`: tokens, ends of documents among them, or records; `nbytes`: of its
    shards; `index`: hash of its index, 32 hex digits, which lies at `index/HASH.idx`."""

    name: str
    index: str
    shards: Natural
    documents: Natural
    items: Natural
    nbytes: Natural


@dataclass(frozen=True)
class SourceCard:
    """What documents were made of: as it was named, and its bytes (0: not known)."""

    name: str
    nbytes: Natural = 0


@dataclass(frozen=True)
class FieldCard:
    """A field of records in a format of others: how its bytes are encoded, in that format's words;
    `nbytes`: of each value, 0 if that differs."""

    name: str
    encoding: str = ""
    nbytes: Natural = 0


@dataclass(frozen=True)
class Card:
    """`kind`: "tokens" or "records". Of tokens: `dtype` (see DTYPES), `eos` (the token behind each
    document, and nowhere else; -1: not known), `tokenizer` and its hash, `vocabulary` (ids are
    below it).
    `held_out`: the share of documents that went to the split "validation". `dropped`: documents
    that an earlier one was equal to, or like by the rule `near` (near.py); -1: nobody looked.
    `plan`: digest of the sources' names and sizes and of all settings. `content`: see `sealed`. Of
    files of others: `layout` (their format), `fields`, and `source`, the URL below which they
    lay."""

    kind: str
    splits: tuple[SplitCard, ...]
    sources: tuple[SourceCard, ...]
    dtype: str = ""
    eos: int = -1
    tokenizer: str = ""
    tokenizer_hash: str = ""
    vocabulary: Natural = 0
    chunk_nbytes: Annotated[int, Within(1, MOST_CHUNK_NBYTES)] = CHUNK_NBYTES
    seed: int = 0
    held_out: HeldOut = 0.0
    dropped: int = -1
    near: str = ""
    licence: str = ""
    plan: str = ""
    content: str = ""
    format: int = PREPARED
    layout: str = ""
    fields: tuple[FieldCard, ...] = ()
    source: str = ""

    def sealed(self) -> Card:
        """With `content`: the digest of all that a reader may get, which does not depend on what
        sources are called, where they lie, or under which licence they are."""
        said = ("kind", "dtype", "eos", "tokenizer_hash", "vocabulary", "chunk_nbytes", "splits")
        more = ("layout", "fields") if self.layout else ()
        body = asdict(self)
        return replace(self, content=digest(canonical({name: body[name] for name in said + more})))

    def split(self, name: str) -> SplitCard | None:
        return next((one for one in self.splits if one.name == name), None)

    def encode(self) -> bytes:
        return json.dumps(asdict(self), indent=1, sort_keys=True).encode() + b"\n"

    @staticmethod
    def decode(data: bytes, where: str) -> Card:
        """Raises CorpusCorrupt."""
        try:
            body = parsed(data, most_nbytes=MOST_CARD_NBYTES, finite=True)
            newer = isinstance(body, dict) and body.get("format", PREPARED) > FORMAT
            card = None if newer else built(Card, body)
        except (BadObject, TypeError) as e:
            raise CorpusCorrupt(f"{where}: wanted the card of a corpus, found none: {e}") from e
        if card is None:
            raise CorpusCorrupt(
                f"{where}: wanted a corpus of format {FORMAT} or older, found {body['format']}; "
                "update the package here"
            )
        known = card.kind == RECORDS or (card.kind == TOKENS and card.dtype in DTYPES)
        if not known or card.sealed().content != card.content:
            raise CorpusCorrupt(f"{where}: the card was changed: its digest does not fit")
        return card


@dataclass(frozen=True)
class ShardEntry:
    """A shard as its maker knows it. `name`: hash of its bytes, 16 bytes; `items`: tokens or
    records in it; `hashes`: of its chunks, one after the other."""

    name: bytes
    nbytes: int
    items: int
    hashes: bytes


@dataclass(frozen=True)
class ShardPlace:
    """Where a shard lies in a file of others: the file's key below `Card.source`, where the shard
    begins in it, and bytes of the whole file."""

    key: str
    start: int
    file_nbytes: int


@dataclass(frozen=True)
class CorpusIndex:
    """The shards of a split as one row of bytes, cut into chunks: each has at most `chunk_nbytes`
    and lies in one shard. `hashes`: uint64 (chunks, 2). `places`: of the shards that lie in files
    of others, which come first; `source`: where those are, for who is told of one."""

    chunk_nbytes: int
    shards: NDArray[Any]  # of _SHARD
    hashes: Uint64s
    places: tuple[ShardPlace, ...] = ()
    source: str = ""

    @functools.cached_property
    def shard_starts(self) -> Int64Array:
        """Where each shard begins in the row, and its end: (shards + 1,) bytes."""
        return _starts(self.shards["nbytes"])

    @functools.cached_property
    def item_starts(self) -> Int64Array:
        """Items before each shard, and in all: (shards + 1,)."""
        return _starts(self.shards["items"])

    @functools.cached_property
    def first_chunks(self) -> Int64Array:
        """The first chunk of each shard, and their number: (shards + 1,)."""
        return _starts(-(-self.shards["nbytes"].astype(np.int64) // self.chunk_nbytes))

    @functools.cached_property
    def starts(self) -> Int64Array:
        """Where each chunk begins in the row, and its end: (chunks + 1,) bytes."""
        shard = np.repeat(np.arange(len(self.shards)), np.diff(self.first_chunks))
        within = np.arange(len(shard)) - self.first_chunks[shard]
        begins = self.shard_starts[shard] + within * self.chunk_nbytes
        return np.append(begins, self.shard_starts[-1])

    def place(self, chunk: int) -> tuple[str, int]:
        """(hash of the shard, which of its chunks) of a chunk."""
        shard = self.shard_of(chunk)
        return self.name(shard), chunk - int(self.first_chunks[shard])

    def shard_of(self, chunk: int) -> int:
        return int(np.searchsorted(self.first_chunks, chunk, "right")) - 1

    def shard_of_item(self, item: int) -> int:
        return int(np.searchsorted(self.item_starts, item, "right")) - 1

    def name(self, shard: int) -> str:
        name: bytes = self.shards["name"][shard].tobytes()
        return name.hex()

    def told(self, shard: int, url: str) -> str:
        """What a shard of the corpus at `url` is called in messages: by where it lies."""
        if shard < len(self.places):
            return f"{self.source}/{self.places[shard].key}"
        return f"{url}/{shard_key(self.name(shard))}"

    def origin(self, chunk: int) -> tuple[int, str]:
        """(the byte of its file where a chunk begins, what was done when it was hashed)."""
        shard = self.shard_of(chunk)
        begin = (chunk - int(self.first_chunks[shard])) * self.chunk_nbytes
        if shard < len(self.places):
            return self.places[shard].start + begin, "indexed"
        return begin, "prepared"

    def chunks_of(self, start: int, end: int) -> range:
        """The chunks in which the bytes [start, end) of the row lie."""
        (span,) = self.spans([(start, end)]).tolist()
        return range(*span)

    def spans(self, ranges: Sequence[tuple[int, int]]) -> Int64Array:
        """Of each [start, end) of the row the first chunk in which its bytes lie, and the one
        behind the last: (n, 2)."""
        begins, ends = np.array(ranges, np.int64).reshape(-1, 2).T
        first = np.searchsorted(self.starts, begins, "right") - 1
        behind = np.searchsorted(self.starts, ends, "left")
        return np.stack([first, np.where(ends > begins, behind, first)], axis=1)

    def ids(self, chunks: Int64Array) -> Uint64s:
        """The first 64 bits of the hashes that these chunks must have, same shape."""
        found: Uint64s = self.hashes[chunks, 0]
        return found

    def contents(
        self, begins: Int64Array, ends: Int64Array, ids: Callable[[Int64Array], Uint64s]
    ) -> Int64Array:
        """64 bits of what lies at the bytes [begins, ends) of the row, as step records want them,
        (n,): of the hashes of the chunks there, so nothing need be read. `ids`: see the method."""
        out = np.zeros(len(begins), np.uint64)
        first = np.searchsorted(self.starts, begins, "right") - 1
        last = np.searchsorted(self.starts, ends - 1, "right") - 1
        last = np.where(ends > begins, last, first - 1)
        for k in range(int((last - first).max(initial=-1)) + 1):
            here = first + k <= last
            chunk = first[here] + k
            low = np.maximum(begins[here] - self.starts[chunk], 0)
            high = np.minimum(ends[here], self.starts[chunk + 1]) - self.starts[chunk]
            where = sample_hash(low + (k << 32), high).view(np.int64)
            out[here] += sample_hash(where, ids(chunk).view(np.int64))
        return out.view(np.int64)

    def encode(self) -> bytes:
        head = {"chunk_nbytes": self.chunk_nbytes, "shards": len(self.shards)}
        body = (self.shards.tobytes(), self.hashes.astype("<u8").tobytes())
        rows = [[place.key, place.start, place.file_nbytes] for place in self.places]
        return b"".join((MAGIC, canonical(head), b"\n", *body, canonical(rows) if rows else b""))

    @staticmethod
    def of(
        chunk_nbytes: int, entries: Iterable[ShardEntry], places: Iterable[ShardPlace] = ()
    ) -> CorpusIndex:
        kept = list(entries)
        rows = [(entry.name, entry.nbytes, entry.items) for entry in kept]
        hashes = np.frombuffer(b"".join(entry.hashes for entry in kept), "<u8").reshape(-1, 2)
        return CorpusIndex(chunk_nbytes, np.array(rows, _SHARD), hashes, tuple(places))

    @staticmethod
    def decode(data: bytes, split: SplitCard, chunk_nbytes: int, where: str) -> CorpusIndex:
        """Raises CorpusCorrupt unless it is the one that the card names."""
        if hash_of(data).hex() != split.index:
            raise CorpusCorrupt(
                f"{where}: wanted the index that the card names, found {len(data)} bytes with "
                f"another hash ({hash_of(data).hex()})"
            )
        begin = data.index(b"\n", len(MAGIC)) + 1
        try:
            shards = np.frombuffer(data, _SHARD, split.shards, begin)
            begin += shards.nbytes
            chunks = int((-(-shards["nbytes"].astype(np.int64) // chunk_nbytes)).sum())
            hashes = np.frombuffer(data, "<u8", 2 * chunks, begin).reshape(-1, 2)
            rows = data[begin + hashes.nbytes :]
            found = CorpusIndex(chunk_nbytes, shards, hashes, _places(rows) if rows else ())
        except (BadObject, TypeError, ValueError) as e:
            raise CorpusCorrupt(f"{where}: the index does not fit its card: {e}") from e
        if found.item_starts[-1] != split.items:
            raise CorpusCorrupt(f"{where}: the index does not fit its card")
        return found


def _places(data: bytes) -> tuple[ShardPlace, ...]:
    """Raises BadObject, TypeError, ValueError."""
    rows = parsed(data, most_nbytes=len(data))
    return tuple(ShardPlace(checked_key(key), whole(a, 0), whole(n, 0)) for key, a, n in rows)


def _starts(sizes: NDArray[Any]) -> Int64Array:
    return np.concatenate([[0], np.cumsum(sizes.astype(np.int64))]).astype(np.int64)


def shard_key(name: str) -> str:
    return f"{SHARDS}{name}.bin"


def index_key(name: str) -> str:
    return f"{INDEXES}{name}.idx"
