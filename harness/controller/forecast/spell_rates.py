"""Rates at which capacity comes and goes, learned from observations and shrunk towards usual rates.

Pure.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.controller.forecast.dynamic_program import AGES_H, CLASSES, SpellRates
from harness.core.estimates import CapacitySeen, Spell

# The usual mean lengths in hours, and the number of spells that they count for.
USUAL_OPEN_H, USUAL_CLOSED_H, USUAL_SPELLS = 3.0, 3.0, 2.0
USUAL_UNNOTICED = 0.25  # share of losses
USUAL_ENDS = 4.0  # weight of the usual rates by age, in ends of spells
# Usual ends per hour of a spell, by class of age: a market that changes fast in its first minutes
# is often slow after hours. Observations scale all of them together.
USUAL_ENDS_PER_H = (1.2, 0.6, 0.3, 0.15, 0.06)
# Rates are rounded to powers of this, so that similar markets share computed tables.
ROUNDED_TO = 1.5
# Zones of one cloud are full at the same times: this many count as one independent zone.
ALIKE = 2.0


def losses_per_h(seen: CapacitySeen | None) -> tuple[float, float]:
    """Return how often per hour a node of an offer is lost, and how often without notice. None: the
    offer is unknown."""
    seen = seen or CapacitySeen()
    k = USUAL_SPELLS
    loss_per_h = (k + seen.losses) / (k * USUAL_OPEN_H + seen.node_s / 3600)
    unnoticed = (k * USUAL_UNNOTICED + seen.unnoticed) / (k + seen.losses)
    return loss_per_h, loss_per_h * unnoticed


# ---- by the age of a spell -----------------------------------------------------------------------
@dataclass(frozen=True)
class Ends:
    """The ends of some spells: how many were observed, and how many are usual."""

    seen: float = 0.0
    usual: float = 0.0

    def __add__(self, other: Ends) -> Ends:
        return Ends(self.seen + other.seen, self.usual + other.usual)

    def pace(self, towards: float = 1.0, weight: float = USUAL_ENDS) -> float:
        """Return the ratio of the rate of ends to that of a usual market, shrunk towards a pace
        that counts for `weight` ends."""
        return (weight * towards + self.seen) / (weight + self.usual)


def ends(spells: Iterable[Spell]) -> Ends:
    """Return the ends of these spells."""
    found = [*spells]
    usual = sum(_usual_ends(spell.seconds / 3600) for spell in found)
    return Ends(sum(spell.ended for spell in found), usual)


def _usual_ends(hours: float) -> float:
    """Return the mean number of ends that a usual market has up to this age."""
    found = 0.0
    for per_h, begin, end in zip(USUAL_ENDS_PER_H, AGES_H, [*AGES_H[1:], math.inf], strict=True):
        found += per_h * (min(hours, end) - begin) if hours > begin else 0.0
    return found


@functools.lru_cache(maxsize=4096)
def _past(spells: tuple[Spell, ...], open: bool) -> Ends:
    return ends(spell for spell in spells if spell.open is open)


def closings(seen: CapacitySeen | None, now_s: float, held: bool) -> Ends:
    """Return the ends of an offer's open spells. `held`: a node of ours is there now."""
    if seen is None or seen.open is None:
        return Ends()
    found = _past(seen.spells, True)
    if seen.open:
        until_s = now_s if held else seen.seen_s
        found += Ends(0.0, _usual_ends((until_s - seen.since_s) / 3600))
    return found


@functools.lru_cache(maxsize=1024)
def _open_times(
    offers: tuple[tuple[bool, float, tuple[Spell, ...]], ...],
) -> tuple[tuple[float, float], ...]:
    """Return when at least one of these was open: (from, until) in order. The last `until` is
    infinite if one still is. The first entry is the first look, with length 0."""
    found = list[tuple[float, float]]()
    first_s = math.inf
    for is_open, since_s, spells in offers:
        if is_open:
            found.append((since_s, math.inf))
        at_s = since_s
        for spell in reversed(spells):
            if spell.open:
                found.append((at_s - spell.seconds, at_s))
            at_s -= spell.seconds
        first_s = min(first_s, at_s)
    merged = [(first_s, first_s)]
    for begin_s, end_s in sorted(found):
        if begin_s <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end_s, merged[-1][1])
        else:
            merged.append((begin_s, end_s))
    return tuple(merged)


def shut_spells(seen: Sequence[CapacitySeen], now_s: float) -> list[Spell]:
    """Return the spells in which none of these offers was open, as far as observed. The last one
    may go on."""
    known = tuple((s.open, s.since_s, s.spells) for s in seen if s.open is not None)
    if not known:
        return []
    times = _open_times(known)
    gaps = [
        Spell(False, begin_s - end_s, True)
        for (_, end_s), (begin_s, _) in itertools.pairwise(times)
    ]
    if times[-1][1] < now_s:
        gaps.append(Spell(False, now_s - times[-1][1], False))
    return gaps


def shut_since(seen: Sequence[CapacitySeen], now_s: float) -> float:
    """Return the time since which none of these offers is open, as far as observed."""
    known = tuple((s.open, s.since_s, s.spells) for s in seen if s.open is not None)
    return min(now_s, _open_times(known)[-1][1]) if known else now_s


def spell_rates(seen: Sequence[CapacitySeen | None], now_s: float, held: int = -1) -> SpellRates:
    """Return the rates of a market of these offers, any of which would do; None: an unknown one.
    `held`: index of one where a node of ours is, -1 for none."""
    known = [s for s in seen if s is not None]
    closes = Ends()
    for i, one in enumerate(seen):
        closes += closings(one, now_s, i == held)
    shut = shut_spells(known, now_s)
    more = len(seen) - 1
    # with more offers, another one is open sooner
    usual_open = (1 + more) ** 0.5
    opens = ends(shut).pace(usual_open)
    usual_another = 1.0 - 0.5 ** (more / ALIKE)
    losses = closes.seen
    bereft = max(0, len(shut) - 1)
    another = 0.0
    if more:
        kept = max(0.0, losses - bereft)
        another = (USUAL_ENDS * usual_another + kept) / (USUAL_ENDS + max(losses, kept))
    return SpellRates(_scaled(closes.pace()), _scaled(opens), round(min(1.0, another), 1))


def _scaled(pace: float) -> tuple[float, ...]:
    rounded = ROUNDED_TO ** round(math.log(pace, ROUNDED_TO))
    return tuple(round(per_h * rounded, 4) for per_h in USUAL_ENDS_PER_H)


assert len(USUAL_ENDS_PER_H) == CLASSES
