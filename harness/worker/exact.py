"""Sums that do not depend on who adds what: `attach(reduce="exact")`. Runs in the worker.

A floating-point sum depends on order and grouping, so on the number of ranks. Integers do not have
that fault. Each micro-batch's gradient, alone, is written as whole numbers of a unit that is a
power of two; they are added up as integers, first on the rank, then by an integer all-reduce (or
reduce-scatter), and the total is divided once by the global weight. So every bit of the weights is
a function of (seed, step), whatever the world, its shares, its resizes and resumes.

    q = round(g * 2**shift)            per element and micro-batch; exact if |g| >= 2**24 units
                                       (float32 has 24 bits)
    total = sum of q                   64-bit ("exact") or 32-bit integers ("exact32"): that many
                                       bytes go over the wire
    gradient = total / (weight * 2**shift), correctly rounded but for 2**-53

Every parameter has a unit of its own, so neither buckets nor shards matter and DDP and FSDP2 give
the same bits. It follows from the greatest |gradient| that any micro-batch has had so far
(`Scales`); this history is a few whole numbers and travels in snapshots. A gradient that does not
fit is seen before anything is applied, by all ranks alike, and the step's micro-batches are done
again with another unit. Of a parameter that has had no gradient but zero nothing is known; 64 bits
are wide enough for a guess (FIRST), which is good for peaks from 2**(FIRST + LEAST_BITS - bits) to
2**FIRST, about 1e-9 to 3e4, and what lies outside is done again. 32 bits are not, so "exact32"
takes 64 in a run's first step; a parameter whose first gradient comes later has that step done
again. NaN and infinity make the whole gradient NaN: a GradScaler skips such a step on all ranks,
and without one the session stops.

Error of one element of the sum S of M micro-batches, against the true sum of what backward gave. L:
bit length of M; u = 2**-24; peak: the greatest |gradient| of that parameter in one micro-batch, an
older step's counting half for each step of its age:
    exact      M * 2**(L + 9 - 64) * peak + u |S|       4.4e-16 * M * peak for M = 8..15
    exact32    M * 2**(L + 3 - 32) * peak + u |S|       3.0e-8 * M * peak for M = 8..15
    float32    (M - 1) * u * sum of |g|                 6.0e-8 * (M - 1) * sum of |g|
A guessed unit (a parameter's first step) is 2**(FIRST - bits), so its error M * 2**(FIRST + L - 64)
+ u |S|: 1.1e-13 * M for M = 8..15. So "exact" is below float32 for every element whose sum of |g|
is above 1e-8 of the peak (M <= 15), and for those beneath it is still less than 1e-14 of the peak.
"exact32" has the greatest elements' error for all elements: it is below float32 only where the sum
of |g| is above half the peak. That is why 64 bits are the default; take 32 where the wire is the
bottleneck.

What no sum can mend: another kind of accelerator, another torch, another number of CPU threads.
These are recorded and compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from harness.core.world import BadInput
from harness.worker.counting import Counting
from harness.worker.exact_sharded import ExactSharded
from harness.worker.parallel import BUCKET_BYTES, Replicated, staged_on
from harness.worker.rounding import NAMES, WORDS
from harness.worker.sharding import is_sharded
from storage.names import plain_name

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass
class _Unit:
    """Parameters whose gradients are turned into integers together."""

    members: list[int]
    total: torch.Tensor  # (n,) integers, a piece of a bucket
    awaited: int  # members whose gradients come whole
    here: int = 0  # of these, whose gradients of this micro-batch have come


class ExactReplicated(Replicated):
    """Every rank holds the whole model. A parameter's gradient becomes integers as soon as backward
    has made it, and is then let go.

    Costs `word` / 8 bytes of memory per parameter above `Replicated`. Between a backward and
    `divide`, `p.grad` is None. Where a gradient comes in several parts for one micro-batch, floats
    add up in `p.grad`, in the order of the backwards, until the micro-batch is over.
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
        """`names`: of the parameters that train of the whole model, where this is a stage of
        it."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.counting = Counting(
            parameters, {id(p): plain_name(n) for n, p in model.named_parameters()}, word, names
        )
        self._index = {p: i for i, p in enumerate(parameters)}
        super().__init__(parameters, bucket_bytes, group)
        self.sums = NAMES[word]
        self._last = False  # the last micro-batch of a step has begun

    def _build(self, bucket_bytes: int) -> None:
        super()._build(bucket_bytes)
        self._lay_out()

    def _lay_out(self) -> None:
        """Integers for all parameters, as wide as the step to come needs them."""
        self._sums = [
            torch.zeros(len(flat), dtype=self.counting.integers, device=flat.device)
            for flat in self._flats
        ]
        self._totals: list[torch.Tensor] = []  # by index of the parameter
        self._units: list[_Unit] = []
        self._unit_of: list[_Unit] = []  # by index of the parameter
        for p in self.parameters:
            flat, view = self._flats[self._bucket_of[p]], self._views[p]
            first = view.storage_offset() - flat.storage_offset()
            self._totals.append(self._sums[self._bucket_of[p]][first : first + p.numel()])
        for bucket in range(len(self._flats)):
            # as they lie in the bucket
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
            p.grad = None  # so that backward leaves this micro-batch's gradient alone there

    def _ready(self, p: nn.Parameter) -> None:
        index = self._index[p]
        if index in self.counting.in_parts:
            return  # autograd adds them up
        if not self.counting.see(index):
            p.grad = None  # all is done again
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
        """Its gradients of this micro-batch that come whole become integers and are let go."""
        unit.here = 0
        members = [i for i in unit.members if i not in self.counting.in_parts]
        grads = [self.parameters[i].grad for i in members]
        whole = [g for g in grads if g is not None]
        if len(whole) == len(unit.members):
            self.counting.add(unit.members, whole, unit.total)
        else:  # some had no part in the forward
            for i, g in zip(members, grads, strict=True):
                if g is not None:
                    self.counting.add([i], [g], self._totals[i])
        for i in members:
            self.parameters[i].grad = None

    def _close(self) -> None:
        """A micro-batch is over: what came in parts is whole now."""
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
        for i, p in enumerate(self.parameters):
            view = self._views[p]
            self.counting.write(i, self._totals[i], weight, view.view(-1))
            p.grad = view
        self.counting.applied()

    def norm(self) -> torch.Tensor:
        return self.counting.norm(self._flats, stages=self.stages)

    def _clear(self) -> None:
        if self._sums and self._sums[0].dtype is not self.counting.integers:
            self._lay_out()
        else:
            for total in self._sums:
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
    """`reduce`: "exact" (64 bits) or "exact32". `group`: the ranks that sum; None: all. `mesh`: of
    all ranks, if the run has one. `names`: of the parameters that train of the whole model, if this
    is a stage of it. Raises BadInput for what cannot be made exact."""
    if not is_sharded(model):
        replicated = ExactReplicated(model, WORDS[reduce], group=group, names=names)
        staged_on(replicated, mesh)
        return replicated
    check_elementwise(optimizers, "fsdp2")
    return ExactSharded(model, WORDS[reduce], mesh, names)


def check_elementwise(optimizers: Sequence[torch.optim.Optimizer], what: str) -> None:
    """Raises BadInput for optimizers whose result depends on where a parameter is cut. `what`:
    cuts them."""
    if any(
        group.get("fused") and p.device.type == "cpu"
        for o in optimizers
        for group in o.param_groups
        for p in group["params"][:1]
    ):
        # Measured with torch 2.13, AVX2: fused Adam and SGD treat the last n % 8 elements of a
        # tensor otherwise than the rest. The ordinary (foreach or not) ones do not, nor do their
        # elementwise kernels.
        raise BadInput(
            f"exact sums with {what} need an optimizer that treats all elements alike; on a CPU "
            "make it with fused=False"
        )
