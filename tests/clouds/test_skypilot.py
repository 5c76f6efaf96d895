"""SkyPilot's cloud behind our seam: what it shows of clusters, what it makes of errors, and
that nothing is left behind."""

import json
import re
import sys
import time

import pytest

from harness.clouds.sky_broker import TRIES, Broker, SkyError, told, verdict
from harness.clouds.sky_clusters import attempt_of_cluster, bring_down, cluster_name, tag, tails
from harness.clouds.sky_task import load
from harness.clouds.skypilot import SkyPilotCloud, has_spot_market
from harness.core.world import UNFIT, BadInput, CloudUnavailable, NodeState
from support.fakesky import EAST, WEST, FakeSky, answer

URL = "s3://b/runs/x"


@pytest.fixture
def task(tmp_path):
    path = tmp_path / "task.yaml"
    resources = "resources: {accelerators: 'H100:8', use_spot: true}"
    path.write_text(
        f"name: t\n{resources}\nenvs: {{A: '1'}}\nsecrets: {{KEY: hidden}}\nrun: exec train\n"
    )
    return load(path, {"RUN": URL}, use_skypilot=False)


@pytest.fixture
def sky():
    return FakeSky([EAST, WEST])


@pytest.fixture
def cloud(task, sky, request):
    made = SkyPilotCloud(task, URL, sky, ask_every_s=0.0, now=sky.now)
    made.look()
    made._watcher = True  # the tests look themselves
    yield made
    made._pool.shutdown()


def look(cloud, sky, seconds=0.0):
    """Time passes; the cloud looks; questions to nodes are answered."""
    sky.tick(seconds)
    # the answer to a question that was asked before; one that is asked now; what follows from it
    for _ in range(3):
        cloud.look()
        for attempt in cloud._attempts.values():
            if attempt.polls.poll:
                attempt.polls.poll.exception()
    return {n.attempt: n for n in cloud.nodes()}


def up(cloud, sky, *attempts):
    for n in attempts:
        cloud.launch(n, cloud.offers()[0])
    return look(cloud, sky, 20.0)


def name(n):
    return f"{tag(URL)}-{n:04d}"


def test_offers_are_ranked_priced_and_placed(cloud):
    first, second = cloud.offers()
    assert (first.name, first.usd_per_h, first.on_demand_usd_per_h, first.spot) == (
        "aws/us-east-1/use1-az1/p5",
        10.0,
        50.0,
        True,
    )
    assert (first.place, second.place, first.gpus, first.speed) == (
        "aws/us-east-1",
        "nebius/eu-north1",
        8,
        1.0,
    )


def test_a_spot_price_that_is_the_on_demand_price_is_no_offer(task, sky):
    sky.found.append(answer("aws/us-east-1/use1-az4/p5", 5.0, on_demand=5.0))
    made = SkyPilotCloud(task, URL, sky, ask_every_s=0.0, now=sky.now)
    assert [o.usd_per_h for o in made.offers()] == [10.0, 12.0]
    assert made.no_market == ("aws/us-east-1/use1-az4/p5",)
    assert has_spot_market(answer("a/b/c", 5.0, on_demand=0.0))  # unknown on-demand price
    # one price for all nodes of a cluster, whose labels say which ones are spot
    assert has_spot_market(answer("kubernetes/lab/8CPU--32GB--H100:8", 16.0, on_demand=16.0))


def test_no_offer_at_all_says_what_to_do(task):
    with pytest.raises(BadInput, match=r"task\.yaml.*sky check"):
        SkyPilotCloud(task, URL, FakeSky([])).offers()


# as SkyPilot 0.14.1 said it of a Kubernetes cluster without spot labels
NO_SPOT = """The following features are not supported by Kubernetes:
\tFeature        Reason
\tspot_instance  Spot instances are not supported in Kubernetes."""


@pytest.mark.parametrize(("on_demand", "told"), [(False, "`--on-demand` takes"), (True, "`sky check`")])
def test_a_cluster_without_spot_nodes_is_refused_with_the_remedy(task, on_demand, told):
    class Without(FakeSky):
        def offers(self, config, clouds, on_demand):
            raise SkyError("LookupError", NO_SPOT)

    made = SkyPilotCloud(task, URL, Without(), on_demand=on_demand)
    with pytest.raises(BadInput) as refused:
        made.offers()
    said = str(refused.value)
    assert "\n" not in said and "Spot instances are not supported in Kubernetes.; " + told in said


def test_a_member_knows_itself_and_is_pinned_to_its_place(cloud, sky):
    cloud.launch(3, cloud.offers()[0])
    config, secrets, idle_minutes = sky.configs[name(3)]
    # no recovery by SkyPilot: that is our job
    assert config["resources"] == {
        "infra": "aws/us-east-1/use1-az1",
        "use_spot": True,
        "labels": {"spotharness-run": URL},  # by which `harness guard` finds the run
    }
    cloud.launch(4, cloud.offers()[1])
    assert "labels" not in sky.configs[name(4)][0]["resources"]  # whose labels hold no URL
    assert config["envs"] | {"HARNESS_NODE": ""} == {
        "A": "1",
        "RUN": URL,
        "HARNESS_ATTEMPT": "3",
        "HARNESS_OFFER": "aws/us-east-1/use1-az1/p5",
        "HARNESS_SPEED": "1",  # of an H100, by which all are measured
        "HARNESS_NODE": "",
    }
    assert json.loads(config["envs"]["HARNESS_NODE"])["offer"]["usd_per_h"] == 10.0
    assert secrets == {"KEY": "hidden"} and "hidden" not in json.dumps(config["envs"])
    assert idle_minutes  # the cloud ends it by itself if nobody else can


def test_launch_is_asked_for_once_and_shown_as_it_goes(cloud, sky):
    cloud.launch(1, cloud.offers()[0])
    cloud.launch(1, cloud.offers()[0])
    assert [m for m, _ in sky.calls].count("launch") == 1
    assert look(cloud, sky, 5.0)[1].state is NodeState.PENDING
    node = look(cloud, sky, 20.0)[1]
    # billed from when SkyPilot had the machine
    assert (node.state, node.asked_s, node.up_s) == (NodeState.UP, 1000.0, 1000.0)
    # but its command began only now
    assert node.at_work_s == sky.now_s and node.been_up_s(sky.now_s + 5.0) == 5.0


def test_a_look_while_a_launch_is_asked_for_asks_for_no_second_one(task):
    """Two launches of one cluster are two jobs: the second would train on a node that the first
    has left for good."""

    class Slow(FakeSky):
        def launch(self, **arguments):
            cloud.look()  # the other thread does, all the time
            return super().launch(**arguments)

    sky = Slow([EAST, WEST])
    cloud = SkyPilotCloud(task, URL, sky, ask_every_s=0.0, now=sky.now)
    cloud.look()
    cloud.launch(1, cloud.offers()[0])
    cloud.look()
    assert [m for m, _ in sky.calls].count("launch") == 1


def test_clouds_and_nodes_are_not_asked_all_the_time(task, sky):
    """Clouds limit requests, and what is asked of a node costs it processes."""
    cloud = SkyPilotCloud(task, URL, sky, ask_every_s=3.0, now=sky.now)
    cloud.look()
    cloud._watcher = True
    up(cloud, sky, 1)
    sky.calls.clear()
    for _ in range(30):
        look(cloud, sky, 0.5)
    asked = [m for m, _ in sky.calls]
    refreshed = [a["refresh"] for m, a in sky.calls if m == "clusters" and a["refresh"]]
    assert asked.count("job") <= 6 and len(refreshed) <= 6 and asked.count("clusters") == 90
    sky.take_away(name(1))
    assert look(cloud, sky, 3.0)[1].state is NodeState.GONE
    cloud._pool.shutdown()


def test_who_is_slow_to_answer_is_asked_less_often(task):
    class Slow(FakeSky):
        def clusters(self, prefix, refresh=()):
            self.tick(5.0 if refresh else 0.0)
            return super().clusters(prefix, refresh)

    sky = Slow([EAST, WEST])
    cloud = SkyPilotCloud(task, URL, sky, ask_every_s=3.0, now=sky.now)
    cloud.look()
    cloud._watcher = True
    up(cloud, sky, 1)
    began_s, sky.calls = sky.now(), []
    while sky.now() - began_s < 100.0:
        look(cloud, sky, 1.0)
    refreshed = len([a for m, a in sky.calls if m == "clusters" and a["refresh"]])
    assert 8 <= refreshed <= 10  # 5 s for the answer, 5 s of rest
    cloud._pool.shutdown()


def test_a_stale_status_is_not_believed(cloud, sky):
    up(cloud, sky, 1)
    sky.take_away(name(1))
    assert sky.clusters(name(1))[0]["status"] == "UP"
    node = look(cloud, sky, 3.0)[1]
    assert (node.state, node.reason, node.exit_code, node.gone_s) == (
        NodeState.GONE,
        "preempted",
        None,
        sky.now_s,
    )


@pytest.mark.parametrize(
    ("state", "log", "code"),
    [
        ("SUCCEEDED", "", 0),
        ("FAILED", "ERROR: Job 1 failed with \nreturn code list: [33] ", 33),
        ("FAILED", "ERROR: Job 1 failed with return code list: [0, 33]", 33),
        ("FAILED", "no such line", 1),
        ("FAILED_SETUP", "", 1),
    ],
)
def test_a_node_whose_command_ended_is_brought_down_and_then_gone(cloud, sky, state, log, code):
    up(cloud, sky, 1)
    sky.end_job(name(1), state, log)
    assert look(cloud, sky)[1].state is NodeState.UP  # billed until it is gone
    look(cloud, sky)
    node = look(cloud, sky, 10.0)[1]
    assert (node.state, node.exit_code, node.reason) == (NodeState.GONE, code, "exited")
    assert not sky.real


def test_a_failed_log_is_kept(task, sky, tmp_path):
    made = SkyPilotCloud(task, URL, sky, ask_every_s=0.0, now=sky.now, log_dir=tmp_path / "logs")
    made.look()
    made._watcher = True
    up(made, sky, 1)
    sky.end_job(name(1), "FAILED", "Traceback: boom")
    look(made, sky)
    assert (tmp_path / "logs" / f"{name(1)}.log").read_text() == "Traceback: boom"


def test_terminate_is_done_once_and_proven(cloud, sky):
    up(cloud, sky, 1, 2)
    cloud.terminate(1)
    cloud.terminate(1)
    cloud.terminate(99)
    assert look(cloud, sky)[1].state is NodeState.UP
    nodes = look(cloud, sky, 7.0)
    assert (nodes[1].state, nodes[1].reason) == (NodeState.GONE, "terminated")
    assert nodes[2].state is NodeState.UP
    assert [a["name"] for m, a in sky.calls if m == "down"] == [name(1)]


def test_a_down_that_fails_is_done_again(cloud, sky):
    up(cloud, sky, 1)
    sky.down_trouble.append(SkyError("RuntimeError", "the cloud had a cold"))
    cloud.terminate(1)
    look(cloud, sky)
    look(cloud, sky, 7.0)
    assert look(cloud, sky, 5.0)[1].alive  # not yet: it is given time
    look(cloud, sky, 20.0)
    assert not look(cloud, sky, 10.0)[1].alive


def test_a_launch_that_goes_on_can_be_ended(cloud, sky):
    cloud.launch(1, cloud.offers()[0])
    look(cloud, sky, 2.0)
    cloud.terminate(1)
    look(cloud, sky)
    node = look(cloud, sky, 10.0)[1]
    assert (node.state, node.up_s) == (NodeState.GONE, None)
    assert not sky.records


FULL = SkyError(
    "ResourcesUnavailableError",
    "Failed",
    [("ResourcesUnavailableError", "InsufficientInstanceCapacity in use1-az1")],
)
VCPU = SkyError(
    "ResourcesUnavailableError",
    "Failed",
    [("ClientError", "VcpuLimitExceeded: you have requested more vCPU capacity")],
)
KEYS = SkyError(
    "ResourcesUnavailableError", "Failed", [("NoCredentialsError", "Unable to locate credentials")]
)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (FULL, "no-capacity"),
        (VCPU, "quota"),
        (KEYS, "credentials"),
        (
            SkyError(
                "ResourcesUnavailableError", "x", [("A", "VcpuLimitExceeded"), ("B", "no capacity")]
            ),
            "no-capacity",
        ),
        (SkyError("ResourcesUnavailableError", "nothing feasible"), "no-capacity"),
        (SkyError("NoCloudAccessError", "x"), "credentials"),
        (SkyError("CloudError", "google error: QUOTA_EXCEEDED"), "quota"),
        (SkyError("CloudError", "an internal error"), "again"),
        (SkyError("InvalidClusterNameError", "x"), "bad-input"),
        (SkyError("ValueError", "Invalid YAML"), "bad-input"),
        (SkyError("ClusterSetUpError", "setup ended with 1"), "setup"),
        (SkyError("BrokenProcessPool", "a worker died"), "again"),
        (SkyError("RequestInterruptedError", "restarted"), "again"),
    ],
)
def test_verdicts(error, says):
    assert verdict(error) == says


@pytest.mark.parametrize("error", [FULL, VCPU], ids=["capacity", "quota"])
def test_a_full_offer_is_a_refusal_that_costs_nothing(cloud, sky, error):
    sky.trouble["aws/us-east-1/use1-az1"] = [error]
    cloud.launch(1, cloud.offers()[0])
    look(cloud, sky, 20.0)
    node = look(cloud, sky, 1.0)[1]
    assert (node.state, node.up_s) == (NodeState.NO_CAPACITY, None)
    assert error.history[0][1] in node.reason
    assert len(cloud.offers()) == 2  # the loop leaves it alone for a while; it stays an offer


def test_a_cloud_without_credentials_is_not_asked_again(cloud, sky):
    sky.trouble["aws/us-east-1/use1-az1"] = [KEYS]
    cloud.launch(1, cloud.offers()[0])
    look(cloud, sky, 20.0)
    look(cloud, sky, 1.0)
    assert [o.place for o in cloud.offers()] == ["nebius/eu-north1"]
    sky.trouble["nebius/eu-north1/p5"] = [KEYS]
    cloud.launch(2, cloud.offers()[0])
    look(cloud, sky, 20.0)
    look(cloud, sky, 1.0)
    with pytest.raises(BadInput, match=r"Unable to locate credentials.*sky check"):
        cloud.offers()


def test_a_task_that_cannot_work_stops_the_run(cloud, sky):
    sky.trouble["aws/us-east-1/use1-az1"] = [
        SkyError("NotSupportedError", "ports are not supported here")
    ]
    cloud.launch(1, cloud.offers()[0])
    look(cloud, sky, 20.0)
    assert look(cloud, sky, 1.0)[1].state is NodeState.NO_CAPACITY
    with pytest.raises(BadInput, match=r"task\.yaml.*ports are not supported"):
        cloud.launch(2, cloud.offers()[0])


def test_spurious_errors_are_tried_again_but_not_forever(cloud, sky):
    sky.trouble["aws/us-east-1/use1-az1"] = [SkyError("BrokenProcessPool", "x")] * (TRIES - 1)
    cloud.launch(1, cloud.offers()[0])
    for _ in range(TRIES):
        nodes = look(cloud, sky, 20.0)
    assert nodes[1].state is NodeState.UP
    sky.trouble["aws/us-east-1/use1-az1"] = [SkyError("BrokenProcessPool", "x")] * TRIES
    cloud.launch(2, cloud.offers()[0])
    for _ in range(TRIES + 1):
        nodes = look(cloud, sky, 20.0)
    nodes = look(cloud, sky, 1.0)
    # A limit counts it; what SkyPilot showed is billed.
    assert (nodes[2].state, nodes[2].exit_code, nodes[2].up_s) == (NodeState.GONE, UNFIT, 1080.0)
    assert nodes[2].reason == "its launch failed 3 times: x"


def test_a_setup_that_fails_is_the_scripts_fault_and_is_billed(cloud, sky):
    sky.trouble["aws/us-east-1/use1-az1"] = [SkyError("ClusterSetUpError", "pip ended with 1")]
    cloud.launch(1, cloud.offers()[0])
    look(cloud, sky, 5.0)
    look(cloud, sky, 20.0)
    node = look(cloud, sky, 1.0)[1]
    assert (node.state, node.exit_code, node.up_s) == (NodeState.GONE, 1, 1000.0)


def test_a_restarted_api_server_loses_no_launch(cloud, sky):
    cloud.launch(1, cloud.offers()[0])
    look(cloud, sky, 5.0)
    sky.restart()
    look(cloud, sky, 1.0)
    assert look(cloud, sky, 20.0)[1].state is NodeState.UP


def test_a_later_controller_adopts_clusters_and_launches(task, cloud, sky):
    up(cloud, sky, 1)
    cloud.launch(2, cloud.offers()[1])
    later = SkyPilotCloud(task, URL, sky, ask_every_s=0.0, now=sky.now)
    later.look()
    later._watcher = True
    nodes = {n.attempt: n for n in later.nodes()}
    assert nodes[1].offer == cloud.offers()[0] and nodes[1].up_s is not None
    assert (nodes[2].state, nodes[2].offer.place) == (NodeState.PENDING, "nebius/eu-north1")
    nodes = look(later, sky, 20.0)
    assert [n.state for n in nodes.values()] == [NodeState.UP, NodeState.UP]
    later.shutdown_names = [later.terminate(n) for n in nodes]
    look(later, sky)
    look(later, sky, 10.0)
    assert not sky.records and not sky.real
    other = SkyPilotCloud(task, "s3://b/runs/other", sky, now=sky.now)
    other.look()
    assert other._attempts == {}


def test_names_of_clusters_are_short_and_of_one_run():
    assert attempt_of_cluster(name(3), URL) == 3
    for foreign in (f"{tag('s3://b/other')}-0003", f"{tag(URL)}0-0003", f"{tag(URL)}-x", tag(URL)):
        assert attempt_of_cluster(foreign, URL) is None
    # GCP allows 35 letters, and SkyPilot adds a dash and 8 letters of the user's hash
    assert len(name(999_999)) + 9 <= 35


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://b/runs/gpt-124m", "gpt-124m"),
        ("s3://b/runs/Llama_7B.sft-2/", "llama-7b"),
        ("s3://b/2026-11-27", "run-2026"),
        ("gs://b/runs/_", "run"),
        ("file:///tmp/x", "x"),
    ],
)
def test_names_of_clusters_say_the_run(url, shown):
    prefix = tag(url)
    assert re.fullmatch(shown + "-[a-z2-7]{9}", prefix)
    full = cluster_name(prefix, 999_999)
    assert re.fullmatch("[a-zA-Z]([-_.a-zA-Z0-9]*[a-zA-Z0-9])?", full)  # SkyPilot's own rule
    assert len(full) + 9 <= 35 and attempt_of_cluster(full, url) == 999_999


def test_a_cluster_that_comes_back_from_the_dead_is_seen_and_ended(cloud, sky):
    up(cloud, sky, 1)
    sky.take_away(name(1))
    look(cloud, sky, 1.0)
    sky.launch(name(1), sky.configs[name(1)][0], {}, None)  # a launch that the server had queued
    assert look(cloud, sky, 20.0)[1].alive
    look(cloud, sky)
    assert not look(cloud, sky, 10.0)[1].alive and not sky.real


def test_a_sick_cluster_is_given_up_after_a_while(cloud, sky):
    up(cloud, sky, 1)
    sky.records[name(1)].update(status="INIT", why="1 of 2 nodes is gone")
    assert look(cloud, sky, 5.0)[1].state is NodeState.UP
    look(cloud, sky, 40.0)
    look(cloud, sky)
    assert look(cloud, sky, 10.0)[1].reason == "preempted"


def test_a_silent_server_makes_the_loop_wait(cloud, sky):
    up(cloud, sky, 1)
    sky.tick(1000.0)
    with pytest.raises(CloudUnavailable, match="could not be seen"):
        cloud.nodes()


def test_shutdown_proves_that_nothing_is_left(task, sky, monkeypatch):
    made = SkyPilotCloud(task, URL, sky, ask_every_s=0.0, now=sky.now)
    made.launch(1, made.offers()[0])
    real_look = made.look

    def look_and_tick():
        sky.tick(5.0)
        real_look()

    made.look = look_and_tick
    made.shutdown(timeout_s=600.0)
    assert (
        not sky.records
        and not sky.real
        and not [n for n in (a.node() for a in made._attempts.values()) if n.alive]
    )


def test_down_without_a_controller(sky, cloud):
    up(cloud, sky, 1, 2)
    ticking = lambda method, timeout_s, **a: (sky.tick(4.0), sky(method, timeout_s, **a))[1]  # noqa: E731
    assert tails(sky, URL, 5) == {name(1): "", name(2): ""}
    assert bring_down(ticking, URL, 60.0) == [name(1), name(2)]
    assert bring_down(ticking, URL, 60.0) == []
    assert not sky.real


# ---- harness down --------------------------------------------------------------------------------


def test_managed_secrets_are_refused_early(tmp_path):
    path = tmp_path / "t.yaml"
    path.write_text("run: x\nsecrets: {KEY: }\n")
    with pytest.raises(BadInput, match="--secret KEY=value"):
        SkyPilotCloud(load(path, use_skypilot=False), URL, FakeSky())


# ---- the process ---------------------------------------------------------------------------------
FAKE_BROKER = """
import io, os, sys, time
sys.path.insert(0, {root!r})
from harness.clouds.sky_broker import serve

class Calls:
    def add(self, a, b): print("noise"); return a + b
    def fail(self): raise ValueError("\\x1b[31mred\\x1b[0m words")
    def sleep(self, seconds): time.sleep(seconds)
    def die(self): os._exit(3)
    def get(self, url): import requests; requests.get(url, timeout=10)

answers = os.fdopen(os.dup(1), "w"); os.dup2(2, 1)
serve(Calls(), sys.stdin, answers)
os._exit(0)
"""


@pytest.fixture
def broker(tmp_path, monkeypatch):
    from pathlib import Path

    (tmp_path / "harness").mkdir()
    script = tmp_path / "python"
    (tmp_path / "fake.py").write_text(FAKE_BROKER.format(root=str(Path(__file__).parents[2])))
    script.write_text(f"#!/bin/sh\nexec {sys.executable} {tmp_path}/fake.py\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    made = Broker({"PATH": "/usr/bin:/bin"}, tmp_path / "broker.log")
    yield made
    made.close()


def test_the_process_answers_errors_and_noise(broker):
    assert broker("add", 60.0, a=2, b=3) == 5
    with pytest.raises(SkyError, match=r"^ValueError: red words$"):
        broker("fail", 60.0)


def test_without_a_network_the_catalog_is_blamed_and_not_the_api_server(broker):
    with pytest.raises(
        CloudUnavailable,
        match=r"catalog of prices cannot be downloaded \(Connection.*127\.0\.0\.1.*HTTPS_PROXY",
    ) as told:
        broker(
            "get",
            60.0,
            url="http://127.0.0.1:9/skypilot-org/skypilot-catalog/master/catalogs/v8/common/accelerators.csv",
        )
    assert "API server" not in str(told.value)
    with pytest.raises(CloudUnavailable, match="API server does not answer"):
        broker("get", 60.0, url="http://127.0.0.1:9/api/health")


def test_a_process_that_dies_is_replaced(broker):
    with pytest.raises(CloudUnavailable, match="ended"):
        broker("die", 60.0)
    assert broker("add", 60.0, a=1, b=1) == 2


def test_a_call_that_hangs_is_given_up_and_others_go_on(broker):
    with pytest.raises(CloudUnavailable, match=r"`sleep` within 0.2 s"):
        broker("sleep", 0.2, seconds=3600)
    first = broker._process
    assert broker("add", 60.0, a=1, b=1) == 2 and broker._process is first
    for _ in range(16):  # too many that hang, and the process is ended
        with pytest.raises(CloudUnavailable):
            broker("sleep", 0.01, seconds=3600)
    assert first.wait(60) is not None
    deadline_s = time.monotonic() + 60
    while broker._process is first and time.monotonic() < deadline_s:
        assert broker("add", 60.0, a=1, b=1) == 2
    assert broker("add", 60.0, a=1, b=1) == 2


def test_what_each_place_answered_is_told():
    class Failed(Exception):
        failover_history = (ValueError("a"),)

    assert told(Failed("x"))["history"] == [{"type": "ValueError", "message": "a"}]


def test_a_member_is_told_the_speed_of_its_offer(task, sky):
    """An L4's workers get fewer micro-batches than an H100's, which would wait for them."""
    sky.found[:] = [answer("aws/us-east-1/use1-az1/g6", 1.0, accelerator="L4", gpus=1)]
    made = SkyPilotCloud(task, URL, sky, ask_every_s=0.0, now=sky.now)
    made._watcher = True
    made.launch(1, made.offers()[0])
    assert 0.0 < float(sky.configs[name(1)][0]["envs"]["HARNESS_SPEED"]) < 0.3
    made._pool.shutdown()
