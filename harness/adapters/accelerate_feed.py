"""Which of an Accelerate script's loaders trains, what it reads, and what else of the script is
state. Runs in the worker."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from harness.adapters.accelerate_rounds import every_batch, length
from harness.core.world import BadInput
from harness.worker import chance
from harness.worker.loader import fingerprint
from harness.worker.shares import SharedLoader

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
    batch; `varies`: batches have no fixed size, and each counts as one sample."""

    loader: Any
    shared: SharedLoader
    batches: int | None
    accumulation: int
    most: int
    size: int
    varies: bool
    template: Any = None
    lengths: Lengths = field(default_factory=Lengths)
    epochs: int = 0

    def data(self) -> str:
        """What is read, and in which order."""
        sampler = getattr(family(self.loader), "sampler", None)
        return (
            f"{fingerprint(self.shared.loader.dataset)} {type(sampler).__name__} "
            f"{self.batches} {self.accumulation}"
        )


def make_feed(
    loader: Any,
    accelerator: Any,
    ranks: int,
    seed: int,
    agree: Callable[[Any], Any],
    tell: Callable[[str], None],
) -> TrainingFeed:
    """`ranks`: of the first world. Raises BadInput."""
    said = os.environ.get(ACCUMULATION, "")
    if said and not (said.isdecimal() and int(said)):
        raise BadInput(f"{ACCUMULATION}={said!r}: wanted a number of iterations, at least 1")
    accumulation = int(said) if said else int(accelerator.gradient_accumulation_steps)
    every = every_of(loader, accelerator, ranks)
    sampler = getattr(every, "batch_sampler", None)
    varies = sampler is not None and getattr(sampler, "batch_size", None) is None
    most = accumulation * ranks
    shared = SharedLoader(
        every, micro_batches=most, mine=range(0, 1), seed=seed, agree=agree, tell=tell
    )
    size = 1 if varies else _size(every)
    return TrainingFeed(loader, shared, length(every), accumulation, most, size, varies)


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
        if hasattr(loader.dataset, "__getitem__") and loader.batch_sampler is not None:
            count = min(_size(loader), len(loader.dataset))
            return loader.collate_fn([loader.dataset[i] for i in range(count)])
        state = getattr(loader.dataset, "state_dict", None)
        before = copy.deepcopy(state()) if state is not None else None
        batch = next(iter(loader))
        if before is not None:
            loader.dataset.load_state_dict(before)
        return batch


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
