"""A DataLoader of this rank's micro-batches, for a training loop of the script's own: `run.loader`.
Runs in the worker.

    loader = run.loader(dataset, global_batch=64, micro_batch=8, shuffle=True, num_workers=2)
    for epoch in loader.epochs(10):                  # after a resume: from the same place
        for x, y in loader:                          # this rank's micro-batches
            loader.step.backward(loss_fn(model(x), y))
            if loader.ends_step:
                loader.step.update(clip_norm=1.0)    # or all three: loader.update(loss, clip_norm=)
        validate(model)                              # at the end of every epoch

An epoch is a pass over the sampler's order, cut into global batches, and these into micro-batches;
the last step of an epoch may be short. All ranks have the same order, and each does its share of
every step, so a step's samples do not depend on the world. A snapshot at a step boundary holds the
epoch and the place in it. The boundary after an epoch's last step comes when the script begins the
next epoch, so that its work between two epochs is neither lost nor repeated.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DistributedSampler

from harness.core.batch import Batching, Plan, digest, indices_at, sample_hash, seed_for
from harness.core.world import BadInput
from harness.loops.own_loop import DataPlace, own_loop
from harness.node.heartbeat import WorkerPhase
from harness.worker import boundary
from harness.worker.batches.feed import agree_on_exclusions
from harness.worker.batches.loader import (
    MicroBatch,
    Reader,
    fingerprint,
    is_map_style,
    seed_everything,
    to_device,
)
from harness.worker.resuming.same_process import WorldOver, going_on
from harness.worker.step import OpenStep, Work
from harness.worker.step_timing import DATA, FORWARD
from harness.worker.votes import HalfSteps

if TYPE_CHECKING:
    from harness.worker.session import Session

# The order in which a loop over epochs reads its samples, the loop's place in it, and a step's
# part of it.

SampleKeys = list[tuple[int, int]]  # (position, index) of each sample


class LoaderPlace(DataPlace):
    """The place in the data where the next step begins. `position`: samples consumed so far;
    `epoch`: passes over the data that are complete; `steps`: steps of this pass that are done."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = self.steps = 0

    def advance(self, samples: int, ends_epoch: bool) -> None:
        self.position += samples
        self.epoch += ends_epoch
        self.steps = 0 if ends_epoch else self.steps + 1

    def go_on(self, epoch: int) -> None:
        """Move to the beginning of a later epoch."""
        self.epoch, self.steps = epoch, 0

    def state_dict(self) -> dict[str, int]:
        return {**super().state_dict(), "epoch": self.epoch, "steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        super().load_state_dict(state)
        self.epoch, self.steps = int(state["epoch"]), int(state["steps"])


@dataclass(frozen=True)
class Cut:
    """One step of an epoch, as this rank sees it. `shares`: the number of micro-batches of each
    replica. `given`: the micro-batches that this rank reads, in order; those from index `own` on
    are fillers, which do not count."""

    samples: int
    ends_epoch: bool
    shares: tuple[int, ...]
    given: list[tuple[int, SampleKeys]]  # (number of the micro-batch, its samples)
    own: int


class EpochOrder:
    """The order of a dataset's samples in each epoch: as stored, shuffled, or a sampler's."""

    def __init__(self, dataset: Any, sampler: Any, shuffle: bool, seed: int):
        if sampler is not None and shuffle:
            raise BadInput("run.loader(sampler=..., shuffle=True): wanted one of them")
        if not isinstance(shuffle, bool) or hasattr(dataset, "sample_order"):
            what = "a mixture" if isinstance(shuffle, bool) else f"shuffle={shuffle!r}"
            raise BadInput(
                f"run.loader(...): wanted shuffle=True, False or a sampler, found {what}, whose "
                "order goes by steps that do not end with an epoch; use run.steps(...)"
            )
        if isinstance(sampler, DistributedSampler):
            raise BadInput(
                "run.loader(sampler=DistributedSampler(...)): the loader shares the data out by "
                "itself; leave it out, and say shuffle=True"
            )
        self._sampler, self._shuffle, self._seed = sampler, shuffle, seed
        self._samples = len(dataset)

    @property
    def name(self) -> str:
        if self._sampler is not None:
            return type(self._sampler).__qualname__
        return "shuffled" if self._shuffle else "in order"

    @property
    def keeps_neighbours(self) -> bool:
        return self._sampler is None and not self._shuffle

    @property
    def scatters(self) -> bool:
        """True if samples are read in random order. A sampler's order is unknown: False."""
        return self._shuffle

    def __len__(self) -> int:
        """Return the number of samples in an epoch."""
        return self._samples if self._sampler is None else len(self._sampler)

    def of(self, epoch: int) -> list[int]:
        """Return the indices of an epoch's samples, in order. The generators that a sampler draws
        from are seeded here, so its order depends on the seed and the epoch only."""
        if self._sampler is None:
            first = epoch * self._samples
            batching = Batching(self._samples, 1, 1, self._seed, self._shuffle)
            at = np.arange(first, first + self._samples)
            order: list[int] = indices_at(batching, at).tolist()
            return order
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        seed = seed_for(self._seed, epoch, 0)
        if isinstance(own := getattr(self._sampler, "generator", None), torch.Generator):
            own.manual_seed(seed)
        seed_everything(seed)
        return [int(index) for index in self._sampler]


OURS = ("batch_size", "batch_sampler", "shuffle", "sampler", "drop_last")


class LoaderStep(OpenStep):
    """One optimizer update of a loop over `run.loader`."""

    def __init__(
        self,
        work: Work,
        place: LoaderPlace,
        cut: Cut,
        reader: Reader,
        began: tuple[float, float],
        halves: HalfSteps,
    ):
        super().__init__(work, work.run.step + 1, began)
        self._halves, self._noted = halves, False
        self.cut, self.begins = cut, place.position
        self._place, self._reader = place, reader
        self._sums.shares, self._sums.tokens_weighted = cut.shares, True
        self._sums.begins = place.position
        self._repeats: bool | None = None  # this phase must be repeated; None: not known yet
        work.training.strategy.zero()

    def take_up(self, i: int, batch: MicroBatch, first: bool) -> Any:
        """Prepare this rank's i-th micro-batch for its forward, and return its data on the device.
        `first`: it was not given out before, so it is recorded."""
        w, filler = self._work, i >= self.cut.own
        if i == 0:
            self._left, self._repeats = len(self.cut.given), None
            votes = self._halves.begin(self._left, self.cut.shares if first else ())
            self._noted = votes or w.training.strategy.may_repeat
            if self._noted and w.training.buffers is not None:
                w.training.buffers.note()
        self._halves.look(i)
        if first and not filler:
            self._sums.note_foreign(batch.positions, batch.samples)
        last = i == len(self.cut.given) - 1
        self._take_up(self.cut.given[i][0], len(batch.samples), last, filler)
        data = to_device(batch.data, w.peers.device)
        if not filler:
            w.rates.arm()
        w.timer.enter(FORWARD)
        return data

    @property
    def ends(self) -> bool:
        """True if this rank's micro-batches of this phase are done, and none is to be repeated.
        False too if this step is lost, which the next world does again."""
        try:
            return self.lost is None and self.complete and not self.repeats()
        except RuntimeError as e:
            self._lose(e)
            return False

    def repeats(self) -> bool:
        """Return, after the last micro-batch and on all ranks, whether all must be repeated."""
        if self._repeats is None:
            w = self._work
            self._repeats = w.training.strategy.again()
            if self._repeats:
                self._repeat()
            elif self._noted and w.training.buffers is not None:
                w.training.buffers.learn()
        return self._repeats

    def again(self) -> Iterator[Any]:
        """Yield this step's micro-batches again, for its next phase, after `sync`: see
        `Step.again`. Raises BadInput."""
        self._refuse_lost()
        self._next_phase()
        self._phase.tokens_weighted = True
        yield from self.micros(None)

    def micros(self, batches: Iterator[MicroBatch] | None) -> Iterator[Any]:
        """Yield the data of this rank's micro-batches as often as all ranks must do them: first
        those of `batches`, each of which must have a backward; then, or if that is None, they are
        read again. Raises BadInput."""
        fresh, repeat = batches, True
        try:
            while repeat:
                for i, (_, keys) in enumerate(self.cut.given):
                    if fresh is None:
                        batch = self._reader.read(keys)
                    else:
                        self._work.timer.enter(DATA)
                        batch = next(fresh)
                    yield self.take_up(i, batch, first=fresh is not None)
                    if self.lost is not None:
                        return
                    if batches is not None and not self.went_backward:
                        raise BadInput(
                            f"step {self.number}: wanted loader.step.backward(loss) for each "
                            "micro-batch, found none for this one"
                        )
                fresh = None
                repeat = not self.updated and self.repeats()
        except RuntimeError as e:
            self._lose(e)

    def sync(self, clip_norm: float | None = None, *, of: Any = None) -> torch.Tensor:
        if self.complete and self.repeats():
            raise BadInput(
                f"step {self.number}: a gradient did not fit into exact sums, so its micro-batches "
                "come once more; ask `if loader.ends_step:` before step.sync() or step.update(), "
                "which is false then"
            )
        return super().sync(clip_norm, of=of)

    def done(self) -> None:
        super().done()
        self._place.advance(self.cut.samples, self.cut.ends_epoch)

    @property
    def epoch(self) -> int:
        """The epoch of this step: 0, 1, ..."""
        return self._place.epoch - (self.updated and self.cut.ends_epoch)

    @property
    def ends_epoch(self) -> bool:
        return self.cut.ends_epoch


class MicroLoader:
    """The iterable that `run.loader` returns; see the module."""

    def __init__(
        self,
        front: Session,
        dataset: Any,
        *,
        global_batch: int,
        micro_batch: int,
        sampler: Any = None,
        shuffle: bool = False,
        drop_last: bool = False,
        tokens_per_sample: int = 0,
        flops_per_sample: float | str = 0.0,
        **options: Any,
    ):
        if not is_map_style(dataset):
            raise BadInput(
                f"run.loader({type(dataset).__name__}): wanted a map-style dataset (__getitem__ "
                "and __len__); data that is read in order only goes to run.steps(...)"
            )
        if unknown := sorted(set(options) & set(OURS)):
            raise BadInput(
                f"run.loader({unknown[0]}=...): the loader cuts batches itself; give micro_batch= "
                "and global_batch= (samples), and sampler= or shuffle= for the order"
            )
        Batching(max(len(dataset), global_batch), global_batch, micro_batch, front.seed)  # check
        self.global_batch, self.micro_batch, self.drop_last = global_batch, micro_batch, drop_last
        self._front, self._dataset = front, dataset
        self._order = EpochOrder(dataset, sampler, shuffle, front.seed)
        self._told = tokens_per_sample, flops_per_sample
        in_turns = (global_batch,) if self._order.keeps_neighbours else ()
        self._reader = Reader(dataset, front.seed, options.pop("collate_fn", None), in_turns)
        pin = {"pin_memory": front.device.type == "cuda"}
        self._loader = self._reader.ahead(_Asking(self), **(pin | options))
        self._place: LoaderPlace | None = None
        self._asked: int | None = None  # the epoch requested by `set_epoch`
        self._total = 0  # the last step, for a loop over `epochs`; 0: it has another
        self.step: LoaderStep | None = None
        self._sample_order: list[int] = []  # the order of the current epoch
        self._cuts: deque[Cut] = deque()  # requested by the DataLoader, and not returned yet

    # ---- what the script may look at -------------------------------------------------------------
    @property
    def steps(self) -> int:
        """The number of optimizer steps in an epoch."""
        samples = len(self._order)
        return samples // self.global_batch if self.drop_last else -(-samples // self.global_batch)

    def __len__(self) -> int:
        """Return the number of micro-batches of this rank in an epoch."""
        whole, rest = divmod(len(self._order), self.global_batch)
        last = [] if self.drop_last or not rest else [self._given(-(-rest // self.micro_batch))]
        return whole * self.accumulation + sum(len(micros) for micros in last)

    @property
    def accumulation(self) -> int:
        """The number of micro-batches of this rank in a full step (gradient accumulation)."""
        return len(self._given(self.global_batch // self.micro_batch))

    @property
    def epoch(self) -> int:
        """The epoch of the next step, at which a script's loop over epochs begins after a resume.
        The first use resumes."""
        return self._opened().epoch

    @property
    def ends_step(self) -> bool:
        """True after the backward of this rank's last micro-batch of a step: call `step.update()`
        now. With exact sums all ranks agree here whether the step must be repeated; if so, it is
        False and the micro-batches come again."""
        return self.step is not None and self.step.ends

    # ---- what the script calls -------------------------------------------------------------------
    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. An iteration of a completed epoch yields nothing. If
        `epoch` is later than the current one, the rest of the current one is skipped."""
        place = self._opened()
        if epoch > place.epoch:
            place.go_on(epoch)
        self._asked = epoch

    def update(
        self, loss: torch.Tensor, weight: float | None = None, clip_norm: float | None = None
    ) -> bool:
        """Call `step.backward(loss, weight)` for this micro-batch, and after the last one of a step
        `step.update(clip_norm)`. Return whether the step is over, and was not lost."""
        if self.step is None:
            raise BadInput("loader.update(loss): wanted a loop over the loader around it")
        self.step.backward(loss, weight)
        if self.ends_step:
            self.step.update(clip_norm)
        return self.step.updated

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the epochs still to do, of `total`; the first is the one in which the run is. Ends
        when all are done or `run.stop` was called; what was trained is committed then."""
        place, front = self._opened(total), self._front
        self._total = front._hands.total = total * self.steps
        while place.epoch < total and not self._over():
            before = self._asked = place.epoch
            front._same.leave()
            yield before
            if place.epoch == before:  # the script left the epoch before its end
                place.go_on(before + 1)
            with going_on(self._go_on):
                self._boundary()
                front._hands.hear_enough()
        front._same.forbid()
        if place.epoch >= total or self._over():
            front._hands.turn(boundary.Reached())

    def __iter__(self) -> Iterator[Any]:
        place = self._opened()
        if self._asked is not None and self._asked < place.epoch:
            self._asked = None
            return
        self._asked = None
        front = self._front
        front._same.enter()
        while True:
            with going_on(self._go_on):
                yield from self._rest_of_epoch(place)
                break
        if not self._total:  # what follows is as in a process that begins with the next epoch
            front._same.leave()

    def _rest_of_epoch(self, place: LoaderPlace) -> Iterator[Any]:
        """Yield this rank's micro-batches of the steps of this epoch that are still to do, as long
        as this world lasts. Raises WorldOver at its end."""
        front, w = self._front, self._front._work
        self._boundary()
        self._sample_order = self._order.of(place.epoch)
        self._check_alike(self._sample_order)
        to_come = ([i for _, i in keys] for cut in self.cuts() for _, keys in cut.given)
        once = self._order.keeps_neighbours
        read = iter(self._loader)
        w.feed.reads(self._dataset, once, self._order.scatters, w.run.warn_anywhere)
        batches = w.feed.ahead(to_come, read, w.run.warn_anywhere)
        try:
            while not self._over():
                yield from self._one_step(batches)
                if self.step is None or self.step.ends_epoch:
                    return  # its boundary comes when the script begins the next epoch
                self._boundary()
        finally:
            if isinstance(batches, Generator):
                batches.close()  # ends the threads that read, or fetch ahead
            w.timer.rest()
            front._profile.stop()

    # ---- within ----------------------------------------------------------------------------------
    def _opened(self, epochs: int = 0) -> LoaderPlace:
        """Return the place in the data. The first call resumes the run. Raises BadInput,
        SystemExit."""
        if self._place is not None:
            return self._place
        front = self._front
        if front._work.training.model is None:
            raise BadInput("call run.prepare(model, optimizer) before a loop over run.loader")
        self._total = epochs * self.steps
        front._same.enter()
        place = LoaderPlace()
        with going_on(front._go_on):
            front._same.begin(first=not front._hands.has_looped)
        self._begin(place)
        self._place = place
        front._same.leave()
        return place

    def _begin(self, place: LoaderPlace) -> None:
        """Begin in this world: resume, and share the steps out. Raises BadInput, SystemExit."""
        front, w = self._front, self._front._work
        agree_on_exclusions(self._dataset, w.peers)
        if w.training.keep_place(place) is not place:
            raise BadInput(
                "run.loader(...): wanted one loader that trains, found that another has begun; use "
                "an ordinary DataLoader for validation, shared out by run.replica and run.replicas"
            )
        last = ", full steps only" if self.drop_last else ""
        own_loop(
            front,
            micro_batches=self.global_batch // self.micro_batch,
            micro_batch=self.micro_batch,
            data=f"{fingerprint(self._dataset)} {self._order.name}{last}",
            seed=front.seed,
            total=self._total,
            adapter="run.loader",
            per_device=False,
        )
        front._work.log.when_whole = front._keeper.note  # its steps are the session's own
        front._same.check(front.step)
        if not place.steps:  # the script may have ended the run behind the last epoch
            front._hands.hear_enough()
        assert w.training.model is not None
        w.rates.watch(w.training.model, *self._told, w.peers.replica_ranks)
        front._same.allow()

    def _go_on(self, why: RuntimeError | SystemExit) -> None:
        """Begin in the next world, within the same epoch, or else at the same end of one. Raises
        `why`, if none comes or if what there is to resume from lies elsewhere: the script cannot go
        back to where it was in another epoch, nor skip what it does at the end of this one."""
        assert self._place is not None
        here, self.step = self._place.epoch, None
        self._front._go_on(why)
        self._begin(self._place)
        if self._place.epoch != here:
            raise why

    def _given(self, micro_batches: int) -> list[int]:
        """Return the numbers of the micro-batches that this rank reads in a step of so many: its
        own, then fillers, so that each rank has at least one, or as many as the others where a
        forward communicates with them."""
        w = self._front._work
        own = [m for m in self._plan.micros(w.peers.rank) if m < micro_batches]
        rounds = 1
        if w.training.model is not None and w.training.strategy.equal_rounds:
            rounds = max(self._shares(micro_batches))
        return own + [(own or [micro_batches - 1])[-1]] * max(0, rounds - len(own))

    def _shares(self, micro_batches: int) -> tuple[int, ...]:
        plan = self._plan
        return tuple(
            max(0, min(start + share, micro_batches) - start)
            for start, share in zip(plan.starts, plan.shares, strict=True)
        )

    @property
    def _plan(self) -> Plan:
        return self._front._work.feed.shared_out(self.global_batch // self.micro_batch)

    def cuts(self) -> Iterator[Cut]:
        """Return the steps of this epoch that are still to do."""
        place, order = self._opened(), self._sample_order
        return self._cut(order, place.position - place.steps * self.global_batch, place.steps)

    def _cut(self, order: Sequence[int], begins: int, steps: int) -> Iterator[Cut]:
        """Yield the steps of an epoch that are still to do. `begins`: the position of the epoch's
        first sample; `steps`: the number of steps that are done."""
        b, most = self.micro_batch, len(order)
        if self.drop_last:
            most -= most % self.global_batch
        for start in range(steps * self.global_batch, most, self.global_batch):
            end = min(start + self.global_batch, most)
            micro_batches = -(-(end - start) // b)
            given = []
            for m in self._given(micro_batches):
                here = range(start + m * b, min(start + (m + 1) * b, end))
                given.append((m, [(begins + i, order[i]) for i in here]))
            mine = self._plan.micros(self._front._work.peers.rank)
            own = sum(m < micro_batches for m in mine)
            yield Cut(end - start, end == most, self._shares(micro_batches), given, own)

    def _check_alike(self, order: Sequence[int]) -> None:
        """Raise BadInput on all ranks unless they have the same order."""
        at = np.arange(len(order), dtype=np.int64)
        said = digest(sample_hash(at, np.array(order, np.int64)))
        if len(set(self._front._work.peers.gather(said))) > 1:
            raise BadInput(
                f"run.loader(sampler={self._order.name}): wanted the same order on every rank, "
                "found that they differ; a sampler must neither share out by rank nor draw from "
                "what is not seeded (it may have set_epoch, or a torch.Generator as `generator`)"
            )

    def _one_step(self, batches: Iterator[MicroBatch]) -> Iterator[Any]:
        front, w = self._front, self._front._work
        assert self._place is not None
        began = time.time(), time.perf_counter()
        front._profile.before(w.run.step + 1)
        w.timer.begin(w.run.step + 1)
        w.timer.enter(DATA)
        batch = next(batches, None)
        if batch is None:
            return
        cut = self._cuts.popleft()
        step = self.step = LoaderStep(w, self._place, cut, self._reader, began, front._halves)
        w.peers.life.tell(WorkerPhase.COMPUTE, w.run.step)
        yield from step.micros(chain((batch,), batches))
        if step.lost is not None:
            raise WorldOver(step.lost)
        if not step.updated:
            raise BadInput(
                f"step {step.number}: neither loader.step.update() nor loader.step.done() was "
                "called behind its last micro-batch (`if loader.ends_step:`)"
            )
        front._profile.after(step.number)

    def _boundary(self) -> None:
        """Run the boundary after the previous step, if that is over and had no boundary yet."""
        front, step = self._front, self.step
        if step is not None and step.lost is not None:  # the script has left its epoch
            raise WorldOver(step.lost)
        if step is not None and step.updated:
            front._close_step()
        self.step = None

    def _over(self) -> bool:
        hands = self._front._hands
        return bool(hands.enough) or self._front._work.run.step >= hands.until


class _Asking:
    """The batch sampler: the samples that this rank reads in an epoch, by micro-batch."""

    def __init__(self, loader: MicroLoader):
        self._loader = loader

    def __iter__(self) -> Iterator[SampleKeys]:
        # Each pass has its own deque, since the thread that iterates may end a little after it.
        asked = self._loader._cuts = deque()
        return self._asking(asked)

    def _asking(self, asked: deque[Cut]) -> Iterator[SampleKeys]:
        for cut in self._loader.cuts():
            asked.append(cut)
            for _, keys in cut.given:
                yield keys
