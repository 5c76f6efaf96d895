"""Data parallelism: summing a model's gradients over replicas. Runs in the worker.

Gradients are *sums* over samples (or tokens), divided once by the global weight, so ranks may do
different numbers of micro-batches. `Replicated` is our own reducer instead of torch's
DistributedDataParallel, which averages over ranks and rebuilds its buckets after the first step, so
that a resumed run would sum in another order than an uninterrupted one.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import utils
from torch.nn.utils import clip_grad

from harness.core.world import BadInput
from harness.worker.gradients.batch_norm import has_sync_norm
from harness.worker.gradients.sharding import (
    FSDP_DIMS,
    check_sharding,
    copies_of,
    is_sharded,
    needs,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# The norm of all gradients, computed only once: a trainer clips by the norm that our step records
# hold.

NAMES = ("_get_total_norm", "get_total_norm")  # of torch 2.6 and later


class NormOnce:
    """The newest 2-norm and weak references to its gradients, which it does not keep alive."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._norm: torch.Tensor | None = None
        self._asked = False

    def install(self) -> None:
        """Make torch's functions look here first from now on. Later calls do nothing."""
        if self._asked:
            return
        self._asked = True
        for module in (clip_grad, utils):
            for name in NAMES:
                if original := getattr(module, name, None):
                    setattr(module, name, self._asking(original))

    def note(self, grads: Sequence[torch.Tensor], norm: torch.Tensor) -> None:
        """Record the norm that torch would compute for these gradients. Ignored if any is not
        float32, since torch would round differently."""
        if self._asked and all(g.dtype == torch.float32 for g in grads):
            self._of = {id(g): (weakref.ref(g), g._version) for g in grads}
            self._norm = norm

    def forget(self) -> None:
        self._of, self._norm = {}, None

    def _known(self, grads: list[torch.Tensor]) -> bool:
        if len(grads) != len(self._of):
            return False
        for grad in grads:
            ref, version = self._of.get(id(grad), (None, -1))
            if ref is None or ref() is not grad or grad._version != version:
                return False
        return True

    def _asking(self, original: Any) -> Any:
        @functools.wraps(original)
        def total_norm(
            tensors: Any,
            norm_type: float = 2.0,
            error_if_nonfinite: bool = False,
            foreach: bool | None = None,
        ) -> torch.Tensor:
            grads = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            norm = self._norm
            if norm is None or error_if_nonfinite or norm_type != 2 or not self._known(grads):
                found: torch.Tensor = original(grads, norm_type, error_if_nonfinite, foreach)
                return found
            return norm.clone()

        return total_norm


once = NormOnce()  # of this process


BUCKET_BYTES = 25 << 20


class Strategy(Protocol):
    """The interface of a step to the parallelism.

    The ranks of a replica get the same micro-batches and the same random numbers, and call all
    methods together; how they divide the work inside a replica is up to the strategy. It must leave
    on every rank the sum of gradients over *replicas*. Losses, weights and samples are counted once
    for each replica, from its first rank. `equal_rounds`: its forward has collectives over
    replicas, so all must do the same number of micro-batches.
    """

    name: str
    equal_rounds: bool
    may_repeat: bool  # `again` may return True (exact.py)
    sums: str  # the attach(reduce=...) that it implements: "fast", "exact" or "exact32"
    replica_ranks: int  # ranks that together hold one copy of the model

    def start(self, micro_batches: int) -> None:
        """Prepare for steps of so many micro-batches, on all ranks together, before the first."""

    def micro(self, last: bool, filler: bool = False) -> None:
        """Prepare for the forward of a micro-batch. `last`: gradients are exchanged during its
        backward; `filler`: it does not count."""

    def micro_done(self) -> None:
        """Finish a micro-batch, after its backward."""

    def again(self) -> bool:
        """Return, after the last micro-batch, whether all ranks must repeat the step's
        micro-batches; the sums are then reset."""

    def reduce(self) -> None:
        """Wait until every gradient is the sum over all replicas."""

    def divide(self, weight: float | torch.Tensor) -> None: ...

    def norm(self) -> torch.Tensor:
        """Return the norm of all gradients of the model, each element counted once; 0-d, the same
        on all ranks."""

    def clip(self, coefficient: torch.Tensor) -> None: ...

    def zero(self) -> None: ...

    def share_found_inf(self, scaler: Any, optimizer: Any) -> None:
        """Make all ranks skip the step if a GradScaler found an overflow on any of them."""


class WholeStage:
    """A rank that holds a whole pipeline stage. `stages`: the group of ranks that hold the stages
    of its replica; None: it holds the whole model."""

    stages: dist.ProcessGroup | None = None

    def over_stages(self, norm: torch.Tensor) -> torch.Tensor:
        """Return the norm over all stages, given this stage's."""
        if self.stages is None:
            return norm
        square = norm**2
        dist.all_reduce(square, group=self.stages)
        return square.sqrt()

    def share_found_inf(self, scaler: Any, optimizer: Any) -> None:
        """Share the overflow flag between stages. Ranks of one stage have the same gradients, and
        so the same flag."""
        if self.stages is not None:
            _share_found_inf(scaler, optimizer, self.stages)


class Single(WholeStage):
    """The strategy of a single replica: there is nothing to sum, and gradients stay where autograd
    puts them, as in the script alone."""

    name, equal_rounds, may_repeat = "ddp", False, False
    sums, replica_ranks = "fast", 1

    def __init__(self, parameters: Iterable[nn.Parameter]):
        self.parameters = [p for p in parameters if p.requires_grad]

    def start(self, micro_batches: int) -> None: ...

    def micro(self, last: bool, filler: bool = False) -> None:
        self._make_dense()

    def micro_done(self) -> None: ...

    def again(self) -> bool:
        return False

    def reduce(self) -> None:
        """Set missing gradients to zero, of parameters that took no part in a forward, as on any
        other world."""
        self._make_dense()
        for p in self.parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)

    def _make_dense(self) -> None:
        """Make sparse gradients dense before others are added to them, as on other worlds: buckets
        are dense, and sparse sums have another order."""
        for p in self.parameters:
            if (grad := p.grad) is not None and grad.is_sparse:
                p.grad = grad.to_dense()

    def _grads(self) -> list[torch.Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    def divide(self, weight: float | torch.Tensor) -> None:
        if not _is_one(weight):
            for grad in self._grads():
                grad.div_(weight)

    def norm(self) -> torch.Tensor:
        grads = self._grads()
        norms = torch._foreach_norm(grads, 2.0, torch.float32)
        total = self.over_stages(torch.linalg.vector_norm(torch.stack(norms)))
        once.note(grads, total)
        return total

    def clip(self, coefficient: torch.Tensor) -> None:
        grads = self._grads()
        for dtype in {grad.dtype for grad in grads}:
            some = [grad for grad in grads if grad.dtype is dtype]
            torch._foreach_mul_(some, coefficient.to(dtype))

    def zero(self) -> None:
        for p in self.parameters:
            p.grad = None


def buckets_of(
    parameters: Iterable[nn.Parameter], bucket_bytes: int = BUCKET_BYTES
) -> list[list[nn.Parameter]]:
    """Return runs of neighbouring parameters of one dtype and device, of at most `bucket_bytes`
    each (or a single larger one)."""
    groups: list[list[nn.Parameter]] = []
    size = 0
    for p in parameters:
        nbytes = p.numel() * p.element_size()
        kind = (p.dtype, p.device)
        if (
            not groups
            or size + nbytes > bucket_bytes
            or (groups[-1][0].dtype, groups[-1][0].device) != kind
        ):
            groups.append([])
            size = 0
        groups[-1].append(p)
        size += nbytes
    return groups


PIECE_NUMEL = 64  # a piece begins at a multiple of so many elements, for the kernels' sake


def laid_out(
    pieces: Sequence[tuple[int, torch.dtype, torch.device]],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return zeros, in one tensor (n,) for each dtype and device, and its pieces, given by number
    of elements, dtype and device, in their order."""
    ends: dict[tuple[torch.dtype, torch.device], int] = {}
    begins = []
    for numel, dtype, device in pieces:
        begins.append(ends.get((dtype, device), 0))
        ends[dtype, device] = begins[-1] + -(-numel // PIECE_NUMEL) * PIECE_NUMEL
    wholes = {
        (dtype, device): torch.zeros(end, dtype=dtype, device=device)
        for (dtype, device), end in ends.items()
    }
    given = zip(pieces, begins, strict=True)
    cut = [wholes[dtype, device][first : first + n] for (n, dtype, device), first in given]
    return list(wholes.values()), cut


class Replicated(WholeStage):
    """The strategy where every rank holds the whole model. Gradients are summed over ranks in flat
    buckets, during the last backward: the first gradient of a step is copied into its place in the
    bucket, and autograd adds the others to it.

    `group`: the ranks that sum, which hold the same parameters; None: all ranks.

    Buckets are filled in reverse order of the parameters and sent in that fixed order, so the order
    of summation is a function of model and world only. They are sent during the last backward if,
    in the first step, each gradient came whole on all ranks; if some came in several parts (several
    backwards for one micro-batch, reentrant checkpointing), they are sent after it.

    `phase`: the current phase of a step; whether gradients come whole is found for each phase.
    """

    name, equal_rounds, may_repeat = "ddp", False, False
    sums, replica_ranks = "fast", 1

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        bucket_bytes: int = BUCKET_BYTES,
        group: dist.ProcessGroup | None = None,
    ):
        self.parameters = [p for p in parameters if p.requires_grad]
        # found now, as the world may be hidden later; None: there is none
        self._group = group or (dist.group.WORLD if dist.is_initialized() else None)
        self._flats: list[torch.Tensor] = []
        self._wholes: list[torch.Tensor] = []  # what the buckets are pieces of, one for each dtype
        self._views: dict[nn.Parameter, torch.Tensor] = {}
        self._bucket_of: dict[nn.Parameter, int] = {}
        self._build(bucket_bytes)
        self._armed = False  # buckets are sent as their gradients come
        self.phase = 0
        self._whole: dict[int, bool] = {}  # phase -> gradients come whole, on all ranks
        self._in_parts = False  # on this rank some came in parts
        self._came: set[nn.Parameter] = set()  # with a gradient in this micro-batch
        self._missing: list[int] = []
        self._sent: list[Any] = []
        self._hooks = [
            p.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]
            for p in self.parameters
        ]

    def release(self) -> None:
        """Let go of the parameters, which something else may train from now on."""
        for hook in self._hooks:
            hook.remove()
        self._flats, self._wholes = [], []
        self._views.clear()

    def _build(self, bucket_bytes: int) -> None:
        groups = buckets_of(reversed(self.parameters), bucket_bytes)
        self._sizes = [len(group) for group in groups]
        self._wholes, self._flats = laid_out(
            [(sum(p.numel() for p in g), g[0].dtype, g[0].device) for g in groups]
        )
        for number, (group, flat) in enumerate(zip(groups, self._flats, strict=True)):
            offset = 0
            for p in group:
                view = flat[offset : offset + p.numel()].view_as(p)
                self._views[p], self._bucket_of[p] = view, number
                p.grad = None
                offset += p.numel()

    def start(self, micro_batches: int) -> None: ...

    def micro(self, last: bool, filler: bool = False) -> None:
        self._came.clear()
        self._armed = last and self._whole.get(self.phase, False)
        if last:
            self._missing, self._sent = list(self._sizes), []

    def hold(self) -> None:
        """Let `reduce` send the gradients of this micro-batch, rather than its backward."""
        self._armed = False

    def take_up_grads(self) -> None:
        """Take up this micro-batch's gradients, where they were made without autograd's hooks."""
        for p in self.parameters:
            if p.grad is not None:
                self._ready(p)

    def micro_done(self) -> None: ...

    def again(self) -> bool:
        return False

    def _ready(self, p: nn.Parameter) -> None:
        self._adopt(p)
        if p in self._came:
            self._came_again()
        self._came.add(p)
        if not self._armed:
            return
        self._missing[self._bucket_of[p]] -= 1
        while len(self._sent) < len(self._flats) and self._missing[len(self._sent)] <= 0:
            self._send(len(self._sent))

    def _adopt(self, p: nn.Parameter) -> None:
        """Move a gradient that autograd or the script allocated to its place in a bucket."""
        view = self._views[p]
        if p.grad is not view and p.grad is not None:
            view.copy_(p.grad.to_dense() if p.grad.is_sparse else p.grad)
            p.grad = view

    def _came_again(self) -> None:
        """Note that a gradient of this micro-batch comes in several parts. Raises BadInput if the
        first part may have been sent."""
        self._in_parts = True
        if self._armed:
            raise BadInput(
                "a gradient came in two parts in one micro-batch (two backwards, or reentrant "
                "checkpointing), and whole in the first step; call step.backward as often for each "
                "micro-batch, from the first step on"
            )

    def _agree_on_parts(self) -> None:
        """Agree after the first step of a phase whether gradients come whole, so that all ranks
        send at the same points."""
        self._armed = False
        if self.phase not in self._whole:
            parts = torch.tensor([int(self._in_parts)], device=self._flats[0].device)
            if self._is_shared:
                dist.all_reduce(parts, op=dist.ReduceOp.MAX, group=self._group)
            self._whole[self.phase] = not int(parts)
        self._in_parts = False

    def _send(self, bucket: int) -> None:
        self._sent.append(self._sum_over_group(self._flats[bucket]))

    def _sum_over_group(self, flat: torch.Tensor) -> Any:
        return dist.all_reduce(flat, group=self._group, async_op=True) if self._is_shared else None

    @property
    def _is_shared(self) -> bool:
        return self._group is not None and self._group.size() > 1

    def reduce(self) -> None:
        if len(self._sent) < len(self._flats):  # some took no part in the last forward, or in any
            for p, view in self._views.items():
                if self._bucket_of[p] >= len(self._sent):
                    self._adopt(p)
                    if p.grad is None:
                        p.grad = view.zero_()
        while len(self._sent) < len(self._flats):
            self._send(len(self._sent))
        for work in self._sent:
            if work is not None:
                work.wait()
        self._agree_on_parts()

    def divide(self, weight: float | torch.Tensor) -> None:
        if not _is_one(weight):
            for flat in self._flats:
                flat.div_(weight)

    def norm(self) -> torch.Tensor:
        norms = [torch.linalg.vector_norm(flat, dtype=torch.float32) for flat in self._flats]
        total = self.over_stages(torch.linalg.vector_norm(torch.stack(norms)))
        once.note(list(self._views.values()), total)
        return total

    def clip(self, coefficient: torch.Tensor) -> None:
        for flat in self._flats:
            flat.mul_(coefficient.to(flat.dtype))

    def zero(self) -> None:
        for p in self.parameters:
            p.grad = None


class InParts:
    """The common part of strategies for models of which each rank holds parts. FSDP2 reduces in the
    backward of the last micro-batch. `group`: the ranks that hold a whole model, or several; None:
    all."""

    may_repeat, sums = False, "fast"

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None = None):
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self._group = group
        self._modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
        inside = {id(child) for m in self._modules for child in m.modules() if child is not m}
        self._roots = [m for m in self._modules if id(m) not in inside]
        self._copies_of: list[int] = []  # ranks of the group that hold the same elements

    def start(self, micro_batches: int) -> None: ...

    def micro(self, last: bool, filler: bool = False) -> None:
        for root in self._roots:
            root.set_requires_gradient_sync(last)
            root.set_is_last_backward(last)

    def micro_done(self) -> None: ...

    def again(self) -> bool:
        return False

    def _local(self) -> list[torch.Tensor]:
        return [local_part(p.grad) for p in self.parameters if p.grad is not None]

    def divide(self, weight: float | torch.Tensor) -> None:
        if not _is_one(weight):
            for grad in self._local():
                grad.div_(_beside(grad, weight))

    def norm(self) -> torch.Tensor:
        """Return the norm of all gradients. Every element is on as many ranks as `copies_of` says,
        so squares are divided by it and summed over ranks."""
        squares: dict[int, list[torch.Tensor]] = {}
        for p, copies in zip(self.parameters, self._copies_of, strict=True):
            if p.grad is not None:
                norm = torch.linalg.vector_norm(local_part(p.grad), dtype=torch.float32)
                squares.setdefault(copies, []).append(norm**2)
        sums = [torch.stack(some).sum() / copies for copies, some in squares.items()]
        held: Any = self.parameters[0]
        device = held.device_mesh.device_type if hasattr(held, "device_mesh") else held.device
        total = torch.stack(sums).sum().to(device)  # from the host, if offloaded
        dist.all_reduce(total, group=self._group)
        return total.sqrt()

    def clip(self, coefficient: torch.Tensor) -> None:
        for grad in self._local():
            grad.mul_(coefficient.to(grad))

    def zero(self) -> None:
        for p in self.parameters:
            p.grad = None

    def share_found_inf(self, scaler: Any, optimizer: Any) -> None:
        _share_found_inf(scaler, optimizer, self._group)


class Sharded(InParts):
    """The strategy for FSDP2, with parameters and gradients as DTensors. During the last backward,
    reduce-scatter sums gradients within a copy of the model, then all-reduce over copies, if there
    are several."""

    name, equal_rounds, replica_ranks = "fsdp2", True, 1

    def __init__(self, model: nn.Module, mesh: DeviceMesh | None = None):
        """`mesh`: the mesh of all ranks, if it has several dimensions. Raises BadInput for sharding
        whose sums would be wrong; see `check_sharding`."""
        check_sharding(model, mesh)
        super().__init__(model)
        stages = 1
        sharded: list[Any] = self.parameters
        if mesh is not None and any(p.device_mesh.ndim > 1 for p in sharded):
            self.replica_ranks, stages = mesh.size() // mesh[FSDP_DIMS].size(), mesh["pp"].size()
        ranks = dist.get_world_size() // stages
        self._copies_of = [copies_of(p, ranks) for p in self.parameters]
        needs(
            FSDPModule,
            "harness.fsdp2",
            "set_gradient_divide_factor",
            "set_force_sum_reduction_for_comms",
        )
        for module in self._modules:
            module.set_gradient_divide_factor(1.0)  # a sum, not a mean over ranks
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum

    def reduce(self) -> None:
        """Return at once: FSDP has waited for its reduce-scatters at the end of the backward."""


def _share_found_inf(scaler: Any, optimizer: Any, group: dist.ProcessGroup | None) -> None:
    for found in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)


def local_part(grad: Any) -> torch.Tensor:
    part: torch.Tensor = grad.to_local() if hasattr(grad, "to_local") else grad
    return part


def _beside(grad: torch.Tensor, weight: float | torch.Tensor) -> float | torch.Tensor:
    return weight.to(grad.device) if isinstance(weight, torch.Tensor) else weight


def _is_one(weight: float | torch.Tensor) -> bool:
    return isinstance(weight, float) and weight == 1.0


def check_fits(strategy: Strategy, reduce: str, replica_ranks: int) -> None:
    """Raise BadInput for what this strategy lacks or cannot do. `reduce`: the argument of `attach`;
    `replica_ranks`: the ranks of each replica of this world."""
    kind = f"the strategy {getattr(strategy, 'name', type(strategy).__name__)!r}"
    wanted = [n for n in (*Strategy.__annotations__, *vars(Strategy)) if not n.startswith("_")]
    if missing := [name for name in wanted if not hasattr(strategy, name)]:
        raise BadInput(
            f"{kind}: wanted all of harness.worker.gradients.parallel.Strategy, found no "
            f"{', '.join(missing)}"
        )
    if strategy.replica_ranks != replica_ranks:
        raise BadInput(
            f"{kind} holds a copy of the model on {_ranks(strategy.replica_ranks)}, this world's "
            f"replicas have {_ranks(replica_ranks)}; start its nodes with `harness run "
            f"--replica-ranks {strategy.replica_ranks}` (without an agent: "
            f"attach(replica_ranks={strategy.replica_ranks})), or prepare(strategy=...) one of "
            f"{_ranks(replica_ranks)}"
        )
    if strategy.sums != reduce:
        raise BadInput(
            f"{kind} makes sums of the kind {strategy.sums!r}, found attach(reduce={reduce!r}); "
            f"use attach(reduce={strategy.sums!r}), or another strategy"
        )


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


def strategy_for(
    model: nn.Module, group: dist.ProcessGroup | None = None, mesh: DeviceMesh | None = None
) -> Strategy:
    """Return the strategy for a model. `group`: the ranks that sum; None: all. `mesh`: the mesh of
    all ranks, if the run has one."""
    if is_sharded(model):
        return Sharded(model, mesh)
    alone = not dist.is_initialized() or dist.get_world_size(group) == 1
    strategy: Single | Replicated = (
        Single(model.parameters()) if alone else Replicated(model.parameters(), group=group)
    )
    strategy.equal_rounds = has_sync_norm(model)  # its forward has collectives over replicas
    staged_on(strategy, mesh)
    return strategy


def staged_on(strategy: Single | Replicated, mesh: DeviceMesh | None) -> None:
    """Make the strategy one of a pipeline stage, if `mesh` has several stages."""
    if mesh is not None and mesh["pp"].size() > 1:
        strategy.stages, strategy.replica_ranks = mesh.get_group("pp"), mesh["pp"].size()
