"""Every file in sky_tasks/ is what SkyPilot takes, and its optimizer ranks it by real spot prices,
offline.

SkyPilot runs in its own process, as it does for `harness launch`, with a HOME that holds rows of
the real catalog (tests/fixtures/catalog, SOURCE.txt says from where) and no credentials. What must come
out is computed here from those rows.
"""

import csv
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from harness.clouds.sky_broker import SkyError
from harness.clouds.sky_task import load
from harness.clouds.skypilot import has_spot_market, to_offer
from harness.core import world
from harness.core.world import DRAINED, UNFIT, BadInput
from support.sky_catalog import CATALOG, CLOUDS, SECONDS

ROOT = Path(__file__).parents[2]
POOL = ROOT / "sky_tasks" / "pool.yaml"  # no task: test_pools_and_groups.py
TASKS = sorted({*(ROOT / "sky_tasks").glob("*.yaml")} - {POOL})

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("sky") is None, reason="SkyPilot is not installed"),
    pytest.mark.xdist_group("sky"),
]


def rows(spot=True):
    """(USD/h, cloud, region, zone, accelerator, count) of every row of the catalog that has
    such a price."""
    for cloud in CLOUDS:
        with open(CATALOG / cloud / "vms.csv") as f:
            for row in csv.DictReader(f):
                price = row["SpotPrice" if spot else "Price"]
                if price:
                    name, count = (
                        row["AcceleratorName"] or "cpu",
                        int(float(row["AcceleratorCount"] or 0)),
                    )
                    yield (
                        float(price),
                        cloud,
                        row["Region"],
                        row.get("AvailabilityZone"),
                        name,
                        count,
                    )


def config(path):
    return {
        k: v
        for k, v in yaml.safe_load(path.read_text()).items()
        if k in ("name", "resources", "num_nodes")
    }


def ask(sky, path, **more):
    return sky("offers", SECONDS, config=config(path), clouds=CLOUDS, on_demand=False, **more)


def wanted(path):
    task = yaml.safe_load(path.read_text())
    choices = task["resources"].get("any_of") or []
    return {tuple(c["accelerators"].split(":")) for c in choices}, task.get("num_nodes", 1)


@pytest.mark.parametrize("path", TASKS, ids=lambda p: p.stem)
def test_every_task_is_valid_and_drains_are_recovered(path):
    text, values = path.read_text(), {"RUN": "s3://b/x"}
    task = load(path, values, use_skypilot=True)
    assert task.recover_on_exit_codes == (DRAINED, UNFIT)
    assert task.workdir == Path(".") and task.setup and not task.managed_secrets
    with pytest.raises(BadInput, match="RUN"):
        load(path, use_skypilot=True)
    # what is secret stands under secrets
    assert not re.search(r"\b(KEY|TOKEN|PASSWORD)\b", " ".join(task.envs))
    for script in (task.setup, task.run):
        assert (
            subprocess.run(["bash", "-n", "-c", script], capture_output=True, text=True).stderr
            == ""
        )
    assert "secrets:" in text or "wandb" not in text


@pytest.mark.parametrize("path", TASKS, ids=lambda p: p.stem)
def test_setup_does_nothing_the_second_time(path, tmp_path):
    """On a relaunched node, or one whose image brings everything, setup is a look at a file."""
    task = load(path, {"RUN": "x"}, use_skypilot=False)
    (tmp_path / "pyproject.toml").write_text("x")
    calls = tmp_path / "calls"
    fake = tmp_path / "bin" / "python3"
    fake.parent.mkdir()
    fake.write_text(
        f'#!/bin/sh\necho "$@" >> {calls}\n'
        '[ "$2" = venv ] && mkdir -p .venv/bin && cp "$0" .venv/bin/python && cp "$0" '
        ".venv/bin/harness\nexit 0\n"
    )
    fake.chmod(0o755)
    env = {"PATH": f"{fake.parent}:/usr/bin:/bin", "VENV": ".venv"}
    for _ in range(2):
        subprocess.run(["bash", "-c", task.setup], cwd=tmp_path, env=env, check=True)
    made = calls.read_text().splitlines()
    assert sum("venv" in line for line in made) == 1 and any("pip install" in line for line in made)
    if "VENV" in task.envs:
        shutil.rmtree(tmp_path / ".venv")
        subprocess.run(
            ["bash", "-c", task.setup], cwd=tmp_path, env={**env, "VENV": "/image"}, check=True
        )
        assert calls.read_text().splitlines() == made


@pytest.mark.parametrize(("heeds", "code"), [(True, 0), (False, 1)])
def test_the_smoke_task_tells_the_agent_itself_to_go(tmp_path, heeds, code):
    """Its `run` section, executed with an agent that says what it is asked, and drains when it
    is told to."""
    task = load(
        ROOT / "sky_tasks" / "smoke.yaml", {"RUN": str(tmp_path / "run")}, use_skypilot=False
    )
    said = tmp_path / "said"
    fake = tmp_path / "venv" / "bin" / "harness"
    fake.parent.mkdir(parents=True)
    fake.write_text(
        f'#!/bin/bash\necho "$1 $2 $3" >> {said}\n'
        '[ "$1" = status ] && { echo \'{"snapshot": 10}\'; exit 0; }\n'
        f'if [ "$1" = run ] && [ ! -e {tmp_path}/began ]; then\n'
        f'  touch {tmp_path}/began; trap "exit {33 if heeds else 5}" TERM; for i in $(seq 600); do '
        "sleep 0.1; done; exit 9\nfi\n"
    )
    fake.chmod(0o755)
    env = {**os.environ, **task.envs, "VENV": str(tmp_path / "venv")}
    ended = subprocess.run(
        ["bash", "-c", task.run], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == code, ended.stderr
    asked = [
        line.split()[0] for line in said.read_text().splitlines() if not line.startswith("status")
    ]
    assert asked == (["run", "run", "run", "prove", "runs", "runs"] if heeds else ["run"])


@pytest.mark.parametrize(
    "path", [p for p in TASKS if p.stem not in ("controller", "drill")], ids=lambda p: p.stem
)
def test_skypilot_ranks_spot_by_the_catalog(sky, path):
    accelerators, nodes = wanted(path)
    true = sorted(
        (round(usd * nodes, 4), cloud, region, zone or None)
        for usd, cloud, region, zone, name, count in rows()
        if (name, str(count)) in accelerators
    )
    found = ask(sky, path)
    assert [round(a["usd_per_h"], 4) for a in found] == [t[0] for t in true]
    assert {(a["place"], round(a["usd_per_h"], 4)) for a in found} == {
        (f"{cloud}/{region}", usd) for usd, cloud, region, _ in true
    }
    assert all(a["spot"] for a in found)
    assert found[0]["usd_per_h"] == pytest.approx(min(t[0] for t in true))


def test_the_optimizer_itself_takes_the_first(sky):
    """H200 in Spain is the cheapest row of all that train.yaml takes; SkyPilot's own choice is
    the head of our list."""
    found = ask(sky, ROOT / "sky_tasks" / "train.yaml")
    assert (found[0]["place"], found[0]["accelerator"], found[0]["usd_per_h"]) == (
        "aws/eu-south-2",
        "H200",
        6.836,
    )
    chosen = sky("best", SECONDS, config=config(ROOT / "sky_tasks" / "train.yaml"), clouds=CLOUDS)
    assert chosen["name"] == found[0]["name"]


def test_zones_without_a_spot_market_are_seen(sky):
    found = ask(sky, ROOT / "sky_tasks" / "train.yaml")
    none = {a["name"].split("/")[2] for a in found if not has_spot_market(a)}
    assert none == {"use1-az1", "use1-az4"}  # their rows have 55.04 in both columns
    assert all(
        not has_spot_market(a)
        for a in ask(sky, ROOT / "sky_tasks" / "canary.yaml")
        if a["name"].startswith("runpod/")
    )


def test_on_demand_is_offered_when_asked_for(sky):
    found = sky(
        "offers",
        SECONDS,
        config=config(ROOT / "sky_tasks" / "train.yaml"),
        clouds=CLOUDS,
        on_demand=True,
    )
    on_demand = {a["place"]: a for a in found if not a["spot"] and a["accelerator"] == "H100"}
    assert on_demand["nebius/eu-north1"]["usd_per_h"] == 23.6
    assert on_demand["aws/us-east-1"]["usd_per_h"] == 55.04
    assert on_demand["aws/us-east-1"]["name"].endswith("/on-demand")


def test_a_cloud_without_spot_capacity_is_offered_on_demand(sky):
    """Lambda has none, as a Kubernetes cluster without spot labels."""
    resources = {"accelerators": "A6000:1", "use_spot": True}
    asked = {"config": {"resources": resources}, "clouds": ["lambda"]}
    with pytest.raises(SkyError, match="Spot instances are not supported"):
        sky("offers", SECONDS, on_demand=False, **asked)
    found = sky("offers", SECONDS, on_demand=True, **asked)
    assert found and not any(one["spot"] or one["resources"].get("use_spot") for one in found)
    true = min(usd for usd, cloud, *_, name, _ in rows(spot=False) if (cloud, name) == ("lambda", "A6000"))
    assert found[0]["usd_per_h"] == pytest.approx(true)


def test_the_controller_is_small_and_not_taken_away(sky):
    found = ask(sky, ROOT / "sky_tasks" / "controller.yaml")
    least = min(usd for usd, *_, name, _ in rows(spot=False) if name == "cpu")
    assert found[0]["usd_per_h"] == pytest.approx(least) and not any(a["spot"] for a in found)
    assert (
        found[0]["place"].startswith("nebius/")
        and found[0]["resources"]["autostop"]["down"] is True
    )


def test_nothing_feasible_is_an_answer_and_nonsense_an_error(sky, tmp_path):
    assert (
        sky(
            "offers",
            SECONDS,
            config={"resources": {"accelerators": "V100:8", "use_spot": True}},
            clouds=["nebius"],
        )
        == []
    )
    with pytest.raises(SkyError, match=r"InvalidSkyPilotConfigError.*nowhere"):
        sky(
            "offers",
            SECONDS,
            config={"resources": {"accelerators": "H100:8", "infra": "nowhere/at/all"}},
            clouds=CLOUDS,
        )


def test_work_is_priced_by_speed_and_number():
    row = {"place": "a/b", "spot": True}
    fast = to_offer(
        {
            **row,
            "name": "a/b/c",
            "usd_per_h": 10.0,
            "on_demand_usd_per_h": 50.0,
            "accelerator": "H100",
            "gpus": 8,
        }
    )
    slow = to_offer(
        {
            **row,
            "name": "a/b/d",
            "usd_per_h": 0.2,
            "on_demand_usd_per_h": 1.0,
            "accelerator": "T4",
            "gpus": 1,
        }
    )
    assert slow.speed == pytest.approx(65 / 989)
    assert sorted([slow, fast], key=world.usd_per_work) == [fast, slow]
