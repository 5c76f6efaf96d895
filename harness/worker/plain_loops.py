"""What a session gives to loops of the script's own, beside `steps`. Runs in the worker."""

from __future__ import annotations

import functools
import math
import time
from typing import Any

import torch
import torch.distributed as dist

from harness.core.facts import StepDone
from harness.core.world import BadInput
from harness.node.marks import Want
from harness.node.progress import WorkerPhase
from harness.worker import machine
from harness.worker.micro_loader import MicroLoader
from harness.worker.own_files import OwnFiles
from harness.worker.own_loop import OwnLoops
from harness.worker.profiling import Profile

MOST_STEPS = 1000  # between two safe points; of more nothing is told


class PlainLoops(OwnLoops):
    """Mixed into `Session`."""

    seed: int
    _profile: Profile
    _safe: tuple[int, float] | None = None  # the step of the last safe point, and when it was over

    def resume(self) -> int:
        """Load the newest valid snapshot into what `prepare` was given. Returns the step it is of
        (0: a fresh start).

        `steps` and `loader` call it; call it yourself only with a loop of your own, then
        `safe_point` after each step and `finish` after the last.
        """
        self._setup.settle()
        self._hands.resume()
        self._safe = self._run.step, time.perf_counter()
        return self._run.step

    def safe_point(self, step: int, loss: float | None = None, samples: int = 0) -> None:
        """For a training loop of your own that sums its gradients by itself (torch's
        DistributedDataParallel): `step` optimizer steps are done, on every rank. Snapshots when
        due; leaves when asked to, on all ranks together (SystemExit). Every rank calls it, at the
        same steps; what draws at random between two of them is the script's own affair.

        `loss` (rank 0's), `samples` (of all ranks, since the last safe point) are for reports. What
        was read nobody proves: `loader` or `steps` do.
        """
        self._tell_steps(step, math.nan if loss is None else float(loss), samples)
        self._run.step = step
        self._hands.turn(machine.Begun())
        self._peers.life.tell(WorkerPhase.REDUCE, step)
        wants = torch.zeros(len(Want) + 1, dtype=torch.int64)
        self._work.votes.cast(wants[:-1], self._work.snapshotter.due)
        wants[-1] = bool(self._work.votes.enough)
        if self._peers.control is not None:
            dist.all_reduce(wants, group=self._peers.control)
        self._peers.life.tell(WorkerPhase.COMPUTE, step)
        self._hands.count(wants[:-1], int(wants[-1]))
        # what a loop of your own does next we cannot know
        self._work.snapshotter.finish_staging()
        self._safe = step, time.perf_counter()

    def _tell_steps(self, step: int, loss: float, samples: int) -> None:
        """Those since the last safe point: each took as long as the others."""
        now = time.time()
        if self._safe is None or not 0 < (steps := step - self._safe[0]) <= MOST_STEPS:
            return
        each_s = (time.perf_counter() - self._safe[1]) / steps
        optimizers = self._work.training.optimizers
        lr = float(optimizers[0].param_groups[0]["lr"]) if optimizers else 0.0
        for i in range(steps):
            begin_s = now - (steps - i) * each_s
            number, few = self._safe[0] + i + 1, samples // steps
            self._run.fact(StepDone(number, self._run.epoch, loss, begin_s, each_s, few, lr=lr))

    def loader(
        self,
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
    ) -> MicroLoader:
        """A DataLoader of this rank's micro-batches, for a loop over epochs of the script's own
        (see `micro_loader.py` for one). `global_batch` and `micro_batch` in samples; a step is a
        global batch, on any number of ranks. `sampler` gives the order of all samples, the same on
        every rank (not DistributedSampler), or `shuffle`. `drop_last`: leave out what is less than
        a global batch at an epoch's end. `options`: of torch's DataLoader: num_workers, collate_fn,
        ... For `tokens_per_sample` and `flops_per_sample` see `steps`.

        It resumes when the script first asks it for its epoch or its data, so `prepare` comes
        before that. Raises BadInput.
        """
        return MicroLoader(
            self,
            dataset,
            global_batch=global_batch,
            micro_batch=micro_batch,
            sampler=sampler,
            shuffle=shuffle,
            drop_last=drop_last,
            tokens_per_sample=tokens_per_sample,
            flops_per_sample=flops_per_sample,
            **options,
        )

    @functools.cached_property
    def files(self) -> OwnFiles:
        """Checkpoints that the script writes by itself, instead of `prepare`: see
        `own_files.py`."""
        return OwnFiles(self._work, self._hands, self._run, self._setup)

    def stop(self, reason: str) -> None:
        """End the run, on all ranks together: no more steps are given, and the final snapshot says
        `reason`. One rank is enough; on others it may be called or not. Behind a step's update it
        is the next step that is the last; between two epochs of `loader.epochs` none follows."""
        if not reason:
            raise BadInput("run.stop(reason): wanted why the run ends, for people; found nothing")
        self._work.votes.enough = reason

    @property
    def stopped(self) -> str:
        """Why the run ends, once all ranks have agreed to at a step boundary; "": it does not. For
        a loop with `safe_point`; others end by themselves."""
        return self._hands.enough
