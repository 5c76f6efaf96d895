"""Policies: each decision follows from a view, and from nothing else."""

from __future__ import annotations

import pytest

from harness.controller.combinators import replacing, together, within_budget, within_hours
from harness.controller.policies import (
    POLICIES,
    cheapest,
    on_demand_fallback,
    patient,
    resolve,
    uniform_progress,
)
from harness.core.estimates import CapacitySeen, Estimates
from harness.core.world import BadInput, Launch, Node, NodeState, Offer, Stop, Terminate, View, Wait
from harness.testing.situations import pending, situation, up

A, B, C = Offer(1.0, "a"), Offer(1.2, "b"), Offer(3.0, "c")
OD = Offer(4.0, "od", spot=False)


def view(*alive: Node, offers: tuple[Offer, ...] = (A, B, C), **changes: object) -> View:
    return situation(*alive, offers=offers, **changes)


def launched(decision: object) -> Offer:
    assert isinstance(decision, Launch), decision
    return decision.offer


def test_cheapest_fills_up_to_max_nodes() -> None:
    assert launched(cheapest(view())) == A
    assert launched(cheapest(view(up(1, A)))) == A
    assert isinstance(cheapest(view(up(1, A), pending(2, A))), Wait)


def test_a_full_offer_is_left_alone_until_its_time() -> None:
    assert launched(cheapest(view(blocked={"a": 1010.0}))) == B
    assert launched(cheapest(view(blocked={"a": 999.0}))) == A


def test_a_full_offer_gets_one_probe_at_a_time() -> None:
    assert launched(cheapest(view(pending(1, A), blocked={"a": 999.0}))) == B
    assert launched(cheapest(view(pending(1, A)))) == A  # it was never full: ask for both at once


def test_no_third_place_is_asked() -> None:
    """The loop would not let a node there (`Loop.room`)."""
    x, y, z = (Offer(p, n, place=n) for n, p in (("x", 1.0), ("y", 2.0), ("z", 3.0)))
    nodes = {"offers": (x, y, z), "max_nodes": 9}
    assert launched(cheapest(view(up(1, z), **nodes))) == x
    assert launched(cheapest(view(up(1, z), up(2, y), **nodes))) == y


def test_waits_end_when_something_can_be_asked_again() -> None:
    assert cheapest(view(blocked={"a": 1003.0, "b": 1060.0, "c": 1004.0})) == Wait(
        3.0, "no capacity on the offers in question"
    )
    assert isinstance(cheapest(view(offers=())), Wait)


def test_patient_pays_more_only_when_patience_is_over() -> None:
    blocked = {"a": 1e9, "b": 1e9}
    assert isinstance(patient(view(blocked=blocked), patience_s=2000), Wait)
    assert launched(patient(view(blocked=blocked), patience_s=500)) == C
    assert isinstance(patient(view(blocked=blocked, last_progress_s=900.0), patience_s=500), Wait)
    assert launched(patient(view(blocked={"a": 1e9}))) == B  # 1.2 is near enough to 1.0


def test_on_demand_only_for_the_minimum_and_only_while_there_is_no_spot() -> None:
    offers, full = (A, OD), {"a": 1e9}
    assert launched(on_demand_fallback(view(offers=offers))) == A
    assert launched(on_demand_fallback(view(offers=offers, blocked=full))) == OD
    assert isinstance(on_demand_fallback(view(up(1, OD), offers=offers, blocked=full)), Wait)
    assert launched(on_demand_fallback(view(up(1, OD), offers=offers))) == A
    assert isinstance(on_demand_fallback(view(up(1, OD), pending(2, A), offers=offers)), Wait)
    assert on_demand_fallback(view(up(1, OD), up(2, A), offers=offers)) == Terminate(
        1, "spot is back"
    )
    assert isinstance(on_demand_fallback(view(up(2, A), offers=offers, blocked=full)), Wait)


def test_uniform_progress_buys_when_behind_and_saves_when_ahead() -> None:
    def decide(
        hour: float,
        step: int,
        *alive: Node,
        blocked: dict[str, float] | None = None,
        nodes: int = 1,
    ) -> object:
        return uniform_progress(
            view(
                *alive,
                now_s=hour * 3600,
                committed_step=step,
                offers=(A, OD),
                blocked=blocked or {},
                max_nodes=nodes,
            ),
            deadline_h=10,
            work_h=5,
            total_steps=100,
        )

    full = {"a": 1e9}
    assert launched(decide(1, 0)) == A
    assert isinstance(decide(1, 30, blocked=full), Wait)  # ahead: wait for spot
    assert launched(decide(1, 5, blocked=full)) == OD  # behind: buy
    assert isinstance(decide(2, 21, up(1, OD)), Wait)  # hardly ahead: two changeovers would eat it
    assert decide(2, 40, up(1, OD)) == Terminate(1, "ahead of schedule and spot is back")
    assert launched(decide(9.9, 90)) == OD  # last call: only what is not taken away
    assert isinstance(decide(9.9, 90, up(1, A)), Wait)  # the spot node that is there is kept


def test_a_node_that_may_not_stay_is_replaced_then_released() -> None:
    policy = replacing(cheapest)
    two = (up(1, A), up(2, A))
    assert isinstance(policy(view(*two)), Wait)
    assert launched(policy(view(*two, doubted=(1,)))) == A
    assert isinstance(policy(view(*two, pending(3, A), doubted=(1,))), Wait)
    there = (*two, up(3, A))
    assert policy(view(*there, doubted=(1,))) == Terminate(1, "its replacement is there", 300.0)
    assert isinstance(policy(view(*there, doubted=(1,), now_s=30.0)), Wait)  # it has hardly come
    # node 1 stays after all
    assert policy(view(*there)) == Terminate(3, "it is not needed any more", 300.0)
    assert policy(view(*two, pending(3, A))) == Terminate(3, "it is not needed any more")
    # better than nothing
    assert isinstance(
        policy(view(*two, doubted=(1,), blocked={"a": 1e9, "b": 1e9, "c": 1e9})), Wait
    )


def test_a_node_beside_another_is_no_crowd_and_takes_its_place() -> None:
    policy = replacing(cheapest)
    there = up(1, A), up(2, A), up(3, OD)
    standing_in = {3: 1}
    fresh = {"now_s": 30.0, "standing_in": standing_in}
    assert isinstance(policy(view(*there, **fresh)), Wait)  # it has hardly come
    gone = policy(view(*there, standing_in=standing_in))
    assert gone == Terminate(1, "its replacement is there", 300.0)


def test_a_budget_stops_just_before_it_is_spent() -> None:
    policy = within_budget(cheapest, usd=10.0)
    assert launched(policy(view(spent_usd=5.0))) == A
    assert policy(view(up(1, A), spent_usd=10.0)) == Stop("the budget of 10 USD is spent")
    # 60 s of A are kept to drain it
    assert policy(view(up(1, A), spent_usd=9.99)) == Stop("the budget of 10 USD is spent")
    # goes on with what is there, starts nothing
    assert isinstance(policy(view(up(1, A), spent_usd=9.96)), Wait)
    assert isinstance(policy(view(spent_usd=9.98)), Stop)
    assert isinstance(policy(view(up(1, A), up(2, A), spent_usd=5.0)), Wait)


def test_hours_stop_it() -> None:
    assert launched(within_hours(cheapest, hours=1)(view())) == A
    assert within_hours(cheapest, hours=0.25)(view()) == Stop("the limit of 0.25 h is reached")


def test_wrappers_compose() -> None:
    policy = within_hours(within_budget(cheapest, usd=1.0), hours=100)
    assert isinstance(policy(view(up(1, A), spent_usd=2.0)), Stop)


def test_reasons_of_waits_are_stable() -> None:
    """A wait is recorded once per reason; a number in it would make a fact of every look."""
    early, late = (
        cheapest(view(now_s=t, blocked=dict.fromkeys("abc", 2000.0))) for t in (1000.0, 1500.0)
    )
    assert isinstance(early, Wait) and isinstance(late, Wait)
    assert early.reason == late.reason


@pytest.mark.parametrize("name", POLICIES)
def test_every_known_name_resolves(name: str) -> None:
    options = {"uniform_progress": "?deadline_h=10&work_h=5&total_steps=100"}
    assert launched(resolve(name + options.get(name, ""))(view())) == A


def mine(view: View, *, where: str = "b") -> Launch:
    return Launch(next(o for o in view.offers if o.name == where))


def test_your_own_by_dotted_path() -> None:
    assert launched(resolve(f"{__name__}:mine")(view())) == B
    assert launched(resolve(f"{__name__}:mine?where=c")(view())) == C


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("cheap", "known: cheapest, best_value, patient"),
        ("no.such.module:f", "cannot be imported"),
        (f"{__name__}:nothing", "cannot be imported"),
        ("uniform_progress", "deadline_h"),
        ("patient?premum=2", "premium"),
        ("deadline?total_steps=many", "wanted total_steps as a number"),
    ],
)
def test_a_bad_name_says_what_to_do(name: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        resolve(name)


# ---- all in one place, and moving on purpose -----------------------------------------------------
EAST, WEST = Offer(1.0, "x/east/a", place="x/east"), Offer(1.5, "x/west/a", place="x/west")
FLEET = together(cheapest, saving=0.2, stay_s=600.0, settle_s=60.0)


def fleet(*alive: Node, **changes: object) -> View:
    return view(*alive, offers=(EAST, WEST), **changes)


def test_all_nodes_are_in_the_place_of_the_first() -> None:
    assert launched(FLEET(fleet())) == EAST
    assert launched(FLEET(fleet(blocked={"x/east/a": 2000.0}))) == WEST
    assert launched(FLEET(fleet(up(1, WEST), now_s=300.0))) == WEST
    assert isinstance(FLEET(fleet(up(1, EAST), blocked={"x/east/a": 2000.0})), Wait)
    stray = FLEET(fleet(up(1, EAST), pending(2, WEST)))
    assert stray == Terminate(2, "the others cannot reach it")


def test_it_moves_to_where_it_is_cheaper_only_when_that_pays() -> None:
    here = up(1, WEST), up(2, WEST)
    assert isinstance(FLEET(fleet(*here, now_s=600.0)), Wait)  # they have not been there for long
    assert launched(FLEET(fleet(*here))) == EAST
    assert isinstance(FLEET(fleet(*here, blocked={"x/east/a": 1001.0})), Wait)  # full there
    assert isinstance(FLEET(fleet(*here, doubted=(2,))), Wait)
    # a third is not enough
    assert isinstance(together(cheapest, saving=0.4, stay_s=600.0)(fleet(*here)), Wait)
    assert isinstance(together(cheapest, saving=0.0)(fleet(*here, now_s=1e6)), Wait)
    assert isinstance(FLEET(fleet(up(1, EAST), up(2, EAST))), Wait)  # there is nothing better


def test_a_place_without_room_rests_and_no_move_begins_when_time_is_short() -> None:
    here, few = (up(1, WEST), up(2, WEST)), CapacitySeen(True, 0.0, 900.0, room=1, room_s=900.0)
    refused = {"blocked": {"x/east/a": 950.0}}
    assert launched(FLEET(fleet(*here, **refused))) == EAST
    rests = Estimates(capacity={"x/east/a": few})
    assert isinstance(FLEET(fleet(*here, known=rests, **refused)), Wait)
    assert launched(FLEET(fleet(*here, known=rests, **refused, now_s=1600.0))) == EAST
    for spare_s, moves in ((1300.0, True), (1100.0, False)):
        known = Estimates(100, 2 * 3600.0, changeover_s=300.0, deadline_s=1000.0 + 3600.0 + spare_s)
        assert isinstance(FLEET(fleet(*here, known=known)), Launch) is moves
    for usd, moves in ((1.0, True), (100.0, False)):  # what an hour late costs
        known = Estimates(
            100, 2 * 3600.0, changeover_s=300.0, deadline_s=5000.0, usd_per_hour_late=usd
        )
        assert isinstance(FLEET(fleet(*here, known=known)), Launch) is moves


def test_a_world_as_large_is_ready_there_before_this_one_is_left() -> None:
    here = up(1, WEST), up(2, WEST)
    assert launched(FLEET(fleet(*here, pending(3, EAST)))) == EAST
    assert isinstance(FLEET(fleet(*here, pending(3, EAST), pending(4, EAST))), Wait)
    fresh = Node(4, EAST, NodeState.UP, asked_s=900.0, up_s=990.0)
    assert isinstance(FLEET(fleet(*here, up(3, EAST), fresh)), Wait)
    billed_while_it_is_set_up = Node(4, EAST, NodeState.UP, asked_s=0.0, up_s=1.0, at_work_s=990.0)
    assert isinstance(FLEET(fleet(*here, up(3, EAST), billed_while_it_is_set_up)), Wait)
    assert FLEET(fleet(*here, up(3, EAST), up(4, EAST))) == Terminate(
        1, "the whole run is cheaper elsewhere", 300.0, (2,)
    )
    assert FLEET(fleet(*here[:1], up(3, EAST))) == Terminate(
        1, "the whole run is cheaper elsewhere", 300.0
    )
    full = FLEET(fleet(*here, up(3, EAST), blocked={"x/east/a": 2000.0}))
    assert full == Terminate(3, "there is no room for the whole run")


def test_a_move_is_not_mistaken_for_a_crowd() -> None:
    """What looks for nodes too many leaves those alone that are elsewhere on purpose."""
    decide = replacing(FLEET)
    moving = up(1, WEST), up(2, WEST), up(3, EAST), pending(4, EAST)
    assert isinstance(decide(fleet(*moving)), Wait)
    assert decide(fleet(*moving, pending(5, EAST))) == Terminate(
        5, "it is not needed any more", 0.0
    )
