"""What snapshots have cost the training, in seconds and as a share of it, by cause. Pure.

Blocked: it stood still to copy its state. Slower: steps beside the sending were longer than others,
as far as that was measured. Waited: it had nothing left to do but to wait for the commit, at its
end or before it left.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from harness.core.facts import SnapshotCommitted
from harness.core.losses import ORDERLY, cost_s
from harness.views.rows import EpochRow


@dataclass(frozen=True)
class SnapshotCosts:
    """Seconds, each one of all ranks together. `trained_s`: of worlds, from the first step of each
    to its last one."""

    blocked_s: float = 0.0
    slower_s: float = 0.0
    waited_s: float = 0.0
    trained_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.blocked_s + self.slower_s + self.waited_s

    @property
    def share(self) -> float:
        """Of the time that the run has trained, and waited for snapshots; 0: it has not."""
        return self.total_s / max(self.trained_s + self.waited_s, self.total_s, 1e-9)

    def to_json(self) -> dict[str, float]:
        return {**asdict(self), "total_s": self.total_s, "share": self.share}


def snapshot_costs(
    committed: Iterable[SnapshotCommitted], epochs: Iterable[EpochRow] = ()
) -> SnapshotCosts:
    blocked_s = slower_s = waited_s = 0.0
    for one in committed:
        stall_s = max(0.0, one.stall_s)
        blocked_s += stall_s
        if one.why in ORDERLY:
            waited_s += max(0.0, one.commit_s - stall_s)
        else:
            slower_s += cost_s(stall_s, one.slowdown, one.commit_s) - stall_s
    trained_s = sum(
        max(0.0, e.last_s - e.first_s)
        for e in epochs
        if e.first_s is not None and e.last_s is not None
    )
    return SnapshotCosts(blocked_s, slower_s, waited_s, trained_s)
