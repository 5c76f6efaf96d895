"""`harness plan`: forecasts that hold what they say, from catalogs that need no network."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from harness.cli import plan_command
from harness.clouds.sky_broker import SkyError
from harness.controller.deadline_policy import deadline
from harness.core.estimates import CapacitySeen, Spell
from harness.core.world import (
    BadInput,
    CloudUnavailable,
    Offer,
    View,
    fill,
)
from harness.planner import catalogs, forecast_report, launch_plan
from harness.planner import forecast as forecasting
from harness.planner.forecast import (
    HIGH,
    LOW,
    ON_DEMAND_ONLY,
    PlanCandidate,
    PlannedRun,
    candidates,
    forecast,
    hindsight_usd,
    quantile,
    ranked,
    shapes,
)
from support.fleet_views import NODES, at_price

ROOT = Path(__file__).parents[2]
SPOT = f"{__name__}:spot_only"


def spot_only(view: View):
    """A light policy of one's own, by its dotted path."""
    return fill(view, [o for o in view.offers if o.spot], "spot")


spot_only.buys_on_demand = False  # type: ignore[attr-defined]


def offers(
    accelerator: str = "H100", usd: float = 1.0, zones: int = 2, speed: float = 1.0
) -> list[Offer]:
    spot = [
        Offer(
            usd * (1 + at / 10),
            f"aws/r{at}/z{at}/{accelerator}",
            True,
            accelerator,
            1,
            3 * usd,
            speed,
            f"aws/r{at}",
        )
        for at in range(zones)
    ]
    dear = f"aws/r0/{accelerator}/on-demand"
    return [*spot, Offer(3 * usd, dear, False, accelerator, 1, 3 * usd, speed, "aws/r0")]


def run(hours: float = 4.0, **more: object) -> PlannedRun:
    return PlannedRun(hours * 3600, **more)  # type: ignore[arg-type]


def test_on_demand_costs_in_a_zone_what_it_costs_there():
    near, far, dear = offers()
    offered = [near, dataclasses.replace(far, on_demand_usd_per_h=4.0), dear]
    [shape] = shapes(offered)
    job = forecasting.job_of(PlanCandidate(shape, 1, "deadline"), run())
    zones = forecasting.market(shape, job, np.random.default_rng(0), {})
    assert job.on_demand(zones) == [3.0, 4.0]


# ---- what is asked -------------------------------------------------------------------------------
def test_shapes_are_ranked_by_the_price_of_their_work():
    found = shapes([*offers("A100", 0.6, speed=0.3), *offers("H100", 1.0), *offers("L4", 0.1, 8)])
    assert [shape.name for shape in found] == ["L4:1", "H100:1", "A100:1"]
    assert len(found[0].spot) == forecasting.MOST_ZONES
    assert found[1].on_demand_usd_per_h == 3.0 and found[1].spot[0].usd_per_h == 1.0


def test_hours_follow_from_work_speed_shares_and_scaling():
    one = shapes(offers())[0]
    assert run(8).hours(one, 1) == 8 and run(8).hours(one, 4) == 2
    assert run(8, scaling=0.9).hours(one, 4) == pytest.approx(2 / 0.81)
    # 6 micro-batches on 4 workers: two of them wait for the others
    assert run(8, micro_batches=6).hours(one, 4) == pytest.approx(2 / 0.75)


def test_what_cannot_be_done_in_time_is_not_tried():
    found = shapes(offers())
    made = candidates(found, (1, 2, 4), ("deadline", ON_DEMAND_ONLY), run(8, deadline_h=5))
    assert {one.nodes for one in made} == {2, 4}
    assert [one.nodes for one in candidates(found, (1, 8), ("x",), run(8, micro_batches=4))] == [1]
    with pytest.raises(BadInput, match=r"undisturbed they take 1 x H100:1 8\.08 h.*more --nodes"):
        candidates(found, (1,), ("deadline",), run(8, deadline_h=5))


def test_a_shape_without_spot_is_planned_on_demand():
    dear = shapes([o for o in offers() if not o.spot])
    (only,) = candidates(dear, (1,), (SPOT, ON_DEMAND_ONLY), run())
    found = forecast(only, run(), 19)
    assert found.usd_at(0.5) == pytest.approx(3 * (4 + 1 / 12)) == found.on_demand_usd
    assert found.hours_at(LOW) == found.hours_at(HIGH) == pytest.approx(4 + 1 / 12)


# ---- what is answered ----------------------------------------------------------------------------
@pytest.mark.parametrize("n", [9, 19, 99])
def test_of_further_values_eight_tenths_lie_between_p10_and_p90(n: int):
    values = sorted(np.random.default_rng(n).standard_normal(n))
    low, high = values.index(quantile(values, LOW)), values.index(quantile(values, HIGH))
    assert (high - low) / (n + 1) == pytest.approx(0.8)  # gaps between values are equally likely
    assert quantile([1.0, math.inf, math.inf], 0.5) == math.inf


def test_the_same_seed_gives_the_same_answer_and_another_one_another():
    candidate = PlanCandidate(shapes(offers())[0], 1, SPOT)
    one, same, other = (forecast(candidate, run(), 9, seed) for seed in (1, 1, 2))
    assert one == same and one.usd != other.usd
    assert one.spot_share == 1.0 and one.hours_at(0.5) >= one.undisturbed_h


def test_history_of_a_market_that_is_hardly_open_makes_the_plan_longer():
    candidate = PlanCandidate(shapes(offers(zones=1))[0], 1, SPOT)
    name = candidate.shape.spot[0].name
    scarce = [Spell(at % 2 == 0, 1800.0 if at % 2 == 0 else 6 * 3600.0, True) for at in range(40)]
    plenty = [Spell(s.open, 6 * 3600.0 if s.open else 1800.0, True) for s in scarce]
    found = {
        kind: forecast(candidate, run(), 19, 0, {name: CapacitySeen(None, spells=tuple(spells))})
        for kind, spells in (("scarce", scarce), ("plenty", plenty))
    }
    assert found["scarce"].hours_at(0.5) > 3 * found["plenty"].hours_at(0.5)
    assert found["scarce"].losses > found["plenty"].losses


def test_the_best_keeps_the_risk_and_is_the_cheapest_of_those():
    shape = shapes(offers())[0]
    asked = run(6, deadline_h=7)
    spot, sure = (forecast(PlanCandidate(shape, 1, p), asked, 19) for p in (SPOT, ON_DEMAND_ONLY))
    assert spot.missed > 0.2 and sure.missed == 0
    assert ranked([spot, sure], asked, 0.05)[0] is sure
    assert ranked([sure, spot], asked, 1.0)[0] is spot
    poor = dataclasses.replace(asked, budget_usd=10.0)
    assert forecasting.risk(sure, poor) == 1.0
    assert forecasting.worth_more([spot, sure], asked, 0.05) == [sure, spot]


@pytest.mark.parametrize("nodes", [1, 3])
def test_nobody_pays_less_than_who_knows_the_market_in_advance(nodes):
    asked = run(6 * nodes, deadline_h=9)
    candidate = PlanCandidate(shapes(offers())[0], nodes, "deadline")
    least, played = hindsight_usd(candidate, asked, 5), forecast(candidate, asked, 5)
    assert played.missed == 0 and len(least) == 5
    assert all(0 < some <= usd + 0.01 for some, usd in zip(least, played.usd, strict=True))


def test_a_long_run_is_as_many_times_its_beginning():
    candidate = PlanCandidate(shapes(offers())[0], 4, SPOT)
    asked = run(6000 * 4, deadline_h=9000, budget_usd=25_000.0)
    share = forecasting.PLAYED_H / 6000
    long, part = forecast(candidate, asked, 19), forecast(candidate, asked.part(share), 19)
    assert long.undisturbed_h == 6000 and long.missed == part.missed
    assert long.usd == tuple(usd / share for usd in part.usd)
    assert all(h <= 9000 for h in long.hours) or long.missed > 0
    # a deadline that on demand just keeps is still kept
    tight = dataclasses.replace(asked, deadline_h=6000 + 1 / 12 + 1e-3, budget_usd=None)
    sure = forecast(PlanCandidate(candidate.shape, 4, ON_DEMAND_ONLY), tight, 9)
    assert sure.missed == 0 and sure.hours_at(0.5) == pytest.approx(6000 + 1 / 12)
    few = hindsight_usd(candidate, asked, 2)
    assert all(0 < least <= usd for least, usd in zip(few, long.usd, strict=False))
    shown = forecast_report.ShownPlan(asked, (long,), long, 0.05, ())
    assert "its first 75 h" in shown.to_json()["assumed"][-1]


@pytest.mark.proof
def test_the_beginning_of_a_long_run_tells_about_what_the_whole_would(monkeypatch):
    candidate = PlanCandidate(shapes(offers())[0], 4, SPOT)
    asked = run(600 * 4, deadline_h=1200)
    part = forecast(candidate, asked, 19)
    monkeypatch.setattr(forecasting, "PLAYED_H", 1e9)
    whole = forecast(candidate, asked, 19)
    assert part.usd_at(0.5) == pytest.approx(whole.usd_at(0.5), rel=0.1)
    assert part.hours_at(0.5) == pytest.approx(whole.hours_at(0.5), rel=0.15)
    assert whole.hours_at(HIGH) - whole.hours_at(LOW) < part.hours_at(HIGH) - part.hours_at(LOW)


# ---- shown ---------------------------------------------------------------------------------------
def shown() -> forecast_report.ShownPlan:
    asked = run(6, deadline_h=9)
    shape = shapes(offers())[0]
    found = [forecast(PlanCandidate(shape, 1, p), asked, 9) for p in (SPOT, ON_DEMAND_ONLY)]
    rows = ranked(found, asked, 0.05)
    sources = ("prices: <b>of yesterday</b>",)
    return forecast_report.ShownPlan(
        asked, tuple(rows), rows[0], 0.05, sources, ("harness", "x"), 0, (rows[0].usd[0] / 2,)
    )


def test_a_plan_is_told_in_a_table_and_drawn_on_a_page(tmp_path):
    told = shown()
    for width in (80, 140):
        console = Console(width=width, record=True, file=io.StringIO())
        forecast_report.show(told, console)
        text = console.export_text()
        assert "1 x H100:1" in text and "launch  harness x" in text and "assumed" in text
        assert " x the bill of whoever knows the market in advance" in text
        assert ("●" in text) == (width == 140)
        table = text.partition("median (")[0].splitlines()
        assert all(len(line.rstrip()) <= width for line in table)
    pytest.importorskip("matplotlib")
    page, png = forecast_report.write(told, str(tmp_path / "plan"))
    assert page.read_text().count("<svg") == 4 and "<b>of yesterday" not in page.read_text()
    assert png.read_bytes().startswith(b"\x89PNG")


def test_a_plan_says_how_often_nodes_are_taken():
    told = shown()
    best = dataclasses.replace(told.rows[0], losses=2.0, losses_per_h=0.25)
    words = forecast_report.sentences(dataclasses.replace(told, best=best))
    assert "        2 nodes are taken, one in 4 node-hours on spot" in words


def test_where_the_risk_cannot_be_kept_it_says_so():
    told = dataclasses.replace(shown(), best=None, launch=())
    assert "None of them keeps the risk below 5.0 %" in forecast_report.sentences(told)[0]
    assert told.to_json()["best"] is None


def test_the_risk_that_is_shown_is_the_budgets_too():
    told = shown()
    dear = {row.candidate.policy: row for row in told.rows}[ON_DEMAND_ONLY]
    assert told.risk_text(dear) == "0 %" and not told.is_risky(dear)
    poor = dataclasses.replace(
        told, run=dataclasses.replace(told.run, deadline_h=None, budget_usd=dear.usd_at(0.5) - 1)
    )
    assert poor.risk_text(dear) == "100 %" and poor.is_risky(dear)
    row = next(r for r in poor.to_json()["candidates"] if r["policy"] == ON_DEMAND_ONLY)
    assert (row["risk"], row["missed"]) == (1.0, 0.0)
    console = Console(width=140, record=True, file=io.StringIO())
    forecast_report.show(poor, console)
    (line,) = [one for one in console.export_text().splitlines() if " on_demand " in one]
    assert "100 %" in line
    asked_nothing = dataclasses.replace(told, run=dataclasses.replace(told.run, deadline_h=None))
    assert asked_nothing.risk_text(dear) == "-"


# ---- catalogs ------------------------------------------------------------------------------------
def test_the_own_catalog_of_this_computer_comes_first_then_the_one_that_ships(tmp_path):
    assert catalogs.catalog("", tmp_path).ships
    own = tmp_path / ".sky/catalogs/v8/aws/vms.csv"
    own.parent.mkdir(parents=True)
    own.write_text("InstanceType\n")
    found = catalogs.catalog("", tmp_path)
    assert not found.ships and set(found.files) == {"aws"} and str(tmp_path) in found.what
    assert catalogs.catalog("shipped", tmp_path).ships
    assert set(catalogs.catalog(str(tmp_path / ".sky/catalogs/v8"), tmp_path).files) == {"aws"}
    with pytest.raises(BadInput, match=r"wanted a folder that holds CLOUD/vms\.csv"):
        catalogs.catalog(str(tmp_path), tmp_path)
    with pytest.raises(BadInput, match="has nothing of gcp; it has aws"):
        found.only(["AWS", "gcp"])


def test_skypilot_finds_a_catalog_that_was_laid_out_and_would_not_download_it(tmp_path):
    found = catalogs.catalog("shipped", tmp_path).only(["aws", "lambda"])
    found.lay_out(tmp_path, "v8")
    files = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()}
    there = ("aws/vms.csv", "lambda/vms.csv", "common/accelerators.csv")
    assert files == {f".sky/catalogs/v8/{name}" for name in there}  # and no checksums beside them


def test_a_task_that_the_catalog_has_nothing_for_is_told_what_to_do(tmp_path):
    found = catalogs.catalog("shipped", tmp_path)

    def refusing(method: str, timeout_s: float, **arguments: object) -> object:
        raise SkyError("LookupError", "no X9000 anywhere")

    def silent(method: str, timeout_s: float, **arguments: object) -> object:
        raise CloudUnavailable("no answer")

    with pytest.raises(BadInput, match=r"X9000 anywhere\. Loosen `resources`, name another --cata"):
        catalogs.offers_of(refusing, Path("t.yaml"), {}, found)
    with pytest.raises(CloudUnavailable, match="--catalog shipped is read without any network"):
        catalogs.offers_of(silent, Path("t.yaml"), {}, found)
    with pytest.raises(BadInput, match="it lists no such machine"):
        catalogs.offers_of(lambda *_, **__: [], Path("t.yaml"), {}, found)


def test_a_cloud_that_cannot_be_asked_here_is_left_out(tmp_path):
    answer = {
        "name": "aws/r/z/t",
        "place": "aws/r",
        "usd_per_h": 1.0,
        "on_demand_usd_per_h": 3.0,
        "spot": True,
        "accelerator": "H100",
        "gpus": 1,
    }

    def one_is_missing(method: str, timeout_s: float, **arguments: object) -> object:
        if "nebius" in arguments["clouds"]:  # type: ignore[operator]
            raise SkyError("ModuleNotFoundError", "nebius")
        return [answer] if "aws" in arguments["clouds"] else []  # type: ignore[operator]

    found = catalogs.catalog("shipped", tmp_path)
    (offer,) = catalogs.offers_of(one_is_missing, Path("t.yaml"), {}, found)
    assert offer.name == "aws/r/z/t"


# ---- the command ---------------------------------------------------------------------------------
@pytest.mark.skipif(importlib.util.find_spec("sky") is None, reason="SkyPilot is not installed")
@pytest.mark.xdist_group("sky")
def test_a_plan_from_the_catalog_that_ships_without_network_or_account(tmp_path):
    """The whole command, with SkyPilot's own optimizer, in a home that has nothing."""
    task = tmp_path / "task.yaml"
    task.write_text(
        "resources: {use_spot: true, any_of: [{accelerators: 'H100:8'}, {accelerators: 'T4:1'}]}\n"
        "envs: {GLOBAL_BATCH: 64, MICRO_BATCH: 1}\nrun: exec harness run -- train.py\n"
    )
    words = "plan task.yaml --step-time 2 --steps 9000 --measured-on H100:8 --deadline 12h --json"
    draws = importlib.util.find_spec("matplotlib") is not None
    more = f"--nodes 1 --markets 19 --jobs 1 --policy {SPOT} --policy on_demand"
    more += " --plot plan.html" * draws
    dead = "http://127.0.0.1:9"  # who asks a network is refused
    env = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent), *sys.path[1:]]),
        "HTTPS_PROXY": dead,
        "HTTP_PROXY": dead,
    }
    done = subprocess.run(
        [sys.executable, "-m", "harness.cli.command", *words.split(), *more.split()],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["best"]["accelerator"] == "H100" and told["best"]["policy"] == SPOT
    assert 40 < told["best"]["usd"]["p10"] <= told["best"]["usd"]["median"] < 120
    assert told["best"]["usd"]["median"] < told["best"]["on_demand_usd"]
    assert any("that ships" in source for source in told["sources"])
    assert told["launch"][:3] == ["harness", "launch", "task.yaml"]
    assert not draws or (tmp_path / "plan.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--nodes", "4:2"], "LOW:HIGH"),
        (["--deadline", "soon"], "36h"),
        (["--plot", "/dev/null/x.html"], "--plot"),
    ],
)
def test_wrong_flags_are_said_at_once(words: list[str], told: str, tmp_path, capsys):
    from harness.cli.command import main

    with pytest.raises(SystemExit) as ended:
        main(["plan", "no-such-task.yaml", *words])
    assert ended.value.code == 2 and told in capsys.readouterr().err


def test_a_plan_says_that_a_launch_would_wait_and_until_when():
    view = at_price(1.8)
    found = launch_plan.make(view.offers, deadline, (1, NODES), view=view)
    assert found.choice is None and "cheaper in time" in found.why and "USD" in found.why
    assert launch_plan.make(view.offers, deadline, (1, NODES)).choice is not None  # nothing is known


def test_a_plan_says_how_far_it_is(capsys):
    """On stderr, so that --json stays JSON; a line at once, then one every few seconds."""
    ticks = iter(range(0, 100, 3))
    told = plan_command._told_of(iter("abcde"), 5, "20 markets", now=lambda: float(next(ticks)))
    assert list(told) == list("abcde")
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "harness plan: 5 choices, each in 20 markets",
        "harness plan: 2 of 5 are forecast",
        "harness plan: 4 of 5 are forecast",
    ]
