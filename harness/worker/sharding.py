"""Which models can be trained as they are, and FSDP2 as a function applied to one. Runs in the
worker.

What a strategy could not sum right is refused by name before anything is trained.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn

from harness.core.world import BadInput
from harness.worker.broadcast import same_everywhere, share
from harness.worker.loader import seed_everything
from storage.ranks import gathered

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


FSDP_DIMS = ("dp_replicate", "dp_shard")  # of `run.mesh`, over which FSDP2 works


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
    meshes: dict[str, str] = {}
    for name, p in sharded:
        mesh = p.device_mesh
        names = mesh.mesh_dim_names or ("?",) * mesh.ndim
        if mesh.ndim != 1 and names not in (FSDP_DIMS, (*FSDP_DIMS, "tp")):
            dims = " x ".join(f"{n}={size}" for n, size in zip(names, mesh.shape, strict=True))
            raise BadInput(
                f"{name}: wanted a mesh of one dimension, found {dims} (HSDP, or tensor "
                f"parallelism beside fsdp2); use attach(mesh={{'dp_shard': ..., 'tp': ...}}) and "
                "its run.mesh for these, or prepare(strategy=...) one of your own"
            )
        at = p.placements[names.index("dp_shard")] if mesh.ndim > 1 else p.placements[0]
        if at.is_replicate() or at.is_partial():
            raise BadInput(f"{name}: wanted its rows sharded over the ranks, found {at}; {use}")
        if id(p) not in managed:
            raise BadInput(
                f"{name}: wanted it sharded by fully_shard, found a DTensor of another origin "
                f"(distribute_tensor?); {use}"
            )
        ranks, wanted = mesh.mesh.flatten().tolist(), list(range(world))
        if run_mesh is not None and mesh.ndim > 1:
            wanted = run_mesh[names].mesh.flatten().tolist()
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


def is_split(p: Any) -> bool:
    """By tensor parallelism, and not sharded yet."""
    return hasattr(p, "placements") and "dp_shard" not in (p.device_mesh.mesh_dim_names or ())


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


def shard(
    model: nn.Module,
    device: torch.device,
    blocks: Sequence[nn.Module] | None = None,
    seed: int = 0,
    mesh: DeviceMesh | None = None,
    replicas: dist.ProcessGroup | None = None,
    stage: dist.ProcessGroup | None = None,
) -> nn.Module:
    """FSDP2 over all ranks: each of `blocks` (default: the members of every ModuleList) and the
    root.

    `mesh`: of `FSDP_DIMS`; None: of one dimension. `replicas`: the ranks that hold the same parts
    of what is split by tensor parallelism; None: nothing is. `stage`: the ranks that hold the same
    stage of a pipeline; None: all.

    One block at a time goes to the device, takes rank 0's values and is sharded: the whole model
    never lies on one device. What is on the meta device gets its values there, whole, before it is
    sharded; see `materialize`.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if mesh is None:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    if blocks is None:  # those inside others first
        blocks = [
            block
            for m in reversed(list(model.modules()))
            if isinstance(m, nn.ModuleList)
            for block in m
        ]
    names = {id(m): name for name, m in model.named_modules()}
    made: dict[int, Any] = {}
    for part in [*blocks, model]:
        materialize(part, device, seed, names, made)
        part.to(device)
        same_everywhere(part, stage, shards=False)
        if replicas is not None:
            with torch.no_grad():  # what is sharded already has been given out
                share([p for p in part.parameters() if is_split(p)], replicas)
        fully_shard(part, mesh=mesh)
    return model


def materialize(
    part: nn.Module, device: torch.device, seed: int, names: dict[int, str], made: dict[int, Any]
) -> None:
    """Give values to what is on the meta device in `part`, by the `reset_parameters()` of the
    module that holds it.

    Each module's randomness is seeded by `seed` and its name, so neither the world nor the order of
    blocks matters. `names`: of modules, by id; `made`: meta tensor's id -> (it, what it became), so
    that tied ones stay tied. Raises BadInput for modules without `reset_parameters`; one that
    resets its children's parameters as well must not have blocks among them.
    """
    for module in dict.fromkeys(_children_first(part)):
        found = False
        for kind in (module._parameters, module._buffers):
            for name, t in kind.items():
                if t is None or not t.is_meta:
                    continue
                if id(t) not in made:
                    empty = torch.empty_like(t, device=device)
                    made[id(t)] = (
                        t,
                        nn.Parameter(empty, t.requires_grad)
                        if isinstance(t, nn.Parameter)
                        else empty,
                    )
                    made[id(t)][1].__dict__.update(t.__dict__)
                    found = True
                kind[name] = made[id(t)][1]
        if not found:
            continue
        reset = getattr(module, "reset_parameters", None) or getattr(
            module, "_reset_parameters", None
        )
        where = names.get(id(module), "") or "the model itself"
        if reset is None:
            raise BadInput(
                f"{where} ({type(module).__name__}) has parameters or buffers on the meta device "
                "and no reset_parameters() to give them values; wanted one (it sets what the "
                "module itself holds), or a model built on the CPU"
            )
        seed_everything(xxhash.xxh3_64_intdigest(f"{seed} {where}".encode()) >> 1)
        with torch.no_grad():
            reset()
        # and what the script draws next does not depend on which module was the last
        seed_everything(seed)


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    """As constructors run."""
    for child in module.children():
        yield from _children_first(child)
    yield module


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
