"""SkyPilot in a process of its own, whose catalog is rows of the real one."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from harness.clouds.sky_broker import Broker
from support.rooms import ROOT

CATALOG = ROOT / "tests" / "fixtures" / "catalog"
CLOUDS = ["aws", "nebius", "runpod", "lambda"]
SECONDS = 120.0


def home_with_catalog(tmp_path_factory):
    """A home folder of SkyPilot's, which has a catalog and nothing else."""
    home = tmp_path_factory.mktemp("home")
    shutil.copytree(CATALOG, home / ".sky" / "catalogs" / "v8")
    return home


def said_by_skypilot(home, code, *words):
    """What `code` prints as JSON behind "SAID ", in a process of its own with this home."""
    env = {**os.environ, "HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    line = next(line for line in ended.stdout.splitlines() if line.startswith("SAID "))
    return json.loads(line.removeprefix("SAID "))


@pytest.fixture(scope="module")
def sky(tmp_path_factory):
    home = home_with_catalog(tmp_path_factory)
    made = Broker({**os.environ, "HOME": str(home)}, home / "broker.log")
    yield made
    made.close()
