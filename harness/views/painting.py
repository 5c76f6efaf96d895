"""Time painted with what it was used for, in whole nanoseconds, so that sums are exact.  Pure."""

from __future__ import annotations

from collections.abc import Iterable

# in the order they are shown
BUCKETS = (
    *("useful", "straggle", "redone", "snapshot"),
    *("provision", "setup", "start", "reform"),
    *("drain", "drained", "idle", "other"),
)
# the first one gets the time
PRECEDENCE = (
    *("snapshot", "straggle", "useful", "redone", "other"),
    *("provision", "setup", "start", "drained", "drain", "idle", "reform"),
)
NANO = 1_000_000_000
Span = tuple[int, int]  # [from, to) in nanoseconds
LabelledSpan = tuple[int, int, str]  # ... and a bucket


def ns(seconds: float) -> int:
    return round(seconds * NANO)


# ---- painting time -------------------------------------------------------------------------------
def paint(layers: Iterable[LabelledSpan], start: int, end: int) -> list[LabelledSpan]:
    """Cut [start, end) into segments without gap or overlap, each in the bucket of highest
    precedence that covers it (`reform` where none does). Neighbours of one bucket are joined."""
    level = {bucket: i for i, bucket in enumerate(PRECEDENCE)}
    cuts: list[tuple[int, int, int]] = []
    for a, b, bucket in layers:
        a, b = max(a, start), min(b, end)
        if a < b:
            cuts += [(a, level[bucket], 1), (b, level[bucket], -1)]
    cuts.sort()
    open_ = [0] * len(PRECEDENCE)
    painted: list[LabelledSpan] = []
    at = start
    for t, i, change in [*cuts, (end, 0, 0)]:
        if t > at:
            bucket = PRECEDENCE[next((k for k, n in enumerate(open_) if n), len(PRECEDENCE) - 1)]
            if painted and painted[-1][2] == bucket:
                painted[-1] = (painted[-1][0], t, bucket)
            else:
                painted.append((at, t, bucket))
            at = t
        open_[i] += change
    return painted


def totals(segments: Iterable[LabelledSpan]) -> dict[str, int]:
    found = dict.fromkeys(BUCKETS, 0)
    for a, b, bucket in segments:
        found[bucket] += b - a
    return found


def apportion(amount: int, weights: dict[str, int]) -> dict[str, int]:
    """`amount` in proportion to `weights`, in whole units that add up to it. Without any weight
    it is `other`."""
    whole = sum(weights.values())
    if not whole:
        return {bucket: amount if bucket == "other" else 0 for bucket in weights}
    shares: dict[str, int] = {}
    before = done = 0
    for bucket, weight in weights.items():  # rounding the running sum loses nothing
        before += weight
        shares[bucket] = amount * before // whole - done
        done += shares[bucket]
    return shares
