"""The data that `steps` is given: which rank reads which part, and its part in the run's identity.
Runs in the worker."""

from __future__ import annotations

import copy
import functools
import itertools
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import xxhash
from torch import Tensor, nn
from torch.utils.data import DataLoader

from harness.core.batch import MAX_SAMPLES, Batching, Plan, SampleOrder, in_turns, plan
from harness.core.read_traffic import Traffic
from harness.core.sample_order import Blocks, blocks_for, said_of
from harness.core.world import BadInput
from harness.worker.batches.content_hash import content_hash
from harness.worker.batches.loader import (
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
from harness.worker.batches.prefetch import ReadsAhead, fetched_ahead
from harness.worker.process_group import Peers
from harness.worker.staged_model import StagedModel
from storage.tensors import quantised_weights, state_tree
from storage.tensors.tensor_names import plain_name

# The test of a stream before the first step: its state is saved, loaded into a copy, and read on.

SKIPPED, COMPARED = 3, 3  # items


def rehearse(dataset: Any) -> str:
    """Return a warning if a resumed run would read other items than an uninterrupted one, or if
    that cannot be tried; "" if they are the same, or the stream is too short. The dataset itself is
    neither read nor changed. Raises BadInput if its state cannot be saved or loaded."""
    kind = type(dataset).__name__
    try:
        first, second = copy.deepcopy(dataset), copy.deepcopy(dataset)
    except Exception as e:  # parts that cannot be copied (open files, sockets) raise anything
        return (
            f"{kind} could not be tried before the first step, since it cannot be copied "
            f"({type(e).__name__}: {e}); whether it goes on where it was after a resume shows "
            "only then"
        )
    items = iter(first)
    if len(list(itertools.islice(items, SKIPPED))) < SKIPPED:
        return ""
    try:
        tensors, plain = state_tree.split(copy.deepcopy(first.state_dict()))
        state = state_tree.join(tensors, json.loads(json.dumps(plain)))
    except TypeError as e:
        raise BadInput(
            f"the state of {kind} cannot be saved: {e}; its state_dict must be made of tensors, "
            "numbers, strings, lists and dicts"
        ) from e
    wanted = [content_hash(item) for item in itertools.islice(items, COMPARED)]
    try:
        second.load_state_dict(state)
        found = [content_hash(item) for item in itertools.islice(iter(second), len(wanted))]
    except Exception as e:
        raise BadInput(
            f"{kind}.load_state_dict(state) of a state that it has just given raises "
            f"{type(e).__name__}: {e}; a resumed run could not go on"
        ) from e
    if found == wanted:
        return ""
    same = next((i for i, pair in enumerate(zip(wanted, found, strict=False)) if len({*pair}) > 1),
                len(found))  # fmt: skip
    return (
        f"{kind} was tried: saved behind its item {SKIPPED}, and loaded, it goes on with another "
        f"item {SKIPPED + same + 1} than it would have. So after a resume samples are lost or "
        "repeated; shuffle before it is a stream, or use a map-style dataset"
    )


SPLITTING = ("streaming.base.", "litdata.streaming.")  # modules of MosaicML and of LitData


def refuse_a_part(dataset: Any, world: int) -> None:
    """Raise BadInput for a stream that would give each rank a different part, where every rank must
    read the same."""
    read = dataset.dataset if isinstance(dataset, DataLoader) else dataset
    kinds = {kind.__module__ for kind in type(read).__mro__}
    if not any(kind.startswith(SPLITTING) for kind in kinds):
        return
    if is_map_style(dataset) or world > 1:
        raise BadInput(
            f"{type(dataset).__name__} shares itself over the ranks, so that each of {world} would "
            "see a part of the data; give run.steps harness.data.ByIndex(dataset) of the "
            "StreamingDataset, which any number of ranks reads whole, or `harness data index` its "
            "files"
        )


@dataclass(frozen=True)
class Shrinking:
    """The halving of micro-batches where memory ran out (`harness run --set oom=halve`).
    `by_choice`: somebody asked for it; `times`: how often it has happened."""

    by_choice: bool = False
    times: int = 0

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Shrinking:
        return cls(
            environ.get("HARNESS_OOM") == "halve", int(environ.get("HARNESS_HALVINGS") or 0)
        )

    def refuse(self, loop: str) -> None:
        """Raise BadInput for a loop that is given micro-batches of its script's size."""
        if self.by_choice:
            raise BadInput(
                f"--set oom=halve: wanted micro-batches that the harness cuts (run.steps), found "
                f"{loop}, which decides their size itself; use --set oom=retry"
            )


class Feed:
    """A run's data and the plan of who reads it. `batching`: None until `steps` is called.
    `stream`: for data that can be read in order only. `processes`: the number of processes on this
    node that read. `meet`: see `DataPeers.meet`."""

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
        # (step, micro-batch) -> its data; for a map-style dataset
        self.read_again: Callable[[int, int], Any] | None = None
        self._dataset: Any = None
        self._read: Any = None  # the same once reading begins, or what the script's own loop reads
        self._collate: Collate | None = None
        # items are hashed as they are read: a stream's, or those of a dataset that knows their
        # hashes
        self.has_contents = False
        # entries of run.json about a foreign loop; None: the steps are ours
        self._foreign: dict[str, Any] | None = None
        self.first_ranks = 0  # as in facts.SessionStarted

    def open(
        self,
        dataset: Any,
        global_batch: int,
        micro_batch: int,
        shuffle: bool | str | Blocks,
        collate: Collate | None,
        halvings: int = 0,
    ) -> Stream | None:
        """Plan which rank reads what. Return a stream if one was begun, whose place is part of the
        state, else None. `halvings`: of the micro-batch. Raises BadInput, TooManyRanks."""
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
        asked = replace(in_batches, order=_order_of(dataset, in_batches, shuffle))
        self.batching = asked.halved(halvings)
        self.plan = self.shared_out(self.batching.micro_batches)
        opened = None
        if not mapped and (self.stream is None or self.stream.dataset is not dataset):
            opened = Stream(dataset, self.batching, self.plan, self._peers.rank, collate)
            self.stream = opened
        self.has_contents = self.stream is not None or has_contents(dataset)
        return opened

    def open_foreign(
        self, micro_batches: int, micro_batch: int, seed: int, foreign: dict[str, Any], parts: int
    ) -> None:
        """Plan the micro-batches of a foreign trainer, which reads the data itself, in the order
        that `foreign` describes. `parts`: of each, which different ranks of a replica read. They
        are what a run counts as its micro-batches, so that it may have other replicas later.
        Raises TooManyRanks."""
        self._dataset, self._foreign, self.seed = None, foreign, seed
        self.has_contents = self.stream is not None
        part, samples = micro_batch // parts, micro_batches * micro_batch
        self.batching = Batching(MAX_SAMPLES, samples, part, seed, False)
        whole = self.shared_out(micro_batches)
        self.plan = replace(whole, shares=tuple(share * parts for share in whole.shares))

    def shared_out(self, micro_batches: int) -> Plan:
        """Return the plan that divides `micro_batches` among this world's ranks. Raises
        TooManyRanks."""
        peers = self._peers
        return plan(micro_batches, peers.world, self._speeds, peers.grouping)

    def identity(self, model: nn.Module, reduce: str) -> dict[str, Any]:
        """Return what must stay the same for the whole run, for run.json."""
        assert self.batching is not None
        mapped = self._foreign is None and is_map_style(self._dataset)
        identity = {
            "version": 1,
            "seed": self.seed,
            "samples": self.batching.samples if mapped else 0,
            "global_batch": self.batching.global_batch,
            "micro_batch": self.batching.as_asked.micro_batch,
            "shuffle": self.batching.shuffle,
            "data": self._foreign["data"] if self._foreign else fingerprint(self._dataset),
            "model": _model_fingerprint(model),
            "reduce": reduce,
        }
        identity |= said_of(self.batching.order)
        if mapped and not self.has_contents:
            return identity
        return {**identity, "contents": True, **(self._foreign or {})}

    def shrunk(self) -> str:
        """Return in words that micro-batches are smaller than the script asks for; "": they are
        not."""
        b = self.batching
        if b is None or not b.asked_micro_batch:
            return ""
        return (
            f"memory ran out, so micro-batches have {b.micro_batch} samples instead of "
            f"{b.asked_micro_batch}; the global batch stays {b.global_batch}, and sums round as in "
            f"a run with micro_batch={b.micro_batch}"
        )

    def steps_in(self, epochs: int) -> int:
        """Return the number of whole steps in `epochs` passes over the data; a rest smaller than a
        global batch is left out. Raises BadInput for data without a length."""
        assert self.batching is not None
        ordered = hasattr(self._dataset, "sample_order")
        if ordered or not is_map_style(self._dataset):
            lacks = "passes over each of its sources" if ordered else "no length"
            raise BadInput(
                f"run.steps(epochs={epochs}): {type(self._dataset).__name__} has {lacks}; say "
                "total= (optimizer steps) instead"
            )
        return epochs * self.batching.samples // self.batching.global_batch

    def drawn_anew(self) -> str:
        """Return why samples differ when they are read again, so that no two runs are bitwise
        equal; "": they do not differ."""
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
        """Return this rank's micro-batches of steps `first` to `total`; none for a stream, which
        yields its own. `tell` is called with a text about each long wait."""
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
        """Record which dataset is read from now on, and connect it to its peers. `once`: see
        `DataPeers.meet`. `scattered`: samples are read in random order; on rank 0 `tell` is then
        called with what that costs, if the dataset says so."""
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
    ) -> Iterator[MicroBatch]:
        """Return the micro-batches of the script's own loop, with their data fetched ahead.
        `to_come`: sample indices of each. `tell` is called with a text about each long wait."""
        return fetched_ahead(self._read, to_come, self._processes, tell, batches)

    def traffic(self) -> Sequence[Traffic]:
        """Return what this process has read of the data so far; () if the data does not count."""
        return self._read.traffic if isinstance(self._read, ReadsAhead) else ()


def agree_on_exclusions(dataset: Any, peers: Peers) -> None:
    """Make all ranks leave out the same documents of a corpus: those of the newest list that any
    rank has found (harness/data/exclusions.py). Raises StoreError."""
    sources = getattr(dataset, "sources", None)  # a mixture has several
    several = list(sources.values()) if isinstance(sources, Mapping) else [dataset]
    corpora = [one for one in several if isinstance(getattr(one, "excluded", None), int)]
    if not corpora:
        return
    said = peers.gather([one.excluded for one in corpora])
    for one, newest in zip(corpora, map(max, zip(*said, strict=True)), strict=True):
        if newest != one.excluded:
            one.exclude(newest)


def _order_of(dataset: Any, batching: Batching, shuffle: bool | str | Blocks) -> SampleOrder | None:
    """Return the dataset's own order (`harness.data.Mixture`), or blocks of neighbours; None: a
    permutation for each epoch, or the order as stored. Raises BadInput."""
    global_batch, micro_batch = batching.global_batch, batching.micro_batch
    if (own := getattr(dataset, "sample_order", None)) is not None:
        order: SampleOrder = own(global_batch, micro_batch, shuffle)
        return order
    if isinstance(shuffle, bool):
        return None
    items = getattr(dataset, "block_items", 0)
    return blocks_for(shuffle, items, batching.samples, global_batch, micro_batch)


def shapes_of(model: nn.Module) -> list[tuple[str, list[int], str]]:
    """Return the name, shape and dtype of each tensor that the model saves, without the parts that
    wrappers add to names. What is stored beside quantised weights is left out: its sizes vary."""
    if isinstance(model, StagedModel) and model.total > 1:
        return model.shapes
    tensors = {plain_name(n): t for n, t in model.state_dict().items() if isinstance(t, Tensor)}
    beside = quantised_weights.stored(model)
    return [
        (name, list(t.shape), str(t.dtype))
        for name, t in tensors.items()
        if name not in beside
    ]


def _model_fingerprint(model: nn.Module) -> str:
    shapes = sorted(shapes_of(model))
    return xxhash.xxh3_128(json.dumps(shapes).encode()).hexdigest()
