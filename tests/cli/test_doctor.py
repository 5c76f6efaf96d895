"""`harness prove doctor`: what it finds, what it says to do, and that it leaves nothing behind.
Clouds' commands are programs on PATH."""

import io
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from harness.cli import command as cli
from harness.cli import doctor, prove
from harness.cli.doctor import FAIL, OK, WARN
from harness.clouds.sky_broker import NO_LINKS, OWN_GROUP, OWN_VNET, Calls, SkyError
from harness.clouds.sky_task import load
from harness.clouds.skypilot import SkyPilotCloud
from harness.core.world import BadInput, CloudUnavailable
from harness.look.trackers.wandb_api import wandb_key, wandb_online
from storage.errors import StoreError
from storage.stores.folder_store import MemoryStore
from storage.stores.store_urls import open_store
from support.fakesky import FakeSky, answer

EAST, WEST = answer("aws/us-east-1/use1-az1/p5", 10.0), answer("nebius/eu-north1/p5", 12.0)


class Sky(FakeSky):
    """An API server with accounts."""

    clouds, says = ("aws", "nebius"), "healthy"

    def enabled(self):
        return list(self.clouds)

    def server(self):
        return {"endpoint": "http://127.0.0.1:46580", "status": self.says, "version": "0.14.1"}


REAL_PROBE = doctor.GPU_PROBE
NO_GPU = (
    """import json; print(json.dumps({"torch": "2", "cuda": None, "nccl": None, "gpus": []}))"""
)


@pytest.fixture(autouse=True)
def no_torch(monkeypatch):
    """Importing torch costs seconds of a core; one test looks at the real answer."""
    monkeypatch.setattr(doctor, "GPU_PROBE", NO_GPU)


@pytest.fixture
def task(tmp_path):
    path = tmp_path / "task.yaml"
    path.write_text(
        "name: t\nresources: {accelerators: 'H100:8', use_spot: true}\nenvs: {TRACKERS: "
        "wandb}\nrun: exec train\n"
    )
    return load(path, {"RUN": "x"}, use_skypilot=False)


def no_command(_):
    raise FileNotFoundError


def examine(task=None, url="", sky=None, store=None, env=None, home=None, ask=no_command):
    found = doctor.examine(
        task,
        url,
        sky or Sky([EAST, WEST]),
        lambda _: store,
        env or {},
        home or doctor.Path("/nowhere"),
        "t",
        ask,
    )
    return {f.what: f for f in found}


def test_all_is_well(task):
    store = MemoryStore("memory://doctor", {})
    found = examine(task, "memory://doctor", store=store, env={"WANDB_API_KEY": "hidden"})
    assert [
        f.state for f in found.values() if f.what in ("API server", "clouds", "offers", "bucket")
    ] == [OK] * 4
    assert found["offers"].found.startswith("2 in 2 places, from 10 USD/h (aws/us-east-1")
    assert store.list("") == []  # nothing is left behind
    assert "hidden" not in doctor.to_json(list(found.values()))


def test_without_a_server_nothing_else_is_asked_of_it(task):
    def silent(method, timeout_s, **_):
        raise CloudUnavailable("SkyPilot did not answer")

    found = examine(task, sky=silent)
    assert (found["API server"].state, found["API server"].found) == (
        FAIL,
        "SkyPilot did not answer",
    )
    assert "sky api start" in found["API server"].remedy
    assert "clouds" not in found and "offers" not in found and "tracker" in found


@pytest.mark.parametrize(
    ("clouds", "state", "says"),
    [((), FAIL, "sky check -v"), (("aws",), WARN, "nowhere to go"), (("aws", "gcp"), OK, "")],
)
def test_clouds_are_counted(task, clouds, state, says):
    sky = Sky([EAST])
    sky.clouds = clouds
    found = examine(task, sky=sky)
    assert found["clouds"].state == state and says in found["clouds"].remedy
    assert ("offers" in found) == bool(clouds)


def test_a_server_of_another_mind(task):
    sky = Sky([EAST])
    sky.says = "needs_auth"
    assert examine(task, sky=sky)["API server"].state == FAIL


def test_offers_that_are_none_or_in_one_place(task):
    assert examine(task, sky=Sky([]))["offers"].state == FAIL
    one = examine(task, sky=Sky([EAST]))["offers"]
    assert one.state == WARN and "any_of" in one.remedy

    class Broken(Sky):
        def offers(self, **_):
            raise SkyError("ValueError", "no such accelerator H1000")

    assert "H1000" in examine(task, sky=Broken())["offers"].found


def test_nodes_that_would_not_reach_each_other(task):
    alone = {**EAST, "name": "azure/eastus/ND96", "place": "azure/eastus", "apart": OWN_VNET}
    pod = {**EAST, "name": "runpod/CA/H100", "place": "runpod/CA", "apart": NO_LINKS.format("RunPod")}
    calm = examine(task)["network"]
    assert calm.state == OK and "NetworkPolicies" in calm.found  # what nobody can know is said
    found = examine(task, sky=Sky([alone, WEST]))["network"]
    assert found.state == WARN and "1 of 2 offers, such as azure/eastus/ND96" in found.found
    assert "azure: {vpc_name: NAME}" in found.remedy
    both, _ = doctor.offers(Sky([alone, pod, WEST]), task)
    assert ["RunPod" in f.remedy for f in both if f.what == "network"] == [False, True]
    fleet = SkyPilotCloud(task, "x", Sky([alone, pod, WEST]), fleet=True)
    assert [o.name for o in fleet.offers()] == [WEST["name"]]
    assert len(SkyPilotCloud(task, "x", Sky([alone, WEST])).offers()) == 2  # one node needs nobody
    with pytest.raises(BadInput, match=r"runpod/CA/H100 would not: .* behind NAT .* --nodes 1"):
        SkyPilotCloud(task, "x", Sky([pod]), fleet=True).offers()


@pytest.mark.parametrize(
    ("cloud", "ports", "override", "why"),
    [
        ("azure", None, {}, OWN_VNET),
        ("azure", None, {"azure": {"vpc_name": "mine"}}, ""),
        ("aws", None, {}, ""),
        ("aws", ["8080"], {}, OWN_GROUP),
        ("aws", ["8080"], {"aws": {"security_group_name": "mine"}}, ""),
        ("gcp", ["8080"], {}, ""),
        ("nebius", None, {}, ""),
        ("runpod", None, {}, NO_LINKS.format("RunPod")),
        ("vast", None, {}, NO_LINKS.format("Vast")),
    ],
)
def test_skypilot_says_whether_two_clusters_reach_each_other(cloud, ports, override, why):
    pytest.importorskip("sky")
    from sky.utils.registry import CLOUD_REGISTRY

    resources = SimpleNamespace(
        cloud=CLOUD_REGISTRY.from_str(cloud),
        region="eastus",
        ports=ports,
        cluster_config_overrides=override,
        use_spot=True,
        instance_type="x",
        accelerators=None,
    )
    assert Calls._apart(cloud, resources) == why


class Overwrites(MemoryStore):
    def create(self, key, data):
        self.put(key, data)
        return True


class Denies(MemoryStore):
    def list(self, prefix):
        raise StoreError("s3://b: 403 Forbidden")


@pytest.mark.parametrize(
    ("store", "says", "remedy"),
    [(Overwrites, "overwrote", "conditional writes"), (Denies, "403 Forbidden", "credentials")],
)
def test_buckets_that_will_not_do(store, says, remedy):
    made = store("memory://bad", {})
    found = examine(url="memory://bad", store=made)["bucket"]
    assert found.state == FAIL and says in found.found and remedy in found.remedy


@pytest.mark.parametrize(
    ("envs", "env", "state", "says"),
    [
        ({"TRACKERS": ""}, {}, OK, "needs no key"),
        ({"TRACKERS": "tensorboard"}, {}, OK, "tensorboard"),
        ({"TRACKERS": "wandb", "WANDB_MODE": "offline"}, {}, OK, "offline"),
        # for want of a key, not for this variable
        ({"TRACKERS": "wandb"}, {"WANDB_MODE": "offline"}, WARN, "offline"),
        (
            {"TRACKERS": "wandb"},
            {"WANDB_API_KEY": "k"},
            WARN,
            "offline: what is committed is kept in the bucket",
        ),
        ({"TRACKERS": "wandb"}, {}, WARN, "no key"),
        ({"TRACKERS": "wandb", "SECRET": "k"}, {}, OK, "online, a key is in the task's secrets"),
        ({"TRACKERS": "wandb", "SECRET": "k", "WANDB_MODE": "offline"}, {}, WARN, "offline"),
        (
            {"TRACKERS": "wandb", "WANDB_MODE": "online"},
            {"WANDB_API_KEY": "k"},
            FAIL,
            "nothing will be published",
        ),
        ({"TRACKERS": "wandb", "SECRET": "k", "WANDB_MODE": "online"}, {}, OK, "online"),
    ],
)
def test_what_will_be_published(tmp_path, envs, env, state, says):
    """What doctor says is what the tracker of a node with this task's envs and secrets does."""
    path = tmp_path / "t.yaml"
    path.write_text("run: x\n")
    secrets = {"WANDB_API_KEY": envs["SECRET"]} if "SECRET" in envs else {}
    task = load(path, {k: v for k, v in envs.items() if k != "SECRET"}, secrets, use_skypilot=False)
    found = doctor.tracker(task, env, tmp_path)
    assert (found.state, says in found.found) == (state, True), found
    key, mode = wandb_key({**task.envs, **task.secrets}, tmp_path), task.envs.get("WANDB_MODE", "")
    assert wandb_online(key, mode) == ("wandb: online" in found.found)


def test_a_key_from_wandb_login_is_seen(tmp_path):
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password secret\n")
    (tmp_path / ".netrc").chmod(0o600)
    found = doctor.tracker(None, {}, tmp_path)
    assert (found.state, found.found) == (OK, "wandb: online, a key is here")


def program(tmp_path, name, script):
    path = tmp_path / name
    path.write_text(f"#!{sys.executable}\n{script}\n")
    path.chmod(0o755)
    return lambda command: (
        subprocess.run(
            [path, *command[1:]], capture_output=True, text=True, timeout=30, check=True
        ).stdout
    )


@pytest.mark.parametrize(
    ("cloud", "region", "says", "state", "words"),
    [
        ("aws", "us-east-1", [{"name": "All P5 Spot Instance Requests", "value": 192.0}], OK, "us-east-1: All P5 Spot"),
        ("aws", "us-east-1", [{"name": "All P5 Spot Instance Requests", "value": 0.0}], WARN, "none of 1"),
        ("gcp", "us-east4", {"quotas": [{"metric": "PREEMPTIBLE_NVIDIA_H100_GPUS", "limit": 8}, {"metric": "CPUS", "limit": 24}]}, OK, "8"),
        ("azure", "eastus", [{"name": {"value": "lowPriorityCores"}, "limit": "0"}], WARN, "none of 1"),
        ("azure", "eastus", {"error": "?"}, WARN, "not told"),
    ],
)  # fmt: skip
def test_quotas_are_asked_with_the_clouds_own_command(tmp_path, cloud, region, says, state, words):
    asked = []
    ask = program(tmp_path, cloud, f"print({json.dumps(json.dumps(says))})")
    found = doctor.quota(cloud, region, lambda command: asked.append(command) or ask(command))
    assert (found.state, words in found.found) == (state, True), found
    assert region in asked[0] and asked[0][0] in ("aws", "gcloud", "az")


def test_a_quota_that_cannot_be_asked_says_how(tmp_path, task):
    found = examine(task)["quota aws"]
    assert (
        found.state == WARN
        and "`aws` is not installed" in found.found
        and "aws service-quotas" in found.remedy
    )
    ask = program(
        tmp_path,
        "gcloud",
        "import sys; print('You do not have permission', file=sys.stderr); sys.exit(1)",
    )
    assert "permission" in doctor.quota("gcp", "us-central1", ask).found


def test_gpus_are_asked_in_a_process_that_may_fail(monkeypatch):
    monkeypatch.setattr(doctor, "GPU_PROBE", REAL_PROBE)
    assert doctor.gpus().state in (OK, WARN)
    monkeypatch.setattr(doctor, "GPU_PROBE", "raise RuntimeError('no kernel image is available')")
    found = doctor.gpus()
    assert found.state == FAIL and "no kernel image" in found.found and "nvidia-smi" in found.remedy
    monkeypatch.setattr(doctor, "GPU_PROBE", "import time; time.sleep(600)")
    monkeypatch.setattr(doctor, "GPU_TIMEOUT_S", 1.0)
    assert "did not answer" in doctor.gpus().found


def test_what_people_and_programs_read(task):
    found = list(examine(task, sky=Sky([])).values())
    console = Console(record=True, width=120, file=io.StringIO())
    doctor.show(found, console)
    text = console.export_text()
    assert "fail  offers" in text and "-> loosen `resources`" in text
    parsed = json.loads(doctor.to_json(found))
    assert parsed["ok"] is False and {f["what"] for f in parsed["findings"]} >= {
        "API server",
        "offers",
        "tracker",
    }


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        prove,
        "sky_broker",
        lambda _: type("Closed", (Sky,), {"close": lambda self: None})([EAST, WEST]),
    )
    monkeypatch.setattr(doctor, "skypilot", lambda: doctor.Finding("SkyPilot", OK, "0.14.1"))
    run = tmp_path / "run"
    with pytest.raises(SystemExit) as ended:
        cli.main(["prove", "doctor", "--run", str(run), "--json"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    assert open_store(str(run)).list("") == []
    with pytest.raises(SystemExit) as ended:
        cli.main(["prove", "doctor", "no-such.yaml"])
    assert ended.value.code == 2
