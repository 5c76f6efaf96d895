"""The policy `deadline`: it never misses one where on demand can be had, costs little, and says
what it does when it knows too little."""

import dataclasses
import random

import numpy as np
import pytest

from harness.controller.deadline_policy import deadline
from harness.controller.forecast.dynamic_program import (
    OPEN,
    SpellRates,
    Terms,
    moves,
    outlook,
    residual_h,
)
from harness.controller.forecast.spell_rates import ends, shut_since, shut_spells, spell_rates
from harness.core.estimates import CapacitySeen, Estimates, Spell
from harness.core.facts import Decided, LeaseTaken, Stamped
from harness.core.world import Launch, Offer, Terminate, Wait
from harness.ledger.attempts import AttemptHistory
from harness.testing.situations import pending, situation, up

HOUR = 3600.0
SPOT, OTHER = Offer(1.0, "a", place="a"), Offer(1.5, "b", place="b")
DEAR = Offer(3.0, "a/on-demand", False, place="a")


def known(work_h=10.0, deadline_h=20.0, **more):
    return Estimates(
        total_steps=1000,
        work=work_h * HOUR,
        changeover_s=600.0,
        look_s=60.0,
        deadline_s=1000.0 + deadline_h * HOUR,
        **more,
    )


def seen(now_s, *hours, open=True):
    """The newest spell first: so many hours each, in turn."""
    spells = []
    for i, h in enumerate(hours[1:], 1):
        spells.append(Spell(open if i % 2 == 0 else not open, h * HOUR, True))
    return CapacitySeen(open, now_s - hours[0] * HOUR, now_s, tuple(reversed(spells)))


def of(*alive, offers=(SPOT, DEAR), **changes):
    changes = {"known": known(), "max_nodes": 1, **changes}
    return situation(*alive, offers=offers, **changes)


# ---- decisions -----------------------------------------------------------------------------------
def test_spot_is_asked_first():
    assert deadline(of()).offer == SPOT


def test_measured_work_is_believed_rather_than_told():
    """As a last call: 10 h of work are left, told are 8.5."""
    late = known(deadline_h=10.3)
    assert deadline(of(known=late), work_h=8.5, total_steps=1000).offer == SPOT
    measured = dataclasses.replace(late, timed=True)
    assert deadline(of(known=measured), work_h=8.5, total_steps=1000).offer == DEAR


def test_without_a_deadline_it_takes_the_cheapest_work():
    found = deadline(of(known=Estimates()))
    assert isinstance(found, Launch) and found.offer == SPOT and "no deadline" in found.reason


@pytest.mark.parametrize("blocked", [{}, {"a": 1060.0}])
def test_while_nobody_knows_the_work_a_node_is_kept_up(blocked):
    view = of(known=dataclasses.replace(known(), work=0.0), blocked=blocked)
    found = deadline(view)
    assert isinstance(found, Launch) and "not known" in found.reason
    assert found.offer == (DEAR if blocked else SPOT)


def test_the_last_call_is_on_demand_though_spot_is_there():
    for spare_h, offer in ((0.15, DEAR), (3.0, SPOT)):
        view = of(known=known(10.0, 10.0 + spare_h))
        assert deadline(view).offer == offer


def test_a_begin_on_spot_leaves_time_for_another_one():
    """Were it lost at once, on demand would still be in time."""
    found = deadline(of(known=known(10.0, 10.35)))
    assert not isinstance(found, Launch) or found.offer == DEAR


def test_it_waits_where_the_market_comes_back_soon_and_time_is_plenty():
    calm = {"a": seen(1000.0, 0.02, *[0.5] * 40, open=False)}
    waits = deadline(of(known=known(10.0, 60.0, capacity=calm), blocked={"a": 1060.0}))
    assert isinstance(waits, Wait) and "waiting" in waits.reason
    # against on demand until spot is back, two hours at most and a begin
    assert 60.0 < waits.expected_s - 1000.0 < 2 * HOUR and 0.1 < waits.saving_usd < 6
    scarce = {"a": seen(1000.0, 20.0, 0.2, 40.0, 0.2, 40.0, open=False)}
    buys = deadline(of(known=known(10.0, 10.5, capacity=scarce), blocked={"a": 1060.0}))
    assert isinstance(buys, Launch) and buys.offer == DEAR


def test_how_long_a_spell_goes_on():
    """Memoryless: always the same. With rates that fall: the longer, the older it is."""
    for age_h in (0.0, 0.5, 20.0):
        assert residual_h((0.5,) * 5, age_h) == pytest.approx(2.0)
    falling = (1.2, 0.6, 0.3, 0.15, 0.06)
    ages = [residual_h(falling, age_h) for age_h in (0.0, 0.34, 1.0, 3.0, 9.0)]
    assert ages == sorted(ages) and ages[-1] == pytest.approx(1 / 0.06)


def test_from_on_demand_to_spot_and_nothing_is_lost():
    bought = up(1, DEAR, since_s=1.0)
    found = deadline(of(bought, now_s=5000.0))
    assert isinstance(found, Launch) and found.offer == SPOT and found.instead_of == 1
    begun = dataclasses.replace(up(2, SPOT, 4990.0), asked_s=4980.0)
    assert isinstance(deadline(of(bought, begun, now_s=5000.0)), Wait)
    found = deadline(of(bought, begun, now_s=5600.0))
    assert isinstance(found, Terminate) and found.attempt == 1 and found.grace_s > 0


def test_a_place_from_which_nodes_are_taken_is_left_for_a_dearer_one():
    offers = (SPOT, dataclasses.replace(OTHER, usd_per_h=1.05), DEAR)
    assert deadline(of(offers=offers)).offer.name == "a"
    restless = {"a": seen(1000.0, 0.5, *[0.3] * 60, open=False), "b": seen(1000.0, 30.0)}
    assert deadline(of(offers=offers, known=known(capacity=restless))).offer.name == "b"


def test_a_node_moves_to_a_cheaper_place_beside_the_one_that_trains():
    dear, cheap = dataclasses.replace(SPOT, usd_per_h=2.0), OTHER
    view = of(up(1, dear, since_s=1.0), offers=(cheap, dear, DEAR), now_s=5000.0)
    found = deadline(view)
    assert isinstance(found, Launch) and found.offer == cheap and found.instead_of == 1
    moved = dataclasses.replace(view, known=known(move_usd=100.0))
    assert isinstance(deadline(moved), Wait)
    pair = known(move_usd=100.0, moves={(dear.place, cheap.place): 0.1})
    assert deadline(dataclasses.replace(view, known=pair)) == found


def test_a_node_that_stands_in_for_another_is_left_to_begin():
    old, new = up(1, SPOT, since_s=1.0), up(2, OTHER, since_s=4900.0)
    view = of(old, new, offers=(SPOT, OTHER, DEAR), now_s=5000.0)
    assert deadline(dataclasses.replace(view, standing_in={2: 1})).reason == (
        "one node is begun beside the other"
    )
    assert deadline(view).attempt == 2, "nobody asked for it"
    late = dataclasses.replace(view, standing_in={2: 1}, known=known(10.0, 10.5))
    assert deadline(late).attempt == 2, "the last call comes first"


@pytest.mark.parametrize("bought", [False, True])
def test_a_move_must_pay_over_the_time_that_its_place_will_last(bought):
    lost = dataclasses.replace(seen(50_000.0, 2.0, 3.0, open=False), node_s=3 * HOUR)
    nodes = [up(1, DEAR, since_s=40_000.0)] if bought else []
    far = dataclasses.replace(OTHER, usd_per_h=1.0)
    for move_usd, pays in ((0.1, True), (8.0, False), (25.0, False)):
        told = known(10.0, 30.0, move_usd=move_usd, capacity={"a": lost})
        blocked = {"a": 60_000.0}
        offers = {"offers": (SPOT, far, DEAR), "blocked": blocked}
        view = of(*nodes, known=told, now_s=50_000.0, **offers)
        found = deadline(view)
        assert (isinstance(found, Launch) and found.offer == far) == pays, move_usd


def test_the_last_call_counts_the_move_to_where_on_demand_is_cheaper():
    far = dataclasses.replace(DEAR, usd_per_h=2.5, name="far", place="far")
    late = {"now_s": 5000.0, "offers": (SPOT, far, DEAR)}
    lost = {SPOT.name: dataclasses.replace(seen(5000.0, 0.5, 1.0, open=False), node_s=HOUR)}
    for move_usd, offer in ((1.0, far), (20.0, DEAR)):  # it saves 0.5 USD an hour, for ten hours
        told = known(10.0, 9.2, move_usd=move_usd, capacity=lost)
        assert deadline(of(known=told, **late)).offer == offer


def test_a_large_fleet_tries_spot_though_a_loss_takes_work_of_all():
    told = known(4.0 * 64, 8.0, lost_s=600.0)
    assert deadline(of(max_nodes=64, known=told)).offer == SPOT


def test_a_fleet_on_demand_goes_where_spot_is_with_no_more_nodes_on_it_than_may_be_lost():
    there, dear = Offer(1.0, "b", place="b"), Offer(3.0, "b/on-demand", False, place="b")
    offers, bought = (SPOT, there, DEAR, dear), [up(i, DEAR) for i in (1, 2, 3, 4)]

    def decide(*away, spare_h=0.16):
        view = of(*bought, *away, offers=offers, max_nodes=4, blocked={"a": 2000.0})
        return deadline(dataclasses.replace(view, known=known(40.0, 10.0 + spare_h)))

    # a begin takes 0.2 h at most: three of four nodes may be lost
    rented = [up(i, there) for i in (5, 6, 7)]
    for some in ([], rented[:1], rented[:2]):
        assert decide(*some).offer == there
    assert decide(*rented).offer == dear
    left = decide(*rented, up(8, dear))
    assert isinstance(left, Terminate) and (left.attempt, *left.also) == (1, 2, 3, 4)
    assert isinstance(decide(*rented, pending(8, dear)), Wait)  # it works on until all are ready
    assert isinstance(decide(spare_h=0.04), Wait)  # none may be lost


def test_nodes_that_are_taken_at_once_are_one_observation():
    """A fleet that was struck once waits for spot; one that lost as many nodes one by one takes on
    demand."""
    times = {"losses": 16, "node_s": 16 * HOUR, "room": 0, "room_s": 1000.0}
    for strikes, decision in ((1, Wait), (16, Launch)):
        told = known(160.0, 11.5, capacity={"a": CapacitySeen(False, strikes=strikes, **times)})
        view = of(max_nodes=16, known=told, blocked={"a": 2000.0})
        assert isinstance(deadline(view), decision), strikes


# ---- prices that move ----------------------------------------------------------------------------
def wandered(now_h, *prices):
    """Of the last hours, so many as there are."""
    return tuple(((now_h - len(prices) + i) * HOUR, usd) for i, usd in enumerate(prices))


CALM = {"a": seen(100 * HOUR, 90.0, 1.0, 30.0, 0.5, 60.0)}
UP_AND_DOWN = wandered(100, *[1.5, 1.3, 1.1, 0.8, 0.6, 0.5, 0.6, 0.8, 1.1, 1.4] * 10)


def at_price(usd, *alive, work_h=10.0, left_h=60.0, prices=UP_AND_DOWN):
    spot = dataclasses.replace(SPOT, usd_per_h=usd)
    path = (*prices, (99.9 * HOUR, usd))
    told = known(work_h, capacity=CALM, prices={"a": path})
    told = dataclasses.replace(told, deadline_s=(100 + left_h) * HOUR)
    return of(*alive, offers=(spot, DEAR), known=told, now_s=100 * HOUR)


def test_it_waits_for_a_lower_price_and_says_for_how_long_and_what_it_saves():
    assert deadline(at_price(0.6)).offer.name == "a"
    waits = deadline(at_price(1.6))
    assert isinstance(waits, Wait) and "cheaper in time" in waits.reason
    assert 100 * HOUR < waits.expected_s <= 150 * HOUR and 0.5 < waits.saving_usd < 16
    # without time to spare, or where prices were never seen to move, it does not
    assert deadline(at_price(1.6, left_h=12.0)).offer.name == "a"
    assert deadline(at_price(1.6, prices=())).offer.name == "a"


def test_a_node_is_let_go_while_its_price_is_high():
    held = up(1, SPOT, since_s=50 * HOUR)
    found = deadline(at_price(1.7, held))
    assert isinstance(found, Terminate) and "cheaper in time" in found.reason and found.grace_s
    for usd, left_h in ((0.6, 60.0), (1.7, 12.0)):
        assert isinstance(deadline(at_price(usd, held, left_h=left_h)), Wait)


def test_what_a_wait_was_expected_to_last_is_not_held_against_the_run():
    facts = [Stamped(0.0, "c", LeaseTaken(1))]
    facts.append(Stamped(5.0, "c", Decided("wait", "cheaper later", 9e4, 2.0)))
    facts.append(Stamped(6.0, "c", Decided("wait", "all nodes are there")))
    assert AttemptHistory.of(facts, random.Random(0)).progress_s == 9e4


# ---- what it is weighed by -----------------------------------------------------------------------
TERMS = Terms(SpellRates((0.5,) * 5, (0.5,) * 5), 0.3, 1 / 6, 0.25, 120, 60)


def test_what_the_rest_costs():
    found = outlook(TERMS)
    # all of it on demand: no time for anything else
    scarce = outlook(dataclasses.replace(TERMS, rates=SpellRates((0.5,) * 5, (1e-6,) * 5)))
    assert scarce.buy(1, 10.0, 10.5) == pytest.approx(10 + 1 / 6, abs=0.3)
    # all of it on spot that never ends
    calm = outlook(dataclasses.replace(TERMS, rates=SpellRates((1e-6,) * 5, (0.5,) * 5)))
    assert calm.rent(10.0, 20.0) == pytest.approx(0.3 * (10 + 1 / 6), abs=0.1)
    # more time never costs more, less work neither
    costs = [found.wait(OPEN, 10.0, t, 0.1) for t in (11.0, 13.0, 16.0, 20.0, 29.0)]
    assert costs == sorted(costs, reverse=True)
    costs = [found.wait(1, w, 20.0, 0.1) for w in (1.0, 5.0, 9.0, 13.0)]
    assert costs == sorted(costs)


def test_what_the_rest_costs_where_prices_wander():
    rates = SpellRates((1e-6,) * 5, (0.5,) * 5)
    still = outlook(dataclasses.replace(TERMS, rates=rates))
    found = outlook(dataclasses.replace(TERMS, rates=rates, swing=0.4, pull_per_h=0.1))
    low, middle, high = (dataclasses.replace(found, level=level) for level in (0.0, 2.0, 4.0))
    # what is cheap now is taken now; what is dear is waited out, or left
    assert low.rent(5.0, 25.0) < low.wait(OPEN, 5.0, 25.0, 0.25)
    assert high.rent(5.0, 25.0) > high.wait(OPEN, 5.0, 25.0, 0.25)
    assert high.keep(4, 5.0, 25.0, 0.25) > high.wait(OPEN, 5.0, 25.0, 0.25)
    assert low.keep(4, 5.0, 25.0, 0.25) < low.wait(OPEN, 5.0, 25.0, 0.25)
    # to choose the moment is worth something, with time; and nothing without
    assert middle.rent(5.0, 25.0) < still.rent(5.0, 25.0)
    assert high.rent(5.0, 6.0) > still.rent(5.0, 6.0)
    assert low.cheaper_in_h(5.0, 25.0, 0.25) == 0 < high.cheaper_in_h(5.0, 25.0, 0.25) < 20


def test_chances_add_up_however_long_it_takes():
    for hours in (0.01, 0.1, 1.0, 30.0):
        found = moves(TERMS.rates, hours)
        assert found.market.sum(axis=1) == pytest.approx(1.0)
        assert found.kept.sum(axis=1) + found.lost == pytest.approx(1.0)
    assert moves(TERMS.rates, 2.0).lost == pytest.approx(1 - np.exp(-1.0), abs=0.02)


def test_paces_are_of_all_that_was_seen():
    assert ends([]).pace() == 1.0
    quick = ends([Spell(True, 0.2 * HOUR, True)] * 50)
    slow = ends([Spell(True, 40 * HOUR, True)] * 50)
    assert quick.pace() > 2.5 > 1 > 0.5 > slow.pace()
    assert spell_rates([None], 0.0) == spell_rates([CapacitySeen()], 5.0)


def test_a_market_is_shut_when_all_of_its_places_are():
    first, second = seen(10 * HOUR, 1, 2, 3), seen(10 * HOUR, 2, 1, 3, open=False)
    # first: open 4-7, shut 7-9, open 9-; second: shut 4-7, open 7-8, shut 8-
    assert shut_spells([first, second], 10 * HOUR) == [Spell(False, HOUR, True)]
    assert shut_since([second], 10 * HOUR) == 8 * HOUR
    assert spell_rates([first, second], 10 * HOUR).another > 0


# ---- whole runs ----------------------------------------------------------------------------------


