"""Floats to integers and back: scales, rounding, sums that do not depend on their order."""

from __future__ import annotations

import enum
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

import numpy as np
import torch

from harness.core.world import BadInput

WORDS = {"exact": 64, "exact32": 32}  # bits on the wire of each value of attach(reduce=...)
NAMES = {word: name for name, word in WORDS.items()}
# a gradient may be 2**8 (2**2) times its recent peak before a step must be done again
HEADROOM = {64: 8, 32: 2}
INTEGERS = {64: torch.int64, 32: torch.int32}
MAX_SHIFT = 149  # no float32 is finer than that
LEAST_BITS = 12  # of one micro-batch's share of a word; fewer would not be worth summing
# a parameter's first gradients are taken to be below 2**15 (losses are sums over a micro-batch's
# samples or tokens)
FIRST = 15
FUSE_FROM = 1 << 18  # elements from which a GPU's kernel of its own pays
# elements on a CPU at a time: what several passes read stays in its cache, and Python's share is
# small
CHUNK = 1 << 17


class RoundingVerdict(enum.Enum):
    GOOD = "everything fitted"
    AGAIN = "something was too large; the units have been changed"
    BAD = "something is NaN or infinite"


class Scales:
    """The unit of each parameter. Pure: a function of the peaks that it was told, which are the
    same on every rank.

    With exponent e, gradients below 2**(e + headroom) fit. A micro-batch may use `bits` of the
    integers so that M of them never overflow. `word`: bits of the integers; while nothing is known
    of any parameter, 64 are taken, which are wide enough for a guess (`width`).
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
        """Of each parameter; None: no gradient but zero has been seen."""
        return self._exponents

    @exponents.setter
    def exponents(self, found: list[int | None]) -> None:
        self._exponents = found
        # bits of the integers of the step to come
        self.width = self.word if any(e is not None for e in found) else 64

    @property
    def bits(self) -> int:
        return self._bits(self.width)

    def _bits(self, width: int) -> int:
        return width - 1 - self._micro_batches.bit_length()  # M * 2**bits < 2**(width - 1)

    def shift(self, i: int) -> int:
        """Gradients of parameter i are counted in units of 2**-shift."""
        exponent = self.exponents[i]
        if exponent is None:
            return self.bits - FIRST if self.width == 64 else 0
        return min(self.bits - HEADROOM[self.word] - exponent, MAX_SHIFT)

    def limit(self, i: int) -> float:
        """The greatest |gradient| of one micro-batch that fits."""
        return (
            0.0
            if self.exponents[i] is None and self.width != 64
            else 2.0 ** min(self.bits - self.shift(i), 1023)
        )

    def least(self, i: int) -> float:
        """The least peak that the unit is fine enough for; known units follow the peaks,
        guessed ones may be too coarse."""
        return 2.0 ** (LEAST_BITS - self.shift(i)) if self.exponents[i] is None else 0.0

    def judge(self, peaks: Sequence[float]) -> RoundingVerdict:
        """`peaks`: of each parameter the greatest |gradient| that any micro-batch of the step
        had. AGAIN changes the units."""
        if not all(map(math.isfinite, peaks)):
            return RoundingVerdict.BAD
        over = [
            i for i, peak in enumerate(peaks) if peak > self.limit(i) or 0.0 < peak < self.least(i)
        ]
        # of a first step in wider integers than are to come, what fitted is known now as well
        known = over if self.width == self.word or not over else range(len(peaks))
        new = {i: math.frexp(peaks[i])[1] for i in known if peaks[i] > 0.0}
        self.exponents = [new.get(i, e) for i, e in enumerate(self.exponents)]
        return RoundingVerdict.AGAIN if over else RoundingVerdict.GOOD

    def advance(self, peaks: Sequence[float]) -> None:
        """After a step that was good: follow the peaks, upwards at once and downwards by one
        bit a step."""
        new = list(self.exponents)
        for i, (peak, exponent) in enumerate(zip(peaks, new, strict=True)):
            if peak > 0:
                found = math.frexp(peak)[1]
                new[i] = found if exponent is None else max(found, exponent - 1)
        self.exponents = new


class Scratch:
    """A CPU's buffers of one chunk, by dtype; views of them are kept, as making one costs as
    much as a small sum."""

    def __init__(self) -> None:
        self._made: dict[torch.dtype, torch.Tensor] = {}
        self._views: dict[tuple[torch.dtype, tuple[int, ...]], tuple[torch.Tensor, ...]] = {}

    def of(self, dtype: torch.dtype, *sizes: int) -> tuple[torch.Tensor, ...]:
        """One buffer cut into pieces of `sizes`, and last the whole of them."""
        if (dtype, sizes) not in self._views:
            if dtype not in self._made:
                self._made[dtype] = torch.empty(CHUNK, dtype=dtype)
            whole = self._made[dtype][: sum(sizes)]
            self._views[dtype, sizes] = (*torch.split(whole, list(sizes)), whole)
        return self._views[dtype, sizes]


def add_rounded(
    grads: Sequence[torch.Tensor], shifts: Sequence[int], total: torch.Tensor, scratch: Scratch
) -> list[float]:
    """total += round(grad * 2**shift) on a CPU, for gradients that lie in `total` one after the
    other. Returns the max |grad| of each.

    grads: all float32 or all float64, (n_i,); total: int32 or int64, (sum of n_i,). One gradient,
    or several of CHUNK elements together. A NaN's peak is NaN. Where a product does not fit, what
    is added is of no meaning; the peak tells.
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
        # powers of two: exact; 2**127 is the last that float32 has
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
    grads: list[torch.Tensor], shifts: Sequence[int], total: torch.Tensor
) -> torch.Tensor:
    """The same for a GPU, and of any size: few kernels for small gradients, a fused one for each
    large one.

    Returns the peaks, (len(grads),).
    """
    fused = fused_kernel(total.device.type) if any(g.numel() >= FUSE_FROM for g in grads) else None
    if fused is None:
        return _add_in_steps(grads, shifts, total)
    peaks: list[torch.Tensor] = []
    offset = 0
    for large, run in groupby(
        zip(grads, shifts, strict=True), key=lambda pair: pair[0].numel() >= FUSE_FROM
    ):
        some, their = zip(*run, strict=True)
        if large:
            for g, shift in zip(some, their, strict=True):
                peaks.append(
                    fused(
                        g, _factors(shift, g.dtype, g.device), total[offset : offset + g.numel()]
                    ).view(1)
                )
                offset += g.numel()
        else:
            size = sum(g.numel() for g in some)
            peaks.append(_add_in_steps(list(some), their, total[offset : offset + size]))
            offset += size
    return torch.cat(peaks)


def _add_in_steps(
    grads: list[torch.Tensor], shifts: Sequence[int], total: torch.Tensor
) -> torch.Tensor:
    peaks = torch.stack(torch._foreach_norm(grads, math.inf))
    scaled = torch._foreach_mul(grads, [2.0 ** min(shift, 126) for shift in shifts])
    if max(shifts) > 126:
        torch._foreach_mul_(scaled, [2.0 ** max(shift - 126, 0) for shift in shifts])
    total.add_(torch.cat(scaled).round_().to(total.dtype))
    return peaks


@functools.cache
def _factors(shift: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """2**shift as two factors that a float32 has, on the device: a kernel that takes them as
    data is compiled once."""
    return torch.tensor(
        [2.0 ** min(shift, 126), 2.0 ** max(shift - 126, 0)], dtype=dtype, device=device
    )


def _add_and_peak(grad: torch.Tensor, factors: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    total.add_((grad * factors[0] * factors[1]).round().to(total.dtype))
    return grad.abs().amax()


@functools.cache
def fused_kernel(
    device: str,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """`_add_and_peak` as one pass over memory; the single steps move more than twice as many
    bytes. None: no compiler here."""
    kernel = torch.compile(_add_and_peak, dynamic=True)
    try:
        grad, factors = (
            torch.zeros(8, device=device),
            _factors(0, torch.float32, torch.device(device)),
        )
        for word in INTEGERS.values():
            kernel(grad, factors, torch.zeros(8, dtype=word, device=device))
    except Exception as e:
        # whatever a compiler's absence looks like on this machine: the single steps do the same
        warnings.warn(
            "exact sums take single steps, which are slower, as their kernel could not be "
            f"compiled: {e}",
            stacklevel=2,
        )
        return None
    return kernel


def divide_into(
    out: torch.Tensor,
    total: torch.Tensor,
    weight: float | torch.Tensor,
    shift: int,
    scratch: Scratch,
) -> None:
    """out = total / (weight * 2**shift): in float64, then rounded to out's dtype. All (n,);
    weight: a number, or 0-d float64."""
    below = weight * 2.0**shift
    if total.device.type != "cpu":
        out.copy_(total.double().div_(below))
        return
    for o, t in zip(torch.split(out, CHUNK), torch.split(total, CHUNK), strict=True):
        o.copy_(scratch.of(torch.float64, t.numel())[-1].copy_(t).div_(below))


def exact_norm(
    parts: Iterable[torch.Tensor],
    numel: int,
    device: torch.device,
    greatest: Callable[[torch.Tensor], object] | None = None,
    add_up: Callable[[torch.Tensor], object] | None = None,
) -> torch.Tensor:
    """Euclidean norm of everything in `parts` (real numbers, (n,) each) on all ranks, 0-d float32;
    any cut of `parts` gives the same bits.

    `numel`: their number on all ranks; `greatest` and `add_up` make an int64 tensor the maximum and
    sum over ranks. Squares are summed as integers, of as many limbs as it takes for a relative
    error of the sum below 2**-20 at worst, 2**-24 and less in practice.
    """
    parts = [p for p in parts if p.numel()]
    top = torch.zeros((), dtype=torch.float64, device=device)
    if parts:
        top = torch.stack([torch.stack(torch.aminmax(p)).abs().max().double() for p in parts]).max()
    # of numbers >= 0 these sort like the numbers
    bits = torch.nan_to_num(top, nan=math.inf, posinf=math.inf).view(torch.int64)
    if greatest is not None:
        greatest(bits)
    peak = float(bits.view(torch.float64))
    if not 0 < peak < math.inf:
        return torch.tensor(math.nan if peak else 0.0, dtype=torch.float32, device=device)
    exponent = math.frexp(peak)[1]  # |x| < 2**exponent
    width = (62 - numel.bit_length()) // 2 * 2  # bits of a limb: numel of them add up below 2**62
    # all that the last one rounds is below 2**-22 of the greatest square
    limbs = -(-(numel.bit_length() + 22) // width)
    sums = torch.zeros(limbs, dtype=torch.int64, device=device)
    size = CHUNK if device.type == "cpu" else 1 << 24
    for part in parts:
        for piece in torch.split(part, size):
            x = piece.double().mul_(2.0 ** (width // 2 - max(exponent, -900)))
            x.mul_(x)  # below 2**width
            for limb in range(limbs - 1):
                whole = x.to(torch.int64)  # cuts off; the rest is exact and goes to the next limb
                sums[limb] += whole.sum()
                x.frac_().mul_(2.0**width)
            sums[limbs - 1] += x.round_().to(torch.int64).sum()
    if add_up is not None:
        add_up(sums)
    square = 0
    for limb in sums.tolist():
        square = (square << width) + limb
    return torch.tensor(
        math.ldexp(math.sqrt(square / (1 << limbs * width)), max(exponent, -900)),
        dtype=torch.float32,
        device=device,
    )
