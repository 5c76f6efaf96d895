"""The adapter for an unchanged torchtitan Trainer: it adds the overrides of
`harness.adapters.torchtitan`, and makes parallelism and batch fit any world. Runs in the worker.

It knows torchtitan only through its module; docs/trainers/torchtitan.md states what is guaranteed.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from harness.adapters import framework_claim
from harness.core.world import BadInput

if TYPE_CHECKING:
    from harness.worker.session import Session

PATCHES = {"torchtitan.trainer": "harness.adapters.torchtitan.patch:patch"}
OVERRIDES = "harness.adapters.torchtitan.overrides"
KNOWN = {  # methods of Trainer that we replace, and their parameters
    "init_distributed": ("self",),
    "train_step": ("self", "data_iterator"),
    "forward_backward_step": ("self", "input_dict", "labels", "global_valid_tokens"),
    "should_continue_training": ("self",),
}


def patch(module: ModuleType) -> None:
    """Patch `module`, which is torchtitan.trainer."""
    trainer: Any = module.Trainer
    plain = trainer.init_distributed

    def init_distributed(self: Any) -> Any:
        if (
            may_adapt(self.config)
            and (run := framework_claim.claim("torchtitan", hide=False)) is not None
        ):
            for name, parameters in KNOWN.items():
                method = getattr(trainer, name)
                known = plain if name == "init_distributed" else method
                framework_claim.refuse_unlike(f"Trainer.{name}", known, parameters, version())
            # torchtitan does this when it joins the process group, which exists already
            torch.autograd.set_multithreading_enabled(False)
            adopt(self.config, run)
        return plain(self)

    trainer.init_distributed = init_distributed


def version() -> str:
    from importlib.metadata import version

    return f"torchtitan {version('torchtitan')}"


def joined() -> Session:
    """Return the run, also for an override that was requested by name. Raises BadInput."""
    gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    # attaching seeds the generators, which torchtitan has already seeded
    with torch.random.fork_rng(gpus):
        run = framework_claim.claim("torchtitan", by_name=True, hide=False)
    assert run is not None
    return run


def may_adapt(config: Any) -> bool:
    """Return False for a configuration that only prepares or simulates a training."""
    playing = config.comm.mode in ("fake_backend", "local_tensor")
    return not (config.checkpoint.create_seed_checkpoint or playing)


def adopt(config: Any, run: Session) -> None:
    """Make a Trainer.Config fit this world, and request our overrides. Raises BadInput."""
    if config.comm.mode != "default":
        raise BadInput(
            f"comm.mode={config.comm.mode!r}: wanted 'default', the process group is the run's; or "
            "run it with --adapt none, and it keeps its own checkpoints"
        )
    check_parallelism(config.parallelism)
    if told := fit_degrees(config.parallelism, run.world):
        run.print(f"harness: {told}")
    micro_batches = fit_batch(config.training)
    asked = {target if isinstance(target, str) else target[0] for target in config.override.imports}
    for name in ("snapshots", "data", "validation"):
        if f"{OVERRIDES}.{name}" not in asked:
            options = {"micro_batches": micro_batches} if name == "snapshots" else {}
            config.override.imports.append((f"{OVERRIDES}.{name}", options))


def check_parallelism(parallelism: Any) -> None:
    """Raise BadInput for parallelism that splits a model in another way than FSDP2 does."""
    for name in ("tensor", "context", "pipeline", "expert"):
        degree = getattr(parallelism, f"{name}_parallel_degree")
        if degree > 1:
            raise BadInput(
                f"parallelism.{name}_parallel_degree={degree}: wanted 1, elastic runs are "
                "data-parallel (replicated, FSDP2 or both) so far; or run it with --adapt none, "
                "and it keeps its own checkpoints"
            )


def fit_degrees(parallelism: Any, world: int) -> str:
    """Set data parallelism over `world` ranks, as close as possible to what was requested; the
    results are the same. Return a description of the change, "" for none."""
    replicate = parallelism.data_parallel_replicate_degree
    shard = parallelism.data_parallel_shard_degree
    if shard == 1:
        fitted = (world, 1)
    elif replicate == 1:
        fitted = (1, -1)
    elif shard > 1 and world % shard == 0:
        fitted = (world // shard, shard)
    elif shard == -1:
        fitted = (max(n for n in range(1, replicate + 1) if world % n == 0), -1)
    else:
        fitted = (1, -1)
    parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree = fitted
    if fitted == (replicate, shard) or world == replicate * shard:
        return ""
    return (
        f"data_parallel_replicate_degree={fitted[0]} and data_parallel_shard_degree={fitted[1]} on "
        f"{world} ranks, in the place of {replicate} and {shard}"
    )


def fit_batch(training: Any) -> int:
    """Return the micro-batches of a step; 0: one per rank of the run's first world. torchtitan
    requires a global batch that this world divides, so its own is unset. Raises BadInput."""
    asked, micro = training.global_batch_size, training.local_batch_size
    if asked < 0:
        return 0
    if asked == 0 or asked % micro:
        raise BadInput(
            f"training.global_batch_size={asked}: wanted a multiple of training.local_batch_size "
            f"({micro})"
        )
    training.global_batch_size = -1
    return int(asked) // int(micro)
