"""An ordinary DataLoader of this rank's micro-batches, for a training loop of the script's own:
`run.loader`. Runs in the worker.

    loader = run.loader(dataset, global_batch=64, micro_batch=8, shuffle=True, num_workers=2)
    for epoch in loader.epochs(10):                  # after a resume: from where it was
        for x, y in loader:                          # this rank's micro-batches
            loader.step.backward(loss_fn(model(x), y))
            if loader.ends_step:
                loader.step.update(clip_norm=1.0)    # or all three: loader.update(loss, clip_norm=)
        validate(model)                              # at the end of every epoch

An epoch is a pass over the sampler's order, cut into global batches, these into micro-batches; the
last step of an epoch may be short. All ranks have the same order, each does its share of every
step, so what a step consumes does not depend on the world. A snapshot at a step boundary holds the
epoch and the place in it. The boundary behind an epoch's last step comes when the script goes on to
the next epoch, so what it does between two epochs is neither lost nor repeated.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from harness.core.batch import Batching, Plan, digest, sample_hash
from harness.core.world import BadInput
from harness.node.progress import WorkerPhase
from harness.worker import machine
from harness.worker.epoch_order import Cut, EpochOrder, LoaderPlace, SampleKeys
from harness.worker.feed import agree_on_exclusions
from harness.worker.hands import Hands
from harness.worker.loader import MicroBatch, Reader, fingerprint, is_map_style, to_device
from harness.worker.own_loop import OwnLoop
from harness.worker.profiling import Profile
from harness.worker.step import Work
from harness.worker.steps import OpenStep
from harness.worker.timing import DATA, FORWARD

OURS = ("batch_size", "batch_sampler", "shuffle", "sampler", "drop_last")


class Front(Protocol):
    """What it needs of a session."""

    seed: int
    _work: Work
    _hands: Hands
    _profile: Profile

    def own_loop(
        self,
        *,
        micro_batches: int,
        micro_batch: int,
        data: str,
        seed: int,
        total: int,
        adapter: str,
    ) -> OwnLoop: ...


class LoaderStep(OpenStep):
    """One optimizer update of a loop over `run.loader`."""

    def __init__(
        self,
        work: Work,
        place: LoaderPlace,
        cut: Cut,
        reader: Reader,
        began: tuple[float, float],
    ):
        super().__init__(work, work.run.step + 1, began)
        self.cut, self.begins = cut, place.position
        self._place, self._reader = place, reader
        self._sums.shares, self._sums.tokens_weighted = cut.shares, True
        self._repeats: bool | None = None  # must this phase be done again? None: not known yet
        work.training.strategy.zero()

    def take_up(self, i: int, batch: MicroBatch, first: bool) -> Any:
        """The i-th micro-batch of this rank is what the script is given next. `first`: nobody has
        seen it."""
        w, filler = self._work, i >= self.cut.own
        if i == 0:
            self._left, self._repeats = len(self.cut.given), None
            if w.training.strategy.may_repeat and w.training.buffers is not None:
                w.training.buffers.note()
        if first and not filler:
            self._sums.note_foreign(batch.positions, batch.samples)
        last = i == len(self.cut.given) - 1
        self._take_up(self.cut.given[i][0], len(batch.samples), last, filler)
        data = to_device(batch.data, w.peers.device)
        if not filler:
            w.rates.arm()
        w.timer.enter(FORWARD)
        return data

    def repeats(self) -> bool:
        """Behind the last micro-batch, on all ranks: must all be done once more?"""
        if self._repeats is None:
            w = self._work
            self._repeats = w.training.strategy.again()
            if self._repeats:
                self._repeat()
            elif w.training.strategy.may_repeat and w.training.buffers is not None:
                w.training.buffers.learn()
        return self._repeats

    def again(self) -> Iterator[Any]:
        """This step's micro-batches once more, for its next phase, behind `sync`: see
        `Step.again`. Raises BadInput."""
        self._next_phase()
        self._phase.tokens_weighted = True
        repeat = True
        while repeat:
            for i, (_, keys) in enumerate(self.cut.given):
                yield self.take_up(i, self._reader.read(keys), first=False)
            repeat = self.repeats()

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
        """The epoch that it is of: 0, 1, ..."""
        return self._place.epoch - (self.updated and self.cut.ends_epoch)

    @property
    def ends_epoch(self) -> bool:
        return self.cut.ends_epoch


class MicroLoader:
    """See the module. Made by `run.loader`."""

    def __init__(
        self,
        front: Front,
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
        Batching(max(len(dataset), global_batch), global_batch, micro_batch, front.seed)  # checks
        self.global_batch, self.micro_batch, self.drop_last = global_batch, micro_batch, drop_last
        self._front, self._dataset, self._options = front, dataset, options
        self._order = EpochOrder(dataset, sampler, shuffle, front.seed)
        self._told = tokens_per_sample, flops_per_sample
        in_turns = (global_batch,) if self._order.keeps_neighbours else ()
        self._reader = Reader(dataset, front.seed, options.pop("collate_fn", None), in_turns)
        self._place: LoaderPlace | None = None
        self._asked: int | None = None  # by `set_epoch`
        self.step: LoaderStep | None = None
        self._sample_order: list[int] = []  # of the epoch in which it is
        self._cuts: deque[Cut] = deque()  # that the DataLoader was asked for, and has not given

    # ---- what the script may look at -------------------------------------------------------------
    @property
    def steps(self) -> int:
        """Optimizer steps in an epoch."""
        samples = len(self._order)
        return samples // self.global_batch if self.drop_last else -(-samples // self.global_batch)

    def __len__(self) -> int:
        """Micro-batches that this rank does in an epoch."""
        whole, rest = divmod(len(self._order), self.global_batch)
        last = [] if self.drop_last or not rest else [self._given(-(-rest // self.micro_batch))]
        return whole * self.accumulation + sum(len(micros) for micros in last)

    @property
    def accumulation(self) -> int:
        """Micro-batches that this rank does in a full step."""
        return len(self._given(self.global_batch // self.micro_batch))

    @property
    def epoch(self) -> int:
        """The epoch in which the next step lies; where a script's loop over epochs begins after a
        resume."""
        return self._opened().epoch

    @property
    def ends_step(self) -> bool:
        """Behind a micro-batch's backward: was it this rank's last one of the step, so that
        `step.update()` comes now? With exact sums all ranks agree here that the step need not be
        done again."""
        step = self.step
        return step is not None and step.complete and not step.repeats()

    # ---- what the script calls -------------------------------------------------------------------
    def set_epoch(self, epoch: int) -> None:
        """Which epoch comes next. Of one that is over nothing is given; what is left of one in
        which the run is, is left out if `epoch` is a later one."""
        place = self._opened()
        if epoch > place.epoch:
            place.go_on(epoch)
        self._asked = epoch

    def update(
        self, loss: torch.Tensor, weight: float | None = None, clip_norm: float | None = None
    ) -> bool:
        """For this micro-batch `step.backward(loss, weight)`, and behind the last one of a step
        `step.update(clip_norm)`. Is the step over?"""
        if self.step is None:
            raise BadInput("loader.update(loss): wanted a loop over the loader around it")
        self.step.backward(loss, weight)
        if ends := self.ends_step:
            self.step.update(clip_norm)
        return ends

    def epochs(self, total: int) -> Iterator[int]:
        """The epochs that are still to do, of so many: the first is that in which the run is. Comes
        to its end when all are done, or `run.stop` was called; what was trained is committed
        then."""
        place, hands = self._opened(total), self._front._hands
        hands.total = total * self.steps
        while place.epoch < total and not self._over():
            before = self._asked = place.epoch
            yield before
            if place.epoch == before:  # the script has left it in the middle
                place.go_on(before + 1)
            self._boundary()
            hands.hear_enough()
        if place.epoch >= total or self._over():
            hands.turn(machine.Reached())

    def __iter__(self) -> Iterator[Any]:
        place = self._opened()
        if self._asked is not None and self._asked < place.epoch:
            self._asked = None
            return
        self._asked = None
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
                    return  # its boundary comes when the script has ended the epoch
                self._boundary()
        finally:
            batches.close()  # what fetches ahead ends here
            w.timer.rest()
            front._profile.stop()

    # ---- within ----------------------------------------------------------------------------------
    def _opened(self, epochs: int = 0) -> LoaderPlace:
        """Resumes, the first time. Raises BadInput, SystemExit."""
        if self._place is not None:
            return self._place
        front, training = self._front, self._front._work.training
        if training.model is None:
            raise BadInput("call run.prepare(model, optimizer) before a loop over run.loader")
        agree_on_exclusions(self._dataset, front._work.peers)
        place = LoaderPlace()
        kept: LoaderPlace = training.keep_place(place)
        if kept is not place:
            raise BadInput(
                "run.loader(...): wanted one loader that trains, found that another has begun; use "
                "an ordinary DataLoader for validation, shared out by run.replica and run.replicas"
            )
        micro_batches = self.global_batch // self.micro_batch
        last = ", full steps only" if self.drop_last else ""
        front.own_loop(
            micro_batches=micro_batches,
            micro_batch=self.micro_batch,
            data=f"{fingerprint(self._dataset)} {self._order.name}{last}",
            seed=front.seed,
            total=epochs * self.steps,
            adapter="run.loader",
        )
        w = front._work
        w.rates.watch(training.model, *self._told, w.peers.replica_ranks)
        pin = {"pin_memory": w.peers.device.type == "cuda"}
        self._loader = self._reader.ahead(_Asking(self), **(pin | self._options))
        self._place = place
        return place

    def _given(self, micro_batches: int) -> list[int]:
        """Numbers of the micro-batches that this rank is given of a step that has so many: its
        own, and fillers behind them, so that each has one, or as many as the others where a
        forward talks to them."""
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
        """The steps of this epoch that are still to do, from here on."""
        place, order = self._opened(), self._sample_order
        return self._cut(order, place.position - place.steps * self.global_batch, place.steps)

    def _cut(self, order: Sequence[int], begins: int, steps: int) -> Iterator[Cut]:
        """`begins`: position of the epoch's first sample; `steps` of it are done."""
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
        """Raises BadInput on all ranks unless they have the same order."""
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
        step = self.step = LoaderStep(w, self._place, cut, self._reader, began)
        w.peers.life.tell(WorkerPhase.COMPUTE, w.run.step)
        first = True
        while first or step.repeats():
            for i, (_, keys) in enumerate(cut.given):
                if not first:
                    batch = self._reader.read(keys)
                elif i:
                    w.timer.enter(DATA)
                    batch = next(batches)
                assert batch is not None
                yield step.take_up(i, batch, first)
                if not step.went_backward:
                    raise BadInput(
                        f"step {step.number}: wanted loader.step.backward(loss) for each "
                        "micro-batch, found none for this one"
                    )
            first = False
            if step.updated:
                break
        if not step.updated:
            raise BadInput(
                f"step {step.number}: neither loader.step.update() nor loader.step.done() was "
                "called behind its last micro-batch (`if loader.ends_step:`)"
            )
        front._profile.after(step.number)

    def _boundary(self) -> None:
        """Behind the step before, if it is over and there was none so far."""
        if self.step is not None and self.step.updated:
            self._front._hands.boundary()
        self.step = None

    def _over(self) -> bool:
        hands = self._front._hands
        return bool(hands.enough) or self._front._work.run.step >= hands.until


class _Asking:
    """The batch sampler: what this rank reads in an epoch, one micro-batch after the other."""

    def __init__(self, loader: MicroLoader):
        self._loader = loader

    def __iter__(self) -> Iterator[SampleKeys]:
        # its own: what asks may be a thread that ends a little after the pass
        asked = self._loader._cuts = deque()
        return self._asking(asked)

    def _asking(self, asked: deque[Cut]) -> Iterator[SampleKeys]:
        for cut in self._loader.cuts():
            asked.append(cut)
            for _, keys in cut.given:
                yield keys
