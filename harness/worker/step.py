"""What an optimizer update adds up to on this rank, what becomes of it over all ranks, and what is
told of it. Runs in the worker."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from harness.core import records as rec
from harness.core.batch import Batching, digest, sample_hash, seed_for
from harness.node.marks import Want
from harness.node.progress import WorkerPhase
from harness.worker.feed import Feed
from harness.worker.loader import MicroBatch, seed_everything, to_device
from harness.worker.peers import Peers
from harness.worker.rates import Rates
from harness.worker.rhythm import Rhythm
from harness.worker.run import Run
from harness.worker.snapshotter import Snapshotter
from harness.worker.steplog import ENOUGH, VOTES, Pending, StepLog, halves
from harness.worker.timing import COMMUNICATION, HARNESS, OPTIMIZER, SNAPSHOT, PhaseTimer
from harness.worker.training import Training
from harness.worker.votes import Votes


class Sums:
    """What this rank adds to the numbers of a step. `leads`: it is the first rank of its replica,
    and adds what the replica has done; what the others were given is only compared with it.
    `tells`: losses are added by this one; None: if it leads."""

    def __init__(
        self, batching: Batching, device: torch.device, leads: bool, tells: bool | None = None
    ):
        self.samples, self._hash_sum, self._contents_sum = 0, 0, 0
        self._leads, self._tells = leads, leads if tells is None else tells
        self._foreign: list[tuple[Any, Any]] = []  # positions, what was read there; not yet summed
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
        self._foreign.append((positions, said))
        self.samples += len(positions)

    def _hash_foreign(self) -> None:
        """All micro-batches at once: a call takes longer than their few rows."""
        if self._foreign:
            positions, said = (np.concatenate(each) for each in zip(*self._foreign, strict=True))
            self._foreign.clear()
            self._hash_sum += digest(sample_hash(positions, positions))
            self._contents_sum += digest(sample_hash(positions, said))

    def add(
        self, micro: int, loss: torch.Tensor, amount: float, more: bool = False, parts: bool = True
    ) -> None:
        """A micro-batch was done. `loss`: mean over it; `amount`: how much that stands for.
        `more`: it is another loss of the same one; `parts`: of another part of it, not of all."""
        if self._tells:
            value = loss.detach().double() * amount
            self.losses[micro] = self.losses[micro] + value if more else value
            if not more:
                self.weights[micro] = amount
            elif parts:
                self.weights[micro] += amount

    def weights_tensor(self) -> torch.Tensor:
        """On the host, from where a GPU can fetch them without being waited for."""
        pin = self.losses.device.type == "cuda"
        return torch.tensor(self.weights, dtype=torch.float64, pin_memory=pin)

    def ints(self, tell: bool, gflops: int) -> torch.Tensor:
        """As `Pending.ints` wants it, without votes."""
        self._hash_foreign()
        both = (self._hash_sum + self._contents_sum) % 2**64
        if self._leads:
            said = (self._hash_sum, self._contents_sum, 0)
        else:
            said = (0, 0, both)
        samples = self.samples if self._leads else 0
        digest, contents, twins = (halves(total % 2**64) for total in said)
        mine = [*digest, samples, *[0] * len(Want), *contents, *twins, tell, gflops, 0]
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
        ints[ENOUGH] = bool(self.votes.enough)
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
        hashed = self.feed.has_contents or begins >= 0
        with_contents = hashed and bool(self.run.identity.get("contents"))
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

    def reduce(
        self, sums: Sums, clip_norm: float | None, of: Sequence[torch.optim.Optimizer] = ()
    ) -> torch.Tensor:
        """Gradients over all ranks, divided and clipped; `Pending.floats`. `of`: only of what these
        optimizers hold, the others are zero; (): of all."""
        strategy, scaler = self.training.strategy, self.training.scaler
        floats, weight = self.summed(sums)
        self.training.settle_norms(sum(sums.shares) or self.batching.micro_batches)
        self.training.statistics.loads.settle()
        strategy.divide(weight)
        if of:
            self._forget_others(of)
        if scaler is not None:
            for optimizer in of or self.training.optimizers:
                scaler.unscale_(optimizer)
                strategy.share_found_inf(scaler, optimizer)
        norm = strategy.norm()
        floats[2] = norm
        if clip_norm is not None:
            strategy.clip((clip_norm / (norm + 1e-6)).clamp(max=1.0))
        return floats

    def _forget_others(self, of: Sequence[torch.optim.Optimizer]) -> None:
        assert self.training.model is not None
        held = {id(p) for o in of for group in o.param_groups for p in group["params"]}
        for p in self.training.model.parameters():
            if p.grad is not None and id(p) not in held:
                p.grad.zero_()

    def optimize(self) -> None:
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

    def seed_between(self) -> None:
        """What runs between two steps (an evaluation) draws the same on any world."""
        seed_everything(seed_for(self.feed.seed, self.run.step, self.batching.micro_batches))
