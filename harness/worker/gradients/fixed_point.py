"""Conversion of floats to integers and back: scales, rounding, and sums that do not depend on their
order. Runs in the worker."""

from __future__ import annotations

import enum
import functools
import importlib
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from harness.core.world import BadInput, HarnessError
from harness.worker.setup_check import differences, environment

WORDS = {"exact": 64, "exact32": 32}  # bits on the wire of each value of attach(reduce=...)
NAMES = {word: name for name, word in WORDS.items()}
# a gradient may be 2**8 (2**2) times its recent peak before a step must be done again
HEADROOM = {64: 8, 32: 2}
INTEGERS = {64: torch.int64, 32: torch.int32}
MAX_SHIFT = 149  # no float32 is finer than that
LEAST_BITS = 12  # of one micro-batch's part of a word; fewer would be too coarse
# a parameter's first gradients are assumed to be below 2**15 (losses are sums over a micro-batch's
# samples or tokens)
FIRST = 15
CHUNKED = {"cpu"}  # types of devices whose gradients are taken in chunks
# elements per pass on a CPU: few enough to stay in its cache over several passes, and enough that
# Python's overhead is small
CHUNK = 1 << 17


class RoundingVerdict(enum.Enum):
    GOOD = "everything fitted"
    AGAIN = "something was too large; the units have been changed"
    BAD = "something is NaN or infinite"


class Scales:
    """The unit of each parameter. Pure: a function of the peaks that it was given, which are the
    same on every rank.

    With exponent e, gradients below 2**(e + headroom) fit. A micro-batch may use `bits` of the
    integers so that M of them never overflow. `word`: bits of the integers; while no parameter's
    exponent is known, `width` is 64, which is wide enough for a guess.
    """

    def __init__(self, count: int, word: int):
        self.word = word
        self._micro_batches = 0
        self.exponents = [None] * count

    def start(self, micro_batches: int) -> None:
        self._micro_batches = micro_batches
        if (bits := self._bits(self.word)) < LEAST_BITS:
            raise BadInput(
                f"{self.word} bits leave {bits} for each of {micro_batches} micro-batches, "
                f"wanted at least {LEAST_BITS}; "
                'use reduce="exact" or a larger micro_batch'
            )

    @property
    def exponents(self) -> list[int | None]:
        """The exponent of each parameter; None: only zero gradients have been seen."""
        return self._exponents

    @exponents.setter
    def exponents(self, found: list[int | None]) -> None:
        self._exponents = found
        # bits of the integers in the next step
        self.width = self.word if any(e is not None for e in found) else 64

    @property
    def bits(self) -> int:
        return self._bits(self.width)

    def _bits(self, width: int) -> int:
        return width - 1 - self._micro_batches.bit_length()  # M * 2**bits < 2**(width - 1)

    def shift(self, i: int) -> int:
        """Return the shift of parameter i: its gradients are counted in units of 2**-shift."""
        exponent = self.exponents[i]
        if exponent is None:
            return self.bits - FIRST if self.width == 64 else 0
        return min(self.bits - HEADROOM[self.word] - exponent, MAX_SHIFT)

    def limit(self, i: int) -> float:
        """Return the greatest |gradient| of one micro-batch that fits, for parameter i."""
        return (
            0.0
            if self.exponents[i] is None and self.width != 64
            else 2.0 ** min(self.bits - self.shift(i), 1023)
        )

    def least(self, i: int) -> float:
        """Return the least peak that the unit of parameter i is fine enough for. Known units follow
        the peaks; guessed ones may be too coarse."""
        return 2.0 ** (LEAST_BITS - self.shift(i)) if self.exponents[i] is None else 0.0

    def judge(self, peaks: Sequence[float]) -> RoundingVerdict:
        """Judge a step, and change the units if the verdict is AGAIN. `peaks`: for each parameter,
        the greatest |gradient| of any micro-batch of the step."""
        if not all(map(math.isfinite, peaks)):
            return RoundingVerdict.BAD
        over = [
            i for i, peak in enumerate(peaks) if peak > self.limit(i) or 0.0 < peak < self.least(i)
        ]
        # after a first step in wider integers than the next, the peaks that fitted are known too
        known = over if self.width == self.word or not over else range(len(peaks))
        new = {i: math.frexp(peaks[i])[1] for i in known if peaks[i] > 0.0}
        self.exponents = [new.get(i, e) for i, e in enumerate(self.exponents)]
        return RoundingVerdict.AGAIN if over else RoundingVerdict.GOOD

    def advance(self, peaks: Sequence[float]) -> None:
        """Follow the peaks after a GOOD step: upwards at once, downwards by one bit per step."""
        new = list(self.exponents)
        for i, (peak, exponent) in enumerate(zip(peaks, new, strict=True)):
            if peak > 0:
                found = math.frexp(peak)[1]
                new[i] = found if exponent is None else max(found, exponent - 1)
        self.exponents = new


class Scratch:
    """The CPU's buffers of one chunk, by dtype. Views of them are kept, since making one costs as
    much as a small sum."""

    def __init__(self) -> None:
        self._made: dict[torch.dtype, torch.Tensor] = {}
        self._views: dict[tuple[torch.dtype, tuple[int, ...]], tuple[torch.Tensor, ...]] = {}

    def of(self, dtype: torch.dtype, *sizes: int) -> tuple[torch.Tensor, ...]:
        """Return one buffer cut into pieces of `sizes`, followed by the pieces as one tensor."""
        if (dtype, sizes) not in self._views:
            if dtype not in self._made:
                self._made[dtype] = torch.empty(CHUNK, dtype=dtype)
            whole = self._made[dtype][: sum(sizes)]
            self._views[dtype, sizes] = (*torch.split(whole, list(sizes)), whole)
        return self._views[dtype, sizes]


def add_rounded(
    grads: Sequence[torch.Tensor], shifts: Sequence[int], total: torch.Tensor, scratch: Scratch
) -> list[float]:
    """Add round(grad * 2**shift) to `total` on a CPU, for gradients that lie in `total` one after
    the other. Return the max |grad| of each.

    grads: all float32 or all float64, (n_i,); total: int32 or int64, (sum of n_i,). One gradient,
    or several of at most CHUNK elements together. A NaN's peak is NaN. If a product does not fit,
    the value added is meaningless; the peak shows it.
    """
    peaks: list[float] = []
    for g in grads:
        least, greatest = torch.aminmax(g) if g.numel() else (0.0, 0.0)  # one pass; NaN wins
        peaks.append(max(-float(least), float(greatest)))
    if total.numel() <= CHUNK:
        _add_chunk(grads, shifts, total, scratch)
    else:
        for g, t in zip(torch.split(grads[0], CHUNK), torch.split(total, CHUNK), strict=True):
            _add_chunk((g,), shifts, t, scratch)
    return peaks


def _add_chunk(
    grads: Sequence[torch.Tensor], shifts: Sequence[int], total: torch.Tensor, scratch: Scratch
) -> None:
    *parts, real = scratch.of(grads[0].dtype, *(g.numel() for g in grads))
    whole = scratch.of(total.dtype, total.numel())[-1]
    for g, shift, part in zip(grads, shifts, parts, strict=True):
        # exact, since these are powers of two; 2**127 is the largest in float32
        torch.mul(g, 2.0 ** min(shift, 126), out=part)
        if shift > 126:
            part.mul_(2.0 ** (shift - 126))
    whole.copy_(real.round_())
    if total.dtype is torch.int64:
        mine = total.numpy()
        # torch's int64 add multiplies by alpha=1 first: four times slower
        np.add(mine, whole.numpy(), out=mine)
    else:
        total.add_(whole)


def add_rounded_together(
    grads: list[torch.Tensor],
    shifts: Sequence[int],
    total: torch.Tensor,
    peaks: torch.Tensor,
    places: tuple[int, ...],
) -> None:
    """Add like `add_rounded`, on a GPU, for any sizes and dtypes. `peaks`: float64, of which those
    at the gradients' `places` are raised to the gradients' peaks."""
    kernels = gpu_kernels(total.device)
    if kernels is not None:
        alike = len({g.dtype for g in grads}) == 1
        kernels.add(grads if alike else _widened(grads), shifts, total, peaks, places)
        return
    found = _add_in_steps(_widened(grads), shifts, total).double()
    where = torch.tensor(places, device=peaks.device)
    peaks[where] = torch.maximum(peaks[where], found)


def _widened(grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return them all as float32, or as float64 if one of them is."""
    widest = torch.float64 if any(g.dtype is torch.float64 for g in grads) else torch.float32
    return [g if g.dtype is widest else g.to(widest) for g in grads]


def _add_in_steps(
    grads: list[torch.Tensor], shifts: Sequence[int], total: torch.Tensor
) -> torch.Tensor:
    if not all(g.numel() for g in grads):  # a norm of nothing is an error
        full = [i for i, g in enumerate(grads) if g.numel()]
        peaks = total.new_zeros(len(grads), dtype=grads[0].dtype)
        if full:
            some = [grads[i] for i in full], [shifts[i] for i in full]
            peaks[full] = _add_in_steps(*some, total)
        return peaks
    peaks = torch.stack(torch._foreach_norm(grads, math.inf))
    scaled = torch.cat(grads)
    pieces = torch.split(scaled, [g.numel() for g in grads])
    torch._foreach_mul_(pieces, [2.0 ** min(shift, 126) for shift in shifts])
    if max(shifts) > 126:
        torch._foreach_mul_(pieces, [2.0 ** max(shift - 126, 0) for shift in shifts])
    total.add_(scaled.round_().to(total.dtype))
    return peaks


@functools.cache
def gpu_kernels(device: torch.device) -> Any:
    """Return the module of kernels for this device, compiled; None on a CPU, and where they cannot
    be compiled. Single steps compute the same, and move several times as many bytes."""
    if device.type in CHUNKED:
        return None
    try:
        module = importlib.import_module("harness.worker.gradients.gpu_kernels")
        module.warm(device)
    except Exception as e:
        # no Triton, or a missing compiler, which may show as any error
        warnings.warn(
            "exact sums take single steps, which are slower, as their kernels could not be "
            f"compiled: {e}",
            stacklevel=2,
        )
        return None
    return module


def divide_into(
    out: torch.Tensor,
    total: torch.Tensor,
    weight: float | torch.Tensor,
    shift: int,
    scratch: Scratch,
) -> None:
    """Write total / (weight * 2**shift) into `out`: computed in float64, then rounded to out's
    dtype. Tensors: (n,), on a CPU; weight: a number, or 0-d float64."""
    below = weight * 2.0**shift
    for o, t in zip(torch.split(out, CHUNK), torch.split(total, CHUNK), strict=True):
        o.copy_(scratch.of(torch.float64, t.numel())[-1].copy_(t).div_(below))


Division = Callable[[float | torch.Tensor], None]  # by a weight


def division(
    outs: Sequence[torch.Tensor], totals: Sequence[torch.Tensor], shifts: Sequence[int]
) -> Division:
    """Return what writes the quotients of several totals, as `divide_into` does for one, on a GPU.
    What it is told can be made ready while the device is still at work."""
    every = list(zip(outs, totals, shifts, strict=True))
    device = totals[0].device
    kernels = gpu_kernels(device)
    ready = []
    for dtype in dict.fromkeys(out.dtype for out in outs) if kernels else ():
        alike = [one for one in every if one[0].dtype is dtype]
        ready.append(kernels.division(*zip(*alike, strict=True)))

    def divide(weight: float | torch.Tensor) -> None:
        if not isinstance(weight, torch.Tensor):
            # a GPU would multiply by the reciprocal of a number, which rounds twice
            weight = torch.full((), weight, dtype=torch.float64, device=device)
        for one in ready:
            one(weight.double())
        for out, total, shift in () if kernels else every:
            # exact but for the rounding to out's dtype
            torch.mul(torch.div(total, weight), 2.0**-shift, out=out)

    return divide


def exact_norm(
    parts: Iterable[torch.Tensor],
    numel: int,
    device: torch.device,
    greatest: Callable[[torch.Tensor], object] | None = None,
    add_up: Callable[[torch.Tensor], object] | None = None,
) -> torch.Tensor:
    """Return the Euclidean norm of everything in `parts` (real numbers, (n,) each) on all ranks,
    0-d float32. Any cut of the numbers into parts gives the same bits.

    `numel`: their number on all ranks; `greatest` and `add_up` replace an int64 tensor by its
    maximum and sum over ranks. Squares are summed as integers with enough limbs for a relative
    error of the sum below 2**-20 at worst, 2**-24 and less in practice.
    """
    parts = [p for p in parts if p.numel()]
    width = (62 - numel.bit_length()) // 2 * 2  # bits of a limb: numel of them sum below 2**62
    # all rounding in the last limb together is below 2**-22 of the greatest square
    limbs = -(-(numel.bit_length() + 22) // width)
    # squares of wide floats are rounded, which kernels would do otherwise
    kernels = gpu_kernels(device) if all(p.dtype.itemsize <= 4 for p in parts) else None
    # all stays on the device, so that no host waits for it
    bits = kernels.top(parts, device) if kernels else _top(parts, device)
    if greatest is not None:
        greatest(bits)
    if kernels:
        sums = kernels.limbs(parts, bits, width, limbs)
    else:
        sums = torch.zeros(limbs, dtype=torch.int64, device=device)
        scale = _power_of_two(width // 2 - _exponent(bits))
        for part in parts:
            for piece in torch.split(part, CHUNK if device.type == "cpu" else 1 << 24):
                sums += _limbs(piece, scale, width, limbs)
    if add_up is not None:
        add_up(sums)
    norm: torch.Tensor = kernels.root(sums, bits, width) if kernels else _root(sums, bits, width)
    return norm


INFINITY = 0x7FF0_0000_0000_0000  # the bits of float64's


def _top(parts: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the bits of the greatest magnitude as float64, which sort like the numbers; those of
    infinity if one is NaN; 0-d int64."""
    top = torch.zeros((), dtype=torch.float64, device=device)
    if parts:
        top = torch.stack(torch._foreach_norm(parts, math.inf)).max().double()
    return torch.nan_to_num(top, nan=math.inf, posinf=math.inf).view(torch.int64)


def _exponent(bits: torch.Tensor) -> torch.Tensor:
    """Return e with |x| < 2**e for all x whose greatest `bits` are of."""
    return torch.frexp(bits.view(torch.float64)).exponent.long().clamp(-900, 1000)


def _power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Return 2**exponents, exactly; int64 -> float64."""
    return (exponents + 1023 << 52).view(torch.float64)


def _limbs(piece: torch.Tensor, scale: torch.Tensor, width: int, limbs: int) -> torch.Tensor:
    """Return the sum of the squares of `piece` (n,), times scale**2, as `limbs` integers of `width`
    bits each, the highest first; (limbs,) int64."""
    x = piece.double() * scale
    x.mul_(x)  # below 2**width
    sums = []
    for _ in range(limbs - 1):
        whole = x.to(torch.int64)  # truncates; the rest is exact, for the next limb
        sums.append(whole.sum())
        x.frac_().mul_(2.0**width)
    sums.append(x.round_().to(torch.int64).sum())
    return torch.stack(sums)


def _root(sums: torch.Tensor, bits: torch.Tensor, width: int) -> torch.Tensor:
    """Return the norm whose square has the limbs `sums`; 0-d float32."""
    square = torch.zeros((), dtype=torch.float64, device=sums.device)
    for limb in sums.double():
        square = square * 2.0**width + limb
    norm = (square * 2.0 ** (-len(sums) * width)).sqrt() * _power_of_two(_exponent(bits))
    return torch.where(bits == INFINITY, math.nan, norm).float()


# The bookkeeping of exact sums (`exact_sums.py`): integer sums of a step's gradients on this rank,
# and whether every gradient fitted.

MAX_REPEATS = 4  # of one step; one is enough when backward is deterministic


class Counting:
    """Rounding of gradients to integers, with the units of a whole model and the verdict of a step.
    Both exact strategies share it. Every rank knows the units of the whole model, even if it holds
    one pipeline stage only."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        names: dict[int, str],
        word: int,
        whole: Sequence[str] = (),
    ):
        """`names`: a parameter's name by its id. `word`: bits of the integers. `whole`: names of
        all trained parameters of the model, in its order; (): `parameters` are all of them. Raises
        BadInput for complex parameters."""
        for p in parameters:
            if not p.is_floating_point():
                raise BadInput(
                    f"exact sums are of real gradients, found a parameter of {p.dtype}; keep "
                    "complex parameters as pairs"
                )
        self.parameters, self.word = parameters, word
        self.device = parameters[0].device
        # the place of each parameter in the whole model
        order = {name: i for i, name in enumerate(whole)}
        self._at = [order.get(names.get(id(p), ""), i) for i, p in enumerate(parameters)]
        self.scales = Scales(len(whole) or len(parameters), word)
        self.scratch = Scratch()
        self._names = names
        # of the whole model's parameters: the bits of the peaks, and 1 for what came in parts
        self._told = torch.zeros(
            2, len(self.scales.exponents), dtype=torch.int64, device=self.device
        )
        self._found: list[float] = []  # the peaks over all ranks, once `agree` has run
        self._seen: set[int] = set()  # in this micro-batch
        # Parameters whose gradients come in several parts for one micro-batch, on any rank: by
        # place here, by place in the whole model, and those that this step has shown here.
        self.in_parts: set[int] = set()
        self._all_in_parts: set[int] = set()
        self._new_parts: set[int] = set()
        self._repeats = 0
        self.verdict: RoundingVerdict | None = None  # None: not all micro-batches are done

    @property
    def _peaks(self) -> torch.Tensor:
        """The greatest |gradient| of each parameter of the whole model in this step, float64."""
        return self._told[0].view(torch.float64)

    @property
    def integers(self) -> torch.dtype:
        """The integer type of the next step. It changes only after the first step of a run."""
        return INTEGERS[self.scales.width]

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
        """Forget peaks and verdict, before a step or a repetition of it."""
        self._told.zero_()
        self._seen.clear()
        self._new_parts.clear()
        self.verdict = None

    def micro(self) -> None:
        self._seen.clear()

    def units(self, members: list[int]) -> list[list[int]]:
        """Cut consecutive parameters into the groups that `add` takes at a time: on a CPU, a chunk
        of small ones or a single large one; on other devices, all of them."""
        units: list[list[int]] = []
        size = 0
        for i in members:
            numel = self.parameters[i].numel()
            if not units or (self.device.type in CHUNKED and size + numel > CHUNK):
                units.append([])
                size = 0
            units[-1].append(i)
            size += numel
        return units

    def see(self, i: int) -> bool:
        """Record that the gradient of parameter i has arrived. Return False if an earlier part of
        it arrived in this micro-batch; the step must then be repeated."""
        if i in self._seen:
            self._new_parts.add(i)
            return False
        self._seen.add(i)
        return True

    def name_of(self, i: int) -> str:
        return self._names.get(id(self.parameters[i]), "a parameter")

    def add(self, members: list[int], grads: list[torch.Tensor], total: torch.Tensor) -> None:
        """Round one micro-batch's gradients of the parameters `members` and add them to `total`
        (n,), integers, in which the parameters lie one after the other."""
        flat = [(g.to_dense() if g.is_sparse else g).reshape(-1) for g in grads]
        places = tuple(self._at[i] for i in members)
        shifts = [self.scales.shift(at) for at in places]
        if self.device.type in CHUNKED:
            mine = self._peaks.numpy()
            found = add_rounded(_widened(flat), shifts, total, self.scratch)
            for at, peak in zip(places, found, strict=True):
                if not peak <= mine[at]:  # also true for NaN
                    mine[at] = math.inf if math.isnan(peak) else peak
        else:
            add_rounded_together(flat, shifts, total, self._peaks, places)

    def must_be_done(self, done: bool) -> None:
        """Raise BadInput unless all micro-batches of the step are `done`. Called before `agree`."""
        if not done:
            raise BadInput(
                "step.update() came before all micro-batches of the step were done; let `for batch "
                "in step` run to its end"
            )

    def agree(self) -> bool:
        """Judge the step after its last micro-batch. Return True, on all ranks alike, if it must be
        repeated. Raises HarnessError after MAX_REPEATS repetitions."""
        if self._new_parts:
            self._told[1, [self._at[i] for i in sorted(self._new_parts)]] = 1
        if self.world > 1:
            # the bits of peaks sort like the peaks, and NaN's are above infinity's
            dist.all_reduce(self._told, op=dist.ReduceOp.MAX)
        bits, parts = self._told.cpu()  # the only wait of a step for its device
        self._found = bits.view(torch.float64).tolist()
        if bool(parts.any()):
            self._come_in_parts(parts.nonzero().view(-1).tolist())
            self.verdict = RoundingVerdict.AGAIN  # no unit is derived from a part of a gradient
        else:
            self.verdict = self.scales.judge(self._found)
        if self.verdict is not RoundingVerdict.AGAIN:
            self._repeats = 0
            return False
        self._repeats += 1
        if self._repeats > MAX_REPEATS:
            raise HarnessError(
                f"the gradients of a step did not fit {self._repeats} times although the units "
                "follow them; backward gives other numbers each time it is asked: use "
                "deterministic kernels (torch.use_deterministic_algorithms)"
            )
        return True

    def _come_in_parts(self, places: Iterable[int]) -> None:
        """Add places in the whole model to the parameters whose gradients come in parts."""
        self._all_in_parts |= set(places)
        self.in_parts = {i for i, at in enumerate(self._at) if at in self._all_in_parts}

    def norm(
        self,
        parts: Iterable[torch.Tensor],
        shards: Sequence[dist.ProcessGroup] = (),
        stages: dist.ProcessGroup | None = None,
    ) -> torch.Tensor:
        """Return the norm of gradients, given as real tensors `parts` of shape (n,). `shards`:
        groups over which parameters are sharded; `stages`: ranks with the other parameters."""
        numel = sum(p.numel() for p in self.parameters)
        if stages is not None:
            every = torch.tensor(numel, device=self.device)
            dist.all_reduce(every, group=stages)
            numel = int(every)
        there = [*shards, *([] if stages is None else [stages])]

        def over(op: dist.ReduceOp.RedOpType) -> Callable[[torch.Tensor], None]:
            def all_reduce(t: torch.Tensor) -> None:
                for group in there:
                    dist.all_reduce(t, op=op, group=group)

            return all_reduce

        return exact_norm(
            parts, numel, self.device, over(dist.ReduceOp.MAX), over(dist.ReduceOp.SUM)
        )

    def must_not_repeat(self, again: Callable[[], bool]) -> None:
        """Raise BadInput if the step must be repeated. Called before sums are used; `again` is
        called if the step has no verdict yet."""
        if self.verdict is None and again():
            raise BadInput(
                "a gradient did not fit and the step must be done again, but `for batch in step` "
                "did not run to its end"
            )

    def division(
        self,
        members: Sequence[int],
        totals: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
    ) -> Division:
        """Return what writes the gradients of the parameters `members`, or pieces of them, to
        `outs`: `totals`, (n_i,) each, divided by a weight; or NaN if a gradient of the step was NaN
        or infinite. It holds for this step's units."""
        shifts = [self.scales.shift(self._at[i]) for i in members]
        many = (
            division(outs, totals, shifts) if outs and self.device.type not in CHUNKED else None
        )

        def divide(weight: float | torch.Tensor) -> None:
            if self.verdict is RoundingVerdict.BAD:
                for out in outs:
                    out.fill_(math.nan)
            elif many is not None:
                many(weight)
            else:
                for out, total, shift in zip(outs, totals, shifts, strict=True):
                    divide_into(out, total, weight, shift, self.scratch)

        return divide

    def applied(self) -> None:
        """Advance the units, after all gradients of a good step are written."""
        if self.verdict is RoundingVerdict.GOOD:
            self.scales.advance(self._found)

    def state_dict(self) -> dict[str, Any]:
        parts = {"in_parts": sorted(self._all_in_parts)} if self._all_in_parts else {}
        return {"word": self.word, "exponents": list(self.scales.exponents), **parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["word"] != self.word or len(state["exponents"]) != len(self.scales.exponents):
            raise BadInput(
                f"the snapshot's sums have {state['word']} bits and {len(state['exponents'])} "
                f"parameters, this script's {self.word} and "
                f"{len(self.scales.exponents)}; resume with the same model and the same reduce="
            )
        self.scales.exponents = list(state["exponents"])
        self._all_in_parts = set()
        self._come_in_parts(state.get("in_parts", ()))
