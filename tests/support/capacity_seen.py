"""What a run would have seen of a zone's capacity, from the zone's trace."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from harness.core.estimates import CapacitySeen, Spell
from harness.planner.traces import ZoneTrace


def seen_in(trace: ZoneTrace, ticks: int | None = None, nodes: int = 1) -> CapacitySeen:
    """Return the observations of a zone's first `ticks` (None: all), from second 0 on. The zone is
    open while it has at least `nodes` nodes."""
    ticks = len(trace.nodes) if ticks is None else min(ticks, len(trace.nodes))
    there = trace.nodes[:ticks] >= nodes
    if not ticks:
        return CapacitySeen()
    edges = [0, *(np.flatnonzero(np.diff(there)) + 1).tolist()]
    spells = (
        Spell(bool(there[begin]), (end - begin) * trace.tick_s, True)
        for begin, end in pairwise(edges)
    )
    seen = CapacitySeen(bool(there[-1]), edges[-1] * trace.tick_s, ticks * trace.tick_s)
    for spell in spells:
        seen = seen.then(spell)
    return seen
