"""What `steps` is given: the data, who reads which of it, and what makes it this run's. Runs in the
worker."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import xxhash
from torch import Tensor, nn

from harness.core.batch import MAX_SAMPLES, Batching, Plan, SampleOrder, in_turns, plan
from harness.core.blocks import Blocks, blocks_for
from harness.core.identity import said_of
from harness.core.traffic import Traffic
from harness.core.world import BadInput
from harness.worker.loader import (
    Collate,
    MicroBatch,
    Stream,
    fingerprint,
    has_contents,
    is_map_style,
    map_style,
    read_again,
    same_when_read_again,
)
from harness.worker.peers import Peers
from harness.worker.pipeline import Pipeline
from harness.worker.prefetch import ReadsAhead, fetched_ahead
from harness.worker.shared_reading import refuse_a_part
from storage.names import plain_name


class Feed:
    """`batching`: None until `steps` is called. `stream`: of data that is read in order only.
    `processes`: of this node that read. `meet`: see `DataPeers`."""

    plan: Plan

    def __init__(
        self,
        peers: Peers,
        seed: int,
        speeds: list[float] | None,
        processes: int = 1,
        meet: Callable[[Any, bool], None] = lambda dataset, once: None,
    ):
        self._peers, self.seed, self._processes, self._meet = peers, seed, processes, meet
        self._speeds = speeds if speeds and len(set(speeds)) > 1 else None
        self.batching: Batching | None = None
        self.stream: Stream | None = None
        # (step, micro-batch) -> its data; of a map-style dataset
        self.read_again: Callable[[int, int], Any] | None = None
        self._dataset: Any = None
        self._read: Any = None  # the same, once it is, or what a loop of the script's own reads
        self._collate: Collate | None = None
        # what run.json says of a loop that is not ours; None: the steps are ours
        self._foreign: dict[str, Any] | None = None

    def open(
        self,
        dataset: Any,
        global_batch: int,
        micro_batch: int,
        shuffle: bool | str | Blocks,
        collate: Collate | None,
    ) -> Stream | None:
        """Plan who reads what. The stream if one was begun: its place is part of the state. Raises
        BadInput, TooManyRanks."""
        mapped = is_map_style(dataset)
        refuse_a_part(dataset, self._peers.world)
        agree_on_exclusions(dataset, self._peers)
        samples = len(dataset) if mapped else 1 << 62
        self._dataset, self._read, self._collate = dataset, None, collate
        if not mapped and not isinstance(shuffle, bool):
            raise BadInput(
                f"run.steps(shuffle={shuffle!r}): {type(dataset).__name__} is iterable, so it "
                "comes in an order of its own; leave it out, or use a map-style dataset"
            )
        in_batches = Batching(
            samples, global_batch, micro_batch, self.seed, mapped and bool(shuffle)
        )
        self.batching = replace(in_batches, order=_order_of(dataset, in_batches, shuffle))
        self.plan = self.shared_out(self.batching.micro_batches)
        if mapped or (self.stream is not None and self.stream.dataset is dataset):
            return None
        self.stream = Stream(dataset, self.batching, self.plan, self._peers.rank, collate)
        return self.stream

    def open_foreign(
        self, micro_batches: int, micro_batch: int, seed: int, foreign: dict[str, Any]
    ) -> None:
        """The data is read by somebody else, in that order of its own which `foreign` names.
        Raises TooManyRanks."""
        self._dataset, self._foreign, self.seed = None, foreign, seed
        self.batching = Batching(MAX_SAMPLES, micro_batches * micro_batch, micro_batch, seed, False)
        self.plan = self.shared_out(micro_batches)

    def shared_out(self, micro_batches: int) -> Plan:
        """Which rank of this world does which of so many. Raises TooManyRanks."""
        peers = self._peers
        return plan(micro_batches, peers.world, self._speeds, peers.grouping)

    def identity(self, model: nn.Module, reduce: str) -> dict[str, Any]:
        """What must stay the same for the whole run."""
        assert self.batching is not None
        mapped = self._foreign is None and is_map_style(self._dataset)
        identity = {
            "version": 1,
            "seed": self.seed,
            "samples": self.batching.samples if mapped else 0,
            "global_batch": self.batching.global_batch,
            "micro_batch": self.batching.micro_batch,
            "shuffle": self.batching.shuffle,
            "data": self._foreign["data"] if self._foreign else fingerprint(self._dataset),
            "model": _model_fingerprint(model),
            "reduce": reduce,
        }
        identity |= said_of(self.batching.order)
        if mapped and not self.has_contents:
            return identity
        return {**identity, "contents": True, **(self._foreign or {})}

    @property
    def has_contents(self) -> bool:
        """Is what is read hashed: of a stream, and of a dataset that knows hashes?"""
        return self.stream is not None or has_contents(self._dataset)

    def steps_in(self, epochs: int) -> int:
        """Whole steps in so many passes over the data; what is left of the last pass is less than
        a global batch. Raises BadInput."""
        assert self.batching is not None
        ordered = hasattr(self._dataset, "sample_order")
        if ordered or not is_map_style(self._dataset):
            lacks = "passes over each of its sources" if ordered else "no length"
            raise BadInput(
                f"run.steps(epochs={epochs}): {type(self._dataset).__name__} has {lacks}; say "
                "total= (optimizer steps) instead"
            )
        return epochs * self.batching.samples // self.batching.global_batch

    def first_version(self, model: nn.Module | None, name: str) -> str:
        """What `identity` says under this name, as its first version did; "": the same."""
        if name == "model" and model is not None:
            return _model_fingerprint(model, by_wrappers=True)
        if name != "data":
            return ""
        if self._foreign:
            return str(self._foreign["data"])
        return fingerprint(self._dataset, by_repr=True)

    def drawn_anew(self) -> str:
        """Why samples are others when they are read again, so that no two runs are the same to the
        bit; "": they are the same."""
        if not is_map_style(self._dataset) or same_when_read_again(self._dataset, self.seed):
            return ""
        return (
            f"{type(self._dataset).__name__}[i] is another sample when it is read again: it draws "
            "from a generator that is not seeded here (torch's, numpy's and Python's global ones "
            "are), so no two runs will be the same to the bit"
        )

    def batches(
        self, first: int, total: int, num_workers: int, tell: Callable[[str], object]
    ) -> Generator[MicroBatch, None, None]:
        """This rank's micro-batches of steps `first` to `total`; a stream gives its own. `tell`
        hears of long waits."""
        assert self.batching is not None
        if not is_map_style(self._dataset):
            return (one for one in tuple[MicroBatch, ...]())
        self.read_again = functools.partial(
            read_again, self._dataset, self.batching, collate_fn=self._collate
        )
        pin = self._peers.device.type == "cuda"
        scattered = 0 in in_turns(self.batching, lanes=1)
        self.reads(self._dataset, not scattered, scattered, tell)
        return map_style(
            self._dataset,
            self.batching,
            self.plan,
            self._peers.rank,
            first,
            total,
            self._collate,
            num_workers,
            pin,
            self._processes,
            tell,
        )

    def reads(
        self, dataset: Any, once: bool, scattered: bool, tell: Callable[[str], object]
    ) -> None:
        """What is read from here on. `once`: see `DataPeers`; `tell` hears what it costs if samples
        are `scattered`."""
        if self._read is dataset:
            return
        self._read = dataset
        self._meet(dataset, once)
        costs = getattr(dataset, "scattered", None)
        if scattered and costs is not None and self._peers.rank == 0:
            nodes = -(-self._peers.world // self._processes)
            if why := costs(nodes):
                tell(str(why))

    def ahead(
        self,
        to_come: Iterable[Sequence[int]],
        batches: Iterator[MicroBatch],
        tell: Callable[[str], object],
    ) -> Generator[MicroBatch, None, None]:
        """Micro-batches of a loop of the script's own, for which what they lie in is fetched ahead:
        indices `to_come`. `tell` hears of long waits."""
        return fetched_ahead(self._read, to_come, self._processes, tell, batches)

    def traffic(self) -> Sequence[Traffic]:
        """What this process has read of the data so far, of data that counts it."""
        return self._read.traffic if isinstance(self._read, ReadsAhead) else ()


def agree_on_exclusions(dataset: Any, peers: Peers) -> None:
    """All ranks leave the same documents of a corpus out: what the newest list says that any of
    them has found (harness/data/excluding.py). Raises StoreError."""
    sources = getattr(dataset, "sources", None)  # of a mixture
    several = list(sources.values()) if isinstance(sources, Mapping) else [dataset]
    corpora = [one for one in several if isinstance(getattr(one, "excluded", None), int)]
    if not corpora:
        return
    said = peers.gather([one.excluded for one in corpora])
    for one, newest in zip(corpora, map(max, zip(*said, strict=True)), strict=True):
        if newest != one.excluded:
            one.exclude(newest)


def _order_of(dataset: Any, batching: Batching, shuffle: bool | str | Blocks) -> SampleOrder | None:
    """The dataset's own (`harness.data.Mixture`), or blocks of neighbours; None: one permutation of
    each epoch, or none. Raises BadInput."""
    global_batch, micro_batch = batching.global_batch, batching.micro_batch
    if (own := getattr(dataset, "sample_order", None)) is not None:
        order: SampleOrder = own(global_batch, micro_batch, shuffle)
        return order
    if isinstance(shuffle, bool):
        return None
    items = getattr(dataset, "block_items", 0)
    return blocks_for(shuffle, items, batching.samples, global_batch, micro_batch)


def shapes_of(model: nn.Module, by_wrappers: bool = False) -> list[tuple[str, list[int], str]]:
    """Name, shape and dtype of each tensor that the model saves."""
    if isinstance(model, Pipeline) and model.total > 1:
        return model.shapes
    return [
        (name if by_wrappers else plain_name(name), list(t.shape), str(t.dtype))
        for name, t in model.state_dict().items()
        if isinstance(t, Tensor)
    ]


def _model_fingerprint(model: nn.Module, by_wrappers: bool = False) -> str:
    shapes = sorted(shapes_of(model, by_wrappers))
    return xxhash.xxh3_128(json.dumps(shapes).encode()).hexdigest()
