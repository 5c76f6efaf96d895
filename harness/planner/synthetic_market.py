"""Synthetic markets: generated from a seed, as rough as real ones, and fitted to observations.

A zone's capacity consists of blocks of machines that come and go together. Each block is present
for a spell, then absent for one. Spells are Weibull distributed: with a shape below 1 most are
short and a few are very long, as in recorded markets. Weather makes all of them longer or shorter
for hours, and zones share some of it. Prices wander around their mean.

`make_up` makes a market of zones that are known. `drawn` draws a zone that fits the observations of
its capacity, with the remaining uncertainty: shapes and lengths come from their posterior.

Pure: the same generator makes the same market.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from harness.controller.forecast.spell_rates import USUAL_CLOSED_H, USUAL_OPEN_H
from harness.core.estimates import CapacitySeen, Spell
from harness.core.world import BadInput
from harness.planner.traces import LEAST_TICK_S, MOST_NODES, MOST_TICK_S, MOST_TICKS, ZoneTrace

# Shapes of spells that are fitted to observations, with their prior probabilities.
SHAPES = ((0.5, 0.2), (0.7, 0.3), (0.85, 0.2), (1.0, 0.2), (1.3, 0.1))
# How much mean lengths of spells differ between zones: standard deviation of their logarithm.
USUAL_SPREAD = 0.8
LEAST_SPELL_H, MOST_SPELL_H = 0.05, 2000.0  # mean lengths
WEATHER_STEP_H = 1.0


@dataclass(frozen=True)
class MadeUpZone:
    """The parameters of a zone. `open_h`, `closed_h`: mean lengths of spells with and without
    capacity, in hours; `open_shape`, `closed_shape`: 1 is memoryless, less has heavier tails.
    `nodes`: the most at once, in `blocks` blocks of about one size (0: each node is a block);
    spells are a block's. `usd_per_h`: mean price of a node; None: no prices. `price_swing`:
    standard deviation of the price's logarithm; it never exceeds `most_usd_per_h`. `is_open`: the
    state when the market begins, which has lasted for `age_h`; None: unknown."""

    zone: str
    open_h: float = USUAL_OPEN_H
    closed_h: float = USUAL_CLOSED_H
    open_shape: float = 0.7
    closed_shape: float = 0.7
    nodes: int = 1
    blocks: int = 0
    usd_per_h: float | None = None
    price_swing: float = 0.0
    most_usd_per_h: float = math.inf
    is_open: bool | None = None
    age_h: float = 0.0

    def __post_init__(self) -> None:
        lengths = (self.open_h, self.closed_h, self.open_shape, self.closed_shape)
        if not all(0 < length < math.inf for length in lengths):
            raise BadInput(f"zone {self.zone}: wanted spells and shapes above 0: {self}")
        if not 1 <= self.nodes <= MOST_NODES:
            raise BadInput(f"zone {self.zone}: wanted 1 to {MOST_NODES} nodes, found {self.nodes}")


@dataclass(frozen=True)
class MarketWeather:
    """The weather of a market. `sway`: how much it makes spells longer and shorter, as a standard
    deviation of the logarithm of time; `together`: the share of it that all zones have in common (0
    to 1); `half_h`: hours until half of it is forgotten."""

    sway: float = 0.0
    together: float = 0.0
    half_h: float = 8.0


CALM = MarketWeather()
ROUGH = MarketWeather(sway=0.7, together=0.5)


def make_up(
    zones: Sequence[MadeUpZone],
    hours: float,
    rng: Generator,
    *,
    tick_s: float = 300.0,
    weather: MarketWeather = CALM,
) -> list[ZoneTrace]:
    """Return a market of these zones, aligned. Raises BadInput."""
    if not LEAST_TICK_S <= tick_s <= MOST_TICK_S:
        raise BadInput(f"a tick of {tick_s:g} s; wanted {LEAST_TICK_S:g} to {MOST_TICK_S:g} s")
    ticks = math.ceil(hours * 3600 / tick_s - 1e-9)
    if not 1 <= ticks <= MOST_TICKS or not zones:
        raise BadInput(f"wanted zones and 1 to {MOST_TICKS} ticks, found {len(zones)} and {ticks}")
    steps = math.ceil(hours / WEATHER_STEP_H) + 1
    swayed = _swayed(rng, steps, len(zones), weather)
    found = list[ZoneTrace]()
    for at, zone in enumerate(zones):
        clocks = _SpellClock(1 / swayed[:, at]), _SpellClock(swayed[:, at])
        nodes = np.zeros(ticks, dtype=np.int64)
        for at_block, block in enumerate(_block_sizes(zone)):
            # the zone is closed while one block is absent; the others' states are unknown
            alike = zone.is_open or not at_block
            known = zone if alike else dataclasses.replace(zone, is_open=None)
            opens = _spells(known, hours, clocks, rng)
            edges = np.ceil(np.array(opens) * 3600 / tick_s - 1e-9).astype(np.int64)
            for begin, end in zip(edges[::2], edges[1::2], strict=True):
                nodes[begin:end] += block
        prices = _prices(zone, ticks, tick_s, rng)
        found.append(ZoneTrace(zone.zone, tick_s, nodes, prices))
    return found


def usual_zones(
    count: int, rng: Generator, *, nodes: int = 1, usd_per_h: float | None = None
) -> list[MadeUpZone]:
    """Return zones of which nothing is known, drawn from the prior of all zones."""
    found = [drawn(f"zone-{at}", None, rng, nodes=nodes) for at in range(count)]
    if usd_per_h is None:
        return found
    factors = np.exp(0.15 * rng.standard_normal(count))
    return [
        dataclasses.replace(zone, usd_per_h=usd_per_h * float(factor), price_swing=0.05)
        for zone, factor in zip(found, factors, strict=True)
    ]


def drawn(
    zone: str,
    seen: CapacitySeen | None,
    rng: Generator,
    *,
    nodes: int = 1,
    now_s: float | None = None,
) -> MadeUpZone:
    """Return a zone that fits these observations; None: there are none. With `now_s` (on the clock
    of the observations) its market begins in the state that was last seen."""
    seen = seen or CapacitySeen()
    spells = list(seen.spells)
    if seen.open is not None:
        spells.append(Spell(seen.open, max(0.0, seen.seen_s - seen.since_s), False))
    open_h, open_shape = _drawn_spell([s for s in spells if s.open], USUAL_OPEN_H, rng)
    closed_h, closed_shape = _drawn_spell([s for s in spells if not s.open], USUAL_CLOSED_H, rng)
    is_open, age_h = (None, 0.0) if now_s is None else (seen.open, seen.age_s(seen.seen_s) / 3600)
    return MadeUpZone(
        zone,
        open_h,
        closed_h,
        open_shape,
        closed_shape,
        nodes=nodes,
        is_open=is_open,
        age_h=age_h,
    )


def in_blocks(zone: MadeUpZone, blocks: int) -> MadeUpZone:
    """Return a zone of `blocks` blocks that are all present about as often and as long as the given
    zone is open: each stays longer, and is absent for less time. Exact for memoryless spells."""
    blocks = max(1, min(blocks, zone.nodes))
    share = (zone.open_h / (zone.open_h + zone.closed_h)) ** (1 / blocks)
    open_h = blocks * zone.open_h
    return dataclasses.replace(
        zone,
        open_h=open_h,
        closed_h=max(LEAST_SPELL_H, open_h * (1 / share - 1)),
        blocks=blocks,
    )


# ---- spells --------------------------------------------------------------------------------------
def _drawn_spell(seen: Sequence[Spell], usual_h: float, rng: Generator) -> tuple[float, float]:
    """Return a drawn mean length in hours, and a shape. For a shape k the posterior is a gamma
    distribution of 1 / scale**k; shapes are weighted by how well they fit the observations."""
    hours = np.array([max(spell.seconds / 3600, 1e-3) for spell in seen])
    ended = np.array([spell.ended for spell in seen], dtype=bool)
    weights, draws = list[float](), list[tuple[float, float]]()
    for shape, before in SHAPES:
        # as many spells as make the mean length as uncertain as zones are different
        a = 0.5 + 1 / (USUAL_SPREAD * shape) ** 2
        b = a * (usual_h / math.gamma(1 + 1 / shape)) ** shape
        n, total = int(ended.sum()), float((hours**shape).sum())
        fits = n * math.log(shape) + (shape - 1) * float(np.log(hours[ended]).sum())
        fits += a * math.log(b) - (a + n) * math.log(b + total)
        fits += math.lgamma(a + n) - math.lgamma(a)
        weights.append(math.log(before) + fits)
        draws.append((a + n, b + total))
    chances = np.exp(np.array(weights) - max(weights))
    at = int(rng.choice(len(SHAPES), p=chances / chances.sum()))
    shape = SHAPES[at][0]
    scale = (rng.gamma(draws[at][0]) / draws[at][1]) ** (-1 / shape)
    return min(MOST_SPELL_H, max(LEAST_SPELL_H, scale * math.gamma(1 + 1 / shape))), shape


class _SpellClock:
    """A clock for spells of one kind, which the weather makes faster and slower."""

    def __init__(self, pace: NDArray[np.float64]):
        self.pace: list[float] = pace.tolist()
        self.passed: list[float] = [0.0, *np.cumsum(pace * WEATHER_STEP_H).tolist()]

    def after(self, at_h: float, spell_h: float) -> float:
        """Return the hour at which a spell is over that begins at `at_h`."""
        last = len(self.pace) - 1
        step = min(last, int(at_h / WEATHER_STEP_H))
        until = self.passed[step] + (at_h - step * WEATHER_STEP_H) * self.pace[step] + spell_h
        step = min(last, bisect_right(self.passed, until) - 1)
        return step * WEATHER_STEP_H + (until - self.passed[step]) / self.pace[step]


def _spells(
    zone: MadeUpZone, hours: float, clocks: tuple[_SpellClock, _SpellClock], rng: Generator
) -> list[float]:
    """Return the hours, up to `hours`, at which one block comes and goes, in turn."""
    means = (zone.closed_h, zone.open_h)
    shapes = (zone.closed_shape, zone.open_shape)
    scales = [m / math.gamma(1 + 1 / k) for m, k in zip(means, shapes, strict=True)]
    is_open = zone.is_open
    if is_open is None:  # the market begins within a spell, more often a long one
        is_open = bool(rng.random() < zone.open_h / (zone.open_h + zone.closed_h))
        k = shapes[is_open]
        first_h = rng.random() * scales[is_open] * rng.gamma(1 + 1 / k) ** (1 / k)
    else:
        k, scale = shapes[is_open], scales[is_open]
        first_h = scale * ((zone.age_h / scale) ** k + rng.exponential()) ** (1 / k) - zone.age_h
    at_h, edges = 0.0, [0.0] if is_open else []
    draw = _drawer(rng, shapes, scales)
    spell_h = first_h
    while True:
        at_h = clocks[is_open].after(at_h, spell_h)
        if at_h >= hours:
            return [*edges, hours] if is_open else edges
        edges.append(at_h)
        is_open = not is_open
        spell_h = draw(is_open)


def _drawer(
    rng: Generator, shapes: Sequence[float], scales: Sequence[float]
) -> Callable[[bool], float]:
    """Return a function that returns lengths of spells, drawn many at a time."""
    held: tuple[list[float], list[float]] = [], []

    def draw(is_open: bool) -> float:
        if not held[is_open]:
            held[is_open].extend((scales[is_open] * rng.weibull(shapes[is_open], 32)).tolist())
        spell_h: float = held[is_open].pop()
        return max(1e-3, spell_h)

    return draw


def _block_sizes(zone: MadeUpZone) -> list[int]:
    count = min(zone.nodes, zone.blocks or zone.nodes)
    return [(zone.nodes + at) // count for at in range(count)]


# ---- what wanders --------------------------------------------------------------------------------
def _wandering(rng: Generator, steps: int, columns: int, keep: float) -> NDArray[np.float64]:
    """Return values around 0 of deviation 1; each step keeps the share `keep`. (steps, columns)"""
    found = rng.standard_normal((steps, columns))
    fresh = math.sqrt(1 - keep * keep)
    for step in range(1, steps):
        found[step] = keep * found[step - 1] + fresh * found[step]
    return found


def _swayed(rng: Generator, steps: int, zones: int, weather: MarketWeather) -> NDArray[np.float64]:
    """Return how much longer each zone's open spells are in each step, and closed ones shorter."""
    if not weather.sway:
        return np.ones((steps, zones))
    keep = 0.5 ** (WEATHER_STEP_H / weather.half_h)
    found = _wandering(rng, steps, zones + 1, keep)
    shared, own = found[:, :1], found[:, 1:]
    both = math.sqrt(weather.together) * shared + math.sqrt(1 - weather.together) * own
    return np.exp(weather.sway * both)


def _prices(
    zone: MadeUpZone, ticks: int, tick_s: float, rng: Generator
) -> NDArray[np.float64] | None:
    """Return prices that change once an hour, and forget half of a change in a day."""
    if zone.usd_per_h is None:
        return None
    steps = math.ceil(ticks * tick_s / 3600)
    swing = zone.price_swing * _wandering(rng, steps, 1, 0.5 ** (1 / 24))[:, 0]
    hourly = np.minimum(
        zone.most_usd_per_h, zone.usd_per_h * np.exp(swing - 0.5 * zone.price_swing**2)
    )
    at = np.minimum(steps - 1, (np.arange(ticks) * tick_s / 3600 + 1e-9).astype(np.int64))
    prices: NDArray[np.float64] = hourly[at]
    return prices
