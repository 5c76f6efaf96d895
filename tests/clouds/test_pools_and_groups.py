"""Pools and job groups of SkyPilot take the files in sky_tasks/: what its client and its server would
check is asked of SkyPilot itself, offline. So are the labels by which it knows Kubernetes' spot nodes.
"""

from __future__ import annotations

import importlib.util
import json

import pytest
import yaml

from harness.clouds.skypilot import NO_SPOT
from harness.core.world import DRAINED, UNFIT
from support.rooms import ROOT
from support.sky_catalog import home_with_catalog, said_by_skypilot

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sky") is None, reason="SkyPilot is not installed"
)
TRIED = """
import json, sys
import sky
from sky.serve import serve_utils
from sky.utils import dag_utils
from harness.clouds import sky_private as p

p.enable_clouds(["aws", "nebius"])
p.keep_catalog_zones()
said, run = {}, [("RUN", "s3://b/runs/x")]

# ---- a pool
workers = sky.Task.from_yaml("sky_tasks/pool.yaml")
serve_utils.validate_service_task(workers, pool=True)
said["workers"] = [workers.service.min_replicas, workers.run, bool(workers.setup)]
jobs = dag_utils.load_chain_dag_from_yaml("sky_tasks/train.yaml", run)
dag_utils.fill_default_config_in_dag_for_job_launch(jobs)
(job,) = jobs.tasks
launched, _ = p.launchable(workers)
said["fits"] = [
    any(serve_utils._task_fits(wanted, worker) for wanted in job.resources) for worker in launched
]
said["codes"] = [r.job_recovery["recover_on_exit_codes"] for r in job.resources]
job.set_service(workers.service)
try:
    serve_utils.validate_service_task(job, pool=True)
except ValueError as e:
    said["with recovery"] = str(e)

# ---- job groups
said["groups"] = {}
for name, text in json.loads(sys.argv[1]).items():
    dag = dag_utils.load_dag_from_yaml_str(text, run)
    dag.validate(skip_workdir=True)
    dag = sky.optimizer.Optimizer.optimize_job_group(dag, quiet=True)
    dag_utils.fill_default_config_in_dag_for_job_launch(dag)
    said["groups"][name] = {
        "group": dag.is_job_group(),
        "jobs": [task.name for task in dag.tasks],
        "runs": [task.envs["RUN"] for task in dag.tasks],
        "places": sorted({str(t.best_resources.infra.to_str()) for t in dag.tasks}),
        "codes": [r.job_recovery["recover_on_exit_codes"] for t in dag.tasks for r in t.resources],
    }
from sky.clouds import CloudImplementationFeatures, Kubernetes
from sky.provision.kubernetes import utils
said["spot labels"] = sorted("=".join(label) for label in utils.SPOT_LABEL_MAP.values())
spot = CloudImplementationFeatures.SPOT_INSTANCE
said["without"] = Kubernetes._CLOUD_UNSUPPORTED_FEATURES[spot]
print("SAID " + json.dumps(said))
"""


def group(*names):
    """A job group of these task files, as docs/CLOUDS.md says."""
    documents = [(ROOT / "sky_tasks" / f"{name}.yaml").read_text() for name in names]
    return "---\n".join(["name: x\nexecution: parallel\n", *documents])


def twice():
    one = (ROOT / "sky_tasks" / "train.yaml").read_text()
    assert one.count("\nname: train\n") == 1
    two = one.replace("\nname: train\n", "\nname: train-2\n")
    return "---\n".join(["name: x\nexecution: parallel\n", one, two])


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    groups = {"trainer and watch": group("train_gang", "watch"), "two trainers": twice()}
    return said_by_skypilot(home_with_catalog(tmp_path_factory), TRIED, json.dumps(groups))


def test_a_pool_takes_workers_on_which_our_jobs_fit(said):
    assert said["workers"][0] == 2 and said["workers"][2]
    assert len(said["fits"]) > 3 and all(said["fits"])
    assert said["codes"] and all(codes == [DRAINED, UNFIT] for codes in said["codes"])
    # why the workers have a file of their own
    assert "job_recovery is disabled for Pool" in said["with recovery"]


def test_a_job_on_a_worker_finds_what_its_setup_would_have_made():
    workers, job = (
        yaml.safe_load((ROOT / "sky_tasks" / f"{name}.yaml").read_text()) for name in ("pool", "train")
    )
    assert workers["setup"] == job["setup"] and workers["workdir"] == job["workdir"]
    assert workers["envs"]["VENV"] == job["envs"]["VENV"]


@pytest.mark.parametrize(
    ("name", "jobs"),
    [("trainer and watch", ["train-gang", "watch"]), ("two trainers", ["train", "train-2"])],
)
def test_a_job_group_takes_our_tasks_and_puts_them_where_they_reach_each_other(said, name, jobs):
    found = said["groups"][name]
    assert found["group"] and found["jobs"] == jobs
    assert found["runs"] == ["s3://b/runs/x"] * 2  # one --env for all
    (place,) = {"/".join(place.split("/")[:2]) for place in found["places"]}
    assert place.startswith(("aws/", "nebius/"))
    assert all(codes == [DRAINED, UNFIT] for codes in found["codes"])


def test_the_labels_of_spot_nodes_are_those_that_we_name(said):
    assert said["spot labels"] and all(label in NO_SPOT for label in said["spot labels"])
    assert "Spot instances are not supported" in said["without"]
