"""Overrides for torchtitan's own extension points: `--override.imports
harness.adapters.torchtitan.overrides.snapshots harness.adapters.torchtitan.overrides.data
harness.adapters.torchtitan.overrides.validation`. Runs in the worker.

`harness run` adds them automatically; see docs/trainers/torchtitan.md.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torchtitan.components.checkpointer.base import BaseCheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.validate import Validator
from torchtitan.config.override import derive, override

from harness.adapters.torchtitan.data import TitanLoaderConfig
from harness.adapters.torchtitan.loop import TitanSnapshotsConfig
from harness.adapters.torchtitan.patch import joined
from harness.loops.own_loop import script_world


@override(target=BaseCheckpointManager.Config, fqns=["checkpoint"], description="our snapshots")  # type: ignore[untyped-decorator]
def snapshots(config: Any, micro_batches: int = 0) -> Any:
    """Use the run's snapshots; torchtitan's own checkpoints continue beside them if enabled.
    `micro_batches`: per step, over all ranks: the global batch divided by
    training.local_batch_size; 0: one per rank of the run's first world."""
    return derive(
        config, TitanSnapshotsConfig, enable=True, inner=config, micro_batches=micro_batches
    )


@override(target=BaseDataLoader.Config, fqns=["dataloader"], description="the same data anywhere")  # type: ignore[untyped-decorator]
def data(config: Any) -> Any:
    """Read the training's data, the same on any number of ranks."""
    run = joined()
    streams = script_world(run, run.replica_ranks)
    return derive(config, TitanLoaderConfig, inner=config, streams=streams)


@override(target=Validator.Config, fqns=["validator"], description="the same data anywhere")  # type: ignore[untyped-decorator]
def validation(config: Any) -> Any:
    """Read the validation's data, the same on any number of ranks, if its steps are limited."""
    if not config.enable or config.steps < 0:
        return config
    run = joined()
    first = script_world(run, run.replica_ranks)
    loader = derive(
        config.dataloader, TitanLoaderConfig, inner=config.dataloader, streams=first,
        steps=config.steps,
    )  # fmt: skip
    steps = -(-config.steps * first // (run.world // run.replica_ranks))
    return dataclasses.replace(config, dataloader=loader, steps=steps)
