"""An agent finds out where its machine stands and what an hour costs, whoever launched it."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest
import yaml

from harness.agent import instance_price
from harness.agent.instance_price import Asking, HourlyPrice, PlaceFinder, Shape, find
from harness.local.aws_metadata import AwsImds
from harness.local.azure_metadata import AzureScheduledEvents
from harness.local.gcp_metadata import GcpMetadata
from harness.local.metadata_server import MetadataServer, environment_of
from harness.look.audit.audit import audit
from harness.look.reports.summary import summarize
from harness.notices.sources import MachineInfo
from storage.stores.folder_store import FileStore

pytestmark = pytest.mark.proof
CATALOG = Path(__file__).parents[1] / "fixtures/catalog"
LAUNCHED_S = 1_795_333_861.0
ASKED_S = LAUNCHED_S - 4
SPOT = Shape("aws", "us-east-2", ("us-east-2a", "use2-az1"), "p5.48xlarge", "H100:8", True)


class NotAsked(Asking):
    def ask(self, *_):
        raise AssertionError("SkyPilot is asked only where nobody else knows")


@pytest.fixture
def home(tmp_path):
    """Of a user on a node that SkyPilot launched, with its catalog."""
    shutil.copytree(CATALOG, tmp_path / ".sky/catalogs/v8")
    return tmp_path


def found(env, root, asking=None):
    told = []
    find(MachineInfo({"HOME": str(root), **env}, root), told.append, asking or NotAsked())
    return told


def cluster_info(cloud, region, zone, name="train-1"):
    about = {"cluster_name": name, "cloud": cloud, "region": region, "zone": zone}
    return {"SKYPILOT_CLUSTER_INFO": json.dumps(about)}


def write_jobs(folder, number=1, zone_s=0):
    """SkyPilot's table of jobs, as its version 0.14 makes it; `zone_s`: of the laptop's clock."""
    stamp = datetime.fromtimestamp(ASKED_S + zone_s, timezone.utc).strftime("%Y-%m-%d-%H-%M-%S")
    with closing(sqlite3.connect(folder / ".sky/jobs.db")) as db:
        db.execute(
            "CREATE TABLE jobs (job_id INTEGER, submitted_at FLOAT, run_timestamp TEXT, "
            "resources TEXT)"
        )
        row = (number, LAUNCHED_S + 20, f"sky-{stamp}-290148", "1x[H100:8]")
        db.execute("INSERT INTO jobs VALUES (?, ?, ?, ?)", row)
        db.commit()


def test_a_node_on_aws(home):
    write_jobs(home, zone_s=-8 * 3600)
    imds = AwsImds(
        *("i-1",),
        zone="us-east-2a",
        zone_id="use2-az1",
        instance_type="p5.48xlarge",
        launched_s=LAUNCHED_S,
    )
    with closing(MetadataServer(imds)) as server:
        env = {
            **environment_of("aws", server.endpoint),
            **cluster_info("AWS", "us-east-2", "us-east-2a"),
            "SKYPILOT_INTERNAL_JOB_ID": "1",
            "SKYPILOT_MANAGED_JOB_ID": "7",
        }
        (one,) = found(env, home)
    assert (one.cloud, one.region, one.zone) == ("aws", "us-east-2", "us-east-2a")
    assert (one.instance_type, one.accelerators, one.spot) == ("p5.48xlarge", "H100:8", True)
    # in its own zone, which the catalog has by another name than this account
    assert (one.usd_per_h, one.on_demand_usd_per_h) == (11.2543, 55.04)
    assert (one.cluster, one.job) == ("train-1", "managed 7")
    assert one.launched_s == ASKED_S  # SkyPilot's bill begins when it asks
    assert one.setup_s == LAUNCHED_S + 20
    assert one.source == "skypilot aws catalog"


def test_a_later_job_of_a_cluster_does_not_pay_for_what_was_before_it(home):
    write_jobs(home, number=2)
    env = {**cluster_info("aws", "us-east-2", None), "SKYPILOT_INTERNAL_JOB_ID": "2"}
    (home / "proc").mkdir()
    (home / "proc/stat").write_text(f"cpu 1 2\nbtime {LAUNCHED_S:.0f}\n")
    (one,) = found(env, home)
    assert one.launched_s is None
    (first,) = found({**env, "SKYPILOT_INTERNAL_JOB_ID": "1"}, home)
    assert first.launched_s == LAUNCHED_S  # when the machine booted


def test_a_machine_that_somebody_keeps_is_not_paid_for_since_it_was_bought(home):
    machine = AwsImds("i-1", zone="us-east-2a", launched_s=LAUNCHED_S)
    with closing(MetadataServer(machine)) as server:
        (one,) = found(environment_of("aws", server.endpoint), home)
        assert (one.cloud, one.launched_s) == ("aws", None)


def test_a_pod_is_paid_for_since_its_first_process(home):
    (home / "proc/1").mkdir(parents=True)
    (home / "proc/stat").write_text(f"btime {LAUNCHED_S - 9000:.0f}\n")
    ticks = 9000 * os.sysconf("SC_CLK_TCK")
    (home / "proc/1/stat").write_text(f"1 (a b) S {' '.join(['0'] * 18)} {ticks} 0 0")
    env = {**cluster_info("Kubernetes", "gke", None), "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    (one,) = found(env, home)
    assert one.launched_s == LAUNCHED_S


def test_nodes_on_gcp_and_azure(tmp_path):
    machine = GcpMetadata("vm-1", zone="us-central1-a", machine_type="a3-highgpu-8g")
    with closing(MetadataServer(machine)) as server:
        (one,) = found(environment_of("gcp", server.endpoint), tmp_path)
    assert (one.cloud, one.region, one.zone) == ("gcp", "us-central1", "us-central1-a")
    assert (one.instance_type, one.spot, one.usd_per_h) == ("a3-highgpu-8g", True, None)
    machine = AzureScheduledEvents("vm-2", region="eastus", size="Standard_ND96isr_H100_v5")
    with closing(MetadataServer(machine)) as server:
        env = environment_of("azure", server.endpoint)
        (one,) = found({**env, "HARNESS_USD_PER_H": "31.5"}, tmp_path)
    assert (one.cloud, one.region, one.spot) == ("azure", "eastus", True)
    assert (one.usd_per_h, one.source) == (31.5, "azure environment")


def test_a_node_of_a_slurm_cluster_under_skypilot(home):
    """What SkyPilot 0.14.1 leaves there; prices of such clusters are only in the configuration of
    whoever launched it."""
    node = {
        "instance_type": "4CPU--16GB--H100:1",
        "accelerator_type": "H100",
        "accelerator_count": 1,
        "private_key": "must not be told",
    }
    config = {
        "provider": {"cluster": "east", "partition": "east-1a", "private_key": "nor this"},
        "available_node_types": {"ray_head_default": {"node_config": node}},
        "head_node_type": "ray_head_default",
    }
    (home / ".sky/sky_ray.yml").write_text(yaml.safe_dump(config))
    ready = home / ".sky_sbatch_ready"
    ready.touch()
    os.utime(ready, (LAUNCHED_S, LAUNCHED_S))
    env = {
        **cluster_info("Slurm", "east", "east-1a"),
        "SLURM_JOB_ID": "12",
        "SLURM_JOB_START_TIME": str(LAUNCHED_S),
        "HARNESS_PRICES": "slurm/west/west-1a/4CPU--16GB--H100:1/on-demand=2.2/2.2;"
        "slurm/east/east-1a/4CPU--16GB--H100:1/on-demand=1.5/1.5;not a price",
    }
    (one,) = found(env, home)
    assert (one.cloud, one.region, one.zone) == ("slurm", "east", "east-1a")
    assert (one.instance_type, one.accelerators) == ("4CPU--16GB--H100:1", "H100:1")
    assert (one.spot, one.usd_per_h, one.on_demand_usd_per_h) == (False, 1.5, 1.5)
    assert one.launched_s == LAUNCHED_S
    assert "told" not in repr(one) and "nor" not in repr(one)
    del env["SLURM_JOB_START_TIME"]
    assert found(env, home)[0].launched_s == LAUNCHED_S


def test_nothing_is_told_of_a_machine_that_nobody_rents(tmp_path):
    assert found({}, tmp_path) == []
    (one,) = found({"HARNESS_USD_PER_H": "2", "HARNESS_ON_DEMAND_USD_PER_H": "-3"}, tmp_path)
    assert (one.usd_per_h, one.on_demand_usd_per_h, one.launched_s) == (2.0, None, None)


@pytest.mark.parametrize(
    "text", ["", "=", "a/b=1", "aws/us-east-2/x/p5.48xlarge=nan/1", "aws=1/2", ";;;", "aws//=1e99/1"]
)
def test_a_table_that_says_nothing_of_this_machine(text):
    assert instance_price.offered(text, SPOT) == HourlyPrice()


def test_what_is_broken_is_not_known(home):
    (home / ".sky/catalogs/v8/aws/vms.csv").write_bytes(b"InstanceType,Region,Price\n\xff\xfe,,\n")
    (home / ".sky/jobs.db").write_text("no database")
    (home / ".sky/sky_ray.yml").write_text("a: [")
    env = {"SKYPILOT_CLUSTER_INFO": "{", "SKYPILOT_INTERNAL_JOB_ID": "1"}
    with closing(MetadataServer(AwsImds("i-1"))) as server:
        server.inject(status=500)
        assert found({**env, **environment_of("aws", server.endpoint)}, home) == []


def test_it_is_found_beside_the_training_and_given_up_when_that_ends(home):
    """With a SkyPilot that never answers."""
    python = home / "skypilot-runtime/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\necho $$ > {home}/pid\nexec sleep 600\n")
    python.chmod(0o755)
    with closing(MetadataServer(AwsImds("i-1", zone="us-east-9a"))) as server:
        env = {"HOME": str(home), "PATH": os.environ["PATH"]}
        env |= environment_of("aws", server.endpoint)
        told = []
        finder = PlaceFinder(MachineInfo(env, home), told.append)
        give_up_s = time.monotonic() + 60
        while not (home / "pid").exists() or not (home / "pid").read_text().strip():
            assert time.monotonic() < give_up_s
            time.sleep(0.02)
        finder.stop()
    assert [(one.region, one.usd_per_h) for one in told] == [("us-east-9", None)]
    with pytest.raises(ProcessLookupError):
        os.kill(int((home / "pid").read_text()), 0)


def test_the_price_is_the_one_of_skypilots_own_bill(home):
    """The number that `sky cost-report` multiplies, by SkyPilot itself from the same catalog."""
    pytest.importorskip("sky", reason="SkyPilot is not installed")
    env = {**os.environ, "HOME": str(home)}
    asked = Asking().ask(Path(sys.executable), SPOT, env)
    assert asked == instance_price.catalog_price(home, SPOT) == HourlyPrice(11.2543, 55.04)


def test_prices_that_travel_with_a_task_are_found_on_its_node(home):
    """From the optimizer's offers on the laptop to the lookup on a node of one of them."""
    pytest.importorskip("sky", reason="SkyPilot is not installed")
    task = Path(__file__).parents[2] / "sky_tasks/train.yaml"
    done = subprocess.run(
        [sys.executable, "-m", "harness.cli", "market", "prices", str(task), "--clouds", "aws"],
        env={**os.environ, "HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    table = done.stdout.strip()
    assert instance_price.offered(table, SPOT) == HourlyPrice(11.2543, 55.04)
    on_demand = replace(SPOT, spot=False)
    assert instance_price.offered(table, on_demand) == HourlyPrice(55.04, 55.04)
    assert instance_price.offered(table, replace(SPOT, region="eu-south-9")) == HourlyPrice()


def test_a_run_that_nobody_led_has_a_bill(home):
    """The real agent, with a script of somebody's; then report and audit."""
    script = home / "script.py"
    script.write_text("print('trained')\n")
    url = f"file://{home}/runs/x"
    env = {name: value for name, value in os.environ.items() if not name.startswith("HARNESS_")}
    env |= {"HOME": str(home), "HARNESS_USD_PER_H": "3600", "HARNESS_ON_DEMAND_USD_PER_H": "7200"}
    env["SKYPILOT_INTERNAL_JOB_ID"] = "2"  # so it is paid for since its agent's begin
    words = ["run", "--run", url, "--nproc", "1", "--notices", "none", "--set", "gpu_health=off"]
    done = subprocess.run(
        [sys.executable, "-m", "harness.cli", *words, "--", str(script)],
        env={**env, **cluster_info("slurm", "east", "east-1a")},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    s = summarize(FileStore(url))
    (row,) = s.ledger.attempts
    assert (row.offer, row.usd_per_h) == ("slurm/east/east-1a", 3600.0)
    assert row.usd == pytest.approx(row.billed_s)  # a dollar a second
    assert s.ledger.cost.saved == pytest.approx(0.5)
    assert audit(FileStore(url)).ok
