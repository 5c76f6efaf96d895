"""The choice of an Accelerate script's training loader, what is read from it, and which other
objects of the script are state. Runs in the worker."""

from __future__ import annotations

import copy
import functools
import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from harness.adapters.accelerate.rounds import Window, batched, every_batch, length, rounds_of
from harness.adapters.deepspeed_copies import EngineOfCopy
from harness.adapters.unused_parameters import UnusedParameters
from harness.adapters.whole_copies import own_parts, whole_shares
from harness.core.world import BadInput
from harness.loops.own_loop import ReadingRanks, WhatWasRead
from harness.loops.shared_batches import Share, SharedLoader
from harness.worker.batches import rng_state
from harness.worker.batches.content_hash import content_hash
from harness.worker.batches.loader import fingerprint
from harness.worker.session import Session

ACCUMULATION = "HARNESS_ACCUMULATION"  # iterations of the script per optimizer step


class Lengths:
    """The number of rounds in each finished epoch, for data of unknown length."""

    def __init__(self) -> None:
        self.rounds: list[int] = []

    def state_dict(self) -> dict[str, Any]:
        return {"rounds": list(self.rounds)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rounds = [int(value) for value in state["rounds"]]


class Schedules:
    """The schedulers as a single object with state."""

    def __init__(self, schedulers: list[Any]):
        self.schedulers = schedulers

    def state_dict(self) -> dict[str, Any]:
        return {str(i): one.state_dict() for i, one in enumerate(self.schedulers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for i, one in enumerate(self.schedulers):
            one.load_state_dict(state[str(i)])


@dataclass
class TrainingFeed:
    """The source of training batches. `loader`: the prepared one; `most`: micro-batches of a step,
    in `accumulation` rounds; `batches`: micro-batches per epoch, None if unknown; `size`: samples
    in each; `varies`: batches have no fixed size, and each counts as one sample; `known`: the
    number of rounds per step is certain; `reading`: the ranks of a copy of the model, each of which
    reads one of the batches of a micro-batch; `seek`: reading must be repositioned, because the run
    was "resumed" or this rank's "own" batches have changed."""

    loader: Any
    shared: SharedLoader
    batches: int | None
    accumulation: int
    most: int
    size: int
    varies: bool
    known: bool
    reading: ReadingRanks
    template: Any = None
    lengths: Lengths = field(default_factory=Lengths)
    epochs: int = 0
    seek: str = ""
    resumed: bool = False

    def data(self) -> str:
        """Describe the data and its order, as text."""
        sampler = getattr(family(self.loader), "sampler", None)
        batches = length(self.shared.loader)
        return (
            f"{fingerprint(self.shared.loader.dataset)} {type(sampler).__name__} "
            f"{batches} {self.accumulation}"
        )

    def share(self, micro_batches: int, mine: range) -> None:
        """Let this rank read its part of the micro-batches `mine`, of so many in a step."""
        reading = self.reading
        self.shared.micro_batches = micro_batches * reading.count
        self.shared.mine = own_parts(mine, reading.count, reading.number)

    def rounds_at(self, epoch: int, at: int, copies: int) -> int:
        """Return the rounds of a finished step; 0 if the epoch was over. `at`: rounds before it."""
        if self.batches is not None:
            total = rounds_of(self.batches, copies)
        elif epoch < len(self.lengths.rounds):
            total = self.lengths.rounds[epoch]
        else:
            total = sys.maxsize
        return max(0, min(self.accumulation, total - at))

    def read_from(self, epoch: int, at: int, copies: int) -> Window:
        """Return a window on an epoch's shares, starting at round `at`."""
        parts = self.reading.count
        if self.seek == "own":
            self.shared.load_state_dict(copy.deepcopy(self.shared.state_dict()))
        if at or self.seek:
            self.shared.resume_at(epoch, at * copies * parts)
        self.seek = ""
        return Window(whole_shares(self.shared, parts), self.batches, at * copies)

    def said_of(self, share: Share) -> tuple[WhatWasRead | None, WhatWasRead | None]:
        """Return the keys and contents that a step's record needs."""
        if self.varies:
            return None, [content_hash(share.keys.tolist())]
        if share.contents is not None:
            return None, share.contents
        return share.keys, None

    def place(self, data: Any) -> Any:
        """Move a batch to the device, as the training loader does."""
        from accelerate.utils import send_to_device

        device = getattr(self.loader, "device", None)
        if device is None:
            return data
        return send_to_device(data, device, non_blocking=bool(self.loader._non_blocking))


# attributes of an Accelerator
PREPARED = ("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects")


class PreparedThings:
    """The objects that the script's accelerators prepared for one of its trainings. `unused`: the
    models' unused parameters; `engine`: DeepSpeed's, if it trains the model."""

    def __init__(self, before: PreparedThings | None = None) -> None:
        """`before`: those of the training before, which the accelerators still have."""
        self.accelerators: list[Any] = before.accelerators if before else []
        self.unused: UnusedParameters | None = None
        self.engine: EngineOfCopy | None = None
        self.used: weakref.WeakSet[Any] = weakref.WeakSet()  # once this training has begun
        self._spent = weakref.WeakSet(before.used if before else ())

    def begin(self) -> None:
        """Note that the training begins: what is prepared later is for another one."""
        for name in PREPARED:
            self.used.update(self._every(name))

    def _every(self, name: str) -> list[Any]:
        return [one for accelerator in self.accelerators for one in getattr(accelerator, name)]

    def all(self, name: str) -> list[Any]:
        """Return the items of the list attribute `name`, over all accelerators."""
        return [one for one in self._every(name) if one not in self._spent]

    def take_engine(self, run: Session, models: list[Any]) -> EngineOfCopy | None:
        """Take over DeepSpeed's engine, if it trains the models. Raises BadInput."""
        known = [(one, zero_engine(one)) for one in self.accelerators]
        found = [(one, engine) for one, engine in known if engine is not None]
        if not found:
            return None
        accelerator, engine = found[-1]
        if len(models) != 1 or models[0] is not engine:
            raise BadInput(
                f"wanted one model that DeepSpeed trains, found {len(models)}; make an Accelerator "
                "for each training, and prepare one model with it"
            )
        self.engine = EngineOfCopy(run, engine, "accelerate")
        wrapper = accelerator.deepspeed_engine_wrapped
        wrapper.backward = functools.partial(self.engine.backward, wrapper.backward)
        return self.engine

    def trains(self, loader: Any, feed: TrainingFeed | None) -> bool:
        """Return whether `loader` is the training loader: the first prepared one that shuffles, or
        the first one if none does. Without a prepared optimizer none trains (inference,
        statistics)."""
        own = family(loader)
        if own is None or (feed is None and not self.all("_optimizers")):
            return False
        if feed is not None:
            return own is family(feed.loader)
        # a training may read the loader of the one before again
        loaders = self.all("_dataloaders") or self._every("_dataloaders")
        known = [raw for one in loaders if (raw := family(one)) is not None]
        chosen = next((raw for raw in known if shuffles(raw)), known[0] if known else None)
        return own is chosen

    def rounds(self, loader: Any, ranks: int, feed: TrainingFeed | None) -> int:
        """Return `len` of the training loader. Raises TypeError if it is unknown."""
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
    reading: ReadingRanks,
) -> TrainingFeed:
    """Build the feed. `ranks`: size of the first world; `begun`: samples per step that the run was
    created with, 0 if it is new. Raises BadInput."""
    said = os.environ.get(ACCUMULATION, "")
    if said and not (said.isdecimal() and int(said)):
        raise BadInput(f"{ACCUMULATION}={said!r}: wanted a number of iterations, at least 1")
    accumulation = int(said) if said else int(accelerator.gradient_accumulation_steps)
    # DeepSpeed steps by itself in each backward that Accelerate's own count says to be the last
    known = bool(said) or accumulation > 1 or begun > 0 or zero_engine(accelerator) is not None
    parts = reading.count
    if parts > 1:
        _check_even(family(loader), accelerator, ranks, parts)
    every = every_of(loader, accelerator, ranks)
    sampler = getattr(every, "batch_sampler", None)
    varies = sampler is not None and getattr(sampler, "batch_size", None) is None
    size = 1 if varies else _size(every)
    if accumulation == 1 and not said:
        accumulation = begun // (size * ranks) or 1  # the script may accumulate in its own loop
    most, batches = accumulation * ranks // parts, length(every)
    shared = SharedLoader(
        every, micro_batches=most * parts, mine=range(0, 1), seed=seed, agree=agree, tell=tell
    )
    whole = None if batches is None else batches // parts
    return TrainingFeed(
        loader, shared, whole, accumulation, most, size * parts, varies, known, reading
    )


def zero_engine(accelerator: Any) -> Any:
    """Return the DeepSpeed engine that trains the Accelerator's model, or None."""
    return getattr(getattr(accelerator, "deepspeed_engine_wrapped", None), "engine", None)


def _check_even(loader: Any, accelerator: Any, ranks: int, parts: int) -> None:
    """Raise BadInput for data that leave a rank of a copy of the model without a batch. `loader`:
    the script's own."""
    if ranks % parts:
        raise BadInput(
            f"wanted a first world of whole copies of the model, of {parts} ranks each, found "
            f"{ranks} ranks; begin the run with --script-world {-(-ranks // parts) * parts}"
        )
    if not batched(loader):
        raise BadInput(
            "wanted a map-style dataset, whose batches the ranks of a copy of the model share out "
            f"by index, found {type(loader.dataset).__name__}; prepare a DataLoader of a map-style "
            "dataset, or use GPUs that hold the whole model"
        )
    if not accelerator.even_batches:
        raise BadInput(
            "even_batches=False may leave a rank of a copy of the model without a batch, for which "
            "the others wait; leave it out"
        )


def every_of(loader: Any, accelerator: Any, ranks: int) -> Any:
    """Return one DataLoader with all batches of the first world's ranks."""
    return every_batch(
        family(loader), ranks, bool(accelerator.split_batches), bool(accelerator.even_batches)
    )


def family(loader: Any) -> Any:
    """Return the script's own loader behind a prepared one, or None if we did not prepare it."""
    return getattr(loader, "harness_raw", None)


def shuffles(loader: Any) -> bool:
    """Return whether `loader`, a script's own, shuffles."""
    from torch.utils.data import IterableDataset, SequentialSampler

    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    return not isinstance(loader.dataset, IterableDataset) and not isinstance(
        sampler, SequentialSampler
    )


def sample_batch(loader: Any) -> Any:
    """Return any batch of the loader, on the host, without side effects."""
    with rng_state.kept():
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
    """Yield as many items as a prepared loader would give, without reading data."""
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
    """Return the schedulers of these optimizers: the prepared ones, and those that the script did
    not prepare. Schedulers that another one steps are left out."""
    wanted = {id(one) for one in optimizers}
    found = [
        thing
        for thing in gc.get_objects()
        if issubclass(type(thing), LRScheduler) and id(getattr(thing, "optimizer", None)) in wanted
    ]
    inner = {id(one) for thing in found for one in getattr(thing, "_schedulers", ())}
    known = {id(one) for one in prepared} | inner
    return [*prepared, *(thing for thing in found if id(thing) not in known)]
