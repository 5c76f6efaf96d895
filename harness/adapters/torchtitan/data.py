"""The training data of torchtitan on any number of ranks: the batches that its first world would
have read. Runs in the worker.

torchtitan's loaders pack documents into sequences, each data-parallel rank its own part of them, so
what a rank reads depends on the number of ranks. Here the parts stay those of the run's first world
(the *streams*). A step takes its micro-batches from all streams in turn, and a rank opens only the
streams of its own micro-batches. The position of each stream is part of the snapshot.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.dataloader import BaseDataLoader, DataloaderExhaustedError

from harness.adapters.torchtitan.patch import joined
from harness.core.world import BadInput
from harness.worker.batches.content_hash import content_hash

IGNORED = -100  # torchtitan's IGNORE_INDEX: the label is not counted


@dataclass(frozen=True)
class TitanBatch:
    """Micro-batch `micro` of a step. `valid`: number of labels that count; `contents`: a hash of
    each sample."""

    micro: int
    inputs: dict[str, Any]
    labels: torch.Tensor
    valid: int
    contents: tuple[int, ...]


class TitanStreams:
    """The streams that this rank reads. `open_stream` builds the loader of one; `count`: streams of
    the run; `micro_batches`: per step, over all ranks; `mine`: this rank's micro-batches."""

    def __init__(
        self, open_stream: Callable[[int], Any], count: int, micro_batches: int, mine: range
    ):
        self._open, self._micro_batches, self._mine = open_stream, micro_batches, mine
        self._count = min(count, micro_batches)
        self._loaders: dict[int, Any] = {}
        self._iterators: dict[int, Iterator[Any]] = {}
        self._at: dict[int, Any] = {}  # positions of streams that are not open yet

    def of(self, stream: int) -> range:
        """Return the stream's micro-batches in each step."""
        first, last = (-(-s * self._micro_batches // self._count) for s in (stream, stream + 1))
        return range(first, last)

    def mine(self) -> list[int]:
        """Return the streams in which this rank has a micro-batch."""
        return [n for n in range(self._count) if set(self.of(n)) & set(self._mine)]

    def step(self) -> Iterator[tuple[int, Any]]:
        """Yield this rank's micro-batches of the next step: (micro, batch). Raises
        DataloaderExhaustedError if a stream ends within it."""
        for stream in self.mine():
            # read other ranks' too, so that all readers leave the stream at the same position
            for micro in self.of(stream):
                try:
                    batch = next(self._iterator(stream))
                except StopIteration as e:
                    raise DataloaderExhaustedError("a stream has no batch left") from e
                if micro in self._mine:
                    yield micro, batch

    def sample(self) -> Any:
        """Return any batch, for a rank that has none of its own."""
        return next(iter(self._open(0)))

    def _iterator(self, stream: int) -> Iterator[Any]:
        if stream not in self._iterators:
            loader = self._open(stream)
            if stream in self._at:
                _class(loader).load_state_dict(loader, self._at.pop(stream))
            self._loaders[stream], self._iterators[stream] = loader, iter(loader)
        return self._iterators[stream]

    def state(self) -> dict[int, Any]:
        """Return the position of each stream that this rank reads."""
        open_now = {n: _class(loader).state_dict(loader) for n, loader in self._loaders.items()}
        return {**self._at, **open_now}

    def load(self, places: dict[int, Any]) -> None:
        """Continue from these positions. Raises BadInput if one of this rank's is missing."""
        self._loaders, self._iterators, self._at = {}, {}, {}
        for stream in self.mine():
            if stream not in places:
                raise BadInput(
                    f"wanted to know where stream {stream} of the data stands, found only "
                    f"{', '.join(map(str, sorted(places))) or 'none'} in the snapshot; it was "
                    "saved by another script: use a new run URL"
                )
            self._at[stream] = places[stream]


def _class(loader: Any) -> Any:
    """Return the class whose state_dict gives the loader's position. torchtitan's own pickles it,
    and binds it to a number of ranks."""
    return StatefulDataLoader if isinstance(loader, StatefulDataLoader) else type(loader)


@dataclass(kw_only=True, slots=True)
class TitanLoaderConfig(BaseDataLoader.Config):  # type: ignore[misc]
    """Configuration of `TitanLoader`. `inner`: the configuration of the script's loader; `streams`:
    ranks of the run's first world; `steps`: length of a validation there, 0 for training;
    `infinite`: set by torchtitan's validator."""

    inner: Any = field(default_factory=BaseDataLoader.Config)
    streams: int = 1
    steps: int = 0
    infinite: bool = True


class TitanLoader(BaseDataLoader):  # type: ignore[misc]
    """A replacement for torchtitan's loader: this rank's micro-batches of each step, then fillers
    that count for nothing, so that all ranks do equally many. `current`: the batches of the step in
    progress."""

    Config = TitanLoaderConfig

    def __init__(
        self,
        config: TitanLoaderConfig,
        *,
        dp_world_size: int,
        dp_rank: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = None,
        **others: Any,
    ):
        self.config, self.micro_batch, self._others = config, local_batch_size, others
        self.current: list[TitanBatch] = []
        self.rounds = 0
        self._streams: TitanStreams | None = None
        if total := config.steps * config.streams:  # a validation is one long step
            first, last = (total * rank // dp_world_size for rank in (dp_rank, dp_rank + 1))
            self.share(total, range(first, last), -(-total // dp_world_size))

    def share(self, micro_batches: int, mine: range, rounds: int) -> None:
        """Set this rank's share of each step. `rounds`: the most that any rank does."""
        self.rounds = rounds
        self._streams = TitanStreams(self._open, self.config.streams, micro_batches, mine)

    def _open(self, stream: int) -> Any:
        config = self.config.inner
        if self.config.steps and hasattr(config, "infinite"):
            config = dataclasses.replace(config, infinite=self.config.infinite)
        return config.build(
            dp_world_size=self.config.streams,
            dp_rank=stream,
            local_batch_size=self.micro_batch,
            snapshot_every_n_steps=1,
            **self._others,
        )

    def __iter__(self) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        assert self._streams is not None
        if self.config.steps:
            yield from self._validation(self._streams)
            return
        while True:
            self.current = self._read(self._streams)
            for batch in self.current:
                yield dict(batch.inputs), batch.labels
            like = self.current[0]
            for _ in range(self.rounds - len(self.current)):
                yield filler(like.inputs, like.labels)

    def _validation(self, streams: TitanStreams) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        done, last, run = 0, None, joined()
        for _, last in streams.step():
            run.alive()  # many batches may take longer than a step
            yield last
            done += 1
        for _ in range(self.rounds - done):
            inputs, labels = last if last is not None else streams.sample()
            yield filler(inputs, labels)

    def _read(self, streams: TitanStreams) -> list[TitanBatch]:
        """Read one step. Raises DataloaderExhaustedError, on all ranks at the same step."""
        found, ended = [], False
        try:
            for micro, (inputs, labels) in streams.step():
                if len(labels) < self.micro_batch:
                    raise DataloaderExhaustedError("what is left of a stream is less than a batch")
                found.append(_batch(micro, inputs, labels))
        except DataloaderExhaustedError:
            ended = True
        if _may_end(self.config.inner) and dist.is_initialized():
            every: list[Any] = [False] * dist.get_world_size()
            dist.all_gather_object(every, ended)
            ended = any(every)
        if ended:
            raise DataloaderExhaustedError("a stream has no batches left for a whole step")
        return found

    def places(self) -> dict[int, Any]:
        """Return the positions of the streams that this rank reads."""
        return {} if self._streams is None else self._streams.state()

    def go_to(self, places: dict[int, Any]) -> None:
        """Continue from `places`, the positions of all streams. Raises BadInput."""
        assert self._streams is not None
        self._streams.load(places)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing for torchtitan's own checkpoints: our snapshots hold the positions."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load nothing; see `state_dict`."""


def _batch(micro: int, inputs: dict[str, Any], labels: torch.Tensor) -> TitanBatch:
    rows = len(labels)
    whole = [v for _, v in sorted(inputs.items()) if torch.is_tensor(v) and len(v) == rows]
    contents = tuple(content_hash([labels[i], *(v[i] for v in whole)]) for i in range(rows))
    return TitanBatch(micro, inputs, labels, int((labels != IGNORED).sum()), contents)


def filler(inputs: dict[str, Any], labels: torch.Tensor) -> tuple[dict[str, Any], torch.Tensor]:
    """Return a batch that runs forward and backward but adds nothing."""
    return dict(inputs), torch.full_like(labels, IGNORED)


def _may_end(config: Any) -> bool:
    """Return whether this loader may run out of data."""
    sources = getattr(config, "sources", None) or [config]
    return not all(getattr(source, "infinite", False) for source in sources)


def fingerprint(config: Any, seq_len: int, streams: int) -> str:
    """Return a fingerprint of the data and their order: the script's config, cut into streams."""
    aside = ("pin_memory", "prefetch_factor", "persistent_workers")
    said = {name: value for name, value in config.to_dict().items() if name not in aside}
    kind = f"{type(config).__module__}.{type(config).__qualname__}"
    body = json.dumps([kind, said, seq_len, streams], sort_keys=True, default=str)
    return f"torchtitan:{hashlib.sha256(body.encode()).hexdigest()[:32]}"
