"""What a node does when nobody leads its run any more: it trains on, but not for ever. Used by
`run_state.py`.

A controller may be killed, or its laptop closed; nodes need none in order to train, to take
snapshots and to finish. But without one nobody replaces lost nodes, keeps a budget, or ends a node
that hangs. So a node that has seen the lease's beat stand still for `bound_s` drains. A run that
was never led (plain `sky launch`, managed jobs), or whose last leader gave the lease back, is not
concerned.

Stillness is what was really seen: of two looks that show the same beat, the time between them
counts, and no more than three usual pauses of it. So a machine that was suspended, or a bucket that
was silent, is not mistaken for a leader who was.

Costs two small reads per node and minute: 0.00005 USD an hour on S3.

Pure: knows no store and no clock; `see` is told what was seen, and when.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.bucket.lease import RELEASED

LOOK_EVERY_S = 60.0  # so often the lease is looked at
COUNTED_S = 3 * LOOK_EVERY_S  # of the time between two looks, no more than this


@dataclass
class Leaderless:
    """One node's judgement. `bound_s`: so long it goes on without a leader; 0: for ever."""

    bound_s: float
    term: int = 0  # newest that was seen
    still_s: float = 0.0  # for so long its beat was seen to stand still
    _beat: bytes | None = None
    _looked_s: float = 0.0

    def see(self, now: float, term: int, beat: bytes) -> str:
        """The newest term (0: none) and its beat, as they are at `now` (s, by this node's own
        clock). Why the node is to leave, or ""."""
        same = self._beat == beat and self.term == term
        self.still_s = (
            self.still_s + min(max(0.0, now - self._looked_s), COUNTED_S) if same else 0.0
        )
        self.term, self._beat, self._looked_s = term, beat, now
        if not term or beat == RELEASED or not self.bound_s or self.still_s < self.bound_s:
            return ""
        return (
            f"nobody leads the run: the beat of its controller (lease, term {term}) has stood "
            f"still for {self.bound_s / 3600:g} h"
        )
