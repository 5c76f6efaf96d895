"""Exact sums (`exact.py`) of what FSDP2 shards. Runs in the worker."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from harness.core.world import BadInput
from harness.worker.counting import Counting
from harness.worker.parallel import Sharded
from harness.worker.rounding import NAMES
from harness.worker.sharding import fsdp_groups, needs, offloaded_to_host, sharded_as
from storage.names import plain_name

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass
class _Group:
    """The parameters that FSDP gathers and shards together."""

    handles: list[Any]  # FSDPParam
    members: list[int]  # which parameters they are
    units: list[list[int]]  # the same, cut into what is turned into integers together
    process_group: Any
    # (numel,) integers, whole parameters one after the other; only while a step needs it
    totals: torch.Tensor | None = None
    wire: torch.Tensor | None = None  # (ranks * columns,): the same, each rank's rows together
    # (columns,): what this rank keeps, each parameter's rows padded to those of rank 0
    mine: torch.Tensor | None = None
    work: Any = None


class ExactSharded(Sharded):
    """FSDP2 without its gradient exchange: whole gradients of a block become integers when its
    backward ends, and are let go. Where a parameter is split by `tp`, each of its ranks does so
    with its part; ranks of `cp` add their parts of a micro-batch's gradient as integers.

    After the last micro-batch's backward of a block its integers are reduce-scattered. Until then
    each rank holds integers for the whole model (`word` / 8 bytes per parameter), like FSDP2 does
    with gradients under set_requires_gradient_sync(False); with one micro-batch per rank only for
    the blocks whose exchange is under way.
    """

    may_repeat = True

    def __init__(
        self,
        model: nn.Module,
        word: int = 64,
        device_mesh: DeviceMesh | None = None,
        names: Sequence[str] = (),
    ):
        """`device_mesh`: of all ranks; `names`: of the parameters that train of the whole model,
        where this is a stage of it. Raises BadInput."""
        super().__init__(model, device_mesh)
        self.sums = NAMES[word]
        self.counting = Counting(
            self.parameters,
            {id(p): plain_name(n) for n, p in model.named_parameters()},
            word,
            names,
        )
        self._last = self._filler = False
        stages = 1 if device_mesh is None else device_mesh["pp"].size()
        self._stages = None if stages == 1 else device_mesh.get_group("pp")  # type: ignore[union-attr]
        if self.replica_ranks > stages > 1:
            raise BadInput(
                f"reduce={self.sums!r} sums within stages of a pipeline over dp_shard and "
                f"dp_replicate; found replicas of {self.replica_ranks} ranks for {stages} stages: "
                "use reduce='fast', or a mesh without tp"
            )
        if offloaded_to_host(model):
            raise BadInput(
                f"reduce={self.sums!r} sums on the device, found a model that FSDP2 keeps in the "
                "host's memory (offload=True, CPUOffloadPolicy); leave that out, or use "
                "reduce='fast'"
            )
        mesh: Any = self.parameters[0].device_mesh  # type: ignore[attr-defined]
        # the ranks at the same place of all copies of the model; None: there is one copy
        self._copies = mesh.get_group("dp_replicate") if mesh.ndim > 1 else None
        self._parts, self._split = 1, None
        if device_mesh is not None:
            self._parts = device_mesh["cp"].size()
            self._split = device_mesh["tp"] if device_mesh["tp"].size() > 1 else None
        self._shapes: dict[int, torch.Size] = {}  # of whole parameters, or of tp's parts
        self._groups: list[_Group] = []
        index = {id(p): i for i, p in enumerate(self.parameters)}
        for param_group in fsdp_groups(model):
            self._watch(param_group, index)
        for root in self._roots:
            root.set_requires_gradient_sync(False)

    def _watch(self, param_group: Any, index: dict[int, int]) -> None:
        needs(
            param_group,
            "reduce='exact' with fsdp2",
            "fsdp_params",
            "_reduce_scatter_process_group",
            "post_backward",
        )
        for handle in param_group.fsdp_params:
            needs(handle, "reduce='exact' with fsdp2", "_orig_size", "_get_grad_inner_tensor")
        handles = [h for h in param_group.fsdp_params if id(h.sharded_param) in index]
        for handle in handles:
            if handle.fsdp_placement.dim != 0:
                raise BadInput(
                    "exact sums know fsdp2 with rows sharded (dimension 0); use "
                    "harness.fsdp2(model, run)"
                )
        members = [index[id(h.sharded_param)] for h in handles]
        self._shapes.update(zip(members, (h._orig_size for h in handles), strict=True))
        group = _Group(
            handles,
            members,
            self.counting.units(members),
            param_group._reduce_scatter_process_group,
        )
        self._groups.append(group)
        fsdp_post_backward = param_group.post_backward

        def post_backward(*unused: Any) -> None:
            self._take(group)
            # finds no gradients, gathers nothing, and frees the whole parameters
            fsdp_post_backward(*unused)

        param_group.post_backward = post_backward

    def start(self, micro_batches: int) -> None:
        self.counting.start(micro_batches * self._parts)

    def micro(self, last: bool, filler: bool = False) -> None:
        self._last, self._filler = last, filler
        for root in self._roots:
            root.set_is_last_backward(last)
        self.counting.micro()

    def micro_done(self) -> None: ...

    def _take(self, group: _Group) -> None:
        """The backward of a block has ended."""
        if group.totals is None and group.mine is None:
            sizes = [self._shapes[i].numel() for i in group.members]
            group.totals = torch.zeros(
                sum(sizes), dtype=self.counting.integers, device=self.counting.device
            )
        grads: dict[int, torch.Tensor] = {}
        for i, handle in zip(group.members, group.handles, strict=True):
            whole = getattr(handle, "_unsharded_param", None)
            if whole is not None and whole.grad is not None:
                # what tp has left to sum is summed here, the same way in every replica
                grads[i], whole.grad = handle._get_grad_inner_tensor(whole.grad), None
                if not self.counting.see(i):
                    raise BadInput(
                        f"the gradient of {self.counting.name_of(i)} came in two parts for one "
                        "micro-batch; exact sums of an fsdp2 model need it whole: call each "
                        "sharded block once in a forward and step.backward once for each "
                        "micro-batch, and with activation checkpointing use use_reentrant=False"
                    )
        if grads and not self._filler:
            assert group.totals is not None, "gradients came after the last backward of this block"
            offset = 0
            for unit in group.units:
                for members in [unit] if all(i in grads for i in unit) else [[i] for i in unit]:
                    size = sum(self._shapes[i].numel() for i in members)
                    if members[0] in grads:
                        self.counting.add(
                            members,
                            [grads[i] for i in members],
                            group.totals[offset : offset + size],
                        )
                    offset += size
        grads.clear()
        if self._last and group.totals is not None:
            self._exchange(group)

    def _exchange(self, group: _Group) -> None:
        assert group.totals is not None
        world = group.process_group.size()
        columns = [self._columns(i, world) for i in group.members]
        if world == 1:
            group.mine, group.totals = group.totals, None
            return
        wire = torch.zeros(
            world, sum(columns), dtype=self.counting.integers, device=self.counting.device
        )
        offset = column = 0
        for i, width in zip(group.members, columns, strict=True):
            whole = group.totals[offset : offset + self._shapes[i].numel()]
            # ranks whose share is as large as rank 0's; the next may have some, others none
            full = len(whole) // width if width else 0
            wire[:full, column : column + width] = whole[: full * width].view(full, width)
            rest = whole[full * width :]
            if len(rest):
                wire[full, column : column + len(rest)] = rest
            offset, column = offset + len(whole), column + width
        group.totals, group.wire = None, wire.view(-1)
        group.mine = torch.empty(
            sum(columns), dtype=self.counting.integers, device=self.counting.device
        )
        # the new name, from torch 2.13 on
        scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        group.work = scatter(group.mine, group.wire, group=group.process_group, async_op=True)

    def _columns(self, i: int, world: int) -> int:
        """Elements of parameter i that rank 0 keeps."""
        shape = self._shapes[i]
        return -(-shape[0] // world) * math.prod(shape[1:])

    def again(self) -> bool:
        self.counting.must_be_done(self._last)
        for group in self._groups:
            if group.mine is None:
                self._take(group)  # no part of it was in the forward
        repeat = self.counting.agree()
        for group in self._groups:
            if group.work is not None:
                group.work.wait()
            if self._copies is not None and group.mine is not None:
                dist.all_reduce(group.mine, group=self._copies)
            group.work = group.wire = None
        self._last = False
        if repeat:
            self._clear()
        return repeat

    def reduce(self) -> None:
        self.counting.must_not_repeat(self.again)

    def divide(self, weight: float | torch.Tensor) -> None:
        for group in self._groups:
            assert group.mine is not None
            column = 0
            for i in group.members:
                p: Any = self.parameters[i]
                grad = torch.empty_like(p.to_local(), memory_format=torch.contiguous_format)
                self.counting.write(
                    i, group.mine[column : column + grad.numel()], weight, grad.view(-1)
                )
                p.grad = sharded_as(p, grad)
                column += self._columns(i, group.process_group.size())
            group.mine = None
        self.counting.applied()

    def norm(self) -> torch.Tensor:
        grads: list[Any] = [p.grad for p in self.parameters if self._is_counted(p)]
        parts = [grad.to_local().view(-1) for grad in grads]
        alone = self.counting.world == 1
        # the ranks that hold a copy (of a stage) together
        copy = [] if alone else [self._groups[0].process_group]
        if self._split is not None:
            copy.append(self._split.get_group())
        return self.counting.norm(parts, copy, self._stages)

    def _is_counted(self, p: Any) -> bool:
        """Of what every rank of `tp` has, the first one's."""
        if self._split is None or self._split.get_local_rank() == 0:
            return True
        names = p.device_mesh.mesh_dim_names
        return "tp" in names and p.placements[names.index("tp")].is_shard()

    def _clear(self) -> None:
        for group in self._groups:
            group.totals = group.wire = group.mine = None
        self.counting.clear()

    def zero(self) -> None:
        super().zero()
        self._clear()

    def state_dict(self) -> dict[str, Any]:
        return self.counting.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counting.load_state_dict(state)
