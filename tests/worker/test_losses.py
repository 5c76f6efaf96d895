"""How often a run snapshots: what it has seen of losses, and what follows from that."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest

from harness.core.loss_rates import (
    ASSUMED_S,
    LEAST_S,
    MEMORY_S,
    MOST_PLACES,
    MOST_S,
    LossesSeen,
    RunLosses,
    daly,
)
from harness.worker.snapshot_timer import Interval, Rhythm

HOUR = 3600.0
PATH = Path(__file__).parents[2] / "benchmarks" / "intervals.py"


def next_world(before, why, seconds, place="p", nodes=1):
    """The world that goes on from a snapshot that was made for `why`, through JSON."""
    data = json.loads(json.dumps({"losses": before.to_data(why, seconds)}))
    return RunLosses(place, nodes).resumed(data)


def test_while_nothing_was_seen_a_loss_comes_every_hour():
    assert RunLosses().here.between_s(1) == RunLosses().here.between_s(64) == ASSUMED_S
    assert RunLosses().resumed(None) == RunLosses()


def test_a_world_whose_newest_snapshot_was_no_farewell_was_lost():
    calm = RunLosses("p")
    for why in ("notice", "drain", "resize", "stop", "final"):
        calm = next_world(calm, why, HOUR)
    assert calm.here.losses == 0 and calm.here.node_s == pytest.approx(5 * HOUR, rel=0.1)
    assert calm.here.between_s(1) > 5 * HOUR
    rough = calm
    for why in ("interval", "own", "request"):
        rough = next_world(rough, why, 600.0)
    assert rough.here.losses == pytest.approx(3, rel=0.05)
    assert rough.here.between_s(1) < 2 * HOUR


def test_a_world_whose_state_nodes_have_kept_lost_no_work():
    data = {"losses": RunLosses("p").to_data("interval", HOUR)}
    assert RunLosses("p").resumed(data).here.losses == 1
    assert RunLosses("p").resumed(data, survived=True).here.losses == 0
    made, now = rhythm()
    now.s = 100.0
    made.begin(age_s=60.0)  # a state in memory, behind a snapshot that is a minute old
    usual_s = made.interval_s()
    assert usual_s > 70.0 and not made.due(1)
    now.s += usual_s - 59.0
    assert made.due(2)


def test_places_are_told_apart_and_many_nodes_are_lost_more_often():
    run = next_world(RunLosses("west"), "drain", 8 * HOUR, "east")
    assert run.here == LossesSeen() and run.seen["west"].node_s > 6 * HOUR
    back = next_world(run, "interval", 10.0, "west", nodes=4)  # it was lost in the east
    assert back.seen["east"].losses == 1 and back.here.losses == 0
    assert ASSUMED_S < back.here.between_s(4) < back.here.between_s(1)


def test_what_was_seen_fades():
    rough = LossesSeen(10.0, 2 * HOUR)
    later = rough.later(3 * MEMORY_S, 2)
    assert later.losses == pytest.approx(0.5, abs=0.01)
    assert later.node_s == pytest.approx(2 * MEMORY_S, rel=0.06)
    assert LossesSeen().later(1e9, 2).node_s == 2 * MEMORY_S  # bounded, however long a run is
    assert LossesSeen().later(60.0, 3).node_s == pytest.approx(180.0, rel=1e-3)


def test_what_travels_is_bounded():
    run = RunLosses()
    for n in range(3 * MOST_PLACES):
        run = next_world(run, "interval", 100.0, f"place {n}")
    said = run.to_data("interval", 5.0)["seen"]
    assert len(said) == MOST_PLACES and list(said)[-1] == run.place


@pytest.mark.parametrize(
    "said",
    [
        None, 7, [], {}, {"seen": 3}, {"seen": {"p": 1}}, {"seen": {"p": [1]}},
        {"seen": {"p": [1, "x"]}}, {"seen": {"p": [-1, 5]}}, {"seen": {"p": [float("nan"), 5]}},
        {"seen": {"p": [1, True]}},
    ],
)  # fmt: skip
def test_what_others_wrote_there_is_as_nothing(said):
    assert RunLosses("p", 2).resumed({"losses": said}) == RunLosses("p", 2)
    assert RunLosses("p", 2).resumed(said) == RunLosses("p", 2)


def test_a_loss_of_no_known_place_or_reason_counts_here():
    run = RunLosses().resumed({"losses": {"seen": {}, "why": 5, "place": None}})
    assert run.here.losses == 1


# ---- the interval --------------------------------------------------------------------------------
class At:
    def __init__(self):
        self.s = 0.0

    def __call__(self):
        return self.s


def rhythm(losses=RunLosses(), interval=Interval(), cost_s=2.0, commit_s=1.0, data=None):
    now = At()
    made = Rhythm(interval, losses, now)
    made.resumed(data)
    made.stall_s, made.commit_s = cost_s, commit_s
    return made, now


def test_a_calm_place_gets_longer_intervals_but_not_before_a_world_is_as_old():
    calm = {"losses": RunLosses().to_data("drain", 20 * HOUR)}
    made, now = rhythm(data=calm)
    usual_s, best_s = daly(2.0, ASSUMED_S), daly(2.0, made.between_losses_s)
    assert best_s > 3 * usual_s and made.interval_s() == usual_s
    now.s = 2 * usual_s
    assert made.interval_s() == usual_s
    made.begin()  # a snapshot
    assert made.interval_s() == 2 * usual_s  # half of what this world has done, at most, is lost
    now.s = 10 * usual_s
    made.begin()
    assert made.interval_s() == pytest.approx(best_s, rel=0.02)


def test_a_rough_place_gets_shorter_ones_at_once():
    run = RunLosses()
    for _ in range(8):
        run = next_world(run, "interval", 300.0, "")
    made, _ = rhythm(data={"losses": run.to_data("interval", 300.0)})
    assert made.between_losses_s < 0.25 * HOUR
    assert made.interval_s() == daly(2.0, made.between_losses_s) < 0.5 * daly(2.0, ASSUMED_S)


def test_what_a_snapshot_costs_is_its_stall_and_the_slower_steps_beside_it():
    made, _ = rhythm(cost_s=0.5)
    assert made.cost_s == 0.5
    for commit_s, slowdown in ((10.5, 0.1), (10.5, 0.3), (99.0, -0.5)):
        made.landed(commit_s, slowdown)
    assert made.cost_s == pytest.approx(0.5 + 1.0) and made.commit_s == 99.0
    assert made.interval_s() == 297.0  # uploads never overlap


def test_what_took_its_time_on_purpose_makes_no_interval_longer():
    made, _ = rhythm(commit_s=8.0)
    made.pace = 1e6
    made.landed(20.0, 0.0, within_s=30.0)  # paced
    assert made.commit_s == 8.0
    made.landed(5.0, 0.0, within_s=30.0)
    assert made.commit_s == 5.0  # it can be as fast as that
    made.landed(40.0, 0.0, within_s=30.0)  # as fast as it could, and late
    assert made.commit_s == 40.0 and made.interval_s() == 120.0
    made.landed(400.0, 0.0)
    assert made.interval_s() == 1200.0


def test_until_a_pace_is_known_a_sending_has_time_and_costs_what_nobody_could_tell():
    made, _ = rhythm(cost_s=0.0, commit_s=0.0)
    assert made.interval_s() == 10.0 and made.within_s == 30.0
    made.landed(24.0, 0.0, within_s=30.0)
    assert made.cost_s == pytest.approx(0.48) and made.interval_s() == daly(0.48, ASSUMED_S)
    made.pace = 1e6
    for _ in range(3):
        made.landed(24.0, 0.0, within_s=30.0)
    assert made.cost_s == 0.0 and made.interval_s() == 10.0 and made.within_s == 5.0
    every, _ = rhythm(interval=Interval(every_s=10.0))
    assert every.within_s == 5.0  # who says how often says for how long


def test_what_is_felt_beside_a_paced_snapshot_counts():
    made, _ = rhythm(cost_s=0.5)
    made.pace = 1e6
    for _ in range(5):
        made.landed(100.5, 0.02, within_s=200.0)
    assert made.cost_s == pytest.approx(2.5)
    assert made.interval_s() == daly(2.5, ASSUMED_S)


@pytest.mark.parametrize(("free_s", "slow"), [(60.0, 0.5), (300.0, 0.5), (300.0, 0.05), (0.0, 0.0)])
def test_it_finds_an_interval_in_which_snapshots_are_not_felt(free_s, slow):
    """Of a snapshot that is felt the more, the less time it has, up to `free_s`."""
    made, now = rhythm(cost_s=0.005, commit_s=0.0)
    made.pace = 1e6
    intervals, lost_s = [], 0.0
    for _ in range(200):
        interval_s, within_s = made.interval_s(), made.within_s
        felt = slow * max(0.0, 1.0 - interval_s / free_s) if free_s else 0.0
        felt = felt if felt > 0.02 else 0.0
        made.landed(0.8 * within_s, felt, within_s)
        intervals.append(interval_s)
        lost_s += felt * 0.8 * within_s
        now.s += interval_s
        made.begin()
    late = intervals[50:]
    dearest_s = slow * 0.1 * free_s + 0.005
    assert max(late) <= max(1.5 * free_s, daly(dearest_s, made.between_losses_s), LEAST_S)
    # by no more than work that would be lost, if a loss came every hour as is assumed
    assert lost_s <= sum(s * s for s in intervals) / (2 * ASSUMED_S) + 5.0
    if slow > 0.1 and free_s < 100:
        assert lost_s < 0.01 * now.s and min(late) > 0.8 * free_s


@pytest.mark.parametrize(
    "said",
    [
        None, [], {}, {"pace": 7}, {"pace": {"where": "2 file:///run"}},
        {"pace": {"where": "2 file:///run", "nbytes_per_s": "x"}},
        {"pace": {"where": "2 file:///run", "nbytes_per_s": float("nan")}},
        {"pace": {"where": "2 file:///run", "nbytes_per_s": -1}},
        {"pace": {"where": "3 file:///run", "nbytes_per_s": 5e6}},
        {"pace": {"where": "2 s3://other/run", "nbytes_per_s": 5e6}},
    ],
)  # fmt: skip
def test_a_pace_of_another_world_or_store_or_nonsense_is_none(said):
    made, _ = rhythm()
    made.resumed(said, "2 file:///run")
    assert made.pace == 0.0


def test_a_pace_goes_on_in_the_same_world():
    made, _ = rhythm()
    made.resumed(None, "2 file:///run")
    made.pace = 5e6
    data = json.loads(json.dumps({"pace": made.pace_data()}))
    again, _ = rhythm()
    again.resumed(data, "2 file:///run")
    assert again.pace == 5e6


def test_intervals_are_bounded_and_those_that_people_name_are_kept():
    rough, calm = LossesSeen(1e6, 0.0), LossesSeen(0.0, 1e9)
    made, _ = rhythm(RunLosses(seen={"": rough}), commit_s=0.0)
    made._losses = RunLosses(seen={"": rough})
    assert made.interval_s() == LEAST_S
    made, now = rhythm(cost_s=60.0)
    made._losses, now.s = RunLosses(seen={"": calm}), 1e6
    made.begin()
    assert made.interval_s() == MOST_S
    made, now = rhythm(interval=Interval(every_s=7.0))
    assert made.interval_s() == 7.0 and made.between_losses_s == 0.0
    assert rhythm(interval=Interval(every_steps=3))[0].due(6)


@pytest.mark.parametrize(("mean_h", "least_gain"), [(0.1, 0.05), (1.0, -0.01), (24.0, 0.005)])
def test_learning_loses_less_than_an_assumed_hour(mean_h, least_gain):
    spec = importlib.util.spec_from_file_location("intervals", PATH)
    intervals = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(intervals)
    assumed, learned = (
        sum(intervals.overhead(way, mean_h * HOUR, 5.0, 15.0, 30 * HOUR, n) for n in range(3)) / 3
        for way in ("assumed", "learned")
    )
    assert assumed - learned > least_gain, (assumed, learned)


def test_worlds_say_what_they_know_as_they_are():
    run = dataclasses.replace(RunLosses("p", 2), seen={"p": LossesSeen(1.0, 7.0)})
    assert run.to_data("interval", 0.0) == {
        "place": "p",
        "why": "interval",
        "seen": {"p": [1.0, 7.0]},
    }
