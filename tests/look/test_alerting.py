"""Alerts reach real receivers: each at least once, and twice only if a sender died."""

import contextlib
import http.server
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from harness.bucket.controller_lease import Lease
from harness.bucket.journal import Journal
from harness.cli.alerts_command import alerts_for_nodes
from harness.cli.command import main
from harness.core.masking import masked_words
from harness.core.world import BadInput
from harness.lab.drills.drill import AlertReceiver
from harness.look.alerts import alert_evaluator, alert_sinks
from harness.look.alerts.alert_evaluator import (
    STALE_S,
    TAKE_OVER_S,
    Alerting,
    AlertSender,
    AlertWatch,
)
from harness.look.alerts.alert_log import SENDING, Alert, AlertLog, AlertReceipt
from harness.look.alerts.alert_sinks import AlertCommand, Webhook, sink_of, sinks_of, tell_in_time
from harness.node.provenance import variables
from storage.errors import StoreUnavailable
from storage.stores.folder_store import FileStore, MemoryStore
from support.alert_situations import MINUTE, SITUATIONS, T0, Made
from support.exposition import parsed, scrape
from support.worlds import until


@pytest.fixture
def hook():
    with AlertReceiver() as made:
        yield made


@dataclass
class Time:
    t: float = T0

    def now(self) -> float:
        return self.t

    def sleep(self, seconds: float) -> None:
        self.t += seconds


class Silent(MemoryStore):
    silent = False

    def list(self, prefix: str) -> list[str]:
        if self.silent:
            raise StoreUnavailable("it does not answer")
        return super().list(prefix)


def play(made: Made, store: Silent, hook, story: str) -> None:
    """Write the facts as they happen; the controller's evaluator and rank 0's look every minute."""
    clock = Time()
    journal = Journal(store, "controller-1", clock.now)
    lease = Lease(store, clock, "laptop:1:aa")
    lease.acquire()
    both = [
        Alerting(store, [sink_of(hook.url)], leads=leads, now=clock.now, monotonic=clock.now)
        for leads in (True, False)
    ]

    def look() -> None:
        journal.flush()
        if story != "controller-gone":
            lease.renew()
        for each in both:
            each.round()

    due_s = T0
    for stamped in made.facts:
        clock.t = stamped.t
        if clock.t >= due_s:
            look()
            due_s = clock.t + MINUTE
        journal.record(stamped.fact)
    look()
    if story == "store-trouble":
        clock.t, store.silent = clock.t + 30, True
        for each in both:
            with pytest.raises(StoreUnavailable):
                each.round()
        clock.t, store.silent = clock.t + 65, False
    for _ in range(4):
        clock.t += 30
        look()


@pytest.mark.parametrize("rule", SITUATIONS)
def test_each_alert_reaches_a_webhook_once(rule, hook):
    store = Silent("memory://run", {})
    made = SITUATIONS[rule]()
    play(made, store, hook, rule)
    assert hook.rules()[rule] == 1, hook.got
    assert len({body["key"] for body in hook.got}) == len(hook.got)
    (body,) = (b for b in hook.got if b["rule"] == rule)
    assert body["run"] == "memory://run" and body["help"] == f"docs/RUNBOOK.md#{rule}"
    # a third evaluator, later: it is told already
    late = Alerting(store, [sink_of(hook.url)], now=lambda: made.t + 300, monotonic=time.monotonic)
    late.round()
    assert hook.rules()[rule] == 1
    told = b"".join(store.get(key) for key in store.list("alerts/"))
    assert b"S3CRET" not in told and b"T0KEN" not in told and b"127.0.0.1" not in told


ALERT = Alert.of("guard-tripped", "critical", "guard: non-finite", "step 9: nan", T0)


def logged(store: MemoryStore, alert: Alert = ALERT) -> AlertLog:
    log = AlertLog(store)
    log.fire(alert, 60.0)
    return log


def sender(store, hook, clock: Time) -> AlertSender:
    return AlertSender(store, sink_of(hook.url), clock.now, clock.now)


def test_a_sender_that_died_is_replaced_and_the_receiver_can_tell_a_repetition(hook):
    """Between the message and the receipt nobody can know: the same key comes again."""
    store, clock = MemoryStore("memory://run", {}), Time()
    log = logged(store)

    class Dies(MemoryStore):
        def put(self, key: str, data: bytes | memoryview) -> None:
            raise StoreUnavailable("dead")

        create, list, get, size = store.create, store.list, store.get, store.size

    first = sender(Dies("memory://run", {}), hook, clock)
    for _ in range(2):  # no answer of the bucket makes it send the message again
        with pytest.raises(StoreUnavailable):
            first.round(log.alerts)
    other = sender(store, hook, clock)
    other.round(log.alerts)
    assert len(hook.got) == 1  # it may yet live
    clock.t += TAKE_OVER_S + 1
    other.round(log.alerts)
    assert [b["key"] for b in hook.got] == [hook.got[0]["key"]] * 2
    assert [h["Idempotency-Key"] for h in hook.asked] == [hook.got[0]["key"]] * 2
    for each in (other, sender(store, hook, clock)):
        each.round(log.alerts)
    assert len(hook.got) == 2


def test_one_that_tries_is_left_at_it(hook):
    """Each try changes its receipt, so nobody takes over."""
    store, clock = MemoryStore("memory://run", {}), Time()
    log = logged(store)
    hook.answers = [500] * 8
    one, other = (sender(store, hook, clock) for _ in range(2))
    for _ in range(8):
        one.round(log.alerts)
        other.round(log.alerts)
        clock.t += 100
    assert (len(hook.asked), hook.got) == (8, [])
    one.round(log.alerts)
    assert len(hook.got) == 1


def test_who_died_before_the_message_is_replaced(hook):
    store, clock = MemoryStore("memory://run", {}), Time()
    log = logged(store)
    sink = sink_of(hook.url)
    store.put(f"alerts/told/{sink.name}/000000.json", AlertReceipt(SENDING, T0).encode())
    one = sender(store, hook, clock)
    for _ in range(4):
        one.round(log.alerts)
        clock.t += TAKE_OVER_S / 2 + 1
    assert len(hook.got) == 1


def test_a_webhook_that_drips_its_answer_has_taken_the_alert():
    """Its status is enough: it is not told again, and nobody waits for the rest."""
    over = threading.Event()

    class Drips(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            with contextlib.suppress(OSError):
                while not over.wait(0.1):
                    self.wfile.write(b"x")

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Drips)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        hook = Webhook(f"http://127.0.0.1:{server.server_port}/x")
        tell_in_time(hook, ALERT, "r", "k", within_s=5.0)
    finally:
        over.set()
        server.shutdown()
        server.server_close()


def test_a_slow_receiver_holds_up_neither_the_others_nor_the_evaluator(hook, tmp_path):
    """It answers a byte at a time, which no timeout of a socket ends."""
    with pytest.raises(alert_sinks.Untold, match="did not answer within 0 s"):
        tell_in_time(AlertCommand(("sleep", "5")), ALERT, "r", "k", within_s=0.2)
    store = MemoryStore("memory://run", {})
    facts = SITUATIONS["worker-failed"]().facts
    clock = Time()
    journal = Journal(store, "controller-1", clock.now)
    for stamped in facts:
        clock.t = stamped.t
        journal.record(stamped.fact)
    journal.flush()
    sinks = [sink_of("command:sleep 8"), sink_of(hook.url)]
    alerting = Alerting(store, sinks, leads=True, now=clock.now)
    thread = threading.Thread(target=alerting.run, args=(0.05,), daemon=True)
    began_s = time.monotonic()
    thread.start()
    until(lambda: hook.got, "the other receiver is told", 5)
    assert time.monotonic() - began_s < 5
    alerting.stop.set()
    thread.join(30)
    assert not thread.is_alive() and hook.rules() == Counter({"worker-failed": 1})


def test_many_at_once_tell_it_once(hook):
    store = MemoryStore("memory://run", {})
    facts = SITUATIONS["worker-failed"]().facts
    clock = Time()
    journal = Journal(store, "controller-1", clock.now)
    for stamped in facts:
        clock.t = stamped.t
        journal.record(stamped.fact)
    journal.flush()
    many = [
        Alerting(store, [sink_of(hook.url)], leads=True, now=clock.now) for _ in range(8)
    ]
    threads = [threading.Thread(target=each.round) for each in many]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert hook.rules() == Counter({"worker-failed": 1})
    assert len(store.list("alerts/fired/")) == 1


def test_a_receiver_that_fails_is_tried_again_and_one_that_refuses_is_given_up(hook, caplog):
    caplog.set_level(logging.DEBUG)
    store, clock = MemoryStore("memory://run", {}), Time()
    log = logged(store)
    hook.answers = [500, 503, 429]
    one = sender(store, hook, clock)
    key = f"alerts/told/{one.sink.name}/000000.json"
    for pause_s in (1, 2, 4):  # twice as long each time
        one.round(log.alerts)
        one.round(log.alerts)  # not yet
        assert json.loads(store.get(key))["outcome"] == "being sent" and not hook.got
        clock.t += pause_s
    one.round(log.alerts)
    assert (len(hook.asked), len(hook.got)) == (4, 1)
    assert json.loads(store.get(key))["outcome"] == "sent"
    other = Alert.of("crash-loop", "critical", "loop", "", T0 + 10)
    log.fire(other, 60.0)
    hook.answers = [404]
    one.round(log.alerts)
    clock.t += 600
    one.round(log.alerts)
    assert len(hook.asked) == 5
    receipt = json.loads(store.get(f"alerts/told/{one.sink.name}/000001.json"))
    assert (receipt["outcome"], receipt["why"]) == ("given up", "it answered 404 Not Found")
    said = caplog.text + b"".join(store.get(k) for k in store.list("")).decode()
    assert "S3CRET" not in said and "T0KEN" not in said


def test_old_news_is_not_told(hook):
    store, clock = MemoryStore("memory://run", {}), Time(T0 + STALE_S + 1)
    sender(store, hook, clock).round(logged(store).alerts)
    assert hook.asked == []


def test_what_apprise_knows_gets_the_key(monkeypatch):
    """Slack as the last line of its text; PagerDuty as its dedup_key."""
    pytest.importorskip("apprise")
    said: list[tuple[str, str]] = []

    def post(url: str, data: str = "", **more: object) -> SimpleNamespace:
        assert more["allow_redirects"] is False
        said.append((url, data))
        return SimpleNamespace(status_code=200 if len(said) < 3 else 500, content=b"ok", text="ok")

    monkeypatch.setattr("requests.post", post)
    monkeypatch.setattr("requests.request", lambda how, url, **more: post(url, **more))
    slack = sink_of("https://hooks.slack.com/services/T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ")
    pager = sink_of(f"pagerduty://{'x' * 32}@{'y' * 20}")
    for sink in (slack, pager):
        sink.tell(ALERT, "memory://run", "k9")
    assert "hooks.slack.com" in said[0][0] and "key k9" in said[0][1] and "step 9: nan" in said[0][1]
    assert json.loads(said[1][1])["dedup_key"] == "k9"
    with pytest.raises(alert_sinks.Untold):
        slack.tell(ALERT, "memory://run", "k9")
    assert "TIia" not in repr(slack) + slack.about + slack.name and slack.name[:6] == "slack-"
    with pytest.raises(BadInput, match="wanted https"):
        sink_of("nobody://S3CRET")


def test_what_needs_apprise_says_so(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"spotharness\[alerts\]"):
        sink_of("slack://a/b/c")


def test_commands_and_redirects(hook, tmp_path):
    hook.answers = [302]
    with pytest.raises(alert_sinks.Untold, match="302"):
        sink_of(hook.url).tell(ALERT, "memory://run", "k")
    assert len(hook.asked) == 1  # nobody went elsewhere
    out = tmp_path / "got.json"
    code = f"import sys; open({str(out)!r}, 'w').write(sys.stdin.read())"
    command = sink_of(f"command:{sys.executable} -c {json.dumps(code)}")
    command.tell(ALERT, "memory://run", "k")
    assert json.loads(out.read_text())["rule"] == "guard-tripped"
    with pytest.raises(alert_sinks.Untold, match="status 3"):
        sink_of(f"command:{sys.executable} -c 'raise SystemExit(3)'").tell(ALERT, "r", "k")
    with pytest.raises(alert_sinks.Untold, match="not reached"):
        Webhook("http://127.0.0.1:9/S3CRET", timeout_s=1.0).tell(ALERT, "r", "k")
    assert "S3CRET" not in repr(sinks_of(["https://hooks.example/S3CRET", "command:x S3CRET"]))


@pytest.mark.parametrize("text", ["", "S3CRET", "command:", "https://", "slack:S3CRET"])
def test_what_is_no_receiver_is_refused_without_its_secret(text):
    with pytest.raises(BadInput, match="wanted https") as e:
        sink_of(text)
    assert "S3CRET" not in str(e.value)


def test_commands_stay_on_the_machine_that_leads(monkeypatch):
    monkeypatch.setenv("HARNESS_ALERTS", "'command:notify-send run' https://b/S3CRET")
    told = alerts_for_nodes(["https://a/S3CRET", "command:touch x"])
    assert told == {"HARNESS_ALERTS": "https://a/S3CRET https://b/S3CRET"}
    assert alerts_for_nodes([])["HARNESS_ALERTS"] == "https://b/S3CRET"


def test_a_launch_s_record_holds_no_receiver():
    words = ["--alert", "https://hooks.slack.com/S3CRET", "--alert=command:x S3CRET", "--brief"]
    told, hidden = masked_words(words)
    assert told == ["--alert", "***", "--alert=***", "--brief"] and set(hidden) == {"--alert"}
    assert variables({"HARNESS_ALERTS": "https://x/S3CRET", "NCCL_DEBUG": "1"}) == {"NCCL_DEBUG": "1"}


RULES = """
rules:
  - {name: fails, fact: SnapshotFailed, count: 3, within_s: 600, severity: critical, title: $step,
     text: "$why in epoch $epoch", where: {why: "*Denied*"}}
  - {name: high, fact: StepDone, above: {loss: 5.0}, cool_down_s: 3600}
  - {name: quiet, absent: Validated, for_s: 60}
  - {rule: snapshot-failed, enabled: false}
  - {rule: loss-spike, severity: info}
"""


def test_rules_of_users(tmp_path):
    from harness.look.alerts.custom_rules import all_rules

    path = tmp_path / "rules.yaml"
    path.write_text(RULES)
    rules = all_rules(f"{path}, test_alerting:own?above=3")
    made = SITUATIONS["snapshot-failed"]()
    found = AlertWatch(rules).see(made.facts)
    assert [(a.rule, a.title, a.text, a.help) for a in found] == [
        ("fails", "10", "AccessDenied in epoch 1", "")
    ]
    spikes = AlertWatch(rules).see(SITUATIONS["loss-spike"]().facts)
    assert {(a.rule, a.severity) for a in spikes} == {
        ("high", "warning"), ("quiet", "warning"), ("loss-spike", "info"), ("own", "warning"),
    }  # fmt: skip


def own(stamped, run, above=9.0):
    loss = getattr(stamped.fact, "loss", 0.0)
    return f"{loss} at {run.live.step}" if isinstance(loss, float) and loss > above else None


def test_the_runbook_s_rules_are_rules(tmp_path):
    from harness.look.alerts.custom_rules import all_rules

    page = (Path(__file__).parents[2] / "docs" / "ALERTS.md").read_text()
    path = tmp_path / "rules.yaml"
    path.write_text(page.partition("```yaml\n")[2].partition("```")[0])
    names = [rule.name for rule in all_rules(str(path))]
    assert names[-3:] == ["snapshots-fail", "high-loss", "no-validation"]
    assert "notice-seen" not in names


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("{name: x, fact: Nothing}", "wanted one of `fact:`"),
        ("{name: X, fact: StepDone}", "wanted a name"),
        ("{name: x, fact: StepDone, above: {loss: a}}", "wanted a number"),
        ("{name: x, fact: StepDone, where: {los: 1}}", "wanted fields of StepDone"),
        ("{name: x, fact: StepDone, count: 3}", "wanted `within_s:`"),
        ("{name: x, absent: StepDone}", "wanted `for_s:`"),
        ("{name: x, fact: StepDone, colour: red}", "is not known"),
        ("{rule: nothing, enabled: false}", "there is no rule"),
        ("{name: crash-loop, fact: StepDone}", "already"),
        ("{name: x, fact: StepDone, severity: bad}", "severity"),
        ("5", "wanted a rule"),
    ],
)
def test_wrong_rules_are_refused_in_words(tmp_path, rule, message):
    from harness.look.alerts.custom_rules import all_rules

    path = tmp_path / "rules.yaml"
    path.write_text(f"rules:\n  - {rule}\n")
    with pytest.raises(BadInput, match=message):
        all_rules(str(path))


# ---- real processes ------------------------------------------------------------------------------
def test_two_processes_beside_rank_0_and_the_command(hook, tmp_path, capsys):
    url = (tmp_path / "run").as_uri()
    store = FileStore(url)
    now = time.time()
    journal = Journal(store, "controller-1", lambda: now)
    for stamped in SITUATIONS["guard-tripped"]().facts:
        journal.record(stamped.fact)
    journal.flush()
    env = {**os.environ, "HARNESS_ALERTS": f"{hook.url} 'command:touch {tmp_path / 'touched'}'"}
    words = [sys.executable, "-m", "harness.look.alerts.alert_evaluator", url]
    log = Path(tmp_path / "log")
    with log.open("wb") as out:
        both = [subprocess.Popen(words, env=env, stdout=out, stderr=out) for _ in range(2)]
    deadline_s = time.monotonic() + 120
    while not (hook.got and (tmp_path / "touched").exists()) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    for process in both:
        process.send_signal(signal.SIGTERM)
    assert [process.wait(60) for process in both] == [0, 0]
    assert hook.rules() == Counter({"guard-tripped": 1})
    assert b"S3CRET" not in log.read_bytes()
    with pytest.raises(SystemExit) as e:
        main(["runs", "alerts", url, "--json"])
    (told,) = json.loads(capsys.readouterr().out)
    assert e.value.code == 0 and told["rule"] == "guard-tripped"
    assert sorted(r["outcome"] for r in told["told"].values()) == ["sent", "sent"]
    with pytest.raises(SystemExit) as e:
        main(["runs", "alerts", url, "--test", "--alert", hook.url])
    assert e.value.code == 0 and hook.rules() == Counter({"guard-tripped": 1, "test": 1})
    with pytest.raises(SystemExit):
        main(["runs", "alerts", url])
    assert "guard: non-finite" in capsys.readouterr().out
    assert alert_evaluator.test_alert(now).severity == "info"


SCRIPT = """
import pathlib, sys, time
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.05)
"""


def test_an_agent_s_publisher_dies_and_its_numbers_are_had(hook, tmp_path):
    """A whole node: its helper tells the alert, its agent starts the publisher again, and Prometheus
    scrapes it meanwhile."""
    (tmp_path / "script.py").write_text(SCRIPT)
    run, log = tmp_path / "run", tmp_path / "log"
    env = {
        **{k: v for k, v in os.environ.items() if not k.startswith("HARNESS_")},
        "HARNESS_ALERTS": hook.url, "HARNESS_NODE_DIR": str(tmp_path / "node"),
        "HARNESS_ATTEMPT": "7",
    }  # fmt: skip
    words = [sys.executable, "-m", "harness.cli", "run", "--run", str(run), "--prometheus", "0"]
    words += ["--trackers", "jsonl", "--notices", "none", "--set", "gpu_health=off", "--nproc", "1"]
    with log.open("wb") as out:
        script = ["--", str(tmp_path / "script.py"), str(tmp_path / "over")]
        agent = subprocess.Popen([*words, *script], env=env, stdout=out, stderr=out)

    def children(name: str) -> list[psutil.Process]:
        found = psutil.Process(agent.pid).children()
        return [p for p in found if name in " ".join(p.cmdline())]

    try:
        until(lambda: children("look.trackers.trackers") and children("look.alerts.alert_evaluator"), log.read_text, 120)
        at = re.search(r"Prometheus at (http://127.0.0.1:\d+/metrics)", log.read_text())
        numbers = parsed(scrape(at[1]))
        state = [k for k, v in numbers.items() if k.startswith("harness_agent_state") and v]
        assert len(state) == 1 and 'attempt="7"' in state[0] and 'state="in"' in state[0]
        (publisher,) = children("look.trackers.trackers")
        publisher.kill()
        until(lambda: hook.got, log.read_text, 120)
        assert [(b["rule"], b["subject"]) for b in hook.got] == [("publisher-dead", "trackers")]
        assert "SIGKILL" in hook.got[0]["text"]
        until(lambda: children("look.trackers.trackers"), log.read_text, 120)  # started again
        (tmp_path / "over").touch()
        assert agent.wait(120) == 0, log.read_text()
    finally:
        agent.kill()
    # its script has no session, which is said at its end
    assert hook.rules() == Counter({"publisher-dead": 1, "promise-weakened": 1})
    assert b"S3CRET" not in b"".join(p.read_bytes() for p in run.rglob("*") if p.is_file())
