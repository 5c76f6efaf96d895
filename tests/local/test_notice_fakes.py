"""Every cloud's source against its fake: appear, change, vanish; slow, wrong, silent, restarted."""

import json
import subprocess
import sys
import threading
import time
from contextlib import closing
from email.utils import formatdate

import pytest

from harness.local.aws_metadata import AwsImds
from harness.local.azure_metadata import AzureScheduledEvents
from harness.local.gcp_metadata import GcpMetadata
from harness.local.metadata_server import MetadataServer, environment_of, metadata_service
from harness.notices import notice as polling
from harness.notices.gcp import MAINTENANCE_EVENT, PREEMPTED, GcpSource, gcp_value
from harness.notices.notice import utc, watch
from harness.notices.sources import (
    MithrilSource,
    detect,
)
from harness.testing import Ear
from support.notice_services import (
    SOON_S,
    TAINT,
    ApiServer,
    source_of,
)
from support.worlds import until


@pytest.fixture(params=["aws", "gcp", "azure"])
def cloud(request):
    return request.param


@pytest.fixture
def server(cloud):
    with closing(MetadataServer(metadata_service(cloud, "vm-7"))) as s:
        yield s


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
    first = MetadataServer(metadata_service(cloud, "vm-7"))
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
    with closing(MetadataServer(metadata_service(cloud, "vm-7"), clock_ahead_s=ahead_s)) as server:
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
    watcher = watch([source], lambda _: None)
    until(lambda: server.requests >= 2)
    watcher.stop(within_s=60)
    assert not any(t.name == f"notices-{cloud}" and t.is_alive() for t in threading.enumerate())


def test_the_environment_leads_to_the_fake(cloud, server, tmp_path):
    found = detect(environment_of(cloud, server.endpoint), tmp_path)
    assert {s.name for s in found} == {cloud}
    server.protocol.notice("kill", SOON_S)
    assert [n.kind for s in found for n in s.poll()] == ["kill"]
    assert sum(s.errors for s in found) == 0


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
        watcher = watch([GcpSource(server.endpoint, hang_s=60)], seen.append)
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


def test_the_fake_as_a_command_takes_orders(tmp_path):
    words = [sys.executable, "-m", "harness.cli", "prove", "fake-metadata", "--cloud", "gcp", "--port", "0"]
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
        words = [sys.executable, "-m", "harness.cli", "prove", "fake-metadata", "--port", port]
        ended = subprocess.run(
            words, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
        )
        assert ended.returncode == 2
        assert f"--port {port}: Address already in use; name another port" in ended.stderr
