"""The rows of a ledger.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from harness.views.painting import NANO

if TYPE_CHECKING:
    from harness.views.painting import LabelledSpan

# AttemptEnded.end of nodes that nobody wanted to go
BAD_ENDS = ("failed", "preempted", "lost", "unfit", "refused")


# ---- rows ----------------------------------------------------------------------------------------
class Billed:
    """Time and money by bucket: `ns` in 1e-9 s, `nusd` in 1e-9 USD."""

    ns: dict[str, int]
    nusd: dict[str, int]

    @property
    def billed_ns(self) -> int:
        return sum(self.ns.values())

    @property
    def billed_s(self) -> float:
        return self.billed_ns / NANO

    @property
    def billed_nusd(self) -> int:
        return sum(self.nusd.values())

    @property
    def usd(self) -> float:
        return self.billed_nusd / NANO


@dataclass(frozen=True)
class AttemptRow(Billed):
    """One attempt and where its billed time went. `name` is its number; of a node that no
    controller launched, its member."""

    name: str
    attempt: int
    members: tuple[str, ...]
    offer: str
    accelerator: str
    spot: bool
    usd_per_h: float
    on_demand_usd_per_h: float
    asked_s: float
    up_s: float | None
    gone_s: float | None  # None: still there
    end: str  # facts.AttemptEnded.end; "" while it lives
    reason: str
    exit_code: int | None
    segments: tuple[LabelledSpan, ...]
    ns: dict[str, int]  # by bucket; adds up to billed_ns
    nusd: dict[str, int]  # 1e-9 USD by bucket; adds up to billed_nusd


@dataclass(frozen=True)
class EpochRow:
    """One world: who, which steps, why it ended and what that cost."""

    epoch: int
    reason: str  # why it began: facts.EpochStarted.reason
    members: tuple[str, ...]
    attempts: tuple[str, ...]  # AttemptRow.name of its members
    world: int
    shares: tuple[int, ...]
    resumed_step: int
    first_step: int | None  # executed, whether committed or not
    last_step: int | None
    steps: int
    committed: int  # of them in the lineage
    steps_lost: int  # executed, over, and not in the lineage
    started_s: float
    first_s: float | None  # begin of its first step
    last_s: float | None  # end of its last step
    end_s: float | None  # when it was over; None: it lives
    # end of the last step of the epoch before -> its first step; None: nothing before, or no step
    gap_s: float | None
    lost_s: float  # wall-clock seconds lost with its end: work to redo, and the gap that followed
    ended: str  # why, in words; "" while it lives

    @property
    def accumulation(self) -> int:
        """Micro-batches that the busiest rank does one after the other."""
        return max(self.shares, default=0)


@dataclass(frozen=True)
class NoticeRow:
    """One notice to one node, and whether a snapshot was committed in time."""

    member: str
    attempt: str
    kind: str  # "kill" | "soft" | "maintenance"
    source: str
    seen_s: float
    deadline_s: float | None
    # seconds from notice to commit of a state at or after it; None: none was
    commit_s: float | None
    step: int | None  # of that snapshot
    training: bool  # the node was in an epoch when it came; else there was nothing to save
    cancelled: bool

    @property
    def grace_s(self) -> float | None:
        return None if self.deadline_s is None else self.deadline_s - self.seen_s

    @property
    def in_time(self) -> bool | None:
        """None: there was nothing to save, or nothing came of it."""
        if not self.training or self.cancelled:
            return None
        return self.commit_s is not None and (self.grace_s is None or self.commit_s <= self.grace_s)


@dataclass(frozen=True)
class Cost:
    """What was paid, and what the same would have cost on demand."""

    spot_usd: float  # what is billed
    on_demand_usd: float  # the same node-seconds at on-demand prices
    # only steps, validation and one start per node of the first epoch: on demand, nothing ever lost
    undisturbed_usd: float
    known: bool  # all on-demand prices are known; else the paid price stands for unknown ones

    @classmethod
    def of(cls, attempts: Sequence[AttemptRow], first_nodes: int) -> Cost:
        """`first_nodes`: of the first world that made a step."""

        def price(a: AttemptRow) -> float:
            if not a.usd_per_h and not a.billed_nusd:
                return 0.0  # what was paid is not known either
            return a.on_demand_usd_per_h or a.usd_per_h

        def spent(a: AttemptRow, buckets: Sequence[str]) -> float:
            return sum(a.ns[bucket] for bucket in buckets) * price(a)

        # One start for each node of the first world: the least that a run on demand pays as well.
        starts = [spent(a, ("provision", "setup", "start")) for a in attempts if a.ns["useful"]]
        start = median(starts) * min(first_nodes, len(starts)) if starts else 0.0
        steps = sum(spent(a, ("useful", "straggle", "other")) for a in attempts)
        return cls(
            spot_usd=sum(a.billed_nusd for a in attempts) / NANO,
            on_demand_usd=sum(a.billed_ns * price(a) for a in attempts) / NANO / 3600,
            undisturbed_usd=(steps + start) / NANO / 3600,
            known=all(a.on_demand_usd_per_h > 0 for a in attempts if a.billed_ns),
        )

    @property
    def saved_usd(self) -> float:
        """Against the same node-seconds on demand."""
        return self.on_demand_usd - self.spot_usd

    @property
    def saved(self) -> float:
        return self.saved_usd / self.on_demand_usd if self.on_demand_usd else 0.0

    @property
    def saved_undisturbed(self) -> float:
        """Against an on-demand run that nothing ever disturbs: the harder comparison, as
        interruptions count against us."""
        return 1.0 - self.spot_usd / self.undisturbed_usd if self.undisturbed_usd else 0.0
