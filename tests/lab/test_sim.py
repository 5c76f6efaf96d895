"""The recovery loop, lease, journal and orders in hundreds of hostile worlds; and proof that the
checkers can fail."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from harness.controller import combinators, policies
from harness.controller.recovery import RunOutcome, recover
from harness.controller.run_limits import RunSpec
from harness.core.facts import AttemptEnded, AttemptIntended, Decided, LeaseTaken
from harness.core.world import Offer
from harness.lab.simulation.invariants import Violation
from harness.lab.simulation.sim_nodes import SimulatedTraining
from harness.lab.simulation.sim_world import ON_DEMAND, FaultRates
from harness.lab.simulation.simulation import (
    SimResult,
    SimulationBuild,
    command,
    simulate,
    simulate_many,
)
from support.broken_parts import (
    DeafLease,
    ForgetfulJournal,
    GenerousJournal,
    HastyLease,
    LazyJournal,
    OverwritingStore,
    boastful,
    deaf,
    greedy,
    impatient,
    panicky,
    sleepy,
)

pytestmark = pytest.mark.proof
SEEDS = 200
CALM = FaultRates(calm_s=0.0)


@pytest.fixture(scope="module")
def worlds() -> list[SimResult]:
    return list(simulate_many(range(SEEDS)))


def test_every_world_ends_well_or_says_why_not(worlds: list[SimResult]) -> None:
    ends = Counter(r.outcome for r in worlds)
    assert ends["done"] > 0.8 * SEEDS
    for r in worlds:
        if r.outcome == "done":
            assert r.committed_step == 300
        else:
            assert (
                r.weather.fails_at_step
                or r.weather.stop_at_s is not None
            )
        if r.outcome == "failed":
            assert "the nodes' command failed 3 times" in r.reason
        if r.outcome == "stopped":
            assert r.reason == "somebody asked for it"


def test_the_worlds_are_hostile(worlds: list[SimResult]) -> None:
    """Otherwise the invariants hold for want of trouble."""
    ends = Counter(s.fact.end for r in worlds for s in r.facts if isinstance(s.fact, AttemptEnded))
    for end in ("preempted", "drained", "finished", "no-capacity", "terminated", "failed", "lost"):
        assert ends[end] > 10, ends
    assert sum(r.controllers > 5 for r in worlds) > SEEDS / 4
    assert sum(r.epochs > 10 for r in worlds) > SEEDS / 10
    assert sum(r.steps_redone > 0 for r in worlds) > SEEDS / 10


def test_controllers_take_over_in_order(worlds: list[SimResult]) -> None:
    for r in worlds:
        terms = [s.fact.term for s in r.facts if isinstance(s.fact, LeaseTaken)]
        assert terms == sorted(set(terms))


def test_the_facts_alone_tell_what_was_paid(worlds: list[SimResult]) -> None:
    for r in worlds:
        last = {s.fact.attempt: s.fact for s in r.facts if isinstance(s.fact, AttemptEnded)}
        # each bill is rounded to a nano-dollar
        told = sum(f.usd for f in last.values())
        assert math.isclose(told, r.usd, abs_tol=1e-9 * len(last))
        intended = {s.fact.attempt for s in r.facts if isinstance(s.fact, AttemptIntended)}
        assert set(last) <= intended


def test_a_seed_is_the_whole_story() -> None:
    assert simulate(4) == simulate(4)


def test_calm_weather_costs_what_the_work_costs() -> None:
    r = simulate(1, run=RunSpec(1, 1), weather=CALM)
    assert (r.outcome, r.attempts, r.controllers, r.steps_redone) == ("done", 1, 1, 0)
    work_s = SimulatedTraining().total_steps * SimulatedTraining().step_s
    assert work_s < r.elapsed_s < work_s + 200
    assert math.isclose(r.usd, 1800 / 3600, rel_tol=0.05)  # 1 USD an hour


SPELL = FaultRates(calm_s=1500.0, refused_s=(300.0, 900.0))


def test_a_spell_of_refusals_does_not_end_a_run() -> None:
    """Ten minutes of 403 for controllers and nodes alike."""
    for result in simulate_many(range(4), weather=SPELL):
        assert result.outcome == "done" and result.elapsed_s > 900


def test_without_capacity_it_stops_and_says_so() -> None:
    r = simulate(
        2,
        run=RunSpec(1, 2, max_hours_without_progress=1.0),
        weather=FaultRates(calm_s=math.inf, available=0.0),
    )
    assert r.outcome == "failed"
    assert "for lack of capacity" in r.reason
    assert 3600 <= r.elapsed_s < 3800
    assert r.usd == 0


def test_a_budget_holds_in_every_world() -> None:
    run = RunSpec(
        1, 3, poll_s=5.0, budget_usd=0.4, exit_grace_s=60.0, launch_s=60.0, terminate_s=10.0
    )
    ends = Counter(r.outcome for r in simulate_many(range(20), run=run))
    assert ends["stopped"] > 12


def test_hours_hold() -> None:
    r = simulate(5, run=RunSpec(1, 1, max_hours=0.25), weather=CALM)
    assert (r.outcome, r.reason) == ("stopped", "the limit of 0.25 h is reached")
    assert 0.25 * 3600 <= r.elapsed_s < 0.25 * 3600 + 200
    assert 0 < r.committed_step < 300  # it drained


def test_on_demand_saves_a_run_that_has_no_spot() -> None:
    drought = FaultRates(
        offers=(*CALM.offers, ON_DEMAND),
        calm_s=20_000.0,
        available=0.0,
        crashes=0.0,
        overtakings=0.0,
    )
    r = simulate(3, policies.on_demand_fallback, RunSpec(1, 2), drought)
    assert r.outcome == "done"
    assert r.elapsed_s < 4000


def test_the_command_prints_what_happened(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(seeds=2, seed=None, first=0, policy="cheapest") == 0
    assert "2 worlds, every rule held" in capsys.readouterr().out
    assert command(seeds=1, seed=3, first=0, policy="cheapest") == 0
    assert "RunEnded" in capsys.readouterr().out


# ---- the checkers can fail -----------------------------------------------------------------------
def spendthrift(run: RunSpec, *others: Any) -> RunOutcome:
    return recover(dataclasses.replace(run, budget_usd=None), *others)


STORMY = FaultRates(kills_per_h=12, noticed=0.2, crashes=0.002, overtakings=0.01, calm_s=1800.0)
REFUSED = FaultRates(refusals=0.002, kills_per_h=6, crashes=0.001, overtakings=0.0, calm_s=1800.0)
# a launch and a boot take 90 s
PATIENT = RunSpec(1, 2, poll_s=5.0, lost_after_s=180.0, max_refused_s=120.0, exit_grace_s=60.0)
MOVING = FaultRates(elsewhere=0.5, kills_per_h=3, crashes=0.004, overtakings=0.0, calm_s=1800.0)
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "deaf lease": ({"build": SimulationBuild(lease=DeafLease)}, "one hand"),
    "hasty lease": ({"build": SimulationBuild(lease=HastyLease)}, "one hand"),
    "lazy journal": ({"build": SimulationBuild(journal=LazyJournal)}, "intended first"),
    "forgetful journal": (
        {"build": SimulationBuild(journal=ForgetfulJournal)},
        "ledger|life|node limit|nothing left",
    ),
    "generous journal": ({"build": SimulationBuild(journal=GenerousJournal)}, "ledger"),
    "overwriting store": (
        {"build": SimulationBuild(store=OverwritingStore)},
        "write once",
    ),
    "impatient": ({"build": SimulationBuild(recover=impatient)}, "nothing left|life"),
    "greedy": ({"build": SimulationBuild(recover=greedy), "run": RunSpec(1, 2, poll_s=5.0)}, "node limit"),
    "spendthrift": (
        {"build": SimulationBuild(recover=spendthrift), "run": RunSpec(1, 3, poll_s=5.0, budget_usd=0.02)},
        "budget",
    ),
    "boastful": ({"build": SimulationBuild(recover=boastful)}, "done"),
    "panicky": ({"build": SimulationBuild(recover=panicky), "weather": REFUSED, "run": PATIENT}, "seeing"),
    "deaf": (
        {"build": SimulationBuild(recover=deaf), "weather": MOVING, "run": PATIENT},
        "node limit|nothing left",
    ),
    "sleepy": (
        {"policy": sleepy, "run": RunSpec(1, 1, poll_s=60.0, max_hours_without_progress=2.0)},
        "life",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_part_is_found(name: str) -> None:
    world, rule = BROKEN[name]

    def broken_worlds() -> Iterator[SimResult]:
        return simulate_many(range(60), **{"weather": STORMY, **world})

    with pytest.raises(Violation, match=rf"^({rule}): [\s\S]*harness market simulate --seed \d+"):
        for _ in broken_worlds():
            pass


def test_the_same_storm_breaks_no_rule_with_whole_parts() -> None:
    """The control of the experiment above."""
    assert all(r.outcome == "done" for r in simulate_many(range(12), weather=STORMY))


@pytest.mark.parametrize("weather", [REFUSED, MOVING], ids=["refused", "another API server"])
def test_controllers_in_trouble_or_elsewhere_break_no_rule(weather: FaultRates) -> None:
    """The control of "panicky" and "deaf"."""
    ends = Counter(r.outcome for r in simulate_many(range(25), run=PATIENT, weather=weather))
    assert ends["done"] == 25, ends


def test_a_fleet_stays_together_and_moves_to_where_it_is_cheaper() -> None:
    """Places do not reach each other. The cheap one is full at first; when it has room, the run
    moves there, once, and loses nothing."""
    west = Offer(1.5, "x/west", place="x/west")
    east = Offer(1.0, "x/east", place="x/east")
    fleet = combinators.together(policies.cheapest, saving=0.2, stay_s=300.0)
    moved = 0
    for seed in range(30):
        weather = FaultRates(
            offers=(east, west),
            available=0.5,
            spell_s=300.0,
            kills_per_h=0.5,
            calm_s=1500.0,
            crashes=0.002,
        )
        r = simulate(
            seed, fleet, RunSpec(1, 3, poll_s=5.0, exit_grace_s=60.0), weather, SimulatedTraining(total_steps=900)
        )
        assert (r.outcome, r.committed_step) == ("done", 900)
        moved += any(
            isinstance(s.fact, Decided) and "cheaper elsewhere" in s.fact.reason for s in r.facts
        )
    assert moved > 10
