"""Forecasts of the time and cost of a run before its launch, from many simulated markets.

A candidate is a shape of node, a number of nodes and a policy. For each, markets are made up that
fit what is known of its zones (`synthetic_market.py`), and the policy is played in them
(`fast_replay.py`). So the spread of the answers includes both what is unknown of the zones and
chance. `ASSUMED` lists the assumptions.

Pure: the same seed gives the same answers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harness.controller import combinators, policies
from harness.core import world
from harness.core.estimates import CapacitySeen, Estimates
from harness.core.world import BadInput, Decision, Offer, Policy, View
from harness.planner.fast_replay import play
from harness.planner.market_nodes import STEP_S, ReplayJob
from harness.planner.optimum import fleet_optimum_usd
from harness.planner.synthetic_market import ROUGH, drawn, in_blocks, make_up
from harness.planner.traces import ZoneTrace

MOST_SHAPES = 4  # the cheapest ones, which are played
MOST_ZONES = 6  # the cheapest ones of each shape
PRICE_SWING = 0.08  # standard deviation of a spot price's logarithm, over days
BLOCKS = 4  # at most, in a zone; the nodes of a block come and go together
LEAST_TICK_S, MOST_TICK_S, TICKS = 60.0, 1800.0, 150  # TICKS: of the undisturbed run
# of the undisturbed run, at most: a longer one is as many times its beginning
PLAYED_H = TICKS * MOST_TICK_S / 3600
OPEN_END = 6.0  # without a deadline, multiples of the undisturbed run that are played
SCREENED = 9  # markets for each candidate before most candidates are dropped
KEPT = 6  # candidates that are played in all markets
LOW, HIGH = 0.1, 0.9

ON_DEMAND_ONLY = "on_demand"
ASSUMED = (
    "a step is as fast as peak arithmetic and the shares of its batch allow, at every number of "
    "nodes (--step-time, --scaling)",
    "zones of which nothing is known are like zones usually are; spot capacity lasts 3 h and is "
    "away for 3 h, each give or take a factor of 2",
    "on demand there is always a node",
)


@dataclass(frozen=True)
class PlannedRun:
    """The run to plan. `work`: of the whole run, worker-seconds of speed 1 (`Offer.speed`).
    `scaling`: the share of the speed that doubling the workers really adds. `changeover_s`: from
    requesting a node until it trains; `lost_s`: training that is lost with a node. None means no
    deadline, or no budget."""

    work: float
    micro_batches: int = 0
    scaling: float = 1.0
    changeover_s: float = 300.0
    lost_s: float = 120.0
    deadline_h: float | None = None
    budget_usd: float | None = None

    def hours(self, shape: NodeShape, nodes: int) -> float:
        """Return the hours that the run takes on this many nodes, undisturbed."""
        ranks = nodes * max(1, shape.gpus)
        even = Estimates(micro_batches=self.micro_batches).efficiency(ranks)
        speed: float = ranks * shape.speed * even * self.scaling ** math.log2(nodes)
        return self.work / speed / 3600

    def part(self, share: float) -> PlannedRun:
        """Return the beginning of the run, with its share of the budget and of the time that the
        deadline leaves after a changeover."""
        begin_h, given = self.changeover_s / 3600, self.deadline_h
        return dataclasses.replace(
            self,
            work=self.work * share,
            deadline_h=None if given is None else begin_h + (given - begin_h) * share,
            budget_usd=None if self.budget_usd is None else self.budget_usd * share,
        )


@dataclass(frozen=True)
class NodeShape:
    """A kind of node and its offers: spot, the cheapest first; on demand, the cheapest (None if not
    offered)."""

    accelerator: str
    gpus: int
    speed: float
    spot: tuple[Offer, ...]
    on_demand: Offer | None

    @property
    def name(self) -> str:
        return f"{self.accelerator}:{self.gpus}" if self.gpus else self.accelerator

    @property
    def usd_per_work(self) -> float:
        """USD per worker-second of speed 1, at the cheapest offer."""
        offers = (*self.spot[:1], *([self.on_demand] if self.on_demand else []))
        return min(world.usd_per_work(offer) for offer in offers)

    @property
    def on_demand_usd_per_h(self) -> float:
        """USD per hour of a node on demand; infinite if there is no such price."""
        known = [offer.on_demand_usd_per_h for offer in self.spot if offer.on_demand_usd_per_h]
        return self.on_demand.usd_per_h if self.on_demand else min(known, default=math.inf)


def shapes(offers: Iterable[Offer]) -> list[NodeShape]:
    """Return the kinds of nodes among these offers, the one with the cheapest work first."""
    kinds: dict[tuple[str, int], list[Offer]] = {}
    for offer in sorted(offers):
        kinds.setdefault((offer.accelerator, offer.gpus), []).append(offer)
    found = [
        NodeShape(
            accelerator,
            gpus,
            some[0].speed,
            tuple(o for o in some if o.spot)[:MOST_ZONES],
            next((o for o in some if not o.spot), None),
        )
        for (accelerator, gpus), some in kinds.items()
    ]
    return sorted(found, key=lambda shape: shape.usd_per_work)


@dataclass(frozen=True)
class PlanCandidate:
    shape: NodeShape
    nodes: int  # at most
    policy: str  # a name, with its options

    @property
    def name(self) -> str:
        return f"{self.nodes} x {self.shape.name}, {self.policy.partition('?')[0]}"


@dataclass(frozen=True)
class PlanForecast:
    """The forecast of one candidate: hours until the end (infinite if never) and bill in each
    market, in the order of the markets. `on_demand_usd`: the cost on demand alone."""

    candidate: PlanCandidate
    hours: tuple[float, ...] = field(repr=False)
    usd: tuple[float, ...] = field(repr=False)
    missed: float  # share of the markets in which it is not done by the deadline
    undisturbed_h: float
    on_demand_usd: float
    losses: float  # mean number of nodes lost
    losses_per_h: float  # of a node on spot
    spot_share: float  # mean share of the paid hours

    def hours_at(self, share: float) -> float:
        return quantile(self.hours, share)

    def usd_at(self, share: float) -> float:
        return quantile(self.usd, share)

    def over(self, budget_usd: float) -> float:
        """Return the share of the markets in which it costs more."""
        return sum(usd > budget_usd for usd in self.usd) / len(self.usd)

    def to_json(self) -> dict[str, Any]:
        def at(values: Callable[[float], float]) -> dict[str, float | None]:
            found = {"p10": values(LOW), "median": values(0.5), "p90": values(HIGH)}
            return {name: v if math.isfinite(v) else None for name, v in found.items()}

        shape = self.candidate.shape
        return {
            "nodes": self.candidate.nodes,
            "accelerator": shape.accelerator,
            "gpus": shape.gpus,
            "policy": self.candidate.policy,
            "hours": at(self.hours_at),
            "usd": at(self.usd_at),
            "missed": self.missed,
            "undisturbed_hours": self.undisturbed_h,
            "on_demand_usd": self.on_demand_usd if math.isfinite(self.on_demand_usd) else None,
            "losses": self.losses,
            "losses_per_spot_node_hour": self.losses_per_h,
            "spot_share": self.spot_share,
            "markets": len(self.hours),
        }


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that a further one is below with the given probability: exact for 0.1 and
    0.9 with 19 or 99 values. Infinite values are allowed."""
    rank = round(share * (len(values) + 1))
    return sorted(values)[min(len(values), max(1, rank)) - 1]


def on_demand_only(view: View) -> Decision:
    """Fill up with nodes on demand, which are never preempted."""
    return world.fill(view, [o for o in view.offers if not o.spot], "on demand")


def buys_on_demand(policy: str) -> bool:
    """Return whether the policy uses offers on demand. Others do not see any, as in `harness
    launch`."""
    return policy == ON_DEMAND_ONLY or policies.uses_on_demand(policy)


def policy_of(candidate: PlanCandidate, run: PlannedRun) -> Policy:
    """Return the policy as `harness launch` would build it, with deadline and work where it needs
    them."""
    name = candidate.policy
    if name == ON_DEMAND_ONLY:
        return on_demand_only
    if name != "uniform_progress":
        return policies.launched(name)
    hours = run.hours(candidate.shape, candidate.nodes)
    by_deadline = functools.partial(
        policies.uniform_progress,
        deadline_h=run.deadline_h or OPEN_END * hours,
        work_h=hours,
        total_steps=max(1, round(hours * 3600 / STEP_S)),
        changeover_s=run.changeover_s,
    )
    return combinators.together(by_deadline)


def candidates(
    found: Sequence[NodeShape],
    node_counts: Sequence[int],
    names: Sequence[str],
    run: PlannedRun,
) -> list[PlanCandidate]:
    """Return the candidates to play: the shapes with the cheapest work, at every number of nodes
    that leaves a share of the batch for each and could keep the deadline undisturbed. Raises
    BadInput."""
    made, slow = list[PlanCandidate](), list[str]()
    for shape in found[:MOST_SHAPES]:
        for nodes in node_counts:
            ranks = nodes * max(1, shape.gpus)
            if run.micro_batches and ranks > run.micro_batches:
                continue
            least_h = run.hours(shape, nodes) + run.changeover_s / 3600
            if run.deadline_h is not None and least_h > run.deadline_h:
                slow.append(f"{nodes} x {shape.name} {least_h:.3g} h")
                continue
            made += [
                PlanCandidate(shape, nodes, name)
                for name in names
                if (shape.spot if name != ON_DEMAND_ONLY else _has_on_demand(shape))
            ]
    if not made:
        why = f"; undisturbed they take {', '.join(slow[:6])}" if slow else ""
        raise BadInput(
            f"wanted nodes that can do the work by the deadline, found none{why}: more --nodes, a "
            "later --deadline, or other accelerators in the task's resources"
        )
    return made


def _has_on_demand(shape: NodeShape) -> bool:
    return math.isfinite(shape.on_demand_usd_per_h)


def as_of(seen: CapacitySeen, now_s: float) -> CapacitySeen:
    """Return the same history on a clock that is 0 at `now_s`."""
    return dataclasses.replace(seen, since_s=seen.since_s - now_s, seen_s=seen.seen_s - now_s)


# ---- playing -------------------------------------------------------------------------------------
def forecast(
    candidate: PlanCandidate,
    run: PlannedRun,
    markets: int,
    seed: int = 0,
    history: Mapping[str, CapacitySeen] | None = None,
) -> PlanForecast:
    """Play this many markets, each from its own seed. `history`: by offer, on a clock that is 0
    when the run begins. Of a long run its first `PLAYED_H` are played, and the rest is expected to
    be like them."""
    shape, nodes = candidate.shape, candidate.nodes
    whole_h, begin_h = run.hours(shape, nodes), run.changeover_s / 3600
    share = min(1.0, PLAYED_H / whole_h)
    run = run.part(share)
    job = job_of(candidate, run)
    policy, seen = policy_of(candidate, run), dict(history or {})
    if candidate.policy == ON_DEMAND_ONLY and shape.on_demand is not None:
        shape = dataclasses.replace(shape, spot=())  # wherever it is cheapest
    places = {offer.name: offer.place for offer in shape.spot}
    # on demand all markets are equal
    different = 1 if candidate.policy == ON_DEMAND_ONLY else markets
    played = [
        play(
            market(shape, job, np.random.default_rng((seed, at)), seen),
            0,
            job,
            policy,
            seed=at,
            seen={name: seen[name] for name in places if name in seen},
            places=places,
            on_demand=buys_on_demand(candidate.policy),
            budget_usd=run.budget_usd,
        )
        for at in range(different)
    ] * (markets // different)
    spot_h, losses = (sum(getattr(one, what) for one in played) for what in ("spot_h", "losses"))
    paid_h = spot_h + sum(one.on_demand_h for one in played)
    return PlanForecast(
        candidate,
        tuple(begin_h + (one.finish_h - begin_h) / share for one in played),
        tuple(one.usd / share for one in played),
        sum(one.missed for one in played) / markets,
        whole_h,
        shape.on_demand_usd_per_h * nodes * (whole_h + begin_h),
        losses / markets / share,
        losses / spot_h if spot_h else 0.0,
        spot_h / paid_h if paid_h else 0.0,
    )


def hindsight_usd(
    candidate: PlanCandidate,
    run: PlannedRun,
    markets: int,
    seed: int = 0,
    history: Mapping[str, CapacitySeen] | None = None,
) -> tuple[float, ...]:
    """Return what somebody would pay at least who knew each of the markets of `forecast` in
    advance, with the same nodes and the same deadline."""
    shape = candidate.shape
    share = min(1.0, PLAYED_H / run.hours(shape, candidate.nodes))
    job = job_of(candidate, run.part(share))
    made = (
        market(shape, job, np.random.default_rng((seed, at)), dict(history or {}))
        for at in range(markets)
    )
    return tuple(
        fleet_optimum_usd(zones, 0, job.to_do(zones), job.nodes[1]) / share for zones in made
    )


def job_of(candidate: PlanCandidate, run: PlannedRun) -> ReplayJob:
    """Return the job that is played. Without a deadline it may take as long as is reasonable."""
    undisturbed_h = run.hours(candidate.shape, candidate.nodes)
    open_h = OPEN_END * (undisturbed_h + run.changeover_s / 3600) + 24
    on_demand = candidate.shape.on_demand_usd_per_h
    return ReplayJob(
        undisturbed_h,
        open_h if run.deadline_h is None else run.deadline_h,
        (1, candidate.nodes),
        changeover_s=run.changeover_s,
        lost_s=run.lost_s,
        on_demand_usd_per_h=on_demand if math.isfinite(on_demand) else 1e6,
    )


def market(
    shape: NodeShape,
    job: ReplayJob,
    rng: np.random.Generator,
    seen: Mapping[str, CapacitySeen],
) -> list[ZoneTrace]:
    """Make up a market of a shape's zones, for as long as the run may take."""
    nodes, tick_s = job.nodes[1], tick_of(job)
    zones = [
        dataclasses.replace(
            in_blocks(drawn(offer.name, seen.get(offer.name), rng, nodes=nodes, now_s=0.0), BLOCKS),
            usd_per_h=offer.usd_per_h,
            price_swing=PRICE_SWING,
            most_usd_per_h=offer.on_demand_usd_per_h or math.inf,
        )
        for offer in shape.spot
    ]
    if not zones:  # a market of on-demand nodes
        assert shape.on_demand is not None
        ticks = math.ceil(2 * job.deadline_h * 3600 / tick_s)
        return [ZoneTrace(shape.on_demand.name, tick_s, np.zeros(ticks, dtype=np.int64))]
    made = make_up(zones, 1.2 * job.deadline_h + 12, rng, tick_s=tick_s, weather=ROUGH)
    return [
        dataclasses.replace(zone, on_demand_usd_per_h=offer.on_demand_usd_per_h or None)
        for zone, offer in zip(made, shape.spot, strict=True)
    ]


def tick_of(job: ReplayJob) -> float:
    """Return the length of a tick in seconds: whole minutes, short enough to resolve a short
    run."""
    wanted_s = 60.0 * round(job.work_h * 60 / TICKS)
    return min(MOST_TICK_S, max(LEAST_TICK_S, wanted_s))


def risk(one: PlanForecast, run: PlannedRun) -> float:
    """Return the share of the markets in which it misses the deadline or exceeds the budget."""
    over = 0.0 if run.budget_usd is None else one.over(run.budget_usd)
    return max(one.missed, over)


def ranked(found: Iterable[PlanForecast], run: PlannedRun, most_risk: float) -> list[PlanForecast]:
    """Return the forecasts, the best first: those within the risk by their median cost, then the
    others by their risk."""

    def key(one: PlanForecast) -> tuple[float, float, float]:
        takes = risk(one, run)
        return (
            takes if takes > most_risk + 1e-9 else 0.0,
            one.usd_at(0.5),
            one.hours_at(0.5),
        )

    return sorted(found, key=key)


def worth_more(
    few: Sequence[PlanForecast], run: PlannedRun, most_risk: float
) -> list[PlanForecast]:
    """Select, from forecasts over a few markets, those to play in all: the best, and the best on
    demand for comparison."""
    order = ranked(few, run, most_risk)
    sure = [one for one in order if one.candidate.policy == ON_DEMAND_ONLY][:1]
    kept = order[:KEPT]
    return kept if not sure or sure[0] in kept else [*kept[:-1], *sure]
