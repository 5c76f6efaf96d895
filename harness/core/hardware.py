"""Peak FLOP/s, memory and link speed of GPUs (`peaks.csv`), for utilisation, prices per useful work
and plans."""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Iterator
from importlib import resources

# Tables that ship with the package: CSV files, with comments that name their sources.


def table_rows(name: str, package: str = "harness.core") -> Iterator[dict[str, str]]:
    """Yield the rows of `harness/core/<name>`; lines that begin with # are comments."""
    lines = resources.files(package).joinpath(name).read_text().splitlines()
    yield from csv.DictReader(line for line in lines if not line.startswith("#"))


PRECISIONS = ("bfloat16", "float16", "tf32", "float32")


@functools.cache
def _rows() -> tuple[tuple[re.Pattern[str], dict[str, float]], ...]:
    """Return (pattern of a GPU name within a device's name, its numbers by column), longest names
    first."""
    found = []
    for row in table_rows("peaks.csv"):
        # matches both "RTX 4090" and "RTX4090"
        words = r"[\s_-]*".join(re.findall(r"[a-z]+|[0-9]+", row["name"].lower()))
        pattern = re.compile(rf"(?<![a-z0-9]){words}(?![0-9])")  # an A1000 is no A100
        columns = (*PRECISIONS, "memory_gb", "link_gb_s")
        found.append((len(row["name"]), pattern, {c: float(row[c]) for c in columns if row[c]}))
    return tuple((pattern, numbers) for _, pattern, numbers in sorted(found, key=lambda f: -f[0]))


def _of(device_name: str) -> dict[str, float]:
    """Return a device's numbers by column; {} if unknown. The longest matching name wins: A10G is
    not A10."""
    name = device_name.lower()
    return next((numbers for pattern, numbers in _rows() if pattern.search(name)), {})


def peak_flops(device_name: str, precision: str = "") -> float | None:
    """Return the peak dense FLOP/s of one device in "bfloat16", "float16", "tf32" or "float32"; by
    default in the better of the first two. None if unknown (peaks.csv)."""
    numbers = _of(device_name)
    asked = [precision] if precision else ["bfloat16", "float16"]
    tflops = [numbers[p] for p in asked if p in numbers]
    return max(tflops) * 1e12 if tflops else None


def gpu_memory(device_name: str) -> float | None:
    """Return the memory of one device in bytes, or None if unknown."""
    found = _of(device_name).get("memory_gb")
    return None if found is None else found * 1e9


def link_speed(device_name: str) -> float | None:
    """Return the bytes per second that one device sends to others of its node, or None if
    unknown."""
    found = _of(device_name).get("link_gb_s")
    return None if found is None else found * 1e9
