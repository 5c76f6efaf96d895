"""`harness runs serve`: all runs of a folder over HTTP on loopback, read only, within bounds."""

import contextlib
import http.client
import json
import threading
from urllib.parse import quote

import pytest

from harness.bucket.journal import Journal
from harness.core import facts as f
from harness.core.world import BadInput
from harness.look.pages import run_logs
from harness.look.pages.run_index import MOST_RUNS, FollowedRun, RunsFolder
from harness.look.pages.web_server import RunsServer, checked_host
from storage.errors import StoreUnavailable
from storage.http_server import is_our_name
from storage.stores.folder_store import MemoryStore
from storage.stores.objects import ObjectStore
from support.histories import T0, TOTAL, whole_run

EVIL = "x<img src=x onerror=alert(1)>"


class Counting:
    """A store that counts what it is asked for."""

    def __init__(self, inner: ObjectStore, count: list[int]):
        self.inner, self.url, self.count = inner, inner.url, count

    def __getattr__(self, name):
        method = getattr(self.inner, name)
        if name in ("put", "create", "delete"):
            raise AssertionError(f"{name}: a page only reads")

        def counted(*words):
            self.count[0] += 1
            return method(*words)

        return counted


@pytest.fixture(scope="module")
def objects():
    """Two runs with one history, one that goes on, one whose name is markup, and no run."""
    whole = whole_run(MemoryStore("memory://x", {})).store
    found: dict[str, bytes] = {}
    for name in ("a", "b", EVIL):
        for key in whole.list(""):
            found[f"{name}/{key}"] = whole.get(key)
    live = MemoryStore("memory://live", {})
    journal = Journal(live, "controller-1", lambda: T0 + 400)
    journal.record(f.RunAsked("t.yaml", 1, 1, "cheapest"))
    journal.record(f.Decided("wait", f"every offer is full {EVIL}"))
    journal.flush()
    for key in live.list(""):
        found[f"live/{key}"] = live.get(key)
    found["notes/readme.txt"] = b"no run"
    return found


def opened(objects, count):
    def open_run(url):
        _, _, name = url.removeprefix("memory://runs").partition("/")
        mine = {
            key.removeprefix(f"{name}/"): data
            for key, data in objects.items()
            if not name or key.startswith(f"{name}/")
        }
        return Counting(MemoryStore(url, mine), count)

    return open_run


@pytest.fixture
def count():
    return [0]


@pytest.fixture
def folder(objects, count):
    return RunsFolder("memory://runs", opened(objects, count), lambda: T0 + 500)


@contextlib.contextmanager
def served(folder):
    server = RunsServer(folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(10.0)


@pytest.fixture(scope="module")
def server(objects):
    folder = RunsFolder("memory://runs", opened(objects, [0]), lambda: T0 + 500)
    folder.asked()
    folder.look()
    for _ in range(4):
        folder.digest()
    with served(folder) as server:
        yield server


def ask(server, path, method="GET", **headers):
    there = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    there.request(method, path, headers={k.replace("_", "-"): v for k, v in headers.items()})
    answer = there.getresponse()
    body = answer.read()
    there.close()
    return answer, body


# ---- what it shows -------------------------------------------------------------------------------
def test_the_table_has_every_run_and_nothing_else(server):
    answer, body = ask(server, "/api/runs")
    assert answer.status == 200
    rows = {r["id"]: r for r in json.loads(body)["runs"]}
    assert set(rows) == {"a", "b", "live", EVIL}
    done = rows["a"]
    assert (done["state"], done["step"], done["total"], done["over"]) == ("done", TOTAL, TOTAL, True)
    assert 0.6 < done["goodput"] < 0.8 and done["spent_usd"] == pytest.approx(0.132, abs=0.01)
    assert done["usd_per_million_tokens"] == pytest.approx(done["spent_usd"] / 0.98304, rel=0.01)
    live = rows["live"]
    assert live["state"] == "waiting for capacity"
    assert live["decision"] == {"t": T0 + 400, "what": "wait", "reason": f"every offer is full {EVIL}"}


def test_until_its_first_look_is_over_it_says_that_it_looks(folder):
    with served(folder) as server:
        for looked in (False, True):
            body = json.loads(ask(server, "/api/runs")[1])
            assert (body["found"], bool(body["runs"])) == (looked, looked)
            folder.look()
            folder.digest()
        assert b"!body.found ? 'looking for runs here'" in ask(server, "/static/serve.js")[1]


def test_curves_come_with_every_axis(server):
    answer, body = ask(server, "/api/curves?run=a&run=nobody&metric=loss")
    assert answer.status == 200
    (curve,) = json.loads(body)["curves"]
    assert curve["step"] == list(range(1, TOTAL + 1))
    assert curve["tokens"][-1] == TOTAL * 64 * 128
    assert {len(curve[k]) for k in ("step", "tokens", "hours", "dollars", "y")} == {TOTAL}
    for axis in ("hours", "dollars"):
        assert curve[axis] == sorted(curve[axis])
    assert curve["dollars"][-1] == pytest.approx(0.13, abs=0.01)
    _, body = ask(server, "/api/curves?run=a&metric=validation")
    assert json.loads(body)["curves"][0]["step"] == [20, 40, 60, 80, 100, 120]


def test_a_report_is_made_when_somebody_reads_it(server):
    folder, path = server.folder, "/run/a"
    assert all(not run.digest.report for run in folder.runs.values())
    answer, page = ask(server, path)
    assert answer.status == 200 and b'data-run="a"' in page
    assert ask(server, f"{path}/content")[0].status == 202
    folder.digest()
    answer, body = ask(server, f"{path}/content")
    assert answer.status == 200 and b"Where billed time went" in body
    assert [n for n, run in folder.runs.items() if run.digest.report] == ["a"]


def test_what_has_not_changed_is_not_sent_again(server):
    for path in ("/api/runs", "/api/curves?run=a&metric=loss", "/static/page.css"):
        answer, body = ask(server, path)
        again, nothing = ask(server, path, If_None_Match=answer.headers["ETag"])
        assert (again.status, nothing) == (304, b"") and body


# ---- who may ask what ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("host", "ours"),
    [
        ("127.0.0.1:8321", True), ("localhost:8321", True), ("[::1]:8321", True), ("10.0.0.4", True), ("LOCALHOST", True),
        ("evil.example:8321", False), ("127.0.0.1.evil.example", False), ("", False), ("localhost.evil.example:1", False), ("[::1", True),
    ],
)  # fmt: skip
def test_only_names_of_this_machine_are_answered(host, ours):
    assert is_our_name(host, frozenset({"localhost", "127.0.0.1"})) is ours


def test_a_rebound_name_and_other_sites_get_nothing(server):
    answer, body = ask(server, "/api/runs", Host="evil.example:80")
    assert answer.status == 421 and b"runs" not in body
    answer, body = ask(server, "/api/runs", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="cors")
    assert answer.status == 403 and b"runs" not in body
    assert ask(server, "/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")[0].status == 200


def test_other_addresses_than_loopback_must_be_asked_for():
    assert checked_host("127.0.0.1", False) and checked_host("::1", False)
    for host in ("0.0.0.0", "10.0.0.4", "example.org"):
        with pytest.raises(BadInput, match="give --anyone"):
            checked_host(host, False)
        assert checked_host(host, True) == host


def test_a_port_that_is_taken_is_told(server):
    with pytest.raises(BadInput, match="give another --port"):
        RunsServer(server.folder, port=server.server_port)


def test_every_answer_is_guarded_and_nothing_is_markup(server):
    for path in ("/", "/run/a", "/api/runs", "/static/serve.js", "/nothing"):
        answer, body = ask(server, path)
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
        if "html" in (answer.headers["Content-Type"] or ""):
            assert b"<img" not in body
    answer, body = ask(server, f"/run/{quote(EVIL)}")
    assert answer.status == 200 and b"<img" not in body and b"&lt;img" in body


@pytest.mark.parametrize(
    "path",
    [
        "/run/nobody", "/run/../a", "/run/..%2F..%2Fetc", "/static/../page.py", "/static/page.py", "/static/%2e%2e/page.py",
        "/run/a/facts", "/api/curves?metric=__class__", "//etc/passwd", "/run/",
    ],
)  # fmt: skip
def test_there_are_no_other_paths(server, path):
    assert ask(server, path)[0].status == 404


def test_it_only_reads(server):
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert ask(server, "/api/runs", method)[0].status == 501
    answer, body = ask(server, "/", "HEAD")
    assert (answer.status, body) == (200, b"")


# ---- bounds --------------------------------------------------------------------------------------
def test_runs_that_are_over_cost_nothing(folder, count):
    folder.look()
    for _ in range(5):
        folder.digest()
    count[0] = 0
    folder.digest()
    assert count[0] == 0
    folder.runs["live"].due_s = 0.0
    folder.look()
    assert 0 < count[0] <= 10  # of the one that goes on
    assert all(run._view is None for name, run in folder.runs.items() if name != "live")


def test_nobody_there_no_requests(folder, count):
    folder.start()
    folder.close()
    assert count[0] == 0


def test_a_bucket_that_is_silent_is_told_and_the_others_are_shown(objects, count):
    open_run = opened(objects, count)

    def silent(url):
        if url.endswith("/b"):
            raise StoreUnavailable("no answer")
        return open_run(url)

    folder = RunsFolder("memory://runs", open_run, lambda: T0 + 500)
    folder.look()
    for run in folder.runs.values():
        run.open, run.due_s, run._view = silent, 0.0, None
    folder.look()
    assert {r["id"] for r in folder.rows() if r["problem"]} == {"b"}


def test_a_run_that_goes_on_again_is_followed_again():
    run, now = whole_run(MemoryStore("memory://runs/one", {})).store, [T0 + 500]
    top = MemoryStore("memory://runs", {"one/run.json": b"{}"})
    folder = RunsFolder(top.url, lambda url: top if url == top.url else run, lambda: now[0])
    folder.look()
    assert folder.runs["one"].over
    journal = Journal(run, "controller-2", lambda: now[0])
    journal.record(f.RunAsked("t.yaml", 1, 1, "cheapest"))
    journal.flush()
    folder.look()
    assert folder.runs["one"].over  # not looked at so soon
    now[0] += 1000
    folder.look()
    assert not folder.runs["one"].over and folder.rows()[0]["state"] == "waiting for capacity"


def test_one_run_can_be_served_alone(objects, count):
    folder = RunsFolder("memory://runs/a", opened(objects, count), lambda: T0 + 500)
    folder.look()
    assert [r["id"] for r in folder.rows()] == ["a"]


def test_very_many_folders_are_bounded(count):
    objects = {f"r{i:04d}/run.json": b"{}" for i in range(MOST_RUNS + 10)}
    folder = RunsFolder("memory://runs", opened(objects, count), lambda: T0)
    folder._find(T0)
    assert (len(folder.runs), folder.left_out) == (MOST_RUNS, 10)
    assert "r0009" not in folder.runs


def test_the_tail_of_a_live_run_continues_its_curve(objects, count):
    run = FollowedRun("a", "memory://runs/a", opened(objects, count), lambda: T0 + 500)
    run.look()
    run.make_digest()
    run.tail.extend(f.StepDone(TOTAL + i, 5, 1.0, T0 + i, 2.0, 64, 8192) for i in (1, 2))
    curve = run.curve("loss")
    assert curve["step"][-3:] == [TOTAL, TOTAL + 1, TOTAL + 2] and curve["y"][-1] == 1.0
    assert curve["hours"] == sorted(curve["hours"])


# ---- logs ----------------------------------------------------------------------------------------
def test_logs_are_read_beside_requests_within_bounds_and_only_while_somebody_looks(objects):
    now, asked = [T0], []
    secret = "AKIA" + "ABCDEFGHIJKLMNOP"
    long = "\n".join(f"line {i} " + "x" * 2 * run_logs.MOST_LETTERS for i in range(500))
    many = dict.fromkeys(range(1, 31), "") | {30: f"\x1b[31mred\x1b[0m {EVIL}\a\nkey {secret}", 29: long}

    def read(url):
        asked.append(url)
        return many, ""

    folder = RunsFolder("memory://runs", opened(objects, [0]), lambda: now[0], read)
    folder.look()
    folder.logs.look()
    assert asked == []  # nobody has opened them
    with served(folder) as server:
        answer, body = ask(server, "/run/a/logs")
        assert answer.status == 202 and json.loads(body) == {"reading": True} and asked == []
        folder.logs.look()
        answer, body = ask(server, "/run/a/logs")
        assert ask(server, "/run/nobody/logs")[0].status == 404
    found = json.loads(body)
    assert answer.status == 200 and answer.getheader("Content-Type") == "application/json"
    assert [one["attempt"] for one in found["nodes"]] == list(range(30, 10, -1))
    assert (found["left_out"], found["problem"]) == (10, "")
    first, second = (one["lines"] for one in found["nodes"][:2])
    assert first[0].rstrip() == f"red {EVIL}" and secret not in body.decode()
    assert len(second) == run_logs.MOST_LINES and second[-1].startswith("line 499 ")
    assert {len(line) for line in second} == {run_logs.MOST_LETTERS}
    folder.logs.look()
    assert asked == ["memory://runs/a"]  # not again at once
    now[0] += run_logs.WANTED_S - 1
    folder.logs.look()
    assert len(asked) == 2
    now[0] += run_logs.WANTED_S + 1
    folder.logs.look()
    assert len(asked) == 2 and folder.logs.of("memory://runs/a") is None  # forgotten


def test_a_log_that_cannot_be_read_is_a_message_and_others_are_shown():
    def read(url):
        if url == "bad":
            raise OSError("the disk is gone")
        return {1: "said"}, "one node does not answer"

    logs = run_logs.RunLogs(read, lambda: 0.0)
    assert logs.of("bad") is logs.of("good") is None
    logs.look()
    assert logs.of("bad") == {"problem": "OSError: the disk is gone", "left_out": 0, "nodes": []}
    assert logs.of("good")["nodes"] == [{"attempt": 1, "lines": ["said"]}]
    assert logs.of("good")["problem"] == "one node does not answer"
