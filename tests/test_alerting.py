"""Alerts reach real receivers: each exactly once, whoever evaluates, dies or comes twice."""

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

import psutil
import pytest
from alert_situations import MINUTE, SITUATIONS, T0, Made
from test_prometheus import parsed, scrape
from worlds import until

from harness.bucket.alerts import Alert, AlertLog
from harness.bucket.journal import Journal
from harness.bucket.lease import Lease
from harness.cli.alerts import alerts_for_nodes
from harness.cli.command import main
from harness.core.masking import masked_words
from harness.core.world import BadInput
from harness.node.surroundings import variables
from harness.proof.receiver import AlertReceiver
from harness.views import alerting, sinks
from harness.views.alerting import CLAIM_S, STALE_S, Alerting, AlertTeller
from harness.views.alerts import AlertWatch
from harness.views.sinks import Webhook, sink_of, sinks_of
from storage.errors import StoreUnavailable
from storage.files import FileStore, MemoryStore


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
def test_each_alert_reaches_a_webhook_exactly_once(rule, hook):
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


def teller(store, hook, clock: Time, **more) -> AlertTeller:
    return AlertTeller(
        store, sink_of(hook.url), clock.now, clock.now, pause_s=0.01, token=more.pop("token", "a")
    )


def test_a_dead_teller_is_replaced_and_the_receiver_can_tell_a_repetition(hook):
    """Between the message and the receipt nobody can know: the same key comes again."""
    store, clock = MemoryStore("memory://run", {}), Time()
    log = logged(store)

    class Dies(MemoryStore):
        def create(self, key: str, data: bytes | memoryview) -> bool:
            if key.endswith(".json"):
                raise StoreUnavailable("dead")
            return store.create(key, data)

        list, get, size = store.list, store.get, store.size

    with pytest.raises(StoreUnavailable):
        teller(Dies("memory://run", {}), hook, clock).round(log.alerts)
    other = teller(store, hook, clock, token="b")
    other.round(log.alerts)
    assert len(hook.got) == 1  # it may yet live
    clock.t += CLAIM_S + 1
    other.round(log.alerts)
    assert [b["key"] for b in hook.got] == [hook.got[0]["key"]] * 2
    assert [h["Idempotency-Key"] for h in hook.asked] == [hook.got[0]["key"]] * 2
    other.round(log.alerts)
    assert len(hook.got) == 2


def test_who_died_before_the_message_is_replaced_once(hook):
    store, clock = MemoryStore("memory://run", {}), Time()
    log = logged(store)
    sink = sink_of(hook.url)
    assert store.create(f"alerts/told/{sink.name}/000000-00.claim", b"{}")
    others = [teller(store, hook, clock, token=t) for t in "abc"]
    for _ in range(5):
        for each in others:
            each.round(log.alerts)
        clock.t += CLAIM_S / 2 + 1
    assert len(hook.got) == 1


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
    hook.answers = [500, 503, 429, 500]
    one = teller(store, hook, clock)
    one.round(log.alerts)  # three tries
    assert (len(hook.asked), hook.got) == (3, [])
    one.round(log.alerts)  # not yet
    assert len(hook.asked) == 3
    clock.t += 60
    one.round(log.alerts)  # once more 500, then taken
    assert (len(hook.asked), len(hook.got)) == (5, 1)
    other = Alert.of("crash-loop", "critical", "loop", "", T0 + 10)
    log.fire(other, 60.0)
    hook.answers = [404]
    one.round(log.alerts)
    clock.t += 600
    one.round(log.alerts)
    assert len(hook.asked) == 6
    receipt = json.loads(store.get(f"alerts/told/{one.sink.name}/000001.json"))
    assert (receipt["outcome"], receipt["why"]) == ("given up", "it answered 404 Not Found")
    said = caplog.text + b"".join(store.get(k) for k in store.list("")).decode()
    assert "S3CRET" not in said and "T0KEN" not in said


def test_old_news_is_not_told(hook):
    store, clock = MemoryStore("memory://run", {}), Time(T0 + STALE_S + 1)
    teller(store, hook, clock).round(logged(store).alerts)
    assert hook.asked == []


def test_slack_commands_and_redirects(hook, tmp_path):
    slack = sink_of(f"slack:{hook.url}")
    slack.tell(Alert.of("x", "critical", "a <b> & c", "text", T0), "memory://run", "k")
    (body,) = hook.got
    assert body["text"] == "critical: a &lt;b&gt; &amp; c"
    assert body["attachments"][0]["color"] == "#dc2626"
    hook.answers = [302]
    with pytest.raises(sinks.Untold, match="302"):
        sink_of(hook.url).tell(ALERT, "memory://run", "k")
    assert len(hook.asked) == 2  # nobody went elsewhere
    out = tmp_path / "got.json"
    code = f"import sys; open({str(out)!r}, 'w').write(sys.stdin.read())"
    command = sink_of(f"command:{sys.executable} -c {json.dumps(code)}")
    command.tell(ALERT, "memory://run", "k")
    assert json.loads(out.read_text())["rule"] == "guard-tripped"
    with pytest.raises(sinks.Untold, match="status 3"):
        sink_of(f"command:{sys.executable} -c 'raise SystemExit(3)'").tell(ALERT, "r", "k")
    with pytest.raises(sinks.Untold, match="not reached"):
        Webhook("http://127.0.0.1:9/S3CRET", timeout_s=1.0).tell(ALERT, "r", "k")
    assert "S3CRET" not in repr(sinks_of(["https://hooks.slack.com/S3CRET", "command:x S3CRET"]))


@pytest.mark.parametrize("text", ["", "S3CRET", "ftp://S3CRET", "command:", "https://", "slack:S3CRET"])
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
    from harness.views.alert_own import all_rules

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
    from harness.views.alert_own import all_rules

    page = (Path(__file__).parent.parent / "docs" / "RUNBOOK.md").read_text()
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
    from harness.views.alert_own import all_rules

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
    words = [sys.executable, "-m", "harness.views.alerting", url]
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
        main(["alerts", url, "--json"])
    (told,) = json.loads(capsys.readouterr().out)
    assert e.value.code == 0 and told["rule"] == "guard-tripped"
    assert sorted(r["outcome"] for r in told["told"].values()) == ["sent", "sent"]
    with pytest.raises(SystemExit) as e:
        main(["alerts", url, "--test", "--alert", hook.url])
    assert e.value.code == 0 and hook.rules() == Counter({"guard-tripped": 1, "test": 1})
    with pytest.raises(SystemExit):
        main(["alerts", url])
    assert "guard: non-finite" in capsys.readouterr().out
    assert alerting.test_alert(now).severity == "info"


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
    words += ["--trackers", "jsonl", "--notices", "none", "--gpu-health", "off", "--nproc", "1"]
    with log.open("wb") as out:
        script = ["--", str(tmp_path / "script.py"), str(tmp_path / "over")]
        agent = subprocess.Popen([*words, *script], env=env, stdout=out, stderr=out)

    def children(name: str) -> list[psutil.Process]:
        found = psutil.Process(agent.pid).children()
        return [p for p in found if name in " ".join(p.cmdline())]

    try:
        until(lambda: children("views.trackers") and children("views.alerting"), log.read_text, 120)
        at = re.search(r"Prometheus at (http://127.0.0.1:\d+/metrics)", log.read_text())
        numbers = parsed(scrape(at[1]))
        state = [k for k, v in numbers.items() if k.startswith("harness_agent_state") and v]
        assert len(state) == 1 and 'attempt="7"' in state[0] and 'state="in"' in state[0]
        (publisher,) = children("views.trackers")
        publisher.kill()
        until(lambda: hook.got, log.read_text, 120)
        assert [(b["rule"], b["subject"]) for b in hook.got] == [("publisher-dead", "trackers")]
        assert "SIGKILL" in hook.got[0]["text"]
        until(lambda: children("views.trackers"), log.read_text, 120)  # started again
        (tmp_path / "over").touch()
        assert agent.wait(120) == 0, log.read_text()
    finally:
        agent.kill()
    assert hook.rules() == Counter({"publisher-dead": 1})
    assert b"S3CRET" not in b"".join(p.read_bytes() for p in run.rglob("*") if p.is_file())
