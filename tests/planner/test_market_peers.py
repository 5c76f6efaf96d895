"""Published policies: the same decisions as their publication says, and the contract of ours."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from harness.planner.market_nodes import ReplayJob
from harness.planner.market_replay import replay
from harness.planner.published_policies import PEERS, peer
from harness.planner.traces import ZoneTrace
from harness.testing import PolicyContract

TICK_S = 600.0
SPOT, DEAR = 0.9731, 3.06


def availability(seed: int, ticks: int, open_ticks: float, closed_ticks: float) -> list[int]:
    rng, found, there = random.Random(seed), list[int](), bool(seed % 2)
    while len(found) < ticks:
        mean = open_ticks if there else closed_ticks
        found += [int(there)] * max(1, round(rng.expovariate(1 / mean)))
        there = not there
    return found[:ticks]


def published(name: str, there: list[int], work: int, deadline: int, delay: int):
    """Cost and finish (ticks) of the rules as they stand in the publication, in whole ticks: wu24
    section 4 for `uniform_progress`, its baseline for `greedy`."""
    state, overhead, left, usd, t = "idle", 0, work, 0.0, 0
    while left > 0 and t < 4 * deadline:
        spot = t < len(there) and bool(there[t])
        state = "idle" if state == "spot" and not spot else state
        time, done = deadline - t, work - left
        want = "spot" if spot else "idle"
        if name == "uniform_progress":
            if done < t * work / deadline and not spot:
                want = "dear"
            if state == "dear" and (not spot or done < (t + 2 * delay) * work / deadline):
                want = "dear"
        if state in ("idle", "dear") and left + 2 * delay >= time:
            want = "dear"
        if left + delay >= time:
            want = "spot" if state == "spot" and not overhead else "dear"
        if want != state:
            state, overhead = want, delay if want != "idle" else 0
        if state != "idle":
            usd += (SPOT if state == "spot" else DEAR) * TICK_S / 3600
            overhead, left = (overhead - 1, left) if overhead else (0, left - 1)
        t += 1
    return usd, t


@pytest.mark.parametrize("name", ["uniform_progress", "greedy"])
@pytest.mark.parametrize(("work", "deadline", "delay"), [(60, 66, 1), (60, 80, 2), (48, 72, 1)])
def test_they_are_as_published(name: str, work: int, deadline: int, delay: int):
    hours = TICK_S / 3600
    job = ReplayJob(
        work * hours,
        deadline * hours,
        changeover_s=delay * TICK_S,
        spot_usd_per_h=SPOT,
        on_demand_usd_per_h=DEAR,
    )
    for seed in range(4):
        there = availability(seed, deadline, *[(8, 4), (3, 6), (20, 10), (2, 20)][seed])
        found = replay([ZoneTrace("a", TICK_S, np.array(there))], 0, job, peer(name, TICK_S))
        usd, ticks = published(name, there, work, deadline, delay)
        assert (found.usd, found.finish_h) == pytest.approx((usd, ticks * hours)), seed
        assert not found.missed


def test_on_demand_is_what_its_bill_says():
    job = ReplayJob(5, 6, nodes=(1, 3), on_demand_usd_per_h=DEAR)
    ended = replay([ZoneTrace("a", TICK_S, np.ones(99, int))], 0, job, peer("on_demand", TICK_S))
    assert ended.usd == pytest.approx(3 * DEAR * (5 + 1 / 6)) and ended.on_demand_h > 15


def test_where_skypilot_goes_after_a_loss():
    """The cheapest place is lost and back at once: one strategy returns, the other does not."""
    prices = np.full(99, 1.0), np.full(99, 2.0), np.full(99, 3.0)
    nodes = np.array([1] * 6 + [0] + [1] * 92)
    zones = [
        ZoneTrace("a", TICK_S, np.ones(99, int), prices[1]),
        ZoneTrace("b", TICK_S, nodes, prices[0]),
        ZoneTrace("c", TICK_S, np.ones(99, int), prices[2]),
    ]
    job = ReplayJob(3, 4)
    eager = replay(zones, 0, job, peer("skypilot_eager", TICK_S))
    assert [span[0] for span in eager.spans] == ["b", "a"]
    zones[1] = ZoneTrace("b", TICK_S, np.array([1, 1, 1, 1] * 24 + [1] * 3), prices[0])
    calm = replay(zones, 0, job, peer("skypilot_failover", TICK_S))
    assert [span[0] for span in calm.spans] == ["b"] and calm.on_demand_h == 0


def test_a_gang_that_is_too_small_is_given_back_and_filled_up_when_behind():
    some = np.array([4] * 10 + [2] * 20 + [4] * 60)
    job = ReplayJob(5, 8, nodes=(4, 4), spot_usd_per_h=SPOT, on_demand_usd_per_h=DEAR)
    zones = [ZoneTrace("a", TICK_S, some)]
    ended = replay(zones, 0, job, peer("uniform_progress", TICK_S))
    assert not ended.missed and 0 < ended.on_demand_h < 12 and ended.losses == 2
    only = replay(zones, 0, job, peer("skypilot_failover", TICK_S))
    # two of four nodes are never kept: they would be paid for, and not train
    assert all(end_h > begin_h for _, begin_h, end_h, _ in only.spans) or only.on_demand_h == 0
    assert math.isclose(only.usd, only.spot_h * SPOT)


class TestUniformProgressAsPublished(PolicyContract):
    seeds = range(2)

    def most_nodes(self, view):
        return view.max_nodes + 1  # spot beside the on-demand node that it takes the place of

    @pytest.fixture
    def policy(self):
        return PEERS["uniform_progress"]


class TestGreedy(PolicyContract):
    seeds = range(2)

    @pytest.fixture
    def policy(self):
        return PEERS["greedy"]
