"""A finished run's own market, as far as its facts tell: where it was given nodes, refused them or
lost them, at what prices, and what its work was.

A run sees its market only where it asks. So there are two readings of what it saw. `held`: a place
had as many nodes as the run had there, and no more: what is certain. `hoped`: it had room for more
at all other times as well, but for those at which it is known to have had none: when it refused a
node or took one away, and from then until it did so again, if it gave none meanwhile. A run that
keeps asking leaves little room between the two; one that has bought its nodes on demand, and looks
for spot no more, leaves much.

Work is counted in node-seconds of useful steps. A world of another size is taken to do as much for
each node as the nearest one that was measured.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from harness.core.facts import AttemptIntended, PricesSeen, SessionStarted
from harness.core.prices import transfer_usd
from harness.core.values import BadObject, built
from harness.core.world import BadInput, Offer
from harness.market.traces import Counts, Prices, ZoneTrace
from harness.views.painting import NANO
from harness.views.rows import AttemptRow, EpochRow
from harness.views.summary import Summary
from harness.views.words import duration, plural

TICKS = 480  # about, of a run
LENGTHS_S = (1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 900, 1800, 3600)  # of a tick
REPEATS = 4  # of the market, one after the other
AT_WORK = ("useful", "straggle", "redone", "snapshot")
GIVEN, REFUSED, TAKEN = "given", "refused", "taken"


@dataclass(frozen=True)
class MarketLook:
    """Something that a run saw of an offer's capacity, `s` seconds after its begin."""

    s: float
    what: str  # GIVEN | REFUSED | TAKEN


@dataclass(frozen=True)
class OfferHistory:
    """What a run saw of one offer. `stays`: of each node from when it was asked for until it was
    gone, seconds; `prices`: (seconds, USD per hour) of each change that was seen."""

    offer: Offer
    looks: tuple[MarketLook, ...]
    stays: tuple[tuple[float, float], ...]
    prices: tuple[tuple[float, float], ...]

    def count(self, what: str) -> int:
        return sum(look.what == what for look in self.looks)


@dataclass(frozen=True)
class WorkSeen:
    """What a run had to do, and what disturbed it; seconds. 0: not known, or nothing."""

    node_s: float  # useful steps of all nodes, without snapshots
    changeover_s: float  # from asking for a node until it trains
    pause_s: float  # that the others stood still when the world changed
    interval_s: float  # between two snapshots
    cost_s: float  # of training time, for one snapshot
    commit_s: float  # from its begin to its commit
    unnoticed: float  # share of the nodes taken away without a snapshot in time
    move_usd: float
    # node-seconds of a step, by number of nodes
    paces: Mapping[int, float] = field(default_factory=dict)

    def of_nodes(self, nodes: int, usual: int) -> float:
        """Node-seconds of all the work in worlds of `nodes`, where it was done in worlds of
        `usual`."""
        here, there = self._pace(nodes), self._pace(usual)
        return self.node_s * here / there if here and there else self.node_s

    def _pace(self, nodes: int) -> float:
        if not self.paces:
            return 0.0
        return self.paces[min(self.paces, key=lambda n: abs(math.log(n / max(1, nodes))))]


@dataclass(frozen=True)
class OwnMarket:
    """`held` and `hoped`: the two readings, as aligned zones (module docstring). `hours`: of the
    run; what lies beyond repeats them."""

    offers: tuple[OfferHistory, ...]
    held: tuple[ZoneTrace, ...]
    hoped: tuple[ZoneTrace, ...]
    hours: float
    tick_s: float
    on_demand_usd_per_h: float  # 0: not known
    bought: bool  # the run had nodes on demand
    one_place: bool
    work: WorkSeen
    unknown: tuple[str, ...]  # what cannot be known, in words


def own_market(s: Summary, most_nodes: int) -> OwnMarket:
    """Of a run with at least one world that trained on spot nodes. `most_nodes`: the most that
    anybody will ask for. Raises BadInput."""
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
    """Did the cloud take the node away? One that left in time, after a notice, was taken as
    well."""
    return row.end in ("preempted", "lost") or (row.end == "drained" and "preempt" in row.reason)


def _history(name: str, rows: Sequence[AttemptRow], s: Summary) -> OfferHistory:
    offer, prices = Offer(0.0, name), list[tuple[float, float]]()
    for stamped in s.facts:
        if isinstance(stamped.fact, PricesSeen) and name in stamped.fact.usd_per_h:
            prices.append((stamped.t - s.started_s, stamped.fact.usd_per_h[name]))
        if isinstance(stamped.fact, AttemptIntended) and stamped.fact.offer.get("name") == name:
            try:
                offer = built(Offer, stamped.fact.offer)
            except BadObject:  # its price is lost; the node's row knows the rest
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
    """Those of the shape that the run used most, and the others."""
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
    """(held, hoped): a market of so many ticks, and REPEATS times the same."""
    held, hoped = list[ZoneTrace](), list[ZoneTrace]()
    for one in offers:
        there = _held(one, ticks, tick_s)
        room = _hoped(one, there, tick_s, most_nodes)
        prices = np.tile(_prices(one, ticks, tick_s), REPEATS)
        held.append(ZoneTrace(one.offer.name, tick_s, np.tile(there, REPEATS), prices))
        hoped.append(ZoneTrace(one.offer.name, tick_s, np.tile(room, REPEATS), prices))
    return tuple(held), tuple(hoped)


def _held(one: OfferHistory, ticks: int, tick_s: float) -> Counts:
    """Nodes that the run had there, in each tick."""
    there = np.zeros(ticks, np.int64)
    for asked_s, gone_s in one.stays:
        first = min(ticks - 1, int(asked_s / tick_s))
        there[first : max(first + 1, round(gone_s / tick_s))] += 1
    return there


def _hoped(one: OfferHistory, held: Counts, tick_s: float, most: int) -> Counts:
    """Room for `most`, but where it is known that there was none."""
    full = np.zeros(len(held), dtype=bool)
    closed = [(look.s, look.what != GIVEN) for look in one.looks]
    for (at_s, is_closed), (next_s, stays) in itertools.pairwise([*closed, (0.0, False)]):
        if is_closed:
            until_s = next_s if stays else at_s
            full[min(len(held) - 1, int(at_s / tick_s)) : int(until_s / tick_s) + 1] = True
    return np.where(full, held, np.maximum(held, most))


def _prices(one: OfferHistory, ticks: int, tick_s: float) -> Prices:
    """Of each tick; before the first that was seen the first."""
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
    """From the last step of a world to the first of the next one, where somebody stayed."""
    trained = [e for e in epochs if e.first_s is not None]
    gaps = [
        after.gap_s
        for before, after in itertools.pairwise(trained)
        if after.gap_s is not None and set(before.attempts) & set(after.attempts)
    ]
    return median(gaps) if gaps else 0.0


def _move_usd(s: Summary, offers: Sequence[OfferHistory]) -> float:
    """For the newest snapshot to be read in another place, where that costs something."""
    places = sorted({one.offer.place for one in offers})
    nbytes = s.snapshots[-1].nbytes if s.snapshots else 0
    ways = [transfer_usd(a, b, nbytes) for a in places for b in places if a != b]
    return sum(ways) / len(ways) if ways else 0.0


def _paces(s: Summary) -> dict[int, float]:
    """Node-seconds of a step, by number of nodes: medians of what was executed."""
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
    broken = sum(row.end in ("failed", "unfit", "refused") for row in s.ledger.attempts)
    if broken:
        found.append(
            f"{plural(broken, 'node')} that failed by themselves: nothing fails by itself there"
        )
    if s.away_s:
        found.append("what the market did while nobody led the run")
    if not any(isinstance(x.fact, SessionStarted) for x in s.facts):
        found.append("how long a restore takes")
    return found
