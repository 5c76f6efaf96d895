"""Bytes of a corpus by ranged reads: the chunk is the unit of reading, of checking by hash, and of
a small cache in memory.

Knows a store and an index; nothing of tokens, documents or torch. Between the memory and the store
lie the node's cache on disk (`chunk_cache.py`) and those of other nodes (`ask_peers`). Chunks from
elsewhere are provided by a `Fetch`; it need not be trusted, since each chunk is hashed.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from harness.core.batch import Uint64s
from harness.core.read_traffic import CACHE, PEER, Traffic
from harness.data.card import CorpusCorrupt, CorpusIndex, Int64Array, hash_of
from harness.data.chunk_cache import NodeCache
from harness.data.forked_reader import can_serve, forks
from storage.errors import NotFound, StoreError
from storage.snapshots.manifest import BLAKE3, is_chunk

if TYPE_CHECKING:
    from storage.tiers.tiers import Tier

# (hash of a shard, number of its chunk) -> the bytes, unchecked; raises StoreError
Fetch: TypeAlias = Callable[[str, int], bytes]
# (hash of a shard, number of a chunk, how many in a row) -> their bytes
FetchRun: TypeAlias = Callable[[str, int, int], bytes]
AT_ONCE = 16  # ranged reads of one process that run at the same time
CACHE_NBYTES = 64 << 20  # memory for chunks in each process
# the most that is fetched ahead, and the share of the node's cache (one part in so many)
AHEAD_NBYTES, AHEAD_SHARE = 128 << 20, 8
RUN_NBYTES = 1 << 20  # bytes of neighbours that are fetched ahead by one request
TRIES = 2  # fetches of a chunk with a wrong hash: one retry, as the transfer may be at fault


@dataclass(frozen=True)
class _Others:
    """The caches of other nodes. `leaves`: what was read from the store is written to them."""

    caches: Tier
    leaves: bool


class Chunks:
    """The bytes of a split, by their places in the row of its chunks. Any thread may call it.

    `cache`: the node's. `ask`: in a forked process, reads the store through its parent
    (`forked_reader.py`). `traffic`: counters of what was fetched so far.
    """

    def __init__(
        self,
        index: CorpusIndex,
        fetch: Fetch,
        where: str,
        cache_nbytes: int = CACHE_NBYTES,
        cache: NodeCache | None = None,
        ask: Callable[[int], bytes] | None = None,
        fetch_run: FetchRun | None = None,
    ):
        self.index, self.where, self._fetch, self.cache = index, where, fetch, cache
        self._ask, self._fetch_run = ask, fetch_run
        self._far_url = index.source or where  # URL of the data, which may be foreign files
        self.traffic = Traffic(self._far_url.partition("://")[0])
        self._others: _Others | None = None
        self.keep(cache_nbytes)
        self._held: OrderedDict[int, bytes] = OrderedDict()
        self._hashed = np.zeros(len(index.hashes), np.bool_)  # chunks read and verified here
        self._coming: dict[int, Future[bytes]] = {}
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def keep(self, nbytes: int) -> None:
        """Limit the chunks in memory to this many bytes."""
        self.room = max(1, nbytes // self.index.chunk_nbytes)  # chunks

    @property
    def read_nbytes(self) -> int:
        """Bytes fetched so far from anywhere except the node's cache."""
        return self.traffic.nbytes[self.traffic.far]

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes [start, end) of the row. Raises CorpusCorrupt, StoreError."""
        (found,) = self.read_each([(start, end)])
        return bytes(found)

    def read_each(self, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes | memoryview]:
        """Yield the bytes of each [start, end) of the row, not copied where they lie in one chunk.
        Raises CorpusCorrupt, StoreError."""
        spans = self.index.spans(ranges)
        begins = self.index.starts[spans[:, 0]]
        for (start, end), (first, behind), begin in zip(
            ranges, spans.tolist(), begins.tolist(), strict=True
        ):
            if behind - first == 1:
                found = self._chunk(first)
            else:
                found = b"".join(map(self._chunk, range(first, behind)))
            yield memoryview(found)[start - begin : end - begin]

    def ask_peers(self, peers: Tier | None, nodes: int, once: bool) -> None:
        """Read through the caches of other nodes from now on (`peers`; None means no longer), and
        write to them what they lacked. `nodes`: their number in all. `once`: a pass over the data
        reads each chunk on one node only, so chunks are written only if all caches together hold a
        whole pass."""
        if self.cache is None:
            return
        leaves = not once or nodes * self.cache.nbytes >= int(self.index.starts[-1])
        self._others = None if peers is None else _Others(peers, leaves)

    def serve(self, number: int) -> bytes:
        """Return a chunk for a forked process. It is kept here only if there is no cache. Raises
        CorpusCorrupt, StoreError."""
        return self._chunk(number, keep=self.cache is None)

    def ahead(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Fetch the missing chunks of these ranges, several at once, but no more than memory
        holds."""
        with self._lock:
            missing = [n for n in self._numbers(ranges) if n not in self._held][: self.room]
        near = self._cached(missing)  # sequentially, which is quicker than dispatching to threads
        for number, one in near.items():
            self._hashed[number] = True
            self._keep(number, one)
        missing = [number for number in missing if number not in near]
        if len(missing) < 2:
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(AT_ONCE, "chunks")
        for _ in self._pool.map(self._chunk, missing):
            pass

    def pieces(self, ranges: Sequence[tuple[int, int]]) -> list[ChunkAhead]:
        """Return the chunks of these ranges in their order, as units of fetching ahead."""
        return [ChunkAhead(self, number) for number in sorted(self._numbers(ranges))]

    def _numbers(self, ranges: Sequence[tuple[int, int]]) -> dict[int, None]:
        """Return the chunks of these ranges, in their order, each once."""
        spans = self.index.spans(ranges).tolist()
        return dict.fromkeys(n for first, behind in spans for n in range(first, behind))

    def warm(self, numbers: Sequence[int]) -> None:
        """Fetch chunks that will be read soon: into the node's cache, or into this process's memory
        if there is none. Raises nothing: the later read raises what is wrong."""
        if self.cache is not None:
            near = [number for number in numbers if self.cache.touch(self._id(number))]
            with self._lock:
                self.traffic.nbytes[CACHE] += sum(map(self.nbytes, near))
            numbers = sorted({*numbers} - {*near})
        with self._lock:
            mine = [n for n in numbers if n not in self._held and n not in self._coming]
            coming = {n: Future[bytes]() for n in mine}
            self._coming |= coming
        if mine:
            self._leave(self._bring(coming, keep=self.cache is None))

    def ahead_nbytes(self, processes: int) -> int:
        """Return the most bytes that one of this many processes of the node may fetch ahead, so
        that it evicts neither its own chunks nor those that others will read. 0 if fetching ahead
        is useless, since a DataLoader's processes read for themselves."""
        if self.cache is None:
            serves = can_serve(self._far_url) and forks()
            return self.room * self.index.chunk_nbytes // AHEAD_SHARE if serves else 0
        return min(AHEAD_NBYTES, self.cache.nbytes // AHEAD_SHARE // processes)

    def nbytes(self, number: int) -> int:
        return int(self.index.starts[number + 1] - self.index.starts[number])

    def ids(self, chunks: Int64Array) -> Uint64s:
        """Return the same as `CorpusIndex.ids`, for chunks that were read here. Only bytes with the
        right hash are ever returned, so a chunk that was read once need not be held."""
        for number in chunks[~self._hashed[chunks]].tolist():
            self._chunk(number)
        return self.index.ids(chunks)

    def _id(self, number: int) -> str:
        """Return the chunk's name in the node's cache."""
        return f"{BLAKE3}{self.index.hashes[number].tobytes().hex()}-{self.nbytes(number)}"

    def _chunk(self, number: int, keep: bool = True) -> bytes:
        """Return a chunk. `keep`: hold it in memory, since it is about to be read here."""
        with self._lock:
            if (held := self._held.get(number)) is not None:
                self._held.move_to_end(number)
                return held
            there = self._coming.get(number)
            if there is None:
                coming = self._coming[number] = Future()
        if there is None:
            self._bring({number: coming}, keep)
            return coming.result()
        found = there.result()
        if keep:
            self._keep(number, found)
        return found

    def _keep(self, number: int, found: bytes) -> None:
        with self._lock:
            self._held[number] = found
            while len(self._held) > self.room:
                self._held.popitem(last=False)

    def _bring(self, coming: Mapping[int, Future[bytes]], keep: bool) -> dict[int, bytes]:
        """Fetch these chunks, for which others may be waiting already. Return those that no node
        had."""
        fresh: dict[int, bytes] = {}
        try:
            found = self._near(list(coming), fresh)
        except BaseException as e:
            found = dict.fromkeys(coming, e)
        for number, future in coming.items():
            one = found[number]
            if isinstance(one, BaseException):
                future.set_exception(one)
            else:
                self._hashed[number] = True
                future.set_result(one)
                if keep:
                    self._keep(number, one)
        with self._lock:
            for number in coming:
                del self._coming[number]
        return fresh

    def _leave(self, fresh: Mapping[int, bytes]) -> None:
        """Write chunks to the nodes that others will ask for them first. No reader waits for
        that."""
        if (others := self._others) is not None and others.leaves:
            for number, one in fresh.items():  # one by one, since each has its own home node
                others.caches.put({self._id(number): one})

    def _near(
        self, numbers: Sequence[int], fresh: dict[int, bytes]
    ) -> dict[int, bytes | BaseException]:
        """Return chunks from the node's cache, or fetch them through it. What no node had is added
        to `fresh`."""
        found: dict[int, bytes | BaseException] = {}
        found |= self._cached(numbers)
        if (cache := self.cache) is None or self._ask is not None:  # the parent fills the cache
            return found | self._far_each([n for n in numbers if n not in found])
        if missing := {n: self._id(n) for n in numbers if n not in found}:
            with cache.turn(missing.values()):
                found |= self._cached(list(missing))
                left = self._from_peers({n: id for n, id in missing.items() if n not in found})
                far = self._far_each([n for n in missing if n not in found and n not in left])
                fresh |= {n: one for n, one in far.items() if isinstance(one, bytes)}
                cache.put({missing[n]: one for n, one in (left | fresh).items()})
                found |= left | far
        return found

    def _from_peers(self, ids: Mapping[int, str]) -> dict[int, bytes]:
        """Return the chunks that other nodes have with the right hash."""
        if (others := self._others) is None:
            return {}
        said = {number: others.caches.get(id) for number, id in ids.items()}
        found = {n: bytes(one) for n, one in said.items() if one and is_chunk(ids[n], one)}
        with self._lock:
            self.traffic.nbytes[PEER] += sum(map(len, found.values()))
        return found

    def _cached(self, numbers: Sequence[int]) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        if (cache := self.cache) is None:
            return found
        for number in numbers:
            id = self._id(number)
            if (data := cache.get(id)) is None:
                continue
            if is_chunk(id, data):
                found[number] = data
            else:  # the disk's fault, not the store's
                cache.drop(id)
        return found

    def _far_each(self, numbers: Sequence[int]) -> dict[int, bytes | BaseException]:
        """Return chunks from the store: neighbours in one request if their hashes are right, else
        one by one."""
        found: dict[int, bytes | BaseException] = {}
        for number in numbers:
            if number in found:
                continue
            try:
                found |= self._far_run(number, numbers)
                if number not in found:
                    found[number] = self._far(number)
            except (CorpusCorrupt, StoreError) as e:
                found[number] = e
        return found

    def _far_run(self, first: int, numbers: Sequence[int]) -> dict[int, bytes]:
        """Return the chunks of `numbers` that follow one another in a shard from `first` on and
        have the right hash; {} if there is only one, or if they can only be fetched one by one.
        Raises StoreError."""
        if self._fetch_run is None or self._ask is not None:
            return {}
        index = self.index
        number = index.shard_of(first)
        shard, within = index.name(number), first - int(index.first_chunks[number])
        count = next(i for i in itertools.count(1) if first + i not in numbers)
        left = int(index.first_chunks[number + 1]) - first
        count = min(count, left, max(1, RUN_NBYTES // index.chunk_nbytes))
        if count < 2:
            return {}
        try:
            with self._noted(f"{index.told(number, self.where)}#{within}"):
                data = memoryview(self._fetch_run(shard, within, count))
                self._count(len(data))
        except NotFound:
            return {}  # the single fetch reports what is missing
        found: dict[int, bytes] = {}
        for i in range(count):
            one = data[i * self.index.chunk_nbytes :][: self.nbytes(first + i)]
            if hash_of(one) == self.index.hashes[first + i].tobytes():
                found[first + i] = bytes(one)
        return found

    def _far(self, number: int) -> bytes:
        """Return one chunk from the store. Raises CorpusCorrupt, StoreError."""
        shard, within = self.index.place(number)
        wanted, nbytes = self.index.hashes[number].tobytes(), self.nbytes(number)
        where, data = self.index.told(self.index.shard_of(number), self.where), b""
        for _ in range(TRIES):
            try:
                with self._noted(f"{where}#{within}"):
                    data = self._ask(number) if self._ask else self._fetch(shard, within)
                    self._count(len(data))
            except NotFound as e:
                raise CorpusCorrupt(
                    f"{where}: wanted a shard that the corpus consists of, found none; restore it, "
                    "or make the corpus again"
                ) from e
            if hash_of(data) == wanted:
                return data
        begin, made = self.index.origin(number)
        what = f"only {len(data)} (it was cut)" if len(data) < nbytes else "others"
        raise CorpusCorrupt(
            f"{where}: wanted the {nbytes} bytes from {begin} on as they were {made}, found "
            f"{what}, {TRIES} times; nothing of it is trained on; restore the shard, or make the "
            "corpus again; `harness data verify` names all that is damaged"
        )

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.traffic.requests += 1
            self.traffic.nbytes[self.traffic.far] += nbytes

    @contextlib.contextmanager
    def _noted(self, what: str) -> Iterator[None]:
        """Record that `what` is being fetched, while the context is open."""
        self.traffic.coming[what] = time.monotonic()
        try:
            yield
        finally:
            self.traffic.coming.pop(what, None)


class ChunkAhead(NamedTuple):
    """Consecutive chunks that will be read, usually one: a unit of what `run.steps` fetches
    ahead."""

    chunks: Chunks
    first: int
    length: int = 1

    @property
    def nbytes(self) -> int:
        return sum(self.chunks.nbytes(self.first + i) for i in range(self.length))

    def joined(self, other: object) -> ChunkAhead | None:
        """Return both as one request; None if they do not follow one another, or are too large."""
        if not isinstance(other, ChunkAhead) or other.chunks is not self.chunks:
            return None
        follows = other.first == self.first + self.length
        if not follows or self.nbytes + other.nbytes > RUN_NBYTES:
            return None
        return ChunkAhead(self.chunks, self.first, self.length + other.length)

    def warm(self) -> None:
        self.chunks.warm(range(self.first, self.first + self.length))
