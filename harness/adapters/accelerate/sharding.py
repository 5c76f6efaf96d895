"""Models that Accelerate shards by FSDP2 or DeepSpeed over the ranks of each copy. Runs in the
worker."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed.fsdp as torch_fsdp

from harness.core.world import BadInput
from harness.worker.session import Session

# what the variables of Accelerate's settings begin with
SAID = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
SHARDING, UNABLE = ("FSDP", "DEEPSPEED"), ("MEGATRON_LM", "XLA")


def check(accelerator: Any, run: Session) -> None:
    """Raise BadInput if the Accelerator splits its model in a way that does not fit to this run."""
    kind, copy_ranks = accelerator.distributed_type.name, run.replica_ranks
    if accelerator.parallelism_config is not None:
        raise BadInput(
            "parallelism_config lays the ranks of one world out, so another world cannot go on "
            "with it; leave it out, and say how many ranks share a copy of the model: `harness run "
            "--mesh dp_shard=8`"
        )
    if kind in UNABLE:
        raise BadInput(
            f"wanted an Accelerator that shards by FSDP2 or DeepSpeed or not at all, found {kind}, "
            "which keeps its parts of the model in a form of its own; use "
            "FullyShardedDataParallelPlugin(fsdp_version=2)"
        )
    if kind == "FSDP" and not accelerator.is_fsdp2:
        raise BadInput(
            "FSDP of version 1 keeps its shards in flat buffers; use version 2: "
            "FullyShardedDataParallelPlugin(fsdp_version=2), FSDP_VERSION=2, or fsdp_version: 2 in "
            "the config file"
        )
    if kind in SHARDING and copy_ranks == 1:
        raise BadInput(
            f"{kind} shards the model over several ranks, and here each rank is a copy of the "
            "model; say how many ranks share one: `harness run --mesh dp_shard=8`"
        )
    if kind not in SHARDING and copy_ranks > 1:
        raise BadInput(
            f"{copy_ranks} ranks shall share a copy of the model, but the Accelerator splits none; "
            "give it fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2) or a "
            "deepspeed_plugin, or leave out --mesh"
        )


def variables_of(config: str) -> dict[str, str]:
    """Return the variables that `accelerate launch` makes of a file of `accelerate config`, other
    than those of the world. Raises BadInput."""
    from accelerate.commands import launch

    try:
        args = launch.launch_command_parser().parse_args(["--config_file", config, "script"])
        args, found, _ = launch._validate_launch_command(args)
        args.main_process_port = 0  # none is asked for
        if args.use_deepspeed:
            args.deepspeed_fields_from_accelerate_config = ",".join(found.deepspeed_config)
            _, made = launch.prepare_deepspeed_cmd_env(args)
        else:
            made = launch.prepare_multi_gpu_env(args)
    except (OSError, ValueError, SystemExit) as e:
        raise BadInput(f"ACCELERATE_CONFIG_FILE={config}: {e}") from e
    return {name: value for name, value in made.items() if name.startswith(SAID)}


@contextlib.contextmanager
def within(run: Session) -> Iterator[None]:
    """Let Accelerate, which shards over all ranks, shard over those of this rank's copy."""
    mesh, original = run.mesh["ranks"], torch_fsdp.fully_shard

    def fully_shard(module: Any, **how: Any) -> Any:
        return original(module, **{**how, "mesh": mesh})

    torch_fsdp.fully_shard = fully_shard
    try:
        yield
    finally:
        torch_fsdp.fully_shard = original
