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
from harness.node.marks import Want
from harness.worker.guards import NonFiniteLoss, Precision, check_finite
from harness.worker.run import Run

VOTES = slice(3, 3 + len(Want))  # of `Pending.ints`
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
    # (6 + wants,) int64, host: digest halves, samples, `VOTES`, contents halves, GFLOP/s
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
        low, high = self.ints[:2].tolist()
        samples, contents = f"{(low + (high << 32)) % 2**64:016x}", ""
        if self.with_contents:
            low, high = self.ints[-3:-1].tolist()
            contents = f"{(low + (high << 32)) % 2**64:016x}"
        return samples, contents


class Rates:
    """What a sample costs, and what this rank's device could do: for tokens per second and MFU.

    `peak_flops`: of the device; None: from its name and what the model is computed in.
    """

    def __init__(self, device: torch.device):
        self.tokens_per_sample = 0
        self.flops_per_sample = 0.0
        self.peak_flops: float | None = None
        self._device = device
        self._precision: Precision | None = None

    def watch(self, model: nn.Module) -> None:
        """See in which precision it is computed, if anybody wants to know."""
        self._precision = Precision(model) if self.flops_per_sample else None

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
        peak = self.peak_flops or known
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
        samples = int(p.ints[2])
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
            check_finite(record.step, loss, None if p.scaled else norm)
        except NonFiniteLoss:
            bad = loss if not math.isfinite(loss) else norm
            self._run.fact(GuardTripped(record.step, self._run.epoch, "non-finite", bad))
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
