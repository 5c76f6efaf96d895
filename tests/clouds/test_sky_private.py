"""What we use of SkyPilot beside its public SDK does what we believe: a contract for each function
of `sky_private.py`, tried on the SkyPilot that is installed.

One process tries all, since it imports SkyPilot with a home and clouds of its own.
"""

import ast
import csv
import importlib.util
import re

import pytest

from harness.clouds import sky_private
from support.rooms import ROOT
from support.sky_catalog import CATALOG, home_with_catalog, said_by_skypilot

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sky") is None, reason="SkyPilot is not installed"
)
TRIED = """
import asyncio, inspect, json
from harness.clouds import sky_private as p

said = {}
said["catalog_version"] = p.catalog_version()
said["user_hash"] = [p.user_hash(), inspect.getsource(p._sky("utils.common_utils"))]
import sky
p.enable_clouds(["lambda"])
lacks = {"infra": "lambda", "accelerators": "A100:8", "use_spot": True}
none, hints = p.launchable(sky.Task.from_yaml_config({"resources": lacks}))
said["hints"] = [len(none), *hints]
p.enable_clouds(["nebius", "aws"])
p.keep_catalog_zones()
task = sky.Task.from_yaml_config({"resources": {"accelerators": "H100:8", "use_spot": True}})
found, hints = p.launchable(task)
said["enable_clouds"] = sorted({str(r.cloud).lower() for r in found})
said["keep_catalog_zones"] = sorted({r.zone for r in found if r.zone and str(r.cloud) == "AWS"})
said["launchable"] = sorted({str(r.get_cost(3600) > 0) for r in found})

of_task, of_resources = p.task_schemas()
said["task_schemas"] = ["run" in of_task["properties"], "any_of" in of_resources["properties"]]
try:
    p.validate({"rum": "x"}, of_task)
except ValueError as e:
    said["validate"] = str(e)
said["schema_errors"] = [
    list(e.absolute_path) for e in p.schema_errors({"num_nodes": "x"}, of_task)
]

base = p.strategy_base()
said["strategy_base"] = {
    name: inspect.iscoroutinefunction(getattr(base, name)) for name in p.STRATEGY_METHODS
}
said["launch_takes"] = sorted(inspect.signature(base._launch).parameters)
p.strategy_logger().info("a word")
said["strategy_logger"] = True
said["handle_of"] = p.handle_of("no-such-cluster")
class Mine(base):
    pass
p.register_strategy("MINE", Mine, "mine", {"type": "integer"})
p.register_strategy("MINE", Mine, "mine", {"type": "integer"})
from sky.utils import registry, schemas
said["register_strategy"] = [
    registry.JOBS_RECOVERY_STRATEGY_REGISTRY.from_str("mine") is Mine,
    "mine" in json.dumps(schemas.get_resources_schema()),
]
said["plugin_base"] = "install" in dir(p.plugin_base())
from sky.backends import backend_utils
said["probed before"] = list(backend_utils._TEST_IP_LIST)
p.probe_network_at("http://127.0.0.1:1")
said["probe_network_at"] = [
    backend_utils._TEST_IP_LIST,
    "_TEST_IP_LIST" in inspect.getsource(backend_utils.check_network_connection),
]
print("SAID " + json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    return said_by_skypilot(home_with_catalog(tmp_path_factory), TRIED)


def zones_of_the_catalog():
    with open(CATALOG / "aws" / "vms.csv", newline="") as rows:
        return {row["AvailabilityZone"] for row in csv.DictReader(rows)}


CONTRACTS = {
    "launchable": lambda said: said["launchable"] == ["True"]
    and said["hints"][0] == 0
    and "Spot instances are not supported" in said["hints"][1],
    "enable_clouds": lambda said: said["enable_clouds"] == ["aws", "nebius"],
    "keep_catalog_zones": lambda said: set() < set(said["keep_catalog_zones"])
    and set(said["keep_catalog_zones"]) <= zones_of_the_catalog(),
    "catalog_version": lambda said: said["catalog_version"] == "v8",
    "user_hash": lambda said: re.fullmatch("[0-9a-f]{8}", said["user_hash"][0])
    and "user_hash = f'-{user_hash}'" in said["user_hash"][1],  # the end of names on clouds
    "task_schemas": lambda said: said["task_schemas"] == [True, True],
    "validate": lambda said: "rum" in said["validate"] and "run" in said["validate"],
    "schema_errors": lambda said: said["schema_errors"] == [["num_nodes"]],
    "strategy_base": lambda said: said["strategy_base"]
    == {
        "_launch": True,
        "_await_launch_request": True,
        "_cleanup_cluster": False,
        "set_strategy_config": False,
    }
    and {"max_retry", "raise_on_failure", "recovery"} <= set(said["launch_takes"]),
    "strategy_logger": lambda said: said["strategy_logger"],
    "handle_of": lambda said: said["handle_of"] is None,
    "register_strategy": lambda said: said["register_strategy"] == [True, True],
    "plugin_base": lambda said: said["plugin_base"],
    "probe_network_at": lambda said: len(said["probed before"]) >= 1
    and said["probe_network_at"] == [["http://127.0.0.1:1"], True],
}


@pytest.mark.parametrize("name", CONTRACTS)
def test_skypilot_keeps_the_contract_of(name, said):
    assert CONTRACTS[name](said), {k: v for k, v in said.items() if name in k} or said


def test_every_function_has_a_contract():
    tree = ast.parse((ROOT / "harness" / "clouds" / "sky_private.py").read_text())
    functions = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
    assert {name for name in functions if name[0] != "_"} == set(CONTRACTS)
    assert callable(sky_private.launchable)


def test_no_other_file_reaches_into_skypilot():
    """Modules of SkyPilot that are not its public interface are named in `sky_private.py` only."""
    inner = ("sky.optimizer\")._", "sky.utils.", "sky.backends", "sky.skylet", "sky.jobs.recovery")
    inner += ("sky(\"utils.registry", "sky(\"catalog.aws", "optimizer\")._", "sky.server.plugins")
    for path in (ROOT / "harness").rglob("*.py"):
        if path.name != "sky_private.py":
            text = path.read_text()
            assert not [word for word in inner if word in text], path
