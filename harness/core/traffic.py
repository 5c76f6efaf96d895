"""What reading data costs: bytes by where they came from, requests, and what is on its way."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

CACHE = "cache"  # of the node
PEER = "peer"  # another node's


@dataclass
class Traffic:
    """Of one corpus in one process. `far`: the scheme of its URL, such as "s3"; `nbytes`: by `far`,
    PEER and CACHE, the latter of what was found there when it was to be fetched ahead; `requests`:
    to the store, of chunks; `coming`: what is on its way, and since when by the monotonic clock."""

    far: str
    nbytes: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    coming: dict[str, float] = field(default_factory=dict)

    def oldest(self) -> tuple[float, str]:
        """Since when the longest has been on its way, and what it is; (inf, ""): nothing is."""
        there = [(since_s, what) for what, since_s in list(self.coming.items())]
        return min(there, default=(float("inf"), ""))
