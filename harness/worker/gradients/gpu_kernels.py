"""The passes over memory that exact sums make on a GPU, as Triton kernels: each takes all gradients
of a unit at once. Runs in the worker; imported only where there is Triton.

A gradient's address and its shift come in a table, since a launch takes no list of tensors. A unit
is cut into blocks, one for each program; which block is whose depends on sizes alone, so it is
worked out once. Peaks and sums are integers when they meet, so their order does not matter.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

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


def add(grads: Sequence[torch.Tensor], shifts: Sequence[int], total: torch.Tensor) -> torch.Tensor:
    """Add round(grad * 2**shift) to `total`, like `fixed_point.add_rounded`. `grads`: (n_i,) each,
    all of one dtype. Return the peaks, (len(grads),), float64."""
    peaks = torch.zeros(len(grads), dtype=torch.float64, device=total.device)
    sizes = tuple(g.numel() for g in grads)
    if programs := _count(sizes):
        _add[(programs,)](
            _table(tuple(g.data_ptr() for g in grads), tuple(shifts), total.device),
            *_blocks(sizes, total.device),
            total,
            peaks.view(torch.int64),
            KINDS[grads[0].dtype],
            _is_aligned((*grads, total), sizes),
            BLOCK,
        )
    return peaks


def divide(
    outs: Sequence[torch.Tensor],
    total: torch.Tensor,
    weight: torch.Tensor,
    shifts: Sequence[int],
) -> None:
    """Write total / (weight * 2**shift) into `outs`, like `fixed_point.divide_together`. `outs`:
    (n_i,) each, all of one dtype; weight: 0-d float64 on the device."""
    sizes = tuple(out.numel() for out in outs)
    if programs := _count(sizes):
        _divide[(programs,)](
            _table(tuple(out.data_ptr() for out in outs), tuple(shifts), total.device),
            *_blocks(sizes, total.device),
            total,
            weight,
            KINDS[outs[0].dtype],
            _is_aligned((*outs, total), sizes),
            BLOCK,
        )


def add_limbs(
    part: torch.Tensor, scale: torch.Tensor, width: int, limbs: int, sums: torch.Tensor
) -> None:
    """Add the squares of `part` (n,), times scale**2, to `sums` (limbs,), int64, as
    `fixed_point._limbs` makes them. part: at most 32 bits wide; scale: 0-d float64."""
    if programs := _count((part.numel(),)):
        _add_limbs[(programs,)](part, part.numel(), scale, sums, width, limbs, BLOCK)


def warm(device: torch.device) -> None:
    """Compile what a run needs, apart from the dtypes and sizes that only it knows. Raises whatever
    a missing compiler shows as."""
    grad, weight = torch.zeros(4, device=device), torch.ones((), dtype=torch.float64, device=device)
    for word in (torch.int64, torch.int32):
        total = torch.zeros(4, dtype=word, device=device)
        add([grad], [0], total)
        divide([grad], total, weight, [0])


def _count(sizes: tuple[int, ...]) -> int:
    return sum(-(-n // BLOCK) for n in sizes)


def _is_aligned(tensors: Sequence[torch.Tensor], sizes: tuple[int, ...]) -> bool:
    """Return whether each may be read 16 bytes at a time."""
    return all(t.data_ptr() % 16 == 0 for t in tensors) and all(n % 4 == 0 for n in sizes)


def _there(rows: Sequence[tuple[int, ...]], device: torch.device) -> torch.Tensor:
    """Copy rows of integers to the device, without a wait for what it was told before."""
    pinned = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)


@functools.lru_cache(KEPT)
def _table(
    addresses: tuple[int, ...], shifts: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """Return (n, 2): address and shift of each gradient."""
    return _there(list(zip(addresses, shifts, strict=True)), device)


@functools.lru_cache(KEPT)
def _blocks(sizes: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (n, 2), the place of each gradient in the total and its size; and (programs, 2), the
    gradient of each program and its first element of it."""
    begins = itertools.accumulate(sizes, initial=0)
    layout = list(zip(begins, sizes, strict=False))
    programs = [(i, first) for i, n in enumerate(sizes) for first in range(0, n, BLOCK)]
    return _there(layout, device), _there(programs, device)


@triton.jit  # type: ignore[untyped-decorator]
def _rounded(x, LARGE: tl.constexpr):  # type: ignore[no-untyped-def]
    # What has no fraction stays; below, the sum has no bits for one, and is rounded to even.
    size = tl.abs(x)
    whole = tl.where(size < LARGE, (size + LARGE) - LARGE, size)
    return tl.where(x < 0, -whole, whole)


@triton.jit  # type: ignore[untyped-decorator]
def _add(  # type: ignore[no-untyped-def]
    table,
    layout,
    programs,
    total,
    peaks,
    KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    of = tl.program_id(0)
    i = tl.load(programs + 2 * of)
    first = tl.load(programs + 2 * of + 1)
    begin = tl.load(layout + 2 * i)
    numel = tl.load(layout + 2 * i + 1)
    grad = tl.load(table + 2 * i).to(tl.pointer_type(KIND))
    shift = tl.load(table + 2 * i + 1)
    if ALIGNED:
        first = tl.multiple_of(first, BLOCK)
        begin = tl.multiple_of(begin, 4)
        numel = tl.multiple_of(numel, 4)
        grad = tl.multiple_of(grad, 16)
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
    tl.atomic_max(peaks + i, peak)
    where = total + begin + at
    before = tl.load(where, mask=at < numel, other=0)
    tl.store(where, before + x.to(before.dtype), mask=at < numel)


@triton.jit  # type: ignore[untyped-decorator]
def _divide(  # type: ignore[no-untyped-def]
    table,
    layout,
    programs,
    total,
    weight,
    KIND: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    of = tl.program_id(0)
    i = tl.load(programs + 2 * of)
    first = tl.load(programs + 2 * of + 1)
    begin = tl.load(layout + 2 * i)
    numel = tl.load(layout + 2 * i + 1)
    out = tl.load(table + 2 * i).to(tl.pointer_type(KIND))
    shift = tl.load(table + 2 * i + 1)
    if ALIGNED:
        first = tl.multiple_of(first, BLOCK)
        begin = tl.multiple_of(begin, 4)
        numel = tl.multiple_of(numel, 4)
        out = tl.multiple_of(out, 16)
    at = first + tl.arange(0, BLOCK)
    t = tl.load(total + begin + at, mask=at < numel, other=0).to(tl.float64)
    q = t / tl.load(weight) * ((1023 - shift) << 52).to(tl.float64, bitcast=True)
    if KIND.primitive_bitwidth < 64:
        q = q.to(tl.float32)  # narrower ones too are rounded by way of it, as torch does
    tl.store(out + at, q.to(KIND), mask=at < numel)


@triton.jit  # type: ignore[untyped-decorator]
def _add_limbs(  # type: ignore[no-untyped-def]
    part,
    numel,
    scale,
    sums,
    WIDTH: tl.constexpr,
    LIMBS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(part + at, mask=at < numel, other=0.0).to(tl.float64) * tl.load(scale)
    x = x * x  # exact, and below 2**WIDTH
    for limb in tl.static_range(LIMBS - 1):
        whole = x.to(tl.int64)
        tl.atomic_add(sums + limb, tl.sum(whole, axis=0))
        x = (x - whole.to(tl.float64)) * (2.0**WIDTH)
    tl.atomic_add(sums + LIMBS - 1, tl.sum(_rounded(x, 2.0**52).to(tl.int64), axis=0))
