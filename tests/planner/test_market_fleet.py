"""Nodes on a recorded market: given, at work, taken and billed as the page says, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from harness.core.world import NodeState
from harness.planner.market_nodes import ON_DEMAND, MarketFleet, ReplayJob
from harness.planner.traces import ZoneTrace

TICK_S = 600.0


def zone(name: str, nodes: list[int], usd: list[float] | None = None) -> ZoneTrace:
    prices = None if usd is None else np.array(usd)
    return ZoneTrace(name, TICK_S, np.array(nodes), prices)


def fleet_of(*zones: ZoneTrace, **job) -> MarketFleet:
    given = {"work_h": 1.0, "deadline_h": 3.0, "nodes": (1, 4), "changeover_s": 600.0, **job}
    return MarketFleet(zones, 0, ReplayJob(**given))


def launch(fleet: MarketFleet, *names: str, first: int = 1) -> list[NodeState]:
    offers = {offer.name: offer for offer in fleet.offers()}
    return [fleet.launch(first + i, offers[name]).state for i, name in enumerate(names)]


def test_what_is_given_is_billed_at_once_and_works_after_the_changeover():
    fleet = fleet_of(zone("a", [1] * 12, [1.0, 2.0] * 6))
    assert launch(fleet, "a", "a") == [NodeState.UP, NodeState.NO_CAPACITY]
    fleet.work()
    assert fleet.bill.work == 0 and fleet.bill.usd == pytest.approx(1 / 6)
    fleet.work()
    assert fleet.bill.work == 600 and fleet.bill.usd == pytest.approx(1 / 6 + 2 / 6)
    launch(fleet, "a" + ON_DEMAND, first=3)  # on demand there is always one
    fleet.work()
    fleet.work()
    assert fleet.bill.work == 4 * 600 and fleet.bill.on_demand_s == 1200
    assert fleet.bill.paid_s == 6 * 600


def test_a_node_that_is_ended_at_once_is_billed_for_a_minute():
    fleet = fleet_of(zone("a", [2] * 12, [3.0] * 12))
    launch(fleet, "a", "a" + ON_DEMAND)
    assert fleet.end(1, 0.0) is not None and fleet.end(2, 0.0) is not None
    assert fleet.bill.usd == pytest.approx((3.0 + fleet.job.on_demand_usd_per_h) / 60)
    assert fleet.bill.paid_s == 2 * 60 and fleet.bill.on_demand_s == 60
    launch(fleet, "a", first=3)
    fleet.work()
    fleet.end(3, TICK_S)  # by the second after that
    assert fleet.bill.paid_s == 2 * 60 + TICK_S


def test_a_begin_in_the_middle_of_a_tick_and_the_end_of_the_work():
    fleet = fleet_of(zone("a", [4] * 20), nodes=(1, 2), changeover_s=900.0, work_h=0.5)
    launch(fleet, "a", "a")
    for _ in range(10):
        fleet.work()
    # 3600 node-seconds for two that begin at 900 s
    assert fleet.bill.done_s == 900 + 1800 and fleet.bill.work == pytest.approx(3600)
    assert fleet.bill.usd == pytest.approx(2 * 2700 / 3600)


def test_the_newest_are_taken_where_there_is_no_room_and_take_work_along():
    fleet = fleet_of(zone("a", [3, 3, 3, 1, 1, 1]), lost_s=60.0)
    launch(fleet, "a", "a", "a")
    for _ in range(3):
        assert fleet.too_many() == []
        fleet.work()
        fleet.steps()
    assert fleet.too_many() == [3, 2]
    assert fleet.bill.work == 3 * 1200
    fleet.take(3)
    assert fleet.bill.work == 3600 - 3 * 60
    fleet.take(2)  # at the same moment: the work of both is lost already
    assert fleet.bill.work == 3600 - 3 * 60
    assert fleet.bill.losses == 2 and [span[3] for span in fleet.spans] == [True, True]
    assert list(fleet.nodes) == [1] and fleet.take(9) is None


def test_a_loss_takes_the_work_of_as_many_ticks_as_was_said_and_none_twice():
    fleet = fleet_of(zone("a", [2] * 30), work_h=5.0, nodes=(1, 2), lost_s=1500.0)
    launch(fleet, "a", "a")

    def after(ticks: int) -> tuple[float, int, int]:
        for _ in range(ticks):
            fleet.work()
            committed = fleet.steps()
        return fleet.bill.work, committed, fleet.uncommitted_steps

    # a step takes both nodes a minute; they begin for a tick and work for eight of ten steps
    assert after(9) == (8 * 1200, 55, 25)
    fleet.take(2)
    assert fleet.bill.work == 5.5 * 1200
    assert after(1)[0] == 5.5 * 1200 + 600
    fleet.take(1)  # a tick later: the work since then
    assert fleet.bill.work == 5.5 * 1200


def test_nodes_train_in_one_place_and_no_more_than_the_job_may_have():
    fleet = fleet_of(zone("a", [4] * 20), zone("b", [4] * 20), nodes=(1, 2))
    launch(fleet, "a", "b", "b", "b")
    fleet.work()
    fleet.work()
    assert fleet.bill.work == 1200  # the two of b, for a tick
    fleet.end(2, fleet.now_s)
    fleet.end(3, fleet.now_s)
    fleet.work()
    assert fleet.bill.work == 1200 + 600  # who is left of b's world, though a would do as well
    fleet.end(4, fleet.now_s)
    fleet.work()
    assert fleet.bill.work == 1200 + 600 + 600


def test_zones_of_one_region_are_one_place():
    fleet = fleet_of(zone("a", [1] * 9), zone("b", [1] * 9), one_place=True, move_usd=5.0)
    launch(fleet, "a", "b")
    fleet.work()
    fleet.work()
    assert fleet.bill.work == 1200 and fleet.bill.moves == 0


def test_too_few_nodes_do_not_train():
    fleet = fleet_of(zone("a", [4] * 9), nodes=(3, 4))
    launch(fleet, "a", "a")
    for _ in range(3):
        fleet.work()
    assert fleet.bill.work == 0 and fleet.bill.paid_s == 2 * 1800
    launch(fleet, "a", first=3)
    fleet.work()
    fleet.work()
    assert fleet.bill.work == 3 * 600


def test_a_begin_elsewhere_is_a_move():
    fleet = fleet_of(zone("a", [1] * 9), zone("b", [1] * 9), move_usd=5.0)
    launch(fleet, "a", "a" + ON_DEMAND, "b")
    assert fleet.bill.moves == 1 and fleet.bill.usd == 5.0


def test_beyond_the_trace_there_is_no_spot():
    fleet = fleet_of(zone("a", [1, 1], [1.0, 7.0]))
    launch(fleet, "a")
    fleet.work()
    fleet.work()
    assert fleet.too_many() == [1]
    assert launch(fleet, "a", first=2) == [NodeState.NO_CAPACITY]
    assert fleet.offers()[0].usd_per_h == 3.0  # on demand; spot is as dear as it was last
    assert fleet.offers()[1].usd_per_h == 7.0
