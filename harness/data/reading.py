"""Datasets over a corpus: windows of tokens, and records; map-style, read by random access.

    train = harness.data.Tokens("s3://bucket/corpus", length=4096)
    for step in run.steps(train, total=..., global_batch=..., micro_batch=...): ...

Runs in the worker and in a DataLoader's processes; needs no torch (a DataLoader makes tensors of
the arrays). What `run.steps` asks of a dataset besides: `fingerprint`, `read_ahead`, `draws`,
`by_thread`, `hold`, `content_ids`, what it fetches ahead: `pieces`, `ahead_nbytes`, `traffic`; and
what nodes have for each other: `caches`, `ask_peers`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from harness.core.traffic import Traffic
from harness.core.world import BadInput
from harness.data.card import DTYPES, END, RECORDS, TOKENS, CorpusCorrupt, Int64Array
from harness.data.chunks import ChunkAhead
from harness.data.corpus import CorpusReader
from harness.data.excluding import (
    NEWEST,
    ExclusionList,
    hashed_anew,
    history,
    instead,
    joined,
    list_of,
    marked,
)
from harness.data.foreign_items import ForeignItems
from harness.data.framing import unframed

if TYPE_CHECKING:
    from storage.tiers import Tier

IGNORED = -100  # a target that losses leave out, as torch's cross_entropy does
BOUNDARIES = ("", "documents", "cu_seqlens")
# of a block of neighbours (core/blocks.py): the more, the fewer are read twice because two blocks
# share them; runs know what they began with, so it must never change
BLOCK_CHUNKS = 16
Ranges = list[tuple[int, int]]
_FINGERPRINT = re.compile(
    r"corpus:(?P<content>[0-9a-f]{32}):(?P<split>\w+):"
    r"(?:tokens:(?P<length>[1-9]\d{0,11}):(?P<boundaries>plain|documents|cu_seqlens)|records:.*)"
)


_Leaving = TypeVar("_Leaving", bound="_LeavesOut")


class _LeavesOut:
    """What both datasets do about the corpus' exclusion lists (excluding.py). `excluded`: number of
    the list that is in force here; 0: none."""

    _reader: CorpusReader
    excluded = 0
    _out: Int64Array  # (n, 2): tokens or records of the split that are left out
    _void: Int64Array  # (n, 2): items of which nothing is left

    @property
    def url(self) -> str:
        return self._reader.url

    @property
    def split(self) -> str:
        return self._reader.split.name

    def exclude(self, number: int = NEWEST) -> None:
        """Leave out what this list of the corpus says; 0: nothing. A dataset takes the newest one
        when it is made, and `run.steps` the newest that any rank has. Raises BadInput,
        CorpusCorrupt, StoreError."""
        self._leave_out(list_of(self._reader.store, self._reader.card, number))

    def _leave_out(self, found: ExclusionList) -> None:
        # columns that lie together: they are searched for each item
        self.excluded = found.number
        self._out = np.asfortranarray(found.ranges(self._reader.split.name))
        self._void = np.asfortranarray(self._voided(self._out))
        if np.array_equal(self._void, [[0, len(self)]]):
            raise BadInput(
                f"{self._reader.url}: wanted something to read, found that the exclusion list "
                f"{found.number} leaves nothing of the split {self._reader.split.name!r}"
            )

    def under_each_list(self: _Leaving) -> list[_Leaving]:
        """The dataset as it is under each exclusion list of its corpus, the empty one first. Raises
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
        """The items that are read for these: see `instead`."""
        n = len(self)
        items = np.array([_within(i, n) for i in indices], np.int64)
        found: list[int] = instead(items, self._void, n).tolist()
        return found


class _Ahead:
    """What `run.steps` asks of a dataset whose chunks it fetches ahead (`worker/prefetch.py`)."""

    _reader: CorpusReader

    @property
    def traffic(self) -> list[Traffic]:
        """What this process has read so far."""
        return [self._reader.chunks.traffic]

    def pieces(self, indices: Sequence[int]) -> list[ChunkAhead]:
        """The chunks that these items lie in."""
        return self._reader.chunks.pieces(self._ranges(indices))

    def ahead_nbytes(self, processes: int) -> int:
        """The most that may be fetched ahead by one of so many processes of this node."""
        return self._reader.chunks.ahead_nbytes(processes)

    @property
    def caches(self) -> dict[str, int]:
        """Of this node: folder -> its bound in bytes."""
        cache = self._reader.chunks.cache
        return {} if cache is None else {str(cache.folder): cache.nbytes}

    def ask_peers(self, peers: Tier | None, nodes: int, once: bool) -> None:
        """See `Chunks.ask_peers`."""
        self._reader.chunks.ask_peers(peers, nodes, once)

    def scattered(self, nodes: int) -> str:
        """Why it costs to read items in no order, by so many nodes: see `CorpusReader`."""
        return self._reader.scattered(self._mean_nbytes, nodes)

    @property
    def _mean_nbytes(self) -> int:
        """Of an item."""
        raise NotImplementedError

    def _ranges(self, indices: Sequence[int]) -> Ranges:
        raise NotImplementedError


class Tokens(_LeavesOut, _Ahead):
    """Windows of `length` tokens of a corpus, in the order of its documents, not overlapping;
    documents follow one another without padding. Item i: (input (T,), target (T,)), int64 arrays;
    the target is the input one token later.

    `boundaries`: what tells attention where documents end: "documents" adds an int32 array (T,),
    which document of the window each input is of (0, 1, ...); "cu_seqlens" adds int32 (n + 1,),
    where each begins and the last ends, as variable-length attention takes it (see `packed`). Then
    the first token of a document is no target (-100).

    Of documents that the corpus' newest exclusion list names, inputs are `eos` and targets -100. A
    window without any other target is the next one that has some, so that no loss is a mean of
    nothing.

    Others: see `CorpusReader`. Raises BadInput, CorpusCorrupt, StoreError.
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
        """Many at once, as a DataLoader asks for them."""
        ranges = self._ranges(indices)
        self._reader.chunks.ahead(ranges)
        return [self[i] for i in indices] if self.draws else self._items(ranges)

    @property
    def draws(self) -> bool:
        """May reading an item draw from a generator? One of a kind that a script made of this one
        may, and each is read by its own `__getitem__`."""
        return type(self).__getitem__ is not Tokens.__getitem__

    def by_thread(self, in_turns: int) -> bool:
        """Is reading items so light that a thread of the training's process does best, where so
        many that lie together are read in turns?"""
        return not self.draws and self._reader.may_hold(in_turns * self._mean_nbytes)

    def hold(self, in_turns: int) -> None:
        """Keep in memory what so many items that lie together lie in."""
        self._reader.hold(in_turns * self._mean_nbytes)

    def _items(self, ranges: Ranges) -> list[tuple[np.ndarray[Any, Any], ...]]:
        rows = np.empty((len(ranges), self.length + 1), np.int64)
        for row, found in zip(rows, self._reader.chunks.read_each(ranges), strict=True):
            row[:] = np.frombuffer(found, self._dtype)
        return [self._item(row, *place) for row, place in zip(rows, ranges, strict=True)]

    def _item(
        self, tokens: np.ndarray[Any, Any], start: int, end: int
    ) -> tuple[np.ndarray[Any, Any], ...]:
        """Of the tokens at the bytes [start, end)."""
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
        """Fetch what these items lie in, several reads at once."""
        self._reader.chunks.ahead(self._ranges(indices))

    def content_ids(self, indices: Sequence[int], as_read: bool = True) -> Int64Array:
        """64 bits of what these items are, (n,): of the bytes that were read here, or as the index
        says that they must be, and of what is left out of them."""
        ranges = self._ranges(indices)
        found = self._reader.contents(ranges, as_read)
        begins, ends = np.array(ranges, np.int64).reshape(-1, 2).T // self._dtype.itemsize
        return hashed_anew(found, self._out, begins, ends)

    @property
    def block_items(self) -> int:
        """How many make a block of `run.steps(shuffle="blocks")`."""
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
        """Windows without a target. Of a document at [s, e) those from s to e are none, e being its
        `eos`; nor is the one behind that where boundaries are kept."""
        dead = joined(out + np.array([0, 2 if self.boundaries else 1]))
        first, last = -(-(dead[:, 0] - 1) // self.length), (dead[:, 1] - 1) // self.length
        return joined(np.clip(np.stack([first, last], axis=1), 0, len(self)))


class Records(_LeavesOut, _Ahead):
    """Records of a corpus: whatever was prepared as such, images and audio too, and datasets of
    others that were indexed. Item i: `decode(record)`, or the record itself, a dict of bytes by the
    name of the field. `decode` runs where the item is read, and may draw from the global
    generators, which `run.steps` seeds by the position. Instead of a record that the corpus' newest
    exclusion list names comes the next one that it does not. Others: see `CorpusReader`. Raises
    BadInput, CorpusCorrupt, StoreError."""

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
        self._foreign: ForeignItems | None = None  # of this process
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
        """Many at once, as a DataLoader asks for them."""
        self.read_ahead(indices)
        return [self[i] for i in indices]

    def read_ahead(self, indices: Sequence[int]) -> None:
        """Fetch what these items lie in, several reads at once."""
        if (foreign := self._others()) is not None:
            foreign.read_ahead(self._instead(indices))
        else:
            self._reader.chunks.ahead(self._ranges(indices))

    def content_ids(self, indices: Sequence[int], as_read: bool = True) -> Int64Array:
        """As `Tokens.content_ids`, of the records before they are decoded; where they lie is read
        in any case."""
        items, foreign = self._instead(indices), self._others()
        found = self._reader.contents(self._places(items), as_read)
        return foreign.apart(found, items) if foreign else found

    @property
    def block_items(self) -> int:
        """As `Tokens.block_items`, of records of the mean size."""
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
        """If the corpus consists of files of others: what finds items in them."""
        chunks = self._reader.chunks
        if self.card.layout and (self._foreign is None or self._foreign.chunks is not chunks):
            self._foreign = ForeignItems(self.card, chunks)
        return self._foreign

    def _entries(self, indices: Sequence[int]) -> Ranges:
        """Where the ends of the record before each and of its own lie, behind the shard's records;
        of a shard's first record its own alone."""
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
    """A collate_fn for `Tokens(boundaries="cu_seqlens")`: a micro-batch of b windows as one row, as
    variable-length attention takes it. Tensors: `input_ids` and `labels` int64 (1, b T),
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


packed.draws = False  # type: ignore[attr-defined]  # so a thread may call it (worker/reading.py)


def named_by(fingerprint: str, url: str, **reading: Any) -> Tokens | Records:
    """The dataset with this fingerprint, of the corpus at `url`: what a run has read, for who
    proves it. `reading`: see `CorpusReader`. Raises BadInput if it is another corpus."""
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
