"""W&B's workspace and report, built without network, compared with the file that is kept."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.look.trackers.publisher import publisher_of
from harness.look.trackers.tracker_registry import RunInfo
from harness.look.trackers.tracker_stream import every_row
from support.story import Story
from support.wandb_server import WandbServer

dashboards = pytest.importorskip("harness.look.trackers.dashboards")
pytest.importorskip("wandb_workspaces")
GOLDEN = Path(__file__).parents[1] / "fixtures" / "wandb_dashboards.json"


def command(*words, **env):
    quiet = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "WANDB_ERROR_REPORTING": "false"}
    return subprocess.run(
        [sys.executable, "-m", "harness.cli", "runs", "dashboards", *words],
        env={**quiet, "PYTHONPATH": ":".join(sys.path), **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_definition_is_the_one_that_is_kept(tmp_path):
    """`harness runs dashboards --out tests/fixtures/wandb_dashboards.json` after a change on purpose."""
    out = command("--out", str(tmp_path / "made.json"))
    assert out.returncode == 0, out.stderr
    assert json.loads((tmp_path / "made.json").read_text()) == json.loads(GOLDEN.read_text())


def test_without_a_key_it_says_what_to_do():
    out = command()
    assert out.returncode == 2
    assert "set WANDB_API_KEY, or name --out FILE" in out.stderr


def test_every_metric_is_one_that_a_run_has():
    """What a chart names is in the stream of a run that went through much."""
    story = Story()
    story.first_half(), story.spoiled(), story.second_half(), story.finish(), story.closed()
    writer = publisher_of(story.store, RunInfo.of(story.store), 0.0)
    writer.now = lambda: story.t
    writer.round(last=True)
    known = {name for row in every_row(story.store) for name in row.values}
    known |= {"cost/storage_usd", "cost/egress_usd"}  # of a bucket in a cloud
    for _, charts in dashboards.SECTIONS:
        for chart in charts:
            named = getattr(chart, "y", ()) or getattr(chart, "metrics", ())
            if isinstance(chart, dashboards.Number):
                named = (chart.metric,)
            named = [*named, *re.findall(r"\$\{(.*?)\}", getattr(chart, "expression", ""))]
            assert set(named) <= known, chart.title


def test_saved_twice_is_saved_once():
    with WandbServer() as server:
        env = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": server.key}
        for _ in range(2):
            out = command("--project", "mine", **env)
            assert out.returncode == 0, out.stderr
        kinds = [(v["type"], v["displayName"], v["projectName"]) for v in server.views]
        assert kinds == [
            ("project-view", "Spot training", "mine"),
            ("runs", "Spot training", "mine"),
        ]
        assert server.misunderstood == []
