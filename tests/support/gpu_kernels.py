"""The GPU's kernels of exact sums beside what a CPU does, under Triton's interpreter
(TRITON_INTERPRET=1). The interpreter reads subnormal bfloat16 wrongly, and cuts a float32 off where
a GPU rounds it to bfloat16, so those are left to `make gpu`."""

from __future__ import annotations

import math

import torch

from harness.worker.gradients import fixed_point, gpu_kernels

SIZES = (40, 7, 1000, 100, 3, 5001, 0, 1024)
SHIFTS = (40, 3, 141, 149, 0, 20, 5, -60)
PLACES = (3, 1, 0, 2, 7, 6, 5, 4)
MOST = {torch.float16: 20, torch.bfloat16: 120}  # shifts with which gradients are no subnormals


def gradients(dtype: torch.dtype, shifts: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    grads = [
        (torch.randn(n, generator=generator) * 2.0 ** (10 - shift)).to(dtype)
        for n, shift in zip(SIZES, shifts, strict=True)
    ]
    grads[3][:2] = torch.tensor([0.0, -0.0])
    if dtype is torch.float32:
        grads[3][2:4] = torch.tensor([2.0**-149, -(2.0**-148)])
    return grads


def check(dtype: torch.dtype, word: torch.dtype) -> None:
    scratch = fixed_point.Scratch()
    shifts = tuple(min(shift, MOST.get(dtype, 149)) for shift in SHIFTS)
    grads = gradients(dtype, shifts)
    # an odd place in memory, and one that may be read 16 bytes at a time
    for at in (1, 4):
        wanted = torch.zeros(sum(SIZES), dtype=word)
        found = torch.zeros(sum(SIZES) + at, dtype=word)[at:]
        wide = fixed_point._widened(grads)
        for _ in range(2):
            peaks = [
                fixed_point.add_rounded([g], [shift], part, scratch)[0]
                for g, shift, part in zip(wide, shifts, wanted.split(SIZES), strict=True)
            ]
            kept = torch.zeros(9, dtype=torch.float64)
            gpu_kernels.add(grads, shifts, found, kept, PLACES)
            assert kept[list(PLACES)].tolist() == peaks and kept[8] == 0
        assert torch.equal(found, wanted)
        for weight in (24.0, 0.1):
            outs = [torch.empty(n, dtype=dtype) for n in SIZES]
            alone = [torch.empty(n, dtype=dtype) for n in SIZES]
            divisor = torch.tensor(weight, dtype=torch.float64)
            gpu_kernels.divide(outs, found.split(SIZES), shifts, divisor)
            for out, other, part, shift in zip(
                outs, alone, found.split(SIZES), shifts, strict=True
            ):
                fixed_point.divide_into(other, part, divisor, shift, scratch)
                same = torch.equal(out.view(torch.uint8), other.view(torch.uint8))
                assert same or dtype is torch.bfloat16
    grads[5][77] = math.nan
    gpu_kernels.add(grads, shifts, found, kept, PLACES)
    assert math.isnan(kept[PLACES[5]])


def check_limbs(dtype: torch.dtype) -> None:
    part = (torch.randn(7333) * 0.01).to(dtype)
    for width, limbs in ((34, 2), (26, 3), (20, 4)):
        scale = torch.tensor(2.0 ** (width // 2), dtype=torch.float64)
        sums = torch.zeros(limbs, dtype=torch.int64)
        gpu_kernels.add_limbs(part, scale, width, limbs, sums)
        assert torch.equal(sums, fixed_point._limbs(part, scale, width, limbs))


if __name__ == "__main__":
    for word in fixed_point.INTEGERS.values():
        for dtype in gpu_kernels.KINDS:
            check(dtype, word)
    for dtype in (torch.float32, torch.bfloat16):
        check_limbs(dtype)
