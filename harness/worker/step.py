"""One optimizer update: its micro-batches, the sums over all ranks, and the step's record. Runs in
the worker."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from harness.core import step_records as rec
from harness.core.batch import Batching, digest, sample_hash, seed_for
from harness.core.world import BadInput
from harness.node.heartbeat import WorkerPhase
from harness.node.marks import Want
from harness.worker.batches.feed import Feed, Shrinking
from harness.worker.batches.loader import MicroBatch, seed_everything, to_device
from harness.worker.gradients.parallel import Replicated, Sharded, Single
from harness.worker.process_group import Peers
from harness.worker.resuming.kept_ahead import AheadKeeper
from harness.worker.resuming.same_process import SameProcess
from harness.worker.run_context import Run
from harness.worker.snapshot_timer import Rhythm
from harness.worker.snapshotter import Snapshotter
from harness.worker.staged_model import StagedModel
from harness.worker.step_log import (
    ENOUGH,
    STEP_MS,
    VOTES,
    Pending,
    StepLog,
    halves,
)
from harness.worker.step_timing import (
    BACKWARD,
    COMMUNICATION,
    DATA,
    FORWARD,
    HARNESS,
    OPTIMIZER,
    OTHER,
    SNAPSHOT,
    PhaseTimer,
    Rates,
)
from harness.worker.training_state import PASSED, Judged, Training
from harness.worker.votes import HalfSteps, Votes


class Sums:
    """The numbers that this rank contributes to a step. `leads`: this is the first rank of its
    replica, and contributes for it; the other ranks' samples are only compared with its own.
    `tells`: this rank contributes the losses; None: the same as `leads`."""

    def __init__(
        self, batching: Batching, device: torch.device, leads: bool, tells: bool | None = None
    ):
        self.samples, self._hash_sum, self._contents_sum = 0, 0, 0
        self._leads, self._tells = leads, leads if tells is None else tells
        self._foreign: list[tuple[Any, Any]] = []  # (positions, reported contents), not yet hashed
        # One element per micro-batch of the step, set by the rank that does it: summed over ranks
        # and in this order, the result is the same on any world.
        self.losses = torch.zeros(batching.micro_batches, dtype=torch.float64, device=device)
        self.weights = [0.0] * batching.micro_batches
        self.tokens_weighted = False
        # (micro_batches,) losses times weights of all ranks, once they are summed
        self.every: torch.Tensor | None = None
        self.judged: Judged = PASSED
        self.begins = -1  # see `StepRecord.begins`
        # shares of a step with fewer micro-batches than the others; (): the plan's
        self.shares: tuple[int, ...] = ()

    def note(self, batch: MicroBatch) -> None:
        """Record that `batch` was read."""
        self._hash_sum += digest(sample_hash(batch.positions, batch.samples))
        if batch.contents is not None:
            self._contents_sum += digest(sample_hash(batch.positions, batch.contents))
        self.samples += len(batch.samples)

    def note_foreign(self, positions: Any, said: Any) -> None:
        """Record positions that a foreign trainer read. Only it knows their contents, so `said` is
        trusted."""
        self._foreign.append((positions, said))
        self.samples += len(positions)

    def _hash_foreign(self) -> None:
        """Hash the foreign micro-batches, all at once: a call costs more than their few rows."""
        if self._foreign:
            positions, said = (np.concatenate(each) for each in zip(*self._foreign, strict=True))
            self._foreign.clear()
            self._hash_sum += digest(sample_hash(positions, positions))
            self._contents_sum += digest(sample_hash(positions, said))

    def add(
        self, micro: int, loss: torch.Tensor, amount: float, more: bool = False, parts: bool = True
    ) -> None:
        """Add the loss of a micro-batch. `loss`: mean over it; `amount`: the weight of that mean.
        `more`: another loss of the same micro-batch; `parts`: that loss is of another part of it,
        so that its weight adds up too."""
        if self._tells:
            value = loss.detach().double() * amount
            self.losses[micro] = self.losses[micro] + value if more else value
            if not more:
                self.weights[micro] = amount
            elif parts:
                self.weights[micro] += amount

    def on_host(self, ints: torch.Tensor) -> torch.Tensor:
        """Return the weights and then `ints` on the host, pinned for a GPU so that the copy does
        not block."""
        pin = self.losses.device.type == "cuda"
        values = [*self.weights, *ints.tolist()]
        return torch.tensor(values, dtype=torch.float64, pin_memory=pin)

    def ints(self, tell: bool, gflops: int) -> torch.Tensor:
        """Return the values of `Pending.ints`, without votes. `tell`: this is the step after which
        the ranks gather their times; `gflops`: this rank's peak."""
        self._hash_foreign()
        both = (self._hash_sum + self._contents_sum) % 2**64
        if self._leads:
            said = (self._hash_sum, self._contents_sum, 0)
        else:
            said = (0, 0, both)
        samples = self.samples if self._leads else 0
        digest, contents, twins = (halves(total % 2**64) for total in said)
        mine = [*digest, samples, *[0] * len(Want), *contents, *twins, tell, gflops, 0, 0]
        return torch.tensor(mine, dtype=torch.int64)


def to_host(floats: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """Copy to the host without blocking. Return the copy and the event that completes it, or
    None if it is complete."""
    if floats.device.type != "cuda":
        return floats, None
    on_host = floats.to("cpu", non_blocking=True)  # torch makes it pinned
    copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    copied.record()
    return on_host, copied


@dataclass(frozen=True)
class Work:
    """The parts that steps use, and the update that ends each step."""

    peers: Peers
    run: Run
    training: Training
    feed: Feed
    log: StepLog
    rates: Rates
    rhythm: Rhythm
    snapshotter: Snapshotter
    votes: Votes
    timer: PhaseTimer
    shrinking: Shrinking
    same: SameProcess
    ahead: AheadKeeper | None

    @property
    def batching(self) -> Batching:
        assert self.feed.batching is not None
        return self.feed.batching

    def vote(self, wants: torch.Tensor, step: int) -> None:
        """Add this rank's votes for the boundary behind `step`; see `Votes.cast`."""
        due: dict[Want, Callable[[int], bool]] = {Want.SNAPSHOT: self.snapshotter.due}
        if self.ahead is not None:
            due[Want.KEEP_AHEAD] = self.ahead.due
        self.votes.cast(wants, step, due, self.snapshotter.quiet)

    def finish_staging(self) -> None:
        """Wait for the copy of a snapshot, as the state may change from here on."""
        if self.snapshotter.copies:
            self.timer.enter(SNAPSHOT)
            self.snapshotter.finish_staging()
            self.timer.enter(OPTIMIZER)

    def done(
        self,
        sums: Sums,
        began: tuple[float, float],
        micros: int,
        floats: torch.Tensor,
        lr: float,
        begins: int = -1,
    ) -> None:
        """End a step after the optimizers have stepped. `began`: wall clock and perf_counter at its
        begin; `micros`: micro-batches done here; `floats`: as in `Pending.floats`; `begins`: see
        `StepRecord.begins`."""
        self.timer.enter(COMMUNICATION)
        for share in self.training.hooks.after_update:
            share()
        self.timer.enter(HARNESS)
        self.run.step += 1
        # the previous step (on a GPU), whose numbers had a whole step's time to arrive
        self.log.settle()
        record = rec.StepRecord(
            step=self.run.step,
            epoch=self.run.epoch,
            world=self.peers.world,
            shares=sums.shares or self.feed.plan.shares,
            samples=0,
            digest="",
            weight=0.0,
            loss=math.nan,
            lr=lr,
            t=0.0,
            dt=0.0,
            begins=begins,
            skipped=sums.judged.skip,
            micro_batch=self.batching.micro_batch if self.batching.asked_micro_batch else 0,
            phase=self.run.phase.number,
            identity=self.run.genesis()[:16] if self.run.phase.number > 1 else "",
        )
        identity = self.run.phase.identity
        assert identity is not None
        hashed = self.feed.has_contents or begins >= 0
        with_contents = hashed and bool(identity.get("contents"))
        scaled = self.training.scaler is not None
        self.rhythm.note_step(calm=self.snapshotter.quiet)
        self.peers.life.tell(WorkerPhase.COMPUTE, self.run.step)
        self.timer.end()
        host_s = self.log.times.host_s = time.perf_counter() - began[1]
        on_host, copied = to_host(floats)
        self.log.pending = Pending(
            *(record, began[0], host_s, on_host, sum(sums.weights), micros, copied),
            *(with_contents, scaled),
        )

    def _ints(self, sums: Sums) -> torch.Tensor:
        """Return this rank's `Pending.ints`. They are summed before the update, so that whoever has
        made it also holds the step's record."""
        tell = self.peers.rank == 0 and self.log.times.due()
        ints = sums.ints(tell, self.rates.peak_gflops)
        self.vote(ints[VOTES], self.run.step + 1)
        ints[ENOUGH] = bool(self.votes.enough)
        if self.votes.know_deadlines:
            ints[STEP_MS] = int(1e3 * self.log.times.host_s)
        return ints

    def summed(self, sums: Sums) -> tuple[torch.Tensor, float | torch.Tensor]:
        """Sum gradients and numbers over all ranks. Return `Pending.floats` without the norm, and
        the global weight."""
        device = self.peers.device
        self.timer.enter(COMMUNICATION)
        self.training.strategy.reduce()
        numbers = to_device(sums.on_host(self._ints(sums)), device)
        totals = torch.cat([sums.losses, numbers])
        own = sums.losses.sum().view(1)
        if self.peers.control is not None:
            dist.all_reduce(totals)  # on the device's stream, so no host waits for it
        micros = len(sums.losses)
        sums.every = totals[:micros]
        self.timer.enter(OPTIMIZER)
        zero = torch.zeros(1, dtype=torch.float64, device=device)
        loss_and_weight = totals[: 2 * micros].view(2, micros).sum(1)
        floats = torch.cat([loss_and_weight, zero, own, totals[2 * micros :]])
        weight: float | torch.Tensor = (
            floats[1] if sums.tokens_weighted else float(self.batching.global_batch)
        )
        return floats, weight

    def reduce(
        self, sums: Sums, clip_norm: float | None, of: Sequence[torch.optim.Optimizer] = ()
    ) -> torch.Tensor:
        """Sum gradients over all ranks, divide and clip them, and return `Pending.floats`. `of`:
        keep the gradients of these optimizers' parameters only and set others to zero; (): all."""
        strategy, scaler = self.training.strategy, self.training.scaler
        floats, weight = self.summed(sums)
        # the division is in the coefficient then: one pass over the gradients less
        at_once = type(strategy) in DIVIDED_BY_CLIPPING and clip_norm is not None and scaler is None
        if not at_once:
            strategy.divide(weight)
        if of:
            self._forget_others(of)
        if scaler is not None:
            for optimizer in of or self.training.optimizers:
                scaler.unscale_(optimizer)
                strategy.share_found_inf(scaler, optimizer)
        norm = strategy.norm() / weight if at_once else strategy.norm()
        floats[2] = norm
        most = self.judge(sums, floats, clip_norm)
        if most is not None:
            coefficient = (most / (norm + 1e-6)).clamp(max=1.0)
            strategy.clip(coefficient / weight if at_once else coefficient)
        return floats

    def judge(
        self,
        sums: Sums,
        floats: torch.Tensor,
        clip_norm: float | None = None,
        some_idle: bool = False,
    ) -> float | None:
        """Let the guards judge a step whose sums are complete, and settle what its forwards have
        left. Return the norm to clip to; None: do not clip. `floats`: see `Pending.floats`;
        `clip_norm`: what the script clips to; `some_idle`: some ranks may have had no micro-batch.
        The gradients of a skipped update are None, for which an optimizer does nothing."""
        hooks = self.training.hooks
        if hooks.judge is not None:
            sums.judged = hooks.judge(self, sums, floats)
            if sums.judged.skip:
                self.training.strategy.zero()
                for forget in hooks.forget:
                    forget()
                return None
            if sums.judged.most_norm is not None:
                most = sums.judged.most_norm
                clip_norm = most if clip_norm is None else min(clip_norm, most)
        for settle in hooks.before_update:
            settle(sum(sums.shares) or self.batching.micro_batches, some_idle)
        return clip_norm

    def _forget_others(self, of: Sequence[torch.optim.Optimizer]) -> None:
        assert self.training.model is not None
        held = {id(p) for o in of for group in o.param_groups for p in group["params"]}
        for p in self.training.model.parameters():
            if p.grad is not None and id(p) not in held:
                p.grad.zero_()

    def optimize(self, judged: Judged) -> None:
        """Step all optimizers, unless the update is skipped, the GradScaler and the scheduler."""
        scaler, scheduler = self.training.scaler, self.training.scheduler
        for optimizer in () if judged.skip else self.training.optimizers:
            if scaler is not None:
                scaler.step(optimizer)
            else:
                optimizer.step()
        if scaler is not None:
            scaler.update()
        if scheduler is not None and not judged.hold:
            scheduler.step()

    def seed_between(self) -> None:
        """Seed code that runs between two steps (an evaluation), alike on any world."""
        seed_everything(seed_for(self.feed.seed, self.run.step, self.batching.micro_batches))


DIVIDED_BY_CLIPPING = (Single, Replicated, Sharded)  # strategies whose `divide` does no more

# Optimizer updates as a script sees them: their micro-batches, backward, and an update that may
# be divided into its parts.

Optimizers: TypeAlias = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]

DONE_AGAIN = (
    "a gradient was far greater than those before it, or came in parts for the first time, so this "
    "step's micro-batches are done once more: buffers are put back, and step.attempt is 1 (this is "
    "told once)"
)


@dataclass
class AtHand:
    """The micro-batch that the script has now. `filler`: it does not contribute to the step."""

    micro: int
    samples: int
    filler: bool = False
    backwards: int = 0


@dataclass
class GivenMicro:
    """A micro-batch as the loader gave it. `filler`: it does not contribute to the step."""

    micro: int
    samples: int
    filler: bool
    data: Any


class OpenStep:
    """The base of a script's steps. `number`: 1, 2, ... `attempt`: 0; with exact sums 1, 2, ...
    while the same micro-batches are repeated because a gradient did not fit: the loop's body should
    count and log only at 0 (see `attach`). `updated`: the step is over. `lost`: it ended without an
    update, since another rank is lost; the next world does it again.
    """

    begins = -1  # see `StepRecord.begins`

    def __init__(self, work: Work, number: int, began: tuple[float, float] | None = None):
        """Begin a step. `began`: when it began, if earlier (wall clock, perf_counter)."""
        self.number, self._work = number, work
        self.attempt = 0
        self.updated = False
        self.lost: RuntimeError | None = None
        self._sums = self._phase = self._new_sums()  # for the record; for the present phase
        self._hand = AtHand(0, 0)
        # micro-batches of this phase that had no backward so far; -1: none has begun
        self._left = -1
        self._micros = 0  # number of micro-batches that had one, in all phases
        # sums of the first phase, and of the newest; None: not summed yet
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
        """Prepare the forward of a micro-batch. `last`: it is the last one of this phase."""
        self._hand = AtHand(micro, samples, filler)
        self._work.training.strategy.micro(last=last, filler=filler)
        for take_up in self._work.training.hooks.before_micro:
            take_up(micro, not filler, False)
        seed_everything(seed_for(self._work.feed.seed, self.number, micro))

    def backward(
        self,
        loss: torch.Tensor,
        weight: float | None = None,
        via: Callable[[torch.Tensor], object] | None = None,
    ) -> None:
        """Add this micro-batch's gradients. `loss`: mean over the micro-batch, 0-d. `weight`: the
        weight of that mean; by default the number of samples; give the number of valid tokens if
        that varies. If ranks share the positions (`cp`), both are for this rank's positions. `via`:
        the function that does the backward, such as `fabric.backward`; None: `loss.backward`.

        It may be called several times for a micro-batch, equally often for each: without weights
        the losses add up; with weights each is the mean of a part of it (a loss in chunks).
        """
        if self.lost is not None:
            return
        try:
            self._backward(loss, weight, via)
        except RuntimeError as e:
            self._lose(e)

    def _lose(self, error: RuntimeError) -> None:
        """Take this for the end of the world, for the next one to do the step again. Raises the
        error if it is another one, or if this process cannot go on."""
        if not self._work.same.survives(error):
            raise error
        self.lost = error

    def _refuse_lost(self) -> None:
        """Raise the error by which this step was lost, if it was."""
        if self.lost is not None:
            raise self.lost

    def _backward(
        self,
        loss: torch.Tensor,
        weight: float | None,
        via: Callable[[torch.Tensor], object] | None,
    ) -> None:
        training, hand = self._work.training, self._hand
        self._work.timer.enter(BACKWARD)
        if (whole := getattr(loss, "full_tensor", None)) is not None:  # from torch's loss_parallel
            loss = whole()
        parts = self._work.peers.parts
        amount = float(hand.samples / parts if weight is None else weight)
        if hand.filler:
            amount = 0.0
        scaled = loss * amount
        if training.scaler is not None:
            scaled = training.scaler.scale(scaled)
        for note in training.hooks.before_backward:
            note()
        # an engine (DeepSpeed) has its own backward
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
        """Make `p.grad` the gradient of the global batch's mean loss on every rank, clipped to
        `clip_norm`, and return its norm before clipping, 0-d. All ranks call it after the last
        micro-batch. Then the script's optimizers step and `done` ends the step, or `again` begins
        another phase. `of`: one optimizer, or several: gradients of all other parameters become
        zero. With a GradScaler the gradients are unscaled. Raises BadInput."""
        w = self._work
        self._refuse_lost()
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
        """End the step after the optimizers have stepped, and record it. Raises BadInput."""
        w = self._work
        self._refuse_lost()
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
        """Sum gradients over all replicas, divide by the global weight, clip, and step all prepared
        optimizers and the scheduler: `sync`, their steps, `done`. If another rank is lost
        meanwhile, it may return without an update; the loop then goes on with the same step."""
        if self.lost is not None:
            return
        try:
            self.sync(clip_norm)
            self._work.optimize(self._phase.judged)
            self.done()
        except RuntimeError as e:
            self._lose(e)

    @property
    def loss(self) -> float:
        """The loss over the global batch: after `sync` that of this phase, after `done` or `update`
        that of the step, which is its first phase's. Reading it waits for the other ranks (and the
        GPU), so read it only when needed. If this step was lost before its sum, it is the last
        step's."""
        if self.updated or self._newest is None:
            return self._work.log.loss_of(self.number)
        total, weight = self._newest[:2].tolist()
        return total / weight if weight else math.nan

    @property
    def skipped(self) -> str:
        """The reason why guards skip this step's update, after `sync`; "": they do not. Gradients
        are None then, so a script's own `optimizer.step()` does nothing."""
        return self._phase.judged.skip

    @property
    def complete(self) -> bool:
        """True if each micro-batch of this phase has had its backward."""
        return self._left == 0

    @property
    def went_backward(self) -> bool:
        """True if the micro-batch that the script has now has had its backward."""
        return self._hand.backwards > 0

    def _repeat(self) -> None:
        """Prepare the repetition of this phase on all ranks, because a gradient did not fit."""
        w = self._work
        self.attempt += 1
        if not w.log.repeated:
            w.log.repeated = True
            w.run.warn(DONE_AGAIN, self.number)
        if w.training.buffers is not None and (lost := w.training.buffers.restore()):
            w.run.warn(lost, self.number)

    def _next_phase(self) -> None:
        """Begin the next phase, with the same micro-batches. Raises BadInput."""
        if self._newest is None:
            raise BadInput(
                f"step {self.number}: step.again() before step.sync(): the gradients of the phase "
                "before would be lost"
            )
        if self._work.training.hooks.judge is not None:
            raise BadInput(
                f"step {self.number}: step.again(): guards judge steps of one phase only; switch "
                "them off (guards='off')"
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
    """One optimizer update of `run.steps`. Iterate over this rank's micro-batches, call `backward`
    for each, then `update`; or, instead of `update`, its parts: `sync`, `again`, `done`."""

    def __init__(
        self, work: Work, number: int, batches: Iterator[MicroBatch], halves: HalfSteps
    ):
        self._batches, self._halves = batches, halves
        self._current: MicroBatch | None = None
        self._mine: list[int] = []  # this rank's micro-batches
        self._fresh = True  # they were not given to the script yet
        # kept for a stream, which cannot be read again; and on a GPU, if there are phases
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
        """Return an iterator over this step's micro-batches again, for its next phase: another
        network's losses (GAN, actor and critic), or another evaluation in a closure (LBFGS). Their
        forwards repeat the same random draws. The first call in a step is the same as iterating
        over it; call it later only after `sync`. Raises BadInput."""
        self._refuse_lost()
        if self._current is not None:
            self._work.training.phases = True
            self._next_phase()
        return self._round()

    @property
    def epoch(self) -> int:
        """The pass over the data that contains the step's first sample: 0, 1, ..."""
        b = self._work.batching
        return (self.number - 1) * b.global_batch // b.samples

    @property
    def ends_epoch(self) -> bool:
        """True if the step contains the last sample of a pass over the data."""
        b = self._work.batching
        return self.number * b.global_batch // b.samples > self.epoch

    def pipeline(self) -> None:
        """Run forward and backward of all this step's micro-batches through the stages of a
        `harness.pipeline` model, instead of a loop over them. It works on every mesh. Raises
        BadInput."""
        w = self._work
        model = w.training.model
        if not isinstance(model, StagedModel):
            raise BadInput(
                "step.pipeline(): wanted a model made by harness.pipeline(model, run, loss), found "
                f"{type(model).__name__}"
            )
        if self._current is not None:
            raise BadInput(f"step {self.number}: wanted step.pipeline() once")
        for rounds in self._attempts():
            given = [self._give(i) for i in range(rounds)]
            model.run_micros(w, self._phase, self.number, given)
            self._left, self._micros = 0, self._micros + rounds

    def _round(self) -> Iterator[Any]:
        try:
            yield from self._micros_of_phase()
        except RuntimeError as e:
            self._lose(e)

    def _micros_of_phase(self) -> Iterator[Any]:
        w, timer = self._work, self._work.timer
        for rounds in self._attempts(may_drop=self._current is None):
            for i in range(rounds):
                self._halves.look(i)
                given = self._give(i)
                self._take_up(given.micro, given.samples, i == rounds - 1, given.filler)
                data = to_device(given.data, w.peers.device)
                if not given.filler:
                    w.rates.arm()
                timer.enter(FORWARD)
                yield data
                if self.lost is not None:  # there is nobody to vote or to sum with
                    return
                if not self.went_backward:
                    raise BadInput(
                        f"step {self.number}: step.backward(loss) was called 0 times for one "
                        "micro-batch, wanted once at least"
                    )

    def _attempts(self, may_drop: bool = False) -> Iterator[int]:
        """Yield the number of micro-batches, with fillers, once for each time that this phase must
        be done. `_give` returns the micro-batches. `may_drop`: they come one by one, and the state
        is whole until the end of this phase."""
        w, timer = self._work, self._work.timer
        timer.enter(HARNESS)
        first = self._fresh = self._current is None
        micros = self._mine = list(w.feed.plan.micros(w.peers.rank))
        rounds = w.feed.plan.rounds if w.training.strategy.equal_rounds else len(micros)
        if w.feed.stream is not None and first:
            self._batches = w.feed.stream.step(self.number)
        shares = w.feed.plan.shares if may_drop else ()
        noted = self._halves.begin(rounds, shares) or w.training.strategy.may_repeat
        buffers = w.training.buffers if noted else None
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
        """Return the i-th micro-batch of this rank; a filler repeats the last one."""
        self._work.timer.enter(DATA)
        filler, micro = i >= len(self._mine), self._mine[min(i, len(self._mine) - 1)]
        if not filler:
            self._current = self._next(i, micro, self._fresh and not self.attempt)
        assert self._current is not None
        return GivenMicro(micro, len(self._current.samples), filler, self._current.data)

    def _next(self, i: int, micro: int, fresh: bool) -> MicroBatch:
        """Return the i-th micro-batch of this rank. `fresh`: read it for the first time."""
        if not fresh:
            return self._again(i, micro)
        batch = next(self._batches)
        self._sums.note(batch)
        w = self._work
        if w.feed.stream is not None or (w.training.phases and w.peers.device.type != "cpu"):
            self._read.append(batch)
        return batch

    def _again(self, i: int, micro: int) -> MicroBatch:
        """Return a micro-batch again, from the dataset or from the stream's items, because the
        script may have changed its tensors. On a GPU the script only has a copy, so a kept batch
        is reused."""
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
