"""The omniscient optimum is the least of all that could have been done."""

import dataclasses
import math
import random

import numpy as np
import pytest

from harness.core.world import BadInput
from harness.planner import optimum as module
from harness.planner.optimum import NOWHERE, ON_DEMAND, WorkToDo, optimum
from harness.planner.traces import ZoneTrace

TICK_S = 600.0


def zone(name, nodes, usd=None):
    return ZoneTrace(name, TICK_S, np.array(nodes), None if usd is None else np.array(usd))


def cost_of(zones, first, work, actions):
    """What a plan costs, played forwards, and when it is done (hours). `actions`: of each tick
    NOWHERE, or a place: of each zone its spot, then on demand there."""
    todo_s = work.hours * 3600
    usd, place, last_zone, ahead_s = 0.0, NOWHERE, None, 0.0
    for tick, action in enumerate(actions):
        late = work.usd_per_hour_late * (tick * TICK_S / 3600 >= work.due_hours - 1e-9)
        if action == NOWHERE:
            place = NOWHERE
            usd += late * TICK_S / 3600
            continue
        z, spot = action % len(zones), action < len(zones)
        at = first + tick
        if spot and (at >= len(zones[z].nodes) or not zones[z].nodes[at]):
            break
        if action != place:
            if last_zone not in (None, z):
                usd += work.moves[last_zone][z] if work.moves else work.move_usd
            place, last_zone, ahead_s = action, z, work.changeover_s
        each, prices = zones[z].on_demand(work.on_demand_usd_per_h), zones[z].usd_per_h
        if spot:
            each = work.spot_usd_per_h if prices is None else prices[at]
        used_s = min(TICK_S, ahead_s + todo_s)
        usd += (each + late) * used_s / 3600
        todo_s -= max(0.0, used_s - ahead_s)
        ahead_s = max(0.0, ahead_s - TICK_S)
        if todo_s <= 1e-6:
            end_h = (tick * TICK_S + used_s) / 3600
            return (usd, end_h) if end_h <= work.deadline_hours + 1e-9 else (math.inf, math.inf)
    return math.inf, math.inf


def least(zones, first, work):
    """The least cost of all plans, by trying every one that may still become better."""
    ticks = math.ceil(work.deadline_hours * 3600 / TICK_S - 1e-9)
    best = math.inf
    stack = [()]
    while stack:
        actions = stack.pop()
        if actions:
            best = min(best, cost_of(zones, first, work, actions)[0])
        if len(actions) < ticks:
            for action in range(NOWHERE, 2 * len(zones)):
                z, at = action % len(zones), first + len(actions)
                if 0 <= action < len(zones) and not (
                    at < len(zones[z].nodes) and zones[z].nodes[at]
                ):
                    continue
                stack.append((*actions, action))
    return best


def made_up(rng):
    zones = []
    for name in "ab"[: rng.randint(1, 2)]:
        nodes = [rng.randint(0, 2) * (rng.random() < 0.7) for _ in range(8)]
        usd = [rng.choice((0.5, 0.9, 2.0)) for _ in nodes] if rng.random() < 0.5 else None
        zones.append(zone(name, nodes, usd))
    ticks = 6 if len(zones) == 1 else 5
    changeover_s = rng.choice((0.0, 120.0, 300.0, 600.0, 720.0, 1200.0))
    deadline_s = ticks * TICK_S - rng.choice((0.0, 0.0, 120.0, 300.0))
    # whole minutes, which whole parts of a tick can be
    work_s = rng.choice((0.3, 0.5, 0.8, 1.0)) * (deadline_s - changeover_s) // 120 * 120
    work = WorkToDo(
        hours=max(120.0, work_s) / 3600,
        deadline_hours=deadline_s / 3600,
        changeover_s=changeover_s,
        spot_usd_per_h=1.0,
        on_demand_usd_per_h=3.0,
        move_usd=rng.choice((0.0, 0.05, 0.3)),
    )
    first = rng.randint(0, 4)
    if rng.random() < 0.5:  # prices of zones and of pairs of them
        zones = [dataclasses.replace(z, on_demand_usd_per_h=rng.choice((1.5, 3.0))) for z in zones]
        usd = [[rng.choice((0.0, 0.1, 0.4)) for _ in zones] for _ in zones]
        work = dataclasses.replace(work, moves=tuple(map(tuple, usd)))
    if rng.random() < 0.5:
        work = dataclasses.replace(work, due_hours=rng.choice((0.2, 0.5)), usd_per_hour_late=1.5)
    return zones, first, work


def played(zones, first, work, plan):
    """What an optimum's plan costs, on demand in whatever zone is the cheapest to go to, and when it
    is done."""
    costs = [(math.inf, math.inf)]
    for z in range(len(zones)):
        actions, last = [], z
        for place in plan:
            last = place if place >= 0 else last
            actions.append(len(zones) + last if place == ON_DEMAND else place)
        costs.append(cost_of(zones, first, work, actions))
    return min(costs)


@pytest.mark.parametrize("seed", range(60))
def test_no_plan_is_cheaper_and_its_own_costs_as_much(seed):
    zones, first, work = made_up(random.Random(seed))
    found = optimum(zones, first, work)
    assert found.usd == pytest.approx(least(zones, first, work))
    assert played(zones, first, work, found.plan) == pytest.approx((found.usd, found.finish_h))


def test_known_cases():
    work = WorkToDo(1.0, 2.0, 600.0, 1.0, 3.0)
    always = optimum([zone("a", [1] * 12)], 0, work)
    assert always.usd == pytest.approx(7 / 6) and always.plan == (0,) * 7
    assert always.finish_h == pytest.approx(7 / 6)
    never = optimum([zone("a", [0] * 12)], 0, work)
    assert never.usd == pytest.approx(3.5) and set(never.plan) == {ON_DEMAND}
    # what lies beyond the trace has no spot
    assert optimum([zone("a", [1] * 12)], 12, work).usd == pytest.approx(3.5)
    # it waits for what comes in time
    late = optimum([zone("a", [0, 0, 0] + [1] * 9)], 0, work)
    assert late.plan == (NOWHERE,) * 3 + (0,) * 7


def test_a_move_is_paid_where_it_pays():
    zones = [zone("a", [1] * 6 + [0] * 6), zone("b", [0] * 6 + [1] * 6)]
    for move_usd, usd in ((0.0, 8 / 6), (0.3, 8 / 6 + 0.3), (9.0, 6 / 6 + 4 / 6)):
        work = WorkToDo(1.0, 2.0, 600.0, 1.0, 2.0, move_usd)
        assert optimum(zones, 0, work).usd == pytest.approx(usd)


def test_what_cannot_be_met_on_demand_is_refused():
    with pytest.raises(BadInput, match="do not fit into a deadline of 1 h, even on demand"):
        optimum([zone("a", [1] * 12)], 0, WorkToDo(1.0, 1.0, 600.0, 1.0, 3.0))
    with pytest.raises(BadInput, match="too many for the exact optimum; give a longer tick"):
        optimum([zone("a", [1])], 0, WorkToDo(10_000.0, 10_001.0, 660.0, 1.0, 3.0))


def test_a_plan_is_the_same_when_few_choices_are_kept(monkeypatch):
    rng = random.Random(4)
    zones = [zone(z, [rng.random() < 0.6 for _ in range(120)]) for z in "ab"]
    work = WorkToDo(12.0, 16.0, 720.0, 1.0, 3.0, 0.1)
    whole = optimum(zones, 3, work)
    monkeypatch.setattr(module, "CHOICES_KEPT", 20_000.0)  # some ten ticks
    assert optimum(zones, 3, work) == whole
    assert played(zones, 3, work, whole.plan) == pytest.approx((whole.usd, whole.finish_h))
