"""`harness market simulate --trace`: the table, its JSON, what is refused before anything is computed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from harness.cli.command import main
from harness.cli.simulate import _listed
from harness.core.world import BadInput
from harness.planner import policy_table
from harness.planner.market_nodes import ReplayJob
from harness.planner.optimum import WorkToDo, fleet_optimum_usd, optimum
from harness.planner.traces import ZoneTrace

KEYS = {"usd", "optimum_usd", "on_demand_usd", "finish_h", "missed", "windows"}


def traces(folder: Path, nodes: int = 1, ticks: int = 120) -> list[str]:
    rng, paths = np.random.default_rng(3), list[str]()
    for name in ("a", "b"):
        data = np.repeat(rng.integers(0, nodes + 1, ticks // 6), 6)
        data[:12] = nodes
        path = folder / f"{name}.json"
        body = {"metadata": {"gap_seconds": 600}, "data": data.tolist()}
        path.write_text(json.dumps(body))
        paths.append(str(path))
    return paths


def simulate(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["market", "simulate", *words])
    return int(ended.value.code or 0)


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_line_for_each_deadline_and_policy(tmp_path: Path, capsys):
    words = ("--work", "6h", "--deadline", "7h,1.5x", "--starts", "2", "--jobs", "1", "--json")
    assert simulate("--trace", traces(tmp_path)[0], *words) == 0
    found = lines(capsys)
    assert [(one["deadline_h"], one["policy"]) for one in found] == [
        (deadline, name)
        for deadline in (7.0, 9.0)
        for name in ("deadline", "uniform_progress", "greedy", "on_demand")
    ]
    for one in found:
        assert one.keys() >= KEYS and one["windows"] == 2 and one["missed"] == 0
        assert one["usd"] >= one["optimum_usd"] - 0.2 and one["zones"] == ["a"]
        assert one["on_demand_usd"] == pytest.approx((6 + 1 / 6) * 3.06)
    assert found[3]["usd"] == pytest.approx(found[3]["on_demand_usd"], abs=1e-3)


def test_files_are_zones_of_one_market_or_markets_of_their_own(tmp_path: Path, capsys):
    paths = traces(tmp_path)
    words = ("--work", "5h", "--deadline", "6h", "--starts", "1", "--policy", "greedy", "--json")
    assert simulate("--trace", *paths, *words) == 0
    assert simulate("--trace", str(tmp_path), "--each", *words) == 0
    together, a, b = lines(capsys)
    assert together["zones"] == ["a", "b"] and (a["traces"], b["traces"]) == ("a", "b")
    assert together["optimum_usd"] <= min(a["optimum_usd"], b["optimum_usd"]) + 1e-6


def test_the_table_says_what_it_was_made_of(tmp_path: Path, capsys):
    pytest.importorskip("matplotlib")
    words = ["--work", "5h", "--deadline", "6h", "--starts", "1", "--policy", "greedy,on_demand"]
    words += ["--polarity", "available", "--changeover", "5m", "--plot", str(tmp_path / "x.html")]
    assert simulate("--trace", *traces(tmp_path), "--each", *words) == 0
    told = " ".join(capsys.readouterr().out.split())
    for what in ("changeover 300 s", "spot 0.9731", "on demand 3.06", "1 means available"):
        assert what in told
    assert "all greedy" in told and "0/2" in told
    assert (tmp_path / "x.html").read_text().startswith("<!")


def test_many_nodes_against_the_best_fixed_number(tmp_path: Path, capsys):
    paths = traces(tmp_path, nodes=3)
    words = ("--work", "4h", "--deadline", "6h", "--starts", "2", "--nodes", "1:3", "--json")
    policies = ("--policy", "uniform_progress,best_fixed", "--jobs", "1")
    assert simulate("--trace", paths[0], *words, *policies) == 0
    led, fixed = lines(capsys)
    assert fixed["policy"] in ("fixed_2", "fixed_3") and fixed["nodes"] == [1, 3]
    assert led["optimum_usd"] == fixed["optimum_usd"] <= min(led["usd"], fixed["usd"]) + 0.1


def test_prices_of_zones_and_of_pairs_are_those_of_policies_and_of_the_optimum(
    tmp_path: Path, capsys
):
    paths = traces(tmp_path)
    words = ("--work", "5h", "--deadline", "6h", "--starts", "1", "--jobs", "1", "--json")
    words += ("--policy", "on_demand,deadline", "--on-demand-usd-per-h", "b=2", "--trace", *paths)
    assert simulate(*words) == 0
    assert simulate(*words, "--move-usd", "4", "--move-usd", "*:b=0.1,b:a=0.2") == 0
    dear, free, again, moving = lines(capsys)
    assert dear["zones_on_demand_usd_per_h"] == {"a": 3.06, "b": 2.0}
    assert dear["usd"] == again["usd"] == pytest.approx((5 + 1 / 6) * 2, abs=1e-3)
    assert free["on_demand_usd"] == dear["usd"] > free["usd"] >= free["optimum_usd"]
    assert moving["moves_usd"] == [["a", "b", 0.1], ["b", "a", 0.2]] and moving["move_usd"] == 4.0
    assert free["optimum_usd"] <= moving["optimum_usd"] <= moving["usd"] + 1e-3
    assert moving["moves"] > 0


def test_lateness_has_a_price_in_bills_and_in_the_optimum(tmp_path: Path, capsys):
    """Spot is back after the deadline: to wait for it is worth what on demand costs more."""
    path = tmp_path / "a.json"
    data = [1] * 12 + [0] * 30 + [1] * 60
    path.write_text(json.dumps({"metadata": {"gap_seconds": 600}, "data": data}))
    words = ("--trace", str(path), "--work", "5h", "--deadline", "6h", "--starts", "1", "--json")
    words += ("--policy", "by_deadline(best_value),on_demand", "--jobs", "1")
    assert simulate(*words) == 0
    for usd in ("0.5", "50"):
        assert simulate(*words, "--usd-per-hour-late", usd) == 0
    found = lines(capsys)
    (kept, _), (cheap, dear), (again, _) = found[:2], found[2:4], found[4:]
    assert kept["missed"] == again["missed"] == 0 and kept["usd"] == again["usd"]
    assert kept["optimum_usd"] == again["optimum_usd"]
    # spot from 0 to 2 h and from 7 h on, with changeovers of 10 min
    late_h = 7 + 1 / 6 + 5 - 11 / 6 - 6
    assert cheap["missed"] == 1 and cheap["late_usd"] == pytest.approx(0.5 * late_h, abs=0.01)
    assert cheap["usd"] == pytest.approx(cheap["optimum_usd"], abs=0.01)
    assert cheap["usd"] < kept["usd"] and dear["late_usd"] == 0


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"on-demand-usd-per-h": "west=2"}, "nothing is so named; found a"),
        ({"on-demand-usd-per-h": "a=0"}, "a finite number above 0"),
        ({"move-usd": "a:b=2"}, "none, as there is one zone"),
        ({"move-usd": "much"}, "found 'much'"),
        ({"deadline": "5h"}, "wanted a deadline after that"),
        ({"deadline": "40h", "work": "30h"}, "does not fit into a trace of 20.0 h"),
        ({"policy": "gredy"}, "there is no policy 'gredy'"),
        ({"policy": "gredy"}, "skypilot_failover"),
        ({"policy": "fixed_few"}, "wanted a number of nodes"),
        ({"policy": "fixed_0"}, "wanted a number of nodes"),
        ({"deadline": "soon"}, "--deadline"),
        ({"deadline": "ax"}, "1.25x of --work"),
        ({"work": "0h"}, "wanted a time above 0"),
        ({"nodes": "3:1"}, "1 <= LOW <= HIGH"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, capsys, given: dict[str, str], told: str):
    asked = {"work": "6h", "deadline": "7h", **given}
    words = [word for name, value in asked.items() for word in (f"--{name}", value)]
    assert simulate("--trace", traces(tmp_path)[0], *words) == 2
    assert told in capsys.readouterr().err


def test_a_file_that_is_none_is_refused(tmp_path: Path, capsys):
    assert simulate("--trace", str(tmp_path / "none.json")) == 2
    (tmp_path / "empty").mkdir()
    assert simulate("--trace", str(tmp_path / "empty")) == 2
    assert "none.json" in capsys.readouterr().err


def test_commas_in_parentheses_are_a_policys_own():
    assert _listed(("at_most(best_value, usd_per_h=2),greedy", "x , greedy")) == (
        "at_most(best_value, usd_per_h=2)",
        "greedy",
        "x",
    )


def test_windows_are_spread_over_the_trace():
    zone = ZoneTrace("a", 600.0, np.ones(100, int))
    assert policy_table.beginnings([zone], 10.0, 5) == [0, 10, 20, 30, 40]
    assert policy_table.beginnings([zone], 10.0, 1) == [0]
    assert policy_table.beginnings([zone], 16.5, 9) == [0, 1]
    with pytest.raises(BadInput, match="does not fit"):
        policy_table.beginnings([zone], 17.0, 1)


def test_the_fixed_number_that_cannot_be_in_time_is_not_tried():
    job = ReplayJob(4, 6, nodes=(1, 4))
    assert policy_table.expanded(("best_fixed", "greedy"), job) == ("fixed_3", "fixed_4", "greedy")
    assert policy_table.fixed_job(job, 2).work == job.work


def test_the_least_bill_of_a_fleet_is_that_of_all_plans():
    rng = np.random.default_rng(4)
    for _ in range(4):
        rooms = rng.integers(0, 4, 7).tolist()
        work = int(rng.integers(3, 12))
        zone = ZoneTrace("a", 3600.0, np.array(rooms))
        found = fleet_optimum_usd([zone], 0, WorkToDo(work, 7, 3600.0, 1.0, 3.0), 3)
        assert found == pytest.approx(_least(tuple(rooms), work))
    one = ZoneTrace("a", 600.0, rng.integers(0, 2, 90))
    alone = WorkToDo(6, 9, 900.0, 1.0, 3.0)
    assert fleet_optimum_usd([one], 0, alone, 1) == pytest.approx(optimum([one], 0, alone).usd)
    with pytest.raises(BadInput, match="even on demand"):
        fleet_optimum_usd([one], 0, WorkToDo(30, 9, 900.0, 1.0, 3.0), 3)


def _least(rooms: tuple[int, ...], work: int, nodes: int = 3) -> float:
    """By trying how many nodes are on spot and on demand in each tick; a begin takes one tick."""
    best = {(0, 0, work): 0.0}
    done = float("inf")
    for room in rooms:
        after: dict[tuple[int, int, int], float] = {}
        for (spot, dear, left), usd in best.items():
            for s in range(min(room, nodes) + 1):
                for d in range(nodes - s + 1):
                    state = (s, d, max(0, left - min(spot, s) - min(dear, d)))
                    after[state] = min(after.get(state, done), usd + s + 3 * d)
        best = {k: usd for k, usd in after.items() if k[2]}
        done = min([done, *(usd for k, usd in after.items() if not k[2])])
    return done
