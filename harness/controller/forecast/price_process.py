"""The wandering of spot prices, learned from observed prices and shrunk towards constant prices.

The logarithm of a price wanders around a mean and is pulled back to it: an Ornstein-Uhlenbeck
process, with the deviation `swing` and the rate `pull_per_h`. Policies use a few levels of the
price, which form a Markov chain with the same mean, deviation and memory (`level_rates`).

Pure.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

PricePath: TypeAlias = tuple[tuple[float, float], ...]  # (time, price) of each change, oldest first

LEVELS = 5  # levels of prices that wander
MIDDLE = (LEVELS - 1) / 2
USUAL_PULL_PER_H = math.log(2) / 24  # half of a distance from the mean is forgotten in a day
USUAL_STILL_H = 6.0  # prices are assumed to have been constant this long before the first look
LEAST_SWING, MOST_SWING = 0.04, 1.0  # less counts as no swing
SHORT = 0.1  # chance of a change in a step so short that it has nearly always one at most
# Nobody looks between two runs, so a price counts for at most this long, however long it stood.
MOST_STOOD_H = 24.0


@dataclass(frozen=True)
class PriceSwing:
    """The swing of one price in USD per hour. `usual_usd`: the exponential of its mean logarithm;
    `swing`: the standard deviation of the logarithm, 0 if the price is constant; `pull_per_h`:
    after t hours exp(-pull_per_h t) of a distance from the mean is left."""

    usual_usd: float
    swing: float = 0.0
    pull_per_h: float = USUAL_PULL_PER_H

    def over(self, usd: float, hours: float) -> float:
        """Return the average cost over the next hours, if it costs `usd` now."""
        if not self.swing or min(usd, self.usual_usd, hours) <= 0:
            return usd
        left = self.pull_per_h * hours
        kept = -math.expm1(-left) / left
        return float(self.usual_usd * (usd / self.usual_usd) ** kept)

    def level(self, usd: float) -> float:
        """Return the level of a price, from 0 to LEVELS - 1. A fraction lies between two levels."""
        if not self.swing or usd <= 0:
            return 0.0
        away = math.log(usd / self.usual_usd) / (self.swing * _step())
        return min(LEVELS - 1.0, max(0.0, MIDDLE + away))


def _step() -> float:
    """Return the distance between two levels, in deviations. A level is the number of heads among
    LEVELS - 1 coins, each of which is turned at its own rate, so the deviation is that of a
    binomial distribution."""
    return 2 / math.sqrt(LEVELS - 1)


def level_factor(swing: float, level: float) -> float:
    """Return the price of a level as a multiple of the usual price."""
    return math.exp(swing * _step() * (level - MIDDLE)) if swing else 1.0


def level_factors(swing: float) -> tuple[float, ...]:
    """Return the factors of all levels. A constant price has one level."""
    return tuple(level_factor(swing, level) for level in range(LEVELS)) if swing else (1.0,)


def level_rates(pull_per_h: float) -> NDArray[np.float64]:
    """Return the rates per hour from level to level; rows sum to 0. A chain with these rates
    forgets at `pull_per_h`, over any time, however short. 0: there is a single level."""
    count = LEVELS if pull_per_h else 1
    rates = np.zeros((count, count))
    for level in range(count):
        if level:
            rates[level, level - 1] = level * pull_per_h / 2
        if level < count - 1:
            rates[level, level + 1] = (count - 1 - level) * pull_per_h / 2
    np.fill_diagonal(rates, -rates.sum(axis=1))
    return rates


def chances(rates: NDArray[np.float64], hours: float) -> NDArray[np.float64]:
    """Return the chances to go from state to state within `hours`, given rates per hour."""
    halves = max(0, math.ceil(math.log2(max(1e-9, -float(rates.min()) * hours) / SHORT)))
    found: NDArray[np.float64] = np.eye(len(rates)) + rates * (hours / 2**halves)
    for _ in range(halves):
        found = found @ found
    return found


def hours_until(rates: NDArray[np.float64], wanted: Sequence[bool]) -> NDArray[np.float64]:
    """Return the mean hours from each level until a wanted one is reached; infinite if none is
    wanted."""
    found = np.full(len(rates), math.inf)
    hit = np.array(wanted, dtype=bool)
    found[hit] = 0.0
    away = np.flatnonzero(~hit)
    if hit.any() and len(away):
        found[away] = np.linalg.solve(rates[np.ix_(away, away)], -np.ones(len(away)))
    return found


@functools.lru_cache(maxsize=4096)
def _moves(pull_per_h: float, hours: float) -> NDArray[np.float64]:
    return chances(level_rates(pull_per_h), hours)


def level_moves(pull_per_h: float, hours: float) -> NDArray[np.float64]:
    """Return the chances to go from level to level within `hours`."""
    return _moves(pull_per_h, round(hours, 6))


def level_after(pull_per_h: float, level: float, hours: float) -> NDArray[np.float64]:
    """Return the chance of each level, `hours` after a level that may lie between two."""
    at, f = place_below(level, LEVELS - 1)
    found = level_moves(pull_per_h, hours)
    chance: NDArray[np.float64] = found[at] * (1 - f) + found[at + 1] * f
    return chance


def hours_until_one(
    pull_per_h: float, level: float, wanted: Sequence[bool], most_h: float
) -> float:
    """Return the mean hours until one of the wanted levels is reached, at most `most_h`. `level`:
    the current one, which may lie between two."""
    hours = np.minimum(most_h, hours_until(level_rates(pull_per_h), wanted))
    return float(np.interp(level, np.arange(len(hours)), hours))


def place_below(at: float, most: int) -> tuple[int, float]:
    """Return the place below `at`, and the fraction of the way from there to the next."""
    at = min(max(at, 0.0), most - 1e-6)
    return int(at), at - int(at)


# ---- learning ------------------------------------------------------------------------------------
@functools.lru_cache(maxsize=2048)
def swing_of(path: PricePath, until_h: int) -> PriceSwing:
    """Return the swing of a price with these observed changes. `until_h`: hours on the path's clock
    until which the last price stood, rounded up so that results can be cached."""
    path = tuple((t, usd) for t, usd in path if usd > 0)
    if not path:
        return PriceSwing(0.0)
    times_h = [t / 3600 for t, _ in path] + [float(until_h)]
    stood = np.clip(np.diff(np.maximum.accumulate(times_h)), 0.0, MOST_STOOD_H)
    logs = np.log([usd for _, usd in path])
    changes, hours = np.diff(logs), float(stood.sum())
    # variance per hour of the wandering alone
    restless = float((changes**2).sum()) / (hours + USUAL_STILL_H)
    if restless <= 0:
        return PriceSwing(path[-1][1])
    mean = _mean(logs, stood, USUAL_PULL_PER_H)
    away = logs - mean
    # the prior counts as a run with the usual pull, observed to within a factor of about two
    told = 1 / USUAL_PULL_PER_H**2
    back = -float((away[:-1] * changes).sum()) / restless
    pull = (told * USUAL_PULL_PER_H + back) / (told + float((away**2 * stood).sum()) / restless)
    pull = min(8 * USUAL_PULL_PER_H, max(USUAL_PULL_PER_H / 4, pull))
    swing = min(MOST_SWING, math.sqrt(restless / (2 * pull)))
    if swing < LEAST_SWING:
        return PriceSwing(path[-1][1])
    return PriceSwing(math.exp(_mean(logs, stood, pull)), swing, pull)


def _mean(logs: NDArray[np.float64], stood: NDArray[np.float64], pull: float) -> float:
    """Return the most likely mean of a process with this pull. The first and the last price count
    for more than their time, which at the beginning is all that is known."""
    total = float(logs[0] + logs[-1] + pull * (logs * stood).sum())
    return total / (2 + pull * float(stood.sum()))


@functools.lru_cache(maxsize=256)
def lowest_path(paths: tuple[PricePath, ...]) -> PricePath:
    """Return the lowest of several prices at each time from which all of them are known."""
    if len(paths) == 1:
        return paths[0]
    begin = max((path[0][0] for path in paths if path), default=0.0)
    moments = sorted({begin, *(t for path in paths for t, _ in path if t > begin)})
    least = np.min([_at(path, moments) for path in paths if path], axis=0)
    found = [(moments[0], float(least[0]))]
    for t, usd in zip(moments[1:], least[1:].tolist(), strict=True):
        if usd != found[-1][1]:
            found.append((t, usd))
    return tuple(found)


def _at(path: PricePath, moments: Iterable[float]) -> NDArray[np.float64]:
    times = np.array([t for t, _ in path])
    at = np.searchsorted(times, np.array([*moments]), side="right") - 1
    found: NDArray[np.float64] = np.array([usd for _, usd in path])[np.maximum(at, 0)]
    return found
