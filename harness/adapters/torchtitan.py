"""torchtitan's own extension points: `--override.imports harness.adapters.torchtitan.snapshots
harness.adapters.torchtitan.data harness.adapters.torchtitan.validation`. Runs in the worker.

`harness run` asks for them by itself; docs/trainers/torchtitan.md.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torchtitan.components.checkpointer.base import BaseCheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.validate import Validator
from torchtitan.config.override import derive, override

from harness.adapters.titan import joined
from harness.adapters.titan_data import TitanLoaderConfig
from harness.adapters.titan_loop import TitanSnapshotsConfig


@override(target=BaseCheckpointManager.Config, fqns=["checkpoint"], description="our snapshots")  # type: ignore[untyped-decorator]
def snapshots(config: Any, micro_batches: int = 0) -> Any:
    """The run's snapshots; torchtitan's own checkpoints go on beside them if they are enabled.
    `micro_batches`: of a step, on all ranks together: the global batch divided by
    training.local_batch_size; 0: one for each rank of the run's first world."""
    return derive(
        config, TitanSnapshotsConfig, enable=True, inner=config, micro_batches=micro_batches
    )


@override(target=BaseDataLoader.Config, fqns=["dataloader"], description="the same data anywhere")  # type: ignore[untyped-decorator]
def data(config: Any) -> Any:
    """The training's data, the same on any number of ranks."""
    return derive(config, TitanLoaderConfig, inner=config, streams=joined().script_world())


@override(target=Validator.Config, fqns=["validator"], description="the same data anywhere")  # type: ignore[untyped-decorator]
def validation(config: Any) -> Any:
    """The validation's data, the same on any number of ranks, if it has a number of steps."""
    if not config.enable or config.steps < 0:
        return config
    run = joined()
    first = run.script_world()
    loader = derive(
        config.dataloader, TitanLoaderConfig, inner=config.dataloader, streams=first,
        steps=config.steps,
    )  # fmt: skip
    steps = -(-config.steps * first // run.world)
    return dataclasses.replace(config, dataloader=loader, steps=steps)
