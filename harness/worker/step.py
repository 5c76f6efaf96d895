"""One optimizer update as the script sees it: its micro-batches, backward, update. Runs in the
worker."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from harness.core import records as rec
from harness.core.batch import Batching, digest, sample_hash, seed_for
from harness.core.world import BadInput
from harness.node.marks import Want
from harness.node.progress import WorkerPhase
from harness.worker.feed import Feed
from harness.worker.loader import MicroBatch, seed_everything, to_device
from harness.worker.peers import Peers
from harness.worker.rates import Rates
from harness.worker.rhythm import Rhythm
from harness.worker.run import Run
from harness.worker.snapshotter import Snapshotter
from harness.worker.steplog import VOTES, Pending, StepLog, halves
from harness.worker.timing import (
    BACKWARD,
    COMMUNICATION,
    DATA,
    FORWARD,
    HARNESS,
    OPTIMIZER,
    OTHER,
    SNAPSHOT,
    PhaseTimer,
)
from harness.worker.training import Training
from harness.worker.votes import Votes

DONE_AGAIN = (
    "a gradient was far greater than those before it, or came in parts for the first time, so this "
    "step's micro-batches are done once more: buffers are put back, and step.attempt is 1 (this is "
    "told once)"
)


class Step:
    """One optimizer update. Iterate it for this rank's micro-batches, call `backward` for each,
    then `update`.

    `number`: 1, 2, ... `attempt`: 0; with exact sums 1, 2, ... while the same micro-batches come
    again because a gradient did not fit: count and log what the body does only at 0 (see `attach`).
    """

    def __init__(self, work: Work, number: int, batches: Iterator[MicroBatch]):
        self.number, self._work, self._batches = number, work, batches
        self._sums = Sums(work.batching, work.peers.device, work.peers.leads_replica)
        self._current: MicroBatch | None = None
        self._filler = False
        self._backwards = 0
        self.attempt = 0
        self.updated = False
        work.timer.begin(number)
        self._began = time.time(), time.perf_counter()

    def __iter__(self) -> Iterator[Any]:
        w, timer = self._work, self._work.timer
        timer.enter(HARNESS)
        micros = list(w.feed.plan.micros(w.peers.rank))
        rounds = w.feed.plan.rounds if w.training.strategy.equal_rounds else len(micros)
        if w.feed.stream is not None:
            self._batches = w.feed.stream.step(self.number)
        read: list[MicroBatch] = []  # of a stream, which cannot be read again
        buffers = w.training.buffers if w.training.strategy.may_repeat else None
        if buffers is not None:
            buffers.note()
        repeat = True
        while repeat:
            for i in range(rounds):
                timer.enter(DATA)
                self._filler = i >= len(micros)
                self._micro = micros[min(i, len(micros) - 1)]
                w.training.strategy.micro(last=i == rounds - 1, filler=self._filler)
                if not self._filler:
                    self._current = self._next(i, read)
                seed_everything(seed_for(w.feed.seed, self.number, self._micro))
                before = self._backwards
                assert self._current is not None
                data = to_device(self._current.data, w.peers.device)
                if not self._filler:
                    w.rates.arm()
                timer.enter(FORWARD)
                yield data
                if (times := self._backwards - before) != 1:
                    raise BadInput(
                        f"step {self.number}: step.backward(loss) was called {times} times for one "
                        "micro-batch, wanted once"
                    )
            timer.enter(COMMUNICATION)
            repeat = w.training.strategy.again()
            timer.enter(HARNESS)
            if repeat:
                self.attempt += 1
                if not w.training.repeated:
                    w.training.repeated = True
                    w.run.warn(DONE_AGAIN, self.number)
                if buffers is not None and (lost := buffers.restore()):
                    w.run.warn(lost, self.number)
        if buffers is not None:
            buffers.learn()
        if w.feed.stream is not None:
            timer.enter(DATA)
            for _ in self._batches:  # read on to the end of the global batch
                raise AssertionError("a micro-batch of ours came after our last one")
        timer.enter(OTHER)

    def _next(self, i: int, read: list[MicroBatch]) -> MicroBatch:
        """The i-th micro-batch of this rank. `read`: what a stream gave before."""
        if self.attempt:
            return self._again(read[i] if read else None)
        batch = next(self._batches)
        self._sums.note(batch)
        if self._work.feed.stream is not None and self._work.training.strategy.may_repeat:
            read.append(batch)
        return batch

    def _again(self, read: MicroBatch | None) -> MicroBatch:
        """What `_micro` was given before, from the dataset or from the items that the stream
        gave: the script may have changed the rest."""
        feed = self._work.feed
        if read is not None:
            assert feed.stream is not None
            return replace(read, data=feed.stream.collated_again(read))
        assert feed.read_again is not None and self._current is not None
        return replace(
            self._current,
            data=feed.read_again(self.number, self._micro),
            samples=self._current.samples,
        )

    def backward(self, loss: torch.Tensor, weight: float | None = None) -> None:
        """Add this micro-batch's gradients. `loss`: mean over the micro-batch, 0-d. `weight`: how
        much the mean stands for; by default its samples; the number of valid tokens when those
        differ."""
        assert self._current is not None
        training = self._work.training
        self._work.timer.enter(BACKWARD)
        amount = float(len(self._current.samples)) if weight is None else float(weight)
        if self._filler:
            amount = 0.0
        scaled = loss * amount
        if training.scaler is not None:
            scaled = training.scaler.scale(scaled)
        scaled.backward()  # type: ignore[no-untyped-call]
        training.strategy.micro_done()
        if not self._filler:
            self._sums.add(self._micro, loss, amount)
        self._sums.tokens_weighted |= weight is not None
        self._backwards += 1
        self._work.timer.enter(HARNESS)
        self._work.rates.counted(len(self._current.samples))
        self._work.timer.enter(OTHER)

    def update(self, clip_norm: float | None = None) -> None:
        """Sum over all replicas, divide by the global weight, clip, and let optimizers and
        schedulers step."""
        self._work.update(self._sums, self._began, self._backwards, clip_norm)
        self.updated = True

    @property
    def loss(self) -> float:
        """The loss over the global batch; waits for the other ranks (and the GPU), so ask only
        when you need it."""
        return self._work.log.loss_of(self.number)


class Sums:
    """What this rank adds to the numbers of a step. `leads`: it is the first rank of its replica,
    and adds what the replica has done; what the others were given is only compared with it."""

    def __init__(self, batching: Batching, device: torch.device, leads: bool):
        self.samples, self._hash_sum, self._contents_sum = 0, 0, 0
        self._leads = leads
        # One place per micro-batch of the step, filled by who does it: their sum over ranks, in
        # this order, is the same on any world.
        self.losses = torch.zeros(batching.micro_batches, dtype=torch.float64, device=device)
        self.weights = [0.0] * batching.micro_batches
        self.tokens_weighted = False
        # of a step that has fewer micro-batches than the others; (): as the plan says
        self.shares: tuple[int, ...] = ()

    def note(self, batch: MicroBatch) -> None:
        """It was read."""
        self._hash_sum += digest(sample_hash(batch.positions, batch.samples))
        if batch.contents is not None:
            self._contents_sum += digest(sample_hash(batch.positions, batch.contents))
        self.samples += len(batch.samples)

    def note_foreign(self, positions: Any, said: Any) -> None:
        """As `note`, of what a trainer that is not ours has read: what is at a position is only
        said."""
        self._hash_sum += digest(sample_hash(positions, positions))
        self._contents_sum += digest(sample_hash(positions, said))
        self.samples += len(positions)

    def add(self, micro: int, loss: torch.Tensor, amount: float) -> None:
        """A micro-batch was done. `loss`: mean over it; `amount`: how much that stands for."""
        if self._leads:
            self.losses[micro] = loss.detach().double() * amount
            self.weights[micro] = amount

    def weights_tensor(self) -> torch.Tensor:
        """On the host, from where a GPU can fetch them without being waited for."""
        pin = self.losses.device.type == "cuda"
        return torch.tensor(self.weights, dtype=torch.float64, pin_memory=pin)

    def ints(self, tell: bool, gflops: int) -> torch.Tensor:
        """As `Pending.ints` wants it, without votes."""
        both = (self._hash_sum + self._contents_sum) % 2**64
        if self._leads:
            said = (self._hash_sum, self._contents_sum, 0)
        else:
            said = (0, 0, both)
        samples = self.samples if self._leads else 0
        digest, contents, twins = (halves(total % 2**64) for total in said)
        mine = [*digest, samples, *[0] * len(Want), *contents, *twins, tell, gflops]
        return torch.tensor(mine, dtype=torch.int64)


def to_host(floats: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """A copy on the host, and the event after which it is there; None: now. Nobody waits here."""
    if floats.device.type != "cuda":
        return floats, None
    on_host = floats.to("cpu", non_blocking=True)  # that is pinned
    copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    copied.record()
    return on_host, copied


@dataclass(frozen=True)
class Work:
    """What steps are made of, and the update that ends each."""

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

    @property
    def batching(self) -> Batching:
        assert self.feed.batching is not None
        return self.feed.batching

    def update(
        self, sums: Sums, began: tuple[float, float], micros: int, clip_norm: float | None
    ) -> None:
        """All ranks come here, with what each has summed over `micros` micro-batches. `began`: by
        the wall clock and by one that is never set."""
        self.peers.life.tell(WorkerPhase.REDUCE)
        floats = self._reduce(sums, clip_norm)
        lr = float(self.training.optimizers[0].param_groups[0]["lr"])
        self.finish_staging()
        self._optimize()
        self.done(sums, began, micros, floats, lr)

    def finish_staging(self) -> None:
        """The state may change from here on."""
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
        """The optimizers have stepped: what this step was is on its way to all ranks. `floats`: as
        `Pending.floats`; `begins`: see `StepRecord.begins`."""
        self.timer.enter(COMMUNICATION)
        self.training.share_buffers()
        self.timer.enter(HARNESS)
        self.run.step += 1
        # the step before this one (on a GPU): its numbers have had a whole step to arrive
        self.log.settle()
        tell = self.peers.rank == 0 and self.log.times.due()
        ints = sums.ints(tell, self.rates.peak_gflops)
        self.votes.cast(ints[VOTES], self.snapshotter.due)
        work = (
            dist.all_reduce(ints, group=self.peers.control, async_op=True)
            if self.peers.control is not None
            else None
        )
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
        )
        assert self.run.identity is not None
        stream = self.feed.stream is not None or begins >= 0
        with_contents = stream and bool(self.run.identity.get("contents"))
        scaled = self.training.scaler is not None
        self.rhythm.note_step(calm=self.snapshotter.quiet)
        self.peers.life.tell(WorkerPhase.COMPUTE, self.run.step)
        self.timer.end()
        host_s = time.perf_counter() - began[1]
        on_host, copied = to_host(floats)
        self.log.pending = Pending(
            *(record, began[0], host_s, on_host, ints, sum(sums.weights), micros, copied, work),
            *(with_contents, scaled),
        )

    def summed(self, sums: Sums) -> tuple[torch.Tensor, float | torch.Tensor]:
        """Gradients and numbers over all ranks: `Pending.floats` without the norm, and the global
        weight."""
        device = self.peers.device
        self.timer.enter(COMMUNICATION)
        self.training.strategy.reduce()
        totals = torch.stack([sums.losses, to_device(sums.weights_tensor(), device)])
        own = sums.losses.sum().view(1)
        if self.peers.control is not None:
            dist.all_reduce(totals)  # on the device's own stream: no host waits for it
        self.timer.enter(OPTIMIZER)
        zero = torch.zeros(1, dtype=torch.float64, device=device)
        floats = torch.cat([totals.sum(1), zero, own])
        weight: float | torch.Tensor = (
            floats[1] if sums.tokens_weighted else float(self.batching.global_batch)
        )
        return floats, weight

    def _reduce(self, sums: Sums, clip_norm: float | None) -> torch.Tensor:
        """Gradients over all ranks, divided and clipped; `Pending.floats`."""
        strategy, scaler = self.training.strategy, self.training.scaler
        floats, weight = self.summed(sums)
        strategy.divide(weight)
        if scaler is not None:
            for optimizer in self.training.optimizers:
                scaler.unscale_(optimizer)
                strategy.share_found_inf(scaler, optimizer)
        norm = strategy.norm()
        floats[2] = norm
        if clip_norm is not None:
            strategy.clip((clip_norm / (norm + 1e-6)).clamp(max=1.0))
        return floats

    def _optimize(self) -> None:
        """Optimizers and schedulers step."""
        scaler, scheduler = self.training.scaler, self.training.scheduler
        for optimizer in self.training.optimizers:
            if scaler is not None:
                scaler.step(optimizer)
            else:
                optimizer.step()
        if scaler is not None:
            scaler.update()
        if scheduler is not None:
            scheduler.step()
        self.training.strategy.zero()
