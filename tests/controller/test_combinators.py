"""Policies made of policies: what each of them adds, how they are written, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest

from harness.controller.combinators import at_most, avoid, spread, together, warm_spare
from harness.controller.deadline_policy import by_deadline
from harness.controller.policies import cheapest, resolve, uses_on_demand
from harness.core.estimates import Estimates
from harness.core.world import (
    BadInput,
    Decision,
    Launch,
    Node,
    Offer,
    Policy,
    Stop,
    Terminate,
    View,
    Wait,
)
from harness.testing.situations import pending, situation, up

H = 3600.0


def node(zone: str, kind: str = "p5", usd_per_h: float = 1.0, **more: object) -> Offer:
    region = zone.rstrip("abc")
    return Offer(usd_per_h, f"aws/{region}/{zone}/{kind}", place=f"aws/{region}", **more)  # type: ignore[arg-type]


A, B, C = node("east1a"), node("east1b", usd_per_h=1.2), node("west2a", usd_per_h=1.5)
OD = node("east1a", "p5-od", 3.0, spot=False)
OFFERS = (A, B, C, OD)


def view(*alive: Node, **changes: object) -> View:
    return situation(*alive, **{"offers": OFFERS, "max_nodes": 4, **changes})


def launched(decision: Decision) -> Offer:
    assert isinstance(decision, Launch), decision
    return decision.offer


def waits(decision: Decision) -> str:
    assert isinstance(decision, Wait), decision
    return decision.reason


# ---- which offers --------------------------------------------------------------------------------
def test_at_most_a_price() -> None:
    full = {A.name: 1e9}
    assert launched(at_most(cheapest, usd_per_h=1.1)(view())) == A
    assert "costs more" not in waits(at_most(cheapest, usd_per_h=1.1)(view(blocked=full)))
    assert waits(at_most(cheapest, usd_per_h=0.9)(view())) == "every offer costs more than it may"
    nodes = view(up(1, OD), up(2, OD), up(3, OD), up(4, OD))
    assert waits(at_most(cheapest, usd_per_h=0.9)(nodes)) == "all nodes are there"
    eight = dataclasses.replace(OD, gpus=8)
    each = at_most(cheapest, usd_per_gpu_h=0.5)
    assert launched(each(view(offers=(A, eight)))) == eight


def test_all_nodes_together_cost_at_most() -> None:
    policy = at_most(cheapest, all_usd_per_h=3.5)
    why = "another node would cost more than all together may"
    assert launched(policy(view(up(1, A), up(2, B)))) == A
    assert waits(policy(view(up(1, A), up(2, B), up(3, B)))) == why
    # also one that was given up and may still be billed; and at the price of today
    assert waits(policy(view(up(1, A), unsure=(up(2, A), up(3, A))))) == why
    dearer = dataclasses.replace(A, usd_per_h=2.4)
    assert waits(policy(view(up(1, A), offers=(B, C, dearer)))) == why
    assert launched(policy(view(up(1, C), offers=(A, C)))) == A
    full = {A.name: 1e9, B.name: 1e9, C.name: 1e9}
    assert "capacity" in waits(policy(view(up(1, OD), blocked={**full, OD.name: 1e9})))
    assert waits(policy(view(up(1, A), up(2, A), up(3, A), up(4, A)))) == "all nodes are there"
    assert waits(at_most(cheapest, all_usd_per_h=0.9)(view())) == why
    # a policy that takes no notice of what is full gets nothing either
    assert waits(at_most(lambda view: Launch(OD), all_usd_per_h=3.5)(view(up(1, A)))) == why


def test_a_run_moves_only_where_a_second_world_fits_into_what_all_may_cost() -> None:
    here = up(1, C), up(2, C)
    for usd_per_h, moves in ((5.0, True), (4.9, False)):
        policy = together(at_most(cheapest, all_usd_per_h=usd_per_h), stay_s=600.0)
        decision = policy(view(*here, offers=(A, C), max_nodes=2))
        assert isinstance(decision, Launch) is moves, usd_per_h
    dearer = dataclasses.replace(A, usd_per_h=1.2)  # meanwhile
    moving = policy(view(*here, up(3, A), offers=(dearer, C), max_nodes=2))
    assert moving == Terminate(3, "there is no room for the whole run")


@pytest.mark.parametrize(
    ("what", "left"),
    [
        (("aws/east1",), C),
        (("aws/east1/east1a", "aws/west2"), B),
        (("*/p5",), OD),
        (("aws",), None),
        (("A100",), A),
        (("cpu",), None),  # its accelerator
        (("aws/eas",), A),  # a part of a name is none
    ],
)
def test_avoid(what: tuple[str, ...], left: Offer | None) -> None:
    decision = avoid(cheapest, *what)(view())
    if left is None:
        assert waits(decision) == "every offer is one to be avoided"
    else:
        assert launched(decision) == left


def test_spread_gives_a_zone_its_share_and_no_more() -> None:
    policy = spread(cheapest, zones=2)
    assert launched(policy(view())) == A
    assert launched(policy(view(up(1, A)))) == A
    assert launched(policy(view(up(1, A), pending(2, A)))) == B
    assert launched(policy(view(up(1, A), up(2, A), up(3, B), blocked={B.name: 1e9}))) == C
    full = {B.name: 1e9, C.name: 1e9}
    there = view(up(1, A), up(2, A), blocked=full)
    assert waits(policy(there)) == "zones that have their share are left alone"
    # but the least number of nodes wherever they can be had
    assert launched(policy(dataclasses.replace(there, min_nodes=3))) == A
    # nodes that may not stay, and zones that are not offered, do not count
    assert launched(policy(view(up(1, A), up(2, A), doubted=(1, 2)))) == A
    assert launched(policy(view(up(1, A), up(2, A), offers=(A,)))) == A


def test_zones_are_places_where_offers_name_none() -> None:
    offers = Offer(1.0, "x", place="x"), Offer(2.0, "y", place="y"), Offer(3.0, "z/p5", place="z")
    policy = spread(cheapest, zones=3)
    at = {"offers": offers, "max_nodes": 3}
    assert launched(policy(view(up(1, offers[0]), **at))) == offers[1]
    two = view(up(1, offers[0]), up(2, offers[1]), **at)  # more than two are left to nobody
    assert waits(policy(two)) == "zones that have their share are left alone"


def test_a_warm_spare_is_in_another_zone() -> None:
    policy = warm_spare(cheapest, n=1)
    there = (up(1, A), up(2, A))
    assert launched(policy(view(*there))) == A
    spare = policy(view(*there, up(3, A)))
    assert spare == Launch(B, "a warm spare")
    assert launched(policy(view(*there, up(3, A), blocked={B.name: 1e9, C.name: 1e9, OD.name: 1e9}))) == A
    assert waits(policy(view(*there, up(3, A), up(4, B)))) == "all nodes are there"
    assert launched(warm_spare(cheapest, n=7)(view(up(1, A)))) == B  # one node is no spare

    def idle(view: View) -> Decision:
        return Wait(9.0, "not now")

    assert waits(warm_spare(idle)(view(*there))) == "not now"  # no spare for nodes that are not there


# ---- a deadline ----------------------------------------------------------------------------------
def at(hour: float, *alive: Node, done: float = 0.0, **changes: object) -> View:
    """Ten hours of work for four nodes, a deadline after twelve, changeovers of 0.1 h."""
    known = Estimates(
        total_steps=100, work=40 * H, changeover_s=0.1 * H, **changes.pop("known", {})  # type: ignore[arg-type]
    )
    return view(*alive, now_s=hour * H, known=known, committed_step=round(100 * done), **changes)


def on_demand(*attempts: int) -> list[Node]:
    return [up(n, OD) for n in attempts]


def test_on_demand_is_bought_at_the_last_call_and_not_before() -> None:
    policy = by_deadline(cheapest, hours=12)
    full = {"blocked": {A.name: 1e9, B.name: 1e9, C.name: 1e9}}
    assert launched(policy(at(1.0))) == A
    assert launched(at_the_last_call := policy(at(1.9))) == OD
    assert at_the_last_call.reason == "the deadline leaves no time for another interruption"
    # while nothing can be had, until two changeovers are left
    assert isinstance(policy(at(1.7, **full)), Wait)
    assert launched(policy(at(1.81, **full))) == OD
    # where lateness has a price, once that is what on demand costs more: 40 node-hours, 2 USD each
    for usd, hour, offer in ((40.0, 1.9, A), (40.0, 3.9, OD), (4000.0, 1.9, OD), (4.0, 15.0, A)):
        late = {"usd_per_hour_late": usd}
        assert launched(policy(at(hour, known=late))) == offer, (usd, hour)
    # a spot node so late needs one more
    assert launched(policy(at(1.69))) == A
    assert launched(policy(at(1.71))) == OD
    # one that may buy before, and where there is no spot to wait for
    assert launched(by_deadline(cheapest, hours=12, early=1)(at(1.0, **full))) == OD
    assert launched(policy(at(1.0, offers=(OD,)))) == OD


def test_what_is_there_stays_at_the_last_call() -> None:
    policy = by_deadline(cheapest, hours=12)
    three = [up(n, A) for n in (1, 2, 3)]
    assert launched(policy(at(1.9, *three))) == OD
    assert waits(policy(at(1.9, *three, up(4, A)))) == "what is there stays: the deadline is near"
    # nodes that lose work when they are lost make it earlier
    known = {"lost_s": 0.2 * H}
    assert launched(policy(at(1.2, *three[:2]))) == A
    assert launched(policy(at(1.3, *three, known=known))) == OD
    # too slow to be in time
    slow = [up(n, dataclasses.replace(A, speed=0.5)) for n in (1, 2, 3, 4)]
    assert policy(at(1.9, *slow)) == Launch(
        OD, "too slow for the deadline: another takes its place", instead_of=1
    )
    assert waits(policy(at(1.9, *slow, up(5, OD), standing_in={5: 1})))


def test_at_the_last_call_all_are_where_they_reach_each_other() -> None:
    policy = by_deadline(cheapest, hours=12)
    west = dataclasses.replace(OD, name="aws/west2/west2a/p5-od", place="aws/west2", usd_per_h=2.9)
    here, offers = (up(1, A), up(2, A)), {"offers": (A, west, OD)}
    assert policy(at(1.9, *here, up(3, C), pending(4, C), **offers)) == Terminate(
        3, "the others cannot reach it", also=(4,)
    )
    assert launched(policy(at(1.9, *here, **offers))) == OD
    assert launched(policy(at(1.9, **offers))) == west


def test_on_demand_nodes_stay_while_they_are_needed() -> None:
    policy = by_deadline(lambda view: Terminate(1, "spot is back", also=(2,)), hours=12)
    nodes = [up(1, A), *on_demand(2, 3, 4)]
    assert waits(policy(at(1.65, *nodes))) == "on-demand nodes stay: the deadline is near"
    assert isinstance(policy(at(1.5, *nodes)), Terminate)


def test_without_a_deadline_or_known_work_the_policy_decides() -> None:
    late = at(11.9)
    assert launched(by_deadline(cheapest)(late)) == A
    assert isinstance(by_deadline(cheapest, hours=12)(late), Launch)
    known = dataclasses.replace(late.known, deadline_s=12 * H)
    assert launched(by_deadline(cheapest)(dataclasses.replace(late, known=known))) == OD
    unknown = dataclasses.replace(late, known=Estimates(deadline_s=12 * H))
    assert launched(by_deadline(cheapest)(unknown)) == A
    assert launched(by_deadline(cheapest, hours=12)(at(11.9, offers=(A, B)))) == A
    stops = by_deadline(lambda view: Stop("enough"), hours=12)
    assert isinstance(stops(at(1.0)), Stop)


def test_of_on_demand_offers_the_cheapest_that_is_in_time() -> None:
    fast = node("west2a", "fast", 9.0, spot=False, speed=2.0)
    policy = by_deadline(at_most(cheapest, usd_per_h=0.5), hours=12)
    offers = {"offers": (OD, fast)}
    assert launched(policy(at(1.81, **offers))) == OD
    assert isinstance(policy(at(4.0, **offers)), Wait)  # too late for it, and early for the other
    assert launched(policy(at(6.9, **offers))) == fast
    assert launched(policy(at(6.9, blocked={fast.name: 1e9}, **offers))) == OD
    # it was bought in time, and goes on to the end
    nodes = on_demand(1, 2, 3, 4)
    assert waits(policy(at(2.0, *nodes, **offers))) == "what is there stays: the deadline is near"


# ---- as people write them ------------------------------------------------------------------------
def mine(view: View, *, where: str = "") -> Decision:
    return Launch(next(o for o in view.offers if where in o.name), "mine")


def only(policy: Policy, zone: str, *, twice: float = 1) -> Policy:
    return lambda view: policy(
        dataclasses.replace(view, offers=tuple(o for o in view.offers if zone in o.name))
    )


@pytest.mark.parametrize(
    ("text", "takes"),
    [
        ("at_most(best_value, usd_per_h=2)", A),
        ("avoid(cheapest, aws/east1)", C),
        ("avoid(cheapest, 'aws/east1/east1a', \"*west*\")", B),
        (" spread( avoid(cheapest(), *east1a*) , zones = 2 ) ", B),
        ("within_hours(within_budget(patient(premium=1.5), usd=1e3), hours=9)", A),
        ("at_most(patient?premium=1.5&patience_s=600, usd_per_gpu_h=2)", A),
        (f"{__name__}:mine(where=west)", C),
        (f"warm_spare({__name__}:mine?where=west, n=1)", C),
        (f"at_most({__name__}:only(cheapest, west2), usd_per_h=9)", C),
        (f"{__name__}:only(cheapest, west2, twice=2)", C),
        (f"{__name__}:mine?where=(,", None),  # as ever: what follows a "?" is nobody's call
    ],
)
def test_a_policy_is_written_as_a_call(text: str, takes: Offer | None) -> None:
    policy = resolve(text)
    if takes is not None:
        assert launched(policy(view())) == takes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("at_most", r"goes around a policy; write for example at_most\(best_value, \.\.\.\)"),
        ("at_most()", "goes around a policy"),
        ("at_most(usd_per_h=2)", "goes around a policy"),
        ("at_most(cheapest)", "wanted one of usd_per_h, usd_per_gpu_h, all_usd_per_h"),
        ("at_most(cheapest, 2)", r"too many positional arguments; it is at_most\(policy"),
        ("at_most(cheapest, usd=2)", "unexpected keyword argument 'usd'"),
        ("at_most(cheapest, usd_per_h=-2)", "above 0, found -2"),
        ("at_most(cheapest, usd_per_h=two)", "usd_per_h as a number, found 'two'"),
        ("at_most(cheep, usd_per_h=2)", "no policy 'cheep'; known: cheapest, .* around another"),
        ("cheapest(best_value)", "cheapest takes options, and no policy"),
        ("patient(premum=1)", "premum"),
        ("avoid(cheapest)", "wanted names of places"),
        ("avoid(cheapest, spread(cheapest))", "one policy, the first; found more"),
        ("spread(cheapest, zones=1.5)", "zones=2 or more, a whole number; found 1.5"),
        ("warm_spare(cheapest, n=0)", "n=1 or more"),
        ("by_deadline(cheapest, hours=0)", "hours above 0"),
        ("by_deadline(cheapest, early=2)", "early=0 or early=1"),
        ("within_budget(cheapest, usd=nan)", "finite"),
        ("at_most(cheapest, usd_per_h=2", "wanted ',' or '\\)', found the end"),
        ("at_most(cheapest usd_per_h=2)", "wanted ',' or '\\)', found 'u'"),
        ("at_most(cheapest, usd_per_h=2))", "wanted the end, found '\\)'"),
        ("at_most(cheapest, usd_per_h=2, usd_per_h=3)", "wanted usd_per_h once"),
        ("at_most(cheapest, usd_per_h=)", "wanted a value"),
        ("avoid(usd=2, cheapest)", "option=value after an option"),
        ("(cheapest)", "wanted a name"),
        ("spread(" * 30 + "cheapest", "at most 20 calls within each other"),
        (f"{__name__}:H(cheapest)", "there is no policy"),
    ],
)
def test_what_is_written_wrongly_is_refused_at_once(text: str, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        resolve(text)


def test_who_buys_on_demand_nodes_is_seen_from_the_name() -> None:
    assert uses_on_demand("uniform_progress?deadline_h=10")
    assert uses_on_demand("avoid(by_deadline(cheapest, hours=3), aws)")
    assert not uses_on_demand("avoid(cheapest, 'aws/uniform')")


# ---- the contract --------------------------------------------------------------------------------


