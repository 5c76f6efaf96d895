"""Which models can be trained as they are, and FSDP2 as a function applied to one. Runs in the
worker.

What a strategy could not sum right is refused by name before anything is trained.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn

from harness.core.mesh import EXPERT_DIMS
from harness.core.world import BadInput
from harness.worker.broadcast import same_everywhere, share
from harness.worker.materialize import Init, Materials
from storage.ranks import gathered

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


FSDP_DIMS = ("dp_replicate", "dp_shard")  # of `run.mesh`, over which FSDP2 works
CP_DIMS = ("dp_replicate", "dp_shard_cp")  # the same where ranks share positions as well


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Of `run.mesh`, what FSDP2 works over. Ranks of `cp` hold parts of the parameters like those
    of `dp_shard`, and their gradients are parts of the same sum. Raises BadInput."""
    if mesh["cp"].size() == 1:
        return mesh[FSDP_DIMS]
    from torch.distributed.device_mesh import DeviceMesh

    needs(DeviceMesh, "attach(mesh={'cp': ...})", "_concatenate")
    together = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    return DeviceMesh._concatenate([mesh["dp_replicate"], together])


def needs(thing: object, what: str, *names: str) -> None:
    """Raises BadInput if this torch's FSDP2 has other names than those that are used here: the
    setters came with 2.8, and what has no public name (exact sums reach into FSDP2) may change with
    any version."""
    if missing := [name for name in names if not hasattr(thing, name)]:
        raise BadInput(
            f"{what} wants an FSDP2 with {', '.join(missing)}; torch {torch.__version__} has none. "
            "Use torch 2.13 (2.8 or newer may do), or leave harness.fsdp2 out: plain data "
            "parallelism needs torch 2.6"
        )


def is_sharded(model: nn.Module) -> bool:
    from torch.distributed.tensor import DTensor

    return any(isinstance(p, DTensor) for p in model.parameters())


def groups_of(module: Any) -> list[Any]:
    """What FSDP2 gathers together at one of its modules. No public name gives it. Raises
    BadInput if this torch has it elsewhere."""
    what = "a sharded model"
    needs(module, what, "_get_fsdp_state")
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        found = list(state._fsdp_param_groups)
    else:
        needs(state, what, "_fsdp_param_group")  # before torch 2.12: one, or None
        found = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    for group in found:
        needs(group, what, "fsdp_params")
    return found


def fsdp_groups(model: nn.Module) -> list[Any]:
    """What FSDP2 gathers and shards together, in the whole model. Raises BadInput as
    `groups_of`."""
    from torch.distributed.fsdp import FSDPModule

    found = {
        id(group): group
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in groups_of(module)
    }
    return list(found.values())


def check_sharding(model: nn.Module, run_mesh: DeviceMesh | None = None) -> None:
    """Raises BadInput, naming parameters, unless all that trains is sharded by FSDP2 over one mesh
    of all ranks, in their order, or over `FSDP_DIMS` of `run_mesh`.

    Only then is every element of every gradient on one rank, and summed over all ranks. Frozen
    parameters may be plain.
    """
    from torch.distributed.tensor import DTensor

    use = (
        "use harness.fsdp2(model, run), or fully_shard with a mesh of one dimension over all "
        "ranks, or prepare(strategy=...) one of your own that sums them"
    )
    named = list(model.named_parameters())
    sharded: list[tuple[str, Any]] = [(name, p) for name, p in named if isinstance(p, DTensor)]
    managed = {
        id(handle.sharded_param) for group in fsdp_groups(model) for handle in group.fsdp_params
    }
    if not managed:
        raise BadInput(
            f"{_some(n for n, _ in sharded)}: wanted parameters sharded by fully_shard, found "
            "DTensors without it (tensor parallelism? distribute_tensor?), whose gradients are "
            f"not summed over the ranks' samples; {use}"
        )
    if plain := [name for name, p in named if p.requires_grad and not isinstance(p, DTensor)]:
        raise BadInput(
            f"{_some(plain)}: wanted every parameter that trains to be sharded, found plain ones "
            "beside DTensors: nobody would sum their gradients. Give fully_shard no "
            "ignored_params and apply it to the whole model as well as to its blocks, or freeze "
            "them"
        )
    world = dist.get_world_size()
    dims = CP_DIMS if run_mesh is not None and run_mesh["cp"].size() > 1 else FSDP_DIMS
    meshes: dict[str, str] = {}
    for name, p in sharded:
        mesh = p.device_mesh
        names = mesh.mesh_dim_names or ("?",) * mesh.ndim
        if mesh.ndim != 1 and names not in (dims, (*dims, "tp"), EXPERT_DIMS):
            found = " x ".join(f"{n}={size}" for n, size in zip(names, mesh.shape, strict=True))
            raise BadInput(
                f"{name}: wanted a mesh of one dimension, found {found} (HSDP, or tensor "
                f"parallelism beside fsdp2); use attach(mesh={{'dp_shard': ..., 'tp': ...}}) and "
                "its run.mesh for these, or prepare(strategy=...) one of your own"
            )
        at = p.placements[1 if mesh.ndim > 1 else 0]
        if at.is_replicate() or at.is_partial():
            raise BadInput(f"{name}: wanted its rows sharded over the ranks, found {at}; {use}")
        if id(p) not in managed:
            raise BadInput(
                f"{name}: wanted it sharded by fully_shard, found a DTensor of another origin "
                f"(distribute_tensor?); {use}"
            )
        ranks, wanted = mesh.mesh.flatten().tolist(), list(range(world))
        if run_mesh is not None and mesh.ndim > 1 and names != EXPERT_DIMS:
            own = ("dp_replicate", "dp_shard", "cp", *names[2:])
            wanted = run_mesh[own].mesh.flatten().tolist()
        if ranks != wanted:
            raise BadInput(
                f"{name}: wanted a mesh over ranks {_row(wanted)} in this order, found one over "
                f"ranks {ranks}; {use}"
            )
        meshes.setdefault(mesh.device_type, name)
    if len(meshes) > 1:
        found = ", ".join(f"{name} on {device}" for device, name in meshes.items())
        raise BadInput(f"wanted one mesh for all parameters, found {found}; {use}")


def _row(ranks: list[int]) -> str:
    in_a_row = ranks == list(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]} to {ranks[-1]}" if in_a_row else str(ranks)


def _some(names: Iterable[str]) -> str:
    first = list(names)
    return ", ".join(first[:3]) + (f" and {len(first) - 3} more" if len(first) > 3 else "")


def copies_of(p: Any, ranks: int) -> int:
    """How many ranks hold the same elements of this sharded tensor (a DTensor). `ranks`: that hold
    a part of it, or the same as others."""
    count: int = ranks // p.device_mesh.size()
    for size, at in zip(p.device_mesh.shape, p.placements, strict=True):
        count *= size if at.is_replicate() else 1
    return count


def sharded_as(like: Any, local: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that lies on the ranks as `like` (a DTensor) does."""
    from torch.distributed.tensor import DTensor

    made: torch.Tensor = DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return made


def is_split(p: Any) -> bool:
    """By tensor or expert parallelism, and not sharded yet."""
    return hasattr(p, "placements") and "dp_replicate" not in (p.device_mesh.mesh_dim_names or ())


def holds_experts(module: nn.Module) -> bool:
    """Were its own parameters given out by `harness.expert_parallel`?"""
    return any(
        "ep" in (p.device_mesh.mesh_dim_names or ())
        for p in module.parameters(recurse=False)
        if hasattr(p, "device_mesh")
    )


def check_unwrapped(model: nn.Module) -> None:
    """Raises BadInput for wrappers that exchange gradients themselves; only a loop of one's own
    can have them."""
    for name, module in model.named_modules():
        fsdp = sys.modules.get("torch.distributed.fsdp")
        if isinstance(module, nn.parallel.DistributedDataParallel) or (
            fsdp and isinstance(module, fsdp.FullyShardedDataParallel)
        ):
            raise BadInput(
                f"{name or 'the model'} is a {type(module).__name__}, which exchanges gradients "
                "itself, as means over ranks; wanted the model without it: run.steps(...) does "
                "that part, and harness.fsdp2(model, run) shards"
            )


def check_real(model: nn.Module) -> None:
    """Raises BadInput for parameters that have no values yet."""
    if meta := [
        name for name, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta
    ]:
        raise BadInput(
            f"{_some(meta)}: wanted parameters and buffers with values, found them on the meta "
            "device; harness.fsdp2(model, run) gives them values that do not depend on the world, "
            "or build the model on a real device"
        )


@dataclass(frozen=True)
class ShardGroups:
    """Who shares what of a model. `mesh`: of `FSDP_DIMS`, or of one dimension. `alike`: the ranks
    that hold the same parts of what is split by tensor parallelism; None: nothing is. `stage`:
    those that hold the same stage of a pipeline; None: all. `experts`: the mesh of `EXPERT_DIMS`,
    if there are modules that hold experts; those are sharded first."""

    mesh: DeviceMesh
    alike: dist.ProcessGroup | None = None
    stage: dist.ProcessGroup | None = None
    experts: DeviceMesh | None = None


def shard(
    model: nn.Module,
    device: torch.device,
    blocks: Sequence[nn.Module] | None = None,
    seed: int = 0,
    groups: ShardGroups | None = None,
    init: Init | None = None,
    **how: Any,
) -> nn.Module:
    """FSDP2 over all ranks: each of `blocks` (default: the members of every ModuleList) and the
    root.

    `groups`: None for a mesh of one dimension. `how`: more for `fully_shard`.

    One block at a time goes to the device, takes rank 0's values and is sharded: the whole model
    never lies on one device. What is on the meta device gets its values there; see `Materials`.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if groups is None:
        groups = ShardGroups(init_device_mesh(device.type, (dist.get_world_size(),)))
    if blocks is None:  # those inside others first
        blocks = [
            block
            for m in reversed(list(model.modules()))
            if isinstance(m, nn.ModuleList)
            for block in m
        ]
    materials = Materials(model, device, seed, init)
    experts = [module for module in model.modules() if holds_experts(module)]
    for part in dict.fromkeys([*experts, *blocks, model]):
        materials.fill(part)
        to_device(part, device)
        same_everywhere(part, groups.stage, shards=False)
        materials.split()
        if groups.alike is not None:
            with torch.no_grad():  # what is sharded already has been given out
                share([p for p in part.parameters() if is_split(p)], groups.alike)
        if part in experts:
            assert groups.experts is not None
            among = groups.experts[EXPERT_DIMS[:2]]
            cut = functools.partial(_cut, among.size(1))
            fully_shard(part, mesh=among, shard_placement_fn=cut, **how)
        else:
            fully_shard(part, mesh=groups.mesh, **how)
        if device.type == "cpu":
            _fetch_none_ahead(part)
    return model


def _fetch_none_ahead(part: Any) -> None:
    """In a backward each part is gathered when it is wanted, not while the one before it computes:
    collectives of the CPU wait, so that would be a block more in memory for no time. (`[]` would
    ask for FSDP2's own choice; of itself there is nothing left to gather.)"""
    part.set_modules_to_backward_prefetch([part])


def _cut(ranks: int, p: Any) -> Any:
    """How `ranks` share one rank of `ep`'s part of its experts: whole experts, or else columns."""
    from torch.distributed.tensor import Shard

    own: Sequence[int] = p.to_local().shape
    for dim in range(min(2, len(own))):
        if own[dim] % ranks == 0:
            return Shard(dim)
    raise BadInput(
        f"experts: wanted {own[0]} of them on each rank of ep, or their first dimension, in equal "
        f"parts for {ranks} ranks of dp_shard, found {tuple(p.shape)} in all; use another mesh"
    )


def offloaded_to_host(model: nn.Module) -> list[Any]:
    """Parameters that FSDP2 keeps in the host's memory."""
    groups = fsdp_groups(model) if is_sharded(model) else ()
    handles = [handle for group in groups for handle in group.fsdp_params]
    return [handle.sharded_param for handle in handles if handle.offload_to_cpu]


def to_device(model: nn.Module, device: torch.device) -> None:
    """As `model.to(device)`, but parameters that FSDP2 keeps in the host's memory stay there."""
    if offloaded := {id(p) for p in offloaded_to_host(model)}:
        model._apply(  # type: ignore[no-untyped-call]
            lambda t: t if id(t) in offloaded else t.to(device)
        )
    else:
        model.to(device)


def drawn_by_shard(model: nn.Module, group: dist.ProcessGroup) -> list[str]:
    """Names of weights whose shards are the same on all ranks though they are not constant: most
    likely each rank drew its own part from the same seed, so that what the run begins with depends
    on the world. Collective."""
    mine: dict[str, str] = {}
    for name, p in model.named_parameters():
        if any(placement.is_shard() for placement in getattr(p, "placements", ())):
            local = p.detach().to_local()  # type: ignore[attr-defined]
            few = local.reshape(-1)[:4096].float().cpu()
            if few.numel() and bool((few != few[0]).any()):
                mine[name] = (
                    f"{tuple(local.shape)} {xxhash.xxh3_64_hexdigest(few.numpy().tobytes())}"
                )
    every = gathered(mine, group)
    return [
        name
        for name in every[0]
        if len(every) > 1 and all(other.get(name) == every[0][name] for other in every)
    ]
