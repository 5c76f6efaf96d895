"""What a node does when nobody leads its run any more: it trains on, but not for ever. Used by
`run_state.py`.

While somebody leads, the controller keeps the run's limits. It leaves them in the bucket
(`RunLimits`), with what is spent, what each attempt costs, and what must be held back for its end.
When that object is written no more, each node reckons on from it, by its own monotonic clock: what
all of the nodes cost since, though some may have gone. It drains when the budget or the hours are
used up: a controller that has died cannot let the fleet run all night.

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
from harness.bucket.limits import RunLimits

LOOK_EVERY_S = 60.0  # so often the lease is looked at
COUNTED_S = 3 * LOOK_EVERY_S  # of the time between two looks, no more than this
# a controller that has not written the limits anew for so many times `every_s`, and for so long,
# keeps them no more
MISSED, STILL_S = 3.0, 2 * LOOK_EVERY_S


@dataclass
class Leaderless:
    """One node's judgement. `bound_s`: so long it goes on without a leader; 0: for ever."""

    bound_s: float
    term: int = 0  # newest that was seen
    still_s: float = 0.0  # for so long its beat was seen to stand still
    beat: bytes | None = None
    _looked_s: float = 0.0

    def see(self, now: float, term: int, beat: bytes) -> str:
        """The newest term (0: none) and its beat, as they are at `now` (s, by this node's own
        clock). Why the node is to leave, or ""."""
        same = self.beat == beat and self.term == term
        self.still_s = (
            self.still_s + min(max(0.0, now - self._looked_s), COUNTED_S) if same else 0.0
        )
        self.term, self.beat, self._looked_s = term, beat, now
        if not term or beat == RELEASED or not self.bound_s or self.still_s < self.bound_s:
            return ""
        return (
            f"nobody leads the run: the beat of its controller (lease, term {term}) has stood "
            f"still for {self.bound_s / 3600:g} h"
        )


@dataclass
class LimitsKeeper:
    """One node's judgement of whether its run is beyond its limits while nobody keeps them."""

    limits: RunLimits | None = None  # the newest that was seen
    seen_s: float = 0.0  # it was seen first
    read_s: float = 0.0  # it was not written before this
    _looked_s: float | None = None

    def see(self, now: float, found: RunLimits | None, lease: Leaderless) -> str:
        """What lies in the bucket at `now` (s, by this node's own clock; None: nothing that can be
        read, so the last that was read counts), and what was seen of the lease until now. Why the
        node is to leave, or ""."""
        known = self.limits
        if found is not None and (
            known is None or (found.term, found.version) > (known.term, known.version)
        ):
            # what was there when we came may be as old as our launch
            before_s = now - found.launch_s if self._looked_s is None else self._looked_s
            self.limits, self.seen_s, self.read_s = found, now, before_s
        self._looked_s = now
        if self.limits is None or now - self.seen_s < max(MISSED * self.limits.every_s, STILL_S):
            return ""
        # by a controller that knows of no such object, or has not come to write its own
        led = lease.term > self.limits.term and lease.still_s < STILL_S
        if led and lease.beat != RELEASED:
            return ""
        return self._beyond(self.limits, now - self.read_s + LOOK_EVERY_S)

    def _beyond(self, limits: RunLimits, since_s: float) -> str:
        """`since_s`: since the limits were written, until we look again."""
        why = f"nobody leads the run (its limits were last written {since_s / 60:.0f} min ago)"
        # all of them go on, and are billed for a while after they have left
        yet_usd = sum(a.usd_per_h * (since_s + a.yet_s) / 3600 for a in limits.attempts)
        if limits.budget_usd is not None and limits.spent_usd + yet_usd >= limits.budget_usd:
            return f"{why}, and its budget of {limits.budget_usd:g} USD is spent"
        if limits.left_s is not None and since_s >= limits.left_s:
            return f"{why}, and its hours are over"
        if limits.leaderless_s is not None and since_s >= limits.leaderless_s:
            return f"{why}, and it was to go on for {limits.leaderless_s / 60:g} min without"
        return ""
