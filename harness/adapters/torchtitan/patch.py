"""The adapter for an unchanged torchtitan Trainer: it adds the overrides of
`harness.adapters.torchtitan`, and makes parallelism and batch fit any world. Runs in the worker.

It knows torchtitan only through its module; docs/trainers/torchtitan.md states what is guaranteed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from harness.adapters import framework_claim
from harness.core.mesh import ModelMesh
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
    mesh = framework_claim.told_mesh()
    if mesh is None and run.replica_ranks > 1:
        raise BadInput(
            f"--replica-ranks {run.replica_ranks}: wanted a mesh, from which torchtitan knows how "
            "these ranks split the model, such as --mesh tp=2"
        )
    check_parallelism(config.parallelism, mesh or ModelMesh())
    if mesh is not None:
        told = lay_out(config.parallelism, mesh.sizes(run.world) | {"ep": mesh.ep})
    else:
        told = fit_degrees(config.parallelism, run.world)
    if told:
        run.print(f"harness: {told}")
    micro_batches = fit_batch(config.training)
    asked = {target if isinstance(target, str) else target[0] for target in config.override.imports}
    for name in ("snapshots", "data", "validation"):
        if f"{OVERRIDES}.{name}" not in asked:
            options = {"micro_batches": micro_batches} if name == "snapshots" else {}
            config.override.imports.append((f"{OVERRIDES}.{name}", options))


# torchtitan's names of the dimensions of a mesh
DEGREES = {
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
    "ep": "expert_parallel_degree",
}


def check_parallelism(parallelism: Any, mesh: ModelMesh) -> None:
    """Raise BadInput for a model that is split into pipeline stages, or over ranks that are no copy
    of the run's mesh."""
    if (stages := max(parallelism.pipeline_parallel_degree, mesh.pp)) > 1:
        raise BadInput(
            f"parallelism.pipeline_parallel_degree={stages}: wanted 1; torchtitan's pipeline "
            "stages are not built: leave them out (and pp out of --mesh), or run it with --adapt "
            "none, and it keeps its own checkpoints"
        )
    asked = {dim: getattr(parallelism, DEGREES[dim]) for dim in ("cp", "tp", "ep")}
    if missing := {d: n for d, n in asked.items() if n > 1 and getattr(mesh, d) != n}:
        said = ", ".join(f"parallelism.{DEGREES[dim]}={n}" for dim, n in missing.items())
        wanted = ",".join(f"{dim}={n}" for dim, n in asked.items() if n > 1)
        more = "dp_shard=N," if "ep" in missing else ""
        raise BadInput(
            f"{said}: the nodes must know which ranks make a copy of the model; wanted `harness "
            f"run --mesh {more}{wanted}`, found the mesh {mesh}"
        )


def lay_out(parallelism: Any, sizes: Mapping[str, int]) -> str:
    """Set all degrees to the sizes of the run's mesh. Return a description of the change."""
    found = {DEGREES[name]: size for name, size in sizes.items() if name in DEGREES}
    changed = {n: s for n, s in found.items() if getattr(parallelism, n) != s}
    for name, size in changed.items():
        setattr(parallelism, name, size)
    told = ", ".join(f"{name}={size}" for name, size in changed.items())
    return f"{told}, as the mesh says" if told else ""


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
