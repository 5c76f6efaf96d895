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
2**FIRST, about 1e-9 to 3e4, and what lies outside is done again. 32 bits are not, so the first step
is done twice. NaN and infinity make the whole gradient NaN: a GradScaler skips such a step on all
ranks, and without one the session stops.

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

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness.core.world import BadInput, HarnessError
from harness.worker.environment import differences, environment
from harness.worker.parallel import (
    BUCKET_BYTES,
    Replicated,
    Sharded,
    fsdp_groups,
    is_sharded,
    needs,
)
from harness.worker.rounding import (
    CHUNK,
    INTEGERS,
    WORDS,
    Scales,
    Scratch,
    Verdict,
    add_rounded,
    add_rounded_together,
    divide_into,
    exact_norm,
)

MAX_REPEATS = 4  # one is enough when backward is deterministic


class _Counting:
    """What this rank's micro-batches of a step added up to, and whether everything fitted.
    Shared by both strategies."""

    def __init__(self, parameters: list[nn.Parameter], names: dict[int, str], word: int):
        for p in parameters:
            if not p.is_floating_point():
                raise BadInput(
                    f"exact sums are of real gradients, found a parameter of {p.dtype}; keep "
                    "complex parameters as pairs"
                )
        self.parameters, self.word = parameters, word
        self.device = parameters[0].device
        self.scales = Scales(len(parameters), word)
        self.integers = INTEGERS[word]
        self.scratch = Scratch()
        self._names = names
        self._peaks = torch.zeros(len(parameters), dtype=torch.float64, device=self.device)
        self._found: list[float] = []  # the peaks over all ranks, once they are agreed
        self._seen: set[int] = set()  # in this micro-batch
        self._repeats = 0
        self.verdict: Verdict | None = None  # None: micro-batches are still to come

    @property
    def world(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    def start(self, micro_batches: int) -> None:
        self.scales.start(micro_batches)
        if self.world > 1:
            every: list[Any] = [None] * self.world
            dist.all_gather_object(every, environment(self.device))
            if dist.get_rank() == 0:
                for rank, other in enumerate(every):
                    if unlike := differences(every[0], other):
                        warnings.warn(
                            f"rank {rank} differs from rank 0, so sums are exact but gradients are "
                            f"not: {unlike}",
                            stacklevel=2,
                        )

    def clear(self) -> None:
        """A step begins, or begins again."""
        self._peaks.zero_()
        self._seen.clear()
        self.verdict = None

    def micro(self) -> None:
        self._seen.clear()

    def units(self, members: list[int]) -> list[list[int]]:
        """Cut a run of parameters into what `add` takes at a time: on a CPU, a chunk of small
        ones or a single large one."""
        units: list[list[int]] = []
        size = 0
        for i in members:
            numel = self.parameters[i].numel()
            if not units or (self.device.type == "cpu" and size + numel > CHUNK):
                units.append([])
                size = 0
            units[-1].append(i)
            size += numel
        return units

    def see(self, i: int) -> None:
        """The gradient of parameter i has come, all of it."""
        if i in self._seen:
            name = self._names.get(id(self.parameters[i]), "a parameter")
            raise BadInput(
                f"the gradient of {name} came in two parts in one backward; exact sums need it "
                "whole: with activation checkpointing "
                "use use_reentrant=False, with fsdp2 call each sharded block once in a forward"
            )
        self._seen.add(i)

    def add(self, members: list[int], grads: list[torch.Tensor], total: torch.Tensor) -> None:
        """Add one micro-batch's gradients of the parameters `members`, which lie in `total`
        (n,) one after the other."""
        flat = [(g.to_dense() if g.is_sparse else g).reshape(-1) for g in grads]
        widest = torch.float64 if any(g.dtype is torch.float64 for g in flat) else torch.float32
        flat = [g if g.dtype is widest else g.to(widest) for g in flat]
        shifts = [self.scales.shift(i) for i in members]
        if self.device.type == "cpu":
            mine = self._peaks.numpy()
            for i, peak in zip(
                members, add_rounded(flat, shifts, total, self.scratch), strict=True
            ):
                if not peak <= mine[i]:  # so for NaN as well
                    mine[i] = math.inf if math.isnan(peak) else peak
        else:
            where = torch.tensor(members, device=self.device)
            peaks = add_rounded_together(flat, shifts, total)
            self._peaks[where] = torch.maximum(self._peaks[where], peaks.double())

    def agree(self) -> bool:
        """After the last micro-batch: True if all must be done again. All ranks say the same."""
        bits = torch.nan_to_num(self._peaks, nan=math.inf, posinf=math.inf).view(torch.int64)
        if self.world > 1:
            dist.all_reduce(bits, op=dist.ReduceOp.MAX)
        self._found = bits.view(torch.float64).tolist()
        self.verdict = self.scales.judge(self._found)
        if self.verdict is not Verdict.AGAIN:
            self._repeats = 0
            return False
        self._repeats += 1
        if self._repeats > MAX_REPEATS:
            raise HarnessError(
                f"the gradients of a step did not fit {self._repeats} times although the units "
                "follow them; backward gives other numbers "
                "each time it is asked: use deterministic kernels "
                "(torch.use_deterministic_algorithms)"
            )
        return True

    def must_not_repeat(self, again: Callable[[], bool]) -> None:
        """Before sums are taken; `again` is asked if nobody has asked it yet. Raises BadInput."""
        if self.verdict is None and again():
            raise BadInput(
                "a gradient did not fit and the step must be done again, but `for batch in step` "
                "did not run to its end"
            )

    def write(
        self, i: int, total: torch.Tensor, weight: float | torch.Tensor, out: torch.Tensor
    ) -> None:
        """The gradient of (a piece of) parameter i."""
        if self.verdict is Verdict.BAD:
            out.fill_(math.nan)
        else:
            divide_into(out, total, weight, self.scales.shift(i), self.scratch)

    def applied(self) -> None:
        """The gradients of this step have been made."""
        if self.verdict is Verdict.GOOD:
            self.scales.advance(self._found)

    def state_dict(self) -> dict[str, Any]:
        return {"word": self.word, "exponents": list(self.scales.exponents)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["word"] != self.word or len(state["exponents"]) != len(self.scales.exponents):
            raise BadInput(
                f"the snapshot's sums have {state['word']} bits and {len(state['exponents'])} "
                f"parameters, this script's {self.word} and "
                f"{len(self.scales.exponents)}; resume with the same model and the same reduce="
            )
        self.scales.exponents = list(state["exponents"])


@dataclass
class _Unit:
    """Parameters whose gradients are turned into integers together."""

    members: list[int]
    total: torch.Tensor  # (n,) integers, a piece of a bucket
    here: int = 0  # members whose gradients of this micro-batch have come


class ExactReplicated(Replicated):
    """Every rank holds the whole model. A parameter's gradient becomes integers as soon as backward
    has made it, and is then let go.

    Costs `word` / 8 bytes of memory per parameter above `Replicated`. Between a backward and
    `divide`, `p.grad` is None.
    """

    may_repeat = True

    def __init__(self, model: nn.Module, word: int = 64, bucket_bytes: int = BUCKET_BYTES):
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.counting = _Counting(
            parameters, {id(p): name for name, p in model.named_parameters()}, word
        )
        self._index = {p: i for i, p in enumerate(parameters)}
        super().__init__(parameters, bucket_bytes)

    def _build(self, bucket_bytes: int) -> None:
        super()._build(bucket_bytes)
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
                self._units.append(_Unit(members, self._sums[bucket][offset : offset + size]))
                offset += size
        by_index = {i: unit for unit in self._units for i in unit.members}
        self._unit_of = [by_index[i] for i in range(len(self.parameters))]

    def start(self, micro_batches: int) -> None:
        self.counting.start(micro_batches)

    def micro(self, last: bool, filler: bool = False) -> None:
        super().micro(last)
        self.counting.micro()
        for p in self.parameters:
            p.grad = None  # so that backward leaves this micro-batch's gradient alone there

    def _ready(self, p: nn.Parameter) -> None:
        index = self._index[p]
        self.counting.see(index)
        unit = self._unit_of[index]
        unit.here += 1
        if unit.here < len(unit.members):
            return
        self._take(unit)
        if self._armed:
            self._missing[self._bucket_of[p]] -= len(unit.members)
            while len(self._sent) < len(self._flats) and self._missing[len(self._sent)] <= 0:
                self._send(len(self._sent))

    def _take(self, unit: _Unit) -> None:
        """Its gradients of this micro-batch become integers and are let go."""
        unit.here = 0
        grads = [self.parameters[i].grad for i in unit.members]
        whole = [g for g in grads if g is not None]
        if len(whole) == len(grads):
            self.counting.add(unit.members, whole, unit.total)
        else:  # some had no part in the forward
            for i, g in zip(unit.members, grads, strict=True):
                if g is not None:
                    self.counting.add([i], [g], self._totals[i])
        for i in unit.members:
            self.parameters[i].grad = None

    def micro_done(self) -> None:
        for unit in self._units:
            if unit.here:
                self._take(unit)

    def _send(self, bucket: int) -> None:
        self._sent.append(
            dist.all_reduce(self._sums[bucket], async_op=True) if self._world > 1 else None
        )

    def again(self) -> bool:
        if not self._armed:
            raise BadInput(
                "step.update() came before all micro-batches of the step were done; let `for batch "
                "in step` run to its end"
            )
        self.micro_done()
        while len(self._sent) < len(self._flats):  # parameters that took no part in the forward
            self._send(len(self._sent))
        repeat = self.counting.agree()
        for work in self._sent:
            if work is not None:
                work.wait()
        self._armed = False
        if repeat:
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
        return exact_norm(
            self._flats, sum(p.numel() for p in self.parameters), self.counting.device
        )

    def _clear(self) -> None:
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
    backward ends, and are let go.

    After the last micro-batch's backward of a block its integers are reduce-scattered. Until then
    each rank holds integers for the whole model (`word` / 8 bytes per parameter), like FSDP2 does
    with gradients under set_requires_gradient_sync(False); with one micro-batch per rank only for
    the blocks whose exchange is under way.
    """

    may_repeat = True

    def __init__(self, model: nn.Module, word: int = 64):
        super().__init__(model)
        self.counting = _Counting(
            self.parameters, {id(p): name for name, p in model.named_parameters()}, word
        )
        self._last = self._filler = False
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
        handles = [h for h in param_group.fsdp_params if id(h.sharded_param) in index]
        for handle in handles:
            if handle.fsdp_placement.dim != 0:
                raise BadInput(
                    "exact sums know fsdp2 with rows sharded (dimension 0); use "
                    "harness.fsdp2(model, run)"
                )
        members = [index[id(h.sharded_param)] for h in handles]
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
        self.counting.start(micro_batches)

    def micro(self, last: bool, filler: bool = False) -> None:
        self._last, self._filler = last, filler
        for root in self._roots:
            root.set_is_last_backward(last)
        self.counting.micro()

    def micro_done(self) -> None: ...

    def _take(self, group: _Group) -> None:
        """The backward of a block has ended."""
        if group.totals is None and group.mine is None:
            sizes = [self.parameters[i].numel() for i in group.members]
            group.totals = torch.zeros(
                sum(sizes), dtype=self.counting.integers, device=self.counting.device
            )
        grads: dict[int, torch.Tensor] = {}
        for i, handle in zip(group.members, group.handles, strict=True):
            whole = getattr(handle, "_unsharded_param", None)
            if whole is not None and whole.grad is not None:
                grads[i], whole.grad = whole.grad, None
                self.counting.see(i)
        if grads and not self._filler:
            assert group.totals is not None, "gradients came after the last backward of this block"
            offset = 0
            for unit in group.units:
                for members in [unit] if all(i in grads for i in unit) else [[i] for i in unit]:
                    size = sum(self.parameters[i].numel() for i in members)
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
            whole = group.totals[offset : offset + self.parameters[i].numel()]
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
        shape = self.parameters[i].shape
        return -(-shape[0] // world) * math.prod(shape[1:])

    def again(self) -> bool:
        if not self._last:
            raise BadInput(
                "step.update() came before all micro-batches of the step were done; let `for batch "
                "in step` run to its end"
            )
        for group in self._groups:
            if group.mine is None:
                self._take(group)  # no part of it was in the forward
        repeat = self.counting.agree()
        for group in self._groups:
            if group.work is not None:
                group.work.wait()
            group.work = group.wire = None
        self._last = False
        if repeat:
            self._clear()
        return repeat

    def reduce(self) -> None:
        self.counting.must_not_repeat(self.again)

    def divide(self, weight: float | torch.Tensor) -> None:
        from torch.distributed.tensor import DTensor

        for group in self._groups:
            assert group.mine is not None
            column = 0
            for i in group.members:
                p: Any = self.parameters[i]
                grad = torch.empty_like(p.to_local(), memory_format=torch.contiguous_format)
                self.counting.write(
                    i, group.mine[column : column + grad.numel()], weight, grad.view(-1)
                )
                p.grad = DTensor.from_local(
                    grad,
                    p.device_mesh,
                    p.placements,
                    run_check=False,
                    shape=p.shape,
                    stride=p.stride(),
                )
                column += self._columns(i, group.process_group.size())
            group.mine = None
        self.counting.applied()

    def norm(self) -> torch.Tensor:
        parts = [g.view(-1) for g in self._local()]
        numel = sum(p.numel() for p in self.parameters)
        if self.counting.world == 1:
            return exact_norm(parts, numel, self.counting.device)
        return exact_norm(
            parts,
            numel,
            self.counting.device,
            lambda t: dist.all_reduce(t, op=dist.ReduceOp.MAX),
            dist.all_reduce,
        )

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


def exact_strategy_for(
    model: nn.Module, reduce: str, optimizers: Sequence[torch.optim.Optimizer] = ()
) -> ExactReplicated | ExactSharded:
    """`reduce`: "exact" (64 bits) or "exact32". Raises BadInput for what cannot be made exact."""
    if not is_sharded(model):
        return ExactReplicated(model, WORDS[reduce])
    if any(
        group.get("fused") and p.device.type == "cpu"
        for o in optimizers
        for group in o.param_groups
        for p in group["params"][:1]
    ):
        # Measured with torch 2.13, AVX2: fused Adam and SGD treat the last n % 8 elements of a
        # tensor otherwise than the rest, so the result depends on where a parameter is cut. The
        # ordinary (foreach or not) ones do not, nor do their elementwise kernels.
        raise BadInput(
            "exact sums with fsdp2 need an optimizer that treats all elements alike; on a CPU make "
            "it with fused=False"
        )
    return ExactSharded(model, WORDS[reduce])
