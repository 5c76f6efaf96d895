"""Which of an Accelerate script's loaders trains, what it reads, and what else of the script is
state. Runs in the worker."""

from __future__ import annotations

import copy
import gc
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from harness.adapters.accelerate_rounds import Window, batched, every_batch, length, rounds_of
from harness.adapters.unused import UnusedParameters
from harness.core.world import BadInput
from harness.worker import chance
from harness.worker.content_hashes import content_hash
from harness.worker.loader import fingerprint
from harness.worker.own_loop import WhatWasRead
from harness.worker.shares import Share, SharedLoader

ACCUMULATION = "HARNESS_ACCUMULATION"  # iterations of the script for each optimizer step


class Lengths:
    """Rounds of the epochs that are over, where nobody knows them beforehand."""

    def __init__(self) -> None:
        self.rounds: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"rounds": list(self.rounds)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rounds = [int(value) for value in state["rounds"]]


class Schedules:
    """The schedulers as one thing with a state."""

    def __init__(self, schedulers: list[Any]):
        self.schedulers = schedulers

    def state_dict(self) -> dict[str, Any]:
        return {str(i): one.state_dict() for i, one in enumerate(self.schedulers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for i, one in enumerate(self.schedulers):
            one.load_state_dict(state[str(i)])


@dataclass
class TrainingFeed:
    """Where training batches come from. `loader`: the prepared one; `most`: micro-batches of a
    step, in `accumulation` rounds; `batches`: of an epoch, None: not known; `size`: samples of a
    batch; `varies`: batches have no fixed size, and each counts as one sample; `known`: that a step
    has so many rounds; `seek`: where reading goes on must be said, because the run was "resumed" or
    other batches are "own" ones now."""

    loader: Any
    shared: SharedLoader
    batches: int | None
    accumulation: int
    most: int
    size: int
    varies: bool
    known: bool
    template: Any = None
    lengths: Lengths = field(default_factory=Lengths)
    epochs: int = 0
    seek: str = ""
    resumed: bool = False

    def data(self) -> str:
        """What is read, and in which order."""
        sampler = getattr(family(self.loader), "sampler", None)
        return (
            f"{fingerprint(self.shared.loader.dataset)} {type(sampler).__name__} "
            f"{self.batches} {self.accumulation}"
        )

    def rounds_at(self, epoch: int, at: int, ranks: int) -> int:
        """Of a step that was done: its rounds; 0: the epoch was over. `at`: rounds before it."""
        if self.batches is not None:
            total = rounds_of(self.batches, ranks)
        elif epoch < len(self.lengths.rounds):
            total = self.lengths.rounds[epoch]
        else:
            total = sys.maxsize
        return max(0, min(self.accumulation, total - at))

    def read_from(self, epoch: int, at: int, ranks: int) -> Window:
        """Shares of an epoch from a round on."""
        if self.seek == "own":
            self.shared.load_state_dict(copy.deepcopy(self.shared.state_dict()))
        if at or self.seek:
            self.shared.resume_at(epoch, at * ranks)
        self.seek = ""
        return Window(iter(self.shared), self.batches, at * ranks)

    def said_of(self, share: Share) -> tuple[WhatWasRead | None, WhatWasRead | None]:
        """Keys and contents, as a step's record wants them."""
        if self.varies:
            return None, [content_hash(share.keys.tolist())]
        if share.contents is not None:
            return None, share.contents
        return share.keys, None

    def place(self, data: Any) -> Any:
        """On the device, as the training loader puts it there."""
        from accelerate.utils import send_to_device

        device = getattr(self.loader, "device", None)
        if device is None:
            return data
        return send_to_device(data, device, non_blocking=bool(self.loader._non_blocking))


class PreparedThings:
    """What the script's accelerators were given. `unused`: of its models."""

    def __init__(self) -> None:
        self.accelerators: list[Any] = []
        self.unused: UnusedParameters | None = None

    def all(self, name: str) -> list[Any]:
        """Of an attribute that each of them has."""
        return [one for accelerator in self.accelerators for one in getattr(accelerator, name)]

    def trains(self, loader: Any, feed: TrainingFeed | None) -> bool:
        """Is it the training loader? The first prepared one that shuffles; where none does, the
        first."""
        own = family(loader)
        if own is None:
            return False
        if feed is not None:
            return own is family(feed.loader)
        known = [raw for one in self.all("_dataloaders") if (raw := family(one)) is not None]
        chosen = next((raw for raw in known if shuffles(raw)), known[0] if known else None)
        return own is chosen

    def rounds(self, loader: Any, ranks: int, feed: TrainingFeed | None) -> int:
        """`len` of the training loader. Raises TypeError where nobody knows."""
        if feed is not None:
            every = feed.shared.loader
        else:
            every = every_of(loader, self.accelerators[0], ranks)
        return rounds_of(len(every), ranks) - int(getattr(loader, "harness_skip", 0))


def make_feed(
    loader: Any,
    accelerator: Any,
    ranks: int,
    begun: int,
    seed: int,
    agree: Callable[[Any], Any],
    tell: Callable[[str], None],
) -> TrainingFeed:
    """`ranks`: of the first world; `begun`: rounds of a step, as the run was begun, 0: it was not.
    Raises BadInput."""
    said = os.environ.get(ACCUMULATION, "")
    if said and not (said.isdecimal() and int(said)):
        raise BadInput(f"{ACCUMULATION}={said!r}: wanted a number of iterations, at least 1")
    accumulation = int(said) if said else int(accelerator.gradient_accumulation_steps)
    known = bool(said) or accumulation > 1 or begun > 0
    if accumulation == 1 and not said:
        accumulation = begun or 1  # the script may accumulate by itself
    every = every_of(loader, accelerator, ranks)
    sampler = getattr(every, "batch_sampler", None)
    varies = sampler is not None and getattr(sampler, "batch_size", None) is None
    most = accumulation * ranks
    shared = SharedLoader(
        every, micro_batches=most, mine=range(0, 1), seed=seed, agree=agree, tell=tell
    )
    size = 1 if varies else _size(every)
    return TrainingFeed(loader, shared, length(every), accumulation, most, size, varies, known)


def every_of(loader: Any, accelerator: Any, ranks: int) -> Any:
    """All batches of the first world's ranks, as one DataLoader."""
    return every_batch(
        family(loader), ranks, bool(accelerator.split_batches), bool(accelerator.even_batches)
    )


def family(loader: Any) -> Any:
    """The script's own loader, of which a prepared one was made; None: it is none of ours."""
    return getattr(loader, "harness_raw", None)


def shuffles(loader: Any) -> bool:
    """A script's own loader."""
    from torch.utils.data import IterableDataset, SequentialSampler

    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    return not isinstance(loader.dataset, IterableDataset) and not isinstance(
        sampler, SequentialSampler
    )


def sample_batch(loader: Any) -> Any:
    """Any batch of it, read without a trace, on the host."""
    with chance.kept():
        if batched(loader):
            count = min(_size(loader), len(loader.dataset))
            return loader.collate_fn([loader.dataset[i] for i in range(count)])
        state = getattr(loader.dataset, "state_dict", None)
        before = copy.deepcopy(state()) if state is not None else None
        batch = next(iter(loader))
        if before is not None:
            loader.dataset.load_state_dict(before)
        return batch


def without_reading(loader: Any, feed: TrainingFeed) -> Iterator[Any]:
    """As many items as a prepared loader would give."""
    own = family(loader)
    item = feed.place(sample_batch(own)) if own is not None else None
    count = length(loader) or 1
    loader.begin()
    for number in range(count):
        loader.end_of_dataloader = number == count - 1
        yield item
    loader.iteration += 1
    loader.end()


def _size(loader: Any) -> int:
    size = getattr(loader.batch_sampler, "batch_size", None) or getattr(loader, "batch_size", None)
    return int(size or 1)


def schedulers_of(optimizers: list[Any], prepared: list[Any]) -> list[Any]:
    """The schedulers of these optimizers: the prepared ones, and those that the script keeps to
    itself; not those that another one steps."""
    wanted = {id(one) for one in optimizers}
    found = [
        thing
        for thing in gc.get_objects()
        if issubclass(type(thing), LRScheduler) and id(getattr(thing, "optimizer", None)) in wanted
    ]
    inner = {id(one) for thing in found for one in getattr(thing, "_schedulers", ())}
    known = {id(one) for one in prepared} | inner
    return [*prepared, *(thing for thing in found if id(thing) not in known)]
