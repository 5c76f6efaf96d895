"""Every cloud's source against its fake and against what clouds really send: appear, change,
vanish; slow, wrong, silent, restarted."""

import json
import subprocess
import sys
import threading
import time
from contextlib import closing
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from worlds import until

from harness.agent import aws, kubernetes, polling
from harness.agent.aws import AwsSource, interruption, maintenance, rebalance
from harness.agent.azure import AzureSource, azure_events
from harness.agent.gcp import MAINTENANCE_EVENT, PREEMPTED, GcpSource, gcp_value
from harness.agent.kubernetes import ACCOUNT, KubernetesSource, node_taints, pod_deletion
from harness.agent.notices import Notice, watch
from harness.agent.polling import utc
from harness.agent.sources import (
    LimitSource,
    MithrilSource,
    detect,
    duration,
    moment,
    places,
    sigterm_s,
)
from harness.clouds.aws_imds import AwsImds
from harness.clouds.azure_events import AzureScheduledEvents
from harness.clouds.gcp_metadata import GcpMetadata
from harness.clouds.metadata import MetadataServer, environment_of, protocol_of
from harness.core.world import BadInput
from harness.testing import Ear

SOON_S = 1_900_000_000.0
VALUES = {"kill": PREEMPTED, "soft": MAINTENANCE_EVENT, "maintenance": MAINTENANCE_EVENT}


def source_of(cloud, endpoint, kind="kill", **options):
    match cloud:
        case "aws":
            return AwsSource(endpoint, **({"maintenance_every_s": 0, "pace_s": 0.02} | options))
        case "gcp":
            return GcpSource(endpoint, VALUES[kind], **({"hang_s": 0.05, "pace_s": 0.02} | options))
        case "azure":
            return AzureSource(endpoint, **({"first_timeout_s": 2.0, "pace_s": 0.02} | options))
    raise AssertionError(cloud)


@pytest.fixture(params=["aws", "gcp", "azure"])
def cloud(request):
    return request.param


@pytest.fixture
def server(cloud):
    with closing(MetadataServer(protocol_of(cloud, "vm-7"))) as s:
        yield s


# ---- every source with its fake, beyond the contract (test_contracts.py) -------------------------
@pytest.mark.parametrize(
    "fault",
    [{"status": 503}, {"status": 403}, {"drop": True}, {"latency_s": 1.0}, {"status": 200}],
    ids=lambda f: "-".join(map(str, f)),
)
def test_an_outage_neither_makes_nor_takes_back_a_notice(cloud, server, fault):
    options = {"timeout_s": 0.4, **({"hang_s": 0.01} if cloud == "gcp" else {})}
    source, ear = source_of(cloud, server.endpoint, **options), Ear()
    ear.step(source)
    server.inject(**fault)
    assert ear.step(source) == []
    server.protocol.notice("kill", SOON_S)
    assert ear.step(source) == []
    assert source.errors >= 2
    assert source.pace_s > 0.02  # asks less often
    server.inject()
    until(lambda: ear.step(source))
    (notice,) = ear.seen
    assert (notice.kind, source.pace_s) == ("kill", 0.02)
    server.inject(**fault)
    assert ear.step(source) == [notice]
    server.protocol.cancel()
    assert ear.step(source) == [notice]
    server.inject()
    until(lambda: ear.step(source) == [])
    assert (ear.seen, ear.gone) == ([notice], [notice])


def test_bursts_of_errors_cost_nothing_but_time(cloud, server):
    source, ear = source_of(cloud, server.endpoint), Ear()
    server.inject(status=500, every=2)
    server.protocol.notice("kill", SOON_S)
    until(lambda: ear.step(source))
    for _ in range(5):
        ear.step(source)
    assert (len(ear.seen), ear.gone) == (1, [])


def test_a_service_that_is_restarted_tells_the_same_notice(cloud):
    first = MetadataServer(protocol_of(cloud, "vm-7"))
    port = int(first.endpoint.rstrip("/").rpartition(":")[2])
    source, ear = source_of(cloud, first.endpoint), Ear()
    ear.step(source)
    first.protocol.notice("kill", SOON_S)
    ear.step(source)
    first.close()
    assert len(ear.step(source)) == 1
    assert source.errors >= 1
    with closing(
        MetadataServer(first.protocol if cloud != "gcp" else GcpMetadata("vm-7"), port)
    ) as second:
        if cloud == "gcp":
            second.protocol.set(PREEMPTED, "TRUE")  # with other ETags
        assert len(ear.step(source)) == 1
    assert (len(ear.seen), ear.gone) == (1, [])


@pytest.mark.parametrize("ahead_s", [-3600.0, 3600.0])
@pytest.mark.parametrize("cloud", ["aws", "azure"])  # GCP tells no times
def test_deadlines_are_told_by_the_clouds_clock(cloud, ahead_s):
    with closing(MetadataServer(protocol_of(cloud, "vm-7"), clock_ahead_s=ahead_s)) as server:
        source, ear = source_of(cloud, server.endpoint), Ear()
        due_s = time.time() + 120.0
        server.order({"do": "notice", "kind": "kill", "in_s": 120})
        (notice,) = ear.step(source)
        assert notice.deadline_s == pytest.approx(due_s, abs=5)
        server.clock_ahead_s = 0.0  # a clock that is set right changes nothing about what was told
        for _ in range(3):
            ear.step(source)
        assert ear.seen == [notice]


def test_watching_a_silent_service_ends_at_once(cloud, server):
    """Also when a GET hangs: nothing here waits for its 600 s."""
    source = source_of(cloud, server.endpoint, **({"hang_s": 600.0} if cloud == "gcp" else {}))
    watcher = watch([source], lambda _: None, lambda _: None)
    until(lambda: server.requests >= 2)
    watcher.stop(within_s=60)
    assert not any(t.name == f"notices-{cloud}" and t.is_alive() for t in threading.enumerate())


def test_the_environment_leads_to_the_fake(cloud, server, tmp_path):
    found = detect(environment_of(cloud, server.endpoint), tmp_path)
    assert {s.name for s in found} == {cloud}
    server.protocol.notice("kill", SOON_S)
    assert [n.kind for s in found for n in s.poll()] == ["kill"]
    assert sum(s.errors for s in found) == 0


# ---- AWS -----------------------------------------------------------------------------------------
def test_what_ec2_sends():
    action = '{"action": "terminate", "time": "2017-09-18T08:22:00Z"}'
    (notice,) = interruption(action)
    assert (notice.kind, notice.deadline_s) == ("kill", utc("2017-09-18T08:22:00Z"))
    assert (
        interruption(action)[0].id
        == notice.id
        != interruption(action.replace("terminate", "stop"))[0].id
    )
    assert [n.deadline_s for n in rebalance('{"noticeTime":"2020-10-27T08:22:00Z"}')] == [None]
    event = {
        "NotBefore": "21 Jan 2019 09:00:43 GMT",
        "Code": "system-reboot",
        "Description": "scheduled reboot",
        "EventId": "instance-event-0d59937288b749b32",
        "NotAfter": "21 Jan 2019 09:17:23 GMT",
        "State": "active",
    }
    (notice,) = maintenance(
        json.dumps(
            [
                event,
                event | {"EventId": "b", "State": "completed"},
                event | {"EventId": "c", "State": "canceled"},
            ]
        )
    )
    assert (notice.id, notice.deadline_s) == (event["EventId"], utc("2019-01-21T09:00:43Z"))


def test_a_scheduled_event_that_moves_is_told_again():
    with closing(MetadataServer(AwsImds("i-1"))) as server:
        source, ear = source_of("aws", server.endpoint), Ear()
        name = server.protocol.notice("maintenance", SOON_S)
        ear.step(source)
        server.protocol.maintenance(
            {
                "EventId": name,
                "NotBefore": formatdate(SOON_S + 60, usegmt=True).partition(", ")[2],
                "State": "active",
            }
        )
        ear.step(source)
        assert [(n.id, n.deadline_s) for n in ear.seen] == [(name, SOON_S), (name, SOON_S + 60)]
        assert ear.gone == []


# ---- GCP -----------------------------------------------------------------------------------------
def get(server, path, **headers):
    reply = polling.Endpoint(server.endpoint).request(
        "GET", path, {k.replace("_", "-"): v for k, v in headers.items()}, timeout_s=10
    )
    return reply.status, reply.body, reply.headers


def test_the_fake_of_gcp_has_its_manners():
    base, google = "/computeMetadata/v1/instance", {"Metadata_Flavor": "Google"}
    with closing(MetadataServer(GcpMetadata("vm-7"))) as server:
        assert get(server, f"{base}/preempted")[0] == 403
        assert get(server, f"{base}/preempted", **google, X_Forwarded_For="10.0.0.1")[0] == 403
        assert get(server, f"{base}/nothing", **google)[0] == 404
        assert get(server, "/")[2]["metadata-flavor"] == "Google"
        status, body, headers = get(server, f"{base}/preempted", **google)
        assert (status, body, headers["metadata-flavor"], headers["server"]) == (
            200,
            "FALSE",
            "Google",
            "Metadata Server for VM",
        )
        etag = headers["etag"]
        assert get(server, f"{base}/preempted", **google)[2]["etag"] == etag
        hanging = f"{base}/preempted?wait_for_change=true&timeout_sec=0.05&last_etag={etag}"
        # the time is up, and nothing has changed
        assert get(server, hanging, **google)[:2] == (200, "FALSE")
        # another ETag is answered at once
        assert get(server, hanging.replace(etag, "0"), **google)[1] == "FALSE"
        threading.Timer(0.1, server.protocol.set, (PREEMPTED, "TRUE")).start()
        status, body, headers = get(server, hanging.replace("0.05", "9"), **google)
        assert (status, body) == (200, "TRUE")
        assert headers["etag"] != etag


def test_a_hanging_get_hears_the_change_in_one_request():
    with closing(MetadataServer(GcpMetadata("vm-7"))) as server:
        seen = []
        watcher = watch([GcpSource(server.endpoint, hang_s=60)], seen.append, lambda _: None)
        until(lambda: server.requests == 2)
        server.protocol.notice("kill", 0.0)
        until(lambda: seen)
        asked = server.requests
        watcher.stop()
        assert asked <= 3


def test_gcp_times_follow_from_what_was_seen():
    assert [n.deadline_s for n in gcp_value(PREEMPTED, "TRUE", True, 1000.0)] == [1030.0]
    assert [
        n.deadline_s
        for n in gcp_value(MAINTENANCE_EVENT, "TERMINATE_ON_HOST_MAINTENANCE", True, 1000.0)
    ] == [4600.0]
    assert [
        n.deadline_s
        for n in gcp_value(MAINTENANCE_EVENT, "TERMINATE_ON_HOST_MAINTENANCE", False, 1000.0)
    ] == [1060.0]
    (pause,) = gcp_value(MAINTENANCE_EVENT, "MIGRATE_ON_HOST_MAINTENANCE", False, 1000.0)
    assert (pause.kind, pause.pause) == ("soft", True)
    with pytest.raises(ValueError, match="MAYBE"):
        gcp_value(PREEMPTED, "MAYBE", True, 0.0)
    with closing(MetadataServer(GcpMetadata("vm-7"))) as server:
        server.protocol.notice("maintenance", 0.0)
        (notice,) = source_of("gcp", server.endpoint, "maintenance").poll()
        assert notice.deadline_s is None  # it was so before we came: nobody knows how long


# ---- Azure ---------------------------------------------------------------------------------------
DOCUMENT = {  # after the shape in Azure's documentation
    "DocumentIncarnation": 2,
    "Events": [
        {
            "EventId": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
            "EventType": "Preempt",
            "ResourceType": "VirtualMachine",
            "Resources": ["vmss_vm1"],
            "EventStatus": "Scheduled",
            "NotBefore": "Mon, 11 Apr 2022 22:26:58 GMT",
            "Description": "",
            "EventSource": "Platform",
            "DurationInSeconds": -1,
        },
    ],
}


def test_what_azure_sends():
    event = DOCUMENT["Events"][0]
    (notice,) = azure_events(DOCUMENT, "VMSS_vm1")
    assert (notice.kind, notice.id, notice.deadline_s) == (
        "kill",
        event["EventId"],
        utc("2022-04-11T22:26:58Z"),
    )
    assert (notice.scope, notice.acknowledge, notice.cancellable) == ("self", True, True)
    assert azure_events(DOCUMENT, "vmss_vm2") == ()  # the document names machines of the whole set
    assert len(azure_events(DOCUMENT, "")) == 1  # whose name it is we do not know: ours, to be safe
    assert not azure_events(DOCUMENT, "")[0].acknowledge

    def read(name, speaks_for_all=False, **changes):
        (found,) = azure_events({"Events": [event | changes]}, name, speaks_for_all)
        return found

    two = ["vmss_vm1", "vmss_vm2"]
    assert [read(n, Resources=two).acknowledge for n in two] == [False, False]
    assert [read(n, True, Resources=two).acknowledge for n in two] == [True, False]
    assert read(two[0], Resources=two).scope == "others"
    kinds = {
        t: read("vmss_vm1", EventType=t).kind
        for t in ("Preempt", "Terminate", "Reboot", "Redeploy", "Freeze", "News")
    }
    assert list(kinds.values()) == ["kill", "kill", "maintenance", "maintenance", "soft", "soft"]
    freeze = read("vmss_vm1", EventType="Freeze")
    assert (freeze.pause, freeze.acknowledge, freeze.deadline_s) == (True, False, None)
    assert read("vmss_vm1", NotBefore="", EventStatus="Started").deadline_s is None


def post(server, body, path="/metadata/scheduledevents?api-version=2020-07-01", **headers):
    return (
        polling.Endpoint(server.endpoint)
        .request("POST", path, {"Metadata": "true"} | headers, timeout_s=10, body=body)
        .status
    )


def test_the_fake_of_azure_has_its_manners():
    path = "/metadata/scheduledevents"
    vm = AzureScheduledEvents("vm-7")
    with closing(MetadataServer(vm)) as server:
        assert get(server, f"{path}?api-version=2020-07-01")[0] == 400
        assert get(server, path, Metadata="true")[0] == 400
        status, body, _ = get(server, f"{path}?api-version=2020-07-01", Metadata="true")
        assert (status, json.loads(body)) == (200, {"DocumentIncarnation": 1, "Events": []})
        assert (
            get(
                server,
                "/metadata/instance/compute/name?api-version=2021-02-01&format=text",
                Metadata="true",
            )[1]
            == "vm-7"
        )
        event = vm.schedule("Redeploy", SOON_S)
        document = json.loads(get(server, f"{path}?api-version=2020-07-01", Metadata="true")[1])
        assert (document["DocumentIncarnation"], document["Events"][0]["NotBefore"]) == (
            2,
            "Sun, 17 Mar 2030 17:46:40 GMT",
        )
        assert [
            post(server, b) for b in (b"", b"{}", b'{"StartRequests": [{"EventId": "none"}]}')
        ] == [400, 400, 400]
        wanted = json.dumps({"StartRequests": [{"EventId": event}]}).encode()
        assert [post(server, wanted), post(server, wanted)] == [200, 200]
        (started,) = json.loads(get(server, f"{path}?api-version=2020-07-01", Metadata="true")[1])[
            "Events"
        ]
        assert (started["EventStatus"], started["NotBefore"]) == ("Started", "")


def test_a_started_event_keeps_the_deadline_that_was_told():
    vm = AzureScheduledEvents("vm-7")
    with closing(MetadataServer(vm)) as server:
        source, ear = source_of("azure", server.endpoint), Ear()
        ear.step(source)
        event = vm.schedule("Preempt", SOON_S)
        vm.schedule("Preempt", SOON_S, ("vm-8",))
        (notice,) = ear.step(source)
        vm.start(event)
        assert ear.step(source) == [notice]
        assert ear.seen == [notice]
        vm.change(event, NotBefore=formatdate(SOON_S + 30, usegmt=True), EventStatus="Scheduled")
        assert [n.deadline_s for n in ear.step(source)] == [SOON_S + 30]
        assert source.acknowledge(notice)
        assert vm.acknowledged == [event]
        server.inject(status=500)
        assert not source.acknowledge(notice)


# ---- Kubernetes ----------------------------------------------------------------------------------
POD = {
    "metadata": {"name": "trainer-0", "uid": "u-1"},
    "spec": {"nodeName": "gpu-1", "terminationGracePeriodSeconds": 30},
}
TAINT = {
    "key": "aws-node-termination-handler/spot-itn",
    "effect": "NoSchedule",
    "value": "x",
    "timeAdded": "2026-11-21T08:00:00Z",
}


class ApiServer:
    """As much of a Kubernetes API server as a pod that asks about itself sees."""

    def __init__(self, root):
        self.pod, self.node, self.refused = json.loads(json.dumps(POD)), {"spec": {}}, set()
        self.asked = []
        account = root / ACCOUNT
        account.mkdir(parents=True)
        (account / "token").write_text("sa-token\n")
        (account / "namespace").write_text("team-a")
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.asked.append(self.path)
                known = {
                    "/api/v1/namespaces/team-a/pods/trainer-0": outer.pod,
                    "/api/v1/nodes/gpu-1": outer.node,
                }
                ours = self.headers["Authorization"] == "Bearer sa-token"
                status = (
                    401
                    if not ours
                    else 403
                    if self.path in outer.refused
                    else 200
                    if self.path in known
                    else 404
                )
                body = json.dumps(known.get(self.path, {})).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.source = KubernetesSource(
            f"http://127.0.0.1:{self.server.server_address[1]}", "trainer-0", account
        )

    def close(self):
        self.server.shutdown()
        self.server.server_close()


def test_a_pod_hears_of_its_own_deletion_and_of_taints_of_its_node(tmp_path):
    with closing(ApiServer(tmp_path)) as api:
        ear = Ear()
        assert ear.step(api.source) == []
        api.node["spec"]["taints"] = [TAINT, {"key": "nvidia.com/gpu", "effect": "NoSchedule"}]
        (notice,) = ear.step(api.source)
        assert (notice.kind, notice.deadline_s) == ("kill", utc("2026-11-21T08:02:00Z"))
        api.node["spec"]["taints"] = []
        assert ear.step(api.source) == []
        assert ear.gone == [notice]
        api.pod["metadata"]["deletionTimestamp"] = "2026-11-21T08:00:30Z"
        (notice,) = ear.step(api.source)
        assert (notice.id, notice.deadline_s) == ("pod-u-1", utc("2026-11-21T08:00:30Z"))
        assert api.source.errors == 0


def test_what_the_service_account_may_not_read_is_asked_once(tmp_path):
    with closing(ApiServer(tmp_path)) as api:
        api.refused = {"/api/v1/nodes/gpu-1"}
        for _ in range(4):
            assert api.source.poll() == []
        assert api.asked.count("/api/v1/nodes/gpu-1") == 1
        assert api.asked.count("/api/v1/namespaces/team-a/pods/trainer-0") == 4
        (tmp_path / ACCOUNT / "token").unlink()
        assert api.source.poll() == []
        assert api.source.errors == 1


def test_taints_and_deletions_from_documents():
    assert pod_deletion(json.dumps(POD)) == ()
    kinds = {
        k: node_taints(json.dumps({"spec": {"taints": [{"key": k}]}}))[0].kind
        for k in kubernetes.TAINTS
    }
    assert kinds["karpenter.sh/disrupted"] == kinds["ToBeDeletedByClusterAutoscaler"] == "kill"
    assert kinds["aws-node-termination-handler/rebalance-recommendation"] == "soft"
    assert node_taints('{"spec": {"taints": null}}') == ()


# ---- Mithril, limits -----------------------------------------------------------------------------
def test_a_mithril_bid_is_lost_and_won_again(tmp_path):
    path, ear = tmp_path / "MITHRIL_SIGNAL.yml", Ear()
    source = MithrilSource(path, settle_s=0)
    assert ear.step(source) == []
    path.write_text("instance_status: STATUS_RUNNING\nbid_status: STATUS_ALLOCATED\n")
    assert ear.step(source) == []
    path.write_text(
        "instance_status: STATUS_PREEMPTING\nbid_status: STATUS_PREEMPTING\nend_time: "
        "2026-11-21T08:05:00Z\n"
    )
    (notice,) = ear.step(source)
    assert (notice.kind, notice.deadline_s, notice.cancellable) == (
        "kill",
        utc("2026-11-21T08:05:00Z"),
        True,
    )
    path.unlink()
    assert ear.step(source) == []
    path.write_text("instance_status: STATUS_RELOCATING\n")
    (notice,) = ear.step(source)
    assert notice.deadline_s == pytest.approx(path.stat().st_mtime + 300)
    path.write_text("instance_status: [\n")
    assert [n.deadline_s for n in ear.step(source)] == [None]
    assert source.errors == 1


def test_ends_that_are_known_from_the_start(tmp_path):
    (slurm,) = detect({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1900000000"}, tmp_path)
    assert slurm.poll() == [
        Notice("slurm", "maintenance", "slurm-1900000000", SOON_S, False, "the time is up then")
    ]
    (limit,) = detect({"HARNESS_CAPACITY_END": "2030-03-17T17:46:40Z"}, tmp_path)
    assert [n.deadline_s for n in limit.poll()] == [SOON_S]
    assert LimitSource("limit", moment("1900000000")).poll() == limit.poll()
    assert [duration(t) for t in ("90", "90s", "30m", "1.5h", "7d")] == [90, 90, 1800, 5400, 604800]
    for bad in ("soon", "", "3 weeks", "-1"):
        with pytest.raises(BadInput, match="wanted"):
            duration(bad)
    with pytest.raises(BadInput, match="wanted"):
        moment("tomorrow")


# ---- where we are --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("files", "env", "found", "grace_s"),
    [
        ({"sys/class/dmi/id/sys_vendor": "Amazon EC2"}, {}, ["aws"], 30),
        ({"sys/class/dmi/id/product_name": "Google Compute Engine"}, {}, ["gcp"], 25),
        (
            {"sys/class/dmi/id/product_name": "Google Compute Engine"},
            {"HARNESS_NODE_DIR": "x"},
            ["file"],
            30,
        ),
        (
            {"sys/class/dmi/id/chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77"},
            {},
            ["azure"],
            30,
        ),
        (
            {"sys/class/dmi/id/sys_vendor": "Google", "sys/class/dmi/id/product_name": "Pixelbook"},
            {},
            [],
            30,
        ),
        ({"sys/class/dmi/id/sys_vendor": "Nebius"}, {}, ["nebius"], 60),
        ({"opt/mithril/README": ""}, {}, ["mithril"], 30),
        ({}, {"RUNPOD_POD_ID": "abc"}, ["runpod"], 5),
        ({}, {"SLURM_JOB_ID": "7"}, ["slurm"], 30),
        (
            {"sys/class/dmi/id/product_name": "Google Compute Engine", f"{ACCOUNT}/token": "t"},
            {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "trainer-0"},
            ["kubernetes", "gcp"],
            25,
        ),
        ({}, {}, [], 30),
    ],
)
def test_a_machine_says_where_it_is(tmp_path, files, env, found, grace_s):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert places(env, tmp_path) == found
    assert sigterm_s(env, tmp_path) == grace_s
    assert {s.name for s in detect(env, tmp_path)} <= set(found)


def test_what_is_asked_for_by_name_is_not_doubted(tmp_path):
    assert [s.name for s in detect({}, tmp_path, "aws, gcp")] == ["aws", "gcp", "gcp"]
    assert (
        detect(
            {"RUNPOD_POD_ID": "x", "AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:1"},
            tmp_path,
            "none",
        )
        == []
    )
    with pytest.raises(BadInput, match="tencent is not known; wanted a list of file"):
        detect({}, tmp_path, "aws,tencent")
    with pytest.raises(BadInput, match="wanted http"):
        AwsSource("169.254.169.254")
    for base, host in ((aws.AWS_V6, "fd00:ec2::254"), (aws.AWS_V4, "169.254.169.254")):
        assert AwsSource(base)._endpoint._host == host


# ---- the command ---------------------------------------------------------------------------------
def test_the_fake_as_a_command_takes_orders(tmp_path):
    words = [sys.executable, "-m", "harness.cli", "fake-metadata", "--cloud", "gcp", "--port", "0"]
    fake = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        name, _, host = fake.stdout.readline().removeprefix("export ").strip().partition("=")
        for _ in range(2):
            assert fake.stdout.readline().startswith("#")
        source = detect({name: host}, tmp_path)[0]
        assert not source.poll()

        def order(line):
            print(line, file=fake.stdin, flush=True)
            return fake.stdout.readline().strip()

        assert order('{"do": "notice", "kind": "kill"}') == '{"id": "instance/preempted"}'
        assert [n.kind for n in source.poll()] == ["kill"]
        assert "none of notice, cancel, fault, well" in order('{"do": "dance"}')
        control = polling.Endpoint(f"http://{host}")

        def post(said):
            return control.request(
                "POST", "/-/control", {}, timeout_s=10, body=json.dumps(said).encode()
            ).status

        assert [
            post(o)
            for o in (
                {"do": "fault", "status": 503},
                {"do": "fault", "party": 1},
                {"do": "cancel"},
                7,
            )
        ] == [200, 400, 200, 400]
        assert [n.kind for n in source.poll()] == ["kill"]  # an outage takes nothing back
        assert source.errors == 1
        assert post({"do": "well"}) == 200
        assert not source.poll()
    finally:
        fake.kill()
        fake.wait()
        fake.stdin.close()
        fake.stdout.close()


def test_a_port_that_is_taken_is_named():
    with closing(MetadataServer(GcpMetadata("vm-7"))) as server:
        port = server.endpoint.rstrip("/").rpartition(":")[2]
        words = [sys.executable, "-m", "harness.cli", "fake-metadata", "--port", port]
        ended = subprocess.run(
            words, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
        )
        assert ended.returncode == 2
        assert f"--port {port}: Address already in use; name another port" in ended.stderr
