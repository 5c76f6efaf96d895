"""A finished run's own market, as far as its facts show it: where it was given nodes, refused them
or lost them, at what prices, and what its work was.

A run sees its market only where it requests nodes. So there are two readings. `held`: a place had
as many nodes as the run had there, and no more; this is certain. `hoped`: it also had room for more
at all other times, except those at which it is known to have had none: when it refused a node or
took one away, and from then until it did so again, if it gave none meanwhile. A run that keeps
requesting leaves little room between the two; one that has bought its nodes on demand, and no
longer looks for spot, leaves much.

Work is counted in node-seconds of useful steps. A world of another size is assumed to do as much
per node as the nearest one that was measured.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from harness.controller import combinators, policies
from harness.core.decoding import built
from harness.core.facts import AttemptIntended, PricesSeen
from harness.core.formatting import duration, plural
from harness.core.world import BadInput, Offer, Policy, View
from harness.ledger.bill import NANO, AttemptRow, EpochRow, transfer_usd
from harness.look.reports.summary import Summary
from harness.planner.market_nodes import STEP_S, ReplayJob
from harness.planner.market_replay import ReplayResult, replay
from harness.planner.policy_table import policy_named
from harness.planner.published_policies import PEERS
from harness.planner.traces import Counts, Prices, ZoneTrace
from storage.canonical_json import BadObject

TICKS = 480  # of a run, approximately
LENGTHS_S = (1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 900, 1800, 3600)  # lengths of a tick
REPEATS = 4  # of the market, one after the other
AT_WORK = ("useful", "straggle", "redone", "snapshot")
GIVEN, REFUSED, TAKEN = "given", "refused", "taken"


@dataclass(frozen=True)
class MarketLook:
    """An observation of an offer's capacity, `s` seconds after its begin."""

    s: float
    what: str  # GIVEN | REFUSED | TAKEN


@dataclass(frozen=True)
class OfferHistory:
    """A run's observations of one offer. `stays`: for each node when it was requested and when it
    was gone, seconds; `prices`: (seconds, USD per hour) of each change that was seen."""

    offer: Offer
    looks: tuple[MarketLook, ...]
    stays: tuple[tuple[float, float], ...]
    prices: tuple[tuple[float, float], ...]

    def count(self, what: str) -> int:
        return sum(look.what == what for look in self.looks)


@dataclass(frozen=True)
class WorkSeen:
    """The work of a run, and what disturbed it; seconds. 0 means unknown, or nothing."""

    node_s: float  # useful steps of all nodes, without snapshots
    changeover_s: float  # from requesting a node until it trains
    pause_s: float  # how long the others stood still when the world changed
    interval_s: float  # between two snapshots
    cost_s: float  # training time that one snapshot costs
    commit_s: float  # from its begin to its commit
    unnoticed: float  # share of the preempted nodes without a snapshot in time
    move_usd: float
    # node-seconds of a step, by number of nodes
    paces: Mapping[int, float] = field(default_factory=dict)

    def of_nodes(self, nodes: int, usual: int) -> float:
        """Return the node-seconds of all the work in worlds of `nodes`, if it was done in worlds of
        `usual`."""
        here, there = self._pace(nodes), self._pace(usual)
        return self.node_s * here / there if here and there else self.node_s

    def _pace(self, nodes: int) -> float:
        if not self.paces:
            return 0.0
        return self.paces[min(self.paces, key=lambda n: abs(math.log(n / max(1, nodes))))]


@dataclass(frozen=True)
class OwnMarket:
    """A run's market. `held` and `hoped`: the two readings, as aligned zones (module docstring).
    `hours`: of the run; what lies beyond repeats them."""

    offers: tuple[OfferHistory, ...]
    held: tuple[ZoneTrace, ...]
    hoped: tuple[ZoneTrace, ...]
    hours: float
    tick_s: float
    on_demand_usd_per_h: float  # where it is cheapest; 0: not known
    bought: bool  # the run had nodes on demand
    one_place: bool
    work: WorkSeen
    unknown: tuple[str, ...]  # what cannot be known, in words


def own_market(s: Summary, most_nodes: int) -> OwnMarket:
    """Return the market of a run with at least one world that trained on spot nodes. `most_nodes`:
    the most that any policy will request. Raises BadInput."""
    shown = [row for row in s.ledger.attempts if row.spot and row.offer]
    if not any(row.up_s is not None for row in shown) or not any(
        e.first_s is not None for e in s.ledger.epochs
    ):
        raise BadInput(
            f"{s.url}: wanted a run that trained on spot nodes of `harness launch`, found "
            f"{plural(len(s.ledger.attempts), 'node')} and {plural(len(shown), 'try')} at spot"
        )
    histories = [_history(name, rows, s) for name, rows in _by_offer(shown).items()]
    kept, others = _of_one_shape(histories)
    until_s = max(1.0, s.ended_s - s.started_s)
    tick_s = float(next((t for t in LENGTHS_S if until_s / t <= TICKS), LENGTHS_S[-1]))
    ticks = max(1, math.ceil(until_s / tick_s))
    held, hoped = readings(kept, ticks, tick_s, most_nodes)
    dear = [one.offer.on_demand_usd_per_h for one in kept if one.offer.on_demand_usd_per_h > 0]
    hours = ticks * tick_s / 3600
    return OwnMarket(
        tuple(kept),
        held,
        hoped,
        hours,
        tick_s,
        min(dear, default=0.0),
        any(not row.spot and row.up_s is not None for row in s.ledger.attempts),
        len({one.offer.place for one in kept}) == 1,
        _work(s, kept),
        tuple(_unknown(s, kept, others, held, hours, bool(dear))),
    )


# ---- what was seen -------------------------------------------------------------------------------
def _by_offer(rows: Sequence[AttemptRow]) -> dict[str, list[AttemptRow]]:
    found = defaultdict[str, list[AttemptRow]](list)
    for row in rows:
        found[row.offer].append(row)
    return dict(sorted(found.items()))


def was_taken(row: AttemptRow) -> bool:
    """Return whether the cloud preempted the node. One that left in time, after a notice, counts
    too."""
    return row.end in ("preempted", "lost") or (row.end == "drained" and "preempt" in row.reason)


def _history(name: str, rows: Sequence[AttemptRow], s: Summary) -> OfferHistory:
    offer, prices = Offer(0.0, name), list[tuple[float, float]]()
    for stamped in s.facts:
        if isinstance(stamped.fact, PricesSeen) and name in stamped.fact.usd_per_h:
            prices.append((stamped.t - s.started_s, stamped.fact.usd_per_h[name]))
        if isinstance(stamped.fact, AttemptIntended) and stamped.fact.offer.get("name") == name:
            try:
                offer = built(Offer, stamped.fact.offer)
            except BadObject:  # the price is unknown; the ledger's row has the rest
                continue
            prices.append((stamped.t - s.started_s, offer.usd_per_h))
    looks, stays = list[MarketLook](), list[tuple[float, float]]()
    for row in rows:
        asked_s = row.asked_s - s.started_s
        if row.end == "no-capacity":
            looks.append(MarketLook(asked_s, REFUSED))
        elif row.up_s is not None:
            gone_s = (s.ended_s if row.gone_s is None else row.gone_s) - s.started_s
            looks.append(MarketLook(asked_s, GIVEN))
            stays.append((asked_s, max(asked_s, gone_s)))
            if was_taken(row):
                looks.append(MarketLook(gone_s, TAKEN))
    ordered = tuple(sorted(looks, key=lambda look: look.s))
    return OfferHistory(offer, ordered, tuple(sorted(stays)), _changes(prices))


def _changes(prices: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    found = list[tuple[float, float]]()
    for at_s, usd in sorted(prices):
        if not found or usd != found[-1][1]:
            found.append((at_s, usd))
    return tuple(found)


def _of_one_shape(found: Sequence[OfferHistory]) -> tuple[list[OfferHistory], list[OfferHistory]]:
    """Split the offers into those of the shape that the run used most, and the others."""
    used = defaultdict[tuple[str, int, float], float](float)
    for one in found:
        used[_shape(one.offer)] += sum(gone_s - asked_s for asked_s, gone_s in one.stays)
    most = max(used, key=lambda shape: used[shape])
    return (
        [one for one in found if _shape(one.offer) == most],
        [one for one in found if _shape(one.offer) != most],
    )


def _shape(offer: Offer) -> tuple[str, int, float]:
    return offer.accelerator, offer.gpus, offer.speed


# ---- two readings --------------------------------------------------------------------------------
def readings(
    offers: Sequence[OfferHistory], ticks: int, tick_s: float, most_nodes: int
) -> tuple[tuple[ZoneTrace, ...], tuple[ZoneTrace, ...]]:
    """Return (held, hoped): the market of this many ticks, repeated REPEATS times."""
    held, hoped = list[ZoneTrace](), list[ZoneTrace]()
    for one in offers:
        there = _held(one, ticks, tick_s)
        room = _hoped(one, there, tick_s, most_nodes)
        prices = np.tile(_prices(one, ticks, tick_s), REPEATS)
        dear = one.offer.on_demand_usd_per_h or None
        for found, nodes in ((held, there), (hoped, room)):
            repeated = np.tile(nodes, REPEATS)
            found.append(
                ZoneTrace(one.offer.name, tick_s, repeated, prices, on_demand_usd_per_h=dear)
            )
    return tuple(held), tuple(hoped)


def _held(one: OfferHistory, ticks: int, tick_s: float) -> Counts:
    """Return the number of nodes that the run had there in each tick."""
    there = np.zeros(ticks, np.int64)
    for asked_s, gone_s in one.stays:
        first = min(ticks - 1, int(asked_s / tick_s))
        there[first : max(first + 1, round(gone_s / tick_s))] += 1
    return there


def _hoped(one: OfferHistory, held: Counts, tick_s: float, most: int) -> Counts:
    """Return room for `most` nodes in each tick, except where it is known that there was none."""
    full = np.zeros(len(held), dtype=bool)
    closed = [(look.s, look.what != GIVEN) for look in one.looks]
    for (at_s, is_closed), (next_s, stays) in itertools.pairwise([*closed, (0.0, False)]):
        if is_closed:
            until_s = next_s if stays else at_s
            full[min(len(held) - 1, int(at_s / tick_s)) : int(until_s / tick_s) + 1] = True
    return np.where(full, held, np.maximum(held, most))


def _prices(one: OfferHistory, ticks: int, tick_s: float) -> Prices:
    """Return the price in each tick; before the first observation the first price."""
    if not one.prices:
        return np.full(ticks, one.offer.usd_per_h)
    times = np.array([at_s for at_s, _ in one.prices])
    at = np.searchsorted(times, np.arange(ticks) * tick_s + tick_s / 2, side="right") - 1
    return np.array([usd for _, usd in one.prices])[np.maximum(at, 0)]


# ---- work ----------------------------------------------------------------------------------------
def _work(s: Summary, offers: Sequence[OfferHistory]) -> WorkSeen:
    rows, ledger = s.ledger.attempts, s.ledger
    taken = [row for row in rows if was_taken(row) and row.up_s is not None]
    in_time = {notice.attempt for notice in ledger.notices if notice.in_time}
    starts = [
        max(0.0, min(a for a, _, bucket in row.segments if bucket in AT_WORK) / NANO - row.asked_s)
        for row in rows
        if any(bucket in AT_WORK for _, _, bucket in row.segments)
    ]
    found = s.postmortem.measured
    return WorkSeen(
        node_s=sum(ledger.ns[bucket] for bucket in ("useful", "straggle", "other")) / NANO,
        changeover_s=median(starts) if starts else 0.0,
        pause_s=_pause_s(ledger.epochs),
        interval_s=found.interval_s,
        cost_s=found.cost_s,
        commit_s=found.commit_s,
        unnoticed=sum(row.name not in in_time for row in taken) / len(taken) if taken else 0.0,
        move_usd=_move_usd(s, offers),
        paces=_paces(s),
    )


def _pause_s(epochs: Sequence[EpochRow]) -> float:
    """Return the median pause: from the last step of a world to the first of the next, where a node
    stayed."""
    trained = [e for e in epochs if e.first_s is not None]
    gaps = [
        after.gap_s
        for before, after in itertools.pairwise(trained)
        if after.gap_s is not None and set(before.attempts) & set(after.attempts)
    ]
    return median(gaps) if gaps else 0.0


def _move_usd(s: Summary, offers: Sequence[OfferHistory]) -> float:
    """Return the mean cost of reading the newest snapshot in another place."""
    places = sorted({one.offer.place for one in offers})
    nbytes = s.snapshots[-1].nbytes if s.snapshots else 0
    ways = [transfer_usd(a, b, nbytes) for a in places for b in places if a != b]
    return sum(ways) / len(ways) if ways else 0.0


def _paces(s: Summary) -> dict[int, float]:
    """Return node-seconds of a step by number of nodes: medians of the executed steps."""
    nodes = {e.epoch: len(set(e.attempts)) for e in s.ledger.epochs}
    seconds = defaultdict[int, list[float]](list)
    for point in (*s.curve, *s.lost):
        if point.epoch in nodes and point.seconds > 0:
            seconds[nodes[point.epoch]].append(point.seconds)
    return {count: count * median(found) for count, found in sorted(seconds.items()) if count}


# ---- what cannot be known ------------------------------------------------------------------------
def _unknown(
    s: Summary,
    offers: Sequence[OfferHistory],
    others: Sequence[OfferHistory],
    held: Sequence[ZoneTrace],
    hours: float,
    priced: bool,
) -> list[str]:
    known = [
        f"{one.offer.name}: {one.count(GIVEN)} given, {one.count(REFUSED)} refused, "
        f"{one.count(TAKEN)} taken away; a node there for "
        f"{100 * zone.availability:.0f} % of the time"
        for one, zone in zip(offers, held, strict=True)
    ]
    told = any(isinstance(x.fact, PricesSeen) for x in s.facts)
    found = [
        "capacity is known only where the run asked (" + "; ".join(known) + ")",
        "offers that it never tried are not there"
        + ("" if told else ", and prices are those of its launches"),
        f"what lies beyond its own {duration(hours * 3600)} repeats them from the beginning",
        "worlds of a size that was never measured are taken to do as much for each node as the "
        f"nearest that was (measured: {', '.join(f'{n}' for n in _paces(s)) or 'none'})",
    ]
    if not priced:
        found.append("the price on demand is not known, so nobody can buy it there")
    elif not any(not row.spot for row in s.ledger.attempts):
        found.append("it never bought on demand: only policies that plan with it may do so there")
    if others:
        shapes = ", ".join(sorted({one.offer.name for one in others}))
        found.append(f"offers of another shape are left out: {shapes}")
    broken = sum(row.end in ("failed", "killed", "unfit", "refused") for row in s.ledger.attempts)
    if broken:
        found.append(
            f"{plural(broken, 'node')} that failed by themselves: nothing fails by itself there"
        )
    if s.away_s:
        found.append("what the market did while nobody led the run")
    if s.session is None:
        found.append("how long a restore takes")
    return found


# The cost of a finished run on its own market under other policies, numbers of nodes and snapshot
# intervals: `harness market simulate --what-if URL`.

SLACK = 1.1  # the deadline of a run without one, as a multiple of its own time
NO_ON_DEMAND_USD = 1e6  # per hour: a price at which nobody buys
USUAL = ("cheapest", "patient", "deadline", "uniform_progress", "on_demand_fallback", "on_demand")


def buys(name: str) -> bool:
    """Return whether a policy of that name must be offered on-demand nodes, as in `harness
    launch`."""
    return name in PEERS or policies.uses_on_demand(name)


@dataclass(frozen=True)
class WhatIfRow:
    """One alternative. `group`: "policy", "nodes" or "interval"; `own`: the run's own choice.
    `held` and `hoped`: its result in the two readings."""

    group: str
    name: str
    job: ReplayJob
    own: bool
    held: ReplayResult
    hoped: ReplayResult


@dataclass(frozen=True)
class ActualRun:
    """The real course of the run, according to the ledger. `goodput`: the share of paid node time
    that was useful."""

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
    """All answers. `deadline_h`: from the run's begin. `unknown`: what cannot be known, in
    words."""

    url: str
    actual: ActualRun
    market: OwnMarket
    deadline_h: float
    rows: tuple[WhatIfRow, ...]
    unknown: tuple[str, ...]


@dataclass(frozen=True)
class WhatIfAsked:
    """The alternatives to try. Empty and 0 mean the usual ones. `deadline_h`: from the run's
    begin."""

    policies: tuple[str, ...] = ()
    nodes: tuple[int, ...] = ()
    intervals_s: tuple[float, ...] = ()
    deadline_h: float = 0.0


def what_if(s: Summary, asked: WhatIfAsked | None = None) -> WhatIf:
    """Replay a run's own market. Raises BadInput if the facts contain none, or a policy is not
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

    # ---- alternatives ----------------------------------------------------------------------------
    def by_policy(self) -> Iterator[WhatIfRow]:
        """Yield the results of policies, the run's own first."""
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
        """Return the run's work on this many nodes, with snapshots at this interval."""
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
        """Return the policy as `harness launch` composes it. Raises BadInput."""
        policy = policy_named(name, self.market.tick_s)
        if not self.market.on_demand_usd_per_h or not (self.market.bought or buys(name)):
            policy = spot_only(policy)
        return combinators.within_hours(policy, hours=self.market.hours * REPEATS)

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
    """Restrict a policy to spot offers."""

    def decide(view: View) -> Any:
        offers = tuple(offer for offer in view.offers if offer.spot)
        return policy(dataclasses.replace(view, offers=offers))

    return decide


def _deadline_h(s: Summary) -> float:
    """Return the run's own deadline, from its begin; without one a little later than its end."""
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
    """Yield the run itself and each alternative as plain values, each for a line of JSON. An
    alternative that is never done has `finish_h` None."""
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
