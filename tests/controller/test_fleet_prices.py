"""A fleet waits for lower prices, and counts what snapshots and losses cost in each place; prices
that never moved leave every decision as it was."""

import dataclasses

import numpy as np
import pytest

from harness.controller.combinators import within_budget
from harness.controller.deadline_policy import deadline
from harness.controller.fleet_policy import by_cost, snapshots_at
from harness.controller.forecast.fleet_program import (
    BOUGHT,
    NOBODY,
    RENTED,
    FleetTerms,
    PricedFleetTerms,
    fleet_outlook,
    priced_fleet_outlook,
)
from harness.core.estimates import CapacitySeen, Estimates
from harness.core.world import Launch, Offer, Stop, Terminate, Wait
from harness.testing.situations import situation, situations, up
from support.fleet_views import DEAR, HOUR, NODES, NOW_H, OTHER, SPOT, at_price


def held(count, usd=1.0):
    offer = dataclasses.replace(SPOT, usd_per_h=usd)
    return [up(n, offer, since_s=(NOW_H - 0.5) * HOUR) for n in range(1, count + 1)]


# ---- waits ---------------------------------------------------------------------------------------
def test_a_fleet_waits_for_a_lower_price_and_says_for_how_long_and_what_it_saves():
    assert isinstance(deadline(at_price(0.5)), Launch)
    waits = deadline(at_price(1.8))
    assert isinstance(waits, Wait) and "cheaper in time" in waits.reason
    assert NOW_H * HOUR < waits.expected_s <= (NOW_H + 48) * HOUR
    assert 5 < waits.saving_usd < 24 * NODES * 1.8
    # without time to spare, or where prices were never seen to move, it does not
    assert isinstance(deadline(at_price(1.8, left_h=26.0)), Launch)
    assert isinstance(deadline(at_price(1.8, path=())), Launch)


def test_all_of_it_is_let_go_while_the_price_is_high():
    found = deadline(at_price(1.8, *held(3)))
    assert isinstance(found, Terminate) and "cheaper in time" in found.reason and found.grace_s
    assert {found.attempt, *found.also} == {1, 2, 3}
    for view in (at_price(0.6, *held(4)), at_price(1.8, *held(4), left_h=27.0)):
        assert isinstance(deadline(view), Wait)
    # on demand is there because time is short, or spot scarce: who holds it goes on
    bought = up(4, DEAR, since_s=(NOW_H - 0.5) * HOUR)
    assert not isinstance(deadline(at_price(1.8, *held(3), bought)), Terminate)


def test_the_last_call_comes_before_any_wait():
    for left_h in (24.1, 24.5, 25.0):
        found = deadline(at_price(2.9, left_h=left_h))
        assert isinstance(found, Launch), left_h
    assert not deadline(at_price(2.9, left_h=24.1)).offer.spot


def test_prices_that_stand_still_leave_decisions_as_they_were():
    asked = 0
    for seed in range(4):
        for view in situations(seed, 12):
            at = view.started_s + 60.0
            known = Estimates(total_steps=300, work=0.4 * HOUR, deadline_s=at + 2 * HOUR)
            still = {o.name: ((view.started_s, o.usd_per_h),) for o in view.offers}
            bare = dataclasses.replace(view, known=known, max_nodes=max(2, view.max_nodes))
            told = dataclasses.replace(bare, known=dataclasses.replace(known, prices=still))
            assert deadline(told) == deadline(bare)
            asked += 1
    assert asked == 48


# ---- what the rest costs -------------------------------------------------------------------------
TERMS = FleetTerms(0.2, 0.6, 1 / 16, 0.3, 1 / 6, 0.2, 0.5, 121, 72)


def test_where_prices_stand_still_the_rest_costs_what_it_did():
    still, found = fleet_outlook(TERMS), priced_fleet_outlook(PricedFleetTerms(TERMS, 0.0, 0.0))
    for there, column in ((RENTED, 0), (BOUGHT, 1)):
        assert found.costs[:, there, 0] == pytest.approx(still.costs[:, column], abs=1e-2)
    # nobody gains by leaving
    assert (found.costs[:, NOBODY] >= found.costs[:, RENTED] - 1e-3).all()


def test_what_the_rest_costs_where_prices_wander():
    found = priced_fleet_outlook(PricedFleetTerms(TERMS, 0.5, 0.03))
    costs = found.costs.astype(np.float64)
    # more time, or a lower price, never costs more; more work never costs less
    slack = 1e-3 * (1 + np.abs(costs))
    assert (costs[1:] <= costs[:-1] + slack[1:]).all()
    assert (costs[:, :, 1:] >= costs[:, :, :-1] - slack[:, :, 1:]).all()
    assert (costs[..., 1:] >= costs[..., :-1] - slack[..., 1:]).all()
    low, high = (dataclasses.replace(found, level=level) for level in (0.0, 4.0))
    fleet = 0.6, 20.0, 50.0
    assert low.keep(*fleet) < low.begin(*fleet) < low.wait(*fleet)
    assert high.wait(*fleet) < high.keep(*fleet) < high.begin(*fleet)
    assert low.cheaper_in_h(*fleet) == 0 < high.cheaper_in_h(*fleet) <= 30
    # without time to spare there is nothing to wait for
    assert high.begin(0.6, 20.0, 22.0) - high.wait(0.6, 20.0, 22.0) < 0.1


# ---- snapshots and losses, by place --------------------------------------------------------------
RESTLESS = CapacitySeen(node_s=20 * HOUR, losses=40, unnoticed=40)
QUIET = CapacitySeen(node_s=400 * HOUR, losses=1, unnoticed=0)


def two_places(**more):
    cheap = dataclasses.replace(SPOT, usd_per_h=0.97)
    known = Estimates(capacity={"a": RESTLESS, "b": QUIET}, **more)
    view = situation(offers=(cheap, OTHER, DEAR), known=known, max_nodes=NODES)
    return view, [cheap, OTHER]


def test_a_fleet_goes_where_snapshots_and_losses_leave_more_of_its_work():
    view, spot = two_places(snapshot_cost_s=20.0, commit_s=30.0)
    assert [o.name for o in by_cost(view, NODES, spot, 24.0)] == ["b", "a"]
    restless, quiet = (snapshots_at(view, NODES, offer) for offer in spot)
    assert 0 < restless.interval_s < quiet.interval_s and restless.share > quiet.share
    # a much lower price is worth it
    half = [dataclasses.replace(spot[0], usd_per_h=0.2), OTHER]
    assert by_cost(view, NODES, half, 24.0)[0].name == "a"


def test_while_nobody_knows_what_a_snapshot_costs_the_price_decides():
    view, spot = two_places()
    assert [o.name for o in by_cost(view, NODES, spot, 24.0)] == ["a", "b"]
    assert snapshots_at(view, NODES, OTHER).interval_s == 0


def test_the_reason_of_a_launch_says_how_often_there_is_a_snapshot():
    assert "snapshot every" in deadline(at_price(0.6, snapshot_cost_s=5.0, commit_s=9.0)).reason
    assert "snapshot" not in deadline(at_price(0.6)).reason


def test_places_are_compared_by_what_they_cost_over_the_stay():
    """The one that is cheap for the moment only comes second."""
    view = at_price(0.9)
    cheap = dataclasses.replace(OTHER, usd_per_h=0.92)
    paths = {"a": ((0.0, 1.6), *view.known.prices["a"]), "b": ((0.0, 0.92),)}
    view = dataclasses.replace(view, known=dataclasses.replace(view.known, prices=paths))
    spot = [dataclasses.replace(SPOT, usd_per_h=0.9), cheap]
    assert [o.name for o in by_cost(view, NODES, spot, 24.0)] == ["b", "a"]
    assert [o.name for o in by_cost(view, NODES, spot, 0.1)] == ["a", "b"]


# ---- what a policy is told -----------------------------------------------------------------------
def test_a_policy_is_told_the_lowest_budget_that_it_is_within():
    told = []

    def mine(view):
        told.append(view.known.budget_usd)
        return Stop("asked")

    view = situation(offers=(SPOT,))
    mine(view)
    within_budget(mine, usd=9.0)(view)
    within_budget(within_budget(mine, usd=70.0), usd=9.0)(view)
    within_budget(within_budget(mine, usd=9.0), usd=70.0)(view)
    assert told == [None, 9.0, 9.0, 9.0]


def test_an_offer_has_a_worker_for_each_gpu_and_one_without():
    assert Offer(1.0, "a").workers == 1 == Offer(1.0, "a", gpus=1).workers
    assert Offer(1.0, "a", gpus=8).workers == 8
