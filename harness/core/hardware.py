"""Peak arithmetic, memory and links of GPUs (`peaks.csv`), for utilisation, prices per useful work
and plans."""

from __future__ import annotations

import functools
import re

from harness.core import tables

PRECISIONS = ("bfloat16", "float16", "tf32", "float32")


@functools.cache
def _rows() -> tuple[tuple[re.Pattern[str], dict[str, float]], ...]:
    """(What a name looks like inside a device's, its numbers by column), longest names first."""
    found = []
    for row in tables.rows("peaks.csv"):
        # "RTX 4090", "RTX4090"
        words = r"[\s_-]*".join(re.findall(r"[a-z]+|[0-9]+", row["name"].lower()))
        pattern = re.compile(rf"(?<![a-z0-9]){words}(?![0-9])")  # an A1000 is no A100
        columns = (*PRECISIONS, "memory_gb", "link_gb_s")
        found.append((len(row["name"]), pattern, {c: float(row[c]) for c in columns if row[c]}))
    return tuple((pattern, numbers) for _, pattern, numbers in sorted(found, key=lambda f: -f[0]))


def _of(device_name: str) -> dict[str, float]:
    """A10G is not A10: the longest matching name wins."""
    name = device_name.lower()
    return next((numbers for pattern, numbers in _rows() if pattern.search(name)), {})


def peak_flops(device_name: str, precision: str = "") -> float | None:
    """FLOP/s that one device can do at most, dense, in "bfloat16", "float16", "tf32" or "float32";
    by default in the better of the first two. None if that is unknown (peaks.csv)."""
    numbers = _of(device_name)
    asked = [precision] if precision else ["bfloat16", "float16"]
    tflops = [numbers[p] for p in asked if p in numbers]
    return max(tflops) * 1e12 if tflops else None


def gpu_memory(device_name: str) -> float | None:
    """Bytes of one device; None if that is unknown."""
    found = _of(device_name).get("memory_gb")
    return None if found is None else found * 1e9


def link_speed(device_name: str) -> float | None:
    """Bytes a second that one device sends to others of its node; None if that is unknown."""
    found = _of(device_name).get("link_gb_s")
    return None if found is None else found * 1e9
