"""Peak arithmetic of GPUs (`peaks.csv`), for utilisation and prices per useful work."""

from __future__ import annotations

import functools
import re

from harness.core import tables


@functools.cache
def _peaks() -> tuple[tuple[re.Pattern[str], dict[str, float]], ...]:
    """(What a name looks like inside a device's, TFLOP/s by precision), longest names first."""
    found = []
    for row in tables.rows("peaks.csv"):
        # "RTX 4090", "RTX4090"
        words = r"[\s_-]*".join(re.findall(r"[a-z]+|[0-9]+", row["name"].lower()))
        pattern = re.compile(rf"(?<![a-z0-9]){words}(?![0-9])")  # an A1000 is no A100
        found.append(
            (
                len(row["name"]),
                pattern,
                {p: float(row[p]) for p in ("bfloat16", "float16", "tf32", "float32") if row[p]},
            )
        )
    return tuple((pattern, peaks) for _, pattern, peaks in sorted(found, key=lambda f: -f[0]))


def peak_flops(device_name: str, precision: str = "") -> float | None:
    """FLOP/s that one device can do at most, dense, in "bfloat16", "float16", "tf32" or "float32";
    by default in the better of the first two. None if that is unknown. A10G is not A10: the longest
    matching name wins (peaks.csv)."""
    by_precision = next(
        (peaks for pattern, peaks in _peaks() if pattern.search(device_name.lower())), {}
    )
    tflops = [
        by_precision[p]
        for p in ([precision] if precision else ["bfloat16", "float16"])
        if p in by_precision
    ]
    return max(tflops) * 1e12 if tflops else None
