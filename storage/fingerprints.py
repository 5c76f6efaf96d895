"""64 bits of what a tensor holds, made where it lies: to copy gigabytes to the host would stop the
training. Finds differences, not forgers."""

from __future__ import annotations

import torch
import xxhash

CHUNK = 1 << 22  # elements of a GPU's tensor that are hashed at a time


def fingerprint(tensor: torch.Tensor) -> str:
    """Of its bytes in row-major order; a GPU's differs from a CPU's of the same."""
    if tensor.numel() == 0:
        return "empty"
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    if not raw.is_cuda:
        return xxhash.xxh3_64_hexdigest(raw.cpu().numpy().data)
    return f"{int(weighted(raw)) & (1 << 64) - 1:016x}"


def weighted(raw: torch.Tensor) -> torch.Tensor:
    """A 64-bit sum of bytes (n,), each times an odd number that is its place's own; 0-d int64,
    on the same device."""
    words = (
        raw[: len(raw) // 4 * 4].view(torch.int32)
        if raw.storage_offset() % 4 == 0
        else raw[:0].view(torch.int32)
    )
    rest = raw[len(words) * 4 :]
    total = torch.zeros((), dtype=torch.int64, device=raw.device)
    for numbers, first in ((words, 0), (rest, len(words))):
        for start in range(0, len(numbers), CHUNK):
            piece = numbers[start : start + CHUNK]
            place = torch.arange(
                first + start, first + start + len(piece), dtype=torch.int64, device=raw.device
            )
            place = (place + 1) * -7046029254386353131  # 0x9E3779B97F4A7C15
            total += ((place ^ (place >> 29)) | 1).mul_(piece).sum()
    return total
