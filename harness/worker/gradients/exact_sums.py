"""Gradient sums that do not depend on how ranks divide the work: `attach(reduce="exact")`. Runs in
the worker.

A floating-point sum depends on order and grouping, and so on the number of ranks. An integer sum
does not. Each micro-batch's gradient is rounded to integer multiples of a unit that is a power of
two; these are added as integers, first on the rank, then by an integer all-reduce (or
reduce-scatter), and the total is divided once by the global weight. So every bit of the weights is
a function of (seed, step), whatever the world size, the shares, and resizes and resumes.

    q = round(g * 2**shift)            per element and micro-batch; exact if |g| >= 2**24 units
                                       (float32 has 24 bits)
    total = sum of q                   64-bit ("exact") or 32-bit integers ("exact32"): that many
                                       bytes go over the wire
    gradient = total / (weight * 2**shift), correctly rounded but for 2**-53

Every parameter has its own unit, so neither buckets nor shards matter, and DDP and FSDP2 give the
same bits. The unit follows from the greatest |gradient| of any micro-batch so far (`Scales`); this
history is a few integers and is part of snapshots. A gradient that does not fit is detected before
anything is applied, by all ranks alike, and the step's micro-batches are repeated with another
unit. Nothing is known of a parameter whose gradients were all zero so far; 64 bits are wide enough
for a guess (FIRST), which suits peaks from 2**(FIRST + LEAST_BITS - bits) to 2**FIRST, about 1e-9
to 3e4; a peak outside makes the step repeat. 32 bits are too few for a guess, so "exact32" uses 64
in a run's first step, and a parameter whose first gradient comes later makes that step repeat. NaN
and infinity make the whole gradient NaN: a GradScaler skips such a step on all ranks, and without
one the session stops.

Error of one element of the sum S of M micro-batches, relative to the true sum of what backward
computed. L: bit length of M; u = 2**-24; peak: the greatest |gradient| of that parameter in one
micro-batch, where a peak of an earlier step is halved for each step since then:
    exact      M * 2**(L + 9 - 64) * peak + u |S|       4.4e-16 * M * peak for M = 8..15
    exact32    M * 2**(L + 3 - 32) * peak + u |S|       3.0e-8 * M * peak for M = 8..15
    float32    (M - 1) * u * sum of |g|                 6.0e-8 * (M - 1) * sum of |g|
A guessed unit (a parameter's first step) is 2**(FIRST - bits), so its error is
M * 2**(FIRST + L - 64) + u |S|: 1.1e-13 * M for M = 8..15. So the error of "exact" is below that of
float32 for every element whose sum of |g| is above 1e-8 of the peak (M <= 15), and for smaller ones
it is still less than 1e-14 of the peak. "exact32" has the greatest elements' error for all
elements: it is below that of float32 only where the sum of |g| is above half the peak. Therefore
64 bits are the default; use 32 where the network is the bottleneck.

Exact sums cannot make up for another kind of accelerator, another version of torch, or another
number of CPU threads. These are recorded and compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from harness.core.world import BadInput
from harness.worker.gradients.fixed_point import NAMES, WORDS, Counting, Division
from harness.worker.gradients.parallel import BUCKET_BYTES, Replicated, Sharded, laid_out, staged_on
from harness.worker.gradients.sharding import (
    fsdp_groups,
    is_sharded,
    needs,
    offloaded_to_host,
    sharded_as,
)
from storage.tensors.tensor_names import plain_name

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


# Exact sums of gradients of models that FSDP2 shards.


@dataclass
class _Group:
    """A group of parameters that FSDP gathers and shards together."""

    handles: list[Any]  # FSDPParam
    members: list[int]  # the indices of their parameters
    units: list[list[int]]  # the same indices, cut into groups that are rounded together
    process_group: Any
    # (numel,) integers, whole parameters one after the other; only while a step needs it
    totals: torch.Tensor | None = None
    wire: torch.Tensor | None = None  # (ranks * columns,): the same, each rank's rows together
    # (columns,): this rank's part; each parameter's rows are padded to as many as rank 0 has
    mine: torch.Tensor | None = None
    work: Any = None


class ExactSharded(Sharded):
    """FSDP2 without its gradient exchange. When the backward of a block ends, its whole gradients
    are turned into integers and freed. Where `tp` splits a parameter, each of its ranks does so
    with its part; ranks of `cp` add their parts of a micro-batch's gradient as integers.

    After the last micro-batch's backward of a block its integers are reduce-scattered. Until then
    each rank holds integers for the whole model (`word` / 8 bytes per parameter), as FSDP2 holds
    gradients under set_requires_gradient_sync(False); with one micro-batch per rank, only for the
    blocks whose exchange is under way.
    """

    may_repeat = True

    def __init__(
        self,
        model: nn.Module,
        word: int = 64,
        device_mesh: DeviceMesh | None = None,
        names: Sequence[str] = (),
    ):
        """`device_mesh`: the mesh of all ranks, if the run has one. `names`: names of all trained
        parameters of the whole model, if `model` is a pipeline stage of it. Raises BadInput for a
        mesh or model that exact sums do not support."""
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
        self._shapes: dict[int, torch.Size] = {}  # of whole parameters, or of this tp rank's part
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
            # It finds no gradients, exchanges nothing, and frees the whole parameters.
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
        """Add a block's gradients to its integers, when its backward has ended; send the integers
        after the last micro-batch."""
        if group.totals is None and group.mine is None:
            sizes = [self._shapes[i].numel() for i in group.members]
            group.totals = torch.zeros(
                sum(sizes), dtype=self.counting.integers, device=self.counting.device
            )
        grads: dict[int, torch.Tensor] = {}
        for i, handle in zip(group.members, group.handles, strict=True):
            whole = getattr(handle, "_unsharded_param", None)
            if whole is not None and whole.grad is not None:
                # Sums that tp left pending are done here, the same way in every replica.
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
            # the number of ranks with as much as rank 0; the next may have less, others nothing
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
        # torch 2.13 renamed the function
        scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        group.work = scatter(group.mine, group.wire, group=group.process_group, async_op=True)

    def _columns(self, i: int, world: int) -> int:
        """Return the number of elements of parameter i that rank 0 keeps."""
        shape = self._shapes[i]
        return -(-shape[0] // world) * math.prod(shape[1:])

    def again(self) -> bool:
        self.counting.must_be_done(self._last)
        for group in self._groups:
            if group.mine is None:
                self._take(group)  # it took no part in the forward
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
            totals, grads = list[torch.Tensor](), list[torch.Tensor]()
            for i in group.members:
                p: Any = self.parameters[i]
                grad = torch.empty_like(p.to_local(), memory_format=torch.contiguous_format)
                totals.append(group.mine[column : column + grad.numel()])
                grads.append(grad.view(-1))
                p.grad = sharded_as(p, grad)
                column += self._columns(i, group.process_group.size())
            self.counting.division(group.members, totals, grads)(weight)
            group.mine = None
        self.counting.applied()

    def norm(self) -> torch.Tensor:
        grads: list[Any] = [p.grad for p in self.parameters if self._is_counted(p)]
        parts = [grad.to_local().view(-1) for grad in grads]
        alone = self.counting.world == 1
        # the groups of ranks that together hold one copy (of a stage)
        copy = [] if alone else [self._groups[0].process_group]
        if self._split is not None:
            copy.append(self._split.get_group())
        return self.counting.norm(parts, copy, self._stages)

    def _is_counted(self, p: Any) -> bool:
        """Return whether this rank's gradient of p counts in the norm: what every rank of `tp` has
        counts on the first of them only."""
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


@dataclass
class _Unit:
    """A group of parameters whose gradients are turned into integers together."""

    members: list[int]
    total: torch.Tensor  # (n,) integers, a piece of a bucket
    awaited: int  # members whose gradients come whole
    here: int = 0  # how many of them have come in this micro-batch


BUCKETS_ALONE = 4  # of a single rank: times the size of a bucket that is sent


class ExactReplicated(Replicated):
    """Exact sums where every rank holds the whole model. A parameter's gradient is turned into
    integers as soon as backward has computed it, and is then freed.

    Needs `word` / 8 bytes of memory per parameter more than `Replicated`. Between a backward and
    `divide`, `p.grad` is None. Where a gradient comes in several parts for one micro-batch, floats
    are added in `p.grad`, in the order of the backwards, until the micro-batch is over.
    """

    may_repeat = True

    def __init__(
        self,
        model: nn.Module,
        word: int = 64,
        bucket_bytes: int = BUCKET_BYTES,
        group: dist.ProcessGroup | None = None,
        names: Sequence[str] = (),
    ):
        """`names`: names of all trained parameters of the whole model, if `model` is a pipeline
        stage of it. `group`: the ranks that sum; None: all."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.counting = Counting(
            parameters, {id(p): plain_name(n) for n, p in model.named_parameters()}, word, names
        )
        self._index = {p: i for i, p in enumerate(parameters)}
        super().__init__(parameters, bucket_bytes, group)
        self.sums = NAMES[word]
        self._last = False  # the last micro-batch of a step has begun
        self._division: Division | None = None

    def _build(self, bucket_bytes: int) -> None:
        # alone, nothing is sent while the backward goes on: fewer and larger buckets
        super()._build(bucket_bytes * (1 if self._is_shared else BUCKETS_ALONE))
        self._lay_out()

    def _lay_out(self) -> None:
        """Allocate the integers of all parameters, in the type that the next step needs."""
        pieces = [(len(flat), self.counting.integers, flat.device) for flat in self._flats]
        self._all_sums, self._sums = laid_out(pieces)
        self._totals: list[torch.Tensor] = []  # by index of the parameter
        self._units: list[_Unit] = []
        self._unit_of: list[_Unit] = []  # by index of the parameter
        for p in self.parameters:
            flat, view = self._flats[self._bucket_of[p]], self._views[p]
            first = view.storage_offset() - flat.storage_offset()
            self._totals.append(self._sums[self._bucket_of[p]][first : first + p.numel()])
        for bucket in range(len(self._flats)):
            # in the order in which they lie in the bucket
            inside = [i for i, p in enumerate(self.parameters) if self._bucket_of[p] == bucket][
                ::-1
            ]
            offset = 0
            for members in self.counting.units(inside):
                size = sum(self.parameters[i].numel() for i in members)
                total = self._sums[bucket][offset : offset + size]
                self._units.append(_Unit(members, total, len(members)))
                offset += size
        by_index = {i: unit for unit in self._units for i in unit.members}
        self._unit_of = [by_index[i] for i in range(len(self.parameters))]
        self._learn_parts()

    def _learn_parts(self) -> None:
        for unit in self._units:
            unit.awaited = sum(i not in self.counting.in_parts for i in unit.members)

    def start(self, micro_batches: int) -> None:
        self.counting.start(micro_batches)

    def micro(self, last: bool, filler: bool = False) -> None:
        self._close()
        super().micro(last)
        self._armed = self._last = last
        self.counting.micro()
        for p in self.parameters:
            p.grad = None  # so that it holds this micro-batch's gradient only

    def _ready(self, p: nn.Parameter) -> None:
        index = self._index[p]
        if index in self.counting.in_parts:
            return  # autograd adds the parts
        if not self.counting.see(index):
            p.grad = None  # the step will be repeated
            return
        unit = self._unit_of[index]
        unit.here += 1
        if unit.here < unit.awaited:
            return
        self._take(unit)
        if self._armed:
            self._missing[self._bucket_of[p]] -= unit.awaited
            while len(self._sent) < len(self._flats) and self._missing[len(self._sent)] <= 0:
                self._send(len(self._sent))

    def _take(self, unit: _Unit) -> None:
        """Turn the unit's gradients of this micro-batch into integers and free them, except those
        that come in parts."""
        unit.here = 0
        members = [i for i in unit.members if i not in self.counting.in_parts]
        grads = [self.parameters[i].grad for i in members]
        whole = [g for g in grads if g is not None]
        if len(whole) == len(unit.members):
            self.counting.add(unit.members, whole, unit.total)
        else:  # some parameters took no part in the forward
            for i, g in zip(members, grads, strict=True):
                if g is not None:
                    self.counting.add([i], [g], self._totals[i])
        for i in members:
            self.parameters[i].grad = None

    def _close(self) -> None:
        """Add, at the end of a micro-batch, the gradients that came in parts."""
        for i in sorted(self.counting.in_parts):
            p = self.parameters[i]
            if p.grad is not None:
                self.counting.add([i], [p.grad], self._totals[i])
                p.grad = None

    def micro_done(self) -> None:
        for unit in self._units:
            if unit.here:
                self._take(unit)

    def _send(self, bucket: int) -> None:
        self._sent.append(self._sum_over_group(self._sums[bucket]))

    def again(self) -> bool:
        self.counting.must_be_done(self._last)
        self.micro_done()
        self._close()
        while len(self._sent) < len(self._flats):  # parameters that took no part in the forward
            self._send(len(self._sent))
        # made here, since a device is at work until the step is judged
        views = [self._views[p].view(-1) for p in self.parameters]
        self._division = self.counting.division(range(len(views)), self._totals, views)
        repeat = self.counting.agree()
        for work in self._sent:
            if work is not None:
                work.wait()
        self._armed = self._last = False
        if repeat:
            self._learn_parts()
            self._clear()
        return repeat

    def reduce(self) -> None:
        self.counting.must_not_repeat(self.again)

    def divide(self, weight: float | torch.Tensor) -> None:
        assert self._division is not None, "no step has been judged"
        self._division(weight)
        for p in self.parameters:
            p.grad = self._views[p]
        self.counting.applied()

    def norm(self) -> torch.Tensor:
        return self.counting.norm(self._wholes, stages=self.stages)

    def _clear(self) -> None:
        if self._sums and self._sums[0].dtype is not self.counting.integers:
            self._lay_out()
        else:
            for total in self._all_sums:
                total.zero_()
        self.counting.clear()

    def zero(self) -> None:
        for p in self.parameters:
            p.grad = None
        self._clear()

    def state_dict(self) -> dict[str, Any]:
        return self.counting.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counting.load_state_dict(state)
        self._learn_parts()
        self._clear()


def exact_strategy_for(
    model: nn.Module,
    reduce: str,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    names: Sequence[str] = (),
) -> ExactReplicated | ExactSharded:
    """Return the exact strategy for a model. `reduce`: "exact" (64 bits) or "exact32". `group`: the
    ranks that sum; None: all. `mesh`: the mesh of all ranks, if the run has one. `names`: names of
    all trained parameters of the whole model, if `model` is a pipeline stage of it. Raises BadInput
    for a model or optimizer that exact sums do not support."""
    if not is_sharded(model):
        replicated = ExactReplicated(model, WORDS[reduce], group=group, names=names)
        staged_on(replicated, mesh)
        return replicated
    check_elementwise(optimizers, "fsdp2")
    return ExactSharded(model, WORDS[reduce], mesh, names)


def check_elementwise(optimizers: Sequence[torch.optim.Optimizer], what: str) -> None:
    """Raise BadInput for optimizers whose result depends on where a parameter is cut. `what`: the
    name of what cuts parameters, for the message."""
    if any(
        group.get("fused") and p.device.type == "cpu"
        for o in optimizers
        for group in o.param_groups
        for p in group["params"][:1]
    ):
        # Measured with torch 2.13, AVX2: fused Adam and SGD compute the last n % 8 elements of a
        # tensor differently. The ordinary optimizers (foreach or not) do not, nor do their
        # elementwise kernels.
        raise BadInput(
            f"exact sums with {what} need an optimizer that treats all elements alike; on a CPU "
            "make it with fused=False"
        )
