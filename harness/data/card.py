"""The definition of a corpus: its card, by which it exists, and the index of each split.

    card.json            written last and create-only: a corpus exists if and only if it does
    index/HASH.idx       of a split: its shards in their order, a BLAKE3 of each chunk of them
    shards/HASH.bin      tokens: a plain little-endian array; records: their bytes, then the end of
                         each; named by their own content

In a corpus that `harness data index` has made, shards are parts of foreign files, which stay where
they are (`card.source`). The index holds their places, and its last shards are the corpus' own:
they hold where each item begins and ends.

All objects are named or fixed by hash from the card down, so that one digest (`Card.content`)
covers all that a training may read. Nothing in it depends on when, where or by how many processes
it was made. Pure except for numpy.
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
from harness.core.decoding import Natural, Within, built
from harness.core.world import BadInput, HarnessError
from harness.data.chunk_cache import NodeCache
from storage.canonical_json import BadObject, canonical, digest, parsed, whole
from storage.errors import NotFound
from storage.snapshots.manifest import BLAKE3, is_chunk
from storage.stores.objects import ObjectStore, checked_key

CARD = "card.json"
SHARDS, INDEXES, WORK = "shards/", "index/", "work/"
FORMAT = 2  # of card and index; raised when an older reader would misunderstand
PREPARED = 1  # format of a corpus that consists of its own shards only
MAGIC = b"harness corpus index 1\n"
HASH_NBYTES = (
    16  # bytes of a BLAKE3, enough that nobody can forge one (storage/snapshots/manifest.py)
)
CHUNK_NBYTES = 256 << 10
MOST_CHUNK_NBYTES, MOST_CARD_NBYTES = 256 << 20, 64 << 20
DTYPES: dict[str, np.dtype[Any]] = {  # of tokens; prepared corpora use the first two
    **{"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4"), "uint8": np.dtype("u1")},
    **{"int16": np.dtype("<i2"), "int32": np.dtype("<i4"), "int64": np.dtype("<i8")},
}
END = np.dtype("<u8")  # the end of each record of a shard
TOKENS, RECORDS = "tokens", "records"
_SHARD = np.dtype([("name", "V16"), ("nbytes", "<u8"), ("items", "<u8")])

Int64Array: TypeAlias = NDArray[np.int64]
HeldOut = Annotated[float, Within(0, 1)]


class CorpusCorrupt(HarnessError):
    """Error for a corpus whose content contradicts its card; the message names the shard or the
    index, what was wanted and what was found."""


def hash_of(data: bytes | memoryview) -> bytes:
    """Return the 16-byte hash that identifies chunks, shards and indexes."""
    return blake3.blake3(data).digest(HASH_NBYTES)


@dataclass(frozen=True)
class SplitCard:
    """One split. `items`: tokens, including those that end documents, or records; `nbytes`: bytes
    of its shards; `index`: hash of its index, 32 hex digits, which lies at `index/HASH.idx`."""

    name: str
    index: str
    shards: Natural
    documents: Natural
    items: Natural
    nbytes: Natural


@dataclass(frozen=True)
class SourceCard:
    """A source of documents: its name as given, and its bytes (0 means unknown)."""

    name: str
    nbytes: Natural = 0


@dataclass(frozen=True)
class FieldCard:
    """A field of records in a foreign format. `encoding`: in that format's terms; `nbytes`: bytes
    of each value (0 means that they differ)."""

    name: str
    encoding: str = ""
    nbytes: Natural = 0


@dataclass(frozen=True)
class Card:
    """The card of a corpus. `kind`: "tokens" or "records". For tokens: `dtype` (see DTYPES), `eos`
    (the token after each document, and nowhere else; -1 means unknown), `tokenizer` and its hash,
    `vocabulary` (all ids are below it). `held_out`: the share of documents that went to the split
    "validation". `dropped`: the number of documents that equal an earlier one, or resemble it by
    the rule `near` (data/prepare/dedupe.py); -1 means not searched. `plan`: digest of the sources'
    names and sizes and of all settings. `content`: see `sealed`. For foreign files: `layout` (their
    format), `fields`, and `source`, the URL of their folder when they were indexed."""

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
        """Return the card with `content`: the digest of all that a reader may get, which does not
        depend on what sources are called, where they are, or under which licence."""
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
        """Return the card that `encode` made. Raises CorpusCorrupt."""
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
    """A new shard. `name`: hash of its bytes, 16 bytes; `items`: its tokens or records; `hashes`:
    those of its chunks, one after the other."""

    name: bytes
    nbytes: int
    items: int
    hashes: bytes


@dataclass(frozen=True)
class ShardPlace:
    """The place of a shard in a foreign file: the file's key below `Card.source`, the byte at which
    the shard begins, and the bytes of the whole file."""

    key: str
    start: int
    file_nbytes: int


@dataclass(frozen=True)
class CorpusIndex:
    """The shards of a split as one row of bytes, cut into chunks: each has at most `chunk_nbytes`
    and lies in one shard. `hashes`: uint64 (chunks, 2). `places`: of the shards in foreign files,
    which come first; `source`: the URL of those files, for messages."""

    chunk_nbytes: int
    shards: NDArray[Any]  # of _SHARD
    hashes: Uint64s
    places: tuple[ShardPlace, ...] = ()
    source: str = ""

    @functools.cached_property
    def shard_starts(self) -> Int64Array:
        """Start of each shard in the row, and the row's end: (shards + 1,) bytes."""
        return _starts(self.shards["nbytes"])

    @functools.cached_property
    def item_starts(self) -> Int64Array:
        """Number of items before each shard, and in all: (shards + 1,)."""
        return _starts(self.shards["items"])

    @functools.cached_property
    def first_chunks(self) -> Int64Array:
        """Number of the first chunk of each shard, and the count of chunks: (shards + 1,)."""
        return _starts(-(-self.shards["nbytes"].astype(np.int64) // self.chunk_nbytes))

    @functools.cached_property
    def starts(self) -> Int64Array:
        """Start of each chunk in the row, and the row's end: (chunks + 1,) bytes."""
        shard = np.repeat(np.arange(len(self.shards)), np.diff(self.first_chunks))
        within = np.arange(len(shard)) - self.first_chunks[shard]
        begins = self.shard_starts[shard] + within * self.chunk_nbytes
        return np.append(begins, self.shard_starts[-1])

    def place(self, chunk: int) -> tuple[str, int]:
        """Return (hash of the shard, number of the chunk within it)."""
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
        """Return a shard's name for messages about the corpus at `url`: its place."""
        if shard < len(self.places):
            return f"{self.source}/{self.places[shard].key}"
        return f"{url}/{shard_key(self.name(shard))}"

    def origin(self, chunk: int) -> tuple[int, str]:
        """Return (byte of its file at which a chunk begins, the operation that hashed it: "indexed"
        or "prepared")."""
        shard = self.shard_of(chunk)
        begin = (chunk - int(self.first_chunks[shard])) * self.chunk_nbytes
        if shard < len(self.places):
            return self.places[shard].start + begin, "indexed"
        return begin, "prepared"

    def chunks_of(self, start: int, end: int) -> range:
        """Return the chunks that contain the bytes [start, end) of the row."""
        (span,) = self.spans([(start, end)]).tolist()
        return range(*span)

    def spans(self, ranges: Sequence[tuple[int, int]]) -> Int64Array:
        """Return, for each [start, end) of the row, the first chunk that contains its bytes, and
        the one after the last: (n, 2)."""
        begins, ends = np.array(ranges, np.int64).reshape(-1, 2).T
        first = np.searchsorted(self.starts, begins, "right") - 1
        behind = np.searchsorted(self.starts, ends, "left")
        return np.stack([first, np.where(ends > begins, behind, first)], axis=1)

    def ids(self, chunks: Int64Array) -> Uint64s:
        """Return the first 64 bits of the hashes that these chunks must have, same shape."""
        found: Uint64s = self.hashes[chunks, 0]
        return found

    def contents(
        self, begins: Int64Array, ends: Int64Array, ids: Callable[[Int64Array], Uint64s]
    ) -> Int64Array:
        """Return 64 bits for the content of the bytes [begins, ends) of the row, (n,), as step
        records need them. They follow from the hashes of the chunks, so nothing is read. `ids`: see
        the method."""
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
        """Return the index that `encode` made. Raises CorpusCorrupt unless it is the one that the
        card names."""
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
    """Return the places in an encoded index. Raises BadObject, TypeError, ValueError."""
    rows = parsed(data, most_nbytes=len(data))
    return tuple(ShardPlace(checked_key(key), whole(a, 0), whole(n, 0)) for key, a, n in rows)


def _starts(sizes: NDArray[Any]) -> Int64Array:
    return np.concatenate([[0], np.cumsum(sizes.astype(np.int64))]).astype(np.int64)


def shard_key(name: str) -> str:
    return f"{SHARDS}{name}.bin"


def index_key(name: str) -> str:
    return f"{INDEXES}{name}.idx"


# The card and the index of a corpus, which every reader opens first.

KEPT_NBYTES = 256 << 10  # least size to cache; a smaller index loads as fast as its size


def card_of(store: ObjectStore) -> Card:
    """Return the corpus' card. Raises BadInput if there is no corpus, CorpusCorrupt, StoreError."""
    try:
        data = store.get(CARD)
    except NotFound:
        raise BadInput(
            f"{store.url}: wanted a corpus, found no {CARD}; `harness data prepare SOURCES... "
            f"{store.url}` makes one, and goes on with one that was interrupted"
        ) from None
    return Card.decode(data, f"{store.url}/{CARD}")


def index_of(
    store: ObjectStore, card: Card, split: SplitCard, cache: NodeCache | None = None
) -> CorpusIndex:
    """Return the index of a split, from the cache if it is there. Raises CorpusCorrupt,
    StoreError."""
    key = index_key(split.index)
    try:
        data = _index(store, key, split, card.chunk_nbytes, cache)
    except NotFound as e:
        raise CorpusCorrupt(f"{store.url}/{key}: wanted an index, found none") from e
    return CorpusIndex.decode(data, split, card.chunk_nbytes, f"{store.url}/{key}")


def _index(
    store: ObjectStore, key: str, split: SplitCard, chunk_nbytes: int, cache: NodeCache | None
) -> bytes:
    """Return the bytes of an index. Raises NotFound, StoreError."""
    least_nbytes = 16 * split.nbytes // chunk_nbytes
    if cache is None or least_nbytes < KEPT_NBYTES:
        return store.get(key)
    id = f"{BLAKE3}{split.index}-{store.size(key)}"
    with cache.turn([id]):
        if (data := cache.get(id)) is None or not is_chunk(id, data):
            data = store.get(key)
            if is_chunk(id, data):  # otherwise the decoder reports what is wrong
                cache.put({id: data})
    return data
