"""The passes over memory that exact sums make on a GPU, as Triton kernels: each takes all gradients
of a unit at once. Runs in the worker; imported only where there is Triton.

Addresses come in a table, since a launch takes no list of tensors. Gradients are cut into blocks,
one for each program; which block is whose depends on sizes alone, so it is worked out once. Peaks
and sums are integers when they meet, so their order does not matter.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

BLOCK = 4096  # elements of one program
KINDS = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
KEPT = 1024  # tables on the device; addresses and units mostly are those of an earlier step


def add(
    grads: Sequence[torch.Tensor],
    shifts: Sequence[int],
    total: torch.Tensor,
    peaks: torch.Tensor,
    places: tuple[int, ...],
) -> None:
    """Add like `fixed_point.add_rounded_together`. `grads`: (n_i,) each, all of one dtype."""
    blocks = _blocks(tuple(g.numel() for g in grads), total.device)
    if blocks.count:
        rows = zip(_addresses(grads), blocks.addresses_in(total), shifts, places, strict=True)
        _add[(blocks.count,)](
            _table(tuple(rows), total.device),
            blocks.table,
            total,
            peaks.view(torch.int64),
            KINDS[grads[0].dtype],
            blocks.aligned and _are_aligned((*grads, total)),
            BLOCK,
        )


def division(
    outs: Sequence[torch.Tensor], totals: Sequence[torch.Tensor], shifts: Sequence[int]
) -> Callable[[torch.Tensor], None]:
    """Return what divides like `fixed_point.division`, by a weight: 0-d float64 on the device.
    `outs`, `totals`: (n_i,) each, all of one dtype."""
    device = totals[0].device
    blocks = _blocks(tuple(out.numel() for out in outs), device)
    rows = zip(_addresses(outs), _addresses(totals), shifts, strict=True)
    table = _table(tuple(rows), device)
    aligned = blocks.aligned and _are_aligned((*outs, *totals))
    kind = KINDS[outs[0].dtype]

    def divide(weight: torch.Tensor) -> None:
        if blocks.count:
            _divide[(blocks.count,)](
                table, blocks.table, totals[0], weight, kind, aligned, BLOCK
            )

    return divide


def top(parts: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return what `fixed_point._top` does. `parts`: (n_i,), not empty, at most 32 bits wide."""
    bits = torch.zeros((), dtype=torch.int64, device=device)
    for part in parts:
        _top[(triton.cdiv(part.numel(), BLOCK),)](part, part.numel(), bits, BLOCK)
    return bits


def limbs(
    parts: Sequence[torch.Tensor], bits: torch.Tensor, width: int, count: int
) -> torch.Tensor:
    """Return the sums of `fixed_point._limbs` over all `parts`, (count,). `bits`: their `top`."""
    sums = torch.zeros(count, dtype=torch.int64, device=bits.device)
    for part in parts:
        _add_limbs[(triton.cdiv(part.numel(), BLOCK),)](
            part, part.numel(), bits, sums, width, count, BLOCK
        )
    return sums


def root(sums: torch.Tensor, bits: torch.Tensor, width: int) -> torch.Tensor:
    """Return what `fixed_point._root` does."""
    norm = torch.empty((), dtype=torch.float32, device=bits.device)
    _root[(1,)](sums, bits, norm, width, len(sums))
    return norm


def warm(device: torch.device) -> None:
    """Compile what a run needs, apart from the dtypes and sizes that only it knows. Raises whatever
    a missing compiler shows as."""
    grad, peaks = torch.zeros(4, device=device), torch.zeros(1, dtype=torch.float64, device=device)
    for word in (torch.int64, torch.int32):
        total = torch.zeros(4, dtype=word, device=device)
        add([grad], [0], total, peaks, (0,))
        division([grad], [total], [0])(torch.ones_like(peaks[0]))
    bits = top([grad], device)
    root(limbs([grad], bits, 34, 2), bits, 34)


def _addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [t.data_ptr() for t in tensors]


def _are_aligned(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether each may be read 16 bytes at a time."""
    return all(t.data_ptr() % 16 == 0 for t in tensors)


def _there(rows: Sequence[tuple[int, ...]], device: torch.device) -> torch.Tensor:
    """Copy rows of integers to the device, without a wait for what it was told before."""
    pinned = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


@functools.lru_cache(KEPT)
def _table(rows: tuple[tuple[int, ...], ...], device: torch.device) -> torch.Tensor:
    """Return what a kernel is told of each tensor."""
    return _there(rows, device)


@dataclass(frozen=True)
class _Blocks:
    """The blocks of tensors of certain sizes, one for each program."""

    begins: list[int]  # of each tensor, where they lie one after the other
    aligned: bool  # whether each begins there at a multiple of 16 bytes
    count: int  # of programs
    table: torch.Tensor  # (count, 3): its tensor, that one's size, the block's first element

    def addresses_in(self, total: torch.Tensor) -> list[int]:
        first, width = total.data_ptr(), total.element_size()
        return [first + width * begin for begin in self.begins]


@functools.lru_cache(KEPT)
def _blocks(sizes: tuple[int, ...], device: torch.device) -> _Blocks:
    begins = list(itertools.accumulate(sizes, initial=0))[:-1]
    programs = [(i, n, first) for i, n in enumerate(sizes) for first in range(0, n, BLOCK)]
    aligned = all(n % 4 == 0 for n in sizes)
    return _Blocks(begins, aligned, len(programs), _there(programs, device))


@triton.jit  # type: ignore[untyped-decorator]
def _rounded(x, LARGE: tl.constexpr):  # type: ignore[no-untyped-def]
    # What has no fraction stays; below, the sum has no bits for one, and is rounded to even.
    size = tl.abs(x)
    whole = tl.where(size < LARGE, (size + LARGE) - LARGE, size)
    return tl.where(x < 0, -whole, whole)


@triton.jit  # type: ignore[untyped-decorator]
def _add(  # type: ignore[no-untyped-def]
    table,  # (n, 4): addresses of gradient and of its total, shift, place among the peaks
    blocks,
    total,  # for its dtype
    peaks,
    KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = blocks + 3 * tl.program_id(0)
    row = table + 4 * tl.load(block)
    numel = tl.load(block + 1)
    first = tl.load(block + 2)
    grad = tl.load(row).to(tl.pointer_type(KIND))
    sums = tl.load(row + 1).to(total.dtype)
    shift = tl.load(row + 2)
    if ALIGNED:
        numel = tl.multiple_of(numel, 4)
        first = tl.multiple_of(first, BLOCK)
        grad = tl.multiple_of(grad, 16)
        sums = tl.multiple_of(sums, 16)
    at = first + tl.arange(0, BLOCK)
    g = tl.load(grad + at, mask=at < numel, other=0.0)
    # the bits of numbers >= 0 sort like the numbers, and NaN's are above infinity's
    if KIND.primitive_bitwidth == 64:
        peak = tl.max(tl.abs(g).to(tl.int64, bitcast=True), axis=0)
        x = _rounded(g * ((shift + 1023) << 52).to(tl.float64, bitcast=True), 2.0**52)
    else:
        g = g.to(tl.float32)
        narrow = tl.max(tl.abs(g).to(tl.int32, bitcast=True), axis=0)
        peak = narrow.to(tl.float32, bitcast=True).to(tl.float64).to(tl.int64, bitcast=True)
        # powers of two as two factors that float32 can hold
        one = ((tl.minimum(shift, 126) + 127) << 23).to(tl.int32)
        other = ((tl.maximum(shift - 126, 0) + 127) << 23).to(tl.int32)
        x = g * one.to(tl.float32, bitcast=True)
        x = _rounded(x * other.to(tl.float32, bitcast=True), 2.0**23)
    tl.atomic_max(peaks + tl.load(row + 3), peak)
    before = tl.load(sums + at, mask=at < numel, other=0)
    tl.store(sums + at, before + x.to(before.dtype), mask=at < numel)


@triton.jit  # type: ignore[untyped-decorator]
def _divide(  # type: ignore[no-untyped-def]
    table,  # (n, 3): addresses of quotient and total, shift
    blocks,
    total,  # for its dtype
    weight,
    KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = blocks + 3 * tl.program_id(0)
    row = table + 3 * tl.load(block)
    numel = tl.load(block + 1)
    first = tl.load(block + 2)
    out = tl.load(row).to(tl.pointer_type(KIND))
    sums = tl.load(row + 1).to(total.dtype)
    shift = tl.load(row + 2)
    if ALIGNED:
        numel = tl.multiple_of(numel, 4)
        first = tl.multiple_of(first, BLOCK)
        out = tl.multiple_of(out, 16)
        sums = tl.multiple_of(sums, 16)
    at = first + tl.arange(0, BLOCK)
    q = tl.load(sums + at, mask=at < numel, other=0).to(tl.float64) / tl.load(weight)
    q = q * ((1023 - shift) << 52).to(tl.float64, bitcast=True)
    if KIND.primitive_bitwidth < 64:
        q = q.to(tl.float32)  # narrower ones too are rounded by way of it, as torch does
    tl.store(out + at, q.to(KIND), mask=at < numel)


@triton.jit  # type: ignore[untyped-decorator]
def _top(part, numel, bits, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(part + at, mask=at < numel, other=0.0).to(tl.float32)
    narrow = tl.max(tl.abs(x).to(tl.int32, bitcast=True), axis=0)
    peak = narrow.to(tl.float32, bitcast=True).to(tl.float64).to(tl.int64, bitcast=True)
    tl.atomic_max(bits, tl.minimum(peak, 0x7FF0_0000_0000_0000))  # infinity's; NaN's are above


@triton.jit
def _exponent(bits):  # type: ignore[no-untyped-def]
    found = tl.minimum(tl.maximum((bits >> 52) - 1022, -900), 1000)
    return tl.where(bits == 0, 0, found)


@triton.jit  # type: ignore[untyped-decorator]
def _add_limbs(  # type: ignore[no-untyped-def]
    part,
    numel,
    bits,
    sums,
    WIDTH: tl.constexpr,
    LIMBS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    scale = (WIDTH // 2 - _exponent(tl.load(bits)) + 1023) << 52
    x = tl.load(part + at, mask=at < numel, other=0.0).to(tl.float64)
    x = x * scale.to(tl.float64, bitcast=True)
    x = x * x  # exact, and below 2**WIDTH
    for limb in tl.static_range(LIMBS - 1):
        whole = x.to(tl.int64)
        tl.atomic_add(sums + limb, tl.sum(whole, axis=0))
        x = (x - whole.to(tl.float64)) * (2.0**WIDTH)
    tl.atomic_add(sums + LIMBS - 1, tl.sum(_rounded(x, 2.0**52).to(tl.int64), axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def _root(  # type: ignore[no-untyped-def]
    sums, bits, norm, WIDTH: tl.constexpr, LIMBS: tl.constexpr
):
    square = tl.load(sums).to(tl.float64)
    for limb in tl.static_range(1, LIMBS):
        square = square * (2.0**WIDTH) + tl.load(sums + limb).to(tl.float64)
    top = tl.load(bits)
    power = ((_exponent(top) + 1023) << 52).to(tl.float64, bitcast=True)
    found = tl.sqrt(square * (2.0 ** (-LIMBS * WIDTH))) * power
    tl.store(norm, tl.where(top == 0x7FF0_0000_0000_0000, float("nan"), found).to(tl.float32))
