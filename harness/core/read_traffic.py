"""The cost of reading data: bytes by origin, requests, and reads in progress."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

CACHE = "cache"  # this node's cache
PEER = "peer"  # another node's cache


@dataclass
class Traffic:
    """Read counters of one corpus in one process. `far`: the scheme of its URL, such as "s3";
    `nbytes`: bytes by origin (`far`, PEER, CACHE); CACHE counts what a fetch ahead found there.
    `requests`: chunk requests to the store; `coming`: reads in progress -> their start on the
    monotonic clock."""

    far: str
    nbytes: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    coming: dict[str, float] = field(default_factory=dict)

    def oldest(self) -> tuple[float, str]:
        """Return (start, name) of the oldest read in progress; (inf, "") if there is none."""
        there = [(since_s, what) for what, since_s in list(self.coming.items())]
        return min(there, default=(float("inf"), ""))
