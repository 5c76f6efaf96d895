"""Datasets over a corpus: windows of tokens, and records; map-style, read by random access.

    train = harness.data.Tokens("s3://bucket/corpus", length=4096)
    for step in run.steps(train, total=..., global_batch=..., micro_batch=...): ...

Runs in the worker and in a DataLoader's processes; needs no torch (a DataLoader makes tensors of
the arrays). What `run.steps` asks of a dataset besides: `fingerprint`, `read_ahead`, `content_ids`,
and what it fetches ahead: `pieces`, `ahead_nbytes`, `traffic`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from harness.core.traffic import Traffic
from harness.core.world import BadInput
from harness.data.card import DTYPES, END, RECORDS, TOKENS, CorpusCorrupt, Int64Array
from harness.data.chunks import ChunkAhead, CorpusReader
from harness.data.framing import unframed

IGNORED = -100  # a target that losses leave out, as torch's cross_entropy does
BOUNDARIES = ("", "documents", "cu_seqlens")
Ranges = list[tuple[int, int]]
_FINGERPRINT = re.compile(
    r"corpus:(?P<content>[0-9a-f]{32}):(?P<split>\w+):"
    r"(?:tokens:(?P<length>[1-9]\d{0,11}):(?P<boundaries>plain|documents|cu_seqlens)|records:.*)"
)


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

    def _ranges(self, indices: Sequence[int]) -> Ranges:
        raise NotImplementedError


class Tokens(_Ahead):
    """Windows of `length` tokens of a corpus, in the order of its documents, not overlapping;
    documents follow one another without padding. Item i: (input (T,), target (T,)), int64 arrays;
    the target is the input one token later.

    `boundaries`: what tells attention where documents end: "documents" adds an int32 array (T,),
    which document of the window each input is of (0, 1, ...); "cu_seqlens" adds int32 (n + 1,),
    where each begins and the last ends, as variable-length attention takes it (see `packed`). Then
    the first token of a document is no target (-100).

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
        if not len(self):
            raise BadInput(
                f"{url}: wanted at least {length + 1} tokens in the split {split!r}, for one "
                f"window, found {self._reader.split.items}; lower length="
            )

    def __len__(self) -> int:
        return max(0, self._reader.split.items - 1) // self.length

    def __getitem__(self, i: int) -> tuple[np.ndarray[Any, Any], ...]:
        ((start, end),) = self._ranges([i])
        tokens = np.frombuffer(self._reader.chunks.read(start, end), self._dtype).astype(np.int64)
        inputs, targets = tokens[:-1], tokens[1:]
        if not self.boundaries:
            return inputs, targets
        ends = inputs == self.card.eos
        targets = np.where(ends, IGNORED, targets)
        if self.boundaries == "documents":
            return inputs, targets, (np.cumsum(ends) - ends).astype(np.int32)
        edges = np.union1d(np.flatnonzero(ends) + 1, [0, self.length])
        return inputs, targets, edges.astype(np.int32)

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[np.ndarray[Any, Any], ...]]:
        """Many at once, as a DataLoader asks for them."""
        self.read_ahead(indices)
        return [self[i] for i in indices]

    def read_ahead(self, indices: Sequence[int]) -> None:
        """Fetch what these items lie in, several reads at once."""
        self._reader.chunks.ahead(self._ranges(indices))

    def content_ids(self, indices: Sequence[int], as_read: bool = True) -> Int64Array:
        """64 bits of what these items are, (n,): of the bytes that were read here, or as the index
        says that they must be."""
        return self._reader.contents(self._ranges(indices), as_read)

    @property
    def fingerprint(self) -> str:
        return self._reader.named(f"tokens:{self.length}:{self.boundaries or 'plain'}")

    def _ranges(self, indices: Sequence[int]) -> Ranges:
        size, length = self._dtype.itemsize, self.length
        starts = [_within(i, len(self)) * length for i in indices]
        return [(start * size, (start + length + 1) * size) for start in starts]


class Records(_Ahead):
    """Records of a corpus: whatever was prepared as such, images and audio too. Item i:
    `decode(record)`, or the record itself, a dict of bytes by the name of the field. `decode` runs
    where the item is read, and may draw from the global generators, which `run.steps` seeds by the
    position. Others: see `CorpusReader`. Raises BadInput, CorpusCorrupt, StoreError."""

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
        if not len(self):
            raise BadInput(f"{url}: wanted records in the split {split!r}, found none")

    def __len__(self) -> int:
        return self._reader.split.items

    def __getitem__(self, i: int) -> Any:
        return self._decoded(self._ranges([i])[0])

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Many at once, as a DataLoader asks for them."""
        self.read_ahead(indices)
        return [self[i] for i in indices]

    def read_ahead(self, indices: Sequence[int]) -> None:
        """Fetch what these items lie in, several reads at once."""
        self._reader.chunks.ahead(self._ranges(indices))

    def content_ids(self, indices: Sequence[int], as_read: bool = True) -> Int64Array:
        """As `Tokens.content_ids`, of the records before they are decoded; where they lie is read
        in any case."""
        return self._reader.contents(self._ranges(indices), as_read)

    @property
    def fingerprint(self) -> str:
        return self._reader.named(f"records:{_name_of(self.decode)}")

    def _decoded(self, place: tuple[int, int]) -> Any:
        record = unframed(self._reader.chunks.read(*place))
        return record if self.decode is None else self.decode(record)

    def _entries(self, indices: Sequence[int]) -> Ranges:
        """Where the ends of the record before each and of its own lie, behind the shard's records;
        of a shard's first record its own alone."""
        index, out = self._reader.index, []
        for i in indices:
            shard = _shard_of(index.item_starts, _within(i, len(self)))
            within, items = i % len(self) - int(index.item_starts[shard]), index.shards["items"]
            table = int(index.shard_starts[shard + 1]) - END.itemsize * int(items[shard])
            low = max(0, within - 1)
            out.append((table + low * END.itemsize, table + (within + 1) * END.itemsize))
        return out

    def _ranges(self, indices: Sequence[int]) -> Ranges:
        chunks, entries, out = self._reader.chunks, self._entries(indices), []
        chunks.ahead(entries)
        for i, place in zip(indices, entries, strict=True):
            shard = _shard_of(chunks.index.item_starts, i % len(self))
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


def named_by(fingerprint: str, url: str) -> Tokens | Records:
    """The dataset with this fingerprint, of the corpus at `url`: what a run has read, for who
    proves it. Raises BadInput if it is another corpus."""
    found = _FINGERPRINT.fullmatch(fingerprint)
    if found is None:
        raise BadInput(
            f"{url}: wanted what a run read of a corpus, found that its data are "
            f"{fingerprint[:200]!r}; only harness.data.Tokens and Records can be proved by their "
            "contents"
        )
    content, split, length, boundaries = found.group("content", "split", "length", "boundaries")
    dataset: Tokens | Records
    if length:
        shape = "" if boundaries == "plain" else boundaries
        dataset = Tokens(url, int(length), split=split, boundaries=shape, cache=None)
    else:
        dataset = Records(url, split=split, cache=None)
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


def _shard_of(item_starts: Int64Array, item: int) -> int:
    return int(np.searchsorted(item_starts, item, "right")) - 1


def _name_of(decode: Callable[..., Any] | None) -> str:
    if decode is None:
        return "plain"
    name = getattr(decode, "__qualname__", type(decode).__qualname__)
    return f"{getattr(decode, '__module__', '')}.{name}"
