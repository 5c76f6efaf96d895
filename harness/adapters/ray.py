"""A Ray Train worker as one of our ranks: `TorchTrainer(train_loop(train, url), ...)`. Runs in the
worker.

Ray starts the workers, joins their process group and restarts them after a failure, on as many
nodes as it has then; we keep the batch, the data and the state. Written from Ray's documentation
(2.x): ray.train.get_context(), ray.train.report(), and the variables that TorchTrainer sets.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from harness.core.world import BadInput
from harness.worker import session as sessions

if TYPE_CHECKING:
    from harness.worker.session import Session

WorkerFunction = Callable[["Session", dict[str, Any]], None]


def train_loop(train: WorkerFunction, url: str, **options: Any) -> Callable[[dict[str, Any]], None]:
    """Return a function for TorchTrainer's `train_loop_per_worker`. It attaches to the run at
    `url`, calls `train(run, config)`, and ends the run when that returns. `options` are those of
    `harness.attach`. Ray handles what it raises (BadInput, StoreError, what `train` raises): its
    FailureConfig says how often it restarts the workers."""

    def per_worker(config: dict[str, Any]) -> None:
        run = attach(url, **options)
        train(run, config)
        run.finish()

    return per_worker


def attach(url: str, **options: Any) -> Session:
    """Call `harness.attach` in the worker function of a TorchTrainer, with Ray's ranks. Raises
    BadInput if these or the process group are not what Ray documents."""
    from ray import train

    context = train.get_context()
    said = {
        "RANK": context.get_world_rank(),
        "WORLD_SIZE": context.get_world_size(),
        "LOCAL_RANK": context.get_local_rank(),
        "LOCAL_WORLD_SIZE": context.get_local_world_size(),
    }
    for name, value in said.items():
        if os.environ.setdefault(name, str(value)) != str(value):
            raise BadInput(
                f"{name}={os.environ[name]} in this worker's environment, but Ray says {value}; "
                "call harness.adapters.ray.attach in the worker function of a TorchTrainer only"
            )
    if said["WORLD_SIZE"] > 1 and not dist.is_initialized():
        raise BadInput(
            f"Ray says that there are {said['WORLD_SIZE']} workers, but they have no process group "
            "of torch; use ray.train.torch.TorchTrainer, which joins them"
        )
    if torch.cuda.is_available():
        from ray.train.torch import get_device

        wanted = torch.device("cuda", said["LOCAL_RANK"])
        if (found := get_device()) != wanted:
            raise BadInput(
                f"wanted {wanted} for local rank {said['LOCAL_RANK']}, found that Ray has given "
                f"this worker {found}; give each worker one GPU (ScalingConfig(use_gpu=True))"
            )
    return sessions.attach(run=url, **options)


def report(run: Session, **metrics: Any) -> None:
    """Report this step's number and `metrics` by `ray.train.report`. Ray requires every worker to
    call it equally often. Its checkpoints are not needed."""
    from ray import train

    train.report({"step": run.step, **metrics})
