"""What a step's numbers become when they have arrived from all ranks: a record in the chain, and a
fact. Runs in the worker."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from harness.core import records as rec
from harness.core.facts import GuardTripped, StepDone, Validated
from harness.core.world import HarnessError
from harness.node.marks import Want
from harness.worker.guards import NonFiniteLoss, check_finite
from harness.worker.rates import Rates
from harness.worker.run import Run
from harness.worker.steptimes import StepTimes
from harness.worker.timing import COMMUNICATION, HARNESS, PhaseTimer

# of `Pending.ints`; what has 64 bits is there as two halves, so that no sum overflows
DIGEST, SAMPLES, VOTES = slice(0, 2), 2, slice(3, 3 + len(Want))
CONTENTS, TWINS = slice(VOTES.stop, VOTES.stop + 2), slice(VOTES.stop + 2, VOTES.stop + 4)
TELL, GFLOPS, ENOUGH = range(TWINS.stop, TWINS.stop + 3)


CLOCK_S = 1.0  # by so much clocks may disagree


@dataclass
class Pending:
    """A step whose numbers are still on their way from the other ranks."""

    # digest, samples, weight, loss and h are filled in when they have arrived
    record: rec.StepRecord
    t_start: float  # wall clock
    # from its begin until `update` was over: when the numbers arrive, and what the script does
    # until the next step, is none of its time. By the host's clock, for want of a better one
    host_s: float
    # (4,) float64, host (there when `copied` has passed): loss sum, weight, grad norm; and this
    # rank's own loss sum
    floats: torch.Tensor
    # (10 + wants,) int64, host: digest halves, samples, `VOTES`, contents halves, halves of the
    # same digests of replicas' other ranks, is it time to tell where time goes, GFLOP/s, has the
    # script asked to end the run
    ints: torch.Tensor
    own_weight: float = 0.0
    micros: int = 0  # micro-batches that this rank did
    copied: Any = None  # an event, of a GPU: until then all of the step is done as well
    work: Any = None
    with_contents: bool = False  # of a stream: the record holds a digest of what was read
    scaled: bool = False  # by a GradScaler, so the norm may be infinite

    def arrive(self) -> tuple[float, float, float]:
        """Wait for the other ranks. Loss over the global batch, global weight, gradient norm."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None
        loss_sum, weight, norm, _ = self.floats.tolist()
        return (loss_sum / weight if weight else math.nan), weight, norm

    def digests(self) -> tuple[str, str]:
        """Of which samples the step consumed, and of their contents ("": not asked for)."""
        samples = f"{whole(self.ints[DIGEST]):016x}"
        return samples, f"{whole(self.ints[CONTENTS]):016x}" if self.with_contents else ""

    def check_replicas(self) -> None:
        """Raises HarnessError unless all ranks of each replica were given the same samples."""
        others = self.record.replica_ranks - 1
        wanted = others * (whole(self.ints[DIGEST]) + whole(self.ints[CONTENTS])) % 2**64
        if others and whole(self.ints[TWINS]) != wanted:
            raise HarnessError(
                f"step {self.record.step}: wanted all {others + 1} ranks of a replica to read the "
                "same samples, found that they did not; the dataset must give the same rows on "
                "every rank (does it split itself by rank?)"
            )


def begun(t_start: float, ended_s: float, most_s: float, latest_s: float) -> float:
    """When a step began for which the script was ready at `t_start`: not before the last one had
    `ended_s`, unless that lies more than `most_s` ahead, as after a wall clock was set back; and
    not after `latest_s`, or it would end in the future."""
    ahead_s = ended_s - t_start
    begin_s = ended_s if 0 < ahead_s <= most_s + CLOCK_S else t_start
    return max(t_start, min(begin_s, latest_s))


def halves(total: int) -> tuple[int, int]:
    """Of 64 bits, the lower first."""
    return total & 0xFFFFFFFF, total >> 32


def whole(two: torch.Tensor) -> int:
    """What the sums of `halves` say, mod 2**64."""
    low, high = two.tolist()
    return int(low + (high << 32)) % 2**64


class StepLog:
    """`pending`: the step whose numbers have not arrived. `head`: of the chain of records.
    `unsaved`: records that no snapshot carries."""

    def __init__(self, run: Run, rates: Rates, timer: PhaseTimer):
        self._run, self._rates, self._timer = run, rates, timer
        self.times = StepTimes(run, rates, timer)
        self._ended_s = 0.0  # wall clock: of the newest record
        self.pending: Pending | None = None
        self.head = ""
        self.unsaved: list[rec.StepRecord] = []
        self.repeated = False  # a step was done again, and that was told
        self.last: rec.StepRecord | None = None
        self._metrics: dict[str, float] = {}
        self.last_metrics: dict[str, float] = {}  # of all names, for the manifest

    def log(self, metrics: dict[str, float]) -> None:
        """Metrics of the step that was just updated."""
        self._metrics.update(metrics)
        self.last_metrics.update(self._metrics)
        self._run.fact(Validated(self._run.step, self._run.epoch, metrics))

    def loss_of(self, step: int) -> float:
        """Over the global batch; waits for the other ranks if need be."""
        if self.pending is not None and self.pending.record.step == step:
            return self.pending.arrive()[0]
        return self.last.loss if self.last else math.nan

    def settle(self) -> None:
        """Wait for the numbers of the pending step, make its record, and look at them. Raises
        NonFiniteLoss."""
        p = self.pending
        if p is None:
            return
        self._timer.enter(COMMUNICATION)
        loss, weight, norm = p.arrive()
        self._timer.enter(HARNESS)
        self.pending = None
        self.times.collect()
        begin_s, dt = self._when(p)
        samples = int(p.ints[SAMPLES])
        digest, contents = p.digests()
        metrics = {"grad_norm": norm, **self._metrics}
        self._metrics = {}
        record = replace(
            p.record,
            samples=samples,
            digest=digest,
            weight=weight,
            loss=loss,
            t=begin_s + dt,
            dt=dt,
            metrics=metrics,
            contents=contents,
        ).chained(self.head)
        try:
            p.check_replicas()
            check_finite(record.step, loss, None if p.scaled else norm)
        except NonFiniteLoss:
            bad = loss if not math.isfinite(loss) else norm
            self._run.fact(GuardTripped(record.step, self._run.epoch, "non-finite", bad))
            self._run.close()
            raise
        except HarnessError:
            self._run.close()
            raise
        self.head, self.last = record.h, record
        self.unsaved.append(record)
        self._tell(record, begin_s, int(p.ints[GFLOPS]))
        own_loss = float(p.floats[3])
        self.times.note(own_loss, p.own_weight, p.micros, samples, int(p.ints[GFLOPS]))
        if int(p.ints[TELL]):
            self.times.gather()

    def _when(self, p: Pending) -> tuple[float, float]:
        """When it began (wall clock), and its duration. A GPU begins a step when it has done the
        one before, and the host may be ahead of it by a step."""
        timed_s = self._timer.settle()
        dt = p.host_s if timed_s is None else timed_s
        last_s = self.last.dt if self.last is not None else 0.0
        begin_s = begun(p.t_start, self._ended_s, last_s + dt, time.time() - dt)
        self._ended_s = begin_s + dt
        return begin_s, dt

    def conclude(self) -> None:
        """All ranks leave, at the same point: what was timed and not told yet is told."""
        if self.pending is None:
            self.times.conclude()

    def _tell(self, record: rec.StepRecord, begin_s: float, peak_gflops: int) -> None:
        mfu = self._rates.mfu(record.samples, record.dt, peak_gflops)
        while self._rates.doubts:
            self._run.warn(self._rates.doubts.pop(), record.step)
        self._run.fact(
            StepDone(
                record.step,
                self._run.epoch,
                record.loss,
                begin_s,
                record.dt,
                record.samples,
                record.samples * self._rates.tokens_per_sample,
                record.lr,
                record.metrics["grad_norm"],
                mfu,
            )
        )
