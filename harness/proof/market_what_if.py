"""What a finished run would have cost on its own market, under other policies, numbers of nodes and
snapshot intervals: `harness simulate --what-if URL`.

The market is what the run's facts tell (`own_market.py`), and it is replayed through the real
recovery loop. Every answer stands twice, for the two readings of what was seen; and the run's own
policy is replayed too, so that one sees how far the replay is from what really happened.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from harness.controller import policies
from harness.core.world import BadInput, Policy, View
from harness.market.traces import ZoneTrace
from harness.proof.market_fleet import STEP_S, ReplayJob
from harness.proof.market_peers import PEERS
from harness.proof.market_replay import ReplayResult, replay
from harness.proof.market_table import policy_named
from harness.proof.own_market import REPEATS, OwnMarket, own_market, was_taken
from harness.views.summary import Summary
from harness.views.words import duration

SLACK = 1.1  # of the run's own time: the deadline where it had none
NO_ON_DEMAND_USD = 1e6  # an hour: nobody buys it
USUAL = ("cheapest", "patient", "deadline", "uniform_progress", "on_demand_fallback", "on_demand")


def buys(name: str) -> bool:
    """Must a policy of that name be offered on-demand nodes, as `harness launch` does?"""
    return name in PEERS or policies.uses_on_demand(name)


@dataclass(frozen=True)
class WhatIfRow:
    """One choice. `group`: "policy", "nodes" or "interval"; `own`: as the run itself chose.
    `held` and `hoped`: what came of it in the two readings."""

    group: str
    name: str
    job: ReplayJob
    own: bool
    held: ReplayResult
    hoped: ReplayResult


@dataclass(frozen=True)
class ActualRun:
    """What really happened, as the ledger has it. `goodput`: useful node time, as a share of what
    was paid for."""

    policy: str
    nodes: tuple[int, int]
    usd: float
    hours: float
    on_demand_h: float
    taken: int
    goodput: float
    state: str


@dataclass(frozen=True)
class WhatIf:
    """All answers. `deadline_h`: from the run's begin. `unknown`: what nobody can tell, in
    words."""

    url: str
    actual: ActualRun
    market: OwnMarket
    deadline_h: float
    rows: tuple[WhatIfRow, ...]
    unknown: tuple[str, ...]


@dataclass(frozen=True)
class WhatIfAsked:
    """What is tried. Empty and 0: the usual. `deadline_h`: from the run's begin."""

    policies: tuple[str, ...] = ()
    nodes: tuple[int, ...] = ()
    intervals_s: tuple[float, ...] = ()
    deadline_h: float = 0.0


def what_if(s: Summary, asked: WhatIfAsked | None = None) -> WhatIf:
    """Replay a run's own market. Raises BadInput where the facts tell of none, or a policy is not
    known."""
    return _Questions(s, asked or WhatIfAsked()).answer()


class _Questions:
    def __init__(self, s: Summary, asked: WhatIfAsked):
        self.s, self.asked = s, asked
        most = max((len(set(e.attempts)) for e in s.ledger.epochs), default=1)
        told = (s.asked.min_nodes, s.asked.max_nodes) if s.asked else (1, most)
        self.policy = s.asked.policy if s.asked else ""
        self.nodes = (max(1, told[0]), max(1, told[1]))
        counts = asked.nodes or (1, self.nodes[1] // 2, self.nodes[1] * 2)
        self.counts = sorted({n for n in counts if n > 0} - {self.nodes[1]})
        self.market = own_market(s, max([self.nodes[1], *self.counts]))
        self.deadline_h = asked.deadline_h or _deadline_h(s)
        self.unknown = list(self.market.unknown)

    def answer(self) -> WhatIf:
        rows = [*self.by_policy(), *self.by_nodes(), *self.by_interval()]
        return WhatIf(
            self.s.url,
            _actual(self.s, self.policy, self.nodes),
            self.market,
            self.deadline_h,
            tuple(rows),
            tuple(self.unknown),
        )

    # ---- what is tried ---------------------------------------------------------------------------
    def by_policy(self) -> Iterator[WhatIfRow]:
        """The run's own first."""
        usual = list(USUAL)
        if not self.market.on_demand_usd_per_h:
            usual = [n for n in usual if not buys(n)]
        job = self.job(self.nodes, self.interval_s)
        if self.policy:
            try:
                own = self.named(self.policy, job)
            except BadInput as e:
                self.unknown.append(f"what its own policy would do: {e}")
            else:
                yield self.row("policy", self.policy, job, own, own=True)
        for name in self.asked.policies or usual:
            if name != self.policy:
                yield self.row("policy", name, job, self.named(name, job))

    def by_nodes(self) -> Iterator[WhatIfRow]:
        for most in self.counts:
            job = self.job((min(self.nodes[0], most), most), self.interval_s)
            yield self.row("nodes", f"at most {most}", job, self.usual(job))

    def by_interval(self) -> Iterator[WhatIfRow]:
        for seconds in self.intervals():
            job = self.job(self.nodes, seconds)
            name = f"every {duration(seconds)}"
            yield self.row("interval", name, job, self.usual(job))

    def intervals(self) -> list[float]:
        usual = self.interval_s
        if not usual:
            self.unknown.append("other snapshot intervals: none was seen that went by time")
            return []
        if self.asked.intervals_s:
            return list(self.asked.intervals_s)
        found = [usual / 2, usual * 2]
        if best_s := self.s.postmortem.measured.best_s:
            found.append(best_s)
        return sorted({round(x, 3) for x in found})

    @property
    def interval_s(self) -> float:
        return self.market.work.interval_s

    # ---- a replay --------------------------------------------------------------------------------
    def job(self, nodes: tuple[int, int], interval_s: float) -> ReplayJob:
        """The run's work on so many nodes, with snapshots so often."""
        work = self.market.work
        node_s = work.of_nodes(nodes[1], self.nodes[1])
        if interval_s:
            node_s *= 1 + work.cost_s / interval_s
        return ReplayJob(
            work_h=node_s / nodes[1] / 3600,
            deadline_h=self.deadline_h,
            nodes=nodes,
            changeover_s=work.changeover_s,
            move_usd=work.move_usd,
            on_demand_usd_per_h=self.market.on_demand_usd_per_h or NO_ON_DEMAND_USD,
            one_place=self.market.one_place,
            snapshot_s=interval_s,
            unnoticed=work.unnoticed,
            pause_s=work.pause_s,
            step_s=min(STEP_S, self.market.tick_s),
        )

    def usual(self, job: ReplayJob) -> Policy:
        try:
            return self.named(self.policy or "cheapest", job)
        except BadInput:
            return self.named("cheapest", job)

    def named(self, name: str, job: ReplayJob) -> Policy:
        """As `harness launch` composes it. Raises BadInput."""
        policy = policy_named(name, job, self.market.tick_s, len(self.market.held))
        if not self.market.on_demand_usd_per_h or not (self.market.bought or buys(name)):
            policy = spot_only(policy)
        return policies.within_hours(policy, hours=self.market.hours * REPEATS)

    def row(
        self,
        group: str,
        name: str,
        job: ReplayJob,
        policy: Policy,
        own: bool = False,
    ) -> WhatIfRow:
        def played(zones: Sequence[ZoneTrace]) -> ReplayResult:
            return replay(zones, 0, job, policy)

        return WhatIfRow(
            group,
            name,
            job,
            own,
            played(self.market.held),
            played(self.market.hoped),
        )


def spot_only(policy: Policy) -> Policy:
    """As where nothing is offered on demand."""

    def decide(view: View) -> Any:
        offers = tuple(offer for offer in view.offers if offer.spot)
        return policy(dataclasses.replace(view, offers=offers))

    return decide


def _deadline_h(s: Summary) -> float:
    """The run's own, from its begin; without one a little later than when it was over."""
    told = s.asked.deadline_s if s.asked else None
    if told is not None and told > s.started_s:
        return (told - s.started_s) / 3600
    return SLACK * s.wall_s / 3600


def _actual(s: Summary, policy: str, nodes: tuple[int, int]) -> ActualRun:
    rows = [row for row in s.ledger.attempts if row.up_s is not None]
    return ActualRun(
        policy=policy,
        nodes=nodes,
        usd=s.ledger.usd,
        hours=s.wall_s / 3600,
        on_demand_h=sum(row.billed_s for row in rows if not row.spot) / 3600,
        taken=sum(was_taken(row) for row in rows),
        goodput=s.ledger.goodput,
        state=s.state,
    )


# ---- numbers -------------------------------------------------------------------------------------
def as_json(found: WhatIf) -> Iterator[dict[str, Any]]:
    """A line for the run itself and for each choice, as plain values. What is never done has no
    `finish_h`."""
    yield {
        "url": found.url,
        "group": "itself",
        **dataclasses.asdict(found.actual),
        "deadline_h": found.deadline_h,
        "unknown": list(found.unknown),
    }
    for row in found.rows:
        yield {
            "url": found.url,
            "group": row.group,
            "name": row.name,
            "own": row.own,
            "nodes": row.job.nodes,
            "interval_s": row.job.snapshot_s,
            "held": _numbers(row.held),
            "hoped": _numbers(row.hoped),
        }


def _numbers(result: ReplayResult) -> dict[str, Any]:
    done = math.isfinite(result.finish_h)
    return {
        "usd": result.usd,
        "finish_h": result.finish_h if done else None,
        "missed": result.missed,
        "on_demand_h": result.on_demand_h,
        "moves": result.moves,
        "losses": result.losses,
        "launches": result.launches,
        "goodput": result.goodput,
    }
