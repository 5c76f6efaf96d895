"""Datasets over a corpus: windows of tokens, and records; map-style, read by random access.

    train = harness.data.Tokens("s3://bucket/corpus", length=4096)
    for step in run.steps(train, total=..., global_batch=..., micro_batch=...): ...

Runs in the worker and in a DataLoader's processes; needs no torch (a DataLoader makes tensors of
the arrays). `run.steps` also uses these attributes of a dataset: `fingerprint`, `read_ahead`,
`draws`, `by_thread`, `hold`, `content_ids`; for fetching ahead `pieces`, `ahead_nbytes`, `traffic`;
and for sharing between nodes `caches`, `ask_peers`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from harness.core.read_traffic import Traffic
from harness.core.world import BadInput
from harness.data.card import DTYPES, END, RECORDS, TOKENS, CorpusCorrupt, Int64Array
from harness.data.chunk_reader import ChunkAhead
from harness.data.corpus import CorpusReader
from harness.data.exclusions import (
    NEWEST,
    ExclusionList,
    hashed_anew,
    history,
    instead,
    list_of,
    marked,
    merged_ranges,
)
from harness.data.formats import ForeignItems
from storage.canonical_json import BadObject, canonical, parsed, whole

if TYPE_CHECKING:
    from storage.tiers.tiers import Tier


# Foreign StreamingDatasets, read by index: whole on every rank, in the order of `run.steps`.


class ByIndex:
    """A map-style dataset of all samples of `dataset`: a StreamingDataset of MosaicML's streaming
    or of LitData. Each process gets its own connections and files, as with the original. Raises
    BadInput."""

    def __init__(self, dataset: Any):
        env = getattr(dataset, "distributed_env", None)
        if env is not None and hasattr(dataset, "set_num_workers"):  # LitData's
            dataset.distributed_env = type(env)(1, 0, 1)
            self._samples = len(dataset)
        elif hasattr(dataset, "epoch_size") and hasattr(dataset, "size"):  # MosaicML's
            self._samples = int(dataset.size)
        else:
            raise BadInput(
                f"ByIndex({type(dataset).__name__}): wanted a StreamingDataset of MosaicML's "
                "streaming or of LitData, found another; run.steps takes any other dataset with "
                "__getitem__ and __len__ as it is"
            )
        self.dataset = dataset

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, i: int) -> Any:
        if not 0 <= i < self._samples:
            raise IndexError(f"item {i} of {self._samples}")
        return self.dataset[i]


# Encoding of a record as bytes: a header line with each field's name and length, then the values.


def framed(record: Mapping[str, bytes]) -> bytes:
    """Return the record as bytes. The order of the fields is kept."""
    head = canonical([[name, len(value)] for name, value in record.items()])
    return b"".join((head, b"\n", *record.values()))


def unframed(data: bytes) -> dict[str, bytes]:
    """Return the record that `framed` encoded. Raises CorpusCorrupt."""
    head, _, body = data.partition(b"\n")
    try:
        rows = parsed(head)
        fields = [(str(name), whole(nbytes, 0)) for name, nbytes in rows]
        if not isinstance(rows, list):
            raise BadObject(f"wanted a list of fields, found {type(rows).__name__}")
    except (BadObject, TypeError, ValueError) as e:
        raise CorpusCorrupt(f"wanted a record as it was prepared, found {data[:40]!r}") from e
    if sum(nbytes for _, nbytes in fields) != len(body):
        raise CorpusCorrupt(f"wanted a record of {fields}, found {len(body)} bytes")
    record, at = {}, 0
    for name, nbytes in fields:
        record[name] = body[at : at + nbytes]
        at += nbytes
    return record


IGNORED = -100  # a target that losses leave out, as torch's cross_entropy does
BOUNDARIES = ("", "documents", "cu_seqlens")
# Chunks in a block of neighbours (core/sample_order.py). With more of them, fewer are read twice
# because two blocks share them. Runs depend on the value that they began with, so it must never
# change.
BLOCK_CHUNKS = 16
Ranges = list[tuple[int, int]]
_FINGERPRINT = re.compile(
    r"corpus:(?P<content>[0-9a-f]{32}):(?P<split>\w+):"
    r"(?:tokens:(?P<length>[1-9]\d{0,11}):(?P<boundaries>plain|documents|cu_seqlens)|records:.*)"
)


_Leaving = TypeVar("_Leaving", bound="_LeavesOut")


class _LeavesOut:
    """Support for the corpus' exclusion lists (exclusions.py) in both datasets. `excluded`: the
    number of the list in force; 0 means none."""

    _reader: CorpusReader
    excluded = 0
    _out: Int64Array  # (n, 2): tokens or records of the split that are left out
    _void: Int64Array  # (n, 2): items that are left out completely

    @property
    def url(self) -> str:
        return self._reader.url

    @property
    def split(self) -> str:
        return self._reader.split.name

    def exclude(self, number: int = NEWEST) -> None:
        """Leave out what this list of the corpus names; 0 leaves out nothing. A new dataset uses
        the newest list, and `run.steps` the newest that any rank has. Raises BadInput,
        CorpusCorrupt, StoreError."""
        self._leave_out(list_of(self._reader.store, self._reader.card, number))

    def _leave_out(self, found: ExclusionList) -> None:
        # contiguous columns, since they are searched for each item
        self.excluded = found.number
        self._out = np.asfortranarray(found.ranges(self._reader.split.name))
        self._void = np.asfortranarray(self._voided(self._out))
        if np.array_equal(self._void, [[0, len(self)]]):
            raise BadInput(
                f"{self._reader.url}: wanted something to read, found that the exclusion list "
                f"{found.number} leaves nothing of the split {self._reader.split.name!r}"
            )

    def under_each_list(self: _Leaving) -> list[_Leaving]:
        """Return the dataset under each exclusion list of its corpus, the empty list first. Raises
        CorpusCorrupt, BadInput, StoreError."""
        out = []
        for one in history(self._reader.store, self._reader.card):
            out.append(copy.copy(self))
            out[-1]._leave_out(one)
        return out

    def _voided(self, out: Int64Array) -> Int64Array:
        return out

    def __len__(self) -> int:
        raise NotImplementedError

    def _instead(self, indices: Sequence[int]) -> list[int]:
        """Return the items that are read in place of these: see `instead`."""
        n = len(self)
        items = np.array([_within(i, n) for i in indices], np.int64)
        found: list[int] = instead(items, self._void, n).tolist()
        return found


class _Ahead:
    """Support for fetching chunks ahead, which `run.steps` does (`worker/batches/prefetch.py`)."""

    _reader: CorpusReader

    @property
    def traffic(self) -> list[Traffic]:
        """Counters of what this process has read so far."""
        return [self._reader.chunks.traffic]

    def pieces(self, indices: Sequence[int]) -> list[ChunkAhead]:
        """Return the chunks in which these items lie."""
        return self._reader.chunks.pieces(self._ranges(indices))

    def ahead_nbytes(self, processes: int) -> int:
        """Return the most bytes that one of this many processes of the node may fetch ahead."""
        return self._reader.chunks.ahead_nbytes(processes)

    @property
    def caches(self) -> dict[str, int]:
        """This node's caches: folder -> its limit in bytes."""
        cache = self._reader.chunks.cache
        return {} if cache is None else {str(cache.folder): cache.nbytes}

    def ask_peers(self, peers: Tier | None, nodes: int, once: bool) -> None:
        """Share chunks with other nodes: see `Chunks.ask_peers`."""
        self._reader.chunks.ask_peers(peers, nodes, once)

    def scattered(self, nodes: int) -> str:
        """Return why random order is expensive on this many nodes: see `CorpusReader.scattered`."""
        return self._reader.scattered(self._mean_nbytes, nodes)

    @property
    def _mean_nbytes(self) -> int:
        """Mean size of an item, in bytes."""
        raise NotImplementedError

    def _ranges(self, indices: Sequence[int]) -> Ranges:
        raise NotImplementedError


class Tokens(_LeavesOut, _Ahead):
    """Non-overlapping windows of `length` tokens of a corpus, in the order of its documents, which
    follow one another without padding. Item i: (input (T,), target (T,)), int64 arrays; the target
    is the input one token later.

    `boundaries` adds the ends of documents, for attention: "documents" adds int32 (T,), the number
    of each input's document within the window (0, 1, ...); "cu_seqlens" adds int32 (n + 1,), the
    start of each and the end of the last, as variable-length attention takes it (see `packed`).
    The first token of a document is then no target (-100).

    Documents that the corpus' newest exclusion list names have `eos` as inputs and -100 as targets.
    A window without any other target is replaced by the next one that has some, so that no loss is
    a mean of nothing.

    Other arguments: see `CorpusReader`. Raises BadInput, CorpusCorrupt, StoreError.
    """

    def __init__(
        self,
        url: str,
        length: int = 4096,
        *,
        split: str = "train",
        boundaries: str = "",
        **reading: Any,
    ):
        if length < 1:
            raise BadInput(f"Tokens(length={length}): wanted at least 1 token")
        if boundaries not in BOUNDARIES:
            names = ", ".join(repr(one) for one in BOUNDARIES)
            raise BadInput(f"Tokens(boundaries={boundaries!r}): wanted one of {names}")
        self._reader = CorpusReader(url, split, TOKENS, **reading)
        self.card, self.length, self.boundaries = self._reader.card, length, boundaries
        self._dtype = DTYPES[self.card.dtype]
        if boundaries and self.card.eos < 0:
            raise BadInput(
                f"Tokens({url}, boundaries={boundaries!r}): wanted a corpus that says which token "
                "ends a document, found none; index it again with --eos"
            )
        if not len(self):
            raise BadInput(
                f"{url}: wanted at least {length + 1} tokens in the split {split!r}, for one "
                f"window, found {self._reader.split.items}; lower length="
            )
        self.exclude()

    def __len__(self) -> int:
        return max(0, self._reader.split.items - 1) // self.length

    def __getitem__(self, i: int) -> tuple[np.ndarray[Any, Any], ...]:
        return self._items(self._ranges([i]))[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[np.ndarray[Any, Any], ...]]:
        """Return many items at once, as a DataLoader requests them."""
        ranges = self._ranges(indices)
        self._reader.chunks.ahead(ranges)
        return [self[i] for i in indices] if self.draws else self._items(ranges)

    @property
    def draws(self) -> bool:
        """True if reading an item may draw from a generator. A subclass with its own `__getitem__`
        may, and its items are read through that method."""
        return type(self).__getitem__ is not Tokens.__getitem__

    def by_thread(self, in_turns: int) -> bool:
        """Return whether a thread of the training's process suffices to read items, where
        `in_turns` neighbours are read in turns. Their chunks must fit in memory."""
        return not self.draws and self._reader.may_hold(in_turns * self._mean_nbytes)

    def hold(self, in_turns: int) -> None:
        """Keep in memory the chunks of this many neighbouring items."""
        self._reader.hold(in_turns * self._mean_nbytes)

    def _items(self, ranges: Ranges) -> list[tuple[np.ndarray[Any, Any], ...]]:
        rows = np.empty((len(ranges), self.length + 1), np.int64)
        for row, found in zip(rows, self._reader.chunks.read_each(ranges), strict=True):
            row[:] = np.frombuffer(found, self._dtype)
        return [self._item(row, *place) for row, place in zip(rows, ranges, strict=True)]

    def _item(
        self, tokens: np.ndarray[Any, Any], start: int, end: int
    ) -> tuple[np.ndarray[Any, Any], ...]:
        """Return the item of the tokens at the bytes [start, end)."""
        inputs, targets = tokens[:-1], tokens[1:]
        if len(self._out):
            size = self._dtype.itemsize
            out = marked(self._out, start // size, end // size)
            inputs = np.where(out[:-1], self.card.eos, inputs)
            targets = np.where(out[:-1] | out[1:], IGNORED, targets)
        if not self.boundaries:
            return inputs, targets
        ends = tokens[:-1] == self.card.eos
        targets = np.where(ends, IGNORED, targets)
        if self.boundaries == "documents":
            return inputs, targets, (np.cumsum(ends) - ends).astype(np.int32)
        edges = np.union1d(np.flatnonzero(ends) + 1, [0, self.length])
        return inputs, targets, edges.astype(np.int32)

    def read_ahead(self, indices: Sequence[int]) -> None:
        """Fetch the chunks of these items, with several reads at once."""
        self._reader.chunks.ahead(self._ranges(indices))

    def content_ids(self, indices: Sequence[int], as_read: bool = True) -> Int64Array:
        """Return 64 bits that identify each item's content, (n,): from the bytes that were read
        here (`as_read`) or from the index alone, combined with what is left out of the item."""
        ranges = self._ranges(indices)
        found = self._reader.contents(ranges, as_read)
        begins, ends = np.array(ranges, np.int64).reshape(-1, 2).T // self._dtype.itemsize
        return hashed_anew(found, self._out, begins, ends)

    @property
    def block_items(self) -> int:
        """Items in a block of `run.steps(shuffle="blocks")`."""
        return max(1, BLOCK_CHUNKS * self.card.chunk_nbytes // self._mean_nbytes)

    @property
    def _mean_nbytes(self) -> int:
        return self.length * self._dtype.itemsize

    @property
    def fingerprint(self) -> str:
        return self._reader.named(f"tokens:{self.length}:{self.boundaries or 'plain'}")

    def _ranges(self, indices: Sequence[int]) -> Ranges:
        size, length = self._dtype.itemsize, self.length
        starts = [i * length for i in self._instead(indices)]
        return [(start * size, (start + length + 1) * size) for start in starts]

    def _voided(self, out: Int64Array) -> Int64Array:
        """Return the windows without a target. A document at [s, e), with its `eos` at e, makes the
        targets from s to e void, and the one after if boundaries are kept."""
        dead = merged_ranges(out + np.array([0, 2 if self.boundaries else 1]))
        first, last = -(-(dead[:, 0] - 1) // self.length), (dead[:, 1] - 1) // self.length
        return merged_ranges(np.clip(np.stack([first, last], axis=1), 0, len(self)))


class Records(_LeavesOut, _Ahead):
    """Records of a corpus: anything that was prepared as records, images and audio included, and
    foreign datasets that were indexed. Item i: `decode(record)`, or the record itself, a dict of
    bytes by field name. `decode` runs where the item is read, and may draw from the global
    generators, which `run.steps` seeds by the position. A record that the corpus' newest exclusion
    list names is replaced by the next one that it does not. Other arguments: see `CorpusReader`.
    Raises BadInput, CorpusCorrupt, StoreError."""

    def __init__(
        self,
        url: str,
        decode: Callable[[dict[str, bytes]], Any] | None = None,
        *,
        split: str = "train",
        **reading: Any,
    ):
        self._reader = CorpusReader(url, split, RECORDS, **reading)
        self.card, self.decode = self._reader.card, decode
        self._foreign: ForeignItems | None = None  # belongs to this process; not pickled
        if not len(self):
            raise BadInput(f"{url}: wanted records in the split {split!r}, found none")
        self.exclude()

    def __len__(self) -> int:
        return self._reader.split.items

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_foreign": None}

    def __getitem__(self, i: int) -> Any:
        found = self._instead([i])
        (place,), foreign = self._places(found), self._others()
        if foreign is None:
            record = unframed(self._reader.chunks.read(*place))
        else:
            record = foreign.record(found[0], place)
        return record if self.decode is None else self.decode(record)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return many items at once, as a DataLoader requests them."""
        self.read_ahead(indices)
        return [self[i] for i in indices]

    def read_ahead(self, indices: Sequence[int]) -> None:
        """Fetch the chunks of these items, with several reads at once."""
        if (foreign := self._others()) is not None:
            foreign.read_ahead(self._instead(indices))
        else:
            self._reader.chunks.ahead(self._ranges(indices))

    def content_ids(self, indices: Sequence[int], as_read: bool = True) -> Int64Array:
        """Return the same as `Tokens.content_ids`, of the records before `decode`. The places of
        the records are read from the corpus in any case."""
        items, foreign = self._instead(indices), self._others()
        found = self._reader.contents(self._places(items), as_read)
        return foreign.apart(found, items) if foreign else found

    @property
    def block_items(self) -> int:
        """Items in a block, as in `Tokens.block_items`, for records of the mean size."""
        split = self._reader.split
        return max(1, BLOCK_CHUNKS * self.card.chunk_nbytes * split.items // split.nbytes)

    @property
    def _mean_nbytes(self) -> int:
        split = self._reader.split
        return split.nbytes // max(1, split.items)

    @property
    def fingerprint(self) -> str:
        return self._reader.named(f"records:{_name_of(self.decode)}")

    def _others(self) -> ForeignItems | None:
        """Return the finder of items in foreign files, if the corpus consists of such."""
        chunks = self._reader.chunks
        if self.card.layout and (self._foreign is None or self._foreign.chunks is not chunks):
            self._foreign = ForeignItems(self.card, chunks)
        return self._foreign

    def _entries(self, indices: Sequence[int]) -> Ranges:
        """Return, for each record, where the table behind its shard's records holds the ends of the
        record before it and of itself; for a shard's first record, of itself alone."""
        index, out = self._reader.index, []
        for i in indices:
            shard = index.shard_of_item(i)
            within, items = i - int(index.item_starts[shard]), index.shards["items"]
            table = int(index.shard_starts[shard + 1]) - END.itemsize * int(items[shard])
            low = max(0, within - 1)
            out.append((table + low * END.itemsize, table + (within + 1) * END.itemsize))
        return out

    def _ranges(self, indices: Sequence[int]) -> Ranges:
        return self._places(self._instead(indices))

    def _places(self, found: Sequence[int]) -> Ranges:
        if (foreign := self._others()) is not None:
            return foreign.ranges(found)
        chunks, entries, out = self._reader.chunks, self._entries(found), []
        chunks.ahead(entries)
        for i, place in zip(found, entries, strict=True):
            shard = chunks.index.shard_of_item(i)
            ends = np.frombuffer(chunks.read(*place), END)
            begin = int(chunks.index.shard_starts[shard])
            start = begin + (int(ends[0]) if len(ends) == 2 else 0)
            end = begin + int(ends[-1])
            if not start <= end <= int(chunks.index.shard_starts[shard + 1]):
                raise CorpusCorrupt(f"{chunks.where}: record {i} ends before it begins")
            out.append((start, end))
        return out


def packed(
    items: Sequence[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]],
) -> Mapping[str, Any]:
    """Collate windows of `Tokens(boundaries="cu_seqlens")`: a micro-batch of b windows as one row,
    as variable-length attention takes it. Tensors: `input_ids` and `labels` int64 (1, b T),
    `cu_seqlens` int32 (documents + 1,); and `max_seqlen`, tokens of the longest document."""
    import torch

    inputs, targets, edges = zip(*items, strict=True)
    steps = [np.diff(one) for one in edges]
    lengths = np.concatenate(steps)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return {
        "input_ids": torch.from_numpy(np.concatenate(inputs))[None],
        "labels": torch.from_numpy(np.concatenate(targets))[None],
        "cu_seqlens": torch.from_numpy(cu_seqlens),
        "max_seqlen": int(lengths.max()),
    }


packed.draws = False  # type: ignore[attr-defined]  # so a thread may call it (worker/batches/loader.py)


def named_by(fingerprint: str, url: str, **reading: Any) -> Tokens | Records:
    """Return the dataset with this fingerprint, of the corpus at `url`, for proving what a run has
    read. `reading`: see `CorpusReader`. Raises BadInput if it is another corpus."""
    found = _FINGERPRINT.fullmatch(fingerprint)
    if found is None:
        raise BadInput(
            f"{url}: wanted what a run read of a corpus, found that its data are "
            f"{fingerprint[:200]!r}; only harness.data.Tokens and Records can be proved by their "
            "contents"
        )
    content, split, length, boundaries = found.group("content", "split", "length", "boundaries")
    reading = {"cache": None, **reading}
    dataset: Tokens | Records
    if length:
        shape = "" if boundaries == "plain" else boundaries
        dataset = Tokens(url, int(length), split=split, boundaries=shape, **reading)
    else:
        dataset = Records(url, split=split, **reading)
    if dataset.card.content != content:
        raise BadInput(
            f"{url}: wanted the corpus that the run read, with content {content}, found another, "
            f"{dataset.card.content}; name the URL of that one"
        )
    return dataset


def _within(i: int, length: int) -> int:
    if not -length <= i < length:
        raise IndexError(f"item {i} of {length}")
    return int(i) % length


def _name_of(decode: Callable[..., Any] | None) -> str:
    if decode is None:
        return "plain"
    name = getattr(decode, "__qualname__", type(decode).__qualname__)
    return f"{getattr(decode, '__module__', '')}.{name}"
