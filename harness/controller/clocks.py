"""How much of the time between two controllers counts to a run's hours, whatever their clocks say.

A successor sees the time since its predecessor's last fact as the difference of two wall clocks,
and either may be hours wrong. What the run's nodes wrote meanwhile, by their own clocks, says how
long it went on. A difference of more than `CLOCKS_AGREE_S` between the two is not believed: no more
is counted than the nodes prove and that much, and no less than they prove.

Pure: knows a store's interface.
"""

from __future__ import annotations

import math
import statistics

from harness.bucket.archive import segments
from harness.core.values import BadObject, number, parsed
from storage.errors import NotFound
from storage.objects import ObjectStore

CLOCKS_AGREE_S = 3600.0
LITTLE_S = 1800.0  # a supervisor has started it again: no need to look
MOST_WRITERS = 64  # of a run's nodes, whose newest facts are looked at


def counted(store: ObjectStore, last_s: float, now_s: float) -> tuple[float, str]:
    """Seconds since the last controller's fact (`last_s`, by its clock) that count, as of `now_s`
    by ours; and what is to be told of it, or "". Raises StoreError."""
    claimed_s = now_s - last_s
    if abs(claimed_s) < LITTLE_S:
        return claimed_s, ""
    proven_s = max(0.0, _told_s(store, last_s) - last_s)
    if abs(claimed_s - proven_s) <= CLOCKS_AGREE_S:
        return claimed_s, ""
    ahead = claimed_s > proven_s
    counts_s = proven_s + CLOCKS_AGREE_S if ahead else proven_s
    how = "ahead of" if ahead else "behind"
    what = "that goes on from there" if ahead else "that has passed"
    off_h, claimed_h = abs(claimed_s - proven_s) / 3600, claimed_s / 3600
    return counts_s, (
        f"the clock of this controller is {off_h:.1f} h {how} the newest facts of the run: of the "
        f"{claimed_h:.1f} h since its last controller, {counts_s / 3600:.1f} h count to its hours, "
        f"as time {what}; set the clock right if it is wrong"
    )


def _told_s(store: ObjectStore, last_s: float) -> float:
    """When the run's nodes told something last: the median of those that did after `last_s`, so
    that one wrong clock proves nothing; `last_s` if none did."""
    newest = [
        keys[max(keys)]
        for writer, keys in segments(store).items()
        if keys and not writer.startswith("controller-")
    ]
    told = [t for key in newest[-MOST_WRITERS:] if (t := _time_of(store, key)) > last_s]
    return statistics.median_low(told) if told else last_s


def _time_of(store: ObjectStore, key: str) -> float:
    """Of the last fact in a segment; -inf: of none that can be read."""
    try:
        body = parsed(store.get(key).rstrip().rpartition(b"\n")[2])
        return number(body.get("t"), 0.0) if isinstance(body, dict) else -math.inf
    except (NotFound, BadObject):
        return -math.inf
