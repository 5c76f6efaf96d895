"""How often capacity comes and goes, learned from what was seen and shrunk towards what is usual.

Pure.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.core.known import CapacitySeen, Spell
from harness.market.lookahead import AGES_H, CLASSES, SpellRates

# What is usual, in hours, and how many spells it counts for.
USUAL_OPEN_H, USUAL_CLOSED_H, USUAL_SPELLS = 3.0, 3.0, 2.0
USUAL_UNNOTICED = 0.25  # share of losses
USUAL_ENDS = 4.0  # so many ends are worth as much as what is usual of spells by their age
# How often, per hour, a spell of some age usually ends (by class of age): a market that is quick to
# change in its first minutes is often slow after hours. What is seen scales it as a whole.
USUAL_ENDS_PER_H = (1.2, 0.6, 0.3, 0.15, 0.06)
# Rates are rounded to powers of this, so that those of similar markets share what is computed.
ROUNDED_TO = 1.5
# Zones of one cloud are full at the same times: so many of them count as one more that is not.
ALIKE = 2.0


def losses_per_h(seen: CapacitySeen | None) -> tuple[float, float]:
    """Of one node of an offer: how often it is taken, and how often without notice. None: nobody
    knows the offer."""
    seen = seen or CapacitySeen()
    k = USUAL_SPELLS
    loss_per_h = (k + seen.losses) / (k * USUAL_OPEN_H + seen.node_s / 3600)
    unnoticed = (k * USUAL_UNNOTICED + seen.unnoticed) / (k + seen.losses)
    return loss_per_h, loss_per_h * unnoticed


# ---- by the age of a spell -----------------------------------------------------------------------
@dataclass(frozen=True)
class Ends:
    """Of some spells: how many came to their end, and how many would have in a usual market."""

    seen: float = 0.0
    usual: float = 0.0

    def __add__(self, other: Ends) -> Ends:
        return Ends(self.seen + other.seen, self.usual + other.usual)

    def pace(self, towards: float = 1.0, weight: float = USUAL_ENDS) -> float:
        """How many times as often they end as in a usual market, shrunk towards a pace that counts
        for `weight` ends."""
        return (weight * towards + self.seen) / (weight + self.usual)


def ends(spells: Iterable[Spell]) -> Ends:
    """Of these."""
    found = [*spells]
    usual = sum(_usual_ends(spell.seconds / 3600) for spell in found)
    return Ends(sum(spell.ended for spell in found), usual)


def _usual_ends(hours: float) -> float:
    """How many ends a usual market has, on average, while something is that old or younger."""
    found = 0.0
    for per_h, begin, end in zip(USUAL_ENDS_PER_H, AGES_H, [*AGES_H[1:], math.inf], strict=True):
        found += per_h * (min(hours, end) - begin) if hours > begin else 0.0
    return found


@functools.lru_cache(maxsize=4096)
def _past(spells: tuple[Spell, ...], open: bool) -> Ends:
    return ends(spell for spell in spells if spell.open is open)


def closings(seen: CapacitySeen | None, now_s: float, held: bool) -> Ends:
    """Of the open spells of one offer. `held`: a node of ours is there now."""
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
    """When at least one of these was open: (from, until) in order; the last `until` is infinite if
    one of them still is. The first is when somebody looked first, of no length."""
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
    """Spells in which none of these offers was open, as far as somebody looked; the last may go
    on."""
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
    """Since when none of these offers is open, as far as somebody looked."""
    known = tuple((s.open, s.since_s, s.spells) for s in seen if s.open is not None)
    return min(now_s, _open_times(known)[-1][1]) if known else now_s


def spell_rates(seen: Sequence[CapacitySeen | None], now_s: float, held: int = -1) -> SpellRates:
    """Of a market of these offers, one of which would do; each of them may be unknown. `held`: the
    place of one where a node of ours is."""
    known = [s for s in seen if s is not None]
    closes = Ends()
    for i, one in enumerate(seen):
        closes += closings(one, now_s, i == held)
    shut = shut_spells(known, now_s)
    more = len(seen) - 1
    # with more offers, some other is open sooner
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
