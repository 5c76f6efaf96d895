"""What a run has learned about its own speed, about capacity and prices, and what it must keep to:
the part of a `View` that policies forecast by.

Pure values. `controller/learning.py` makes them of facts and records for a real run, a replay of a
market makes them of what its simulated run has seen so far. Neither knows the future.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from harness.core.losses import LossesSeen, derived_interval_s

MOST_SPELLS = 256  # kept of each offer, the newest


@dataclass(frozen=True)
class Spell:
    """For so long an offer had a machine for us (`open`), or had none. `ended`: it then became the
    other; otherwise nobody looked any longer, and it may have gone on."""

    open: bool
    seconds: float
    ended: bool


@dataclass(frozen=True)
class CapacitySeen:
    """What was seen of one offer's capacity. `open`: as last seen; None: never looked. It was so
    from `since_s`, and was last seen to be so at `seen_s` (the run's clock). `node_s` and
    `losses`: seconds that nodes were up there, added up, and how many of them were taken;
    `unnoticed`: of those, without a notice that left time for a snapshot."""

    open: bool | None = None
    since_s: float = 0.0
    seen_s: float = 0.0
    spells: tuple[Spell, ...] = ()  # before this one, the oldest first
    node_s: float = 0.0
    losses: int = 0
    unnoticed: int = 0

    def age_s(self, now_s: float) -> float:
        """For how long it has been as it is."""
        return max(0.0, now_s - self.since_s)

    def after(self, prior: CapacitySeen) -> CapacitySeen:
        """The same with what was known of the offer before this run began. How it is now this run
        knows best, once it has looked."""
        return dataclasses.replace(
            prior if self.open is None else self,
            spells=(*prior.spells, *self.spells)[-MOST_SPELLS:],
            node_s=prior.node_s + self.node_s,
            losses=prior.losses + self.losses,
            unnoticed=prior.unnoticed + self.unnoticed,
        )

    def then(self, spell: Spell, **changes: object) -> CapacitySeen:
        """After that spell."""
        spells = (*self.spells, spell)[-MOST_SPELLS:]
        return dataclasses.replace(self, spells=spells, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class SnapshotPace:
    """How a world would snapshot in some place: every `interval_s` seconds (0: not known), which
    takes a `share` of its training; `lost_s` of it go with a loss without notice."""

    interval_s: float
    lost_s: float
    share: float


@dataclass(frozen=True)
class StepPace:
    """How fast steps were in one kind of world: the median of `step_s` seconds over `steps` steps
    of `ranks` workers, each on one `accelerator`."""

    accelerator: str
    ranks: int
    step_s: float
    steps: int


@dataclass(frozen=True)
class Knowledge:
    """Zeros and empty: not known. Work is counted in worker-seconds: what one worker of speed 1
    (`Offer.speed`) does in a second when the batch divides evenly."""

    total_steps: int = 0
    work: float = 0.0  # of the whole run, worker-seconds: measured, or as the user said
    # steps that are done and not yet committed, as far as the nodes have told
    uncommitted_steps: int = 0
    micro_batches: int = 0  # of a step: a world of more replicas leaves some of them idle
    replica_ranks: int = 1  # workers that do one micro-batch together
    paces: tuple[StepPace, ...] = ()
    # seconds from asking for a node until it trains: launch, set-up, restore
    changeover_s: float = 300.0
    look_s: float = 10.0  # from one decision to the next, at most
    # training that is lost when a node is taken without notice: half a snapshot interval or so
    lost_s: float = 0.0
    # of training, that one snapshot costs, and from its begin to its commit; 0: not known, or the
    # script says how often there is one
    snapshot_cost_s: float = 0.0
    commit_s: float = 0.0
    snapshot_bytes: int = 0
    move_usd: float = 0.0  # for the snapshot to leave the region, once
    home: str = ""  # the place (`Offer.place`) where snapshots are read for nothing
    deadline_s: float | None = None  # the run's clock
    # what may be spent, as `View.spent_usd` counts: the lowest limit that this policy is within
    # (`within_budget`); None: there is none
    budget_usd: float | None = None
    capacity: Mapping[str, CapacitySeen] = field(default_factory=dict)  # by offer
    # by offer: (when, USD per hour) of each change that was seen, the oldest first
    prices: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)

    def snapshots(self, seen: CapacitySeen | None, nodes: int) -> SnapshotPace:
        """Of a world of so many nodes, where that was seen; None: nothing was."""
        if not self.snapshot_cost_s:
            return SnapshotPace(0.0, self.lost_s, 0.0)
        losses = LossesSeen(seen.unnoticed, seen.node_s) if seen else LossesSeen()
        interval_s = derived_interval_s(
            self.snapshot_cost_s, self.commit_s, losses.between_s(nodes)
        )
        share = min(1.0, self.snapshot_cost_s / interval_s)
        return SnapshotPace(interval_s, interval_s / 2 + self.commit_s, share)

    def efficiency(self, ranks: int) -> float:
        """Share of a world's workers that is at work: shares of a step are uneven where the
        micro-batches are no multiple of the replicas, and workers that make no whole replica have
        none."""
        if not self.micro_batches or ranks <= 0:
            return 1.0
        busy = self.micro_batches * self.replica_ranks / self.rounds(ranks)
        return min(1.0, busy / ranks)

    def rounds(self, ranks: int) -> int:
        """Micro-batches that the busiest replica does in a step: how long it takes. Fewer workers
        than a replica needs count as one."""
        return -(-self.micro_batches // max(1, ranks // self.replica_ranks))

    def left(self, committed_step: int) -> float | None:
        """Worker-seconds of work that is still to be done; None: nobody knows."""
        if not self.work:
            return None
        if not self.total_steps:  # the script says how many when it begins
            return None if committed_step or self.uncommitted_steps else self.work
        done = min(self.total_steps, committed_step + self.uncommitted_steps)
        return self.work * (1.0 - done / self.total_steps)
