"""How often capacity comes and goes, learned from what was seen and shrunk towards what is usual.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.known import CapacitySeen

# What is usual, in hours, and how many spells it counts for.
USUAL_OPEN_H, USUAL_CLOSED_H, USUAL_SPELLS = 3.0, 3.0, 2.0
USUAL_UNNOTICED = 0.25  # share of losses


@dataclass(frozen=True)
class CapacityRates:
    """Of one offer, per hour: how often open capacity closes, and closed capacity opens; how often
    one node there is taken, and how often it is without notice. `seen_h`: hours of evidence."""

    close_per_h: float
    open_per_h: float
    loss_per_h: float
    unnoticed_per_h: float
    seen_h: float

    @property
    def open_share(self) -> float:
        """Of the time."""
        return self.open_per_h / (self.open_per_h + self.close_per_h)


def rates(seen: CapacitySeen | None, now_s: float = 0.0) -> CapacityRates:
    """Of what was seen of an offer; None: of an offer that nobody knows."""
    seen = seen or CapacitySeen()
    open_s = closed_s = 0.0
    closes = opens = 0
    for spell in seen.spells:
        open_s += spell.seconds if spell.open else 0.0
        closed_s += 0.0 if spell.open else spell.seconds
        closes += spell.open and spell.ended
        opens += not spell.open and spell.ended
    if seen.open is not None:  # the one that goes on
        goes_on_s = max(0.0, seen.seen_s - seen.since_s)
        open_s += goes_on_s if seen.open else 0.0
        closed_s += 0.0 if seen.open else goes_on_s
    k = USUAL_SPELLS
    close_per_h = (k + closes) / (k * USUAL_OPEN_H + open_s / 3600)
    loss_per_h = (k + seen.losses) / (k * USUAL_OPEN_H + seen.node_s / 3600)
    unnoticed = (k * USUAL_UNNOTICED + seen.unnoticed) / (k + seen.losses)
    return CapacityRates(
        close_per_h=close_per_h,
        open_per_h=(k + opens) / (k * USUAL_CLOSED_H + closed_s / 3600),
        loss_per_h=loss_per_h,
        unnoticed_per_h=loss_per_h * unnoticed,
        seen_h=(open_s + closed_s) / 3600,
    )
