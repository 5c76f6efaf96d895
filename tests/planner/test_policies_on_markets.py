"""What policies cost, and whether they are in time, on made-up markets."""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest

from harness.cli import launch
from harness.controller.deadline_policy import by_deadline, deadline
from harness.controller.policies import cheapest, launched
from harness.core.world import Decision, Launch, Offer, View
from harness.planner.decision_log import explained
from harness.planner.fast_replay import play
from harness.planner.forecast import NodeShape, PlanCandidate, PlannedRun, policy_of
from harness.planner.market_nodes import ReplayJob
from harness.planner.market_replay import replay
from harness.planner.optimum import WorkToDo, optimum
from harness.planner.policy_table import policy_named
from harness.planner.synthetic_market import make_up, usual_zones
from harness.planner.traces import ZoneTrace


def test_deadlines_are_kept_in_markets_that_nobody_knows() -> None:
    """Made-up ones: of one zone or three, for one node or four."""
    for seed in range(6):
        rng = np.random.default_rng(seed)
        nodes = (1, 4)[seed % 2]
        zones = make_up(
            usual_zones((1, 3)[seed % 3 > 0], rng, nodes=nodes, usd_per_h=1.0), 40, rng, tick_s=600.0
        )
        for slack in (1.08, 1.5):
            job = ReplayJob(20.0, 20.0 * slack, nodes=(1, nodes), changeover_s=600.0, lost_s=300.0)
            assert not play(zones, 0, job, by_deadline(cheapest)).missed, (seed, slack)


@pytest.mark.parametrize("name", ["at_most({}, all_usd_per_h=3.3)", "warm_spare(at_most({}, all_usd_per_h=3.3))"])
@pytest.mark.parametrize("inside", ["best_value", "on_demand_fallback", "deadline"])
def test_all_nodes_together_cost_no_more_than_they_may(name: str, inside: str) -> None:
    """At the moment of each launch, in two places whose prices move, at half of what all would."""
    policy, most = launched(name.format(inside)), list[float]()

    def watched(view: View) -> Decision:
        decision = policy(view)
        if isinstance(decision, Launch):
            now = {offer.name: offer.usd_per_h for offer in view.offers}
            most.append(sum(now[n.offer.name] for n in view.alive) + decision.offer.usd_per_h)
        return decision

    rng = np.random.default_rng(5)
    zones = usual_zones(2, rng, nodes=4, usd_per_h=1.0)
    zones = [dataclasses.replace(zone, price_swing=0.3) for zone in zones]
    made = make_up(zones, 60, rng, tick_s=600.0)
    job = ReplayJob(8.0, 40.0, nodes=(1, 4), changeover_s=600.0, lost_s=300.0)
    found = play(made, 0, job, watched)
    assert 2.0 < max(most) <= 3.3 + 1e-6
    assert math.isfinite(found.finish_h)


# ---- the policy `deadline` ------------------------------------------------------------------------
def made_up(seed, ticks=500):
    """Spells of all lengths, from minutes to days."""
    rng, found = random.Random(seed), []
    means = [rng.choice((2, 6, 20, 60)) for _ in range(2)]
    while len(found) < ticks:
        found += [1] * (1 + int(rng.weibullvariate(means[0], 0.7)))
        found += [0] * (1 + int(rng.weibullvariate(means[1], 0.7)))
    return ZoneTrace("z", 600.0, np.array(found[:ticks], dtype=np.int64), None)


@pytest.mark.parametrize(("deadline_h", "most"), [(13.0, 1.25), (15.0, 1.15), (18.0, 1.15)])
def test_it_is_in_time_and_near_the_optimum(deadline_h, most):
    """Of markets that it knows nothing of when it begins."""
    paid = least = 0.0
    job = ReplayJob(12.0, deadline_h, changeover_s=600.0)
    for seed in range(6):
        zone = made_up(seed)
        found = play([zone], 0, job, deadline)
        assert not found.missed
        paid += found.usd
        work = WorkToDo(12.0, deadline_h, 600.0, job.spot_usd_per_h, job.on_demand_usd_per_h)
        least += optimum([zone], 0, work).usd
    assert paid <= most * least


def test_it_is_in_time_without_any_spot():
    zone = ZoneTrace("z", 300.0, np.array([1] + [0] * 300, dtype=np.int64), None)
    for nodes in ((1, 1), (1, 3)):
        found = replay([zone], 1, ReplayJob(12.0, 13.0, nodes, 720.0), deadline)
        assert not found.missed and found.spot_h == 0


@pytest.mark.parametrize("deadline_h", [13.0, 18.0])
def test_a_fleet_is_in_time_and_uses_what_spot_there_is(deadline_h):
    """Against what is paid at least: all spot that is ever there, and the rest on demand."""
    paid = least = 0.0
    job = ReplayJob(12.0, deadline_h, (1, 8), changeover_s=600.0)
    for seed in range(4):
        nodes = sum(made_up(10 * seed + i).nodes for i in range(8))
        found = play([ZoneTrace("z", 600.0, nodes)], 0, job, deadline)
        assert not found.missed
        spot_h = min(96.0, nodes[: int(6 * deadline_h)].sum() / 6)
        paid += found.usd
        least += spot_h * job.spot_usd_per_h + (96.0 - spot_h) * job.on_demand_usd_per_h
    assert paid <= 1.25 * least


# ---- what `harness launch` runs ---------------------------------------------------------------------
@pytest.mark.parametrize("name", ["deadline", "best_value", "spread(deadline, zones=2)"])
def test_what_is_launched_is_what_simulate_plan_and_what_if_play(name):
    """On recorded views of a fleet over three places, one after the other."""
    rng = np.random.default_rng(3)
    market = make_up(usual_zones(3, rng, nodes=6, usd_per_h=1.0), 30, rng, tick_s=600.0)
    shape = NodeShape("cpu", 0, 1.0, (Offer(1.0, "a"),), None)
    run = PlannedRun(3600.0, deadline_h=14.0)
    played = [policy_named(name, 600.0), policy_of(PlanCandidate(shape, 6, name), run)]
    launched = launch.policy_of(launch.LaunchFlags(task="t.yaml", policy=name, cloud="sky"))
    found: list[View] = []

    def recorded(view: View):
        found.append(view)
        return launched(view)

    ended = play(market, 0, ReplayJob(10.0, 14.0, (1, 6), 600.0, move_usd=0.5), recorded)
    assert len(found) > 30 and ended.launches > 6
    for view in found:
        assert [policy(view) for policy in played] == [launched(view)] * 2


def test_a_fleet_leaves_a_place_that_shrinks_and_not_when_it_is_too_late():
    """A place with room for all beside one that keeps a node of four."""
    ticks = np.arange(400)
    shrinks = ZoneTrace("a", 600.0, np.where(ticks < 12, 4, 1))
    keeps = ZoneTrace("b", 600.0, np.full(400, 4))
    job = ReplayJob(10.0, 12.0, (1, 4), 600.0, move_usd=1.0)
    ended = play([shrinks, keeps], 0, job, deadline)
    assert not ended.missed and ended.moves == 1 and ended.on_demand_h == 0
    late = ZoneTrace("a", 600.0, np.where(ticks < 56, 4, 1))
    ended = play([late, keeps], 0, dataclasses.replace(job, deadline_h=10.5), deadline)
    assert not ended.missed and ended.moves == 0


def test_a_fleet_that_has_begun_on_spot_is_not_bought_a_second_time():
    """Whatever a loss would cost, there is none: all of the work is done on the first nodes."""
    always = ZoneTrace("a", 600.0, np.full(200, 16))
    job = ReplayJob(8.0, 8.8, nodes=(1, 16), changeover_s=600.0, lost_s=600.0)
    found = play([always], 0, job, deadline)
    assert (found.launches, found.on_demand_h, found.missed) == (16, 0.0, False)


@pytest.mark.parametrize("lost_s", [600.0, 1200.0])
def test_a_fleet_is_in_time_though_each_loss_takes_work_of_many_ticks(lost_s):
    """Where nodes are taken in every fourth tick, some or all of them, and come back at once."""
    spot_h = 0.0
    for seed in range(50, 60):
        rng = np.random.default_rng(seed)
        taken = (rng.random(300) < 0.25) * rng.integers(1, 17, 300)
        job = ReplayJob(5.0, (5.8, 6.5)[seed % 2], (1, 16), 600.0, lost_s=lost_s)
        found = play([ZoneTrace("a", 300.0, 16 - taken)], 0, job, deadline)
        assert not found.missed, seed
        spot_h += found.spot_h
    assert spot_h > 50


def test_every_decision_of_a_window_is_explained():
    """In the order of time, with what was there, and as often as it was made."""
    ticks = np.arange(400)
    zones = [
        ZoneTrace("a", 600.0, np.where(ticks < 12, 4, 1)),
        ZoneTrace("b", 600.0, np.full(400, 4)),
    ]
    job = ReplayJob(10.0, 12.0, (1, 4), 600.0, move_usd=1.0)
    result, lines = explained(zones, 0, job, deadline)
    assert result == play(zones, 0, job, deadline)
    assert [line.at_h for line in lines] == sorted(line.at_h for line in lines)
    first, *_ = lines
    assert (first.did, first.times, first.nodes) == ("ask a", 4, ())
    shrunk = next(line for line in lines if line.at_h == 2.0)
    assert shrunk.rooms == (("a", 1), ("b", 4)) and shrunk.nodes == (("a", 1),)
    left = next(line for line in lines if line.did.startswith("let go"))
    assert left.did == "let go 1 x a" and dict(left.nodes) == {"a": 1, "b": 4}
