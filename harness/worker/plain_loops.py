"""What a session gives to loops of the script's own, beside `steps`. Runs in the worker."""

from __future__ import annotations

from typing import Any

from harness.core.world import BadInput
from harness.worker.micro_loader import MicroLoader
from harness.worker.own_loop import OwnLoops
from harness.worker.profiling import Profile


class PlainLoops(OwnLoops):
    """Mixed into `Session`."""

    seed: int
    _profile: Profile

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
