"""The ranks of this world, and which of them this process is. Runs in the worker.

Every method that talks to the others must be called by all of them, at the same point.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from harness.core.world import HarnessError
from harness.node.progress import Place, Progress
from storage.errors import StoreError
from storage.restore import this_machine


class Peers:
    """`control`: the group of all ranks on the host (gloo); None: this one is alone."""

    def __init__(self, environ: dict[str, str]):
        self.life = Progress(environ.get("HARNESS_PROGRESS"))
        self.life.tell(Place.START)
        self.rank = int(environ.get("RANK", 0))
        self.local_rank = int(environ.get("LOCAL_RANK", 0))
        self.world = int(environ.get("WORLD_SIZE", 1))
        self.host = environ.get("HARNESS_HOST") or this_machine()
        self.device = (
            torch.device("cuda", self.local_rank)
            if torch.cuda.is_available()
            else torch.device("cpu")
        )
        self.control: dist.ProcessGroup | None = None

    def meet(self, environ: dict[str, str]) -> None:
        """Join the process group, if the environment names one."""
        if "WORLD_SIZE" in environ and not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo")
        if dist.is_initialized() and self.world > 1:
            self.control = dist.new_group(backend="gloo")

    def print(self, *values: Any) -> None:
        """On rank 0."""
        if self.rank == 0:
            print(*values, flush=True)

    def agree(self, value: Callable[[], Any]) -> Any:
        """Rank 0's value, on every rank; its error as well."""
        if self.control is None:
            return value()
        box: list[Any] = [None]
        error: Exception | None = None
        if self.rank == 0:
            try:
                box = [(value(), None)]
            except (HarnessError, StoreError) as e:
                error, box = e, [(None, f"{type(e).__name__}: {e}")]
        dist.broadcast_object_list(box, src=0, group=self.control)
        if error is not None:
            raise error
        result, message = box[0]
        if message is not None:
            raise HarnessError(f"rank 0 found: {message}")
        return result

    def gather(self, value: Any) -> list[Any]:
        """Each rank's value, in their order."""
        if self.control is None:
            return [value]
        every: list[Any] = [None] * self.world
        dist.all_gather_object(every, value, group=self.control)
        return every

    def sum(self, value: float | torch.Tensor) -> float:
        """The sum over all ranks, rounded once (so it depends on the ranks' values, not on
        their order)."""
        mine = torch.as_tensor(value, dtype=torch.float64).detach().cpu().reshape(1)
        if self.control is None:
            return float(mine)
        every = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(every, mine, group=self.control)
        return math.fsum(float(v) for v in every)

    def gather_steps(self, step: int) -> set[int]:
        """The steps at which the ranks are."""
        if self.control is None:
            return {step}
        steps = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(steps, torch.tensor([step]), group=self.control)
        return {int(each) for each in steps}

    def barrier(self) -> None:
        """Nobody hangs up while another still talks."""
        if self.control is not None:
            dist.barrier(group=self.control)
