"""A run's knowledge of its own speed, of capacity and prices, and of its limits: the part of a
`View` that policies use for forecasts.

Pure values. `controller/learning.py` derives them from facts and records for a real run; a replay
of a market derives them from what its simulated run has seen so far. Neither knows the future.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from harness.core.loss_rates import LossesSeen, derived_interval_s

MOST_SPELLS = 256  # newest spells kept per offer


@dataclass(frozen=True)
class Spell:
    """A period in which an offer had capacity (`open`), or had none. `ended`: it then changed;
    otherwise observation stopped, and the period may have gone on."""

    open: bool
    seconds: float
    ended: bool


@dataclass(frozen=True)
class CapacitySeen:
    """Observations of one offer's capacity. `open`: the last observation; None: never observed. It
    has been so since `since_s`, and was last confirmed at `seen_s` (the run's clock). `node_s`:
    total seconds that nodes were up there; `losses`: how many of them were preempted; `unnoticed`:
    those without a notice that left time for a snapshot; `strikes`: moments at which any were:
    several are often taken at once.

    `room`: the number of our nodes that it had room for at `room_s`: as many as were left when one
    was refused or taken, else as many as were up; None: unknown. `room_node_s` over `watched_s` is
    its average over the time in which this was watched."""

    open: bool | None = None
    since_s: float = 0.0
    seen_s: float = 0.0
    spells: tuple[Spell, ...] = ()  # before this one, the oldest first
    node_s: float = 0.0
    losses: int = 0
    unnoticed: int = 0
    strikes: int = 0
    room: int | None = None
    room_s: float = 0.0
    room_node_s: float = 0.0
    watched_s: float = 0.0

    def age_s(self, now_s: float) -> float:
        """Return for how many seconds the current state has lasted."""
        return max(0.0, now_s - self.since_s)

    def after(self, prior: CapacitySeen) -> CapacitySeen:
        """Return these observations joined to `prior`, those from before this run began. The
        current state is this run's, once it has observed one."""
        return dataclasses.replace(
            prior if self.open is None else self,
            spells=(*prior.spells, *self.spells)[-MOST_SPELLS:],
            node_s=prior.node_s + self.node_s,
            losses=prior.losses + self.losses,
            unnoticed=prior.unnoticed + self.unnoticed,
            strikes=prior.strikes + self.strikes,
            room_node_s=prior.room_node_s + self.room_node_s,
            watched_s=prior.watched_s + self.watched_s,
        )

    def then(self, spell: Spell, **changes: object) -> CapacitySeen:
        """Return the observations with `spell` appended, and with `changes` applied."""
        spells = (*self.spells, spell)[-MOST_SPELLS:]
        return dataclasses.replace(self, spells=spells, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class SnapshotPace:
    """The snapshots of a world in some place. `interval_s`: seconds between them (0: unknown);
    `share`: fraction of training time that they take; `lost_s`: seconds of training lost when a
    node is lost without notice."""

    interval_s: float
    lost_s: float
    share: float


@dataclass(frozen=True)
class StepPace:
    """The speed of steps in one kind of world. `step_s`: median seconds over `steps` steps of
    `ranks` workers, each on one `accelerator`."""

    accelerator: str
    ranks: int
    step_s: float
    steps: int


@dataclass(frozen=True)
class Estimates:
    """The knowledge that policies forecast by; zeros and empty values mean unknown. Work is counted
    in worker-seconds: the work of one worker of speed 1 (`Offer.speed`) in a second when the batch
    divides evenly."""

    total_steps: int = 0
    work: float = 0.0  # of the whole run, worker-seconds: measured, or given by the user
    timed: bool = False  # `work` was measured
    # steps done and not yet committed, as far as nodes have reported them
    uncommitted_steps: int = 0
    micro_batches: int = 0  # of a step: a world of more replicas leaves some of them idle
    replica_ranks: int = 1  # workers that do one micro-batch together
    paces: tuple[StepPace, ...] = ()
    # seconds from the request for a node until it trains: launch, set-up, restore
    changeover_s: float = 300.0
    look_s: float = 10.0  # from one decision to the next, at most
    # training lost when a node is preempted without notice: about half a snapshot interval
    lost_s: float = 0.0
    # seconds of training that one snapshot costs, and from its begin to its commit; 0: unknown, or
    # the script sets the interval
    snapshot_cost_s: float = 0.0
    commit_s: float = 0.0
    snapshot_bytes: int = 0
    move_usd: float = 0.0  # for the snapshot to leave the region, once
    # (from, to) -> the same between these places, where that is known separately
    moves: Mapping[tuple[str, str], float] = field(default_factory=dict)
    home: str = ""  # the place (`Offer.place`) where reading snapshots is free
    deadline_s: float | None = None  # the run's clock; None: no deadline
    usd_per_hour_late: float | None = None  # after the deadline; None: it is to be kept
    # spending limit, counted like `View.spent_usd`: the lowest limit around this policy
    # (`within_budget`); None: no limit
    budget_usd: float | None = None
    capacity: Mapping[str, CapacitySeen] = field(default_factory=dict)  # by offer
    # by offer: (time, USD per hour) of each observed change, the oldest first
    prices: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)

    def moved_usd(self, source: str, target: str) -> float:
        """Return USD for a snapshot in the place `source` to be read once in `target`."""
        return self.moves.get((source, target), self.move_usd)

    def snapshots(self, seen: CapacitySeen | None, nodes: int) -> SnapshotPace:
        """Return the snapshot pace of a world of `nodes` nodes. `seen`: observations of its place;
        None: there are none."""
        if not self.snapshot_cost_s:
            return SnapshotPace(0.0, self.lost_s, 0.0)
        losses = LossesSeen(seen.unnoticed, seen.node_s) if seen else LossesSeen()
        interval_s = derived_interval_s(
            self.snapshot_cost_s, self.commit_s, losses.between_s(nodes)
        )
        share = min(1.0, self.snapshot_cost_s / interval_s)
        return SnapshotPace(interval_s, interval_s / 2 + self.commit_s, share)

    def efficiency(self, ranks: int) -> float:
        """Return the fraction of a world's workers that is busy: replicas get uneven shares if the
        micro-batches are not a multiple of their number, and workers beyond the last whole replica
        get none."""
        if not self.micro_batches or ranks <= 0:
            return 1.0
        busy = self.micro_batches * self.replica_ranks / self.rounds(ranks)
        return min(1.0, busy / ranks)

    def rounds(self, ranks: int) -> int:
        """Return the micro-batches that the busiest replica does in a step, which determine its
        duration. Fewer workers than a replica needs count as one replica."""
        return -(-self.micro_batches // max(1, ranks // self.replica_ranks))

    def left(self, committed_step: int) -> float | None:
        """Return the remaining work in worker-seconds, or None if unknown."""
        if not self.work:
            return None
        if not self.total_steps:  # the script sets the number when it begins
            return None if committed_step or self.uncommitted_steps else self.work
        done = min(self.total_steps, committed_step + self.uncommitted_steps)
        return self.work * (1.0 - done / self.total_steps)
