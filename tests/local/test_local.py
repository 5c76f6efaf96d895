"""The local cloud: nodes are real processes, and go the way spot machines go - whole, and
sometimes without a word."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from harness.clouds.sky_task import Task
from harness.core.facts import Chain, SessionStarted, StepDone
from harness.core.world import BadInput, CloudUnavailable, NodeState, Offer
from harness.local import provider
from harness.local.local_cloud import LocalCloud, clean, visible_gpus
from harness.local.metadata_reply import TOKEN_HEADER, TTL_HEADER
from harness.notices.aws import AwsSource
from harness.notices.sources import detect
from storage.stores.store_urls import open_store
from support.worlds import until

WAIT_S = 120.0  # for anything that takes some 0.1 s when the machine is not busy
SLEEP = "sleep 300"
# Four processes: the node's command with a child, and another child with a session, and a child, of
# its own.
FAMILY = "sleep 300 & setsid bash -c 'sleep 300 & wait' & echo started; wait"


def of_cloud(state_dir: Path, nodes_only: bool = False) -> dict[int, dict[str, str]]:
    """Pid and environment of every process of this STATE_DIR: nodes and what they started, and
    provider and guard."""
    return {
        p.pid: e
        for p in psutil.process_iter()
        if (e := _environ_if_of(p, state_dir, nodes_only)) is not None
    }


def _environ_if_of(p: psutil.Process, state_dir: Path, nodes_only: bool) -> dict[str, str] | None:
    try:
        environ = p.environ()
        mine = environ.get("HARNESS_NODE_DIR", "").startswith(f"{state_dir}/") or (
            not nodes_only and str(state_dir) in p.cmdline()
        )
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return None
    return environ if mine else None


def of_nodes(state_dir: Path) -> dict[int, dict[str, str]]:
    return of_cloud(state_dir, nodes_only=True)


@pytest.fixture
def make(tmp_path):
    """Clouds on one STATE_DIR; whatever happens, nothing is left of them."""
    made = []

    def make(run=SLEEP, market="calm", wanted=(1, 3), **more):
        task = Task(tmp_path / "t.yaml", "t", run, envs={"GREETING": "hello"}, workdir=tmp_path)
        more = {
            "env": {**os.environ, "RANK": "7", "HARNESS_X": "1"},
            "launch_s": 0.05,
            "gpus": (),
            **more,
        }
        made.append(LocalCloud(tmp_path / "state", task, market, wanted=wanted, **more))
        return made[-1]

    yield make
    for cloud in made:
        cloud.shutdown()
    assert until(lambda: not of_cloud(tmp_path / "state"), "nothing to be left")


def node(cloud, attempt):
    return next(n for n in cloud.nodes() if n.attempt == attempt)


def up(cloud, *attempts):
    for attempt in attempts:
        cloud.launch(attempt, cloud.offers()[0])
    for attempt in attempts:
        until(lambda a=attempt: node(cloud, a).state is NodeState.UP, f"attempt {attempt} to be up")


def gone(cloud, attempt):
    return until(
        lambda: (n := node(cloud, attempt)).state is NodeState.GONE and n,
        f"attempt {attempt} to be gone",
    )


def log_of(cloud, attempt):
    return cloud.state_dir / "nodes" / str(attempt) / "log"


def environment(cloud, attempt):
    """Of its command, which may have been forked and not begun yet."""

    def found():
        nodes = of_nodes(cloud.state_dir).values()
        return next((e for e in nodes if e["HARNESS_ATTEMPT"] == str(attempt)), None)

    return until(found, f"the environment of attempt {attempt}")


# ---- a node's life -------------------------------------------------------------------------------
def test_a_node_runs_its_command_and_tells_how_it_ended(make, tmp_path):
    cloud = make('echo "$GREETING from $PWD"; which python; sleep 300 & setsid sleep 300 & exit 33')
    assert cloud.nodes() == []
    cloud.launch(1, cloud.offers()[0])
    end = gone(cloud, 1)
    assert (end.exit_code, end.reason, end.offer) == (33, "exited", cloud.offers()[0])
    assert end.asked_s <= end.up_s <= end.gone_s
    assert log_of(cloud, 1).read_text().splitlines() == [
        f"hello from {tmp_path}",
        str(Path(sys.executable).parent / "python"),
    ]
    assert not of_nodes(cloud.state_dir)  # what it left behind went with the machine
    cloud.launch(1, cloud.offers()[0])  # the same attempt again: it has been
    assert [n.attempt for n in cloud.nodes()] == [1]


def test_a_node_sees_what_skypilot_sets_and_nothing_of_its_caller(make):
    cloud = make()
    up(cloud, 1, 2)
    first, second = environment(cloud, 1), environment(cloud, 2)
    assert {
        k: v for k, v in first.items() if k.startswith("SKYPILOT_") and k != "SKYPILOT_TASK_ID"
    } == {
        "SKYPILOT_NODE_RANK": "0",
        "SKYPILOT_NODE_IPS": "127.0.0.1",
        "SKYPILOT_NUM_NODES": "1",
        "SKYPILOT_NUM_GPUS_PER_NODE": "0",
        "SKYPILOT_CLUSTER_INFO": (
            '{"cluster_name": "local-1", "cloud": "local", "region": "local/a", "zone": null}'
        ),
        "SKYPILOT_INTERNAL_JOB_ID": "1",
    }
    assert first["SKYPILOT_TASK_ID"] == second["SKYPILOT_TASK_ID"]
    assert (first["HARNESS_ATTEMPT"], first["HARNESS_OFFER"], second["HARNESS_ATTEMPT"]) == (
        "1",
        "local/a",
        "2",
    )
    assert Path(first["HARNESS_NODE_DIR"]) == log_of(cloud, 1).parent
    assert first["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "1")
    assert first["GREETING"] == "hello"
    assert first["HOME"] == os.environ["HOME"]
    assert not {"RANK", "HARNESS_X", "PYTEST_CURRENT_TEST"} & set(first)
    assert first["AWS_EC2_METADATA_SERVICE_ENDPOINT"] != second["AWS_EC2_METADATA_SERVICE_ENDPOINT"]


def test_launch_is_idempotent_and_terminate_of_nobody_does_nothing(make):
    cloud = make(FAMILY)
    up(cloud, 1)
    cloud.launch(1, cloud.offers()[0])
    cloud.terminate(99)
    assert len(cloud.nodes()) == 1
    until(lambda: len(of_nodes(cloud.state_dir)) == 4, "the whole family")
    cloud.terminate(1)
    assert (node(cloud, 1).state, node(cloud, 1).reason, node(cloud, 1).exit_code) == (
        NodeState.GONE,
        "terminated",
        None,
    )
    assert not of_nodes(cloud.state_dir)


def test_beyond_capacity_there_is_none(make):
    cloud = make(wanted=(1, 1))
    up(cloud, 1)
    cloud.launch(2, cloud.offers()[1])
    refused = until(lambda: (n := node(cloud, 2)).state is NodeState.NO_CAPACITY and n)
    assert refused.up_s is None
    assert refused.gone_s is not None
    cloud.terminate(1)
    up(cloud, 3)


# ---- being taken ---------------------------------------------------------------------------------
def test_a_notice_is_served_and_the_machine_is_taken_at_its_deadline_with_everything_on_it(make):
    cloud = make(FAMILY)
    up(cloud, 1, 2)
    until(lambda: len(of_nodes(cloud.state_dir)) == 8, "both families")
    endpoint = environment(cloud, 1)["AWS_EC2_METADATA_SERVICE_ENDPOINT"]
    source = AwsSource(endpoint)
    assert source.poll() == []
    asked_s, grace_s = time.time(), 6.0  # for all that is asked while it is there
    cloud.event("preempt", grace_s=grace_s)
    (notice,) = source.poll()
    assert (notice.kind, notice.source) == ("kill", "aws")
    # whole seconds, rounded down
    assert asked_s + grace_s - 1.1 <= notice.deadline_s <= time.time() + grace_s
    assert node(cloud, 1).alive
    end = gone(cloud, 1)
    assert (end.reason, end.exit_code) == ("preempted", None)
    assert notice.deadline_s <= end.gone_s <= asked_s + grace_s + WAIT_S
    assert {e["HARNESS_ATTEMPT"] for e in of_nodes(cloud.state_dir).values()} == {"2"}
    port = int(endpoint.rstrip("/").rpartition(":")[2])
    with socket.socket() as s:
        assert s.connect_ex(("127.0.0.1", port)) != 0  # its metadata endpoint went with it


def test_a_node_that_heeds_its_notice_is_gone_before_the_deadline(make):
    base, curl = "${AWS_EC2_METADATA_SERVICE_ENDPOINT}latest", "curl -sf --noproxy '*'"
    token = f"$({curl} -X PUT -H '{TTL_HEADER}: 60' {base}/api/token)"
    ask = f'{curl} -H "{TOKEN_HEADER}: {token}" {base}/meta-data/spot/instance-action'
    cloud = make(f"while ! {ask}; do sleep 0.05; done; exit 33")
    up(cloud, 1)
    cloud.event("preempt", grace_s=60)
    end = gone(cloud, 1)
    assert (end.exit_code, end.reason) == (33, "exited")
    assert json.loads(log_of(cloud, 1).read_text())["action"] == "terminate"


def test_sudden_death_and_total_outage(make):
    cloud = make(FAMILY)
    up(cloud, 1, 2, 3)
    cloud.event("kill", victim=-1)
    assert gone(cloud, 3).reason == "killed"
    assert [n.attempt for n in cloud.nodes() if n.alive] == [1, 2]
    cloud.event("outage", seconds=4.0)
    assert {gone(cloud, 1).reason, gone(cloud, 2).reason} == {"killed"}
    assert not of_nodes(cloud.state_dir)
    cloud.launch(4, cloud.offers()[0])
    until(lambda: node(cloud, 4).state is NodeState.NO_CAPACITY)
    until(lambda: cloud.status()["available"] == 2, "the end of the outage")
    up(cloud, 5)


def test_the_market_follows_the_runs_progress(make, tmp_path):
    run_url = str(tmp_path / "run")
    cloud = make(market="demo", run_url=run_url)
    up(cloud, 1, 2)
    cloud.launch(3, cloud.offers()[0])
    until(lambda: node(cloud, 3).state is NodeState.NO_CAPACITY, "a third not to be had")
    chain = Chain("worker-x")
    facts = [
        SessionStarted(1, 2, 0, 0, 100, 8, 4, (1, 1), "fast", "ddp", "cpu", 0.0),
        StepDone(20, 1, 1.0, 0.0, 0.1, 8, 0),
    ]
    lines = "\n".join(chain.line(float(t), fact) for t, fact in enumerate(facts))
    open_store(run_url).create("facts/worker-x/000000.jsonl", lines.encode())
    until(lambda: cloud.status()["available"] == 3, "capacity to rise at 15 %")
    assert cloud.status()["progress"] == 0.2
    up(cloud, 4)


@pytest.mark.parametrize("speaks", ["gcp", "azure"])
def test_a_node_may_have_another_clouds_metadata_service(make, speaks, tmp_path):
    cloud = make(notices=speaks)
    up(cloud, 1)
    sources = detect(
        {k: v for k, v in environment(cloud, 1).items() if k != "HARNESS_NODE_DIR"}, tmp_path
    )
    assert {s.name for s in sources} == {speaks}
    assert not any(s.poll() for s in sources)
    cloud.event("preempt", grace_s=WAIT_S)
    heard = [n for s in sources[:1] for n in s.poll()]
    assert [(n.kind, n.source) for n in heard] == [("kill", speaks)]


def test_a_metadata_endpoint_can_be_made_to_fail(make):
    cloud = make()
    up(cloud, 1)
    source = AwsSource(environment(cloud, 1)["AWS_EC2_METADATA_SERVICE_ENDPOINT"])
    cloud.inject(1, status=503)
    source.poll()
    assert source.errors > 0
    with pytest.raises(BadInput, match="not up"):
        cloud.inject(2, status=503)
    with pytest.raises(BadInput):
        cloud.event("party")


# ---- seats that die ------------------------------------------------------------------------------
CONTROLLER = """
import os, sys, time
from pathlib import Path
from harness.local.local_cloud import LocalCloud
from harness.clouds.sky_task import Task
cloud = LocalCloud(sys.argv[1], Task(Path("t"), "t", "sleep 300"), "calm", env=dict(os.environ), launch_s=0.05, gpus=())
cloud.launch(1, cloud.offers()[0])
while not all(n.up_s for n in cloud.nodes()): time.sleep(0.02)
print("up", flush=True)
time.sleep(300)
"""


def test_nodes_outlive_their_controller_and_the_next_one_adopts_them(make):
    cloud = make()
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, str(cloud.state_dir)], stdout=subprocess.PIPE, text=True
    )
    assert controller.stdout.readline() == "up\n"
    controller.kill()
    controller.wait(timeout=WAIT_S)
    controller.stdout.close()
    assert node(cloud, 1).state is NodeState.UP
    assert of_nodes(cloud.state_dir)
    cloud.terminate(1)
    assert not of_nodes(cloud.state_dir)


def test_when_the_provider_is_killed_its_nodes_die_and_the_next_one_says_so(make):
    cloud = make(FAMILY)
    up(cloud, 1)
    cloud.launch(2, cloud.offers()[0])
    assert node(cloud, 2).alive
    until(lambda: len(of_nodes(cloud.state_dir)) >= 4)
    pid = cloud.status()["pid"]
    os.kill(pid, signal.SIGKILL)
    until(lambda: not of_nodes(cloud.state_dir), "the nodes to die with their provider")
    died_s = time.time()
    until(lambda: cloud.status()["pid"] != pid, "a new provider")
    end = node(cloud, 1)
    assert (end.state, end.reason, end.exit_code) == (NodeState.GONE, "provider died", None)
    assert end.up_s <= end.gone_s <= died_s
    up(cloud, 3)


def test_history_outlives_a_provider_that_ends_because_it_is_idle(make):
    cloud = make("exit 5", idle_exit_s=0.3)
    cloud.launch(1, cloud.offers()[0])
    gone(cloud, 1)
    before = cloud.nodes()
    until(lambda: not of_cloud(cloud.state_dir), "an idle provider to end")
    assert cloud.nodes() == before  # by a new one


def test_there_is_one_provider_per_state_dir(make):
    cloud = make()
    pid = cloud.status()["pid"]
    second = subprocess.run(
        [sys.executable, "-m", "harness.local.provider", str(cloud.state_dir)],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert second.returncode == provider.ALREADY_RUNNING
    assert "running already" in second.stderr
    assert cloud.status()["pid"] == pid
    other = make()
    assert other.status()["pid"] == pid  # a second controller finds the first one's


def test_shutdown_leaves_nothing_but_the_history(make):
    cloud = make(FAMILY)
    up(cloud, 1, 2)
    pid = cloud.status()["pid"]
    ports = [
        c.laddr.port
        for c in psutil.Process(pid).net_connections("tcp")
        if c.status == psutil.CONN_LISTEN
    ]
    assert len(ports) == 3  # the API and two metadata endpoints
    assert {c.laddr.ip for c in psutil.Process(pid).net_connections("tcp")} == {"127.0.0.1"}
    cloud.shutdown()
    assert not of_cloud(cloud.state_dir)
    assert not psutil.pid_exists(pid)
    for port in ports:
        with socket.socket() as s:
            assert s.connect_ex(("127.0.0.1", port)) != 0
    assert [(n.state, n.reason) for n in cloud.nodes()] == [(NodeState.GONE, "terminated")] * 2
    cloud.terminate(1)
    cloud.shutdown()
    with pytest.raises(CloudUnavailable, match="shut down"):
        cloud.launch(3, cloud.offers()[0])


def test_a_provider_that_hangs_is_told_and_can_still_be_ended(make, monkeypatch):
    monkeypatch.setattr("harness.local.local_cloud.CALL_TIMEOUT_S", 0.3)
    monkeypatch.setattr("harness.local.local_cloud.END_WITHIN_S", 1.0)
    cloud = make()
    up(cloud, 1)
    os.kill(cloud.status()["pid"], signal.SIGSTOP)
    with pytest.raises(CloudUnavailable, match=r"did not answer GET /nodes.*provider\.log"):
        cloud.nodes()
    cloud.shutdown()


def test_a_provider_that_cannot_start_leaves_its_last_words(make):
    cloud = make()
    cloud.state_dir.mkdir()
    (cloud.state_dir / "nodes.json").write_text("{")
    with pytest.raises(CloudUnavailable, match="JSONDecodeError"):
        cloud.nodes()


# ---- the door ------------------------------------------------------------------------------------
def test_the_api_asks_for_its_token_and_no_secret_lies_on_disk(make, tmp_path):
    task = Task(tmp_path / "t.yaml", "t", "env", secrets={"KEY": "s3cret-value"}, workdir=tmp_path)
    cloud = make()
    cloud.task = Task(task.path, task.name, SLEEP, secrets=task.secrets, workdir=tmp_path)
    up(cloud, 1)
    assert environment(cloud, 1)["KEY"] == "s3cret-value"
    for path in cloud.state_dir.rglob("*"):
        if path.is_file():
            assert "s3cret-value" not in path.read_text(), path
    assert stat.S_IMODE((cloud.state_dir / "provider.json").stat().st_mode) == 0o600
    address = json.loads((cloud.state_dir / "provider.json").read_text())
    for headers in (
        {},
        {"Authorization": "Bearer x"},
        {"Authorization": "Bearer é".encode().decode("latin-1")},
    ):
        request = urllib.request.Request(
            f"http://127.0.0.1:{address['port']}/nodes", headers=headers
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with pytest.raises(urllib.error.HTTPError) as e:
            opener.open(request, timeout=5)
        assert e.value.code == 401
        e.value.close()


def test_bad_input_is_told_before_anything_starts(tmp_path):
    def cloud(market="calm", **changes):
        return LocalCloud(
            tmp_path / "state",
            Task(tmp_path / "t", "t", "true", **changes),
            market,
            wanted=3,
            env={},
        )

    for make in (
        lambda: cloud("sedd:7"),
        lambda: cloud(num_nodes=2),
        lambda: cloud(workdir=tmp_path / "none"),
    ):
        with pytest.raises(BadInput):
            make()
    assert not (tmp_path / "state").exists()


def test_an_unknown_offer_is_told(make):
    with pytest.raises(BadInput, match="local/a, local/b, local/c"):
        make().launch(1, Offer(1.0, "local/zzz"))


def test_clean_environment():
    kept = {"PATH": "/bin", "AWS_ACCESS_KEY_ID": "k", "RANKING": "x", "MY_HARNESS_X": "1"}
    dropped = [
        "HARNESS_RUN",
        "SKYPILOT_NODE_RANK",
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "TORCHELASTIC_RUN_ID",
        "PYTEST_CURRENT_TEST",
        "AWS_EC2_METADATA_DISABLED",
        "BASH_ENV",
    ]
    assert clean({**kept, **dict.fromkeys(dropped, "x")}) == kept


def test_gpus_are_shared_out(tmp_path):
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ("0", "2", "10")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, 1"}, tmp_path) == ("3", "1")
    assert (
        visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path)
        == visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path)
        == ()
    )
    eight = tuple("01234567")
    assert [provider.share_of_gpus(eight, slot, 3) for slot in range(3)] == [
        ("0", "1"),
        ("2", "3"),
        ("4", "5"),
    ]
    assert [provider.share_of_gpus(("0",), slot, 3) for slot in range(3)] == [("0",)] * 3
    assert provider.share_of_gpus((), 0, 3) == ()


def test_gpus_reach_the_node(make):
    cloud = make(gpus=("4", "5", "6", "7"), wanted=(1, 2))
    up(cloud, 1, 2)
    seen = [environment(cloud, n) for n in (1, 2)]
    assert [e["CUDA_VISIBLE_DEVICES"] for e in seen] == ["4,5", "6,7"]
    assert {e["SKYPILOT_NUM_GPUS_PER_NODE"] for e in seen} == {"2"}


def test_the_local_clouds_state_of_another_user_is_refused(tmp_path, monkeypatch) -> None:
    another = 1 + os.geteuid()
    (tmp_path / "theirs").mkdir(mode=0o755)
    monkeypatch.setattr(os, "geteuid", lambda: another)
    cloud = LocalCloud(tmp_path / "theirs", Task(Path("-"), "x", "true"), gpus=())
    with pytest.raises(BadInput, match="wanted a folder of this user's own for the local cloud"):
        cloud.nodes()
