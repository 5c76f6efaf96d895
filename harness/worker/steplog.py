"""What a step's numbers become when they have arrived from all ranks: a record in the chain, and a
fact. Runs in the worker."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from harness.core import records as rec
from harness.core.facts import GuardTripped, StepDone, Validated
from harness.core.hardware import peak_flops
from harness.core.world import HarnessError
from harness.node.marks import Want
from harness.worker.guards import NonFiniteLoss, Precision, check_finite
from harness.worker.run import Run

# of `Pending.ints`; what has 64 bits is there as two halves, so that no sum overflows
DIGEST, SAMPLES, VOTES = slice(0, 2), 2, slice(3, 3 + len(Want))
CONTENTS, TWINS = slice(VOTES.stop, VOTES.stop + 2), slice(VOTES.stop + 2, VOTES.stop + 4)
UNKNOWN_GFLOPS = -(1 << 50)  # one rank's makes the sum of all negative


@dataclass
class Pending:
    """A step whose numbers are still on their way from the other ranks."""

    # digest, samples, weight, loss and h are filled in when they have arrived
    record: rec.StepRecord
    t_start: float
    # `update` was over: when the numbers arrive, and what the script does until the next step, is
    # none of its time
    t_end: float
    floats: torch.Tensor  # (3,) float64 on the device: loss sum, weight, grad norm
    # (8 + wants,) int64, host: digest halves, samples, `VOTES`, contents halves, halves of the same
    # digests of replicas' other ranks, GFLOP/s
    ints: torch.Tensor
    work: Any = None
    with_contents: bool = False  # of a stream: the record holds a digest of what was read
    scaled: bool = False  # by a GradScaler, so the norm may be infinite

    def arrive(self) -> tuple[float, float, float]:
        """Wait for the other ranks. Loss over the global batch, global weight, gradient norm."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        loss_sum, weight, norm = self.floats.tolist()
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


def halves(total: int) -> tuple[int, int]:
    """Of 64 bits, the lower first."""
    return total & 0xFFFFFFFF, total >> 32


def whole(two: torch.Tensor) -> int:
    """What the sums of `halves` say, mod 2**64."""
    low, high = two.tolist()
    return int(low + (high << 32)) % 2**64


class Rates:
    """What a sample costs, and what this rank's device could do: for tokens per second and MFU.

    `peak_flops`: of the device, per second; None: from its name and what the model is computed in.
    """

    def __init__(self, device: torch.device, peak_flops: float | None = None):
        self.tokens_per_sample = 0
        self.flops_per_sample = 0.0
        self._peak_flops = peak_flops
        self._device = device
        self._precision: Precision | None = None

    def watch(self, model: nn.Module, tokens_per_sample: int, flops_per_sample: float) -> None:
        """From here on. In which precision the model is computed is seen if anybody wants to
        know."""
        self.tokens_per_sample, self.flops_per_sample = tokens_per_sample, flops_per_sample
        if self._precision is None and flops_per_sample:
            self._precision = Precision(model)

    @functools.cached_property
    def peak_gflops(self) -> int:
        """What this rank adds to the sum by which MFU divides; asked for after the first
        forward."""
        precision = self._precision.name if self._precision is not None else "none"
        known = (
            peak_flops(torch.cuda.get_device_name(self._device), precision)
            if self._device.type == "cuda"
            else None
        )
        peak = self._peak_flops or known
        return int(peak / 1e9) if peak else UNKNOWN_GFLOPS


class StepLog:
    """`pending`: the step whose numbers have not arrived. `head`: of the chain of records.
    `unsaved`: records that no snapshot carries."""

    def __init__(self, run: Run, rates: Rates):
        self._run, self._rates = run, rates
        self.pending: Pending | None = None
        self.head = ""
        self.unsaved: list[rec.StepRecord] = []
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
        loss, weight, norm = p.arrive()
        self.pending = None
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
            t=p.t_end,
            dt=p.t_end - p.t_start,
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
        self._tell(record, p)

    def _tell(self, record: rec.StepRecord, p: Pending) -> None:
        gflops = (
            self._rates.flops_per_sample * record.samples / record.dt / 1e9 if record.dt else 0.0
        )
        peak_gflops = int(p.ints[-1])
        self._run.fact(
            StepDone(
                record.step,
                self._run.epoch,
                record.loss,
                p.t_start,
                record.dt,
                record.samples,
                record.samples * self._rates.tokens_per_sample,
                record.lr,
                record.metrics["grad_norm"],
                gflops / peak_gflops if peak_gflops > 0 and gflops else None,
            )
        )
