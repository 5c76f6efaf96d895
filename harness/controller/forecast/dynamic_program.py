"""The least expected cost of the rest of a run, if all later decisions are optimal: a dynamic
programme over the remaining work and time, and over the age of spells of capacity.

It models one node, which trains on spot or on demand, or waits. A begin is billed, and makes no
progress for a changeover. A begin on spot from on demand happens while the old node trains on, and
so costs money only. Spells of capacity end at rates that depend on their age (`SpellRates`): in
most markets a long spell is likely to go on for long, and many young ones end soon. The price of
spot is constant, or wanders over some levels (`price_process.py`); then spot may also be left while
it is expensive.

Costs are in hours of on demand: multiply by its price. Pure.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from harness.controller.forecast.price_process import (
    hours_until_one,
    level_after,
    level_factor,
    level_factors,
    level_moves,
    place_below,
)

CostVector: TypeAlias = NDArray[np.float64]

# ages in hours at which the next age class begins
AGES_H = (0.0, 0.34, 1.0, 3.0, 9.0)
CLASSES = len(AGES_H)
# cost of an hour of work that is not done at the deadline, in hours of on demand
LATE = 30.0
# cached tables; those of wandering prices are larger by the number of levels
MOST_TABLES, MOST_WANDERING, MOST_MOVES = 96, 16, 4096
SHORT_H = 0.1  # hours in which a spell nearly always changes at most once
OPEN = 0  # a market's state; 1 + age class: closed for that long


@dataclass(frozen=True)
class SpellRates:
    """Rates per hour by age class: how often open capacity closes, and closed capacity opens.
    `another`: the chance that another place is open when one closes. `open_class`: the class of
    open capacity without a node of ours, whose age nobody observes."""

    close_per_h: tuple[float, ...]
    open_per_h: tuple[float, ...]
    another: float = 0.0
    open_class: int = 0


def class_of(age_h: float) -> int:
    """Return the class of an age: its index in AGES_H."""
    return sum(age_h >= begin for begin in AGES_H[1:])


def residual_h(per_h: Sequence[float], age_h: float) -> float:
    """Return the mean remaining hours of a spell of that age. `per_h`: ends per hour, by age
    class."""
    found, alive = 0.0, 1.0
    for rate, end in zip(per_h, (*AGES_H[1:], math.inf), strict=True):
        if age_h < end:
            ended = -math.expm1(-rate * (end - age_h))
            found += alive * ended / rate
            alive, age_h = alive * (1 - ended), end
    return found


@dataclass(frozen=True)
class Moves:
    """Chances of changes of capacity within some time. `market`: from state to state. For a node of
    ours, by age class, `kept`: from class to class; `lost`: that it is lost."""

    market: CostVector
    kept: CostVector
    lost: CostVector


@functools.lru_cache(maxsize=MOST_MOVES)
def moves(rates: SpellRates, hours: float) -> Moves:
    """Return the changes within `hours` in a market with these rates."""
    halves = max(0, math.ceil(math.log2(hours / SHORT_H))) if hours > 0 else 0
    short_h = hours / 2**halves
    kept, lost = _aging(rates.close_per_h, short_h)
    still, opened = _aging(rates.open_per_h, short_h)
    market = np.zeros((1 + CLASSES, 1 + CLASSES))
    closed = lost[rates.open_class] * (1 - rates.another)
    market[OPEN, OPEN], market[OPEN, 1] = 1 - closed, closed
    market[1:, 1:], market[1:, OPEN] = still, opened
    for _ in range(halves):
        market, kept = market @ market, kept @ kept
    return Moves(market, kept, 1 - kept.sum(axis=1))


def _aging(per_h: tuple[float, ...], hours: float) -> tuple[CostVector, CostVector]:
    """Return the chances from age class to age class for spells that go on, and of an end."""
    ends = 1.0 - np.exp(-np.array(per_h) * hours)
    older = np.append(np.minimum(1.0, hours / np.diff(np.array(AGES_H))), 0.0)
    on = np.diag((1 - ends) * (1 - older))
    on[np.arange(CLASSES - 1), np.arange(1, CLASSES)] = ((1 - ends) * older)[:-1]
    return on, ends


@dataclass(frozen=True)
class Terms:
    """The parameters of a table of costs. `price`: the usual price of spot, as a share of on
    demand; `swing`, `pull_per_h`: how it wanders around that (`price_process.PriceSwing`). The
    cells are of time and of work. `move`: the mean cost of the move that a later begin on spot
    needs, in hours of on demand."""

    rates: SpellRates
    price: float
    changeover_h: float
    cell_h: float
    time_cells: int
    work_cells: int
    swing: float = 0.0
    pull_per_h: float = 0.0
    move: float = 0.0

    @functools.cached_property
    def prices(self) -> tuple[float, ...]:
        """Prices of spot, by level."""
        return tuple(self.price * factor for factor in level_factors(self.swing))


@dataclass(frozen=True)
class Outlook:
    """Least expected costs, [cells of time left, price level, state, cells of work left]: of
    waiting (`idle`) and of training on demand (`bought`), by the market's state; of training on
    spot (`rented`), by the age class of its spell. `level`: of the current price; `until`: solves
    up to this many cells of time left, which are solved only on use."""

    terms: Terms
    idle: NDArray[np.float32]
    bought: NDArray[np.float32]
    rented: NDArray[np.float32]
    until: Callable[[int], None]
    level: float = 0.0

    @property
    def price(self) -> float:
        """Current price of spot."""
        return self.terms.price * level_factor(self.terms.swing, self.level)

    # ---- the alternatives ------------------------------------------------------------------------
    def wait(self, state: int, work_h: float, time_h: float, for_h: float) -> float:
        """Return the cost of waiting for `for_h`, and then acting optimally."""
        after = self._at(self.idle, work_h, time_h, for_h)
        return float(moves(self.terms.rates, for_h).market[state] @ after)

    def buy(self, state: int, work_h: float, time_h: float) -> float:
        """Return the cost of beginning on demand."""
        begin_h = self.terms.changeover_h
        after = self._at(self.bought, work_h, time_h, begin_h)
        return begin_h + float(moves(self.terms.rates, begin_h).market[state] @ after)

    def rent(self, work_h: float, time_h: float) -> float:
        """Return the cost of beginning on spot, which is open, without that of a move there."""
        begin_h, rates = self.terms.changeover_h, self.terms.rates
        found = moves(rates, begin_h)
        lost = float(found.lost[0])
        kept = float(found.kept[0] @ self._at(self.rented, work_h, time_h, begin_h))
        after = self._bereft(work_h, time_h, begin_h / 2)
        return self.price * begin_h * (1 - lost / 2) + kept + lost * after

    def keep(self, age: int, work_h: float, time_h: float, for_h: float) -> float:
        """Return the cost of training on spot for `for_h`. `age`: the age class of its spell."""
        found, left_h = moves(self.terms.rates, for_h), work_h - for_h
        kept = float(found.kept[age] @ self._at(self.rented, left_h, time_h, for_h))
        lost = float(found.lost[age])
        return self.price * for_h + kept + lost * self._bereft(left_h, time_h, for_h)

    def stay(self, state: int, work_h: float, time_h: float, for_h: float) -> float:
        """Return the cost of training on demand for `for_h`, and then acting optimally."""
        after = self._at(self.bought, work_h - for_h, time_h, for_h)
        return for_h + float(moves(self.terms.rates, for_h).market[state] @ after)

    def change(self, work_h: float, time_h: float) -> float:
        """Return the cost of changing from on demand to open spot, without that of a move there.
        Both are billed meanwhile."""
        begin_h = self.terms.changeover_h
        found = moves(self.terms.rates, begin_h)
        lost = float(found.lost[0])
        left = work_h - begin_h, time_h, begin_h
        kept = float(found.kept[0] @ self._at(self.rented, *left))
        after = kept + lost * float(self._at(self.bought, *left)[1])
        return begin_h + self.price * begin_h * (1 - lost / 2) + after

    def cheaper_in_h(self, work_h: float, time_h: float, for_h: float) -> float:
        """Return the mean hours until the price is low enough to begin on spot, at most the spare
        time."""
        begins = []
        for level in range(len(self.terms.prices)):
            at = dataclasses.replace(self, level=float(level))
            begins.append(at.rent(work_h, time_h) <= at.wait(OPEN, work_h, time_h, for_h))
        spare_h = max(0.0, time_h - work_h - self.terms.changeover_h)
        return hours_until_one(self.terms.pull_per_h, self.level, begins, spare_h)

    def _bereft(self, work_h: float, time_h: float, after_h: float) -> float:
        """Return the cost if spot is lost after `after_h`."""
        idle = self._at(self.idle, work_h, time_h, after_h)
        another = self.terms.rates.another
        return float(another * idle[OPEN] + (1 - another) * idle[1])

    def _at(
        self, table: NDArray[np.float32], work_h: float, time_h: float, after_h: float
    ) -> CostVector:
        """Return the costs of all states after `after_h`, interpolated between cells."""
        cell_h = self.terms.cell_h
        i, f = place_below((time_h - after_h) / cell_h, self.terms.time_cells)
        self.until(i + 1)
        j, g = place_below(work_h / cell_h, self.terms.work_cells)
        corner = table[i : i + 2, :, :, j : j + 2]
        low, high = corner[0], corner[1]
        sooner = low[..., 0] * (1 - g) + low[..., 1] * g
        later = high[..., 0] * (1 - g) + high[..., 1] * g
        found = sooner * (1 - f) + later * f
        if len(found) > 1:
            found = level_after(self.terms.pull_per_h, self.level, after_h)[None] @ found
        of_states: CostVector = found[0]
        return of_states


def outlook(terms: Terms) -> Outlook:
    """Solve the programme backwards over time, as far as its results are used. A begin takes whole
    cells here; in the last of them some work is done."""
    return _wandering(terms) if terms.swing else _still(terms)


@functools.lru_cache(maxsize=MOST_TABLES)
def _still(terms: Terms) -> Outlook:
    return _solved(terms)


@functools.lru_cache(maxsize=MOST_WANDERING)
def _wandering(terms: Terms) -> Outlook:
    return _solved(terms)


def _solved(terms: Terms) -> Outlook:
    levels, states, works = len(terms.prices), 1 + CLASSES, terms.work_cells + 1
    idle = np.empty((terms.time_cells + 1, levels, states, works), np.float32)
    bought = np.empty_like(idle)
    rented = np.empty((terms.time_cells + 1, levels, CLASSES, works), np.float32)
    late = LATE * terms.cell_h * np.arange(works, dtype=np.float32)
    idle[0], bought[0], rented[0] = late, late, late
    cells = _Cells(_Stage(terms, idle, bought, rented))
    return Outlook(terms, idle, bought, rented, cells.until)


@dataclass
class _Cells:
    """The cells of time, the first `solved` of which are done."""

    stage: _Stage
    solved: int = 0

    def until(self, r: int) -> None:
        """Solve the cells up to `r` that are not solved yet."""
        for each in range(self.solved + 1, r + 1):
            self.stage.solve(each)
            self.solved = each


class _Stage:
    """The solution of one cell of time: everything that does not depend on which cell."""

    def __init__(
        self,
        terms: Terms,
        idle: NDArray[np.float32],
        bought: NDArray[np.float32],
        rented: NDArray[np.float32],
    ):
        self.tables = idle, bought, rented
        cell_h, self.another = terms.cell_h, terms.rates.another
        cells = terms.changeover_h / cell_h
        self.cells = max(1, math.ceil(cells - 1e-9))
        self.done = self.cells - cells  # work done within a begin, in cells
        each, begin = moves(terms.rates, cell_h), moves(terms.rates, terms.changeover_h)
        self.market, self.kept, self.lost = _single(each.market, each.kept, each.lost[:, None])
        self.begin_market, kept, lost = _single(begin.market, begin.kept[0], begin.lost[:1])
        self.begin_kept, self.begin_lost = kept, float(lost[0])
        self.levels = _single(  # in a cell, a begin, and half a begin
            *(
                level_moves(terms.pull_per_h, n * cell_h)
                for n in (1, self.cells, (self.cells + 1) // 2)
            )
        )
        (prices,) = _single(np.array(terms.prices))
        self.cell_usd = np.float32(cell_h)
        self.spot_usd = prices[:, None, None] * self.cell_usd
        self.buy_usd = np.float32(self.cells * cell_h)
        self.rent_usd = prices[:, None] * np.float32(self.buy_usd * (1 - self.begin_lost / 2))
        self.rent_usd += np.float32(terms.move)

    def solve(self, r: int) -> None:
        idle, bought, rented = self.tables
        idle_after = _mixed(self.levels[0], idle[r - 1])
        wait = self.market @ idle_after
        rented_after, bereft = _mixed(self.levels[0], rented[r - 1]), self._bereft(idle_after)
        on = self.kept @ rented_after
        on += self.lost * bereft[:, None]
        np.add(on[..., :-1], self.spot_usd, out=rented[r, ..., 1:])
        stay = bought[r]
        bought_after = _mixed(self.levels[0], bought[r - 1])
        np.add((self.market @ bought_after)[..., :-1], self.cell_usd, out=stay[..., 1:])
        if r >= self.cells:
            k, begin_after = self.cells, bought_after
            if k > 1:  # otherwise a begin takes one cell, like everything else
                rented_after = _mixed(self.levels[1], rented[r - k])
                bereft = self._bereft(_mixed(self.levels[2], idle[r - (k + 1) // 2]))
                begin_after = _mixed(self.levels[1], bought[r - k])
            there = self.begin_kept @ rented_after
            begun = self._worked(there) + self.rent_usd
            begun += self.begin_lost * bereft
            np.minimum(wait, self._worked(self.begin_market @ begin_after) + self.buy_usd, out=wait)
            np.minimum(wait[:, OPEN], begun, out=wait[:, OPEN])
            beside = there + self.begin_lost * begin_after[:, 1] + (self.rent_usd + self.buy_usd)
            np.minimum(stay[:, OPEN, k:], beside[:, :-k], out=stay[:, OPEN, k:])
        np.minimum(stay, wait, out=stay)
        if len(self.rent_usd) > 1:  # at constant prices, spot that was worth it once stays worth it
            np.minimum(rented[r], wait[:, OPEN, None], out=rented[r])
        idle[r] = wait
        for table in self.tables:
            table[r, ..., 0] = 0.0

    def _bereft(self, idle: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the costs after a loss."""
        found: NDArray[np.float32] = self.another * idle[:, OPEN] + (1 - self.another) * idle[:, 1]
        return found

    def _worked(self, costs: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the costs minus the work that a begin leaves time for."""
        if not self.done:
            return costs
        found = costs.copy()
        found[..., 1:] += np.float32(self.done) * (costs[..., :-1] - costs[..., 1:])
        return found


def _single(*arrays: CostVector) -> tuple[NDArray[np.float32], ...]:
    return tuple(a.astype(np.float32) for a in arrays)


def _mixed(levels: NDArray[np.float32], costs: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the costs by level, after the price has moved."""
    if len(levels) == 1:
        return costs
    return (levels @ costs.reshape(len(levels), -1)).reshape(costs.shape)
