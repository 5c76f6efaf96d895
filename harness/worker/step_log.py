"""The log of steps: when a step's numbers have arrived from all ranks, they become a record in the
chain and a fact. Runs in the worker."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from harness.core import step_records as rec
from harness.core.facts import PHASES, GuardTripped, StepDone, StepsTimed, Validated
from harness.core.read_traffic import CACHE, PEER, Traffic
from harness.core.world import HarnessError
from harness.node.marks import Want
from harness.worker.run_context import Run
from harness.worker.step_timing import COMMUNICATION, HARNESS, PhaseTimer, Rates

# places in `Pending.ints`; 64-bit values are stored as two halves, so that a float64 holds the sums
# of 2**21 ranks exactly
DIGEST, SAMPLES, VOTES = slice(0, 2), 2, slice(3, 3 + len(Want))
CONTENTS, TWINS = slice(VOTES.stop, VOTES.stop + 2), slice(VOTES.stop + 2, VOTES.stop + 4)
TELL, GFLOPS, ENOUGH, STEP_MS = range(TWINS.stop, TWINS.stop + 4)



@dataclass
class Pending:
    """A step whose numbers have not arrived from the other ranks yet. They are sums over all ranks,
    valid when `arrive` has returned."""

    # digest, samples, weight, loss and h are filled in on arrival
    record: rec.StepRecord
    t_start: float  # wall clock
    # from its begin to the end of `update`, by the host's clock, if it was not timed otherwise; the
    # arrival of the numbers, and the script's work until the next step, are not part of its time
    host_s: float
    # (4 + 11 + wants,) float64, host (valid when `copied` has passed): loss sum, weight, grad norm;
    # this rank's own loss sum; and then `ints`
    floats: torch.Tensor
    own_weight: float = 0.0
    micros: int = 0  # micro-batches that this rank did
    copied: Any = None  # a GPU's event; when it has passed, the whole step is done
    with_contents: bool = False  # the record has a digest of the contents read (of a stream)
    scaled: bool = False  # with a GradScaler, so the norm may be infinite

    def arrive(self) -> tuple[float, float, float]:
        """Wait for the device. Return the loss over the global batch, the global weight and the
        gradient norm. The loss of a step of which the script has skipped everything is 0."""
        if self.copied is not None:
            self.copied.synchronize()
            self.copied = None
        loss_sum, weight, norm = self.floats[:3].tolist()
        skipped = not weight and loss_sum == 0.0
        return (0.0 if skipped else loss_sum / weight if weight else math.nan), weight, norm

    @functools.cached_property
    def ints(self) -> torch.Tensor:
        """(11 + wants,) int64, after `arrive`: digest halves, samples, `VOTES`, contents halves,
        halves of the same digests of replicas' other ranks, whether to gather times now, GFLOP/s,
        whether the script requests the end of the run, milliseconds that the step before took."""
        return self.floats[4:].to(torch.int64)

    def digests(self) -> tuple[str, str]:
        """Return the digests of the samples of the step and of their contents ("": not wanted)."""
        samples = f"{sum_of_halves(self.ints[DIGEST]):016x}"
        return samples, f"{sum_of_halves(self.ints[CONTENTS]):016x}" if self.with_contents else ""

    @property
    def samples(self) -> int:
        return int(self.ints[SAMPLES])

    @property
    def votes(self) -> torch.Tensor:
        """The number of ranks that want each `Want`."""
        return self.ints[VOTES]

    @property
    def enough(self) -> int:
        """The number of ranks whose script wants the run to end."""
        return int(self.ints[ENOUGH])

    @property
    def mean_s(self) -> float:
        """The seconds that the step before took by the ranks' hosts; 0: there is no agent."""
        return int(self.ints[STEP_MS]) / 1e3 / self.record.world

    @property
    def tells_times(self) -> bool:
        """True if the ranks gather their times after this step."""
        return bool(self.ints[TELL])

    @property
    def peak_gflops(self) -> int:
        return int(self.ints[GFLOPS])

    def check_replicas(self) -> None:
        """Raise HarnessError unless all ranks of each replica were given the same samples."""
        others = self.record.replica_ranks - 1
        wanted = (
            others * (sum_of_halves(self.ints[DIGEST]) + sum_of_halves(self.ints[CONTENTS])) % 2**64
        )
        if others and sum_of_halves(self.ints[TWINS]) != wanted:
            raise HarnessError(
                f"step {self.record.step}: wanted all {others + 1} ranks of a replica to read the "
                "same samples, found that they did not; the dataset must give the same rows on "
                "every rank (does it split itself by rank?)"
            )


def halves(total: int) -> tuple[int, int]:
    """Split a 64-bit number into two halves of 32 bits, the lower first."""
    return total & 0xFFFFFFFF, total >> 32


def sum_of_halves(two: torch.Tensor) -> int:
    """Return the sum, mod 2**64, from the sums of `halves`."""
    low, high = two.tolist()
    return int(low + (high << 32)) % 2**64


# Guards that stop a training run that has gone wrong, before its state is committed, and the
# precision that a model computes in.


class NonFiniteLoss(HarnessError):
    """The loss or the gradient norm is NaN or infinite. No snapshot with it was committed."""


def check_finite(step: int, loss: float, grad_norm: float | None) -> None:
    """Raise NonFiniteLoss if the loss or the norm is not finite. For a step that a GradScaler
    skips, pass grad_norm=None: an overflow there is no fault."""
    for what, value in (("loss", loss), ("gradient norm", grad_norm)):
        if value is not None and not math.isfinite(value):
            raise NonFiniteLoss(
                f"step {step}: the {what} is {value}, wanted a finite number. Nothing of this step "
                "is committed; the run stays at its last snapshot. Look at the learning rate, the "
                "precision and the samples of this step."
            )


# The durations of steps on all ranks, by phase, gathered now and then and recorded by rank 0.

# the interval: every ten seconds at first, then a share of the time so far, up to a minute
LEAST_EVERY_S, MOST_EVERY_S, SHARE = 10.0, 60.0, 1 / 60
# places in a rank's values: seconds by phase, then these
LOSS, WEIGHT, FLOPS, FAR, PEERS, NEAR, REQUESTS = range(len(PHASES), len(PHASES) + 7)

NOTHING = (0.0, 0.0, 0.0)


@dataclass
class Gathering:
    """The values of all ranks for `steps` steps up to `last`; valid when `work` has ended."""

    last: int
    steps: int
    every: list[torch.Tensor]  # by rank
    work: Any = None


class StepTimes:
    """The timing of steps. `traffic`: returns what this rank's process has read so far."""

    def __init__(self, run: Run, rates: Rates, timer: PhaseTimer):
        self._run, self._rates, self._timer = run, rates, timer
        # this rank's sums of loss, weight and FLOP: not gathered yet; and those of the newest step,
        # whose time is known only when the next one begins
        self._done, self._newest = NOTHING, NOTHING
        self._samples = self._peak_gflops = 0
        self.host_s = 0.0  # that the newest step took by this rank's host; 0: not known
        self.traffic: Callable[[], Sequence[Traffic]] = tuple
        self._read = np.zeros(4)  # as of the last gather
        self._gathering: Gathering | None = None
        self._began_s = self._asked_s = time.monotonic()

    def due(self) -> bool:
        """Return whether it is time to gather; rank 0 calls it."""
        now_s = time.monotonic()
        every_s = min(MOST_EVERY_S, max(LEAST_EVERY_S, SHARE * (now_s - self._began_s)))
        if not self._run.url or now_s - self._asked_s < every_s:
            return False
        self._asked_s = now_s
        return True

    def note(self, loss: float, weight: float, micros: int, samples: int, peak_gflops: int) -> None:
        """Record a step whose numbers have arrived. `loss`, `weight`: sums over this rank's
        micro-batches; `micros`: their number, including repetitions; `samples`, `peak_gflops`: of
        all ranks."""
        self._add_newest()
        self._newest = (loss, weight, self._rates.flops_per_micro * micros)
        self._samples, self._peak_gflops = samples, peak_gflops

    def _add_newest(self) -> None:
        (a, b, c), (loss, weight, flops) = self._done, self._newest
        self._done, self._newest = (a + loss, b + weight, c + flops), NOTHING

    def gather(self) -> None:
        """Begin to gather the values of all ranks, which call it after the same step."""
        if not self._timer.steps:
            return
        seconds, steps, last = self._timer.take_seconds()
        read = self._read_so_far()
        said = [*seconds, *self._done, *np.maximum(read - self._read, 0).tolist()]
        self._done, self._read = NOTHING, read
        mine, group = torch.tensor(said, dtype=torch.float64), self._run.peers.control
        found = self._gathering = Gathering(last, steps, [mine])
        if group is not None:
            found.every = [torch.empty_like(mine) for _ in range(self._run.peers.world)]
            found.work = dist.all_gather(found.every, mine, group=group, async_op=True)

    def collect(self) -> None:
        """Wait for the gather, if there is one; rank 0 records the result."""
        found, self._gathering = self._gathering, None
        if found is None:
            return
        if found.work is not None:
            found.work.wait()
        if self._run.peers.rank == 0:
            self._run.fact(self._told(found))

    def _read_so_far(self) -> NDArray[np.float64]:
        """Return bytes from stores, from other nodes and from the node's own cache, and the number
        of requests."""
        there = self.traffic()
        by = [(one.nbytes, one.far, one.requests) for one in there]
        of = [(found[far], found[PEER], found[CACHE], requests) for found, far, requests in by]
        total: NDArray[np.float64] = np.array(of, float).reshape(-1, 4).sum(0)
        return total

    def conclude(self) -> None:
        """Gather and record the remaining times. All ranks call it at the same point, as they
        leave."""
        if self._run.url:
            self.collect()
            self._timer.close()
            self._add_newest()
            self.gather()
            self.collect()

    def _told(self, found: Gathering) -> StepsTimed:
        table = torch.stack(found.every).numpy()  # (ranks, values)
        spent = table[:, : len(PHASES)] / found.steps
        step_s = float(spent.sum(1).mean())
        own_s, own_ranks = _spread(spent.sum(1) - spent[:, COMMUNICATION])
        did = np.flatnonzero(table[:, WEIGHT] > 0)  # only some ranks of a replica have losses
        loss, places = _spread(table[did, LOSS] / table[did, WEIGHT])
        rates, samples = self._rates, self._samples
        flops = float(table[:, FLOPS].sum()) / found.steps
        return StepsTimed(
            epoch=self._run.epoch,
            first=found.last - found.steps + 1,
            last=found.last,
            seconds=dict(zip(PHASES, spent.mean(0).tolist(), strict=True)),
            own_s=own_s,
            own_ranks=own_ranks,
            loss=loss,
            loss_ranks=tuple(int(did[place]) for place in places),
            hfu=rates.hfu(flops, step_s, self._peak_gflops),
            mfu=rates.mfu(samples, step_s, self._peak_gflops),
            samples=samples,
            tokens=samples * rates.tokens_per_sample,
            read_nbytes=self._read_by(*table[:, FAR : NEAR + 1].sum(0)),
            read_requests=int(table[:, REQUESTS].sum()),
        )

    def _read_by(self, far: float, peers: float, near: float) -> dict[str, int]:
        """Return the bytes read by their origin. If sources are in several stores, the first
        store's name stands for all."""
        schemes = [one.far for one in self.traffic()]
        names = (*schemes[:1], PEER, CACHE)
        return {name: int(n) for name, n in zip(names, (far, peers, near), strict=False) if n}


def _spread(values: NDArray[Any]) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return (least, median, most) and the indices of the least and the most."""
    if not len(values):
        return (), ()
    least, most = int(values.argmin()), int(values.argmax())
    return (
        (float(values[least]), float(np.median(values)), float(values[most])),
        (least, most),
    )


CLOCK_S = 1.0  # the most by which clocks may disagree


def begun(t_start: float, ended_s: float, most_s: float, latest_s: float) -> float:
    """Return when a step began (wall clock). `t_start`: when the script was ready for it. The step
    does not begin before the last one's end, `ended_s`, unless that lies more than `most_s` ahead,
    as after a clock was set back; nor after `latest_s`, or it would end in the future."""
    ahead_s = ended_s - t_start
    begin_s = ended_s if 0 < ahead_s <= most_s + CLOCK_S else t_start
    return max(t_start, min(begin_s, latest_s))


class StepLog:
    """The log of this rank's steps. `pending`: the step whose numbers have not arrived. `head`:
    hash of the newest record in the chain. `unsaved`: records that no snapshot carries yet."""

    def __init__(self, run: Run, rates: Rates, timer: PhaseTimer):
        self._run, self._rates, self._timer = run, rates, timer
        self._journal = run.journal  # None on ranks other than 0
        self.times = StepTimes(run, rates, timer)
        self._ended_s = 0.0  # wall clock at the end of the newest recorded step
        self.pending: Pending | None = None
        self.head = ""
        self.unsaved: list[rec.StepRecord] = []
        self.usual_step_s = 0.0  # of the newest settled step, the same on all ranks; 0: not known
        # called when the newest step's record is known, before any exchange between ranks
        self.when_whole: Callable[[], None] = lambda: None
        self.repeated = False  # a step was repeated, and the warning about it was given
        self.last: rec.StepRecord | None = None
        self._metrics: dict[str, float] = {}
        self.last_metrics: dict[str, float] = {}  # newest value of every name, for the manifest

    def log(self, metrics: dict[str, float]) -> None:
        """Add metrics to the step that was just updated."""
        self._metrics.update(metrics)
        self.last_metrics.update(self._metrics)
        self._run.fact(Validated(self._run.step, self._run.epoch, metrics))

    def unsaved_s(self, now_s: float) -> float:
        """Return for how long, at `now_s` (wall clock), steps have been done that no snapshot
        carries yet."""
        first = next(iter(self.unsaved), None)
        return 0.0 if first is None else max(0.0, now_s - first.t + first.dt)

    def loss_of(self, step: int) -> float:
        """Return a step's loss over the global batch. Waits for the other ranks if necessary."""
        if self.pending is not None and self.pending.record.step == step:
            return self.pending.arrive()[0]
        return self.last.loss if self.last else math.nan

    def settle(self) -> None:
        """Wait for the numbers of the pending step, make its record and check it. Raises
        NonFiniteLoss, HarnessError."""
        p = self.pending
        if p is None:
            return
        self._timer.enter(COMMUNICATION)
        loss, weight, norm = p.arrive()
        self._timer.enter(HARNESS)
        self.pending = None
        begin_s, dt = self._when(p)
        samples = p.samples
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
            if not record.skipped:
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
        self.usual_step_s = p.mean_s
        if record.step == self._run.step:
            self.when_whole()
        self._tell(record, begin_s, p.peak_gflops)
        own_loss = float(p.floats[3])
        self.times.note(own_loss, p.own_weight, p.micros, samples, p.peak_gflops)
        self.times.collect()
        if p.tells_times:
            self.times.gather()

    def _when(self, p: Pending) -> tuple[float, float]:
        """Return when a step began (wall clock), and its duration. A GPU begins a step after the
        previous one, and the host may be ahead of it by a step."""
        timed_s = self._timer.settle()
        dt = p.host_s if timed_s is None else timed_s
        last_s = self.last.dt if self.last is not None else 0.0
        begin_s = begun(p.t_start, self._ended_s, last_s + dt, time.time() - dt)
        self._ended_s = begin_s + dt
        return begin_s, dt

    def conclude(self) -> None:
        """Report the remaining times. All ranks call it at the same point, as they leave."""
        if self.pending is None:
            self.times.conclude()

    def _tell(self, record: rec.StepRecord, begin_s: float, peak_gflops: int) -> None:
        mfu = self._rates.mfu(record.samples, record.dt, peak_gflops)
        while self._rates.doubts:
            self._run.warn(self._rates.doubts.pop(), record.step)
        if self._journal is None:
            return
        self._journal.record(
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
