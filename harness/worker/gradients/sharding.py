"""The checks of whether a model can be trained as it is, and FSDP2 as a function that shards one.
Runs in the worker.

Parameters whose gradients a strategy could not sum are refused by name before training begins.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from harness.core.mesh import EXPERT_DIMS
from harness.core.world import BadInput
from harness.worker.batches.loader import seed_everything
from harness.worker.process_group import broadcast_all, same_everywhere
from storage.tensors.save_ranks import gathered
from storage.tensors.tensor_names import plain_name

# Initialization of models that were built on the meta device.

# Sets the values of a whole tensor in place, given its name in the model and the tensor.
Init = Callable[[str, torch.Tensor], None]


class Materials:
    """The tensors of a model on the meta device, initialized for one part of the model at a time by
    `init`, or without it by the `reset_parameters()` of the module that holds them."""

    def __init__(self, model: nn.Module, device: torch.device, seed: int, init: Init | None = None):
        self._device, self._seed, self._init = device, seed, init
        self._modules = {id(m): plain_name(name) for name, m in model.named_modules()}
        named = [*model.named_parameters(), *model.named_buffers()]
        self._tensors = {id(t): (plain_name(name), t) for name, t in named if t.is_meta}
        self._given: set[int] = set()
        # in the newest part, the tensors that tensor parallelism splits: (place, name, layout)
        self._whole: list[tuple[dict[str, Any], str, Any]] = []

    def fill(self, part: nn.Module) -> None:
        """Initialize the meta tensors of `part`, as whole tensors. Raises BadInput for modules
        without `reset_parameters`. A module that resets its children's parameters as well must have
        no blocks among its children."""
        made: dict[int, torch.Tensor] = {}  # by id of the meta tensor, so that tied ones stay tied
        for module in dict.fromkeys(_children_first(part)):
            found = False
            kinds: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for kind in kinds:
                for name, t in kind.items():
                    if t is None or not t.is_meta:
                        continue
                    if id(t) not in made:
                        made[id(t)], found = self._empty(t), True
                    if hasattr(t, "placements"):
                        self._whole.append((kind, name, t))
                    kind[name] = made[id(t)]
            if found and self._init is None:
                self._reset(module)
        if self._init is not None:
            for i, tensor in made.items():
                self._draw(self._init, self._tensors[i][0], tensor)

    def split(self) -> None:
        """Cut, in the part that was filled last, the tensors that tensor parallelism splits."""
        cut: dict[int, Any] = {}
        for kind, name, t in self._whole:
            if id(t) not in cut:
                mine = distribute_tensor(
                    kind[name].detach(), t.device_mesh, t.placements, src_data_rank=None
                )
                cut[id(t)] = nn.Parameter(mine, t.requires_grad)
            kind[name] = cut[id(t)]
        self._whole.clear()

    def _empty(self, t: torch.Tensor) -> torch.Tensor:
        if id(t) in self._given:
            raise BadInput(
                f"{self._tensors[id(t)][0]}: wanted a tensor of one block, found it in another one "
                "as well (tied weights): give harness.fsdp2 blocks=[...] that leave both of their "
                "modules to the root"
            )
        self._given.add(id(t))
        empty = torch.empty(t.shape, dtype=t.dtype, device=self._device)
        if not isinstance(t, nn.Parameter):
            return empty
        made = nn.Parameter(empty, t.requires_grad)
        made.__dict__.update(t.__dict__)
        return made

    def _reset(self, module: nn.Module) -> None:
        reset = getattr(module, "reset_parameters", None) or getattr(
            module, "_reset_parameters", None
        )
        where = self._modules.get(id(module), "") or "the model itself"
        if reset is None:
            raise BadInput(
                f"{where} ({type(module).__name__}) has parameters or buffers on the meta device "
                "and no reset_parameters() to give them values; wanted one (it sets what the "
                "module itself holds), harness.fsdp2(..., init=fn) with a function of name and "
                "tensor, or a model built on the CPU"
            )
        self._seeded(where, reset)

    def _draw(self, init: Init, name: str, tensor: torch.Tensor) -> None:
        if tensor.is_floating_point():
            tensor.data.fill_(torch.nan)
        self._seeded(name, lambda: init(name, tensor))
        if tensor.is_floating_point() and tensor.numel() and bool(tensor.detach().amin().isnan()):
            raise BadInput(
                f"harness.fsdp2(init=...): wanted values for all of {name} {tuple(tensor.shape)}, "
                "found some that were left out, or NaN; set them in place, such as "
                "tensor.normal_(std=0.02)"
            )

    def _seeded(self, name: str, draw: Callable[[], None]) -> None:
        seed_everything(xxhash.xxh3_64_intdigest(f"{self._seed} {name}".encode()) >> 1)
        with torch.no_grad():
            draw()
        # so that the script's next random numbers do not depend on what was drawn here
        seed_everything(self._seed)


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules in the order in which constructors run, children first."""
    for child in module.children():
        yield from _children_first(child)
    yield module


FSDP_DIMS = ("dp_replicate", "dp_shard")  # the dimensions of `run.mesh` that FSDP2 works over
CP_DIMS = ("dp_replicate", "dp_shard_cp")  # the same with context parallelism


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the part of `run.mesh` that FSDP2 works over. Ranks of `cp` hold shards of the
    parameters like those of `dp_shard`, and their gradients are parts of the same sum. Raises
    BadInput."""
    if mesh["cp"].size() == 1:
        return mesh[FSDP_DIMS]

    needs(DeviceMesh, "attach(mesh={'cp': ...})", "_concatenate")
    together = mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    return DeviceMesh._concatenate([mesh["dp_replicate"], together])


def needs(thing: object, what: str, *names: str) -> None:
    """Raise BadInput if this torch's FSDP2 lacks any of `names`: the setters came with 2.8, and the
    private names (exact sums use FSDP2's internals) may change with any version. `what`: the user's
    feature, for the message."""
    if missing := [name for name in names if not hasattr(thing, name)]:
        raise BadInput(
            f"{what} wants an FSDP2 with {', '.join(missing)}; torch {torch.__version__} has none. "
            "Use torch 2.13 (2.8 or newer may do), or leave harness.fsdp2 out: plain data "
            "parallelism needs torch 2.6"
        )


def is_sharded(model: nn.Module) -> bool:
    return any(isinstance(p, DTensor) for p in model.parameters())


def groups_of(module: Any) -> list[Any]:
    """Return the parameter groups that FSDP2 gathers at one of its modules. There is no public name
    for them. Raises BadInput if this torch has them elsewhere."""
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
    """Return the parameter groups of FSDP2 in the whole model. Raises BadInput as `groups_of`."""
    found = {
        id(group): group
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in groups_of(module)
    }
    return list(found.values())


def check_sharding(model: nn.Module, run_mesh: DeviceMesh | None = None) -> None:
    """Raise BadInput, naming parameters, unless all trained parameters are sharded by FSDP2 over
    one mesh of all ranks, in rank order, or over `FSDP_DIMS` of `run_mesh`.

    Only then is every element of every gradient on one rank, and summed over all ranks. Frozen
    parameters may be plain.
    """
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
    """Return how many ranks hold the same elements of a tensor; of a plain one, all do. `ranks`:
    the number of ranks that hold any of it."""
    if not hasattr(p, "placements"):
        return ranks
    count: int = ranks // p.device_mesh.size()
    for size, at in zip(p.device_mesh.shape, p.placements, strict=True):
        count *= size if at.is_replicate() else 1
    return count


def sharded_as(like: Any, local: torch.Tensor) -> torch.Tensor:
    """Return a DTensor with the mesh, placements and shape of `like`, from this rank's part."""
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
    """Return whether tensor or expert parallelism split this parameter, and FSDP2 has not sharded
    it yet."""
    return hasattr(p, "placements") and "dp_replicate" not in (p.device_mesh.mesh_dim_names or ())


def holds_experts(module: nn.Module) -> bool:
    """Return whether `harness.expert_parallel` distributed the module's own parameters."""
    return any(
        "ep" in (p.device_mesh.mesh_dim_names or ())
        for p in module.parameters(recurse=False)
        if hasattr(p, "device_mesh")
    )


def check_unwrapped(model: nn.Module) -> None:
    """Raise BadInput for wrappers that exchange gradients themselves; only a loop of the script's
    own can have them."""
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
    """Raise BadInput for parameters and buffers that have no values yet."""
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
    """The groups of ranks that share parts of a model. `mesh`: of `FSDP_DIMS`, or of one dimension.
    `alike`: the ranks with the same parts of tensors that tensor parallelism splits; None: none are
    split. `stage`: the ranks with the same pipeline stage; None: all. `experts`: the mesh of
    `EXPERT_DIMS`, if there are modules that hold experts; those are sharded first."""

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
    """Shard a model by FSDP2 over all ranks: each of `blocks` (default: the members of every
    ModuleList) and the root. Return the model.

    `groups`: None for a mesh of one dimension. `how`: further arguments of `fully_shard`.

    One block at a time moves to the device, takes rank 0's values and is sharded, so the whole
    model never lies on one device. Tensors on the meta device get their values then; see
    `Materials`.
    """
    if groups is None:
        groups = ShardGroups(init_device_mesh(device.type, (dist.get_world_size(),)))
    if blocks is None:  # inner blocks first
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
        model_to_device(part, device)
        same_everywhere(part, groups.stage, shards=False)
        materials.split()
        if groups.alike is not None:
            with torch.no_grad():  # parameters that are already sharded have been shared before
                broadcast_all([p for p in part.parameters() if is_split(p)], groups.alike)
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
    """Make backwards gather each part when it is needed, not while the part before it computes.
    Collectives on the CPU block, so prefetching would cost a block of memory and save no time.
    (`[]` would select FSDP2's own choice; prefetching the part itself gathers nothing.)"""
    part.set_modules_to_backward_prefetch([part])


def _cut(ranks: int, p: Any) -> Any:
    """Return how `ranks` ranks share the experts of one rank of `ep`: whole experts, or else a cut
    of each expert's first dimension. Raises BadInput if neither divides evenly."""
    own: Sequence[int] = p.to_local().shape
    for dim in range(min(2, len(own))):
        if own[dim] % ranks == 0:
            return Shard(dim)
    raise BadInput(
        f"experts: wanted {own[0]} of them on each rank of ep, or their first dimension, in equal "
        f"parts for {ranks} ranks of dp_shard, found {tuple(p.shape)} in all; use another mesh"
    )


def offloaded_to_host(model: nn.Module) -> list[Any]:
    """Return the parameters that FSDP2 keeps in the host's memory."""
    groups = fsdp_groups(model) if is_sharded(model) else ()
    handles = [handle for group in groups for handle in group.fsdp_params]
    return [handle.sharded_param for handle in handles if handle.offload_to_cpu]


def model_to_device(model: nn.Module, device: torch.device) -> None:
    """Move the model to the device, except parameters that FSDP2 keeps in the host's memory."""
    if offloaded := {id(p) for p in offloaded_to_host(model)}:
        model._apply(  # type: ignore[no-untyped-call]
            lambda t: t if id(t) in offloaded else t.to(device)
        )
    else:
        model.to(device)


def drawn_by_shard(model: nn.Module, group: dist.ProcessGroup) -> list[str]:
    """Return names of weights whose shards are the same on all ranks though they are not constant.
    Most likely each rank drew its shard from the same seed, so that the initial weights depend on
    the world. Collective."""
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
