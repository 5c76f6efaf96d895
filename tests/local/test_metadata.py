"""The metadata endpoint says what EC2 says, and the watcher hears it - also when it is slow,
wrong or silent."""

import hashlib
import http.client
import json
import time
import urllib.error
import urllib.request
from contextlib import closing

import pytest

from harness.local.aws_metadata import AwsImds
from harness.local.metadata_reply import NOT_FOUND, TOKEN_HEADER, TTL_HEADER
from harness.local.metadata_server import MetadataServer
from harness.notices.aws import AWS_V4, AWS_V6, AwsSource
from harness.notices.notice import Notice, Noticed, step, utc, watch
from harness.notices.sources import FileSource, detect

ACTION = "/latest/meta-data/spot/instance-action"
DEADLINE_S = 1_505_722_920.0  # 2017-09-18T08:22:00Z
EVENT = {
    "NotBefore": "21 Jan 2019 09:00:43 GMT",
    "NotAfter": "21 Jan 2019 09:17:23 GMT",
    "Code": "system-reboot",
    "Description": "scheduled reboot",
    "EventId": "instance-event-0d59937288b749b32",
    "State": "active",
}


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def server(clock):
    with closing(MetadataServer(AwsImds("i-0123", zone="us-east-1a", monotonic=clock))) as s:
        yield s


def ask(server, method, path, headers=()):
    request = urllib.request.Request(
        server.endpoint.rstrip("/") + path, method=method, headers=dict(headers)
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=5) as r:
            return r.status, r.read().decode(), dict(r.headers)
    except urllib.error.HTTPError as e:
        with e:
            return e.code, e.read().decode(), dict(e.headers)


def token(server, ttl="60"):
    status, body, headers = ask(server, "PUT", "/latest/api/token", {TTL_HEADER: ttl})
    assert (status, headers[TTL_HEADER]) == (200, ttl)
    return body


def get(server, path):
    return ask(server, "GET", path, {TOKEN_HEADER: token(server)})


# ---- the endpoint --------------------------------------------------------------------------------
@pytest.mark.parametrize("ttl", [None, "", "0", "21601", "-1", "x", "1.5", "²"])
def test_bad_ttl(server, ttl):
    answer = server.protocol.answer(
        "PUT", "/latest/api/token", {} if ttl is None else {TTL_HEADER.lower(): ttl}
    )
    assert answer.status == 400


def test_token_rules(server, clock):
    assert (
        ask(server, "PUT", "/latest/api/token", {TTL_HEADER: "60", "X-Forwarded-For": "10.0.0.1"})[
            0
        ]
        == 403
    )
    assert ask(server, "GET", "/latest/api/token")[0] == 405
    assert ask(server, "GET", ACTION)[0] == 401
    assert ask(server, "GET", ACTION, {TOKEN_HEADER: "made up"})[0] == 401
    t = token(server, "60")
    clock.now_s += 20
    status, body, headers = ask(
        server, "GET", "/latest/meta-data/instance-id", {TOKEN_HEADER.lower(): t}
    )
    assert (status, body, headers[TTL_HEADER]) == (200, "i-0123", "40")
    clock.now_s += 40
    assert ask(server, "GET", ACTION, {TOKEN_HEADER: t})[0] == 401


def test_nothing_pending(server):
    assert get(server, ACTION)[:2] == (404, NOT_FOUND)
    assert get(server, "/latest/meta-data/spot/termination-time")[0] == 404
    assert get(server, "/latest/meta-data/events/recommendations/rebalance")[0] == 404
    assert get(server, "/latest/meta-data/events/maintenance/scheduled")[:2] == (200, "[]")
    assert get(server, "/latest/meta-data/placement/availability-zone")[1] == "us-east-1a"
    assert get(server, "/latest/meta-data/placement/region/")[1] == "us-east-1"
    assert (
        json.loads(get(server, "/latest/dynamic/instance-identity/document")[1])["instanceId"]
        == "i-0123"
    )


def test_interruption_is_frozen_until_cancelled(server, clock):
    server.protocol.announce("terminate", DEADLINE_S)
    first = get(server, ACTION)
    assert json.loads(first[1]) == {"action": "terminate", "time": "2017-09-18T08:22:00Z"}
    assert first[2]["Content-Type"] == "application/json"
    clock.now_s += 30
    assert get(server, ACTION)[1] == first[1]
    assert get(server, "/latest/meta-data/spot/termination-time")[1] == "2017-09-18T08:22:00Z"
    server.protocol.cancel()
    assert get(server, ACTION)[0] == 404
    server.protocol.announce("stop", DEADLINE_S)
    assert get(server, "/latest/meta-data/spot/termination-time")[0] == 404


def test_faults(server):
    t = {TOKEN_HEADER: token(server)}
    server.inject(status=503, count=1)
    assert [ask(server, "GET", "/latest/meta-data/instance-id", t)[0] for _ in range(2)] == [
        503,
        200,
    ]
    server.inject(drop=True, method="GET")
    with pytest.raises((http.client.RemoteDisconnected, urllib.error.URLError)):
        ask(server, "GET", "/latest/meta-data/instance-id", t)
    assert token(server)
    server.inject(latency_s=0.2)
    began = time.monotonic()
    assert ask(server, "GET", "/latest/meta-data/instance-id", t)[0] == 200
    assert time.monotonic() - began >= 0.2
    server.inject()
    assert ask(server, "GET", "/latest/meta-data/instance-id", t)[0] == 200


# ---- the contract between the endpoint and the watcher -------------------------------------------
def test_hears_an_interruption_once_with_its_deadline(server, clock):
    source, seen, gone = AwsSource(server.endpoint, monotonic=clock), [], []
    known = step(source, {}, seen.append, gone.append)
    assert not seen
    server.protocol.announce("terminate", DEADLINE_S)
    for _ in range(3):
        known = step(source, known, seen.append, gone.append)
    body = get(server, ACTION)[1]
    name = f"aws-itn-{hashlib.sha256(body.encode()).hexdigest()[:16]}"
    assert seen == [
        Notice("aws", "kill", name, DEADLINE_S, False, "spot terminate at 2017-09-18T08:22:00Z")
    ]
    server.protocol.cancel()
    step(source, known, seen.append, gone.append)
    assert gone == seen
    assert source.errors == 0


def test_hears_rebalance_as_soft_and_maintenance_as_cancellable(server, clock):
    source = AwsSource(server.endpoint, maintenance_every_s=0, monotonic=clock)
    server.protocol.rebalance(DEADLINE_S)
    server.protocol.maintenance(EVENT)
    soft, maintenance = source.poll()
    assert (soft.kind, soft.deadline_s) == ("soft", None)
    assert (maintenance.kind, maintenance.id, maintenance.cancellable) == (
        "maintenance",
        EVENT["EventId"],
        True,
    )
    assert maintenance.deadline_s == utc("2019-01-21T09:00:43Z")
    server.protocol.maintenance({**EVENT, "State": "canceled"})
    assert [n.kind for n in source.poll()] == ["soft"]


def test_hibernation_gives_no_time(server, clock):
    server.protocol.announce("hibernate", DEADLINE_S)
    (notice,) = AwsSource(server.endpoint, monotonic=clock).poll()
    assert (notice.kind, notice.deadline_s) == ("kill", None)


def test_one_token_for_many_polls_and_a_new_one_when_it_is_refused(server, clock):
    source = AwsSource(server.endpoint, monotonic=clock)
    source.poll()
    source.poll()
    assert server.requests == 1 + 3 + 2  # scheduled events are announced days before
    server.protocol = AwsImds("i-0123", monotonic=clock)  # knows no token any more: 401, PUT, again
    server.protocol.announce("terminate", DEADLINE_S)
    assert len(source.poll()) == 1
    assert server.requests == 6 + 1 + 1 + 2
    clock.now_s += 3590
    source.poll()  # refreshed before it expires
    assert (server.requests, source.errors) == (10 + 1 + 3, 0)


@pytest.mark.parametrize(
    "fault", [{"status": 503}, {"drop": True}, {"status": 401}, {"latency_s": 3.0}, {"status": 200}]
)
def test_an_endpoint_that_fails_neither_kills_the_watcher_nor_cancels_a_notice(
    server, clock, fault
):
    source = AwsSource(server.endpoint, timeout_s=1.0, monotonic=clock)
    server.protocol.announce("terminate", DEADLINE_S)
    before = list(source.poll())
    assert len(before) == 1
    server.inject(**fault)
    assert list(source.poll()) == before
    assert source.errors >= 1
    server.inject()
    clock.now_s += 100
    assert list(source.poll()) == before


def test_goes_on_without_a_token_when_only_the_token_request_times_out(clock):
    with closing(MetadataServer(AwsImds("i-0", tokens_required=False, monotonic=clock))) as server:
        server.protocol.announce("terminate", DEADLINE_S)
        server.inject(latency_s=3.0, method="PUT")
        source = AwsSource(server.endpoint, timeout_s=1.0, monotonic=clock)
        assert len(source.poll()) == 1
        asked = server.requests
        source.poll()
        assert server.requests == asked + 2  # the token is not asked for again at once


def test_proxies_are_bypassed(server, clock, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    source = AwsSource(server.endpoint, monotonic=clock)
    source.poll()
    assert source.errors == 0


def test_a_dead_endpoint_is_counted(clock):
    server = MetadataServer(AwsImds("i-0"))
    server.close()
    source = AwsSource(server.endpoint, monotonic=clock)
    assert source.poll() == []
    assert source.errors == 1


# ---- files ---------------------------------------------------------------------------------------
def test_a_touched_file_is_a_notice_and_its_removal_a_cancellation(tmp_path):
    path, seen, gone = tmp_path / "notice", [], []
    source = FileSource(path, settle_s=0)
    known = step(source, {}, seen.append, gone.append)
    path.touch()
    known = step(source, known, seen.append, gone.append)
    known = step(source, known, seen.append, gone.append)
    assert [(n.kind, n.deadline_s, n.cancellable) for n in seen] == [("kill", None, True)]
    path.unlink()
    step(source, known, seen.append, gone.append)
    assert gone == seen


def test_a_file_may_say_more(tmp_path):
    path = tmp_path / "notice"
    source = FileSource(path)
    path.write_text(
        json.dumps({"kind": "soft", "grace_s": 30, "id": "drill-1", "detail": "a drill"})
    )
    (notice,) = source.poll()
    assert (notice.kind, notice.id, notice.detail) == ("soft", "drill-1", "a drill")
    assert notice.deadline_s == pytest.approx(path.stat().st_mtime + 30)
    path.write_text(json.dumps({"deadline_s": 5000, "id": "drill-2"}))
    assert [(n.kind, n.deadline_s, n.id) for n in source.poll()] == [("kill", 5000.0, "drill-2")]


@pytest.mark.parametrize(
    "text", ['{"kind": "ki', "[1]", '{"kind": "party"}', '{"grace_s": "soon"}']
)
def test_an_unreadable_file_is_waited_for_and_then_taken_for_a_kill(tmp_path, text):
    path = tmp_path / "notice"
    path.write_text(text)
    now = path.stat().st_mtime
    source = FileSource(path, now=lambda: now)
    assert source.poll() == []
    now += 1.0
    (notice,) = source.poll()
    assert (notice.kind, notice.deadline_s, source.errors) == ("kill", None, 1)
    assert "unreadable" in notice.detail


# ---- finding, watching ---------------------------------------------------------------------------
def test_detection_asks_the_machine_and_never_the_network(tmp_path):
    def base(env, root):
        return [s._endpoint.base for s in detect(env, tmp_path / root) if isinstance(s, AwsSource)]

    for root, file, says in (
        ("aws", "sys_vendor", "Amazon EC2\n"),
        ("gcp", "product_name", "Google Compute Engine\n"),
        ("xen", "bios_version", "4.11.amazon\n"),
    ):
        (tmp_path / root / "sys/class/dmi/id").mkdir(parents=True)
        (tmp_path / root / "sys/class/dmi/id" / file).write_text(says)
    assert base({}, "none") == base({}, "gcp") == []
    assert base({}, "aws") == base({}, "xen") == [AWS_V4]
    assert base({"AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE": "IPv6"}, "aws") == [AWS_V6]
    assert base({"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:7/"}, "gcp") == [
        "http://127.0.0.1:7"
    ]
    assert base({"AWS_EC2_METADATA_DISABLED": "true"}, "aws") == []
    files = [s.path for s in detect({"HARNESS_NODE_DIR": str(tmp_path)}, tmp_path / "none")]
    assert files == [tmp_path / "notice"]


def test_watching_calls_back_and_stops(server, tmp_path):
    seen, gone = [], []
    sources = [
        AwsSource(server.endpoint, pace_s=0.02),
        FileSource(tmp_path / "notice", pace_s=0.02, settle_s=0),
    ]

    def wait_for(count, what):
        until = time.monotonic() + 60
        while len(what) < count:
            assert time.monotonic() < until
            time.sleep(0.01)

    def tell(told):
        (seen if isinstance(told, Noticed) else gone).append(told.notice)

    watcher = watch(sources, tell)
    server.protocol.announce("terminate", DEADLINE_S)
    wait_for(1, seen)
    (tmp_path / "notice").touch()
    wait_for(2, seen)
    server.protocol.cancel()
    wait_for(1, gone)
    watcher.stop()
    assert {n.source for n in seen} == {"aws", "file"}
    assert [n.source for n in gone] == ["aws"]
    asked = server.requests
    time.sleep(0.1)
    assert server.requests == asked


def test_a_callback_that_fails_does_not_end_the_watching(tmp_path):
    path, calls = tmp_path / "notice", []

    def fails_once(told):
        calls.append(told)
        if len(calls) == 1:
            raise RuntimeError("not ready")

    path.touch()
    watcher = watch([FileSource(path, pace_s=0.02, settle_s=0)], fails_once)
    until = time.monotonic() + 60
    while len(calls) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    watcher.stop()
    assert calls[0] == calls[1]
