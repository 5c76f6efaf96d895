"""To wait for a lower price costs less where prices wander, with one node and with many, and no
deadline is missed. Whole runs on made-up markets."""

import dataclasses

import numpy as np
import pytest

from harness.controller.deadline_policy import deadline
from harness.planner.fast_replay import play
from harness.planner.market_nodes import ReplayJob
from harness.planner.market_replay import replay
from harness.planner.synthetic_market import MadeUpZone, make_up

pytestmark = pytest.mark.proof
BEFORE_H, TICK_S, CHANGE = 480.0, 1800.0, 8  # ticks from one price to the next


def market(seed, nodes, hours, room=(60.0, 0.5), swing=0.6):
    """Of one zone, and its prices in the time before, as a run that begins then knows them."""
    first = int(BEFORE_H * 3600 / TICK_S)
    zone = MadeUpZone(
        "z", *room, nodes=nodes, usd_per_h=1.0, price_swing=swing, most_usd_per_h=3.0, is_open=True
    )
    made = make_up([zone], BEFORE_H + hours, np.random.default_rng(seed), tick_s=TICK_S)[0]
    usd = made.usd_per_h[np.arange(len(made.nodes)) // CHANGE * CHANGE]
    before = tuple((TICK_S * (at - first), float(usd[at])) for at in range(0, first, CHANGE))
    return [dataclasses.replace(made, usd_per_h=usd)], first, {"z": before}


def prices_stand_still(view):
    return deadline(dataclasses.replace(view, known=dataclasses.replace(view.known, prices={})))


@pytest.mark.parametrize(("nodes", "markets"), [(1, 12), (4, 40)])
def test_to_wait_for_lower_prices_costs_less(nodes, markets):
    """Than the same policy that takes prices as they are, in the same markets."""
    paid = {deadline: 0.0, prices_stand_still: 0.0}
    job = ReplayJob(24.0, 72.0, (1, nodes), changeover_s=600.0)
    for seed in range(markets):
        zones, first, before = market(seed, nodes, 80.0)
        for policy in paid:
            found = play(zones, first, job, policy, prices=before)
            assert not found.missed
            paid[policy] += found.usd
    assert paid[deadline] < 0.97 * paid[prices_stand_still]


@pytest.mark.parametrize("room", [(2.0, 4.0), (8.0, 2.0), (1000.0, 0.1)])
@pytest.mark.parametrize("times", [1.05, 1.3, 2.0])
def test_no_deadline_is_missed_however_prices_move(room, times):
    job = ReplayJob(12.0, times * 12.0, (1, 6), changeover_s=600.0)
    for seed in range(4):
        zones, first, before = market(seed, 6, times * 12.0 + 1, room, swing=1.0)
        assert not play(zones, first, job, deadline, prices=before).missed
    assert not replay(zones, first, job, deadline).missed


def test_a_fleet_that_waits_does_so_in_the_real_loop():
    """Which ends its nodes, asks for others later, and does not take the wait for a standstill."""
    job = ReplayJob(24.0, 72.0, (1, 4), changeover_s=600.0)
    zones, first, _ = market(0, 4, 80.0, swing=1.0)
    found, quick = replay(zones, first, job, deadline), play(zones, first, job, deadline)
    assert (found.outcome, found.missed, found.launches) == ("done", False, quick.launches)
    assert found.usd == pytest.approx(quick.usd)
    still = play(zones, first, job, prices_stand_still)
    assert found.launches > still.launches and found.usd < 0.9 * still.usd
