"""The plan of a task, as SkyPilot's own optimizer ranks its offers, offline."""

import dataclasses
import importlib.util
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from harness.clouds.sky_task import load
from harness.clouds.skypilot import SkyPilotCloud
from harness.controller import policies
from harness.core import world
from harness.planner import launch_plan
from support.sky_catalog import CLOUDS

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("sky") is None, reason="SkyPilot is not installed"),
    pytest.mark.xdist_group("sky"),
]


def shown(made):
    out = io.StringIO()
    launch_plan.show(made, Console(file=out, width=200))
    return out.getvalue()


def test_the_plan_says_what_why_and_for_how_much(sky, tmp_path):
    task = load(
        ROOT / "sky_tasks" / "train.yaml",
        {"RUN": "x", "MICRO_BATCH": "2", "GLOBAL_BATCH": "512"},
        use_skypilot=False,
    )
    cloud = SkyPilotCloud(task, "x", sky, clouds=CLOUDS)
    made = launch_plan.make(
        cloud.offers(),
        policies.best_value,
        (1, 8),
        no_market=cloud.no_market,
        micro_batches=launch_plan.micro_batches(None, task.envs),
    )
    assert (made.choice.place, made.choice.usd_per_h, made.choice.gpus) == (
        "aws/eu-south-2",
        6.836,
        8,
    )
    assert made.shares(1) == (32,) * 8 and sum(made.shares(8)) == 256
    # 8 workers of which 4 hold one copy of the model: two replicas; of 3, two wait
    for ranks, shares in ((4, (128, 128)), (3, (128, 128)), (16, None)):
        split = dataclasses.replace(made, replica_ranks=ranks)
        assert split.shares(1) == shares
        assert ("too few workers for a replica of 16" in shown(split)) == (shares is None)
    assert "accumulation 128, replicas of 4 workers" in shown(
        dataclasses.replace(made, replica_ranks=4)
    )
    assert len(made.no_market) == 2 and made.usd_per_step(made.choice) is None
    prices = [world.usd_per_work(o) for o in made.offers]
    assert prices == sorted(prices)
    timed = launch_plan.make(
        cloud.offers(),
        policies.best_value,
        (1, 8),
        measured=launch_plan.measured_speed([(9.0, 4), (0.5, 16), (0.7, 16)], 1.0),
    )
    # 16 workers of speed 1 for 0.6 s
    assert timed.usd_per_step(timed.choice) == pytest.approx(6.836 / 8 / 3600 * 16 * 0.6)
    assert json.dumps(made.to_json())


def test_a_fleet_is_offered_no_nodes_that_do_not_reach_each_other(sky, tmp_path):
    path = tmp_path / "task.yaml"
    path.write_text("name: t\nresources: {accelerators: {H100: 1, A100-80GB: 1}}\nrun: train\n")
    task = load(path, {}, use_skypilot=False)
    alone = SkyPilotCloud(task, "x", sky, clouds=("runpod", "nebius"))
    fleet = SkyPilotCloud(task, "x", sky, clouds=("runpod", "nebius"), fleet=True)
    kept = {o.name.split("/")[0] for o in fleet.offers()}
    assert {o.name.split("/")[0] for o in alone.offers()} == {"runpod", "nebius"}
    assert kept == {"nebius"} and fleet.apart == alone.apart and fleet.apart
    made = launch_plan.make(fleet.offers(), policies.cheapest, (1, 4), apart=fleet.apart)
    said = f"{len(fleet.apart)} left out, whose nodes do not reach each other: runpod/"
    assert said in shown(made) and "behind NAT" in shown(made)
    assert list(made.to_json()["apart"]) == list(fleet.apart)
