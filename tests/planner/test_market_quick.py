"""The quick play of a market is the real replay, to the last digit."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from harness.controller import combinators, policies
from harness.core import world
from harness.core.estimates import CapacitySeen
from harness.core.world import Launch, Stop, View, Wait
from harness.planner.fast_replay import play
from harness.planner.market_nodes import ReplayJob
from harness.planner.market_replay import replay
from harness.planner.synthetic_market import ROUGH, MadeUpZone, make_up, usual_zones
from harness.planner.traces import ZoneTrace

POLICIES = {
    "deadline": policies.resolve("deadline"),
    "cheapest": policies.cheapest,
    "together": combinators.together(policies.cheapest),
    "on_demand_fallback": policies.on_demand_fallback,
    "uniform_progress": functools.partial(
        policies.uniform_progress, deadline_h=7, work_h=5, total_steps=300, changeover_s=600
    ),
}


def market(seed: int, zones: int, nodes: int, price: float | None = 1.0) -> list[ZoneTrace]:
    rng = np.random.default_rng(seed)
    found = usual_zones(zones, rng, nodes=nodes, usd_per_h=price)
    return make_up(found, 40, rng, tick_s=600, weather=ROUGH)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(("zones", "nodes"), [(1, 1), (3, 4)])
def test_it_is_the_real_replay(name: str, zones: int, nodes: int):
    job = ReplayJob(5, 7, (1, nodes), changeover_s=500.0, lost_s=300.0, move_usd=0.5)
    made = market(zones + 5, zones, nodes)
    quick, real = play(made, 3, job, POLICIES[name]), replay(made, 3, job, POLICIES[name])
    assert quick.spans == real.spans
    for what in ("usd", "finish_h", "on_demand_h", "spot_h", "goodput"):
        assert getattr(quick, what) == pytest.approx(getattr(real, what), rel=1e-9), what
    for what in ("launches", "moves", "losses", "missed", "outcome"):
        assert getattr(quick, what) == getattr(real, what), what


def test_a_policy_sees_what_it_would_see_in_the_real_replay():
    """Of views that differ in nothing that a policy may rely on, all."""
    seen: dict[str, list[tuple[object, ...]]] = {"quick": [], "real": []}

    def looking(which: str, view: View):
        known = view.known
        capacity = {k: (c.open, c.since_s, c.spells, c.losses) for k, c in known.capacity.items()}
        held = tuple((n.attempt, n.offer, n.up_s, n.at_work_s) for n in view.alive)
        # until when a full offer is left alone is drawn by chance, within the tick
        blocked = tuple(sorted(view.blocked))
        # the real loop's money is whole nano-dollars for each attempt
        spent_usd = round(view.spent_usd, 6)
        numbers = (view.now_s, view.committed_step, spent_usd, view.attempts, view.losses)
        times = (view.last_progress_s, view.launch_s, view.leave_s, known.deadline_s, known.work)
        seen[which].append((held, view.offers, blocked, capacity, numbers, times))
        return policies.cheapest(view)

    job = ReplayJob(4, 6, (1, 2), lost_s=120.0)
    made = market(4, 2, 2)
    play(made, 0, job, functools.partial(looking, "quick"))
    replay(made, 0, job, functools.partial(looking, "real"))
    for quick, real in zip(seen["quick"], seen["real"], strict=False):
        assert quick == real
    # after the last step the real loop has nodes leave, and asks no policy
    assert abs(len(seen["quick"]) - len(seen["real"])) <= 1 and len(seen["quick"]) > 20


def test_what_is_known_before_is_seen_and_goes_on():
    before = {"zone-0": CapacitySeen(True, -3600.0, -60.0, node_s=100.0, losses=2)}
    found: list[CapacitySeen] = []

    def looking(view: View):
        found.append(view.known.capacity["zone-0"])
        return policies.cheapest(view)

    play(market(3, 1, 1), 0, ReplayJob(2, 4), looking, seen=before)
    assert found[0] == before["zone-0"] and found[-1].since_s == -3600.0
    assert before["zone-0"].losses == 2  # the caller's own is left alone


def test_a_policy_that_stops_or_asks_too_often_ends():
    made = make_up([MadeUpZone("a", is_open=True)], 10, np.random.default_rng(1))
    stopped = play(made, 0, ReplayJob(2, 4), lambda view: Stop("enough"))
    assert (stopped.outcome, stopped.reason, stopped.missed) == ("stopped", "enough", True)
    assert play(made, 0, ReplayJob(2, 4), lambda view: Wait(1.0, "never")).outcome == "stopped"
    asked = play(made, 0, ReplayJob(0.2, 4), lambda view: Launch(view.offers[0]))
    assert asked.finish_h < 1


def test_a_budget_is_kept():
    made = market(6, 1, 1)
    ended = play(made, 0, ReplayJob(20, 40), policies.cheapest, budget_usd=3.0)
    assert ended.outcome == "stopped" and "budget" in ended.reason and ended.usd <= 3.0


def test_a_node_instead_of_another_is_the_same_in_both():
    """A policy that has a node on demand beside its spot node now and then, and goes back."""

    def restless(view: View):
        spot = [n for n in view.alive if n.offer.spot]
        if len(view.alive) == 1 and not view.standing_in and int(view.now_s / 3600) % 2:
            others = [o for o in view.offers if o.spot is not view.alive[0].offer.spot]
            if opened := world.open_offers(view, others):
                return Launch(opened[0], "the other kind", instead_of=view.alive[0].attempt)
        return policies.cheapest(view) if not spot and not view.alive else Wait(60.0, "at work")

    made, job = market(11, 2, 1), ReplayJob(6, 12, changeover_s=300.0, move_usd=0.3)
    quick, real = play(made, 0, job, restless), replay(made, 0, job, restless)
    assert quick.spans == real.spans and len(quick.spans) > 3 and quick.on_demand_h > 0
    assert quick.usd == pytest.approx(real.usd, rel=1e-9) and quick.moves == real.moves


def test_zones_of_one_place_train_together_and_a_move_between_them_is_none():
    made = market(9, 3, 2)
    job = ReplayJob(5, 9, (1, 2), move_usd=1.0)
    places = {trace.zone: "east" for trace in made}
    apart = play(made, 0, job, policies.cheapest)
    near = play(made, 0, job, policies.cheapest, places=places)
    assert near.moves == 0 and near.finish_h <= apart.finish_h
    alone = play(made, 0, job, policies.cheapest, places=places, on_demand=False)
    assert alone.on_demand_h == 0
