"""A hash of tensors that does not depend on how they are spread over ranks. Pure: numpy on bytes,
no torch.

The bytes are taken as little-endian words; word i of a tensor has an odd key k(i), the tensor an
odd key t made of its name, dtype and shape, and the hash is the sum of word * k(i) * t modulo 2^64,
plus t for the tensor itself. A sum can be computed in any order and by any number of ranks, each
over its share: so all worlds, and DDP and FSDP2, get the same hash of the same weights without
gathering them. One changed word always changes it (an odd key has an inverse). It detects
differences, not forgery.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import xxhash

BLOCK = 1 << 14  # words; k(i) = inner[i % BLOCK] * outer(i // BLOCK)
AT_ONCE = 8  # blocks at once: few calls, and they fit a processor's cache as 64-bit numbers
BETWEEN_PAUSES = 1 << 20  # words
MASK = (1 << 64) - 1


def weights_sum(
    tensors: Mapping[str, Any],
    files: Mapping[str, memoryview],
    prefix: str,
    known: Mapping[tuple[str, int], int] | None = None,
    made: dict[tuple[str, int], int] | None = None,
    pause: Callable[[int], object] = lambda nbytes: None,
) -> int:
    """Return the sum over all chunks of `tensors` whose name begins with `prefix`, which is not
    hashed. `tensors` is an index as in `Manifest.tensors`, with names of `files` as parts. Add the
    sums of all ranks with `combined`.

    `known`: sums that are not computed again, by tensor and number of the chunk; `made` receives
    all sums. `pause(nbytes)` is called before that many bytes are summed.
    """
    total, made = 0, {} if made is None else made
    for name, entry in tensors.items():
        if name.startswith(prefix):
            for i, chunk in enumerate(entry["chunks"]):
                found = (known or {}).get((name, i))
                if found is None:
                    data = files[chunk["part"]][chunk["start"] : chunk["end"]]
                    found = _chunk_sum(name.removeprefix(prefix), entry, chunk, data, pause)
                made[name, i] = found
                total += found
    return total & MASK


def sum_of_stored(
    tensors: Mapping[str, Any], prefix: str, read: Callable[[str, int, int], memoryview]
) -> str:
    """Return the same hash, as 16 hex digits, of a stored snapshot. `tensors` is the index of its
    manifest; `read(part, start, end)` returns bytes of a part, which the next read may overwrite.
    Raises what `read` raises, and ValueError for bytes that do not fit their tensor."""
    total = 0
    for name, entry in tensors.items():
        if name.startswith(prefix):
            for chunk in entry["chunks"]:
                data = read(chunk["part"], chunk["start"], chunk["end"])
                _check_box(name, entry, chunk, len(data))
                total += _chunk_sum(name.removeprefix(prefix), entry, chunk, data)
    return combined([f"{total & MASK:x}"])


def combined(sums: list[str]) -> str:
    """Add sums, given in hex, and return the hash as 16 hex digits."""
    return f"{sum(int(s, 16) for s in sums) & MASK:016x}"


def _chunk_sum(
    name: str,
    entry: Mapping[str, Any],
    chunk: Mapping[str, Any],
    data: memoryview,
    pause: Callable[[int], object] = lambda nbytes: None,
) -> int:
    shape, sizes, offsets = entry["shape"], chunk["sizes"], chunk["offsets"]
    elements = math.prod(sizes)
    width = len(data) // elements
    word = min(width, 4)
    words = np.frombuffer(data, f"<u{word}")
    key = xxhash.xxh3_64_intdigest(f"{name} {entry['dtype']} {tuple(shape)}".encode()) | 1
    per_element = width // words.itemsize
    total = key if not any(offsets) else 0
    for first, start, n in _runs(shape, sizes, offsets):
        total += key * _run_sum(
            words[start * per_element : (start + n) * per_element], first * per_element, pause
        )
    return total & MASK


def _check_box(name: str, entry: Mapping[str, Any], chunk: Mapping[str, Any], nbytes: int) -> None:
    """Raise ValueError unless the bytes can be a box of that tensor."""
    shape, sizes, offsets = entry["shape"], chunk["sizes"], chunk["offsets"]
    width, rest = divmod(nbytes, math.prod(sizes) or 1)
    lies_in = len(shape) == len(sizes) == len(offsets) and all(
        offset >= 0 and size > 0 and offset + size <= of
        for offset, size, of in zip(offsets, sizes, shape, strict=True)
    )
    if not lies_in or rest or width not in (1, 2, 4, 8, 16):
        raise ValueError(
            f"tensor {name!r}: wanted a box of {shape} at {offsets}, found {nbytes} bytes for "
            f"{sizes}"
        )


def _runs(shape: list[int], sizes: list[int], offsets: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the box as runs that are contiguous in the whole tensor: (index of the first element
    there, in the box, elements)."""
    tail = len(shape)
    while tail > 0 and sizes[tail - 1] == shape[tail - 1]:
        tail -= 1
    inner = max(0, tail - 1)  # this dimension may be partial; all after it are whole
    run = math.prod(sizes[inner:])
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    base = sum(o * s for o, s in zip(offsets, strides, strict=True))
    for i, place in enumerate(np.ndindex(*sizes[:inner])):
        yield base + sum(p * s for p, s in zip(place, strides, strict=False)), i * run, run


def _run_sum(words: np.ndarray[Any, Any], first: int, pause: Callable[[int], object]) -> int:
    total, at, due = 0, 0, 0
    wide = np.empty((min(AT_ONCE, len(words) // BLOCK), BLOCK), np.uint64)
    while at < len(words):
        if at >= due:
            pause((min(len(words), at + BETWEEN_PAUSES) - at) * words.itemsize)
            due = at + BETWEEN_PAUSES
        block, inside = divmod(first + at, BLOCK)
        if inside == 0 and len(words) - at >= BLOCK:  # whole blocks, many at once
            n = min(AT_ONCE, (len(words) - at) // BLOCK)
            np.copyto(wide[:n], words[at : at + n * BLOCK].reshape(n, BLOCK))
            sums = np.multiply(wide[:n], _INNER, out=wide[:n]).sum(axis=1)
            total += sum(int(s) * _outer(block + i) for i, s in enumerate(sums))
            at += n * BLOCK
        else:
            n = min(BLOCK - inside, len(words) - at)
            found = np.multiply(
                words[at : at + n], _INNER[inside : inside + n], dtype=np.uint64
            ).sum(dtype=np.uint64)
            total += int(found) * _outer(block)
            at += n
    return total & MASK


def _outer(block: int) -> int:
    return int(xxhash.xxh3_64_intdigest(block.to_bytes(8, "little"))) | 1


def _inner_keys() -> np.ndarray[Any, Any]:
    keys = [xxhash.xxh3_64_intdigest(i.to_bytes(8, "little"), seed=1) | 1 for i in range(BLOCK)]
    return np.array(keys, np.uint64)


_INNER = _inner_keys()
