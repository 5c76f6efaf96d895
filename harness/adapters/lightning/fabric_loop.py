"""The steps of a script's own loop around Lightning Fabric, on any world. Runs in the worker.

The script sees a world of one. Its training loader yields this rank's micro-batches, one per run of
the loop's body. `optimizer.step()` acts only in a step's last body, when the gradients of all ranks
have been summed; the same holds for `zero_grad`, clipping and schedulers. A rank without a
micro-batch in a short last step runs the body once without effect, so schedulers step.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DistributedSampler

from harness.adapters.lightning.data import drawn_from
from harness.adapters.lightning.limits import check_split
from harness.adapters.lightning.parts import (
    batch_size,
    first_copies,
    of_all_parts,
    refuse_other_size,
)
from harness.adapters.unused_parameters import UnusedParameters
from harness.adapters.whole_copies import copies_of, own_parts, reshard, whole_shares
from harness.core.world import BadInput
from harness.loops.own_loop import OwnLoop, OwnStep, own_loop
from harness.loops.shared_batches import Share, SharedLoader
from harness.worker.batches import rng_state
from harness.worker.batches.loader import fingerprint
from harness.worker.session import Session


class Several:
    """Several objects with state, as one."""

    def __init__(self, things: dict[str, Any]):
        self._things = things

    def state_dict(self) -> dict[str, Any]:
        return {name: thing.state_dict() for name, thing in self._things.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, thing in self._things.items():
            thing.load_state_dict(state[name])


class BatchCount:
    """The position of the script's loop: finished epochs, and batches of the current one, of which
    each consists of `parts`."""

    def __init__(self) -> None:
        self.epoch = self.batch = 0
        self.parts = 1

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "batch": self.batch, "parts": self.parts}

    def load_state_dict(self, state: dict[str, int]) -> None:
        refuse_other_size(int(state["parts"]), self.parts)
        self.epoch, self.batch = int(state["epoch"]), int(state["batch"])


@dataclass
class FabricParts:
    """The objects that the script has set up. `kept`: further state, by name; `reading`: the ranks
    of a copy of the model that read different parts of a micro-batch."""

    models: list[Any] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    loaders: list[Any] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)
    reading: int = 1
    unused: UnusedParameters | None = None


class FabricSteps:
    """The training driver of this process. `accumulation`: iterations of the script's body per
    optimizer step; `first_copies`: copies of the model in the world whose batch is kept; `share`:
    the body's current micro-batch, None if the body counts for nothing."""

    def __init__(self, run: Session, accumulation: int = 1):
        self.run, self.accumulation, self.first_copies = run, accumulation, first_copies(run)
        self.parts = FabricParts()
        self.loop: OwnLoop | None = None
        self.step: OwnStep | None = None
        self.share: Share | None = None
        self.count = BatchCount()
        self._shared: SharedLoader | None = None
        # generators that the script's first epoch is drawn from
        self._drawn: rng_state.State | None = None
        self._passed = 0  # epochs that a resumed script has skipped without work
        self._last = self._synced = self._pending = False

    @property
    def micro_batches(self) -> int:
        return self.accumulation * self.first_copies

    @property
    def within(self) -> bool:
        """True while the training loop's body runs."""
        return self.step is not None

    # ---- which loader trains ---------------------------------------------------------------------
    def trains(self, loader: Any) -> bool:
        """Return whether `loader` trains: the first one that shuffles, else the first one."""
        if not (self.parts.models and self.parts.optimizers):
            return False
        chosen = next((one for one in self.parts.loaders if _shuffles(one)), self.parts.loaders[0])
        return bool(chosen is loader)

    def length(self, loader: Any) -> int:
        """Return `len` of the training loader, as on a rank of the first world."""
        return math.ceil(len(loader) / self.first_copies)

    # ---- the beginning ---------------------------------------------------------------------------
    def _begin(self, loader: Any) -> SharedLoader:
        if self._shared is not None:
            return self._shared
        self._drawn = rng_state.generators_state()
        optimizers = self.parts.optimizers
        if len(optimizers) > 1:
            raise BadInput(
                f"wanted one optimizer in fabric.setup, found {len(optimizers)}: what the "
                "second one does depends on the first one's step, which comes when all ranks are "
                "done; use run.steps(...) of harness.attach(), where step.again() begins a phase"
            )
        if len(self.parts.models) > 1:
            raise BadInput(f"wanted one model in fabric.setup, found {len(self.parts.models)}")
        model, parts = self.parts.models[0], self.parts.reading
        check_split(model, parts)
        self.count.parts = parts
        schedulers = {
            str(i): thing
            for i, thing in enumerate(_schedulers_of(self.parts.optimizers[0], self._gate))
        }
        state: dict[str, Any] = {"count": self.count, **self.parts.kept}
        if schedulers:
            state["schedulers"] = Several(schedulers)
        shared = self._shared = SharedLoader(
            of_all_parts(loader, parts),
            micro_batches=self.micro_batches * parts,
            mine=range(1),
            seed=self.run.seed,
            agree=lambda value: self.run._peers.agree(lambda: value),
            tell=self.run.print,
        )
        self.run.prepare(
            model,
            self.parts.optimizers,
            state={**state, "batches": shared},
            strategy=copies_of(self.run, model, deferred=False),
        )
        self.loop = own_loop(
            self.run,
            micro_batches=self.micro_batches,
            micro_batch=batch_size(loader) * parts,
            data=fingerprint(loader.dataset),
            seed=self.run.seed,
            adapter="fabric",
            reading_ranks=parts,
        )
        shared.mine = own_parts(self.loop.share, parts, self.loop.reading.number)
        if self.run.step:
            self._drawn = None
            shared.resume_at(self.count.epoch, self.count.batch * parts)
        self.run.print(
            f"harness: Fabric: {self.micro_batches} micro-batches a step, on {self.run.world} "
            "ranks now. Each iteration of the loop is a step of the first world; the loop's own "
            "variables are not kept (a best score: fabric.keep(name=object))"
        )
        return shared

    def _gate(self, scheduler: Any) -> None:
        """Make the scheduler's `step` act only once per step of the optimizer."""
        kind = type(scheduler)

        def step(that: Any, *args: Any, **kwargs: Any) -> Any:
            return None if self.within and not self._last else kind.step(that, *args, **kwargs)

        # an instance attribute would become part of its state
        scheduler.__class__ = type(kind.__name__, (kind,), {"step": step})

    def resume(self) -> None:
        """Resume before the first epoch. Raises BadInput, SystemExit."""
        if not self.parts.loaders:
            raise BadInput("wanted fabric.setup_dataloaders(...) before fabric.epochs(...)")
        self._begin(next(loader for loader in self.parts.loaders if self.trains(loader)))
        self._passed = self.count.epoch

    # ---- iterations ------------------------------------------------------------------------------
    def iterate(self, loader: Any, place: Callable[[Any], Any]) -> Iterator[Any]:
        """Yield the rest of an epoch of the training loader. `place` moves data to the device."""
        shared = self._begin(loader)
        self.rest()
        if self._passed < self.count.epoch:
            self._passed += 1
            return
        if self.parts.reading > 1:  # as Fabric does with the loader of one part
            shared.set_epoch(self.count.epoch)
        whole = whole_shares(shared, self.parts.reading)
        shares, total = drawn_from(self._drawn, whole), _length(loader)
        self._drawn = None
        while True:
            group, count = self._group(shares, total)
            if not count:
                break
            yield from self._bodies(group, count, place)
            self.count.batch += count
            if total is None or self.count.batch < total:
                self._pending = True  # until the script requests the next item
        self.count.epoch, self.count.batch = self.count.epoch + 1, 0
        self._passed += 1
        self._pending = True

    def _group(self, shares: Iterator[Share], total: int | None) -> tuple[list[Share], int]:
        """Return the next step's micro-batches with this rank's data, and their number."""
        self.rest()
        group = list(itertools.islice(shares, self.micro_batches))
        return group, len(group)

    def _bodies(self, group: list[Share], count: int, place: Callable[[Any], Any]) -> Iterator[Any]:
        assert self.loop is not None
        self.step = self.loop.begin(count, sum(share.count for share in group))
        self._synced = False
        own: list[Share | None] = [share for share in group if share.mine]
        filler = None if own else self._any_batch(group[0])
        for number, share in enumerate(own or [None]):
            self.share, self._last = share, number + 1 >= len(own)
            if share is not None:
                said = share.contents
                self.step.read(share.micro, share.keys if said is None else None, said)
                self.step.micro(share.micro)
            yield place(filler if share is None else share.data)
        if self.step is not None:
            raise BadInput(
                f"step {self.step.number}: wanted optimizer.step() in each iteration, found none: "
                "a loop that accumulates by itself, every so many iterations, does not know how "
                "many this rank has. Let harness.adapters.lightning.Fabric(accumulate=N) do it, "
                "and step in each"
            )

    def _any_batch(self, share: Share) -> Any:
        """Return a batch that belongs to another rank, for a body that counts for nothing."""
        assert self._shared is not None
        loader = self._shared.loader
        with rng_state.kept():
            keys = share.keys[: max(1, share.count // self.parts.reading)]
            return loader.collate_fn([loader.dataset[int(key)] for key in keys])

    def rest(self) -> None:
        """Finish the previous step, because the script requests more."""
        if self._pending and self.loop is not None:
            self._pending = False
            self.loop.boundary()

    # ---- what the body calls ---------------------------------------------------------------------
    def backward(self, loss: torch.Tensor, go: Callable[[torch.Tensor], None]) -> None:
        """Handle `fabric.backward(loss)`. `go` is Fabric's own function."""
        if self.step is None:
            go(loss)
            return
        if self.share is None:
            return
        beside = min(
            self.first_copies,
            self.step.count - self.share.micro + self.share.micro % self.first_copies,
        )
        go(loss / (self.accumulation * beside))
        self.step.done(self.share.micro, loss.detach(), self.share.count)

    def sync(self) -> bool:
        """Sum the gradients in a step's last body. Return False if they are not complete yet."""
        if self.step is None:
            return True
        if self._last and not self._synced:
            if self.share is None and self.run.replica_ranks > 1:
                reshard(self.parts.models[0])  # a forward without a backward has gathered it
            self.step.sync()
            if self.parts.unused is not None:
                self.parts.unused.drop()
            self._synced = True
        return self._last

    def optimize(self, optimizer: Any, go: Callable[[], Any]) -> Any:
        """Step the optimizer if the gradients are complete. `go` is Fabric's own function."""
        if not self.sync():
            return None
        rate = float(optimizer.param_groups[0]["lr"])
        result = go()
        if self.step is not None:
            self.step.end(rate)
            self.step = None
        return result

    def zero(self, go: Callable[[], None]) -> None:
        """Zero the gradients with `go`, except within a step, which still needs them."""
        if self.step is None:
            go()

    def finished(self) -> None:
        """Finish the run: the script reports the end of training."""
        self.rest()
        if self.loop is not None:
            self.loop.finished()


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def _shuffles(loader: Any) -> bool:
    sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(sampler, DistributedSampler):
        return bool(sampler.shuffle)
    kinds = (
        torch.utils.data.SequentialSampler,
        torch.utils.data.dataloader._InfiniteConstantSampler,
    )
    return not isinstance(sampler, kinds)


def _schedulers_of(optimizer: Any, gate: Callable[[Any], None]) -> list[Any]:
    """Return this optimizer's schedulers, in the order of their creation, after gating each."""
    found = [
        thing
        for thing in gc.get_objects()
        if issubclass(type(thing), LRScheduler) and thing.optimizer is optimizer
    ]
    inner = {id(one) for thing in found for one in getattr(thing, "_schedulers", ())}
    outer = [thing for thing in found if id(thing) not in inner]
    for thing in outer:
        gate(thing)
    return outer
