"""Optimizer updates as a script sees them: their micro-batches, backward, and an update that may
be cut open. Runs in the worker.

    for step in run.steps(...):                  # what `step.update(clip_norm=1.0)` does:
        for x, y in step:
            step.backward(loss_fn(model(x), y))
        norm = step.sync(clip_norm=1.0)          # gradients are those of the global batch
        optimizer.step()                         # the script's own optimizers and schedulers
        step.done()                              # the step is over: its record, the next boundary
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from harness.core.batch import seed_for
from harness.core.world import BadInput
from harness.node.progress import WorkerPhase
from harness.worker.loader import MicroBatch, seed_everything, to_device
from harness.worker.parallel import Replicated
from harness.worker.pipeline_step import GivenMicro, StageShare, runner_of
from harness.worker.step import Sums, Work
from harness.worker.timing import BACKWARD, COMMUNICATION, DATA, FORWARD, HARNESS, OTHER

Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]

DONE_AGAIN = (
    "a gradient was far greater than those before it, or came in parts for the first time, so this "
    "step's micro-batches are done once more: buffers are put back, and step.attempt is 1 (this is "
    "told once)"
)


@dataclass
class AtHand:
    """The micro-batch that the script has now. `filler`: it counts nothing."""

    micro: int
    samples: int
    filler: bool = False
    backwards: int = 0


class OpenStep:
    """What all of a script's steps have. `number`: 1, 2, ... `attempt`: 0; with exact sums 1, 2,
    ... while the same micro-batches come again because a gradient did not fit: count and log what
    the body does only at 0 (see `attach`). `updated`: it is over.
    """

    begins = -1  # see `StepRecord.begins`

    def __init__(self, work: Work, number: int, began: tuple[float, float] | None = None):
        """`began`: it has, then; by the wall clock, and by one that is never set."""
        self.number, self._work = number, work
        self.attempt = 0
        self.updated = False
        self._sums = self._phase = self._new_sums()  # of the record; of what goes on now
        self._hand = AtHand(0, 0)
        # micro-batches of this phase that had no backward so far; -1: they have not begun
        self._left = -1
        self._micros = 0  # all that had one
        # of the first phase, and of the newest; None: they are not summed yet
        self._floats: torch.Tensor | None = None
        self._newest: torch.Tensor | None = None
        self._lr = 0.0
        self._tell_phase(0)
        if began is None:
            work.timer.begin(number)
        self._began = began or (time.time(), time.perf_counter())

    def _new_sums(self) -> Sums:
        work = self._work
        peers = work.peers
        return Sums(
            work.batching, peers.device, peers.leads_replica, tells=work.training.tells_losses
        )

    def _take_up(self, micro: int, samples: int, last: bool, filler: bool = False) -> None:
        """Before the forward of a micro-batch."""
        self._hand = AtHand(micro, samples, filler)
        self._work.training.strategy.micro(last=last, filler=filler)
        self._work.training.statistics.take_up(micro, counts=not filler)
        seed_everything(seed_for(self._work.feed.seed, self.number, micro))

    def backward(
        self,
        loss: torch.Tensor,
        weight: float | None = None,
        via: Callable[[torch.Tensor], object] | None = None,
    ) -> None:
        """Add this micro-batch's gradients. `loss`: mean over the micro-batch, 0-d. `weight`: how
        much the mean stands for; by default its samples; the number of valid tokens when those
        differ. Where ranks share the positions (`cp`), both are of this rank's. `via`: who goes
        backward, `fabric.backward` for example; None: the loss itself.

        It may be called several times for a micro-batch, as often for each: without weights the
        losses add up; with weights each is the mean of a part of it (a loss in chunks).
        """
        training, hand = self._work.training, self._hand
        self._work.timer.enter(BACKWARD)
        if (whole := getattr(loss, "full_tensor", None)) is not None:  # of torch's loss_parallel
            loss = whole()
        parts = self._work.peers.parts
        amount = float(hand.samples / parts if weight is None else weight)
        if hand.filler:
            amount = 0.0
        scaled = loss * amount
        if training.scaler is not None:
            scaled = training.scaler.scale(scaled)
        training.statistics.loads.note()
        # an engine (DeepSpeed) goes backward by itself
        own = getattr(training.strategy, "backward", torch.Tensor.backward)
        (via or own)(scaled)
        training.strategy.micro_done()
        if not hand.filler:
            self._phase.add(hand.micro, loss, amount, hand.backwards > 0, weight is not None)
        self._phase.tokens_weighted |= weight is not None
        if not hand.backwards:
            self._left -= 1
            self._micros += 1
            self._work.rates.counted(hand.samples)
        hand.backwards += 1
        self._work.timer.enter(OTHER)

    def sync(self, clip_norm: float | None = None, *, of: Optimizers | None = None) -> torch.Tensor:
        """Behind the last micro-batch, on all ranks: from here on `p.grad` is the gradient of the
        global batch's mean loss, on every rank, clipped to `clip_norm`. Returns its norm before
        that, 0-d. Then the script's optimizers step, and `done` ends the step; or `again` begins
        another phase of it. `of`: one optimizer, or several: the gradients of what others hold are
        zero. With a GradScaler they are unscaled. Raises BadInput."""
        w = self._work
        if not self.complete:
            raise BadInput(
                f"step {self.number}: step.sync() or update() came before all micro-batches of the "
                "step were done; let `for batch in step` run to its end, with a step.backward for "
                "each"
            )
        if self._newest is not None:
            raise BadInput(f"step {self.number}: step.sync() came twice; step.again() is between")
        optimizers = () if of is None else (of,) if isinstance(of, torch.optim.Optimizer) else of
        w.peers.life.tell(WorkerPhase.REDUCE)
        found = self._newest = w.reduce(self._phase, clip_norm, tuple(optimizers))
        if self._floats is None:
            self._floats = found
            self._lr = float(w.training.optimizers[0].param_groups[0]["lr"])
        w.finish_staging()
        w.peers.life.tell(WorkerPhase.COMPUTE)
        seed_everything(seed_for(w.feed.seed, self.number, w.batching.micro_batches + 1))
        return found[2].clone()

    def done(self) -> None:
        """Optimizers have stepped: the step is over, and is told of. Raises BadInput."""
        w = self._work
        if self._floats is None or self.updated:
            raise BadInput(
                f"step {self.number}: wanted step.done() once, behind step.sync() and the "
                "optimizers' steps"
            )
        w.training.strategy.zero()
        w.done(self._sums, self._began, self._micros, self._floats, self._lr, self.begins)
        w.seed_between()
        self.updated = True

    def update(self, clip_norm: float | None = None) -> None:
        """Sum over all replicas, divide by the global weight, clip, and let all optimizers and the
        scheduler that were prepared step: `sync`, their steps, `done`."""
        self.sync(clip_norm)
        self._work.optimize()
        self.done()

    @property
    def loss(self) -> float:
        """The loss over the global batch: behind `sync` that of this phase, behind `done` or
        `update` that of the step, which is its first phase's. Waits for the other ranks (and the
        GPU), so ask only when you need it."""
        if self.updated or self._newest is None:
            return self._work.log.loss_of(self.number)
        total, weight = self._newest[:2].tolist()
        return total / weight if weight else math.nan

    @property
    def complete(self) -> bool:
        """Each micro-batch of this phase has had its backward."""
        return self._left == 0

    @property
    def went_backward(self) -> bool:
        """The micro-batch that the script has now has had its backward."""
        return self._hand.backwards > 0

    def _repeat(self) -> None:
        """All ranks do this phase once more: a gradient did not fit."""
        w = self._work
        self.attempt += 1
        if not w.log.repeated:
            w.log.repeated = True
            w.run.warn(DONE_AGAIN, self.number)
        if w.training.buffers is not None and (lost := w.training.buffers.restore()):
            w.run.warn(lost, self.number)

    def _next_phase(self) -> None:
        """The same micro-batches are about to come again. Raises BadInput."""
        if self._newest is None:
            raise BadInput(
                f"step {self.number}: step.again() before step.sync(): the gradients of the phase "
                "before would be lost"
            )
        self._work.training.strategy.zero()
        self._phase, self._newest, self.attempt = self._new_sums(), None, 0
        self._phase.shares = self._sums.shares
        self._tell_phase(self._phase_number + 1)

    def _tell_phase(self, number: int) -> None:
        self._phase_number = number
        if isinstance(strategy := self._work.training.strategy, Replicated):
            strategy.phase = number


class Step(OpenStep):
    """One optimizer update of `run.steps`. Iterate it for this rank's micro-batches, call
    `backward` for each, then `update`; or cut that open: `sync`, `again`, `done`."""

    def __init__(self, work: Work, number: int, batches: Iterator[MicroBatch]):
        self._batches = batches
        self._current: MicroBatch | None = None
        self._mine: list[int] = []  # this rank's micro-batches
        self._fresh = True  # nobody has seen them
        # of a stream, which cannot be read again; and on a GPU, if there are phases
        self._read: list[MicroBatch] = []
        super().__init__(work, number)

    def __iter__(self) -> Iterator[Any]:
        if self._current is not None:
            raise BadInput(
                f"step {self.number}: its micro-batches were given already; step.again() gives "
                "them once more, behind step.sync()"
            )
        return self._round()

    def again(self) -> Iterator[Any]:
        """This step's micro-batches once more, for its next phase: another network's losses (GAN,
        actor and critic), or another evaluation in a closure (LBFGS). What is drawn at random in
        their forwards is what was drawn before. The first time in a step it is the same as
        iterating it; later it comes behind `sync`. Raises BadInput."""
        if self._current is not None:
            self._work.training.phases = True
            self._next_phase()
        return self._round()

    @property
    def epoch(self) -> int:
        """The pass over the data in which its first sample lies: 0, 1, ..."""
        b = self._work.batching
        return (self.number - 1) * b.global_batch // b.samples

    @property
    def ends_epoch(self) -> bool:
        """Is the last sample of a pass over the data among its own?"""
        b = self._work.batching
        return self.number * b.global_batch // b.samples > self.epoch

    def pipeline(self) -> None:
        """All of this step's micro-batches through the stages of a model that was made by
        `harness.pipeline`, forward and backward; instead of a loop over them. On every mesh the
        same call. Raises BadInput."""
        w = self._work
        runner = runner_of(w)
        if self._current is not None:
            raise BadInput(f"step {self.number}: wanted step.pipeline() once")
        for rounds in self._attempts():
            given = [self._give(i) for i in range(rounds)]
            runner.run(StageShare(w, self._phase, self.number, given))
            self._left, self._micros = 0, self._micros + rounds

    def _round(self) -> Iterator[Any]:
        w, timer = self._work, self._work.timer
        for rounds in self._attempts():
            for i in range(rounds):
                given = self._give(i)
                self._take_up(given.micro, given.samples, i == rounds - 1, given.filler)
                data = to_device(given.data, w.peers.device)
                if not given.filler:
                    w.rates.arm()
                timer.enter(FORWARD)
                yield data
                if not self.went_backward:
                    raise BadInput(
                        f"step {self.number}: step.backward(loss) was called 0 times for one "
                        "micro-batch, wanted once at least"
                    )

    def _attempts(self) -> Iterator[int]:
        """Once for each time that this phase's micro-batches are to be done: how many there are,
        with fillers. `_give` says which."""
        w, timer = self._work, self._work.timer
        timer.enter(HARNESS)
        first = self._fresh = self._current is None
        micros = self._mine = list(w.feed.plan.micros(w.peers.rank))
        rounds = w.feed.plan.rounds if w.training.strategy.equal_rounds else len(micros)
        if w.feed.stream is not None and first:
            self._batches = w.feed.stream.step(self.number)
        buffers = w.training.buffers if w.training.strategy.may_repeat else None
        if buffers is not None:
            buffers.note()
        repeat = True
        while repeat:
            self._left = rounds
            yield rounds
            timer.enter(COMMUNICATION)
            repeat = w.training.strategy.again()
            timer.enter(HARNESS)
            if repeat:
                self._repeat()
        if buffers is not None:
            buffers.learn()
        if w.feed.stream is not None and first:
            timer.enter(DATA)
            for _ in self._batches:  # read on to the end of the global batch
                raise AssertionError("a micro-batch of ours came after our last one")
        timer.enter(OTHER)

    def _give(self, i: int) -> GivenMicro:
        """The i-th micro-batch of this rank; a filler is the last one again."""
        self._work.timer.enter(DATA)
        filler, micro = i >= len(self._mine), self._mine[min(i, len(self._mine) - 1)]
        if not filler:
            self._current = self._next(i, micro, self._fresh and not self.attempt)
        assert self._current is not None
        return GivenMicro(micro, len(self._current.samples), filler, self._current.data)

    def _next(self, i: int, micro: int, fresh: bool) -> MicroBatch:
        """The i-th micro-batch of this rank. `fresh`: nobody has seen it."""
        if not fresh:
            return self._again(i, micro)
        batch = next(self._batches)
        self._sums.note(batch)
        w = self._work
        if w.feed.stream is not None or (w.training.phases and w.peers.device.type != "cpu"):
            self._read.append(batch)
        return batch

    def _again(self, i: int, micro: int) -> MicroBatch:
        """What `micro` was given before, from the dataset or from the items that the stream gave:
        the script may have changed the rest (but for what it only has a copy of, on a GPU)."""
        feed = self._work.feed
        if feed.stream is not None:
            return replace(self._read[i], data=feed.stream.collated_again(self._read[i]))
        if self._read:
            return self._read[i]
        assert feed.read_again is not None and self._current is not None
        return replace(
            self._current,
            data=feed.read_again(self.number, micro),
            samples=self._current.samples,
        )
