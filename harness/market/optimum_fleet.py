"""What an omniscient planner would have paid with many nodes: the least cost of some node-hours of
work by a deadline, with any number of nodes up to a limit in each tick.

A fleet is a row of slots: of n nodes in a zone the first n slots are filled. A slot can be on spot
in a zone where so many nodes could be had, so each slot is the problem of one node
(`optimum.py`), and the work is shared out among them for the least sum. For one zone that is
exact, but for the grain of the work that is shared out (a thousandth of a slot's or so). With
several zones, or with a least number of nodes, it is a lower bound: slots need not be in one place,
nor be filled together.

Pure.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from harness.core.world import BadInput
from harness.market.optimum import WorkToDo, least_costs, parts_of
from harness.market.traces import ZoneTrace

SHARES = 5000  # into which the work of all slots is cut


def fleet_optimum_usd(
    zones: Sequence[ZoneTrace], first: int, work: WorkToDo, nodes: int, one_place: bool = False
) -> float:
    """From tick `first` of aligned zones on. `work.hours`: of all nodes together. `one_place`:
    nodes of different zones are one fleet. Raises BadInput if the deadline cannot be met even on
    demand."""
    tick_s = zones[0].tick_s
    per_tick = parts_of(tick_s, work.changeover_s)
    least_h = work.hours / nodes + work.changeover_s / 3600
    if least_h > work.deadline_hours + 1e-9:
        raise BadInput(
            f"{work.hours:g} node-hours of work take {nodes} nodes {least_h:.4g} h, even on "
            f"demand; found a deadline of {work.deadline_hours:g} h"
        )
    parts = math.ceil(work.hours * 3600 / tick_s * per_tick - 1e-9)
    grain = max(1, parts // SHARES)
    most = int(work.deadline_hours * 3600 / tick_s + 1e-9) * per_tick
    each = dataclasses.replace(
        work, hours=most / per_tick * tick_s / 3600, move_usd=work.move_usd / nodes
    )
    market = [_merged(zones)] if one_place else list(zones)
    known: dict[bytes, NDArray[np.float64]] = {}
    total = np.full(-(-parts // grain) + 1, math.inf)
    total[0] = 0.0
    for slot in range(1, nodes + 1):
        rooms = [(zone.nodes >= slot).astype(np.int64) for zone in market]
        key = b"".join(room.tobytes() for room in rooms)
        if key not in known:
            slots = [dataclasses.replace(z, nodes=r) for z, r in zip(market, rooms, strict=True)]
            known[key] = least_costs(slots, first, each)[::grain]
        total = _shared(total, known[key])
    return float(total[-1])


def _shared(one: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    """The least sum of both, by the work that they do together."""
    found = np.full_like(one, math.inf)
    for share, usd in enumerate(other[: len(one)].tolist()):
        if math.isfinite(usd):
            np.minimum(found[share:], one[: len(one) - share] + usd, out=found[share:])
    # who can do more can do less
    return np.minimum.accumulate(found[::-1])[::-1]


def _merged(zones: Sequence[ZoneTrace]) -> ZoneTrace:
    """All nodes of all zones, each at the price of the cheapest."""
    nodes = np.sum([zone.nodes for zone in zones], axis=0)
    prices = [zone.usd_per_h for zone in zones if zone.usd_per_h is not None]
    least = np.min(prices, axis=0) if len(prices) == len(zones) else None
    return dataclasses.replace(zones[0], nodes=nodes, usd_per_h=least)
