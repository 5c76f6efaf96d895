"""SkyPilot in a process of its own, whose catalog is rows of the real one."""

import os
import shutil
from pathlib import Path

import pytest

from harness.clouds.sky_broker import Broker

CATALOG = Path(__file__).parents[1] / "fixtures" / "catalog"
CLOUDS = ["aws", "nebius", "runpod", "lambda"]
SECONDS = 120.0


@pytest.fixture(scope="module")
def sky(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    shutil.copytree(CATALOG, home / ".sky" / "catalogs" / "v8")
    made = Broker({**os.environ, "HOME": str(home)}, home / "broker.log")
    yield made
    made.close()
