"""The GPU's kernels of exact sums beside what a CPU does, under Triton's interpreter
(TRITON_INTERPRET=1). The interpreter reads subnormal bfloat16 wrongly, and cuts a float32 off where
a GPU rounds it to bfloat16, so those are left to `make gpu`."""

from __future__ import annotations

import math
from unittest.mock import patch

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
            gpu_kernels.division(outs, found.split(SIZES), shifts)(divisor)
            for out, other, part, shift in zip(
                outs, alone, found.split(SIZES), shifts, strict=True
            ):
                fixed_point.divide_into(other, part, divisor, shift, scratch)
                same = torch.equal(out.view(torch.uint8), other.view(torch.uint8))
                assert same or dtype is torch.bfloat16
    grads[5][77] = math.nan
    gpu_kernels.add(grads, shifts, found, kept, PLACES)
    assert math.isnan(kept[PLACES[5]])


def check_norm(dtype: torch.dtype, exponent: int) -> None:
    parts = [(torch.randn(n) * 2.0**exponent).to(dtype) for n in (7333, 1, 4096)]
    numel = 11_430
    wanted = fixed_point.exact_norm(parts, numel, parts[0].device)
    with patch.object(fixed_point, "gpu_kernels", lambda device: gpu_kernels):
        assert torch.equal(fixed_point.exact_norm(parts, numel, parts[0].device), wanted)
        parts[0][-1] = math.nan
        assert fixed_point.exact_norm(parts, numel, parts[0].device).isnan()


if __name__ == "__main__":
    for word in fixed_point.INTEGERS.values():
        for dtype in gpu_kernels.KINDS:
            check(dtype, word)
    for exponent in (-100, 0, 100):
        check_norm(torch.float32, exponent)
        check_norm(torch.bfloat16, exponent)
